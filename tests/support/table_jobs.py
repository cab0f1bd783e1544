"""Scripts on tables that check what they read."""

import random
import time

import numpy as np

import paceline


class Counters:
    """One counter per worker: at iteration `it` each is at least `it - s` and the own one exactly `it`."""

    def __init__(self, iterations, staleness=None, delay_s=0.0, work=10, **table):
        self.iterations, self.staleness, self.delay_s, self.work, self.table = (
            iterations,
            staleness,
            delay_s,
            work,
            table,
        )

    def __call__(self):
        session = paceline.init()
        counters = session.table("counters", session.workers, 1, dtype="int64", staleness=self.staleness, **self.table)
        chance = random.Random(session.worker)
        for it in range(self.iterations):
            seen = counters.get()[:, 0]
            assert seen.min() >= it - counters.bound, f"worker {session.worker} at {it} sees {seen}"
            assert seen[session.worker] == it, f"worker {session.worker} at {it} sees its own as {seen}"
            counters.inc([session.worker], np.ones((1, 1), dtype=np.int64))
            if self.delay_s:
                time.sleep(chance.random() * self.delay_s)
            session.clock(work=self.work)
        session.barrier()
        assert (counters.get() == self.iterations).all(), counters.get()
