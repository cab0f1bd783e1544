"""The server's line in balanced rounds: learned from waiting, shared by places."""

import pytest

from paceline.core.events import Pushed
from paceline.strategies.balanced_line import CUSHION, Line
from paceline.strategies.balanced_pace import Pace, seconds_for


def push(worker, queued_down_s):
    return Pushed(1.0, worker, worker, 1, 0, 8, 1.0, 0.5, 0.0, 0, 0, queued_down_s=queued_down_s)


def line_of(each, speeds):
    line = Line(each=each)
    line.line_up({worker: Pace(0.1, 1 / speed) for worker, speed in enumerate(speeds)})
    return line


def test_a_models_time_on_the_line_is_what_others_wait_for_it():
    line = Line()
    for worker in range(4):
        line.note_model(worker, 2.0)
    for worker, queued in enumerate([None, 0.3, 0.6, 0.9]):
        line.measure(push(worker, queued))
    assert line.each == pytest.approx(0.3)
    assert line.ahead == {}


def test_models_of_other_moments_and_pushes_that_never_come_say_nothing():
    line = Line()
    line.note_model(0, 2.0)
    line.note_model(1, 3.0)
    line.measure(push(1, None))
    line.note_model(2, 3.0)
    line.forget(2)
    line.measure(push(2, 5.0))
    assert line.each == 0.0


def test_a_line_that_becomes_faster_is_followed():
    line = Line(each=0.3)
    for _ in range(30):
        line.note_model(0, 2.0)
        line.note_model(1, 2.0)
        line.measure(push(0, None))
        line.measure(push(1, 0.1))
        line.sent_at = None
    assert line.each == pytest.approx(0.1, rel=0.01)


def test_places_go_by_classes_of_speed_and_within_one_by_worker():
    assert line_of(0.1, [1.0, 8.0, 1.02, 7.9]).in_turn([0, 1, 2, 3]) == [1, 3, 0, 2]
    assert line_of(0.0, [1.0, 8.0, 1.02, 7.9]).in_turn([3, 2, 1, 0]) == [0, 1, 2, 3]
    unknown = line_of(0.1, [1.0, 8.0])
    assert unknown.in_turn([0, 1, 2]) == [2, 1, 0], "who is to be measured comes first"


def test_a_worker_waits_for_its_turn_both_ways_unless_it_goes_on():
    line = line_of(0.5, [1.0, 8.0, 4.0])
    pace = Pace(0.1, 0.25)
    assert line.delayed(2, pace, 0.0, goes_on=False) == Pace(0.1 + 2 * 0.5, 0.25)
    assert line.delayed(0, pace, 0.0, goes_on=False) == Pace(0.1 + 2 * 2 * 0.5, 0.25)
    assert line.delayed(0, pace, 0.0, goes_on=True) == Pace(0.1 + 2 * 0.5, 0.25)
    assert line.delayed(7, pace, 0.3, goes_on=False) == pace, "it has no place"


def test_where_times_vary_the_last_to_push_gets_the_most_spare_time():
    line = line_of(0.5, [8.0, 4.0, 2.0, 1.0])
    line.sharing = 4
    slowed = [line.delayed(worker, Pace(0.0, 1.0), 0.1, goes_on=False).per_sample for worker in range(4)]
    assert slowed[0] == pytest.approx(1 + CUSHION * 0.1)
    assert slowed == sorted(slowed, reverse=True)
    assert slowed[3] < 1.02


def test_a_further_push_costs_the_more_the_fuller_the_line_is():
    line = Line(each=0.01)
    assert line.cost(10, span=10.0) == pytest.approx(0.1 * 0.01)
    assert line.cost(10, span=0.1) == line.cost(10, span=0.05) == pytest.approx(0.1)
    assert Line().cost(10, span=1.0) == 0.0


def test_shares_with_places_fill_the_shortest_round():
    """Turns of 0.5 s, three workers: 2 * (T - 1) + 1 * (T - 2) samples and so on until 30 are done."""
    line = line_of(0.5, [4.0, 2.0, 1.0])
    paces = [line.delayed(w, Pace(1.0, 1 / speed), 0.0, goes_on=False) for w, speed in enumerate([4.0, 2.0, 1.0])]
    span = seconds_for(30, paces)
    assert span == pytest.approx(6.0, abs=0.26)
    assert sum(pace.fitting(span) for pace in paces) >= 30
