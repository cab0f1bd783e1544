"""The server's part in a run of nodes: which nodes are present, which average together, and the centre.

The coordinator grants samples as in every run, but no model: nodes step on their own models and send them to each
other. The server collects all models only to evaluate or save them, and at the end of a phase.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from paceline.core.errors import InternalError, OptionError
from paceline.core.events import Cause
from paceline.core.peer_events import PeerCause
from paceline.core.updates import UNMEASURED, Contents, Merged, PushRef
from paceline.model.spec import state_of
from paceline.model.store import Store, gradient_norm, model_state
from paceline.peers import messages as p
from paceline.peers.gathering import Gathering, NodeModel
from paceline.peers.models import Centre, as_stored, distance, is_finite, mean_of, shares
from paceline.peers.packing import DTYPES
from paceline.records.journal import PeerDecision
from paceline.server.exchange import Result
from paceline.server.model_exchange import ModelExchange
from paceline.server.phases import standing
from paceline.server.workers import GrantOrder, WorkerRecord
from paceline.strategies import build_peer
from paceline.transport.mail import as_bytes, from_bytes
from paceline.transport.messages import Push, Work

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

MOST_BROKEN = 3  # times that a node whose model is not finite may take another's; a fourth would not help


class StepsElsewhere:
    """Updates of a run whose nodes make the steps: the server has nothing to merge."""

    of_clocks: ClassVar[bool] = False

    def apply(self, pushes: Sequence[PushRef], weights: Sequence[float], *, stock: bool) -> Merged:
        """Do nothing: the nodes have made the steps."""
        del pushes, weights, stock
        return UNMEASURED

    def extend(self, held: PushRef, piece: PushRef) -> PushRef:
        """Raise: a step arrives in one piece."""
        raise InternalError(f"the step {held} was extended by {piece}")

    def discard(self, push: PushRef) -> None:
        """Do nothing: the server holds no push."""

    def contents(self) -> Contents:
        """Return nothing to save."""
        return Contents({}, {})


class PeerExchangeBase(ModelExchange, ABC):
    """The part of the exchange that virtual nodes and processes share."""

    def __init__(self, run: "ServerRun") -> None:
        super().__init__(run)
        self.spec = run.plan.config.strategy
        self.used: dict[int, int] = {}  # samples of each node, in this phase
        self._kept: dict[
            int, tuple[list[torch.Tensor], list[torch.Tensor]]
        ] = {}  # nodes' own models at the end of the last phase
        self._broken: dict[int, int] = {}  # how often each node's model was not finite
        self._passed: dict[int, int] = {}  # the last round of averages that each node asked for

    def make_way(self) -> None:
        raise OptionError(f"{self.spec} has no server that could keep tables: choose ssp, bsp or asp")

    def adopt(self, store: Store, at: float) -> None:
        del at
        self.store_or_none = store  # for evaluations and checkpoints; grants send no model
        self.run.coordinator.use(StepsElsewhere(), 0, self)
        self.run.coordinator.watch.count_samples()

    @abstractmethod
    def grant(self, order: GrantOrder) -> None:
        """Have a node make a step."""

    @abstractmethod
    def cancel(self, worker: int, ticket: int) -> None:
        """Void a grant."""

    def count(self, node: int, push: Push) -> None:
        """Count the samples of a node's step; a gradient that is not finite made no step."""
        if push.gradient is not None and math.isfinite(gradient_norm(push.gradient)):
            self.used[node] = self.used.get(node, 0) + push.samples

    def arrive(self, record: WorkerRecord, push: Push, compute_s: float, transfer_s: float, at: float) -> None:
        """Tell the coordinator of a step."""
        arrival = PushRef(
            record.worker, record.incarnation, push.ticket, push.samples, compute_s, transfer_s,
            kept=push.kept, nominal=push.nominal,
        )  # fmt: skip
        if push.gradient is not None:
            arrival.norm, arrival.loss = gradient_norm(push.gradient), push.gradient.loss
        self.run.coordinator.arrive(at, arrival)

    def put_average(self, models: Mapping[int, NodeModel], nbytes: int, at: float) -> None:
        """Write the average of the models, weighted by samples, into the store."""
        if self.store_or_none is None or not models:
            return  # between phases the store has the average already
        models = self._sound(models, at)
        tensors = [model.tensors for model in models.values()]
        mean = mean_of(tensors, shares([self.used.get(node, 0) for node in models]))
        counters = [model.counters for model in models.values()]
        self.store.overwrite(*as_stored(self.store.spec, mean, counters))
        data = {"distance": distance(tensors), "nodes": len(models), "bytes": nbytes}
        self.run.coordinator.observe(at, "consensus", data)

    def _sound(self, models: Mapping[int, NodeModel], at: float) -> Mapping[int, NodeModel]:
        """Leave out models with NaN or infinities, unless all of them are so."""
        sound = {node: model for node, model in models.items() if is_finite(model.tensors)}
        for node in models.keys() - sound.keys() if sound else ():
            self.run.remark(f"the model of worker {node} is not finite: it is left out of the average", at)
        return sound or models

    def on_broken(self, record: WorkerRecord, message: p.NotFinite, at: float) -> bool:
        """Name a node whose model is not finite; set it aside if that happens again and again. Return whether it goes
        on, with the model of another node."""
        node, run = record.worker, self.run
        count = self._broken[node] = self._broken.get(node, 0) + 1
        run.coordinator.observe(run.moment(at), "not_finite", {"step": message.step, "count": count}, node)
        if count > MOST_BROKEN and len(run.workers.in_phase) > 1:
            why = f"its model was not finite {count} times, and each time it had taken another node's"
            run.departures.set_aside(record, why, run.moment(at))
            return False
        text = f"the model of worker {node} is not finite after its step {message.step}: it goes on from another node's"
        run.remark(text, run.moment(at))
        return True

    def keep(self, models: Mapping[int, NodeModel]) -> None:
        """Keep the nodes' own models, before they get the average; without nodes keep those of the phase before."""
        if models:
            spec = self.store.spec
            self._kept = {node: as_stored(spec, m.tensors, [m.counters]) for node, m in sorted(models.items())}

    @property
    def own_models(self) -> Sequence[int]:
        return sorted(self._kept)

    @contextlib.contextmanager
    def as_node(self, node: int) -> Iterator[None]:
        average = self.store.read()
        self.store.overwrite(*self._kept[node])
        try:
            yield
        finally:
            self.store.overwrite(self.store.layout.views(average.flat), average.buffers)

    def is_complete(self, number: int, present: Sequence[int]) -> bool:
        """Whether every node that is computing has asked for that round's average, or a later one."""
        records = self.run.coordinator.records
        computing = [node for node in present if records[node].present and records[node].ticket]
        return all(self._passed.get(node, 0) >= number for node in computing)

    def extra(self) -> dict[str, Any]:
        return {"peer": self.spec, "node_samples": dict(self.used)}

    def restore(self, contents: Contents, version: int, states: dict[int, bytes], extra: dict[str, Any]) -> None:
        super().restore(contents, version, states, extra)
        self.used = {int(node): count for node, count in extra.get("node_samples", {}).items()}

    def result(self) -> Result:
        if self.store_or_none is None:
            return Result()
        spec = self.store.spec
        return Result(model_state(self.store), nodes={n: state_of(spec, *model) for n, model in self._kept.items()})


class PeerExchange(PeerExchangeBase):
    """The exchange of nodes in processes, which send models to each other without the server."""

    messages = p.NodeToServer

    def __init__(self, run: "ServerRun") -> None:
        super().__init__(run)
        self.gathering = Gathering(self)
        self._boxes: dict[int, p.Box] = {}
        self._present: set[int] = set()
        self._started: set[int] = set()
        self._leaving: set[int] = set()  # nodes that pass their weight on; peers send them nothing more
        self._beginners: set[int] = set()  # nodes that begin the phase with the common model
        self._centre: Centre | None = None
        self._rounds: dict[int, set[int]] = {}  # nodes that wait for an average, by round
        self._groups: dict[int, p.Group] = {}
        self._averaging: dict[int, set[int]] = {}  # members of a group that are not done, by round
        self._coming = self._together = False  # whether the phase's last models were asked for, and are averaged
        machine = build_peer(self.spec, 0, 0)
        self._wire = DTYPES.get(machine.wire)  # for the centre
        self._has_centre = machine.has_centre

    # -- nodes come and go -------------------------------------------------------------------------------------------

    def begin_phase(self, members: Sequence[int], at: float) -> None:
        del at
        self._beginners = set(members)
        self._centre = Centre.of(self.store) if self._has_centre else None
        self._present = set(members)

    def _comes(self, node: int) -> None:
        if node in self._present:
            return
        self._present.add(node)
        self._passed.pop(node, None)
        self._send_others(node, p.Peering([self._boxes[node]], []))

    def _send_others(self, node: int, news: p.Peering) -> None:
        for other in sorted(self._started - {node}):
            self.run.engine.send(other, news)

    def left(self, worker: int, cause: Cause, at: float) -> None:
        del at
        self.gathering.gone(worker, crashed=cause != "done")
        if worker not in self._present:
            return
        self._present.discard(worker)
        self._started.discard(worker)
        why: PeerCause = cause if cause in ("done", "leave", "timeout") else "crash"
        self._send_others(worker, p.Peering([], [(worker, why)]))
        self._leaving.discard(worker)
        for number, waiting in list(self._averaging.items()):
            waiting.discard(worker)
            if worker in self._groups[number].members:  # even if it was done: its last messages may not have arrived
                self._call_again(number)
        for nodes in self._rounds.values():
            nodes.discard(worker)
        self._settle_rounds()

    def phase_over(self, at: float) -> None:
        del at
        for each in (self._present, self._started, self._leaving):
            each.clear()
        for table in (self._rounds, self._averaging, self._groups, self._passed):
            table.clear()
        self._coming = self._together = False
        self._centre = None
        self.gathering.phase_over()

    def ask_to_leave(self, record: WorkerRecord, then: Callable[[], None]) -> None:
        if record.worker in self._started:
            self.gathering.dismiss(record.worker, then)
        else:
            then()

    # -- silence -----------------------------------------------------------------------------------------------------

    answers_pings = True  # a node that waits for others reads its messages

    def ping(self, worker: int) -> None:
        self.run.engine.send(worker, p.AreYouThere())

    def excuses(self, worker: int) -> bool:
        return any(worker in nodes for nodes in self._rounds.values())

    def owes(self, worker: int) -> float | None:
        return self.gathering.asked_at if worker in self.gathering.waiting else None

    # -- all models together -----------------------------------------------------------------------------------------

    def refresh(self, then: Callable[[], None]) -> None:
        """Update the store's average, then call `then`; between two phases the store has it already."""
        if self._present and not self._together:
            self.gathering.begin(then, last=False)
        else:
            then()

    def can_end_phase(self, at: float) -> bool:
        """Whether the nodes' last models are averaged; the first call asks for them."""
        del at
        if not self.run.phases.running:
            return True
        if not self._coming:
            self._coming = True
            self.gathering.begin(self._come_together, last=True)
        return self._together

    def _come_together(self) -> None:
        self._together = True
        self.run.engine.wake()

    # -- steps -------------------------------------------------------------------------------------------------------

    def grant(self, order: GrantOrder) -> None:
        """Have a node make a step; before its first one tell it who its peers are."""
        run, node = self.run, order.worker
        record = run.workers.records[node]
        self._comes(node)
        if node not in self._started:
            self._started.add(node)
            run.engine.send(node, self._first_news(node))
        record.script.order, record.script.computing = order, True
        timing = None
        if run.emulation is not None:
            timing = run.emulation.compute(node, order.allotment.samples, order.at)
        work = Work(
            order.ticket, order.allotment, None, order.rounds_done, save=run.checkpoints.number_for(node),
            phase=run.phases.number, step=record.through, standing=standing(run),
        )  # fmt: skip
        run.engine.dispatch(node, work, timing)

    def cancel(self, worker: int, ticket: int) -> None:
        self.run.workers.records[worker].script.order = None
        self.run.engine.recall(worker, ticket)

    def _first_news(self, node: int) -> p.Peering:
        """Return a node's first message: its peers, and the one whose model a newcomer starts from."""
        others = sorted(self._present - self._leaving - {node})
        source = None if node in self._beginners or not others else others[0]
        latency_s, seconds_per_byte = self._link(node)
        joined = [self._boxes[other] for other in others]
        self._beginners.discard(node)  # its next incarnation is a newcomer
        elapsed_s, phase = self.run.engine.now(), self.run.phases.number
        return p.Peering(joined, [], True, source, elapsed_s, latency_s, seconds_per_byte, phase)

    def _link(self, node: int) -> tuple[float, float]:
        emulation = self.run.emulation
        if emulation is None:
            return 0.0, 0.0
        bandwidth = min(emulation.times.bandwidth(node), emulation.times.server_bandwidth)
        return emulation.times.latency_s(node, 0, True), 0.0 if bandwidth == math.inf else 1 / bandwidth

    def _way_s(self, node: int, nbytes: float, at: float) -> float:
        """Return the seconds that so many bytes take between a node and here, or a neighbour, from `at` on."""
        emulation = self.run.emulation
        if emulation is None:
            return 0.0
        return emulation.times.latency_s(node, 0, True, at) + emulation.times.way_s(node, nbytes, at)

    def on_push(self, record: WorkerRecord, message: Push, at: float) -> None:
        """Pass a node's step to the coordinator, unless its grant is void."""
        run, script = self.run, record.script
        script.pushed, script.computing = True, False
        order, script.order = script.order, None
        if order is None or order.ticket != message.ticket or not run.active:
            return
        if run.emulation is not None:
            run.emulation.computed(message.overrun_s)
        self.count(record.worker, message)
        self.arrive(record, message, message.compute_s, max(0.0, at - order.at - message.compute_s), at)
        self._settle_rounds()

    # -- messages of nodes -------------------------------------------------------------------------------------------

    def on_message(self, record: WorkerRecord | None, message: Any, at: float) -> None:
        if record is None:
            raise InternalError(f"the evaluator sent {message}, which has no meaning here")
        node, run = record.worker, self.run
        match message:
            case p.Decisions():
                for decided in message.decided:
                    run.sink.write(PeerDecision(node, record.incarnation, decided.event, decided.actions))
            case p.Mailbox():
                latency_s, _ = self._link(node)
                self._boxes[node] = p.Box(node, record.incarnation, message.address, message.key, latency_s)
            case p.CentreExchange():
                self._exchange(record, message, at)
            case p.Averaging():
                self._passed[node] = message.round
                self._rounds.setdefault(message.round, set()).add(node)
                self._settle_rounds()
            case p.Exchanged():
                run.coordinator.observe(run.moment(at), "exchange", {"bytes": message.bytes}, node)
                self._has_averaged(node, message)
            case p.Leaving() if node in self._started:
                self._leaving.add(node)
                self._send_others(node, p.Peering([], [(node, message.cause)], leaving=True))
            case p.Leaving():
                pass  # the phase is over
            case p.Snapshot():
                self.gathering.take(node, message)
            case p.NotFinite():
                self.on_broken(record, message, at)
            case p.Here():
                pass  # heard, which is all it is for
            case _:
                raise InternalError(f"worker {node} sent {message}, which has no meaning here")

    # -- the centre --------------------------------------------------------------------------------------------------

    def _exchange(self, record: WorkerRecord, message: p.CentreExchange, at: float) -> None:
        if self._is_void(record, message):
            return
        nbytes = sum(value.nbytes for value in message.values)
        way_s = self._way_s(record.worker, nbytes, at)
        if way_s <= 0.0:
            self._answer((record, self._pull(record, message)))
            return

        def at_centre(_: Any) -> None:
            if not self._is_void(record, message):
                self.run.engine.call_at(at + 2 * way_s, self._answer, (record, self._pull(record, message)))

        self.run.engine.call_at(at + way_s, at_centre)

    def _is_void(self, record: WorkerRecord, message: p.CentreExchange | p.Pulled) -> bool:
        """Whether the grant in which the node asked has ended or was cancelled."""
        return record.script.gone or not record.ticket or record.ticket != message.ticket

    def _answer(self, going: tuple[WorkerRecord, p.Pulled]) -> None:
        record, message = going
        if not self._is_void(record, message) and self.run.active:
            self.run.engine.send(record.worker, message)

    def _pull(self, record: WorkerRecord, message: p.CentreExchange) -> p.Pulled:
        if self._centre is None:
            raise InternalError(f"worker {record.worker} exchanges with a centre that {self.spec} does not have")
        centre = self._centre.tensors
        places = range(len(centre)) if message.tensors is None else message.tensors
        values = [
            from_bytes(torch.from_numpy(value), self._wire or centre[place].dtype, centre[place].shape)
            for place, value in zip(places, message.values, strict=True)
        ]
        pulls = self._centre.pull(message.alpha, message.tensors, values)
        nbytes = sum(value.nbytes for value in message.values)
        self.run.coordinator.observe(self.run.moment(), "exchange", {"bytes": 2 * nbytes}, record.worker)
        return p.Pulled([as_bytes(pull).numpy() for pull in pulls], message.ticket)

    # -- averages of all ---------------------------------------------------------------------------------------------

    def _settle_rounds(self) -> None:
        """Start the averages that no computing node is still missing from."""
        for number in sorted(self._rounds):
            if not self._rounds[number] or not self.is_complete(number, sorted(self._present)):
                continue
            members = sorted(self._rounds.pop(number))
            self._averaging[number] = set(members)
            self._groups[number] = p.Group(number, 0, members, self._seconds(members))
            self._call(self._groups[number])

    def _seconds(self, members: list[int]) -> float:
        if self.run.emulation is None or len(members) < 2:
            return 0.0
        share = 2 * (len(members) - 1) / len(members)
        nbytes, at = share * self.store.nbytes, self.run.moment()
        return max(self._way_s(node, nbytes, at) for node in members)

    def _call(self, group: p.Group) -> None:
        for node in group.members:
            self.run.engine.send(node, group)

    def _has_averaged(self, node: int, message: p.Exchanged) -> None:
        group, waiting = self._groups.get(message.round), self._averaging.get(message.round, set())
        waiting.discard(node)
        if not waiting:
            self._averaging.pop(message.round, None)
            self._groups.pop(message.round, None)
        elif group is not None and message.attempt < group.attempt:  # it was done before the new attempt named it
            self._call_again(message.round)

    def _call_again(self, number: int) -> None:
        before = self._groups[number]
        members = sorted(self._averaging[number])
        if not members:
            return
        self._groups[number] = p.Group(number, before.attempt + 1, members, before.seconds)
        self._call(self._groups[number])

    # -- checkpoints, results ----------------------------------------------------------------------------------------

    def restore(self, contents: Contents, version: int, states: dict[int, bytes], extra: dict[str, Any]) -> None:
        super().restore(contents, version, states, extra)
        self.gathering.averaged = True

    def result(self) -> Result:
        """Return no model if the run failed before any average: the store has only the first model then."""
        return super().result() if self.gathering.averaged or self.run.cause != "error" else Result()
