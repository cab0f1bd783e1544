"""Actions: the outputs of a strategy, each with its reason, numbers included.

Within one decision they come in the order of this file. The pushes of an Apply come in worker order, because
floating-point sums follow it. The Grants, at most one for each worker, come in the order in which samples are allotted
and models are sent: worker order, unless the strategy has a reason to send one model before another.
"""

import msgspec


class Apply(msgspec.Struct, frozen=True, gc=False, tag="apply", tag_field="kind"):
    """Merge these pushes into one new version; the weights add up to the mass of the step."""

    pushes: tuple[int, ...]
    weights: tuple[float, ...]
    reason: str
    stock: bool = False  # one unscaled optimizer step on the weighted sum, instead of the mass rule


class Discard(msgspec.Struct, frozen=True, gc=False, tag="discard", tag_field="kind"):
    """Drop a held push; its samples are issued again."""

    push: int
    reason: str


class Cancel(msgspec.Struct, frozen=True, gc=False, tag="cancel", tag_field="kind"):
    """Take back the worker's running grant; its samples are issued again."""

    worker: int
    reason: str


class Grant(msgspec.Struct, frozen=True, gc=False, tag="grant", tag_field="kind"):
    """Let the worker compute `work` samples and push them as clock `through`."""

    worker: int
    work: int
    through: int
    reason: str
    extends: int | None = None  # a held push of the same process that these samples are added to
    cached: bool = False  # no pull, if the worker can add its own last update to what it has exactly as the server did


class SetTimer(msgspec.Struct, frozen=True, gc=False, tag="timer", tag_field="kind"):
    """Feed TimerFired at that time; replaces an earlier timer of the same name, and `at=None` clears it."""

    name: str
    at: float | None
    reason: str


class Mark(msgspec.Struct, frozen=True, gc=False, tag="mark", tag_field="kind"):
    """Record the worker's state from here on; has no other effect."""

    worker: int
    state: str
    reason: str


class Track(msgspec.Struct, frozen=True, gc=False, tag="track", tag_field="kind"):
    """Record a quantity of the strategy for plots; has no other effect."""

    name: str
    value: float
    reason: str
    worker: int | None = None


Action = Apply | Discard | Cancel | Grant | SetTimer | Mark | Track
