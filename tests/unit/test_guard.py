"""The guard speaks up once, with numbers, and only when something is wrong."""

import json
import math
import random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from paceline.server.guard import AVERAGED_ROUNDS, PATIENCE_ROUNDS, Guard


def feed(guard, losses, rounds=1.0):
    return [text for loss in losses if (text := guard.applied(loss, None, rounds, rounds, 3, 7)) is not None]


def named_at(losses, rounds=1.0):
    """The rounds after which the guard speaks."""
    guard = Guard()
    return [number * rounds for number, loss in enumerate(losses, 1) if feed(guard, [loss], rounds)]


# -- curves -----------------------------------------------------------------------------------------------------------


def falling(start, end, rounds, noise=0.0, seed=0):
    """From one level to the other by equal factors, with noise as a share of the loss."""
    chance = random.Random(seed)
    steps = [start * (end / start) ** (number / max(1, rounds - 1)) for number in range(rounds)]
    return [loss * (1 + noise * chance.uniform(-1, 1)) for loss in steps]


def flat(level, rounds, noise=0.05, seed=0):
    return falling(level, level, rounds, noise, seed)


def squares(batch, rounds, seed):
    """Half the squared error of predictions of pure noise."""
    chance = random.Random(seed)
    return [sum(chance.gauss(0, 1) ** 2 for _ in range(batch)) / (2 * batch) for _ in range(rounds)]


def wrong_labels(rounds, seed):
    """Single losses of a classifier that is mostly sure, where one label in four is wrong."""
    chance = random.Random(seed)
    level = falling(2.3, 0.01, rounds)
    return [2.3 + chance.random() * 4 if chance.random() < 0.25 else loss * chance.expovariate(1) for loss in level]


def around_zero(rounds, seed):
    """Policy gradients: noise whose sign means nothing."""
    chance = random.Random(seed)
    return [chance.gauss(0.2 - 0.001 * number, 1.0) for number in range(rounds)]


def outliers(rounds, seed):
    """A regression that learns, on targets with rare huge errors."""
    chance = random.Random(seed)
    return [loss * chance.expovariate(1) * (1 + 500 * (chance.random() < 0.01)) for loss in falling(5.0, 1.0, rounds)]


def restarts(low, height, period, count):
    """Warm restarts: every period begins at a height again."""
    return falling(2.3, low, 60) + count * (flat(height, period // 3) + falling(height, low, period - period // 3))


def critic():
    """From zero far down, and slowly back as the opponent learns."""
    down = [-10 * number / 50 for number in range(50)]
    return [-0.01, 0.02, *down, *[-10 + 9.8 * number / 200 for number in range(200)], *flat(-0.2, 150, noise=1.0)]


def classes():
    """A curriculum: each stage begins above the first loss and takes its time."""
    stages = [falling(start, end, 150, noise=0.1, seed=number)
              for number, (start, end) in enumerate([(2.3, 0.001), (4.8, 0.02), (3.2, 0.5)])]  # fmt: skip
    return [loss for stage in stages for loss in stage]


HEALTHY = {
    "falls": falling(2.3, 0.05, 300, noise=0.3),
    "falls to zero": falling(2.3, 1e-12, 400),
    "leaps at tiny losses": falling(2.0, 1e-7, 100) + 4 * (flat(1e-6, 60) + flat(1e-7, 30)),
    "is small beside the first": [2.0, *flat(1e-9, 300), *flat(1e-3, 300)],
    "reaches zero": falling(1.0, 1e-3, 50) + [0.0] * 100 + flat(1e-3, 200),
    "rises at first": [2.3, *flat(3.8, 80), *falling(3.8, 0.3, 200)],
    "is hardly learned for long": flat(2.303, 300, noise=0.02) + falling(2.3, 0.2, 200),
    "has one huge spike": [*falling(2.3, 0.3, 100), 1e9, *flat(0.3, 300)],
    "has one huge spike at the start": [2.3, 1e9, *falling(2.2, 0.3, 300)],
    "spikes": (falling(2.3, 0.3, 100) + [40.0] * 5 + falling(3.0, 0.25, 40)) + 3 * ([30.0] * 3 + flat(0.25, 80)),
    "learns anew from an explosion at the start": [2.3, 90.0, 60.0, *falling(30.0, 2.0, 12), *falling(2.0, 0.1, 200)],
    "warm restarts": restarts(0.02, 0.9, 90, 4),
    "classes are added": classes(),
    "harder data": falling(2.3, 0.2, 150) + flat(1.5, 300),
    "log density": [3.0, *[3.0 - 0.04 * number for number in range(200)], *flat(-5.0, 200)],
    "log density, worse for a while": [3 - 0.04 * n for n in range(200)] + flat(1.0, 100) + flat(-5.0, 100),
    "critic": critic(),
} | {
    f"{name} {seed}": curve
    for seed in range(20)
    for name, curve in {
        "noise, batch 1": squares(1, 400, seed),
        "noise, batch 8": squares(8, 400, seed),
        "wrong labels": wrong_labels(500, seed),
        "rewards": around_zero(400, seed),
        "outliers": outliers(500, seed),
    }.items()
}  # fmt: skip

GOOD = falling(2.3, 0.3, 100, noise=0.1)
# What goes wrong, and the round at which it plainly does.
PLANTED = {
    "explodes at once": ([2.3, *[2.3 * 4**number for number in range(1, 120)]], 2),
    "explodes slowly": (GOOD + [0.3 * 1.02**number for number in range(400)], 200),
    "explodes slowly from the start": ([3e8 * 1.03**number for number in range(300)], 35),
    "stays high": (GOOD + flat(50.0, 150, noise=0.3), 101),
    "stays high after one round": ([2.3, *flat(50.0, 150, noise=0.3)], 2),
    "oscillates": ([1.4, *[75.0, 20.0] * 80], 2),
    "oscillates after learning": (GOOD + [5.0, 2.2] * 80, 105),
    "at chance after an explosion at the start": ([2.33, 100.0, 80.0, 50.0, 20.0, 8.0, *flat(2.34, 150, 0.02)], 2),
    "at chance after learning": (GOOD + flat(2.3, 150, noise=0.02), 115),
    "at chance after an explosion": (GOOD + flat(500.0, 10) + flat(2.29, 150, noise=0.02), 101),
    "falls below zero and explodes": ([3 - 0.04 * n for n in range(200)] + flat(100.0, 150, noise=0.5), 201),
    "explodes among noise": (squares(1, 100, 0) + [loss * 100 for loss in squares(1, 150, 1)], 101),
    "explodes among rewards": (around_zero(200, 0) + [300 * loss + 300 for loss in around_zero(150, 1)], 201),
    "is not a number": (GOOD + [math.nan] * 5, 101),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loss_is_never_called_diverging(name):
    assert named_at(HEALTHY[name]) == []


@pytest.mark.parametrize("name", [name for name in HEALTHY if not name[-1].isdigit()])
def test_eighths_of_rounds_are_judged_like_whole_ones(name):
    assert named_at([loss for loss in HEALTHY[name] for _ in range(8)], 0.125) == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_divergence_is_named_within_a_hundred_rounds(name):
    losses, plain_at = PLANTED[name]
    (first, *_) = named_at(losses)
    assert plain_at <= first <= plain_at + 100


@pytest.mark.parametrize("name", [name for name in PLANTED if "among" not in name])
def test_a_divergence_is_named_after_as_many_rounds_if_they_come_in_eighths(name):
    losses, _ = PLANTED[name]
    (first, *_) = named_at([loss for loss in losses for _ in range(8)], 0.125)
    assert first == pytest.approx(named_at(losses)[0], abs=10)


@given(
    st.lists(
        st.tuples(st.floats(-10, 50), st.floats(0, 2), st.integers(1, 80)), min_size=1, max_size=6
    ),
    st.integers(-60, 60),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_the_unit_of_the_loss_does_not_matter(stretches, power, chance):
    losses = [level + spread * chance.uniform(-1, 1) for level, spread, length in stretches for _ in range(length)]
    found = named_at(losses)
    event("named" if found else "not named")
    assert named_at([loss * 2.0**power for loss in losses]) == found


@pytest.mark.parametrize("unit", [1e-7, 3.0, 1e9])
def test_healthy_and_planted_losses_in_other_units(unit):
    assert not [name for name, losses in HEALTHY.items() if named_at([unit * loss for loss in losses])]
    for losses, _ in PLANTED.values():
        assert named_at([unit * loss for loss in losses])[0] == pytest.approx(named_at(losses)[0], abs=1)


def test_a_constant_added_to_positive_losses_makes_the_guard_more_patient():
    losses = GOOD + flat(2.3, 150, noise=0.02)
    assert len(named_at(losses)) == 1
    assert named_at([loss + 10 for loss in losses]) == []
    assert len(named_at([loss + 10 for loss in GOOD + flat(50.0, 150)])) == 1


# -- what it says and remembers ---------------------------------------------------------------------------------------


def test_the_warning_has_the_numbers():
    guard = Guard()
    assert feed(guard, [1.0] * 20) == []
    # The average over ten rounds needs a few to rise above the limit; from there the fifty rounds count.
    rounds = next(n for n in range(1, 100) if feed(guard, [9.0]))
    assert PATIENCE_ROUNDS <= rounds < PATIENCE_ROUNDS + AVERAGED_ROUNDS
    (text,) = feed(Guard(), [1.0] * 20 + [9.0] * 200)
    assert "was 1 at first and 1 at best, and has not recovered for 50 rounds" in text
    assert "worker 3, staleness 7, mass 1" in text


def test_a_recovery_clears_it_and_it_may_speak_again():
    guard = Guard()
    assert feed(guard, [1.0] + [0.5] * 30 + [9.0] * 30 + [0.5] * 100 + [9.0] * 30) == []
    assert len(feed(guard, [9.0] * 60)) == 1
    assert feed(guard, [9.0] * 500) == []
    assert feed(guard, [0.5] * 100) == []
    assert len(feed(guard, [9.0] * 100)) == 1


def test_a_falling_loss_gets_more_time_and_a_fallen_one_does_not():
    learned = falling(2.3, 0.01, 100)
    slowly = falling(2.29, 1.75, 80)
    assert named_at(learned + slowly + falling(1.75, 0.1, 50)) == []
    (stayed,) = named_at(learned + [2.29] * 200)
    (stopped,) = named_at(learned + slowly[:70] + [slowly[70]] * 150)
    assert 100 + PATIENCE_ROUNDS < stayed < 100 + PATIENCE_ROUNDS + 2 * AVERAGED_ROUNDS
    assert stayed + AVERAGED_ROUNDS < stopped < 100 + 70 + PATIENCE_ROUNDS + 2 * AVERAGED_ROUNDS


def test_what_the_loss_alone_does_not_show():
    """A discriminator whose opponent learns looks like a collapse; a model that never learned like a slow one."""
    assert named_at(falling(1.39, 0.2, 100) + flat(1.38, 200, noise=0.05)) != []
    assert named_at([2.3, *flat(3.5, 10), *flat(2.4, 300, noise=0.05)]) == []


def test_values_that_are_not_finite_are_reported_at_once_and_once():
    guard = Guard()
    assert len(feed(guard, [1.0, math.nan, math.inf])) == 1
    guard = Guard()
    assert guard.applied(None, math.inf, 1.0, 1.0, 0, 0) is not None
    assert guard.applied(None, 1.0, 1.0, 1.0, 0, 0) is None


def test_the_first_refused_push_is_worth_a_warning():
    guard = Guard()
    assert "worker 2" in guard.refused(2, 7, math.nan, 4)
    assert guard.refused(2, 7, math.nan, 4) is None


@pytest.mark.parametrize("after", [0, 1, 5, 60, 120])
def test_a_restored_guard_goes_on_where_it_was(after):
    losses = GOOD + flat(50.0, 150, noise=0.3)
    first, second = Guard(), Guard()
    feed(first, losses[:after])
    second.restore(json.loads(json.dumps(first.snapshot())))
    assert feed(second, losses[after:]) == feed(first, losses[after:]) != []


def test_what_a_snapshot_of_an_earlier_version_lacks_begins_afresh():
    guard = Guard()
    guard.restore({"best": "inf", "first": 0.0, "_mean": 0.0, "_known": 0.0, "_silent": True})
    assert math.isinf(guard.best)
    assert len(feed(guard, GOOD + flat(50.0, 150))) == 1
