"""The actors of a run: one for the server, which is the launcher of `paceline serve`, and one for each worker, which is
the agent of `paceline join`, with Ray in place of people who start them. From there on all is the engine `hosts`.

Every incarnation of a worker has an actor of its own, and Ray restarts none: the server alone decides who comes back.
The first are in the run's placement group; each further one is a request of its own, because a group cannot grow, and
stays with Ray until there is room, so a worker joins when a machine appears. The join token is an argument of a call,
which goes from actor to actor and is shown nowhere.
"""

import contextlib
import logging
import os
import queue
import sys
import time
from collections.abc import Callable, Iterator
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.errors import OptionError, PacelineError
from paceline.core.quantities import resource_amounts
from paceline.core.settings import is_elastic
from paceline.engines.hosts.agent import INTERRUPTED, Agent, JoinSettings
from paceline.engines.hosts.join_listener import JoinedHost, JoinedProcess
from paceline.engines.hosts.serving import HostLauncher, name_of
from paceline.engines.local import control
from paceline.engines.local.children import ProcessPlace
from paceline.engines.local.result_handover import Outcome
from paceline.engines.local.workload import Workload
from paceline.engines.ray.placement import actor_options, load, node_address, reason_of
from paceline.records.journal import Line, Sink
from paceline.records.logs import Log
from paceline.server.plan import Plan, how_it_ended
from paceline.server.progress import Progress
from paceline.strategies.sources import file_of
from paceline.transport.join_token import JoinToken, new_token, read_token

LOOK_S = 0.5  # between two looks at what has become of actors
PARTING_S = 10.0  # for actors to clean up after the run
VAIN = 3  # workers that come to nothing before the run gives up, or as many as it begins with

News = logging.LogRecord | Progress | Line | None
Left = tuple[int, str]  # how a worker left: the exit code of `paceline join`, and the error that it would have shown
logger = logging.getLogger("paceline")


class RunJob(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as the driver hands it to its actors. Paths are those of the driver's machine."""

    plan: Plan
    workload: Workload
    folder: Path  # the driver's current one
    root: Path | None  # the folder that Ray's runtime environment brings; None: all machines have the same paths
    import_path: list[str]  # of the driver
    log_level: int
    name: str  # begins the names of all actors
    group: Any  # the placement group: the first bundle is the server's
    wants_lines: bool  # of the journal, all of them
    wants_progress: bool

    def here(self, path: str | Path | None) -> Path | None:
        """Return where an actor finds a file or folder; Ray starts it in the folder that it brought."""
        found = None if path is None else self.folder / path
        if found is None or self.root is None or not found.is_relative_to(self.root):
            return found
        return Path.cwd() / found.relative_to(self.root)

    def settle(self, resources: str) -> None:
        """Set up the process of an actor; Ray would let one that asks for no GPU see all of them."""
        logger.setLevel(self.log_level)
        if "GPU" not in resource_amounts(resources):
            os.environ["CUDA_VISIBLE_DEVICES"] = ""


class PacelineWorker:
    """Runs one worker's process, whose output is in this actor's log."""

    def __init__(self) -> None:
        self._interrupted, self._interrupt = os.pipe()

    def run(self, job: RunJob, token: str, address: str, number: int) -> Left:
        """Join the run at this address and take part until its end; `number` tells the run's actors apart."""
        config, script, folder = job.plan.config, job.here(job.workload.script), job.here(".")
        logging.basicConfig(format="paceline: %(message)s", force=True)
        job.settle(config.worker_resources)
        settings = JoinSettings(
            address=address, rank=number, trusted_network=config.trusted_network, data_dir=job.here(config.data_dir),
            strategy=job.here(file_of(config.strategy)), start="fresh",  # a nursery would start one process, no other
        )  # fmt: skip
        try:
            if script is not None and not script.is_file():
                fix = "copy the script there, or give --working-dir FOLDER, which sends that folder to every machine"
                raise OptionError(f"{os.uname().nodename} has no {script}: {fix}")
            if folder is not None and folder.is_dir():
                os.chdir(folder)
            workload = msgspec.structs.replace(job.workload, script=None if script is None else os.fspath(script))
            with contextlib.closing(Agent(workload, name_of(workload), read_token(token), settings)) as agent:
                return agent.run(self._interrupted), ""
        except PacelineError as error:
            return error.exit_code, str(error)
        except KeyboardInterrupt:
            return INTERRUPTED, ""

    def leave(self) -> None:
        """Give up if the run has not let this actor in; it is over, and else tells its workers itself."""
        os.write(self._interrupt, b"!")


class WorkerActors:
    """The actors that run workers, living or asked for."""

    def __init__(self, job: RunJob, token: JoinToken, address: str) -> None:
        self._job, self._token, self._address, self._count = job, token, address, 0
        self._bundles = list(range(1, job.plan.workers + 1))  # of the placement group, those that are free
        self._alive: dict[Any, tuple[int, int | None, Any]] = {}  # by the call of `run`: number, bundle, actor

    def __len__(self) -> int:
        return len(self._alive)

    def ask(self) -> None:
        """Ask Ray for one more: in the placement group, where a bundle is free, else wherever there is room."""
        ray = load()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        job, number, config = self._job, self._count, self._job.plan.config
        bundle = self._bundles.pop(0) if self._bundles else None
        where: Any = "SPREAD" if config.spread else "DEFAULT"
        if bundle is not None:
            where = PlacementGroupSchedulingStrategy(job.group, placement_group_bundle_index=bundle)
        made: Any = ray.remote(PacelineWorker).options(
            name=f"{job.name} worker {number}", scheduling_strategy=where, max_concurrency=2,
            **actor_options(config.worker_resources),
        )  # fmt: skip
        actor = made.remote()
        call = actor.run.remote(job, self._token.reveal(), self._address, number)
        self._alive[call], self._count = (number, bundle, actor), number + 1

    def ended(self) -> Iterator[tuple[int, Left | str]]:
        """Yield those that have ended since the last look: number, and how it left or what Ray says it died of."""
        ray, calls = load(), list(self._alive)
        for call in ray.wait(calls, num_returns=len(calls), timeout=0)[0] if calls else ():
            number, bundle, _ = self._alive.pop(call)
            self._bundles += [] if bundle is None else [bundle]
            try:
                yield number, ray.get(call)
            except ray.exceptions.RayError as error:
                yield number, reason_of(error)

    def part(self) -> None:
        """Let those that run end by themselves, so that each removes its files; forget those that Ray never placed."""
        ray = load()
        asked = {actor.leave.remote(): call for call, (_, _, actor) in self._alive.items()}
        heard = ray.wait(list(asked), num_returns=len(asked), timeout=1)[0] if asked else []
        if heard:
            ray.wait([asked[each] for each in heard], num_returns=len(heard), timeout=PARTING_S)
        self._alive.clear()


class RayLauncher(HostLauncher):
    """One run's processes: server and evaluator beside this actor, each worker in an actor of its own."""

    def __init__(
        self, job: RunJob, interrupts: int, sink: Sink | None, progress: Callable[[Progress], None] | None
    ) -> None:
        ip = node_address()
        host = f"[{ip}]" if ":" in ip else ip
        config = msgspec.structs.replace(job.plan.config, listen=f"{host}:*")  # any port that is free
        plan, token = msgspec.structs.replace(job.plan, config=config), new_token()
        super().__init__(plan, job.workload, name_of(job.workload), token, Log(), sink, progress)
        self._interrupted, self._look_at = interrupts, 0.0
        self._actors = WorkerActors(job, token, self._listener.address)
        self._wanted = self._most = config.most_workers or plan.workers  # actors that there should be, and may be
        self._joined: set[int | None] = set()  # those that are in the run
        self._missed: set[int] = set()  # workers for which an actor is asked for
        self._repeats = 0  # demands of the server that are known already
        self._vain = 0  # ends of actors since the last one joined, and of processes before training began

    def _interrupts(self) -> contextlib.AbstractContextManager[int]:
        return contextlib.nullcontext(self._interrupted)

    def _address_for_tensors(self, _shard: int) -> str:
        return f"tcp://{self._address}"

    def run(self) -> Outcome:
        try:
            self._look()
            return super().run()
        finally:
            self._actors.part()

    def _kill_the_late(self) -> None:
        super()._kill_the_late()
        self._look()

    def _look(self) -> None:
        """See which actors have ended, and ask for as many as are wanted."""
        now = time.monotonic()
        if now < self._look_at or self._finished is not None or self._failure is not None:
            return
        self._look_at = now + LOOK_S
        for number, how in self._actors.ended():
            self._on_actor_end(number, how)
        while self._failure is None and len(self._actors) < min(self._wanted, self._most):
            self._actors.ask()

    def _on_actor_end(self, number: int, how: Left | str) -> None:
        """Decide whether another is asked for. Before training begins always, since the run waits for it."""
        joined, text = number in self._joined, how if isinstance(how, str) else how[1]
        self._joined.discard(number)
        if text and not isinstance(how, str) and not joined and self._began is None:
            self._fail(control.Failure("user", text))
        elif not joined and isinstance(how, str):
            logger.warning("actor %d has ended before it could join: %s", number, text)
            self._count_vain(text)
        elif isinstance(how, str) and is_elastic(self._plan.config) and not self._plan.config.respawn:
            logger.warning("actor %d is gone, and another one is asked for: %s", number, text)
        elif self._began is not None:
            self._wanted -= 1  # it has ended by itself, or the server decides whether to start it again
            if text:
                logger.warning("actor %d has left the run: %s", number, text)

    def _count_vain(self, why: str) -> None:
        """Give up if it goes on like this."""
        self._vain += 1
        enough = self._vain >= max(VAIN, self._plan.workers)
        if enough and self._began is None:
            self._fail(self._script_failure or control.Failure("peer", f"no worker gets as far as to train: {why}"))
        elif enough:
            self._wanted, self._vain = len(self._actors), 0

    def _start(self, place: ProcessPlace) -> None:
        super()._start(place)
        if place in self._children.alive:
            self._missed.discard(place.worker)
        elif self._repeats:
            self._repeats -= 1
        elif self._began is not None:
            self._wanted += 1  # once the actor of the last process has ended: its place in the group is needed
            self._missed.add(place.worker)

    def _on_relinked(self) -> None:
        super()._on_relinked()
        self._repeats = len(self._missed)  # a restarted server asks for all of them again

    def _on_no_place(self, reason: str) -> None:
        super()._on_no_place(reason)
        self._wanted += 1  # the server has not noticed yet that the one is gone whom this one was to replace

    def _waits_for_others(self) -> bool:
        return self._wanted > 0

    def on_host(self, host: JoinedHost) -> None:
        self._joined.add(host.rank)
        if self._began is not None:
            self._vain = 0
        super().on_host(host)

    def on_end(self, process: JoinedProcess) -> None:
        """As on hosts; but the actor ends with its process, whatever becomes of the worker."""
        super().on_end(process)
        if process.host.identity in self._listener.hosts:
            self._listener.dismiss(process.host, *self._why_dismissed(process))
        if self._began is None and process.code:
            self._count_vain(f"its process {how_it_ended(process.code)}")


class PacelineServer:
    """Runs a run's server and evaluator, and tells the driver what happens."""

    def __init__(self) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._interrupted, self._interrupt = os.pipe()

    def run(self, job: RunJob) -> tuple[Outcome, bytes | None]:
        """Carry the run to its end; return how it ended, and the model."""
        os.chdir(job.folder)  # this is the driver's machine
        sys.path[:0] = [folder for folder in job.import_path if folder not in sys.path]
        job.settle(job.plan.config.server_resources)
        logger.addHandler(QueueHandler(self._news))
        logger.propagate = False
        journal = job.plan.journal and job.plan.journal.absolute()
        print(f"{job.name}: its journal is {journal}, what workers print in their actors' logs", flush=True)
        try:
            launcher = RayLauncher(
                job, self._interrupted, self if job.wants_lines else None, self.write if job.wants_progress else None
            )
            with contextlib.closing(launcher.run()) as outcome:
                return msgspec.structs.replace(outcome, model=None), outcome.model_bytes()
        finally:
            self.write(None)  # so that nobody waits for more

    def write(self, news: News) -> None:
        """Keep something for the driver; as a journal's sink, a line."""
        self._news.put(news)

    def news(self, wait_s: float) -> list[News]:
        """Return what has happened since the last call; waits so long for something to happen."""
        found: list[News] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._news.get(timeout=wait_s))
            while True:
                found.append(self._news.get_nowait())
        return found

    def interrupt(self) -> None:
        """Ask the run to end, as Ctrl-C does; the second time at once."""
        os.write(self._interrupt, b"!")
