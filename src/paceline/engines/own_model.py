"""The model of a script that runs by itself: it steps with its own optimizer, and the run only counts.

Nothing is copied, replaced or taken over. Whatever the script does to its model and optimizers is what it would be
without paceline: several optimizers, changed weights, closures, a model that moves to another device.
"""

from collections.abc import Sequence
from typing import Any

import torch

from paceline.core.updates import UNMEASURED_PLAIN, Merged, PushRef
from paceline.model.flat import Layout
from paceline.model.spec import ModelSpec
from paceline.model.store import Gradient, Parameters, Store
from paceline.transport.messages import OwnUpdate
from paceline.worker.replica import News, Replica


class OwnReplica(Replica):
    """The script's own module; what it pushes is that it has stepped."""

    steps_itself = True
    at_once = True

    def __init__(self, model: torch.nn.Module, optimizer: Any, spec: ModelSpec | None = None) -> None:
        super().__init__(model, optimizer, spec)
        self._stepped = False  # the script's optimizer has, on the current batch

    def values(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return nothing: the model stays where it is."""
        return [], []

    def load(self, version: Parameters) -> None:
        """Do nothing: the model is the version."""

    def add_own(self, own: OwnUpdate) -> None:
        """Do nothing, likewise."""

    def news(self, *, by_hand: bool = True) -> News:
        """Return what came; a step counts whatever gradients it took."""
        found = super().news(by_hand=by_hand)
        return News.ADDED if self._stepped and not found else found

    def note_step(self) -> None:
        self._stepped = True

    def require_unmoved(self) -> None:
        """Do nothing: the script may move its model."""

    def mark_batch(self) -> None:
        super().mark_batch()
        self._stepped = False

    def add(self, samples: int, *, last: bool) -> None:
        """Count the samples of a step."""
        del last
        self._samples += samples

    def take(self, loss: float | None) -> Gradient | None:
        """Return a push without tensors; None if the script made no step."""
        samples = self._samples
        self.forget()
        return Gradient([], frozenset(), (), (), loss, norm=0.0) if samples else None


class OwnStore(Store):
    """Counts versions of the script's own model, and copies it to be measured."""

    def __init__(self, replica: OwnReplica) -> None:
        self.spec, self.version, self.statistics = replica.spec, 0, False
        self.layout = replica.layout
        self.notice = None
        self._replica = replica
        self._pushes = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the model; nobody transfers them."""
        return self.layout.nbytes

    def apply(self, pushes: Sequence[PushRef], weights: Sequence[float], *, stock: bool) -> Merged:
        """Count a version."""
        del weights, stock
        for push in pushes:
            self.discard(push)
        self.version += 1
        return UNMEASURED_PLAIN  # the script has made the step already

    def read(self) -> Parameters:
        """Copy the model as it is now: the script may have moved it or changed its precision."""
        values, buffers = self._replica.model_copy()
        self.layout = Layout.of(values)
        return Parameters(self.version, self.layout.pack(values), buffers)
