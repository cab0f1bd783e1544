"""Runs on a lab beside one machine and the simulator: what the verdicts catch, and that a small benchmark runs."""

import json
import os
import sys

import pytest
import torch
from safetensors.torch import save_file

import bench_lab_runs as bench
import bench_ray_runs as ray_bench
import netlab
from paceline import strategies


def row(**other):
    fine = {"run": "ssp", "network": "1gbit", "real/simulated": 1.1, "loss": 0.41, "local loss": 0.40,
            "local range": 0.02, "same bits": False}  # fmt: skip
    return {**fine, **other}


def missed(*rows):
    return {bar.name for bar in bench.judge(list(rows)) if not bar.passed}


def test_each_planted_fault_is_caught():
    assert missed(row(), row(run="bsp", **{"same bits": True, "loss": 9.0})) == set()
    assert missed(row(run="bsp")) == {"bits: bsp, 1gbit"}
    assert (
        missed(row(**{"real/simulated": 1.16})) == missed(row(**{"real/simulated": 0.84})) == {"simulator: ssp, 1gbit"}
    )
    assert missed(row(loss=0.421)) == missed(row(loss=0.379)) == {"loss: ssp, 1gbit"}
    assert missed(row(**{"local range": 0.0})) == {"loss: ssp, 1gbit"}
    assert missed(row(**{"local range": 0.0, "loss": 0.40})) == set()
    assert missed(row(loss=float("nan"))) == {"loss: ssp, 1gbit"}
    timed = {name: row()[name] for name in ("network", "real/simulated", "loss")} | {"run": "asp"}
    assert missed(timed) == set()
    assert missed(timed | {"real/simulated": 1.16}) == {"simulator: asp, 1gbit"}


def test_one_bit_makes_a_model_another(tmp_path):
    values = {"w": torch.ones(5), "b": torch.zeros(2)}
    save_file(values, tmp_path / "a")
    save_file(values, tmp_path / "same")
    save_file({**values, "w": torch.tensor([1, 1, 1, 1, 1 + 2**-23])}, tmp_path / "other")
    save_file({"w": values["w"]}, tmp_path / "part")
    assert bench.same_bits(tmp_path / "a", tmp_path / "same")
    assert not bench.same_bits(tmp_path / "a", tmp_path / "other")
    assert not bench.same_bits(tmp_path / "a", tmp_path / "part")


def test_all_of_the_strategies_are_measured_on_both_networks():
    assert [case.name for case in bench.FULL.cases] == [
        "bsp", "ssp", "dasp", "balanced", "adaptive_k", "adaptive_gossip", "ssp:staleness=2 on tables",
    ]  # fmt: skip
    timed = {case.name.partition(":")[0] for case in (*bench.FULL.cases, *bench.FULL.timed)}
    assert timed == {*strategies.names(), *strategies.peer_names()}
    assert bench.FULL.rates == ("100mbit", "1gbit")
    with pytest.raises(SystemExit, match="--only must be of bsp"):
        bench.main(["--only", "sgd"])


def test_on_ray_weights_are_in_two_shards_where_they_can_be_split(tmp_path):
    runs = ray_bench.RayRuns(tmp_path, tmp_path, ray_bench.SERVERS)
    assert {case.name: runs.servers_of(case) for case in bench.FULL.cases} == {
        "bsp": 2, "ssp": 2, "dasp": 2, "balanced": 2, "adaptive_k": 2, "adaptive_gossip": 0,
        "ssp:staleness=2 on tables": 2,
    }  # fmt: skip
    shared, whole = (runs._options(bench.FULL.cases[number], 0) for number in (0, -2))
    assert shared[-2:] == ["--servers", "2"]
    assert "--servers" not in whole


def test_the_range_of_three_seeds_is_too_narrow_to_judge_by():
    assert bench.by_chance(3) > 0.25
    assert bench.by_chance(len(bench.SEEDS)) < 0.08


def test_without_root_nothing_is_measured(monkeypatch, capsys):
    if sys.platform == "linux":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    bench.main(["--quick"])
    assert "not measured: a lab needs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.soak
def test_a_small_benchmark_runs(capsys):
    netlab.require()
    bench.main(["--quick", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in found["rows"]] == ["bsp", "ssp:staleness=2 on tables"]
    assert found["bits: bsp, 1gbit"]["verdict"] == "met"
