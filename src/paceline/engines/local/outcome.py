"""How a run of real processes ended, as its caller sees it: a report, a model, or an exception."""

import contextlib
import os

import msgspec
import torch
from safetensors.torch import load

from paceline.core.errors import InternalError, PacelineError, PeerError, ScriptError, UserError
from paceline.engines.local.control import Failure
from paceline.records.report import Report
from paceline.server.plan import Cause

_ERRORS: dict[str, type[PacelineError]] = {
    "user": UserError,
    "script": ScriptError,
    "peer": PeerError,
    "internal": InternalError,
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended. A descriptor of the model's state belongs to whoever has this, who must `close` it."""

    cause: Cause
    encoded_report: bytes
    failure: Failure | None
    model: int | None
    keys: list[str] = []  # of the model's state, in its own order
    tables: bool = False  # it is not a model's but that of tables

    @property
    def report(self) -> Report | None:
        """The run's report; there is none if it came to nothing."""
        if not self.encoded_report:
            return None
        return msgspec.json.decode(self.encoded_report, type=Report, strict=False)  # "nan" is how JSON has it

    def state(self) -> dict[str, torch.Tensor] | None:
        """The trained model under its ordinary `state_dict` keys, or the tables by their names."""
        if self.model is None:
            return None
        with open(self.model, "rb", closefd=False) as file:
            file.seek(0)
            state = load(file.read())
        return {key: state[key] for key in self.keys or state}

    def raise_failure(self) -> None:
        """Raise what went wrong, by whose fault it is; the other process's traceback goes with it as a note."""
        if self.failure is None:
            return
        error = _ERRORS[self.failure.blame](self.failure.text)
        if self.failure.traceback:
            error.add_note(self.failure.traceback.rstrip())
        raise error

    def close(self) -> None:
        if self.model is not None:
            with contextlib.suppress(OSError):
                os.close(self.model)
