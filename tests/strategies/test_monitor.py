"""The performance monitor, and telling interference from a change of level."""

import msgspec
import pytest

from paceline.core.events import Pushed
from paceline.strategies.interference import LEVEL_PUSHES, Interference, limit
from paceline.strategies.monitor import Monitor


def monitored(**seconds):
    monitor = Monitor()
    for worker, compute in seconds.items():
        monitor.record(int(worker[1:]), 8, 8, compute, 0.5)
    return monitor


def test_the_first_push_is_the_estimate():
    monitor = monitored(w0=1.0)
    assert monitor.time(0) == 1.5
    assert monitor.nodes[0].deviation == 0
    assert monitor.time(1) is None
    assert monitor.score(1) is None


def test_averages_move_by_a_fifth():
    monitor = monitored(w0=1.0)
    monitor.record(0, 8, 8, 2.0, 1.0)
    node = monitor.nodes[0]
    assert node.per_sample * 8 == pytest.approx(1.2)
    assert node.transfer == pytest.approx(0.6)
    assert node.deviation == pytest.approx(0.2 * 1.5)


def test_a_lasting_change_is_followed_within_ten_pushes():
    monitor = monitored(w0=1.0)
    for _ in range(10):
        monitor.record(0, 8, 8, 4.0, 0.5)
    assert monitor.time(0) == pytest.approx(4.5, rel=0.1)


def test_the_score_is_the_fastest_time_over_ones_own():
    monitor = monitored(w0=1.0, w1=2.5, w2=5.5)
    assert [monitor.score(worker) for worker in range(3)] == pytest.approx([1.0, 0.5, 0.25])
    monitor.forget(0)
    assert monitor.score(1) == 1.0
    assert monitor.score(0) is None


def test_less_work_does_not_look_fast():
    monitor = monitored(w0=8.0)
    monitor.record(0, 2, 8, 2.0, 0.5)
    assert monitor.time(0) == pytest.approx(8.5)


def test_a_scrap_of_work_hardly_counts_and_a_refused_push_not_at_all():
    """Its time is mostly fixed cost, and scaled to nominal work it would look like a slow-down."""
    monitor = Monitor()
    monitor.record(0, 64, 64, 1.0, 0.0)
    monitor.record(0, 1, 64, 0.2, 0.0)
    assert monitor.time(0) == pytest.approx(1.0, rel=0.2)
    before = msgspec.to_builtins(monitor)
    monitor.record(0, 0, 64, 9.0, 9.0)
    assert msgspec.to_builtins(monitor) == before


def test_a_correction_of_nominal_work_scales_the_time():
    monitor = monitored(w0=1.0)
    monitor.record(0, 16, 16, 2.0, 0.5)
    assert monitor.time(0) == pytest.approx(2.5)


def test_plain_data_and_back():
    monitor = monitored(w0=1.0, w3=2.0)
    assert msgspec.convert(msgspec.to_builtins(monitor, str_keys=True), Monitor, str_keys=True) == monitor


def push(compute_s, samples=8, worker=0):
    return Pushed(0.0, worker, 1, 1, 0, samples, compute_s, 0.0, 0.0, 0, 0)


def test_an_overdue_push_disturbs_and_stays_out_of_the_estimate():
    watch = Interference()
    assert [watch.judge(push(s), 8, 8, 4.0, 3) for s in (1.0, 1.2, 4.0)] == ["in time", "in time", "overdue"]
    assert watch.monitor.time(0) == pytest.approx(1.04)
    assert watch.disturbed == {0: True}
    assert watch.judge(push(1.1), 8, 8, 4.0, 3) == "in time"
    assert watch.disturbed == {}


def test_eight_overdue_pushes_in_a_row_are_a_level():
    watch = Interference()
    watch.judge(push(1.0), 8, 8, 4.0, 3)
    verdicts = [watch.judge(push(4.0), 8, 8, 4.0, 3) for _ in range(LEVEL_PUSHES)]
    assert verdicts == ["overdue"] * (LEVEL_PUSHES - 1) + ["level"]
    assert watch.monitor.time(0) == pytest.approx(4.0)
    assert watch.judge(push(4.0), 8, 8, 4.0, 3) == "in time"


def test_a_push_in_time_starts_the_count_afresh():
    watch = Interference()
    watch.judge(push(1.0), 8, 8, 4.0, 3)
    for _ in range(3):
        verdicts = [watch.judge(push(4.0), 8, 8, 4.0, 3) for _ in range(LEVEL_PUSHES - 1)]
        assert verdicts == ["overdue"] * (LEVEL_PUSHES - 1)
        assert watch.judge(push(1.0), 8, 8, 4.0, 3) == "in time"


def test_short_and_refused_pushes_are_not_judged():
    watch = Interference()
    assert watch.judge(push(9.0, samples=0), 0, 8, 4.0, 3) == "too short to judge"
    assert watch.monitor.time(0) is None
    watch.judge(push(1.0), 8, 8, 4.0, 3)
    assert watch.judge(push(2.0, samples=1), 1, 8, 4.0, 3) == "too short to judge"
    assert watch.disturbed == {}


@pytest.mark.parametrize(("gamma", "expected"), [(0.0, 1.25), (4.0, 1.4)])
def test_the_limit_is_a_quarter_or_gamma_deviations(gamma, expected):
    watch = Interference()
    watch.judge(push(1.0), 8, 8, gamma, 3)
    watch.monitor.nodes[0].deviation = 0.1
    assert limit(watch.monitor.nodes[0], gamma) == pytest.approx(expected)
