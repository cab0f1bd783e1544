"""How a run ends: what the server sends to the launcher (the model behind a descriptor, a failure as plain data), and
what the launcher makes of it for the caller: a report, a model or an exception.
"""

import contextlib
import os
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from typing import IO

import msgspec
import numpy as np
import safetensors.torch
import torch

from paceline.core.errors import (
    InternalError,
    JournalError,
    PacelineError,
    PeerError,
    ScriptError,
    StorageError,
    UserError,
)
from paceline.engines.local.control import Blame, Failure, Finished
from paceline.records.journal import Observation, read
from paceline.records.metrics import Metrics, to_json
from paceline.records.report import Report
from paceline.server.exchange import Result
from paceline.server.plan import Cause, Plan

_ERRORS: dict[Blame, type[PacelineError]] = {
    "storage": StorageError, "user": UserError, "script": ScriptError, "peer": PeerError, "internal": InternalError,
}  # fmt: skip


def trained_state(left: Result) -> dict[str, torch.Tensor] | None:
    """Return the tables, or the model's state with a tensor of its own per key: safetensors cannot store tied ones."""
    if left.tables is not None:
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in left.tables.items()}
    if left.model is None:
        return None
    return {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in left.model.items()}


@contextlib.contextmanager
def behind_descriptor(data: bytes | None) -> Iterator[tuple[int, ...]]:
    """Put the bytes behind a descriptor that can be sent to another process; no name in any file system."""
    if data is None:
        yield ()
        return
    with tempfile.TemporaryFile() if not hasattr(os, "memfd_create") else _anonymous() as file:
        file.write(data)
        file.flush()
        yield (file.fileno(),)


def _anonymous() -> IO[bytes]:
    return os.fdopen(os.memfd_create("paceline-model"), "w+b")


def as_failure(error: Exception) -> Failure:
    """Convert an error into a message, with the script's traceback if a worker raised it, else the server's."""
    notes = "\n".join(getattr(error, "__notes__", ()))
    for blame, kind in _ERRORS.items():
        if isinstance(error, kind) and blame != "internal":
            return Failure(blame, str(error), notes)
    text = str(error) if isinstance(error, InternalError) else f"{type(error).__name__}: {error}"
    return Failure("internal", text, notes or traceback.format_exc())


def as_overdue(workers: Sequence[int]) -> Failure | None:
    """Return the failure of a run whose result is there, but whose scripts did not end; None if all of them did."""
    if not workers:
        return None
    which = f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"
    return Failure(
        "script",
        f"the script of {which} did not end after the run and was ended; model and report are complete "
        "(--worker-timeout says how long a script may go on)",
    )


def interrupted_without_server(plan: Plan, how: str) -> Finished:
    """Return the end of an interrupted run whose server died before it could report: what its journal tells."""
    metrics, covers = Metrics(), "nothing of it was recorded"
    if plan.journal is not None:
        covers = f"the report covers what {plan.journal} holds, and the model is that of the newest checkpoint, if any"
        try:
            for line in read(plan.journal):
                metrics.write(line)
        except JournalError as error:
            covers = f"the report covers the beginning of the run: {error}"
    if metrics.header is None:
        metrics.write(plan.header)
    text = f"{how} while the run was being interrupted: {covers}"
    metrics.write(Observation(metrics.seconds, "warning", {"text": text}))
    journal, folder = (None if path is None else os.fspath(path) for path in (plan.journal, plan.folder))
    return Finished("interrupted", to_json(metrics.report(journal, folder)).encode())


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. Owns the descriptor of the model's state: call `close`."""

    cause: Cause
    encoded_report: bytes
    failure: Failure | None
    model: int | None
    keys: list[str] = []  # of the model's state, in its own order
    tables: bool = False  # the state is that of tables, not of a model

    @property
    def report(self) -> Report | None:
        """The run's report; None if the server sent none."""
        if not self.encoded_report:
            return None
        return msgspec.json.decode(self.encoded_report, type=Report, strict=False)  # JSON carries NaN as "nan"

    def state(self) -> dict[str, torch.Tensor] | None:
        """Return the trained model under its `state_dict` keys, or the tables by name."""
        data = self.model_bytes()
        if data is None:
            return None
        state = safetensors.torch.load(data)
        return {key: state[key] for key in self.keys or state}

    def model_bytes(self) -> bytes | None:
        """Return what is behind the model's descriptor."""
        if self.model is None:
            return None
        with open(self.model, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

    def raise_failure(self) -> None:
        """Raise the failure, if any, as the error class of whoever is to blame; the remote traceback becomes a note."""
        if self.failure is None:
            return
        error = _ERRORS[self.failure.blame](self.failure.text)
        if isinstance(error, StorageError):
            error.report = self.report
        if self.failure.traceback:
            error.add_note(self.failure.traceback.rstrip())
        raise error

    def close(self) -> None:
        if self.model is not None:
            with contextlib.suppress(OSError):
                os.close(self.model)
