"""Changes of a module's buffers while a push was computed, written to where the server reads them.

A push carries the difference of floating-point buffers, the value of counters, and nothing for unchanged buffers. Batch
statistics are many and small: their differences are computed in one call. Large buffers are masks and tables that
hardly ever change, so they are compared first.
"""

import math
from collections.abc import Iterator, Sequence

import torch

LARGE = 1 << 15  # elements from which on comparing is cheaper than subtracting

Changes = list[torch.Tensor | None]


def write_changes(
    buffers: Sequence[torch.Tensor], reads: Sequence[torch.Tensor], homes: Sequence[torch.Tensor]
) -> tuple[Changes, bool]:
    """Write each buffer's change to its home; return the changes (None: unchanged) and whether all are finite."""
    changes: Changes = [None] * len(homes)
    small: list[int] = []
    finite = True
    with torch.no_grad():
        for place, (buffer, read, home) in enumerate(zip(buffers, reads, homes, strict=True)):
            real = home.is_floating_point() or home.is_complex()
            if real and 0 < home.numel() < LARGE:
                small.append(place)
            elif not torch.equal(buffer, read):
                changes[place] = home.copy_(difference(buffer, read) if real else buffer)
                finite = finite and (not real or is_finite(home))
        if small:
            chosen = [[tensors[place] for place in small] for tensors in (buffers, reads, homes)]
            for place, (change, sound) in zip(small, _subtract(*chosen), strict=True):
                changes[place] = change
                finite = finite and sound
    return changes, finite


def _subtract(
    buffers: list[torch.Tensor], reads: list[torch.Tensor], homes: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor | None, bool]]:
    """Yield each buffer's change (None: unchanged) and whether it is finite."""
    torch._foreach_copy_(homes, buffers)
    torch._foreach_sub_(homes, reads)
    for buffer, read, home, norm in zip(buffers, reads, homes, torch._foreach_norm(homes, math.inf), strict=True):
        largest = norm.item()
        if math.isfinite(largest):
            yield (home if largest else None), True
        elif torch.equal(buffer, read):
            yield None, True
        else:
            home.copy_(difference(buffer, read))
            yield home, is_finite(home)


def difference(buffer: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Subtract, with 0 where both are equal: masks hold infinities, whose difference would be NaN."""
    return torch.where(buffer == read, torch.zeros_like(buffer), buffer - read)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite: by the norm, which costs a fraction, or each value if that overflows."""
    return math.isfinite(torch.linalg.vector_norm(tensor).item()) or bool(torch.isfinite(tensor).all())
