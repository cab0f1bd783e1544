"""The comparisons of tables: what their bars say of made numbers, and that each side answers."""

import json

import pytest

import bench_staleness
import bench_tables
from bench_staleness import Curve
from sides.isolation import ask
from sides.questions import Gather


def rows_of(repeat=0, get=100.0, inc=400.0, repeated=300.0, fetch=200.0, peer=2000.0, tokens=9e5):
    plain = {"get_us": 100.0, "inc_distinct_us": 200.0, "inc_repeated_us": 200.0}
    ours = {"get_us": get, "inc_distinct_us": inc, "inc_repeated_us": repeated, "fetch_us": fetch}
    return [
        {"repeat": repeat, "side": "rows_plain", **plain},
        {"repeat": repeat, "side": "rows_paceline", **ours},
        {"repeat": repeat, "side": "rows_ray", "fetch_us": peer},
        {"repeat": repeat, "side": "rows_redis", "fetch_us": peer},
        {"repeat": repeat, "side": "rows_plain_topics", "tokens_per_cpu_s": 1e6},
        {"repeat": repeat, "side": "rows_paceline_topics", "tokens_per_cpu_s": tokens},
    ]


class TestTables:
    @pytest.fixture(autouse=True)
    def _everybody_is_here(self, monkeypatch):
        monkeypatch.setattr(bench_tables, "peers", lambda: {"rows_ray": "", "rows_redis": ""})

    def test_good_numbers_meet_every_bar(self):
        assert all(bar.passed for bar in bench_tables.judge(rows_of(), has_corpus=True))

    @pytest.mark.parametrize(
        ("worse", "bar"),
        [
            ({"get": 310.0}, "get_over_numpy"),
            ({"inc": 810.0}, "inc_over_numpy"),
            ({"repeated": 410.0}, "inc_repeated_over_numpy"),
            ({"fetch": 410.0}, "fetch_over_ray"),
            ({"peer": 990.0}, "fetch_over_redis"),
            ({"tokens": 7.9e5}, "topics_tokens"),
        ],
    )
    def test_a_worse_number_misses_its_bar(self, worse, bar):
        found = {b.name: b.passed for b in bench_tables.judge(rows_of(**worse), has_corpus=True)}
        assert not found[bar]

    def test_a_rival_that_is_not_here_is_said_to_be_missing(self, monkeypatch):
        monkeypatch.setattr(bench_tables, "peers", lambda: {"rows_ray": "no Ray", "rows_redis": ""})
        found = {b.name: b for b in bench_tables.judge(rows_of(), has_corpus=False)}
        assert (found["fetch_over_ray"].ratio, found["fetch_over_ray"].why) == (None, "no Ray")
        assert found["topics_tokens"].why == bench_tables.NO_CORPUS


class TestStaleness:
    def test_curves_as_in_the_publication_meet_every_bar(self, monkeypatch):
        monkeypatch.setattr(bench_staleness, "stalled", lambda name: bench_staleness.Bar(name, 0.0, 0.1, False, ""))
        rows, curves = self.made()
        bars = bench_staleness.judge("lasso", rows, curves, bench_staleness.Size(("lasso",), (0, 1, 4), 1))
        assert [bar.name for bar in bars if not bar.passed] == []

    def test_a_bound_that_costs_nothing_per_clock_is_noticed(self, monkeypatch):
        monkeypatch.setattr(bench_staleness, "stalled", lambda name: bench_staleness.Bar(name, 0.0, 0.1, False, ""))
        rows, curves = self.made(best_per_clock=4)
        bars = bench_staleness.judge("lasso", rows, curves, bench_staleness.Size(("lasso",), (0, 1, 4), 1))
        assert "lasso_per_clock" in [bar.name for bar in bars if not bar.passed]

    @staticmethod
    def made(best_per_clock=0):
        rows, curves = [], {}
        known = [("ssp:staleness=0", 0, 40), ("ssp:staleness=1", 1, 20), ("ssp:staleness=4", 4, 18), ("asp", None, 17)]
        for strategy, bound, seconds in known:
            cost = {0: 0.0, 1: 0.01, 4: 0.4, None: 0.5}[bound] - (1.0 if bound == best_per_clock and bound else 0.0)
            losses = [10.0, 5.0 + cost, 1.0 + cost]
            curves[strategy] = [Curve([0.0, seconds * 0.4, seconds], [0, 50, 100], losses, seconds, 0.5, 100.0)]
            rows.append({
                "application": "lasso", "strategy": strategy, "seconds": seconds,
                "waiting": 0.0 if bound is None else 0.5 / (bound + 1),
                "bytes_per_clock": 100.0 if bound is None else 100.0 / (bound + 1), "last_loss": losses[-1],
            })  # fmt: skip
        return rows, curves


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("side", ["rows_plain", "rows_paceline"])
def test_a_side_answers_with_seconds_of_every_round(side):
    found = ask(side, Gather(table_rows=300, width=3, rows=40, rounds=4)).seconds
    assert json.loads(json.dumps(found)) == found
    assert all(len(seconds) == 4 and min(seconds) > 0 for seconds in found.values())
    assert {"get", "inc_distinct", "inc_repeated"} <= found.keys()
    assert ("fetch" in found) == (side == "rows_paceline")
