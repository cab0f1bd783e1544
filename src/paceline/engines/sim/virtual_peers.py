"""Nodes without a server in virtual time: their messages take their links' time, and nothing goes through the middle.

A node's outgoing link is serial: latency, and bytes over the smaller of the scenario's bandwidth and the node's own.
Sending overlaps computing, but a step does not begin while two messages are still on their way out; a machine whose
options say `overlap=false` waits for all of them. What has arrived by the end of a step's computing is dealt with
there. Who gets which samples is told without delay: in a run without a server that is no traffic of the training.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paceline.core import peer_events as e
from paceline.core.errors import OptionError
from paceline.core.peer_actions import Mix, Send
from paceline.engines.sim.node_links import NodeLinks
from paceline.engines.sim.virtual_cluster import Flight
from paceline.engines.sim.virtual_gathering import keep, put_average
from paceline.model.store import UNMEASURED, Merged, Parameters, gradient_norm
from paceline.peers.messages import (
    Arrived,
    Averages,
    Averaging,
    Border,
    Decided,
    Elastic,
    Model,
    Outgoing,
    PeerToServer,
    PeerToWorker,
    Pulled,
    Step,
    Wanted,
)
from paceline.peers.models import Centre, as_stored, mix_in
from paceline.peers.node import WIRES
from paceline.records.journal import PeerDecision
from paceline.server.workers import GrantOrder, PushArrival
from paceline.strategies import build_peer
from paceline.strategies.peers.base import Peer
from paceline.transport.messages import Hello

if TYPE_CHECKING:
    from paceline.engines.sim.engine import ScriptCluster


# A letter: whose it is, with its life, its number, what is sent, and the seconds until it is out.
Sending = tuple[int, int | None, int, Outgoing, float]


class VirtualPeers:
    """Carries what nodes say to each other, keeps the centre, and averages their models for whoever measures them."""

    def __init__(self, cluster: "ScriptCluster") -> None:
        self._cluster = cluster
        self._spec = cluster.conduct.peer
        self._machines: dict[int, Peer] = {}
        self._models: dict[int, Model] = {}
        self._used: dict[int, int] = {}  # samples of each node, in this phase
        self._parted: set[int] = set()  # who left this phase's loop, and still counts in its average
        self._present: dict[int, int] = {}  # with its life
        self._started: set[int] = set()
        self._crashed: set[int] = set()
        self._inboxes: dict[int, list[Arrived]] = {}
        self._messages = 0
        self._leaving: dict[int, Sending] = {}  # by number: on their way out,
        self._under_way: dict[int, Sending] = {}  # and not yet there
        self._links = NodeLinks(cluster.times)
        self._centre: Centre | None = None
        self._rounds: dict[int, dict[int, list[torch.Tensor]]] = {}  # averages that wait for somebody
        self._passed: dict[int, int] = {}
        self._overlaps, self._weighted = True, False
        self._waits_since: dict[int, float] = {}  # for an average

    @property
    def in_use(self) -> bool:
        return self._spec is not None

    def machine(self, node: int) -> Peer | None:
        """A fresh one for that node."""
        if self._spec is None:
            return None
        machine = build_peer(self._spec, self._cluster.conduct.config.seed, node)
        self._overlaps = getattr(machine.options, "overlap", True)
        self._weighted = getattr(machine.options, "form", None) == "weighted"
        self._machines[node] = machine
        return machine

    # -- nodes come and go -------------------------------------------------------------------------------------------

    def welcome(self, worker: int, hello: Hello) -> Parameters:
        """The first model is everybody's; a newcomer takes that of a node that is there."""
        conduct = self._cluster.conduct
        first = conduct.welcome(worker, hello)
        conduct.coordinator.store = self  # type: ignore[assignment]  # steps are made where the models are
        conduct.coordinator.model_bytes = 0  # and grants send none
        model = self._models.get(min(self._present, default=-1))
        if model is None:
            return first
        values, buffers = as_stored(conduct.store.spec, model.tensors(), [model.counters()])
        return Parameters(first.version, conduct.store.layout.pack(values), buffers)

    def _comes(self, worker: int) -> None:
        """A node that gets samples is there."""
        life = self._cluster.incarnations[worker]
        if self._present.get(worker) == life:
            return
        if not self._present and self._machines[worker].has_centre and self._centre is None:
            self._centre = Centre.of(self._cluster.conduct.store)
        self._present[worker] = life
        self._crashed.discard(worker)
        self._passed.pop(worker, None)
        self._inboxes[worker] = []
        self._tell_others(worker, e.Joined(0.0, worker))

    def left(self, worker: int, cause: e.PeerCause) -> None:
        """A node can no longer be reached. One that leaves of its own accord hands on what others must not lose."""
        if cause != "done":
            self._parted.discard(worker)
        if worker not in self._present:
            if cause != "done":
                self._forget(worker)
            return
        if cause in ("done", "leave") and worker in self._started:
            self._hand_on(worker, cause)
        del self._present[worker]
        self._started.discard(worker)
        unread = self._inboxes.pop(worker, [])
        self._links.forget(worker)
        if cause not in ("done", "leave"):
            self._crashed.add(worker)
        if cause == "done":
            self._parted.add(worker)
        else:
            self._forget(worker)
        for waiting in self._rounds.values():
            waiting.pop(worker, None)
        self._tell_others(worker, e.Left(0.0, worker, cause))
        if cause in ("done", "leave"):
            self._return(unread)
        self.settle()

    def _forget(self, worker: int) -> None:
        self._models.pop(worker, None)
        self._used.pop(worker, None)

    def _taking_part(self) -> dict[int, Model]:
        """Whose models count: all that are inside the loop, and those that left it of their own accord."""
        nodes = (self._present.keys() | self._parted | self._cluster.phases.members) & self._models.keys()
        return {node: self._models[node] for node in sorted(nodes)}

    def _hand_on(self, worker: int, cause: e.PeerCause) -> None:
        life, event = self._present[worker], e.Left(self._cluster.kernel.now, worker, cause)
        actions = self._machines[worker].handle(event)
        self._cluster.conduct.sink.write(PeerDecision(worker, life, event, actions))
        tensors = self._models[worker].tensors()
        for action in actions:
            if isinstance(action, Send):
                places = range(len(tensors)) if action.tensors is None else action.tensors
                kind = WIRES[self._machines[worker].wire]
                values = [tensors[place].detach().to(kind or tensors[place].dtype, copy=True) for place in places]
                self._post(worker, Outgoing(action.peer, action.weight, action.tensors, values))

    def _return(self, unread: list[Arrived]) -> None:
        """What a leaver has not taken in is received again by whoever sent it; a weight must not get lost."""
        for arrived in unread:
            event = arrived.event
            if isinstance(event, e.Received) and event.peer in self._present:
                self._inboxes[event.peer].append(arrived)
            elif isinstance(event, e.Received) and self._present and self._weighted:
                self._inboxes[min(self._present)].append(arrived)

    def phase_over(self) -> None:
        """Everybody leaves the loop, with the average of all models; the next loop begins anew."""
        self._take_in_the_last()
        self.refresh()
        keep(self._cluster, self._taking_part())
        self._parted.clear()
        self._used.clear()
        self._centre = None
        self._present.clear()
        self._started.clear()
        self._rounds.clear()

    def _take_in_the_last(self) -> None:
        """What is on its way arrives, and what has arrived is mixed in; nobody sends anything more."""
        for letter in list(self._leaving.values()):
            self._sent(letter)
        for letter in list(self._under_way.values()):
            self._delivered(letter)
        for node in sorted(self._started):
            arrived, self._inboxes[node] = self._inboxes[node], []
            for one in arrived:
                if not isinstance(one.event, e.Asked):
                    self._mix_at_the_end(node, one)

    def _mix_at_the_end(self, node: int, arrived: Arrived) -> None:
        event = msgspec.structs.replace(arrived.event, at=self._cluster.kernel.now)
        actions = self._machines[node].handle(event)
        self._cluster.conduct.sink.write(PeerDecision(node, self._present[node], event, actions))
        for action in actions:
            if isinstance(action, Mix) and isinstance(event, e.Received) and arrived.values is not None:
                mix_in(self._models[node].tensors(), event.tensors, arrived.values, action.weight)

    def _tell_others(self, worker: int, event: e.PeerEvent) -> None:
        for other in sorted(self._started - {worker}):
            self._inboxes[other].append(Arrived(event))

    # -- steps -------------------------------------------------------------------------------------------------------

    def order(self, order: GrantOrder) -> None:
        """A node computes on its own model, as soon as its messages let it."""
        cluster, worker, now = self._cluster, order.worker, self._cluster.kernel.now
        self._comes(worker)
        attempt = cluster.attempts.get(worker, 0)
        cluster.attempts[worker] = attempt + 1
        begin = self._links.can_compute_at(worker, now, overlaps=self._overlaps)
        end = begin + cluster.times.compute_s(worker, attempt, order.allotment.samples, begin)
        cluster.fly(Flight(order, attempt, 0, begin, end, now))

    def report(self, flight: Flight, arrival: PushArrival) -> None:
        """A step was made; whatever its exchanges took beside the computing counts as transfer."""
        now, worker = self._cluster.kernel.now, arrival.worker
        gradient = arrival.gradient
        if gradient is not None and math.isfinite(gradient_norm(gradient)):  # another one made no step
            self._used[worker] = self._used.get(worker, 0) + arrival.samples
        arrival.compute_s = flight.computed_at - flight.computing_from
        arrival.transfer_s = now - flight.granted_at - arrival.compute_s
        self._cluster.kernel.at(now, self._cluster.arrived, arrival)

    def step(self, flight: Flight) -> Step:
        """The grant as the node gets it, when its computing time is over."""
        order, phase = flight.order, self._cluster.phases.number
        return Step(
            order.ticket, order.allotment, None, order.position, phase=phase, border=self._border(flight)
        )  # fmt: skip

    def refuse_tables(self) -> None:
        """There is nobody who could keep them."""
        if self.in_use:
            raise OptionError(f"{self._spec} has no server that could keep tables: choose ssp, bsp or asp")

    def _border(self, flight: Flight) -> Border:
        worker, now = flight.order.worker, self._cluster.kernel.now
        others = None
        if worker not in self._started:
            self._started.add(worker)
            others = tuple(sorted(set(self._present) - {worker}))
        arrived, self._inboxes[worker] = self._inboxes[worker], []
        step = self._cluster.coordinator.seats[worker].through
        compute_s, wait_s = now - flight.computing_from, flight.computing_from - flight.granted_at
        return Border(now, step, compute_s, wait_s, arrived, others)

    def apply(
        self, gradients: Sequence[Any], weights: Sequence[float], samples: Sequence[int], *, stock: bool
    ) -> Merged:
        """Steps are made where the models are: here is nothing to be done."""
        del gradients, weights, samples, stock
        return UNMEASURED

    # -- what nodes say ----------------------------------------------------------------------------------------------

    def hear(self, worker: int, message: PeerToServer) -> PeerToWorker | None:
        """Deal with a message; what can be answered at once is."""
        match message:
            case Model():
                self._models[worker] = message
            case Outgoing():
                self._post(worker, message)
            case Wanted():
                self._later(self._links.latency_s(worker, message.peer), self._asked, (worker, message.peer))
            case Elastic():
                return self._exchange(worker, message)
            case Averaging():
                self._passed[worker], self._waits_since[worker] = message.round, self._cluster.kernel.now
                self._rounds.setdefault(message.round, {})[worker] = message.values
                self._later(0.0, self._on_average, worker)
            case Decided():
                life = self._cluster.incarnations[worker]
                self._cluster.conduct.sink.write(PeerDecision(worker, life, message.event, message.actions))
        return None

    def _later(self, seconds: float, call: Any, argument: Any) -> None:
        self._cluster.kernel.at(self._cluster.kernel.now + seconds, call, argument)

    def _post(self, worker: int, message: Outgoing) -> None:
        now = self._cluster.kernel.now
        out = self._links.send(worker, message.nbytes, now)
        self._messages += 1
        letter = (worker, self._present.get(worker), self._messages, message, out - now)
        self._leaving[self._messages] = self._under_way[self._messages] = letter
        self._later(out - now, self._sent, letter)
        self._later(out - now + self._links.latency_s(worker, message.peer), self._delivered, letter)

    def _sent(self, letter: Sending) -> None:
        worker, life, number, message, seconds = letter
        if self._leaving.pop(number, None) is not None and self._present.get(worker) == life:
            self._inboxes[worker].append(Arrived(e.Sent(0.0, message.peer, message.nbytes, seconds)))

    def _delivered(self, letter: Sending) -> None:
        worker, life, number, message, _ = letter
        if self._under_way.pop(number, None) is None:
            return  # it arrived when its phase ended
        to = message.peer
        if to not in self._present:  # what cannot be delivered comes back
            if self._present.get(worker) == life:
                to = worker
            elif worker in self._crashed or not self._present or not self._weighted:
                return
            else:
                to = min(self._present)  # its sender has handed on all that it had: somebody must take it
        sender = worker if to != worker else to
        received = e.Received(0.0, sender, number, message.weight, message.tensors)
        self._inboxes[to].append(Arrived(received, message.values))

    def _asked(self, question: tuple[int, int]) -> None:
        asker, asked = question
        if asked in self._started:
            self._inboxes[asked].append(Arrived(e.Asked(0.0, asker)))

    # -- the centre, and averages ------------------------------------------------------------------------------------

    def _exchange(self, worker: int, message: Elastic) -> Pulled | None:
        nbytes = sum(value.nbytes for value in message.values)
        seconds = self._links.seconds(worker, nbytes) + self._cluster.times.latency_s(worker, 0, True)
        if seconds <= 0.0:
            return self._pull(worker, message)
        self._later(seconds, self._at_centre, (worker, self._ticket(worker), message, seconds))
        return None

    def _ticket(self, worker: int) -> int | None:
        """Of the grant that the node is busy with; what is decided for another one is void."""
        return self._cluster.coordinator.seats[worker].ticket if worker in self._present else None

    def _at_centre(self, going: tuple[int, int | None, Elastic, float]) -> None:
        worker, ticket, message, seconds = going
        if ticket and self._ticket(worker) == ticket:
            self._later(seconds, self._answer, (worker, ticket, self._pull(worker, message)))

    def _pull(self, worker: int, message: Elastic) -> Pulled:
        assert self._centre is not None
        pulls = self._centre.pull(message.alpha, message.tensors, message.values)
        nbytes = sum(value.nbytes for value in message.values)
        self._cluster.coordinator.now = self._cluster.kernel.now
        self._cluster.coordinator.observe("exchange", {"bytes": 2 * nbytes}, worker)
        return Pulled(pulls)

    def _answer(self, going: tuple[int, int | None, PeerToWorker]) -> None:
        worker, ticket, message = going
        if ticket and self._ticket(worker) == ticket and self._cluster.conduct.active:
            self._cluster.tell(worker, message)

    def _on_average(self, _: int) -> None:
        self.settle()

    def settle(self) -> None:
        """Let those rounds be averaged for which everybody has come who is still to come."""
        seats = self._cluster.coordinator.seats
        for number in sorted(self._rounds):
            waiting = self._rounds[number]
            computing = [worker for worker in self._present if seats[worker].present and seats[worker].ticket]
            if not waiting or any(self._passed.get(worker, 0) < number for worker in computing):
                continue
            del self._rounds[number]
            self._average(waiting)

    def _average(self, group: dict[int, list[torch.Tensor]]) -> None:
        members = tuple(sorted(group))
        means = [torch.stack([v.double() for v in values]).mean(dim=0).to(values[0].dtype)
                 for values in zip(*(group[worker] for worker in members), strict=True)]  # fmt: skip
        nbytes = sum(mean.nbytes for mean in means)
        share = 2 * (len(members) - 1) / len(members)  # of a ring all-reduce: what each sends, in models
        for worker in members:
            # That was no time to compute in, nor one in which anything was sent.
            waited = self._cluster.kernel.now - self._waits_since.pop(worker)
            self._cluster.coordinator.seats[worker].granted_at += waited
            self._cluster.flights[worker].granted_at += waited
            seconds = share * self._links.seconds(worker, nbytes) + (
                self._links.latency_s(worker, worker) if share else 0.0
            )
            self._cluster.coordinator.now = self._cluster.kernel.now
            self._cluster.coordinator.observe("exchange", {"bytes": round(share * nbytes)}, worker)
            self._later(seconds, self._answer, (worker, self._ticket(worker), Averages(means, members)))

    # -- all models together -----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Put the average of all nodes' models, weighted by samples, where it is measured and kept."""
        put_average(self._cluster, self._taking_part(), self._used)
