"""Tables split by rows over shards are the same tables: written, read, saved and joined as if one server had them."""

import gc
import os
import re
import socket
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from shard_threads import shard_links

from paceline.core.errors import CheckpointError, PeerError
from paceline.core.updates import Contents
from paceline.model import tensor_files
from paceline.shards import commands as c
from paceline.shards.messages import RowsPart, TickPart
from paceline.shards.sharded_store import MOST_TICKS, ShardLinks, TickArrivals
from paceline.shards.sharded_tables import ShardedTableStore
from paceline.shards.table_endpoint import TableEndpoint
from paceline.shards.table_stripes import TableStripes, part_of, places_of
from paceline.tables.client import MOST_AHEAD
from paceline.tables.messages import Opened, OpenTable, Rows, TableLog, Tick, TickParts
from paceline.tables.positions import Cut, Position, RestoredPositions
from paceline.tables.server import TableExchange
from paceline.tables.table_spec import make_spec
from paceline.tables.table_store import Reader, TableStore
from paceline.transport.messages import Note
from paceline.transport.shm import Channel, ShmServerEnd

SPECS = [
    make_spec("sums", 23, 3, "float32", None, "add", False),
    make_spec("clipped", 23, 2, "float64", None, "clip:limit=0.5", False),
    make_spec("stepped", 40, 5, "float32", None, "adagrad:rate=0.3", False),
    make_spec("few", 2, 4, "int64", None, "add", True),  # fewer rows than shards
]


class Site:
    """A coordinator's store over shards, a worker's end of its links, and one server's store beside them."""

    def __init__(self, links, coordinator, worker):
        self.links, self.end, self.worker = links, coordinator, worker
        engine = SimpleNamespace(token=lambda number: "t")
        self.store = ShardedTableStore(SimpleNamespace(engine=engine), links)
        self.alone = TableStore(None)
        for store in (self.store, self.alone):
            store.readers[0] = Reader(0)
            store.clocks.enter(0, 0)
        for spec in SPECS:
            values = np.arange(spec.rows * spec.width).reshape(spec.rows, -1).astype(spec.dtype)
            for store in (self.store, self.alone):
                store.tables[store.number_of(spec)].fill(values[:1] if spec.name == "clipped" else values)
            worker.send(OpenTable(spec))
            assert self.collected().spec == spec
            coordinator.deliver(Opened(self.store.numbers[spec.name], False))
            worker.receive()

    def collected(self):
        while (message := self.end.collect()) is None:
            pass
        return message

    def arrived(self, tick):
        """The clock as the coordinator has it, once all shards hold it."""
        self.worker.send(tick)
        told = self.collected()
        while (whole := self.links.ticks.take("t", told)) is None:
            self.links.listen()
        return whole

    def write(self, tick):
        self.alone.write(tick)
        self.store.write(self.arrived(tick))

    def read(self, table, rows):
        """What the worker gets, and what one server would send."""
        self.end.deliver(self.store.rows(0, table, rows, 3))
        return self.worker.receive(), self.alone.rows(0, table, rows, 3)


@contextmanager
def site(shards):
    with ExitStack() as last:
        links = last.enter_context(shard_links(shards))
        pairs = [socket.socketpair() for _ in range(shards)]
        links.connect("t", [os.dup(mine.fileno()) for mine, _ in pairs])
        for mine, _ in pairs:
            mine.close()
        mine, theirs = Channel.pair()
        worker = TableEndpoint([theirs, *(Channel(other) for _, other in pairs)])
        last.callback(worker.close)
        end = ShmServerEnd(mine)
        last.callback(end.close)
        yield Site(links, end, worker)


def clock(chance, number=1, specs=SPECS):
    """A clock with increments to most tables: to some rows, to all, to none."""
    logs = []
    for table, spec in enumerate(specs):
        rows = None if chance.random() < 0.3 else chance.permutation(spec.rows)[: chance.integers(0, spec.rows + 1)]
        count = spec.rows if rows is None else len(rows)
        if chance.random() < 0.9:
            logs.append(TableLog(table, rows, (3 * chance.standard_normal((count, spec.width))).astype(spec.dtype)))
    return Tick(number, 1, logs, 0.5, 0.01)


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert np.array_equal(one[name], other[name]), name


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_every_row_is_in_one_shard(shards):
    rows = np.array([4, 0, 9, 17, 3])
    log = TableLog(2, rows, np.arange(10.0).reshape(5, 2))
    found = {}
    for shard in range(shards):
        part = part_of(log, shard, shards)
        found |= {int(row) * shards + shard: tuple(sums) for row, sums in zip(part.rows, part.sums, strict=True)}
    assert found == {int(row): tuple(sums) for row, sums in zip(rows, log.sums, strict=True)}
    whole = np.arange(11)
    assert sorted(np.concatenate([whole[places_of(None, shard, shards)] for shard in range(shards)])) == list(whole)


@pytest.mark.parametrize("shards", [2, 3])
def test_bits_reads_and_bytes_are_those_of_one_server(shards):
    chance = np.random.default_rng(shards)
    with site(shards) as here:
        for number in range(1, 13):
            here.write(clock(chance, number))
            table = int(chance.integers(len(SPECS)))
            for rows in (None, chance.permutation(SPECS[table].rows)[:5], np.empty(0, np.int64)):
                found, expected = here.read(table, rows)
                assert np.array_equal(found.values, np.asarray(expected.values))
                assert found.values.dtype == expected.values.dtype
                assert (found.slowest, found.included, found.clock) == (0, 0, 3)
        assert_same(here.store.snapshot(), here.alone.snapshot())
        assert [t.changes for t in here.store.tables] == [t.changes for t in here.alone.tables]
        assert np.array_equal(here.store.tables[3].changed, here.alone.tables[3].changed)


def test_a_shard_that_drops_or_repeats_a_part_is_seen(monkeypatch):
    """What the comparison above would say of such a shard."""
    real = TableStripes.carry_out

    def careless(self, command, tensors):
        if isinstance(command, c.ApplyTick) and self._shard == 1:
            if command.number == 1:
                return None
            real(self, command, tensors)
        return real(self, command, tensors)

    monkeypatch.setattr(TableStripes, "carry_out", careless)
    for ticks in (1, 2):  # the first is dropped, the second applied twice
        with site(2) as here:
            chance = np.random.default_rng(5)
            for number in range(1, ticks + 1):
                here.write(clock(chance, number))
            found, expected = here.store.snapshot(), here.alone.snapshot()
            assert np.array_equal(found["sums"][0::2], expected["sums"][0::2])
            assert not np.array_equal(found["sums"][1::2], expected["sums"][1::2])


def saved(store, cut, folder):
    """What a checkpoint of this store holds, read back."""
    files, head = {}, {}
    for taken in (store.contents(), store.late_contents(cut)):
        head |= taken.head
        files |= {name: {key: t.clone() for key, t in tensors.items()} for name, tensors in taken.files.items()}
        for name in {} if taken.save is None else taken.save(folder)[0]:
            files[name] = tensor_files.read(folder / name)
    return Contents(files, {"tables": head.pop("tables")}), head


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 0), (0, 2)])
def test_a_checkpoint_is_read_by_any_number_of_servers(tmp_path, before, after):
    """0: one server. The clocks that the tables lack come back, too, and are written once."""
    chance = np.random.default_rng(1)
    with site(before or 2) as one, site(after or 2) as other:
        first = one.store if before else one.alone
        second = other.store if after else TableStore(None)
        for number in range(1, 4):
            one.write(clock(chance, number))
        late = [clock(chance, number) for number in (4, 5)]
        held = [one.arrived(tick) for tick in late] if before else late
        contents, head = saved(first, Cut({0: Position(0, 0, 3, held[:1])}, held[1:], 0), tmp_path)
        second.restore(contents)
        restored = RestoredPositions()
        restored.load(contents, head, second.numbers, second.keep)
        assert_same(second.snapshot(), one.alone.snapshot())
        for tick in [*restored.take_loose(), *restored.place(0, 0, None).ticks]:
            second.write(tick)
        for tick in reversed(late):
            one.alone.write(tick)
        assert_same(second.snapshot(), one.alone.snapshot())
        if after:  # the next checkpoint may hold them again
            again = tmp_path / "again"
            again.mkdir()
            kept = second.keep(late[0])
            files, head = saved(second, Cut({0: Position(0, 0, 5, [kept])}, [], 0), again)
            restored.load(files, head, second.numbers)
            (tick,) = restored.place(0, 0, None).ticks
            assert sum(len(log.sums) for log in tick.logs) == sum(len(log.sums) for log in late[0].logs)


def test_a_checkpoint_that_lacks_a_shards_file_is_refused(tmp_path):
    with site(3) as here:
        contents, _ = saved(here.store, Cut({}, [], 0), tmp_path)
        del contents.files["tables-1.safetensors"]
        with pytest.raises(CheckpointError, match=r"the rows of table 'sums' that it holds are not all 23: \[8\]"):
            TableStore(None).restore(contents)


# -- clocks that shards hold -------------------------------------------------------------------------------------------


def test_a_clock_exists_once_every_shard_holds_it_and_is_dropped_with_its_last_reference():
    arrivals = TickArrivals(2)
    arrivals.expect("hers")
    tick = Tick(1, 1, [], parts=TickParts(7, 40, "forged"))
    for _ in range(2):  # a part that comes twice
        assert arrivals.note(0, c.TickHeld("hers", 7)) == 1
    assert arrivals.take("hers", tick) is None
    arrivals.note(1, c.TickHeld("hers", 7))
    taken = arrivals.take("hers", tick)
    assert (taken.parts.owner, taken.parts.number, taken.parts.nbytes) == ("hers", 7, 40)
    assert arrivals.take("hers", tick) is None
    again = msgspec.structs.replace(taken, era=3)
    del taken
    gc.collect()
    assert arrivals.dropped == []
    del again
    gc.collect()
    assert arrivals.dropped == [("hers", 7)]
    arrivals.note(1, c.TickHeld("hers", 8))
    assert arrivals.forget("hers") == 7
    assert not arrivals.knows("hers")


def test_what_shards_hold_of_a_worker_that_left_is_what_all_of_them_hold():
    stripes = TableStripes(0, 2)
    for number in (1, 2, 3):
        stripes.hold("hers", number, [])
    stripes.hold("his", 3, [])
    stripes.drop_after("hers", 1)
    assert sorted(stripes._ticks) == [("hers", 1), ("his", 3)]


def test_a_worker_that_sends_shards_more_clocks_than_it_tells_of_is_broken():
    mine, theirs = Channel.pair()
    theirs.send(c.encode(c.Listens("")))
    links = ShardLinks([mine], lambda shard: pytest.fail(f"shard {shard} is gone"))
    assert MOST_TICKS > MOST_AHEAD  # an honest worker never has as many
    links.ticks.expect("hers")
    theirs.send(c.encode(c.TickHeld("nobodys", 1)))
    for number in range(MOST_TICKS + 1):
        theirs.send(c.encode(c.TickHeld("hers", number)))
        links.listen()
    assert [broken.text for broken in links.broken] == [f"it sent parts of more than {MOST_TICKS} clocks at once"]
    links.close()
    theirs.close()


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (TableLog(9, None, np.zeros((12, 3), np.float32)), "it adds to table 9, and there are 4"),
        (TableLog(-1, None, np.zeros((12, 3), np.float32)), "it adds to table -1, and there are 4"),
        (TableLog(0, None, np.zeros((11, 3), np.float32)), r"shape \(11, 3\) to 12 rows of table 'sums'"),
        (TableLog(0, None, np.zeros((12, 3))), "it adds float64"),
        (
            TableLog(0, np.array([12]), np.zeros((1, 3), np.float32)),
            "a row that is not one of the 12 here of table 'sum",
        ),
        (
            TableLog(0, np.array([-1]), np.zeros((1, 3), np.float32)),
            "a row that is not one of the 12 here of table 'sum",
        ),
    ],
)
def test_a_part_that_does_not_fit_breaks_its_worker_and_no_shard(log, why):
    with site(2) as here:
        here.worker._shards[0].send(TickPart(1, [log]))
        while not here.links.broken:
            here.links.listen()
        assert here.links.broken[0].token == "t"
        assert re.search(why, here.links.broken[0].text)
        assert_same(here.store.snapshot(), here.alone.snapshot())


def test_a_shard_takes_parts_alone():
    with site(2) as here:
        here.worker._shards[1].send(Note("loss", 1.0))
        while not here.links.broken:
            here.links.listen()
        assert "takes parts of pushes and clocks, not a Note" in here.links.broken[0].text


def test_all_that_an_ended_process_sent_is_taken_in():
    """Its end may be known before the shards have read what it sent last."""
    with site(2) as here:
        here.worker.send(clock(np.random.default_rng(0)))
        told = here.collected()
        here.worker.close()
        here.links.drain("t")
        tick = here.links.ticks.take("t", told)
        assert tick is not None
        here.links.forget("t", None)
        here.store.write(tick)
        here.alone.write(clock(np.random.default_rng(0)))
        assert_same(here.store.snapshot(), here.alone.snapshot())


@pytest.mark.parametrize("shape", [(2, 3), (23, 2), (1, 4), (23,)])
def test_first_values_of_another_shape_are_refused(shape):
    with site(2) as here, pytest.raises(PeerError, match="table 'sums' has 23 rows of 3 numbers, and was sent values"):
        here.store.tables[0].fill(np.zeros(shape, np.float32))


@pytest.mark.parametrize("in_parts", [True, False])
def test_increments_that_go_to_others_than_those_who_have_the_tables_are_refused(in_parts):
    record = SimpleNamespace(worker=4)
    exchange = SimpleNamespace(run=SimpleNamespace(emulation=None), store=SimpleNamespace(in_parts=in_parts))
    logs = [TableLog(0, None, np.zeros((1, 1)))]
    tick = Tick(3, 1, logs, parts=None if in_parts else TickParts(1, 8))
    with pytest.raises(PeerError, match="worker 4 sent the increments of clock 3 to another server than theirs"):
        TableExchange._on_tick(exchange, record, tick, 0.0)


# -- a worker's end ----------------------------------------------------------------------------------------------------


def test_a_clock_for_a_full_link_goes_out_while_the_worker_waits_for_the_coordinator():
    pairs = [Channel.pair() for _ in range(3)]
    worker = TableEndpoint([mine for mine, _ in pairs])
    coordinator, *shards = [ShmServerEnd(theirs) for _, theirs in pairs]
    log = TableLog(0, np.arange(2_000), np.zeros((2_000, 1), np.float32))
    for number in range(1, 301):  # more than a socket holds, and less than a lane takes
        worker.send(Tick(number, 1, [log]))
    assert worker._writes_wait()
    assert not worker.poll()
    got = []

    def read():
        for end in (*shards, coordinator):
            ticks = []
            while len(ticks) < 300:
                message = end.collect()
                ticks += [] if message is None else [message]
            got.append([tick.number if end is not coordinator else tick.parts.number for tick in ticks])
        coordinator.deliver(Opened(0, False))

    reading = threading.Thread(target=read)
    reading.start()
    assert worker.receive() == Opened(0, False)
    reading.join()
    assert got == [list(range(1, 301))] * 3
    worker.close()
    for end in (coordinator, *shards):
        end.close()


def test_rows_of_messages_that_never_came_are_skipped_and_others_are_refused():
    pairs = [Channel.pair() for _ in range(3)]
    worker = TableEndpoint([mine for mine, _ in pairs])
    coordinator, *shards = [ShmServerEnd(theirs) for _, theirs in pairs]
    for number in (1, 2):
        for place, shard in enumerate(shards):
            shard.deliver(RowsPart(number, np.full((1, 2), 10.0 * number + place)))
    message = Rows(0, np.array([3, 6]), np.empty((0, 2)), 0, 0, 1, (2, 32))
    coordinator.deliver(message)
    assert worker.receive().values.tolist() == [[21.0, 21.0], [20.0, 20.0]]
    shards[0].deliver(RowsPart(9, np.zeros((1, 2))))
    coordinator.deliver(msgspec.structs.replace(message, parts=(3, 32)))
    with pytest.raises(PeerError, match="a shard sent RowsPart where RowsPart 3 was due"):
        worker.receive()
    worker.close()
    for end in (coordinator, *shards):
        end.close()
