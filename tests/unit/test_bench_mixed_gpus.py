"""Mixed GPUs: clusters from the table of throughputs, how sides are tuned, and what the bars say of made rows."""

import math
from pathlib import Path
from typing import Any

import pytest

import bench_mixed_gpus as bench
from contenders import gavel
from contenders.bars import Bar
from contenders.gavel import Mix
from kept_rows import Kept
from paceline import strategies

TABLE = """job_type,num_gpus,k80,p100,v100,v100_unconsolidated
One (batch size 8),1,1.0,2.0,4.0,4.0
One (batch size 8),2,9.0,9.0,9.0,9.0
Two,1,5.0,10.0,7.5,7.5
Lacking,1,0.0,1.0,1.0,1.0
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(TABLE)
    return path


def test_job_types_are_those_that_ran_on_one_gpu_of_each_generation(table: Path) -> None:
    jobs = gavel.job_types(table)
    assert jobs == {"One (batch size 8)": (1.0, 2.0, 4.0), "Two": (5.0, 10.0, 7.5)}
    assert (gavel.nearest(jobs, 2.2), gavel.nearest(jobs, 3.0)) == ("Two", "One (batch size 8)")


def test_a_cluster_has_the_measured_speeds_over_the_fastest(table: Path) -> None:
    cluster = gavel.cluster("Two", Mix(1, 2, 1), 0.002, "none", 1, table)
    assert [worker.speed for worker in cluster.workers] == [0.5, 1.0, 1.0, 0.75]
    assert gavel.cluster("Two", Mix(2, 0, 1), 0.002, "none", 1, table).count == 3


def test_sides_can_be_built_and_asynchronous_ones_have_their_whole_steps() -> None:
    for side in {*bench.cost_sides(12), *bench.race_sides()}:
        for form in bench.forms(side):
            strategies.build(form.spec, 0)
    assert bench.forms("bsp") == [bench.Form("bsp", 0.9), bench.Form("bsp", 0.0)]
    assert bench.Form("asp:whole_steps=true", 0.9) in bench.forms("asp")
    assert len(bench.forms("asp")) == 3


@pytest.mark.parametrize(
    ("scores", "accuracy", "wanted"),
    [
        ({-1: 3.0, 0: 1.0, 1: 2.0}, {}, []),
        ({-1: 3.0, 0: 2.0, 1: 1.0}, {}, [2]),
        ({-1: 1.0, 0: 2.0, 1: math.inf}, {}, [-2]),
        ({-1: math.inf, 0: math.inf, 1: math.inf}, {-1: 0.5, 0: 0.7, 1: 0.9}, [2]),  # all too slow: go faster
        ({-1: math.inf, 0: math.inf, 1: math.inf}, {-1: 0.9, 0: 0.7, 1: 0.1}, [-2]),  # all unstable
        ({-1: math.inf, 0: math.inf, 1: math.inf}, {-1: 0.7, 0: 0.9, 1: 0.1}, []),
        ({bench.LARGEST - 1: 2.0, bench.LARGEST: 1.0}, {}, []),
    ],
)
def test_the_grid_is_extended_while_the_best_is_on_its_edge(scores, accuracy, wanted) -> None:
    assert bench.beyond(scores, dict.fromkeys(scores, 0.0) | accuracy) == wanted


def made(job: str, side: str, seed: int, reached: float | None, tuning: bool = False) -> dict[str, Any]:
    return {"part": "race", "job": job, "side": side, "seed": seed, "reached_s": reached, "tuning": tuning}


def chosen(job: str, side: str, tuned: float | None) -> dict[str, Any]:
    return {"part": "choice", "job": job, "side": side, "tuned_s": tuned}


def test_ratios_are_of_the_same_seeds_with_their_interval() -> None:
    ratio = bench.ratio_of({0: 1.0, 1: 2.0, 2: 4.0}, {0: 2.0, 1: 4.0, 2: 8.0})
    assert ratio == pytest.approx((2.0, 2.0, 2.0))
    low_high = bench.ratio_of({0: 1.0, 1: 1.0}, {0: 1.0, 1: 4.0})
    assert low_high is not None
    assert low_high[0] == pytest.approx(2.0)
    assert low_high[1] < 1 < low_high[2]
    assert bench.ratio_of({0: 1.0, 1: None}, {0: 1.0, 1: 1.0}) is None
    assert bench.ratio_of({}, {0: 1.0}) is None


def test_the_rival_is_picked_by_the_tuning_seeds_and_judged_by_fresh_ones() -> None:
    rows = [
        chosen("J 4", "bsp", 10.0),
        chosen("J 4", "asp", 9.0),
        chosen("J 4", "ssp", None),
        chosen("J 4", "dasp", 5.0),
    ]
    rows += [made("J 4", "dasp", seed, 5.0) for seed in range(3)]
    rows += [made("J 4", "asp", seed, 8.0) for seed in range(3)] + [made("J 4", "asp", 100, 1.0, tuning=True)]
    rows += [made("J 4", "bsp", seed, 4.0) for seed in range(3)]  # sooner on fresh seeds, and not the rival
    (bar,) = bench.judge_races(rows, ["J 4"])
    assert (bar.name, bar.ratio, bar.passed) == ("dasp_j_4", pytest.approx(0.375), True)
    assert "`asp`'s" in bar.meaning


def test_a_side_that_missed_the_target_on_a_fresh_seed_misses_its_bar() -> None:
    rows = [
        chosen("J", "bsp", 1.0),
        made("J", "bsp", 0, 1.0),
        chosen("J", "balanced", 1.0),
        made("J", "balanced", 0, None),
    ]
    (bar,) = bench.judge_races(rows, ["J"])
    assert (bar.ratio, bar.passed) == (None, False)


def test_a_side_that_raced_without_its_rivals_is_not_judged() -> None:
    assert bench.judge_races([chosen("J", "dasp", 1.0), made("J", "dasp", 0, 1.0)], ["J"]) == []


def test_names_of_bars_are_words() -> None:
    assert [bench.short(job) for job in ("ResNet-18 (batch size 16)", "A3C")] == ["resnet_18_16", "a3c"]


def costs(**changed: float) -> list[dict[str, Any]]:
    usual = {"share": 0.96, "waiting": 0.1, "staleness": 1.0, "staleness_p95": 2.0}
    others = {
        side: {**usual, "waiting": 0.5, "staleness": 5.0, "staleness_p95": 9.0}
        for side in ("bsp", "asp", "ssp", "dssp")
    }
    sides = {**others, **{side: {**usual, **changed} for side in ("dasp", "adaptive_sync", "balanced")}}
    return [{"part": "cost", "job": "J", "mix": "M", "jitter": jitter, "side": side, **row}
            for jitter in (0.0, bench.SIGMA) for side, row in sides.items()]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"share": 0.92}, ["balanced_share"]),
        ({"share": 0.8}, ["balanced_share", "balanced_share_jitter"]),
        ({"waiting": 0.6}, ["dasp_waits_less", "adaptive_sync_waits_less"]),
        ({"staleness": 6.0}, ["dasp_staleness", "adaptive_sync_staleness"]),
        ({"staleness_p95": 10.0}, ["dasp_staleness_p95"]),
    ],
)
def test_costs_have_their_bars(changed: dict[str, float], missed: list[str]) -> None:
    found: list[Bar] = bench.judge_costs(costs(**changed))
    assert [bar.name for bar in found if not bar.passed] == missed


class Imagined(bench.Races):
    """Races whose times follow from the rate: best at 0.4, unstable above 0.8."""

    def __init__(self, kept: Kept) -> None:
        super().__init__("J", kept, (100, 101))
        self.asked: list[tuple[float, int, float]] = []

    def row(self, side, form, lr, seed, limit_s, tuning):  # type: ignore[no-untyped-def]
        self.asked.append((lr, seed, limit_s))
        seconds = math.inf if lr > 0.8 else 10 * (1 + abs(math.log2(lr / 0.4))) * (2 if form.momentum == 0 else 1)
        return {"reached_s": seconds if seconds <= limit_s else None, "accuracy": 0.9}


def test_a_side_is_given_up_at_three_times_its_best_and_its_best_form_is_chosen(tmp_path: Path) -> None:
    races = Imagined(Kept("q", "abc", tmp_path))
    form, lr, score, rows = races.tune("bsp")
    assert (form, lr, score) == (bench.Form("bsp", 0.9), pytest.approx(0.4), pytest.approx(10.0))
    assert races.asked[0][2] == math.inf
    assert races.asked[-1][2] == pytest.approx(30.0)
    assert len(rows) == len(races.asked)


@pytest.mark.shared
@pytest.mark.skipif(not gavel.TABLE.is_file(), reason="needs ../shared/data/trace_gavel_throughputs")
def test_the_raced_job_types_are_nearest_to_the_spreads() -> None:
    jobs = gavel.job_types()
    assert len(jobs) == 26
    for wanted in bench.SPREADS:
        assert gavel.spread(jobs[gavel.nearest(jobs, wanted)]) == pytest.approx(wanted, rel=0.1)


def test_a_race_is_run_once_and_a_kept_one_that_was_given_up_sooner_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: Path
) -> None:
    monkeypatch.setattr(bench, "EPOCHS", 1)
    cluster = gavel.cluster("Two", Mix(1, 1, 0), 0.002, "none", 1, table)
    monkeypatch.setattr(bench.gavel, "cluster", lambda *_arguments: cluster)
    form = bench.Form("bsp", 0.9)

    def raced(limit_s: float) -> dict[str, Any]:
        return bench.Races("Two", Kept("q", "abc", tmp_path), (100,)).row("bsp", form, 0.1, 0, limit_s, True)

    short, longer = raced(0.1), raced(0.2)
    assert (short["limit_s"], longer["limit_s"]) == (0.1, 0.2)
    assert raced(0.15) == longer
    monkeypatch.setattr(bench, "EPOCHS", 2)  # another question
    assert raced(0.1)["key"] != longer["key"]
