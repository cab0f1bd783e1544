"""The comparison of exchanges: what its bars say of made numbers, and that a small run goes through."""

import math

import pytest

import bench_gossip
from bench_gossip import Job, Ran


def ran(accuracy=0.93, loss=0.24, sent=100, course=(9, 9, 1, 1, 1, 1, 1, 1, 1, 1)):
    return Ran(accuracy, loss, sent, 10, 1.0, 0.1, list(course))


def by_side(**changed):
    ours = changed.get("adaptive", [ran(0.928, 0.25, 6), ran(0.929, 0.26, 6), ran(0.927, 0.25, 6)])
    return {
        "baseline": [ran()] * 3,
        "fixed": [ran(0.918, 0.28, 7), ran(0.92, 0.28, 7), ran(0.917, 0.29, 7)],
        "adaptive": ours,
    }


def missed(**changed):
    return [bar.name for bar in bench_gossip.judge("cosine", by_side(**changed)) if not bar.passed]


def test_good_numbers_meet_every_bar():
    assert missed() == []


@pytest.mark.parametrize(
    ("worse", "bars"),
    [
        ({"sent": 9}, ["cosine_bytes_saved"]),
        ({"accuracy": 0.92}, ["cosine_behind"]),
        ({"accuracy": 0.915}, ["cosine_behind", "cosine_ahead_of_fixed"]),
        ({"loss": 0.3}, ["cosine_loss_below_fixed"]),
        ({"course": [1] * 9 + [9]}, ["cosine_dense_early"]),
    ],
)
def test_a_worse_number_misses_its_bar(worse, bars):
    good = {"accuracy": 0.928, "loss": 0.25, "sent": 6}
    assert missed(adaptive=[ran(**{**good, **worse})] * 3) == bars


def test_a_side_that_sends_too_much_is_not_chosen():
    size = bench_gossip.QUICK
    base, dear, cheap = (
        Job(s, 0.4, "cosine", 100, size)
        for s in ("gossip:period=1", *(bench_gossip.sides()["adaptive"][i] for i in (0, 2)))
    )
    fixed = Job("gossip:period=13", 0.4, "cosine", 100, size)
    found = {base: ran(0.93, sent=1000), fixed: ran(0.92, sent=70), dear: ran(0.93, sent=90), cheap: ran(0.91, sent=60)}
    chosen, most = bench_gossip.choose(found)
    assert (chosen["adaptive"], most) == (cheap, 1000)


def test_time_must_be_saved_and_less_of_it_the_faster_the_line():
    good = bench_gossip.judge_time([(0.5, 0.7), (1.0, 0.53), (2.0, 0.3)])
    assert all(bar.passed for bar in good)
    bad = bench_gossip.judge_time([(0.5, 0.3), (1.0, 0.5), (2.0, 0.6)])
    assert [bar.passed for bar in bad] == [False, False]


@pytest.mark.parametrize(
    ("schedule", "at", "expected"), [("cosine", 0.5, 0.5), ("cosine", 1.0, 0.0), ("step", 0.4, 1.0), ("step", 0.6, 0.1)]
)
def test_rates_decay(schedule, at, expected):
    assert math.isclose(bench_gossip.factor(schedule, at), expected, abs_tol=1e-12)
