"""What to do: the outputs of a strategy, each with the reason for it, numbers included.

Within one decision they stand in the order of this file; Applies name their pushes, and Grants follow each other, in
worker order, because floating-point sums and the allotment of samples follow that order.
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
    """Take the worker's running grant back; its samples are issued again."""

    worker: int
    reason: str


class Grant(msgspec.Struct, frozen=True, gc=False, tag="grant", tag_field="kind"):
    """Let the worker compute `work` samples and push them as clock `through`."""

    worker: int
    work: int
    through: int
    reason: str
    extends: int | None = None  # a held push of the same process that these samples are added to


class SetTimer(msgspec.Struct, frozen=True, gc=False, tag="timer", tag_field="kind"):
    """Feed TimerFired at that time; a name set before is replaced, and `at=None` clears it."""

    name: str
    at: float | None
    reason: str


class Mark(msgspec.Struct, frozen=True, gc=False, tag="mark", tag_field="kind"):
    """The worker is in this state from here on; recorded, without effect."""

    worker: int
    state: str
    reason: str


class Track(msgspec.Struct, frozen=True, gc=False, tag="track", tag_field="kind"):
    """A quantity of the strategy's own, recorded for plots, without effect."""

    name: str
    value: float
    reason: str
    worker: int | None = None


Action = Apply | Discard | Cancel | Grant | SetTimer | Mark | Track
