"""When workers of balanced rounds count as late: by arithmetic, and asked through the strategy."""

import heapq

import pytest

from paceline import strategies
from paceline.core.actions import Cancel, Grant, SetTimer
from paceline.core.events import Joined, Pushed, TimerFired
from paceline.strategies.balanced_lateness import Lateness


def begun(span):
    lateness = Lateness()
    lateness.begin(10.0, span)
    return lateness


def test_a_worker_is_late_by_a_margin_after_it_should_have_answered():
    lateness = begun(2.0)
    lateness.due[1] = 11.5
    lateness.some_are_done(12.0, half=True)
    assert lateness.late_at(1, 0.3) == pytest.approx(11.8)
    assert lateness.late_at(2, 0.3) == pytest.approx(12.3), "due at the end of the round"


def test_what_the_first_and_half_of_them_took_longer_counts_for_all():
    lateness = begun(2.0)
    lateness.some_are_done(13.0, half=False)
    assert lateness.late_at(1, 2.0) == pytest.approx(16.0)
    lateness.some_are_done(13.5, half=False)
    assert lateness.stretch == 1.5, "by the first"
    lateness.some_are_done(14.0, half=True)
    assert lateness.late_at(1, 2.0) == pytest.approx(18.0)
    lateness.some_are_done(19.0, half=True)
    assert lateness.stretch == 2.0, "settled"


def test_without_a_prediction_the_first_to_be_done_is_the_measure():
    lateness = begun(0.0)
    lateness.due.update({1: 10.5, 2: 15.0})
    lateness.some_are_done(13.0, half=False)
    assert (lateness.span, lateness.stretch) == (3.0, 1.0)
    assert [lateness.late_at(worker, 1.0) for worker in (1, 2)] == [14.0, 16.0]


def test_times_that_no_clock_tells_apart_say_nothing():
    lateness = begun(0.0)
    lateness.some_are_done(10.0, half=True)
    assert (lateness.span, lateness.stretch, lateness.settled) == (0.0, 0.0, True)


class Cluster:
    """Workers that compute a sample in a second; who is silent gets grants and answers nothing."""

    def __init__(self, workers, silent):
        self.strategy, self.silent = strategies.build("balanced", 0), silent
        self.coming, self.timer, self.pushes, self.found = [], None, {}, []
        for worker in range(workers):
            self._do(0.0, Joined(0.0, worker, 16))

    def _do(self, now, event):
        for action in self.strategy.handle(event):
            self.found.append((now, action))
            if isinstance(action, Grant) and action.worker not in self.silent:
                heapq.heappush(self.coming, (now + action.work, action.worker, action.work, action.extends))
            if isinstance(action, SetTimer):
                self.timer = action.at

    def run(self, until):
        while self.coming or self.timer is not None:
            now = min(self.coming[0][0] if self.coming else until, self.timer if self.timer is not None else until)
            if now >= until:
                break
            if now == self.timer:
                self.timer = None
                self._do(now, TimerFired(now, "late"))
                continue
            _, worker, work, extends = heapq.heappop(self.coming)
            push = extends or len(self.pushes) + 1
            self.pushes[push] = self.pushes.get(push, 0) + work
            self._do(now, Pushed(now, worker, push, 1, 0, self.pushes[push], work, 0.0, 0.0, 0, 0))
        return self.found

    @property
    def versions(self):
        return self.strategy.state.completed


@pytest.mark.parametrize("silent", [{3}, {0, 3}, {0, 1, 2, 3, 4}, {*range(1, 8)}], ids=len)
def test_who_is_silent_from_the_first_grant_on_is_late_though_nobody_could_predict_the_round(silent):
    cluster = Cluster(8, silent)
    alone = 16 * 8 / (8 - len(silent))
    found = cluster.run(until=2.3 * alone)
    assert {action.worker for _, action in found if isinstance(action, Cancel)} == silent
    assert cluster.versions >= 1
    assert max(at for at, action in found if isinstance(action, Cancel)) <= 2 * alone


def test_samples_of_a_late_worker_do_not_wait_for_others_who_still_compute():
    strategy = strategies.build("balanced", 0)
    for worker in range(4):
        strategy.handle(Joined(0.0, worker, 8))
    state = strategy.state
    state.asked, state.remaining, state.completed = {2: 8, 3: 8}, 0, 5
    state.lateness.begin(0.0, 8.0)
    state.end, state.gathering, state.lateness.due = 8.0, False, {2: 8.0, 3: 11.0}
    state.paces.monitor.nodes.clear()
    for worker in range(4):
        state.paces.monitor.record(worker, 8, 8, 8.0, 0.0)
        state.speeds[worker] = 1.0
    state.speed = 4.0
    late_at = state.lateness.late_at(2, 8.0 / 3)
    granted = [action.worker for action in strategy.handle(TimerFired(late_at, "late")) if isinstance(action, Grant)]
    assert granted[:2] == [0, 1]
    assert strategy.state.asked.keys() == {0, 1, 3}
