"""The guard speaks up once, with numbers, and only when something is wrong."""

import math

from paceline.guard import PATIENCE_ROUNDS, Guard


def feed(guard, losses, mass=1.0):
    return [text for loss in losses if (text := guard.applied(loss, None, mass, 3, 7)) is not None]


def test_a_loss_above_four_times_its_best_for_fifty_rounds():
    guard = Guard()
    assert feed(guard, [1.0] + [4.5] * 49) == []
    (text,) = feed(guard, [4.5] * 100)
    assert "4.5" in text
    assert "worker 3, staleness 7, mass 1" in text


def test_one_good_round_clears_it_and_it_may_speak_again():
    guard = Guard()
    feed(guard, [1.0] + [5.0] * 49 + [1.0])
    assert feed(guard, [5.0] * 49) == []
    assert len(feed(guard, [5.0] * 2)) == 1
    feed(guard, [0.9])
    assert len(feed(guard, [5.0] * 60)) == 1


def test_rounds_are_counted_by_mass():
    guard = Guard()
    feed(guard, [1.0])
    assert feed(guard, [9.0] * int(PATIENCE_ROUNDS * 8 - 1), mass=0.125) == []
    assert len(feed(guard, [9.0] * 2, mass=0.125)) == 1


def test_values_that_are_not_finite_are_reported_at_once_and_once():
    guard = Guard()
    assert len(feed(guard, [1.0, math.nan, math.inf])) == 1
    guard = Guard()
    assert guard.applied(None, math.inf, 1.0, 0, 0) is not None
    assert guard.applied(None, 1.0, 1.0, 0, 0) is None


def test_negative_losses_are_judged_by_their_excess():
    guard = Guard()
    assert feed(guard, [-10.0] + [-6.5] * 80) == []
    assert len(feed(guard, [-5.5] * 80)) == 1


def test_the_first_refused_push_is_worth_a_warning():
    guard = Guard()
    assert "worker 2" in guard.refused(2, math.nan, 4)
    assert guard.refused(2, math.nan, 4) is None
