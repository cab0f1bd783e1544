"""How long a worker may be silent: the rule itself, over steps as workers make them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.quantities import Patience
from paceline.server.silence import ENOUGH, RETURNS, StepTimes, allowed_s, likely_s

USUAL = Patience(30.0, 600.0)
seconds = st.floats(1e-4, 1e4, allow_nan=False)
some_steps = st.lists(seconds, min_size=ENOUGH, max_size=60)


def made(steps, samples=8):
    times = StepTimes()
    for step in steps:
        times.add(step, samples)
    return times


@given(some_steps)
def test_nobody_is_overdue_before_the_floor_nor_before_twice_its_longest_step(steps):
    allowed = allowed_s(made(steps), [], 8, USUAL)
    assert allowed >= USUAL.floor
    assert allowed >= RETURNS * max(steps)


@given(some_steps)
def test_short_steps_never_get_more_than_the_ceiling(steps):
    short = [min(step, USUAL.ceiling / RETURNS) for step in steps]
    assert allowed_s(made(short), [], 8, USUAL) <= USUAL.ceiling


@given(st.floats(1e-3, USUAL.ceiling / 26), st.lists(st.floats(0.8, 1.25), min_size=ENOUGH, max_size=31))
def test_one_step_of_20_times_the_median_is_no_reason(usual, around):
    steps = [usual * share for share in around]
    assert allowed_s(made(steps), [], 8, USUAL) > 20 * sorted(steps)[len(steps) // 2]


@given(some_steps, st.floats(0.1, 10))
def test_the_rule_knows_no_unit(steps, scale):
    assert likely_s([scale * step for step in steps]) == pytest.approx(scale * likely_s(steps))


@given(some_steps, st.integers(1, 1000))
def test_a_larger_grant_gets_time_in_proportion(steps, samples):
    own = made(steps, samples=100)
    assert allowed_s(own, [], samples, USUAL) == allowed_s(own, [], 100, USUAL) * max(1.0, samples / 100)


def test_a_worker_without_a_step_has_the_ceiling_and_as_long_as_others_need():
    assert allowed_s(StepTimes(), [], 8, USUAL) is None
    assert allowed_s(StepTimes(), [made([0.1] * 5)], 8, USUAL) == USUAL.ceiling
    assert allowed_s(StepTimes(), [made([700.0] * 5)], 8, USUAL) == 26 * 700.0


def test_a_worker_that_came_back_may_be_silent_as_long_again():
    own = made([0.1] * 10)
    assert allowed_s(own, [], 8, USUAL) == USUAL.floor
    own.returned(45.0)
    assert allowed_s(own, [], 8, USUAL) == 90.0


def step_times(seed):
    """The steps of one healthy worker: some jitter, a trend, and in every other run one step of 20 times the median."""
    chance = random.Random(seed)
    usual = 10 ** chance.uniform(-3, 1.3)
    steps = [usual * chance.lognormvariate(0, 0.3) * (1 + 0.002 * number) for number in range(200)]
    if seed % 2:
        place = chance.randrange(ENOUGH + 3, len(steps))
        steps[place] = 20 * sorted(steps[:place])[place // 2]
    return steps


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_200_healthy_workers_lose_nobody(seed):
    for each in range(seed, seed + 20):
        own = made([])
        for number, step in enumerate(step_times(each)):
            allowed = allowed_s(own, [], 8, USUAL)
            assert allowed is None or step < allowed, f"worker {each}, step {number}"
            own.add(step, 8)


def test_the_check_of_healthy_workers_finds_a_rule_that_is_too_strict():
    """A rule without room for a long step would lose some of them."""
    strict = Patience(0.001, 0.002)
    lost = 0
    for each in range(20):
        own = made([])
        for step in step_times(each):
            allowed = allowed_s(own, [], 8, strict)
            lost += allowed is not None and step >= allowed
            own.add(step, 8)
    assert lost
