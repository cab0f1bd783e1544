"""How a server takes its leave: the trained model behind a descriptor, and what went wrong in a form that travels."""

import contextlib
import os
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np
import safetensors.torch
import torch

from paceline.core.errors import InternalError, PacelineError, PeerError, ScriptError, UserError
from paceline.engines.local import control
from paceline.server.exchange import Result


def trained_state(left: Result) -> dict[str, torch.Tensor] | None:
    """The model's state, each key with a tensor of its own: tied ones are foreign to the file format. Or the tables."""
    if left.tables is not None:
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in left.tables.items()}
    if left.model is None:
        return None
    return {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in left.model.items()}


@contextlib.contextmanager
def behind_descriptor(data: bytes | None) -> Iterator[tuple[int, ...]]:
    """Bytes that another process can read without a name in any file system."""
    if data is None:
        yield ()
        return
    with tempfile.TemporaryFile() if not hasattr(os, "memfd_create") else _anonymous() as file:
        file.write(data)
        file.flush()
        yield (file.fileno(),)


def _anonymous() -> IO[bytes]:
    return os.fdopen(os.memfd_create("paceline-model"), "w+b")


def save_result(data: bytes, folder: Path, name: str) -> str | None:
    """Whole or not at all; that it cannot be written is a complaint, and no reason to lose the run."""
    unfinished, path = folder / f".{name}.safetensors", folder / f"{name}.safetensors"
    try:
        unfinished.write_bytes(data)
        unfinished.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        return f"cannot write {path}: {error.strerror}; the `Run` that launch() returns has it"
    return None


def save_nodes(models: Mapping[int, Mapping[str, torch.Tensor]], folder: Path) -> str | None:
    """Each node's own model, in a run without a server; what is wrong if one cannot be written."""
    if not models:
        return None
    nodes = folder / "nodes"
    try:
        nodes.mkdir(exist_ok=True)
    except OSError as error:
        return f"cannot make {nodes}: {error.strerror}"
    for node, model in models.items():
        state = {key: t.clone(memory_format=torch.contiguous_format) for key, t in model.items()}
        complaint = save_result(safetensors.torch.save(state), nodes, str(node))
        if complaint is not None:
            return complaint
    return None


def as_failure(error: Exception) -> control.Failure:
    """An error as it travels: the script's own traceback, where it came from a worker, else ours."""
    blames: list[tuple[type[PacelineError], control.Blame]] = [
        (UserError, "user"), (ScriptError, "script"), (PeerError, "peer"),
    ]  # fmt: skip
    notes = "\n".join(getattr(error, "__notes__", ()))
    for kind, blame in blames:
        if isinstance(error, kind):
            return control.Failure(blame, str(error), notes)
    text = str(error) if isinstance(error, InternalError) else f"{type(error).__name__}: {error}"
    return control.Failure("internal", text, notes or traceback.format_exc())
