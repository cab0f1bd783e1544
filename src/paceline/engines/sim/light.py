"""Light workers: cost only, no script. They make clusters of 100,000."""

from paceline.coordinator import Coordinator
from paceline.engines.sim.cluster import Flight, VirtualCluster
from paceline.engines.sim.kernel import Kernel
from paceline.errors import OptionError
from paceline.journal import Sink
from paceline.ledger import Tally
from paceline.scenario import Scenario
from paceline.seats import Arrival, Order
from paceline.strategies.base import Strategy


class LightCluster(VirtualCluster):
    """Workers that compute nothing and take the scenario's time for it."""

    def __init__(self, kernel: Kernel, scenario: Scenario, work: int, model_bytes: int) -> None:
        super().__init__(kernel, scenario)
        self._work = work
        self._bytes = (model_bytes, model_bytes)
        # With nothing to cross and nobody to come or go, a grant leads to its push's arrival in one call.
        self._direct = self.times.free_links(model_bytes) and not scenario.events
        self._tries = [0] * scenario.count
        self._void: set[int] = set()  # tickets taken back before their pushes were computed
        self._arrived_call = self._arrived_directly  # made once: a bound method per push would be kept with each

    def admit(self, worker: int) -> None:
        if self._started:
            self.coordinator.join(worker, self._work, self.kernel.now)

    def begin(self) -> None:
        self._started = False
        super().begin()
        self._started = True
        for worker in self.coordinator.seats:
            self.coordinator.join(worker, self._work, 0.0)

    def push_bytes(self, order: Order) -> tuple[int, int]:  # noqa: ARG002 - all models are alike
        return self._bytes

    def order(self, order: Order) -> None:
        if not self._direct:
            super().order(order)
            return
        worker, at, tries = order.worker, order.at, self._tries
        attempt = tries[worker]
        tries[worker] = attempt + 1
        seconds = self.times.compute_s(worker, attempt, order.allotment.samples, at)
        self.kernel.at(at + seconds, self._arrived_call, order)

    def _arrived_directly(self, order: Order) -> None:
        ticket, now, size = order.ticket, self.kernel.now, self._bytes[0]
        if ticket in self._void:
            self._void.remove(ticket)
            return
        down = size if order.fresh else 0
        samples, seconds = order.allotment.samples, now - order.at
        self.coordinator.arrive(
            now, Arrival(order.worker, order.incarnation, ticket, samples, seconds, 0.0, size, down)
        )

    def cancel(self, worker: int, ticket: int) -> None:
        if self._direct:
            self._void.add(ticket)
        else:
            super().cancel(worker, ticket)

    def computed(self, flight: Flight) -> None:
        order = flight.order
        self.send_up(flight, Arrival(order.worker, order.incarnation, order.ticket, order.allotment.samples, 0.0, 0.0))


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
) -> Coordinator:
    """Run a strategy on light workers until one of the limits; what happened goes to `sink`."""
    if max_versions is None and max_seconds is None and samples is None:
        raise OptionError("a cost-only run needs a limit: max_versions, max_seconds or samples")
    strategy.check(scenario.count)
    kernel = Kernel()
    cluster = LightCluster(kernel, scenario, work, model_bytes)
    coordinator = cluster.coordinator = Coordinator(strategy, cluster, sink, max_versions=max_versions)
    coordinator.on_over = kernel.stop
    coordinator.open(Tally(samples if samples is not None else 1 << 62))
    cluster.begin()
    kernel.run(max_seconds)
    coordinator.stop(kernel.now, "the run's limit was reached")
    coordinator.observe_end("limit")
    return coordinator
