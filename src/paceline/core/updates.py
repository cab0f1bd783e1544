"""A push as whoever decides about it sees it: numbers. Its tensors stay with whoever holds the weights.

So a push may lie in one memory, on a device or in several shards; who holds it is told what to do by reference.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from paceline.core.ledger import Allotment


class PushRef(msgspec.Struct, gc=False):
    """A delivered push that is neither applied nor discarded."""

    worker: int
    ticket: int
    samples: int
    read_version: int
    allotments: tuple[Allotment, ...]
    norm: float | None = None  # None: it brought no update
    loss: float | None = None


class Merged(msgspec.Struct, frozen=True):
    """Statistics of one applied gradient."""

    norm: float | None
    inner_product: float | None


UNMEASURED = Merged(None, None)


class Contents(msgspec.Struct, frozen=True):
    """What a checkpoint holds of the weights: tensors by file and name, and plain data for its head."""

    files: dict[str, dict[str, Any]]
    head: dict[str, Any]


class Updates(Protocol):
    """Whatever holds the weights: a store, shards of it, tables; of nodes with models of their own, nothing."""

    def apply(self, pushes: Sequence[PushRef], weights: Sequence[float], *, stock: bool) -> Merged:
        """Merge these pushes into one version; the weights add up to its mass, which is positive."""

    def extend(self, held: PushRef, piece: PushRef) -> PushRef:
        """Add a further piece, computed on the same version, to a held push."""

    def discard(self, push: PushRef) -> None:
        """Forget a push that will not be applied."""

    def contents(self) -> Contents:
        """All that a checkpoint needs, without a copy: write it before the next apply."""
