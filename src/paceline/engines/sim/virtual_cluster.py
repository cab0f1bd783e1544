"""Virtual workers as an engine's outbox: a grant becomes a push after the scenario's time for it.

A flight is one grant's way through the cluster: the model travels down, the worker computes, the gradient travels up.
`VirtualCluster` keeps the times; what a worker does when its computing time is over is the subclass's: light workers
send an empty push, script workers run the user's code.
"""

import math
from abc import ABC, abstractmethod

import msgspec

from paceline.core.errors import ScenarioError
from paceline.core.peer_events import PeerCause
from paceline.core.scenario.costs import Times
from paceline.core.scenario.file import Scenario, ScenarioEvent
from paceline.core.scenario.message_faults import MessageFaults
from paceline.core.scenario.network import Direction
from paceline.engines.sim.kernel import Kernel
from paceline.server.coordinator import Coordinator
from paceline.server.workers import GrantOrder, PushArrival


class Flight(msgspec.Struct, gc=False):
    """One grant on its way."""

    order: GrantOrder
    attempt: int
    bytes_down: int
    computing_from: float
    computed_at: float
    granted_at: float


class VirtualCluster(ABC):
    """Carries orders, cancellations and timers out in virtual time."""

    coordinator: Coordinator

    def __init__(self, kernel: Kernel, scenario: Scenario) -> None:
        self.kernel = kernel
        self.scenario = scenario
        self.times = times = Times(scenario)
        self.incarnations: dict[int, int] = {}
        self.mishaps = MessageFaults(scenario)
        self.attempts: dict[int, int] = {}
        self.flights: dict[int, Flight] = {}
        self.gone: set[int] = set()
        self.down = Direction(times, upward=False)
        self.up = Direction(times, upward=True)

    @abstractmethod
    def push_bytes(self, order: GrantOrder) -> tuple[int, int]:
        """Bytes that the order's model and its push move: down, up."""

    @abstractmethod
    def computed(self, flight: Flight) -> None:
        """The worker's computing time is over."""

    @abstractmethod
    def admit(self, worker: int) -> None:
        """A process starts: take its seat and join when it is ready."""

    def removed(self, worker: int, cause: PeerCause) -> None:  # noqa: B027 - light workers have nothing else to clear away
        """The worker's process is gone, and what it computed with it."""

    def begin(self) -> None:
        """Start the workers of the scenario and schedule what befalls them."""
        for event in self.scenario.events:
            if event.kind == "server_crash":
                raise ScenarioError("the sim engine has no server process to crash: remove the server_crash event")
            self.kernel.at(event.at, self._befall, event)
        for worker in range(self.scenario.count):
            self._start(worker)

    def _start(self, worker: int) -> None:
        self.incarnations[worker] = self.incarnations.get(worker, -1) + 1
        self.gone.discard(worker)
        self.coordinator.seat(worker, self.incarnations[worker])
        self.admit(worker)

    def _befall(self, event: ScenarioEvent) -> None:
        """Carry a scenario's event out; slow-downs, pauses and cut links are in the times already."""
        coordinator = self.coordinator
        coordinator.now = self.kernel.now
        for worker in event.workers or (None,):
            coordinator.observe("scenario", event.as_data(), worker)
        match event.kind:
            case "crash" | "leave":
                for worker in event.workers:
                    if worker not in self.gone:
                        self.gone.add(worker)
                        self.flights.pop(worker, None)
                        coordinator.leave(worker, event.kind, self.kernel.now)
                        self.removed(worker, event.kind)
            case "rejoin":
                for worker in event.workers:
                    self._start(worker)
            case "join":
                for worker in event.workers:
                    self.times.add_worker(worker, event.speed)
                    self._start(worker)
            case _:
                pass

    def order(self, order: GrantOrder) -> None:
        """Send the model down and let the worker compute."""
        worker, now = order.worker, self.kernel.now
        attempt = self.attempts.get(worker, 0)
        self.attempts[worker] = attempt + 1
        down = self.push_bytes(order)[0] if order.fresh else 0
        begin = self.down.arrival(worker, attempt, down, now)
        end = begin + self.times.compute_s(worker, attempt, order.allotment.samples, begin)
        self.fly(Flight(order, attempt, down, begin, end, now))

    def fly(self, flight: Flight) -> None:
        """The grant is on its way until its worker's computing time is over."""
        self.flights[flight.order.worker] = flight
        self.kernel.at(flight.computed_at, self._on_computed, flight)

    def _on_computed(self, flight: Flight) -> None:
        if self.flights.get(flight.order.worker) is flight:
            self.computed(flight)

    def send_up(self, flight: Flight, arrival: PushArrival) -> None:
        """The push sets out; times and bytes are filled in here, where they are known."""
        order, now = flight.order, self.kernel.now
        arrival.bytes_up, arrival.bytes_down = self.push_bytes(order)[1], flight.bytes_down
        at = self.up.arrival(order.worker, flight.attempt, arrival.bytes_up, now)
        moments = self.mishaps.deliveries(order.worker, flight.attempt, now, at)
        arrival.compute_s = now - flight.computing_from
        arrival.transfer_s = (flight.computing_from - flight.granted_at) + (moments[0] - now)
        for moment in moments:
            self.kernel.at(moment, self.arrived, arrival)

    def arrived(self, arrival: PushArrival) -> None:
        """The push is there; one whose process died on the way is not."""
        if self.incarnations[arrival.worker] != arrival.incarnation or arrival.worker in self.gone:
            return
        flight = self.flights.get(arrival.worker)
        if flight is not None and flight.order.ticket == arrival.ticket:
            del self.flights[arrival.worker]
        self.coordinator.arrive(self.kernel.now, arrival)

    def cancel(self, worker: int, ticket: int) -> None:
        """The grant is void; a push that already set out crosses the cancellation and is refused on arrival."""
        flight = self.flights.get(worker)
        if flight is not None and flight.order.ticket == ticket:
            del self.flights[worker]

    def timer(self, name: str, at: float | None, generation: int) -> None:
        """Wake the strategy at that time."""
        if at is not None and at < math.inf:
            self.kernel.at(at, self._ring, (name, generation))

    def _ring(self, timer: tuple[str, int]) -> None:
        self.coordinator.fire(*timer, self.kernel.now)
