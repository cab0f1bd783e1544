"""Workers that fall silent are taken out and come back, on a clock that only the test moves."""

import pytest
from hand_driven import BATCH, HandDrivenRun

from paceline.core.events import Joined, Left
from paceline.core.quantities import Patience
from paceline.server.departures import MOST_REFUSED, RESPAWNS
from paceline.server.liveness import ALL_AWAY
from paceline.transport.messages import Cancelled, CollectiveCall, Ended, Note, Ready, Work


def trained(rounds=2, workers=3, timeout="5..20", **settings):
    """A run whose workers have made some steps of 0.1 s."""
    hand = HandDrivenRun(workers=workers, worker_timeout=Patience.parse(timeout), **settings)
    for worker in range(workers):
        hand.prepares(worker)
    for worker in range(workers):
        hand.says(worker, ready())
    for _ in range(rounds):
        hand.engine.advance(hand.engine.time + 0.1)
        for worker in range(workers):
            hand.pushes(worker)
    return hand


def ready(phase=0, size=200):
    return Ready(phase, size, BATCH, 1, "epoch", 1)


def passes(hand, seconds, *busy):
    """Time passes, and these workers push whenever they have work."""
    until = hand.engine.time + seconds
    while hand.engine.time < until:
        hand.engine.advance(hand.engine.time + 0.1)
        for worker in busy:
            if hand.run.workers.records[worker].ticket:
                hand.pushes(worker)


def left(hand, cause="timeout"):
    return [event.worker for event in hand.events if isinstance(event, Left) and event.cause == cause]


def warnings(hand):
    return [line.data["text"] for line in hand.observed("warning")]


def about(hand, worker):
    return [text for text in warnings(hand) if f"worker {worker} " in text]


def test_a_silent_worker_is_named_then_taken_out_and_its_samples_go_to_the_others():
    hand = trained(own_processes=True)
    had = hand.run.workers.records[1].allotments[0].indices.tolist()
    passes(hand, 3.0, 0, 2)
    assert about(hand, 1) == []
    passes(hand, 1.9, 0, 2)
    silent = "worker 1 has sent nothing for {} s (its longest step took 0.1 s): the others go on without it{}"
    assert about(hand, 1) == [silent.format(3.12, " in 1.88 s")]
    assert left(hand) == []
    passes(hand, 0.3, 0, 2)
    assert left(hand) == [1]
    assert about(hand, 1) == [silent.format(3.12, " in 1.88 s"), silent.format(5, "")]
    again = [work.allotment.indices.tolist() for worker in (0, 2) for work in works(hand, worker)]
    assert sum(had[0] in indices for indices in again) == 1
    assert hand.run.coordinator.version > 2  # bsp goes on


def works(hand, worker):
    return [message for message in hand.engine.sent[worker] if isinstance(message, Work)]


def test_one_that_is_back_is_told_so_and_its_late_push_is_dropped():
    hand = trained()
    ticket = hand.last(1, Work).ticket
    passes(hand, 6, 0, 2)
    assert hand.last(1, Cancelled) == Cancelled(ticket, again=True)
    used = hand.run.coordinator.used
    hand.pushes(1, ticket=ticket)
    assert hand.run.coordinator.used == used
    assert [line.worker for line in hand.observed("dropped")] == [1]
    assert hand.events[-1] != Joined(hand.engine.time, 1, BATCH)
    hand.says(1, ready())
    passes(hand, 1, 0, 1, 2)
    assert hand.run.workers.records[1].present
    assert any(text.startswith("worker 1 is back after ") for text in warnings(hand))


def test_one_that_is_heard_after_it_was_named_stays_and_is_named_again_only_after_a_longer_silence():
    hand = trained(rounds=9, own_processes=True)
    passes(hand, 4.0, 0, 2)
    assert len(about(hand, 1)) == 1
    hand.pushes(1)  # after 4 s: twice as long is allowed from here on
    passes(hand, 4.8, 0, 2)
    hand.pushes(1)
    assert len(about(hand, 1)) == 1
    passes(hand, 6.5, 0, 2)
    assert len(about(hand, 1)) == 2
    assert left(hand) == []


def test_all_samples_are_used_once_when_a_worker_comes_back():
    hand = trained()
    passes(hand, 6, 0, 2)
    hand.says(1, ready())
    passes(hand, 60, 0, 1, 2)
    assert (hand.run.coordinator.used, hand.run.coordinator.lost) == (200, 0)
    assert hand.over_for(1) is not None


@pytest.mark.parametrize("excuse", ["debugger", "messages", "pushes"])
def test_a_worker_that_is_debugged_or_heard_is_not_silent(excuse):
    hand = trained()
    if excuse == "debugger":
        hand.run.departures.liveness.debugging(1, True)
    for _ in range(10):
        passes(hand, 3, 0, 2)
        if excuse == "messages":
            hand.says(1, Note("x", 1.0))
        elif excuse == "pushes":
            hand.pushes(1)
    assert left(hand) == []
    if excuse == "debugger":
        hand.run.departures.liveness.debugging(1, False)
        passes(hand, 6, 0, 2)
        assert left(hand) == [1]


def test_without_a_timeout_nobody_is_taken_out():
    hand = HandDrivenRun(workers=2, worker_timeout=None).train()
    hand.pushes(0)
    hand.pushes(1)
    hand.pushes(0)
    hand.engine.advance(1e6)
    assert left(hand) == []


def test_workers_that_wait_for_the_slowest_are_not_silent():
    hand = trained(timeout="5..20")
    for worker in (0, 2):
        hand.pushes(worker)
    hand.engine.advance(hand.engine.time + 4.9)
    hand.pushes(1)
    hand.engine.advance(hand.engine.time + 4.0)
    assert left(hand) == []


def test_nobody_is_taken_out_while_all_are_silent_and_that_is_said():
    hand = trained(own_processes=True)
    hand.engine.advance(1e5)
    assert left(hand) == []
    (said,) = warnings(hand)
    assert said == "no worker (0, 1, 2) has sent anything for 3.12 s: while all are silent none is taken out"
    hand.pushes(0)  # one is back: now the others are overdue
    hand.engine.advance(hand.engine.time + 1.1)
    assert left(hand) == [1, 2]


def test_a_worker_without_a_step_has_until_the_ceiling():
    hand = trained(rounds=0)
    for worker in (0, 2):
        hand.pushes(worker)
    hand.engine.advance(19.9)
    assert left(hand) == []
    hand.engine.advance(20.1)
    assert left(hand) == [1]


def test_time_in_which_the_server_stood_still_does_not_count():
    hand = trained(own_processes=True)
    passes(hand, 4, 0, 2)
    hand.engine.time += 100.0  # stopped: the next look is far too late
    hand.engine.advance(hand.engine.time)
    assert left(hand) == []
    passes(hand, 6, 0, 2)
    assert left(hand) == [1]


def test_a_worker_that_does_not_come_to_the_next_loop_has_until_the_ceiling():
    hand = HandDrivenRun(workers=2, worker_timeout=Patience(5, 20)).train()
    while hand.run.phases.running:
        for worker in (0, 1):
            hand.pushes(worker)
    hand.is_ready(0, phase=1)
    hand.engine.advance(19.9)
    assert not hand.run.phases.running
    (named,) = about(hand, 1)
    assert "has sent nothing for 12.5 s" in named
    assert named.endswith("and the others wait for it: they go on without it in 7.5 s")
    hand.engine.advance(20.5)
    assert hand.run.phases.running
    assert sorted(hand.run.workers.in_phase) == [0]
    hand.is_ready(1, phase=1)
    assert sorted(hand.run.workers.in_phase) == [0, 1]


def test_a_worker_that_others_wait_for_in_a_collective_call_has_until_the_ceiling():
    hand = HandDrivenRun(workers=2, worker_timeout=Patience(5, 20)).train()
    while hand.run.phases.running:
        for worker in (0, 1):
            hand.pushes(worker)
    hand.says(0, CollectiveCall(0, "barrier", b"", []))
    hand.engine.advance(25.0)
    assert any("worker 1 has sent nothing" in text for text in warnings(hand))


@pytest.mark.parametrize("others_end", [True, False])
def test_a_script_that_does_not_end_after_its_loop_is_ended(others_end):
    hand = HandDrivenRun(workers=2, worker_timeout=Patience(5, 20), own_processes=True).train()
    while hand.run.phases.running:
        for worker in (0, 1):
            hand.pushes(worker)
    if others_end:
        hand.ends(0)
    hand.engine.advance(20 * (1 if others_end else ALL_AWAY) - 1)
    assert not hand.run.finished
    hand.engine.advance(20 * (1 if others_end else ALL_AWAY) + 6)
    assert (hand.run.finished, hand.run.cause) == (True, "done")
    assert hand.run.departures.liveness.overdue == ([1] if others_end else [0, 1])
    assert any("had not ended" in text for text in warnings(hand))
    assert hand.run.result().model is not None


def test_a_silent_worker_is_killed_when_the_run_is_over():
    hand = trained(max_versions=9)
    passes(hand, 7, 0, 2)
    assert hand.run.cause == "limit"
    for worker in (0, 2):
        hand.ends(worker)
    assert (1, "kill") in hand.engine.controlled
    assert hand.run.finished


# -- processes that end in the middle ----------------------------------------------------------------------------------


def test_a_process_that_ends_with_0_in_its_loop_is_said_and_counts_as_a_crash():
    hand = HandDrivenRun().train()
    hand.exits(1, 0)
    assert left(hand, "crash") == [1]
    (text,) = warnings(hand)
    assert text.startswith("worker 1 ended in the middle of its loop (exit code 0) at 0 s; the others go on")


def test_sys_exit_in_a_loop_is_said_too_and_is_meant():
    hand = HandDrivenRun(respawn=True).train()
    hand.leaves_the_loop(1)
    hand.says(1, Ended(in_loop=True))
    hand.exits(1)
    (text,) = warnings(hand)
    assert text == "the script of worker 1 ended by sys.exit() in the middle of its loop; the others go on"
    assert left(hand, "crash") == []
    assert hand.engine.started[-1] != (1, 1), "nobody brings back who left"


def test_sys_exit_after_the_loop_is_an_ordinary_end():
    hand = HandDrivenRun().train()
    while hand.run.phases.running:
        for worker in (0, 1):
            hand.pushes(worker)
    for worker in (0, 1):
        hand.says(worker, Ended(in_loop=True))
        hand.exits(worker)
    assert (hand.run.cause, warnings(hand)) == ("done", [])


def test_a_process_that_dies_of_a_sample_is_no_vain_one():
    hand = HandDrivenRun(workers=2, respawn=True).train()
    hand.pushes(0)
    hand.pushes(1)
    for _ in range(2 * RESPAWNS):
        hand.exits(1, -9)
        if hand.run.finished or dict(hand.engine.started)[1] == hand.incarnations[1]:
            break
        hand.comes(1)
        hand.prepares(1)
        hand.is_ready(1)
    assert not any("it is not started again" in text for text in warnings(hand))
    assert hand.observed("lost")[0].data["samples"] == 1
    assert hand.run.coordinator.lost == 1


# -- gradients that are never finite -----------------------------------------------------------------------------------


def test_a_worker_whose_gradients_are_never_finite_is_set_aside():
    hand = trained(rounds=1, timeout="500")
    for number in range(MOST_REFUSED):
        assert hand.run.workers.incarnation(1) is not None, number
        for worker in (0, 2):
            hand.pushes(worker)
        hand.pushes(1, float("nan"))
    hand.engine.advance(hand.engine.time)
    assert left(hand, "leave") == [1]
    assert (1, "hang_up") in hand.engine.controlled
    assert f"worker 1 is set aside: {MOST_REFUSED} gradients in a row were not finite" in warnings(hand)


def test_a_gradient_now_and_then_that_is_not_finite_is_no_reason():
    hand = trained(rounds=1, timeout="500")
    for number in range(25):
        for worker in (0, 1, 2):
            hand.pushes(worker, float("nan") if worker == 1 and number % 5 else 1.0)
    assert left(hand, "leave") == []


def test_where_nobodys_gradients_are_finite_nobody_is_set_aside():
    hand = trained(rounds=1, timeout="500")
    for _ in range(MOST_REFUSED - 1):
        for worker in (0, 1, 2):
            if hand.run.workers.records[worker].ticket:
                hand.pushes(worker, float("nan"))
    hand.engine.advance(hand.engine.time)
    assert left(hand, "leave") == []
