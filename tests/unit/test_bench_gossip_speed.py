"""The comparison of nodes with plain PyTorch: what its bars say of made numbers, and that a small run goes through."""

import json

import pytest

import bench_gossip_speed as bench


def rows(node=98.0, plain=100.0, step_ms=10.0, change=0.4, finite=0.1, exchange=1.1):
    steps = {"what": "cnn steps", "node_per_s": node, "plain_per_s": plain, "plain_step_ms": step_ms}
    return [
        steps, {"what": "change", "change_ms": change}, {"what": "finite", "finite_ms": finite},
        {"what": "exchange", "exchange_s": exchange, "in_place_s": 1.0},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"node": 96.0}, ["steps_over_plain"]),
        ({"change": 0.6}, ["change_share"]),
        ({"finite": 0.21}, ["finite_share"]),
        ({"exchange": 1.3}, ["exchange_over_in_place"]),
    ],
)
def test_every_bar_can_be_missed(changed, missed):
    assert [bar.name for bar in bench.judge(rows(**changed)) if not bar.passed] == missed


@pytest.mark.slow
@pytest.mark.soak
def test_a_small_run_goes_through(capsys):
    bench.main(["--quick", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {"steps_over_plain", "change_share", "exchange_over_in_place", "fixed_cost_us"} <= found.keys()
