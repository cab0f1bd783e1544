"""Times: draws that are pure functions, and exact integration through slow-downs and pauses."""

import math
import statistics
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InternalError
from paceline.core.scenario.costs import RateCourse, Times, pace_of
from paceline.core.scenario.network import Direction
from paceline.scenario import Scenario, ScenarioEvent, load, parse

ALIBABA = Path(__file__).parents[2].parent / "shared" / "data" / "trace_alibaba_minibatch" / "job_1_norm.csv"
PINNED = [0.4658431964240163, 2.2887514623453074, 1.348858168734138]
needs_alibaba = pytest.mark.skipif(not ALIBABA.exists(), reason="../shared/data/trace_alibaba_minibatch is not here")


def made(jitter: str = "none", workers: str = "[[workers]]\ncount = 4\n", rest: str = "", seed: int = 7) -> Scenario:
    text = f'seed = {seed}\n[compute]\nseconds_per_sample = 0.5\njitter = "{jitter}"\n{workers}{rest}'
    return parse(text, "test", Path())


def factors(jitter: str, count: int = 20_000) -> list[float]:
    times = Times(made(jitter))
    return [times.compute_s(worker, attempt, 2, 0.0) for attempt in range(count // 4) for worker in range(4)]


def test_cost_is_samples_times_seconds_over_speed() -> None:
    times = Times(made(workers="[[workers]]\nspeed = 4.0\n[[workers]]\nspeed = 0.25\n"))
    assert times.compute_s(0, 0, 10, 3.0) == 1.25
    assert times.compute_s(1, 5, 10, 3.0) == 20.0
    assert times.compute_s(1, 5, 0, 3.0) == 0.0


def test_draws_depend_on_nothing_but_seed_worker_and_attempt() -> None:
    asked = [(worker, attempt) for worker in range(4) for attempt in range(50)]
    one, other = Times(made("lognormal:0.3")), Times(made("lognormal:0.3"))
    forwards = {pair: one.compute_s(*pair, 8, 0.0) for pair in asked}
    assert {pair: other.compute_s(*pair, 8, 99.0) for pair in reversed(asked)} == forwards
    assert len(set(forwards.values())) == len(asked)
    reseeded = Times(made("lognormal:0.3", seed=8))
    assert not {reseeded.compute_s(*pair, 8, 0.0) for pair in asked} & set(forwards.values())


def test_draws_of_a_seed_stay_as_they_are() -> None:
    """Whoever changes the hash changes every published run: the values are pinned."""
    times = Times(made("exponential"))
    drawn = [times.compute_s(worker, attempt, 2, 0.0) for worker, attempt in [(0, 0), (0, 1), (3, 1000)]]
    assert drawn == pytest.approx(PINNED, rel=1e-12)


def test_draws_do_not_depend_on_how_many_workers_there_are() -> None:
    few, many = Times(made("lognormal:0.3")), Times(made("lognormal:0.3", "[[workers]]\ncount = 400\n"))
    assert few.compute_s(3, 9, 8, 0.0) == many.compute_s(3, 9, 8, 0.0)


@pytest.mark.parametrize("sigma", [0.1, 1.0])
def test_lognormal_has_median_one_and_its_sigma(sigma: float) -> None:
    logs = [math.log(factor) for factor in factors(f"lognormal:{sigma}")]
    error = sigma / math.sqrt(len(logs))
    assert abs(statistics.fmean(logs)) < 4 * error
    assert statistics.pstdev(logs) == pytest.approx(sigma, abs=4 * error)
    assert max(map(abs, logs)) < 6 * sigma


def test_exponential_has_mean_one() -> None:
    drawn = factors("exponential")
    assert statistics.fmean(drawn) == pytest.approx(1.0, abs=4 / math.sqrt(len(drawn)))
    assert statistics.median(drawn) == pytest.approx(math.log(2), abs=0.03)
    assert min(drawn) > 0


def test_shifted_exponential_has_its_minimum_and_mean() -> None:
    drawn = factors("shifted_exponential:0.6,1.5")
    assert 0.6 < min(drawn) < 0.601
    assert statistics.fmean(drawn) == pytest.approx(1.5, abs=4 * 0.9 / math.sqrt(len(drawn)))


def test_draws_are_uncorrelated_between_attempts_and_workers() -> None:
    times = Times(made("lognormal:1"))
    rows = [[math.log(times.compute_s(worker, attempt, 2, 0.0)) for attempt in range(5000)] for worker in range(2)]
    for left, right in [(rows[0], rows[1]), (rows[0][:-1], rows[0][1:])]:
        assert abs(statistics.correlation(left, right)) < 4 / math.sqrt(5000)


def test_a_worker_may_have_a_jitter_of_its_own() -> None:
    times = Times(made("none", '[[workers]]\n[[workers]]\njitter = "exponential"\n'))
    assert times.compute_s(0, 0, 2, 0.0) == 1.0
    assert times.compute_s(1, 0, 2, 0.0) == Times(made("exponential")).compute_s(1, 0, 2, 0.0)


def test_trace_rows_go_round(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("worker,time,seconds\n10,3,6\n10,1,2\n9,1,4\n10,2,4\n")
    text = '[compute]\nseconds_per_sample = 1\njitter = "trace:t.csv"\n[[workers]]\ncount = 3\n'
    times = Times(parse(text, "test", tmp_path))
    assert [times.compute_s(0, attempt, 1, 0.0) for attempt in range(3)] == [1.0, 1.0, 1.0]
    assert [times.compute_s(1, attempt, 1, 0.0) for attempt in range(5)] == [0.5, 1.0, 1.5, 0.5, 1.0]
    assert times.compute_s(2, 7, 1, 0.0) == times.compute_s(0, 7, 1, 0.0)


@pytest.mark.shared
@needs_alibaba
def test_a_recorded_job_is_replayed_around_its_median() -> None:
    text = f'[compute]\nseconds_per_sample = 1\njitter = "trace:{ALIBABA.name}"\n[[workers]]\ncount = 12\n'
    times = Times(parse(text, "test", ALIBABA.parent))
    drawn = [times.compute_s(worker, attempt, 1, 0.0) for worker in range(10) for attempt in range(300)]
    assert statistics.median(drawn) == pytest.approx(1.0)
    assert drawn[0] / drawn[300] == pytest.approx(476 / 509)
    assert times.compute_s(11, 301, 1, 0.0) == times.compute_s(1, 1, 1, 0.0)


def test_latency_and_bandwidth_of_links() -> None:
    rest = "[network]\nlatency_ms = 10\nbandwidth_mbps = 800\n"
    times = Times(made("exponential", "[[workers]]\n[[workers]]\nlatency_ms = 40\nbandwidth_mbps = 8\n", rest))
    assert (times.latency_s(0, 3, True), times.latency_s(1, 3, False)) == (0.010, 0.040)
    assert (times.server_bandwidth, times.bandwidth(0), times.bandwidth(1)) == (1e8, math.inf, 1e6)
    assert Times(made()).server_bandwidth == math.inf
    assert Times(made()).latency_s(0, 0, True) == 0.0


def test_network_jitter_is_drawn_apart_for_each_direction() -> None:
    times = Times(made("lognormal:0.5", rest='[network]\nlatency_ms = 1000\njitter = "lognormal:0.5"\n'))
    up = [times.latency_s(0, attempt, True) for attempt in range(2000)]
    down = [times.latency_s(0, attempt, False) for attempt in range(2000)]
    compute = [times.compute_s(0, attempt, 2, 0.0) for attempt in range(2000)]
    assert up == [times.latency_s(0, attempt, True) for attempt in range(2000)]
    for left, right in [(up, down), (up, compute), (down, compute)]:
        assert abs(statistics.correlation(left, right)) < 0.1
    assert statistics.median(up) == pytest.approx(1.0, abs=0.06)


def test_newcomers_are_taken_in_one_by_one() -> None:
    slow = '[[events]]\nkind = "join"\nat = 1\n[[events]]\nkind = "slow"\nworker = 4\nat = 10\nfor = 5\nfactor = 2\n'
    times = Times(made("lognormal:0.2", rest="[network]\nlatency_ms = 5\n" + slow))
    with pytest.raises(InternalError, match="next free id, 4, not 6"):
        times.add_worker(6, 1.0)
    times.add_worker(4, 0.5)
    same = Times(made("lognormal:0.2", "[[workers]]\ncount = 4\n[[workers]]\nspeed = 0.5\n"))
    assert times.compute_s(4, 2, 2, 0.0) == same.compute_s(4, 2, 2, 0.0)
    assert times.compute_s(4, 2, 2, 10.0) == pytest.approx(2 * same.compute_s(4, 2, 2, 0.0))
    assert (times.latency_s(4, 0, True), times.bandwidth(4)) == (0.005, math.inf)


def test_slow_downs_and_pauses_stretch_a_computation() -> None:
    rest = """
    [[events]]
    kind = "slow"
    worker = 1
    at = 10
    for = 4
    factor = 4
    [[events]]
    kind = "pause"
    workers = [1, 2]
    at = 12
    for = 1
    """
    times = Times(made(rest=rest))
    assert times.compute_s(0, 0, 4, 9.0) == 2.0
    assert times.compute_s(2, 0, 4, 11.5) == 3.0
    # 1 s before, then 0.5 s worth in 10..12, none in 12..13, 0.25 s worth in 13..14, the last 0.25 s after.
    assert times.compute_s(1, 0, 4, 9.0) == pytest.approx(5.25)
    assert times.compute_s(1, 0, 2, 8.0) == 1.0
    assert times.compute_s(1, 0, 2, 14.0) == 1.0
    assert times.compute_s(1, 0, 4, 12.5) == pytest.approx(0.5 + 1 + 1.75)


SLOW_LINKS = """
[network]
latency_ms = 100
bandwidth_mbps = 80
[[events]]
kind = "slow_link"
worker = 1
at = 10
for = 4
factor = 4
[[events]]
kind = "slow_link"
at = 20
for = 2
factor = 2
"""


def test_a_slow_link_stretches_what_is_on_its_way_and_the_latency() -> None:
    times = Times(made(rest=SLOW_LINKS))
    second = 10_000_000  # bytes, on the server's line
    assert [times.latency_s(1, 0, True, at) for at in (9.9, 10.0, 13.9, 14.0)] == [0.1, 0.4, 0.4, 0.1]
    assert [times.latency_s(worker, 0, True, 20.5) for worker in (0, 1)] == [0.2, 0.2]
    assert times.latency_s(1, 0, True) == 0.1, "without a time, as it is without trouble"
    assert times.link_s(1, second, 5.0) == 1.0
    assert times.link_s(1, second, 10.0) == 4.0
    assert times.link_s(1, second, 9.5) == pytest.approx(0.5 + 2.0), "half of it left before"
    assert times.link_s(1, 2 * second, 10.0) == pytest.approx(4.0 + 1.0)
    assert times.link_s(0, second, 10.0) == 0.0, "no limit of its own beside the line"
    assert [times.line_s(second, at) for at in (10.0, 20.0, 21.0)] == [1.0, 2.0, pytest.approx(1.5)]
    assert [times.way_s(1, second, at) for at in (5.0, 10.0, 20.0)] == [1.0, 4.0, 2.0]


def test_a_slow_link_does_not_occupy_the_line_of_the_others() -> None:
    """Worker 1 takes four times as long for its second of data; worker 0, right behind it, waits for one."""
    ways = [Direction(Times(made(rest=rest)), upward=True) for rest in (SLOW_LINKS, SLOW_LINKS.partition("[[")[0])]
    slowed, usual = ([way.arrival(worker, 0, 10_000_000, 10.0) for worker in (1, 0)] for way in ways)
    assert usual == pytest.approx([11.1, 12.1])
    assert slowed == pytest.approx([10 + 4 + 0.1, 12.1]), "the latency is that of the time when all bytes have left"
    both = [ways[0].arrival(worker, 1, 5_000_000, 20.0) for worker in (0, 1)]
    assert both == pytest.approx([20 + 1 + 0.2, 20 + 2 + 0.1]), "the server's line is slow for everybody"


def test_a_slow_link_makes_a_workers_own_thin_link_thinner() -> None:
    rest = SLOW_LINKS.replace("bandwidth_mbps = 80\n", "")
    times = Times(made(workers="[[workers]]\ncount = 2\nbandwidth_mbps = 8\n", rest=rest))
    assert [times.link_s(worker, 100_000, 10.0) for worker in (0, 1)] == pytest.approx([0.1, 0.4])


def test_partitions_that_touch_or_overlap_are_one() -> None:
    spans = [(5, 2), (6, 4), (10, 1), (20, 1)]
    rest = "".join(f'[[events]]\nkind = "partition"\nworkers = [1, 2]\nat = {at}\nfor = {s}\n' for at, s in spans)
    times = Times(made(rest=rest))
    asked = [4.9, 5.0, 6.5, 10.5, 11.0, 20.0, 21.0]
    assert [times.reachable_at(1, at) for at in asked] == [4.9, 11.0, 11.0, 11.0, 11.0, 21.0, 21.0]
    assert times.reachable_at(0, 5.0) == 5.0


seconds = st.floats(0.0, 40.0, allow_nan=False)
spells = st.lists(
    st.builds(
        lambda at, lasts, factor: ScenarioEvent(
            "slow" if factor else "pause", at / 4, workers=(0,), for_s=lasts / 4, factor=factor
        ),
        st.integers(0, 80),
        st.integers(1, 40),
        st.sampled_from([None, 0.5, 2.0, 3.0, 8.0]),
    ),
    min_size=1,
    max_size=6,
)


def done_in(pace: RateCourse, start: float, end: float) -> float:
    """Work done between two times, summed over the steps of the pace without the code under test."""
    total, begin = 0.0, 0.0
    for edge, rate in zip([*pace.edges, math.inf], [*pace.rates, 1.0], strict=True):
        total += max(0.0, min(end, edge) - max(start, begin)) * rate
        begin = edge
    return total


@given(spells, seconds, seconds)
def test_the_work_done_within_the_stretched_time_is_the_work_asked(
    events: list[ScenarioEvent], start: float, work: float
) -> None:
    pace = pace_of(events)
    lasts = pace.stretched(start, work)
    assert done_in(pace, start, start + lasts) == pytest.approx(work, abs=1e-9)


@given(spells, st.integers(0, 160), st.integers(1, 400))
def test_brute_force_stepping_agrees(events: list[ScenarioEvent], quarters: int, tenths: int) -> None:
    """Steps of 1/64 s on which every pace is constant, as events begin and end at quarters of a second."""
    # The odd remainder keeps the end of the work off the beginning of a pause, where rounding would decide.
    start, work, step = quarters / 4, tenths / 10 + math.pi / 1000, 1 / 64
    at, left = start, work
    while True:
        rate = math.prod(
            0.0 if event.factor is None else 1 / event.factor for event in events if event.at <= at < event.until
        )
        if left - rate * step <= 1e-9:
            break
        at, left = at + step, left - rate * step
    end = start + pace_of(events).stretched(start, work)
    assert end == pytest.approx(at + (left / rate if rate else 0.0), abs=1e-6)


@given(spells, seconds, seconds, st.floats(0.0, 1.0))
def test_splitting_work_changes_nothing(events: list[ScenarioEvent], start: float, work: float, share: float) -> None:
    pace = pace_of(events)
    first = pace.stretched(start, work * share)
    both = first + pace.stretched(start + first, work * (1 - share))
    whole = pace.stretched(start, work)
    # Where work ends just as a pause begins, rounding decides on which side of it: only the work done must agree.
    if all(event.factor for event in events):
        assert both == pytest.approx(whole, abs=1e-9)
    assert done_in(pace, start, start + both) == pytest.approx(done_in(pace, start, start + whole), abs=1e-9)


@given(spells, seconds, seconds, seconds)
def test_later_starts_and_more_work_never_end_sooner(
    events: list[ScenarioEvent], start: float, later: float, work: float
) -> None:
    pace = pace_of(events)
    end = start + pace.stretched(start, work)
    started_later = start + later + pace.stretched(start + later, work)
    assert done_in(pace, start, started_later) >= work - 1e-9
    assert started_later >= end - 1e-9 or not all(event.factor for event in events)
    assert start + pace.stretched(start, work + later) >= end


@given(seconds, seconds, st.lists(st.tuples(seconds, st.floats(0.1, 10)), min_size=1, max_size=4))
def test_a_computation_outside_all_events_is_not_touched(
    start: float, work: float, spans: list[tuple[float, float]]
) -> None:
    late = [ScenarioEvent("pause", start + work + at + 1e-6, workers=(0,), for_s=lasts) for at, lasts in spans]
    assert pace_of(late).stretched(start, work) == work


def test_light_workers_are_light() -> None:
    text = '[compute]\nseconds_per_sample = 0.01\njitter = "lognormal:0.1"\n[[workers]]\ncount = 20000\n'
    tracemalloc.start()
    try:
        times = Times(parse(text, "many", Path()))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert times.compute_s(19_999, 0, 1, 0.0) > 0
    assert used / 20_000 < 200


def test_built_ins_have_times() -> None:
    for name in ("even4", "interference8", "mixed_gpus12", "uneven8", "wan6"):
        cluster = load(name)
        times = Times(cluster)
        for worker in range(cluster.count):
            assert 0 < times.compute_s(worker, 0, 64, 0.0) < sys.float_info.max
            assert times.latency_s(worker, 0, True) > 0
