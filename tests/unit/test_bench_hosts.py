"""Exchanges between two hosts: all bytes cross the network and arrive, and what their numbers say."""

import json
import os
import sys

import pytest
import warm_python

import bench_hosts as bench
import netlab
from contenders import paceline_hosts
from contenders.isolation import ask
from contenders.questions import HostExchange


@pytest.fixture
def forks(monkeypatch, warm, nothing_left):
    """Commands on hosts begin as forks of a warm interpreter."""

    def popen(host, command, **options):
        process = warm_python.Popen(command, preexec_fn=host.entry(), **options)
        host._lab.started.append(process)
        return process

    monkeypatch.setattr(netlab.Host, "popen", popen)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def rows(shaped=(1600.0, 1640.0), unshaped=(200.0, 500.0), cpu=(100.0, 250.0), side="bare", shared=None):
    size = bench.FULL
    return [
        {
            "repeat": 0, "turn": 0, "side": side, "network": network, "curve": curve, "round_ms": ms,
            "worker_cpu_ms": used, "server_cpu_ms": used,
        }
        for network, found in ((size.rate, shaped), (bench.UNSHAPED, unshaped), (bench.SHARED, shared or unshaped))
        for curve, ms, used in zip(("no", "yes"), found, cpu, strict=True)
    ]  # fmt: skip


def beside(*milliseconds):
    return [
        {"repeat": 0, "side": "paceline", "network": bench.UNSHAPED, "curve": "yes", "idle": idle, "round_ms": ms}
        for idle, ms in zip(bench.FULL.idle, milliseconds, strict=True)
    ]


def missed(found):
    return {bar.name for bar in bench.judge(found, bench.FULL) if not bar.passed}


def test_each_bar_is_of_its_own_rows():
    fine = rows() + rows((9e9, 1.25 * 1640.0), (1.25 * 200.0, 9e9), side="paceline") + beside(1.0, 9e9, 1.9)
    assert missed(fine) == set()
    slow = rows() + rows((1.0, 1.35 * 1640.0), (1.35 * 200.0, 1.0), side="paceline") + beside(1.0, 1.0, 2.1)
    assert missed(slow) == {"shaped_with_curve", "unshaped_without", "unshaped_shared", "idle_members"}
    shared = rows() + rows(side="paceline", shared=(1.35 * 200.0, 1.0)) + beside(1.0, 1.0, 1.0)
    assert missed(shared) == {"unshaped_shared"}


def test_what_encryption_adds_is_told_for_each_network():
    facts = bench.facts_of(rows(), bench.FULL)
    assert facts == pytest.approx({
        "curve_over_plain_shaped": 1.025, "curve_over_plain_unshaped": 2.5, "curve_cpu_over_plain": 2.5,
        "shaped_over_its_rate": 1.025,
    })  # fmt: skip
    told = (
        facts
        | bench.processors_of(rows() + rows(unshaped=(300.0, 1.0), side="paceline"))
        | {"load_before": 1.0, "load_after": 2.0}
    )
    assert "1gbit a bare round with CURVE takes 1.025 times" in bench.notes(bench.FULL, told)
    assert "single ratios lie between 1.50 and 1.50" in bench.notes(bench.FULL, told)
    assert "took 200 ms a round and 1.0 processor seconds per second" in bench.notes(bench.FULL, told)


def test_the_ratios_of_all_turns_count():
    found = rows() + rows(side="paceline")
    slow, fast = ({"turn": turn, "round_ms": ms} for turn, ms in ((1, 900.0), (2, 100.0)))
    plain = next(row for row in found if row["side"] == "paceline" and row["network"] == bench.UNSHAPED)
    bare = next(row for row in found if row["network"] == bench.UNSHAPED)
    found += [plain | slow, bare | {"turn": 1}, plain | fast, bare | {"turn": 2}, *beside(1.0, 1.0, 1.0)]
    ratio = next(bar.ratio for bar in bench.judge(found, bench.FULL) if bar.name == "unshaped_without")
    assert ratio == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("curve", [False, True], ids=["plain", "curve"])
@pytest.mark.parametrize("side", bench.CONTENDERS)
def test_the_bytes_of_an_exchange_cross_the_network(side, curve, forks):
    netlab.require()
    question = HostExchange(
        parameters=700_000, rounds=2, rate="500mbit", curve=curve, apart=not curve
    )  # several chunks
    answer = paceline_hosts.host_exchange(question) if side == "paceline" else ask(bench.CONTENDERS[side], question)
    assert len(answer.round_s) == 2
    assert answer.worst_error == 0.0
    assert all(4 * 700_000 < answer.facts[name] < 5 * 700_000 for name in ("sent_bytes", "received_bytes"))
    assert 0 < answer.facts.get("up_s", min(answer.round_s) / 2) < max(answer.round_s)


@pytest.mark.slow
def test_updates_go_on_beside_members_that_say_nothing(forks):
    netlab.require()
    question = HostExchange(parameters=1000, rounds=3, rate=None, curve=True, idle=5)
    answer = paceline_hosts.host_exchange(question)
    assert (len(answer.round_s), answer.worst_error) == (3, 0.0)


def test_without_root_nothing_is_measured(monkeypatch, capsys):
    if sys.platform == "linux":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    bench.main(["--quick"])
    assert "not measured: a lab needs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.soak
def test_a_small_run_goes_through(capsys):
    netlab.require()
    bench.main(["--quick", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {"curve_over_plain_shaped", "curve_over_plain_unshaped", "shaped_over_its_rate"} <= found.keys()
    assert len(found["rows"]) == 2 * (3 + 2 * bench.QUICK.turns) + len(bench.QUICK.idle)
    assert all(found[name]["verdict"] in ("met", "missed") for name in ("shaped_with_curve", "unshaped_without"))
