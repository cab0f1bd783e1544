"""Script workers in virtual time: the user's code computes real gradients whenever its virtual time has come.

A worker waits with the parameters it was granted until its computing time is over and only then computes, so cancelled
work costs nothing. Evaluation happens between two events and takes no virtual time.
"""

import math
from collections.abc import Callable

from paceline.core.errors import InternalError, ScenarioError, ScriptError, UserError
from paceline.core.ledger import Allotment
from paceline.core.peer_events import PeerCause
from paceline.core.scenario.file import Scenario
from paceline.core.scenario.jitter import worker_key
from paceline.engines.sim.interrupts import Interrupts, deferred
from paceline.engines.sim.kernel import Kernel
from paceline.engines.sim.threads import ScriptThread, Streams, Turns
from paceline.engines.sim.ticks import Ticks
from paceline.engines.sim.virtual_cluster import Flight, VirtualCluster
from paceline.engines.sim.virtual_peers import VirtualPeers
from paceline.engines.sim.virtual_tables import VirtualTables
from paceline.model.store import Parameters
from paceline.peers.messages import PeerToServer, PeerToWorker
from paceline.server.coordinator import Coordinator
from paceline.server.phases import Phases, as_data
from paceline.server.run_control import Conduct
from paceline.server.workers import GrantOrder, PushArrival
from paceline.tables.messages import TableToServer
from paceline.transport.messages import (
    Done,
    Extra,
    Hello,
    More,
    Note,
    Over,
    Push,
    Ready,
    Remark,
    Stop,
    ToServer,
    ToWorker,
    Welcome,
    Work,
)
from paceline.worker.context import Shared, WorkerContext


class ScriptCluster(VirtualCluster):
    """Virtual workers that run a script."""

    def __init__(self, kernel: Kernel, scenario: Scenario, train: Callable[[], None], conduct: Conduct) -> None:
        super().__init__(kernel, scenario)
        self.train = train
        self.conduct = conduct
        self.phases = Phases()
        self.shared = Shared()
        self.threads: dict[int, ScriptThread] = {}
        self.turns = Turns()
        self._versions: dict[int, Parameters | None] = {}  # what each worker computes on
        self.tables = VirtualTables(self)
        self.peers = VirtualPeers(self)
        self._starting = True

    # -- workers come and go -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        super().begin()
        self._starting = False
        self._begin_phase_if_ready()

    def admit(self, worker: int) -> None:
        config, incarnation = self.conduct.config, self.incarnations[worker]
        seed = worker_key(config.seed + incarnation * 1_000_003, worker) >> 1
        thread = self.threads[worker] = ScriptThread(self.train, self.turns, seed)
        self.phases.alive.add(worker)
        given = WorkerContext(
            worker=worker,
            workers=self.scenario.count,
            endpoint=thread.link,
            shared=self.shared,
            options=config.options,
            batch_size=config.batch_size,
            epochs=config.epochs,
            data_dir=config.data_dir,
            device="cpu",
            evaluates=config.evaluate_every is not None and not self.conduct.can_evaluate,
            peer=self.peers.machine(worker),
        )
        thread.start(given)
        self._listen(worker)
        if not self._starting:
            self._begin_phase_if_ready()

    def removed(self, worker: int, cause: PeerCause) -> None:
        self.peers.left(worker, cause)
        if worker in self.threads:
            self._abandon(worker)
        self._versions.pop(worker, None)
        self.phases.gone(worker)
        self.tables.left(worker)
        self._begin_phase_if_ready()

    def _abandon(self, worker: int) -> None:
        thread = self.threads.pop(worker)
        thread.abandon()
        if not thread.ended:
            text = f"the script of worker {worker} swallows its own end (a bare `except:`?): its thread was left behind"
            self.coordinator.observe("warning", {"text": text})

    def _script_ended(self, worker: int) -> None:
        thread = self.threads[worker]
        if thread.error is not None:
            del self.threads[worker]
            raise self._blame(worker, thread.error)
        self.tables.part(worker, lambda: self._depart(worker))
        self.threads.pop(worker, None)

    def _depart(self, worker: int) -> None:
        """The script is at its end, and all that it wrote has arrived."""
        self.phases.gone(worker)
        self._out_of_loop(worker)
        self.gone.add(worker)

    def _blame(self, worker: int, error: BaseException) -> BaseException:
        if isinstance(error, UserError):
            return error
        if isinstance(error, SystemExit):
            return ScriptError(f"the script of worker {worker} exited with {error.code}")
        batch = self.shared.batches.get(worker, 0)
        where = f"worker {worker}, batch {batch}, {self.kernel.now:.6g} s into the run"
        failure = ScriptError(f"the script raised {type(error).__name__} in {where}: {error}")
        failure.__cause__ = error
        return failure

    # -- what scripts say --------------------------------------------------------------------------------------------

    def tell(self, worker: int, message: ToWorker | PeerToWorker) -> None:
        """Hand a message over and hear what the script says to it."""
        self.threads[worker].resume(message)
        self._listen(worker)

    def _listen(self, worker: int) -> None:
        """Take in all that a script said before it came to wait."""
        thread = self.threads[worker]
        while (message := thread.collect()) is not None:
            answer = self._hear(worker, message)
            if self.threads.get(worker) is not thread:
                return
            if answer is not None:
                thread.resume(answer)
        if thread.ended:
            self._script_ended(worker)

    def _hear(self, worker: int, message: ToServer | PeerToServer) -> ToWorker | PeerToWorker | None:
        """Deal with a message; what can be answered at once is."""
        match message:
            case Push():
                self._on_push(worker, message)
            case More():
                return self._on_more(worker, message)
            case Note():
                self.coordinator.now = self.kernel.now
                self.coordinator.observe("report", {"name": message.name, "value": message.value}, worker)
            case Ready():
                return self._on_ready(worker, message)
            case Hello():
                home = self.peers if self.peers.in_use else self.conduct
                return Welcome(home.welcome(worker, message))
            case Done():
                self._out_of_loop(worker)
            case Remark():
                self.coordinator.now = self.kernel.now
                self.conduct.remark(message.text)
            case Stop():
                self.coordinator.now = self.kernel.now
                self.conduct.stop_phase(message.reason)
            case _ if isinstance(message, TableToServer):
                self.peers.refuse_tables()
                self.tables.hear(worker, message)
            case _ if isinstance(message, PeerToServer):
                return self.peers.hear(worker, message)
        return None

    def _on_ready(self, worker: int, message: Ready) -> Over | None:
        answer = "over" if self.conduct.cause is not None else self.phases.ready(worker, message)
        if answer == "over":
            return self._over()
        if answer == "join":
            self.coordinator.join(worker, message.batch_size, self.kernel.now)
            self.tables.settle()
        elif self.tables.in_use:
            self.tables.look_at_openers()
            self._begin_phase_if_ready()
        return None

    def _begin_phase_if_ready(self) -> None:
        if self.phases.can_begin and not self._starting:
            ledger = self.phases.begin(self.conduct.config.seed, self.scenario.count)
            current = self.phases.current
            if current is None:
                raise InternalError("a phase began without anybody")
            members = sorted(self.phases.members)
            self.coordinator.now = self.kernel.now
            self.coordinator.observe(
                "phase", as_data(current, math.ceil(ledger.total / (current.batch_size * len(members))))
            )
            self.conduct.phase_begins(ledger, current.size, current.batch_size * len(members))
            for worker in members:
                self.coordinator.join(worker, current.batch_size, self.kernel.now)
            self.tables.settle()

    # -- grants and pushes -------------------------------------------------------------------------------------------

    def push_bytes(self, order: GrantOrder) -> tuple[int, int]:  # noqa: ARG002 - all replicas are alike
        return self.conduct.model_bytes, self.conduct.model_bytes

    def order(self, order: GrantOrder) -> None:
        if self.tables.in_use:
            self.tables.order(order)
            return
        if self.peers.in_use:
            self.peers.order(order)
            return
        if order.fresh:
            self._versions[order.worker] = self.conduct.store.read()
        super().order(order)

    def computed(self, flight: Flight) -> None:
        order = flight.order
        if self.peers.in_use:
            self.tell(order.worker, self.peers.step(flight))
            return
        version = self._versions.get(order.worker) if order.fresh else None
        work = Work(order.ticket, order.allotment, version, order.position, phase=self.phases.number)
        self.tell(order.worker, work)

    def _on_push(self, worker: int, message: Push) -> None:
        flight = self.flights[worker]
        order = flight.order
        arrival = PushArrival(
            worker, order.incarnation, message.ticket, message.samples, 0.0, 0.0,
            gradient=message.gradient, kept=message.kept, nominal=message.nominal,
        )  # fmt: skip
        if self.peers.in_use:
            self.peers.report(flight, arrival)
        else:
            self.send_up(flight, arrival)

    def arrived(self, arrival: PushArrival) -> None:
        super().arrived(arrival)
        self.peers.settle()

    def _on_more(self, worker: int, message: More) -> Extra | None:
        flight = self.flights[worker]
        current = self.phases.current
        work = current.batch_size if current is not None else 1
        extra = self.coordinator.more(worker, self.incarnations[worker], message.ticket, work)
        if extra is None:
            return Extra(None)
        self.prolong(flight, extra)
        return None

    def prolong(self, flight: Flight, extra: Allotment) -> None:
        """The worker goes on computing on the same grant."""
        worker, now = flight.order.worker, self.kernel.now
        attempt = self.attempts[worker]
        self.attempts[worker] = attempt + 1
        seconds = self.times.compute_s(worker, attempt, extra.samples, now)
        self.kernel.at(now + seconds, self._on_prolonged, (flight, extra))

    def _on_prolonged(self, going: tuple[Flight, Allotment]) -> None:
        flight, extra = going
        if self.flights.get(flight.order.worker) is flight:
            self.tell(flight.order.worker, Extra(extra))

    def _out_of_loop(self, worker: int) -> None:
        """The script wants no more of this phase; whatever the worker computed is not delivered."""
        self.phases.members.discard(worker)
        self.flights.pop(worker, None)
        if self.conduct.active:
            self.coordinator.leave(worker, "done", self.kernel.now)
        self.tables.left(worker)
        self.peers.left(worker, "done")
        if self.phases.running and not self.phases.members:
            self.conduct.nobody_left()

    def _ring(self, timer: tuple[str, int]) -> None:
        super()._ring(timer)
        self.tables.settle()

    # -- ends --------------------------------------------------------------------------------------------------------

    def _over(self) -> Over:
        store = self.conduct.store_or_none
        final = store.read() if store is not None else None
        run_over = self.conduct.cause is not None
        return Over(self.phases.number, final, self.coordinator.position, run_over)

    def end_phase(self) -> None:
        """Let everybody out of the loop; what their scripts do next may be another phase."""
        self.coordinator.close(self.kernel.now)
        self.flights.clear()
        self.peers.phase_over()
        self.release(self.phases.end())
        self._begin_phase_if_ready()

    def release(self, members: set[int]) -> None:
        """Tell these workers that their loop is over."""
        for worker in sorted(members):
            if worker in self.threads:
                self.tell(worker, self._over())

    def finish(self) -> None:
        """The run is over: scripts run to their end without further work."""
        self.flights.clear()
        self.peers.phase_over()
        members = self.phases.end() | set(self.phases.waiting)
        self.phases.waiting.clear()
        self.release(members)
        self.abandon()  # whoever called `batches` again was told at once that the run is over

    def abandon(self) -> None:
        """The run failed: end every script where it waits."""
        while self.threads:
            self._abandon(min(self.threads))


def run(train: Callable[[], None], scenario: Scenario, conduct: Conduct) -> None:
    """Train on the scenario's virtual cluster until the run is over; what happened is in `conduct`."""
    kernel = Kernel()
    cluster = ScriptCluster(kernel, scenario, train, conduct)
    coordinator = Coordinator(conduct.strategy, cluster, conduct.sink, max_versions=conduct.config.max_versions)
    cluster.coordinator = coordinator
    evaluations = Streams(worker_key(conduct.config.seed, -1) >> 1)

    def before_evaluation() -> None:
        cluster.peers.refresh()
        cluster.turns.take(evaluations)

    conduct.take_charge(coordinator, kernel.stop, before_evaluation)
    every = conduct.config.evaluate_every
    ticks = Ticks(kernel, conduct, every.amount if every is not None and every.unit == "s" else None)
    try:
        with deferred(kernel.stop) as interrupts:
            cluster.begin()
            ticks.begin()
            _loop(cluster, conduct, interrupts)
        conduct.check_options(cluster.shared.asked)
        coordinator.now = kernel.now
        if conduct.cause not in (None, "done"):
            coordinator.stop(kernel.now, f"the run ended: {conduct.cause}")
        cluster.finish()
        conduct.end(kernel.now)
    except BaseException as error:
        coordinator.now = kernel.now
        interrupted = isinstance(error, KeyboardInterrupt)
        coordinator.stop(kernel.now, "the run was interrupted" if interrupted else "the run failed")
        cluster.abandon()
        raise
    finally:
        cluster.turns.give_back()


def _loop(cluster: ScriptCluster, conduct: Conduct, interrupts: Interrupts) -> None:
    kernel, coordinator = cluster.kernel, cluster.coordinator
    while conduct.cause is None:
        interrupts.raise_if_pending()
        asked_for = coordinator.phase_over or coordinator.at_limit or conduct.phase_stopped is not None
        stopped = asked_for or kernel.run(conduct.config.max_seconds)
        interrupts.raise_if_pending()
        conduct.check_options(cluster.shared.asked)
        if conduct.cause is not None:
            return
        if conduct.switch_to is not None:
            conduct.switch_strategy(kernel.now)
        elif coordinator.at_limit or (stopped and kernel.now == conduct.config.max_seconds):
            conduct.cause = "limit"
        elif coordinator.phase_over or conduct.phase_stopped is not None:
            conduct.phase_ends()
            cluster.end_phase()
        elif not stopped and not cluster.phases.running:
            conduct.cause = "done"
        elif not stopped:
            raise _stuck(cluster)
        if not cluster.threads and not cluster.tables.parting and conduct.cause is None:
            conduct.cause = "done"


def _stuck(cluster: ScriptCluster) -> Exception:
    present = [seat.worker for seat in cluster.coordinator.seats.values() if seat.present]
    if present:
        return InternalError(
            f"{cluster.coordinator.strategy.name} lets workers {present} wait for ever at {cluster.kernel.now:.6g} s"
        )
    left_at = cluster.coordinator.now
    return ScenarioError(
        f"every worker has left at {left_at:.6g} s and data remains: let one rejoin in the scenario's events"
    )
