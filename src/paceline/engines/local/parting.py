"""How a server takes its leave: the trained model behind a descriptor, and what went wrong in a form that travels."""

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch

from paceline.engines.local import control
from paceline.errors import InternalError, PacelineError, PeerError, ScriptError, UserError
from paceline.store import Store, model_state


@contextlib.contextmanager
def model_behind_descriptor(store: Store | None, folder: str | None) -> Iterator[tuple[int, ...]]:
    """The model's state as safetensors bytes, in the run's folder too if it has one."""
    if store is None:
        yield ()
        return
    # Tied keys share a tensor, which the format has no notion of.
    apart = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in model_state(store).items()}
    data = safetensors.torch.save(apart)
    if folder is not None:
        (Path(folder) / "model.safetensors").write_bytes(data)
    descriptor = os.memfd_create("paceline-model")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield (descriptor,)
    finally:
        os.close(descriptor)


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
