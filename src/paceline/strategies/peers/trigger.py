"""When a model has changed enough to be worth an exchange: the shared part of the adaptive machines.

Published (Ho, Wu, Liu, "Adaptive communication for distributed deep learning on commodity GPU cluster", CCGrid 2018):
a fixed period wastes traffic; exchange according to the change of the local model instead, with a threshold set
dynamically. Reconstruction, the rule: a tensor is due when

    change^2 * (steps since its last exchange) ^ steps_power >= threshold^2 * (share of the bytes) ^ share_power

with `change = |x - x_last| / |x_last|`; always during the first `warmup` steps of a node, and at least every
`max_interval` steps. With `scope=model` the whole model is one tensor. Both powers are 1 in the reconstruction; the
defaults, 2, are paceline's own and were measured (docs/internals/gossip-defaults.md): a higher share_power lets the
largest tensors wait longer and all others less, a higher steps_power spreads exchanges more evenly over the run, so
that nodes end nearer to each other; both take a higher threshold. A threshold
that follows the recent change per step would be scale-free and end up as a fixed period, so it stays put, or follows a
budget of bytes instead.

The budget is a share of what an exchange of the whole model at every step would send. The account of models sent
beyond it is kept from the end of the warm-up on, and `threshold = threshold at first * exp(account / MODELS)`: each
model sent raises it by a tenth, each model's worth of budget left unused lowers it by as much. What is sent therefore
differs from the budget, over any number of steps, by at most MODELS times the logarithm of how far the threshold has
moved, whatever the learning rate does. Steps at which no exchange is possible do not count.
"""

from collections.abc import Sequence
from math import exp
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from paceline.core.actions import Track
from paceline.core.errors import InternalError, OptionError
from paceline.core.peer_events import Stepped
from paceline.strategies.base import Options
from paceline.strategies.peers.periods import SharePower, require_tensors

MODELS = 10.0  # models sent beyond the budget that raise the threshold e-fold; large, so that it moves smoothly
TRACKED = 0.99  # a smaller change of the threshold, relative to the last tracked one, is not tracked
FORMER = {
    "share_power": "1",
    "steps_power": "1",
    "warmup": "20",
}  # defaults in journals that do not name their defaults
SHARE_POWER = 2.0  # the default: measured best where one tensor has most of the bytes, and elsewhere the same
LIMIT = 100.0  # models; keeps the account finite while nothing changes at all


Threshold = Annotated[
    float, Meta(ge=0, description="relative change; 0 exchanges at every step, with a budget it is the first value")
]


class TriggerOptions(Options, frozen=True, kw_only=True):
    """When a tensor is due, and the budget."""

    threshold: Threshold = 0.3
    scope: Annotated[
        Literal["tensor", "model"], Meta(description="tensor: each tensor when it has changed; model: all at once")
    ] = "tensor"
    share_power: (
        Annotated[
            SharePower,
            Meta(
                description="how much longer large tensors wait: 1 in proportion to the root of their bytes, 2 to "
                "their bytes; 0 as long as small ones; none: 2, of use with scope=tensor"
            ),
        ]
        | None
    ) = None
    steps_power: Annotated[
        float,
        Meta(
            ge=0,
            le=4,
            description="how much sooner a tensor is due that was not exchanged for long; 0: change alone decides",
        ),
    ] = 2.0
    warmup: Annotated[int, Meta(ge=0, description="steps of a node at whose beginning it exchanges every time")] = 0
    max_interval: Annotated[int, Meta(ge=1, description="steps; no tensor goes longer without an exchange")] = 100
    budget: (
        Annotated[float, Meta(gt=0, le=1, description="share of the bytes of period=1 that steers the threshold")]
        | None
    ) = None

    def __post_init__(self) -> None:
        require_tensors(self.scope, 1.0 if self.share_power is None else self.share_power)
        if self.budget is None:
            return
        least = 1 / self.max_interval
        if self.budget < least:
            raise OptionError(
                f"budget must be >= 1 / max_interval ({least:g}), not {self.budget:g}; raise it or max_interval"
            )
        if not 0 < self.threshold < float("inf"):
            raise OptionError(f"threshold must be > 0 and finite where a budget steers it, not {self.threshold:g}")


class Due(msgspec.Struct, frozen=True):
    """What to exchange at this step, and why."""

    tensors: tuple[int, ...] | None  # None: all
    share: float  # of the model's bytes
    interval: float  # steps since these bytes were last exchanged, on average
    why: str


class Trigger(msgspec.Struct):
    """Steps since each part's last exchange; a part is a tensor, or the model."""

    threshold: float = 0.0
    sizes: list[int] = []  # bytes of each part
    limits: list[float] = []  # its share of all bytes to the share_power; 0 where it has none
    total: int = 0
    steps: int = 0  # of this node, from its start
    last: list[int] = []  # the step of each part's last exchange
    account: float = 0.0  # models sent beyond the budget
    tracked: float = 1.0  # the last threshold that was tracked

    @staticmethod
    def start(sizes: Sequence[int], options: TriggerOptions) -> "Trigger":
        """Make the trigger of a node that starts."""
        total = sum(sizes)
        parts = list(sizes) if options.scope == "tensor" else [total]
        power = SHARE_POWER if options.share_power is None else options.share_power
        limits = [(size / total) ** power if size else 0.0 for size in parts]
        threshold = options.threshold
        return Trigger(threshold, sizes=parts, limits=limits, total=total, last=[0] * len(parts), tracked=threshold)

    def step(self, event: Stepped, options: TriggerOptions) -> Due | None:
        """Count the step and return what is due after it. Empty parts never are."""
        self.steps += 1
        steps, last, longest, power = self.steps, self.last, options.max_interval, options.steps_power
        if steps <= options.warmup:
            parts = [part for part, size in enumerate(self.sizes) if size]
            return self._due(parts, options, f"warm-up step {steps} of {options.warmup}")
        changes = _changes(event, options)
        enough = self.threshold * self.threshold
        # Written so that a change of NaN is due as well.
        parts = [
            part
            for part, (limit, change, at) in enumerate(zip(self.limits, changes, last, strict=True))
            if limit and (steps - at >= longest or not change * change * (steps - at) ** power < enough * limit)
        ]
        if not parts:
            return None
        first = parts[0]
        what = f"tensor {first}" if options.scope == "tensor" else "the model"
        change, since = changes[first], steps - last[first]
        limit = f"max_interval {longest}" if since >= longest else f"threshold {self.threshold:.4g}"
        return self._due(parts, options, f"{what} changed by {change:.4g} in {since} steps, {limit}")

    def _due(self, parts: list[int], options: TriggerOptions, why: str) -> Due | None:
        if not parts:
            return None
        sizes, nonempty = self.sizes, sum(1 for size in self.sizes if size)
        size = sum(sizes[part] for part in parts)
        interval = sum(sizes[part] * (self.steps - self.last[part]) for part in parts) / size
        if options.scope == "tensor":
            why = f"{len(parts)} of {nonempty} tensors, {why}"
        return Due(None if len(parts) == nonempty else tuple(parts), size / self.total, interval, why)

    def exchanged(self, tensors: tuple[int, ...] | None) -> None:
        """Note that these tensors were exchanged after the last step."""
        if tensors is None or len(self.sizes) == 1:  # the one part is the model, or its only tensor
            self.last = [self.steps] * len(self.sizes)
        else:
            for tensor in tensors:
                self.last[tensor] = self.steps

    def settle(self, due: Due | None, options: TriggerOptions) -> list[Track]:
        """Account for what was sent at a step that could exchange, and track interval and threshold."""
        spent = due.share if due is not None else 0.0
        budget = options.budget
        if budget is not None and self.steps > options.warmup:
            self.account = min(max(self.account + spent - budget, -LIMIT), LIMIT)
            self.threshold = options.threshold * exp(self.account / MODELS)
        tracks = []
        if due is not None:
            reason = f"{due.share:.4g} of the model after {due.interval:.4g} steps"
            tracks.append(Track("interval", due.interval, reason))
        if budget is not None and not TRACKED < self.threshold / self.tracked < 1 / TRACKED:
            self.tracked = self.threshold
            reason = f"{self.account:.4g} models beyond the budget of {budget:g} a step"
            tracks.append(Track("threshold", self.threshold, reason))
        return tracks

    def track(self) -> Track:
        """Track the threshold at the start."""
        return Track("threshold", self.threshold, f"{len(self.sizes)} parts of {self.total} bytes in all")


def _changes(event: Stepped, options: TriggerOptions) -> Sequence[float]:
    if options.scope == "tensor" and event.changes is not None:
        return event.changes
    if options.scope == "model" and event.change is not None:
        return (event.change,)
    raise InternalError(f"step {event.step} came without the change of each {options.scope}")
