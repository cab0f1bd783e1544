"""The publication's regret bound, on real ssp runs with transient stragglers; planted faults exceed it."""

import pytest
from clusters import cluster, event

from contenders import regret
from contenders.regret import Descent
from paceline.core.errors import ScriptError

WORKERS = 4
CLOCKS = 400


def stragglers(seed=1):
    """One worker after the other is four times slower for a while."""
    events = "".join(
        event("slow", 0.02 + 0.06 * turn, worker=turn % WORKERS, for_=0.04, factor=4.0) for turn in range(80)
    )
    return cluster(*[1.0] * WORKERS, events=events, jitter="lognormal:0.2", seed=seed)


@pytest.mark.parametrize(("staleness", "cache"), [(0, ""), (1, ""), (1, ",cache=true"), (4, ",cache=true")])
def test_the_losses_of_all_reads_keep_the_bound(staleness, cache):
    clocks = CLOCKS // 2
    found = regret.measure(Descent(clocks, staleness), f"ssp:staleness={staleness}{cache}", stragglers())
    assert found.pushes == WORKERS * clocks
    assert 0 < found.share <= 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_reads_that_are_staler_than_the_bound_exceed_it(staleness):
    """Workers pull every fifty clocks, whatever the others do, with the steps that belong to the bound."""
    script = Descent(CLOCKS, staleness, bounded=False)
    assert regret.measure(script, "ssp:staleness=inf,cache=true,refresh=50", stragglers()).share > 1


def test_steps_that_do_not_become_smaller_exceed_it():
    def constant(t, staleness, workers):
        del t
        return regret.step_size(1, staleness, workers)

    assert regret.measure(Descent(CLOCKS, 0, constant, bounded=False), "ssp:staleness=0", stragglers()).share > 1


def test_a_run_that_leaves_the_theorems_premise_is_refused():
    with pytest.raises(ScriptError, match="not a bound"):
        regret.measure(Descent(CLOCKS, 0, lambda *_: 1.0), "ssp:staleness=0", stragglers())
