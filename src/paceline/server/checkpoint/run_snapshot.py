"""A coordinator's state as plain data, and a fresh coordinator that continues from it.

No worker survives a restore: all join again. So a snapshot has nothing outstanding: it records samples that workers
compute or whose pushes are held as unallotted, to be issued again first, in worker order. The restored strategy is told
that all its workers have left before any of them joins. Its decisions on that are journaled but not carried out, since
the pushes and grants no longer exist; only its timers are set.
"""

from collections import defaultdict
from typing import Any

import msgspec

from paceline.core.actions import SetTimer
from paceline.core.errors import InternalError
from paceline.core.events import Left
from paceline.core.ledger import Allotment, Ledger, Outstanding
from paceline.records.journal import Decision, Restored
from paceline.server.coordinator import Coordinator
from paceline.strategies import canonical


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run between two events."""

    version: int
    at: float
    used: int  # samples, of the whole run
    lost: int
    used_before: int  # of finished phases
    lost_before: int
    rounds_done: float = msgspec.field(name="position")  # in nominal rounds
    round_samples: int
    pushes: int
    tickets: int
    members: tuple[int, ...]  # the workers that are present or idle to the strategy
    strategy: str  # in the form `name:option=value`
    strategy_state: dict[str, Any]
    timers: dict[str, float]
    watch: dict[str, Any]
    ledger: dict[str, Any] | None  # None between two phases

    @property
    def restored(self) -> Restored:
        """What the journal's header says of it."""
        return Restored(self.version, self.at, self.used, self.lost, self.pushes)


def snapshot(coordinator: Coordinator, at: float) -> RunSnapshot:
    """Return the coordinator's state, all but the store; call it between two events."""
    c = coordinator
    if c.busy:
        raise InternalError(f"a snapshot of version {c.version} was asked for in the middle of a decision")
    ledger: Ledger | None = c.ledger
    return RunSnapshot(
        version=c.version,
        at=at,
        used=c.used,
        lost=c.lost,
        used_before=c.totals.used_before,
        lost_before=c.totals.lost_before,
        rounds_done=c.totals.rounds_done,
        round_samples=c.totals.round_samples,
        pushes=c.totals.pushes,
        tickets=c.totals.tickets,
        members=tuple(worker for worker, record in sorted(c.records.items()) if record.present or record.idle),
        strategy=canonical(c.strategy),
        strategy_state=c.strategy.snapshot(),
        timers=c.timers.pending(),
        watch=c.watch.snapshot(),
        ledger=None if ledger is None else ledger.snapshot(outstanding(c)),
    )


def outstanding(coordinator: Coordinator) -> list[Outstanding]:
    """Return what is allotted and not settled, in worker order: held pushes as they arrived, then the grant."""
    owned: dict[int, list[Allotment]] = defaultdict(list)
    for _, held in sorted(coordinator.held.items()):
        owned[held.worker] += held.allotments
    for worker, record in coordinator.records.items():
        if record.ticket:
            owned[worker] += record.allotments
    return [(worker, allotment) for worker in sorted(owned) for allotment in owned[worker]]


def restore(coordinator: Coordinator, taken: RunSnapshot, at: float) -> None:
    """Make a fresh coordinator, whose strategy is of the snapshot's kind, continue from a snapshot.

    The journal's header, with the strategy's state in it, must have been written. The caller restores the phase's
    ledger: a fresh one with `ledger.restore(taken.ledger)`, opened with `taken.round_samples`.
    """
    c = coordinator
    if canonical(c.strategy) != taken.strategy:
        raise InternalError(f"a snapshot of {taken.strategy} cannot be restored into {canonical(c.strategy)}")
    c.version, totals = taken.version, c.totals
    totals.rounds_done, totals.round_samples = taken.rounds_done, taken.round_samples
    totals.used_before, totals.lost_before = taken.used_before, taken.lost_before
    c.totals.pushes, c.totals.tickets = taken.pushes, taken.tickets
    c.watch.restore(taken.watch)
    c.at = at
    c.strategy.restore(taken.strategy_state)
    for name, due in taken.timers.items():
        c.effects.set_timer(name, due, c.timers.set(name, due))
    # Fastest first: a slower one's leaving would raise the minimum clock, and all must rejoin where the slowest was.
    clocks = getattr(getattr(c.strategy.state, "clocks", None), "of", {})
    for worker in sorted(taken.members, key=lambda worker: (-clocks.get(worker, 0), worker)):
        event = Left(at, worker, "crash")
        actions = c.strategy.handle(event)
        if c.sink is not None:
            c.sink.write(Decision(event, actions))
        for action in actions:
            if isinstance(action, SetTimer):
                c.effects.set_timer(action.name, action.at, c.timers.set(action.name, action.at))
