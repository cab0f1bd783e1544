"""Samples that kill are found by halving, and nothing else is lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.ledger import MOST_KILLERS, STRIKES, make_ledger


class Cluster:
    """Workers that compute what a ledger allots them, and die of some samples."""

    def __init__(self, killers, size=200, epochs=1, workers=3, work=16, least=1):
        self.ledger = make_ledger("epoch", size, epochs, 0, workers, least=least)
        self.killers, self.workers, self.work = set(killers), workers, work
        self.has = {}
        self.used, self.lost, self.deaths = [], [], 0

    def turn(self, worker, dies=False):
        """The worker computes what it has, or is allotted something."""
        allotment = self.has.pop(worker, None)
        if allotment is None:
            found = self.ledger.allot(worker, self.work)
            if found is not None:
                assert found.samples <= max(self.work, self.ledger.least)
                self.has[worker] = found
            return
        if dies or self.killers & set(allotment.indices.tolist()):
            self.deaths += 1
            verdict = self.ledger.accuse(worker, (allotment,))
            self.lost += verdict.lost
            self.ledger.settle(0, len(verdict.lost))
        else:
            self.ledger.delivered(worker)
            self.used += allotment.indices.tolist()
            self.ledger.settle(allotment.samples)

    def run(self, chance=None, kills=0, most=5000):
        for turn in range(most):
            worker = turn % self.workers if chance is None else chance.integers(self.workers)
            dies = chance is not None and kills > 0 and worker in self.has and chance.random() < 0.1
            kills -= dies
            self.turn(int(worker), bool(dies))
            if self.ledger.finished:
                return self
        raise AssertionError("the run did not come to its end")


@settings(deadline=None)
@given(st.sets(st.integers(0, 199), max_size=MOST_KILLERS), st.integers(1, 40), st.integers(1, 5))
def test_exactly_the_killers_are_lost(killers, work, workers):
    done = Cluster(killers, work=work, workers=workers).run()
    assert sorted(done.lost) == sorted(killers)
    assert sorted(done.used) == sorted(set(range(200)) - killers)


@pytest.mark.parametrize("seed", range(20))
def test_processes_that_die_of_something_else_lose_nothing(seed):
    done = Cluster([], size=800).run(np.random.default_rng(seed), kills=10)
    assert done.lost == []
    assert sorted(done.used) == list(range(800))
    assert done.deaths > 0


def test_a_killer_costs_few_processes():
    done = Cluster([7], size=800, work=32).run()
    assert done.deaths <= 5 + 1 + STRIKES  # 32, 16, 8, 4, 2, and alone


def test_at_most_one_worker_tries_suspects_at_a_time():
    cluster = Cluster([])
    first = cluster.ledger.allot(0, 16)
    cluster.ledger.accuse(0, (first,))
    halves = cluster.ledger.allot(1, 16), cluster.ledger.allot(2, 16)
    assert [half.samples for half in halves] == [8, 16]
    assert set(halves[0].indices.tolist()) < set(first.indices.tolist())
    assert not set(halves[1].indices.tolist()) & set(first.indices.tolist())


def test_a_killer_is_tried_alone_and_once_in_the_next_epoch():
    once, twice = Cluster([7], size=1000).run(), Cluster([7], size=1000, epochs=2).run()
    assert twice.lost == [7, 7]
    assert twice.deaths == once.deaths + 1


def test_where_a_model_needs_two_samples_a_pair_is_lost():
    done = Cluster([7], least=2).run()
    assert 7 in done.lost
    assert len(done.lost) <= 3
    assert sorted(done.lost + done.used) == list(range(200))


def test_after_several_killers_nothing_is_suspected():
    cluster = Cluster(range(200))
    with pytest.raises(AssertionError, match="did not come to its end"):
        cluster.run(most=3000)
    assert len(set(cluster.lost)) == MOST_KILLERS


def test_suspects_are_in_a_snapshot():
    cluster = Cluster([])
    allotment = cluster.ledger.allot(0, 16)
    cluster.ledger.accuse(0, (allotment,))
    half = cluster.ledger.allot(1, 16)
    again = make_ledger("epoch", 200, 1, 0, 3)
    again.restore(cluster.ledger.snapshot([(1, half)]))
    found = []
    while (more := again.allot(0, 50)) is not None:
        found += more.indices.tolist()
    assert sorted(found) == list(range(200))
