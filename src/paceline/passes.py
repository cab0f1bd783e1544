"""One worker's passes through one phase: grants come in as pieces, pieces become pushes.

A piece belongs to the next push if backward ran on it and no `zero_grad` followed; otherwise the script skipped it. A
grant that is used up without a `step()` is a script that accumulates gradients: it gets further pieces on the same
grant. If the last piece was skipped, what there is gets pushed when the next batch is asked for.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.errors import InternalError
from paceline.fetching import Fetcher, pieces_of
from paceline.ledger import Allotment, Indices
from paceline.replica import Replica
from paceline.transport.base import Closed, Endpoint
from paceline.transport.messages import Done, Extra, More, Over, Push, Ready, Remark, Work

Piece = tuple[int, Indices]  # of which allotment of the grant
EDITS_WATCHED = 3  # pushes of a phase whose parameters are compared with the version read; it costs a pass over them
OVER = object()  # what follows the last batch; None may be a batch


class Passes:
    """The loop of one worker over one phase."""

    def __init__(self, endpoint: Endpoint, replica: Replica, fetcher: Fetcher, ready: Ready) -> None:
        self.replica = replica
        self.over: Over | None = None
        self.position = 0.0
        self._endpoint = endpoint
        self._fetcher = fetcher
        self._ready = ready
        self._ticket = 0
        self._allotments: list[Allotment] = []
        self._queue: deque[Piece] = deque()
        self._batches: Iterator[Any] = iter(())
        self._current: Piece | None = None
        self._seen_backward = False
        self._thrown_away = False  # a gradient was zeroed without a step: this script does not accumulate
        self._stray = False  # a backward ran after the batch's push had gone
        self._computed: list[Piece] = []  # backward ran, not yet stepped
        self._taken: list[Piece] = []  # part of the push
        self._losses: list[tuple[float, int]] = []
        self._steps = 0
        self._accumulates = False
        self._nominal: int | None = None
        self._pushed = 0
        self._remarked: set[str] = set()

    # -- what happens in the script ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Announce this worker and wait for its first grant."""
        self._endpoint.send(self._ready)
        self._await_work()

    def next_batch(self) -> Any:
        """The next piece as a batch; OVER at the end of the phase."""
        while self.over is None:
            if self._queue:
                self._current = self._queue.popleft()
                self._seen_backward = False
                self.replica.mark_gradients()
                return next(self._batches)
            if self._computed and not self._thrown_away:
                self._ask_for_more()
            else:
                self._computed = []
                self._push()
        return OVER

    def on_backward(self, fresh: bool) -> None:
        """Gradients of the current piece were accumulated; `fresh`: onto nothing, so what was there before is gone."""
        if self._current is None:
            self._stray = True
        elif not self._seen_backward:
            if fresh and self._computed:
                self.on_zero_grad()
            self._seen_backward = True
            self._computed.append(self._current)

    def on_zero_grad(self) -> None:
        """Whatever was computed and not stepped is gone."""
        self._thrown_away = self._thrown_away or bool(self._computed)
        self._computed.clear()
        self._seen_backward = False
        self.replica.mark_gradients()

    def on_loss(self, loss: float) -> None:
        """The loss of the current piece."""
        samples = len(self._current[1]) if self._current is not None else 0
        self._losses.append((loss, samples))

    def on_step(self) -> None:
        """Add what was computed to the push; on the last piece, push."""
        if self._stray:
            self._stray = False
            self._remark("optimizer.step() was called again for one batch: only the first step of a batch is pushed")
        if self._current is not None and not self._seen_backward and self.replica.has_new_gradients():
            self._computed.append(self._current)  # put there by hand, as torch.autograd.grad leaves it to the script
        self._steps += 1
        if self._steps == 1 and self._accumulates:
            self._nominal = self._ready.batch_size * len(self._computed)
        self._add_computed()
        if not self._queue and self.over is None:
            self._push()

    def abandon(self) -> None:
        """The script left the loop; what was not pushed is computed by somebody else."""
        if self.over is None:
            self.replica.forget()
            with contextlib.suppress(Closed):  # the run may have ended first; then there is nobody to tell
                self._endpoint.send(Done(self._ready.phase))

    # -- grants and pushes -------------------------------------------------------------------------------------------

    def _add_computed(self) -> None:
        samples = sum(len(indices) for _, indices in self._computed)
        if samples:
            self.replica.add(samples)
            self._taken += self._computed
        self._computed = []
        self._seen_backward = False
        self._current = None

    def _remark(self, text: str) -> None:
        if text not in self._remarked:
            self._remarked.add(text)
            self._endpoint.send(Remark(text))

    def _push(self) -> None:
        if self._pushed < EDITS_WATCHED and self.replica.edited():
            self._remark(
                "the script changes parameters beside the optimizer (clamping, loading, ...): such changes are "
                "overwritten by the next version"
            )
        self._pushed += 1
        samples = sum(len(indices) for _, indices in self._taken)
        known = sum(count for _, count in self._losses)
        loss = sum(value * count for value, count in self._losses) / known if known else None
        kept = None
        if samples < sum(allotment.samples for allotment in self._allotments):
            kept = [self._kept_of(number) for number in range(len(self._allotments))]
        self._endpoint.send(Push(self._ticket, samples, self.replica.take(loss), kept, self._nominal))
        self._nominal = None
        self._await_work()

    def _kept_of(self, number: int) -> Indices:
        parts = [indices for owner, indices in self._taken if owner == number]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _ask_for_more(self) -> None:
        self._accumulates = True
        self._endpoint.send(More(self._ticket))
        answer = self._endpoint.receive()
        if isinstance(answer, Over):
            self._finish(answer)
        elif isinstance(answer, Work):  # the grant was cancelled meanwhile
            self._take_up(answer)
        elif isinstance(answer, Extra) and answer.allotment is not None:
            self._enqueue(answer.allotment)
        else:  # the data ended in mid-accumulation: what there is makes the last push
            self._add_computed()
            self._push()

    def _await_work(self) -> None:
        message = self._endpoint.receive()
        if isinstance(message, Over):
            self._finish(message)
        elif isinstance(message, Work):
            self._take_up(message)
        else:
            raise InternalError(f"a worker that waits for work was sent {message}")

    def _take_up(self, work: Work) -> None:
        self.replica.forget()
        self._allotments, self._taken, self._computed, self._losses = [], [], [], []
        self._queue.clear()
        self._current = None
        self._thrown_away = False
        self._ticket = work.ticket
        self.position = work.position
        if work.parameters is not None:
            self.replica.load(work.parameters)
        self._enqueue(work.allotment)

    def _enqueue(self, allotment: Allotment) -> None:
        number = len(self._allotments)
        self._allotments.append(allotment)
        pieces = pieces_of(allotment.indices, self._ready.batch_size, self._ready.least)
        self._queue.extend((number, piece) for piece in pieces)
        self._batches = self._fetcher.batches(pieces)

    def _finish(self, over: Over) -> None:
        self.over = over
        self.position = over.position
        self._queue.clear()
        self.replica.forget()
        if over.parameters is not None:
            self.replica.load(over.parameters)
