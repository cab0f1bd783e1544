"""What every ledger of samples is: allotments, and the counts of used and lost samples."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from paceline.core.errors import CheckpointError

Sampling = Literal["epoch", "shard", "replacement", "stream", "clocks"]
SAMPLINGS: tuple[Sampling, ...] = ("epoch", "shard", "replacement")  # that a script may ask for
ENDLESS = 1 << 40  # stands for the size of streams that are read until they end
MOST_SAMPLES = 1 << 53  # above this a float cannot count single samples
Indices = np.ndarray[Any, np.dtype[np.int64]]  # not npt.NDArray, which is a different object in each NumPy version
if TYPE_CHECKING:
    IndicesOrNone = Any  # None only from a Tally; Any spares every caller a check
else:
    IndicesOrNone = Indices | None


class Allotment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Samples handed to one worker, all of one epoch."""

    epoch: int
    samples: int
    indices: IndicesOrNone


class DeathVerdict(msgspec.Struct, frozen=True):
    """What the death of a process says about the samples that it had."""

    tried: bool = False  # it had samples that were suspected before
    lost: tuple[int, ...] = ()  # samples that are given up: each has killed several processes alone


class Ledger(ABC):
    """The samples of one phase: used, lost and still available."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.lost = 0
        self.finished = False  # every sample is settled, or the phase was ended early

    @abstractmethod
    def allot(self, worker: int, work: int) -> Allotment | None:
        """Allot the worker at most `work` samples of one epoch; return None if none are available."""

    @abstractmethod
    def give_back(self, worker: int, allotment: Allotment) -> None:
        """Take back an allotment that was not delivered or was discarded, to issue it again."""

    def accuse(self, worker: int, allotments: Sequence[Allotment]) -> "DeathVerdict":
        """Take back what a process had when it died; `suspects.py` finds the samples that kill."""
        for allotment in allotments:
            self.give_back(worker, allotment)
        return DeathVerdict()

    def delivered(self, worker: int) -> None:  # noqa: B027 - most ledgers suspect nothing
        """Note that a worker has come through what it was allotted."""

    @property
    def killers(self) -> set[int]:
        """Samples that were given up, to be issued alone when their turn comes again; callers may add to it."""
        return set()

    @property
    @abstractmethod
    def has_unallotted(self) -> bool: ...

    def settle(self, used: int, lost: int = 0) -> bool:
        """Mark allotted samples as used or lost; return whether the phase is finished."""
        self.used = used = self.used + used
        self.lost = lost = self.lost + lost
        if used + lost >= self.total:
            self.finished = True
        return self.finished

    def snapshot(self, outstanding: Sequence["Outstanding"]) -> dict[str, Any]:
        """Return plain data for `restore`; `outstanding` lists the workers' allotments in the order to reissue them."""
        counts = {"total": self.total, "used": self.used, "lost": self.lost, "finished": self.finished}
        return {**counts, **self._snapshot(outstanding)}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Continue from the snapshot of a ledger made with the same arguments as this one."""
        if data["total"] != self.total:
            raise CheckpointError(
                f"the checkpoint's phase has {data['total']} samples (epochs times data set), the script's "
                f"{self.total}: resume with the data and the epochs the run was started with"
            )
        self.used, self.lost, self.finished = data["used"], data["lost"], data["finished"]
        self._restore(data)

    def _snapshot(self, outstanding: Sequence["Outstanding"]) -> dict[str, Any]:  # noqa: ARG002 - for subclasses
        return {}

    def _restore(self, data: Mapping[str, Any]) -> None:  # noqa: B027 - a Tally has only its counts
        """Restore what a sampling keeps besides its counts."""


Outstanding = tuple[int, Allotment]  # (worker, its allotment)
