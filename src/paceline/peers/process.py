"""A node in its own process: it steps, decides, and exchanges messages with its peers at the borders of its steps.

The coordinator grants samples, announces peers and keeps the journal; models go from node to node. A node waits for a
peer in four cases only: a newcomer for the model that it starts from, an average for its group, a step while two
messages are still on their way out, and in the weighted form a leaver for somebody to take its weight.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from paceline.core.errors import PeerError
from paceline.core.peer_events import PeerCause, Received
from paceline.core.peer_events import Sent as SentEvent
from paceline.model.store import Gradient
from paceline.peers import messages as m
from paceline.peers.group_average import GroupAverage
from paceline.peers.peer_mailbox import PeerMailbox, kept
from paceline.transport.base import Lost
from paceline.transport.mail import as_bytes, from_bytes
from paceline.transport.messages import Cancelled, Over, Work

IDLE_S = 0.05  # between two looks at the mailbox while there is nothing to compute
PATIENCE_S = 1.0  # before a newcomer asks the next node for its model, too
LOOK_S = 0.002  # between two looks at the coordinator's link while the node waits for a peer's message
LEAVING_S = 10.0  # for a peer to take a leaver's weight; the peer may be in the middle of a step
LEAVING_LOOK_S = 0.05  # between two attempts to pass it on
MENDING_S = 10.0  # for a peer to lend its model to a node whose own is not finite; it may be in the middle of a step
LAST_MESSAGES_S = 5.0  # for a node's last messages to leave


class ProcessReplica(PeerMailbox):
    """One node's model, its machine and its mailbox."""

    kept_as = "paceline.node"
    _can_mend = True  # as long as some peer had a model to give
    _arriving: list[m.Arrived] = []  # at the border that is being passed

    # -- messages of the coordinator ---------------------------------------------------------------------------------

    def introduce(self) -> None:
        """Register at the coordinator with a fresh machine: a restarted one knows nothing of the old machine."""
        self.node = self._make_node(self._make_machine(), self.node.number)
        self._news, self._waiting, self._lends = [], [], []
        self._averages, self._has_started = None, False
        self._endpoint.send(m.Mailbox(self._mail.address, self._mail.key))

    def handle(self, message: object) -> bool:
        match message:
            case m.Peering():
                self._on_peering(message)
            case m.Collect():
                self._give(message)
            case m.AreYouThere():
                self._endpoint.send(m.Here())
            case m.Group() | m.Pulled():
                pass  # late: a Group of a finished average or an earlier server, a Pulled of a cancelled grant
            case _:
                return False
        return True

    # -- steps -------------------------------------------------------------------------------------------------------

    def on_grant(self, work: object) -> float:
        if isinstance(work, Work):
            self._grant = work.step, work.ticket
        began = time.perf_counter()
        if self._source is not None:
            source, self._source = self._source, None
            self._start_from(source)
        self._outbox.wait_for_room(overlaps=getattr(self.node.machine.options, "overlap", True))
        self._wait_s = time.perf_counter() - began
        return self._wait_s

    def take(self, loss: float | None) -> Gradient | None:
        """Make the step, unless the phase's last model was sent: the step would be in no model."""
        if self.closed:
            self.forget()
            return None
        return super().take(loss)

    def on_computed(self, compute_s: float, loss: float | None) -> None:
        """Let the machine decide about the step, and handle what has arrived."""
        if self.closed:
            return
        if self._refused:
            self.node.recover(self._grant[0])
        self._reach_border(self._samples_stepped, compute_s, loss)

    def _reach_border(self, samples: int, compute_s: float, loss: float | None) -> None:
        others, self._others, self._has_started = self._others, None, True
        arrived = self._arriving = self._arrivals()
        at = time.perf_counter() - self._zero
        border = m.Border(at, self._grant[0], compute_s, self._wait_s, arrived, others)
        self.node.border(border, samples, loss)
        self._arriving = []
        self._mail.release()
        self._lend()
        self._flush()

    def _flush(self) -> None:
        if self._decided:
            self._endpoint.send(m.Decisions(self._decided))
            self._decided = []

    def _arrivals(self) -> list[m.Arrived]:
        news, self._news = self._news, []
        sent = [m.Arrived(SentEvent(0.0, d.peer, d.bytes, d.seconds)) for d in self._outbox.departed()]
        waiting, self._waiting = self._waiting, []
        return [*news, *sent, *self._open([*waiting, *self._mail.collect()])]

    # -- exchanges that the machine waits for ------------------------------------------------------------------------

    def _ask(self, message: object) -> object:
        match message:
            case m.CentreExchange():
                self._flush()
                values = [as_bytes(value).numpy() for value in message.values]
                self._endpoint.send(m.CentreExchange(message.alpha, message.tensors, values, self._grant[1]))
                answer = self._await(lambda message: message if self._answers(message) else None)
                if answer is None:
                    return None
                pulls = [torch.from_numpy(value.copy()) for value in answer.values]
                pairs = zip(pulls, message.values, strict=True)
                return m.Pulled([from_bytes(pull, value.dtype, value.shape) for pull, value in pairs])
            case m.Averaging():
                return self._average(message)
        raise PeerError(f"a node does not ask {message}")

    def _answers(self, message: object) -> bool:
        return isinstance(message, m.Pulled) and message.ticket == self._grant[1]

    def _average(self, message: m.Averaging) -> m.Averages | None:
        self._flush()
        self._endpoint.send(m.Averaging(message.round, []))
        group = self._await(_if_group, until=self._lend)
        averages = self._averages = self._averages or GroupAverage(self.node.number, self._incarnation, self._mail)
        began = time.perf_counter()
        while group is not None:
            averages.begin(group, message.values)
            again = self._await(_if_group, until=averages.advance)
            if averages.done:
                self._endpoint.send(m.Exchanged(message.round, group.attempt, averages.sent_bytes))
                time.sleep(max(0.0, began + group.seconds - time.perf_counter()))
                return m.Averages(averages.result(), tuple(group.members))
            group = again  # a member has left: try again without it
        return None

    def _await(self, wanted: Callable[[object], Any], until: Callable[[], bool] | None = None) -> Any:
        """Handle the coordinator's messages until `wanted` accepts one, and return what it made of it.

        Return None once `until` holds, for which peers' messages are collected, and if the grant is void: then
        `interrupted` says why.
        """
        while self.interrupted is None:
            if until is not None:
                if until():
                    return None
                self._waiting += [kept(d) for d in self._sorted(self._mail.collect(LOOK_S))]
                self._mail.release()
                if not self._endpoint.poll():
                    continue
            try:
                message = self._endpoint.receive()
            except Lost as lost:
                self.interrupted = lost
                return None
            found = wanted(message)
            if found is not None:
                return found
            if isinstance(message, Over | Cancelled | Work):
                self.interrupted = message
            else:
                self.handle(message)
        return None

    # -- joining and leaving -----------------------------------------------------------------------------------------

    def idle(self) -> None:
        """Lend newcomers a model and keep messages for the next border, until the coordinator sends something."""
        while not self._endpoint.poll(IDLE_S):
            self._waiting += [kept(delivered) for delivered in self._sorted(self._mail.collect())]
            self._mail.release()
            self._lend()

    def _mend(self, step: int) -> bool:
        """Take a peer's model instead of one that is not finite; return whether one had a model to give.

        If none has, all are as bad as this one, and it does not ask again.
        """
        if not self._can_mend or not self._known:
            return False
        self._flush()
        self._endpoint.send(m.NotFinite(step))
        for arrived in self._arriving:  # waiting releases the memory that they are in
            if arrived.values is not None:
                arrived.values[:] = [value.clone() for value in arrived.values]
        self._can_mend = self._start_from(min(self._known), time.perf_counter() + MENDING_S)
        self.optimizer.state.clear()  # what the optimizer knows is of the old model
        return self._can_mend

    def _start_from(self, source: int, at_most: float = math.inf) -> bool:
        """Load a peer's model; ask the next peer if one leaves or takes longer than `PATIENCE_S`.

        Return whether one came by `at_most`.
        """
        self._lent, asked = None, set[int]()
        while self._lent is None and self._known and self.interrupted is None and time.perf_counter() < at_most:
            untried = sorted(self._known - asked, key=lambda peer: (peer != source, peer))
            if untried and self._mail.post(untried[0], self._make_header("lend"), []):
                asked.add(untried[0])
            until = time.perf_counter() + PATIENCE_S
            self._await(lambda _: None, until=partial(self._is_lent, until))
            asked &= self._known
        if self._lent is not None:
            homes = [*self.tensors(), *self.counters()]
            with torch.no_grad():
                for home, value in zip(homes, self._lent.values, strict=True):
                    home.copy_(from_bytes(value, home.dtype, home.shape))
        return self._lent is not None

    def _is_lent(self, until: float) -> bool:
        return self._lent is not None or not self._known or time.perf_counter() > until

    def _lend(self) -> bool:
        """Send this node's model to newcomers that are known. Return False, so that as `until` it never ends a wait."""
        if self._lends and not self.node.is_sound():
            self._lends = []  # they ask another node
        for peer in [peer for peer in self._lends if peer in self._known]:
            header = self._make_header("lent")
            if self._mail.post(peer, header, [*self.tensors(), *self.counters()]):
                self._lends.remove(peer)
        return False

    def _give(self, collect: m.Collect) -> None:
        if collect.number == 0:
            self.leave("leave")
            return
        if collect.last and self._has_started:
            self._take_in_the_last()
        self.closed = collect.last
        self._send_snapshot(collect.number)

    def _take_in_the_last(self) -> None:
        """Wait for sent messages to leave, and mix in what has arrived."""
        self._outbox.wait_for_all(LAST_MESSAGES_S)
        self._reach_border(0, 0.0, None)

    def _send_snapshot(self, number: int) -> None:
        values = [as_bytes(tensor).numpy() for tensor in self.tensors()]
        counters = [as_bytes(tensor).numpy() for tensor in self.counters()]
        self._endpoint.send(m.Snapshot(number, values, counters))

    def leave(self, cause: PeerCause = "done") -> None:
        """Leave before the phase is over; the node's weight, and what has just arrived, go to the others."""
        if self.closed:
            return  # it has left, or the phase's last model was sent
        if self._has_started:
            weighted = getattr(self.node.machine.options, "form", None) == "weighted"
            if weighted:
                self._endpoint.send(m.Leaving(cause))  # so that peers stop sending it their weight
            self._take_in_the_last()
            self.node.leave(time.perf_counter() - self._zero, cause)
            self._take_in_the_last()
            if weighted:
                self._see_it_taken(time.perf_counter() + LEAVING_S)
        self.closed = True
        self._send_snapshot(0)

    def _see_it_taken(self, until: float) -> None:
        """Wait until peers have read this node's messages; send what comes back from a leaving peer to another."""
        while self._has_something_to_leave() and time.perf_counter() < until and self.interrupted is None:
            look_again = time.perf_counter() + LEAVING_LOOK_S
            self._await(lambda _: None, until=partial(_is_past, look_again))
            self._take_in_the_last()

    def _has_something_to_leave(self) -> bool:
        return self._mail.unread > 0 or any(isinstance(one.event, Received) for one in self._news)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this node's model and optimizer; the machine is not saved and starts afresh."""
        return {
            "tensors": [t.detach().cpu().clone() for t in self.tensors()],
            "counters": [t.detach().cpu().clone() for t in self.counters()],
            "optimizer": self.optimizer.state_dict()["state"],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore this node's model and optimizer."""
        with torch.no_grad():
            values = [*state["tensors"], *state["counters"]]
            for home, value in zip([*self.tensors(), *self.counters()], values, strict=True):
                home.copy_(value)
        # The script sets learning rates and other options, as with a server.
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})


def _if_group(message: object) -> m.Group | None:
    return message if isinstance(message, m.Group) else None


def _is_past(moment: float) -> bool:
    return time.perf_counter() > moment
