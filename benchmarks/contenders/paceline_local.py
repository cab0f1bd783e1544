"""paceline on real processes, through its public interface: `launch`, a session, a scenario, the journal.

One thing is not public: a run of one host opens no TCP port, and does so here to be compared with others that do.

The timed part of an exchange is `optimizer.step()`, with the gradient in ordinary memory: its copy into the shared slot
is in it. After a backward pass that copy is made already, by a hook, parameter by parameter; setting `p.grad` by hand
moves it to where a clock can see it. What the server needed for itself is in the journal; its memory is read from
outside.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import paceline
from contenders import digits, vectors, workloads
from contenders.questions import Exchange, Exchanged, Question, Race, Raced, Train, Trained, Update, Updated
from contenders.windows import common_rate, trained
from paceline import scenario
from paceline.engines.local import addresses
from paceline.records import journal

COPIES = {
    "shm": "gradient 1 (to its shared slot), parameters 1 (to the model)",
    "zeromq": "gradient and parameters each through a TCP socket",  # of the loopback, as the bare round trip
}
ENOUGH = 1_000_000  # samples or epochs: every worker leaves the loop when it has made its own steps
LOOK_S = 0.1  # between two looks at the server's memory


# -- exchange --------------------------------------------------------------------------------------------------------


def exchange(task: Exchange) -> Exchanged:
    with _Memory() as memory, addresses.loopback():
        found, facts = _launched(
            _exchange, task, strategy=task.strategy, transport=task.transport, servers=task.servers
        )
    facts["server_bytes"] = memory.peak({worker["pid"] for worker in found})
    round_s = [seconds for worker in found for seconds in worker["round_s"][task.warmup :]]
    return Exchanged(round_s, found[0]["worst_error"], facts, COPIES[task.transport])


def _exchange() -> None:
    session = paceline.init()
    task, answer = Exchange(**json.loads(session.option("task", ""))), _answer_file(session)
    model, gradients = vectors.Flat(task.parameters), vectors.Gradients(task.parameters)
    optimizer = vectors.sgd(list(model.parameters()), task.lr)
    session.prepare(model, optimizer)
    gradient, round_s = torch.empty(task.parameters), []
    rounds = task.warmup + task.rounds
    batches = session.batches(vectors.Counted(ENOUGH), batch_size=1, collate_fn=_as_is)
    for number, _ in zip(range(rounds), batches, strict=False):
        optimizer.zero_grad()
        model.values.grad = gradients.write(number, gradient)
        began = time.perf_counter()
        optimizer.step()
        round_s.append(time.perf_counter() - began)
    error = vectors.worst_error(model.values.detach(), rounds, task.lr) if session.workers == 1 else None
    answer.write_text(json.dumps({"round_s": round_s, "worst_error": error, "pid": os.getpid()}))


# -- update ----------------------------------------------------------------------------------------------------------


def update(task: Update) -> Updated:
    found, _ = _launched(_update, task, strategy="asp")
    return common_rate([worker["done"][task.warmup :] for worker in found])


def _update() -> None:
    session = paceline.init()
    task, answer = Update(**json.loads(session.option("task", ""))), _answer_file(session)
    model = vectors.Flat(task.parameters)
    optimizer = vectors.sgd(list(model.parameters()), task.lr)
    session.prepare(model, optimizer)
    gradient, done = vectors.Gradients(task.parameters).write(1, torch.empty(task.parameters)), []
    batches = session.batches(vectors.Counted(ENOUGH), batch_size=1, collate_fn=_as_is)
    for _ in zip(range(task.warmup + task.updates), batches, strict=False):
        model.values.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        done.append(time.monotonic())
    answer.write_text(json.dumps({"done": done}))


# -- train -----------------------------------------------------------------------------------------------------------


def train(task: Train) -> Trained:
    found, _ = _launched(_train, task, strategy=task.strategy)
    return trained([worker["ends"] for worker in found], task)


def _train() -> None:
    session = paceline.init()
    task, answer = Train(**json.loads(session.option("task", ""))), _answer_file(session)
    model = workloads.build(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    session.prepare(model, optimizer)
    ends = []
    data = workloads.dataset(task.model, workloads.SAMPLES)
    batches = session.batches(data, batch_size=task.batch_size, epochs=ENOUGH)
    for _, (x, y) in zip(range(task.warmup + task.steps), batches, strict=False):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        ends.append(time.monotonic())
    answer.write_text(json.dumps({"ends": ends}))


# -- race ------------------------------------------------------------------------------------------------------------


def race(task: Race) -> Raced:
    """The scenario that `step_s` was drawn from comes with the options: a grant's samples decide its seconds."""
    train_set, _ = digits.load(task.data)
    cluster = scenario.parse(task.options["scenario"], "race", Path())
    every = task.evaluate_every * task.workers * task.batch_size / len(train_set)
    settings = {
        "strategy": task.options["strategy"],
        "scenario": cluster,
        "seed": task.seed,
        "target": f"loss<={task.target!r}",
        "evaluate_every": f"{every:.6f}e",
        "max_seconds": task.max_s,
    }
    run = paceline.launch(
        _race, engine="local", threads=task.threads, options={"task": _spelt(dataclasses.replace(task, step_s=[]))},
        **settings,
    )  # fmt: skip
    report = run.summary
    reached = report.target.reached_at_seconds if report.target is not None else None
    facts = {"wait_fraction": report.wait_fraction or 0.0, "staleness": report.staleness.mean or 0.0}
    return Raced(reached, report.samples_used / report.seconds, report.seconds, report.versions, facts)


def _race() -> None:
    session = paceline.init()
    task = Race(**json.loads(session.option("task", "")))
    train_set, held_out = digits.load(task.data)
    torch.manual_seed(task.seed)
    model = digits.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        return {"loss": digits.loss(model, held_out)}

    session.prepare(model, optimizer, evaluate=evaluate)
    for x, y in session.batches(train_set, batch_size=task.batch_size, epochs=10_000):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        session.report(loss=loss)
        optimizer.step()


# -- what the questions share ----------------------------------------------------------------------------------------


def _launched(
    run: Callable[[], None], task: Exchange | Update | Train, **settings: Any
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """What each worker answered, in worker order, and what the server says of itself."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "journal.jsonl"
        paceline.launch(
            run, engine="local", workers=task.workers, threads=task.threads, evaluate_every="off", journal=path,
            options={"task": _spelt(task), "answers": name}, **settings,
        )  # fmt: skip
        found = [json.loads((Path(name) / f"{worker}.json").read_text()) for worker in range(task.workers)]
        facts = {}
        for line in journal.read(path):
            if isinstance(line, journal.Observation) and line.what == "server":
                facts = {key: float(value) for key, value in line.data.items()}
        return found, facts


def _answer_file(session: paceline.Session) -> Path:
    """Asked for at the start, as every option must be before the first round is over."""
    return Path(session.option("answers", "")) / f"{session.worker}.json"


def _spelt(task: Question) -> str:
    return json.dumps(dataclasses.asdict(task))


def _as_is(batch: list[int]) -> list[int]:
    return batch


class _Memory:
    """The highest resident memory of each process that this one starts."""

    def __init__(self) -> None:
        self._peaks: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "_Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def peak(self, workers: set[int]) -> float:
        """Of the server: the one child that is no worker."""
        return float(max(size for pid, size in self._peaks.items() if pid not in workers))

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(OSError):
                for pid in map(int, _children()):
                    with contextlib.suppress(OSError, StopIteration):
                        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                        peak = next(line for line in lines if line.startswith("VmHWM:"))
                        self._peaks[pid] = int(peak.split()[1]) * 1024


def _children() -> list[str]:
    threads = Path("/proc/self/task").iterdir()
    return [pid for thread in threads for pid in (thread / "children").read_text().split()]
