"""Messages about tables on their way between workers and their host, each taking the time that its scenario has for it.

Engines differ in what a moment is and how a worker is told something; that is for their subclasses to say. Where no
scenario is in force every message is there at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from paceline.core.scenario.network import Ways
from paceline.server.phases import Phases
from paceline.server.run_control import Conduct
from paceline.server.workers import GrantOrder, PushArrival
from paceline.tables import messages as t
from paceline.tables.host import Host

Call = Callable[[], None]


class Traffic(ABC):
    """Carries what workers and tables say to each other."""

    copies = True  # rows are copied before they set out: what they were then is what arrives

    def __init__(self, conduct: Conduct, phases: Phases, ways: Ways | None) -> None:
        self.conduct = conduct
        self._phases = phases
        self._ways = ways
        self._host: Host | None = None
        self._messages: dict[int, int] = {}  # of each worker, for the network's jitter
        self._in_order: dict[int, float] = {}  # before which nothing more arrives at a worker
        self._in_order_up: dict[int, float] = {}  # before which none of its questions arrives at the host
        self._bytes: dict[int, tuple[int, int]] = {}  # of each worker's current clock, beside its increments: up, down
        self._under_way: dict[int, int] = {}  # completed clocks of each worker that have not arrived
        self._parting: dict[int, tuple[int, list[Call]]] = {}  # whose script is at its end, and what waits for that

    @abstractmethod
    def now(self) -> float:
        """The run's time."""

    @abstractmethod
    def at(self, moment: float, call: Callable[[Any], None], argument: Any) -> None:
        """Make the call at that moment."""

    @abstractmethod
    def incarnation(self, worker: int) -> int | None:
        """Of the worker's process; None if there is none."""

    @abstractmethod
    def tell(self, worker: int, message: t.TableToWorker) -> None:
        """Hand a message to a worker that is there."""

    @abstractmethod
    def on_tick(self, worker: int, incarnation: int, tick: t.Tick) -> None:
        """A script has gone through a clock."""

    @abstractmethod
    def on_measures(self, worker: int, message: t.Measures) -> None:
        """A script can measure the tables."""

    @property
    def in_use(self) -> bool:
        return self._host is not None

    @property
    def host(self) -> Host:
        if self._host is None:
            self._host = Host(self.conduct.coordinator, self._deliver, paced=self._ways is not None)
            self.conduct.keep_tables(self._host)
        return self._host

    # -- from workers ------------------------------------------------------------------------------------------------

    def hear(self, worker: int, message: t.TableToServer) -> None:
        """A script says something about tables."""
        incarnation = self.incarnation(worker)
        if incarnation is None:
            return
        match message:
            case t.Tick():
                self._under_way[worker] = self._under_way.get(worker, 0) + 1
                self.on_tick(worker, incarnation, message)
            case t.Fetch():
                size = 0 if message.rows is None else message.rows.nbytes
                self._count(worker, up=size)
                self._send_up(worker, size, lambda: self.host.fetch(worker, message))
            case t.Forget():
                self._send_up(worker, message.rows.nbytes, lambda: self.host.forget(worker, message))
            case t.AtBarrier():
                self._send_up(worker, 0, lambda: self.host.barrier(worker, message))
            case t.OpenTable():
                self.host.open(worker, message, self._phases.alive, set(self._phases.waiting))
            case t.TableInit():
                self.host.fill(worker, message)
            case t.Measures():
                self.on_measures(worker, message)

    def ship(self, worker: int, incarnation: int, attempt: int, tick: t.Tick, sent_at: float, compute_s: float) -> None:
        """A clock's increments set out."""
        up, down = self._bytes.pop(worker, (0, 0))
        moments = [sent_at]
        if self._ways is not None:
            at = self._ways.up.arrival(worker, self._next(worker), tick.nbytes, sent_at)
            moments = self._ways.mishaps.deliveries(worker, attempt, sent_at, at)
        for number, moment in enumerate(moments):
            arrival = PushArrival(worker, incarnation, 0, 0, compute_s, 0.0, tick.nbytes + up, down)
            self._when(moment, worker, partial(self._arrive, worker, tick, arrival, first=number == 0))

    def _arrive(self, worker: int, tick: t.Tick, arrival: PushArrival, *, first: bool) -> None:
        self.host.tick(worker, tick, arrival)
        if not first:
            return
        self._under_way[worker] -= 1

    def _send_up(self, worker: int, size: int, call: Call) -> None:
        at = self.now()
        if self._ways is not None:
            at = self._ways.up.arrival(worker, self._next(worker), size, at)
            at = self._in_order_up[worker] = max(at, self._in_order_up.get(worker, 0.0))
        self._when(at, worker, call)

    def _when(self, moment: float, worker: int, call: Call) -> None:
        """Make the call once its moment has come, if its worker's process is then still there."""
        going = (worker, self._incarnation(worker), call)
        if moment <= self.now():
            self._run(going)
        else:
            self.at(moment, self._run, going)

    def _run(self, going: tuple[int, int | None, Call]) -> None:
        worker, incarnation, call = going
        if self.is_here(worker, incarnation):
            call()
            self.settle()

    # -- to workers --------------------------------------------------------------------------------------------------

    def _deliver(self, worker: int, message: t.TableToWorker) -> None:
        at, ways = self.now(), self._ways
        if isinstance(message, t.Rows):
            if self.copies:
                message = msgspec.structs.replace(message, values=np.asarray(message.values))
            size = message.values.nbytes + (message.rows.nbytes if message.clock is None else 0)
            self._count(worker, down=size)
            if ways is not None:
                at = ways.down.arrival(worker, self._next(worker), size, at)
        elif ways is not None and isinstance(message, t.Passed):
            at = ways.down.arrival(worker, self._next(worker), 0, at)
        if ways is None:
            self.tell(worker, message)
            return
        at = self._in_order[worker] = max(at, self._in_order.get(worker, 0.0))
        self.at(at, self._tell, (worker, self._incarnation(worker), message))

    def _tell(self, going: tuple[int, int | None, t.TableToWorker]) -> None:
        worker, incarnation, message = going
        if incarnation is not None and self.incarnation(worker) == incarnation and self.conduct.active:
            self.tell(worker, message)

    # -- the cluster's side ------------------------------------------------------------------------------------------

    def order(self, order: GrantOrder) -> None:
        """The strategy lets a worker begin its next clock."""
        self.host.order(order)

    def part(self, worker: int, call: Call) -> None:
        """The worker's script came to its end: make the call once all that it wrote has arrived."""
        incarnation = self._incarnation(worker)
        if incarnation is None or self._has_arrived(worker):
            call()
        else:
            self._parting.setdefault(worker, (incarnation, []))[1].append(call)

    def is_parting(self, worker: int) -> bool:
        """Whether its last clocks are still under way, or wait for their turn."""
        return worker in self._parting

    def _has_arrived(self, worker: int) -> bool:
        return not self._under_way.get(worker) and (self._host is None or self._host.has_taken(worker))

    @property
    def parting(self) -> bool:
        """Whether somebody's last clocks are still under way."""
        return bool(self._parting)

    def is_here(self, worker: int, incarnation: int | None) -> bool:
        """Whether that process is there, or what it wrote before its end is still to come."""
        return incarnation is not None and self._incarnation(worker) == incarnation and self.conduct.active

    def _incarnation(self, worker: int) -> int | None:
        found = self.incarnation(worker)
        return self._parting[worker][0] if found is None and worker in self._parting else found

    def left(self, worker: int) -> None:
        """The worker takes no more part."""
        self._parting.pop(worker, None)
        self._under_way.pop(worker, None)
        if self._host is not None:
            self._host.left(worker)
            self.look_at_openers()
            self._bytes.pop(worker, None)
            self._in_order.pop(worker, None)
            self._in_order_up.pop(worker, None)
            self.settle()

    def look_at_openers(self) -> None:
        """Somebody left, or waits for the work to begin: a table may have been waited for in vain."""
        if self._host is not None:
            self._host.look_at_openers(self._phases.alive, set(self._phases.waiting))

    def settle(self) -> None:
        """Send what is due after a decision."""
        if self._host is not None and self.conduct.active:
            self._host.settle(self.now())
            for worker in [worker for worker in self._parting if self._has_arrived(worker)]:
                _, calls = self._parting.pop(worker, (0, []))  # one that leaves may let others go
                for call in calls:
                    call()

    def _next(self, worker: int) -> int:
        number = self._messages.get(worker, 0)
        self._messages[worker] = number + 1
        return number

    def _count(self, worker: int, up: int = 0, down: int = 0) -> None:
        known = self._bytes.get(worker, (0, 0))
        self._bytes[worker] = (known[0] + up, known[1] + down)
