"""The ledger: which worker has which samples, and which are settled. The order of the calls fixes every allotment.

A sample is unallotted, allotted, or settled (used or lost). Allotted samples come back when their work was cancelled,
discarded or never delivered, and are issued again in the epoch they belong to. Four samplings:

* `epoch`: a fresh global shuffle per epoch; each sample of an epoch is settled exactly once, by any worker;
* `shard`: worker i of n owns the rows i, i+n, i+2n, ...; it goes through them in shuffled passes of its own;
* `replacement`: every sample is drawn uniformly from the whole data set;
* `stream`: each worker reads a stream of its own, and whole batches are counted.

`shard` and `replacement` end when the samples used reach epochs times the data set's size; `stream` ends after a number
of batches, or when every stream has ended. `Tally` counts without naming samples, for clusters of light workers that
compute nothing.

A snapshot is plain data in which nothing is allotted: it lists what workers have at that moment as given back, to be
issued again first and in their order. The ledger itself is left unchanged. Seed and epoch reproduce the shuffles, so
the snapshot leaves them out.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import numpy as np

from paceline.core.errors import CheckpointError, InternalError, OptionError

Sampling = Literal["epoch", "shard", "replacement", "stream", "clocks"]
SAMPLINGS: tuple[Sampling, ...] = ("epoch", "shard", "replacement")  # that a script may ask for
ENDLESS = 1 << 40  # stands for the size of streams that are read until they end
MOST_SAMPLES = 1 << 53  # above this a float cannot count single samples
Indices = np.ndarray[Any, np.dtype[np.int64]]  # not npt.NDArray, which is a different object in each NumPy version
if TYPE_CHECKING:
    IndicesOrNone = Any  # None only from a Tally; Any spares every caller a check
else:
    IndicesOrNone = Indices | None
STRIKES = 3  # processes that a smallest group must have killed alone: one or two may have died of anything
MOST_KILLERS = 8


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

    own_data: ClassVar[Literal["", "rows", "stream"]] = ""  # of each worker, that no other one gets

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
        """Take back what a process had when it died; `Suspects` finds the samples that kill."""
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


class Suspicion(msgspec.Struct):
    """Samples one of which may kill, and how many processes have died of these alone."""

    allotment: Allotment
    strikes: int = 0


class Suspects:
    """Finds the samples that kill the process which computes them, without losing the others.

    Samples that a process had when it died are suspects. They are issued again in halves, one group at a time in the
    whole run, so that at most one process dies of them at a time. A group that comes through is innocent. One that
    kills is split again, down to the fewest samples that a model can be trained on (one, or two with BatchNorm); such a
    group that has killed `STRIKES` processes is given up. A process that died of something else loses nothing: its
    samples come through.

    A sample that was given up comes again in the next epoch. It is then issued alone, and given up at the first death.

    After `MOST_KILLERS` different ones nothing more is suspected: where so many samples kill, it is not the samples.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._waiting: deque[Suspicion] = deque()
        self._tried: tuple[int, Suspicion] | None = None  # the group that a worker has at the moment
        self._given_up = 0  # groups, the first time
        self.known: set[int] = set()  # samples that were given up

    @property
    def can_try(self) -> bool:
        """Whether a group waits, and no other is being computed."""
        return bool(self._waiting) and self._tried is None

    @property
    def waiting(self) -> Iterator[Allotment]:
        """The groups that are with no worker."""
        return (suspicion.allotment for suspicion in self._waiting)

    def try_next(self, worker: int, work: int) -> Allotment:
        """Allot the worker the next group, at most `work` samples of it."""
        first = self._waiting.popleft()
        if first.allotment.samples > max(work, self._least):
            fits, rest = _cut(first.allotment, max(work, self._least))
            if rest.samples >= self._least:
                self._waiting.appendleft(Suspicion(rest))
                first = Suspicion(fits)
        self._tried = worker, first
        return first.allotment

    def sift(self, epoch: int, indices: Indices) -> Indices:
        """Keep back the samples that have killed before, each to be tried alone; return the others."""
        if self._least > 1:
            return indices  # such a model cannot be trained on one sample
        kills = np.isin(indices, list(self.known))
        for index in indices[kills]:
            self._waiting.append(Suspicion(Allotment(epoch, 1, np.array([index])), STRIKES - 1))
        return indices[~kills]

    def acquit(self, worker: int) -> None:
        """Clear the group that this worker has come through."""
        if self._tried is not None and self._tried[0] == worker:
            self.known.difference_update(map(int, self._tried[1].allotment.indices))
            self._tried = None

    def give_back(self, worker: int, allotment: Allotment) -> bool:
        """Take back a group that was not computed; return False for samples that are no suspects."""
        if self._tried is None or self._tried[0] != worker or self._tried[1].allotment is not allotment:
            return False
        self._waiting.append(self._tried[1])
        self._tried = None
        return True

    def accuse(self, worker: int, allotments: Sequence[Allotment]) -> tuple[DeathVerdict, list[Allotment]]:
        """Suspect what a process had when it died; return the verdict, and what is not suspected."""
        named = [allotment for allotment in allotments if allotment.samples]
        if self._tried is None or self._tried[0] != worker:
            if self._given_up >= MOST_KILLERS:
                return DeathVerdict(), named
            for allotment in named:
                self._suspect(Suspicion(allotment))
            return DeathVerdict(), []
        tried = self._tried[1]
        self._tried = None
        others = [allotment for allotment in named if allotment is not tried.allotment]
        lost = self._suspect(tried)
        if self._given_up >= MOST_KILLERS:
            others += self._forget()
        return DeathVerdict(True, tuple(map(int, tried.allotment.indices)) if lost else ()), others

    def _suspect(self, killer: Suspicion) -> bool:
        """Split a group that has killed, or count a strike against a smallest one; return whether it is lost."""
        samples = killer.allotment.samples
        if samples >= 2 * self._least:
            self._waiting.extend(Suspicion(half) for half in _cut(killer.allotment, samples // 2))
            return False
        if killer.strikes + 1 >= STRIKES:
            indices = set(map(int, killer.allotment.indices))
            self._given_up += not indices <= self.known
            self.known |= indices
            return True
        self._waiting.append(Suspicion(killer.allotment, killer.strikes + 1))
        return False

    def _forget(self) -> list[Allotment]:
        """Suspect nothing more, but for what is known to kill; return all that was."""
        doubtful, known = [], deque[Suspicion]()
        for suspicion in self._waiting:
            if set(map(int, suspicion.allotment.indices)) <= self.known:
                known.append(suspicion)
            else:
                doubtful.append(suspicion.allotment)
        self._waiting = known
        return doubtful


def _cut(allotment: Allotment, samples: int) -> tuple[Allotment, Allotment]:
    first, second = allotment.indices[:samples], allotment.indices[samples:]
    return Allotment(allotment.epoch, len(first), first), Allotment(allotment.epoch, len(second), second)


def make_ledger(
    sampling: Sampling,
    size: int,
    epochs: float,
    seed: int,
    workers: int,
    phase: int = 0,
    least: int = 1,
    batch: int = 1,
) -> Ledger:
    """Make the ledger of a phase over `size` samples; `least` is the smallest piece the model can be trained on.

    `batch` is how many samples a batch of a stream counts as.
    """
    if size < 1:
        raise OptionError(f"the data set must have at least 1 sample, not {size}")
    if not (epochs > 0 and math.isfinite(epochs)):
        raise OptionError(f"epochs must be > 0 and finite, not {epochs}")
    if epochs * size > MOST_SAMPLES:
        raise OptionError(f"epochs must be <= {MOST_SAMPLES / size:.3g} for {size} samples, not {epochs}")
    if size < least:
        raise OptionError(f"the data set has {size} sample; a model with BatchNorm needs at least {least} to train on")
    total = max(1, round(epochs * size))
    match sampling:
        case "epoch":
            total = max(1, round(whole_epochs(size, epochs, least) * size))
            return EpochLedger(size, total, (seed, phase), least)
        case "shard":
            return ShardLedger(size, total, (seed, phase), workers, least)
        case "replacement":
            return ReplacementLedger(size, total, (seed, phase), least)
        case "stream":
            return StreamLedger(total, batch)
        case "clocks":
            return Unallotted(MOST_SAMPLES)
    raise OptionError(f"sampling must be one of {', '.join(SAMPLINGS)}, not {sampling!r}")


def whole_epochs(size: int, epochs: float, least: int) -> float:
    """Return `epochs`, raised where the last epoch would be a part of fewer than `least` samples."""
    if least <= 1 or epochs * size > MOST_SAMPLES:
        return epochs
    total = max(1, round(epochs * size))
    part = total % size
    return (total - part + least) / size if 0 < part < least else epochs


def _piece(work: int, available: int, least: int) -> int:
    """Return how many to take so that neither the piece nor what remains is smaller than `least`."""
    taken = min(max(work, least), available)
    return available if 0 < available - taken < least else taken


def _indices(numbers: Sequence[int]) -> Indices:
    return np.array(numbers, dtype=np.int64)


class EpochLedger(Ledger):
    """Settles each sample of an epoch exactly once; the next epoch opens as soon as one is fully allotted."""

    def __init__(self, size: int, total: int, seed: tuple[int, int], least: int = 1) -> None:
        super().__init__(total)
        self.size = size
        self.seed = seed
        self.least = least
        self.epoch = 0
        self._order = self._shuffled(0)
        self._cursor = 0
        self._returned: dict[int, deque[Indices]] = {}
        self._suspects = Suspects(least)

    def _shuffled(self, epoch: int) -> Indices:
        length = min(self.size, self.total - epoch * self.size)
        order: Indices = np.random.default_rng([*self.seed, epoch]).permutation(self.size)
        return order[:length]

    def allot(self, worker: int, work: int) -> Allotment | None:
        if self._suspects.can_try:
            return self._suspects.try_next(worker, work)
        if self._returned:
            return self._reissue(min(self._returned), work)
        if self._cursor == len(self._order):
            if (self.epoch + 1) * self.size >= self.total:
                return None
            self.epoch += 1
            self._order = self._shuffled(self.epoch)
            self._cursor = 0
        fresh = self._take(work)
        return Allotment(self.epoch, len(fresh), fresh) if len(fresh) else self.allot(worker, work)

    def _take(self, work: int) -> Indices:
        """Take the next samples; those that have killed before are issued alone, later."""
        available = len(self._order) - self._cursor
        taken = _piece(work, available, self.least)
        indices = self._order[self._cursor : self._cursor + taken]
        self._cursor += taken
        return self._suspects.sift(self.epoch, indices) if self._suspects.known else indices

    def _reissue(self, epoch: int, work: int) -> Allotment:
        chunks = self._returned[epoch]
        returned = np.concatenate(chunks) if len(chunks) > 1 else chunks[0]
        del self._returned[epoch]
        if epoch == self.epoch and len(returned) < work and self._cursor < len(self._order):
            fresh = self._take(work - len(returned))
            returned = np.concatenate([returned, fresh])
            return Allotment(epoch, len(returned), returned)
        taken = _piece(work, len(returned), self.least)
        if taken < len(returned):
            self._returned[epoch] = deque([returned[taken:]])
        return Allotment(epoch, taken, returned[:taken])

    def give_back(self, worker: int, allotment: Allotment) -> None:
        if allotment.samples and not self._suspects.give_back(worker, allotment):
            self._returned.setdefault(allotment.epoch, deque()).append(allotment.indices)

    def accuse(self, worker: int, allotments: Sequence[Allotment]) -> DeathVerdict:
        verdict, innocent = self._suspects.accuse(worker, allotments)
        for allotment in innocent:
            self.give_back(worker, allotment)
        return verdict

    def delivered(self, worker: int) -> None:
        self._suspects.acquit(worker)

    @property
    def killers(self) -> set[int]:
        return self._suspects.known

    @property
    def has_unallotted(self) -> bool:
        return (
            bool(self._returned)
            or self._suspects.can_try
            or self._cursor < len(self._order)
            or (self.epoch + 1) * self.size < self.total
        )

    def settle(self, used: int, lost: int = 0) -> bool:
        finished = super().settle(used, lost)
        if self.used + self.lost > self.total:
            raise InternalError(f"{self.used} samples used and {self.lost} lost, but only {self.total} exist")
        return finished

    def _snapshot(self, outstanding: Sequence[Outstanding]) -> dict[str, Any]:
        returned = {epoch: [chunk.tolist() for chunk in chunks] for epoch, chunks in self._returned.items()}
        for allotment in (*self._suspects.waiting, *(each for _, each in outstanding)):
            if allotment.samples:
                returned.setdefault(allotment.epoch, []).append(allotment.indices.tolist())
        pairs = [[epoch, chunks] for epoch, chunks in sorted(returned.items())]
        return {"epoch": self.epoch, "cursor": self._cursor, "returned": pairs}

    def _restore(self, data: Mapping[str, Any]) -> None:
        self.epoch, self._cursor = data["epoch"], data["cursor"]
        self._order = self._shuffled(self.epoch)
        self._returned = {epoch: deque(map(_indices, chunks)) for epoch, chunks in data["returned"]}


class _Unbounded(Ledger):
    """Base of samplings that never run out of samples before the phase is finished."""

    @property
    def has_unallotted(self) -> bool:
        return not self.finished

    def give_back(self, worker: int, allotment: Allotment) -> None:
        """Drop the allotment: the next one is drawn afresh."""


class ShardLedger(_Unbounded):
    """Fixed rows per worker, as in the fastest-k publications; rows of a worker that left stay unused."""

    own_data = "rows"

    def __init__(self, size: int, total: int, seed: tuple[int, int], workers: int, least: int = 1) -> None:
        super().__init__(total)
        if workers > size:
            raise OptionError(f"sampling 'shard' needs a row per worker: {workers} workers, but {size} samples")
        if size // workers < least:
            raise OptionError(
                f"sampling 'shard' has {size} samples for {workers} workers, but a model with BatchNorm needs {least} "
                f"rows per worker: use at most {size // least} workers or sampling 'epoch'"
            )
        self.size = size
        self.seed = seed
        self.workers = workers
        self.least = least
        self._passes: dict[int, int] = {}
        self._rest: dict[int, Indices] = {}

    def allot(self, worker: int, work: int) -> Allotment | None:
        if self.finished:
            return None
        rest = self._rest.get(worker)
        if rest is None or not len(rest):
            rest = self._shuffled(worker)
        taken = _piece(work, len(rest), self.least)
        self._rest[worker] = rest[taken:]
        return Allotment(self._passes[worker] - 1, taken, rest[:taken])

    def _shuffled(self, worker: int) -> Indices:
        count = self._passes.get(worker, 0)
        self._passes[worker] = count + 1
        return self._pass(worker, count)

    def _pass(self, worker: int, count: int) -> Indices:
        rows = np.arange(worker % self.workers, self.size, self.workers)
        shuffled: Indices = np.random.default_rng([*self.seed, worker, count]).permutation(rows)
        return shuffled

    def give_back(self, worker: int, allotment: Allotment) -> None:
        # Back to the front of their pass, or the pass would miss these rows.
        if self._passes[worker] - 1 == allotment.epoch:
            self._rest[worker] = np.concatenate([allotment.indices, self._rest[worker]])

    def _snapshot(self, outstanding: Sequence[Outstanding]) -> dict[str, Any]:
        rest = dict(self._rest)
        for worker, allotment in reversed(outstanding):
            if self._passes[worker] - 1 == allotment.epoch:
                rest[worker] = np.concatenate([allotment.indices, rest[worker]])
        passes = [[worker, count, self._spelled(worker, rest[worker])] for worker, count in self._passes.items()]
        return {"passes": passes}

    def _spelled(self, worker: int, rest: Indices) -> int | list[int]:
        """Return only the length of `rest` if the shuffled pass ends in these very rows, else the rows themselves."""
        order = self._pass(worker, self._passes[worker] - 1)
        as_made = np.array_equal(order[len(order) - len(rest) :], rest)
        return len(rest) if as_made else rest.tolist()

    def _restore(self, data: Mapping[str, Any]) -> None:
        for worker, count, rest in data["passes"]:
            self._passes[worker] = count
            order = self._pass(worker, count - 1)
            self._rest[worker] = order[len(order) - rest :] if isinstance(rest, int) else _indices(rest)


class ReplacementLedger(_Unbounded):
    """Uniform draws from the whole data set."""

    def __init__(self, size: int, total: int, seed: tuple[int, int], least: int = 1) -> None:
        super().__init__(total)
        self.size = size
        self.least = least
        self._rng = np.random.default_rng(seed)
        self._again: deque[Indices] = deque()  # drawn before a checkpoint and never delivered

    def allot(self, worker: int, work: int) -> Allotment | None:  # noqa: ARG002 - all workers share the draws
        if self.finished:
            return None
        if self._again:
            drawn = self._again.popleft()
            taken = _piece(work, len(drawn), self.least)
            if len(drawn) > taken:
                self._again.appendleft(drawn[taken:])
            return Allotment(self.used // self.size, taken, drawn[:taken])
        work = max(work, self.least)
        return Allotment(self.used // self.size, work, self._rng.integers(self.size, size=work))

    def _snapshot(self, outstanding: Sequence[Outstanding]) -> dict[str, Any]:
        again = [*self._again, *(allotment.indices for _, allotment in outstanding if allotment.samples)]
        return {"again": [drawn.tolist() for drawn in again], "random": self._rng.bit_generator.state}

    def _restore(self, data: Mapping[str, Any]) -> None:
        self._again = deque(map(_indices, data["again"]))
        self._rng.bit_generator.state = data["random"]


class StreamLedger(Ledger):
    """Counts whole batches of the workers' own streams; any worker's batch will do for any other's."""

    own_data = "stream"

    def __init__(self, total: int, batch: int) -> None:
        super().__init__(total)
        self._batch = batch
        self._unallotted = total

    def allot(self, worker: int, work: int) -> Allotment | None:  # noqa: ARG002 - any worker gets the next batches
        if self.finished or not self._unallotted:
            return None
        taken = min(max(1, round(work / self._batch)) * self._batch, self._unallotted)
        self._unallotted -= taken
        return Allotment(0, taken, np.arange(taken))

    def give_back(self, worker: int, allotment: Allotment) -> None:  # noqa: ARG002 - any worker may get it next
        self._unallotted += allotment.samples

    @property
    def has_unallotted(self) -> bool:
        return self._unallotted > 0

    def _restore(self, data: Mapping[str, Any]) -> None:
        self._unallotted = self.total - data["used"] - data["lost"]


class Tally(_Unbounded):
    """Counts samples of workers that compute nothing."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._last = Allotment(0, 0, None)  # reused: without indices, allotments of equal size are interchangeable

    def allot(self, worker: int, work: int) -> Allotment | None:  # noqa: ARG002 - samples are only counted
        if self.finished:
            return None
        if self._last.samples != work:
            self._last = Allotment(0, work, None)
        return self._last


class Unallotted(Tally):
    """The ledger of scripts on tables, which choose their own samples and report the count afterwards."""

    def allot(self, worker: int, work: int) -> Allotment | None:  # noqa: ARG002 - a grant is for a clock
        return super().allot(worker, 0)
