"""bench_ssp: which lines it measures, how it judges them, and which parts it does not measure again."""

import math

import msgspec
import pytest

import bench_ssp
import bench_staleness
from bench_ssp import Kept
from bench_staleness import Curve


def row(strategy, waiting, seconds, cluster="stragglers"):
    return {"cluster": cluster, "strategy": strategy, "waiting": waiting, "seconds_to_level": seconds}


def task(part="lasso", ratios=(0.9, 0.92, 0.88, 0.91, 0.9), times=(20.0, 10.0, 14.0)):
    lines = bench_ssp.lines_of(part, (0, 2, 8))
    rows = [row(line, 0.4 - 0.1 * place, times[min(place, 2)]) for place, line in enumerate(lines)]
    return {
        "part": part,
        "picked": lines[1],
        "ratios": list(ratios),
        "rows": [*rows, row(lines[0], 0.9, 1.0, "lasting")],
    }


def theory(over=1.0, share=0.1):
    return {"part": "theory", "rows": [{"task": "bytes", "over": over}, {"task": "regret", "share": share}]}


def test_bytes_are_counted_with_jitter_as_well_and_the_larger_is_judged(monkeypatch):
    def made(job):
        often = 1.0 if "cache" not in job.strategy else 0.5 if job.kind == "even" else 0.6
        return Curve([1.0], [8], [1.0], 1.1 if "cache" in job.strategy else 1.0, 0.0, 0.0, 100 * often, 0.0)

    monkeypatch.setattr(bench_ssp, "tried", made)
    size = msgspec.structs.replace(bench_ssp.QUICK, bounds=(0, 1))
    rows = [row for kind in bench_ssp.EQUAL for row in bench_ssp.bytes_of(size, kind)]
    assert [(row["cluster"], row["bound"], row["over"]) for row in rows] == [
        ("even", 0, 1.0), ("even", 1, 1.0), ("jitter", 0, 1.0), ("jitter", 1, 1.2)
    ]  # fmt: skip
    assert rows[-1]["time_over_no_cache"] == 1.1
    assert next(bar for bar in bench_ssp.judge_theory(rows) if bar.name == "model_bytes").ratio == 1.2
    cluster = bench_staleness.cluster(bench_ssp.TASKS["digits"], 0, "jitter")
    assert (cluster.compute.jitter.spec, cluster.events) == ("lognormal:0.1", ())


def missed(*found):
    return [bar.name for bar in bench_ssp.judge(found) if not bar.passed]


def tables(*slow):
    return [task(part, ratios=(1.2,) * 5 if part in slow else (0.9,) * 5) for part in bench_ssp.TABLES]


def test_what_the_publication_says_meets_every_bar():
    assert missed(*tables(), task("digits"), theory()) == []


def test_one_task_on_tables_may_be_no_sooner_than_asp():
    assert missed(*tables("topics")) == ["topics_over_asp"]
    assert missed(*tables("topics", "lasso"))[-1] == "tables_sooner_than_asp"


@pytest.mark.parametrize(
    ("found", "bars"),
    [
        (task("digits", times=(9.0, 10.0, 14.0)), ["digits_interior"]),
        (task("digits", ratios=(0.9, None, 0.9)), ["digits_over_asp"]),
        (task("digits", ratios=(0.0, 0.9, 0.9)), ["digits_over_asp"]),
        (theory(over=1.3), ["model_bytes"]),
        (theory(share=1.01), ["regret"]),
    ],
)
def test_what_it_does_not_say_is_noticed(found, bars):
    assert missed(found) == bars


def test_the_mean_of_ratios_is_geometric_and_has_its_interval():
    mean, interval = bench_ssp.mean_and_interval([0.5, 2.0, 1.0])
    assert mean == pytest.approx(1.0)
    half = 2.920 * math.log(2) / math.sqrt(3)
    assert interval == pytest.approx((math.exp(-half), math.exp(half)))
    assert bench_ssp.mean_and_interval([0.5, math.inf]) == (None, None)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [(5.0, 10.0, 0.5), (math.inf, math.inf, None), (5.0, math.inf, 0.0), (math.inf, 5.0, math.inf)],
)
def test_who_never_gets_there_has_lost(ours, theirs, expected):
    assert bench_ssp.ratio(ours, theirs) == expected


def test_a_model_has_its_bounds_with_a_cache_and_some_without():
    assert bench_ssp.lines_of("digits", (0, 2)) == [
        "ssp:staleness=0",
        "ssp:staleness=2,cache=true",
        "ssp:staleness=2",
        "asp",
    ]
    assert bench_ssp.lines_of("lasso", (0, 2)) == ["ssp:staleness=0", "ssp:staleness=2", "asp"]


def test_the_level_is_of_what_the_run_gained_at_its_best():
    curve = Curve([0.0, 1.0, 2.0], [0, 8, 16], [10.0, 2.0, 3.0], 2.0, 0.1, 1.0, 9.0, 0.0)
    assert bench_ssp.level_of(curve) == pytest.approx(10.0 - 0.98 * 8.0)
    assert bench_ssp.seconds_to(curve, 2.5) == 1.0
    assert bench_ssp.seconds_to(curve, 1.5) == bench_ssp.seconds_to(None, 9.0) == math.inf


def test_a_grid_is_extended_while_its_best_is_on_the_edge(monkeypatch):
    tried = []

    def made(job):
        tried.append(job.changed["lr"])
        return Curve([1.0], [8], [abs(math.log2(job.changed["lr"] / 3.2))], 1.0, 0.0, 0.0, 1.0, 0.0)

    class Here:
        map = staticmethod(map)

    monkeypatch.setattr(bench_ssp, "tried", made)
    size = bench_ssp.Size(tuning=(1,))
    found, _ = bench_ssp.search("digits", "asp", size, Here, None)
    assert found.changed == {"lr": 3.2}
    assert max(tried) == 6.4


def test_a_part_is_kept_for_its_sources_alone(tmp_path):
    Kept(tmp_path, "abc").put("lasso", {"part": "lasso"})
    assert Kept(tmp_path, "abc").get("lasso") == {"part": "lasso"}
    assert Kept(tmp_path, "abc").get("topics") is None
    assert Kept(tmp_path, "other").get("lasso") is None
    Kept(tmp_path / "none", None).put("lasso", {})
    assert Kept(tmp_path / "none", None).get("lasso") is None
    assert not (tmp_path / "none").exists()


def test_lasting_stragglers_are_slower_all_the_time_and_nothing_else_happens():
    made = bench_staleness.cluster(bench_ssp.TASKS["digits"], 0, "lasting")
    assert made.events == ()
    assert sorted({worker.speed for worker in made.workers}) == [0.5, 1.0]
    assert made.count == bench_staleness.WORKERS
