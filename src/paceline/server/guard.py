"""The convergence guard: asynchronous training must never fail silently.

It watches losses and the norms of applied gradients. A value that is not finite is reported at once; a loss above four
times its best for fifty rounds in a row is reported then, with the worker, staleness and mass involved. The loss is
averaged over some ten rounds: the luckiest of many small batches is no measure (of 18 small-batch runs that reached
their target, 5 were called diverging by single losses, none by the average). A loss that is small beside the first one
is never called diverging.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paceline.core.errors import OptionError
from paceline.core.updates import PushRef
from paceline.strategies.base import Strategy

NO_LOSS = "the script reports no loss: the guard watches gradients alone (add `session.report(loss=loss)`)"

WORSE_THAN_BEST = 4.0  # a loss this many times its best is no longer noise
PATIENCE_ROUNDS = 50.0  # and this many rounds are no longer a bad patch
AVERAGED_ROUNDS = 10.0  # several batches, and few beside the patience
SETTLED = 0.5  # of its full weight; a younger average is no better a measure than a single loss
HARMLESS = 0.01  # of the first loss


class Listener(Protocol):
    """Receives the findings of `Watch`."""

    def on_divergence(self, text: str) -> None: ...

    def on_nonfinite(self) -> None: ...


class Guard:
    """Says in words what is going wrong; the caller decides what to do about it."""

    def __init__(self) -> None:
        self.best = math.inf
        self.first = 0.0  # mean over the first round, when the model has hardly moved
        self._opening = 0.0
        self._mean, self._known = 0.0, 0.0
        self._bad_rounds = 0.0
        self._seen_refusal = False
        self._silent = True

    def snapshot(self) -> dict[str, float | bool]:
        """Return all that it has seen, as plain data."""
        return dict(vars(self))

    def restore(self, data: Mapping[str, Any]) -> None:
        """Continue from a snapshot; numbers that JSON cannot write, such as infinity, come as strings."""
        vars(self).update({name: type(value)(data[name]) for name, value in vars(self).items()})

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

    def applied(self, loss: float | None, norm: float | None, mass: float, worker: int, staleness: int) -> str | None:
        """Check an applied version, return a warning or None; `worker` and `staleness` are of its stalest push."""
        if loss is None:
            return (
                None if norm is None or math.isfinite(norm) else self._not_finite("norm", norm, mass, worker, staleness)
            )
        if not math.isfinite(loss):
            return self._not_finite("loss", loss, mass, worker, staleness)
        if self._opening < 1:
            self.first += loss * mass
            self._opening += mass
            if self._opening >= 1:
                self.first /= self._opening
                self.best = self.first
            return None
        mean = self._averaged(loss, mass)
        if self._known >= SETTLED:
            self.best = min(self.best, mean)
        # A multiple of a best loss that is zero or negative means nothing; the absolute excess does.
        limit = WORSE_THAN_BEST * self.best if self.best > 0 else self.best + WORSE_THAN_BEST
        if mean <= limit or abs(mean) <= HARMLESS * abs(self.first):
            self._bad_rounds = 0.0
            self._silent = True
            return None
        self._bad_rounds += mass
        if self._bad_rounds < PATIENCE_ROUNDS or not self._silent:
            return None
        self._silent = False
        return (
            f"diverging: loss {mean:.4g} has been above {WORSE_THAN_BEST:g} times its best ({self.best:.4g}) for "
            f"{self._bad_rounds:.0f} rounds; last applied: worker {worker}, staleness {staleness}, mass {mass:.3g}"
        )

    def _averaged(self, loss: float, mass: float) -> float:
        """Return the mean of recent losses, weighted by mass and corrected for the mean's start at zero."""
        share = 1 - math.exp(-mass / AVERAGED_ROUNDS)
        self._mean += share * (loss - self._mean)
        self._known += share * (1 - self._known)
        return self._mean / self._known

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

    def applied(self, held: list[PushRef], mass: float, norm: float | None, version: int, strategy: Strategy) -> None:
        """Note the mean loss of the pushes applied to `version`, and ask the guard."""
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
        self._take_note(self._guard.applied(self.loss, norm, mass, stalest.worker, staleness))

    def refused(self, worker: int, step: int, norm: float, staleness: int) -> None:
        """Report a push that is not finite and was refused."""
        self._take_note(self._guard.refused(worker, step, norm, staleness))
        self._listener.on_nonfinite()

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
