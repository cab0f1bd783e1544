"""Light workers: cost only, no script. They make clusters of 100,000."""

from paceline.core.errors import OptionError
from paceline.core.ledger import Tally
from paceline.core.scenario.costs import crossing_is_free
from paceline.core.scenario.file import Scenario, as_data
from paceline.engines.sim.kernel import Kernel
from paceline.engines.sim.virtual_cluster import Flight, VirtualCluster
from paceline.records.journal import Header, Sink
from paceline.server.coordinator import Coordinator
from paceline.server.workers import GrantOrder, PushArrival
from paceline.strategies import canonical
from paceline.strategies.base import Strategy


class LightCluster(VirtualCluster):
    """Workers that compute nothing and take the scenario's time for it."""

    def __init__(self, kernel: Kernel, scenario: Scenario, work: int, model_bytes: int) -> None:
        super().__init__(kernel, scenario)
        self._work = work
        self._bytes = model_bytes
        self._started = False

    def admit(self, worker: int) -> None:
        if self._started:
            self.coordinator.join(worker, self._work, self.kernel.now)

    def begin(self) -> None:
        super().begin()
        self._started = True
        for worker in self.coordinator.seats:
            self.coordinator.join(worker, self._work, 0.0)

    def push_bytes(self, order: GrantOrder) -> tuple[int, int]:  # noqa: ARG002 - all models are alike
        return self._bytes, self._bytes

    def computed(self, flight: Flight) -> None:
        order = flight.order
        self.send_up(
            flight, PushArrival(order.worker, order.incarnation, order.ticket, order.allotment.samples, 0.0, 0.0)
        )


class DirectCluster(LightCluster):
    """With nothing to cross and nobody to come or go, a grant leads to its push's arrival in one call."""

    def __init__(self, kernel: Kernel, scenario: Scenario, work: int, model_bytes: int) -> None:
        super().__init__(kernel, scenario, work, model_bytes)
        self._tries = [0] * scenario.count
        self._void: set[int] = set()  # tickets taken back before their time was over
        self._arrived_call = self._arrived_directly  # one for all: each pending call would keep its own

    def order(self, order: GrantOrder) -> None:
        worker, at, tries = order.worker, order.at, self._tries
        attempt = tries[worker]
        tries[worker] = attempt + 1
        samples, size = order.allotment.samples, self._bytes
        end = at + self.times.compute_s(worker, attempt, samples, at)
        down = size if order.fresh else 0
        arrival = PushArrival(worker, order.incarnation, order.ticket, samples, end - at, 0.0, size, down)
        self.kernel.at(end, self._arrived_call, arrival)

    def _arrived_directly(self, arrival: PushArrival) -> None:
        if arrival.ticket in self._void:
            self._void.remove(arrival.ticket)
        else:
            self.coordinator.arrive(self.kernel.now, arrival)

    def cancel(self, worker: int, ticket: int) -> None:  # noqa: ARG002 - tickets are unique
        self._void.add(ticket)


def make_cluster(kernel: Kernel, scenario: Scenario, work: int, model_bytes: int) -> LightCluster:
    """The cheapest cluster that does the scenario justice."""
    direct = not scenario.events and crossing_is_free(scenario, model_bytes)
    return (DirectCluster if direct else LightCluster)(kernel, scenario, work, model_bytes)


def simulate(
    strategy: Strategy,
    scenario: Scenario,
    *,
    work: int = 1,
    max_versions: int | None = None,
    max_seconds: float | None = None,
    samples: int | None = None,
    model_bytes: int = 0,
    sink: Sink | None = None,
    seed: int = 0,
) -> Coordinator:
    """Run a strategy on light workers until one of the limits; what happened goes to `sink`.

    `seed` is the one the strategy was built with: a replay builds it again. A run whose workers have all left before
    a limit ends as `stopped`.
    """
    if max_versions is None and max_seconds is None and samples is None:
        raise OptionError("a cost-only run needs a limit: max_versions, max_seconds or samples")
    strategy.check(scenario.count)
    kernel = Kernel()
    cluster = make_cluster(kernel, scenario, work, model_bytes)
    coordinator = cluster.coordinator = Coordinator(strategy, cluster, sink, max_versions=max_versions)
    coordinator.on_over = kernel.stop
    coordinator.model_bytes = model_bytes
    coordinator.open(Tally(samples if samples is not None else 1 << 62), work * scenario.count)
    if sink is not None:
        sink.write(_header(strategy, scenario, seed))
    cluster.begin()
    stopped = kernel.run(max_seconds)
    over = coordinator.phase_over
    coordinator.stop(kernel.now, "the run's data is used up" if over else "the run's limit was reached")
    coordinator.observe_end("done" if over else "limit" if stopped else "stopped")
    return coordinator


def _header(strategy: Strategy, scenario: Scenario, seed: int) -> Header:
    return Header(
        engine="sim", strategy=canonical(strategy), seed=seed, workers=scenario.count, scenario=as_data(scenario)
    )
