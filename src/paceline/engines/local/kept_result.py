"""The trained model as files: in the run's folder, or where there is room if that is not possible.

A full disk must not cost hours of training. So the places are tried in turn: the run's folder, the temporary folder of
this machine, and its shared memory, which is gone when the machine is switched off but needs no disk.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import safetensors.torch
import torch

from paceline.records import private_files

MEMORY = Path("/dev/shm")


class KeptResult(msgspec.Struct, frozen=True):
    """Where the model is; None if nowhere. `complaint` says what went wrong, and where it is instead."""

    path: Path | None
    complaint: str | None = None


def keep(data: bytes, nodes: Mapping[int, Mapping[str, torch.Tensor]], folder: Path, name: str) -> KeptResult:
    """Write the model, and each node's own in a run without a server, into the run's folder, or else elsewhere."""
    file = f"{name}.safetensors"
    try:
        _write(data, nodes, folder, file)
        return KeptResult(folder / file)
    except OSError as error:
        first = f"cannot write {folder / file}: {error.strerror}"
    others = []
    for place in _other_places():
        made: Path | None = None
        try:
            made = Path(tempfile.mkdtemp(prefix=f"paceline-{folder.name}-", dir=place))
            _write(data, nodes, made, file)
        except OSError as error:
            others.append(f"{place}: {error.strerror}")
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
        else:
            return KeptResult(made / file, f"{first}; it is in {made / file}: move it from there")
    return KeptResult(None, f"{first}, nor anywhere else ({'; '.join(others)}): the trained model is lost")


def _other_places() -> Iterator[Path]:
    with contextlib.suppress(OSError):  # no temporary folder can be written to
        yield Path(tempfile.gettempdir())
    yield MEMORY


def _write(data: bytes, nodes: Mapping[int, Mapping[str, torch.Tensor]], folder: Path, file: str) -> None:
    """Write each file whole or not at all; if one cannot be written, leave none."""
    written: list[Path] = []
    try:
        _write_whole(folder / file, data, written)
        if nodes:
            private_files.make_folder(folder / "nodes")
        for node, model in nodes.items():
            state = {key: t.clone(memory_format=torch.contiguous_format) for key, t in model.items()}
            _write_whole(folder / "nodes" / f"{node}.safetensors", safetensors.torch.save(state), written)
    except OSError:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        raise


def _write_whole(path: Path, data: bytes, written: list[Path]) -> None:
    unfinished = path.with_name(f".{path.name}")
    written.append(unfinished)
    private_files.write_bytes(unfinished, data)
    os.replace(unfinished, path)  # noqa: PTH105 - as it is written
    written[-1] = path
