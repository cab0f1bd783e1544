"""The comparisons on real processes: every side answers, all get the same result, no process outlives its answer."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bench_datapath
import bench_overhead
import bench_uneven_real
from contenders import bars, digits, isolation
from contenders.bars import Bar
from contenders.isolation import ContenderError, ask
from contenders.questions import Exchange, Race, Raced, Train, Update
from contenders.racing import Watch, sleep_until
from contenders.windows import common_rate, trained

needs_ray = pytest.mark.skipif(not bench_datapath.with_ray(), reason=bench_datapath.NO_RAY)


SOAKED = ("gloo", "torch_rpc", "ddp")  # rivals that start in ten seconds; one of them, Ray, is asked in every run


def sides(*names):
    marks = {"ray_actor": needs_ray, **dict.fromkeys(SOAKED, pytest.mark.soak)}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


# -- every side ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("side", sides("limit", "gloo", "torch_rpc", "ray_actor", "paceline_local"))
def test_every_side_ends_with_what_torch_makes_of_the_same_gradients(side):
    answer = ask(side, Exchange(parameters=3_000, rounds=4, warmup=2))
    assert len(answer.round_s) == 4
    assert answer.worst_error == 0.0
    assert "parameters" in answer.copies or "gradient" in answer.copies


@pytest.mark.soak
@pytest.mark.slow
def test_over_tcp_the_result_is_the_same_and_the_bare_round_trip_is_timed():
    question = Exchange(parameters=600_000, rounds=3, warmup=1)  # several chunks
    answer = ask("paceline_local", dataclasses.replace(question, transport="zeromq"))
    assert answer.worst_error == 0.0
    assert len(ask("bare_zeromq", question).round_s) == 3
    facts = answer.facts  # what the server says of itself, and what was seen of it
    assert facts["apply_s"] + facts["copy_s"] <= facts["cpu_s"]
    assert facts["server_bytes"] > 50e6


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("side", sides("ray_actor", "paceline_local"))
def test_asynchronous_updates_are_counted(side):
    answer = ask(side, Update(parameters=100, workers=1, updates=40, warmup=3))
    assert answer.updates == 40
    assert answer.updates_per_s > 0


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(("side", "workers"), [("plain", 1), ("ddp", 2), ("paceline_local", 2)])
def test_training_is_timed_step_by_step(side, workers):
    answer = ask(side, Train(model="tiny", batch_size=4, steps=20, warmup=2, workers=workers))
    assert answer.samples_per_s > 0
    assert len(answer.step_s) == 19


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("name", sides("ddp", "balanced"))
def test_a_race_ends_at_its_target(name, tmp_path):
    course = bench_uneven_real.Course(bench_uneven_real.QUICK, tmp_path / "digits.pt")
    entry = next(entry for entry in bench_uneven_real.entries([name]))
    answer = course.run(entry, entry.variants[0], 0.2, 0, max_s=60.0)
    assert answer.reached_s is not None
    assert answer.reached_s <= answer.seconds
    assert answer.updates > 0


# -- processes -------------------------------------------------------------------------------------------------------


def started_by_this_process():
    return set(isolation._descendants())


def test_processes_that_left_their_group_are_ended_too(tmp_path):
    before = started_by_this_process()
    child = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True); print('ready')"
    with isolation._orphans_ended():
        subprocess.run([sys.executable, "-c", child], check=True, capture_output=False, stdout=subprocess.DEVNULL)
        assert started_by_this_process() - before  # the sleeper lives on, as an orphan that came to us
    assert started_by_this_process() - before == set()


def test_a_side_that_fails_says_why():
    before = started_by_this_process()
    with pytest.raises(ContenderError, match=r"no_such_side could not exchange \(exit code 1\)(.|\n)*No module named"):
        ask("no_such_side", Exchange(parameters=10, rounds=1))
    assert started_by_this_process() - before == set()


def test_a_side_that_hangs_is_ended(tmp_path, monkeypatch):
    slow = tmp_path / "contenders"
    slow.mkdir()
    (slow / "__init__.py").write_text("")
    (slow / "isolation.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(isolation, "HOME", tmp_path)
    before = started_by_this_process()
    with pytest.raises(ContenderError, match=r"anybody took more than 0\.5 s to exchange"):
        ask("anybody", Exchange(parameters=10, rounds=1), limit_s=0.5)
    assert started_by_this_process() - before == set()


def test_a_side_gets_its_threads_and_none_of_our_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_STRATEGY", "ssp")
    environment = isolation._environment(3, tmp_path)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "PACELINE_STRATEGY" not in environment
    assert environment["PATH"] == os.environ["PATH"]


def test_a_contender_imports_the_sources_beside_the_benchmarks(tmp_path):
    first, second, third = isolation._environment(1, tmp_path)["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "bench_datapath.py").exists()
    assert (Path(second) / "paceline" / "__init__.py").exists()
    assert (Path(third) / "netlab" / "__init__.py").exists()


# -- arithmetic ------------------------------------------------------------------------------------------------------


def test_a_rate_is_counted_while_all_were_at_work():
    assert common_rate([[0.0, 1.0, 2.0, 3.0], [1.0, 1.5, 2.0]]).updates_per_s == 3.0
    with pytest.raises(ValueError, match="never pushed at the same time"):
        common_rate([[0.0, 1.0], [2.0, 3.0]])


def test_a_training_is_measured_after_its_warm_up():
    task = Train(model="tiny", batch_size=10, steps=3, warmup=1)
    found = trained([[0.0, 5.0, 6.0, 7.0]], task)
    assert found.samples_per_s == 10.0
    assert found.step_s == [1.0, 1.0]


def test_the_target_is_met_by_three_evaluations_at_the_middle_ones_time():
    watch = Watch(0.1)
    assert not any(watch.look(at, value) for at, value in [(1, 0.0), (2, 0.0), (3, 0.4), (4, 0.0), (5, 0.0)])
    assert watch.look(6, 0.1)
    assert watch.reached_s == 5
    assert watch.look(7, 1.0)  # what has been met stays met


def test_sleeping_the_difference_says_when_there_is_none_left():
    assert sleep_until(time.monotonic() + 0.001)
    assert not sleep_until(time.monotonic() - 1.0)


def test_the_data_of_a_race_needs_nothing_but_torch(tmp_path):
    digits.save(tmp_path / "digits.pt")
    train_set, held_out = digits.load(str(tmp_path / "digits.pt"))
    assert len(train_set) == 1400
    assert 2.0 <= digits.loss(digits.build(), held_out) <= 3.0


# -- verdicts --------------------------------------------------------------------------------------------------------


def datapath_rows(repeat, ours=20.0, ray=True):
    times = {"limit": 16.0, "paceline": ours, "torch_rpc": 160.0, "gloo": 120.0, "bare_zeromq": 100.0}
    times |= {"paceline_tcp": 120.0, "paceline_crowd": 50.0, "paceline_idle": 0.4} | (
        {"ray_actor": 60.0} if ray else {}
    )
    rows = [{"repeat": repeat, "side": side, "round_ms": ms, "worst_error": 0.0} for side, ms in times.items()]
    rows[0] |= {"apply_ms": 12.0, "copy_ms": 4.0}
    for row in rows:
        row["busy"] = 0.9
        row["server_mb"] = 200.0 if row["side"] == "paceline_idle" else 1600.0
    rows.append({"repeat": repeat, "side": "paceline_updates", "updates_per_s": 6000.0})
    return [*rows, {"repeat": repeat, "side": "ray_actor_updates", "updates_per_s": 1000.0}] if ray else rows


def test_the_data_path_is_judged_by_the_median_of_the_repeats_own_ratios():
    rows = [row for repeat, ours in enumerate([20.0, 24.0, 80.0]) for row in datapath_rows(repeat, ours)]
    found = {bar.name: bar for bar in bench_datapath.judge(rows, bench_datapath.FULL)}
    assert found["over_own_copies"].ratio == 24.0 / (12.0 + 2 * 4.0)
    assert found["over_own_copies"].passed
    assert found["over_best_peer"].ratio == 2.5
    assert found["tcp_over_bare"].passed
    assert found["server_busy"].passed
    assert found["updates_over_ray"].ratio == 6.0
    assert found["server_memory"].ratio == 1400 / 1400


def test_the_lead_over_the_fastest_peer_is_told_with_what_bounds_it():
    rows = [row for repeat, ours in enumerate([20.0, 24.0, 80.0]) for row in datapath_rows(repeat, ours)]
    facts = bench_datapath.bounds(rows)
    assert facts == {
        "over_limit": 24.0 / 16.0, "least_over_limit": 20.0 / 16.0,
        "most_over_best_peer": 60.0 / 20.0, "limit_over_best_peer": 60.0 / 16.0,
    }  # fmt: skip
    assert "more than 3.00 times ahead" in bench_datapath.notes(bench_datapath.FULL, facts)


def test_without_ray_its_bars_are_not_measured_and_say_how_to_get_it():
    found = {bar.name: bar for bar in bench_datapath.judge(datapath_rows(0, ray=False), bench_datapath.FULL)}
    assert not found["over_best_peer"].passed
    assert bars.as_data(found["updates_over_ray"])["verdict"] == "not measured"
    assert "pip install 'paceline[bench]'" in found["updates_over_ray"].value


def test_overhead_is_judged_by_samples_per_second():
    rates = {"cnn": 96.0, "mlp": 90.0, "fixed_cost": 50.0, "cnn_ddp": 98.0, "wide_ddp": 150.0}
    rows = [
        {"case": case, "paceline_per_s": rate, "rival_per_s": 100.0, "paceline_step_ms": 12.25, "rival_step_ms": 12.0}
        for case, rate in rates.items()
    ]
    passed = {bar.name: bar.passed for bar in bench_overhead.judge(rows)}
    assert passed == {
        "cnn_share": True, "mlp_share": False, "cnn_plain_step_ms": True, "mlp_plain_step_ms": True,
        "bsp_over_ddp_cnn": True, "bsp_over_ddp_wide": True,
    }  # fmt: skip
    assert bench_overhead.fixed_cost_us(rows) == pytest.approx(250.0)


def raced(name, *reached):
    entry = bench_uneven_real.Entry(name, "side")
    answers = [Raced(at, 100.0, 10.0, 5) for at in reached]
    return [bench_uneven_real._row(entry, {}, 0.2, seed, answer, tuning=False) for seed, answer in enumerate(answers)]


def test_a_race_is_judged_by_the_median_and_a_missed_target_is_the_latest():
    rows = [*raced("ddp", 30.0, 36.0, None), *raced("balanced", 10.0, 12.0, 14.0), *raced("dasp", None, None, 9.0)]
    found = {bar.name: bar for bar in bench_uneven_real.judge(bench_uneven_real.summary(rows), 100.0)}
    assert found["balanced_over_ddp"].ratio == 3.0
    assert found["dasp_over_ddp"].ratio is None
    assert "dasp missed the target in 100 s" in found["dasp_over_ddp"].value
    assert not found["balanced_over_hivemind"].passed


def test_hivemind_is_left_out_where_its_environment_is_missing(monkeypatch):
    monkeypatch.setattr(bench_uneven_real, "HIVEMIND", Path("nowhere"))
    assert "hivemind" not in [entry.name for entry in bench_uneven_real.entries([])]
    sides = bench_uneven_real.summary([*raced("ddp", 4.0), *raced("balanced", 2.0)])
    bar = next(bar for bar in bench_uneven_real.judge(sides, 10.0) if bar.name == "balanced_over_hivemind")
    assert "bench_uneven_real.py says how to make it" in bar.why


def test_unknown_sides_are_named():
    with pytest.raises(SystemExit, match=r"--only asap: there are ddp, .*asp"):
        bench_uneven_real.entries(["asap"])


class Imagined(bench_uneven_real.Course):
    """Races that take as long as `times` says, by learning rate and seed."""

    def __init__(self, times):
        self._size = bench_uneven_real.FULL
        self.times = times
        self.raced = []

    def run(self, entry, variant, lr, seed, max_s):
        self.raced.append((lr, seed, max_s))
        reached = self.times.get(lr, {}).get(seed, self.times.get(lr, {}).get(100))
        return Raced(reached if reached is not None and reached <= max_s else None, 1.0, max_s, 1)


def test_a_rate_is_given_up_at_three_times_the_best_so_far():
    course = Imagined({0.2: {100: 30.0, 101: 15.0}, 0.4: {100: 20.0, 101: 30.0}, 0.1: {100: 90.0}})
    _, lr, rows = course.tune(bench_uneven_real.Entry("ddp", "ddp"))
    assert course.raced[:4] == [(0.2, 100, 120.0), (0.4, 100, 90.0), (0.1, 100, 60.0), (0.8, 100, 60.0)]
    assert sorted(course.raced[4:]) == [(0.2, 101, 120.0), (0.4, 101, 120.0)]
    assert lr == 0.2, "behind on the first seed, ahead by both"
    assert all(row["tuning"] for row in rows)


def test_the_grid_is_extended_while_the_best_lies_on_its_edge():
    course = Imagined({0.2: {100: 24.0}, 0.4: {100: 20.0}, 0.8: {100: 15.0}, 1.6: {100: 12.0}, 3.2: {100: 13.0}})
    _, lr, _ = course.tune(bench_uneven_real.Entry("ddp", "ddp"))
    assert lr == 1.6
    assert {rate for rate, seed, _ in course.raced if seed == 101} == {0.4, 0.8, 1.6, 3.2}


def test_a_rate_that_is_clearly_ahead_need_not_race_again():
    course = Imagined({0.2: {100: 36.0}, 0.4: {100: 20.0}})
    assert course.tune(bench_uneven_real.Entry("ddp", "ddp"))[1] == 0.4
    assert len(course.raced) == 4


def test_everybody_is_raced_without_momentum_too_each_form_to_its_own_edge():
    ddp, asp, dasp = bench_uneven_real.entries(["ddp", "asp", "dasp"])
    assert [tuple(form.items()) for form in asp.variants] == [
        (("strategy", "asp"),), (("strategy", "asp"), ("momentum", 0.0)), (("strategy", "asp:whole_steps=true"),),
    ]  # fmt: skip
    assert dasp.variants == ({"strategy": "dasp"}, {"strategy": "dasp", "momentum": 0.0})
    assert ddp.variants == ({}, {"momentum": 0.0})

    class Momentum(Imagined):
        def run(self, entry, variant, lr, seed, max_s):
            best = {0.1: 20.0} if "momentum" not in variant else {0.8: 60.0, 1.6: 30.0, 3.2: 15.0}
            self.times = {rate: {100: seconds} for rate, seconds in best.items()}
            return super().run(entry, variant, lr, seed, max_s)

    variant, lr, _ = Momentum({}).tune(asp)
    assert (variant, lr) == ({"strategy": "asp", "momentum": 0.0}, 3.2)


def test_who_never_gets_there_is_not_tuned_for_ever():
    _, lr, _ = Imagined({}).tune(bench_uneven_real.Entry("ddp", "ddp"))
    assert lr == 0.2


def test_one_json_object_has_a_ratio_and_a_verdict_per_bar(capsys):
    options = bars.asked(bars.parser("").parse_args(["--quick", "--json"]), 5)
    bars.tell("datapath", options, [Bar("over_limit", 1.25, 1.4, False, "meaning")], [{"side": "limit"}], "notes")
    told = json.loads(capsys.readouterr().out)
    assert told["over_limit"] == {"ratio": 1.25, "bar": "<= 1.4", "verdict": "met", "meaning": "meaning"}
    assert told["rows"] == [{"side": "limit"}]
    assert told["repeats"] == 1
    assert "cores" in told["machine"]


def test_only_a_full_run_writes_a_result(tmp_path, capsys):
    bar = Bar("over_limit", 1.5, 1.4, False, "push over limit")
    for arguments in (["--quick", "--repeats", "2"], ["--out", str(tmp_path), "--unclean"]):
        options = bars.asked(bars.parser("").parse_args(arguments), 5)
        bars.tell(
            "datapath", options, [bar], [{"side": "limit"}], "what it means", facts={"cost_us": 12.5}, code={"bsp": "d"}
        )
        assert (tmp_path / "datapath.md").exists() == ("--quick" not in arguments)
    page = (tmp_path / "datapath.md").read_text()
    assert "| push over limit (`over_limit`) <= 1.4 | 1.5 | **missed** |" in page
    assert json.loads((tmp_path / "datapath.json").read_text())["strategy_code"] == {"bsp": "d"}
    assert "cost_us: 12.5" in capsys.readouterr().out


def test_every_worker_of_a_race_has_the_scenarios_own_times(tmp_path):
    course = bench_uneven_real.Course(bench_uneven_real.QUICK, tmp_path / "digits.pt")
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_uneven_real, "ask", lambda side, question, python: asked.append(question))
        course.run(bench_uneven_real.Entry("ddp", "ddp"), {}, 0.2, 3, 1.0)
    question = asked[0]
    assert isinstance(question, Race)
    assert question.workers == 4
    middle = [sorted(times)[len(times) // 2] for times in question.step_s]
    assert middle[3] / middle[0] == pytest.approx(4.0, rel=0.05)
