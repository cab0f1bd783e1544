"""The exchange of nodes in virtual time: messages go from node to node and take their links' time.

A node's outgoing link is serial: latency, and bytes over the smaller of the scenario's bandwidth and the node's own.
Sending overlaps computing, but a step does not begin while two messages are still on their way out; a machine whose
options say `overlap=false` waits for all of them. A node handles what has arrived when it has computed a step. Grants
take no time: in a run without a server they are not part of the training's traffic. A partition holds back all that a
node sends or is sent; a message that is duplicated has one number, and its second copy is refused.
"""

from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paceline.core import peer_events as e
from paceline.core.errors import InternalError
from paceline.core.events import Cause
from paceline.core.peer_actions import Mix, Send
from paceline.model.spec import ModelSpec
from paceline.model.store import Parameters
from paceline.peers.gathering import NodeModel
from paceline.peers.messages import (
    Arrived,
    Averages,
    Averaging,
    Border,
    CentreExchange,
    Decided,
    Lent,
    Model,
    NotFinite,
    Outgoing,
    PeerToServer,
    PeerToWorker,
    Pulled,
    Step,
    Wanted,
)
from paceline.peers.models import Centre, as_stored, is_finite, mix_in
from paceline.peers.node_links import NodeLinks
from paceline.peers.node_replica import NodeReplica
from paceline.peers.packing import off_wire, on_wire
from paceline.peers.server import PeerExchangeBase
from paceline.records.journal import PeerDecision
from paceline.server.emulation import Timing
from paceline.server.phases import standing
from paceline.server.workers import GrantOrder, WorkerRecord
from paceline.strategies import build_peer
from paceline.strategies.peers.base import Peer
from paceline.transport.base import Endpoint
from paceline.transport.messages import Hello, Push, Standing
from paceline.worker.context import MakeReplica

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.server.run import ServerRun


# A message on its way: sender, sender's incarnation, number, message, and the seconds until it has left.
Sending = tuple[int, int | None, int, Outgoing, float]


class NodeFlight(msgspec.Struct):
    """One grant at a node: when it was given, and when computing begins and ends."""

    order: GrantOrder
    timing: Timing
    granted_at: float
    standing: Standing


class VirtualPeerExchange(PeerExchangeBase):
    """The exchange of virtual nodes: delivers their messages, keeps the centre, and averages their models."""

    messages = PeerToServer

    def __init__(self, run: "ServerRun") -> None:
        super().__init__(run)
        if run.emulation is None:
            raise InternalError("virtual nodes were given no scenario")
        self._times = run.emulation.times
        self._machines: dict[int, Peer] = {}
        self._models: dict[int, Model] = {}
        self._flights: dict[int, NodeFlight] = {}
        self._left_loop: set[int] = set()  # nodes that left this phase's loop and still count in its average
        self._present: dict[int, int] = {}  # incarnation of each node present
        self._started: set[int] = set()
        self._crashed: set[int] = set()
        self._lost: set[int] = set()  # silent nodes that were taken out
        self._inboxes: dict[int, list[Arrived]] = {}
        self._sent_count = 0
        self._leaving: dict[int, Sending] = {}  # messages still on the sender's link, by number
        self._under_way: dict[int, Sending] = {}  # messages not yet delivered, by number
        self._links = NodeLinks(self._times)
        self._centre: Centre | None = None
        self._rounds: dict[int, dict[int, list[torch.Tensor]]] = {}  # pending averages: each waiting node's values
        self._waits_since: dict[int, float] = {}  # since when each node waits for an average

    def replica_maker(self, node: int, endpoint: Endpoint) -> MakeReplica:
        """Return what makes a node's replica; it tells of its machine when it introduces itself."""
        strategy, seed = self.spec, self.run.plan.config.seed

        def make(model: torch.nn.Module, optimizer: torch.optim.Optimizer, spec: ModelSpec) -> NodeReplica:
            return NodeReplica(model, optimizer, spec, lambda: build_peer(strategy, seed, node), node, endpoint)

        return make

    def _option(self, node: int, name: str, default: Any) -> Any:
        return getattr(self._machines[node].options, name, default)

    def _is_weighted(self) -> bool:
        return any(self._option(node, "form", None) == "weighted" for node in self._machines)

    # -- nodes come and go -------------------------------------------------------------------------------------------

    def first_model(self, record: WorkerRecord, hello: Hello) -> Parameters:
        """Return the run's first model, or for a newcomer the model of a node that is present."""
        first = super().first_model(record, hello)
        model = self._models.get(min(self._present, default=-1))
        if model is None:
            return first
        values, buffers = as_stored(self.store.spec, model.tensors(), [model.counters()])
        return Parameters(first.version, self.store.layout.pack(values), buffers)

    def _comes(self, worker: int) -> None:
        """Add a node that gets its first grant."""
        incarnation = self.run.workers.records[worker].incarnation
        if self._present.get(worker) == incarnation:
            return
        if not self._present and self._machines[worker].has_centre and self._centre is None:
            self._centre = Centre.of(self.store)
        self._present[worker] = incarnation
        self._crashed.discard(worker)
        self._passed.pop(worker, None)
        self._inboxes[worker] = []
        self._notify_others(worker, e.PeerJoined(0.0, worker))

    def left(self, worker: int, cause: Cause, at: float) -> None:
        """Remove a node; one that did not crash passes on first what the others must not lose."""
        self._flights.pop(worker, None)
        if cause != "done":
            self._left_loop.discard(worker)
        if worker not in self._present:
            if cause != "done":
                self._forget(worker)
            return
        willing = cause in ("done", "leave")
        why: e.PeerCause = cause if willing else "crash"  # type: ignore[assignment]
        if willing and worker in self._started:
            self._hand_on(worker, why, at)
        del self._present[worker]
        self._started.discard(worker)
        unread = self._inboxes.pop(worker, [])
        self._links.forget(worker)
        if not willing:
            self._crashed.add(worker)
        if cause == "done":
            self._left_loop.add(worker)
        elif cause == "timeout":
            self._lost.add(worker)  # its script may come back
        else:
            self._forget(worker)
        for waiting in self._rounds.values():
            waiting.pop(worker, None)
        self._notify_others(worker, e.PeerLeft(0.0, worker, why))
        if willing:
            self._return(unread)
        self._settle_rounds()

    def _begin_again(self, worker: int) -> None:
        """Let a node that was taken out for its silence go on from another's model, as a newcomer does."""
        self._lost.discard(worker)
        other = next((self._models[n] for n in sorted(self._started & self._models.keys()) if n != worker), None)
        if other is not None:
            mix_in(self._models[worker].tensors(), None, other.tensors(), 1.0)

    def _forget(self, worker: int) -> None:
        self._models.pop(worker, None)
        self.used.pop(worker, None)

    def _taking_part(self) -> dict[int, NodeModel]:
        """Return the models that count in the average: of nodes in the loop, and of those that left it normally."""
        nodes = (self._present.keys() | self._left_loop | self.run.workers.in_phase) & self._models.keys()
        return {node: NodeModel(self._models[node].tensors(), self._models[node].counters()) for node in sorted(nodes)}

    def _decide(self, node: int, event: e.PeerEvent) -> list[Any]:
        """Feed a node's machine an event outside its script's steps, and record the decision."""
        actions = self._machines[node].handle(event)
        self.run.sink.write(PeerDecision(node, self._present[node], event, actions))
        return actions

    def _hand_on(self, worker: int, cause: e.PeerCause, at: float) -> None:
        actions = self._decide(worker, e.PeerLeft(at, worker, cause))
        tensors = self._models[worker].tensors()
        for action in actions if is_finite(tensors) else ():
            if isinstance(action, Send):
                places = range(len(tensors)) if action.tensors is None else action.tensors
                wire = self._machines[worker].wire
                values = [on_wire(tensors[place], wire, copy=True) for place in places]
                self._post(worker, Outgoing(action.peer, action.weight, action.tensors, values))

    def _return(self, unread: list[Arrived]) -> None:
        """Return a leaver's unread messages to their senders, since weights must not get lost."""
        for arrived in unread:
            event = arrived.event
            if isinstance(event, e.Received) and event.peer in self._present:
                self._inboxes[event.peer].append(arrived)
            elif isinstance(event, e.Received) and self._present and self._is_weighted():
                self._inboxes[min(self._present)].append(arrived)

    def phase_over(self, at: float) -> None:
        """End the phase: average all models, keep the nodes' own, and clear the state for the next phase."""
        self._take_in_the_last(at)
        models = self._taking_part()
        self._average_all(models, at)
        with torch.no_grad():
            self.keep({n: NodeModel(_copied(m.tensors), _copied(m.counters)) for n, m in models.items()})
        for each in (self._left_loop, self._started):
            each.clear()
        for table in (self.used, self._present, self._rounds, self._flights):
            table.clear()
        self._centre = None

    def _take_in_the_last(self, at: float) -> None:
        """Deliver all messages on their way and mix in what has arrived; nodes send nothing more."""
        for sending in list(self._leaving.values()):
            self._sent(sending)
        for sending in list(self._under_way.values()):
            self._delivered(sending)
        for node in sorted(self._started):
            arrived, self._inboxes[node] = self._inboxes[node], []
            for one in arrived:
                if not isinstance(one.event, e.Asked):
                    self._mix_at_the_end(node, one, at)

    def _mix_at_the_end(self, node: int, arrived: Arrived, at: float) -> None:
        event = msgspec.structs.replace(arrived.event, at=at)
        for action in self._decide(node, event):
            if not isinstance(action, Mix) or not isinstance(event, e.Received) or arrived.values is None:
                continue
            tensors = self._models[node].tensors()
            places = range(len(tensors)) if event.tensors is None else event.tensors
            values = off_wire(arrived.values, self._machines[node].wire, [tensors[place] for place in places])
            if is_finite(values):
                mix_in(tensors, event.tensors, values, action.weight)

    def _notify_others(self, worker: int, event: e.PeerEvent) -> None:
        for other in sorted(self._started - {worker}):
            self._inboxes[other].append(Arrived(event))

    # -- steps -------------------------------------------------------------------------------------------------------

    def grant(self, order: GrantOrder) -> None:
        """Have a node compute on its own model, as soon as its outgoing messages let it."""
        run, worker, at = self.run, order.worker, order.at
        if run.emulation is None:
            return
        self._comes(worker)
        if worker in self._lost:
            self._begin_again(worker)
        attempt = run.emulation.attempt(worker)
        begin = self._links.can_compute_at(worker, at, overlaps=self._option(worker, "overlap", True))
        timing = Timing(attempt, at, begin, self._times.compute_s(worker, attempt, order.allotment.samples, begin))
        flight = self._flights[worker] = NodeFlight(order, timing, at, standing(run))
        run.engine.call_at(timing.end, self._computed, flight)

    def excuses(self, worker: int) -> bool:
        return any(worker in waiting for waiting in self._rounds.values())

    def busy_until(self, worker: int) -> float | None:
        flight = self._flights.get(worker)
        return None if flight is None else flight.timing.end

    def cancel(self, worker: int, ticket: int) -> None:
        flight = self._flights.get(worker)
        if flight is not None and flight.order.ticket == ticket:
            del self._flights[worker]

    def _computed(self, flight: NodeFlight) -> None:
        order = flight.order
        if self._flights.get(order.worker) is flight:
            phase = self.run.phases.number
            step = Step(
                order.ticket, order.allotment, None, order.rounds_done, phase=phase, border=self._border(flight),
                save=self.run.checkpoints.number_for(order.worker), standing=flight.standing,
            )  # fmt: skip
            self.run.engine.send(order.worker, step)

    def on_push(self, record: WorkerRecord, message: Push, at: float) -> None:
        """Accept a step; the time of its exchanges, beyond the computing, counts as transfer."""
        flight = self._flights[record.worker]
        self.count(record.worker, message)
        compute_s = flight.timing.end - flight.timing.begin
        arrives_at = self._times.reachable_at(record.worker, at)
        for moment in self._deliveries(record.worker, flight.timing.attempt, at, arrives_at):
            transfer_s = moment - flight.granted_at - compute_s
            self.run.engine.call_at(moment, self._arrived, (record, message, compute_s, transfer_s))

    def _deliveries(self, worker: int, number: int, sent_at: float, arrives_at: float) -> list[float]:
        """Return when a message arrives: once, unless a message fault strikes it."""
        emulation = self.run.emulation
        return [arrives_at] if emulation is None else emulation.ways.faults.deliveries(
            worker, number, sent_at, arrives_at
        )  # fmt: skip

    def _arrived(self, going: tuple[WorkerRecord, Push, float, float]) -> None:
        record, message, compute_s, transfer_s = going
        if self.run.workers.get(record.worker, record.incarnation) is not record or not self.run.active:
            return
        flight = self._flights.get(record.worker)
        if flight is not None and flight.order.ticket == message.ticket:
            del self._flights[record.worker]
        self.arrive(record, message, compute_s, transfer_s, self.run.engine.now())
        self._settle_rounds()

    def _border(self, flight: NodeFlight) -> Border:
        worker, at = flight.order.worker, self.run.engine.now()
        others = None
        if worker not in self._started:
            self._started.add(worker)
            others = tuple(sorted(set(self._present) - {worker}))
        arrived, self._inboxes[worker] = self._inboxes[worker], []
        step = self.run.workers.records[worker].through
        begin = flight.timing.begin
        return Border(at, step, at - begin, begin - flight.granted_at, arrived, others)

    # -- messages of nodes -------------------------------------------------------------------------------------------

    def on_message(self, record: WorkerRecord | None, message: Any, at: float) -> None:
        if record is None:
            raise InternalError(f"an evaluator sent {message}, which has no meaning here")
        worker = record.worker
        match message:
            case Model():
                self._models[worker], self._machines[worker] = message, message.machine
            case Outgoing():
                self._post(worker, message)
            case Wanted():
                arrives_at = self._links.arrival(worker, message.peer, at, at)
                self.run.engine.call_at(arrives_at, self._asked, (worker, message.peer))
            case CentreExchange():
                self._exchange(worker, message)
            case Averaging():
                self._passed[worker], self._waits_since[worker] = message.round, at
                self._rounds.setdefault(message.round, {})[worker] = message.values
                self._later(0.0, lambda _: self._settle_rounds(), None)
            case NotFinite():
                self._mend(record, message, at)
            case Decided():
                self.run.sink.write(PeerDecision(worker, record.incarnation, message.event, message.actions))

    def _mend(self, record: WorkerRecord, message: NotFinite, at: float) -> None:
        """Lend a node whose model is not finite another's."""
        lenders = [node for node in sorted(self._started & self._models.keys()) if node != record.worker]
        sound = (self._models[node] for node in lenders if is_finite(self._models[node].tensors()))
        lent = next(sound, None)
        if lent is None or self.on_broken(record, message, at):
            self.run.engine.send(record.worker, Lent([] if lent is None else _copied(lent.tensors())))

    def _later(self, seconds: float, call: "Callable[[Any], None]", argument: Any) -> None:
        self.run.engine.call_at(self.run.engine.now() + seconds, call, argument)

    def _post(self, worker: int, message: Outgoing) -> None:
        at = self.run.engine.now()
        out = self._links.send(worker, message.nbytes, at)
        self._sent_count += 1
        sending = (worker, self._present.get(worker), self._sent_count, message, out - at)
        self._leaving[self._sent_count] = self._under_way[self._sent_count] = sending
        self._later(out - at, self._sent, sending)
        arrives_at = self._links.arrival(worker, message.peer, at, out)
        for copy, moment in enumerate(self._deliveries(worker, self._sent_count, at, arrives_at)):
            self.run.engine.call_at(moment, self._delivered_again if copy else self._delivered, sending)

    def _sent(self, sending: Sending) -> None:
        worker, incarnation, number, message, seconds = sending
        if self._leaving.pop(number, None) is not None and self._present.get(worker) == incarnation:
            self._inboxes[worker].append(Arrived(e.Sent(0.0, message.peer, message.nbytes, seconds)))

    def _delivered_again(self, sending: Sending) -> None:
        """Refuse the second copy of a message, unless it comes first."""
        worker, _, number, message, _ = sending
        if number in self._under_way:
            self._delivered(sending)
        elif self.run.phases.running and self.run.active:
            reason = f"message {number} of node {worker} has arrived before"
            data = {"reason": reason, "samples": 0, "push": None}
            self.run.coordinator.observe(self.run.engine.now(), "refused", data, message.peer)

    def _delivered(self, sending: Sending) -> None:
        worker, incarnation, number, message, _ = sending
        if self._under_way.pop(number, None) is None:
            return  # it was delivered when its phase ended
        to = message.peer
        if to not in self._present:  # return it to its sender
            if self._present.get(worker) == incarnation:
                to = worker
            elif worker in self._crashed or not self._present or not self._is_weighted():
                return
            else:
                to = min(self._present)  # the sender has left: another node must take the weight
        received = e.Received(0.0, worker, number, message.weight, message.tensors)
        self._inboxes[to].append(Arrived(received, message.values))

    def _asked(self, question: tuple[int, int]) -> None:
        asker, asked = question
        if asked in self._started:
            self._inboxes[asked].append(Arrived(e.Asked(0.0, asker)))

    # -- the centre, and averages ------------------------------------------------------------------------------------

    def _exchange(self, worker: int, message: CentreExchange) -> None:
        nbytes = sum(value.nbytes for value in message.values)
        now, held_back = self.run.engine.now(), self._held_back(worker)
        seconds = self._links.seconds(worker, nbytes, now) + self._times.latency_s(worker, 0, True, now)
        if seconds + held_back <= 0.0:
            self.run.engine.send(worker, self._pull(worker, message))
        else:
            self._later(held_back + seconds, self._at_centre, (worker, self._ticket(worker), message, seconds))

    def _held_back(self, worker: int) -> float:
        """Return the seconds for which the node is still cut off."""
        now = self.run.engine.now()
        return self._times.reachable_at(worker, now) - now

    def _ticket(self, worker: int) -> int | None:
        """Return the ticket of the node's current grant; answers for another ticket are void."""
        return self.run.workers.records[worker].ticket if worker in self._present else None

    def _at_centre(self, going: tuple[int, int | None, CentreExchange, float]) -> None:
        worker, ticket, message, seconds = going
        if ticket and self._ticket(worker) == ticket:
            answer = (worker, ticket, self._pull(worker, message))
            self._later(self._held_back(worker) + seconds, self._answer, answer)

    def _pull(self, worker: int, message: CentreExchange) -> Pulled:
        assert self._centre is not None
        pulls = self._centre.pull(message.alpha, message.tensors, message.values)
        nbytes = sum(value.nbytes for value in message.values)
        self.run.coordinator.observe(self.run.engine.now(), "exchange", {"bytes": 2 * nbytes}, worker)
        return Pulled(pulls)

    def _answer(self, going: tuple[int, int | None, PeerToWorker]) -> None:
        worker, ticket, message = going
        if ticket and self._ticket(worker) == ticket and self.run.active:
            self.run.engine.send(worker, message)

    def _settle_rounds(self) -> None:
        """Average the rounds that no computing node is still missing from."""
        for number in sorted(self._rounds):
            if self._rounds[number] and self.is_complete(number, list(self._present)):
                self._average(self._rounds.pop(number))

    def _average(self, group: dict[int, list[torch.Tensor]]) -> None:
        members, at = tuple(sorted(group)), self.run.engine.now()
        means = [torch.stack([v.double() for v in values]).mean(dim=0).to(values[0].dtype)
                 for values in zip(*(group[worker] for worker in members), strict=True)]  # fmt: skip
        nbytes = sum(mean.nbytes for mean in means)
        share = 2 * (len(members) - 1) / len(members)  # of a ring all-reduce: what each sends, in models
        held_back = max(self._held_back(worker) for worker in members)
        for worker in members:
            # The wait counts neither as computing nor as transfer.
            waited = at - self._waits_since.pop(worker)
            self.run.workers.records[worker].granted_at += waited
            self._flights[worker].granted_at += waited
            seconds = share * self._links.seconds(worker, nbytes, at) + (
                self._links.latency_s(worker, worker, at) if share else 0.0
            )
            self.run.coordinator.observe(at, "exchange", {"bytes": round(share * nbytes)}, worker)
            self._later(held_back + seconds, self._answer, (worker, self._ticket(worker), Averages(means, members)))

    # -- all models together -----------------------------------------------------------------------------------------

    def refresh(self, then: "Callable[[], None]") -> None:
        self._average_all(self._taking_part(), self.run.engine.now())
        then()

    def _average_all(self, models: dict[int, NodeModel], at: float) -> None:
        nbytes = sum(t.nbytes for model in models.values() for t in (*model.tensors, *model.counters))
        self.put_average(models, nbytes, at)


def _copied(tensors: Any) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]
