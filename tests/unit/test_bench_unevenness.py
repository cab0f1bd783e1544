"""The judge of strategies on unequal workers: its cells, how sides are tuned, which rows count, and what bars say."""

import itertools
import json
import math

import msgspec
import pytest

import bench_unevenness as bench
from contenders import (
    strategy_code,
    uneven_cells,
    uneven_growth,
    uneven_parts,
    uneven_rows,
    uneven_tuning,
    uneven_verdicts,
)
from contenders.uneven_cells import CELLS, JUDGED, RESAMPLED, Outcome, Trial
from contenders.uneven_growth import Applied, Throughput
from contenders.uneven_parts import FREE, PARTS, Found, Task
from contenders.uneven_rows import Rows
from contenders.uneven_tuning import SIDES, Choice, Search, ratio
from paceline.core.actions import Apply, Mark
from paceline.core.errors import UserError
from paceline.core.events import Pushed, TimerFired
from paceline.records import journal
from sources import Sources

NO_TRACES = not uneven_cells.ALIBABA.is_dir()


def outcome(reached=10.0, accuracy=0.91, **changed):
    known = Outcome(reached, 11.0, accuracy, 5, 40, 2560, 1.0, 3.0, 0.1, 2, {"SYNC": 1.0}, 9, 1.5, "target")
    return msgspec.structs.replace(known, **changed)


MISSED = outcome(None, 0.5, ended="limit")


# -- cells -----------------------------------------------------------------------------------------------------------


def test_twelve_cells_are_judged():
    assert len(JUDGED) == 12
    assert sorted(len(cell.speeds) for cell in JUDGED) == [8] * 8 + [16] * 4
    assert [cell.name for cell in JUDGED if min(cell.speeds) == 1] == ["interference", "stalls", "alibaba1"]


@pytest.mark.parametrize(
    ("name", "groups"),
    [("w8_4x", [(4, 1.0), (2, 0.5), (2, 0.25)]), ("w16_8x", [(8, 1.0), (4, 0.5), (2, 0.25), (2, 0.125)])],
)
def test_speeds_are_those_of_the_name(name, groups):
    assert uneven_cells.alike(CELLS[name].speeds) == groups


@pytest.mark.parametrize(("name", "share"), [("w8_4x_line03", 0.3), ("w16_8x_line10", 1.0)])
def test_a_round_of_all_pushes_takes_its_share_of_the_fast_computing(name, share):
    cell = CELLS[name]
    mbps = uneven_cells.cluster(cell, 0).network.bandwidth_mbps
    seconds = len(cell.speeds) * uneven_cells.bytes_of(cell) * 8 / (mbps * 1e6)
    assert seconds == pytest.approx(share * uneven_cells.FAST_S, rel=1e-4)


@pytest.mark.parametrize("name", ["interference", "stalls"])
def test_one_node_after_the_other_is_disturbed(name):
    events = uneven_cells.cluster(CELLS[name], 3).events
    assert all(one.until <= other.at for one, other in itertools.pairwise(events))
    assert all(one.worker != other.worker for one, other in itertools.pairwise(events))
    assert events == uneven_cells.cluster(CELLS[name], 3).events != uneven_cells.cluster(CELLS[name], 4).events


def test_samples_that_cannot_be_split_cost_what_their_images_do():
    whole, usual = (uneven_cells.cluster(CELLS[name], 0).compute.seconds_per_sample for name in ("whole", "w8_4x"))
    pieces = uneven_cells.BATCH // CELLS["whole"].images
    assert pieces == 2  # the fewest that BatchNorm can be trained on
    assert pieces * whole == pytest.approx(uneven_cells.BATCH * usual)


def test_resampled_clusters_follow_from_the_seed():
    assert uneven_cells.resampled(uneven_cells.RESAMPLED_SEED) == RESAMPLED != uneven_cells.resampled(1)
    mixes = [cell for cell in RESAMPLED if not cell.trace]
    assert len(mixes) == 5
    assert all(max(cell.speeds) == 1 and min(cell.speeds) >= 1 / 8 for cell in mixes)


def test_mixes_that_are_drawn_again_are_others():
    names = [cell.name for cell in uneven_parts.AGAIN]
    assert names == [f"again{number}" for number in range(5)]
    assert {cell.speeds for cell in uneven_parts.AGAIN}.isdisjoint(cell.speeds for cell in RESAMPLED)
    assert all(CELLS[cell.name] == cell for cell in uneven_parts.AGAIN)
    times = {"bsp": 20.0, "asp": 10.0, "adaptive_sync": 9.0}
    found = found_with(times, cells=names) | found_with({**times, "adaptive_sync": 12.0}, cells=["again3"])
    assert uneven_verdicts.judge_again(found).value == "1.2"


@pytest.mark.skipif(NO_TRACES, reason=f"no traces: {uneven_cells.ALIBABA}")
def test_resampled_times_are_recorded_ones():
    made = uneven_cells.pieces(3, 2)
    known = {t for name in ("alibaba1", "alibaba2", "alibaba3")
             for row in uneven_cells.cluster(CELLS[name], 0).compute.jitter.rows for t in row}  # fmt: skip
    assert len(made) == 2
    assert made[0] != made[1]
    assert {time for row in made for time in row} <= known
    assert uneven_cells.cluster(RESAMPLED[-1], 0).workers[0].jitter.rows == uneven_cells.pieces(
        int(RESAMPLED[-1].trace.partition(":")[2]), 8
    )


def test_time_in_states_is_counted_until_the_end():
    watch = uneven_cells.Watch()
    for at, worker, state in ((0.0, 0, "WARMUP"), (0.0, 1, "WARMUP"), (2.0, 0, "SYNC"), (6.0, 0, "ASYNC")):
        watch.write(journal.Decision(TimerFired(at=at, name="t"), [Mark(worker, state, "")]))
    assert watch.shares(10.0) == {"ASYNC": 0.2, "SYNC": 0.2, "WARMUP": 0.6}
    assert watch.changes == 2


def test_a_run_below_the_target_goes_on_until_its_limit(monkeypatch):
    """However low the accuracy is after a third of the time: a side is cut at 3 times its best, and at nothing else."""

    def launch(*_, sink, max_seconds, **others):
        for second in range(int(max_seconds)):
            sink.write(journal.Observation(second, "evaluation", {"metrics": {"accuracy": 0.1}}))
        raise UserError("the model is not finite")  # the run is made no further

    monkeypatch.setattr(uneven_cells.paceline, "launch", launch)
    monkeypatch.setattr(uneven_cells, "data", lambda *_: None)
    found = uneven_cells.run(Trial("w8_4x", "bsp", 0.1, 0.9, 0, limit_s=30.0))
    assert (found.ended, found.evaluations) == ("UserError", 30)


# -- tuning ----------------------------------------------------------------------------------------------------------


class Made:
    """Runs whose time follows from the distance to a best rate; a run that takes longer than its limit misses."""

    def __init__(self, best, seconds=10.0, steep=0.3):
        self.best, self.seconds, self.steep, self.trials = best, seconds, steep, []

    def __call__(self, trial):
        self.trials.append(trial)
        away = abs(2 * math.log2(trial.rate / self.best[trial.momentum]))
        seconds = self.seconds * math.exp(self.steep * away) * (1.1 if trial.momentum else 1.0)
        if seconds > trial.limit_s:
            return outcome(None, 0.9 / (1 + away), seconds=trial.limit_s)
        return outcome(seconds)


def searched(make, side="asp"):
    search = Search("w8_4x", side, 64, make)
    search.run(SIDES[side])
    return search


@pytest.mark.parametrize("exponent", [-14, -6, 0, 7])
def test_the_grid_is_extended_until_the_best_lies_inside(exponent):
    best = uneven_tuning.rate_of(exponent)
    choice = searched(Made({0.0: best, 0.9: best})).choose()
    assert (choice.trial.rate, choice.trial.momentum) == (best, 0.0)
    assert choice.score == pytest.approx(10.0)


def test_every_form_is_tried_with_both_momenta_but_the_same_arithmetic_once():
    make = Made({0.0: 1.0, 0.9: 0.1})
    searched(make)
    tried = {(trial.strategy, trial.momentum) for trial in make.trials}
    assert tried == {("asp", 0.0), ("asp", 0.9), ("asp:whole_steps=true", 0.9)}


def test_a_run_is_cut_only_at_three_times_the_best_so_far():
    make = Made({0.0: 1.0, 0.9: 0.1})
    best = math.inf
    search = Search("w8_4x", "asp", 64, make)
    search.run(SIDES["asp"])
    for trial in list(make.trials):
        assert trial.limit_s >= min(uneven_tuning.first_limit(CELLS["w8_4x"]), 3 * best) * 0.999
        best = min(best, make(trial).reached_s or math.inf)


def test_a_side_that_is_nowhere_at_the_target_gets_longer_runs():
    soon = uneven_tuning.first_limit(CELLS["w8_4x"])
    late = searched(Made({0.0: 1.0, 0.9: 0.1}, seconds=2 * soon)).choose()
    assert late.score == pytest.approx(2 * soon)
    assert searched(Made({0.0: 1.0, 0.9: 0.1}, seconds=4 * soon)).choose() is None


def test_the_other_seeds_choose_among_those_that_are_close():
    def make(trial):
        best = 1.0 if trial.seed == 100 else 2**0.5
        return Made({0.0: best, 0.9: 1e-9}, steep=0.15 if trial.seed == 100 else 1.5)(trial)

    choice = searched(make, "balanced").choose()
    assert choice.trial.rate == pytest.approx(2**0.5, rel=1e-5)


def test_three_more_seeds_choose_between_the_best_two():
    """A rate that is soonest on three seeds, and three times as late on one of the others, is not taken."""
    asked = []

    def make(trial):
        asked.append(trial)
        late = trial.seed == 104 and trial.rate == 1.0
        return Made({0.0: 1.0, 0.9: 1e-9}, seconds=40.0 if late else 10.0, steep=0.1)(trial)

    choice = searched(make, "balanced").choose()
    assert choice.trial.rate != 1.0
    assert choice.score < 1.2 * 10
    assert len({trial.rate for trial in asked if trial.seed == 105}) <= uneven_tuning.FINALISTS
    assert len({trial.rate for trial in asked if trial.seed == 101}) == uneven_tuning.CANDIDATES


@pytest.mark.parametrize(("steep", "taken"), [(0.04, 2**-0.5), (0.2, 1.0)])
def test_of_two_rates_that_are_as_good_the_lower_one_is_taken(steep, taken):
    """The rate above is no better than the one below, which is just as far from the best."""
    choice = searched(Made({0.0: 1.0, 0.9: 1e-9}, steep=steep), "balanced").choose()
    assert choice.trial.rate == pytest.approx(taken, rel=1e-5)
    other = msgspec.structs.replace(choice.trial, rate=0.1)
    assert uneven_tuning.alike(choice.trial, other)
    assert not uneven_tuning.alike(choice.trial, msgspec.structs.replace(other, momentum=0.5))


def test_where_all_that_are_close_miss_on_a_tuning_seed_the_next_ones_are_tried():
    def make(trial):
        if trial.momentum == 0 and trial.seed == 101:
            return MISSED
        return Made({0.0: 1.0, 0.9: 0.1}, seconds=15.0 if trial.momentum else 10.0)(trial)

    choice = searched(make, "balanced").choose()
    assert (choice.trial.momentum, choice.trial.rate) == (0.9, pytest.approx(0.1, rel=0.5))
    assert choice.score < 20


def test_a_side_that_always_misses_on_a_tuning_seed_counts_as_late_as_it_may_be():
    choice = searched(lambda trial: MISSED if trial.seed == 102 else outcome(10.0), "balanced").choose()
    assert choice.score == pytest.approx(uneven_tuning.CUT * 10)


def test_a_side_that_is_never_there_has_no_choice():
    assert searched(lambda trial: MISSED).choose() is None


def test_a_mean_of_ratios_has_its_interval():
    found = ratio([8.0, 16.0, 8.0, 16.0, 8.0], [16.0, 16.0, 16.0, 16.0, 16.0])
    assert found.mean == pytest.approx(2**-0.6)
    spread = 2.132 * math.log(2) * math.sqrt(0.3) / math.sqrt(5)
    assert (math.log(found.high / found.mean), math.log(found.mean / found.low)) == pytest.approx((spread, spread))


def test_a_missed_run_counts_with_the_time_that_it_had():
    assert uneven_tuning.seconds_of(MISSED) == 11.0


# -- rows ------------------------------------------------------------------------------------------------------------

TRIAL = Trial("w8_4x", "bsp", 0.5, 0.9, 0, limit_s=40.0)


def test_rows_are_there_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    Rows(path, "one").add(TRIAL, outcome())
    with path.open("ab") as file:
        file.write(b'{"trial": {"cell"')  # cut short
    again = Rows(path, "two")
    assert again.get(TRIAL) == outcome()
    again.pack()
    assert not path.exists()
    assert Rows(path, "three").get(TRIAL) == outcome()


def test_a_row_in_the_middle_that_is_none_is_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    Rows(tmp_path / "other.jsonl", "one").add(TRIAL, outcome())
    path.write_text("{}\n" + (tmp_path / "other.jsonl").read_text())
    with pytest.raises(SystemExit, match="line 1 is no row"):
        Rows(path, "two")


@pytest.mark.parametrize(
    ("known", "limit", "found"),
    [
        (outcome(10.0), 12.0, True),
        (outcome(10.0), 9.0, False),  # it would have been given up: unknown, since it was not
        (MISSED, 39.0, True),
        (MISSED, 41.0, False),
    ],
)
def test_a_limit_matters_only_where_it_would_have_struck(tmp_path, known, limit, found):
    rows = Rows(tmp_path / "rows.jsonl", "one")
    rows.add(TRIAL, known)
    assert (rows.get(msgspec.structs.replace(TRIAL, limit_s=limit)) is not None) == found


def changed(monkeypatch, what, value):
    monkeypatch.setattr(uneven_rows, what, value)


def test_rows_of_other_sources_of_the_strategy_are_left_out(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    Rows(path, "one").add(TRIAL, outcome())
    changed(monkeypatch, "strategy_code", lambda name: "other")
    assert Rows(path, "two").get(TRIAL) is None


@pytest.mark.parametrize("differs", [None, 0, 3, 6])
def test_where_the_strategy_changed_several_runs_decide_for_all(tmp_path, monkeypatch, differs):
    path = tmp_path / "rows.jsonl"
    trials = [msgspec.structs.replace(TRIAL, seed=seed) for seed in range(9)]
    rows = Rows(path, "one")
    for number, trial in enumerate(trials):
        rows.add(trial, outcome(10.0 + number, cpu_s=float(number)))
    changed(monkeypatch, "strategy_code", lambda name: "other")
    rows = Rows(path, "two")
    asked = []

    def again(trial):
        asked.append(trial.seed)
        return outcome(10.0 + trial.seed + (0.5 if trial.seed == differs else 0.0))

    rows.settle(("w8_4x", "bsp"), again)
    assert asked == [seed for seed in (0, 3, 6) if differs is None or seed <= differs]
    assert [rows.get(trial) is not None for trial in trials] == [differs in (None, trial.seed) for trial in trials]


def test_a_row_that_was_given_up_before_its_limit_does_not_count(tmp_path):
    path = tmp_path / "rows.jsonl"
    Rows(path, "one").add(TRIAL, msgspec.structs.replace(MISSED, ended="HopelessError"))
    rows = Rows(path, "two")
    assert (rows.get(TRIAL), rows.refused, rows.doubtful) == (None, 1, {})


def test_a_row_is_of_everything_that_a_run_goes_through():
    for place in uneven_rows.SHARED:
        assert (uneven_rows.PACKAGE / place).exists(), place
    assert {"scenario.py", "tasks/cifar.py", "tasks/mnist.py"} <= set(uneven_rows.SHARED)


@pytest.mark.parametrize("same", [True, False])
def test_where_shared_sources_changed_one_run_decides_for_all(tmp_path, monkeypatch, same):
    path, other = tmp_path / "rows.jsonl", msgspec.structs.replace(TRIAL, seed=1)
    rows = Rows(path, "one")
    rows.add(TRIAL, outcome(cpu_s=1.0))
    rows.add(other, outcome(12.0, cpu_s=2.0))
    changed(monkeypatch, "shared_code", lambda: "other")
    rows = Rows(path, "two")
    assert rows.get(TRIAL) is rows.get(other) is None
    asked = []

    def again(trial):
        asked.append(trial)
        return outcome(cpu_s=9.0) if same else outcome(10.5)

    rows.settle(("w8_4x", "bsp"), again)
    rows.settle(("w8_4x", "bsp"), again)
    assert asked == [TRIAL]  # the cheapest
    assert (rows.get(other) is not None) == same
    assert rows.get(TRIAL).reached_s == (10.0 if same else 10.5)
    kept = Rows(path, "three")
    assert (kept.get(other) is not None) == same
    assert [row.checked for trial, row in kept.found.items() if trial == other] == ["two"] * same
    kept.pack()
    packed = Rows(path, "four")
    assert len(packed.found) + len(packed.doubtful.get(("w8_4x", "bsp"), [])) == 2  # one row for each run


def test_comments_and_docstrings_do_not_change_what_sources_do():
    plain = "def f(x):\n    return x + 1\n"
    told = '"""A module."""\n\n\ndef f(x):\n    """Add."""\n    return (x + 1)  # one\n'
    assert strategy_code.meaning(plain) == strategy_code.meaning(told) != strategy_code.meaning(plain.replace("1", "2"))


def test_a_strategy_depends_on_what_it_imports_beside_itself():
    names = {path.name for path in strategy_code.reached(strategy_code.STRATEGIES / "asp.py")}
    assert {"asp.py", "ssp.py", "clocks.py"} <= names
    assert "base.py" not in names
    assert strategy_code.strategy_code("asp") != strategy_code.strategy_code("bsp")


# -- verdicts --------------------------------------------------------------------------------------------------------


def found_with(times, tuned=None, cells=tuple(CELLS), how="fresh"):
    """Every side in every cell, with the same times on all seeds but for a little."""
    found = {}
    for cell in cells:
        for side, seconds in times.items():
            trial = Trial(cell, SIDES[side][0], 0.1, 0.9, 100)
            runs = [outcome(seconds * (1 + seed / 100)) for seed in range(5)]
            found[Task(how, cell, side)] = Found(Choice(side, trial, (tuned or times)[side]), runs)
    return found


TIMES = {"bsp": 30.0, "asp": 20.0, "ssp": 25.0, "dssp": 26.0, "dasp": 12.0, "dasp_states": 19.0, "adaptive_sync": 20.5}


def missed(bars):
    return [bar.name for bar in bars if not bar.passed]


def judged(**changed):
    names = [cell.name for cell in JUDGED]
    return uneven_verdicts.judge(found_with({**TIMES, **changed}), names, uneven_verdicts.UNEVEN)


def test_good_times_meet_every_bar():
    assert missed(judged()) == []


@pytest.mark.parametrize(
    ("worse", "bars"),
    [
        ({"dasp": 15.0}, ["dasp_far_sooner"]),
        ({"dasp": 17.0}, ["dasp_sooner", "dasp_far_sooner"]),
        ({"dasp": 20.5}, ["dasp_sooner", "dasp_far_sooner", "dasp_behind"]),
        ({"dasp_states": 21.0}, ["states_ahead"]),
        ({"dasp_states": 23.0}, ["states_behind", "states_ahead"]),
        ({"adaptive_sync": 21.5}, ["adaptive_sync_behind"]),
    ],
)
def test_a_worse_time_misses_its_bar(worse, bars):
    assert missed(judged(**worse)) == bars


def test_the_rival_is_picked_by_what_was_tuned():
    found = found_with(TIMES, tuned={**TIMES, "asp": 40.0})
    against = uneven_verdicts.compared(found, "fresh", "w8_4x", "dasp", uneven_tuning.RIVALS)
    assert (against.rival, against.ratio.mean) == ("ssp", pytest.approx(12 / 25))


def test_a_side_without_runs_is_not_measured():
    found = {task: each for task, each in found_with(TIMES).items() if task.side != "dasp_states"}
    names = [cell.name for cell in JUDGED]
    bars = {bar.name: bar for bar in uneven_verdicts.judge(found, names, uneven_verdicts.UNEVEN)}
    assert "no runs of dasp_states" in bars["states_behind"].value
    assert bars["dasp_sooner"].passed


@pytest.mark.parametrize(
    ("busy", "bars"),
    [(24.0, ["adaptive_sync_over_bsp"]), (26.0, ["adaptive_sync_interference", "adaptive_sync_over_bsp"]), (20.0, [])],
)
def test_interference_is_held_against_calm_and_against_bsp(busy, bars):
    found = found_with({**TIMES, "adaptive_sync": 20.0})
    disturbed = found_with({"adaptive_sync": busy}, cells=["interference"])
    assert missed(uneven_verdicts.judge_interference({**found, **disturbed})) == bars


def test_a_lead_must_survive_free_batches():
    good = found_with(TIMES, cells=FREE, how="free")
    assert missed(uneven_verdicts.judge_batches(good)) == []
    worse = found_with({**TIMES, "dasp": 17.5}, cells=FREE, how="free")
    assert missed(uneven_verdicts.judge_batches(worse)) == ["dasp_free_batch"]


@pytest.mark.parametrize(("wide", "bars"), [(0.001, []), (0.003, ["dasp_spread"])])
def test_the_spread_of_accuracy_is_held_against_that_of_asp(wide, bars):
    found = {}
    for cell in uneven_verdicts.SPREAD:
        for side, width in (("asp", 0.002), ("dasp", wide)):
            runs = [outcome(None, 0.9 + width * (seed % 2)) for seed in range(6)]
            found[Task("spread", cell, side)] = Found(Choice(side, TRIAL, 1.0), runs)
    assert missed(uneven_verdicts.judge_spread(found)) == bars


def test_throughputs_and_partitions_have_their_bars():
    growth = [
        Throughput(name, size, line, jitter, share * 100, 100.0, 80.0 if line else 100.0)
        for name, share in (("balanced", 0.97), ("adaptive_sync", 0.84))
        for size in uneven_growth.SIZES
        for line, jitter in itertools.product((False, True), repeat=2)
    ]
    lost = {"balanced": {"fastest": 1.1, "slowest": 0.4}}
    assert missed(uneven_verdicts.judge_growth(growth, lost)) == ["adaptive_sync_64"]
    assert missed(uneven_verdicts.judge_growth([], {})) == [
        "adaptive_sync_64", "balanced_speeds", "balanced_jitter", "balanced_line", "balanced_partition",
    ]  # fmt: skip


def test_rows_say_why_a_side_is_soon():
    row = next(r for r in uneven_verdicts.table(found_with(TIMES)) if (r["cell"], r["side"]) == ("w8_4x", "dasp"))
    assert row["over_rival"] == pytest.approx(0.6)
    assert row["rival"] == "asp"
    assert row["samples_over_rival"] / row["pace_over_rival"] == pytest.approx(1.0)  # all runs here are alike
    assert {"samples_per_s", "samples", "staleness", "waiting", "states", "over_rival_low"} <= row.keys()


# -- growth ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 0.5, 0.25), (1.0, 0.3, 0.1, 0.02)])
def test_the_formula_of_a_synchronous_round_is_the_best_of_all_orders(speeds):
    mbps, size, work = 100.0, 100_000, 8
    t, samples = 8 * size / (mbps * 1e6), work * len(speeds)
    best = 0.0
    for count in range(1, len(speeds) + 1):
        for chosen in itertools.combinations([speed / uneven_cells.SECONDS_PER_SAMPLE for speed in speeds], count):
            orders = list(itertools.permutations(range(1, count + 1)))
            for down, up in itertools.product(orders, orders):
                idle = [(k + j) * t for k, j in zip(down, up, strict=True)]
                seconds = (samples + sum(v * s for v, s in zip(chosen, idle, strict=True))) / sum(chosen)
                if seconds >= max(idle):
                    best = max(best, samples / seconds)
    assert uneven_growth.synchronous(speeds, mbps, size, work) == pytest.approx(best)


def test_no_round_of_bsp_is_faster_than_the_formula():
    speeds = (1.0,) * 8
    found = uneven_growth.applied("bsp", uneven_growth.cluster(speeds, True, False), 10.0)
    assert found.until(9.0) / 9.0 <= uneven_growth.synchronous(speeds) * 1.001


def test_samples_of_a_version_count_evenly_until_it():
    found = Applied()
    found.write(journal.Decision(pushed(1, 100, 4.0), [Apply((1,), (1.0,), "")]))
    assert [found.until(second) for second in (0.0, 1.0, 4.0, 5.0)] == [0.0, 25.0, 100.0, 100.0]


def pushed(push, samples, at):
    return Pushed(worker=0, push=push, clock=1, read_version=0, samples=samples, compute_s=1.0, transfer_s=0.0,
                  wait_s=0.0, bytes_up=0, bytes_down=0, norm=None, loss=None, at=at)  # fmt: skip


def test_asp_loses_nothing_to_a_partition_and_bsp_all_of_it():
    speeds = (1.0,) * 4
    assert uneven_growth.lost_rounds("asp", 0, speeds) == pytest.approx(0.0, abs=1.0)
    assert uneven_growth.lost_rounds("bsp", 0, speeds) > 50


# -- the command -----------------------------------------------------------------------------------------------------


def test_every_part_names_cells_and_sides_that_exist():
    for part in PARTS.values():
        tasks = part()
        assert tasks
        assert all(task.cell in CELLS and task.side in SIDES for task in tasks)


def test_a_side_that_does_not_exist_is_left_out_and_said(capsys, monkeypatch):
    monkeypatch.setitem(SIDES, "dasp_states", ("dasp:fit=nothing_of_that_name",))
    tasks = [Task("once", "w8_4x", side) for side in ("bsp", "dasp_states")]
    found, complete = bench.measure(tasks, Made({0.0: 1.0, 0.9: 0.1}), 1)
    assert complete
    assert list(found) == tasks[:1]
    assert "dasp:fit=nothing_of_that_name is not there" in capsys.readouterr().err


def test_what_is_out_of_time_is_not_complete():
    def make(trial):
        raise bench.OutOfTimeError

    assert bench.measure([Task("once", "w8_4x", "bsp")], make, 1) == ({}, False)


def test_parts_that_are_not_whole_are_named():
    asked = [Task("fresh", "w8_4x", "bsp"), Task("fresh", "w8_4x", "asp")]
    told = bench.lacking({"fresh": asked, "spread": []}, {asked[0]: Found(None, [])})
    assert "1 of 2 of `fresh`" in told
    assert "spread" not in told
    assert bench.lacking({"fresh": asked}, dict.fromkeys(asked, Found(None, []))) == ""


def test_the_result_so_far_makes_no_runs_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "PARTS", {"fresh": lambda: [Task("fresh", "w8_4x", "bsp")]})
    monkeypatch.setattr(bench, "grow", lambda **_: ([], {}))
    monkeypatch.setattr(uneven_cells, "run", None)
    of = Sources("none", copied=True)
    options = bench.bars.Asked(quick=False, json=False, repeats=8, out=tmp_path, of=of)
    with pytest.raises(SystemExit, match="--so-far"):
        bench.report(options, Rows(tmp_path / bench.ROWS, "none"), 1, 0.0)
    bench.report(options, Rows(tmp_path / bench.ROWS, "none"), 1, so_far=True)
    page = (tmp_path / "unevenness.md").read_text()
    assert "1 of 1 of `fresh`" in page
    assert "bench_unevenness.py --repeats 8 --so-far" in page
    assert "not measured" in page


def test_a_free_batch_is_the_best_of_all():
    def make(trial):
        seconds = {16: 12.0, 32: 8.0, 64: 10.0}[trial.batch]
        return outcome(seconds + 2 * abs(math.log(trial.rate)) + trial.momentum)

    found = Task("free", "w8_4x", "bsp").carry_out(make)
    assert (found.choice.trial.batch, found.choice.trial.rate) == (32, 1.0)
    assert [each.reached_s for each in found.outcomes] == [8.0] * len(uneven_tuning.FRESH_SEEDS)


def test_accuracies_are_compared_after_equal_times():
    ends = set()

    def make(trial):
        if trial.to_the_end:
            ends.add(trial.limit_s)
        return outcome(10.0 if trial.strategy.startswith("asp") else 6.0)

    for side in ("asp", "dasp"):
        assert len(Task("spread", "w8_4x", side).carry_out(make).outcomes) == len(uneven_parts.SPREAD_SEEDS)
    assert ends == {15.0}


@pytest.mark.parametrize("cell", ["w8_4x", "cifar"])
def test_a_side_that_is_never_there_has_no_runs(cell):
    assert Task("fresh", cell, "bsp").carry_out(lambda trial: MISSED) == Found(None, [])


class NoRuns(bench.Maker):
    """A maker whose runs cost nothing."""

    def __init__(self, rows, jobs, minutes=None):
        self.rows, self.made = rows, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __call__(self, trial):
        return outcome(10.0 + trial.seed)


def test_a_quick_look_prints_every_bar_and_writes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(bench, "Maker", NoRuns)
    monkeypatch.setattr(uneven_growth, "rows", lambda *_: ([], {}))
    before = sorted(path.name for path in bench.results.FOLDER.iterdir())
    bench.main(["--quick", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["adaptive_sync_interference"]["verdict"] == "met"
    assert told["balanced_line"]["verdict"] == told["dasp_sooner"]["verdict"] == "not measured"
    assert sorted(path.name for path in bench.results.FOLDER.iterdir()) == before


def test_fresh_seeds_are_fixed(tmp_path):
    with pytest.raises(SystemExit, match="fresh seeds are fixed: 16, 17, 18, 19, 20, 21, 22, 23"):
        bench.main(["--repeats", "3", "--part", "fresh", "--unclean", "--out", str(tmp_path)])


def test_a_whole_run_writes_the_page_and_packs_its_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "Maker", NoRuns)
    monkeypatch.setattr(uneven_growth, "rows", lambda *_: ([], {}))
    monkeypatch.setattr(bench.sources, "checked", lambda _: Sources("abc", copied=True))
    monkeypatch.setattr(bench, "PARTS", {"fresh": lambda: [Task("fresh", "w8_4x", side) for side in ("bsp", "dasp")]})
    Rows(tmp_path / bench.ROWS, "old").add(TRIAL, outcome())
    bench.main(["--out", str(tmp_path)])
    page = (tmp_path / "unevenness.md").read_text()
    assert "1 at old" in page
    assert "| fresh | w8_4x | dasp |" in page
    assert (tmp_path / f"{bench.ROWS}.gz").exists()
    assert not (tmp_path / bench.ROWS).exists()
