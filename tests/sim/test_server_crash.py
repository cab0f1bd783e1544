"""A server that crashes in virtual time goes on from its newest checkpoint, and its workers live on."""

import threading

import pytest
import torch
from clusters import UNEVEN, cluster, event
from reference_runs import CENTRAL, PEERS, ROWS, Train

import paceline
from attacks import foreign_checker, foreign_runs
from paceline import ScenarioError, strategies
from paceline.core.actions import Apply
from paceline.core.errors import OptionError
from paceline.core.events import Joined, Left
from paceline.engines.sim.light import RESTART_S, simulate
from paceline.records import Lines, journal
from paceline.records.journal import Decision, Header, Observation, Writer
from paceline.records.replay import replay

EPOCHS = 3
LINE = "latency_ms = 2"


def crashing(*moments, events="", speeds=UNEVEN, network=LINE, **keys):
    """A cluster whose server crashes at these seconds."""
    crashes = "".join(event("server_crash", at, **keys) for at in moments)
    return cluster(*speeds, jitter="lognormal:0.2", network=network, events=crashes + events)


def launch(folder, scenario, script=None, **settings):
    settings = {"strategy": "asp", "checkpoint_every": "3v", "evaluate_every": "off", **settings}
    return paceline.launch(script or Train((EPOCHS,)), engine="sim", scenario=scenario, runs_dir=folder, **settings)


def lines_of(run):
    return list(journal.read(run.journal))


def observed(lines, what):
    return [line for line in lines if isinstance(line, Observation) and line.what == what]


def restarts(lines):
    """The seconds at which a server came back."""
    after = [number + 1 for number, line in enumerate(lines) if isinstance(line, Header) and line.restored is not None]
    return [lines[number].event.at for number in after]


def first_joins(lines):
    """When each worker joined after the first restart."""
    begun = next(n for n, line in enumerate(lines) if isinstance(line, Header) and line.restored is not None)
    joins = [line.event for line in lines[begun:] if isinstance(line, Decision) and isinstance(line.event, Joined)]
    return {each.worker: each.at for each in reversed(joins)}


@pytest.mark.parametrize("strategy", [*CENTRAL.values(), *PEERS.values()])
def test_every_sample_is_settled_once_whoever_waits_for_whom(strategy, tmp_path):
    run = launch(tmp_path, crashing(0.4, 0.75, for_=0.1), strategy=strategy)
    assert run.ended == "done"
    assert run.summary.samples_used == EPOCHS * len(ROWS)
    assert len([line for line in lines_of(run) if isinstance(line, Header)]) == 3
    assert replay(run.journal).difference is None
    assert foreign_checker.faults(foreign_checker.read(run.journal), whole=True) == []


def test_what_was_done_since_the_checkpoint_is_rolled_back_and_told(tmp_path):
    run = launch(tmp_path, crashing(0.4, for_=0.3))
    lines = lines_of(run)
    at = next(number for number, line in enumerate(lines) if isinstance(line, Header) and number)
    before, restored = lines[:at], lines[at].restored
    made = sum(len([a for a in line.actions if isinstance(a, Apply)]) for line in before if isinstance(line, Decision))
    assert restored.version in [line.data["version"] for line in observed(before, "checkpoint")]
    assert restored.version < made
    (told,) = observed(lines, "rolled_back")
    assert told.at == pytest.approx(0.7)
    assert told.data["versions"] == made - restored.version
    assert run.summary.samples_used == EPOCHS * len(ROWS)


def test_the_server_is_back_after_for_seconds_or_a_usual_time(tmp_path):
    assert restarts(lines_of(launch(tmp_path, crashing(0.4, for_=0.3)))) == [pytest.approx(0.7)]
    assert restarts(lines_of(launch(tmp_path, crashing(0.4)))) == [pytest.approx(0.4 + RESTART_S)]


def test_the_same_run_writes_the_same_journal(tmp_path):
    one, other = (launch(tmp_path, crashing(0.4, 0.8)) for _ in range(2))
    assert one.journal.read_bytes() == other.journal.read_bytes()


def test_under_bsp_nobody_could_tell_from_the_model(tmp_path):
    smooth = launch(tmp_path, crashing(), strategy="bsp")
    rough = launch(tmp_path, crashing(0.35, 0.9), strategy="bsp")
    assert rough.summary.versions == smooth.summary.versions
    for name, tensor in smooth.model_state.items():
        assert torch.equal(rough.model_state[name], tensor)


def test_scripts_live_on(tmp_path):
    threads = []

    def script():
        threads.append(threading.get_ident())
        Train((EPOCHS,))()

    run = launch(tmp_path, crashing(0.4, 0.8), script)
    assert run.ended == "done"
    assert len(threads) == len(UNEVEN)


@pytest.mark.parametrize("kind", ["pause", "partition"])
def test_a_worker_that_is_stopped_or_cut_off_finds_the_server_afterwards(kind, tmp_path):
    lines = lines_of(launch(tmp_path, crashing(0.4, for_=0.1, events=event(kind, 0.3, worker=1, for_=0.6))))
    assert first_joins(lines)[1] == pytest.approx(0.9)


def test_a_second_crash_before_somebody_has_found_the_first_successor(tmp_path):
    events = event("partition", 0.3, worker=1, for_=0.6)
    run = launch(tmp_path, crashing(0.4, for_=0.1, events=events + event("server_crash", 0.9, for_=0.1)))
    assert run.summary.samples_used == EPOCHS * len(ROWS)
    quick = event("join", 0.2) + event("partition", 0.3, worker=4, for_=1.0) + event("server_crash", 0.7, for_=0.1)
    run = launch(tmp_path, crashing(0.4, for_=0.1, events=quick), Train((8,)))
    assert run.summary.samples_used == 8 * len(ROWS)
    assert first_joins(lines_of(run))[4] == pytest.approx(1.3)


def test_what_happens_in_its_absence_happens_when_it_is_back(tmp_path):
    missed = event("crash", 0.45, worker=1) + event("join", 0.5) + event("crash", 0.4, worker=2)
    lines = lines_of(launch(tmp_path, crashing(0.4, for_=0.3, events=missed)))
    struck = {line.data["kind"]: line.at for line in observed(lines, "scenario") if line.worker != 2}
    assert struck["crash"] == struck["join"] == pytest.approx(0.7)
    assert [line.at for line in observed(lines, "scenario") if line.worker == 2] == [0.4]  # in the server's last second
    left = [line.event for line in lines if isinstance(line, Decision) and isinstance(line.event, Left)]
    assert (2, "crash") in [(each.worker, each.cause) for each in left if each.at == 0.4]


def test_a_worker_that_was_gone_before_comes_back_as_the_scenario_says(tmp_path):
    events = event("crash", 0.2, worker=1) + event("leave", 0.25, worker=2) + event("rejoin", 0.8, workers=[1, 2])
    lines = lines_of(launch(tmp_path, crashing(0.4, for_=0.1, events=events), script=Train((6,))))
    assert set(first_joins(lines)) == {0, 1, 2, 3}
    assert first_joins(lines)[1] == pytest.approx(0.8)


def test_a_server_that_nobody_outlives_waits_for_those_that_come_back(tmp_path):
    gone = event("crash", 0.3, workers=[0, 1, 2, 3]) + event("rejoin", 1.5, workers=[1, 2])
    run = launch(tmp_path, crashing(0.4, for_=0.1, events=gone))
    assert run.summary.samples_used == EPOCHS * len(ROWS)
    assert set(first_joins(lines_of(run))) == {1, 2}
    with pytest.raises(ScenarioError, match="every worker has left at 0.5 s and data remains"):
        launch(tmp_path, crashing(0.4, for_=0.1, events=event("crash", 0.45, workers=[0, 1, 2, 3])))


def test_a_run_whose_time_is_up_in_the_servers_absence_ends_when_it_is_back(tmp_path):
    run = launch(tmp_path, crashing(0.4, for_=0.3), max_seconds=0.5)
    assert run.ended == "limit"
    assert foreign_checker.faults(foreign_checker.read(run.journal)) == []


def test_a_crash_needs_checkpoints_and_a_folder_for_them(tmp_path):
    with pytest.raises(OptionError, match="server_crash needs a checkpoint to go on from: give --checkpoint-every"):
        paceline.launch(Train(), engine="sim", scenario=crashing(0.4))
    with pytest.raises(OptionError, match="checkpoint_every needs a folder to write to: give runs_dir"):
        paceline.launch(Train(), engine="sim", scenario=crashing(0.4), checkpoint_every="3v")
    assert not list(tmp_path.iterdir())


def test_a_crash_before_the_first_checkpoint_is_an_error(tmp_path):
    with pytest.raises(
        ScenarioError, match=r"crashes at 0.01 s, before its first checkpoint is complete: let it crash "
    ):
        launch(tmp_path, crashing(0.01))


def test_checkpoints_without_a_crash_change_no_decision(tmp_path):
    without = lines_of(launch(tmp_path, crashing(), checkpoint_every=None))
    having = lines_of(launch(tmp_path, crashing()))
    assert [line for line in having if isinstance(line, Decision)] == [
        line for line in without if isinstance(line, Decision)
    ]
    assert {line.data["seconds"] for line in observed(having, "checkpoint")} == {0.0}
    assert having[0].options["checkpoint_every"] == "3v"
    assert "checkpoint_every" not in without[0].options


@pytest.mark.parametrize("strategy", ["bsp", "asp", "ssp:staleness=1", "dssp:lower=1,upper=3", "adaptive_sync"])
def test_no_increment_of_a_table_is_lost_and_none_counted_twice(strategy, tmp_path):
    job = foreign_runs.tables(15, None, eager=False, barrier=True)
    run = launch(tmp_path, crashing(0.2, 0.5, for_=0.05), job, strategy=strategy)
    assert len([line for line in lines_of(run) if isinstance(line, Header)]) == 3
    assert run.tables["t"][:, 0].tolist() == [15] * len(UNEVEN) + [0] * (12 - len(UNEVEN))
    assert replay(run.journal).difference is None
    assert foreign_checker.faults(foreign_checker.read(run.journal), whole=True) == []


def test_a_worker_on_tables_that_is_ahead_of_the_checkpoint_does_not_wait_for_itself(tmp_path):
    """It came after the checkpoint, so the others repeat clocks that it never made, and its next read is of its own."""
    job = foreign_runs.tables(15, 0, eager=False, barrier=False)
    scenario = crashing(0.13, for_=0.05, speeds=(1.0, 1.0, 1.0), network="", events=event("join", 0.125))
    run = launch(tmp_path, scenario, job, strategy="dssp:lower=2,upper=2", checkpoint_every="100v")
    assert run.ended == "done"


class TestLightWorkers:
    @pytest.mark.parametrize("strategy", CENTRAL.values())
    def test_every_sample_is_settled(self, strategy, tmp_path):
        events = event("crash", 0.1, worker=1) + event("rejoin", 0.5, worker=1) + event("join", 0.45)
        events += event("partition", 0.6, worker=2, for_=0.8) + event("leave", 0.65, worker=0)
        writer = Writer(tmp_path / "journal.jsonl")
        done = simulate(
            strategies.build(strategy, 0), crashing(0.4, 1.0, for_=0.3, events=events), work=5, samples=600,
            checkpoint_every=3, sink=writer,
        )  # fmt: skip
        writer.close()
        assert done.used >= 600
        assert replay(tmp_path / "journal.jsonl").difference is None
        lines = foreign_checker.read(tmp_path / "journal.jsonl")
        assert foreign_checker.faults(lines, whole=True) == []
        assert len([line for line in lines if line["type"] == "header"]) == 3

    def test_a_crash_needs_checkpoints(self):
        with pytest.raises(ScenarioError, match="server_crash needs a checkpoint to go on from: give checkpoint_every"):
            simulate(strategies.build("bsp", 0), crashing(0.4), max_versions=10)
        with pytest.raises(OptionError, match="checkpoint_every must be >= 1 versions, not 0"):
            simulate(strategies.build("bsp", 0), crashing(0.4), max_versions=10, checkpoint_every=0)

    def test_the_time_may_be_up_in_the_servers_absence(self):
        lines = Lines()
        simulate(strategies.build("asp", 0), crashing(0.4, for_=0.3), max_seconds=0.5, checkpoint_every=3, sink=lines)
        (end,) = observed(lines, "end")
        assert end.data["cause"] == "limit"
        assert end.at == pytest.approx(0.7)
