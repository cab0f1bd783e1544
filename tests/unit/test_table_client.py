"""A worker's end of the tables against a server that says exactly what a test has it say."""

from collections import deque

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.tables import messages as t
from paceline.tables.client import MOST_AHEAD, Client
from paceline.tables.table import Table, initial_values
from paceline.tables.table_spec import TableSpec
from paceline.transport.base import Closed, Lost
from paceline.transport.messages import Over, Ready, SavedState
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


def entered(clock=0, lead=1.0, workers=(0, 1)):
    return t.Entered(clock, lead, lead, [t.ClockRoster(0, list(workers))], paced=False)


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
        server = Server(entered(), LOST, LOST, t.Opened(0, wanted=False), entered(2), rows(2, 1.0, included=2))
        client, table = opened(server)
        assert (table.get() == 1.0).all()
        assert server.reconnects == 2
        assert client.clock == 2

    def test_what_was_cached_and_shipped_before_is_of_another_time(self):
        server = Server(entered(), rows(0, 1.0), LOST, t.Opened(0, wanted=False), entered(5), rows(5, 9.0, included=5))
        client, table = opened(server)
        table.get()
        table.inc(None, np.full((ROWS, 2), 0.5, dtype=np.float32))
        client.complete_clock(1)
        client.complete_clock(1)  # its rows are too old now, and the server is gone when it asks for new ones
        assert (table.get() == 9.0).all()
        assert client.clock == 5

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
    def test_a_state_that_is_wanted_at_the_end_is_sent(self):
        server = Server(entered(), Over(0, None, 1.0, save=7))
        _, table = opened(server)
        with pytest.raises(Closed):
            table.get()
        assert server.last(SavedState).number == 7

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
