"""Tables on real processes, whatever befalls them: committed clocks stay, the one under way goes whole."""

import os
import signal
import time

import numpy as np
import pytest
from clusters import cluster, event
from launching import launch

import paceline
from paceline.core.errors import UserError
from paceline.core.events import Left
from paceline.records import journal
from paceline.records.journal import Decision, Header
from paceline.records.metrics import fold
from paceline.records.replay import replay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]


class Count:
    """Every worker counts its clocks in a row of its own until all stand at `clocks`."""

    def __init__(self, clocks, workers=3, victim=None, at=None, pause_s=0.002, work=10, read=True):
        self.clocks, self.workers, self.victim, self.at = clocks, workers, victim, at
        self.pause_s, self.work, self.read = pause_s, work, read

    def __call__(self):
        session = paceline.init()
        table = session.table("counts", self.workers, 2, dtype="int64")
        while session.clocks < self.clocks:
            if self.read:
                table.get()
            table.inc([session.worker], np.array([[1, session.clocks]]))
            if (session.worker, session.clocks) == (self.victim, self.at):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(self.pause_s)
            if not session.clock(work=self.work):
                return
        session.barrier()


@pytest.mark.parametrize(
    ("strategy", "servers"),
    [
        ("ssp:staleness=1", 1),
        ("ssp:staleness=1", 2),
        *(pytest.param(name, servers, marks=pytest.mark.soak) for name in ("bsp", "asp") for servers in (1, 2)),
    ],
)
def test_a_killed_worker_leaves_its_committed_clocks_and_nothing_of_the_one_under_way(strategy, servers, tmp_path):
    run = launch(Count(15, victim=1, at=5), workers=3, strategy=strategy, servers=servers, runs_dir=tmp_path)
    assert run.ended == "done"
    assert run.tables["counts"][:, 0].tolist() == [15, 5, 15]
    assert run.tables["counts"][1, 1] == sum(range(5))
    lines = list(journal.read(run.journal))
    assert [x.event.worker for x in lines if isinstance(x, Decision) and isinstance(x.event, Left)
            and x.event.cause == "crash"] == [1]  # fmt: skip
    assert replay(run.journal).difference is None
    assert any("killed" in text or "signal" in text.lower() for text in run.summary.warnings)


@pytest.mark.soak
def test_a_killed_worker_comes_back_at_the_slowest_ones_clock_and_shares_the_work():
    run = launch(
        Count(60, victim=1, at=5, pause_s=0.01),
        workers=3,
        strategy="ssp:staleness=1",
        respawn=True,
    )
    counts = run.tables["counts"][:, 0]
    assert counts[[0, 2]].tolist() == [60, 60]
    assert 5 <= counts[1] <= 60


@pytest.mark.parametrize("servers", [1, 2])
def test_a_killed_server_loses_no_increment_and_has_none_twice(tmp_path, servers):
    scenario = cluster(1.0, 1.0, 0.5, events=event("server_crash", 1.0))
    run = launch(
        Count(40, work=2), scenario=scenario, strategy="ssp:staleness=2", runs_dir=tmp_path,
        checkpoint_every="6v", servers=servers,
    )  # fmt: skip
    assert run.ended == "done"
    headers = [line for line in journal.read(run.journal) if isinstance(line, Header)]
    assert len(headers) == 2
    assert headers[1].restored is not None
    assert run.tables["counts"].tolist() == [[40, sum(range(40))]] * 3
    assert replay(run.journal).difference is None


@pytest.mark.parametrize(
    ("strategy", "servers"),
    [
        ("ssp:staleness=3", 1),
        *(pytest.param(name, servers, marks=pytest.mark.soak) for name in ("bsp", "asp") for servers in (1, 2)),
    ],
)
def test_a_resumed_run_has_every_increment_once(strategy, servers, tmp_path):
    job = Count(20, workers=2, pause_s=0.0)
    first = launch(
        job, workers=2, strategy=strategy, runs_dir=tmp_path, checkpoint_every="5v", max_versions=14, servers=servers
    )
    assert first.ended == "limit"
    second = launch(job, workers=2, resume=first.folder)
    assert second.tables["counts"].tolist() == [[20, sum(range(20))]] * 2


@pytest.mark.soak
def test_a_checkpoint_of_tables_is_refused_by_a_script_of_another_shape(tmp_path):
    first = launch(
        Count(20, workers=2), workers=2, strategy="bsp", runs_dir=tmp_path, checkpoint_every="5v",
        max_versions=8,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"table 'counts' has rows 2, worker \d opens it with rows 3"):
        launch(Count(20, workers=3), workers=2, resume=first.folder)


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_an_emulated_scenario_takes_its_time_and_loses_none_of_it(tmp_path, servers):
    scenario = cluster(1.0, 0.5, jitter="lognormal:0.2", network="latency_ms = 5.0\nbandwidth_mbps = 100")
    run = launch(
        Count(20, workers=2, work=3),
        scenario=scenario,
        strategy="ssp:staleness=2",
        runs_dir=tmp_path,
        servers=servers,
    )
    assert run.tables["counts"][:, 0].tolist() == [20, 20]
    for present, made_up in fold(journal.read(run.journal)).time_law().values():
        assert made_up == pytest.approx(present, rel=0.05)
    assert replay(run.journal).difference is None


@pytest.mark.soak
def test_the_evaluators_process_measures_the_tables():
    def train():
        session = paceline.init()
        table = session.table("t", 1, dtype="float64", init=8.0)
        session.measure(lambda tables: {"loss": float(tables["t"][0, 0])})
        while True:
            table.inc(0, [-0.25])
            time.sleep(0.002)
            if not session.clock():
                break

    run = launch(train, strategy="bsp", target="loss=2", evaluate_every="1v")
    assert run.ended == "target"


@pytest.mark.soak
def test_a_table_of_two_shapes_ends_the_run_with_both():
    def train():
        session = paceline.init()
        session.table("t", 5 + session.worker)

    with pytest.raises(UserError, match=r"table 't' has rows \d, worker \d opens it with rows \d"):
        launch(train, workers=2)


@pytest.mark.soak
@pytest.mark.parametrize("names", [("xy", "yx"), ("xy", "x")])
def test_tables_may_be_opened_in_any_order_and_by_some(names):
    def train():
        session = paceline.init()
        tables = {name: session.table(name, 2) for name in names[session.worker]}
        for _ in range(3):
            tables["x"].inc([session.worker], [[1.0]])
            session.clock()

    assert (launch(train, workers=2, strategy="ssp:staleness=1").tables["x"] == 3.0).all()


@pytest.mark.parametrize("strategy", ["bsp", pytest.param("ssp:staleness=1", marks=pytest.mark.soak)])
def test_a_script_that_only_writes_loses_no_clock_at_its_end(strategy):
    class Write(Count):
        def __call__(self):
            session = paceline.init()
            table = session.table("counts", 2, 1, dtype="int64")
            for _ in range(400):
                table.inc([session.worker], np.ones((1, 1), dtype=np.int64))
                time.sleep(0.001 * session.worker)
                session.clock()

    run = launch(Write(0), workers=2, strategy=strategy)
    assert run.tables["counts"][:, 0].tolist() == [400, 400]


@pytest.mark.soak
def test_a_script_may_stop_everybody():
    def train():
        session = paceline.init()
        table = session.table("t", 1)
        count = 0
        while session.clock():
            table.get()
            count += 1
            if count == 5 and session.worker == 1:
                session.stop("enough")

    run = launch(train, workers=2, strategy="bsp")
    assert run.ended == "done"


@pytest.mark.soak
def test_a_worker_that_only_writes_is_told_that_its_clocks_arrived():
    run = launch(
        Count(100, workers=2, pause_s=0.0, read=False),
        workers=2,
        strategy="ssp:staleness=200",
    )
    assert run.tables["counts"][:, 0].tolist() == [100, 100]
