"""The comparison of exchanges: what its bars say of made numbers, and that a small run goes through."""

import json
import math
from types import SimpleNamespace

import msgspec
import pytest

import bench_gossip
import results
from contenders import gossip_disturbed, gossip_real, gossip_runs, gossip_time, gossip_trials, kept_runs, result_parts
from contenders.bars import Bar
from contenders.gossip_real import Timed
from contenders.gossip_runs import Job, Ran
from contenders.kept_runs import KeptRuns, OutOfTimeError
from contenders.result_parts import Part
from paceline import scenario, strategies
from sources import Sources

COSINE, STEP, CIFAR = (bench_gossip.CONTESTS[name] for name in ("mnist8", "step8", "cifar8"))
DENSE_EARLY = [9] * 4 + [1] * 16
NO_MNIST = not gossip_runs.folder("mnist").is_dir()


def ran(accuracy=0.93, loss=0.24, sent=100, course=DENSE_EARLY, pace=100.0, waiting=0.0, nodes=None):
    own = accuracy if nodes is None else nodes
    return Ran(accuracy, loss, sent, 10, 1.0, 0.1, list(course), pace, waiting, own, own)


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
        ({"sent": 9}, ["mnist8_bytes_saved"]),
        ({"accuracy": 0.92}, ["mnist8_behind", "mnist8_nodes_behind"]),
        ({"nodes": 0.92}, ["mnist8_nodes_behind"]),
        (
            {"accuracy": 0.915},
            ["mnist8_behind", "mnist8_nodes_behind", "mnist8_ahead_of_fixed", "mnist8_ahead_of_per_tensor"],
        ),
        ({"loss": 0.3}, ["mnist8_loss_below_fixed", "mnist8_loss_below_per_tensor"]),
        ({"course": [1] * 19 + [9]}, ["mnist8_dense_early"]),
    ],
)
def test_a_worse_number_misses_its_bar(worse, bars):
    good = {"accuracy": 0.928, "loss": 0.25, "sent": 6}
    assert missed(adaptive=[ran(**{**good, **worse})] * 3) == bars


def test_each_control_has_its_own_bars():
    better = [ran(0.94, 0.2, 7)] * 3
    assert missed(per_tensor=better) == ["mnist8_ahead_of_per_tensor", "mnist8_loss_below_per_tensor"]


@pytest.mark.parametrize(("after", "bars"), [(3, []), (1, []), (0, ["step8_dense_after_fall"])])
def test_what_is_sent_after_the_fall_of_the_rate_is_compared_with_later(after, bars):
    course = [9] * 10 + [after] + [1] * 9
    assert missed(STEP, adaptive=[ran(a, 0.25, 6, course) for a in (0.928, 0.929, 0.927)]) == bars


def test_a_side_that_sends_too_much_is_not_chosen():
    base, fixed, adaptive, dear, cheap = (
        Job(spec, 0.4, "cosine", 100, CIFAR.size)
        for spec in (*(CIFAR.sides[side][0] for side in ("baseline", "fixed", "adaptive")),
                     *CIFAR.sides["per_tensor"])
    )  # fmt: skip
    found = {base: ran(0.93, sent=1000), fixed: ran(0.92, sent=70), adaptive: ran(0.92, sent=90),
             dear: ran(0.93, sent=90), cheap: ran(0.91, sent=60)}  # fmt: skip
    chosen, most = gossip_trials.choose(CIFAR.sides, found)
    assert (chosen["per_tensor"], most) == (cheap, 1000)
    assert chosen["adaptive"] == adaptive  # the defaults send what they send: a bar judges it


@pytest.mark.parametrize("contests", [bench_gossip.CONTESTS, bench_gossip.QUICK])
def test_every_side_can_be_built_and_has_the_partners_of_the_others(contests):
    for contest in contests.values():
        gossips = "elastic" not in contest.name
        for named in (contest, *([gossip_trials.of_partners(contest, "exponential")] if gossips else [])):
            built = [strategies.build_peer(spec, 0, 0) for specs in named.sides.values() for spec in specs]
            assert {getattr(machine.options, "peers", None) for machine in built} == {named.peers if gossips else None}
        options = [spec.partition(":")[2] for spec in contest.sides["adaptive"]]
        if contest.name == "float32":
            wires = [strategies.build_peer(spec, 0, 0).wire for specs in contest.sides.values() for spec in specs]
            assert set(wires) == {"float32"}
        else:
            assert options in ([""], [f"alpha={bench_gossip.ALPHA}"])  # what somebody gets who types the name


def test_a_grid_goes_on_where_somebodys_best_lies_on_its_edge():
    assert gossip_trials.beyond([0.7, 1.0, 1.5], [1.0, 1.0]) == []
    assert gossip_trials.beyond([0.7, 1.0, 1.5], [1.0, 1.5]) == [pytest.approx(2.25)]
    assert gossip_trials.beyond([0.7, 1.0, 1.5], [0.7, 1.5]) == [pytest.approx(0.7 / 1.5), pytest.approx(2.25)]


class Known:
    """Runs whose outcome is a function of the job."""

    def __init__(self, outcome):
        self.outcome, self.made = outcome, []

    def make(self, run, kind, jobs):
        self.made += jobs
        return [self.outcome(job) for job in jobs]


def test_rates_and_momentum_are_tuned_over_the_same_grid_on_every_side():
    def outcome(job):
        whole = job.rate / (1 - job.momentum)
        best = 3.1 if job.strategy.startswith("adaptive") else 1.0
        return ran(
            0.9 - 0.01 * abs(math.log(whole / best)) + 0.02 * job.momentum, sent=1 if "int8" in job.strategy else 100
        )

    known = Known(outcome)
    chosen, rows = gossip_trials.tune(COSINE, known)
    assert chosen["adaptive"].rate == pytest.approx(0.3)  # at momentum 0.9, beyond the first grid
    assert chosen["baseline"].rate == pytest.approx(0.1)
    tried = {}
    for job in known.made:
        tried.setdefault(job.strategy, set()).add((round(job.rate, 6), job.momentum))
    assert len({frozenset(each) for each in tried.values()}) == 1
    assert {job.momentum for job in known.made} == {0.0, 0.9}
    assert len(rows) == len(known.made)


def test_parts_beside_the_contests_take_what_is_on_the_page():
    def outcome(job):
        return ran(0.9 + 0.02 * job.momentum - 0.01 * abs(job.rate - 0.2), sent=1 if "int8" in job.strategy else 100)

    known = Known(outcome)
    held = gossip_trials.hold(COSINE, 2, known)
    part = Part.of([], held.rows, Sources("abc"), 1.0)
    assert bench_gossip.chosen_of(COSINE, part) == held.chosen
    measuring = bench_gossip.Measuring(SimpleNamespace(quick=False), None, {"mnist8": part})
    assert measuring._chosen() == held.chosen


def test_an_interval_is_students():
    low, high = gossip_trials.within([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (low, high) == (pytest.approx(3 - 1.5076, abs=1e-3), pytest.approx(3 + 1.5076, abs=1e-3))
    assert gossip_trials.within([2.0]) == (2.0, 2.0)


# -- time ------------------------------------------------------------------------------------------------------------


def curve(overlap, *gains):
    return [{"overlap": overlap, "bandwidth": 2.0**i, "time_saved": gain} for i, gain in enumerate(gains)]


@pytest.mark.parametrize(
    ("ratio", "held", "overlapping", "bars"),
    [
        (0.47, (0.7, 0.53, 0.3), (0.6, 0.2, 0.1), []),
        (0.5, (0.7, 0.53, 0.3), (0.6, 0.2, 0.1), ["time_saved"]),
        (0.47, (0.3, 0.53, 0.7), (0.6, 0.2, 0.1), ["time_falls_with_bandwidth"]),
        (0.47, (0.7, 0.53, 0.3), (0.1, 0.2, 0.1), ["overlap_time_falls_with_bandwidth"]),
    ],
)
def test_time_must_be_saved_and_less_of_it_the_faster_the_line(ratio, held, overlapping, bars):
    rows = curve(False, *held) + curve(True, *overlapping)
    assert [bar.name for bar in gossip_time.judge(rows, {False: [ratio] * 3}) if not bar.passed] == bars


def test_the_usual_line_has_the_publications_share():
    mbps = gossip_time.usual_mbps(COSINE.size, step_s=0.06)
    sending = gossip_time.model_bits(COSINE.size) / mbps / 1e6
    assert sending / (sending + 0.06) == pytest.approx(0.565)
    assert gossip_time.most_saved(overlap=False) == pytest.approx(0.565)
    assert gossip_time.most_saved(overlap=True) == pytest.approx(1 - 0.435 / 0.565)


def timings(without, with_overlap):
    return [
        Timed("emulated", side, overlap, 400, seconds, 0.1, 1.0, 0.9, 0.0)
        for overlap, pair in ((False, without), (True, with_overlap))
        for side, seconds in zip(("baseline", "adaptive"), pair, strict=True)
    ]


@pytest.mark.parametrize(
    ("without", "with_overlap", "bars"),
    [
        ((50.0, 23.0), (28.0, 22.0), []),
        ((50.0, 26.0), (28.0, 22.0), ["real_emulated_time_saved"]),
        ((50.0, 23.0), (28.0, 26.0), ["real_emulated_time_saved_overlap"]),
    ],
)
def test_real_processes_have_a_bar_for_each_way_to_send(without, with_overlap, bars):
    found = gossip_real.judge("emulated", timings(without, with_overlap))
    assert [bar.name for bar in found if not bar.passed] == bars


def test_the_line_of_real_processes_is_in_the_scenario():
    cluster = scenario.parse(
        gossip_real.cluster(Job("gossip", 0.4, "cosine", 1, COSINE.size, mbps=20.0)), "test", gossip_runs.SHARED
    )
    assert len(cluster.workers) == 8
    assert cluster.compute.seconds_per_sample == pytest.approx(gossip_real.STEP_S / 16)
    assert cluster.network.bandwidth_mbps == 20.0
    script = gossip_real.SCRIPT.format(benchmarks="somewhere", job=b"{}")
    compile(script, "train.py", "exec")


@pytest.mark.slow
@pytest.mark.skipif(NO_MNIST, reason="needs MNIST in ../shared/data/mnist, or where the variable MNIST says")
@pytest.mark.soak
def test_a_tiny_run_of_real_processes_is_timed():
    size = gossip_runs.Size(samples=128, epochs=1, workers=2, hidden=8, test=100)
    job = Job("gossip:period=1", 0.4, "cosine", 1, size, mbps=gossip_time.usual_mbps(size, gossip_real.STEP_S))
    found = gossip_real.timed("emulated", "baseline", job, overlap=False)
    assert found.seconds > 4 * gossip_real.STEP_S / 0.435 * 0.7  # the last sending is not waited for
    assert 0 < found.waiting < 1
    assert found.megabytes > 0


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


# -- parts, and runs that are kept ------------------------------------------------------------------------------------


def part(bar, date="2026-01-01 00:00 UTC", commit="abc1234"):
    return Part(date, commit, "clean", "a machine", 3.0, [results.Verdict(bar, "0.9", ">= 0.92", passed=False)],
                [{"contest": bar, "side": "fixed", "lr": 0.25}])  # fmt: skip


def test_a_part_replaces_itself_and_leaves_the_others(tmp_path):
    of = Sources("abc1234", copied=True)
    before = {"mnist8": part("mnist8_bytes"), "cifar8": part("cifar8_bytes")}
    result_parts.write("gossip", "python x.py", before, bench_gossip.notes, of, tmp_path)
    for name, each in result_parts.load("gossip", tmp_path).items():
        assert each == msgspec.structs.replace(before[name], rows=[{"part": name, **before[name].rows[0]}])
    known = result_parts.load("gossip", tmp_path)
    after = {**known, "cifar8": part("cifar8_bytes", "2026-02-02 00:00 UTC", "def5678")}
    page = result_parts.write("gossip", "python x.py", after, bench_gossip.notes, of, tmp_path).read_text()
    assert "2026-01-01 00:00 UTC | abc1234" in page
    assert "2026-02-02 00:00 UTC | def5678" in page
    assert [each.commit for each in result_parts.load("gossip", tmp_path).values()] == ["abc1234", "def5678"]


def test_a_result_that_was_measured_in_one_go_has_no_parts(tmp_path):
    results.write("gossip", "python x.py", [], [{"lr": 0.25}], "As it was.", Sources("abc1234", copied=True), tmp_path)
    assert result_parts.load("gossip", tmp_path) == {}


def test_a_part_tells_its_bars_and_when():
    told = Part.of([Bar("bytes", 0.93, 0.92, True, "few bytes")], [{"lr": 0.25}], Sources("abc1234"), 2.0)
    assert (told.commit, told.tree, told.verdicts[0].name, told.verdicts[0].passed) == (
        "abc1234", "clean", "few bytes (`bytes`)", True,
    )  # fmt: skip


class Inline:
    """An executor that computes at once."""

    def map(self, call, jobs):
        return [call(job) for job in jobs]

    def submit(self, call, job):
        self.answer = call(job)
        return self

    def result(self):
        return self.answer


def test_kept_runs_are_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_runs, "FOLDER", tmp_path)
    jobs = [Job("gossip", rate, "cosine", 1, COSINE.size) for rate in (0.1, 0.2)]
    made = []

    def run(job):
        made.append(job.rate)
        return ran(job.rate, math.inf)

    first = KeptRuns("gossip", Sources("abc1234"), Inline()).make(run, Ran, jobs[:1])
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text() + '{"job": ["run", ')  # its process was killed
    again = KeptRuns("gossip", Sources("abc1234"), Inline()).make(run, Ran, jobs)
    assert again == [*first, ran(0.2, math.inf)]
    assert made == [0.1, 0.2]
    KeptRuns("gossip", Sources("def5678"), Inline()).make(run, Ran, jobs)  # other sources
    KeptRuns("gossip", Sources("abc1234", ("changed.py",)), Inline()).make(run, Ran, jobs)
    assert made == [0.1, 0.2, 0.1, 0.2, 0.1, 0.2]


def test_no_run_begins_after_the_minutes_that_were_given(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_runs, "FOLDER", tmp_path)
    jobs = [Job("gossip", rate, "cosine", 1, COSINE.size) for rate in (0.1, 0.2)]
    with pytest.raises(OutOfTimeError):
        KeptRuns("gossip", Sources("abc1234"), Inline(), minutes=0.0).make(ran, Ran, jobs)
    assert not list(tmp_path.iterdir())


def test_a_result_explained_anew_keeps_its_numbers(tmp_path):
    of = Sources("abc1234", copied=True)
    page = result_parts.write("gossip", "python x.py", {"mnist8": part("x")}, lambda _: "As it was.", of, tmp_path)
    before = page.read_text()
    bench_gossip.main(["--retell", "--out", str(tmp_path)])
    notes = bench_gossip.notes(result_parts.load("gossip", tmp_path)).strip()
    assert page.read_text() == before.replace("As it was.", notes)


@pytest.mark.soak
@pytest.mark.skipif(NO_MNIST, reason="needs MNIST in ../shared/data/mnist, or where the variable MNIST says")
def test_a_quick_run_prints_every_bar_and_every_run(capsys):
    bench_gossip.main(["--quick", "--json", "--jobs", "1"])
    printed = json.loads(capsys.readouterr().out)
    assert {"mnist8_ahead_of_per_tensor", "elastic8_bytes_saved", "slow_node_pace", "faults_behind"} <= set(printed)
    assert {row["contest"] for row in printed["rows"]} == {"cosine", "elastic", "disturbed"}
    assert printed["slow_node_pace"]["verdict"] == "met"
