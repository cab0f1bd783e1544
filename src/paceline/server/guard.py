"""The convergence guard: asynchronous training must never fail silently.

It watches losses and the norms of applied gradients. A value that is not finite is reported at once. The loss is
averaged over some ten rounds, and this mean compared with the first loss and with its own best:

- It has exploded when it is twice the first loss. Losses that fall below zero (log densities, critics) have no bottom;
  there it must also lie above the first loss by half of what had been gained.
- It has fallen back when it is twice its best and three quarters of what had been gained are lost again. This goes for
  losses that were never negative: a critic's loss comes back to zero as its opponent learns.

If the loss does not recover within fifty rounds, the guard says so, with the worker, staleness and mass. A loss that
has exploded recovers when it is half way back to its best and a tenth below the first one: a ruined model often
goes on at the loss of guessing, which is about the first loss. Below the first loss, one that keeps falling gets more
time: so does training after a warm restart or on harder data.

Small batches make lucky first and best losses, beside which all others look bad. So a verdict also needs losses that
nearly all are bad, and that are steady, or clear of their own deviation, or many times those of the first rounds.

All of this is relative to the losses seen: their unit does not matter. A positive constant added to them makes the
guard more patient. `benchmarks/bench_guard.py` has runs of every kind.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paceline.core.errors import OptionError
from paceline.core.updates import PushRef
from paceline.strategies.base import Strategy

NO_LOSS = "the script reports no loss: the guard watches gradients alone (add `session.report(loss=loss)`)"

AVERAGED_ROUNDS = 10.0  # several batches, and few beside the patience
PATIENCE_ROUNDS = 50.0  # a bad patch is over by then, or the loss visibly on its way down
SETTLED = 0.5  # of its full weight; a younger average is no better a measure than a single loss
TIMES_WORSE = 2.0  # than the first loss, or the best
LOST_SHARE = 0.75  # of what had been gained; harder data of the trials cost up to 0.7
RECOVERED_SHARE, BELOW_FIRST = 0.5, 0.1  # of what had been gained, and of the first loss: guessing does not get there
FALL = 0.03  # of the first loss; guessing hardly gets there
MOSTLY, NEARLY_ALL = 0.8, 0.98  # of the rounds
STEADY, STILL = 0.2, 0.12  # mean change from one loss to the next, of their sum; squares of normal errors: batch 8 0.27
GROWTH = 10.0  # times the mean of the first rounds
LEARNED = 0.5  # of the first loss
CLEAR_AFTER_LEARNING = 1.25  # mean deviations; squares of normal errors in batches of one are 1.1 above zero
CLEAR_OF_NOISE = 1.6  # a loss that oscillates between a height and a quarter of it is 1.7 above zero
FAR_FROM_NOISE = 8.0  # mean deviations, for losses that have no other measure since they change their sign


class Listener(Protocol):
    """Receives the findings of `Watch`."""

    def on_divergence(self, text: str) -> None: ...

    def on_nonfinite(self, worker: int) -> None: ...


class Guard:
    """Says in words what is going wrong; the caller decides what to do about it."""

    def __init__(self) -> None:
        self.best = math.inf
        self.first = 0.0  # mean over the first round, when the model has hardly moved
        self._opening = 0.0  # rounds of it
        self._mean, self._known = 0.0, 0.0  # over ten rounds
        self._slow_mean, self._deviation, self._unrest, self._slow_known = 0.0, 0.0, 0.0, 0.0  # over fifty
        self._last = 0.0
        self._early = math.inf  # the first mean that is a measure
        self._calm_deviation = math.inf  # when the trouble began, if it was known by then
        self._exploded = False
        self._bad_rounds = 0.0
        self._above, self._not_recovered = 0.0, 0.0  # those of them whose own losses are so
        self._mark = 0.0  # a loss below it has fallen
        self._fell = False
        self._seen_refusal = False
        self._silent = True

    def snapshot(self) -> dict[str, float | bool]:
        """Return all that it has seen, as plain data."""
        return dict(vars(self))

    def restore(self, data: Mapping[str, Any]) -> None:
        """Continue from a snapshot; numbers that JSON cannot write, such as infinity, come as strings.

        What a snapshot of an earlier guard lacks begins afresh.
        """
        vars(self).update({name: type(value)(data[name]) for name, value in vars(self).items() if name in data})

    def refused(self, worker: int, step: int, norm: float, staleness: int) -> str | None:
        """Return a warning for the first push that is not finite; the journal counts the rest."""
        if self._seen_refusal:
            return None
        self._seen_refusal = True
        return (
            f"diverging: the gradient of worker {worker} at its step {step} is not finite (norm {norm}), {staleness} "
            "versions after its read; it was refused and its samples are lost. Lower the learning rate or choose a "
            "stricter strategy"
        )

    def applied(
        self, loss: float | None, norm: float | None, rounds: float, mass: float, worker: int, staleness: int
    ) -> str | None:
        """Check an applied version, return a warning or None.

        `rounds` is how much of a round it is; `worker` and `staleness` are of its stalest push.
        """
        if loss is None:
            return (
                None if norm is None or math.isfinite(norm) else self._not_finite("norm", norm, mass, worker, staleness)
            )
        if not math.isfinite(loss):
            return self._not_finite("loss", loss, mass, worker, staleness)
        if self._opening < 1:
            self.first += loss * rounds
            self._last = loss
            self._opening += rounds
            if self._opening >= 1:
                self.first /= self._opening
                self.best = self.first
            return None
        mean = self._averaged(loss, rounds)
        if self._known >= SETTLED:
            self.best = min(self.best, mean)
            self._early = mean if self._early == math.inf else self._early
        if not self._is_bad(mean):
            self._bad_rounds = 0.0
            self._silent = True
            return None
        self._count(loss, mean, rounds)
        if self._bad_rounds < PATIENCE_ROUNDS or self._is_noise(mean) or not self._silent:
            return None
        self._silent = False
        return (
            f"diverging: loss {mean:.4g}, averaged over {AVERAGED_ROUNDS:g} rounds, was {self.first:.4g} at first and "
            f"{self.best:.4g} at best, and has not recovered for {self._bad_rounds:.0f} rounds; "
            f"last applied: worker {worker}, staleness {staleness}, mass {mass:.3g}"
        )

    def _limit(self) -> float:
        """Return above what a loss has fallen back."""
        return max(self.best + LOST_SHARE * (self.first - self.best), TIMES_WORSE * self.best)

    def _recovered(self) -> float:
        """Return the loss at which one that had exploded has recovered."""
        return self.first - max(RECOVERED_SHARE * (self.first - self.best), BELOW_FIRST * abs(self.first))

    def _is_bad(self, mean: float) -> bool:
        """Whether the loss has exploded and not recovered, or has fallen back."""
        first, gained = self.first, self.first - self.best
        if mean > first + max((TIMES_WORSE - 1) * abs(first), RECOVERED_SHARE * gained):
            self._exploded = True
        elif mean <= self._recovered():
            self._exploded = False
        return self._exploded or (self.best >= 0 and mean > self._limit())

    def _count(self, loss: float, mean: float, rounds: float) -> None:
        """Count rounds since the loss became bad, or since it last fell below the first one and every earlier low."""
        if self._bad_rounds == 0:
            self._mark, self._fell = mean, False
            self._calm_deviation = self._deviation / self._slow_known if self._slow_known >= SETTLED else math.inf
        if not self._fell:
            self._mark = max(self._mark, mean)
        if mean < min(self._mark, self.first) - FALL * abs(self.first):
            self._mark, self._fell = mean, True
            self._bad_rounds = 0.0
        if self._bad_rounds == 0:
            self._above = self._not_recovered = 0.0
        self._bad_rounds += rounds
        self._above += rounds * (loss > self._limit())
        self._not_recovered += rounds * (loss > self._recovered())

    def _is_noise(self, mean: float) -> bool:
        """Whether losses vary so much that the first or the best one may have been good by luck."""
        deviation, slow_mean = self._deviation / self._slow_known, self._slow_mean / self._slow_known
        excess = slow_mean - self.best
        if self.best < 0:
            return excess <= FAR_FROM_NOISE * min(deviation, self._calm_deviation)
        unrest = self._unrest / self._slow_known
        if self._exploded and mean <= self._limit():  # it goes on at the loss of guessing
            return unrest > STILL or self._not_recovered < MOSTLY * self._bad_rounds
        bad_share = self._above / self._bad_rounds
        if bad_share < MOSTLY:
            return True
        has_learned = self.best < LEARNED * self.first  # so its first loss was no lucky one
        needed = CLEAR_AFTER_LEARNING if has_learned else CLEAR_OF_NOISE if bad_share >= NEARLY_ALL else math.inf
        grows = slow_mean > GROWTH * self._early and excess > deviation
        return not (unrest <= STEADY or excess > needed * deviation or grows)

    def _averaged(self, loss: float, rounds: float) -> float:
        """Return the mean of recent losses, weighted by rounds and corrected for the mean's start at zero."""
        share = 1 - math.exp(-rounds / AVERAGED_ROUNDS)
        self._mean += share * (loss - self._mean)
        self._known += share * (1 - self._known)
        mean = self._mean / self._known
        share = 1 - math.exp(-rounds / PATIENCE_ROUNDS)
        self._slow_mean += share * (loss - self._slow_mean)
        change, size = abs(loss - self._last), abs(loss) + abs(self._last)
        self._deviation += share * (abs(loss - mean) - self._deviation)
        self._unrest += share * ((change / size if size else 0.0) - self._unrest)
        self._last = loss
        self._slow_known += share * (1 - self._slow_known)
        return mean

    def _not_finite(self, what: str, value: float, mass: float, worker: int, staleness: int) -> str | None:
        if not self._silent:
            return None
        self._silent = False
        return f"diverging: {what} is {value}; applied last: worker {worker}, staleness {staleness}, mass {mass:.3g}"


class Watch:
    """The loss of the version applied last; passes the guard's warnings on to a listener, which decides."""

    def __init__(self, warn: Callable[[str], None], listener: Listener) -> None:
        self.loss: float | None = None
        self._warn = warn
        self._listener = listener
        self._guard = Guard()
        self._told_of_losses = False
        self._seen_loss = False
        self._by_samples = False

    def count_samples(self) -> None:
        """Count rounds by their samples, not by mass: each node's step is a whole one, of its own model."""
        self._by_samples = True

    def expect_no_losses(self) -> None:
        """Do not warn of missing losses: not every iteration has one."""
        self._told_of_losses = True

    def snapshot(self) -> dict[str, Any]:
        """Return what it has seen, as plain data."""
        told, seen = self._told_of_losses, self._seen_loss
        return {"loss": self.loss, "told_of_losses": told, "seen_loss": seen, "guard": self._guard.snapshot()}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        self.loss = None if data["loss"] is None else float(data["loss"])
        self._told_of_losses, self._seen_loss = data["told_of_losses"], data["seen_loss"]
        self._guard.restore(data["guard"])

    def applied(
        self, held: list[PushRef], share: float, mass: float, norm: float | None, version: int, strategy: Strategy
    ) -> None:
        """Note the mean loss of the pushes applied to `version`, which are `share` of a round, and ask the guard."""
        stalest = held[0]
        if len(held) == 1:
            self.loss = stalest.loss if stalest.samples else None
        else:
            self.loss = _mean_loss(held)
            stalest = min(held, key=lambda push: push.read_version)
        if self.loss is None:
            self._miss_loss(strategy)
        self._seen_loss = self._seen_loss or self.loss is not None
        staleness = version - stalest.read_version
        rounds = share if self._by_samples else mass
        self._take_note(self._guard.applied(self.loss, norm, rounds, mass, stalest.worker, staleness))

    def refused(self, worker: int, step: int, norm: float, staleness: int) -> None:
        """Report a push that is not finite and was refused."""
        self._take_note(self._guard.refused(worker, step, norm, staleness))
        self._listener.on_nonfinite(worker)

    def _miss_loss(self, strategy: Strategy) -> None:
        if not self._told_of_losses and not self._seen_loss:
            self._told_of_losses = True
            self._warn(NO_LOSS)
        if strategy.needs_losses and not self._seen_loss:
            raise OptionError(
                f"{strategy.name} decides by the loss, and the script reports none: add "
                "`session.report(loss=loss)` before `optimizer.step()`"
            )

    def _take_note(self, text: str | None) -> None:
        if text is not None:
            self._warn(text)
            self._listener.on_divergence(text)


def _mean_loss(held: list[PushRef]) -> float | None:
    known = [(push.loss, push.samples) for push in held if push.loss is not None]
    total = sum(samples for _, samples in known)
    return sum(loss * samples for loss, samples in known) / total if total else None
