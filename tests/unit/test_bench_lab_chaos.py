"""Chaos on a lab: what is read from a journal, what the verdicts catch, and that a small benchmark runs."""

import json
import os
import sys
from types import SimpleNamespace

import msgspec
import pytest

import bench_lab_chaos as bench
import bench_shard_chaos as shard_chaos
import chaos_times as times
import netlab
from chaos_times import Kill, Moment

ZERO = 1000.0  # the machine's clock when the run's was 0


def header(restored=None):
    return {"type": "header", "restored": restored}


def report(at, late=0.0):
    return {"type": "observation", "what": "report", "at": at, "data": {"name": "monotonic", "value": ZERO + at - late}}


def decided(at, kind, worker, *actions, **more):
    event = {"at": at, "kind": kind, "worker": worker, **more}
    return {"type": "decision", "event": event, "actions": [{"kind": action} for action in actions]}


def rolled_back(**data):
    return {"type": "observation", "what": "rolled_back", "at": 0.0, "data": data}


@pytest.fixture
def journal():
    """Three workers; worker 2 dies at 5.0, the server at 10.0."""
    return [
        header(),
        report(1.0, late=0.4),
        *(decided(0.0, "joined", worker, "grant") for worker in range(3)),
        *(decided(4.0, "pushed", worker, *(["apply"] * (worker == 2))) for worker in range(3)),
        report(4.5, late=0.01),
        decided(4.9, "pushed", 0),
        decided(5.2, "left", 2, cause="crash"),
        decided(5.3, "pushed", 1, "apply"),
        decided(5.9, "pushed", 0, "apply"),
        decided(7.0, "joined", 2, "grant"),
        header({"version": 2}),
        rolled_back(versions=1, samples=32, pushes=2),
        decided(5.0, "left", 0, cause="crash"),  # of the checkpoint's workers
        *(decided(10.5, "joined", worker) for worker in range(3)),
        report(11.0, late=0.02),
        decided(11.5, "pushed", 0, "apply"),
        decided(20.0, "left", 0, cause="done"),
    ]


KILLS = [Kill(ZERO + 5.0, "worker", (2,)), Kill(ZERO + 10.0, "server")]


def test_moments_are_put_on_the_machines_clock_by_its_fastest_report(journal):
    assert times.zero_of(journal[:12]) == pytest.approx(ZERO - 0.01)
    found = times.moments(journal)
    assert [moment.kind for moment in found].count("restored") == 1
    assert found[0].at == pytest.approx(ZERO - 0.01)
    assert not [moment for moment in found if moment.kind == "left" and moment.worker == 0 and moment.cause == "crash"]
    silent = [header({"version": 2}), decided(12.0, "joined", 0)]
    assert times.moments([*journal, *silent])[-1].at == pytest.approx(ZERO + 12 - 0.02)
    with pytest.raises(ValueError, match="no worker reported"):
        times.moments([header(), decided(0.0, "joined", 0)])


def test_a_workers_death_lasts_until_all_others_have_pushed_after_it_was_noticed(journal):
    (death,) = times.worker_deaths(KILLS, times.moments(journal))
    assert death.noticed_s == pytest.approx(0.19)
    assert death.version_s == pytest.approx(0.29)
    assert death.all_others_s == pytest.approx(0.89)


def test_a_machines_death_lasts_until_the_server_goes_on_without_all_its_workers(journal):
    later = next(number for number, line in enumerate(journal) if line.get("event", {}).get("at") == 5.9)
    journal.insert(later, decided(5.35, "left", 1, cause="crash"))
    both = Kill(ZERO + 5.0, "machine", (1, 2))
    (death,) = times.worker_deaths([both], times.moments(journal))
    assert (death.noticed_s, death.all_others_s) == pytest.approx((0.34, 0.89))
    assert times.departures_without_a_kill([both], times.moments(journal)) == []
    assert len(times.departures_without_a_kill(KILLS, times.moments(journal))) == 1


def test_nobody_waits_for_a_worker_that_had_not_joined(journal):
    early = Kill(ZERO + 4.95, "worker", (7,))
    (death,) = times.worker_deaths([early], times.moments(journal))
    assert death.noticed_s is None
    assert death.version_s == pytest.approx(0.34)


def test_others_that_do_not_push_again_are_not_measured(journal):
    stuck = [line for line in journal[:12] if line.get("event", {}).get("at") != 5.9]
    (death,) = times.worker_deaths(KILLS[:1], times.moments(stuck))
    assert death.version_s == pytest.approx(0.29)
    assert death.all_others_s is None


def test_a_servers_death_lasts_until_the_next_version_and_says_what_was_rolled_back(journal):
    (death,) = times.server_deaths(KILLS, times.moments(journal))
    assert death.version_s == pytest.approx(1.48)
    assert death.workers == 3
    assert times.rollbacks(journal) == [{"versions": 1, "samples": 32, "pushes": 2}]
    (none,) = times.server_deaths(KILLS, times.moments(journal[:12]))
    assert none.version_s is None
    (shard,) = times.server_deaths([Kill(ZERO + 10.0, "shard")], times.moments(journal))
    assert shard.version_s == death.version_s


def test_a_server_that_dies_again_before_it_says_anything_makes_the_first_death_last(journal):
    twice = [*KILLS, Kill(ZERO + 10.2, "server")]
    first, second = times.server_deaths(twice, times.moments(journal))
    assert (first.version_s, second.version_s) == pytest.approx((1.48, 1.28))
    assert len(times.rollbacks(journal)) == 1


def test_departures_that_no_kill_explains_are_found(journal):
    found = times.moments(journal)
    assert times.departures_without_a_kill(KILLS, found) == []
    assert [moment.worker for moment in times.departures_without_a_kill([], found)] == [2]
    late = [Kill(ZERO + 6.0, "worker", (2,))]
    assert len(times.departures_without_a_kill(late, found)) == 1
    twice = [*found, Moment(ZERO + 30, "left", 2, "timeout")]
    assert [moment.cause for moment in times.departures_without_a_kill(KILLS, twice)] == ["timeout"]


def test_the_longest_silence_counts_from_the_begin_to_the_end(journal):
    found = times.moments(journal)
    assert times.longest_silence(found, ZERO, ZERO + 12) == pytest.approx(11.48 - 5.89)
    assert times.longest_silence(found, ZERO, ZERO + 30) == pytest.approx(30 - 11.48)


# -- verdicts ----------------------------------------------------------------------------------------------------------

SHARD, MACHINE = Kill(ZERO + 20.0, "shard"), Kill(ZERO + 30.0, "machine", (0, 1))
SHARDED = bench.Case("bsp", servers=2, on_ray=True)
FINE = bench.Found(
    case=bench.Case("bsp"), kills=KILLS, workers=[times.WorkerDeath(KILLS[0], 0.1, 0.2, 1.9)],
    servers=[times.ServerDeath(KILLS[1], 14.0)], rolled_back=[times.NO_LOSS], cuts=1, ended=True,
    accuracy=0.96, versions=100, restarted=0, missing=0, places_lost=0, faults=[],
    plants=dict.fromkeys(bench.PLANTS, True), left=[], abandoned=0, silence_s=7.0, seconds=60.0,
)  # fmt: skip
ALSO_FINE = msgspec.structs.replace(
    FINE, case=SHARDED, kills=[*KILLS, SHARD, MACHINE],
    workers=[*FINE.workers, times.WorkerDeath(MACHINE, 1.0, 1.1, 1.9)],
    servers=[*FINE.servers, times.ServerDeath(SHARD, 14.9)],
)  # fmt: skip
SLOW_SERVER = times.ServerDeath(KILLS[1], 15.1)


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"accuracy": 0.949}, ["target"]),
        ({"ended": False}, ["target"]),
        ({"workers": [times.WorkerDeath(KILLS[0], 0.1, 0.2, 2.1)]}, ["goes on"]),
        ({"workers": [*FINE.workers, times.WorkerDeath(KILLS[0], 0.1, None, None)]}, ["goes on"]),
        ({"workers": []}, ["goes on"]),
        ({"workers": [*FINE.workers, times.WorkerDeath(KILLS[0], 0.1, None, None, others=0)]}, []),
        ({"restarted": 1}, ["unharmed"]),
        ({"missing": 1}, ["back"]),
        ({"places_lost": 1}, ["places"]),
        ({"servers": [*FINE.servers, SLOW_SERVER]}, ["server"]),
        ({"servers": [times.ServerDeath(KILLS[1], None)]}, ["server"]),
        ({"servers": [*FINE.servers, times.ServerDeath(KILLS[1], 99.0, workers=0)]}, []),
        ({"servers": [*FINE.servers, times.ServerDeath(KILLS[1], None, workers=0)]}, []),
        ({"servers": [times.ServerDeath(KILLS[1], 1.0, workers=0)]}, ["server"]),
        ({"servers": []}, ["server"]),
        ({"faults": ["line 1: no push is applied twice"]}, ["journal"]),
        ({"plants": {**FINE.plants, "a push is lost": False}}, ["plants"]),
        ({"left": ["process 7"]}, ["left"]),
    ],
)
def test_each_planted_fault_is_caught(change, missed):
    found = msgspec.structs.replace(FINE, **change)
    assert [bar.name for bar in bench.judge([found]) if not bar.passed] == [f"{name}: bsp" for name in missed]
    bench.notes(bench.HOW, [found], [0.1, 0.2], 0)


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"servers": [*FINE.servers, times.ServerDeath(SHARD, 15.1)]}, ["shard"]),
        ({"servers": [*FINE.servers, times.ServerDeath(SHARD, None)]}, ["shard"]),
        ({"servers": FINE.servers}, ["shard"]),
        ({"workers": [*FINE.workers, times.WorkerDeath(MACHINE, 2.0, 2.1, 2.2)]}, ["machine"]),
        ({"workers": [*FINE.workers, times.WorkerDeath(MACHINE, 2.0, 2.1, None)]}, ["goes on", "machine"]),
    ],
)
def test_so_is_each_of_a_run_with_shards_and_machines(change, missed):
    found = msgspec.structs.replace(ALSO_FINE, **change)
    assert [bar.name for bar in bench.judge([found]) if not bar.passed] == [f"{name}: bsp, ray" for name in missed]
    bench.notes(shard_chaos.HOW, [found], [0.1, 0.2], 0)


def test_processes_that_vanish_without_a_kill_are_counted():
    census = bench.Census()
    there = {1: "server", 2: "shard 0", **{10 + number: f"worker {number}" for number in range(6)}}
    census.take(there)
    census.kill([10])
    census.take({**there, 20: "worker 0"})  # the kernel still has the one that was killed
    census.take({pid: name for pid, name in there.items() if pid not in (10, 11)})
    assert (census.vanished, census.missing) == (2, 2)  # 11 and 20
    census.kill([2])
    census.take({3: "server", 4: "shard 0"} | {pid: name for pid, name in census.now.items() if pid > 2})
    assert census.vanished == 2  # a shard's death ends the server
    census.take({pid: name for pid, name in census.now.items() if pid != 4})
    assert census.vanished == 3


def test_what_is_left_behind_is_seen(tmp_path, monkeypatch):
    now = iter(range(0, 1000, 6))
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(bench.leaks, "tagged_processes", lambda tag: {7: "paceline: worker 0", 8: "the keeper"})
    blocks = ["torch_1_2", "torch_3_2", "torch_5_2"]  # of one that was there, of one with its number, of a stranger
    for name in blocks:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (50.0, 50.0))
    monkeypatch.setattr(bench.leaks, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(bench.leaks, "stale_blocks", lambda: [*blocks, "torch_7_1", "paceline-abcdefgh"])
    host = SimpleNamespace(name="host1", processes=lambda: {7})
    with bench.private_temporary(tmp_path):
        (tmp_path / "tmp" / "paceline-x").mkdir()
        left = bench.left_behind(
            SimpleNamespace(hosts=[host], keeper_pid=8), "tag", {1: (40, 60), 3: (60, 70), 7: (0, 99)}
        )
    assert left == [
        "host1: process 7 ", "process 7: paceline: worker 0", "temporary file paceline-x", "shared memory torch_1_2",
        "shared memory paceline-abcdefgh",
    ]  # fmt: skip


def test_two_strategies_suffer_for_ten_minutes_and_shards_by_join_and_on_ray():
    assert [case.name for case in bench.CASES] == ["bsp", "ssp"]
    assert [case.name for case in shard_chaos.CASES] == ["bsp, join", "bsp, ray"]
    (remote,) = shard_chaos.ON_DEMAND
    assert remote.name == "bsp, ray, remote shards"
    assert remote.options[-4:] == ("--servers", "3", "--remote-shards", "2")
    assert (bench.MINUTES, bench.KILL_EVERY_S, bench.CUT_EVERY_S, bench.CUT_S) == (10, 10, 60, 5)
    with pytest.raises(SystemExit):
        bench.main(["--minutes", "0.5"])
    with pytest.raises(SystemExit):
        bench.main(["--only", "bsp, ray"])


def test_without_root_nothing_is_measured(monkeypatch, capsys):
    if sys.platform == "linux":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    bench.main(["--quick"])
    assert "not measured: a lab needs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.soak
def test_a_small_benchmark_runs(capsys):
    netlab.require()
    if not bench.DATA.is_dir():
        pytest.skip(f"there is no MNIST in {bench.DATA}")
    bench.main(["--quick", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in found["rows"]] == ["bsp"]
    assert found["journal: bsp"]["verdict"] == found["left: bsp"]["verdict"] == "met"
