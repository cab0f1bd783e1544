"""The comparison of exchanges: what its bars say of made numbers, and that a small run goes through."""

import json
import math

import pytest

import bench_gossip
import results
from contenders import gossip_disturbed, gossip_runs, gossip_trials
from contenders.gossip_runs import Job, Ran
from paceline import scenario, strategies
from sources import Sources

COSINE, STEP = (next(c for c in bench_gossip.contests(False) if c.name == name) for name in ("cosine", "step"))
DENSE_EARLY = [9] * 4 + [1] * 16
NO_MNIST = not gossip_runs.folder("mnist").is_dir()


def ran(accuracy=0.93, loss=0.24, sent=100, course=DENSE_EARLY, pace=100.0, waiting=0.0):
    return Ran(accuracy, loss, sent, 10, 1.0, 0.1, list(course), pace, waiting)


def runs(**changed):
    control = [ran(0.918, 0.28, 7), ran(0.92, 0.28, 7), ran(0.917, 0.29, 7)]
    ours = [ran(0.928, 0.25, 6), ran(0.929, 0.26, 6), ran(0.927, 0.25, 6)]
    return {"baseline": [ran()] * 3, "fixed": control, "per_tensor": control, "adaptive": ours, **changed}


def missed(contest=COSINE, **changed):
    return [bar.name for bar in gossip_trials.judge(contest, runs(**changed)) if not bar.passed]


def test_good_numbers_meet_every_bar():
    assert missed() == []


@pytest.mark.parametrize(
    ("worse", "bars"),
    [
        ({"sent": 9}, ["cosine_bytes_saved"]),
        ({"accuracy": 0.92}, ["cosine_behind"]),
        ({"accuracy": 0.915}, ["cosine_behind", "cosine_ahead_of_fixed", "cosine_ahead_of_per_tensor"]),
        ({"loss": 0.3}, ["cosine_loss_below_fixed", "cosine_loss_below_per_tensor"]),
        ({"course": [1] * 19 + [9]}, ["cosine_dense_early"]),
    ],
)
def test_a_worse_number_misses_its_bar(worse, bars):
    good = {"accuracy": 0.928, "loss": 0.25, "sent": 6}
    assert missed(adaptive=[ran(**{**good, **worse})] * 3) == bars


def test_each_control_has_its_own_bars():
    better = [ran(0.94, 0.2, 7)] * 3
    assert missed(per_tensor=better) == ["cosine_ahead_of_per_tensor", "cosine_loss_below_per_tensor"]


@pytest.mark.parametrize(("after", "bars"), [(3, []), (1, []), (0, ["step_dense_after_fall"])])
def test_what_is_sent_after_the_fall_of_the_rate_is_compared_with_later(after, bars):
    course = [9] * 10 + [after] + [1] * 9
    assert missed(STEP, adaptive=[ran(a, 0.25, 6, course) for a in (0.928, 0.929, 0.927)]) == bars


def test_a_side_that_sends_too_much_is_not_chosen():
    base, fixed, per_tensor, dear, cheap = (
        Job(spec, 0.4, "cosine", 100, COSINE.size)
        for spec in (*(COSINE.sides[side][0] for side in ("baseline", "fixed", "per_tensor")),
                     *COSINE.sides["adaptive"][:2])
    )  # fmt: skip
    found = {base: ran(0.93, sent=1000), fixed: ran(0.92, sent=70), per_tensor: ran(0.92, sent=70),
             dear: ran(0.93, sent=90), cheap: ran(0.91, sent=60)}  # fmt: skip
    chosen, most = gossip_trials.choose(COSINE.sides, found)
    assert (chosen["adaptive"], most) == (cheap, 1000)


@pytest.mark.parametrize("quick", [True, False])
def test_all_but_the_baseline_are_tried_equally_often_and_can_be_built(quick):
    for contest in bench_gossip.contests(quick):
        assert len({len(specs) for side, specs in contest.sides.items() if side != "baseline"}) == 1
        for specs in contest.sides.values():
            assert all(strategies.build_peer(spec, 0, 0) for spec in specs)


def test_time_must_be_saved_and_less_of_it_the_faster_the_line():
    good = bench_gossip.judge_time([(0.5, 0.7), (1.0, 0.53), (2.0, 0.3)])
    assert all(bar.passed for bar in good)
    bad = bench_gossip.judge_time([(0.5, 0.3), (1.0, 0.5), (2.0, 0.6)])
    assert [bar.passed for bar in bad] == [False, False]


@pytest.mark.parametrize(
    ("disturbed", "bars"),
    [
        ({}, []),
        ({"one_slow": [ran(pace=90.0)]}, ["slow_node_pace"]),
        ({"one_slow": [ran(waiting=0.1)]}, ["slow_node_waiting"]),
        ({"faults": [ran(0.92)]}, ["faults_behind"]),
    ],
)
def test_what_a_disturbance_costs_has_its_bars(disturbed, bars):
    calm = {kind: [ran()] for kind in ("even", "one_slow", "undisturbed", "faults")}
    assert [bar.name for bar in gossip_disturbed.judge({**calm, **disturbed}) if not bar.passed] == bars


def test_clusters_have_their_slow_node_and_their_faults():
    job = Job("gossip", 0.4, "cosine", 1, COSINE.size, slow=True, faults=True)
    cluster = scenario.parse(gossip_runs.cluster(job), "test", gossip_runs.SHARED)
    assert [worker.speed for worker in cluster.workers] == [1.0] * 7 + [0.25]
    assert [event.kind for event in cluster.events] == ["crash", "crash", "join", "join"]
    assert all(0.25 < event.at / COSINE.size.seconds < 0.65 for event in cluster.events)


@pytest.mark.parametrize(
    ("schedule", "at", "expected"), [("cosine", 0.5, 0.5), ("cosine", 1.0, 0.0), ("step", 0.4, 1.0), ("step", 0.6, 0.1)]
)
def test_rates_decay(schedule, at, expected):
    assert math.isclose(gossip_runs.factor(schedule, at), expected, abs_tol=1e-12)


def test_missing_data_is_told_with_the_variable_that_names_its_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MNIST", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match=r"mnist is missing: .*nowhere; set the variable MNIST"):
        bench_gossip.main(["--quick"])


def test_a_result_explained_anew_keeps_its_numbers(tmp_path):
    verdicts = [results.Verdict("few bytes (`bytes`)", "0.9", ">= 0.92", passed=False)]
    of, rows = Sources("abc1234", copied=True), [{"lr": 0.25, "side": "fixed"}]
    page = results.write("gossip", "python x.py", verdicts, rows, "As it was.", of, tmp_path)
    before = page.read_text()
    bench_gossip.main(["--retell", "--out", str(tmp_path)])
    assert page.read_text() == before.replace("As it was.", bench_gossip.notes().strip())


@pytest.mark.soak
@pytest.mark.skipif(NO_MNIST, reason="needs MNIST in ../shared/data/mnist, or where the variable MNIST says")
def test_a_quick_run_prints_every_bar_and_every_run(capsys):
    bench_gossip.main(["--quick", "--json", "--jobs", "1"])
    printed = json.loads(capsys.readouterr().out)
    assert {"cosine_ahead_of_per_tensor", "elastic_bytes_saved", "slow_node_pace", "faults_behind"} <= set(printed)
    assert {row["contest"] for row in printed["rows"]} == {"cosine", "elastic", "disturbed"}
    assert printed["slow_node_pace"]["verdict"] == "met"
