"""Cover: late pushes of workers that are hardly ever among the first k are kept and merged, not cancelled.

With `sampling="shard"` nobody else has a worker's rows: if it is lastingly slow, fastest k never uses them, and the
error ends at a floor. Ours, not published. The rule:

- A worker's debt is the pushes that would be its fair share (k / n a round) less those that it brought. It is forgotten
  over MEMORY pushes, so that chance alone makes no debt, and is never below 0.
- From OWED pushes of debt on the worker is covered: its work is not cancelled. It computes on while the others go on,
  does not count towards k, and its push goes into the first round that ends after its arrival.
- That push has the share of the step that the worker owes, at least an ordinary one. Late pushes together are at most
  half of a step: a push from an old version that is more than half of a step makes training diverge (measured: at two
  thirds the error rose a hundredfold).
- A covered worker that is among the first k of the round its work began in is covered no longer.

So a present worker brings at least 1 - OWED / MEMORY of its fair share of pushes, or is covered. While it is, one of
its pushes is merged at least every `rounds_between` rounds plus the duration of one push. Its share of the steps is the
fair one, 1 / n, while a push takes it up to n / 2 rounds, and 1 / (2 rounds) if it takes longer; covered workers whose
pushes come in the same round share its half. Waiting for the worker instead takes its time for everybody: on the
publication's regression, where 10 of 50 were 20 times slower, training had not come below an error of 8 when it was at
0.006 with late pushes.
"""

from collections.abc import Iterable, Mapping
from math import log

import msgspec

from paceline.core.events import Left, Pushed

OWED = 20.0  # pushes; chance alone makes about 5
MEMORY = 50.0  # pushes
MOST_OF_A_STEP = 0.5


def rounds_between(k: int, workers: int) -> float:
    """Return after how many rounds without any push of it a worker is covered for certain."""
    share = k / workers
    return log(1 - OWED / MEMORY) / log(1 - share / MEMORY)


class Cover(msgspec.Struct):
    """Who owes how many pushes, who is covered, and what of them is still computed or waits for the end of a round."""

    debt: dict[int, float] = {}
    covered: set[int] = set()
    running: set[int] = set()  # computing on an older version
    arrived: dict[int, Pushed] = {}  # late pushes by worker

    def takes(self, event: Pushed) -> bool:
        """Keep the push if it is a late one."""
        if event.worker not in self.running:
            return False
        self.running.remove(event.worker)
        self.arrived[event.worker] = event
        return True

    def leave(self, event: Left) -> Pushed | None:
        """Forget the worker; return its late push that still waits. An idle worker keeps its debt."""
        self.running.discard(event.worker)
        if event.cause != "idle":
            self.debt.pop(event.worker, None)
            self.covered.discard(event.worker)
        return self.arrived.pop(event.worker, None)

    @property
    def late(self) -> int:
        """How many present workers cannot be on time in this round."""
        return len(self.running) + len(self.arrived)

    def shares(self, on_time: Iterable[Pushed]) -> dict[int, float]:
        """Return by worker what its late push is of the step: what it owes, and all together no more than half."""
        late = [worker for worker, push in self.arrived.items() if push.samples]
        timely = sum(push.samples > 0 for push in on_time)
        if not timely:
            return dict.fromkeys(late, 1 / len(late)) if late else {}
        owed = {worker: max(1.0, self.debt.get(worker, 0.0)) / timely for worker in late}
        scale = min(1.0, MOST_OF_A_STEP / sum(owed.values())) if owed else 1.0
        return {worker: share * scale for worker, share in owed.items()}

    def end_round(self, on_time: Mapping[int, Pushed], present: Iterable[int], workers: int) -> list[int]:
        """Count what each brought and owes; return those whose work goes on for the first time since they were on time.

        Afterwards `running` are the workers that are neither cancelled nor granted anything.
        """
        late, share = self.shares(on_time.values()), len(on_time) / workers
        in_step = 1 - sum(late.values())  # of a step that each push in time shares with the others
        waiting, self.arrived = self.arrived, {}
        begun = []
        for worker in present:
            push = on_time.get(worker)
            brought = late.get(worker, 0.0) * len(on_time) if push is None else in_step * (push.samples > 0)
            debt = self.debt.get(worker, 0.0) * (1 - share / MEMORY) + share - brought
            self.debt[worker] = max(0.0, debt)
            if push is not None:
                self.covered.discard(worker)
            elif worker not in waiting and (debt >= OWED or worker in self.covered):
                if worker not in self.covered:
                    begun.append(worker)
                self.covered.add(worker)
                self.running.add(worker)
        return begun
