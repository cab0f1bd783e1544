"""Every strategy meets every fault that a scenario knows, and the pairs on real processes cover what they promise."""

import pytest
from clusters import UNEVEN, cluster
from fault_pairs import (
    ALL_PAIRS,
    CENTRAL,
    FAULTS,
    IMPOSSIBLE,
    PAIRS,
    PEERS,
    SIMULATED,
    SIMULATED_PAIRS,
    name_of,
)
from reference_runs import CENTRAL as CENTRAL_SPECS
from reference_runs import PEERS as PEER_SPECS
from reference_runs import ROWS, Train

import paceline
from attacks import foreign_checker
from paceline import strategies
from paceline.core.scenario.faults import KINDS
from paceline.laws.checker import check
from paceline.records import journal
from paceline.records.journal import Observation
from paceline.records.replay import replay

EPOCHS = 3
NAMES = {*strategies.names(), *strategies.peer_names()}


@pytest.mark.parametrize(("name", "fault"), SIMULATED_PAIRS)
def test_a_strategy_settles_every_sample_under_a_fault(name, fault, tmp_path):
    scenario = cluster(*UNEVEN, jitter="lognormal:0.2", network="latency_ms = 2", events=SIMULATED[fault])
    run = paceline.launch(
        Train((EPOCHS,)), engine="sim", scenario=scenario, strategy={**CENTRAL_SPECS, **PEER_SPECS}[name],
        evaluate_every="off", journal=tmp_path / "journal.jsonl", runs_dir=tmp_path,
        checkpoint_every="3v" if fault == "server_crash" else None,
    )  # fmt: skip
    assert run.ended == "done"
    assert run.summary.samples_used == EPOCHS * len(ROWS)
    lines = list(journal.read(run.journal))
    happened = [line.data["kind"] for line in lines if isinstance(line, Observation) and line.what == "scenario"]
    assert fault in happened
    assert replay(run.journal).difference is None
    if fault == "server_crash":  # the laws are about one server
        assert foreign_checker.faults(foreign_checker.read(run.journal), whole=True) == []
    elif name in CENTRAL_SPECS:
        assert check(lines) == []


class TestTheDesign:
    """What the fixed pairs cover; whoever registers a strategy or adds a fault is told what is missing."""

    def test_every_strategy_meets_every_event_of_a_scenario(self):
        simulated = {(name, kind) for name, kind in SIMULATED_PAIRS}
        assert {(name, kind) for name in NAMES for kind in KINDS} == simulated

    def test_every_machine_without_a_server_outlives_the_coordinator(self):
        assert {name_of(spec) for spec, fault in PAIRS if fault == "server killed"} >= set(strategies.peer_names())

    def test_every_fault_strikes_processes_under_each_exchange(self):
        for names in (strategies.names(), strategies.peer_names()):
            assert {fault for spec, fault in PAIRS if name_of(spec) in names} == set(FAULTS)
        assert {kind for kinds in FAULTS.values() for kind in kinds} == set(KINDS)

    def test_every_strategy_is_struck_on_processes(self):
        assert {name_of(spec) for spec, _ in PAIRS} == NAMES

    def test_soak_holds_all_pairs(self):
        assert set(CENTRAL) | set(PEERS) == NAMES
        assert len(set(PAIRS)) == len(PAIRS)
        assert set(PAIRS) <= set(ALL_PAIRS)
        assert {(name_of(spec), fault) for spec, fault in [*ALL_PAIRS, *IMPOSSIBLE]} == {
            (name, fault) for name in NAMES for fault in FAULTS
        }
