"""The laws of strategies, checked in a journal.

The checker trusts no other code: it reads events, actions and observations, and counts everything else itself.

* form, reasons: actions come in their order, pushes in worker order, grants one a worker, and each gives its reason;
* pushes: each is applied or discarded exactly once, and never while it is being extended;
* grants, presence: no worker holds two grants, none that has gone gets one, and a second one only extends a held push;
* samples: what was granted is pushed or taken back, and an epoch's samples are all settled when it is done;
* progress: no worker is parked for ever while others are present;
* bound, weights: the strategy's own promises hold at every step;
* clocks, versions, timers, time: pushes carry those of their grants, and times add up to the time present.
"""

from collections.abc import Iterable

import msgspec

from paceline.core.actions import Apply, Cancel, Discard, Grant, Mark, SetTimer, Track
from paceline.laws.account import Account
from paceline.laws.staleness_bounds import Bound, Weights, bound_of, check_weights, weights_of
from paceline.records import metrics
from paceline.records.journal import Decision, Header, Line, Observation

ORDER = {kind: place for place, kind in enumerate((Apply, Discard, Cancel, Grant, SetTimer, Mark, Track))}
LAW_OF_TIME = 0.01  # largest error of a worker's seconds, as a share of its time present


class Violation(msgspec.Struct, frozen=True):
    """A law that a line breaks."""

    line: int  # from 1
    law: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.law}: {self.text}"


class Checker:
    """A fold over the lines of a journal that collects violations."""

    def __init__(self, *, exact_work: bool = False) -> None:
        self.violations: list[Violation] = []
        self.account = Account(self.blame, exact_work=exact_work)
        self._number = 0
        self._bound: Bound | None = None
        self._weights: Weights | None = None

    def blame(self, law: str, text: str) -> None:
        """Record that the current line breaks a law."""
        self.violations.append(Violation(self._number, law, text))

    def write(self, line: Line) -> None:
        """Check one line."""
        self._number += 1
        if isinstance(line, Decision):
            self._decision(line)
        elif isinstance(line, Header):
            self.account.start(line)
            self._weights = weights_of(line.strategy)
            self._bound = bound_of(line.strategy, self.account, self.blame)
        elif isinstance(line, Observation):
            if self.account.ended is not None:
                self.blame("form", f"{line.what} follows the end")
            self.account.observe(line)

    def _decision(self, decision: Decision) -> None:
        if self._bound is None or self.account.ended is not None:
            self.blame("form", "a decision before any header or after the end")
            return
        self._check_form(decision)
        self.account.happen(decision.event)
        self._bound.before(decision)
        for action in decision.actions:
            if isinstance(action, Apply):
                self._check_order(action)
                check_weights(self._weights, self.account, decision.event, action, self.blame)
            self.account.act(action)
        self.account.workers.note_waits()
        self._bound.after(decision)

    def _check_form(self, decision: Decision) -> None:
        places = [ORDER[type(action)] for action in decision.actions]
        if places != sorted(places):
            self.blame("form", f"actions out of order: {[type(action).__name__ for action in decision.actions]}")
        granted = [action.worker for action in decision.actions if isinstance(action, Grant)]
        if len(granted) != len(set(granted)):
            self.blame("form", f"two grants for one worker: {granted}")
        for action in decision.actions:
            if not action.reason.strip():
                self.blame("reasons", f"{type(action).__name__} gives no reason: {action}")

    def _check_order(self, action: Apply) -> None:
        held = self.account.held
        order = [(held[push].worker, push) for push in action.pushes if push in held]
        if not action.pushes or order != sorted(order):
            self.blame("form", f"an Apply of nothing or out of worker order: {action.pushes}")


def check(lines: Iterable[Line], *, exact_work: bool = False) -> list[Violation]:
    """Return all violations, in the order of the lines; `exact_work`: each grant must yield all samples it asks for."""
    lines = list(lines)
    checker = Checker(exact_work=exact_work)
    for line in lines:
        checker.write(line)
    if checker.account.ended is None:
        checker.blame("form", "the journal has no end")
    folded = metrics.fold(lines)
    for worker, (present, counted) in folded.time_law().items():
        if abs(present - counted) > LAW_OF_TIME * present + 1e-9:
            checker.blame("time", f"w{worker} was present for {present:.9g} s, its times make {counted:.9g} s")
    counted_alike = (folded.samples_used, folded.versions) == (checker.account.used, checker.account.version)
    if not checker.violations and not counted_alike:
        checker.blame("samples", f"the report has {folded.samples_used} samples in {folded.versions} versions")
    return checker.violations
