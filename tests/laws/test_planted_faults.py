"""The checker is worth something: each fault planted into a strategy, the coordinator or the ledger breaks its law.

Every faulty run is a real one, through a coordinator that does not notice, and its sound twin breaks no law.
"""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from paceline import strategies
from paceline.core.actions import Action, Apply, Grant
from paceline.core.events import Event, Left, Pushed
from paceline.core.ledger import Allotment, EpochLedger
from paceline.core.updates import PushRef
from paceline.laws.check import first_difference
from paceline.laws.checker import Violation, check
from paceline.laws.clusters import ClusterPlan, play
from paceline.records.journal import Decision, Line, Observation
from paceline.server.coordinator import Coordinator
from paceline.strategies import Strategy
from paceline.strategies.adaptive_k_load import AdaptiveKLoad
from paceline.strategies.balanced import Balanced
from paceline.strategies.bsp import Bsp
from paceline.strategies.dasp import Dasp
from paceline.strategies.dssp import Dssp
from paceline.strategies.fastest_k import FastestK
from paceline.strategies.k_async import KAsync
from paceline.strategies.ssp import Ssp

CLUSTER = """
seed = 3
[compute]
seconds_per_sample = 0.125
jitter = "lognormal:0.1"
[[workers]]
count = 3
[[workers]]
speed = 0.25
[[events]]
kind = "crash"
worker = 3
at = 9.4
[[events]]
kind = "rejoin"
worker = 3
at = 20.0
"""
ENDLESS = ClusterPlan(CLUSTER, 8, 1, None, 1.0, 0.05, 60, 0)
UNEVEN = ClusterPlan(CLUSTER.partition("[[events]]")[0].replace("0.25", "0.05"), 8, 1, None, 1.0, 0.0, 60, 0)
EPOCHS = ClusterPlan(CLUSTER, 8, 1, 150, 2.0, 0.05, 60, 0)


class Tolerant(Coordinator):
    """Carries out what the real one refuses: a push twice, a grant to somebody who computes or has gone."""

    _known: dict[int, PushRef] = {}

    def _release(self, push: int) -> PushRef:
        self._known[push] = held = self.held.pop(push, None) or self._known[push]
        return held

    def _grant(self, action: Grant) -> None:
        self.records[action.worker].ticket = 0
        super()._grant(action)


def run(
    strategy: type[Strategy], spec: str, plan: ClusterPlan, coordinator: type[Coordinator] = Coordinator
) -> list[Line]:
    options = strategies.parse(spec)[1]
    chance = random.Random(f"{plan.seed}:strategy")
    # The header has the options that were asked for, not those that a fault made of them.
    return play(strategy(options, chance), plan, coordinator, spec)


def broken(lines: list[Line], plan: ClusterPlan = ENDLESS) -> list[Violation]:
    return check(lines, exact_work=plan.size is None)


def laws(found: list[Violation]) -> set[str]:
    return {violation.law for violation in found}


def require_fault(faulty: type[Strategy], spec: str, law: str, plan: ClusterPlan = ENDLESS) -> list[Violation]:
    """The faulty strategy breaks the law, and the one it was made from breaks none."""
    sound = strategies.strategy_class(spec.partition(":")[0])
    assert not broken(run(sound, spec, plan), plan)
    found = broken(run(faulty, spec, plan, Tolerant), plan)
    assert law in laws(found), [str(violation) for violation in found[:5]]
    return found


def changed(base: type[Strategy], change: Callable[[Event, list[Action], Strategy], list[Action]]) -> type[Strategy]:
    """The strategy with its answers changed on their way out."""

    class Faulty(base):  # type: ignore[valid-type,misc]
        def handle(self, event: Event) -> list[Action]:
            return change(event, super().handle(event), self)

    return Faulty


def replaced(actions: list[Action], kind: type[Action], **fields: Any) -> list[Action]:
    return [msgspec.structs.replace(a, **fields) if isinstance(a, kind) else a for a in actions]


# -- double apply ------------------------------------------------------------------------------------------------------


def test_double_apply() -> None:
    def again(event: Event, actions: list[Action], strategy: Any) -> list[Action]:
        applies = [action for action in actions if isinstance(action, Apply)]
        if applies and strategy.state.completed == 5:
            return [*applies, *actions]
        return actions

    found = require_fault(changed(Bsp, again), "bsp", "pushes")
    assert any("settled already" in violation.text for violation in found)


def test_a_push_that_is_never_settled() -> None:
    def forgets(event: Event, actions: list[Action], strategy: Any) -> list[Action]:
        skip = isinstance(event, Pushed) and event.push == 20
        return [action for action in actions if not (skip and isinstance(action, Apply))]

    require_fault(changed(Ssp, forgets), "ssp", "progress", EPOCHS)


# -- lost sample -------------------------------------------------------------------------------------------------------


def test_lost_sample_in_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not broken(run(Bsp, "bsp", EPOCHS), EPOCHS)
    give_back = EpochLedger.give_back

    def loses_one(self: EpochLedger, worker: int, allotment: Allotment) -> None:
        kept = allotment.indices[:-1]
        give_back(self, worker, Allotment(allotment.epoch, len(kept), kept))

    monkeypatch.setattr(EpochLedger, "give_back", loses_one)
    found = broken(run(Bsp, "bsp", EPOCHS), EPOCHS)
    assert any("are unaccounted for" in violation.text for violation in found), found


def test_lost_sample_in_the_coordinator() -> None:
    class Careless(Coordinator):
        def arrive(self, at: float, message: PushRef) -> None:
            message.samples -= self.version == 7
            super().arrive(at, message)

    assert "samples" in laws(broken(run(Bsp, "bsp", ENDLESS, Careless)))
    assert not broken(run(Bsp, "bsp", ENDLESS))


# -- doubled grant -----------------------------------------------------------------------------------------------------


def test_doubled_grant() -> None:
    def another(event: Event, actions: list[Action], strategy: Any) -> list[Action]:
        if isinstance(event, Pushed) and event.push == 12 and actions and isinstance(actions[-1], Grant):
            other = max(worker for worker in strategy.state.roster.present if worker != event.worker)
            return [*actions, msgspec.structs.replace(actions[-1], worker=other)]
        return actions

    found = require_fault(changed(Ssp, another), "ssp:staleness=inf", "grants")
    assert any("while it computes" in violation.text for violation in found)


def test_grant_to_a_leaver() -> None:
    def farewell(event: Event, actions: list[Action], strategy: Any) -> list[Action]:
        if isinstance(event, Left) and event.cause == "crash":
            return [*actions, Grant(event.worker, 8, 9, "one for the road")]
        return actions

    class Generous(Tolerant):
        def _grant(self, action: Grant) -> None:
            if self.records[action.worker].present:
                super()._grant(action)

    assert "presence" in laws(broken(run(changed(Bsp, farewell), "bsp", ENDLESS, Generous)))


# -- bound off by one --------------------------------------------------------------------------------------------------


class LooseSsp(Ssp):
    @staticmethod
    def bound_of(options: Any) -> float:
        return Ssp.bound_of(options) + 1


class TightSsp(Ssp):
    @staticmethod
    def bound_of(options: Any) -> float:
        return Ssp.bound_of(options) - 1


class LooseDssp(Dssp):
    def __init__(self, options: Any, rng: random.Random) -> None:
        super().__init__(msgspec.structs.replace(options, upper=options.upper + 1), rng)


class HastyFastestK(FastestK):
    def __init__(self, options: Any, rng: random.Random) -> None:
        super().__init__(msgspec.structs.replace(options, k=options.k - 1), rng)


class PatientKAsync(KAsync):
    def __init__(self, options: Any, rng: random.Random) -> None:
        super().__init__(msgspec.structs.replace(options, k=options.k + 1), rng)


@pytest.mark.parametrize(
    ("faulty", "spec"),
    [
        (LooseSsp, "ssp:staleness=2"),
        (TightSsp, "ssp:staleness=2"),
        (LooseDssp, "dssp:lower=1,upper=3"),
        (HastyFastestK, "fastest_k:k=3"),
        (HastyFastestK, "fastest_k:k=3,cover=true"),
        (PatientKAsync, "k_async:k=2"),
    ],
)
def test_bound_off_by_one(faulty: type[Strategy], spec: str) -> None:
    require_fault(faulty, spec, "bound", UNEVEN)


# -- unreleased leaver -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "spec", "law"),
    [(Ssp, "ssp:staleness=1", "bound"), (Bsp, "bsp", "bound"), (KAsync, "k_async:k=4", "bound")],
)
def test_unreleased_leaver(base: type[Strategy], spec: str, law: str) -> None:
    def keeps(event: Event, actions: list[Action], strategy: Any) -> list[Action]:
        return [] if isinstance(event, Left) and event.cause == "crash" else actions

    found = require_fault(changed(base, keeps), spec, law)
    assert "progress" in laws(found) or base is Ssp


def test_a_worker_that_is_never_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = msgspec.structs.replace(UNEVEN, scenario=UNEVEN.scenario.replace("0.05", "0.01"))
    assert not broken(run(Balanced, "balanced", plan))
    monkeypatch.setattr("paceline.strategies.balanced.RETRY_ROUNDS", 1000)
    assert "progress" in laws(broken(run(Balanced, "balanced", plan)))


def test_a_barrier_that_forgets_a_member() -> None:
    def forgets(event: Event, actions: list[Action], strategy: Any) -> list[Action]:
        grants = [action for action in actions if isinstance(action, Grant)]
        return [action for action in actions if action is not grants[-1]] if len(grants) == 3 else actions

    require_fault(changed(Dasp, forgets), "dasp", "progress")


# -- missing reason ----------------------------------------------------------------------------------------------------


def test_missing_reason() -> None:
    def silent(event: Event, actions: list[Action], strategy: Any) -> list[Action]:
        return replaced(actions, Grant, reason=" ") if strategy.state.completed == 9 else actions

    require_fault(changed(Bsp, silent), "bsp", "reasons")


# -- wrong weight ------------------------------------------------------------------------------------------------------


def equal_weights(event: Event, actions: list[Action], strategy: Any) -> list[Action]:
    return [
        msgspec.structs.replace(a, weights=(1 / len(a.pushes),) * len(a.pushes)) if isinstance(a, Apply) else a
        for a in actions
    ]


def heavier(event: Event, actions: list[Action], strategy: Any) -> list[Action]:
    return [
        msgspec.structs.replace(a, weights=tuple(w * 1.001 for w in a.weights)) if isinstance(a, Apply) else a
        for a in actions
    ]


@pytest.mark.parametrize(
    ("base", "spec", "change"),
    [
        (Bsp, "bsp", equal_weights),
        (KAsync, "k_async:k=2", equal_weights),
        (FastestK, "fastest_k:k=2,cover=true", heavier),
        (Ssp, "ssp", heavier),
        (Dasp, "dasp", heavier),
    ],
)
def test_wrong_weight(base: type[Strategy], spec: str, change: Any) -> None:
    require_fault(changed(base, change), spec, "weights")


# -- lost random state -------------------------------------------------------------------------------------------------


class Forgetful(AdaptiveKLoad):
    """Restores everything but the state of its chance."""

    def restore(self, data: dict[str, Any]) -> "Forgetful":
        return super().restore({**data, "random": msgspec.to_builtins(self.rng.getstate())})


def test_lost_random_state() -> None:
    spec = "adaptive_k_load:window=3,burn_in=2"
    lines = run(AdaptiveKLoad, spec, ENDLESS)
    options = strategies.parse(spec)[1]

    def resumed(cls: type[Strategy]) -> str | None:
        seeds = iter(["1:strategy"])
        return first_difference(lines, lambda: cls(options, random.Random(next(seeds, "another"))), every=10)

    assert resumed(AdaptiveKLoad) is None
    assert "a step expected" in (resumed(Forgetful) or "")


def test_lost_state() -> None:
    class Amnesiac(Ssp):
        def restore(self, data: dict[str, Any]) -> "Amnesiac":
            return super().restore({**data, "state": {**data["state"], "parked": {}}})

    options = strategies.parse("ssp:staleness=1")[1]
    lines = run(Ssp, "ssp:staleness=1", ENDLESS)
    assert first_difference(lines, lambda: Ssp(options, random.Random(1)), every=3) is None
    assert first_difference(lines, lambda: Amnesiac(options, random.Random(1)), every=3) is not None


# -- faults of the record itself ---------------------------------------------------------------------------------------


def test_actions_out_of_order() -> None:
    lines = run(Bsp, "bsp", ENDLESS)
    place = next(i for i, line in enumerate(lines) if isinstance(line, Decision) and len(line.actions) > 2)
    line = lines[place]
    assert isinstance(line, Decision)
    lines[place] = Decision(line.event, line.actions[::-1])
    found = broken(lines)
    assert (found[0].line, found[0].law) == (place + 1, "form")


def test_time_that_runs_backwards() -> None:
    lines = run(Bsp, "bsp", ENDLESS)
    lines.insert(-1, Observation(0.0, "warning", {"text": "late"}))
    assert laws(broken(lines)) == {"time"}


def test_a_journal_without_an_end() -> None:
    assert laws(broken(run(Bsp, "bsp", ENDLESS)[:-1])) >= {"form"}


def test_seconds_that_do_not_add_up() -> None:
    lines = run(Ssp, "ssp", ENDLESS)
    slower = [
        Decision(msgspec.structs.replace(line.event, compute_s=line.event.compute_s * 1.05), line.actions)
        if isinstance(line, Decision) and isinstance(line.event, Pushed)
        else line
        for line in lines
    ]
    assert laws(broken(slower)) == {"time"}
