"""Batches from the user's data set and `DataLoader` settings, with the ledger as the sampler."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate, default_convert

from paceline.core.errors import OptionError
from paceline.core.ledger import Indices
from paceline.core.values import nearest

OWNED = {
    "batch_sampler": "the ledger decides which samples are whose",
    "drop_last": "every sample is settled exactly once",
    "sampler": "the ledger decides which samples are whose",
    "shuffle": "samples are shuffled globally, from --seed",
}


DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(DataLoader).parameters.items()}
KNOWN = sorted(DEFAULTS.keys() - {"dataset", "batch_size", *OWNED})


class LoaderParts(NamedTuple):
    """What a script's own `DataLoader` says about its data."""

    dataset: Any
    batch_size: int | None  # None: it makes no batches itself
    options: dict[str, Any]  # for a loader of the run's own
    remark: str  # what of it the run does otherwise


def parts_of(loader: "DataLoader[Any]") -> LoaderParts:
    """Take a loader apart; which samples come when is up to the run."""
    options = {name: getattr(loader, name) for name in KNOWN if getattr(loader, name, None) != DEFAULTS[name]}
    if options.get("collate_fn") in (default_collate, default_convert):
        del options["collate_fn"]
    batch_size, replaced = loader.batch_size, loader.sampler
    if batch_size is None and loader.batch_sampler is not None:
        batch_size, replaced = getattr(loader.batch_sampler, "batch_size", None), loader.batch_sampler
    remark = f"the run shares samples out, shuffled from --seed; the DataLoader's {type(replaced).__name__} is not used"
    if loader.drop_last:
        remark += ", nor is drop_last: every sample is used"
    return LoaderParts(loader.dataset, batch_size, options, remark)


class _Pieces:
    """The batch sampler of a DataLoader that is iterated once per grant."""

    def __init__(self) -> None:
        self.pieces: Sequence[Indices] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter([piece.tolist() for piece in self.pieces])

    def __len__(self) -> int:
        return len(self.pieces)


class Source(Protocol):
    """Where a phase's batches come from: a data set that the ledger shares out, or this worker's own stream."""

    size: int
    dataset: Any
    source: Any  # what a stream iterates over
    ended: bool  # a stream has no more batches
    avoided: tuple[int, ...]  # samples that are not to be shown

    @property
    def begun(self) -> bool:
        """Whether it was read from."""
        ...

    @property
    def keeps_state(self) -> bool:
        """Whether it is a stream that can go on where it stood."""
        ...

    def batches(self, pieces: Sequence[Indices]) -> Iterator[Any]: ...

    def shown(self, batch_size: int) -> Iterator[Any]:
        """Yield at most one batch, of which nothing is used up."""
        ...


class Fetcher:
    """Loads batches of one data set."""

    ended = False
    avoided: tuple[int, ...] = ()
    begun = True
    keeps_state = False
    source = None

    def __init__(self, dataset: Any, loader_options: dict[str, Any]) -> None:
        self.size = len(dataset)
        for name in loader_options:
            if name in OWNED:
                raise OptionError(f"batches() takes no {name}: {OWNED[name]}")
            if name not in KNOWN:
                raise OptionError(f"batches() takes no {name}, nor does torch's DataLoader; {nearest(name, KNOWN)}")
        self.dataset = dataset
        self._collate = loader_options.get("collate_fn") or default_collate
        self._whole = type(dataset) is TensorDataset and self._collate is default_collate
        self._sampler = _Pieces()
        self._loader: DataLoader[Any] | None = None
        if loader_options.get("num_workers") or loader_options.get("pin_memory"):
            options = dict(loader_options)
            if options.get("num_workers"):
                options["persistent_workers"] = True  # one start per phase, not per grant
            self._loader = DataLoader(dataset, batch_sampler=self._sampler, **options)

    def batches(self, pieces: Sequence[Indices]) -> Iterator[Any]:
        """Return one batch per piece."""
        if self._loader is None:
            return map(self._fetch, pieces)
        self._sampler.pieces = pieces
        return _lazily(self._loader)

    def shown(self, batch_size: int) -> Iterator[Any]:
        """Yield the data set's first samples as a batch."""
        first = np.setdiff1d(np.arange(min(batch_size + len(self.avoided), self.size)), self.avoided)
        yield self._fetch(first[:batch_size])

    def _fetch(self, indices: Indices) -> Any:
        if self._whole:
            # `torch.from_numpy` needs writable memory; arrays from a wire may be read-only.
            rows = torch.from_numpy(indices if indices.flags.writeable else indices.copy())
            return [tensor[rows] for tensor in self.dataset.tensors]
        if hasattr(self.dataset, "__getitems__"):
            return self._collate(self.dataset.__getitems__(indices.tolist()))
        return self._collate([self.dataset[index] for index in indices.tolist()])


def _lazily(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the loader at its first batch, not before: it draws random numbers when it starts."""
    yield from loader


def is_indexed(dataset: Any) -> bool:
    """Return whether samples can be picked by number, so that the ledger can share them out."""
    return not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def pieces_of(indices: Indices, batch_size: int, least: int) -> list[Indices]:
    """Cut an allotment into pieces of at most `batch_size`, none smaller than `least` if possible."""
    if len(indices) <= batch_size:
        return [indices]
    cut = [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]
    if len(cut[-1]) < least:
        both = indices[len(indices) - len(cut[-2]) - len(cut[-1]) :]
        # Two pieces of at least `least`, or one above `batch_size` if there are too few samples.
        cut[-2:] = [both[:-least], both[-least:]] if len(both) >= 2 * least else [both]
    return cut
