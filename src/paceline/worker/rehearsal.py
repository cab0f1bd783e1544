"""A batch of a phase that is over, shown to a script that comes to it late.

A script that joins or is resumed runs from its beginning. Its loops over finished phases get one batch each, so that
what later lines use (`print(loss)` after an epoch) exists; afterwards everything is as it was before that batch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.worker.fetching import Source
from paceline.worker.replica import Replica
from paceline.worker.state import WorkerState


class Rehearsal:
    """Takes the place of the `BatchLoop`: steps, losses and stops have no effect."""

    def __init__(self, replica: Replica, state: WorkerState, find_server: Callable[[], None]) -> None:
        self.find_server = find_server
        self._replica = replica
        self._state = state

    def batches(self, source: Source, batch_size: int) -> Iterator[Any]:
        """Yield one batch; when the script asks for the next or leaves, undo what it did with this one."""
        replica, state = self._replica, self._state.freeze()
        tensors = [*(parameter.data for parameter in replica.parameters), *replica.buffers]
        before = [tensor.clone() for tensor in tensors]
        try:
            yield from source.shown(batch_size)
        finally:
            with torch.no_grad():
                now = [*(parameter.data for parameter in replica.parameters), *replica.buffers]
                for tensor, value in zip(now, before, strict=True):
                    tensor.copy_(value)
            for parameter in replica.parameters:
                parameter.grad = None
            replica.forget()
            replica.mark()
            self._state.thaw(state)

    def on_zero_grad(self) -> None:
        """Do nothing: no push is made of the gradients."""

    def on_loss(self, loss: float) -> None:
        """Do nothing: the batch is in no push."""

    def on_step(self) -> None:
        """Do nothing: the phase is over."""

    def on_own_step(self) -> None:
        """Do nothing: the phase is over."""

    def on_step_of(self, places: Sequence[int]) -> None:
        """Do nothing: the phase is over."""

    def stop(self, reason: str) -> None:
        """Do nothing: the phase is over."""
