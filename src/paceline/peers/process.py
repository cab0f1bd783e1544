"""A node in a process of its own: it steps, decides, and exchanges letters with its peers at the borders of its steps.

The coordinator grants samples, says who is there and keeps the journal; models go from node to node. Nothing here waits
for a peer, with three exceptions: a newcomer waits for the model that it starts from, an average for its group, and a
step does not begin while two letters are still on their way out.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import PeerError
from paceline.peer_events import Asked, Joined, Left, PeerCause, Received
from paceline.peer_events import Sent as SentEvent
from paceline.peers.averaging import Meeting
from paceline.peers.departures import Departures
from paceline.peers.node import Node
from paceline.peers.replica import NodeReplica
from paceline.store import Gradient, ModelSpec
from paceline.strategies.peers.base import Peer
from paceline.transport.base import Lost
from paceline.transport.mail import Delivered, Kind, Letter, Mail, as_bytes, from_bytes
from paceline.transport.messages import Cancelled, Over, Work
from paceline.transport.peer_messages import (
    Arrived,
    Averages,
    Averaging,
    Border,
    Collect,
    Decided,
    Decisions,
    Elastic,
    Exchanged,
    Group,
    Mailbox,
    Outgoing,
    Peering,
    Pulled,
    Snapshot,
    Wanted,
)

IDLE_S = 0.05  # between two looks at the mailbox, while there is nothing to compute
PATIENCE_S = 1.0  # of a newcomer; then it asks another node for its model, too
LOOK_S = 0.002  # between two looks at the coordinator's link, while a letter is waited for
LEAVING_S = 2.0  # for a leaver's weight to be taken by somebody
LAST_LETTERS_S = 5.0  # for letters to leave, at a node's end

logger = logging.getLogger("paceline")


class ProcessReplica(NodeReplica):
    """One node's model, its machine and its mailbox."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        spec: ModelSpec,
        make_machine: Callable[[], Peer],
        place: tuple[int, int],
        endpoint: Any,
        mail: Mail,
    ) -> None:
        """`place` is the node's number and its life."""
        self._make_machine = make_machine
        self._life = place[1]
        self._mail = mail
        self._departures = Departures(mail)
        self._known: set[int] = set()
        self._decided: list[Decided] = []
        self._news: list[Arrived] = []  # for the next border
        self._waiting: list[Delivered] = []  # letters that came while something else was waited for, or come later
        self._lends: list[int] = []  # newcomers that want a model
        self._lent: Delivered | None = None
        self._meeting: Meeting | None = None
        self._others: tuple[int, ...] | None = None
        self._source: int | None = None
        self._zero = 0.0
        self._step_number = self._phase = 0
        self._wait_s = 0.0
        self._messages = 0
        self._has_started = False
        self._closed = False  # the phase is over, but for the word that it is
        super().__init__(model, optimizer, spec, make_machine(), place[0], endpoint)
        tensors = self.tensors()
        mail.reserve([t.numel() * t.element_size() for t in [*tensors, *self.counters()]])

    def _make_node(self, machine: Peer, number: int) -> Node:
        return Node(machine, number, self.tensors, self._carry, self._ask, copies=False)

    # -- what the coordinator says -----------------------------------------------------------------------------------

    def introduce(self) -> None:
        """To this coordinator: another one knows nothing of what this node's machine knew."""
        self.node = self._make_node(self._make_machine(), self.node.number)
        self._news, self._waiting, self._lends = [], [], []
        self._meeting, self._has_started = None, False
        self._endpoint.send(Mailbox(self._mail.address, self._mail.key))

    def hear(self, message: object) -> bool:
        match message:
            case Peering():
                self._meet_peers(message)
            case Collect():
                self._give(message)
            case Group():
                pass  # of an average that a server before this one had called
            case _:
                return False
        return True

    def _meet_peers(self, peering: Peering) -> None:
        if peering.fresh:
            for node in self._known - {box.node for box in peering.joined}:
                self._mail.part(node)
            self._known.clear()
            self._others = tuple(sorted(box.node for box in peering.joined))
            self._source, self._zero, self._phase = peering.source, peering.zero, peering.phase
            self._departures.over(peering.latency_s, peering.seconds_per_byte)
        for box in peering.joined:
            self._part_with(box.node)
            self._mail.meet(box)
            self._known.add(box.node)
            self._departures.latencies[box.node] = box.latency_s
            if not peering.fresh:
                self._news.append(Arrived(Joined(0.0, box.node)))
        for node, cause in peering.left:
            self._part_with(node)
            self._news.append(Arrived(Left(0.0, node, cause)))
        if peering.fresh:
            self._news.clear()  # what came of a phase before this one
            self._waiting.clear()
            self._meeting = None

    def _part_with(self, node: int) -> None:
        if node in self._known:
            self._known.discard(node)
            for back in self._mail.part(node):
                if back.letter.kind == "model":
                    self._comes_back(back.letter, back.values)

    # -- steps -------------------------------------------------------------------------------------------------------

    def meet(self, work: object) -> float:
        if isinstance(work, Work):
            self._step_number, self._closed = work.step, False
        began = time.perf_counter()
        if self._source is not None:
            source, self._source = self._source, None
            self._start_from(source)
        self._departures.wait_for_room(overlaps=getattr(self.node.machine.options, "overlap", True))
        self._wait_s = time.perf_counter() - began
        return self._wait_s

    def take(self, loss: float | None) -> Gradient | None:
        """Once the last model was given away, a step would be lost: its samples belong to somebody else."""
        if self._closed:
            self.forget()
            return None
        return super().take(loss)

    def cross(self, compute_s: float, loss: float | None) -> None:
        """Decide about the step, and deal with what has arrived by now."""
        if self._closed:
            return
        self._cross(self._samples_stepped, compute_s, loss)

    def _cross(self, samples: int, compute_s: float, loss: float | None) -> None:
        others, self._others, self._has_started = self._others, None, True
        arrived = self._arrivals()
        at = time.perf_counter() - self._zero
        border = Border(at, self._step_number, compute_s, self._wait_s, arrived, others)
        self.node.border(border, samples, loss)
        self._mail.release()
        self._lend()
        self._flush()

    def _flush(self) -> None:
        if self._decided:
            self._endpoint.send(Decisions(self._decided))
            self._decided = []

    def _arrivals(self) -> list[Arrived]:
        news, self._news = self._news, []
        sent = [Arrived(SentEvent(0.0, d.peer, d.bytes, d.seconds)) for d in self._departures.departed()]
        waiting, self._waiting = self._waiting, []
        return [*news, *sent, *self._open([*waiting, *self._mail.collect()])]

    def _open(self, letters: list[Delivered]) -> list[Arrived]:
        now, arrived = time.perf_counter(), []
        for delivered in letters:
            letter = delivered.letter
            if letter.at > now:
                self._waiting.append(_kept(delivered))
            elif letter.phase < self._phase and letter.kind in ("model", "asked"):
                pass
            elif letter.kind == "model":
                values = self._typed(letter, delivered.values)
                if values is not None:
                    arrived.append(Arrived(self._received(letter.sender, letter), values))
            elif letter.kind == "asked":
                arrived.append(Arrived(Asked(0.0, letter.sender)))
            else:
                self._set_aside(delivered)
        return arrived

    def _set_aside(self, delivered: Delivered) -> None:
        """What is no machine's business."""
        letter = delivered.letter
        if letter.kind == "lend":
            self._lends.append(letter.sender)
        elif letter.kind == "lent":
            self._lent = _kept(delivered)
        else:
            self._meeting = self._meeting or Meeting(self.node.number, self._life, self._mail)
            self._meeting.take(_kept(delivered))

    def _received(self, sender: int, letter: Letter) -> Received:
        self._messages += 1
        return Received(0.0, sender, self._messages, letter.weight, letter.tensors)

    def _typed(self, letter: Letter, values: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Bytes as what they are; None, and a word about it, where they do not fit this node's model."""
        tensors = self.tensors()
        places = range(len(tensors)) if letter.tensors is None else letter.tensors
        try:
            chosen = [tensors[place] for place in places if place >= 0]
            pairs = zip(chosen, values, strict=True)
            return [from_bytes(value, self.node.wire_dtype(t), t.shape) for t, value in pairs]
        except (IndexError, ValueError, RuntimeError) as error:
            logger.warning("a letter of node %d was dropped: %s", letter.sender, error)
            return None

    # -- what the machine wants --------------------------------------------------------------------------------------

    def _carry(self, message: object) -> None:
        match message:
            case Decided():
                self._decided.append(message)
            case Outgoing():
                letter = self._letter("model", message.weight, message.tensors)
                if not self._departures.send(message.peer, letter, message.values):
                    self._comes_back(letter, [as_bytes(value).clone() for value in message.values])
            case Wanted():
                self._departures.send(message.peer, self._letter("asked"), [])

    def _letter(self, kind: Kind, weight: float = 1.0, tensors: tuple[int, ...] | None = None) -> Letter:
        return Letter("", self.node.number, self._life, kind, weight, tensors, self._phase)

    def _comes_back(self, letter: Letter, values: list[torch.Tensor]) -> None:
        """What cannot be delivered is received again, from oneself."""
        typed = self._typed(letter, values)
        if typed is not None:
            self._news.append(Arrived(self._received(self.node.number, letter), typed))

    def _ask(self, message: object) -> object:
        match message:
            case Elastic():
                self._flush()
                values = [as_bytes(value).numpy() for value in message.values]
                self._endpoint.send(Elastic(message.alpha, message.tensors, values))
                answer = self._await(lambda heard: heard if isinstance(heard, Pulled) else None)
                if answer is None:
                    return None
                pulls = [torch.from_numpy(value.copy()) for value in answer.values]
                pairs = zip(pulls, message.values, strict=True)
                return Pulled([from_bytes(pull, value.dtype, value.shape) for pull, value in pairs])
            case Averaging():
                return self._average(message)
        raise PeerError(f"a node does not ask {message}")

    def _average(self, message: Averaging) -> Averages | None:
        self._flush()
        self._endpoint.send(Averaging(message.round, []))
        group = self._await(lambda heard: heard if isinstance(heard, Group) else None, until=self._lend)
        meeting = self._meeting = self._meeting or Meeting(self.node.number, self._life, self._mail)
        began = time.perf_counter()
        while group is not None:
            meeting.begin(group, message.values)
            again = self._await(lambda heard: heard if isinstance(heard, Group) else None, until=meeting.advance)
            if meeting.done:
                self._endpoint.send(Exchanged(message.round, group.attempt, meeting.sent_bytes))
                time.sleep(max(0.0, began + group.seconds - time.perf_counter()))
                return Averages(meeting.result(), tuple(group.members))
            group = again  # one of them has gone: without it, then
        return None

    def _await(self, wanted: Callable[[object], Any], until: Callable[[], bool] | None = None) -> Any:
        """Hear the coordinator until it says what is wanted, or `until` holds, which letters may bring about.

        None in that case, and if the grant is void: then `interrupted` says why.
        """
        while self.interrupted is None:
            if until is not None:
                if until():
                    return None
                self._waiting += [_kept(d) for d in self._sorted(self._mail.collect(LOOK_S))]
                self._mail.release()
                if until() or not self._endpoint.poll():
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
                self.hear(message)
        return None

    def _sorted(self, letters: list[Delivered]) -> list[Delivered]:
        """Those that are for the next border; the others are dealt with."""
        later = [delivered for delivered in letters if delivered.letter.kind in ("model", "asked")]
        for delivered in letters:
            if delivered.letter.kind not in ("model", "asked"):
                self._set_aside(delivered)
        return later

    # -- newcomers, and the end --------------------------------------------------------------------------------------

    def idle(self) -> None:
        """Until the coordinator says something: newcomers are given a model, and letters wait for the next border."""
        while not self._endpoint.poll(IDLE_S):
            self._waiting += [_kept(delivered) for delivered in self._sorted(self._mail.collect())]
            self._mail.release()
            self._lend()

    def _start_from(self, source: int) -> None:
        """Take over a peer's model; one that goes before it has answered, or takes too long, is not the only one."""
        self._lent, asked = None, set[int]()
        while self._lent is None and self._known and self.interrupted is None:
            untried = sorted(self._known - asked, key=lambda peer: (peer != source, peer))
            if untried:
                asked.add(untried[0])
                self._mail.post(untried[0], self._letter("lend"), [])
            until = time.perf_counter() + PATIENCE_S
            self._await(lambda _: None, until=lambda until=until: self._is_lent(until))  # type: ignore[misc]
            asked &= self._known
        if self._lent is not None:
            homes = [*self.tensors(), *self.counters()]
            with torch.no_grad():
                for home, value in zip(homes, self._lent.values, strict=True):
                    home.copy_(from_bytes(value, home.dtype, home.shape))

    def _is_lent(self, until: float) -> bool:
        return self._lent is not None or not self._known or time.perf_counter() > until

    def _lend(self) -> bool:
        """Give newcomers this node's model, as soon as it is known where they are. Nothing that is waited for."""
        for peer in [peer for peer in self._lends if peer in self._known]:
            letter = self._letter("lent")
            if self._mail.post(peer, letter, [*self.tensors(), *self.counters()]):
                self._lends.remove(peer)
        return False

    def _give(self, collect: Collect) -> None:
        if collect.number == 0:
            self.leave("leave")
            return
        if collect.last and self._has_started:
            self._take_in_the_last()
        self._closed = collect.last
        self._send_snapshot(collect.number)

    def _take_in_the_last(self) -> None:
        """What has arrived is mixed in, and what was sent is seen to leave."""
        self._departures.wait_for_all(LAST_LETTERS_S)
        self._cross(0, 0.0, None)

    def _send_snapshot(self, number: int) -> None:
        values = [as_bytes(tensor).numpy() for tensor in self.tensors()]
        counters = [as_bytes(tensor).numpy() for tensor in self.counters()]
        self._endpoint.send(Snapshot(number, values, counters))

    def leave(self, cause: PeerCause = "done") -> None:
        """Of its own accord, before the phase is over: its weight, and what has just arrived, stay with the others."""
        if self._closed:
            return  # it was sent away before
        if self._has_started:
            self._take_in_the_last()
            self.node.leave(time.perf_counter() - self._zero, cause)
            until = time.perf_counter() + LEAVING_S
            self._take_in_the_last()
            while self._has_something_to_leave() and time.perf_counter() < until:
                # Who else leaves is heard here, and what that one did not read goes to another.
                self._await(lambda _: None, until=lambda at=time.perf_counter() + LOOK_S: time.perf_counter() > at)  # type: ignore[misc]
                self._take_in_the_last()
        self._closed = True
        self._send_snapshot(0)

    def _has_something_to_leave(self) -> bool:
        return self._mail.unread > 0 or any(isinstance(one.event, Received) for one in self._news)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This node's own model and optimizer; its machine starts afresh."""
        return {
            "tensors": [t.detach().cpu().clone() for t in self.tensors()],
            "counters": [t.detach().cpu().clone() for t in self.counters()],
            "optimizer": self.optimizer.state_dict()["state"],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        with torch.no_grad():
            for home, value in zip(
                [*self.tensors(), *self.counters()], [*state["tensors"], *state["counters"]], strict=True
            ):
                home.copy_(value)
        # Rates and the like are the script's to set, as with a server.
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})


def _kept(delivered: Delivered) -> Delivered:
    """With values of its own."""
    return Delivered(delivered.letter, [value.clone() for value in delivered.values])
