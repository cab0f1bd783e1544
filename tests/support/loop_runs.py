"""Runs the loops of tests/scripts: originals with the data order of a run, ports alone, and their results compared.

A run shuffles samples from its seed, a DataLoader from torch's generator. For the comparison the original's samplers
take their order from the run's ledger. Starting a DataLoader draws from torch's generator too, which a run's own
loading does not, so that draw is undone in both scripts. Nothing else of either is touched.
"""

import contextlib
import difflib
import io
import os
import random
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from paceline.cli import main
from paceline.core.ledger import make_ledger
from scripts.catalogue import REFUSED, Loop


class RunOrder:
    """The order in which a run alone hands out samples, epoch by epoch."""

    def __init__(self, one_loop: bool, seed: int = 0) -> None:
        self._one_loop = one_loop
        self._seed = seed
        self._epoch = 0

    def next(self, size: int) -> list[int]:
        """The order of the next epoch: another epoch of the only phase, or the only one of the next phase."""
        phase, epoch = (0, self._epoch) if self._one_loop else (self._epoch, 0)
        self._epoch += 1
        ledger = make_ledger("epoch", size, epoch + 1, self._seed, workers=1, phase=phase)
        for _ in range(epoch):
            ledger.allot(0, size)
        allotment = ledger.allot(0, size)
        assert allotment is not None
        return list(map(int, allotment.indices))


@contextlib.contextmanager
def comparable(order: RunOrder | None = None) -> Iterator[None]:
    """Loaders start without a draw; with an order, shuffling samplers follow it."""
    start, random_order, shared_order = DataLoader.__iter__, RandomSampler.__iter__, DistributedSampler.__iter__

    def iterate(loader: Any) -> Any:
        state = torch.get_rng_state()
        found = start(loader)
        torch.set_rng_state(state)
        return found

    DataLoader.__iter__ = iterate
    if order is not None:
        RandomSampler.__iter__ = lambda sampler: iter(order.next(len(sampler.data_source)))
        DistributedSampler.__iter__ = lambda sampler: iter(order.next(len(sampler.dataset)))
    try:
        yield
    finally:
        DataLoader.__iter__ = start
        RandomSampler.__iter__, DistributedSampler.__iter__ = random_order, shared_order


@contextlib.contextmanager
def as_script(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """What `python path arguments...` finds: its arguments, imports from its own folder, and no trace of it after."""
    argv, paths, modules = sys.argv, list(sys.path), set(sys.modules)
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, paths
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).parent == path.parent:
                del sys.modules[name]
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])


def run_original(loop: Loop, result: Path, seed: int = 0) -> dict[str, Any]:
    """Run the plain script in this process and return its result."""
    for _ in range(loop.starts):
        with comparable(RunOrder(loop.one_loop, seed)):
            run_alone(loop.original, result)
    return read(result)


def run_port(loop: Loop, result: Path) -> dict[str, Any]:
    """Run the port alone in this process and return its result."""
    for _ in range(loop.starts):
        with comparable():
            run_alone(loop.port, result)
    return read(result)


def run_alone(path: Path, result: Path) -> None:
    """Run one script in this process, which prints to nowhere."""
    with as_script(path, [str(result)]), Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        runpy.run_path(str(path), run_name="__main__")


def read(result: Path) -> dict[str, Any]:
    """What a script has saved."""
    found: dict[str, Any] = torch.load(result)
    return found


def command(loop: Loop, result: Path, engine: str, workers: int, *settings: str) -> list[str]:
    """The arguments of `paceline` that train the port on workers, each with its share of the original's batch."""
    batch_size = loop.batch_size(workers)
    shared_out = [] if batch_size is None else ["--batch-size", str(batch_size)]
    given = ["--engine", engine, "--workers", str(workers), "--threads", "1", "--evaluate-every", "off", *shared_out]
    return ["run", *given, *settings, str(loop.port), str(result)]


def run_on_workers(loop: Loop, result: Path, engine: str, workers: int) -> tuple[int, str]:
    """Train the port on workers by the command line, in this process; return its exit code and what it said."""
    said = io.StringIO()
    given = command(loop, result, engine, workers, "--runs-dir", str(result.with_suffix(".runs")))
    code = 0
    for _ in range(loop.starts):
        # The command line gives this process the script's arguments and folder.
        with as_script(loop.port, []), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(given)
    return code, " ".join(said.getvalue().split())


def unexpected(loop: Loop, expected: str, code: int, said: str, result: Path, of_original: float) -> str | None:
    """Say what a run on workers did other than the catalogue expects; None if nothing."""
    if expected.startswith(REFUSED):
        part = expected.removeprefix(REFUSED)
        if code == 0:
            return f"it ran, and should have been refused with {part!r}"
        return None if part in said else f"refused without a word of {part!r}: {said[-300:]}"
    if code != 0:
        return f"exit code {code}: {said[-300:]}"
    if not result.exists():
        return "no result was saved"
    score = read(result)["score"]
    if loop.reaches(score, of_original):
        return None
    return f"score {score:.4g}, the original's is {of_original:.4g}, allowed {loop.within:g} worse"


def difference(one: Any, other: Any, where: str = "") -> str | None:
    """Say where two results differ first, tensors to the last bit; None if nowhere."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{where or 'the result'} has {sorted(map(str, one))} and {sorted(map(str, other))}"
        pairs = ((f"{where}.{key}".lstrip("."), one[key], other[key]) for key in one)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = ((f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True)))
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype == other.dtype and torch.equal(one, other):
            return None
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"{where} is {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
        return f"{where} differs by up to {float((one.double() - other.double()).abs().max()):.2g}"
    else:
        return None if type(one) is type(other) and one == other else f"{where} is {one!r} and {other!r}"
    return next((found for name, a, b in pairs if (found := difference(a, b, name))), None)


def lines_changed(original: str, port: str) -> int:
    """Lines added and removed between two texts, as `diff` counts them."""
    found = difflib.unified_diff(original.splitlines(), port.splitlines(), n=0, lineterm="")
    return sum(line[:1] in "+-" and not line.startswith(("+++", "---")) for line in found)
