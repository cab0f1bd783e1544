"""Does a run by serve and join go on while its processes are killed and its cables are cut?

    python benchmarks/bench_lab_chaos.py                          # 22 minutes, one core; needs root and MNIST
    python benchmarks/bench_lab_chaos.py --strategy bsp --minutes 2 --keep /tmp/chaos   # one short run; writes nothing
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
import gzip
import json
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from chaos_times import Kill, Line, ServerDeath, WorkerDeath
from contenders import bars
from contenders.bars import Bar
from netlab import Lab

DATA = Path(__file__).parents[2] / "shared" / "data" / "mnist"
STRATEGIES = ("bsp", "ssp:staleness=3")
WORKERS = 6
BATCH = 16
SAMPLES = 60_000
PAUSE_S = 0.1  # of each batch, while there is chaos
SPARE = 1.05  # epochs beyond those that fit into the chaos if nothing is disturbed
MINUTES = 10.0
KILL_EVERY_S = 10.0
CUT_EVERY_S = 60.0
CUT_S = 5.0
TARGET = 0.95  # accuracy on the test images
GOES_ON_S = 2.0
SERVES_S = 15.0
CHECKPOINTS = "7s"  # which has no common measure with the kills: servers die at every distance from a checkpoint
PATIENCE_S = 240.0  # for the start, and for the end after the chaos
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


class Found(msgspec.Struct, frozen=True):
    """What came out of one run."""

    strategy: str
    kills: list[Kill]
    workers: list[WorkerDeath]
    servers: list[ServerDeath]
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
    silence_s: float  # the longest time without a version during the chaos
    seconds: float


# -- the chaos ---------------------------------------------------------------------------------------------------------


def living(lab: Lab) -> dict[int, str]:
    """The run's worker and server processes on all hosts, by number, with the names that they show."""
    found = {}
    for pid in set().union(*(host.processes() for host in lab.hosts)):
        with contextlib.suppress(OSError):
            shown = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0\1").decode(errors="replace")
            if re.fullmatch(r"paceline: (server|worker \d+)", shown):
                found[pid] = shown.removeprefix("paceline: ")
    return found


def victim(draw: random.Random, alive: dict[int, str]) -> tuple[int, str]:
    """Draw one of the seven processes; one that is being started is not there, then any other."""
    name = draw.choice(["server", *(f"worker {number}" for number in range(WORKERS))])
    pids = [pid for pid, shown in sorted(alive.items()) if shown == name] or sorted(alive)
    pid = pids[0] if len(pids) == 1 else draw.choice(pids)
    return pid, alive[pid]


class Census:
    """Which of the run's processes there are, from one kill to the next."""

    def __init__(self) -> None:
        self.now: dict[int, str] = {}
        self.vanished = 0  # processes that are gone and that nobody killed
        self._killed: set[int] = set()

    def take(self, alive: dict[int, str]) -> None:
        """Look at those that are alive."""
        self.vanished += len(self.now.keys() - alive.keys() - self._killed)
        self.now = alive

    def kill(self, pid: int) -> None:
        """Note that this one is killed."""
        self._killed.add(pid)

    @property
    def missing(self) -> int:
        """How many of the workers there were not when it was last taken."""
        return WORKERS - sum(name != "server" for name in self.now.values())


def rage(
    lab: Lab, minutes: float, seed: int, census: Census, alive: Callable[[], bool], say: Callable[[str], None]
) -> list[Kill]:
    """Kill and cut for so long, and wait as long as between two kills; return the kills."""
    draw = random.Random(seed)
    began = time.monotonic()
    dues = [(KILL_EVERY_S * number, "kill", None) for number in range(1, int(60 * minutes / KILL_EVERY_S) + 1)]
    for number in range(int(60 * minutes / CUT_EVERY_S)):
        at, host = CUT_EVERY_S * number + draw.uniform(0, CUT_EVERY_S - CUT_S), draw.choice(lab.hosts[1:])
        dues += [(at, "cut", host), (at + CUT_S, "heal", host)]
    kills, cut = [], False
    for due, what, host in sorted(dues, key=lambda each: each[0]):
        while (left := began + due - time.monotonic()) > 0:
            alive()
            time.sleep(min(left, 0.5))
        if host is not None:
            cut = what == "cut"
            host.cut() if cut else host.heal()
            say(f"{due:6.1f} s: {what} {host.name}")
            continue
        census.take(living(lab))
        pid, name = victim(draw, census.now)
        census.kill(pid)
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        server = name == "server"
        kills.append(Kill(at, "server" if server else "worker", -1 if server else int(name.split()[1]), cut))
        say(f"{due:6.1f} s: kill {name}" + " (a host is cut off)" * cut)
    time.sleep(KILL_EVERY_S)
    census.take(living(lab))
    return kills


def run(strategy: str, minutes: float, seed: int, data: Path, folder: Path, say: Callable[[str], None]) -> Found:
    """One run on a lab of its own, its chaos, and what came of it."""
    epochs = round(SPARE * 60 * minutes / PAUSE_S * WORKERS * BATCH / SAMPLES, 3)
    with (
        private_temporary(folder) as tag,
        Lab(hosts=3, rate="1gbit") as lab,
        Site(folder, SCRIPT, epochs=epochs, pause=PAUSE_S, lab=lab) as site,
    ):
        options = (
            "--workers", str(WORKERS), "--strategy", strategy, "--checkpoint-every", CHECKPOINTS, "--respawn",
            "--evaluate-every", "1e", "--start", "nursery", "--data-dir", os.fspath(data), "--seed", str(seed),
        )  # fmt: skip
        site.serve(*options)
        for number in range(WORKERS):
            own = ("--start", "nursery", "--log-level", "info", "--data-dir", os.fspath(data))
            site.join(*own, host=lab.hosts[1 + number % 2])
        hosts.wait_until(lambda: _alive(site) and any(site.folder.glob("runs/*/checkpoints/v*")))
        began = time.monotonic()
        census = Census()
        kills = rage(lab, minutes, seed, census, lambda: _alive(site), say)
        over = time.monotonic()
        (folder / "hurry").touch()
        say("the chaos is over")
        codes = [command.end() for command in site.commands]
        left = left_behind(lab, tag)
        journal = foreign_checker.read(site.run / "journal.jsonl")
        report = site.report
        moments = chaos_times.moments(journal)
        started = sum(command.said.count("running worker") for command in site.commands[1:])
        killed = sum(kill.what == "worker" for kill in kills)
        plants = {name: bool(foreign_checker.faults(plant(journal), whole=True)) for name, plant in PLANTS.items()}
        return Found(
            strategy=strategy,
            kills=kills,
            workers=chaos_times.worker_deaths(kills, moments),
            servers=chaos_times.server_deaths(kills, moments),
            rolled_back=chaos_times.rollbacks(journal),
            cuts=int(60 * minutes / CUT_EVERY_S),
            ended=not any(codes),
            accuracy=report["metrics"]["accuracy"],
            versions=report["versions"],
            restarted=max(census.vanished, started - WORKERS - killed),
            missing=census.missing,
            places_lost=len(chaos_times.departures_without_a_kill(kills, moments)),
            faults=foreign_checker.faults(journal, whole=True),
            plants=plants,
            left=left,
            silence_s=chaos_times.longest_silence(moments, began, over),
            seconds=report["seconds"],
        )


def _alive(site: Site) -> bool:
    """True; SystemExit if a command of the run has ended before it should."""
    for command in site.commands:
        if command.poll() is not None:
            raise SystemExit(f"{command.log.name} ended with code {command.code}:\n{command.said[-4000:]}")
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


def left_behind(lab: Lab, tag: str) -> list[str]:
    """What all these processes have left: processes, temporary files, shared memory (anonymous one goes with them)."""
    complaints: list[str] = []
    until = time.monotonic() + 10.0
    while time.monotonic() < until:
        tagged = leaks.tagged_processes(tag)
        complaints = [f"{host.name}: process {pid}" for host in lab.hosts for pid in host.processes()]
        complaints += [f"process {pid}: {command}" for pid, command in tagged.items() if pid != lab.keeper_pid]
        complaints += [f"temporary file {path.name}" for path in Path(os.environ["TMPDIR"]).iterdir()]
        complaints += [f"shared memory {name}" for name in leaks.stale_blocks()]
        if not complaints:
            break
        time.sleep(0.1)
    return complaints


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
    others = [death.all_others_s for death in found.workers if death.all_others_s is not None]
    versions = [death.version_s for death in found.workers if death.version_s is not None]
    servers = [death.version_s for death in found.servers if death.version_s is not None]
    lost = {name: sum(each[name] for each in found.rolled_back) for name in ("versions", "samples")}
    return {
        "strategy": found.strategy, "seconds": found.seconds, "versions": found.versions,
        "workers killed": len(found.workers), "servers killed": len(found.servers), "cuts": found.cuts,
        "kills during a cut": sum(kill.during_cut for kill in found.kills),
        "next version: median s": statistics.median(versions) if versions else None,
        "others' pushes: median s": statistics.median(others) if others else None,
        "others' pushes: slowest s": max(others, default=None),
        "new server: median s": statistics.median(servers) if servers else None,
        "new server: slowest s": max(servers, default=None),
        "longest without a version: s": found.silence_s,
        "versions rolled back": lost["versions"], "samples issued again": lost["samples"],
        "restarted unharmed": found.restarted, "not back": found.missing, "places lost": found.places_lost,
        "accuracy": found.accuracy, "faults in the journal": len(found.faults), "left behind": len(found.left),
    }  # fmt: skip


def judge(every: list[Found]) -> list[Bar]:
    """What must hold of every run."""
    verdicts = []
    for found in every:
        where, row = found.strategy.partition(":")[0], row_of(found)
        unseen = [death for death in found.workers if death.all_others_s is None]
        silent = [death for death in found.servers if death.version_s is None]
        verdicts += [
            Bar(f"target: {where}", found.accuracy if found.ended else None, TARGET, True,
                "accuracy at the end, every command having ended well", "a command failed"),
            Bar(f"goes on: {where}", None if unseen else row["others' pushes: median s"], GOES_ON_S, False,
                "median s from a worker's death until every other worker has pushed",
                f"after {len(unseen)} deaths they did not" if unseen else "none was killed"),
            Bar(f"unharmed: {where}", found.restarted, 0, False,
                "processes that ended or were started again although nobody killed them"),
            Bar(f"back: {where}", found.missing, 0, False, "workers that were not back 10 s after the last kill"),
            Bar(f"places: {where}", found.places_lost, 0, False, "workers that lost their place without being killed"),
            Bar(f"server: {where}", None if silent else row["new server: slowest s"], SERVES_S, False,
                "longest s from the server's death to the next version",
                f"after {len(silent)} deaths there was none" if silent else "it was never killed"),
            Bar(f"journal: {where}", len(found.faults), 0, False,
                "faults in the journal: among them samples that are not settled once, and untold rollbacks"),
            Bar(f"plants: {where}", sum(found.plants.values()), len(PLANTS), True,
                "faults planted in copies of the journal that were found"),
            Bar(f"left: {where}", len(found.left), 0, False, "processes, temporary files, shared memory left behind"),
        ]  # fmt: skip
    return verdicts


def notes(every: list[Found], load: list[float], seed: int) -> str:
    """What was done and how it was measured."""
    told = "".join(f"\n- {found.strategy}: {fault}" for found in every for fault in (*found.faults[:5], *found.left))
    restarts = "".join(
        f"\n| {found.strategy} | {number} | {each['versions']} | {each['pushes']} | {each['samples']} |"
        for found in every
        for number, each in enumerate(found.rolled_back, 1)
    )
    return f"""
{WORKERS} workers on two hosts of a lab with cables of 1 Gbit/s and the server on a third, by `paceline serve` and
`paceline join`, encrypted, with `--respawn --checkpoint-every {CHECKPOINTS}`. MNIST, batch {BATCH}, a pause of
{1000 * PAUSE_S:g} ms in each batch until the chaos is over. Every {KILL_EVERY_S:g} s SIGKILL to one of the seven
processes, and in every minute {CUT_S:g} s without the cable of one of the joined hosts, both drawn from seed {seed} and
the next ones. Kills and cuts are not kept apart: a worker that dies while a host is cut off counts, too.

"Others' pushes" is from the kill until every other worker has pushed again after the server went on without the dead
one; a push takes {PAUSE_S:g} s at least. "New server" is from the kill to the first version after it. Moments of the
journal are put on this machine's monotonic clock by what workers report of theirs (all hosts of a lab share it), which
is good to some milliseconds. "Places lost" are departures of workers that nobody killed. "Left behind" is looked for
before the lab is taken down: processes in the hosts' namespaces or with this run's environment anywhere, files in the
temporary folder that was all theirs, named shared memory of processes that are gone. The machine's load was
{load[0]:.1f} before and {load[1]:.1f} after.

What each start of a server rolled back, by the journal's `rolled_back`; these samples were issued again, which the
checker counts.

| strategy | restart | versions | pushes | samples |
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
    parser = bars.parser("runs on three hosts whose processes are killed and whose cables are cut")
    parser.add_argument("--strategy", action="append", dest="only", help="this one alone; may be repeated")
    parser.add_argument("--minutes", type=float, help=f"of chaos, instead of {MINUTES:g}; writes nothing")
    parser.add_argument("--seed", type=int, default=0, help="of kills, cuts and the run")
    parser.add_argument("--data-dir", type=Path, default=DATA, help="MNIST's four files")
    parser.add_argument("--keep", type=Path, help="leave the runs' folders in this one")
    given = parser.parse_args(arguments)
    if given.repeats not in (None, 1):
        parser.error(f"--repeats must be 1, not {given.repeats}: each run has dozens of kills")
    if given.minutes is not None and given.minutes < 1:
        parser.error(f"--minutes must be >= 1, not {given.minutes:g}: there is one cut in each")
    strategies = tuple(given.only or (STRATEGIES[:1] if given.quick else STRATEGIES))
    given.only = given.only or given.minutes  # a part of the benchmark
    minutes = given.minutes or (1.0 if given.quick else MINUTES)
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
        for number, strategy in enumerate(strategies):
            own = folder / f"{number}-{strategy.partition(':')[0]}"
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir(parents=True)
            found = run(strategy, minutes, given.seed + number, data, own, _silent if options.json else _say)
            every.append(found)
            (own / "found.json").write_bytes(msgspec.json.format(msgspec.json.encode(found)))
            if not options.json:
                print(json.dumps(row_of(found)), *found.faults[:20], *found.left, sep="\n", flush=True)
    load.append(os.getloadavg()[0])
    told = notes(every, load, given.seed)
    bars.tell("lab_chaos", options, judge(every), [row_of(found) for found in every], told, ("pyzmq",))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    del text


if __name__ == "__main__":
    main()
