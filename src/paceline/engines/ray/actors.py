"""The actors of a run: one for the server, which is the launcher of `paceline serve`, and one for each worker and each
remote shard, which is the agent of `paceline join`, with Ray in place of people who start them. From there on all is
the engine `hosts`.

Every incarnation of a worker has an actor of its own, so has the successor of a shard that died, and Ray restarts none:
the launcher alone decides who comes back. The first are in the run's placement group; each further one is a request of
its own, because a group cannot grow, and stays with Ray until there is room, so a worker joins when a machine appears.
The join token is an argument of a call, which goes from actor to actor and is shown nowhere.
"""

import contextlib
import logging
import os
import queue
import sys
from collections.abc import Iterator
from functools import partial
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.errors import OptionError, PacelineError
from paceline.core.quantities import resource_amounts
from paceline.engines.hosts.agent import INTERRUPTED, Agent, JoinSettings
from paceline.engines.hosts.cluster_launcher import ClusterLauncher, Left
from paceline.engines.hosts.serving import name_of
from paceline.engines.local.result_handover import Outcome
from paceline.engines.local.workload import Workload
from paceline.engines.ray.placement import actor_options, load, node_address, reason_of
from paceline.records.journal import Line
from paceline.server.plan import Plan
from paceline.server.progress import Progress
from paceline.strategies.sources import file_of
from paceline.transport.join_token import JoinToken, new_token, read_token

PARTING_S = 10.0  # for actors to clean up after the run

News = logging.LogRecord | Progress | Line | None
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
    group: Any  # the placement group: the first bundle is the server's, the next are those of remote shards
    wants_lines: bool  # of the journal, all of them
    wants_progress: bool

    def here(self, path: str | Path | None) -> Path | None:
        """Return where an actor finds a file or folder; Ray starts it in the folder that it brought."""
        found = None if path is None else self.folder / path
        if found is None or self.root is None or not found.is_relative_to(self.root):
            return found
        return Path.cwd() / found.relative_to(self.root)

    def plan_here(self) -> Plan:
        """Return the plan of a run that is served on this machine, at any ports that are free."""
        ip = node_address()
        listen = f"[{ip}]:*" if ":" in ip else f"{ip}:*"
        return msgspec.structs.replace(self.plan, config=msgspec.structs.replace(self.plan.config, listen=listen))

    def workload_here(self) -> Workload:
        """Return what a worker of this machine runs, and go to the folder where it does."""
        script, folder = self.here(self.workload.script), self.here(".")
        if script is not None and not script.is_file():
            fix = "copy the script there, or give --working-dir FOLDER, which sends that folder to every machine"
            raise OptionError(f"{os.uname().nodename} has no {script}: {fix}")
        if folder is not None and folder.is_dir():
            os.chdir(folder)
        return msgspec.structs.replace(self.workload, script=None if script is None else os.fspath(script))

    def settle(self, resources: str) -> None:
        """Set up the process of an actor; Ray would let one that asks for no GPU see all of them."""
        logger.setLevel(self.log_level)
        if "GPU" not in resource_amounts(resources):
            os.environ["CUDA_VISIBLE_DEVICES"] = ""


class PacelineAgent:
    """Runs the process of one worker or shard, whose output is in this actor's log."""

    def __init__(self) -> None:
        self._interrupted, self._interrupt = os.pipe()

    def run(self, job: RunJob, token: str, address: str, number: int, shard: bool) -> Left:
        """Join the run at this address and take part until its end; `number` tells the run's actors apart."""
        config = job.plan.config
        logging.basicConfig(format="paceline: %(message)s", force=True)
        job.settle(config.shard_resources if shard else config.worker_resources)
        settings = JoinSettings(
            address=address, rank=number, trusted_network=config.trusted_network, data_dir=job.here(config.data_dir),
            strategy=job.here(file_of(config.strategy)), shard=shard,
            start=config.start if shard else "fresh",  # a nursery would start one worker, no other
        )  # fmt: skip
        try:
            workload = Workload() if shard else job.workload_here()
            name = "" if shard else name_of(workload)
            with contextlib.closing(Agent(workload, name, read_token(token), settings)) as agent:
                return agent.run(self._interrupted), ""
        except PacelineError as error:
            return error.exit_code, str(error)
        except KeyboardInterrupt:
            return INTERRUPTED, ""

    def leave(self) -> None:
        """Give up if the run has not let this actor in; it is over, and else tells its members itself."""
        os.write(self._interrupt, b"!")


class RayActors:
    """The actors that run workers, or those that hold shards, living or asked for."""

    def __init__(self, job: RunJob, token: JoinToken, address: str, shards: bool) -> None:
        plan, remote = job.plan, job.plan.remote_shards
        self._job, self._token, self._address, self._shards = job, token, address, shards
        self._count = plan.config.servers - remote if shards else 0  # as the shards are counted that they hold at first
        self._bundles = list(
            range(1, remote + 1) if shards else range(remote + 1, remote + plan.workers + 1)
        )  # free ones
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
        made: Any = ray.remote(PacelineAgent).options(
            name=f"{job.name} {'shard' if self._shards else 'worker'} {number}", scheduling_strategy=where,
            max_concurrency=2, **actor_options(config.shard_resources if self._shards else config.worker_resources),
        )  # fmt: skip
        actor = made.remote()
        call = actor.run.remote(job, self._token.reveal(), self._address, number, self._shards)
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
            token, sink = new_token(), self if job.wants_lines else None
            launcher = ClusterLauncher(
                job.plan_here(), job.workload, token, self._interrupted, partial(RayActors, job, token), sink,
                self.write if job.wants_progress else None,
            )  # fmt: skip
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
