"""Labs on which contenders race: three hosts with fixed shares of one processor, the last with a co-tenant.

Processes start outside their host's share, as importing torch would take a minute of it. When all ranks are ready, they
are moved into it, the co-tenant starts, and the race begins. Evaluations take place outside the shares on every side:
in paceline's own evaluator, or in this process, which reads what a rival's first rank shows. Both stamp a model with
the time at which it was taken, so what an evaluation lasts delays nobody.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import warm_python
from hosts import Command
from ray_clusters import RayCluster

from contenders import isolation, lab_mnist
from contenders.lab_mnist import LabRace
from netlab import Lab
from paceline.engines.hosts import tokens

HOSTS = 3
SLOW = 2  # the host with the co-tenant
TENANTS = 3  # its processes: with a rank's one, the rank gets a quarter
SHARE = 0.25  # of a processor, per host
WEIGHT = 100  # times that of programs outside: a host gets its share whatever else this machine does
RATE = "1gbit"
BATCH = 128  # samples of a step of each host
EVERY = 4 * HOSTS * BATCH  # samples between evaluations
TARGET = 0.9  # held-out accuracy
START_S = 120.0
START_NICE = -15  # until the first batch, when all programs get the same priority: starts are not timed
END_S = 60.0
LOOK_S = 0.01
PATIENCE_S = 1.0  # between two looks whether the parent lives
EVALUATOR = b"paceline: evaluator"
FIRST_PORT = 20_000  # every race of a lab has its own: the kernel keeps those of the last one for a while
CONTENDERS = Path(__file__).parent / "contenders"


class Outcome(msgspec.Struct, frozen=True):
    """Seconds from the first batch to the target, None if it was not reached in time."""

    reached_s: float | None
    samples: int | None  # used by then
    full_share: float  # part of the race in which the slow host used up its share of the processor: 1 unless disturbed
    ready_s: float  # from start to the first batch, the wait for the lab's turn included


class Ask(msgspec.Struct, frozen=True):
    """One race: who, how, and for how long."""

    kind: str  # one of STARTERS
    lr: float
    momentum: float
    seed: int
    sizes: tuple[int, ...]
    options: dict[str, Any]
    limit_s: float


# -- sides -----------------------------------------------------------------------------------------------------------


class Grid:
    """A race's hosts, and what was started on them."""

    def __init__(self, lab: Lab, folder: Path, python: Path, port: int, limit_s: float) -> None:
        self.lab, self.folder, self.python, self.port, self.limit_s = lab, folder, python, port, limit_s
        self.started: list[Any] = []  # whatever has `poll`

    def environment(self, **more: str) -> dict[str, str]:
        """Of a rival: one thread, the lab's network, this tree's contenders."""
        own = isolation._environment(1, self.folder)
        return {**own, "GLOO_SOCKET_IFNAME": "eth0", "PYTHONDONTWRITEBYTECODE": "", **more}

    def start(self, host: int, *words: str | os.PathLike[str], **more: str) -> None:
        """Start a rival's program on a host."""
        with (self.folder / f"{len(self.started)}.log").open("wb") as log:
            process = self.lab.hosts[host].popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder,
                env=self.environment(**more),
            )  # fmt: skip
        self.started.append(process)

    def torchrun(self, host: int, script: str, *how: str, **more: str) -> None:
        """Start one rank by torchrun."""
        given = ("-m", "torch.distributed.run", "--nproc-per-node", "1", *how)
        self.start(host, self.python, *given, CONTENDERS / script, self.folder, **more)

    def paceline(self, host: int, name: str, *words: str | os.PathLike[str]) -> None:
        """Start a command of paceline on a host, on this tree's sources."""
        path = {"PYTHONPATH": self.environment()["PYTHONPATH"]}
        given = (name, "--threads", "1", "--token-file", self.folder / "token")
        script = (CONTENDERS / "rival_paceline.py", self.folder)
        command = Command(f"{name}{host}", self.folder, *given, *words, *script,
                          host=self.lab.hosts[host], environment=path)  # fmt: skip
        self.started.append(command)

    def require_alive(self) -> None:
        """RuntimeError, with the logs, if a program has ended with an error."""
        for process in self.started:
            if process.poll():
                said = "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"a program ended with exit code {process.poll()}:\n{said}")


def _ddp(grid: Grid, task: LabRace, stack: contextlib.ExitStack) -> None:
    meeting = ("--master-addr", grid.lab.hosts[0].address, "--master-port", str(grid.port))
    for host in range(HOSTS):
        grid.torchrun(host, "rival_ddp.py", "--nnodes", str(HOSTS), "--node-rank", str(host), *meeting)


def _torchft(grid: Grid, task: LabRace, stack: contextlib.ExitStack) -> None:
    listen = f"{grid.lab.hosts[0].address}:{grid.port}"
    replicas = ("--min_replicas", str(HOSTS), "--join_timeout_ms", "10000", "--quorum_tick_ms", "100")
    grid.start(0, grid.python.parent / "torchft_lighthouse", *replicas, "--bind", listen)
    for host in range(HOSTS):
        address = grid.lab.hosts[host].address
        named = {"TORCHFT_LIGHTHOUSE": f"http://{listen}", "REPLICA_GROUP_ID": str(host), "OWN_ADDRESS": address}
        meeting = ("--master-addr", address, "--master-port", str(grid.port + 1))
        grid.torchrun(host, "rival_torchft.py", *meeting, **named, NUM_REPLICA_GROUPS=str(HOSTS))


def _hivemind(grid: Grid, task: LabRace, stack: contextlib.ExitStack) -> None:
    for host in range(HOSTS):
        address = grid.lab.hosts[host].address
        grid.start(host, grid.python, CONTENDERS / "rival_hivemind.py", grid.folder, str(host), address)


def _ray_train(grid: Grid, task: LabRace, stack: contextlib.ExitStack) -> None:
    # By default Ray's workers are nicer than others, by 15: beside the co-tenant they would get next to nothing.
    own = grid.environment(RAY_worker_niceness="0")
    cluster = RayCluster(cpus=2, lab=grid.lab, python=grid.python, environment=own)
    stack.enter_context(cluster)
    for _ in range(1, HOSTS):
        cluster.add(cpus=1).wait()
    grid.start(0, grid.python, CONTENDERS / "rival_ray_train.py", grid.folder, cluster.address, **cluster.environment)


def _paceline(grid: Grid, task: LabRace, stack: contextlib.ExitStack) -> None:
    tokens.write_new(grid.folder / "token")
    listen = f"{grid.lab.hosts[0].address}:{grid.port}"
    grid.paceline(
        0, "serve", "--listen", listen, "--workers", str(HOSTS), "--strategy", task.options["strategy"], "--seed",
        str(task.seed), "--target", f"accuracy>={TARGET}", "--evaluate-every",
        f"{task.every / lab_mnist.TRAIN_SAMPLES:.6f}e", "--max-seconds", f"{grid.limit_s:g}",
    )  # fmt: skip
    for host in range(HOSTS):
        grid.paceline(host, "join", listen)


def _probe(grid: Grid, task: LabRace, stack: contextlib.ExitStack) -> None:
    for host in range(HOSTS):
        words = ("-m", "contenders.lab_mnist", grid.folder, str(host), f"{grid.limit_s:g}")
        grid.start(host, grid.python, *words)


STARTERS: dict[str, Callable[[Grid, LabRace, contextlib.ExitStack], None]] = {
    "paceline": _paceline, "ddp": _ddp, "ray_train": _ray_train, "hivemind": _hivemind, "torchft": _torchft,
}  # fmt: skip


# -- one race --------------------------------------------------------------------------------------------------------


class RaceLab:
    """A lab whose hosts have shares of one processor. Labs on the same processor start at will and race by turns."""

    def __init__(self, lab: Lab, data: Path, python: Path, core: int, turn: Any) -> None:
        self._lab, self._data, self._python, self._core, self._turn = lab, data, python, core, turn
        self._races = 0
        # Programs shall start outside their host's share, and be moved into it later.
        self._groups = [Path(held["group"]) for held in lab.held]
        for held, group in zip(lab.held, self._groups, strict=True):
            held["group"] = ""
            name, usual = ("cpu.weight", 100) if (group / "cpu.weight").exists() else ("cpu.shares", 1024)
            (group / name).write_text(str(WEIGHT * usual))
        self._model = lab_mnist.build(0)
        self._held_out = lab_mnist.load(os.fspath(data), "held_out")

    def race(self, ask: Ask) -> Outcome:
        """From the start of the processes to the target or the limit; nothing is left."""
        began = time.monotonic()
        with self._running(ask.kind, STARTERS[ask.kind], ask) as grid:
            ready_s, before = time.monotonic() - began, self._periods()
            self._go(grid.folder)
            judge = self._of_paceline if ask.kind == "paceline" else self._of_a_rival
            reached, samples = judge(grid)
            periods, full = (after - past for after, past in zip(self._periods(), before, strict=True))
        return Outcome(reached, samples, full / max(1, periods), ready_s)

    def speeds(self, seconds: float) -> list[float]:
        """Steps per second of each host while all compute, the co-tenant at work."""
        ask = Ask("probe", 0.0, 0.0, 0, (BATCH,) * HOSTS, {}, seconds)
        with self._running("probe", _probe, ask) as grid:
            self._go(grid.folder)
            files = [grid.folder / f"steps-{host}" for host in range(HOSTS)]
            _until(lambda: all(file.exists() for file in files), seconds + START_S, grid)
            return [int(file.read_text()) / seconds for file in files]

    @contextlib.contextmanager
    def _running(self, name: str, start: Any, ask: Ask) -> Iterator[Grid]:
        """The side's processes, ready and in their hosts' shares, beside a co-tenant."""
        self._races += 1
        port = FIRST_PORT + 10 * self._races
        with tempfile.TemporaryDirectory(prefix="race-") as path, contextlib.ExitStack() as stack:
            folder = Path(path)
            task = LabRace(
                os.fspath(self._data), ask.lr, ask.momentum, ask.seed, list(ask.sizes), EVERY, port, ask.options
            )
            (folder / "task.json").write_text(json.dumps(dataclasses.asdict(task)))
            grid = Grid(self._lab, folder, self._python, port, ask.limit_s)
            stack.callback(self._clear)
            start(grid, task, stack)
            _until(lambda: all((folder / f"ready-{rank}").exists() for rank in range(HOSTS)), START_S, grid)
            stack.enter_context(self._turn)
            stack.callback(self._clear)
            self._admit()
            self._start_tenants(folder, grid)
            yield grid

    def _admit(self) -> None:
        """Move all programs but paceline's evaluator into their hosts' shares, on the lab's processor, all alike."""
        for host, group in zip(self._lab.hosts, self._groups, strict=True):
            for pid in host.processes():
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
                    if EVALUATOR not in Path(f"/proc/{pid}/cmdline").read_bytes():
                        (group / "cgroup.procs").write_text(str(pid))
                        for thread in Path(f"/proc/{pid}/task").iterdir():
                            os.sched_setaffinity(int(thread.name), {self._core})
                            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)

    def _start_tenants(self, folder: Path, grid: Grid) -> None:
        host, files = self._lab.hosts[SLOW], [folder / f"tenant-{number}" for number in range(TENANTS)]
        for file in files:
            host.popen([sys.executable, "-I", "-S", CONTENDERS / "co_tenant.py", file])
        _until(lambda: all(file.exists() for file in files), START_S, grid)
        self._admit()

    def _go(self, folder: Path) -> None:
        (folder / lab_mnist.GO).touch()

    def _periods(self) -> tuple[int, int]:
        """Periods of the slow host's share so far, and those in which it was used up."""
        told = dict(line.split() for line in (self._groups[SLOW] / "cpu.stat").read_text().splitlines())
        return int(told["nr_periods"]), int(told["nr_throttled"])

    def _of_a_rival(self, grid: Grid) -> tuple[float | None, int | None]:
        """Evaluate what the first rank shows, until the target or the limit."""
        began = [grid.folder / f"began-{rank}" for rank in range(HOSTS)]
        _until(lambda: all(file.exists() for file in began), START_S, grid)
        origin = lab_mnist.began_at(grid.folder, HOSTS)
        while True:
            over = time.monotonic() - origin > grid.limit_s
            for snapshot in sorted(grid.folder.glob("snapshot-*")):
                at, samples = lab_mnist.restore(snapshot, self._model)
                snapshot.unlink()
                if lab_mnist.accuracy(self._model, self._held_out) >= TARGET:
                    return at - origin, samples
            if over:
                return None, None
            grid.require_alive()
            time.sleep(LOOK_S)

    def _of_paceline(self, grid: Grid) -> tuple[float | None, int | None]:
        """Wait for the end of the run, and take what its report says; its clock starts before the first batch."""
        _until(lambda: grid.started[0].poll() is not None, grid.limit_s + END_S, grid)
        grid.require_alive()
        (path,) = (grid.folder / "runs").glob("*/report.json")
        target, report = json.loads(path.read_text())["target"], json.loads(path.read_text())
        reached = target["reached_at_seconds"]
        return reached, None if reached is None else report["samples_used"]

    def _clear(self) -> None:
        """End everything on the hosts."""
        for host in self._lab.hosts:
            host.kill()
        for process in self._lab.started:
            process.wait()
        self._lab.started.clear()


def _until(happened: Callable[[], bool], patience_s: float, grid: Grid) -> None:
    until = time.monotonic() + patience_s
    while not happened():
        grid.require_alive()
        if time.monotonic() > until:
            raise RuntimeError(f"nothing happened in {patience_s:g} s: {sorted(os.listdir(grid.folder))}")  # noqa: PTH208
        time.sleep(LOOK_S)


# -- several labs at once --------------------------------------------------------------------------------------------


class Lanes:
    """Labs on processors of their own, each in a process; races are taken by whichever is free."""

    def __init__(self, cores: Sequence[int], labs: int, data: Path, python: Path, probe_s: float) -> None:
        """`labs` per core: while one of them races the others start."""
        context = multiprocessing.get_context("spawn")
        self._asks, self._answers = context.Queue(), context.Queue()
        given = (data, python, probe_s, len(cores) == 1, self._asks, self._answers)
        turns = self._turns = [(core, context.Lock()) for core in cores]  # kept: a lock goes with its last owner
        self._processes = [context.Process(target=_lane, args=(*turn, *given)) for turn in turns for _ in range(labs)]
        self._waiting: dict[int, Future[Outcome]] = {}
        self._lock = threading.Lock()
        self._count = 0
        self.speeds: list[list[float]] = []

    def __enter__(self) -> "Lanes":
        for process in self._processes:
            process.start()
        threading.Thread(target=self._collect, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for _process in self._processes:
            self._asks.put(None)
        for process in self._processes:
            process.join()

    def race(self, ask: Ask) -> Outcome:
        """Race on a lab that is free; RuntimeError if the side failed."""
        with self._lock:
            self._count += 1
            number, found = self._count, Future[Outcome]()
            self._waiting[number] = found
        self._asks.put((number, ask))
        while True:
            with contextlib.suppress(TimeoutError):
                return found.result(PATIENCE_S)
            if any(process.exitcode for process in self._processes):
                raise SystemExit("a lab's process has ended; what it said is above")

    def _collect(self) -> None:
        while True:
            number, answer = self._answers.get()
            if number is None:
                self.speeds.append(answer)
                continue
            with self._lock:
                found = self._waiting.pop(number)
            if isinstance(answer, Outcome):
                found.set_result(answer)
            else:
                found.set_exception(RuntimeError(answer))


def _lane(
    core: int, turn: Any, data: Path, python: Path, probe_s: float, alone: bool, asks: Any, answers: Any
) -> None:  # fmt: skip
    """Race as asked for, on one lab. Beside races on other processors programs start on the lab's own."""
    torch.set_num_threads(1)
    os.nice(START_NICE)
    if not alone:
        os.sched_setaffinity(0, {core})
    with Lab(hosts=HOSTS, rate=RATE, cores=SHARE, cpus=None if alone else [core]) as lab, warm_python.kept():
        course = RaceLab(lab, data, python, core, turn)
        answers.put((None, course.speeds(probe_s)))
        while (asked := _next(asks)) is not None:
            number, ask = asked
            try:
                answers.put((number, course.race(ask)))
            except RuntimeError as error:
                answers.put((number, str(error)))
        answers.put((None, course.speeds(probe_s)))


def _next(asks: Any) -> tuple[int, Ask] | None:
    """What is asked next; None at the end, also that of a parent that was killed."""
    parent = multiprocessing.parent_process()
    while parent is None or parent.is_alive():
        with contextlib.suppress(queue.Empty):
            asked: tuple[int, Ask] | None = asks.get(timeout=PATIENCE_S)
            return asked
    return None
