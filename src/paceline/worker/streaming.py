"""Batches from streams: each worker reads one of its own, and the ledger counts batches without naming samples.

A stream is an `IterableDataset`, whose items a `DataLoader` makes into batches; a `DataLoader` over one, used as it is;
or any other iterable, whose items are batches already. It is read strictly one batch at a time, never ahead: its state
is that of the grant which is computed, and a live source is not waited for longer than its batch takes.
"""

import copy
import inspect
import numbers
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from paceline.core.errors import OptionError
from paceline.core.ledger import ENDLESS, Indices
from paceline.core.values import nearest
from paceline.transport.messages import Ready
from paceline.worker.fetching import DEFAULTS, KNOWN, OWNED, is_indexed
from paceline.worker.state import Keepable

ALLOWED = sorted([*KNOWN, "drop_last"])  # of a DataLoader's options
NOTHING = object()
Unread = list[tuple[Any, Any]]  # batches that were shown and are still to be read, each with its iterator


def is_stream(dataset: Any) -> bool:
    """Return whether the data can only be read in its own order; refuse what cannot be read at all."""
    if isinstance(dataset, DataLoader):
        return isinstance(dataset.dataset, IterableDataset)
    if is_indexed(dataset):
        return False
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        hint = ": call it, batches(f())" if inspect.isgeneratorfunction(dataset) else ""
        raise OptionError(
            "batches() takes a data set with __len__ and __getitem__, a DataLoader, an IterableDataset or another "
            f"iterable, not {type(dataset).__name__}{hint}"
        )
    return True


class StreamFetcher:
    """Reads batches from one worker's stream."""

    def __init__(self, source: Any, dataset: Any, size: int, unread: Unread) -> None:
        self.dataset = dataset
        self.size = size
        self.source = source  # iterating over it gives batches
        self.ended = False
        self.avoided: tuple[int, ...] = ()  # a stream names no samples
        self.kept_by_script = False  # by `session.keep`
        self._iterator: Iterator[Any] | None = None
        self._unread = unread
        self._state = _state_of(source, dataset)

    @property
    def begun(self) -> bool:
        return self._iterator is not None

    @property
    def keeps_state(self) -> bool:
        return self.kept_by_script or self._state is not None

    def restart(self) -> None:
        """Begin a phase: an iterable starts again, an iterator goes on."""
        self._iterator, self.ended = None, False

    def batches(self, pieces: Sequence[Indices]) -> Iterator[Any]:
        """Return a batch per piece, or fewer if the stream ends."""
        for _ in pieces:
            batch = self._read()
            if batch is NOTHING:
                return
            yield batch

    def _read(self) -> Any:
        if self.ended:
            return NOTHING
        for place, (source, batch) in enumerate(self._unread):
            if source is self.source:
                del self._unread[place]
                return batch
        if self._iterator is None:
            self._iterator = iter(self.source)
        batch = next(self._iterator, NOTHING)
        self.ended = batch is NOTHING
        return batch

    def shown(self, batch_size: int) -> Iterator[Any]:  # noqa: ARG002 - batches are as they come
        """Yield a batch that the next phase reads again."""
        before = None if self._state is None else copy.deepcopy(self._state.state_dict())
        was_unread = any(source is self.source for source, _ in self._unread)
        batch = self._read()
        try:
            if batch is not NOTHING:
                yield batch
        finally:
            if self._state is not None:
                self._state.load_state_dict(before)
            elif batch is not NOTHING and (was_unread or self._goes_on()):
                self._unread.append((self.source, batch))
            self.restart()

    def _goes_on(self) -> bool:
        """Return whether iterating again goes on where this iteration stands, as for a generator."""
        return not isinstance(self.source, DataLoader) and iter(self.source) is self._iterator

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return whether the stream has ended, and its position if it has one."""
        position = None if self._state is None or self.kept_by_script else self._state.state_dict()
        return {"ended": self.ended, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a stream with such a state stood; one without goes on as it is, or stays at its end."""
        if self._state is not None and not self.kept_by_script:
            self._state.load_state_dict(state["position"])
        if self.keeps_state:
            self.restart()
        self.ended = state["ended"]


def _state_of(source: Any, dataset: Any) -> Keepable | None:
    """Return what knows the stream's position: the iterable itself, or the data set that it reads in this process."""
    if isinstance(source, Keepable):
        return source
    in_process = not isinstance(source, DataLoader) or source.num_workers == 0
    return dataset if in_process and isinstance(dataset, Keepable) else None


def open_stream(
    data: Any,
    batch_size: int | None,
    steps: int | None,
    epochs: float,
    workers: int,
    options: dict[str, Any],
    unread: Unread,
) -> tuple[StreamFetcher, Ready]:
    """Make the fetcher of a stream and the phase over it; without `steps` the phase ends with the streams."""
    if epochs != 1:
        raise OptionError(
            f"a stream is read once, so epochs must be 1, not {epochs!r}: give steps=, or loop over batches() again"
        )
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or steps < 1):
        raise OptionError(f"steps must be a whole number >= 1, not {steps!r}")
    for name in options:
        if name in OWNED and name != "drop_last":
            raise OptionError(f"batches() takes no {name} for a stream: it is read in its own order")
        if name not in ALLOWED:
            raise OptionError(f"batches() takes no {name}, nor does torch's DataLoader; {nearest(name, ALLOWED)}")
    source, dataset, counted = _batched(data, batch_size, options)
    size = ENDLESS if steps is None else int(steps) * workers * counted
    return StreamFetcher(source, dataset, size, unread), Ready(0, size, counted, 1.0, "stream", 1)


def _batched(data: Any, batch_size: int | None, options: dict[str, Any]) -> tuple[Any, Any, int]:
    """Return what to iterate over, the data behind it, and how many samples a batch counts as."""
    if isinstance(data, DataLoader):
        changed = {**options, **({} if batch_size in (None, data.batch_size) else {"batch_size": batch_size})}
        if not changed:
            return data, data.dataset, data.batch_size or 1
        if isinstance(data, Keepable):
            raise OptionError(
                f"{type(data).__name__} has a state of its own, so it is used as it is: give {min(changed)} to it, not "
                "to batches()"
            )
        mine = {name: getattr(data, name) for name in ALLOWED if getattr(data, name, None) != DEFAULTS[name]}
        made: DataLoader[Any] = DataLoader(data.dataset, **{"batch_size": data.batch_size, **mine, **changed})
        return made, data.dataset, made.batch_size or 1
    if isinstance(data, IterableDataset):
        loader: DataLoader[Any] = DataLoader(data, batch_size=batch_size or 1, **options)
        return loader, data, batch_size or 1
    if options:
        raise OptionError(
            f"batches() takes no {min(options)} for {type(data).__name__}: its items are batches already; an "
            "IterableDataset or a DataLoader makes batches of samples"
        )
    return data, data, batch_size or 1
