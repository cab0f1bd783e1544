"""A worker's end of the tables against a server that says exactly what a test has it say."""

from collections import deque

import numpy as np
import pytest

from paceline.core.errors import PeerError, UserError
from paceline.tables import messages as t
from paceline.tables.client import MOST_AHEAD, Client
from paceline.tables.table import Table, initial_values
from paceline.tables.table_spec import TableSpec
from paceline.transport.base import Closed, Lost
from paceline.transport.messages import Ended, Over, Ready, SavedState
from paceline.worker.state import WorkerState

ROWS = 6
SPEC = TableSpec("x", ROWS, 2, "float32", None, "add", eager=False)
ZEROS = initial_values(SPEC, None)
READY = Ready(0, 0, 1, 1.0, "epoch", 1)
LOST = object()


class Server:
    """An endpoint with a server behind it that answers as told; `says` is what it says next, whatever it is asked."""

    def __init__(self, *says):
        self.says = deque(says)
        self.heard = []
        self.reconnects = 0

    def send(self, message):
        self.heard.append(message)

    def receive(self):
        if not self.says:
            raise AssertionError(f"the worker waits, and nothing more is said; last heard: {self.heard[-3:]}")
        said = self.says.popleft()
        if said is LOST:
            raise Lost
        return said

    def poll(self, seconds=0.0):
        return False

    def adopt(self, spec):
        return None

    def reconnect(self):
        self.reconnects += 1
        if not self.says:
            raise Closed

    def last(self, kind):
        return [message for message in self.heard if isinstance(message, kind)][-1]


def entered(clock=0, lead=1.0, workers=(0, 1), keeps=True, era=0):
    return t.Entered(clock, lead, lead, [t.ClockRoster(0, list(workers))], paced=False, keeps=keeps, era=era)


def rows(clock, value, included=0, slowest=None, named=None):
    count = ROWS if named is None else len(named)
    values = np.full((count, 2), value, dtype=np.float32)
    return t.Rows(0, named, values, clock if slowest is None else slowest, included, clock)


def opened(server, worker=0):
    client = Client(server, worker, READY, WorkerState())
    server.says.extendleft([t.Opened(0, wanted=False)])
    return client, Table(client, client.open(SPEC, ZEROS, None))


class TestALostServer:
    def test_one_lost_before_the_worker_took_part_is_introduced_to_again(self):
        server = Server(LOST, t.Opened(0, wanted=False), entered(), rows(0, 3.0))
        _, table = opened(server)
        assert (table.get(0) == 3.0).all()
        assert [type(message) for message in server.heard if isinstance(message, t.OpenTable | Ready)] == [
            t.OpenTable, Ready, t.OpenTable, Ready,
        ]  # fmt: skip

    def test_one_lost_while_a_table_is_opened_is_asked_again(self):
        server = Server(LOST, t.Opened(4, wanted=False), t.Opened(4, wanted=False), entered())
        client = Client(server, 0, READY, WorkerState())
        table = client.open(SPEC, ZEROS, None)
        assert table.number == 4
        assert sum(isinstance(message, t.OpenTable) for message in server.heard) >= 2

    def test_one_lost_twice_in_a_row_is_introduced_to_a_third_time(self):
        server = Server(entered(2), LOST, LOST, t.Opened(0, wanted=False), entered(2), rows(2, 1.0, included=2))
        client, table = opened(server)
        assert (table.get() == 1.0).all()
        assert server.reconnects == 2
        assert client.clock == 2

    def test_what_a_checkpoint_holds_is_not_kept(self):
        server = Server(entered(), t.Stored(0, 2), rows(3, 0.0, included=3), LOST, t.Opened(0, wanted=False))
        server.says += [entered(2), rows(3, 1.0, included=2)]
        client, table = opened(server)
        for _ in range(3):
            table.inc(0, np.ones(2, dtype=np.float32))
            client.complete_clock(1)
        table.get()
        client._wait_once()
        assert server.last(t.ClockStanding) == t.ClockStanding(0, 2)
        assert [tick.through for tick in server.heard if isinstance(tick, t.Tick) and tick.again] == [3]

    def test_one_that_cannot_be_sent_everything_again_is_an_error(self):
        server = Server(entered(keeps=False), LOST, t.Opened(0, wanted=False), entered())
        client, table = opened(server)
        table.inc(0, np.ones(2, dtype=np.float32))
        client.complete_clock(1)
        with pytest.raises(PeerError, match="worker 0 cannot send again what it sent before: only a run with"):
            client._wait_once()

    def test_one_lost_after_the_scripts_end_is_told_again_that_it_ended(self):
        server = Server(entered(), LOST, t.Opened(0, wanted=False), entered(), Over(0, None, 1.0))
        client, table = opened(server)
        table.inc(0, np.ones(2, dtype=np.float32))
        client.complete_clock(1)
        client.outlast_server()
        assert [type(message) for message in server.heard[-2:]] == [t.Tick, Ended]

    def test_an_increment_of_the_clock_under_way_outlives_it(self):
        server = Server(entered(lead=0.0), rows(0, 1.0), LOST, t.Opened(0, wanted=False), entered(0, 0.0), rows(0, 2.0))
        client, table = opened(server)
        table.get()
        table.inc(0, np.array([1.0, 1.0], dtype=np.float32))
        client._wait_once()
        assert table.get(0).tolist() == [3.0, 3.0]

    def test_none_that_comes_back_ends_the_script(self):
        server = Server(entered(), LOST)
        _, table = opened(server)
        with pytest.raises(Closed):
            table.get()


class TestOwnWrites:
    def test_rows_that_lack_own_clocks_get_them_added(self):
        server = Server(entered(), rows(0, 0.0), rows(2, 10.0, included=1))
        client, table = opened(server)
        for _ in range(2):
            if client.clock == 0:
                table.get()
            table.inc(0, np.array([1.0, 1.0], dtype=np.float32))
            client.complete_clock(1)
        assert table.get(0).tolist() == [11.0, 11.0]  # the second of the two was not in what the server sent

    def test_a_worker_that_only_writes_waits_for_a_server_that_takes_it_in_slowly(self):
        server = Server(entered(), t.Included(1))
        client, table = opened(server)
        for _ in range(MOST_AHEAD):
            table.inc(0, np.array([1.0, 1.0], dtype=np.float32))
            client.complete_clock(1)
        assert len(server.says) == 1
        client.complete_clock(1)
        assert not server.says


class TestTheEnd:
    def test_a_state_that_is_wanted_at_the_end_is_sent_if_that_comes_between_two_iterations(self):
        server = Server(entered(), Over(0, None, 1.0, save=7))
        client, table = opened(server)
        table.inc(0, np.ones(2, dtype=np.float32))
        server.poll = lambda: bool(server.says)
        assert client.complete_clock(1) is False
        assert server.last(SavedState).number == 7

    def test_a_state_in_the_middle_of_an_iteration_is_of_no_clock_and_not_sent(self):
        server = Server(entered(), Over(0, None, 1.0, save=7))
        _, table = opened(server)
        with pytest.raises(Closed):
            table.get()
        assert not [message for message in server.heard if isinstance(message, SavedState)]

    def test_a_state_that_is_wanted_is_sent_when_the_clock_is_completed(self):
        server = Server(entered(), t.Save(3), rows(0, 0.0))
        client, table = opened(server)
        table.get()
        assert not [message for message in server.heard if isinstance(message, SavedState)]
        client.complete_clock(1)
        order = [type(message) for message in server.heard][-2:]
        assert order == [t.Tick, SavedState]

    def test_a_clock_after_the_end_is_refused(self):
        server = Server(entered(), Over(0, None, 1.0))
        client, table = opened(server)
        with pytest.raises(Closed):
            table.get()
        with pytest.raises(UserError, match="after the run ended"):
            client.complete_clock(1)


def test_what_its_checkpoint_lacks_is_sent_again_and_the_clock_stays():
    server = Server(entered(), rows(0, 1.0), LOST, t.Opened(0, wanted=False), entered(1), rows(2, 9.0, included=1))
    client, table = opened(server)
    table.get()
    table.inc(None, np.full((ROWS, 2), 0.5, dtype=np.float32))
    client.complete_clock(1)
    table.inc(0, np.full(2, 0.25, dtype=np.float32))
    client.complete_clock(1)  # its rows are too old now, and the server is gone when it asks for new ones
    assert table.get(0).tolist() == [9.25, 9.25]  # the first clock is in what the checkpoint holds
    assert client.clock == 2
    assert server.last(t.ClockStanding) == t.ClockStanding(0, 0)
    sent = [message for message in server.heard if isinstance(message, t.Tick)]
    assert [(tick.through, tick.again) for tick in sent] == [(1, False), (2, False), (2, True)]
    assert sent[-1].logs[0].sums.tolist() == [[0.25, 0.25]]


def test_a_barrier_that_was_passed_is_passed_again_between_its_clocks():
    server = Server(entered(), t.Passed(1, 5), LOST, t.Opened(0, wanted=False), entered(), t.Passed(1, 5))
    client, table = opened(server)
    for _ in range(2):
        table.inc(0, np.ones(2, dtype=np.float32))
        client.complete_clock(1)
        if client.clock == 1:
            client.barrier()
    client._wait_once()
    again = server.heard[-3:]
    assert [type(message) for message in again] == [t.Tick, t.AtBarrier, t.Tick]
    assert again[1] == t.AtBarrier(1, 1, 5)
    assert [(tick.era, tick.through) for tick in again if isinstance(tick, t.Tick)] == [(0, 1), (1, 6)]
    assert client.clock == 6
