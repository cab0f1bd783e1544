"""Blame: who was waited for and why, by hand."""

import pytest
from journals import decision, header, joined, observed, pushed

from paceline.core.actions import Apply, Cancel, Grant
from paceline.core.events import Applied, Left, TimerFired
from paceline.records import wait_attribution as blame
from paceline.records.journal import Line, Restored
from paceline.records.metrics import fold


def round_of(start: float, push: int, compute_s: float, transfer_s: float, samples: int = 8) -> list[Line]:
    """w0 pushes after 1 s; w1 after its two times, which lets both go on."""
    end = start + compute_s + transfer_s
    return [
        decision(pushed(start + 1.0, 0, push, compute_s=1.0)),
        decision(
            pushed(end, 1, push + 1, compute_s=compute_s, transfer_s=transfer_s, samples=samples),
            Apply((push, push + 1), (0.5, 0.5), "all"),
            Grant(0, 8, 2, "go"),
            Grant(1, 8, 2, "go"),
        ),
    ]


def start() -> list[Line]:
    return [header(), joined(0.0, 0), joined(0.0, 1)]


def test_blame_goes_to_the_worker_whose_push_let_the_grant_go() -> None:
    rows = blame.fold(start() + round_of(0.0, 1, 4.0, 0.5)).waited_for()
    assert rows == [blame.Waited(0, 1, "compute", 3.5)]


def test_the_cause_is_what_exceeds_its_own_median_most() -> None:
    usual = start() + round_of(0.0, 1, 4.0, 0.5) + round_of(4.5, 3, 4.0, 0.5)
    slow_link = blame.fold(usual + round_of(9.0, 5, 4.1, 2.0)).waited_for()
    assert blame.Waited(0, 1, "transfer", pytest.approx(5.1)) in slow_link
    slow_node = blame.fold(usual + round_of(9.0, 5, 6.0, 0.6)).waited_for()
    assert blame.Waited(0, 1, "compute", pytest.approx(3.5 + 3.5 + 5.6)) in slow_node


def test_more_work_is_not_taken_for_a_slow_down() -> None:
    usual = start() + round_of(0.0, 1, 4.0, 0.5) + round_of(4.5, 3, 4.0, 0.5)
    rows = blame.fold(usual + round_of(9.0, 5, 8.0, 0.6, samples=16)).waited_for()
    assert blame.Waited(0, 1, "transfer", pytest.approx(7.6)) in rows


@pytest.mark.parametrize("kind", ["pause", "slow"])
def test_an_episode_on_record_is_the_cause_while_it_lasts(kind: str) -> None:
    lines = [*start(), observed(1.0, "scenario", 1, kind=kind, **{"for": 2.0})]
    rows = blame.fold(lines + round_of(0.0, 1, 4.0, 0.5) + round_of(4.5, 3, 4.0, 0.5)).waited_for()
    assert {(row.culprit, row.cause): row.seconds for row in rows} == {(1, kind): 3.5, (1, "compute"): 3.5}


@pytest.mark.parametrize("struck", [1, None])
def test_a_slow_link_on_record_is_a_transfer_of_the_worker_that_it_names(struck: int | None) -> None:
    """Also where the times alone do not say so; the server's line is everybody's, and nobody's fault."""
    lines = [*start(), observed(1.0, "scenario", struck, kind="slow_link", factor=4.0, **{"for": 2.0})]
    rows = blame.fold(lines + round_of(0.0, 1, 4.0, 0.5)).waited_for()
    assert rows == [blame.Waited(0, 1, "transfer" if struck else "compute", 3.5)]


def test_leavers_timers_and_the_end_are_told_apart() -> None:
    lines = [*start(), decision(pushed(1.0, 0, 1, compute_s=1.0))]
    lines.append(decision(Left(3.0, 1, "crash"), Apply((1,), (1.0,), "all"), Grant(0, 8, 2, "go")))
    lines.append(observed(3.0, "cancelled", 1, samples=8, seconds=3.0, cause="crash"))
    lines.append(decision(pushed(4.0, 0, 2, compute_s=1.0, wait_s=2.0)))
    lines.append(decision(TimerFired(4.5, "deadline"), Grant(0, 8, 3, "deadline passed")))
    lines.append(decision(pushed(5.0, 0, 3, compute_s=0.5, wait_s=0.5)))
    lines.append(observed(6.0, "end", cause="limit"))
    found = blame.fold(lines)
    assert [(row.culprit, row.cause, row.seconds) for row in found.waited_for()] == [
        (1, "left", 2.0),
        (None, "end", 1.0),
        (None, "timer", 0.5),
    ]
    assert found.culprits()[0] == blame.Culprit(1, 2.0, {"left": 2.0})
    assert found.culprits()[1] == blame.Culprit(None, 1.5, {"end": 1.0, "timer": 0.5})


def test_a_grant_on_the_stores_answer_is_owed_to_the_push_that_was_applied() -> None:
    lines = [*start(), decision(pushed(1.0, 0, 1, compute_s=1.0))]
    lines.append(decision(pushed(4.0, 1, 2, compute_s=4.0), Apply((1, 2), (0.5, 0.5), "all")))
    lines.append(decision(Applied(4.0, 1, (1, 2), 1.0, -1.0), Grant(0, 8, 2, "go"), Grant(1, 8, 2, "go")))
    assert blame.fold(lines).waited_for() == [blame.Waited(0, 1, "compute", 3.0)]


def test_a_cut_link_is_on_record_for_every_worker_it_names() -> None:
    lines = [*start(), observed(1.0, "scenario", kind="partition", workers=[1, 5], **{"for": 2.0})]
    assert blame.fold(lines + round_of(0.0, 1, 4.0, 0.5)).waited_for() == [blame.Waited(0, 1, "partition", 3.5)]


def test_medians_are_over_the_latest_pushes() -> None:
    """After 31 slow rounds their pace is the usual one, and a slow link stands out against it."""
    lines = start()
    for number in range(blame.WINDOW + 5):
        lines += round_of(10.0 * number, 2 * number + 1, 1.5 if number < 5 else 4.0, 0.5)
    before = {row.cause: row.seconds for row in blame.fold(lines).waited_for()}
    late = 10.0 * (blame.WINDOW + 5)
    after = {row.cause: row.seconds for row in blame.fold(lines + round_of(late, 999, 4.0, 1.0)).waited_for()}
    assert "transfer" not in before
    assert after["transfer"] > 0


RESTORED = Restored(version=0, at=0.0, samples_used=0, samples_lost=0, pushes=0)


def test_push_ids_that_repeat_after_a_restart_are_pushes_of_their_own() -> None:
    """The server dies while it holds 8 samples of w0 as push 1; after the restart push 1 is one of w1."""
    lines: list[Line] = [*start(), decision(pushed(1.0, 0, 1, compute_s=1.0)), header(restored=RESTORED)]
    lines += [joined(10.0, 0), joined(10.0, 1), decision(pushed(14.0, 1, 1, compute_s=4.0, samples=8))]
    lines.append(decision(pushed(15.0, 0, 2, compute_s=5.0)))
    found = blame.fold(lines)
    assert list(found._compute[1]) == [4.0 / 8]
    assert list(found._compute[0]) == [1.0 / 8]  # of before the restart


def test_nobody_is_present_between_a_servers_end_and_the_next_join() -> None:
    """w0 waits from 1 s until the last line before the restart, and not through the time without a server."""
    lines: list[Line] = [*start(), decision(pushed(1.0, 0, 1, compute_s=1.0)), observed(3.0, "note")]
    lines += [header(restored=RESTORED), decision(Left(9.0, 0, "crash"), Cancel(1, "alone"))]
    lines += [decision(Left(9.0, 1, "crash")), joined(10.0, 0), decision(pushed(11.0, 0, 1, compute_s=1.0))]
    lines.append(observed(12.0, "end", cause="limit"))
    rows = blame.fold(lines).waited_for()
    assert rows == [blame.Waited(0, None, "end", 3.0)]
    assert sum(row.seconds for row in rows) == sum(worker.wait_s for worker in fold(lines).report(None).per_worker)


@pytest.mark.parametrize("closed_by", ["push", "cancel", "crash", "idle"])
def test_a_grant_that_is_held_back_after_its_decision_is_waiting(closed_by: str) -> None:
    """As while a checkpoint is saved: the grant of 1 s is decided at once, and its work begins at 1.5 s."""
    lines = [header(), joined(0.0, 0), decision(pushed(1.0, 0, 1, compute_s=1.0), Grant(0, 8, 2, "go"))]
    lost = observed(3.0, "cancelled", 0, samples=8, seconds=1.5, cause=closed_by)
    lines += {
        "push": [decision(pushed(3.0, 0, 2, compute_s=1.5, wait_s=0.5))],
        "cancel": [decision(TimerFired(3.0, "late"), Cancel(0, "late")), lost],
        "crash": [lost, decision(Left(3.0, 0, "crash"))],
        "idle": [decision(Left(1.5, 0, "idle"))],  # there was nothing left for it, so the work never began
    }[closed_by]
    lines.append(observed(3.0, "end", cause="done"))
    assert [(row.cause, row.seconds) for row in blame.fold(lines).waited_for()] == [("server", 0.5)]
    metric = fold(lines)
    assert metric.report(None).per_worker[0].wait_s == 0.5
    ((present, accounted),) = metric.time_law().values()
    assert accounted == present
