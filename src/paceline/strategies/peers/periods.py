"""A fixed period for each tensor: what is left of the trigger of the adaptive machines when nothing adapts.

Rule: tensors have periods in proportion to the square root of their bytes, none below one step, such that all together
send what the whole model sent every `period` steps would. paceline's own; ALGORITHMS calls it the fixed per-tensor
period, and it is the control that tells what adapting gains from what small tensors being cheap gains.

Why the root: of all periods that cost the same bytes, these have the smallest sum, so that tensors are old for the
shortest time on average; and where every tensor moves at random and at the same relative pace, `change^2 * steps since
= threshold^2 * share of the bytes` (trigger.py) is reached after just these intervals.

A period need not be a whole number: the n-th exchange is due at the first step that is not before n periods.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Annotated, Literal

from msgspec import Meta

ROUNDING = 1e-9  # periods by which an exchange may be early, so that a multiple is met whatever a division leaves

Scope = Annotated[
    Literal["model", "tensor"],
    Meta(
        description="model: all tensors every period steps; tensor: each at a period of its own, "
        "in proportion to the root of its bytes, as many bytes in all"
    ),
]


def of_each(sizes: Sequence[int], period: int) -> list[float]:
    """The period of each tensor, in steps; one without a byte has the shortest, and is never sent."""
    total = sum(sizes)
    often = {place for place, size in enumerate(sizes) if not size}  # those at every step
    scale = 0.0
    while len(often) < len(sizes):
        left = 1 / period - sum(sizes[place] for place in often) / total
        scale = sum(sqrt(size / total) for place, size in enumerate(sizes) if place not in often) / left
        short = {place for place, size in enumerate(sizes) if scale * sqrt(size / total) <= 1 + ROUNDING}
        if short <= often:
            break
        often |= short  # they cost less than their part of the sum, so everybody else's period can only shrink
    return [1.0 if place in often else scale * sqrt(size / total) for place, size in enumerate(sizes)]


def due(step: int, sizes: Sequence[int], periods: Sequence[float]) -> tuple[int, ...] | None:
    """What is to be exchanged after that step: some tensors, none (an empty tuple), or all (None)."""
    nonempty = [place for place, size in enumerate(sizes) if size]
    chosen = [place for place in nonempty if _count(step, periods[place]) > _count(step - 1, periods[place])]
    return None if chosen and len(chosen) == len(nonempty) else tuple(chosen)


def told(step: int, period: int, chosen: tuple[int, ...] | None, sizes: Sequence[int]) -> str:
    """The reason for an exchange of these tensors; without `sizes` the model has one period."""
    if not sizes:
        return f"step {step}, every {period}"
    nonempty = sum(1 for size in sizes if size)
    return f"step {step}, {nonempty if chosen is None else len(chosen)} of {nonempty} tensors at their periods"


def _count(step: int, period: float) -> int:
    """Exchanges that are due by then."""
    return int(step / period + ROUNDING)
