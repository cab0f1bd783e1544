"""paceline's tables on real processes, through the public interface alone.

A get from the cache is one of rows that are within the bound; a fetch is the first get of a clock under `asp`, whose
rows are asked for in every clock. The increments are timed with the rows in the cache.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from contenders.paceline_local import _answer_file, _launched
from contenders.questions import Exchange, Exchanged, Gather, Gathered, Sample, Sampled
from contenders.row_numbers import draws, first_values, timed
from contenders.rows_plain import compile_sampler
from paceline.records import journal
from paceline.tasks import topics

WIDTH = 64  # numbers in a row of a table that takes a model's place


def exchange(task: Exchange) -> Exchanged:
    """As many numbers as the model has parameters; a round reads half of the rows, adds to them and ends its clock."""
    found, facts = _launched(_exchange, task, strategy=task.strategy, servers=task.servers)
    return Exchanged([seconds for worker in found for seconds in worker["round_s"][task.warmup :]], None, facts)


def _exchange() -> None:
    session = paceline.init()
    task, answer = Exchange(**json.loads(session.option("task", ""))), _answer_file(session)
    count = task.parameters // WIDTH
    table = session.table("rows", count, WIDTH)
    chance, deltas = np.random.default_rng(session.worker), np.ones((count // 2, WIDTH), dtype=np.float32)
    round_s = []
    for _ in range(task.warmup + task.rounds):
        rows = chance.permutation(count)[: count // 2]
        began = time.perf_counter()
        table.get(rows)
        table.inc(rows, deltas)
        session.clock()
        round_s.append(time.perf_counter() - began)
    answer.write_text(json.dumps({"round_s": round_s}))


def gather(task: Gather) -> Gathered:
    cached, _ = _launched(_cached, task, strategy="ssp:staleness=1000000")  # type: ignore[arg-type]
    fetched, _ = _launched(_fetched, task, strategy="asp")  # type: ignore[arg-type]
    return Gathered({**cached[0], **fetched[0]})


def _opened() -> tuple[Any, Gather, Path, Any]:
    session = paceline.init()
    task, answer = Gather(**json.loads(session.option("task", ""))), _answer_file(session)
    return session, task, answer, session.table("rows", task.table_rows, task.width, init=first_values(task))


def _cached() -> None:
    session, task, answer, table = _opened()
    table.get()
    deltas = np.ones((task.rows, task.width), dtype=np.float32)

    def clocked(run: Callable[[Any], Any]) -> Callable[[Any], float]:
        def timed_run(rows: Any) -> float:
            began = time.perf_counter()
            run(rows)
            seconds = time.perf_counter() - began
            session.clock()  # the increments leave: every round finds its op-log empty, as every clock does
            return seconds

        return timed_run

    def rounds(run: Callable[[Any], float], *, distinct: bool) -> list[float]:
        return [run(rows) for rows in draws(task, distinct=distinct)][task.warmup :]

    found = {
        "get": timed(task, table.get, distinct=True),
        "inc_distinct": rounds(clocked(lambda rows: table.inc(rows, deltas)), distinct=True),
        "inc_repeated": rounds(clocked(lambda rows: table.inc(rows, deltas)), distinct=False),
    }
    answer.write_text(json.dumps(found))


def _fetched() -> None:
    session, task, answer, table = _opened()
    seconds = []
    for rows in draws(task, distinct=True):
        session.clock()
        began = time.perf_counter()
        table.get(rows)
        seconds.append(time.perf_counter() - began)
    answer.write_text(json.dumps({"fetch": seconds[task.warmup :]}))


def sample(task: Sample) -> Sampled:
    options = {"topics": task.topics, "parts": task.parts, "clocks": task.passes * task.parts, "beta": 0.05}
    if task.folder is None:
        options |= {"documents": 100, "vocabulary": 300}
    lines = journal.Lines()
    with tempfile.TemporaryDirectory() as folder:

        def train() -> None:
            compile_sampler()
            began = time.process_time()
            topics.train()
            (Path(folder) / str(os.getpid())).write_text(str(time.process_time() - began))

        run = paceline.launch(
            train, engine="local", workers=task.workers, threads=task.threads, evaluate_every="off",
            strategy=f"ssp:staleness={task.staleness}", data_dir=task.folder, sink=lines,
            options={name: str(value) for name, value in options.items()},
        )  # fmt: skip
        cpu_s = sum(float(file.read_text()) for file in Path(folder).iterdir())
    server = next(line.data for line in lines if isinstance(line, journal.Observation) and line.what == "server")
    return Sampled(run.summary.samples_used, cpu_s, server["cpu_s"], topics.loss_of(run.tables["words"], 0.05))
