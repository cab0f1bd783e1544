"""How each side of a cell gets its rate, momentum and form, and how it is timed with them on fresh seeds.

A side is a strategy in all its forms. In a cell every form is tried with both momenta over one grid of rates, a
factor of the root of 2 apart: first every second rate, from the same three for all, further out while the best lies
on the edge, then the two neighbours of the best, unless it is `REFINED` times behind the side's best so far: in the
23 searches looked at for this, the rates between gained a factor of 1.32 at most. A run ends at the target, at `CUT`
times the side's best so far, or when it diverges. What comes within `CLOSE` of the side's best on the first tuning seed
is run on two others, and the best of these on three more; the geometric mean of all chooses. If each of them misses
the target on one seed, the next ones are tried in the same way. Fresh seeds are run with what is chosen, and choose
nothing.

At the edge of what is stable under momentum most runs are soon at the target and some are three times as late, so that
a rate there can look best by chance. So more than three seeds choose, and of two rates whose scores are within `TIE`
the lower one is taken, as tune_learning_rates.py does. Seeds 0 to 7 showed that three were too few, and seeds 8 to 15
that six do not tell such rates apart (`dasp` behind lines that a round fills); no time of theirs judges since then.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from contenders.uneven_cells import BATCH, CELLS, SECONDS_PER_SAMPLE, Cell, Outcome, Trial

SIDES: dict[str, tuple[str, ...]] = {
    "bsp": ("bsp",),
    "asp": ("asp", "asp:whole_steps=true"),
    "ssp": ("ssp:staleness=3", "ssp:staleness=3,whole_steps=true"),
    "dssp": ("dssp", "dssp:whole_steps=true"),
    "dasp": ("dasp",),
    "dasp_states": ("dasp:fit=none",),
    "adaptive_sync": ("adaptive_sync",),
    "balanced": ("balanced",),
    "balanced_one": ("balanced:pieces=one",),
}
RIVALS = ("bsp", "asp", "ssp", "dssp")
MOMENTA = (0.0, 0.9)  # all are tried; the order only saves time
TUNING_SEEDS = (100, 101, 102, 103, 104, 105)
FEW = 3  # of them, for all that are close
FRESH_SEEDS = tuple(range(16, 24))  # times of a side differ by a tenth and more from seed to seed
START = {0.0: (-1, 1, 3), 0.9: (-7, -5, -3)}  # exponents of the root of 2; extended as far as need be
LOWEST, HIGHEST = -16, 11
CUT = 3.0  # times the best so far: a run that is not there by then has missed
CLOSE = 1.3  # of the best on the first seed: tried on the others, so that no side gets a rate that was lucky once
CANDIDATES = 4  # at most
FINALISTS = 3  # at most, on all tuning seeds
TIE = 1.05  # scores this close say nothing
REFINED = 1.5  # times the side's best: a form and momentum that is further behind gets no rates between
SLOWEST_ROUNDS = 300  # of the slowest worker, until which a side's first runs may go on
LONGER = 3.0  # times that, where none of them is at the target by then
FRESH_LIMIT = 4.0  # times the tuned time: a fresh run that takes longer counts as if it had taken that

Make = Callable[[Trial], Outcome]


class Choice(msgspec.Struct, frozen=True):
    """What a side runs with in a cell; `score` is the geometric mean of its tuning seeds."""

    side: str
    trial: Trial  # its seed is that of no run
    score: float


def rate_of(exponent: int) -> float:
    """A rate of the grid."""
    return float(f"{2 ** (exponent / 2):.6g}")


def first_limit(cell: Cell) -> float:
    """Virtual seconds for a side's first runs: a round is the slowest worker's push, and the line both ways."""
    fast = BATCH * SECONDS_PER_SAMPLE
    return SLOWEST_ROUNDS * fast * (1 / min(cell.speeds) + 2 * cell.line)


class Search:
    """The trials of one side in one cell, with one batch."""

    def __init__(self, cell: str, side: str, batch: int, make: Make, first: float | None = None) -> None:
        self.cell, self.side, self.batch, self._make = cell, side, batch, make
        self.limit = first_limit(CELLS[cell]) if first is None else first
        self._best = math.inf
        self.tried: dict[Trial, Outcome] = {}  # on the first seed

    def run(self, forms: Sequence[str]) -> None:
        """Try all forms and momenta on the first seed, and if none is at the target, for longer."""
        self._try_all(forms)
        if not self._times():
            self.limit *= LONGER
            self._try_all(forms)

    def _try_all(self, forms: Sequence[str]) -> None:
        """What is soon at the target comes first where that is known."""
        for form in forms:
            for momentum in MOMENTA if self.side == "asp" else reversed(MOMENTA):
                if momentum or form == min(forms, key=len):  # without momentum the forms are the same arithmetic
                    self._tune(form, momentum)

    def _tune(self, form: str, momentum: float) -> None:
        found: dict[int, tuple[float, float]] = {}

        def visit(exponent: int) -> None:
            if exponent not in found and LOWEST <= exponent <= HIGHEST:
                found[exponent] = self._try(form, momentum, exponent)

        middle = START[momentum][1]
        for exponent in (middle, *START[momentum]):
            visit(exponent)
        for edge in iter(lambda: beyond(found), None):
            visit(edge)
        best = min(found, key=lambda exponent: found[exponent])
        if found[best][0] <= REFINED * self._best:
            visit(best - 1)
            visit(best + 1)

    def _try(self, form: str, momentum: float, exponent: int) -> tuple[float, float]:
        """Return the time, and the accuracy at the end to tell misses apart; smaller is better."""
        trial = Trial(self.cell, form, rate_of(exponent), momentum, TUNING_SEEDS[0], self.batch, rounded(self.limit))
        outcome = self.tried[trial] = self._make(trial)
        if outcome.reached_s is not None:
            self._best = min(self._best, outcome.reached_s)
            self.limit = min(self.limit, CUT * outcome.reached_s)
        return outcome.reached_s or math.inf, -outcome.accuracy

    def first_choice(self) -> Choice | None:
        """The best on the first seed alone; None if none is ever at the target."""
        times = self._times()
        return Choice(self.side, best := min(times, key=lambda trial: times[trial]), times[best]) if times else None

    def choose(self) -> Choice | None:
        """Run the best on the other seeds, too, and return the best of all; None if none is ever at the target."""
        times = self._times()
        if not times:
            return None
        left = sorted(times, key=lambda trial: times[trial])
        limit = rounded(CUT * times[left[0]])
        while left:
            close = [trial for trial in left if times[trial] <= CLOSE * times[left[0]]][:CANDIDATES]
            chosen = self._best_of(close, times, limit)
            if chosen is not None:
                return chosen
            left = [trial for trial in left if trial not in close]
        lucky = min(times, key=lambda trial: times[trial])
        return Choice(self.side, lucky, CUT * times[lucky])

    def _best_of(self, close: list[Trial], times: dict[Trial, float], limit: float) -> Choice | None:
        """Return the best of these on all tuning seeds; None if each misses the target on one of them."""
        few = {trial: self._score(trial, TUNING_SEEDS[:FEW], times[trial], limit) for trial in close}
        order = sorted(close, key=lambda trial: (few[trial], trial.rate))
        last = [trial for trial in order if few[trial] <= CLOSE * few[order[0]]][:FINALISTS]
        scores = {trial: self._score(trial, TUNING_SEEDS, times[trial], limit) for trial in last}
        first = min(last, key=lambda trial: (scores[trial], few[trial]))
        if scores[first] == math.inf:
            return None
        tied = [trial for trial in last if alike(trial, first) and scores[trial] <= TIE * scores[first]]
        best = min(tied, key=lambda trial: trial.rate)
        return Choice(self.side, best, scores[best])

    def _score(self, trial: Trial, seeds: tuple[int, ...], first: float, limit: float) -> float:
        """The geometric mean of these seeds, of which the first is known; infinite once one of them misses."""
        found = [first]
        for seed in seeds[1:]:
            reached = self._make(msgspec.structs.replace(trial, seed=seed, limit_s=limit)).reached_s
            if reached is None:
                return math.inf
            found.append(reached)
        return statistics.geometric_mean(found)

    def _times(self) -> dict[Trial, float]:
        return {trial: outcome.reached_s for trial, outcome in self.tried.items() if outcome.reached_s is not None}


def alike(one: Trial, other: Trial) -> bool:
    """Whether two trials differ by their rate alone."""
    return msgspec.structs.replace(one, rate=0.0, limit_s=0.0) == msgspec.structs.replace(other, rate=0.0, limit_s=0.0)


def beyond(found: dict[int, tuple[float, float]]) -> int | None:
    """The next exponent to try while the best lies on the edge of what was tried."""
    best = min(found, key=lambda exponent: found[exponent])
    if best == min(found) and best - 2 >= LOWEST:
        return best - 2
    if best == max(found) and best + 2 <= HIGHEST:
        return best + 2
    return None


def rounded(limit: float) -> float:
    """A limit with few digits, so that a trial is the same when it is asked for again."""
    return float(f"{limit:.4g}")


def fresh(choice: Choice, make: Make, seeds: Iterable[int] = FRESH_SEEDS) -> list[Outcome]:
    """The chosen trial on seeds that chose nothing."""
    limit = rounded(FRESH_LIMIT * choice.score)
    return [make(msgspec.structs.replace(choice.trial, seed=seed, limit_s=limit)) for seed in seeds]


# -- comparing -------------------------------------------------------------------------------------------------------


class Ratio(msgspec.Struct, frozen=True):
    """The geometric mean of the ratios of paired seeds, and its 90 % interval by t on the logarithms."""

    mean: float
    low: float
    high: float


T_90 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}  # by freedom


def seconds_of(outcome: Outcome) -> float:
    """The time to the target; of a run that missed it, the time it was given."""
    return outcome.seconds if outcome.reached_s is None else outcome.reached_s


def ratio(ours: list[float], theirs: list[float]) -> Ratio:
    """Of paired times."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(logs)
    off = T_90[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return Ratio(math.exp(mean), math.exp(mean - off), math.exp(mean + off) if off < math.inf else math.inf)
