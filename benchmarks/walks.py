"""Four walks through the source, traced in tiny runs on real processes: which files does one thing pass through?

push      a gradient under bsp: from `optimizer.step()` to the next batch
message   a model between two gossip nodes: from `step()` of one to its use in the next `step()` of the other
table     `inc`, `clock` and a `get` that has to fetch
line      a line of the journal: from the decision to bytes in the file

**Window.** In the process whose script does it: all calls between two marks of the script, in the middle of a run.
In any other process of the run: what handles messages in that time, up to the last send; a process that does not both
receive and send is not on the way. The loop of such a process waits (select, poll) in the same frame over and over:
calls made by frames that are open during that wait count if they read from a socket or are given a message (an object
with declared fields), with all calls below them; the loop itself and its other chores do not. Between nodes, the window
of the sender ends with its first send, that of the receiver lasts from its first receipt to its first send. A line is
followed by identity: every call that is given the line, with all calls below it, then the stack of the next write.

**Files** are those of which a function is entered in the window, in the order of the first one. Files that only declare
a type (a struct is made without a call) are not among them. Of a push and of a table's clock REPEATS in a row are
marked, and what each of them passes counts: a progress report that one of them happens to cause does not. A second
count leaves out files that are entered only below a call into `strategies/` or below one that is given a line (a record
of the module `journal`).

**Turns.** A walk turns back where a call enters a file that is already on the stack of the window, below another file:
A -> B -> A. Each different path from A back to A counts once.

**Shapes** of a gradient: the classes of the package of which an object is an argument (`self` aside) or the result of a
call in the window, or lies in a list or declared field of one, and which (a) declare a field `ticket` or `push` with
the number of this push, or (b) have a tensor with the values of this gradient, or (c) have a field `gradient` that
does, or are the field `gradient` of such an object.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
MIDDLE = 5  # the first marked step; those before the fourth also compare parameters with the version granted
REPEATS = 5  # marked steps
LINE = MIDDLE + REPEATS + 1  # the step whose journal line is followed
FLUSH_S = 1.0  # a journal promises its lines to readers twice a second
LIMIT_S = 120.0
Trace = list["Event"]


class Event(NamedTuple):
    """What the tracer wrote down; see `walk_tracer.py`."""

    at: float
    thread: int
    kind: str
    file: str
    held: list[dict[str, Any]] = []
    process: int = 0


class Walk(NamedTuple):
    """What one thing passes through."""

    files: list[str]
    outside: list[str]  # those of them beside the strategy's decision and the journal line
    turns: list[str]
    shapes: list[str] = []


# -- the runs ----------------------------------------------------------------------------------------------------------


def _training() -> tuple[Any, Any, Any, Any]:
    import torch

    import paceline

    torch.manual_seed(1)
    session = paceline.init()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.prepare(model, optimizer)
    x = torch.randn(96, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return session, model, optimizer, session.batches(data, batch_size=4, epochs=2)


def push() -> None:
    """The script of a worker under bsp."""
    import sitecustomize as tracer  # the copy that this interpreter loaded first

    session, model, optimizer, batches = _training()
    first = session.worker == 0
    if not first:
        tracer.leave_out()
    marked = range(MIDDLE, MIDDLE + REPEATS)
    for number, (x, y) in enumerate(batches):
        if first and number - 1 in (*marked, LINE):
            time.sleep(FLUSH_S if number - 1 == LINE else 0.0)
            tracer.end()
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        if first and number in (*marked, LINE):
            for parameter in model.parameters():
                parameter.grad.fill_(tracer.MARK)
            tracer.begin("line" if number == LINE else f"push {number - MIDDLE}")
        optimizer.step()


def message() -> None:
    """The script of a gossip node. The two take turns: each step of node 1 receives what node 0 has just sent."""
    import sitecustomize as tracer

    session, model, optimizer, batches = _training()
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        if number <= MIDDLE:
            tracer.await_turn(2 * number + session.worker)
        if number == MIDDLE:
            tracer.begin("received" if session.worker else "sent")
        optimizer.step()
        if number == MIDDLE:
            tracer.end()
            tracer.leave_out()
        if number <= MIDDLE:
            tracer.signal_turn(2 * number + session.worker + 1)


def table() -> None:
    """The script of a worker on a table whose every clock makes the next `get` ask the server."""
    import numpy
    import sitecustomize as tracer

    import paceline

    session = paceline.init()
    worker = session.worker
    counters = session.table("counters", 4, 2, staleness=0)
    if worker:
        tracer.leave_out()
    for number in range(2 * MIDDLE + REPEATS):
        marked = worker == 0 and MIDDLE <= number < MIDDLE + REPEATS
        if marked:
            tracer.begin(f"table {number - MIDDLE}")
        counters.inc([worker], numpy.ones((1, 2), dtype=numpy.float32))
        session.clock()
        counters.get()
        if marked:
            tracer.end()


JOBS: dict[str, tuple[Callable[[], None], str]] = {
    "push": (push, "bsp"),
    "message": (message, "gossip"),
    "table": (table, "bsp"),
}


def traced(job: str, tree: Path) -> list[Trace]:
    """Run a job with the sources of `tree`; the events of each process."""
    source = tree / "src" / "paceline"
    with tempfile.TemporaryDirectory(prefix="walks-") as name:
        folder = Path(name)
        shutil.copy(HERE / "walk_tracer.py", folder / "sitecustomize.py")
        (folder / "window").write_bytes(bytes(2))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([name, str(source.parent)]),
            "OMP_NUM_THREADS": "1",
            "PACELINE_WALKS": name,
            "PACELINE_WALKS_SOURCE": str(source),
        }
        command = [sys.executable, str(Path(__file__).resolve()), job]
        done = subprocess.run(
            command, cwd=name, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the {job} run on {tree} failed:\n{done.stderr[-2000:]}")
        paths = sorted(folder.glob("trace-*.jsonl"))
        return [_read(path, number) for number, path in enumerate(paths)]


def _read(path: Path, process: int) -> Trace:
    return [Event(*json.loads(line))._replace(process=process) for line in path.read_text().splitlines()]


# -- windows -----------------------------------------------------------------------------------------------------------


def window(traces: Iterable[Trace], name: str) -> tuple[Trace, list[Trace]]:
    """The events of the process that marked this window, and those of others at that time, by thread."""
    own, others = None, []
    for trace in traces:
        begin = next((i for i, e in enumerate(trace) if (e.kind, e.file) == ("begin", name)), None)
        if begin is not None:
            end = next(i for i, e in enumerate(trace) if i > begin and e.kind == "end")
            own = [e for e in trace[begin + 1 : end] if e.thread == trace[begin].thread]
            since, until = trace[begin].at, trace[end].at
    if own is None:
        raise RuntimeError(f"no process marked the window {name!r}")
    for trace in traces:
        if not any((e.kind, e.file) == ("begin", name) for e in trace):
            within = [e for e in trace if since <= e.at <= until]
            others += [[e for e in within if e.thread == thread] for thread in dict.fromkeys(e.thread for e in within)]
    return own, others


def cut(trace: Trace, first: str | None, last: str) -> Trace:
    """Up to the first event of kind `last`, from the first of kind `first` with the calls that are open by then."""
    start = 0 if first is None else next((i for i, e in enumerate(trace) if e.kind == first), len(trace))
    stop = next((i for i, e in enumerate(trace) if i >= start and e.kind == last), None)
    if stop is None:
        raise RuntimeError(f"nothing was traced from {first or 'the mark'} to {last}")
    return [*_open_calls(trace[:start]), *trace[start:stop]]


def _open_calls(trace: Trace) -> Trace:
    stack: Trace = []
    for event in trace:
        if event.kind == "call":
            stack.append(event)
        elif event.kind == "return" and stack:
            stack.pop()
    return stack


def handling(trace: Trace) -> Trace:
    """What handles messages in a process with a loop, up to its last send; nothing if it does not receive and send."""
    sends = [i for i, e in enumerate(trace) if e.kind == "send"]
    if not sends or all(e.kind != "recv" for e in trace[: sends[-1]]):
        return []
    trace = trace[: sends[-1] + 1]
    loop = _loop_calls(trace)
    way: Trace = []
    current: Trace = []  # a call made by the loop, and everything below it
    depth = 0
    for i, event in enumerate(trace):
        if event.kind == "call" and i in loop:
            continue
        if event.kind == "return" and not depth:
            continue  # of the loop, or of what began before the window
        depth += {"call": 1, "return": -1}.get(event.kind, 0)
        current.append(event)
        if not depth or i == len(trace) - 1:
            given = current[0].kind == "call" and any(held["record"] for held in current[0].held)
            if (given and way) or any(e.kind == "recv" for e in current):
                way += current
            current = []
    return way


def _loop_calls(trace: Trace) -> set[int]:
    """The calls that are open while the process waits for its next message: where its stack is least deep."""
    waits = {i: e.held for i, e in enumerate(trace) if e.kind == "wait"}
    stack: list[int] = []
    found: set[int] = set()
    for i, event in enumerate(trace):
        if event.kind == "call":
            stack.append(i)
        elif event.kind == "return" and stack:
            stack.pop()
        elif i in waits and waits[i] == min(waits.values()):
            found |= set(stack)
    return found


# -- what they pass ----------------------------------------------------------------------------------------------------


def files_of(traces: Iterable[Trace]) -> list[str]:
    """Files entered, in the order of their first call."""
    calls = sorted((e for trace in traces for e in trace if e.kind == "call"), key=lambda e: e.at)
    return list(dict.fromkeys(e.file for e in calls))


def beside_decision(trace: Trace) -> Trace:
    """The calls that are not below one into a strategy or one that is given the journal line."""
    kept: Trace = []
    depth = inside = 0
    for event in trace:
        if event.kind == "call":
            depth += 1
            if event.file.startswith("strategies/") or any(held["line"] for held in event.held):
                inside = inside or depth
            if not inside:
                kept.append(event)
        elif event.kind == "return":
            depth = max(0, depth - 1)
            inside = 0 if depth < inside else inside
    return kept


def walk_of(ways: list[Trace], shapes: list[str] | None = None) -> Walk:
    """What these traces together pass."""
    return Walk(files_of(ways), files_of(map(beside_decision, ways)), turns_of(ways), shapes or [])


def turns_of(traces: Iterable[Trace]) -> list[str]:
    """Paths on the stack that lead from a file through others back into it."""
    found: dict[str, None] = {}
    for trace in traces:
        stack: list[str] = []
        for event in trace:
            if event.kind == "return" and stack:
                stack.pop()
            if event.kind != "call":
                continue
            if event.file in stack and stack[-1] != event.file:
                last = len(stack) - 1 - stack[::-1].index(event.file)
                path = [*stack[last:], event.file]
                once = [file for i, file in enumerate(path) if i == 0 or file != path[i - 1]]
                found[" -> ".join(once)] = None
            stack.append(event.file)
    return list(found)


def shapes_of(own: Trace, others: list[Trace], worker: int = 0) -> list[str]:
    """The classes that hold the push on its way."""
    ticket = next((held["ticket"] for held in _held(cut(own, None, "send")) if "ticket" in held), None)
    served = [held for trace in others for held in _held(trace)]
    number = next((held["push"] for held in served if held.get("worker") == worker and "push" in held), None)
    found: dict[str, None] = {}
    for held in [*_held(own), *served]:
        same = "ticket" in held and held["ticket"] == ticket
        same = same or ("push" in held and held["push"] == number)
        if held["marked"] and held["gradient_of"] is not None:
            found[held["gradient_of"]] = None
        if same or held["marked"] or held["gradient_of"] in found:
            found[held["type"]] = None
    return list(found)


def _held(trace: Trace) -> Iterator[dict[str, Any]]:
    return (held for event in trace if event.kind in ("call", "return") for held in event.held)


def line_of(traces: list[Trace]) -> Walk:
    """The first decision that is recorded in these traces, from its maker to the bytes."""
    maker = next(trace for trace in traces if any(held["decision"] for held in _held(trace)))
    line = next(held["id"] for held in _held(maker) if held["decision"])
    stack: Trace = []
    way: Trace = []
    inside = 0  # how deep the stack is in the outermost call that has the line
    made = 0.0
    for event in maker:
        if event.kind == "call":
            stack.append(event)
            if not inside and any(held["id"] == line for held in event.held):
                way += [] if way else stack[-2:-1]
                inside, made = len(stack), made or event.at
        if inside:
            way.append(event)
        if event.kind == "return" and stack:
            stack.pop()
            inside = 0 if len(stack) < inside else inside
    threads = [trace for trace in traces if trace[0].process == maker[0].process]
    writes = [(e.at, i) for i, trace in enumerate(threads) for e in trace if e.kind == "write" and e.at > made]
    if not writes:
        raise RuntimeError(f"no bytes of the journal were written within {FLUSH_S} s of a line")
    at, writer = min(writes)
    return walk_of([way, _open_calls([event for event in threads[writer] if event.at < at])])


def common(found: list[Walk]) -> Walk:
    """What every one of these walks passes, in the order of the first."""
    return Walk(
        *([name for name in names[0] if all(name in other for other in names)] for names in zip(*found, strict=True))
    )


def walks(tree: Path) -> dict[str, Walk]:
    """All four, of one source tree."""
    found: dict[str, Walk] = {}
    for job in JOBS:
        traces = traced(job, tree)
        if job == "message":
            sent, received = window(traces, "sent")[0], window(traces, "received")[0]
            ways = [cut(sent, None, "send"), cut(received, "recv", "send")]
            found[job] = walk_of(ways)
            continue
        repeated = []
        for number in range(REPEATS):
            own, others = window(traces, f"{job} {number}")
            served = [way for trace in others if (way := handling(trace))]
            repeated.append(walk_of([own, *served], shapes_of(own, served) if job == "push" else None))
        found[job] = common(repeated)
        if job == "push":
            found["line"] = line_of(window(traces, "line")[1])
    return found


def main() -> None:
    """Run one of the jobs, in a process of `traced`."""
    import paceline

    train, strategy = JOBS[sys.argv[1]]
    run = paceline.launch(
        train,
        engine="local",
        workers=2,
        strategy=strategy,
        transport="shm",
        evaluate_every="off",
        journal=Path("journal.jsonl"),
    )
    if run.ended != "done":
        sys.exit(f"the run ended with {run.ended}")


if __name__ == "__main__":
    main()
