"""One worker's loop over one phase: it cuts grants into pieces and makes pushes of the pieces.

A piece belongs to the next push if backward ran on it and no `zero_grad` followed; otherwise the script skipped it. A
script that uses up a grant without a `step()` accumulates gradients: it gets further pieces on the same grant. If the
last piece was skipped, the loop pushes the others when the script asks for the next batch.

The server may void a grant at any time; the worker checks for that in `next_batch` and in `step()`. In an emulated
scenario, the grant says how long the model travels and how long its computation takes; the worker sleeps the rest of
that time, and a message that voids the grant ends the sleep. A lost server voids the grant too: the worker waits until
it is back, introduces itself again, and continues with its next grant.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from paceline.core.errors import InternalError, UserError
from paceline.core.ledger import Allotment, Indices
from paceline.transport import messages as m
from paceline.transport.base import Closed, Endpoint, Lost
from paceline.worker.fetching import Source, pieces_of
from paceline.worker.handshake import Handshake
from paceline.worker.host_watch import host_watch
from paceline.worker.replica import News, Replica
from paceline.worker.run_position import RunPosition
from paceline.worker.run_scheduler import RunPlateau, RunScheduler
from paceline.worker.state import WorkerState

Piece = tuple[int, Indices]  # the allotment's number within the grant, and the samples
EDITS_WATCHED = 3  # first pushes of a phase that are checked for edits that torch does not count
EDITS_EVERY = 100  # later pushes, of which one is; each check costs a pass over the parameters
EDITED = (
    "the script changes parameters{} inside a batches() loop beside the optimizer (clamping, loading, averaging, an "
    "optimizer that is not prepared): other workers train on without that change; make it between two loops, on a copy "
    "of the model, or run the script by itself"
)
OVER = object()  # marks the end of the batches; None may be a batch


class GrantPieces:
    """The pieces of one grant, and what the script did with each."""

    def __init__(self, ticket: int = 0) -> None:
        self.ticket = ticket
        self.allotments: list[Allotment] = []
        self.queue: deque[Piece] = deque()
        self.batches: Iterator[Any] = iter(())
        self.current: Piece | None = None
        self.thrown_away = False  # a gradient was zeroed without a step: this script does not accumulate
        self.computed: list[Piece] = []  # backward ran, step() did not
        self.taken: list[Piece] = []  # part of the push
        self.losses: list[tuple[float, int]] = []
        self.began = 0.0  # when the model arrived, or does in the scenario, on the host's clock
        self.read_at = 0.0  # when this process could begin computing
        self.target_s: float | None = None  # how long the scenario has the computation take


class BatchLoop:
    """The loop of one worker over one phase."""

    def __init__(
        self, endpoint: Endpoint, replica: Replica, fetcher: Source, ready: m.Ready, handshake: Handshake,
        state: WorkerState, kept: deque[m.ToWorker], position: RunPosition,
        followers: Sequence[RunScheduler | RunPlateau] = (), *, leads: bool = False,
    ) -> None:  # fmt: skip
        self.replica = replica
        self.over: m.Over | None = None
        self._endpoint = endpoint
        self._fetcher = fetcher
        self._ready = ready
        self._handshake = handshake
        self._state = state
        self._leads = leads  # what its script does to the model between phases counts
        self._kept = kept  # messages that came while the script waited for an answer of another kind
        self._position = position
        self._followers = followers  # of the position
        self._grant = GrantPieces()
        self._steps = 0
        self._accumulates = False
        self._nominal: int | None = None
        self._pushed = 0
        self._remarked: set[str] = set()
        self._stepped: dict[int, torch.Tensor | None] = {}  # of several optimizers: each one's gradients in this pass
        self._stopped: str | None = None  # why the script ended the phase

    # -- calls from the script ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Announce this worker and wait for its first grant.

        If the script has changed the model since the last version was loaded, worker 0's is trained from here on.
        """
        if self._leads and self.replica.edited():
            self._endpoint.send(m.ModelLoaded(self._ready.phase, *self.replica.model_copy()))
        self.replica.require_unmoved()
        self.replica.mark()
        self.replica.settle()
        self._endpoint.send(self._ready)
        self._await_work()

    def next_batch(self) -> Any:
        """Return the next piece as a batch; OVER at the end of the phase."""
        self.end_pass()
        if self._grant.current is not None and not self._interrupted():
            self._look()
        while self.over is None:
            if self._stopped is not None:
                self._await_end()
            elif self._grant.queue:
                self._grant.current = self._grant.queue.popleft()
                self.replica.mark_batch()
                batch = next(self._grant.batches, OVER)
                if batch is not OVER:
                    return batch
                self._end_of_stream()
            elif self._grant.computed and not self._grant.thrown_away:
                self._ask_for_more()
            else:
                self._grant.computed = []
                self._push()
        return OVER

    def on_zero_grad(self) -> None:
        """Drop the pieces that were computed and not stepped."""
        if self._stepped:
            return  # another optimizer's turn in the same pass
        if self._grant.computed or (self.replica.touched and self._grant.current is not None):
            self._grant.thrown_away = True
            self._grant.computed.clear()
        self.replica.mark()

    def on_loss(self, loss: float) -> None:
        """Record the loss of the current piece."""
        samples = len(self._grant.current[1]) if self._grant.current is not None else 0
        self._grant.losses.append((loss, samples))

    def on_step(self) -> None:
        """Add the computed pieces to the push; after the last piece, push."""
        if self._interrupted():
            return
        if self._grant.current is not None:
            self._look()
        elif self.replica.news(by_hand=False):
            self._remark("optimizer.step() was called again for one batch: only the first step of a batch is pushed")
        self._steps += 1
        if self._steps == 1 and self._accumulates:
            self._nominal = self._ready.batch_size * len(self._grant.computed)
        self._add_computed()
        if not self._grant.queue and self.over is None:
            self._push()

    def on_own_step(self) -> None:
        """Count a step that the script's own optimizer has made; further ones for the same batch are the script's."""
        if self._grant.current is None:
            return
        self.replica.note_step()
        self.on_step()

    def on_step_of(self, places: Sequence[int]) -> None:
        """Keep the gradients of one of several optimizers until the pass is over."""
        if self._interrupted() or self._grant.current is None:
            return
        if self._stepped.keys() & set(places):
            self._remark("optimizer.step() was called again for one batch: only the first step of a batch is pushed")
            return
        for place in places:
            gradient = self.replica.parameters[place].grad
            self._stepped[place] = None if gradient is None else gradient.detach().clone()

    def end_pass(self) -> None:
        """Push what several optimizers stepped on in this pass, if any: the gradients that each had at its own step.

        Afterwards gradients are as the script left them: zeroed, or to be added to.
        """
        if not self._stepped:
            return
        stepped, self._stepped = self._stepped, {}
        left = [None if p.grad is None else p.grad.detach().clone() for p in self.replica.parameters]
        for place, parameter in enumerate(self.replica.parameters):
            parameter.grad = stepped.get(place)
        self.on_step()
        for parameter, gradient in zip(self.replica.parameters, left, strict=True):
            parameter.grad = gradient

    def stop(self, reason: str) -> None:
        """End the phase for all workers; this one gets no further batch."""
        self._stopped = reason
        self._endpoint.send(m.Stop(reason))

    def find_server(self) -> None:
        """Introduce this worker to a restarted server, which has voided its grant."""
        self._kept.clear()
        self._kept.append(self._find_server())

    def abandon(self) -> None:
        """Tell the server that the script left the loop; another worker computes what was not pushed."""
        if self.over is None:
            self.replica.forget()
            with contextlib.suppress(Closed, Lost):
                self.replica.leave()
            self.replica.interrupted = None  # meant for the loop that the script has left
            with contextlib.suppress(Closed):  # the run may have ended first
                self._endpoint.send(m.Done(self._ready.phase))

    # -- pieces and pushes -------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Count the current piece as computed if it left a gradient."""
        news = self.replica.news()
        if news and self._grant.current is not None:
            if news is News.FRESH and self._grant.computed:  # zeroed without the optimizer's zero_grad
                self._grant.thrown_away = True
                self._grant.computed.clear()
            self._grant.computed.append(self._grant.current)

    def _add_computed(self) -> None:
        samples = sum([len(indices) for _, indices in self._grant.computed])
        if samples:
            self.replica.add(samples, last=not self._grant.queue)
            self._grant.taken += self._grant.computed
            self._grant.computed = []
        self._grant.current = None
        if self.replica.densified is not None:
            name, self.replica.densified = self.replica.densified, None
            self._remark(f"the sparse gradient of parameter {name} is sent whole: with sparse=False it is made so")

    def _remark(self, text: str) -> None:
        if text not in self._remarked:
            self._remarked.add(text)
            self._endpoint.send(m.Remark(text))

    def _push(self) -> None:
        edited = self._find_edits()
        self._pushed += 1
        samples = sum([len(indices) for _, indices in self._grant.taken])
        loss = None
        if self._grant.losses:
            known = sum([count for _, count in self._grant.losses])
            loss = sum([value * count for value, count in self._grant.losses]) / known if known else None
        kept = None
        if samples < sum([allotment.samples for allotment in self._grant.allotments]):
            kept = [self._kept_of(number) for number in range(len(self._grant.allotments))]
        gradient = self.replica.take(loss)
        if self.replica.closed:
            self._await_work()
            return
        overrun_s = 0.0
        grant = self._grant
        if grant.target_s is not None:
            # Counted from `read_at`, since a grant that arrived late is no overrun of the computation.
            overrun_s = max(0.0, perf_counter() - grant.read_at - grant.target_s)
            if self._interrupted(grant.began + grant.target_s):
                return
        compute_s = perf_counter() - grant.began
        self.replica.on_computed(compute_s, loss)
        if self._voided_in_exchange():
            return
        host = host_watch().sample()
        self._endpoint.send(m.Push(grant.ticket, samples, gradient, kept, self._nominal, compute_s, overrun_s, host))
        self._nominal = None
        answer = self._receive()
        # With any other answer the server may already have been writing the next version over the one compared.
        if edited and isinstance(answer, m.Work):
            raise UserError(EDITED.format(""))
        self._await_work(answer)

    def _watches_edits(self) -> bool:
        return self._pushed < EDITS_WATCHED or self._pushed % EDITS_EVERY == 0

    def _find_edits(self) -> bool:
        """Refuse changes of parameters beside the optimizer; what is changed and restored before the push is none.

        Return whether parameters differ though torch has counted no write to them.
        """
        replica = self.replica
        name = replica.rewritten()
        if name is None:
            return self._watches_edits() and replica.edited()
        replica.require_unmoved()
        if not replica.knows_edits or replica.edited():
            raise UserError(EDITED.format(f" ({name})"))
        return False

    def _voided_in_exchange(self) -> bool:
        """Return whether the grant was voided during a node's exchange; if so, wait for the next one first."""
        message = self._interrupting()
        if message is None:
            return False
        self._await_work(message)
        return True

    def _interrupting(self) -> m.ToWorker | None:
        """Return the message that interrupted a node's exchange, if any; if the server was lost there, reconnect."""
        message, self.replica.interrupted = self.replica.interrupted, None
        return self._find_server() if isinstance(message, Lost) else message

    def _kept_of(self, number: int) -> Indices:
        parts = [indices for owner, indices in self._grant.taken if owner == number]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _end_of_stream(self) -> None:
        """Return the pieces that there are no batches for and push the others; without others take no more work.

        The script stays in the loop until the phase is over, so that it leaves with the final model.
        """
        if not self._fetcher.ended:
            raise UserError("the data set raised StopIteration for a sample that it has")
        grant = self._grant
        last, rest = grant.allotments[-1], [grant.current, *grant.queue]
        missing = sum([len(piece[1]) for piece in rest if piece is not None])
        kept = last.samples - missing
        grant.allotments[-1] = Allotment(last.epoch, kept, last.indices[:kept])
        grant.current = None
        grant.queue.clear()
        self._endpoint.send(m.Fewer(grant.ticket, missing))
        if any(allotment.samples for allotment in grant.allotments):
            if grant.thrown_away:
                grant.computed = []
            self._add_computed()
            self._push()
            return
        self.replica.forget()
        try:
            self.replica.leave()
            message = self._interrupting()
        except Lost:
            message = self._find_server()
        self._endpoint.send(m.Done(self._ready.phase, self._state.capture(self._ready.phase, over=False)))
        self._await_work(message)

    def _await_end(self) -> None:
        """Wait for the end of the phase that the script has stopped."""
        self._drop_grant()
        self.replica.drop_step()
        while self.over is None:
            message = self._receive()
            if not isinstance(message, m.Over):
                self.replica.handle(message)
            elif message.run_over or message.phase >= self._ready.phase:
                self._finish(message)

    # -- grants ------------------------------------------------------------------------------------------------------

    def _receive(self) -> m.ToWorker:
        """Wait for the next message. If the server was lost, reconnect and return a `Cancelled` for the grant."""
        try:
            self.replica.idle()
            return self._kept.popleft() if self._kept else self._endpoint.receive()
        except Lost:
            return self._find_server()

    def _find_server(self) -> m.ToWorker:
        self._handshake.again()
        self._endpoint.send(self._ready)
        if self._stopped is not None:
            self._endpoint.send(m.Stop(self._stopped))
        return m.Cancelled(self._grant.ticket)

    def _interruption(self, until: float = 0.0) -> m.ToWorker | None:
        """Return a message that ends the grant early, waiting for it until `until`; None if none comes."""
        while True:
            remaining = until - perf_counter() if until else 0.0
            if self._kept or self._endpoint.poll(max(0.0, remaining)):
                message = self._receive()
                self.replica.handle(message)
                voids = isinstance(message, m.Cancelled) and message.ticket == self._grant.ticket
                if voids or isinstance(message, m.Work | m.Over):
                    return message
            elif remaining <= 0.0:
                return None

    def _interrupted(self, until: float = 0.0) -> bool:
        """Return whether the grant was voided by `until`; if so, wait for the next one first."""
        message = self._interruption(until)
        if message is None:
            return False
        self._await_work(message)
        return True

    def _await_work(self, message: m.ToWorker | None = None) -> None:
        """Wait for a grant and its model, or for the end of the phase."""
        while self.over is None:
            message = message or self._receive()
            if isinstance(message, m.Work) and message.phase is not None and message.phase < self._ready.phase:
                message = None  # sent before the server read that this script had left that phase
                continue
            if isinstance(message, m.Work):
                delayed = message.delay_s > 0.0
                self._take_up(message)
                message = self._interrupting()
                if message is None and delayed:
                    message = self._interruption(self._grant.began)
                if message is None:
                    return
                continue
            if isinstance(message, m.Over):
                # An earlier phase's `Over` may have been sent before the server read this worker's `Done`.
                if message.run_over or message.phase >= self._ready.phase:
                    self._finish(message)
            elif isinstance(message, m.Cancelled) and message.again:
                self._endpoint.send(self._ready)
            elif not (self.replica.handle(message) or isinstance(message, m.Cancelled | m.Extra)):
                # `Cancelled` and `Extra` may cross a push or a reconnect.
                raise InternalError(f"a worker that waits for work was sent {message}")
            message = None

    def _ask_for_more(self) -> None:
        self._accumulates = True
        self._endpoint.send(m.More(self._grant.ticket))
        answer = self._receive()
        while self.replica.handle(answer):
            answer = self._receive()
        if not isinstance(answer, m.Extra):  # the grant was voided meanwhile
            self._await_work(answer)
        elif answer.allotment is not None:
            if answer.compute_s is not None:
                self._grant.target_s = (self._grant.target_s or 0.0) + answer.compute_s
            self._enqueue(answer.allotment)
        else:  # the data ended during accumulation: push what was computed
            self._add_computed()
            self._push()

    def _take_up(self, work: m.Work) -> None:
        now = perf_counter()
        self._drop_grant()
        if self._state.pending is not None:
            self._reach()
        waited = self.replica.on_grant(work)  # a node that joins takes its model here, so capture its state after it
        grant = self._grant
        grant.began, grant.read_at = now + work.delay_s + waited, now + max(0.0, work.delay_s) + waited
        grant.target_s = work.compute_s
        if work.save is not None:
            self._endpoint.send(m.SavedState(work.save, self._state.capture(self._ready.phase, over=False)))
        grant.ticket = work.ticket
        self._position.granted = True
        self._note_standing(work)
        if work.own is not None:
            self.replica.add_own(work.own)  # before the push's slot is used again
        self.replica.use(work.slot, extends=work.parameters is None and work.own is None)
        if work.parameters is not None:
            self.replica.load(work.parameters)
        if work.parameters is not None or work.own is not None:
            self.replica.watch_writes()
            if self._watches_edits():
                self.replica.watch_edits()
        self._enqueue(work.allotment)

    def _note_standing(self, news: m.Work | m.Over) -> None:
        """Take over the run's numbers, which fall when a server resumes; schedulers follow them."""
        self._position.rounds, self._position.standing = news.rounds_done, news.standing
        for follower in self._followers:
            follower.on_standing(granted=isinstance(news, m.Work))

    def _reach(self) -> None:
        begun = self._fetcher.begun
        resumed = self._state.reach(self._ready.phase, over=False)
        lost = not (begun or self._fetcher.keeps_state or self._fetcher.ended)
        if resumed and self._ready.sampling == "stream" and lost:
            self._remark(
                "the data stream cannot be rewound, so the resumed run reads it from its beginning: one with "
                "state_dict() and load_state_dict() goes on where it stood"
            )

    def _drop_grant(self) -> None:
        self._stepped = {}
        self.replica.forget()
        self._grant = GrantPieces(self._grant.ticket)

    def _enqueue(self, allotment: Allotment) -> None:
        number = len(self._grant.allotments)
        self._grant.allotments.append(allotment)
        pieces = pieces_of(allotment.indices, self._ready.batch_size, self._ready.least)
        self._grant.queue.extend([(number, piece) for piece in pieces])
        self._grant.batches = self._fetcher.batches(pieces)

    def _finish(self, over: m.Over) -> None:
        self.over = over
        self._fetcher.avoided = over.killers
        self._note_standing(over)
        self._grant.queue.clear()
        self.replica.forget()
        self._state.reach(self._ready.phase, over=True)
        if over.save is not None:
            # A run that ended within a phase resumes in that phase.
            self._endpoint.send(m.SavedState(over.save, self._state.capture(self._ready.phase, over=not over.run_over)))
        if over.parameters is not None:
            self.replica.load(over.parameters)
            self.replica.watch_edits()
