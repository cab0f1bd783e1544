"""Whom a run waits for is said once, after some seconds."""

from typing import Any

import pytest
from hand_driven import HandDrivenRun

from paceline.server.waits import PATIENCE_S, SILENCE_S, Waits
from paceline.transport.messages import Ended


class Watched:
    """A run driven by hand, and what is said about it."""

    def __init__(self, **settings: Any) -> None:
        self.hand = HandDrivenRun(**settings)
        self.said: list[str] = []
        self.waits = Waits(self.hand.run, self.said.append)
        self.at = 0.0

    def after(self, seconds: float) -> list[str]:
        """What is said until so many seconds later, looked for as often as a server does."""
        before = len(self.said)
        until = self.at + seconds
        while self.at < until:
            self.at += 0.25
            self.waits.look(self.at)
        return self.said[before:]


def test_workers_that_do_not_come_to_prepare_are_named_once() -> None:
    watched = Watched(workers=3)
    watched.hand.prepares(1)
    assert watched.after(PATIENCE_S - 1) == []
    (said,) = watched.after(2)
    assert said.startswith("waiting for workers 0, 2 to call prepare(): the script imports, loads data")
    assert watched.after(10 * PATIENCE_S) == []


def test_who_is_still_missing_is_named_anew() -> None:
    watched = Watched(workers=3)
    watched.after(PATIENCE_S + 1)
    watched.hand.prepares(0)
    watched.hand.prepares(1)
    (said,) = watched.after(PATIENCE_S + 1)
    assert said.startswith("waiting for worker 2 to call prepare()")


def test_a_worker_that_does_not_come_to_the_loop_is_named() -> None:
    watched = Watched(workers=2)
    for worker in (0, 1):
        watched.hand.prepares(worker)
    assert watched.after(3 * PATIENCE_S) == []  # nobody waits: both scripts are before their loop
    watched.hand.is_ready(1)
    assert watched.after(PATIENCE_S + 1) == ["waiting for worker 0 to come to the next loop, where the others are"]


def test_an_evaluator_is_waited_for() -> None:
    watched = Watched(workers=1, own_processes=True, evaluate_every=None)
    watched.hand.run.evaluations.awaited = True
    watched.hand.prepares(0)
    watched.hand.is_ready(0)
    (said,) = watched.after(PATIENCE_S + 1)
    assert said.startswith("waiting for the evaluator to call prepare()")


def test_a_loop_in_which_nobody_pushes_names_who_computes() -> None:
    watched = Watched(workers=2)
    watched.hand.train()
    watched.hand.pushes(0)
    assert watched.after(SILENCE_S - 1) == []
    assert watched.after(2) == [f"waiting for worker 1 to push: no push came for {SILENCE_S:.0f} s"]


def test_a_push_begins_the_wait_anew() -> None:
    watched = Watched(workers=2, strategy="asp")
    watched.hand.train()
    for _ in range(3):
        assert watched.after(SILENCE_S - 1) == []
        watched.hand.pushes(0)


@pytest.mark.parametrize("ends", [True, False])
def test_a_script_that_goes_on_after_the_run_is_named(ends: bool) -> None:
    watched = Watched(workers=2, max_versions=1)
    watched.hand.train()
    for worker in (0, 1):
        watched.hand.pushes(worker)
    assert watched.hand.run.stage == "finishing"
    watched.hand.says(0, Ended())
    if ends:
        watched.hand.says(1, Ended())
    said = watched.after(PATIENCE_S + 1)
    assert said == ([] if ends else ["waiting for worker 1: the run is over, and its script still runs"])
