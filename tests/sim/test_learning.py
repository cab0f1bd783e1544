"""Every strategy learns, on equal and on 4x-uneven machines, at the learning rate of the committed table."""

import json
from pathlib import Path

import pytest

import tune_learning_rates
from learning_trials import KINDS, TRIALS, Variant, attempt, cluster, strategy_spec, target, variants
from paceline.core.errors import OptionError
from paceline.scenario import load
from paceline.strategies import names
from paceline.tasks import learning_rate, learning_rates

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
SEED = 0


def tuned():
    """Every entry of the committed table: task, strategy as it was tuned, rate and momentum."""
    for task, trial in TRIALS.items():
        for momentum in trial.momenta:
            key = task + tune_learning_rates.WITHOUT * (momentum == 0.0)
            for spec, rate in learning_rates(key).items():
                yield task, spec, rate, momentum


def trials():
    """Each strategy once, every pair of task and machines in turn; the rest runs in `make soak`."""
    for place, name in enumerate(names()):
        pairs = [(entry, kind) for entry in tuned() if entry[1].partition(":")[0] == name for kind in KINDS]
        chosen = pairs[(place + 2) % len(pairs)]
        for entry, kind in pairs:
            task, spec, _, momentum = entry
            marks = () if (entry, kind) == chosen else pytest.mark.soak
            yield pytest.param(*entry, kind, marks=marks, id=f"{task}-{spec}-{momentum}-{kind}")


@pytest.mark.slow
@pytest.mark.parametrize(("task", "spec", "rate", "momentum", "kind"), list(trials()))
def test_it_reaches_the_target(task, spec, rate, momentum, kind):
    run = attempt(task, kind, spec, rate, SEED, momentum=momentum)
    assert run.ended == "target", f"ended with {run.ended} at {run.summary.metrics}; {run.summary.warnings}"
    assert run.summary.target.reached_at_seconds > 0


@pytest.mark.parametrize("task", TRIALS)
def test_the_table_has_each_strategy_once_as_it_is_tried(task):
    specs = list(learning_rates(task))
    assert [spec.partition(":")[0] for spec in specs] == names()
    own = TRIALS[task].momenta[0]
    assert all(Variant(spec, own) in variants(task, spec.partition(":")[0]) for spec in specs)
    assert all(rate > 0 for _, _, rate, _ in tuned())


def test_a_rate_is_found_by_the_strategys_name_whatever_its_options():
    tuned = learning_rates("digits")[strategy_spec("digits", "fastest_k")]
    assert learning_rate("digits", "fastest_k") == learning_rate("digits", "fastest_k:k=3") == tuned


def test_a_strategy_or_task_without_a_rate_is_named_with_the_way_to_one():
    with pytest.raises(OptionError, match=r"'assp' on task 'digits' \(tuned: bsp, asp, .*\); give --set lr=VALUE"):
        learning_rate("digits", "assp:staleness=3")
    with pytest.raises(OptionError, match=r"'bsp' on task 'shakespeare' \(tuned: none\)"):
        learning_rate("shakespeare", "bsp")


def test_the_targets_are_those_promised():
    assert target("digits") == "accuracy>=0.93"
    without_learning = attempt("linreg", "equal", "bsp", lr=0.0, seed=SEED, epochs=1)
    first_error = without_learning.summary.metrics["error"]
    assert float(target("linreg").removeprefix("error<=")) == pytest.approx(1e-4 * first_error, rel=1e-12)


def test_the_clusters_differ_in_speed_alone():
    for task in TRIALS:
        equal, uneven = (cluster(task, kind) for kind in KINDS)
        assert equal.count == uneven.count
        assert {worker.speed for worker in equal.workers} == {1.0}
        assert {worker.speed for worker in uneven.workers} == {1.0, 0.5, 0.25}
        assert (equal.compute, equal.network, equal.seed) == (uneven.compute, uneven.network, uneven.seed)
    assert cluster("digits", "uneven") == load("uneven8")


def test_the_table_is_that_of_the_dated_result():
    rows = tune_learning_rates.read_rows(json.loads((RESULTS / "learning_rates.json").read_text())["rows"])
    fresh = {(row.task, row.strategy, row.momentum): row.lr for row in rows if not row.tuning}
    assert {(task, spec, momentum): rate for task, spec, rate, momentum in tuned()}.items() <= fresh.items()
