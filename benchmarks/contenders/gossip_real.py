"""The time that exchanging by change saves on real processes, over the line on which the baseline communicates for the
publication's share of its time.

Two lines: `emulated` is a run of the local engine whose scenario has the bandwidth, `shaped` hosts of a lab
(tests/netlab) whose cables the kernel limits (tc-tbf), with a process each, by `paceline serve` and `paceline join`. A
step takes STEP_S in either, most of it slept, so that eight processes on two cores do not wait for a processor.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import paceline
from contenders import gossip_runs
from contenders.bars import Bar
from contenders.gossip_runs import Job
from contenders.gossip_time import bar_of_time, most_saved, usual_mbps
from contenders.gossip_trials import FIRST_FRESH, with_option
from paceline import scenario
from paceline.core.peer_events import Sent, Stepped
from paceline.records import journal

TESTS = Path(__file__).parents[2] / "tests"
STEP_S = 0.3  # of computing, most of it slept; 10 to 15 ms that a step takes besides hardly count then
PATIENCE_S = 900.0
SCRIPT = """
import sys
sys.path[:0] = [{benchmarks!r}]
import msgspec
from contenders import gossip_runs
gossip_runs.train(msgspec.json.decode({job!r}, type=gossip_runs.Job))
"""


class Timed(msgspec.Struct, frozen=True):
    """One run."""

    line: str
    side: str
    overlap: bool
    seed: int
    seconds: float  # until the last node's last step
    waiting: float  # share of the nodes' time in which they waited for their line, or for a processor
    megabytes: float
    accuracy: float
    late: float  # share of computations that took longer than STEP_S; 0 where nobody counts them


class Script:
    """What a node runs; it can be sent to other processes."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self) -> None:
        gossip_runs.train(self.job)


def cluster(job: Job) -> str:
    """The scenario: equal nodes, and the line if the job has one."""
    network = "" if job.mbps is None else f"[network]\nbandwidth_mbps = {job.mbps}"
    return f"""
seed = {job.seed}
[compute]
seconds_per_sample = {STEP_S / job.size.batch}
{network}
[[workers]]
count = {job.size.workers}
"""


def on_emulated_line(job: Job) -> tuple[list[journal.Line], Any]:
    """One run of the local engine."""
    lines = journal.Lines()
    with tempfile.TemporaryDirectory(prefix="gossip-") as folder:
        done = paceline.launch(
            Script(job), engine="local", scenario=scenario.parse(cluster(job), "gossip", Path()),
            strategy=job.strategy, seed=job.seed, sink=lines, evaluate_every=f"{job.size.epochs:g}e", runs_dir=folder,
        )  # fmt: skip
        return list(lines), done.summary


def on_shaped_line(job: Job) -> tuple[list[journal.Line], Any]:
    """One run across the hosts of a lab. The server's cable has no limit: it carries no model while nodes train."""
    hosts, netlab, warm_python = _of_tests()
    hosts.PATIENCE_S = PATIENCE_S
    size, mbps = job.size, job.mbps
    plain = msgspec.structs.replace(job, mbps=None)  # the scenario has no network: the cables are real
    script = SCRIPT.format(benchmarks=os.fspath(Path(gossip_runs.__file__).parents[1]), job=msgspec.json.encode(plain))
    rates = [None, *[f"{mbps:.3f}mbit"] * size.workers]
    with (
        tempfile.TemporaryDirectory(prefix="gossip-") as folder,
        warm_python.kept(),
        netlab.Lab(hosts=1 + size.workers, rate=rates) as lab,
        hosts.Site(folder, script=script, lab=lab) as site,
    ):
        (Path(folder) / "cluster.toml").write_text(cluster(plain))
        serve = site.serve(
            "--workers", str(size.workers), "--strategy", job.strategy, "--scenario", "./cluster.toml",
            "--seed", str(job.seed), "--evaluate-every", f"{size.epochs:g}e",
        )  # fmt: skip
        for host in lab.hosts[1:]:
            site.join(host=host)
        for command in (serve, *site.commands[1:]):
            if command.end():
                raise SystemExit(f"{command.log.name} ended with code {command.poll()}:\n{command.said}")
        report = json.loads((site.run / "report.json").read_text())
        return list(journal.read(site.run / "journal.jsonl")), msgspec.convert(report, paceline.Report)


LINES = {"emulated": on_emulated_line, "shaped": on_shaped_line}


def timed(line: str, side: str, job: Job, *, overlap: bool) -> Timed:
    """Make one run and read its journal."""
    job = msgspec.structs.replace(job, strategy=with_option(job.strategy, f"overlap={str(overlap).lower()}"))
    lines, report = LINES[line](job)
    steps = [each.event for each in _of_nodes(lines) if isinstance(each.event, Stepped)]
    sent = sum(each.event.bytes for each in _of_nodes(lines) if isinstance(each.event, Sent))
    waited, computed = sum(step.wait_s for step in steps), sum(step.compute_s for step in steps)
    late = [each.data["overruns"] / max(1, each.data["computations"]) for each in lines
            if isinstance(each, journal.Observation) and each.what == "overruns"]  # fmt: skip
    return Timed(
        line, side, overlap, job.seed, max(step.at for step in steps), waited / ((waited + computed) or 1.0),
        sent / 1e6, report.accuracy or 0.0, late[-1] if late else 0.0,
    )  # fmt: skip


def measure(
    chosen: Mapping[str, Job], lines: Sequence[str], repeats: int, *, quick: bool = False
) -> tuple[list[dict[str, Any]], list[Bar]]:
    """Both sides on each line, with overlap and without, in turn so that the machine's mood is the same for both."""
    size = chosen["baseline"].size
    mbps = usual_mbps(size, STEP_S)
    found = []
    for seed in range(FIRST_FRESH, FIRST_FRESH + repeats):
        for line in lines:
            for overlap in (False, True):
                for side in ("baseline", "adaptive"):
                    job = msgspec.structs.replace(chosen[side], seed=seed, mbps=mbps)
                    found.append(timed(line, side, job, overlap=overlap))
                    if not quick:
                        print(found[-1], file=sys.stderr, flush=True)
    rows = [{"contest": "real", "mbps": mbps, **msgspec.to_builtins(each)} for each in found]
    return rows, [bar for line in lines for bar in judge(line, found)]


def judge(line: str, found: Sequence[Timed]) -> list[Bar]:
    """The claim on time without overlap; with it, the share that is saved of all that could be."""
    bars = []
    for overlap in (False, True):
        of = {(each.side, each.seed): each.seconds for each in found if (each.line, each.overlap) == (line, overlap)}
        ratios = [of["adaptive", seed] / of["baseline", seed] for side, seed in of if side == "baseline"]
        where = f"real processes, {line} line, overlap={str(overlap).lower()}"
        bar = bar_of_time(f"real_{line}_time_saved{'_overlap' if overlap else ''}", ratios, where)
        if overlap:
            least = 0.8 * most_saved(overlap=True)
            meaning = (
                f"{bar.meaning}; sending nothing at all would save {most_saved(overlap=True):.1%}, the bar is 0.8 of it"
            )
            bar = msgspec.structs.replace(bar, bound=least, meaning=meaning)
        bars.append(bar)
    return bars


def why_not_shaped() -> str | None:
    """Why no lab can be built here; None if one can."""
    reason: str | None = _of_tests()[1].why_not()
    return reason


def _of_nodes(lines: Sequence[journal.Line]) -> Iterator[journal.PeerDecision]:
    return (line for line in lines if isinstance(line, journal.PeerDecision))


def _of_tests() -> tuple[Any, Any, Any]:
    for folder in (TESTS, TESTS / "support"):
        if os.fspath(folder) not in sys.path:
            sys.path.append(os.fspath(folder))
    import hosts
    import warm_python

    import netlab

    return hosts, netlab, warm_python
