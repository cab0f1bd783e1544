"""Every registered strategy keeps the laws on any cluster, whatever befalls it.

A strategy is tested by being registered. The clusters are the same every time, and with PACELINE_SOAK=1
they are twenty times as many.
"""

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laws.made_plans import plans
from paceline import laws, strategies
from paceline.laws.check import first_difference
from paceline.laws.checker import check
from paceline.laws.clusters import ClusterPlan, play
from paceline.strategies import Strategy

LAWS = Path(laws.__file__).parent
SOAK = os.environ.get("PACELINE_SOAK") == "1"
EXAMPLES = 80
DEAR = {"adaptive_k_load": 25}  # each of its runs draws a frontier twice
pytestmark = [pytest.mark.soak] if SOAK else []  # so that the long form is among what `make soak` asks for

CACHED = [
    f"ssp:cache=true,{more}" for more in ("staleness=0", "staleness=2", "patience=0.5", "staleness=inf,refresh=3")
]
VARIATIONS = {
    "asp": ["asp", "asp:whole_steps=true"],
    "ssp": ["ssp", "ssp:staleness=0", "ssp:staleness=1", "ssp:staleness=inf", *CACHED],
    "dssp": ["dssp", "dssp:lower=0,upper=3", "dssp:lower=1,upper=6", "dssp:lower=2,upper=2"],
    "adaptive_sync": ["adaptive_sync", "adaptive_sync:cap=0", "adaptive_sync:cap=2,gamma=1", "adaptive_sync:delta=0"],
    "dasp": ["dasp", "dasp:fit=merge", "dasp:fit=none", "dasp:theta=2", "dasp:theta=0,fit=merge", "dasp:relax=1,rho=1"],
    "fastest_k": ["fastest_k:k=1", "fastest_k:k=2", "fastest_k:k=4", "fastest_k:k=2,cover=true"],
    "k_async": ["k_async:k=1", "k_async:k=2", "k_async:k=5"],
    "adaptive_k": [
        "adaptive_k:burn_in=3,threshold=1",
        "adaptive_k:test=trend,window=3,burn_in=2",
        "adaptive_k:start=2,stop=3,burn_in=2,threshold=0",
        "adaptive_k:test=bound,eta=0.01,L=2,c=1,sigma2=10,s=10,error=100",
    ],
    "adaptive_k_load": [
        "adaptive_k_load:loads=1/2,test=bound,eta=0.01,L=2,c=1,sigma2=10,error=100,cover=true",
        "adaptive_k_load:window=2,burn_in=2",
        "adaptive_k_load:loads=1/2/4,test=pflug,threshold=1,burn_in=3",
    ],
    "balanced": ["balanced", "balanced:pieces=one"],
}


def specs(name: str) -> st.SearchStrategy[str]:
    return st.sampled_from(VARIATIONS.get(name, [name]))


def on_clusters(test: Callable[..., Any], examples: int) -> Callable[..., Any]:
    return settings(
        max_examples=examples * (20 if SOAK else 1),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )(test)


def of_other_chance(spec: str, plan: ClusterPlan) -> Callable[[], Strategy]:
    """The strategy that the run began with, and then ones whose own seed would have it decide otherwise."""
    seeds = iter([plan.seed])
    return lambda: strategies.build(spec, next(seeds, plan.seed + 1))


@pytest.mark.parametrize("name", strategies.names())
def test_laws(name: str) -> None:
    @given(spec=specs(name), plan=plans(), every=st.integers(1, 40))
    def holds(spec: str, plan: ClusterPlan, every: int) -> None:
        lines = play(strategies.build(spec, plan.seed), plan)
        broken = check(lines, exact_work=plan.size is None)
        assert not broken, "\n".join(map(str, broken))
        different = first_difference(lines, of_other_chance(spec, plan), every)
        assert different is None, different

    on_clusters(holds, DEAR.get(name, EXAMPLES))()


def test_the_checker_knows_neither_ledger_nor_coordinator() -> None:
    for file in ("checker.py", "account.py", "staleness_bounds.py"):
        imported: set[str] = set()
        for node in ast.walk(ast.parse((LAWS / file).read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
        ours = {name for name in imported if name.startswith("paceline.")} - {"paceline.records"}
        allowed = (
            "paceline.core.events",
            "paceline.laws",
            "paceline.core.actions",
            "paceline.records.journal",
            "paceline.records.metrics",
            "paceline.strategies",
        )
        assert not {name for name in ours if not name.startswith(allowed)}, file


def test_a_worker_that_a_round_does_not_need_is_measured_again_in_time() -> None:
    """The fast one of two does the whole batch of two samples alone as soon: the slow one still gets its turn."""
    text = "seed = 0\n[compute]\nseconds_per_sample = 0.125\n[[workers]]\nspeed = 1.0\n[[workers]]\nspeed = 0.5\n"
    assert check(play(strategies.build("balanced", 0), ClusterPlan(text, 1, 0, None, 1.0, 0.0, 60, 0))) == []
