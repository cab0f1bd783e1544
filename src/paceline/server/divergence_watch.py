"""What the coordinator keeps an eye on: the loss of each version and, through the guard, signs of divergence."""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.errors import OptionError
from paceline.server.guard import Guard
from paceline.server.workers import Held
from paceline.strategies.base import Strategy

NO_LOSS = "the script reports no loss: the guard watches gradients alone (add `session.report(loss=loss)`)"


class Watch:
    """The loss of the version applied last, and the divergence nobody has dealt with yet."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.loss: float | None = None
        self.divergence: str | None = None
        self.on_divergence: Callable[[], None] | None = None  # where every push is refused no version follows
        self.on_nonfinite: Callable[[], None] | None = None
        self._warn = warn
        self._guard = Guard()
        self._told_of_losses = False
        self._seen_loss = False

    def expect_no_losses(self) -> None:
        """Not every iteration has a loss, and nobody need say so."""
        self._told_of_losses = True

    def snapshot(self) -> dict[str, Any]:
        """What it has seen, as plain data."""
        told, seen = self._told_of_losses, self._seen_loss
        return {"loss": self.loss, "told_of_losses": told, "seen_loss": seen, "guard": self._guard.snapshot()}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Go on from a snapshot."""
        self.loss = None if data["loss"] is None else float(data["loss"])
        self._told_of_losses, self._seen_loss = data["told_of_losses"], data["seen_loss"]
        self._guard.restore(data["guard"])

    def applied(self, held: list[Held], mass: float, norm: float | None, version: int, strategy: Strategy) -> None:
        """These pushes were applied to `version`: note their mean loss and hear the guard."""
        stalest = held[0]
        if len(held) == 1:
            self.loss = stalest.gradient.loss if stalest.gradient is not None and stalest.samples else None
        else:
            self.loss = _mean_loss(held)
            stalest = min(held, key=lambda h: h.read_version)
        if self.loss is None:
            self._miss_loss(strategy)
        self._seen_loss = self._seen_loss or self.loss is not None
        staleness = version - stalest.read_version
        self._take_note(self._guard.applied(self.loss, norm, mass, stalest.worker, staleness))

    def refused(self, worker: int, step: int, norm: float, staleness: int) -> None:
        """A push was not finite and went no further."""
        self._take_note(self._guard.refused(worker, step, norm, staleness))
        if self.on_nonfinite is not None:
            self.on_nonfinite()

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
            self.divergence = text
            self._warn(text)
            if self.on_divergence is not None:
                self.on_divergence()


def _mean_loss(held: list[Held]) -> float | None:
    known = [(h.gradient.loss, h.samples) for h in held if h.gradient is not None and h.gradient.loss is not None]
    total = sum(samples for _, samples in known)
    return sum(loss * samples for loss, samples in known) / total if total else None
