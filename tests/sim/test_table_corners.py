"""Corners of the tables that once were wrong: clocks of those who stepped aside, rows forgotten while they are fetched,
tables opened in another order, numbers that a dtype cannot hold."""

import random

import numpy as np
import pytest
import torch
from clusters import cluster, event

import paceline
from paceline.core.errors import InternalError, OptionError
from paceline.records.journal import Lines, Observation
from paceline.strategies.clocks import Clocks
from paceline.tables.table_spec import make_spec


def launch(train, scenario, strategy, **settings):
    return paceline.launch(
        train, engine="sim", scenario=scenario, strategy=strategy, evaluate_every="off", **settings
    )  # fmt: skip


def alone(train):
    return launch(train, cluster(1.0), "ssp:staleness=3")


def by_turns(session, table, clocks=30):
    """Now one, now the other worker is slow."""
    for clock in range(clocks):
        table.get()
        table.inc([session.worker], [[1.0]])
        session.clock(work=20 if (clock // 6) % 2 == session.worker else 2)


class TestClocks:
    def test_a_barrier_after_somebody_stepped_aside_is_passed_by_all_at_one_clock(self):
        passed = {}

        def train():
            session = paceline.init()
            table = session.table("t", 2, staleness=1)
            by_turns(session, table)
            session.barrier()
            passed[session.worker] = session.clocks
            assert (table.get() == 30.0).all()

        assert launch(train, cluster(1.0, 1.0), "adaptive_sync").ended == "done"
        assert passed[0] == passed[1]

    @pytest.mark.parametrize("at", [1.3, 2.0, 2.3, 3.0])
    def test_a_newcomer_does_not_set_anybodys_clock_back(self, at):
        def train():
            session = paceline.init()
            by_turns(session, session.table("t", 3, staleness=1))

        run = launch(train, cluster(1.0, 1.0, events=event("join", at, speed=1.0)), "adaptive_sync")
        assert run.summary.table_reads["t"].max_age <= 1

    def test_a_clock_that_goes_back_is_an_error_of_ours(self):
        clocks = Clocks()
        clocks.join(0)
        clocks.advance(0, 5)
        with pytest.raises(InternalError, match="has completed 5 clocks and is said to have completed 4"):
            clocks.advance(0, 4)

    @pytest.mark.parametrize("seed", range(6))
    def test_rows_asked_for_ahead_of_time_keep_nobody_away(self, seed):
        def train():
            session = paceline.init()
            chance = random.Random(seed * 10 + session.worker)
            table = session.table("t", 2, staleness=0)
            for _ in range(25):
                table.prefetch()
                table.get()
                table.inc([session.worker], [[1.0]])
                session.clock(work=chance.choice([1, 1, 2, 5, 10]))

        run = launch(train, cluster(1.0, 0.5), "adaptive_sync")
        assert (run.tables["t"] == 25.0).all()


class TestRowsOnTheirWay:
    def test_a_row_that_is_fetched_again_while_it_is_forgotten_stays_fresh(self):
        def train():
            session = paceline.init()
            table = session.table("t", 8, eager=True, cache_rows=2, dtype="int64")
            for clock in range(30):
                if session.worker == 0:
                    if clock == 2:
                        table.prefetch([1, 2])
                        table.prefetch([3, 4])
                        table.prefetch([1, 2])
                    if clock > 4:
                        assert table.get([1])[0, 0] >= clock - 3
                else:
                    table.inc([1], [[1]])
                session.clock()

        launch(train, cluster(1.0, 1.0, network="latency_ms = 5.0"), "ssp:staleness=3")

    def test_a_prefetch_does_not_look_at_its_rows_again(self):
        def train():
            session = paceline.init()
            table = session.table("t", 10, init=np.arange(10.0).reshape(10, 1))
            rows = np.array([1, 2])
            table.prefetch(rows)
            session.clock(work=6)
            rows[:] = [3, 4]
            assert table.get(rows).ravel().tolist() == [3.0, 4.0]

        launch(train, cluster(1.0, network="latency_ms = 50.0"), "ssp:staleness=3")

    def test_two_prefetches_for_one_clock_are_both_waited_for(self):
        def train():
            session = paceline.init()
            table = session.table("t", 10)
            for _ in range(10):
                table.prefetch([0, 1, 2])
                table.prefetch([3, 4, 5])
                session.clock(work=1)
                table.get([0, 1, 2, 3, 4, 5])

        run = launch(train, cluster(1.0, network="latency_ms = 50.0"), "ssp:staleness=0")
        assert run.summary.bytes_down <= 10 * 6 * 4

    def test_ages_are_written_from_the_least_on(self):
        lines = Lines()

        def train():
            session = paceline.init()
            table = session.table("t", 1)
            for _ in range(40 if session.worker else 400):
                table.get()
                session.clock()

        launch(train, cluster(1.0, 0.1), "asp", sink=lines)
        reads = [line.data for line in lines if isinstance(line, Observation) and line.what == "reads"]
        assert max(data["first"] + len(data["ages"]) for data in reads) > 300
        assert max(len(data["ages"]) for data in reads) == 1


class TestOpening:
    @pytest.mark.parametrize("names", [{0: "xy", 1: "yx"}, {0: "xy", 1: "x"}, {0: "x", 1: "xy"}])
    def test_tables_may_be_opened_in_any_order_and_by_some(self, names):
        def train():
            session = paceline.init()
            tables = {name: session.table(name, 2) for name in names[session.worker]}
            for _ in range(3):
                tables["x"].inc([session.worker], [[1.0]])
                session.clock()

        run = launch(train, cluster(1.0, 1.0), "ssp:staleness=1")
        assert (run.tables["x"] == 3.0).all()

    def test_who_only_writes_shares_the_work_with_nobody_twice(self):
        owned = {}

        def train():
            session = paceline.init()
            table = session.table("t", 12)
            while session.clocks < 30:
                for row in session.share(12):
                    owned.setdefault((session.clocks, int(row)), []).append(session.worker)
                table.inc(session.share(12), np.ones((len(session.share(12)), 1), dtype=np.float32))
                session.clock(work=5)

        launch(train, cluster(1.0, 0.2, events=event("join", 0.73, speed=1.0)), "ssp:staleness=1")
        assert {len(workers) for workers in owned.values()} == {1}


class TestNumbers:
    @pytest.mark.parametrize(
        ("call", "text"),
        [
            (lambda t: t.inc(0, [2**31 + 5, 1]), "2147483653 is not within what int32 holds"),
            (
                lambda t: t.inc([0], torch.ones(1, 2, dtype=torch.bfloat16)),
                "that NumPy has, not torch.bfloat16",
            ),
            (lambda t: t.inc([0], torch.ones(1, 2).to_sparse()), "must be a dense tensor"),
            (lambda t: t.inc([0], torch.ones(1, 2, dtype=torch.int64)), r"convert them with .to\(torch.int32\)"),
            (lambda t: t.inc([0, 1], [[1, 2], [3]]), "lists of equal lengths"),
            (lambda t: t.inc([0], np.ma.masked_array([[1, 2]], mask=[[0, 1]])), "must not be a masked array"),
            (lambda t: t.get(slice(0.5, 2)), "a slice of whole numbers"),
        ],
    )
    def test_a_refused_call_leaves_nothing(self, call, text):
        def train():
            session = paceline.init()
            table = session.table("t", 3, 2, dtype="int32")
            with pytest.raises(OptionError, match=text):
                call(table)
            table.inc([], [])
            session.clock()

        assert (alone(train).tables["t"] == 0).all()

    def test_sums_that_overflow_are_refused(self):
        def train():
            session = paceline.init()
            table = session.table("t", 3)
            large = np.full((2, 1), 3e38, dtype=np.float32)
            with pytest.raises(OptionError, match="delta of row 1 is not finite"):
                table.inc([1, 1], large)
            table.inc([2], large[:1])
            table.inc([2], large[:1])
            session.clock()

        with pytest.raises(OptionError, match="delta of row 2 is not finite"):
            alone(train)

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            (("int32", "clip:limit=0.5"), "clip's limit must be a whole number <= 2147483647"),
            (("int32", "clip:limit=5e9"), "clip's limit must be a whole number <= 2147483647"),
        ],
    )
    def test_a_rule_must_fit_the_dtype(self, settings, text):
        with pytest.raises(OptionError, match=text):
            make_spec("t", 3, 2, settings[0], None, settings[1], eager=False)

    def test_a_row_must_not_be_too_long(self):
        with pytest.raises(OptionError, match="a row must take less than 2147483648 bytes"):
            make_spec("t", 3, 1 << 29, "float64", None, "add", eager=False)

    @pytest.mark.parametrize("init", [2**40 + 7, np.uint64(2**63 + 1)])
    def test_a_start_that_the_dtype_cannot_hold_is_refused(self, init):
        with pytest.raises(OptionError, match="is not within what int32 holds"):
            alone(lambda: paceline.init().table("t", 3, dtype="int32", init=init).get())

    @pytest.mark.parametrize("cache_rows", [2.5, "2", 0])
    def test_a_cache_has_a_whole_number_of_rows(self, cache_rows):
        with pytest.raises(OptionError, match="cache_rows must be a whole number >= 1"):
            alone(lambda: paceline.init().table("t", 3, cache_rows=cache_rows))
