"""balanced behind a server's line and through partitions, and dasp behind a line.

What can synchronous rounds reach there, and what does a loss cost? Workers that cost time alone, in virtual time.
Throughput is counted once the workers are known.
"""

from itertools import pairwise, permutations
from pathlib import Path

import pytest
from clusters import event

from paceline import scenario as scenarios
from paceline import strategies
from paceline.core.actions import Apply, Cancel, Discard, Grant, Mark
from paceline.core.events import Pushed
from paceline.engines.sim.light import simulate
from paceline.laws.checker import check
from paceline.laws.clusters import ClusterPlan, play
from paceline.records.journal import Decision, Lines

WORK = 64
SECONDS_PER_SAMPLE = 0.002
MODEL_BYTES = 400_000
LINE = "bandwidth_mbps = 1000"
TURN_S = 8 * MODEL_BYTES / 1e9  # of one model, or one gradient, on that line
MIXES = {
    "equal": lambda n: [1.0] * n,
    "1-4x": lambda n: [1.0] * (n // 2) + [0.5] * (n // 4) + [0.25] * (n // 4),
    "1-8x": lambda n: [1.0, 0.5, 0.25, 0.125] * (n // 4),
}

LONG_TAIL = [1.0] * 8 + [0.5] * 4 + [0.25] * 2 + [0.125] * 2


def run(speeds, *, network="", jitter="none", events="", seconds=30.0, strategy="balanced"):
    made = scenarios.parse(text_of(speeds, network, jitter, events), "test", Path())
    lines = Lines()
    simulate(strategies.build(strategy, 0), made, work=WORK, model_bytes=MODEL_BYTES, sink=lines, max_seconds=seconds)
    return lines


def text_of(speeds, network="", jitter="none", events=""):
    workers = "".join(f"[[workers]]\nspeed = {speed}\n" for speed in speeds)
    compute = f'seed = 7\n[compute]\nseconds_per_sample = {SECONDS_PER_SAMPLE}\njitter = "{jitter}"\n'
    return f"{compute}[network]\n{network}\n{workers}{events}"


def one_epoch(speeds, samples, events):
    """A run on data that ends, the ledger included."""
    plan = ClusterPlan(text_of(speeds, events=events), WORK, 0, samples, 1.0, 0.0, 10_000, MODEL_BYTES)
    return play(strategies.build("balanced", 0), plan)


def rounds_of(lines):
    """When each version was made, and of how many samples."""
    pushed, found = {}, []
    for line in lines:
        if not isinstance(line, Decision):
            continue
        if isinstance(line.event, Pushed):
            pushed[line.event.push] = line.event.samples
        for action in line.actions:
            if isinstance(action, Apply):
                found.append((line.event.at, sum(pushed[push] for push in action.pushes)))
    return found


def per_second(lines, since=5.0):
    rounds = [(at, samples) for at, samples in rounds_of(lines) if at >= since]
    return sum(samples for _, samples in rounds[1:]) / (rounds[-1][0] - rounds[0][0])


def speed_of(speeds):
    return sum(speeds) / SECONDS_PER_SAMPLE


def synchronous_round_s(rates, samples, turn_s):
    """The shortest round: models down and gradients up one after the other, the fastest first down and last up.

    A worker of rank r computes for T - 2 r turns, so T = (samples + 2 turns * sum of r * rate) / sum of rates, over the
    workers that take part.
    """
    best, weighted, total = float("inf"), 0.0, 0.0
    for rank, rate in enumerate(sorted(rates, reverse=True), 1):
        weighted += rank * rate
        total += rate
        best = min(best, (samples + 2 * turn_s * weighted) / total)
    return best


def test_no_other_orders_make_a_shorter_synchronous_round():
    """The formula against all orders of models down and gradients up, by bisection, for four workers."""
    rates, samples, turn_s = [500.0, 250.0, 125.0, 60.0], 64, 0.02
    found = []
    for down in permutations(range(4)):
        for up in permutations(range(4)):
            short, long = 0.0, 10.0
            for _ in range(50):
                seconds = (short + long) / 2
                done = sum(
                    rate * max(0.0, seconds - (d + 1 + u + 1) * turn_s)
                    for rate, d, u in zip(rates, down, up, strict=True)
                )
                short, long = (seconds, long) if done < samples else (short, seconds)
            found.append(long)
    assert synchronous_round_s(rates, samples, turn_s) == pytest.approx(min(found))
    assert max(found) > 1.1 * min(found)


def test_gradients_sent_while_the_next_piece_is_computed_make_no_round_shorter():
    """Two pieces a worker, in every order of their gradients, against one piece.

    A gradient that is j-th from the end begins j turns before the end, and a worker computes until its last one begins;
    that its first one leaves meanwhile is taken to cost it nothing. The last ones are still of all workers.
    """
    rates, samples, turn_s = [500.0, 250.0, 125.0], 256, 0.02
    found = []
    for down in permutations(range(3)):
        for up in set(permutations([0, 0, 1, 1, 2, 2])):  # whose gradient it is, from the end
            waiting = [(down[worker] + 1 + up.index(worker) + 1) * turn_s for worker in range(3)]
            lost = sum(rate * each for rate, each in zip(rates, waiting, strict=True))
            seconds = (samples + lost) / sum(rates)
            assert seconds > max(waiting), "each of them takes part"
            found.append(seconds)
    assert min(found) == pytest.approx(synchronous_round_s(rates, samples, turn_s))


@pytest.mark.parametrize(
    ("speeds", "line", "best", "reached", "hidden"),
    [
        (MIXES["1-4x"](8), 0.3, 0.220, 1.094, 1.18),
        (MIXES["1-4x"](8), 1.0, 0.298, 1.095, 1.60),
        (LONG_TAIL, 0.3, 0.221, 1.112, 1.16),
        (LONG_TAIL, 1.0, 0.291, 1.086, 1.53),
    ],
)
def test_what_a_line_takes_from_a_round_and_what_staleness_could_give_back(speeds, line, best, reached, hidden):
    """The numbers of the design notes; the line is full for `line` fast computing times by one gradient of each."""
    turn_s = line * WORK * SECONDS_PER_SAMPLE / len(speeds)
    rates, samples = [speed / SECONDS_PER_SAMPLE for speed in speeds], WORK * len(speeds)
    round_s = synchronous_round_s(rates, samples, turn_s)
    assert round_s == pytest.approx(best, abs=0.0005)
    assert round_s / (samples / sum(rates)) == pytest.approx(hidden, abs=0.005)
    network = f"bandwidth_mbps = {8 * MODEL_BYTES / turn_s / 1e6}"
    even, uneven = (
        samples / per_second(run(speeds, network=network, jitter=each)) for each in ("none", "lognormal:0.1")
    )
    assert even < 1.01 * round_s
    assert uneven == pytest.approx(reached * round_s, rel=0.002)


@pytest.mark.parametrize("speeds", [MIXES[name](64) for name in MIXES], ids=MIXES)
@pytest.mark.parametrize(("jitter", "least"), [("none", 0.97), ("lognormal:0.1", 0.86)])
def test_64_workers_on_a_full_line_reach_nearly_what_synchronous_rounds_can(speeds, jitter, least):
    lines = run(speeds, network=LINE, jitter=jitter, seconds=20.0)
    rates = [speed / SECONDS_PER_SAMPLE for speed in speeds]
    possible = WORK * 64 / synchronous_round_s(rates, WORK * 64, TURN_S)
    assert least < per_second(lines) / possible < 1.001
    assert {samples for _, samples in rounds_of(lines)} == {WORK * 64}
    assert check(lines) == []


@pytest.mark.parametrize("workers", [8, 32])
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize(("jitter", "least"), [("none", 0.985), ("lognormal:0.1", 0.96)])
def test_nearly_all_of_the_clusters_speed_is_used_without_a_line(workers, name, jitter, least):
    speeds = MIXES[name](workers)
    assert per_second(run(speeds, jitter=jitter, seconds=12.0), since=2.0) > least * speed_of(speeds)


def test_a_full_line_takes_one_push_from_each_worker():
    lines = run(MIXES["1-4x"](64), network=LINE)
    pushes = sum(isinstance(line, Decision) and isinstance(line.event, Pushed) for line in lines)
    assert pushes <= 64 * (len(rounds_of(lines)) + 2)


def test_models_go_to_the_fastest_first_and_gradients_never_wait_for_each_other():
    lines = run(MIXES["1-4x"](16)[::-1], network=LINE)
    last = max(place for place, line in enumerate(lines) if isinstance(line, Decision) and applies(line))
    granted = [action.worker for action in lines[last].actions if isinstance(action, Grant)]
    assert granted == [*range(8, 16), *range(4, 8), *range(4)]
    late = [line.event for line in lines[len(lines) // 2 :] if isinstance(line, Decision) and is_push(line)]
    assert sum(event.queued_up_s or 0.0 for event in late) < 0.5 * TURN_S * len(late)
    assert sum(event.queued_down_s or 0.0 for event in late) > 5 * TURN_S * len(late)


def applies(line):
    return any(isinstance(action, Apply) for action in line.actions)


def is_push(line):
    return isinstance(line.event, Pushed)


# -- partitions --------------------------------------------------------------------------------------------------------


def cut(worker, at, for_):
    return event("partition", at, workers=[worker] if isinstance(worker, int) else worker, for_=for_)


def seconds_until(lines, version):
    return rounds_of(lines)[version - 1][0]


def rounds_lost(speeds, worker, at, **given):
    """Rounds that a partition of 10 s costs beyond the share of the worker that is cut off, or of several."""
    calm, cut_off = (run(speeds, events=each, seconds=30.0, **given) for each in ("", cut(worker, at, 10.0)))
    versions = len(rounds_of(cut_off))
    share = 10.0 * sum(speeds[each] for each in ([worker] if isinstance(worker, int) else worker)) / sum(speeds)
    undisturbed = seconds_until(calm, versions)
    return (seconds_until(cut_off, versions) - undisturbed - share) * versions / undisturbed


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("worker", [0, 7])
@pytest.mark.parametrize("at", [10.0, 10.07])
def test_a_partition_costs_little_more_than_the_worker_that_it_cuts_off(name, worker, at):
    assert rounds_lost(MIXES[name](8), worker, at) <= 1.2


@pytest.mark.parametrize("given", [{"jitter": "lognormal:0.1"}, {"network": LINE}], ids=["jitter", "line"])
def test_likewise_with_jitter_and_on_a_line(given):
    assert rounds_lost(MIXES["1-4x"](8), 0, 10.03, **given) <= 1.2


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("cut_off", [[0], [7], [0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [*range(1, 8)]], ids=str)
@pytest.mark.parametrize("at", [0.0, 0.05, 0.2, 5.0, 5.07])
def test_no_version_takes_much_longer_than_the_reachable_workers_need_for_it(name, cut_off, at):
    """Nor in the first round, when nobody is known, nor when most are cut off."""
    speeds = MIXES[name](8)
    lines = run(speeds, events=cut(cut_off, at, 100.0), seconds=at + 6.0)
    seconds = [0.0, *(second for second, _ in rounds_of(lines))]
    longest = max(later - earlier for earlier, later in pairwise(seconds))
    left = sum(speed for worker, speed in enumerate(speeds) if worker not in cut_off)
    alone, together = (WORK * 8 * SECONDS_PER_SAMPLE / speed for speed in (left, sum(speeds)))
    if at == 0.0:  # whoever never answered could be as fast as the others
        together = max(together, alone * (8 - len(cut_off)) / 8)
    assert longest <= alone + 1.2 * together


@pytest.mark.parametrize("jitter", ["none", "lognormal:0.1"])
@pytest.mark.parametrize("speeds", [[1.0] * 7 + [0.125], [1.0] + [0.125] * 7, MIXES["1-8x"](8)])
def test_nobody_8_times_slower_is_taken_for_silent(speeds, jitter):
    """Not even in the first round, when that is not known."""
    lines = run(speeds, jitter=jitter, seconds=5.0)
    assert not [a for line in lines if isinstance(line, Decision) for a in line.actions if isinstance(a, Cancel)]


def test_a_worker_64_times_slower_is_measured_by_its_check_and_nobody_waits_for_it():
    lines = run([1.0] * 7 + [1 / 64], seconds=5.0)
    assert marks_of(lines, 7)[:2] == ["silent", "active"]
    assert rounds_of(lines)[0][0] < 2.2 * WORK * SECONDS_PER_SAMPLE
    assert per_second(lines, since=1.5) > 0.985 * 7 / SECONDS_PER_SAMPLE


def test_most_workers_3_times_slower_for_a_while_are_back_before_one_has_done_all_their_work():
    """They are taken for silent; the one in time takes a round's time of their samples at once, not all."""
    slow = "".join(event("slow", 5.0, worker=worker, for_=5.0, factor=3.0) for worker in range(7))
    at = [second for second, _ in rounds_of(run([1.0] * 8, events=slow, seconds=10.0))]
    longest = max(later - earlier for earlier, later in pairwise(at))
    assert longest < 5 * WORK * SECONDS_PER_SAMPLE


def marks_of(lines, worker):
    decisions = [line for line in lines if isinstance(line, Decision)]
    return [a.state for d in decisions for a in d.actions if isinstance(a, Mark) and a.worker == worker]


def test_within_a_round_the_silent_worker_is_left_out_and_within_one_it_is_back():
    lines = run([1.0] * 8, events=cut(3, 10.0, 5.0), seconds=20.0)
    decisions = [line for line in lines if isinstance(line, Decision)]
    marks = [(d.event.at, a.state) for d in decisions for a in d.actions if isinstance(a, Mark) and a.worker == 3]
    round_s = WORK * SECONDS_PER_SAMPLE
    assert [state for _, state in marks] == ["silent", "active"]
    assert marks[0][0] < 10.0 + 2 * round_s
    assert marks[1][0] < 15.0 + round_s
    asked = [d.event.at for d in decisions for a in d.actions if isinstance(a, Grant) and a.worker == 3]
    assert sum(10.0 + 2 * round_s < at < 15.0 for at in asked) == 0, "nothing is sent to it meanwhile"
    assert any(15.0 < at < 15.0 + 2 * round_s for at in asked)


def test_no_sample_of_a_partition_is_lost_or_counted_twice():
    lines = one_epoch([1.0, 1.0, 0.5, 0.25], 12_000, cut(0, 3.0, 2.0))
    assert check(lines) == []
    rounds = rounds_of(lines)
    assert sum(samples for _, samples in rounds) == 12_000
    assert {samples for _, samples in rounds[:-1]} == {4 * WORK}
    kinds = [type(a) for line in lines if isinstance(line, Decision) for a in line.actions]
    assert (kinds.count(Cancel), kinds.count(Discard)) == (1, 1)
    dropped = [line for line in lines if getattr(line, "what", "") == "dropped"]
    assert len(dropped) <= 1, "its late push crosses the Cancel"


@pytest.mark.parametrize("at", [0.5, 1.9, 2.03])
def test_a_worker_that_never_answers_again_does_not_keep_the_last_samples(at):
    """The data ends within the partition: the others take back what the silent one was asked for."""
    lines = one_epoch([1.0, 1.0, 0.5], 2_600, cut(1, at, 500.0))
    assert sum(samples for _, samples in rounds_of(lines)) == 2_600
    assert rounds_of(lines)[-1][0] < 6.0
    assert check(lines) == []


def test_two_workers_are_told_apart_too():
    lines = run([1.0, 1.0], events=cut(0, 5.0, 5.0), seconds=15.0)
    at = [second for second, _ in rounds_of(lines)]
    longest = max(later - earlier for earlier, later in pairwise(at))
    assert longest < 3.2 * WORK * SECONDS_PER_SAMPLE


def test_a_pause_of_all_workers_leaves_nobody_out():
    events = "".join(event("slow", 5.0, worker=worker, for_=5.0, factor=3.0) for worker in range(4))
    lines = run([1.0] * 4, events=events, seconds=20.0)
    assert not [a for line in lines if isinstance(line, Decision) for a in line.actions if isinstance(a, Cancel)]


@pytest.mark.parametrize("speeds", [MIXES[name](16) for name in MIXES], ids=MIXES)
@pytest.mark.parametrize("jitter", ["none", "lognormal:0.1"])
def test_dasp_plans_rounds_by_turns_on_a_busy_line(speeds, jitter):
    """All gradients of a round take the time in which the fastest computes its push."""
    network = f"bandwidth_mbps = {16 * 8 * MODEL_BYTES / (WORK * SECONDS_PER_SAMPLE) / 1e6}"
    turn_s = WORK * SECONDS_PER_SAMPLE / 16
    best = WORK * 16 / synchronous_round_s([speed / SECONDS_PER_SAMPLE for speed in speeds], WORK * 16, turn_s)
    found = {
        spec: per_second(run(speeds, network=network, jitter=jitter, strategy=spec))
        for spec in ("dasp", "dasp:fit=merge")
    }
    assert found["dasp"] >= 0.88 * best
    assert found["dasp"] >= 0.97 * found["dasp:fit=merge"]
