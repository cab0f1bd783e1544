"""How learning rates are tuned: made-up times by rate, seed and cluster, and what becomes of them."""

import math
import tomllib
from concurrent.futures import Future

import pytest

import tune_learning_rates as tuner
from learning_trials import Variant, variants
from paceline.strategies import names

ASP = Variant("asp", 0.9)


class Imagined:
    """A pool whose runs take as long as `times` says, by rate and, if it differs, by seed and cluster."""

    def __init__(self, times):
        self.times = times
        self.ran = []

    def submit(self, run, task, kind, variant, lr, seed, tuning):
        assert run is tuner.measure
        self.ran.append((lr, kind, seed))
        found = self.times.get(lr)
        reached = found.get((kind, seed), found.get(kind)) if isinstance(found, dict) else found
        done = Future()
        done.set_result(
            tuner.Row(task, variant.spec, variant.momentum, kind, lr, seed, tuning, reached, 1.0, 1, 0.0, 0.0)
        )
        return done


def search(times):
    pool = Imagined(times)
    return tuner.search("digits", ASP, (0, 1, 2), (3, 4), pool), pool


def test_a_rate_that_is_slow_in_one_run_may_still_win():
    """Behind tenfold on one seed, and far behind on one cluster: neither rules it out."""
    late = {"equal": 1.0, "uneven": 4.0, ("equal", 0): 10.0}
    (tuned, _), pool = search({0.05: 3.0, 0.1: 3.0, 0.2: late, 0.4: 9.0})
    assert tuned.lr == 0.2
    assert tuned.score == pytest.approx(2.0)
    assert len([run for run in pool.ran if run[0] == 0.2 and run[2] < 3]) == 6


def test_a_miss_ends_the_trials_of_its_rate_alone():
    (tuned, rows), pool = search({0.05: 3.0, 0.1: 2.0, 0.2: {"equal": 1.0, "uneven": 1.0, ("uneven", 1): None}})
    assert tuned.lr == 0.1
    assert [run for run in pool.ran if run[0] == 0.2] == [
        (0.2, "equal", 0), (0.2, "uneven", 0), (0.2, "equal", 1), (0.2, "uneven", 1),
    ]  # fmt: skip
    assert [(row.lr, row.seed) for row in rows if not row.tuning] == [(0.1, 3), (0.1, 3), (0.1, 4), (0.1, 4)]


def test_the_grid_is_extended_while_the_best_lies_on_its_edge():
    (tuned, rows), _ = search({0.05: 9.0, 0.1: 8.0, 0.2: 7.0, 0.4: 6.0, 0.8: 5.0, 1.6: 5.5})
    assert tuned.lr == 0.8
    assert {row.lr for row in rows} == {0.05, 0.1, 0.2, 0.4, 0.8, 1.6}


def test_the_grid_is_extended_while_the_rate_that_a_tie_takes_lies_on_its_edge():
    (tuned, rows), _ = search({0.0125: 9.0, 0.025: 5.0, 0.05: 5.1, 0.1: 5.0, 0.2: None})
    assert tuned.lr == 0.025
    assert min(row.lr for row in rows) == 0.0125


def test_who_learns_at_no_rate_is_not_tuned_for_ever():
    (tuned, rows), _ = search({})
    assert tuned.lr is None
    assert math.isinf(tuned.score)
    assert min(row.lr for row in rows) == pytest.approx(0.1 * 2.0**tuner.SMALLEST)


@pytest.mark.parametrize("name", names())
def test_every_strategy_is_tried_with_and_without_momentum(name):
    found = variants("digits", name)
    assert {variant.momentum for variant in found} == {0.9, 0.0}
    whole = [variant for variant in found if "whole_steps=true" in variant.spec]
    assert len(whole) == (name in ("asp", "ssp", "dssp"))
    assert [variant.momentum for variant in variants("linreg", name)] == [None]


def test_a_table_has_the_best_form_at_the_tasks_own_momentum_and_another_those_without():
    def entry(spec, momentum, score, lr):
        return tuner.Tuned(Variant(spec, momentum), score, lr, [])

    asp = [entry("asp", 0.0, 2.0, 0.8), entry("asp:whole_steps=true", 0.9, 3.0, 0.05), entry("asp", 0.9, 4.0, 0.1)]
    never = [entry("bsp", 0.9, 1.0, 0.4), entry("bsp", 0.0, math.inf, None)]
    found = tuner.tables(tuner.Findings({"digits": {"bsp": never, "asp": asp}}))
    assert found == {"digits": {"bsp": 0.4, "asp:whole_steps=true": 0.05}, "digits_without_momentum": {"asp": 0.8}}
    written = tomllib.loads(tuner.table_text(tuner.merged(found, ["bsp", "asp"])))
    assert written["digits"]["asp:whole_steps=true"] == 0.05
    assert "asp" not in written["digits"], "its earlier entry is replaced"
    assert list(written["digits"])[-1] == "balanced", "others keep theirs, in the registry's order"


def test_few_seeds_make_no_table():
    with pytest.raises(SystemExit):
        tuner.main(["--seeds", "1"])
