"""Checkpoints of tables, message by message: what they hold, and where workers go on from them."""

import numpy as np
import pytest
from hand_driven import HandDrivenRun

from paceline.core.settings import Every
from paceline.server.checkpoint import files
from paceline.tables import messages as t
from paceline.tables import server
from paceline.tables.table_spec import TableSpec
from paceline.transport.messages import Ready, SavedState

COUNTS = TableSpec("counts", 3, 1, "float32", None, "add", eager=False)
CLOCKS = Ready(0, 1 << 40, 1, 1, "clocks", 1)


def on_tables(folder, strategy="ssp:staleness=3", every="2v", standing=(), workers=2, **more):
    """Workers that have begun their work; `standing` is what those say that outlived a server."""
    hand = HandDrivenRun(strategy, workers, folder=folder, checkpoint_every=Every.parse(every), **more)
    for worker in range(workers):
        hand.says(worker, t.OpenTable(COUNTS))
    if hand.last(0, t.Opened).wanted:
        hand.says(0, t.TableInit(0, np.zeros((1, 1), dtype=np.float32)))
    for worker in range(workers):
        if standing:
            hand.says(worker, standing[worker])
        hand.says(worker, CLOCKS)
    return hand


def tick(through, worker, era=0, again=False):
    log = t.TableLog(0, np.array([worker]), np.ones((1, 1), dtype=np.float32))
    return t.Tick(through, 1, [log], era=era, again=again)


def counts(hand):
    return hand.run.result().tables["counts"][:2, 0].tolist()


def saves(hand, worker):
    """The worker sends the state that it was asked for last."""
    hand.says(worker, SavedState(hand.last(worker, t.Save).number, b"state"))


def whole_checkpoint(folder, **more):
    """Worker 0 completed four clocks and worker 1 two; the checkpoint began after the third clock of both together."""
    hand = on_tables(folder, every="3v", **more)
    for worker in (0, 1):  # the one at the beginning
        hand.says(worker, tick(1, worker))
        saves(hand, worker)
    hand.says(0, tick(2, 0))  # the third version: now
    hand.says(0, tick(3, 0))
    hand.says(0, tick(4, 0))
    saves(hand, 0)
    hand.says(0, tick(5, 0))  # after its state
    hand.says(1, tick(2, 1))
    saves(hand, 1)
    assert counts(hand) == [5.0, 2.0]
    return hand


def entered(hand):
    return [hand.last(worker, t.Entered).clock if hand.count(worker, t.Entered) else None for worker in (0, 1)]


def test_a_checkpoint_is_of_one_moment_of_each_worker(tmp_path):
    hand = whole_checkpoint(tmp_path / "a")
    assert [(hand.last(worker, t.Stored).era, hand.last(worker, t.Stored).clock) for worker in (0, 1)] == [
        (0, 4),
        (0, 2),
    ]
    found = files.read(tmp_path / "a").head.engine["clocks"]["workers"]
    assert [(found[w]["applied"], len(found[w]["ticks"])) for w in ("0", "1")] == [(2, 2), (1, 1)]


def test_the_journal_is_written_before_its_checkpoint_can_be_found(tmp_path):
    hand = on_tables(tmp_path / "a", every="3v")
    found = []
    hand.run.checkpoints.flush = lambda: found.append(len(list(tmp_path.glob("a/checkpoints/v*/checkpoint.json"))))
    for worker in (0, 1):
        hand.says(worker, tick(1, worker))
        saves(hand, worker)
    assert found == [0]
    assert len(list(tmp_path.glob("a/checkpoints/v*/checkpoint.json"))) == 1


def test_resumed_workers_go_on_at_their_own_clocks_and_the_faster_waits(tmp_path):
    first = on_tables(tmp_path / "a", every="4v")
    for worker in (0, 1):  # the one at the beginning
        first.says(worker, tick(1, worker))
        saves(first, worker)
    for clock in (2, 3, 4):  # the fourth version is worker 0's third clock
        first.says(0, tick(clock, 0))
    saves(first, 0)
    first.says(1, tick(2, 1))
    saves(first, 1)
    hand = on_tables(tmp_path / "b", resume=tmp_path / "a")
    assert entered(hand) == [None, 2]  # worker 0's clock 4 waits until the slower is where it stood
    assert counts(hand) == [3.0, 2.0]
    hand.says(1, tick(3, 1))
    assert entered(hand) == [4, 2]
    assert hand.last(0, t.Entered).state == b"state"
    hand.says(0, tick(5, 0))
    hand.says(1, tick(4, 1))
    hand.says(1, tick(5, 1))
    assert counts(hand) == [5.0, 5.0]
    hand.says(0, t.Fetch(0, 5, None))
    assert hand.last(0, t.Rows).slowest == 5


def test_without_a_bound_nobody_waits(tmp_path):
    whole_checkpoint(tmp_path / "a", strategy="asp")
    hand = on_tables(tmp_path / "b", strategy="asp", resume=tmp_path / "a")
    assert entered(hand) == [4, 2]
    assert counts(hand) == [4.0, 2.0]


def test_workers_that_live_on_send_again_what_the_checkpoint_lacks(tmp_path):
    folder = tmp_path / "a"
    whole_checkpoint(folder)
    hand = on_tables(folder, resume=folder, restarted_at=9.0, standing=[t.ClockStanding(0, 4), t.ClockStanding(0, 2)])
    hand.says(1, tick(3, 1, again=True))
    assert entered(hand) == [4, 2]
    assert hand.last(0, t.Entered).state is None
    hand.says(0, tick(5, 0, again=True))
    hand.says(0, tick(5, 0, again=True))  # twice
    assert counts(hand) == [5.0, 3.0]
    assert "clock 5 of worker 0 is not expected" in hand.observed("refused")[-1].data["reason"]


def test_the_successor_of_a_worker_that_lived_on_is_a_newcomer(tmp_path):
    folder = tmp_path / "a"
    whole_checkpoint(folder)
    standing = [t.ClockStanding(0, 4), t.ClockStanding(0, 2)]
    hand = on_tables(folder, resume=folder, restarted_at=9.0, standing=standing, respawn=True)
    for clock in (3, 4, 5, 6):
        hand.says(1, tick(clock, 1, again=True))
    hand.exits(0, code=-9)
    hand.comes(0)
    hand.says(0, t.OpenTable(COUNTS))
    hand.says(0, CLOCKS)
    assert hand.last(0, t.Entered).clock == 6


def test_a_worker_that_does_not_come_back_leaves_its_clocks(tmp_path):
    whole_checkpoint(tmp_path / "a")
    hand = HandDrivenRun("ssp:staleness=3", 1, folder=tmp_path / "b", resume=tmp_path / "a")
    hand.says(0, t.OpenTable(COUNTS))
    hand.says(0, CLOCKS)
    assert counts(hand) == [4.0, 2.0]
    assert hand.observed("kept")[-1].data == {"clocks": 1}


def test_a_barrier_that_opens_begins_the_checkpoint_again(tmp_path):
    hand = on_tables(tmp_path / "a")
    hand.says(0, tick(1, 0))
    saves(hand, 0)
    hand.says(0, t.AtBarrier(1, 1))
    hand.says(1, t.AtBarrier(1, 0))  # its state never came
    assert hand.observed("checkpoint") == []
    assert [hand.last(worker, t.Passed).clock for worker in (0, 1)] == [0, 0]
    for worker in (0, 1):
        hand.says(worker, tick(1, worker, era=1))
        saves(hand, worker)
    assert len(hand.observed("checkpoint")) == 1
    found = files.read(tmp_path / "a").head.engine["clocks"]
    assert (found["repeats"], [found["workers"][w]["era"] for w in ("0", "1")]) == (1, [1, 1])


def test_a_barrier_that_a_resumed_script_calls_again_leaves_clocks_as_they_are(tmp_path):
    hand = on_tables(tmp_path / "a", strategy="asp")
    for worker in (0, 1):
        hand.says(worker, t.AtBarrier(1, 0))
    hand.says(0, tick(1, 0, era=1))
    hand.says(0, tick(2, 0, era=1))
    hand.says(1, tick(1, 1, era=1))
    for worker in (0, 1):
        saves(hand, worker)
    again = on_tables(tmp_path / "b", strategy="asp", resume=tmp_path / "a")
    assert entered(again) == [2, 1]
    again.says(0, t.AtBarrier(1, 2))
    again.says(1, t.AtBarrier(1, 1))
    assert [again.last(worker, t.Passed).clock for worker in (0, 1)] == [2, 1]
    again.says(1, t.AtBarrier(2, 1))
    again.says(0, t.AtBarrier(2, 2))
    assert len({again.last(worker, t.Passed).clock for worker in (0, 1)}) == 1  # a new one levels them


def test_a_barrier_that_was_passed_under_an_earlier_server_opens_at_the_same_clock(tmp_path):
    folder = tmp_path / "a"
    whole_checkpoint(folder, strategy="asp")
    standing = [t.ClockStanding(0, 4), t.ClockStanding(0, 2)]
    hand = on_tables(folder, strategy="asp", resume=folder, restarted_at=9.0, standing=standing)
    hand.says(0, t.AtBarrier(1, 4, passed=2))
    hand.says(1, t.AtBarrier(1, 2))
    assert [hand.last(worker, t.Passed).clock for worker in (0, 1)] == [2, 2]
    hand.says(0, tick(3, 0, era=1, again=True))
    assert counts(hand) == [5.0, 2.0]


def test_no_checkpoint_without_states_is_written_while_workers_repeat_their_barriers(tmp_path):
    folder = tmp_path / "a"
    first = on_tables(folder, every="100v")
    for worker in (0, 1):  # the one at the beginning
        first.says(worker, tick(1, worker))
        saves(first, worker)
    standing = [t.ClockStanding(0, 1)] * 2
    hand = on_tables(folder, every="100v", resume=folder, restarted_at=9.0, standing=standing)
    for barrier in range(1, 6):
        for worker in (0, 1):
            hand.says(worker, tick(barrier + 1, worker, era=barrier - 1, again=True))
            hand.says(worker, t.AtBarrier(barrier, barrier + 1, passed=barrier + 1))
    assert hand.observed("checkpoint") == []
    for worker in (0, 1):
        hand.says(worker, tick(7, worker, era=5))
        saves(hand, worker)
    (written,) = hand.observed("checkpoint")
    assert "without_state_of" not in written.data
    assert files.read(folder).workers == [0, 1]
    assert counts(hand) == [7.0, 7.0]


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_many_increments_ask_for_a_checkpoint_early(most, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "MOST_UNSAVED", most)
    hand = on_tables(tmp_path / "a", every="1000v")
    for worker in (0, 1):  # the one at the beginning
        hand.says(worker, tick(1, worker))
        saves(hand, worker)
    before = hand.count(0, t.Save)
    hand.says(0, tick(2, 0))
    hand.says(0, tick(3, 0))
    assert (hand.count(0, t.Save) > before) is (most == 0)


@pytest.mark.parametrize("restarted_at", [None, 9.0])
def test_a_worker_that_waited_for_the_slowest_is_counted_by_the_strategy_at_its_own_clock(restarted_at, tmp_path):
    folder = tmp_path / "a"
    first = on_tables(folder, every="4v")
    for worker in (0, 1):  # the checkpoint at the beginning
        first.says(worker, tick(1, worker))
        saves(first, worker)
    for clock in (2, 3):  # the fourth version is worker 1's third clock
        first.says(1, tick(clock, 1))
    saves(first, 1)
    for clock in (2, 3, 4):
        first.says(0, tick(clock, 0))
    saves(first, 0)
    standing = [t.ClockStanding(0, 4), t.ClockStanding(0, 3)] if restarted_at else []
    hand = on_tables(folder, resume=folder, restarted_at=restarted_at, standing=standing)
    assert entered(hand) == [4, 3]  # the slower had sent three clocks that the tables lacked
    assert hand.run.coordinator.strategy.state.clocks.of == {0: 4, 1: 3}
    hand.says(1, tick(4, 1))
    hand.says(0, t.AtBarrier(1, 4))
    hand.says(1, t.AtBarrier(1, 4))
    assert [hand.last(worker, t.Passed).clock for worker in (0, 1)] == [4, 4]


def test_a_barrier_opens_at_the_workers_own_clock_whatever_the_strategy_counts(tmp_path):
    first = on_tables(tmp_path / "a", every="6v", workers=3)
    for worker in (0, 1, 2):  # the checkpoint at the beginning
        first.says(worker, tick(1, worker))
        saves(first, worker)
    for worker, clock in ((1, 2), (0, 2), (0, 3)):  # the sixth version is the last of these
        first.says(worker, tick(clock, worker))
    saves(first, 0)
    for worker, clock in ((1, 3), (2, 2)):
        first.says(worker, tick(clock, worker))
        saves(first, worker)
    hand = on_tables(tmp_path / "b", resume=tmp_path / "a", workers=3)
    hand.says(1, tick(4, 1))  # worker 0, at clock 3, waits for worker 2
    counted = hand.run.coordinator.strategy.state.clocks
    assert counted.of == {1: 4, 2: 2}
    hand.ends(2)
    assert counted.of == {0: 4, 1: 4}  # worker 0 joined at the slowest's of those that the strategy knew
    hand.says(1, t.AtBarrier(1, 4))
    hand.says(0, tick(4, 0))
    hand.says(0, t.AtBarrier(1, 4))
    assert [hand.last(worker, t.Passed).clock for worker in (0, 1)] == [4, 4]
    assert counts(hand) == [4.0, 4.0]
