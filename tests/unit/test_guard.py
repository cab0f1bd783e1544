"""The guard speaks up once, with numbers, and only when something is wrong."""

import math
import random

from paceline.server.guard import AVERAGED_ROUNDS, PATIENCE_ROUNDS, Guard


def feed(guard, losses, mass=1.0):
    return [text for loss in losses if (text := guard.applied(loss, None, mass, 3, 7)) is not None]


def test_a_loss_above_four_times_its_best_for_fifty_rounds():
    guard = Guard()
    assert feed(guard, [1.0] * 20) == []
    # The average over ten rounds needs a few to rise above the limit; from there the fifty rounds count.
    rounds = next(n for n in range(1, 100) if feed(guard, [9.0]))
    assert PATIENCE_ROUNDS <= rounds < PATIENCE_ROUNDS + AVERAGED_ROUNDS
    (text,) = feed(Guard(), [1.0] * 20 + [9.0] * 200)
    assert "4 times its best (1)" in text
    assert "worker 3, staleness 7, mass 1" in text


def test_a_recovery_clears_it_and_it_may_speak_again():
    guard = Guard()
    assert feed(guard, [1.0] * 20 + [9.0] * 35 + [1.0] * 60 + [9.0] * 35) == []
    assert len(feed(guard, [9.0] * 60)) == 1
    assert feed(guard, [9.0] * 500) == []
    feed(guard, [1.0] * 60)
    assert len(feed(guard, [9.0] * 80)) == 1


def test_rounds_are_counted_by_mass():
    whole, eighths = Guard(), Guard()
    assert feed(whole, [1.0] * 20 + [9.0] * 40) == feed(eighths, [1.0] * 160 + [9.0] * 320, mass=0.125) == []
    assert len(feed(whole, [9.0] * 30)) == len(feed(eighths, [9.0] * 240, mass=0.125)) == 1


def test_the_luckiest_of_many_small_batches_is_no_yardstick():
    chance = random.Random(0)
    losses = [math.exp(chance.gauss(-2, 1.2)) for _ in range(3000)]
    assert max(losses) / min(losses) > 1e3
    assert feed(Guard(), losses, mass=0.125) == []


def test_a_loss_that_is_small_beside_the_first_is_harmless():
    assert feed(Guard(), [2.0] + [1e-9] * 300 + [1e-3] * 300) == []


def test_values_that_are_not_finite_are_reported_at_once_and_once():
    guard = Guard()
    assert len(feed(guard, [1.0, math.nan, math.inf])) == 1
    guard = Guard()
    assert guard.applied(None, math.inf, 1.0, 0, 0) is not None
    assert guard.applied(None, 1.0, 1.0, 0, 0) is None


def test_negative_losses_are_judged_by_their_excess():
    guard = Guard()
    assert feed(guard, [-10.0] * 30 + [-6.5] * 80) == []
    assert len(feed(guard, [-5.0] * 120)) == 1


def test_the_first_refused_push_is_worth_a_warning():
    guard = Guard()
    assert "worker 2" in guard.refused(2, 7, math.nan, 4)
    assert guard.refused(2, 7, math.nan, 4) is None
