"""Nodes on real processes: who is there, who averages with whom, and the centre. Their models go from node to node.

The coordinator grants samples as ever, without a model, and tells each node who comes and goes. What nodes decide comes
back for the journal. Where a scenario is emulated, its links' times are kept by the nodes themselves.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import InternalError, OptionError
from paceline.core.peer_events import PeerCause
from paceline.engines.local.gathering import Gathering
from paceline.engines.local.members import Member
from paceline.model.store import UNMEASURED, Merged
from paceline.peers import messages as p
from paceline.peers.models import Centre
from paceline.peers.node import WIRES
from paceline.records.journal import PeerDecision
from paceline.server.workers import GrantOrder, PushArrival
from paceline.strategies import build_peer
from paceline.transport import messages as m
from paceline.transport.mail import as_bytes, from_bytes

if TYPE_CHECKING:
    from paceline.engines.local.process_cluster import LocalCluster


class LocalPeers:
    """What the coordinator does for nodes."""

    def __init__(self, cluster: "LocalCluster") -> None:
        self._cluster = cluster
        self._spec = cluster.conduct.peer
        self.gathering = Gathering(cluster)
        self._boxes: dict[int, p.Box] = {}
        self._present: set[int] = set()
        self._started: set[int] = set()
        self._leaving: set[int] = set()  # who hands its weight on, and is sent nothing more
        self._beginners: set[int] = set()  # of this phase: they have a common model
        self._centre: Centre | None = None
        self._rounds: dict[int, set[int]] = {}  # who waits for an average
        self._passed: dict[int, int] = {}
        self._groups: dict[int, p.Group] = {}
        self._averaging: dict[int, set[int]] = {}  # members of a group that are not yet done
        self._coming = self._together = False  # the models, at the end of a phase
        machine = None if self._spec is None else build_peer(self._spec, 0, 0)
        self._wire = None if machine is None else WIRES[machine.wire]
        self._has_centre = machine is not None and machine.has_centre

    @property
    def in_use(self) -> bool:
        return self._spec is not None

    def refuse_tables(self) -> None:
        """There is nobody who could keep them."""
        if self.in_use:
            raise OptionError(f"{self._spec} has no server that could keep tables: choose ssp, bsp or asp")

    # -- nodes come and go -------------------------------------------------------------------------------------------

    def begin(self, nodes: list[int]) -> None:
        """A phase begins, with these."""
        if not self.in_use:
            return
        self._beginners = set(nodes)
        self._centre = Centre.of(self._cluster.conduct.store) if self._has_centre else None
        self._present = set(nodes)
        self._cluster.coordinator.store = self  # type: ignore[assignment]  # steps are made where the models are
        self._cluster.coordinator.model_bytes = 0  # and grants send none

    def _comes(self, node: int) -> None:
        if node in self._present:
            return
        self._present.add(node)
        self._passed.pop(node, None)
        self._tell_others(node, p.Peering([self._boxes[node]], []))

    def _tell_others(self, node: int, news: p.Peering) -> None:
        for other in sorted(self._started - {node}):
            self._cluster.members[other].link.deliver(news)  # type: ignore[arg-type]

    def left(self, node: int, cause: str) -> None:
        """A node can no longer be reached."""
        if not self.in_use:
            return
        self.gathering.gone(node, crashed=cause != "done")
        if node not in self._present:
            return
        self._present.discard(node)
        self._started.discard(node)
        why: PeerCause = cause if cause in ("done", "leave", "timeout") else "crash"  # type: ignore[assignment]
        self._tell_others(node, p.Peering([], [(node, why)]))
        self._leaving.discard(node)
        for round_, waiting_nodes in list(self._averaging.items()):
            waiting_nodes.discard(node)
            if node in self._groups[round_].members:  # even if it was done: its last letters may not have come
                self._call_again(round_)
        for nodes in self._rounds.values():
            nodes.discard(node)
        self.settle()

    def phase_over(self) -> None:
        """Everybody leaves the loop, with the average of all models; the next loop begins anew."""
        self._present.clear()
        self._started.clear()
        self._leaving.clear()
        self._rounds.clear()
        self._averaging.clear()
        self._groups.clear()
        self._passed.clear()
        self._coming = self._together = False
        self._centre = None
        self.gathering.phase_over()

    def ask_to_leave(self, member: Member, then: Callable[[], None]) -> bool:
        """Let a node hand on what the others must not lose, and go on when it has; False: there is nothing."""
        if not self.in_use or member.worker not in self._started:
            return False
        self.gathering.dismiss(member, then)
        return True

    # -- all models together -----------------------------------------------------------------------------------------

    def refresh(self, then: Callable[[], None]) -> None:
        """Have the average of all models in the store, and go on; between two phases it is there."""
        if self.in_use and self._present and not self._together:
            self.gathering.begin(then, last=False)
        else:
            then()

    def is_together(self) -> bool:
        """Whether a phase that is over can be closed: its nodes' models are averaged. They are asked for here."""
        if not self.in_use or not self._cluster.phases.running:
            return True
        if not self._coming:
            self._coming = True
            self.gathering.begin(self._come_together, last=True)
        return self._together

    def _come_together(self) -> None:
        self._together = True

    # -- steps -------------------------------------------------------------------------------------------------------

    def order(self, order: GrantOrder) -> None:
        """Tell a node to make a step, and what has happened around it."""
        cluster, node = self._cluster, order.worker
        member = cluster.members[node]
        self._comes(node)
        if node not in self._started:
            self._started.add(node)
            member.link.deliver(self._first_word(node))  # type: ignore[arg-type]
        member.order, member.computing, member.bytes_down = order, True, 0
        compute_s, sent_at = None, None
        if cluster.emulation is not None:
            member.attempt = cluster.emulation.attempt(node)
            compute_s = cluster.emulation.times.compute_s(node, member.attempt, order.allotment.samples, order.at)
            sent_at = cluster.clock.on_host(order.at)
        step = cluster.coordinator.seats[node].through
        member.link.deliver(m.Work(
            order.ticket, order.allotment, None, order.position, 0, 0.0, compute_s, cluster.save_number(member),
            sent_at, cluster.phases.number, step,
        ))  # fmt: skip

    def _first_word(self, node: int) -> p.Peering:
        """Who is there, and where a newcomer takes its model from."""
        others = sorted(self._present - self._leaving - {node})
        source = None if node in self._beginners or not others else others[0]
        latency_s, seconds_per_byte = self._link(node)
        zero = self._cluster.clock.on_host(0.0)
        joined = [self._boxes[other] for other in others]
        self._beginners.discard(node)  # whoever comes in its place is a newcomer
        phase = self._cluster.phases.number
        return p.Peering(joined, [], True, source, zero, latency_s, seconds_per_byte, phase)

    def _link(self, node: int) -> tuple[float, float]:
        emulation = self._cluster.emulation
        if emulation is None:
            return 0.0, 0.0
        bandwidth = min(emulation.times.bandwidth(node), emulation.times.server_bandwidth)
        return emulation.times.latency_s(node, 0, True), 0.0 if bandwidth == math.inf else 1 / bandwidth

    def pushed(self, member: Member, message: m.Push) -> None:
        """A node has made a step."""
        cluster = self._cluster
        member.pushed, member.computing = True, False
        order, member.order = member.order, None
        if order is None or order.ticket != message.ticket or not cluster.conduct.active:
            return
        now = cluster.clock.now()
        if cluster.emulation is not None:
            cluster.emulation.computed(message.overrun_s)
        self.gathering.count(member.worker, message)
        cluster.coordinator.arrive(now, PushArrival(
            member.worker, member.incarnation, message.ticket, message.samples, message.compute_s,
            max(0.0, now - order.at - message.compute_s), gradient=message.gradient, kept=message.kept,
            nominal=message.nominal,
        ))  # fmt: skip
        self.settle()

    def apply(self, *_: Any, **__: Any) -> Merged:
        """Steps are made where the models are: here is nothing to be done."""
        return UNMEASURED

    # -- what nodes say ----------------------------------------------------------------------------------------------

    def hear_from(self, member: Member, message: p.NodeToServer) -> None:
        """A node says something that only nodes say."""
        node, cluster = member.worker, self._cluster
        match message:
            case p.Decisions():
                for decided in message.decided:
                    cluster.conduct.sink.write(PeerDecision(node, member.incarnation, decided.event, decided.actions))
            case p.Mailbox():
                latency_s, _ = self._link(node)
                self._boxes[node] = p.Box(node, member.incarnation, message.address, message.key, latency_s)
            case p.Elastic():
                self._exchange(member, message)
            case p.Averaging():
                self._passed[node] = message.round
                self._rounds.setdefault(message.round, set()).add(node)
                self.settle()
            case p.Exchanged():
                cluster.coordinator.now = cluster.clock.now()
                cluster.coordinator.observe("exchange", {"bytes": message.bytes}, node)
                self._has_averaged(node, message)
            case p.Leaving() if node in self._started:
                self._leaving.add(node)
                self._tell_others(node, p.Peering([], [(node, message.cause)], leaving=True))
            case p.Leaving():
                pass  # the phase is over
            case p.Snapshot():
                self.gathering.take(node, message)
            case _:
                raise InternalError(f"{member.name} sent {message}, which has no meaning here")

    # -- the centre --------------------------------------------------------------------------------------------------

    def _exchange(self, member: Member, message: p.Elastic) -> None:
        cluster = self._cluster
        if self._is_void(member, message):
            return
        latency_s, seconds_per_byte = self._link(member.worker)
        nbytes = sum(value.nbytes for value in message.values)
        way_s = latency_s + nbytes * seconds_per_byte
        if way_s <= 0.0:
            self._deliver((member, self._pull(member, message)))
            return
        now = cluster.clock.now()

        def at_centre(_: Any) -> None:
            if not self._is_void(member, message):
                cluster.alarms.at(now + 2 * way_s, self._deliver, (member, self._pull(member, message)))

        cluster.alarms.at(now + way_s, at_centre)

    def _is_void(self, member: Member, message: p.Elastic | p.Pulled) -> bool:
        """Whether the grant is over in which the node asked: its loop is, or it was taken back."""
        seat = self._cluster.coordinator.seats.get(member.worker)
        return member.gone or seat is None or not seat.ticket or seat.ticket != message.ticket

    def _deliver(self, going: tuple[Member, p.Pulled]) -> None:
        member, message = going
        if not self._is_void(member, message) and self._cluster.conduct.active:
            member.link.deliver(message)  # type: ignore[arg-type]

    def _pull(self, member: Member, message: p.Elastic) -> p.Pulled:
        cluster = self._cluster
        if self._centre is None:
            raise InternalError(f"{member.name} exchanges with a centre that {self._spec} does not have")
        centre = self._centre.tensors
        places = range(len(centre)) if message.tensors is None else message.tensors
        values = [
            from_bytes(torch.from_numpy(value), self._wire or centre[place].dtype, centre[place].shape)
            for place, value in zip(places, message.values, strict=True)
        ]
        pulls = self._centre.pull(message.alpha, message.tensors, values)
        cluster.coordinator.now = cluster.clock.now()
        nbytes = sum(value.nbytes for value in message.values)
        cluster.coordinator.observe("exchange", {"bytes": 2 * nbytes}, member.worker)
        return p.Pulled([as_bytes(pull).numpy() for pull in pulls], message.ticket)

    # -- averages of all ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let those rounds be averaged for which everybody has come who is still to come."""
        seats = self._cluster.coordinator.seats
        for number in sorted(self._rounds):
            computing = [node for node in self._present if seats[node].present and seats[node].ticket]
            if not self._rounds[number] or any(self._passed.get(node, 0) < number for node in computing):
                continue
            members = sorted(self._rounds.pop(number))
            self._averaging[number] = set(members)
            self._groups[number] = p.Group(number, 0, members, self._seconds(members))
            self._call(self._groups[number])

    def _seconds(self, members: list[int]) -> float:
        if self._cluster.emulation is None or len(members) < 2:
            return 0.0
        share = 2 * (len(members) - 1) / len(members)
        nbytes = self._cluster.conduct.model_bytes
        links = [self._link(node) for node in members]
        return max(latency_s + share * nbytes * per_byte for latency_s, per_byte in links)

    def _call(self, group: p.Group) -> None:
        for node in group.members:
            self._cluster.members[node].link.deliver(group)  # type: ignore[arg-type]

    def _has_averaged(self, node: int, message: p.Exchanged) -> None:
        group, waiting = self._groups.get(message.round), self._averaging.get(message.round, set())
        waiting.discard(node)
        if not waiting:
            self._averaging.pop(message.round, None)
            self._groups.pop(message.round, None)
        elif group is not None and message.attempt < group.attempt:  # it was done when the others were called again
            self._call_again(message.round)

    def _call_again(self, number: int) -> None:
        before = self._groups[number]
        members = sorted(self._averaging[number])
        if not members:
            return
        self._groups[number] = p.Group(number, before.attempt + 1, members, before.seconds)
        self._call(self._groups[number])
