"""The simulator with scripts: deterministic, faults carried out, times that add up, evaluation that costs nothing."""

import hashlib
import json
import random

import numpy as np
import pytest
import torch
from clusters import EVEN, UNEVEN, Rows, cluster, event, mean_square, network

import paceline
from paceline.core.actions import Grant
from paceline.core.errors import JournalError, ScenarioError, UserError
from paceline.core.events import Joined, Left, Pushed
from paceline.engines.sim.kernel import Kernel
from paceline.records import wait_attribution
from paceline.records.journal import Decision, Lines, Observation, Writer
from paceline.records.metrics import fold
from paceline.tasks import get

ROWS = Rows()
STRATEGIES = ["bsp", "asp", "ssp", "dssp", "adaptive_sync", "dasp", "fastest_k:k=3", "k_async:k=2", "balanced"]


def train(epochs=3, lr=0.02, report_loss=True):
    def script():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)

        def evaluate(module):
            with torch.no_grad():
                return {"loss": float(mean_square(module, ROWS.x, ROWS.y))}

        session.prepare(model, optimizer, evaluate=evaluate)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=epochs):
            optimizer.zero_grad()
            loss = mean_square(model, x, y)
            loss.backward()
            if report_loss:
                session.report(loss=loss)
            optimizer.step()

    return script


def launch(scenario, script=None, **settings):
    lines = Lines()
    run = paceline.launch(script or train(), engine="sim", scenario=scenario, sink=lines, **settings)
    return run, lines


def decisions(lines, kind):
    return [line.event for line in lines if isinstance(line, Decision) and isinstance(line.event, kind)]


def observed(lines, what):
    return [line for line in lines if isinstance(line, Observation) and line.what == what]


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_calls_of_one_moment_run_in_the_order_they_were_made():
    kernel, seen = Kernel(), []
    kernel.at(2.0, seen.append, "late")
    kernel.at(1.0, seen.append, "a")
    kernel.at(1.0, seen.append, "b")
    kernel.at(1.0, lambda _: kernel.at(0.5, seen.append, "past means next"), None)
    assert not kernel.run()
    assert seen == ["a", "b", "past means next", "late"]
    kernel.at(5.0, seen.append, "beyond")
    assert kernel.run(until=4.0)
    assert kernel.now == 4.0


def test_the_kernel_is_small():
    from pathlib import Path

    import paceline.engines.sim.kernel as module

    assert len(Path(module.__file__).read_text().splitlines()) < 120


@pytest.mark.parametrize("strategy", ["bsp", "dasp", "balanced"])
def test_equal_runs_write_equal_bytes(tmp_path, strategy):
    scenario = cluster(*UNEVEN, jitter="lognormal:0.2")
    paths = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        random.seed(path.name)  # whatever the process's own generators did before
        settings = {"strategy": strategy, "seed": seed, "max_versions": 20, "journal": path}
        paceline.launch(get("digits"), engine="sim", scenario=scenario, **settings)
    assert digest(paths[0]) == digest(paths[1])
    assert digest(paths[0]) != digest(paths[2])


def test_every_worker_has_random_generators_of_its_own_and_the_callers_are_left_alone():
    drawn = {}

    def script():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        mine = drawn.setdefault(session.worker, [])
        torch.manual_seed(session.worker)
        np.random.seed(session.worker)
        random.seed(session.worker)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=1):
            mine.append((float(torch.rand(())), float(np.random.rand()), random.random()))
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()

    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    launch(cluster(*EVEN), script)
    for worker, draws in drawn.items():
        generator, legacy, python = (
            torch.Generator().manual_seed(worker),
            np.random.RandomState(worker),
            random.Random(worker),
        )
        for values in draws:
            assert values == (float(torch.rand((), generator=generator)), legacy.rand(), python.random())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_data_is_settled_and_times_add_up(strategy):
    network_lines = "latency_ms = 2\nbandwidth_mbps = 10"
    run, lines = launch(cluster(*UNEVEN, jitter="lognormal:0.3", network=network_lines), strategy=strategy)
    report = run.summary
    assert report.samples_used == 150
    assert run.ended == "done"
    for present, accounted in fold(lines).time_law().values():
        assert accounted == pytest.approx(present, rel=0.01)
    assert sum(worker.samples for worker in report.per_worker) == 150


def test_transfer_is_latency_bytes_and_the_servers_queue():
    scenario = cluster(1.0, 1.0, network="latency_ms = 10\nbandwidth_mbps = 0.416")  # 520 bytes: 10 ms each way
    _, lines = launch(scenario, max_versions=1)
    first, second = decisions(lines, Pushed)
    assert first.bytes_up == first.bytes_down == 520
    # Down: the second waits for the first. Up: it arrives at the server's link after it, too.
    assert first.transfer_s == pytest.approx(0.010 + 0.010 + 0.010 + 0.010)
    assert second.transfer_s == pytest.approx(0.010 + 0.020 + 0.010 + 0.010)
    assert first.compute_s == second.compute_s == pytest.approx(0.05)


def test_a_crash_gives_work_back_and_a_rejoin_brings_a_new_process():
    events = event("crash", 0.12, worker=1) + event("rejoin", 0.5, worker=1)
    run, lines = launch(cluster(*EVEN, events=events), train(epochs=8))
    assert run.summary.samples_used == 400
    assert next((e.at, e.worker, e.cause) for e in decisions(lines, Left)) == (0.12, 1, "crash")
    assert any(e.worker == 1 and e.at == 0.5 for e in decisions(lines, Joined))
    lost = observed(lines, "cancelled")[0]
    assert (lost.worker, lost.data["samples"], lost.data["cause"]) == (1, 5, "crash")


def test_leaving_and_joining():
    events = event("leave", 0.3, worker=0) + event("join", 0.4, speed=2.0)
    run, lines = launch(cluster(*EVEN, events=events), train(epochs=8), strategy="asp")
    assert run.summary.samples_used == 400
    assert decisions(lines, Left)[0].cause == "leave"
    joined = [e for e in decisions(lines, Joined) if e.worker == 4]
    assert joined[0].at == 0.4
    granted = [
        line.event.at
        for line in lines
        if isinstance(line, Decision) and any(isinstance(a, Grant) and a.worker == 0 for a in line.actions)
    ]
    assert max(granted) <= 0.3


def test_a_slow_down_and_a_pause_stretch_the_computing_they_meet():
    events = event("slow", 0.0, worker=0, for_=0.1, factor=2.0) + event("pause", 0.02, worker=1, for_=1.0)
    _, lines = launch(cluster(*EVEN, events=events), max_versions=4, strategy="asp")
    first = {e.worker: e for e in reversed(decisions(lines, Pushed))}
    assert first[0].compute_s == pytest.approx(0.1)
    assert first[2].compute_s == pytest.approx(0.05)
    assert 1 not in first


def test_a_slow_link_lengthens_transfers_and_is_why_the_others_wait():
    events = event("slow_link", 0.0, worker=2, for_=1e3, factor=8.0)
    _, lines = launch(cluster(*EVEN, events=events, network="latency_ms = 5"), max_versions=4, strategy="bsp")
    pushes = decisions(lines, Pushed)
    assert all(e.transfer_s == pytest.approx(0.08 if e.worker == 2 else 0.01) for e in pushes)
    assert all(e.compute_s == pytest.approx(0.05) for e in pushes)
    assert {(row.culprit, row.cause) for row in wait_attribution.fold(lines).waited_for() if row.cause != "end"} == {
        (2, "transfer")
    }


def test_duplicates_and_late_arrivals_are_refused_by_the_intake():
    events = event("duplicate", 0.0, share=1.0) + event("reorder", 0.2, share=0.5)
    run, lines = launch(cluster(*EVEN, events=events, network="latency_ms = 5"), strategy="asp")
    assert run.summary.samples_used == 150
    assert len(observed(lines, "refused")) > 5
    pushes = [e.push for e in decisions(lines, Pushed)]
    assert len(pushes) == len(set(pushes))


@pytest.mark.parametrize(
    "events", [event("crash", 0.12, worker=1) + event("rejoin", 50.0, worker=1), event("join", 50.0)]
)
def test_who_would_come_after_the_last_script_has_ended_is_not_waited_for(events):
    run, lines = launch(cluster(*EVEN, events=events), train(epochs=2))
    assert run.summary.samples_used == 100
    assert not [line for line in observed(lines, "scenario") if line.data["at"] == 50.0]
    assert {e.worker for e in decisions(lines, Joined)} == {0, 1, 2, 3}


def test_a_loop_that_everybody_has_left_is_over_although_somebody_is_to_join_later():
    def script():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        session.prepare(model, optimizer)
        for _ in range(2):
            for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=1)):
                if number == 1:
                    break
                optimizer.zero_grad()
                mean_square(model, x, y).backward()
                optimizer.step()

    run, lines = launch(cluster(*EVEN, events=event("join", 50.0)), script)
    assert run.summary.samples_used == 2 * 4 * 5
    assert max(line.at for line in observed(lines, "phase")) < 1.0
    assert observed(lines, "end")[0].at < 1.0


def test_all_workers_gone_is_an_error_that_names_the_time():
    with pytest.raises(ScenarioError, match=r"every worker has left at 0.07"):
        launch(cluster(1.0, events=event("crash", 0.07, worker=0)))


def test_evaluation_costs_no_virtual_time_and_comes_at_even_distances():
    with_evaluation, lines = launch(cluster(*UNEVEN), evaluate_every="2v")
    without, _ = launch(cluster(*UNEVEN), evaluate_every="1000v")
    assert with_evaluation.summary.seconds == without.summary.seconds
    versions = [line.data["version"] for line in observed(lines, "evaluation")]
    assert versions[:4] == [0, 2, 4, 6]
    by_epochs = observed(launch(cluster(*UNEVEN), evaluate_every="0.5e")[1], "evaluation")
    assert [round(line.data["epoch"], 1) for line in by_epochs] == [0.0, 0.8, 1.2, 1.6, 2.0, 2.8, 3.0]
    by_seconds = observed(launch(cluster(*UNEVEN), evaluate_every="0.5s")[1], "evaluation")
    assert [line.at for line in by_seconds][:3] == [0.0, 0.5, 1.0]


def test_a_target_is_met_by_three_evaluations_at_the_middle_ones_time():
    run, lines = launch(cluster(*EVEN), train(epochs=100), target="loss=20", evaluate_every="1v")
    assert run.ended == "target"
    evaluations = observed(lines, "evaluation")
    losses = [line.data["metrics"]["loss"] for line in evaluations]
    means = [sum(losses[i : i + 3]) / 3 for i in range(len(losses) - 2)]
    first = next(i for i, mean in enumerate(means) if mean <= 20)
    assert run.summary.target.reached_at_seconds == evaluations[first + 1].at
    assert len(losses) == first + 3


@pytest.mark.parametrize(
    ("limits", "ended"), [({"max_versions": 7}, "limit"), ({"max_seconds": 0.33}, "limit"), ({}, "done")]
)
def test_limits(limits, ended):
    run, _ = launch(cluster(*UNEVEN), **limits)
    assert run.ended == ended
    if "max_versions" in limits:
        assert run.summary.versions == 7
    if "max_seconds" in limits:
        assert run.summary.seconds == 0.33


def test_a_target_without_evaluate_and_one_of_an_unknown_metric():
    def script():
        session = paceline.init()
        model = network()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        list(session.batches(ROWS, batch_size=5))

    with pytest.raises(UserError, match="needs prepare"):
        launch(cluster(1.0), script, target="accuracy=0.9")
    with pytest.raises(UserError, match="returns loss"):
        launch(cluster(1.0), target="accuracy=0.9")


@pytest.mark.parametrize("action", ["warn", "stop", "bsp"])
def test_a_diverging_run_says_so(action):
    settings = {"strategy": "asp", "on_divergence": action}
    run, lines = launch(cluster(*UNEVEN), train(epochs=40, lr=50.0), **settings)
    assert any("diverging" in text for text in run.summary.warnings)
    assert run.ended == ("divergence" if action == "stop" else "done")
    assert run.exit_code == (3 if action == "stop" else 0)
    headers = [line.strategy for line in lines if type(line).__name__ == "Header"]
    assert headers == (["asp", "bsp"] if action == "bsp" else ["asp"])


def test_a_strategy_that_decides_by_the_loss_asks_for_it():
    with pytest.raises(UserError, match=r"session.report"):
        launch(cluster(*EVEN), train(report_loss=False), strategy="adaptive_k:test=trend")


def test_two_hundred_scripts_are_welcomed_one_after_the_other():
    def script():
        session = paceline.init()
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for _ in session.steps(1):
            model.weight.grad = torch.ones(1, 1)
            optimizer.step()

    run, lines = launch(cluster(*[1.0] * 200), script, workers=200)
    assert (run.ended, run.summary.versions, run.summary.samples_used) == ("done", 1, 200)
    assert [event.worker for event in decisions(lines, Joined)] == list(range(200))


def test_no_thread_is_left(nothing_left):
    launch(cluster(*EVEN))
    with pytest.raises(ScenarioError):
        launch(cluster(1.0, events=event("crash", 0.07, worker=0)))


def test_a_journal_whose_end_is_lost_does_not_cost_the_report(tmp_path, monkeypatch):
    close = Writer.close

    def cannot_write(writer):
        close(writer)
        raise JournalError("no space left")

    monkeypatch.setattr(Writer, "close", cannot_write)
    with pytest.raises(JournalError, match="no space left"):
        launch(cluster(*EVEN), train(epochs=1), journal=tmp_path / "j.jsonl.gz", runs_dir=tmp_path / "runs")
    (report,) = tmp_path.glob("runs/*/report.json")
    assert json.loads(report.read_text())["samples_used"] == 50
