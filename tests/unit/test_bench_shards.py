"""What the numbers of one process that holds the weights, and of two, say."""

import pytest

import bench_shards as bench


def exchanges(where, one=(100.0, 60.0), two=(75.0, 80.0)):
    """Round and busy times of one server and of two."""
    return [
        {"repeat": 0, "where": where, "servers": servers, "round_ms": ms, "server_busy_ms": busy}
        for servers, (ms, busy) in ((1, one), (2, two))
    ]


def of_many(push_us=(50.0, 90.0), decision_us=(5.0, 5.0, 7.0, 55.0)):
    pushes = [
        {"repeat": 0, "where": "pushes", "servers": n, "push_us": us} for n, us in zip((1, 2), push_us, strict=True)
    ]
    return pushes + [
        {"repeat": 0, "where": "decisions", "strategy": name, "workers": workers, "decision_us": us}
        for name in bench.LIGHT
        for workers, us in zip(bench.FULL.clusters, decision_us, strict=True)
    ]


def judged(rows):
    return {bar.name: bar for bar in bench.judge(rows, bench.FULL)}


def test_the_ideal_halves_what_the_server_does_and_nothing_else():
    found = judged(
        exchanges(bench.LOCAL) + exchanges(bench.HOSTS, two=(70.0, 80.0)) + exchanges(bench.TABLES, two=(80.0, 80.0))
    )
    assert found["tables_gain"].ratio == pytest.approx(1.25)
    assert found["local_gain"].ratio == pytest.approx(100 / 75)
    assert found["local_share"].ratio == pytest.approx(70 / 75)
    assert found["hosts_share"].ratio == pytest.approx(1.0)
    assert all(bar.passed for bar in found.values())


def test_a_second_server_that_costs_time_misses_its_bars():
    found = judged(exchanges(bench.LOCAL, two=(101.0, 80.0)) + exchanges(bench.TABLES, two=(101.0, 80.0)))
    assert {name for name, bar in found.items() if not bar.passed} == {
        "local_gain", "local_share", "hosts_gain", "hosts_share", "tables_gain",
    }  # fmt: skip
    assert found["hosts_gain"].why == "no lab can be built here"


def test_the_model_adds_what_a_decision_grows_by_to_what_a_push_costs():
    facts = bench.facts_of(exchanges(bench.LOCAL) + of_many(), bench.FULL)
    assert facts["data_ms"] == pytest.approx(60.0 / bench.FULL.workers)
    table = bench.model_table(facts, bench.FULL)
    assert "| `bsp` | 7 | 5% | 55 | 100% |" in table  # 1,000 at 50 + 2 us, 10,000 at 50 + 50 us, each once a second
    assert "costs the server 50 µs" in bench.notes(bench.FULL, facts)


def test_light_workers_are_timed_under_every_strategy():
    size = bench.QUICK
    rows = bench.measure_decisions(size, 0)
    assert {(row["strategy"], row["workers"]) for row in rows} == {
        (name, workers) for name in bench.LIGHT for workers in size.clusters
    }
    assert all(row["decision_us"] > 0 and row["versions"] > 0 for row in rows)
