"""The comparisons of tables: what their bars say of made numbers, and that each side answers."""

import json

import pytest

import bench_staleness
import bench_tables
from bench_staleness import Curve
from contenders.isolation import ask
from contenders.questions import Gather


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
    SIZE = bench_staleness.Size(("lasso",), (0, 1, 4), 1)

    def missed(self, **changed):
        rows, curves = self.made(**changed)
        return [bar.name for bar in bench_staleness.judge("lasso", rows, curves, self.SIZE) if not bar.passed]

    def test_curves_as_in_the_publication_meet_every_bar(self):
        assert self.missed() == []

    @pytest.mark.parametrize(
        ("strategy", "field", "value", "bars"),
        [
            ("ssp:staleness=4", "waiting", 0.4, ["lasso_waiting_rises"]),
            ("ssp:staleness=0", "clocks_to_level", 90, ["lasso_per_clock"]),
            ("ssp:staleness=4", "seconds_to_level", 5.0, ["lasso_per_second"]),
            ("ssp:staleness=0", "seconds_to_level", 5.0, ["lasso_per_second", "lasso_sooner_than_bsp"]),
            ("asp", "last_loss", 1.0, ["lasso_over_asp"]),
            ("asp", "seconds_to_level", 5.0, ["lasso_sooner_than_asp"]),
            ("ssp:staleness=4", "bytes_per_clock_even", 60.0, ["lasso_traffic"]),
        ],
    )
    def test_what_the_publication_does_not_say_is_noticed(self, strategy, field, value, bars):
        assert self.missed(strategy=strategy, field=field, value=value) == bars

    def test_a_bound_that_never_gets_there_counts_as_last(self):
        assert self.missed(strategy="ssp:staleness=4", field="seconds_to_level", value=None) == []

    @staticmethod
    def made(strategy=None, field=None, value=None):
        rows, curves = [], {}
        of = {
            "ssp:staleness=0": (0.5, 80, 20.0, 100.0, 1.0),
            "ssp:staleness=1": (0.2, 84, 10.0, 50.0, 1.01),
            "ssp:staleness=4": (0.1, 120, 14.0, 20.0, 1.5),
            "asp": (0.0, 90, 12.0, 100.0, 1.2),
        }
        for name, (waiting, clocks, seconds, even, loss) in of.items():
            curves[name] = [
                Curve(
                    [0.0, seconds, 2 * seconds], [0, clocks, 160], [9.0, 2 * loss, loss], 2 * seconds, waiting, 1, 9, 0
                )
            ]
            row = {"strategy": name, "waiting": waiting, "clocks_to_level": clocks, "seconds_to_level": seconds}
            rows.append({**row, "bytes_per_clock_even": even, "last_loss": loss})
            if name == strategy:
                rows[-1][field] = value
        return rows, curves

    def test_stragglers_come_one_after_the_other_and_a_stall_is_one_event(self):
        app = bench_staleness.APPLICATIONS["lasso"]
        kinds = {kind: bench_staleness.cluster(app, 0, kind).events for kind in ("stragglers", "even", "stall")}
        assert len(kinds["stragglers"]) == 1000
        assert len(kinds["even"]) == 0
        assert len(kinds["stall"]) == 1


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("side", ["rows_plain", "rows_paceline"])
def test_a_side_answers_with_seconds_of_every_round(side):
    found = ask(side, Gather(table_rows=300, width=3, rows=40, rounds=4)).seconds
    assert json.loads(json.dumps(found)) == found
    assert all(len(seconds) == 4 and min(seconds) > 0 for seconds in found.values())
    assert {"get", "inc_distinct", "inc_repeated"} <= found.keys()
    assert ("fetch" in found) == (side == "rows_paceline")
