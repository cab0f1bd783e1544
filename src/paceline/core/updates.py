"""Pushes as the coordinator sees them: numbers and a reference. Their tensors stay with the holder of the weights.

So a push may lie in one memory, on a device or in several shards; the coordinator applies or discards it by reference.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from paceline.core.events import HostLoad
from paceline.core.ledger import Allotment, Indices


class PushRef(msgspec.Struct, gc=False):
    """A push from its arrival until it is applied or discarded."""

    worker: int
    incarnation: int
    ticket: int
    samples: int
    compute_s: float = 0.0
    transfer_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    norm: float | None = None  # None: no update
    loss: float | None = None
    kept: list[Indices] | None = None  # per allotment, if the script skipped any of its samples
    nominal: int | None = None  # samples per push of a script that accumulates gradients
    read_version: int = 0  # set on arrival, as are the allotments
    allotments: tuple[Allotment, ...] = ()
    queued_down_s: float | None = None  # of `transfer_s`, behind others on the server's line
    queued_up_s: float | None = None
    extending: bool = False  # its worker is computing a further piece
    host: HostLoad | None = None  # of its worker's host


class Merged(msgspec.Struct, frozen=True):
    """Statistics of one applied gradient."""

    norm: float | None
    inner_product: float | None
    plain: bool = False  # the change follows from the gradient, the mass and its own options alone


UNMEASURED = Merged(None, None)
UNMEASURED_PLAIN = Merged(None, None, plain=True)


class Contents(msgspec.Struct, frozen=True):
    """The weights in a checkpoint: tensors by file and name, and plain data for its head.

    `save` writes further files into the checkpoint's folder; it returns the length and checksum of each, and plain data
    for the head.
    """

    files: dict[str, dict[str, Any]]
    head: dict[str, Any]
    save: Callable[[Path], tuple[dict[str, tuple[int, int]], dict[str, Any]]] | None = None


class Updates(Protocol):
    """The holder of the weights: a store, shards of it, or tables; for nodes with their own models, a stub."""

    of_clocks: ClassVar[bool]  # whether pushes are clocks of tables, to which nothing can be added

    def apply(self, pushes: Sequence[PushRef], weights: Sequence[float], *, stock: bool) -> Merged:
        """Merge these pushes into one version; the weights add up to its mass, which must be positive."""

    def extend(self, held: PushRef, piece: PushRef) -> PushRef:
        """Add a further piece, computed on the same version, to a held push."""

    def discard(self, push: PushRef) -> None:
        """Drop a push that will not be applied."""

    def contents(self) -> Contents:
        """Return what a checkpoint needs, without copying: write it before the next apply."""
