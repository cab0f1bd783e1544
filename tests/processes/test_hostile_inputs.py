"""A sample of the hostile inputs of `benchmarks/bench_hostile.py`, and that its judges find planted faults."""

import pytest

import bench_hostile

INPUTS = 250


@pytest.mark.parametrize(
    ("planted", "complaint"),
    [(None, None), ("crash", "exit code 1"), ("hang", "were not answered"), ("leak", "MB more")],
)
def test_a_hub_bears_hostile_inputs_and_planted_faults_are_found(planted, complaint, monkeypatch):
    if planted is None:
        outcome = bench_hostile.attack(INPUTS, 7)
        assert outcome.complaints() == []
        assert (outcome.members, outcome.strangers) == (175, 75)
        assert len(outcome.faults) > 25
        assert sum(outcome.faults.values()) > 50
    else:
        monkeypatch.setattr(bench_hostile, "PATIENCE_S", 4.0)
        monkeypatch.setattr(bench_hostile, "MOST_BYTES", 10_000_000)
        outcome = bench_hostile.attack(INPUTS, 7, None, "--planted", planted)
        assert any(complaint in each for each in outcome.complaints())
