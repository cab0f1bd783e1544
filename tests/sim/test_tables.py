"""Scripts on tables in virtual time: what they read, what travels, and what happens when workers come and go."""

import numpy as np
import pytest
import torch
from clusters import cluster, event

import paceline
from paceline.core.errors import InternalError, OptionError, ScriptError, UserError
from paceline.records.journal import Lines, Observation

EVEN = cluster(1.0, 1.0, 1.0, 1.0)


def launch(train, scenario=EVEN, strategy="ssp:staleness=3", **settings):
    return paceline.launch(train, engine="sim", scenario=scenario, strategy=strategy, evaluate_every="off", **settings)


def alone(train, **settings):
    return launch(train, cluster(1.0), **settings)


class TestReadsAndWrites:
    def test_numpy_rows_get_arrays_torch_rows_get_tensors_and_a_number_gets_one_row(self):
        def train():
            table = paceline.init().table("t", 5, 2, init=np.arange(10.0).reshape(5, 2))
            assert isinstance(table.get([1, 3]), np.ndarray)
            assert table.get([1, 3]).tolist() == [[2, 3], [6, 7]]
            assert torch.equal(table.get(torch.tensor([4])), torch.tensor([[8.0, 9.0]]))
            assert table.get(2).tolist() == [4, 5]
            assert table.get(slice(3, None)).tolist() == table.get(range(3, 5)).tolist() == [[6, 7], [8, 9]]
            assert table.get([]).shape == (0, 2)
            table.inc(2, [1, 1])
            table.inc(torch.tensor([2, 2, 0]), torch.ones(3, 2))
            table.inc(None, np.full((5, 2), 10, dtype=np.float32))
            assert table.get().tolist() == [[11, 12], [12, 13], [17, 18], [16, 17], [18, 19]]

        run = alone(train)
        assert run.tables["t"].tolist() == np.arange(10.0).reshape(5, 2).tolist()  # nothing was committed

    def test_what_get_returns_is_the_callers_own(self):
        def train():
            session = paceline.init()
            table = session.table("t", 2)
            table.get()[:] = 7
            assert table.get().tolist() == [[0], [0]]
            deltas = np.ones((2, 1), dtype=np.float32)
            table.inc(None, deltas)
            deltas[:] = 9
            session.clock()
            assert table.get().tolist() == [[1], [1]]

        assert alone(train).tables["t"].tolist() == [[1], [1]]

    def test_a_table_that_is_opened_again_is_the_same_object(self):
        def train():
            session = paceline.init()
            assert session.table("t", 2) is session.table("t", 2)

        alone(train)

    @pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
    def test_every_dtype_adds_up(self, dtype):
        def train():
            session = paceline.init()
            table = session.table("t", 3, 1, dtype=dtype)
            for _ in range(4):
                table.inc([session.worker % 3, 2], np.array([[1], [2]], dtype=dtype))
                session.clock()

        run = launch(train)
        assert run.tables["t"].dtype == dtype
        assert run.tables["t"][:, 0].tolist() == [8, 4, 4 + 4 * 4 * 2]

    @pytest.mark.parametrize("update", ["add", "adagrad:rate=0.1", "clip:limit=2"])
    @pytest.mark.parametrize("options", [{}, {"eager": True}, {"cache_rows": 2}, {"cache_rows": 2, "eager": True}])
    def test_a_worker_alone_sees_after_each_clock_what_it_saw_before(self, update, options):
        def train():
            session = paceline.init()
            table = session.table("t", 4, 1, dtype="float64", update=update, **options)
            for it in range(6):
                row = it % 4
                table.get([row])
                table.inc([row], [[1.5]])
                seen = table.get(row)[0]
                session.clock()
                assert table.get(row)[0] == pytest.approx(seen)

        alone(train, strategy="bsp")

    def test_init_may_be_a_number_an_array_or_a_function_and_the_first_workers_counts(self):
        def train():
            session = paceline.init()
            table = session.table("t", 3, 2, init=lambda rows, width: np.full((rows, width), 5 + session.worker))
            other = session.table("u", 2, init=7)
            assert table.get().tolist() == [[5, 5]] * 3
            assert other.get().tolist() == [[7], [7]]

        launch(train)

    def test_the_final_tables_are_measured_however_rarely_others_are(self):
        def train():
            session = paceline.init()
            table = session.table("t", 1, dtype="float64")
            session.measure(lambda tables: {"sum": float(tables["t"][0, 0])})
            for _ in range(5):
                table.inc(0, [1.0])
                session.clock()

        run = paceline.launch(train, engine="sim", scenario=EVEN, strategy="bsp", evaluate_every="1000v")
        assert run.summary.metrics["sum"] == 20

    def test_the_run_measures_its_tables_and_reaches_a_target(self):
        def train():
            session = paceline.init()
            table = session.table("t", 1, dtype="float64", init=8.0)
            session.measure(lambda tables: {"loss": float(tables["t"][0, 0])})
            while True:
                table.inc(0, [-0.25])
                if not session.clock(work=5):
                    break

        run = paceline.launch(train, engine="sim", scenario=EVEN, strategy="bsp", target="loss=2")
        assert run.ended == "target"
        assert run.summary.target.reached_at_seconds == pytest.approx(6 * 0.05)
        assert run.summary.metrics["loss"] <= 2


class TestTime:
    def test_a_clock_takes_the_scenarios_time_for_its_work(self):
        def train():
            session = paceline.init()
            table = session.table("t", 1)
            for _ in range(10):
                table.get()
                session.clock(work=7)

        run = alone(train)
        assert run.summary.seconds == pytest.approx(10 * 7 * 0.01)
        assert run.summary.samples_used == 70

    def test_a_read_that_misses_takes_the_networks_time_and_one_from_the_cache_none(self):
        def train():
            session = paceline.init()
            table = session.table("t", 100, 10)
            for _ in range(8):
                table.get()
                session.clock()

        network = "latency_ms = 100.0"
        never = launch(train, cluster(1.0, network=network), "ssp:staleness=7")
        always = launch(train, cluster(1.0, network=network), "asp")
        # One fetch of two crossings and eight clocks; the last push is still to arrive. Without a bound: a fetch each.
        assert never.summary.seconds == pytest.approx(0.2 + 8 * 0.01 + 0.1)
        assert always.summary.seconds == pytest.approx(8 * (0.2 + 0.01) + 0.1)
        assert never.summary.bytes_down == 100 * 10 * 4
        assert always.summary.bytes_down == 8 * 100 * 10 * 4

    def test_the_time_law_holds(self):
        from paceline.records.metrics import fold

        def train():
            session = paceline.init()
            table = session.table("t", 50, 4)
            for _ in range(12):
                table.get()
                table.inc(None, np.ones((50, 4), dtype=np.float32))
                session.clock(work=3)

        lines = Lines()
        launch(train, cluster(1.0, 0.5, 0.25, jitter="lognormal:0.3", network="latency_ms = 2.0"), sink=lines)
        for present, made_up in fold(lines).time_law().values():
            assert made_up == pytest.approx(present, rel=0.01)

    def test_prefetched_rows_are_on_their_way_while_the_clock_is_computed(self):
        def train(ahead):
            def script():
                session = paceline.init()
                table = session.table("t", 10)
                for _ in range(10):
                    table.get([1, 2])
                    if ahead:
                        table.prefetch([1, 2])
                    session.clock(work=50)

            return script

        slow = cluster(1.0, network="latency_ms = 50.0")
        plain, ahead = (launch(train(flag), slow, "ssp:staleness=1") for flag in (False, True))
        assert ahead.summary.seconds < plain.summary.seconds - 9 * 0.04


class TestTraffic:
    def test_rows_are_fetched_about_once_per_staleness_and_one_clocks(self):
        def train():
            session = paceline.init()
            table = session.table("t", 20, 5)
            for _ in range(60):
                table.get()
                table.inc([session.worker], np.ones((1, 5), dtype=np.float32))
                session.clock()

        fetched = [launch(train, strategy=f"ssp:staleness={s}").summary.bytes_down for s in (0, 1, 3, 5)]
        for staleness, count in zip((1, 3, 5), fetched[1:], strict=True):
            assert fetched[0] / count == pytest.approx(staleness + 1, rel=0.35)

    def test_an_eager_table_is_fresher_within_the_same_bound(self):
        def train(eager):
            def script():
                session = paceline.init()
                table = session.table("t", 8, eager=eager)
                for _ in range(40):
                    table.get()
                    table.inc([session.worker], [[1.0]])
                    session.clock()

            return script

        ages = []
        for eager in (False, True):
            reads = launch(train(eager), strategy="ssp:staleness=5").summary.table_reads["t"]
            assert reads.max_age <= 5
            assert reads.rows == sum(reads.ages) == 4 * 40 * 8
            ages.append(sum(age * count for age, count in enumerate(reads.ages)))
        assert ages[1] < ages[0] / 2

    def test_an_eager_table_with_a_bound_of_its_own_need_not_be_read_in_every_clock(self):
        def train():
            session = paceline.init()
            table = session.table("t", 4, staleness=0, eager=True)
            for it in range(30):
                if it % 3 == session.worker % 3:
                    assert table.get()[session.worker, 0] == it
                table.inc([session.worker], [[1.0]])
                session.clock(work=1 + session.worker)

        assert launch(train).summary.table_reads["t"].max_age == 0


class TestComingAndGoing:
    def test_a_crash_keeps_committed_clocks_and_drops_the_one_under_way(self):
        def train():
            session = paceline.init()
            table = session.table("t", 3)
            for _ in range(20):
                table.get()
                table.inc([session.worker], [[1.0]])
                session.clock(work=10)

        run = launch(train, cluster(1.0, 1.0, 1.0, events=event("crash", 0.55, worker=1)), "ssp:staleness=2")
        assert run.tables["t"][:, 0].tolist() == [20, 5, 20]
        assert run.summary.seconds == pytest.approx(20 * 0.1)

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", ["bsp", "ssp:staleness=1", "ssp:staleness=3", "dssp:lower=1,upper=3"])
    def test_no_row_has_two_owners_at_one_clock_and_none_has_none_once_it_is_dealt_anew(self, strategy):
        rows, clocks = 12, 20

        def train():
            session = paceline.init()
            owners = session.table("owners", rows * clocks)
            while session.clocks < clocks:
                mine = session.share(rows)
                owners.get([0])
                owners.inc(session.clocks * rows + mine, np.ones((len(mine), 1), dtype=np.float32))
                if not session.clock(work=10):
                    break

        for victim in range(4):
            events = event("crash", 0.73, worker=victim) + event("join", 1.1, speed=1.0)
            run = launch(train, cluster(1.0, 0.5, 0.8, 1.0, events=events, jitter="lognormal:0.4"), strategy)
            counts = run.tables["owners"][:, 0].reshape(clocks, rows)
            assert counts.max() == 1
            assert (counts[-4:] == 1).all()

    @pytest.mark.parametrize("strategy", ["bsp", "ssp:staleness=1", "dssp", "adaptive_sync"])
    def test_a_script_that_only_writes_loses_no_clock_at_its_end(self, strategy):
        def train():
            session = paceline.init()
            table = session.table("t", 4)
            for _ in range(30):
                table.inc([session.worker], [[1.0]])
                session.clock(work=1 + 5 * session.worker)

        assert launch(train, strategy=strategy).tables["t"][:, 0].tolist() == [30] * 4

    def test_a_script_may_stop_everybody(self):
        def train():
            session = paceline.init()
            table = session.table("t", 1)
            count = 0
            while session.clock(work=5):
                table.get()
                count += 1
                if count == 5 and session.worker == 2:
                    session.stop("enough")

        run = launch(train)
        assert run.ended == "done"
        assert any("enough" in text for text in run.summary.warnings)

    def test_a_newcomer_takes_its_share_from_a_later_clock_on(self):
        def train():
            session = paceline.init()
            table = session.table("t", 2)
            shares = []
            for _ in range(12 if session.worker < 2 else 4):
                shares.append(len(session.share(12)))
                table.get()
                session.clock(work=10)
            table.inc([0 if session.worker < 2 else 1], [[float(sum(shares))]])
            session.clock()

        scenario = cluster(1.0, 1.0, events=event("join", 0.35, speed=1.0))
        run = launch(train, scenario, "ssp:staleness=1")
        assert 0 < run.tables["t"][1, 0] <= 4 * 4

    @pytest.mark.parametrize("strategy", ["bsp", "asp", "ssp:staleness=1", "dssp", "adaptive_sync"])
    def test_workers_that_did_unequal_numbers_of_clocks_meet_at_a_barrier(self, strategy):
        def train():
            session = paceline.init()
            table = session.table("t", 3)
            for _ in range(3 * (session.worker + 1)):
                table.get()
                table.inc([session.worker], [[1.0]])
                session.clock(work=2)
            session.barrier()
            assert table.get()[:, 0].tolist() == [3, 6, 9]
            for _ in range(2):
                table.get()
                table.inc(None, np.ones((3, 1), dtype=np.float32))
                session.clock(work=2)
            session.barrier()
            assert table.get()[:, 0].tolist() == [9, 12, 15]

        launch(train, cluster(1.0, 0.5, 0.8), strategy)

    def test_a_limit_ends_the_scripts_wherever_they_are(self):
        def train():
            session = paceline.init()
            table = session.table("t", 1)
            while session.clock(work=10):
                table.get()

        assert launch(train, max_versions=30, strategy="bsp").ended == "limit"


class TestBadInput:
    @pytest.mark.parametrize(
        ("call", "text"),
        [
            (lambda t: t.get([5]), "rows must be 0 to 4, not 5"),
            (lambda t: t.get([-1]), "rows must be 0 to 4, not -1"),
            (lambda t: t.get([0.5]), "rows must be whole numbers in one dimension, not float64"),
            (lambda t: t.inc([0, 9], np.ones((2, 2), dtype=np.float32)), "rows must be 0 to 4, not 9"),
            (lambda t: t.inc([0], np.ones((1, 3), dtype=np.float32)), r"must have shape \(1, 2\), not \(1, 3\)"),
            (lambda t: t.inc([0], [["a", "b"]]), "is of float32, the deltas of <U1"),
            (lambda t: t.inc([0], np.ones((1, 2))), "is of float32, the deltas of float64: convert them"),
            (
                lambda t: t.inc([3, 4], np.array([[0, 1], [np.nan, 1]], dtype=np.float32)),
                "the delta of row 4 is not finite; nothing of it was applied",
            ),
        ],
    )
    def test_a_refused_call_is_named_and_nothing_of_it_is_applied(self, call, text):
        def train():
            session = paceline.init()
            table = session.table("t", 5, 2)
            table.get()
            with pytest.raises(OptionError, match=text):
                call(table)
            session.clock()

        assert (alone(train).tables["t"] == 0).all()

    def test_fractions_are_not_cut_off_for_a_table_of_whole_numbers(self):
        def train():
            table = paceline.init().table("t", 1, dtype="int64")
            with pytest.raises(OptionError, match="is of int64, the deltas of float64"):
                table.inc(0, [0.5])

        alone(train)

    def test_a_clock_after_the_run_ended_is_refused(self):
        def train():
            session = paceline.init()
            session.table("t", 1)
            while session.clock():
                pass
            with pytest.raises(UserError, match="clock.. after the run ended: leave the loop when"):
                session.clock()

        assert alone(train, max_versions=5).summary.versions == 5

    def test_another_shape_under_the_same_name_is_refused(self):
        def train():
            session = paceline.init()
            session.table("t", 5 + session.worker)

        with pytest.raises(OptionError, match="table 't' has rows 5, worker 1 opens it with rows 6"):
            launch(train)

    @pytest.mark.parametrize(
        ("train", "text"),
        [
            (lambda s: s.clock(), "open the tables first"),
            (lambda s: (s.table("t", 1), s.clock(work=0)), "must be a whole number >= 1, not 0"),
            (lambda s: s.table("t", 3, init=np.zeros((2, 1))), r"shape \(3, 1\), not \(2, 1\)"),
            (lambda s: s.table("t", 3, init=np.nan), "not finite"),
            (lambda s: s.table("t", 3, dtype="int64", init=0.5), "init is of float64, the table of int64"),
            (lambda s: (s.table("t", 1), s.clock(), s.table("u", 1)), "open all tables before that"),
            (lambda s: s.measure(3), "must be a function of the tables, not int"),
        ],
    )
    def test_what_a_session_cannot_do_is_refused(self, train, text):
        with pytest.raises(UserError, match=text):
            alone(lambda: train(paceline.init()))

    def test_a_strategy_without_clocks_of_its_own_is_refused_by_name(self):
        with pytest.raises(
            OptionError, match="dasp does not work on tables: choose bsp, asp, ssp, dssp, adaptive_sync"
        ):
            launch(lambda: paceline.init().table("t", 1), strategy="dasp")

    def test_a_model_and_tables_do_not_go_together(self):
        def train():
            session = paceline.init()
            session.table("t", 1)
            model = torch.nn.Linear(1, 1)
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        with pytest.raises(UserError, match="a run trains a model or works on tables"):
            alone(train)


class TestTheCheck:
    def test_a_read_older_than_the_bound_ends_the_run_with_both_clocks_and_the_row(self, monkeypatch):
        from paceline.tables import host

        def train():
            session = paceline.init()
            table = session.table("t", 4, staleness=1)
            for _ in range(20):
                table.get()
                session.clock(work=10)

        monkeypatch.setattr(host, "may_read", lambda slowest, clock, staleness: slowest >= clock - staleness - 1)
        with pytest.raises((InternalError, ScriptError), match=r"row 0 of table 't' was read at clock \d+ as of clock"):
            launch(train, cluster(1.0, 0.25), "asp")

    def test_every_read_is_on_record(self):
        def train():
            session = paceline.init()
            table = session.table("t", 4)
            for _ in range(5):
                table.get([0, 1])
                table.get([2])
                session.clock()

        lines = Lines()
        run = launch(train, sink=lines)
        observed = [line for line in lines if isinstance(line, Observation) and line.what == "reads"]
        assert len(observed) == 4 * 5
        assert all(sum(line.data["ages"]) == 3 for line in observed)
        assert run.summary.table_reads["t"].rows == 60


def test_a_script_on_tables_runs_alone_as_it_is():
    session = paceline.init()
    table = session.table("t", 3)
    measured = []
    session.measure(lambda tables: measured.append(tables["t"].sum()) or {"loss": float(tables["t"].sum())})
    for _ in range(4):
        mine = session.share(3)
        assert mine.tolist() == [0, 1, 2]
        table.inc(mine, np.ones((3, 1), dtype=np.float32))
        assert session.clock()
    session.barrier()
    assert table.get().tolist() == [[4], [4], [4]]
    assert measured[-1] == 12
