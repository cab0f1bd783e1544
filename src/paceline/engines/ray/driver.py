"""A run on a Ray cluster, as seen by whoever starts it: places, the server's actor, and what it tells until the end.

Server and evaluator are on the driver's machine, where the run's folder is. If the driver dies, Ray ends all actors.
"""

import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.errors import OptionError, PeerError, UserError
from paceline.core.settings import RunConfig
from paceline.engines.local.launcher import finished_run
from paceline.engines.local.loop import interrupts
from paceline.engines.local.result_handover import Outcome, behind_descriptor
from paceline.engines.local.workload import packed
from paceline.engines.ray import placement
from paceline.engines.ray.actors import News, PacelineServer, RunJob
from paceline.records.journal import Sink
from paceline.records.logs import notice
from paceline.server.exchange import Launched
from paceline.server.plan import Plan
from paceline.server.progress import Progress
from paceline.worker import context

NEWS_S = 1.0  # that the server's actor waits for something to tell
LOOK_S = 0.2  # between two looks for an interrupt
LAST_S = 15.0  # for the run to end at once, at a second interrupt

logger = logging.getLogger("paceline")


def launch(
    train: Callable[[], None], plan: Plan, sink: Sink | None, progress: Callable[[Progress], None] | None
) -> Launched:
    """Run on a Ray cluster, save the report in the run's folder, and return the result."""
    if context.current() is not None:
        raise UserError("launch() was called inside a worker of another run: leave the call out")
    with placement.connected(plan.config, plan.workers) as own:
        name = f"paceline {plan.folder.name if plan.folder is not None else 'run'} {secrets.token_hex(3)}"
        workload = packed(train)
        root = _root(plan.config, workload.script)
        with placement.placed(plan.config, plan.workers, name, own=own) as group:
            job = RunJob(
                plan=plan, workload=workload, folder=Path.cwd(), root=root, name=name, group=group,
                log_level=logger.getEffectiveLevel(), wants_lines=sink is not None, wants_progress=progress is not None,
                import_path=[os.path.abspath(each) for each in sys.path],  # noqa: PTH100 - an empty one is this folder
            )  # fmt: skip
            outcome, model = _carried_out(job, partial(_tell, sink, progress))
    with behind_descriptor(model) as descriptors:
        return finished_run(msgspec.structs.replace(outcome, model=descriptors[0] if descriptors else None), plan)


def _root(config: RunConfig, script: str | None) -> Path | None:
    """Return the folder that Ray brings to every machine, if any, and say how the script gets there."""
    given, here = config.working_dir, Path.cwd()
    brought = placement.load().get_runtime_context().runtime_env.get("working_dir")
    root = given.absolute() if given is not None else here if brought else None  # Ray has put a job's driver there
    inside = script is not None and root is not None and (here / script).is_relative_to(root)
    if script is not None and given is not None and not inside:
        raise OptionError(f"--working-dir {root}: {script} is not in it; give a folder above the script")
    same = "every machine has it at the same path (--working-dir FOLDER would send it there)"
    if script is not None:
        notice(f"the script: {f'it travels with {root}, by the runtime environment of Ray' if inside else same}")
    return root


def _carried_out(job: RunJob, tell: Callable[[News], None]) -> tuple[Outcome, bytes | None]:
    """Start the server's actor, and show what it tells until the run has ended."""
    ray = placement.load()
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where = PlacementGroupSchedulingStrategy(job.group, placement_group_bundle_index=0)
    made: Any = ray.remote(PacelineServer).options(
        name=f"{job.name} server", max_concurrency=4, scheduling_strategy=where,
        **placement.actor_options(job.plan.config.server_resources),
    )  # fmt: skip
    server = made.remote()  # at a time it has calls for the run, for news, and for two interrupts
    try:
        ended = server.run.remote(job)
        with interrupts() as descriptor:
            _follow(server, ended, descriptor, tell)
        found: tuple[Outcome, bytes | None] = ray.get(ended)
        return found
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except ray.exceptions.RayError as error:
        hint = "; `paceline resume` goes on from its newest checkpoint" * (job.plan.config.checkpoint_every is not None)
        raise PeerError(f"the actor of the run's server has died{hint}: {placement.reason_of(error)}") from error
    finally:
        ray.kill(server)


def _follow(server: Any, ended: Any, descriptor: int, tell: Callable[[News], None]) -> None:
    """Return once the run has ended; raise KeyboardInterrupt at a second interrupt."""
    ray = placement.load()
    count, news, over = 0, server.news.remote(NEWS_S), False
    while not over:
        ready, _ = ray.wait([ended, news], num_returns=2, timeout=LOOK_S)
        over = ended in ready
        if over or news in ready:
            for each in ray.get(news):
                tell(each)
            news = server.news.remote(NEWS_S)
        with contextlib.suppress(BlockingIOError):
            for _ in os.read(descriptor, 64):
                count += 1
                server.interrupt.remote()
        if count > 1 and not over:
            ray.wait([ended], timeout=LAST_S)
            raise KeyboardInterrupt


def _tell(sink: Sink | None, progress: Callable[[Progress], None] | None, news: News) -> None:
    if isinstance(news, logging.LogRecord):
        logger.handle(news)
    elif isinstance(news, Progress) and progress is not None:
        progress(news)
    elif news is not None and not isinstance(news, Progress) and sink is not None:
        sink.write(news)
