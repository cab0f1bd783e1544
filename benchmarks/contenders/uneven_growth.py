"""Throughput from 8 to 64 workers, with and without a server line, and what a partition costs: cost-only workers.

What a synchronous round can reach on a line, for the bar of `balanced`: let a model or a gradient occupy the line for
`t` seconds in either direction, one after the other. The k-th model to go down is there at `k t`, and if a round ends
at `T`, the gradient that is the j-th last to arrive has to leave at `T - j t` at the latest. So worker `w` computes for
at most `T - (k_w + j_w) t`, and a round of `G` samples needs `G <= sum over w of v_w (T - (k_w + j_w) t)`. The two
orders are free of each other, and the sum is largest if the fastest is first down and last up: `k_w = j_w = rank of w
by speed`. Hence `T = (G + 2 t sum of rank v) / sum of v`. Slow workers may be left out where that makes `T` shorter,
and nobody computes for less than nothing. It knows no latency, no jitter, and no transfer of the next round in this
one.
"""

from pathlib import Path
from typing import Any

import msgspec

from contenders.uneven_cells import BATCH, SECONDS_PER_SAMPLE, alike, mix
from paceline import scenario
from paceline.core.actions import Apply
from paceline.core.events import Pushed
from paceline.engines.sim.light import simulate
from paceline.records import journal
from paceline.scenario import Scenario
from paceline.strategies import build

SIZES = (8, 16, 32, 64)
MBPS = 1000.0
MODEL_BYTES = 4 * (784 * 100 + 100 + 100 * 10 + 10)  # an MLP with 100 hidden units: asp fills 0.87 of the line with 64
JITTER = "lognormal:0.1"
WARM_S, END_S = 20.0, 80.0  # what is counted; rates are estimated before
CUT_AT_S, CUT_S = 30.0, 10.0  # a partition
SEED = 1


class Applied:
    """Samples that were applied, and when; a sink."""

    def __init__(self) -> None:
        self.at: list[float] = [0.0]
        self.total: list[int] = [0]
        self._samples: dict[Any, int] = {}

    def write(self, line: journal.Line) -> None:
        if not isinstance(line, journal.Decision):
            return
        if isinstance(line.event, Pushed):
            self._samples[line.event.push] = line.event.samples
        for action in line.actions:
            if isinstance(action, Apply):
                self.at.append(line.event.at)
                self.total.append(self.total[-1] + sum(self._samples.pop(push, 0) for push in action.pushes))

    def until(self, second: float) -> float:
        """Samples by then, as if those of a version were applied evenly since the last one."""
        after = next((i for i, at in enumerate(self.at) if at > second), len(self.at) - 1)
        before = after - 1
        begin, end = self.at[before], self.at[after]
        if end <= second or end == begin:
            return float(self.total[after])
        return self.total[before] + (self.total[after] - self.total[before]) * (second - begin) / (end - begin)


class Throughput(msgspec.Struct, frozen=True):
    """A strategy's samples per second, and what the workers' speeds add up to."""

    strategy: str
    workers: int
    line: bool
    jitter: bool
    per_s: float
    ideal_per_s: float
    synchronous_per_s: float  # the most that rounds can reach on the line

    @property
    def share(self) -> float:
        """Of the sum of speeds."""
        return self.per_s / self.ideal_per_s


def speeds_of(workers: int) -> tuple[float, ...]:
    """The 4x mix at any size: a half at 1, a quarter at 1/2, a quarter at 1/4."""
    return mix((workers // 2, 1.0), (workers // 4, 0.5), (workers // 4, 0.25))


def cluster(speeds: tuple[float, ...], line: bool, jitter: bool, events: str = "") -> Scenario:
    """The scenario of a cost-only run."""
    network = f"[network]\nbandwidth_mbps = {MBPS}" if line else ""
    text = f"""
seed = {SEED}
[compute]
seconds_per_sample = {SECONDS_PER_SAMPLE}
jitter = "{JITTER if jitter else "none"}"
{network}
"""
    text += "".join(f"[[workers]]\ncount = {count}\nspeed = {speed}\n" for count, speed in alike(speeds))
    return scenario.parse(text + events, "growth", Path())


def applied(strategy: str, of: Scenario, seconds: float = END_S) -> Applied:
    """What a strategy applies in so many virtual seconds."""
    found = Applied()
    simulate(build(strategy, 0), of, work=BATCH, max_seconds=seconds, model_bytes=MODEL_BYTES, sink=found, seed=0)
    return found


def throughput(strategy: str, workers: int, line: bool, jitter: bool) -> Throughput:
    """Of a strategy, once it knows the workers."""
    speeds = speeds_of(workers)
    found = applied(strategy, cluster(speeds, line, jitter))
    per_s = (found.until(END_S - 1) - found.until(WARM_S)) / (END_S - 1 - WARM_S)
    ideal = sum(speeds) / SECONDS_PER_SAMPLE
    return Throughput(strategy, workers, line, jitter, per_s, ideal, synchronous(speeds) if line else ideal)


def synchronous(speeds: tuple[float, ...], mbps: float = MBPS, size: int = MODEL_BYTES, work: int = BATCH) -> float:
    """Samples per second of the best synchronous round; the formula stands at the head of this file."""
    samples, t = work * len(speeds), 8 * size / (mbps * 1e6)
    rates = sorted((speed / SECONDS_PER_SAMPLE for speed in speeds), reverse=True)
    best = 0.0
    for taken in range(1, len(rates) + 1):
        part = rates[:taken]
        seconds = (samples + 2 * t * sum(rank * rate for rank, rate in enumerate(part, 1))) / sum(part)
        if seconds >= 2 * t * taken:
            best = max(best, samples / seconds)
    return best


def lost_rounds(strategy: str, cut_off: int, speeds: tuple[float, ...]) -> float:
    """Rounds of the whole batch that a partition costs beyond the cut off worker's own share of the time."""
    events = f'[[events]]\nkind = "partition"\nworker = {cut_off}\nat = {CUT_AT_S}\nfor = {CUT_S}\n'
    undisturbed, disturbed = (
        applied(strategy, cluster(speeds, False, False, e)).until(END_S - 1) for e in ("", events)
    )
    own = CUT_S * speeds[cut_off] / SECONDS_PER_SAMPLE
    return (undisturbed - disturbed - own) / (BATCH * len(speeds))


def partitions(strategy: str, workers: int = 8) -> dict[str, float]:
    """Rounds lost, whoever is cut off: the fastest or the slowest of unequal workers, or one of equal ones."""
    uneven, equal = speeds_of(workers), (1.0,) * workers
    return {
        "fastest": lost_rounds(strategy, 0, uneven),
        "slowest": lost_rounds(strategy, workers - 1, uneven),
        "equal": lost_rounds(strategy, 0, equal),
    }


def rows(sides: dict[str, str], sizes: tuple[int, ...] = SIZES) -> tuple[list[Throughput], dict[str, dict[str, float]]]:
    """Everything: throughput by side, size, line and jitter, and rounds lost to partitions by side."""
    cases = [(False, False), (False, True), (True, False), (True, True)]
    found = [
        throughput(spec, size, line, jitter) for spec in sides.values() for size in sizes for line, jitter in cases
    ]
    return found, {side: partitions(spec) for side, spec in sides.items()}
