"""A node's messages: its peers, what has arrived from them, and what waits for the next border."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from paceline.core.peer_events import Asked, PeerJoined, PeerLeft, Received
from paceline.model.spec import ModelSpec
from paceline.peers.group_average import GroupAverage
from paceline.peers.messages import Arrived, Decided, Outgoing, Peering, Wanted
from paceline.peers.node import Node
from paceline.peers.node_replica import NodeReplica
from paceline.peers.packing import from_wire
from paceline.strategies.peers.base import Peer
from paceline.transport.mail import Delivered, Departed, Kind, Mail, PeerHeader, as_bytes

logger = logging.getLogger("paceline")


TICK_S = 0.0005


class Outbox:
    """One node's outgoing link: when each message has left, and when the next step may begin.

    Under an emulated scenario the link is serial and takes the scenario's time, and each message carries its arrival
    time. Otherwise the mailbox reports departures.
    """

    def __init__(self, mail: Mail) -> None:
        self._mail = mail
        self.latencies: dict[int, float] = {}
        self._latency_s = 0.0
        self._seconds_per_byte = 0.0
        self._free_at = 0.0
        self._leaving: list[tuple[float, Departed]] = []  # messages on their way out, with the time they have left

    def over(self, latency_s: float, seconds_per_byte: float) -> None:
        """Emulate a link of that latency and speed from here on; zeros: do not emulate."""
        self._latency_s, self._seconds_per_byte = latency_s, seconds_per_byte

    def send(self, peer: int, header: PeerHeader, values: Sequence[torch.Tensor]) -> bool:
        """Post a message; False if the peer cannot take it."""
        now, nbytes = time.perf_counter(), sum(value.nbytes for value in values)
        out_at = max(now, self._free_at) + nbytes * self._seconds_per_byte
        latency_s = (self._latency_s + self.latencies.get(peer, 0.0)) / 2
        emulated = bool(latency_s or self._seconds_per_byte)
        header = msgspec.structs.replace(header, at=out_at + latency_s if emulated else 0.0)
        if not self._mail.post(peer, header, values):
            return False
        if header.kind == "model":
            if self._seconds_per_byte:
                self._free_at = out_at
                self._leaving.append((out_at, Departed(peer, nbytes, out_at - now)))
            elif not self._mail.tracks:
                self._leaving.append((now, Departed(peer, nbytes, time.perf_counter() - now)))
        return True

    def departed(self) -> list[Departed]:
        """Return the messages that have left since the last call."""
        now = time.perf_counter()
        known = self._mail.departed()
        if not self._seconds_per_byte and self._mail.tracks:
            return known
        out = [departed for at, departed in self._leaving if at <= now]
        self._leaving = [(at, departed) for at, departed in self._leaving if at > now]
        return out

    def _on_their_way(self) -> int:
        now = time.perf_counter()
        if self._seconds_per_byte:
            return sum(at > now for at, _ in self._leaving)
        return self._mail.on_their_way

    def wait_for_room(self, *, overlaps: bool) -> None:
        """Wait until at most one message is on its way out, or none if sending must not overlap computing."""
        self._wait(1 if overlaps else 0, math.inf)

    def wait_for_all(self, seconds: float) -> None:
        """Wait until everything has left, at most so many seconds."""
        self._wait(0, seconds)

    def _wait(self, most: int, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while self._on_their_way() > most and time.perf_counter() < until:
            time.sleep(TICK_S)


class PeerMailbox(NodeReplica):
    """One node's model and its mailbox."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, spec: ModelSpec,
        make_machine: Callable[[], Peer], place: tuple[int, int], endpoint: Any, mail: Mail,
    ) -> None:  # fmt: skip
        """`place` is the node's number and incarnation."""
        self._incarnation = place[1]
        self._mail = mail
        self._outbox = Outbox(mail)
        self._known: set[int] = set()
        self._decided: list[Decided] = []
        self._news: list[Arrived] = []  # events for the next border
        self._waiting: list[Delivered] = []  # messages for the next border, or with an emulated arrival still to come
        self._lends: list[int] = []  # newcomers that asked for a model
        self._lent: Delivered | None = None
        self._averages: GroupAverage | None = None
        self._others: tuple[int, ...] | None = None
        self._source: int | None = None
        self._zero = 0.0
        self._phase = 0
        self._grant = (0, 0)  # step and ticket of the current grant
        self._wait_s = 0.0
        self._messages = 0
        self._has_started = False
        super().__init__(model, optimizer, spec, make_machine, place[0], endpoint)
        tensors = self.tensors()
        mail.reserve([t.numel() * t.element_size() for t in [*tensors, *self.counters()]])

    def _make_node(self, machine: Peer, number: int) -> Node:
        return Node(machine, number, self.tensors, self._carry, self._ask, copies=False, mend=self._mend)

    def _carry(self, message: object) -> None:
        """Send or record what the machine decided."""
        match message:
            case Decided():
                self._decided.append(message)
            case Outgoing():
                header = self._make_header("model", message.weight, message.tensors)
                if not self._outbox.send(message.peer, header, message.values):
                    self._comes_back(header, [as_bytes(value).clone() for value in message.values])
            case Wanted():
                self._outbox.send(message.peer, self._make_header("asked"), [])

    def _on_peering(self, peering: Peering) -> None:
        if peering.fresh:
            for node in self._known - {box.node for box in peering.joined}:
                self._mail.remove_peer(node)
            self._known.clear()
            self.closed = False
            self._others = tuple(sorted(box.node for box in peering.joined))
            self._source, self._phase = peering.source, peering.phase
            self._zero = time.perf_counter() - peering.elapsed_s
            self._outbox.over(peering.latency_s, peering.seconds_per_byte)
        for box in peering.joined:
            if box.node in self._known:
                self._remove_peer(box.node)
            self._mail.add_peer(box)
            self._known.add(box.node)
            self._outbox.latencies[box.node] = box.latency_s
            if not peering.fresh:
                self._news.append(Arrived(PeerJoined(0.0, box.node)))
        for node, cause in peering.left:
            if node in self._known:
                self._news.append(Arrived(PeerLeft(0.0, node, cause)))
            if peering.leaving:
                self._known.discard(node)
            else:
                self._remove_peer(node)
        if peering.fresh:
            self._news.clear()  # left over from the previous phase
            self._waiting = [one for one in self._waiting if one.header.phase >= peering.phase]
            self._averages = None

    def _remove_peer(self, node: int) -> None:
        self._known.discard(node)
        for back in self._mail.remove_peer(node):
            if back.header.kind == "model":
                self._comes_back(back.header, back.values)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _open(self, messages: list[Delivered]) -> list[Arrived]:
        now, arrived = time.perf_counter(), []
        for delivered in messages:
            header = delivered.header
            if header.at > now:
                self._waiting.append(kept(delivered))
            elif header.phase < self._phase and header.kind in ("model", "asked"):
                pass
            elif header.kind == "model":
                values = self._typed(header, delivered.values)
                if values is not None:
                    arrived.append(Arrived(self._received(header.sender, header), values))
            elif header.kind == "asked":
                arrived.append(Arrived(Asked(0.0, header.sender)))
            else:
                self._set_aside(delivered)
        return arrived

    def _set_aside(self, delivered: Delivered) -> None:
        """Keep a message that is not for the machine: a request for a model, a lent model, or part of an average."""
        header = delivered.header
        if header.kind == "lend":
            self._lends.append(header.sender)
        elif header.kind == "lent":
            self._lent = kept(delivered)
        else:
            self._averages = self._averages or GroupAverage(self.node.number, self._incarnation, self._mail)
            self._averages.take(kept(delivered))

    def _received(self, sender: int, header: PeerHeader) -> Received:
        self._messages += 1
        return Received(0.0, sender, self._messages, header.weight, header.tensors)

    def _typed(self, header: PeerHeader, values: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Turn bytes into tensors; log a warning and return None if they do not fit this node's model."""
        tensors = self.tensors()
        places = range(len(tensors)) if header.tensors is None else header.tensors
        try:
            chosen = [tensors[place] for place in places if place >= 0]
            pairs = zip(chosen, values, strict=True)
            return [from_wire(value, self.node.machine.wire, tensor) for tensor, value in pairs]
        except (IndexError, ValueError, RuntimeError) as error:
            logger.warning("a message of node %d was dropped: %s", header.sender, error)
            return None

    def _make_header(self, kind: Kind, weight: float = 1.0, tensors: tuple[int, ...] | None = None) -> PeerHeader:
        return PeerHeader("", self.node.number, self._incarnation, kind, weight, tensors, self._phase)

    def _comes_back(self, header: PeerHeader, values: list[torch.Tensor]) -> None:
        """Let the node receive from itself what could not be delivered."""
        typed = self._typed(header, values)
        if typed is not None:
            self._news.append(Arrived(self._received(self.node.number, header), typed))

    def _sorted(self, messages: list[Delivered]) -> list[Delivered]:
        """Return the messages for the next border; keep the others where they belong."""
        later = [delivered for delivered in messages if delivered.header.kind in ("model", "asked")]
        for delivered in messages:
            if delivered.header.kind not in ("model", "asked"):
                self._set_aside(delivered)
        return later


def kept(delivered: Delivered) -> Delivered:
    """Copy a message, since `Mail.release` frees the memory that its values are in."""
    return Delivered(delivered.header, [value.clone() for value in delivered.values])
