"""A scenario fitted to measured pushes: seconds per sample, a lognormal jitter, and each worker's speed.

The median is fitted, not the mean, because the factor of `lognormal:SIGMA` has median 1. SIGMA is the root mean square
of the logarithms around it. The first pushes of each worker are left out, since they warm up caches and allocators, and
so are pushes of another size than most, such as the last one of an epoch.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.core.errors import OptionError

WARM_UP = 3  # pushes of each worker that are left out
FEWEST = 8  # pushes that are enough for a median, and barely for a deviation
LARGEST_SIGMA = 10.0  # of the format


class Timed(NamedTuple):
    """One push: its samples, and the seconds of computing them and of the way to and fro."""

    samples: int
    compute_s: float
    transfer_s: float
    bytes_up: int
    bytes_down: int


class Fit(NamedTuple):
    """What a worker's pushes say."""

    pushes: int  # of this size, used for the fit
    samples: int  # of each
    seconds_per_sample: float
    sigma: float
    transfer_s: float
    bytes_up: int
    bytes_down: int


def fit(pushes: Sequence[Timed], who: str) -> Fit:
    """Fit the pushes of one worker, in the order in which they were made."""
    usual = Counter(push.samples for push in pushes).most_common(1)[0][0] if pushes else 0
    kept = [push for push in pushes[WARM_UP:] if push.samples == usual and push.compute_s > 0]
    if len(kept) < FEWEST:
        raise OptionError(
            f"{who} made {len(kept)} pushes of the usual size after {WARM_UP} to warm up, and {FEWEST} are needed: "
            "give more --seconds, or a smaller --batch-size"
        )
    typical = statistics.median(push.compute_s for push in kept)
    logs = [math.log(push.compute_s / typical) for push in kept]
    sigma = math.sqrt(statistics.fmean(log * log for log in logs))
    return Fit(
        len(kept), usual, typical / usual, min(sigma, LARGEST_SIGMA),
        statistics.median(push.transfer_s for push in kept),
        round(statistics.median(push.bytes_up for push in kept)),
        round(statistics.median(push.bytes_down for push in kept)),
    )  # fmt: skip


def scenario_text(alone: Fit, side_by_side: Mapping[int, Fit], about: Sequence[str]) -> str:
    """Return a scenario file: speed 1.0 is one worker by itself, and others are as fast as they were together."""
    lines = [f"# {line}" for line in about]
    lines += [
        f"# The model is {alone.bytes_up} bytes up with each push and {alone.bytes_down} bytes down with each version.",
        "seed = 0",
        "",
        "[compute]",
        f"seconds_per_sample = {alone.seconds_per_sample:.6g}",
        f'jitter = "lognormal:{alone.sigma:.3g}"',
        "",
        "[network]",
        f"latency_ms = {alone.transfer_s / 2 * 1000:.4g}  # half of what a push took beside computing, on this machine",
    ]
    for worker, each in sorted(side_by_side.items()):
        lines += ["", f"[[workers]]  # worker {worker} of {len(side_by_side)} side by side"]
        lines += [f"speed = {speed(alone, each):.4g}", f'jitter = "lognormal:{each.sigma:.3g}"']
    if not side_by_side:
        lines += ["", "[[workers]]", "count = 1", "speed = 1.0"]
    return "\n".join(lines) + "\n"


def speed(alone: Fit, each: Fit) -> float:
    """Return a worker's speed relative to one by itself."""
    return alone.seconds_per_sample / each.seconds_per_sample
