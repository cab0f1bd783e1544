"""Light workers: simulated cost without a script, for clusters of 100,000. `simulate` is public."""

import math

import msgspec

from paceline.core.errors import OptionError, ScenarioError
from paceline.core.ledger import Tally
from paceline.core.scenario.costs import crossing_is_free
from paceline.core.scenario.faults import ScenarioEvent
from paceline.core.scenario.file import Scenario, as_data
from paceline.core.updates import PushRef
from paceline.engines.sim.kernel import Kernel
from paceline.engines.sim.light_restarts import LightRestarts
from paceline.records.journal import Header, Sink
from paceline.server.coordinator import Coordinator, OnVersion
from paceline.server.emulation import Emulation, Timing
from paceline.server.workers import GrantOrder
from paceline.strategies import canonical
from paceline.strategies.base import DEFAULTS, Strategy

__all__ = ["simulate"]

RESTART_S = (
    0.1  # until a crashed server is back, if the event has no `for`: so long a small real one takes on two cores
)


def finds_server_at(scenario: Scenario, worker: int, at: float) -> float:
    """Return when a worker can notice a server that is there since `at`: one that is paused or cut off, later."""
    for event in scenario.events:
        if event.kind in ("pause", "partition") and worker in event.workers and event.at <= at < event.until:
            at = event.until
    return at


class Flight(msgspec.Struct, gc=False):
    """One grant under way: the model travels down, the worker computes, the gradient travels up."""

    order: GrantOrder
    timing: Timing
    bytes_down: int


class LightCluster:
    """Workers that compute nothing, in the times that the scenario gives."""

    coordinator: Coordinator

    def __init__(self, kernel: Kernel, scenario: Scenario, work: int, model_bytes: int) -> None:
        self.kernel = kernel
        self.scenario = scenario
        self.emulation = Emulation(scenario)
        self._work = work
        self._bytes = model_bytes
        self._flights: dict[int, Flight] = {}
        self._gone: set[int] = set()
        self.can_restart = False  # there are snapshots for a server that crashes
        self.down_s: float | None = None  # for so long the server that has just crashed is gone

    def begin(self) -> None:
        """Start the workers of the scenario and schedule its events."""
        for event in self.scenario.events:
            if event.kind == "server_crash" and not self.can_restart:
                raise ScenarioError(
                    "the scenario's server_crash needs a checkpoint to go on from: give checkpoint_every"
                )
            self.kernel.at(event.at, self._strike, event)
        for worker in range(self.scenario.count):
            self.coordinator.workers.admit(worker, 0)
        for worker in range(self.scenario.count):
            self.coordinator.join(worker, self._work, 0.0)

    def begin_again(self, incarnations: dict[int, int], died_at: float) -> None:
        """Introduce the workers to a coordinator that goes on, and schedule what happened since the other one died."""
        self.down_s = None
        self._flights.clear()
        for event in self.scenario.events:
            if event.at > died_at:
                self.kernel.at(event.at, self._strike, event)
        there = sorted(incarnations.keys() - self._gone)
        for worker, incarnation in sorted(incarnations.items()):
            self.coordinator.workers.admit(worker, incarnation)
        for worker in there:
            at = finds_server_at(self.scenario, worker, self.kernel.now)
            self.kernel.at(at, self._join_again, (worker, incarnations[worker]))

    def _join_again(self, going: tuple[int, int]) -> None:
        worker, incarnation = going
        record = self.coordinator.records[worker]
        if worker not in self._gone and record.incarnation == incarnation and not record.present:
            self.coordinator.join(worker, self._work, self.kernel.now)

    def _die(self, down_s: float) -> None:
        self.down_s = down_s
        self.kernel.stop()

    def _start(self, worker: int) -> None:
        before = self.coordinator.records.get(worker)
        self._gone.discard(worker)
        self.coordinator.workers.admit(worker, 0 if before is None else before.incarnation + 1)
        self.coordinator.join(worker, self._work, self.kernel.now)

    def _strike(self, event: ScenarioEvent) -> None:
        """Carry out a scenario event; slow-downs, pauses and cut links are already part of the times."""
        at = self.kernel.now
        for target in event.workers or (None,):
            self.coordinator.observe(at, "scenario", event.as_data(), target)
        if event.kind == "server_crash":  # after all other events of this second
            self.kernel.at(at, self._die, RESTART_S if event.for_s is None else event.for_s)
        for worker in event.workers:
            if event.kind in ("crash", "leave") and worker not in self._gone:
                self._gone.add(worker)
                self._flights.pop(worker, None)
                self.coordinator.leave(worker, event.kind, at)
            elif event.kind in ("rejoin", "join"):
                if event.kind == "join":
                    self.emulation.times.add_worker(worker, event.speed)
                self._start(worker)

    # -- what the coordinator decides --------------------------------------------------------------------------------

    def grant(self, order: GrantOrder) -> None:
        """Send the model down and schedule the end of the computation."""
        down = self._bytes if order.fresh else 0
        timing = self.emulation.grant(order.worker, order.allotment.samples, down, order.at)
        flight = self._flights[order.worker] = Flight(order, timing, down)
        self.kernel.at(timing.end, self._computed, flight)

    def _computed(self, flight: Flight) -> None:
        """Send the push of a worker whose computing time is over."""
        order, timing, now = flight.order, flight.timing, self.kernel.now
        if self._flights.get(order.worker) is not flight:
            return
        moments = self.emulation.arrivals(order.worker, timing.attempt, self._bytes, now)
        arrival = PushRef(
            order.worker, order.incarnation, order.ticket, order.allotment.samples, now - timing.begin,
            timing.delay_s + (moments[0] - now), self._bytes, flight.bytes_down, queued_down_s=timing.queued_s,
            queued_up_s=self.emulation.ways.up.queued_s,
        )  # fmt: skip
        self.bring(arrival)
        for moment in moments:
            self.kernel.at(moment, self._arrived, arrival)

    def bring(self, arrival: PushRef) -> None:
        """Do nothing; a subclass attaches a payload to the push."""

    def _arrived(self, arrival: PushRef) -> None:
        """Hand the push to the coordinator, unless its worker has gone since it was sent."""
        worker = arrival.worker
        if self.coordinator.records[worker].incarnation != arrival.incarnation or worker in self._gone:
            return
        flight = self._flights.get(worker)
        if flight is not None and flight.order.ticket == arrival.ticket:
            del self._flights[worker]
        self.coordinator.arrive(self.kernel.now, arrival)

    def cancel(self, worker: int, ticket: int) -> None:
        """Drop the grant; a push already on its way crosses the cancellation and is refused on arrival."""
        flight = self._flights.get(worker)
        if flight is not None and flight.order.ticket == ticket:
            del self._flights[worker]

    def set_timer(self, name: str, at: float | None, generation: int) -> None:
        """Schedule the strategy's timer."""
        if at is not None and at < math.inf:
            self.kernel.at(at, self._ring, (name, generation))

    def _ring(self, timer: tuple[str, int]) -> None:
        self.coordinator.fire(*timer, self.kernel.now)

    def on_work_used_up(self) -> None:
        """Stop the kernel: the run is over."""
        self.kernel.stop()

    def on_divergence(self, text: str) -> None:
        """Do nothing: light workers report no loss."""

    def on_nonfinite(self, worker: int) -> None:
        """Do nothing: light workers compute no gradient."""


class DirectCluster(LightCluster):
    """Light workers without network costs or events: a grant schedules its push's arrival directly."""

    def __init__(self, kernel: Kernel, scenario: Scenario, work: int, model_bytes: int) -> None:
        super().__init__(kernel, scenario, work, model_bytes)
        self._tries = [0] * scenario.count
        self._void: set[int] = set()  # tickets cancelled before their push arrived
        self._arrived_call = self._arrived_directly  # one bound method for all calls: each access would make another
        self._compute_s = self.emulation.times.compute_s

    def grant(self, order: GrantOrder) -> None:
        worker, at, tries = order.worker, order.at, self._tries
        attempt = tries[worker]
        tries[worker] = attempt + 1
        # The order itself is what waits: of 100,000 workers the smaller object matters to the processor's caches.
        self.kernel.at(at + self._compute_s(worker, attempt, order.allotment.samples, at), self._arrived_call, order)

    def _arrived_directly(self, order: GrantOrder) -> None:
        ticket = order.ticket
        if ticket in self._void:
            self._void.remove(ticket)
            return
        now, size = self.kernel.now, self._bytes
        down = size if order.fresh else 0
        arrived = PushRef(
            order.worker, order.incarnation, ticket, order.allotment.samples, now - order.at, 0.0, size, down
        )
        self.coordinator.arrive(now, arrived)

    def cancel(self, worker: int, ticket: int) -> None:  # noqa: ARG002 - tickets are unique
        self._void.add(ticket)


def make_cluster(kernel: Kernel, scenario: Scenario, work: int, model_bytes: int) -> LightCluster:
    """Return the cheapest cluster that models the whole scenario."""
    direct = not scenario.events and crossing_is_free(scenario, model_bytes)
    return (DirectCluster if direct else LightCluster)(kernel, scenario, work, model_bytes)


def simulate(
    strategy: Strategy, scenario: Scenario, *, work: int = 1, max_versions: int | None = None,
    max_seconds: float | None = None, samples: int | None = None, model_bytes: int = 0, sink: Sink | None = None,
    seed: int = 0, checkpoint_every: int | None = None,
) -> Coordinator:  # fmt: skip
    """Run a strategy on light workers until one of the limits, and write the journal's lines to `sink`.

    `seed` is the one that the strategy was built with; a replay builds it again. A run whose workers all leave before
    a limit ends as `stopped`. A scenario whose server crashes needs `checkpoint_every`, in versions.
    """
    if max_versions is None and max_seconds is None and samples is None:
        raise OptionError("a cost-only run needs a limit: max_versions, max_seconds or samples")
    if checkpoint_every is not None and checkpoint_every < 1:
        raise OptionError(f"checkpoint_every must be >= 1 versions, not {checkpoint_every}")
    strategy.check(scenario.count)
    cluster = make_cluster(Kernel(), scenario, work, model_bytes)
    on_version: list[OnVersion] = []

    def make(strategy: Strategy) -> Coordinator:
        made = Coordinator(
            strategy, cluster, sink, max_versions=max_versions, carrier=cluster, on_version=on_version
        )  # fmt: skip
        made.model_bytes = model_bytes
        return made

    coordinator = cluster.coordinator = make(strategy)
    total = samples if samples is not None else 1 << 62
    coordinator.open(Tally(total), work * scenario.count)
    header = _header(strategy, scenario, seed)
    if sink is not None:
        sink.write(header)
    restarts: LightRestarts | None = None
    if checkpoint_every is not None:
        restarts, cluster.can_restart = LightRestarts(cluster, make, header, total, checkpoint_every), True
        restarts.take()
        on_version.append(restarts.on_version)
    cluster.begin()
    stopped = cluster.kernel.run(max_seconds)
    while restarts is not None and cluster.down_s is not None:
        coordinator = restarts.go_on()
        until = None if max_seconds is None else max(max_seconds, cluster.kernel.now)
        stopped = cluster.kernel.run(until)
    over, now = coordinator.phase_over, cluster.kernel.now
    coordinator.stop(now, "the run's data is used up" if over else "the run's limit was reached")
    coordinator.observe_end(now, "done" if over else "limit" if stopped else "stopped")
    return coordinator


def _header(strategy: Strategy, scenario: Scenario, seed: int) -> Header:
    return Header(
        defaults=DEFAULTS,
        engine="sim",
        strategy=canonical(strategy),
        seed=seed,
        workers=scenario.count,
        scenario=as_data(scenario),
    )
