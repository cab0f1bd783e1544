"""The rows that every contender of the tables' comparison is asked for, and how rounds are timed."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from contenders.questions import Gather


def draws(task: Gather, *, distinct: bool) -> Iterator[Any]:
    """Row numbers of one round after the other, the same for every contender."""
    chance = np.random.default_rng(1)
    for _ in range(task.warmup + task.rounds):
        if distinct:
            yield chance.permutation(task.table_rows)[: task.rows]
        else:
            yield chance.integers(0, task.table_rows, task.rows)


def first_values(task: Gather) -> Any:
    """What the table holds at the start."""
    return np.random.default_rng(2).random((task.table_rows, task.width), dtype=np.float32)


def timed(task: Gather, run: Callable[[Any], Any], *, distinct: bool) -> list[float]:
    """Seconds of `run` on each round's rows, after the warm-up."""
    seconds = []
    for rows in draws(task, distinct=distinct):
        began = time.perf_counter()
        run(rows)
        seconds.append(time.perf_counter() - began)
    return seconds[task.warmup :]
