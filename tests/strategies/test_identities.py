"""Identities between strategies, and what holds for each of them, on random histories with joins and leaves."""

import pytest
from random_histories import SPECS, cluster_of, resumed_every

from paceline import strategies
from paceline.core.actions import Apply, Grant, Track
from paceline.core.events import Left

SEEDS = range(4)
BOUNDS = [{}, {"samples": 900}]


@pytest.mark.parametrize("options", BOUNDS, ids=["endless", "finite"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ssp:staleness=inf", "asp"),
        ("ssp:staleness=inf,whole_steps=true", "asp:whole_steps=true"),
        ("dssp:lower=0,upper=0", "ssp:staleness=0"),
        ("dssp:lower=2,upper=2", "ssp:staleness=2"),
        ("fastest_k:k=6", "bsp"),
        ("k_async:k=1", "asp"),
        ("adaptive_k:start=6,stop=6", "bsp"),
        ("adaptive_k:start=1,stop=1", "fastest_k:k=1"),
        ("adaptive_k:start=3,stop=3,test=trend", "fastest_k:k=3"),
        ("adaptive_k:start=3,stop=3,cover=true", "fastest_k:k=3,cover=true"),
        ("fastest_k:k=6,cover=true", "bsp"),
    ],
)
def test_equal_decision_for_decision(one, other, seed, options):
    first, second = (cluster_of(spec, seed, **options).run(pushes=250) for spec in (one, other))
    assert first.arrived > 80
    assert first.without_reasons() == second.without_reasons()


@pytest.mark.parametrize("options", BOUNDS, ids=["endless", "finite"])
@pytest.mark.parametrize("seed", SEEDS)
def test_ssp_without_staleness_paces_as_bsp(seed, options):
    ssp, bsp = (cluster_of(spec, seed, **options).run(pushes=300) for spec in ("ssp:staleness=0", "bsp"))
    assert ssp.grants() == bsp.grants()
    assert len(ssp.applies()) > len(bsp.applies())


@pytest.mark.parametrize("seed", [0, 1])
def test_different_bounds_differ(seed):
    """The comparisons above can fail."""
    runs = [cluster_of(s, seed).run(pushes=300).without_reasons() for s in ("bsp", "asp", "ssp", "fastest_k:k=3")]
    assert all(a != b for i, a in enumerate(runs) for b in runs[:i])


@pytest.mark.parametrize("spec", SPECS)
def test_snapshots_in_mid_run_change_nothing(spec):
    straight = cluster_of(spec, 3).run(pushes=300)
    resumed = cluster_of(spec, 3, after=resumed_every(7, spec, 3)).run(pushes=300)
    assert resumed.decisions == straight.decisions


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spec", SPECS)
def test_every_push_is_settled_and_nobody_waits_for_ever(spec, seed):
    """Data that ends: then nothing is held, nothing unallotted, and whoever is left was sent idle."""
    cluster = cluster_of(spec, seed, samples=1500)
    for worker in range(6):
        cluster.at(500.0, "join", worker)
    cluster.run()
    assert cluster.unallotted == 0
    assert cluster.held == {}
    assert not any(worker.present for worker in cluster.workers.values())
    applied = [push for apply in cluster.applies() for push in apply.pushes]
    assert len(applied) == len(set(applied)) == len(cluster.staleness)


@pytest.mark.parametrize("spec", SPECS)
def test_when_the_last_worker_leaves_everything_held_is_applied(spec):
    cluster = cluster_of(spec, 0, faults=False, refuse=0.0)
    cluster.run(pushes=203)
    for worker in range(6):
        cluster.at(cluster.now, "leave", worker)
    cluster.run()
    assert isinstance(cluster.decisions[-1].event, Left)
    assert cluster.held == {}


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "cover" not in spec])
def test_weights(spec):
    """Whole steps have mass 1; the others have each push's share of the nominal round."""
    whole = spec.split(":")[0] in ("bsp", "fastest_k", "adaptive_k", "adaptive_k_load")
    cluster = cluster_of(spec, 1, faults=False, refuse=0.0).run(pushes=300)
    for apply in cluster.applies():
        expected = [1 / len(apply.pushes)] * len(apply.pushes) if whole else [8 / 48] * len(apply.pushes)
        assert list(apply.weights) == pytest.approx(expected)
        assert apply.stock == ("whole_steps" in spec)


@pytest.mark.parametrize("spec", SPECS)
def test_refused_pushes_count_with_weight_zero(spec):
    cluster = cluster_of(spec, 1, faults=False, refuse=1.0).run(pushes=100)
    assert cluster.applies()
    assert all(weight == 0 for apply in cluster.applies() for weight in apply.weights)
    assert cluster.version == 0


@pytest.mark.parametrize("spec", SPECS)
def test_every_joiner_is_put_to_work_at_once(spec):
    cluster = cluster_of(spec, 2).run(pushes=300)
    joined = [d for d in cluster.decisions if type(d.event).__name__ == "Joined"]
    corrections = [d for d in joined if not d.actions]
    assert all([a.worker for a in d.actions if isinstance(a, Grant)] == [d.event.worker] for d in joined if d.actions)
    assert len(corrections) <= 1  # the one change of nominal work in a history
    assert len(joined) > 12


@pytest.mark.parametrize("spec", SPECS)
def test_a_change_of_nominal_work_alone_causes_nothing_but_larger_grants(spec):
    cluster = cluster_of(spec, 0, faults=False)
    cluster.run(pushes=50)
    cluster.at(cluster.now, "work", worker=0, value=16)
    cluster.run(pushes=51)
    correction = next(d for d in cluster.decisions if d.event.at > 0 and type(d.event).__name__ == "Joined")
    assert correction.actions == []
    before = len(cluster.decisions)
    cluster.run(pushes=150)
    works = {a.work for d in cluster.decisions[before:] for a in d.actions if isinstance(a, Grant) and a.worker == 0}
    assert works
    assert works <= ({2, 4, 8} if spec.startswith("adaptive_k_load") else {16})


@pytest.mark.parametrize("spec", SPECS)
def test_leaving_while_idle_changes_only_the_nominal_round(spec):
    strategy = strategies.build(spec, 0)
    cluster = cluster_of(strategy, 0, faults=False, samples=20, refuse=0.0).run()
    assert all(worker.idle for worker in cluster.workers.values())
    total = strategy.state.roster.round_samples
    assert strategy.handle(Left(cluster.now, 0, "done")) == []
    assert strategy.state.roster.round_samples == total - 8


def test_reasons_have_numbers():
    for spec in SPECS:
        for decision in cluster_of(spec, 0).run(pushes=100).decisions:
            for action in decision.actions:
                assert any(letter.isdigit() for letter in action.reason), action
                assert isinstance(action, Track | Apply | Grant) or "w" in action.reason
