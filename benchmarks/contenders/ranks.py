"""Starts the processes of a contender that has several: fresh interpreters that meet in a folder of their own."""

import multiprocessing
import queue
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PATIENCE_S = 1.0  # between two looks whether all ranks are alive
FAREWELL_S = 30.0  # for a rank that has answered to end by itself


def gather(run: Callable[[int, Path, Any], Any], ranks: int, task: Any) -> list[Any]:
    """What `run(rank, folder, task)` returned on every rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        answers = context.Queue()
        arguments = [(run, rank, Path(name), task, answers) for rank in range(ranks)]
        # Not daemons: a rank may start processes for itself.
        processes = [context.Process(target=_answer, args=given) for given in arguments]
        for process in processes:
            process.start()
        found: dict[int, Any] = {}
        try:
            while len(found) < ranks:
                _take(answers, found, processes)
        finally:
            for process in processes:
                process.join(FAREWELL_S if len(found) == ranks else 0)
                process.kill()
        return [found[rank] for rank in range(ranks)]


def meeting(folder: Path) -> str:
    """Where torch.distributed's ranks find one another, without a port that somebody else may take."""
    return f"file://{folder / 'ranks'}"


def _take(answers: Any, found: dict[int, Any], processes: Sequence[Any]) -> None:
    try:
        rank, value = answers.get(timeout=PATIENCE_S)
    except queue.Empty:
        for rank, process in enumerate(processes):
            if rank not in found and process.exitcode:
                raise RuntimeError(f"rank {rank} ended with exit code {process.exitcode}") from None
    else:
        found[rank] = value


def _answer(run: Callable[[int, Path, Any], Any], rank: int, folder: Path, task: Any, answers: Any) -> None:
    answers.put((rank, run(rank, folder, task)))
