"""A scenario fitted to pushes gives back the cluster that the pushes were drawn from."""

import math
import random
from pathlib import Path

import pytest

from paceline.core.errors import OptionError
from paceline.core.scenario import file as scenarios
from paceline.core.scenario.fitting import FEWEST, WARM_UP, Timed, fit, scenario_text, speed


def drawn(per_sample: float, sigma: float, count: int = 4000, samples: int = 32, seed: int = 1) -> list[Timed]:
    chance = random.Random(seed)
    return [
        Timed(samples, samples * per_sample * math.exp(sigma * chance.gauss(0, 1)), 0.004, 800, 900)
        for _ in range(count)
    ]


@pytest.mark.parametrize(("per_sample", "sigma"), [(0.001, 0.05), (0.02, 0.4), (3.0, 0.0)])
def test_the_parameters_of_drawn_times_are_found(per_sample: float, sigma: float) -> None:
    found = fit(drawn(per_sample, sigma), "worker 0")
    assert found.seconds_per_sample == pytest.approx(per_sample, rel=0.03)
    assert found.sigma == pytest.approx(sigma, rel=0.05, abs=1e-12)
    assert (found.samples, found.transfer_s, found.bytes_up, found.bytes_down) == (32, 0.004, 800, 900)


def test_first_pushes_and_short_ones_do_not_count() -> None:
    pushes = [Timed(32, 100.0, 1.0, 0, 0)] * WARM_UP + drawn(0.01, 0.1, 200)
    with_short = [part for push in pushes for part in (push, push)] + [Timed(5, 100.0, 1.0, 0, 0)] * 50
    for given in (pushes, pushes[:WARM_UP] + with_short[2 * WARM_UP :]):
        assert fit(given, "worker 0").seconds_per_sample == pytest.approx(0.01, rel=0.05)
        assert fit(given, "worker 0").sigma < 0.2


def test_too_few_pushes_are_refused_with_the_number_that_is_needed() -> None:
    assert fit(drawn(0.01, 0.1, WARM_UP + FEWEST), "worker 1").pushes == FEWEST
    with pytest.raises(OptionError, match=r"worker 1 made 7 pushes .* and 8 are needed: give more --seconds"):
        fit(drawn(0.01, 0.1, WARM_UP + FEWEST - 1), "worker 1")
    with pytest.raises(OptionError, match="made 0 pushes"):
        fit([], "worker 0")


def test_what_is_written_is_a_scenario_of_these_workers() -> None:
    alone = fit(drawn(0.002, 0.1), "worker 0")
    together = {n: fit(drawn(0.002 * slower, 0.2, seed=n), f"worker {n}") for n, slower in enumerate((2.0, 4.0))}
    text = scenario_text(alone, together, ["Measured by hand."])
    cluster = scenarios.parse(text, "mine", Path())
    assert text.startswith("# Measured by hand.\n# The model is 800 bytes up with each push and 900 bytes down")
    assert cluster.compute.seconds_per_sample == pytest.approx(0.002, rel=0.03)
    assert cluster.network.latency_ms == pytest.approx(2.0)
    assert [worker.speed for worker in cluster.workers] == pytest.approx([0.5, 0.25], rel=0.05)
    assert [speed(alone, each) for each in together.values()] == pytest.approx([0.5, 0.25], rel=0.05)
    assert scenarios.parse(scenario_text(alone, {}, []), "one", Path()).count == 1
