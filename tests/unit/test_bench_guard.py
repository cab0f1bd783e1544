"""The trials of the guard: what counts as plainly diverging, what the bars say of made rows, and a sample of runs."""

import json
import math

import pytest

import bench_guard
import guard_trials
from guard_trials import Course, Trial, by_round, named_by_earlier_rule, plain_at

HEALTHY, PLANTED = guard_trials.healthy(), guard_trials.planted()
SAMPLE = [
    Trial("classify", "asp", "one", 1, {"batch": 1, "flipped": 0.3, "lr": 0.01, "rounds": 200}),
    Trial("noise_only", "bsp", "one", 2),
    Trial("separable", "bsp", "one", 3),
    Trial("more_classes", "bsp", "one", 4),
    Trial("critic", "bsp", "one", 5, {"rounds": 150}),
    Trial("rewards", "bsp", "one", 6, {"batch": 1}),
    Trial("likelihood", engine="alone", cluster="one"),
]
# Short runs of different scripts and strategies; the rest is the benchmark's.
NAMED = [trial for trial in PLANTED if trial.script in ("task:linreg", "curvature", "root", "hasty", "restarts")]


def course(losses, rounds=1.0, refused_at=None, named_at=None):
    return Course(list(losses), [rounds] * len(losses), named_at, refused_at, "", 0.0)


def test_there_are_as_many_runs_as_the_bars_ask_for_and_none_twice():
    assert (len(HEALTHY), len(PLANTED)) == (bench_guard.HEALTHY, bench_guard.PLANTED)
    assert len({trial.name for trial in [*HEALTHY, *PLANTED]}) == len(HEALTHY) + len(PLANTED)
    assert all(trial.planted for trial in PLANTED)
    assert not any(trial.planted for trial in HEALTHY)
    assert {"sim", "alone", "local"} == {trial.engine for trial in HEALTHY}


def test_losses_by_round():
    assert by_round(course([1.0, 3.0, 5.0, 7.0], 0.5)) == [2.0, 6.0]
    assert by_round(course([1.0] * 10, 0.1)) == [pytest.approx(1.0)]


@pytest.mark.parametrize(
    ("losses", "plain"),
    [
        ([1.0] * 20 + [9.0] * 80, 22),  # the mean of ten is above 2 with the second
        ([1.0] * 20 + [9.0] * 10 + [0.5] * 70, None),  # it recovers
        ([2.0] + [0.5] * 29 + [2.0] * 70, 38),  # more than 1.625, three quarters of the way back
        ([2.0] + [0.5] * 29 + [1.5] * 70, None),
        ([2.0] + [-2.0] * 29 + [2.0] * 70, None),  # a loss below zero may come back
        ([2.0] + [-2.0] * 29 + [9.0] * 70, 36),
        ([1.0] * 20 + [math.nan], 21),
    ],
)
def test_where_a_run_is_plainly_diverging(losses, plain):
    assert plain_at(course(losses)) == plain


def test_a_refused_gradient_is_plain_at_once():
    assert plain_at(course([1.0] * 20, refused_at=7.5)) == 7.5


def test_the_earlier_rule():
    assert named_by_earlier_rule(course([1.0] * 20 + [9.0] * 80)) == 20 + 50 + 4
    assert named_by_earlier_rule(course([2.3] * 10 + [0.1] * 50 + [1.0] * 80)) is not None, "harder data"
    assert named_by_earlier_rule(course([2.3, 90.0, *[2.34] * 200])) is None, "guessing after an explosion"


def rows(good=200, alarms=0, after=(60.0,) * 20):
    healthy = [{"planted": "", "named at": 51.0 if number < alarms else None} for number in range(good)]
    return healthy + [{"planted": "much", "named at": 99.0, "after": each} for each in after]


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (rows(), []),
        (rows(alarms=1), ["false_alarms"]),
        (rows(good=199), ["healthy"]),
        (rows(after=[60.0] * 19 + [None]), ["named"]),
        (rows(after=[60.0] * 19 + [101.0]), ["named"]),
        (rows(after=[None] * 20), ["named", "slowest"]),
    ],
)
def test_the_bars(found, missed):
    assert [bar.name for bar in bench_guard.judge(found) if not bar.passed] == missed


@pytest.mark.parametrize("trial", SAMPLE, ids=lambda trial: trial.name)
def test_a_sample_of_healthy_runs_is_not_called_diverging(trial):
    found = guard_trials.run(trial)
    assert len(by_round(found)) >= 100
    assert found.named_at is None, found.text


@pytest.mark.parametrize("trial", NAMED, ids=lambda trial: trial.name)
def test_a_sample_of_planted_divergences_is_named(trial):
    row = bench_guard.row_of(trial, guard_trials.run(trial))
    assert row["plain at"] is not None
    assert row["after"] <= bench_guard.WITHIN


def test_a_small_benchmark_goes_through(capsys, monkeypatch):
    monkeypatch.setattr(bench_guard, "healthy", lambda: [Trial("noise_only", "bsp", "one", 1, {"rounds": 60})])
    monkeypatch.setattr(bench_guard, "planted", lambda: [PLANTED[-2]])
    monkeypatch.setattr(bench_guard, "QUICK", 1)
    bench_guard.main(["--quick", "--json", "--jobs", "1"])
    told = json.loads(capsys.readouterr().out)
    assert [told[name]["verdict"] for name in ("healthy", "false_alarms", "named", "slowest")] == ["met"] * 4
