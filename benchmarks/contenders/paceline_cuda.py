"""paceline with one worker on a CUDA device, through its public interface.

The timed part of an exchange begins with the gradient complete on the device and ends with the device holding the next
version; handing the gradient to `p.grad` is part of it, since its copy to the host begins there. What an overlap saves
is seen in the worker's own time from a grant to its push, which the journal has and the server has no part in.
"""

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import paceline
from contenders import vectors
from contenders.questions import Exchange, Exchanged, Overlap, Overlapped
from paceline.core.events import Pushed
from paceline.records import journal
from paceline.worker import device_replica as device_slots

NEVER = 1 << 62


def exchange(task: Exchange) -> Exchanged:
    found, facts = _launched(_exchange, task)
    return Exchanged(found["round_s"][task.warmup : -1], found["worst_error"], facts.server)


def _exchange() -> None:
    session = paceline.init()
    task, answer = Exchange(**json.loads(session.option("task", ""))), Path(session.option("answer", ""))
    gradients = vectors.Gradients(task.parameters).to(session.device)
    model = vectors.Flat(task.parameters).to(session.device)
    start = model.values.detach().clone()
    optimizer = vectors.sgd(list(model.parameters()), task.lr)
    session.prepare(model, optimizer)
    gradient, round_s = torch.empty(task.parameters, device=session.device), []
    rounds = task.warmup + task.rounds + 1  # the last step also ends the run: it is not timed
    for number, _ in enumerate(session.batches(vectors.Counted(rounds), batch_size=1)):
        optimizer.zero_grad()
        gradients.write(number, gradient)
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.values.backward(gradient)
        optimizer.step()
        torch.cuda.synchronize()
        round_s.append(time.perf_counter() - began)
    error = vectors.error_from(start, gradients, model.values.detach(), rounds, task.lr)
    answer.write_text(json.dumps({"round_s": round_s, "worst_error": error}))


def overlap(task: Overlap) -> Overlapped:
    found, facts = _launched(_overlap, task)
    return Overlapped(found["backward_s"][task.warmup : -1], facts.compute_s[task.warmup : -1])


def _overlap() -> None:
    session = paceline.init()
    task, answer = Overlap(**json.loads(session.option("task", ""))), Path(session.option("answer", ""))
    if not task.early:
        device_slots.EARLY = NEVER
    layers = [torch.nn.Linear(task.width, task.width, bias=False) for _ in range(task.layers)]
    model = torch.nn.Sequential(*layers).to(session.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    session.prepare(model, optimizer)
    inputs = torch.randn(task.rows, task.width, device=session.device)
    backward_s = []
    for _ in session.batches(vectors.Counted(task.warmup + task.rounds + 1), batch_size=1):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(inputs).square().mean()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss.backward()
        torch.cuda.current_stream().synchronize()  # what is computed, not what is copied beside it
        backward_s.append(time.perf_counter() - began)
        optimizer.step()
        torch.cuda.synchronize()  # the next grant's time begins with its model on the device
    answer.write_text(json.dumps({"backward_s": backward_s}))


@dataclasses.dataclass
class Told:
    """What the journal has: the server's seconds by what they were for, the worker's seconds for every push."""

    server: dict[str, float]
    compute_s: list[float]


def _launched(run: Callable[[], None], task: Exchange | Overlap) -> tuple[dict[str, Any], Told]:
    """What the worker answered, and what the journal has."""
    with tempfile.TemporaryDirectory() as name:
        path, answer = Path(name) / "journal.jsonl", Path(name) / "answer.json"
        paceline.launch(
            run, engine="local", workers=1, threads=task.threads, strategy="asp", evaluate_every="off", journal=path,
            runs_dir=Path(name), options={"task": json.dumps(dataclasses.asdict(task)), "answer": str(answer)},
        )  # fmt: skip
        told = Told({}, [])
        for line in journal.read(path):
            if isinstance(line, journal.Observation) and line.what == "server":
                told.server = {key: float(value) for key, value in line.data.items()}
            elif isinstance(line, journal.Decision) and isinstance(line.event, Pushed):
                told.compute_s.append(line.event.compute_s)
        return json.loads(answer.read_text()), told
