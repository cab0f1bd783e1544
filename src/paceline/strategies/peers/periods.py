"""A fixed period for each tensor: what is left of the trigger of the adaptive machines when nothing adapts.

Rule: tensors have periods in proportion to `bytes ^ (share_power / 2)`, none below one step, such that all together
send what the whole model sent every `period` steps would. paceline's own; ALGORITHMS calls it the fixed per-tensor
period. It is the control that separates the gain of adapting from the gain of small tensors being cheap.

Why the root, which share_power=1 is: of all periods that cost the same bytes, these have the smallest sum, so that
tensors are old for the shortest time on average; and where every tensor moves at random and at the same relative pace,
`change^2 * steps since = threshold^2 * share of the bytes ^ share_power` (trigger.py) is reached after just these
intervals. share_power=2 makes all tensors cost the same, and 0 gives all the same period.

A period need not be a whole number: the n-th exchange is due at the first step that is not before n periods.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta

from paceline.core.errors import OptionError

ROUNDING = 1e-9  # periods by which an exchange may be early, so that rounding does not miss a multiple

Scope = Annotated[
    Literal["model", "tensor"],
    Meta(
        description="model: all tensors every period steps; tensor: each at a period of its own, "
        "the longer the more bytes it has (share_power), as many bytes in all"
    ),
]
SharePower = Annotated[
    float,
    Meta(
        ge=0,
        le=2,
        description="how much longer large tensors wait: 1 in proportion to the root of their bytes, 2 to their bytes; "
        "0 as long as small ones",
    ),
]


def require_tensors(scope: str, share_power: float) -> None:
    """Refuse a share_power with scope=model, where all tensors have one period."""
    if scope == "model" and share_power != 1.0:
        raise OptionError(f"share_power={share_power:g} is of use with scope=tensor, not with scope=model; change one")


def of_each(sizes: Sequence[int], period: int, share_power: float = 1.0) -> list[float]:
    """Return the period of each tensor, in steps; an empty one has the shortest, and is never sent."""
    total = sum(sizes)
    longer = [(size / total) ** (share_power / 2) if size else 0.0 for size in sizes]
    often = {place for place, size in enumerate(sizes) if not size}  # those sent at every step, or empty
    scale = 0.0
    while len(often) < len(sizes):
        left = 1 / period - sum(sizes[place] for place in often) / total
        scale = sum(sizes[place] / total / longer[place] for place in range(len(sizes)) if place not in often) / left
        short = {place for place in range(len(sizes)) if scale * longer[place] <= 1 + ROUNDING}
        if short <= often:
            break
        often |= short  # they cost less than their part of the sum, so all other periods can only shrink
    return [1.0 if place in often else scale * longer[place] for place in range(len(sizes))]


def due(step: int, sizes: Sequence[int], periods: Sequence[float]) -> tuple[int, ...] | None:
    """Return what to exchange after a step: some tensors, none (an empty tuple), or all (None)."""
    nonempty = [place for place, size in enumerate(sizes) if size]
    chosen = [place for place in nonempty if _count(step, periods[place]) > _count(step - 1, periods[place])]
    return None if chosen and len(chosen) == len(nonempty) else tuple(chosen)


def reason(step: int, period: int, chosen: tuple[int, ...] | None, sizes: Sequence[int]) -> str:
    """Return the reason for an exchange of these tensors; without `sizes` the model has one period."""
    if not sizes:
        return f"step {step}, every {period}"
    nonempty = sum(1 for size in sizes if size)
    return f"step {step}, {nonempty if chosen is None else len(chosen)} of {nonempty} tensors at their periods"


def _count(step: int, period: float) -> int:
    """Return the number of exchanges due up to this step."""
    return int(step / period + ROUNDING)
