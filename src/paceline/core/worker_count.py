"""How many workers a run has, and how many threads each of them: the usual numbers, and those of a scenario.

A scenario file may come from anybody. One with more workers than a run of a script can have by accident is run only if
whoever starts the run says the number.
"""

import math
import os

from paceline.core.errors import OptionError
from paceline.core.quantities import resource_amounts
from paceline.core.scenario.file import Scenario
from paceline.core.settings import Capabilities, RunConfig
from paceline.core.values import shown

USUAL_WORKERS = 4  # at most, where neither a scenario nor CUDA devices set the number
MOST_UNASKED = 100  # workers that a scenario brings, joins included, without --workers: each is a process or a thread


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usual_workers(devices: int) -> int:
    """Return the default number of workers: one per CUDA device, else one per core, 2 to `USUAL_WORKERS`."""
    return devices or max(2, min(cores(), USUAL_WORKERS))


def usual_threads(config: RunConfig, workers: int, engine: Capabilities) -> int:
    """Return torch's threads per process: as set, else what a worker asks a cluster for, a share of the cores, or 1."""
    if config.threads is not None:
        return config.threads
    if engine.asks_a_cluster:
        return max(1, int(resource_amounts(config.worker_resources).get("CPU", 1.0)))
    return max(1, cores() // workers) if engine.own_processes else 1


def usual_cpus(config: RunConfig, workers: int) -> int:
    """Return how many processors a cluster of this machine alone offers: at least what all of the run asks for.

    If the machine has fewer they are shared, as by processes that ask nobody.
    """
    server, shard, worker = (
        resource_amounts(text).get("CPU", 0)
        for text in (config.server_resources, config.shard_resources, config.worker_resources)
    )
    most = max(workers, config.most_workers or 0)
    return max(cores(), math.ceil(server + (config.remote_shards or 0) * shard + most * worker))


def agreed_workers(asked: int | None, present: int, scenario: str, *, by_default: bool = False) -> int:
    """Return the scenario's number of workers; raise if a different number was asked for."""
    if asked is None or asked == present:
        return present
    which = f"scenario {scenario}" + (", taken because none was given," if by_default else "")
    raise OptionError(
        f"--workers: {which} has {present} workers, not {asked}; leave --workers out, or give a scenario file with "
        f"{asked} workers (`paceline scenario {scenario}` prints one to start from)"
    )


def require_asked_for(cluster: Scenario, asked: int | None) -> None:
    """Refuse a large scenario unless the command line, the environment or launch() gives its number of workers.

    `asked` is that number. As many again may join later.
    """
    newcomers = sum(event.count for event in cluster.events if event.kind == "join")
    most = max(MOST_UNASKED, 2 * (asked or 0))
    if cluster.count + newcomers > most:
        later = f" and {newcomers:,} that join" if newcomers else ""
        enough = newcomers <= cluster.count and asked is None
        fix = f"give --workers {cluster.count} if that is meant" if enough else "let fewer join"
        raise OptionError(
            f"scenario {shown(cluster.name)} has {cluster.count:,} workers{later}, and a run takes at most {most:,} "
            f"of a scenario without being told; {fix}"
        )
