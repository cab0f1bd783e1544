"""Does a run by serve and join go on while its processes are killed and its cables are cut?

    python benchmarks/bench_lab_chaos.py                          # 22 minutes, one core; needs root and MNIST
    python benchmarks/bench_lab_chaos.py --only bsp --minutes 2 --keep /tmp/chaos       # one short run; writes nothing
    python benchmarks/bench_lab_chaos.py --quick --json           # one minute; writes nothing

A lab of three hosts (tests/netlab): one serves, three workers join from each of the others, with checkpoints and
`--respawn`. For ten minutes a random one of the seven processes, six workers and the server, is killed by SIGKILL every
10 s, and once a minute the cable of a random one of the joined hosts is cut for 5 s, at a random moment. Then the run
goes on undisturbed, and without the pauses that made it last so long, to its last epoch. The moments of the kills and
the journal say how it went (chaos_times.py). The journal is also judged by attacks/foreign_checker.py, and so are
copies of it with a fault each, which it must find.
"""

import contextlib
import copy
import functools
import gzip
import heapq
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import hosts
import leaks
import warm_python
from hosts import Site

import chaos_times
import netlab
import sources
from attacks import foreign_checker
from chaos_times import Kill, Line, ServerDeath, What, WorkerDeath
from contenders import bars
from contenders.bars import Bar
from netlab import Host, Lab

DATA = Path(__file__).parents[2] / "shared" / "data" / "mnist"
WORKERS = 6
BATCH = 16
SAMPLES = 60_000
PAUSE_S = 0.1  # of each batch, while there is chaos
SPARE = 1.05  # epochs beyond those that fit into the chaos if nothing is disturbed
MINUTES = 10.0
KILL_EVERY_S = 10.0
AWAY_S = 20.0  # that a machine stays away
BACK_S = 60.0  # after the last kill, for a machine and its workers to be back
CUT_EVERY_S = 60.0
CUT_S = 5.0
TARGET = 0.95  # accuracy on the test images
GOES_ON_S = 2.0
SERVES_S = 15.0
CHECKPOINTS = "7s"  # which has no common measure with the kills: servers die at every distance from a checkpoint
PATIENCE_S = 240.0  # for the start, and for the end after the chaos
LOOK_S = 0.5  # between two looks at the processes
LEAVES_S = 10.0  # after the end, for what processes leave to be gone
Seen = dict[int, tuple[float, float]]  # processes on the hosts, and when they were first and last seen there
SERVERS = ("server", "shard")  # of whose processes all are replaced if one dies
SCRIPT = """
import os, time
import torch
import paceline
from paceline.tasks import mnist
from paceline.tasks.classification import score
from torch.nn import functional

session = paceline.init()
train_set, test_set = mnist.load(session.data_dir, "train"), mnist.load(session.data_dir, "t10k")
torch.manual_seed(1)
model = mnist.build("mlp", 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.prepare(model, optimizer, evaluate=lambda copy: score(copy, test_set))
for x, y in session.batches(train_set, batch_size=16, epochs={epochs}):
    if not os.path.exists("hurry"):
        time.sleep({pause})
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    session.report(loss=loss, monotonic=time.monotonic())
    optimizer.step()
"""


class Case(msgspec.Struct, frozen=True):
    """One run: by serve and join, or on a Ray cluster."""

    strategy: str
    servers: int = 1
    on_ray: bool = False
    remote_shards: int = 0  # of the servers, those in actors of their own

    @property
    def name(self) -> str:
        """As in results."""
        how = f", {'ray' if self.on_ray else 'join'}" * (self.servers > 1)
        return self.strategy.partition(":")[0] + how + ", remote shards" * (self.remote_shards > 0)

    @property
    def options(self) -> tuple[str, ...]:
        """Of the command that serves or runs it."""
        return (
            "--workers", str(WORKERS), "--strategy", self.strategy, "--checkpoint-every", CHECKPOINTS, "--respawn",
            "--evaluate-every", "1e", "--start", "nursery", *(("--servers", str(self.servers)) * (self.servers > 1)),
            *(("--remote-shards", str(self.remote_shards)) * (self.remote_shards > 0)),
        )  # fmt: skip


CASES = (Case("bsp"), Case("ssp:staleness=3"))


class Found(msgspec.Struct, frozen=True):
    """What came out of one run."""

    case: Case
    kills: list[Kill]
    workers: list[WorkerDeath]
    servers: list[ServerDeath]  # and of shards
    rolled_back: list[dict[str, int]]  # by each restart
    cuts: int
    ended: bool  # every command with code 0
    accuracy: float
    versions: int
    restarted: int  # processes that ended, or were started again, although nobody killed them
    missing: int  # workers that had not come back when the chaos was over
    places_lost: int  # departures of workers that nobody killed
    faults: list[str]  # that the checker found in the journal
    plants: dict[str, bool]  # faults planted in the journal, and whether the checker found them
    left: list[str]
    abandoned: int  # temporary folders on machines all of whose processes were killed at once
    silence_s: float  # the longest time without a version during the chaos
    seconds: float


# -- the chaos ---------------------------------------------------------------------------------------------------------


def processes_of(lab: Lab) -> set[int]:
    """All processes on all hosts."""
    return set().union(*(host.processes() for host in lab.hosts))


def living(lab: Lab) -> dict[int, str]:
    """The run's worker, server and shard processes on all hosts, by number, with the names that they show."""
    return named(processes_of(lab))


def named(pids: Collection[int]) -> dict[int, str]:
    """Those among these processes."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            shown = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0\1").decode(errors="replace")
            if re.fullmatch(r"paceline: (server|(worker|shard) \d+)", shown):
                found[pid] = shown.removeprefix("paceline: ")
    return found


def workers_on(host: Host) -> tuple[int, ...]:
    """The workers whose processes are on a host."""
    return tuple(int(name.split()[1]) for name in named(host.processes()).values() if name.startswith("worker"))


class Machines(Protocol):
    """Machines that can be killed with all their processes, and come back."""

    def off(self, host: Host) -> None:
        """Kill everything on this host."""

    def on(self, host: Host) -> None:
        """Let it come back."""


class Census:
    """Which of the run's processes there are, from one look to the next."""

    def __init__(self) -> None:
        self.now: dict[int, str] = {}
        self.vanished = 0  # processes that are gone and that nobody killed
        self._killed: set[int] = set()

    def take(self, alive: dict[int, str]) -> None:
        """Look at those that are alive."""
        self.vanished += len(self.now.keys() - alive.keys() - self._killed)
        self.now = alive

    def kill(self, pids: Collection[int]) -> None:
        """Note that these are killed; server and shards all end if one does."""
        self._killed.update(pids)
        if any(self.now[pid].startswith(SERVERS) for pid in pids):
            self._killed.update(pid for pid, name in self.now.items() if name.startswith(SERVERS))

    @property
    def missing(self) -> int:
        """How many of the workers there were not when it was last taken."""
        return WORKERS - sum(not name.startswith(SERVERS) for name in self.now.values())


class Chaos:
    """Kills and cuts on a lab, all drawn from one seed."""

    def __init__(
        self, lab: Lab, case: Case, seed: int, machines: Machines | None, alive: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.kills: list[Kill] = []
        self.census = Census()
        self.seen: Seen = {}
        self._lab, self._case, self._machines, self._alive, self._say = lab, case, machines, alive, say
        self._draw = random.Random(seed)
        self._cut = False
        self._due = 0.0  # when what is being done was due
        self._trained: set[str] = set()  # hosts that had workers at the last kill
        self._dues: list[tuple[float, int, Callable[[], str]]] = []
        self._order = itertools.count()

    def _at(self, due: float, call: Callable[[], str]) -> None:
        heapq.heappush(self._dues, (due, next(self._order), call))

    def rage(self, minutes: float) -> None:
        """Kill and cut for so long, and wait as long as between two kills, or until all machines are back."""
        for number in range(1, int(60 * minutes / KILL_EVERY_S) + 1):
            self._at(KILL_EVERY_S * number, self._kill)
        for number in range(0 if self._case.on_ray else int(60 * minutes / CUT_EVERY_S)):
            at, host = CUT_EVERY_S * number + self._draw.uniform(0, CUT_EVERY_S - CUT_S), self._draw.choice([1, 2])
            self._at(at, functools.partial(self._set_cut, self._lab.hosts[host], True))
            self._at(at + CUT_S, functools.partial(self._set_cut, self._lab.hosts[host], False))
        began = time.monotonic()
        while self._dues:
            due, _, call = heapq.heappop(self._dues)
            self._due = due
            while (left := began + due - time.monotonic()) > 0:
                self._look()
                time.sleep(min(left, LOOK_S))
            self._say(f"{due:6.1f} s: {call()}")
        until = time.monotonic() + (BACK_S if self._case.on_ray else KILL_EVERY_S)
        while time.monotonic() < until:
            time.sleep(LOOK_S)
            self._look()

    def _look(self) -> None:
        self._alive()
        now = time.time()
        self.seen |= {pid: (self.seen.get(pid, (now,))[0], now) for pid in processes_of(self._lab)}
        self.census.take(living(self._lab))

    def _set_cut(self, host: Host, cut: bool) -> str:
        self._cut = cut
        host.cut() if cut else host.heal()
        return f"{'cut' if cut else 'heal'} {host.name}"

    def _kill(self) -> str:
        """Kill one of the processes or machines that there are."""
        self._look()
        hosts = {host.name: host for host in self._lab.hosts[1:]}
        before, self._trained = self._trained, {name for name, host in hosts.items() if workers_on(host)}
        trains = before & self._trained
        machines = [] if self._machines is None else [name for name in sorted(self._trained) if trains - {name}]
        there = [*sorted(self.census.now.values()), *machines]
        if not there:  # no worker, and a server that waits for a shard
            return "kill nobody, since none is there"
        name = self._draw.choice(there)
        if name in machines:
            return self._kill_machine(hosts[name])
        pid = next(pid for pid, shown in self.census.now.items() if shown == name)
        self.census.kill([pid])
        what, _, number = name.partition(" ")
        self._note(what, (int(number),) if what == "worker" else ())
        os.kill(pid, signal.SIGKILL)
        return f"kill {name}" + " (a host is cut off)" * self._cut

    def _kill_machine(self, host: Host) -> str:
        there = named(host.processes())
        self.census.take(self.census.now | there)
        self.census.kill(there)
        self._note("machine", workers_on(host))
        assert self._machines is not None
        self._machines.off(host)
        self._at(self._due + AWAY_S, functools.partial(self._bring_back, host))
        return f"kill {host.name} with {', '.join(sorted(there.values()))}"

    def _bring_back(self, host: Host) -> str:
        assert self._machines is not None
        self._machines.on(host)
        return f"{host.name} is back"

    def _note(self, what: str, workers: tuple[int, ...]) -> None:
        self.kills.append(Kill(time.monotonic(), msgspec.convert(what, What), workers, self._cut))


class ByJoin:
    """A run by serve and join."""

    def __init__(self, lab: Lab, site: Site, case: Case, data: Path, seed: int) -> None:
        given = ("--data-dir", os.fspath(data))
        site.serve(*case.options, *given, "--seed", str(seed))
        for number in range(WORKERS):
            site.join("--start", "nursery", "--log-level", "info", *given, host=lab.hosts[1 + number % 2])
        self._joined = site.commands[1:]

    machines: Machines | None = None
    abandoned = 0

    def __enter__(self) -> "ByJoin":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def started(self) -> int:
        """How often a worker was started, but for what a machine's death has ended."""
        return sum(command.said.count("running worker") for command in self._joined)

    def left(self) -> list[str]:
        """What is left of the run before its machines are ended: these have none that outlives it."""
        return []


def run(
    case: Case, minutes: float, seed: int, data: Path, folder: Path, say: Callable[[str], None],
    began_by: Callable[..., Any] = ByJoin,
) -> Found:  # fmt: skip
    """One run on a lab of its own, its chaos, and what came of it."""
    epochs = round(SPARE * 60 * minutes / PAUSE_S * WORKERS * BATCH / SAMPLES, 3)
    with (
        private_temporary(folder) as tag,
        Lab(hosts=3, rate="1gbit") as lab,
        Site(folder, SCRIPT, epochs=epochs, pause=PAUSE_S, lab=lab) as site,
    ):
        with began_by(lab, site, case, data, seed) as way:
            hosts.wait_until(lambda: _alive(site) and any(site.folder.glob("runs/*/checkpoints/v*")))
            began = time.monotonic()
            chaos = Chaos(lab, case, seed, way.machines, lambda: _alive(site), say)
            chaos.rage(minutes)
            over = time.monotonic()
            (folder / "hurry").touch()
            say("the chaos is over")
            codes = [command.end() for command in site.commands]
            left = way.left()
        left += left_behind(lab, tag, chaos.seen)
        journal = foreign_checker.read(site.run / "journal.jsonl")
        report = site.report
        moments = chaos_times.moments(journal)
        kills, census = chaos.kills, chaos.census
        killed = sum(kill.what == "worker" for kill in kills)
        plants = {name: bool(foreign_checker.faults(plant(journal), whole=True)) for name, plant in PLANTS.items()}
        return Found(
            case=case,
            kills=kills,
            workers=chaos_times.worker_deaths(kills, moments),
            servers=chaos_times.server_deaths(kills, moments),
            rolled_back=chaos_times.rollbacks(journal),
            cuts=0 if case.on_ray else int(60 * minutes / CUT_EVERY_S),
            ended=not any(codes),
            accuracy=report["metrics"]["accuracy"],
            versions=report["versions"],
            restarted=max(census.vanished, way.started() - WORKERS - killed),
            missing=census.missing,
            places_lost=len(chaos_times.departures_without_a_kill(kills, moments)),
            faults=foreign_checker.faults(journal, whole=True),
            plants=plants,
            left=left,
            abandoned=way.abandoned,
            silence_s=chaos_times.longest_silence(moments, began, over),
            seconds=report["seconds"],
        )


def _alive(site: Site) -> bool:
    """True; SystemExit if a command of the run has ended before it should."""
    for command in site.commands:
        if command.poll() is not None:
            raise SystemExit(f"{command.log.name} ended with code {command.poll()}:\n{command.said[-4000:]}")
    return True


# -- what is left ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def private_temporary(folder: Path) -> Iterator[str]:
    """Give all processes a temporary folder of their own, and a tag by which they are found; yield the tag."""
    temporary, tag = folder / "tmp", uuid.uuid4().hex
    temporary.mkdir()
    before = {name: os.environ.get(name) for name in ("TMPDIR", leaks.TAG)}
    os.environ |= {"TMPDIR": os.fspath(temporary), leaks.TAG: tag}
    tempfile.tempdir = None
    try:
        yield tag
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = None


def left_behind(lab: Lab, tag: str, seen: Seen) -> list[str]:
    """What all these processes have left: processes, temporary files, shared memory (anonymous one goes with them).

    `seen` were on the hosts: shared memory of others, or of later processes with their numbers, is not theirs.
    """
    complaints: list[str] = []
    until = time.monotonic() + LEAVES_S
    while time.monotonic() < until:
        tagged = leaks.tagged_processes(tag)
        complaints = [f"{host.name}: process {pid} {_title(pid)}" for host in lab.hosts for pid in host.processes()]
        complaints += [f"process {pid}: {command}" for pid, command in tagged.items() if pid != lab.keeper_pid]
        complaints += [f"temporary file {path.name}" for path in Path(os.environ["TMPDIR"]).iterdir()]
        complaints += [f"shared memory {name}" for name in leaks.stale_blocks() if _is_of(seen, name)]
        if not complaints:
            break
        time.sleep(0.1)
    return complaints


def _is_of(seen: Seen, block: str) -> bool:
    """Whether named shared memory was made by one of these processes, or is a folder of some run."""
    named = leaks.OWNED.fullmatch(block)
    if named is None:
        return re.fullmatch(r"paceline-\w{8}", block) is not None
    first, last = seen.get(int(named["owner"]), (math.inf, -math.inf))
    try:
        return first - LOOK_S <= (leaks.SHARED_MEMORY / block).stat().st_mtime <= last + LOOK_S
    except FileNotFoundError:  # it is gone meanwhile
        return False


def _title(pid: int) -> str:
    """What a process shows; empty if it is a zombie or gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


# -- planted faults ----------------------------------------------------------------------------------------------------


def _without(which: Callable[[Line], bool]) -> Callable[[list[Line]], list[Line]]:
    """The journal without the middle one of such lines."""

    def plant(journal: list[Line]) -> list[Line]:
        found = [number for number, line in enumerate(journal) if which(line)]
        middle = found[len(found) // 2] if found else None
        return [line for number, line in enumerate(journal) if number != middle]

    return plant


def _applied_again(journal: list[Line]) -> list[Line]:
    """The journal with one apply made twice."""
    found = [number for number, line in enumerate(journal) if _applies(line)]
    middle = found[len(found) // 2]
    changed = copy.deepcopy(journal[middle])
    apply = next(action for action in changed["actions"] if action["kind"] == "apply")
    changed["actions"].insert(0, apply)
    return [*journal[:middle], changed, *journal[middle + 1 :]]


def _restored_elsewhere(journal: list[Line]) -> list[Line]:
    """The journal with a restored server that claims another checkpoint."""
    found = [number for number, line in enumerate(journal) if line["type"] == "header" and line["restored"]]
    if not found:
        return journal
    changed = copy.deepcopy(journal)
    changed[found[-1]]["restored"]["samples_used"] += BATCH
    return changed


def _applies(line: Line) -> bool:
    return line["type"] == "decision" and any(action["kind"] == "apply" for action in line["actions"])


PLANTS: dict[str, Callable[[list[Line]], list[Line]]] = {
    "what was rolled back is not recorded": _without(lambda line: line.get("what") == "rolled_back"),
    "a push is lost": _without(lambda line: line["type"] == "decision" and line["event"]["kind"] == "pushed"),
    "a push is applied twice": _applied_again,
    "a server goes on from no checkpoint": _restored_elsewhere,
}


# -- results -----------------------------------------------------------------------------------------------------------


def row_of(found: Found) -> dict[str, Any]:
    """One line of the table."""
    alone = [death for death in found.workers if death.kill.what == "worker"]
    others = [death.all_others_s for death in alone if death.all_others_s is not None]
    versions = [death.version_s for death in alone if death.version_s is not None]
    lost = {name: sum(each[name] for each in found.rolled_back) for name in ("versions", "samples")}
    return {
        "run": found.case.name, "seconds": found.seconds, "versions": found.versions, "workers killed": len(alone),
        **_after_servers(found, "server"), **(_after_servers(found, "shard") if found.case.servers > 1 else {}),
        **(_after_machines(found) if found.case.on_ray else {}),
        "cuts": found.cuts, "kills during a cut": sum(kill.during_cut for kill in found.kills),
        "next version: median s": statistics.median(versions) if versions else None,
        "others' pushes: median s": statistics.median(others) if others else None,
        "others' pushes: slowest s": max(others, default=None),
        "longest without a version: s": found.silence_s,
        "versions rolled back": lost["versions"], "samples issued again": lost["samples"],
        "restarted unharmed": found.restarted, "not back": found.missing, "places lost": found.places_lost,
        "accuracy": found.accuracy, "faults in the journal": len(found.faults), "left behind": len(found.left),
    }  # fmt: skip


def _after_servers(found: Found, what: What) -> dict[str, Any]:
    """How long it took from each death of a server, or of a shard, to the next version, if somebody trained."""
    deaths = [death for death in found.servers if death.kill.what == what]
    seconds = [death.version_s for death in deaths if death.version_s is not None and death.workers]
    return {
        f"{what}s killed": len(deaths), f"after a {what}: median s": statistics.median(seconds) if seconds else None,
        f"after a {what}: slowest s": max(seconds, default=None),
    }  # fmt: skip


def _after_machines(found: Found) -> dict[str, Any]:
    deaths = [death for death in found.workers if death.kill.what == "machine"]
    seconds = [death.all_others_s for death in deaths if death.all_others_s is not None]
    return {
        "machines killed": sum(kill.what == "machine" for kill in found.kills),
        "after a machine, others' pushes: median s": statistics.median(seconds) if seconds else None,
        "its folders left": found.abandoned,
    }  # fmt: skip


def judge(every: list[Found]) -> list[Bar]:
    """What must hold of every run."""
    verdicts = []
    for found in every:
        where, row = found.case.name, row_of(found)
        unseen = [death for death in found.workers if death.all_others_s is None and death.others]
        verdicts += [
            Bar(f"target: {where}", found.accuracy if found.ended else None, TARGET, True,
                "accuracy at the end, every command having ended well", "a command failed"),
            Bar(f"goes on: {where}", None if unseen else row["others' pushes: median s"], GOES_ON_S, False,
                "median s from a worker's death until every other worker has pushed",
                f"after {len(unseen)} deaths they did not" if unseen else "none was killed"),
            Bar(f"unharmed: {where}", found.restarted, 0, False,
                "processes that ended or were started again although nobody killed them"),
            Bar(f"back: {where}", found.missing, 0, False,
                f"workers that were not back {BACK_S if found.case.on_ray else KILL_EVERY_S:g} s after the last kill"),
            Bar(f"places: {where}", found.places_lost, 0, False, "workers that lost their place without being killed"),
            *(_served_again(found, what) for what in (SERVERS if found.case.servers > 1 else SERVERS[:1])),
            *([] if not found.case.on_ray else [
                Bar(f"machine: {where}", row["after a machine, others' pushes: median s"],
                    SERVES_S if found.case.remote_shards else GOES_ON_S, False,
                    "median s from a machine's death until every worker elsewhere has pushed", "none was killed")]),
            Bar(f"journal: {where}", len(found.faults), 0, False,
                "faults in the journal: among them samples that are not settled once, and untold rollbacks"),
            Bar(f"plants: {where}", sum(found.plants.values()), len(PLANTS), True,
                "faults planted in copies of the journal that were found"),
            Bar(f"left: {where}", len(found.left), 0, False, "processes, temporary files, shared memory left behind"),
        ]  # fmt: skip
    return verdicts


def _served_again(found: Found, what: What) -> Bar:
    silent = [death for death in found.servers if death.kill.what == what and death.version_s is None and death.workers]
    why = f"after {len(silent)} deaths there was none" if silent else "it was never killed while somebody trained"
    slowest = None if silent else row_of(found)[f"after a {what}: slowest s"]
    meaning = f"longest s from the death of the server{chr(39)}s process to the next version"
    if what == "shard":
        meaning = "longest s from a shard's death to the next version"
    return Bar(f"{what}: {found.case.name}", slowest, SERVES_S, False, meaning, why)


HOW = f"""
{WORKERS} workers on two hosts of a lab with cables of 1 Gbit/s and the server on a third, by `paceline serve` and
`paceline join`, encrypted, with `--respawn --checkpoint-every {CHECKPOINTS}`. MNIST, batch {BATCH}, a pause of
{1000 * PAUSE_S:g} ms in each batch until the chaos is over. Every {KILL_EVERY_S:g} s SIGKILL to one of the seven
processes, and in every minute {CUT_S:g} s without the cable of one of the joined hosts, both drawn from a seed.
Kills and cuts are not kept apart: a worker that dies while a host is cut off counts, too.
"""


def notes(how: str, every: Sequence[Found], load: Sequence[float], seed: int) -> str:
    """What was done and how it was measured."""
    told = "".join(f"\n- {found.case.name}: {fault}" for found in every for fault in (*found.faults[:5], *found.left))
    restarts = "".join(
        f"\n| {found.case.name} | {number} | {each['versions']} | {each['pushes']} | {each['samples']} |"
        for found in every
        for number, each in enumerate(found.rolled_back, 1)
    )
    return f"""{how}
The first run has seed {seed}, the others the next ones. "Others' pushes" is from the kill until every other worker has
pushed again after the server went on without the dead one; a push takes {PAUSE_S:g} s at least. "After a server" is
from the kill to the first version after it, where some worker was training. Moments of the journal are put on this
machine's monotonic clock by what workers report of theirs (all hosts of a lab share it), which is good to some
milliseconds. "Places lost" are departures of workers that nobody killed. "Left behind" is looked for before the lab is
taken down: processes in the hosts' namespaces or with this run's environment anywhere, files in the temporary folder
that was all theirs, named shared memory of processes that are gone and were seen on the hosts. The machine's load was
{load[0]:.1f} before and {load[1]:.1f} after.

What each start of a server rolled back, by the journal's `rolled_back`; these samples were issued again, which the
checker counts.

| run | restart | versions | pushes | samples |
|---|---|---|---|---|{restarts}
{"" if not told else chr(10) + "Found:" + chr(10) + told}
"""


@contextlib.contextmanager
def plain_data(data: Path) -> Iterator[Path]:
    """MNIST's files, decompressed once instead of by each process that is started."""
    with tempfile.TemporaryDirectory(prefix="lab-chaos-data-") as folder:
        for path in data.glob("*-ubyte*"):
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            (Path(folder) / path.name.removesuffix(".gz")).write_bytes(content)
        yield Path(folder)


def main(arguments: list[str] | None = None) -> None:
    """Make the runs, print, and write the result."""
    measure(arguments, "lab_chaos", CASES, HOW)


def measure(
    arguments: list[str] | None, question: str, cases: Sequence[Case], how: str,
    began_by: Callable[[Case], Callable[..., Any]] = lambda _: ByJoin, packages: tuple[str, ...] = ("pyzmq",),
    on_demand: Sequence[Case] = (),
) -> None:  # fmt: skip
    """Make the runs of these cases and write the page of this question; `began_by` returns how one is begun.

    Those `on_demand` are made if they are named, and are not on the page.
    """
    parser = bars.parser("runs on three hosts whose processes are killed and whose cables are cut")
    parser.add_argument("--only", action="append", metavar="RUN", help="this one alone; may be repeated")
    parser.add_argument("--minutes", type=float, help=f"of chaos, instead of {MINUTES:g}; writes nothing")
    parser.add_argument("--seed", type=int, default=0, help="of kills, cuts and the run")
    parser.add_argument("--data-dir", type=Path, default=DATA, help="MNIST's four files")
    parser.add_argument("--keep", type=Path, help="leave the runs' folders in this one")
    given = parser.parse_args(arguments)
    if given.repeats not in (None, 1):
        parser.error(f"--repeats must be 1, not {given.repeats}: each run has dozens of kills")
    if given.minutes is not None and given.minutes < 1:
        parser.error(f"--minutes must be >= 1, not {given.minutes:g}: there is one cut in each")
    known = {case.name: case for case in (*cases, *on_demand)}
    unknown = {*(given.only or ())} - known.keys()
    if unknown:
        parser.error(f"--only must be of {'; '.join(known)}; not {'; '.join(sorted(unknown))}")
    chosen = [known[name] for name in given.only] if given.only else cases[: 1 if given.quick else None]
    given.only = given.only or given.minutes  # a part of the benchmark
    reason = netlab.why_not()
    if reason is None and not given.data_dir.is_dir():
        reason = f"there is no MNIST in {given.data_dir}"
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return
    options = bars.asked(given, 1)
    if options.of is not None:  # the lab and the commands' helper are measured too
        sources.checked(given, measured=(*sources.MEASURED, "tests/netlab", "tests/support"))
    hosts.PATIENCE_S = PATIENCE_S
    load, every = [os.getloadavg()[0]], []
    with contextlib.ExitStack() as stack:
        stack.enter_context(warm_python.kept())
        data = stack.enter_context(plain_data(given.data_dir))
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-chaos-")))
        for number, case in enumerate(chosen):
            own = folder / f"{number}-{case.name.replace(', ', '-')}"
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir(parents=True)
            minutes, say = given.minutes or (1.0 if given.quick else MINUTES), _silent if options.json else _say
            found = run(case, minutes, given.seed + number, data, own, say, began_by(case))
            every.append(found)
            (own / "found.json").write_bytes(msgspec.json.format(msgspec.json.encode(found)))
            if not options.json:
                print(json.dumps(row_of(found)), *found.faults[:20], *found.left, sep="\n", flush=True)
    load.append(os.getloadavg()[0])
    told = notes(how, every, load, given.seed)
    bars.tell(question, options, judge(every), [row_of(found) for found in every], told, packages)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    del text


if __name__ == "__main__":
    main()
