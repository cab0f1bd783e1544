"""The time that exchanging by change saves, in virtual time: by bandwidth, and by whether sending overlaps computing.

The usual line is the one at which the baseline communicates for the publication's share of its time if sending does not
overlap computing.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from contenders.bars import Bar
from contenders.gossip_runs import SECONDS_PER_SAMPLE, Job, Ran, Size, build, run
from contenders.gossip_trials import FIRST_FRESH, with_option, within
from contenders.kept_runs import KeptRuns

COMMUNICATION = 0.565  # of the baseline's time, in the publication
SAVED = 0.52  # of its time, there
BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)  # of the usual line's


def model_bits(size: Size) -> int:
    """The bits of a model."""
    return 8 * sum(p.nbytes for p in build(size).parameters())


def usual_mbps(size: Size, step_s: float | None = None) -> float:
    """The usual line, where a step computes for `step_s`."""
    computing = SECONDS_PER_SAMPLE * size.batch if step_s is None else step_s
    return model_bits(size) / (computing * COMMUNICATION / (1 - COMMUNICATION)) / 1e6


def most_saved(*, overlap: bool) -> float:
    """What no more can be saved on the usual line, even by sending nothing."""
    ratio = COMMUNICATION / (1 - COMMUNICATION)  # of a step's sending to its computing
    return 1 - 1 / max(1.0, ratio) if overlap else 1 - 1 / (1 + ratio)


def measure(
    chosen: Mapping[str, Job], scales: Sequence[float], repeats: int, kept: KeptRuns
) -> tuple[list[dict[str, Any]], list[Bar]]:
    """Rows of the curve, and the bars. All seeds at the usual line, the first alone elsewhere."""
    usual = usual_mbps(chosen["baseline"].size)
    rows, at_usual = [], {}
    for overlap, scale in itertools.product((False, True), sorted(scales)):
        seeds = range(FIRST_FRESH, FIRST_FRESH + (repeats if scale == 1.0 else 1))
        jobs = [
            msgspec.structs.replace(
                chosen[side], seed=seed, mbps=usual * scale,
                strategy=with_option(chosen[side].strategy, f"overlap={str(overlap).lower()}"),
            )
            for seed in seeds for side in ("baseline", "adaptive")
        ]  # fmt: skip
        made = kept.make(run, Ran, jobs)
        ratios = [made[2 * i + 1].seconds / made[2 * i].seconds for i in range(len(seeds))]
        if scale == 1.0:
            at_usual[overlap] = ratios
        rows.append({
            "contest": "time", "side": "time", "overlap": overlap, "bandwidth": scale, "seeds": len(seeds),
            "time_saved": 1 - statistics.geometric_mean(ratios),
        })  # fmt: skip
    return rows, judge(rows, at_usual)


def judge(rows: Sequence[Mapping[str, Any]], at_usual: Mapping[bool, Sequence[float]]) -> list[Bar]:
    """What must hold of time."""
    bars = [bar_of_time("time_saved", at_usual[False], "virtual nodes, overlap=false")]
    for overlap, name in ((False, "time_falls_with_bandwidth"), (True, "overlap_time_falls_with_bandwidth")):
        gains = [
            row["time_saved"] for row in sorted(rows, key=lambda row: row["bandwidth"]) if row["overlap"] == overlap
        ]
        rises = max((later - earlier for earlier, later in itertools.pairwise(gains)), default=0.0)
        words = "sending overlaps computing" if overlap else "it does not"
        bars.append(Bar(name, rises, 0.005, False, f"the gain falls as bandwidth grows ({words}); largest rise"))
    return bars


def bar_of_time(name: str, ratios: Sequence[float], where: str) -> Bar:
    """The publication's claim on time."""
    saved = 1 - statistics.geometric_mean(ratios)
    low, high = (1 - math.exp(edge) for edge in reversed(within([math.log(ratio) for ratio in ratios])))
    return Bar(name, saved, SAVED, True,
               f"time saved where communication is {COMMUNICATION:.1%} of the baseline's ({where}), "
               f"90 % within {low:.3f} to {high:.3f}")  # fmt: skip
