"""Every strategy learns, on equal and on 4x-uneven machines, at the learning rate of the committed table."""

import os
import random
import re
from pathlib import Path

import pytest

from learning_trials import KINDS, TRIALS, attempt, cluster, strategy_spec, target
from paceline.core.errors import OptionError
from paceline.scenario import load
from paceline.strategies import names
from paceline.tasks import learning_rate, learning_rates

ROOT = Path(__file__).parents[2]
SEED = 0


def trials():
    """Each strategy once, on a task and machines that rotate with LAWS_SEED; the rest runs in `make soak`."""
    chance = random.Random(f"learning {os.environ.get('LAWS_SEED', '1')}")
    for name in names():
        pairs = [(task, kind) for task in TRIALS for kind in KINDS]
        chosen = chance.sample(pairs, 1)
        for task, kind in pairs:
            marks = () if (task, kind) in chosen else pytest.mark.soak
            yield pytest.param(task, name, kind, marks=marks, id=f"{task}-{name}-{kind}")


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name", "kind"), list(trials()))
def test_it_reaches_the_target(task, name, kind, leaves_nothing_behind):
    run = attempt(task, kind, strategy_spec(task, name), learning_rate(task, name), SEED)
    assert run.ended == "target", f"ended with {run.ended} at {run.summary.metrics}; {run.summary.warnings}"
    assert run.summary.target.reached_at_seconds > 0


@pytest.mark.parametrize("task", TRIALS)
def test_the_table_has_each_strategy_once_as_it_is_tried(task):
    assert list(learning_rates(task)) == [strategy_spec(task, name) for name in names()]
    assert all(rate > 0 for rate in learning_rates(task).values())


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


@pytest.mark.parametrize("task", TRIALS)
def test_the_documentation_quotes_the_table_and_the_dated_result(task):
    section = (ROOT / "docs/learning.md").read_text(encoding="utf-8").split(f"## {task}")[1].split("\n## ")[0]
    quoted = dict(re.findall(r"^\| `([^`]+)` \| (\S+) \|", section, re.MULTILINE))
    assert {spec: float(rate) for spec, rate in quoted.items()} == learning_rates(task)
    result = (ROOT / "benchmarks/results/learning_rates.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in section.splitlines() if line.startswith("| `") and line not in result] == []
