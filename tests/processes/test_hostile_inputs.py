"""A sample of the hostile inputs of `benchmarks/bench_hostile.py`, and that its judges find planted faults."""

from pathlib import Path

import pytest

import bench_hostile
import bench_strangers
from bench_strangers import Beside

INPUTS = 120


@pytest.mark.parametrize(("servers", "inputs"), [(1, INPUTS), (2, INPUTS // 2)])
def test_a_whole_serve_bears_hostile_inputs(servers, inputs):
    outcome = bench_hostile.attack(inputs, 7, steps=600, servers=servers)
    assert outcome.complaints() == []
    assert outcome.members + outcome.strangers >= inputs
    assert outcome.members >= 0.6 * inputs
    assert sum(outcome.hung_up.values()) > inputs // 6


def test_a_fault_in_what_contains_errors_is_found(monkeypatch):
    """A server that does not go on without a worker whose message does not fit the run: planted, and found."""
    monkeypatch.setattr(bench_hostile, "PATIENCE_S", 4.0)
    monkeypatch.setattr(bench_hostile.hostile_clients, "PATIENCE_S", 2.0)
    monkeypatch.setattr(bench_hostile.hostile_serve, "undisturbed_digest", lambda steps, servers: "not asked for")
    outcome = bench_hostile.attack(INPUTS, 7, "crash", steps=600)
    assert any("exit codes" in each for each in outcome.complaints())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"stalled": True}, "no step"), ({"codes": {"serve": 4}}, "exit codes"), ({"same_bits": False}, "other bits"),
        ({"more_bytes": 50_000_001}, "MB more"), ({"log_bytes": 100_001}, "bytes of log"),
        ({"log": "Traceback (most recent call last)"}, "a traceback"),
    ],
)  # fmt: skip
def test_each_bar_of_hostile_inputs_can_be_missed(change, complaint):
    good = {
        "members": 6_200, "strangers": 3_800, "stalled": False, "codes": {"serve": 0}, "same_bits": True,
        "more_bytes": 0, "log_bytes": 0, "seconds": 1.0, "answered": {}, "hung_up": {}, "silent": 0, "damages": {},
        "log": "",
    }  # fmt: skip
    assert bench_hostile.Outcome(**good).complaints() == []
    (found,) = bench_hostile.Outcome(**{**good, **change}).complaints()
    assert complaint in found


def test_strangers_are_judged_by_the_median_of_their_pairs():
    found = [Beside("flood", "run", speed, 1_000, 9) for speed in (70.0, 90.0, 95.0)]
    found += [Beside("flood", "sink", 100.0, 0, 9)] * 3
    outcome = {"found": found, "codes": {"serve": 0}, "log": ""}
    assert all(verdict.passed for verdict in bench_strangers.verdicts_of(outcome, ["flood"]))
    slow = [Beside("flood", "run", 79.0, 60_000_000, 9)] * 3 + found[3:]
    missed = bench_strangers.verdicts_of({"found": slow, "codes": {"serve": 1}, "log": "x" * 100_001}, ["flood"])
    assert [verdict.passed for verdict in missed] == [False] * 4


def test_the_messages_that_are_left_out_are_named_where_users_read_what_members_can_do():
    """A member that damages one of them may end a run, or mislead it."""
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8")
    said = page.partition("Five kinds of message steer a run")[2].partition("The ten thousand")[0]
    assert len(bench_hostile.STEERING) == 5
    assert [kind for kind in bench_hostile.STEERING if f"`{kind}`" not in said] == []
