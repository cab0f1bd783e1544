"""The parts of a table, each by itself: sums by row, caches with clocks, update rules, shelves of shards."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import OptionError
from paceline.tables import table_store as shelves
from paceline.tables.host import Host
from paceline.tables.messages import OpenTable, TableInit
from paceline.tables.rowwise import RowDedup, add_rows, parse_rule, put_rows
from paceline.tables.table_spec import make_spec
from paceline.tables.table_store import ServerTable
from paceline.tables.worker_table import Cache, OpLog


def spec_of(rows=10, width=2, dtype="float64", **options):
    chosen = {"staleness": None, "update": "add", "eager": False, **options}
    return make_spec("t", rows, width, dtype, chosen["staleness"], chosen["update"], chosen["eager"])


def rows_of(*numbers):
    return np.array(numbers, dtype=np.int64)


some_rows = st.lists(st.integers(0, 19), max_size=40).map(lambda numbers: np.array(numbers, dtype=np.int64))


class TestSums:
    @given(some_rows, st.randoms(use_true_random=False))
    def test_repeated_rows_are_summed_as_numpy_would(self, rows, chance):
        deltas = np.array([[chance.random(), chance.random()] for _ in rows]).reshape(len(rows), 2)
        distinct, sums = RowDedup(20).summed(rows, deltas)
        there = np.zeros((20, 2))
        there[distinct] += sums
        expected = np.zeros((20, 2))
        np.add.at(expected, rows, deltas)
        assert len(np.unique(distinct)) == len(distinct)
        np.testing.assert_allclose(there, expected, rtol=1e-12)

    @given(st.lists(st.lists(st.integers(0, 19), max_size=20, unique=True), max_size=6))
    def test_an_oplog_ships_the_sum_of_all_that_was_added(self, additions):
        log, expected = OpLog(spec_of(rows=20)), np.zeros((20, 2))
        for number, rows in enumerate(additions):
            deltas = np.full((len(rows), 2), 1.0 + number)
            log.add(rows_of(*rows), deltas)
            expected[rows] += deltas
        known, sums = log.of(np.arange(20))
        np.testing.assert_array_equal(sums, expected[known])
        rows, sums = log.take()
        assert sorted(rows) == sorted(set().union(*additions) if additions else ())
        there = np.zeros((20, 2))
        there[rows] = sums
        np.testing.assert_array_equal(there, expected)
        assert log.count == 0
        assert not log.of(np.arange(20))[0].any()

    def test_an_oplog_grows_beyond_its_first_places(self):
        log = OpLog(spec_of(rows=5000))
        log.add(np.arange(5000)[::-1].copy(), np.ones((5000, 2)))
        log.add(np.arange(5000), np.ones((5000, 2)))
        rows, sums = log.take()
        assert len(rows) == 5000
        assert (sums == 2).all()


class TestWrites:
    @pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
    @pytest.mark.parametrize("width", [1, 3, 20])
    @pytest.mark.parametrize("kind", ["rows", "slice", "none", "view"])
    def test_rows_are_put_and_added_as_numpy_would(self, dtype, width, kind):
        chance = np.random.default_rng(width)
        target = chance.integers(-9, 9, (30, width)).astype(dtype)
        places = {"slice": slice(4, 14), "none": np.empty(0, dtype=np.int64)}.get(kind, chance.permutation(30)[:10])
        rows = chance.integers(-9, 9, (0 if kind == "none" else 10, 2 * width)).astype(dtype)
        rows = rows[:, :width] if kind == "view" else np.ascontiguousarray(rows[:, :width])
        for ours, put in ((put_rows, True), (add_rows, False)):
            found, expected = target.copy(), target.copy()
            ours(found, places, rows)
            expected[places] = rows if put else expected[places] + rows
            assert np.array_equal(found, expected)

    def test_a_place_that_is_not_there_is_refused(self):
        with pytest.raises(IndexError):
            put_rows(np.zeros((3, 2)), np.array([3]), np.ones((1, 2)))


class TestCache:
    def test_a_row_may_be_used_while_it_is_within_the_bound(self):
        cache, marks = Cache(spec_of(), None), RowDedup(10)
        cache.install(rows_of(1, 2), np.ones((2, 2)), slowest=4, clock=5)
        assert cache.lacking(rows_of(1, 2, 1), 7, 3, marks) is None
        assert list(cache.lacking(rows_of(1, 2, 2, 1), 8, 3, marks)) == [2, 1]
        assert list(cache.lacking(rows_of(1, 3), 7, 3, marks)) == [3]

    def test_what_was_fetched_in_this_clock_need_not_be_fetched_again(self):
        cache, marks = Cache(spec_of(), None), RowDedup(10)
        cache.install(rows_of(1), np.ones((1, 2)), slowest=0, clock=5)
        assert cache.lacking(rows_of(1), 5, 0, marks) is None
        assert list(cache.lacking(rows_of(1), 6, 0, marks)) == [1]

    def test_the_rows_used_longest_ago_make_room(self):
        cache, marks = Cache(spec_of(), 3), RowDedup(10)
        for row in (1, 2, 3):
            assert list(cache.lacking(rows_of(row), 0, 9, marks)) == [row]
            cache.install(rows_of(row), np.full((1, 2), float(row)), 0, 0)
        assert cache.lacking(rows_of(1), 0, 9, marks) is None
        assert list(cache.lacking(rows_of(4), 0, 9, marks)) == [4]
        cache.install(rows_of(4), np.full((1, 2), 4.0), 0, 0)
        assert [list(rows) for rows in cache.evicted] == [[2]]
        assert list(cache.lacking(rows_of(2), 0, 9, marks)) == [2]
        values, _ = cache.read(rows_of(4, 3, 1))
        assert values[:, 0].tolist() == [4, 3, 1]

    @settings(max_examples=50)
    @given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=12))
    def test_a_small_cache_reads_what_a_large_one_reads(self, reads):
        truth = np.arange(20, dtype=float).reshape(10, 2)
        cache, marks = Cache(spec_of(), 4), RowDedup(10)
        for rows in reads:
            wanted = rows_of(*rows)
            lacking = cache.lacking(wanted, 0, 9, marks)
            if lacking is not None:
                cache.install(lacking, truth[lacking], 0, 0)
            np.testing.assert_array_equal(cache.read(wanted)[0], truth[wanted])

    def test_a_row_that_is_being_installed_is_not_the_one_to_go(self):
        cache, marks = Cache(spec_of(), 4), RowDedup(10)
        truth = np.arange(20, dtype=float).reshape(10, 2)
        cache.lacking(np.arange(4), 0, 9, marks)
        cache.install(np.arange(4), truth[:4], 0, 0)
        cache.lacking(np.arange(4), 0, 9, marks)  # all were used just now
        cache.install(rows_of(0, 9), truth[[0, 9]], 0, 0)
        here = [row for row in range(10) if cache.lacking(rows_of(row), 0, 9, marks) is None]
        assert {0, 9} <= set(here)
        np.testing.assert_array_equal(cache.read(rows_of(*here))[0], truth[here])

    def test_more_rows_at_once_than_it_holds_are_refused_by_number(self):
        cache = Cache(spec_of(), 3)
        with pytest.raises(OptionError, match="4 rows are read at once and the cache holds 3; raise cache_rows"):
            cache.lacking(rows_of(1, 2, 3, 4), 0, 0, RowDedup(10))

    def test_a_cache_of_nothing_is_refused(self):
        with pytest.raises(OptionError, match="cache_rows must be a whole number >= 1, not 0"):
            Cache(spec_of(), 0)


class TestRules:
    def test_adagrad_steps_shrink_with_the_squares_seen(self):
        shelf = ServerTable(spec_of(rows=1, width=1, update="adagrad:rate=0.5"))
        for _ in range(2):
            shelf.apply(rows_of(0), np.array([[3.0]]))
        assert shelf.read(None)[0, 0] == pytest.approx(0.5 * (1 + 1 / 2**0.5))
        assert shelf.read(None)[0, 1] == pytest.approx(18.0)

    def test_clip_cuts_each_element(self):
        shelf = ServerTable(spec_of(rows=2, update="clip:limit=0.5"))
        shelf.apply(rows_of(1), np.array([[3.0, -0.25]]))
        assert shelf.read(rows_of(1)).tolist() == [[0.5, -0.25]]

    @pytest.mark.parametrize(
        "text", ["sub", "clip", "clip:limit=0", "clip:limit=x", "adagrad:limit=1", "adagrad:rate=inf"]
    )
    def test_a_rule_that_is_none_is_refused_by_name(self, text):
        with pytest.raises(OptionError, match="must be"):
            parse_rule(text)


class TestShelf:
    @given(some_rows)
    def test_shards_read_and_add_as_one_array(self, rows):
        before, shelves.BLOCK_BYTES = shelves.BLOCK_BYTES, 7 * 16
        try:
            shelf = ServerTable(spec_of(rows=20))
        finally:
            shelves.BLOCK_BYTES = before
        assert len(shelf.blocks) == 3
        whole = np.arange(40, dtype=float).reshape(20, 2)
        shelf.fill(whole)
        distinct = np.unique(rows)
        shelf.apply(distinct, np.ones((len(distinct), 2)))
        shelf.apply(None, whole)
        expected = 2 * whole
        expected[distinct] += 1
        np.testing.assert_array_equal(shelf.read(rows), expected[rows])
        np.testing.assert_array_equal(shelf.read(None), expected)


class TestSpec:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"rows": 0}, "rows must be a whole number from 1 to"),
            ({"width": 1.5}, "width must be a whole number"),
            ({"dtype": "float16"}, "dtype must be one of float32, float64, int32, int64, not float16"),
            ({"dtype": "apples"}, "not apples"),
            ({"staleness": -1}, "staleness must be a whole number of clocks >= 0 or None, not -1"),
            ({"dtype": "int32", "update": "adagrad:rate=1"}, "needs a table of floats, not int32"),
        ],
    )
    def test_what_cannot_be_is_refused_with_its_bound(self, options, text):
        with pytest.raises(OptionError, match=text):
            spec_of(**options)

    def test_numpys_and_torchs_own_dtypes_are_understood(self):
        import torch

        assert spec_of(dtype=np.float32).dtype == spec_of(dtype=torch.float32).dtype == "float32"
        assert spec_of(dtype=np.dtype("int64")).dtype == "int64"

    def test_another_shape_under_the_same_name_is_refused(self):
        with pytest.raises(OptionError, match="table 't' has rows 10, worker 3 opens it with rows 11"):
            spec_of().require_same(spec_of(rows=11), "worker 3")


class TestOpening:
    def test_whoever_comes_in_the_place_of_a_worker_that_was_asked_is_asked(self):
        said = []
        coordinator = SimpleNamespace(records={})
        store = shelves.TableStore(None)
        host = Host(coordinator, store, lambda worker, message: said.append((worker, message.wanted)), paced=False)
        opening = OpenTable(spec_of())
        host.open(0, opening, {0}, set())
        host.left(0, 0.0)
        host.open(0, opening, {0}, set())
        assert said == [(0, True), (0, True)]
        host.fill(0, TableInit(0, np.zeros((10, 2))))
        assert said[2:] == [(0, False)]
