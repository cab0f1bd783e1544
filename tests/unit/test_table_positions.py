"""Where workers stand in a checkpoint of tables: what is recorded while it is under way, and what is made of it."""

import numpy as np
import pytest
import torch

from paceline.core.errors import PeerError
from paceline.core.updates import Contents
from paceline.tables import messages as t
from paceline.tables.positions import INCREMENTS, Cut, Position, RestoredPositions
from paceline.tables.sent_clocks import SentClocks


def tick(through, era=0, rows=(1,), sums=1.0):
    named = None if rows is None else np.array(rows)
    count = 4 if rows is None else len(rows)
    return t.Tick(through, 3, [t.TableLog(0, named, np.full((count, 2), sums))], 0.5, era=era)


def reread(cut, *, live=False, of_this_run=False):
    """The positions as a restored server finds them, after they have been in a file."""
    contents = cut.contents(["x", "y"])
    files = {name: {key: tensor.clone() for key, tensor in part.items()} for name, part in contents.files.items()}
    restored = RestoredPositions(live=live, of_this_run=of_this_run)
    restored.load(Contents(files, {}), contents.head, {"y": 0, "x": 1})
    return restored


def through(ticks):
    return [each.through for each in ticks]


class TestACut:
    def test_increments_come_back_as_they_were_under_the_tables_new_numbers(self):
        restored = reread(Cut({0: Position(0, 0, 4, [tick(5, rows=(2, 3), sums=7.0), tick(6, rows=None)])}, [], 0))
        first, second = restored.place(0, 0, None).ticks
        assert (first.through, first.work, first.loss, first.logs[0].table) == (5, 3, 0.5, 1)
        assert first.logs[0].rows.tolist() == [2, 3]
        assert first.logs[0].sums.tolist() == [[7.0, 7.0]] * 2
        assert second.logs[0].rows is None

    def test_read_only_increments_can_be_written(self):
        one = tick(5)
        one.logs[0].sums.flags.writeable = False
        assert isinstance(Cut({0: Position(0, 0, 4, [one])}, [], 0).contents(["x"]).files[INCREMENTS]["0.5.0.sums"],
                          torch.Tensor)  # fmt: skip

    @pytest.mark.parametrize(("others", "start"), [(3, 5), (9, 9)])
    def test_a_lost_workers_clocks_stay_and_it_makes_none_of_them_again(self, others, start):
        cut = Cut({0: Position(0, 0, 4, [tick(5)]), 1: Position(0, 0, others)}, [], 0)
        cut.close(0, lost=True)
        restored = reread(cut)
        assert through(restored.take_loose()) == [5]
        assert restored.take_loose() == []
        assert restored.place(0, 0, None).clock == start
        assert reread(cut, live=True, of_this_run=True).place(0, 1, None) is None


class TestAResumedRun:
    def test_every_process_goes_on_where_its_worker_stood_and_counts_barriers_anew(self):
        restored = reread(Cut({1: Position(2, 3, 4, [tick(5, era=3)])}, [], 0))
        found = restored.place(1, 0, None)
        assert (found.era, found.applied, found.clock, found.ticks[0].era) == (0, 4, 5, 0)
        assert restored.repeats == 3

    def test_clocks_of_workers_that_do_not_come_are_left_behind(self):
        restored = reread(Cut({0: Position(0, 0, 4, [tick(5)]), 1: Position(0, 0, 4, [tick(5)])}, [tick(9)], 0))
        restored.leave_behind([1])
        assert through(restored.take_loose()) == [9, 5]
        assert restored.place(0, 0, None).applied == 5  # it comes late
        assert through(restored.place(1, 0, None).ticks) == [5]

    def test_barriers_that_were_repeated_before_are_repeated_again(self):
        assert reread(Cut({0: Position(0, 1, 4)}, [], repeats=3)).repeats == 3

    def test_a_checkpoint_of_an_older_version_has_no_positions(self):
        restored = RestoredPositions()
        restored.load(Contents({}, {}), {"phase": 0}, {})
        assert restored.place(0, 0, None) is None


class TestARestartedServer:
    def test_a_process_that_lives_goes_on_behind_what_the_checkpoint_holds(self):
        restored = reread(Cut({0: Position(0, 2, 4, [tick(5, era=2)])}, [], 1), live=True, of_this_run=True)
        found = restored.place(0, 0, t.ClockStanding(2, 3))
        assert (found.era, found.applied, found.clock) == (2, 4, 5)
        assert restored.repeats == 1

    def test_one_that_came_after_the_checkpoint_says_itself_where_it_began(self):
        restored = reread(Cut({}, [], 0), live=True, of_this_run=True)
        found = restored.place(3, 0, t.ClockStanding(0, 17))
        assert (found.era, found.applied, found.ticks) == (0, 17, [])

    def test_the_place_of_an_earlier_process_is_not_its_successors(self):
        restored = reread(Cut({0: Position(0, 0, 4, [tick(5)])}, [], 0), live=True, of_this_run=True)
        assert restored.place(0, 1, None) is None
        assert through(restored.take_loose()) == [5]

    def test_a_checkpoint_of_the_run_that_this_one_resumed_is_of_its_first_processes(self):
        positions = {0: Position(4, 2, 4), 1: Position(4, 2, 4)}
        restored = reread(Cut(positions, [], 0), live=True)
        assert restored.place(0, 0, t.ClockStanding(0, 4)).clock == 4
        assert restored.place(1, 1, None) is None

    def test_a_checkpoint_older_than_what_a_worker_keeps_is_an_error(self):
        restored = reread(Cut({0: Position(0, 0, 4)}, [], 0), live=True, of_this_run=True)
        with pytest.raises(PeerError, match="has 4 clocks of worker 0, which can send again only those after 6"):
            restored.place(0, 0, t.ClockStanding(0, 6))


class TestSentClocks:
    def test_a_small_log_is_kept_without_the_memory_it_does_not_fill(self):
        sent = SentClocks(0)
        sent.begin(0, keeps=True)
        block = np.zeros((1024, 2))
        sent.add(t.Tick(1, 1, [t.TableLog(0, None, block[:1])]))
        (kept,) = sent.again(0, 0)
        assert kept.logs[0].sums.base is None
        assert sent.lacking == [kept]

    def test_nothing_is_kept_where_no_server_is_started_again(self):
        sent = SentClocks(0)
        sent.begin(0, keeps=False)
        assert sent.again(0, 0) == []


def test_clocks_count_until_the_workers_state_has_come():
    cut = Cut({0: Position(0, 0, 4, [tick(5)]), 1: Position(0, 0, 4)}, [], 0)
    cut.record(0, tick(6))
    cut.close(0)
    cut.record(0, tick(7))
    cut.record(1, tick(5))
    assert [through(cut.positions[worker].ticks) for worker in (0, 1)] == [[5, 6], [5]]
    assert [cut.positions[worker].clock for worker in (0, 1)] == [6, 5]
