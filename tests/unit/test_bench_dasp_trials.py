"""The trials of dasp's rules: what counts as a variant's time, what is kept, and that every variant is a strategy."""

import json
import math

import msgspec
import pytest
from virtual_cluster import VirtualCluster

import dasp_trials
import results
from contenders import dasp_variants
from contenders.uneven_cells import Outcome
from dasp_trials import Row, earlier, mean, measure, summary
from paceline import strategies
from paceline.core.actions import Apply, Grant


def row(**changes):
    made = Row("w8_4x", "merge", "dasp", 0.9, 0.4, [20.0, 22.0], 0.1, 0.2, 8, 0.5)
    return msgspec.structs.replace(made, **changes)


def outcome(reached):
    return Outcome(reached, 30.0, 0.91, 100, 800, 50_000, 0.1, 0.0, 0.2, 8, {"ASYNC": 0.5}, 40, 1.0, "target")


def test_a_missed_seed_makes_a_rate_infinite():
    assert mean([10.0, 40.0]) == pytest.approx(20.0)
    assert mean([10.0, None]) == math.inf


def test_the_best_rate_counts_and_a_miss_is_told():
    rows = [
        row(),
        row(rate=0.57, seconds=[18.0, 18.0]),
        row(rate=0.28, seconds=[None]),
        row(cell="whole", seconds=[None]),
    ]
    assert summary(rows) == [{"variant": "merge", "w8_4x": "18.0 at 0.57", "whole": "missed"}]


def test_a_rate_ends_with_its_first_miss_and_at_three_times_the_best(monkeypatch):
    asked = []

    def run(trial):
        asked.append((trial.rate, trial.seed, trial.limit_s))
        return outcome(None if trial.rate == 0.4 else 20.0)

    monkeypatch.setattr(dasp_trials, "run", run)
    rows = measure("w8_4x", "none", (0.28, 0.4, 0.57), (100, 101))
    assert asked == [
        *((0.28, seed, 150.0) for seed in (100, 101)), (0.4, 100, pytest.approx(60.0)),
        *((0.57, seed, pytest.approx(60.0)) for seed in (100, 101)),
    ]  # fmt: skip
    assert [row.seconds for row in rows] == [[20.0, 20.0], [None], [20.0, 20.0]]
    assert {row.asynchronous for row in rows} == {0.5}


def test_rows_of_the_same_commit_are_kept_unless_they_are_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert earlier("abc", ["w8_4x"], ["merge"]) == []
    kept = [row(), row(cell="whole"), row(variant="join")]
    (tmp_path / "dasp_trials.json").write_text(json.dumps({"commit": "abc", "trials": msgspec.to_builtins(kept)}))
    assert earlier("abc", ["w8_4x"], ["merge"]) == kept[1:]
    assert earlier("def", ["w8_4x"], ["merge"]) == []


@pytest.mark.parametrize("variant", dasp_trials.TRIED)
def test_every_variant_is_a_strategy(variant):
    cluster = VirtualCluster(
        strategies.build(dasp_trials.TRIED[variant][0], 0), [1.0, 1.0, 2.0, 4.0], work=64, jitter=0.1
    )
    assert cluster.run(pushes=60).arrived == 60


def test_onward_goes_on_at_once_and_dasp_with_the_groups_step():
    def waited(strategy):
        cluster = VirtualCluster(strategy, [1.0, 1.0, 1.0, 4.0], work=64, jitter=0.1).run(until=60.0)
        late = [d for d in cluster.decisions if getattr(d.event, "worker", None) == 3 and cluster.states[3] == "ASYNC"]
        alone = [d for d in late if not any(isinstance(a, Apply) for a in d.actions)]
        return sum(not any(isinstance(a, Grant) and a.worker == 3 for a in d.actions) for d in alone[1:])

    assert waited(dasp_variants.Onward(fit="none")) == 0
    assert waited(strategies.build("dasp:fit=none", 0)) > 5


def test_dampings():
    weights = {}
    for made in (dasp_variants.Root(fit="none"), dasp_variants.Plain(fit="none"), strategies.build("dasp:fit=none", 0)):
        cluster = VirtualCluster(made, [1.0, 1.0, 1.0, 4.0], work=64).run(until=60.0)
        weights[made.damping] = min(weight for apply in cluster.applies() for weight in apply.weights)
    assert weights[0.5] > weights[1] > weights[2] > 0
