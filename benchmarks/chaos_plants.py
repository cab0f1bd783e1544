"""Faults planted in the package while a chaotic run is made, each of which the judges of bench_chaos.py must find.

Each patches the code in this process, as a mistake in it would be, and leaves the journal to the run.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import msgspec

from paceline.core.ledger import EpochLedger, Ledger
from paceline.engines.sim.light import LightCluster
from paceline.engines.sim.virtual_engine import SimEngine
from paceline.peers.virtual import VirtualPeerExchange
from paceline.records.metrics import Metrics
from paceline.server.checkpoint import schedule
from paceline.server.checkpoint.run_snapshot import RunSnapshot
from paceline.server.coordinator import Coordinator
from paceline.strategies.ssp import Ssp, SspState
from paceline.tables.host import Host

Plant = Callable[[], contextlib.AbstractContextManager[Any]]
NOW_AND_THEN = 7  # every so manieth time a fault strikes that could strike always


def a_push_is_applied_twice() -> contextlib.AbstractContextManager[Any]:
    """An update is ordered once and counted twice."""
    real, count = Coordinator._apply, itertools.count(1)

    def twice(self: Coordinator, action: Any) -> None:
        held = {push: self.held[push] for push in action.pushes if push in self.held}
        real(self, action)
        if next(count) % NOW_AND_THEN == 0:
            self.held.update(held)
            with patch.object(self, "updates", None):  # the store has the gradient no more
                real(self, action)

    return patch.object(Coordinator, "_apply", twice)


def a_push_is_lost() -> contextlib.AbstractContextManager[Any]:
    """A push is taken in, and nobody decides on it."""
    real, count = Coordinator.arrive, itertools.count(1)

    def lose(self: Coordinator, at: float, arrived: Any) -> None:
        record = self.records.get(arrived.worker)
        if record is not None and record.ticket == arrived.ticket and next(count) % NOW_AND_THEN == 0:
            record.ticket = 0
            return
        real(self, at, arrived)

    return patch.object(Coordinator, "arrive", lose)


def a_bound_is_exceeded() -> contextlib.AbstractContextManager[Any]:
    """`ssp` lets workers lead by a clock more than it promises."""
    real = Ssp.bound_of
    return patch.object(Ssp, "bound_of", staticmethod(lambda options: real(options) + 1))


def a_sample_is_never_settled() -> contextlib.AbstractContextManager[Any]:
    """Of what a worker that is gone had, one sample is not issued again."""
    real = EpochLedger.give_back

    def forgetful(self: EpochLedger, worker: int, allotment: Any) -> None:
        kept = max(0, allotment.samples - 1)
        real(self, worker, type(allotment)(allotment.epoch, kept, allotment.indices[:kept]))

    return patch.object(EpochLedger, "give_back", forgetful)


@contextlib.contextmanager
def a_sample_is_settled_twice() -> Iterator[None]:
    """What a worker that is gone had is issued again twice, and nobody counts."""
    real = EpochLedger.give_back

    def generous(self: EpochLedger, worker: int, allotment: Any) -> None:
        real(self, worker, allotment)
        real(self, worker, allotment)

    with patch.object(EpochLedger, "give_back", generous), patch.object(EpochLedger, "settle", Ledger.settle):
        yield


def a_second_copy_of_a_push_is_accepted() -> contextlib.AbstractContextManager[Any]:
    """The intake does not look whether it has had a ticket before."""
    real = Coordinator.arrive
    had: dict[int, set[tuple[int, int, int]]] = {}

    def careless(self: Coordinator, at: float, arrived: Any) -> None:
        record, key = self.records.get(arrived.worker), (arrived.worker, arrived.incarnation, arrived.ticket)
        before = had.setdefault(id(self), set())
        if record is not None and record.present and key in before and record.incarnation == arrived.incarnation:
            under_way, record.ticket = record.ticket, arrived.ticket
            real(self, at, arrived)
            record.ticket = record.ticket or under_way
            return
        before.add(key)
        real(self, at, arrived)

    return patch.object(Coordinator, "arrive", careless)


def a_second_copy_of_a_clock_is_accepted() -> contextlib.AbstractContextManager[Any]:
    """The tables do not look whether they have had a clock before."""
    real = Host.tick

    def careless(self: Host, worker: int, message: Any, arrival: Any, at: float) -> None:
        reader = self._readers.get(worker)
        again = reader is not None and message.era == reader.era and message.through == reader.received
        if reader is not None and again and reader.incarnation == arrival.incarnation:
            self._store.write(message)
            return
        real(self, worker, message, arrival, at)

    return patch.object(Host, "tick", careless)


def a_second_copy_of_a_model_is_accepted() -> contextlib.AbstractContextManager[Any]:
    """A node takes in the same message of another node twice."""

    def careless(self: VirtualPeerExchange, sending: Any) -> None:
        self._under_way.setdefault(sending[2], sending)
        self._delivered(sending)

    return patch.object(VirtualPeerExchange, "_delivered_again", careless)


def a_push_that_was_rolled_back_is_still_counted() -> contextlib.AbstractContextManager[Any]:
    """A restored server takes some of what was rolled back for settled."""
    real = Ledger.restore

    def counting(self: Ledger, data: Any) -> None:
        real(self, data)
        self.used += min(3, self.total - self.used)

    return patch.object(Ledger, "restore", counting)


def a_roll_back_is_not_told() -> contextlib.AbstractContextManager[Any]:
    """A restored server does not say what it has undone."""
    return patch.object(Metrics, "beyond", lambda *_: {})


def a_checkpoint_is_of_another_moment() -> contextlib.AbstractContextManager[Any]:
    """A checkpoint has one version more than the run had."""
    taken = schedule.snapshot

    def early(*given: Any) -> RunSnapshot:
        found = taken(*given)
        return msgspec.structs.replace(found, version=found.version + 1)

    return patch.object(schedule, "snapshot", early)


@contextlib.contextmanager
def a_worker_never_finds_the_server_again() -> Iterator[None]:
    """A deadlock: the run waits for a worker that nobody tells of the restarted server."""
    real = SimEngine._find_server

    def lost(self: SimEngine, going: Any) -> None:
        if going[0] != max(self._threads):
            real(self, going)

    def lost_light(self: LightCluster, going: Any) -> None:
        del self, going

    with patch.object(SimEngine, "_find_server", lost), patch.object(LightCluster, "_join_again", lost_light):
        yield


def a_parked_worker_is_forgotten() -> contextlib.AbstractContextManager[Any]:
    """A deadlock: `ssp` never lets go on whom it has parked."""
    real = SspState.released

    def nobody(self: SspState, before: int) -> list[int]:
        real(self, before)
        return []

    return patch.object(SspState, "released", nobody)


PLANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        a_push_is_applied_twice, a_push_is_lost, a_bound_is_exceeded, a_sample_is_never_settled,
        a_sample_is_settled_twice, a_second_copy_of_a_push_is_accepted, a_second_copy_of_a_clock_is_accepted,
        a_second_copy_of_a_model_is_accepted, a_push_that_was_rolled_back_is_still_counted, a_roll_back_is_not_told,
        a_checkpoint_is_of_another_moment, a_worker_never_finds_the_server_again, a_parked_worker_is_forgotten,
    )
}  # fmt: skip
