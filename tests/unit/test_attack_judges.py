"""The judges of the attacks on hung workers and poison find each planted fault."""

import json

import msgspec
import pytest
import safetensors.torch
import torch

from attacks import hung, poison
from attacks.harness import Ended

GOOD = Ended(0, "", "", 5.0)
NAMED = [
    "worker 1 has sent nothing for 1.25 s: the others go on without it in 0.75 s",
    "worker 1 has sent nothing for 2 s: the others go on without it",
]
REPORT = {"samples_used": hung.SAMPLES, "seconds": 4.0, "faults": {"timeouts": 1}, "warnings": NAMED}


def test_a_run_that_went_on_without_the_hung_worker_holds():
    seen = hung.Seen(GOOD, REPORT, 9, True)
    assert hung.judge_hung(seen).held
    assert hung.judge_back(msgspec.structs.replace(seen, steps=30), 9).held
    assert hung.judge_healthy(msgspec.structs.replace(seen, report={**REPORT, "faults": {"timeouts": 0}})).held


@pytest.mark.parametrize(
    "fault",
    [
        {"samples_used": hung.SAMPLES - 8}, {"samples_used": hung.SAMPLES + 8}, {"faults": {"timeouts": 0}},
        {"faults": {"timeouts": 2}}, {"warnings": []}, {"warnings": NAMED[1:]},
        {"warnings": NAMED[::-1]}, {"seconds": 30.0},
    ],
    ids=str,
)  # fmt: skip
def test_a_fault_of_a_run_with_a_hung_worker_is_found(fault):
    assert not hung.judge_hung(hung.Seen(GOOD, {**REPORT, **fault}, 9, True)).held


def test_a_run_that_never_ends_or_a_worker_that_never_comes_back_is_found():
    assert not hung.judge_hung(hung.Seen(Ended(-9, "", "", 40.0), {}, 9, False)).held
    assert not hung.judge_hung(hung.Seen(Ended(4, "", "", 5.0), REPORT, 9, True)).held
    assert not hung.judge_back(hung.Seen(GOOD, REPORT, 9, True), 9).held
    assert not hung.judge_healthy(hung.Seen(GOOD, REPORT, 9, True)).held


def test_a_script_that_does_not_end_must_be_said_and_leave_its_model():
    ended = Ended(1, "", "the script of worker 1 did not end after the run", 5.0)
    seen = hung.Seen(ended, REPORT, 9, True)
    assert hung.judge_after(seen).held
    for worse in (
        msgspec.structs.replace(seen, model=False),
        msgspec.structs.replace(seen, ended=Ended(0, "", ended.err, 5.0)),
        msgspec.structs.replace(seen, ended=Ended(1, "", "", 5.0)),
        msgspec.structs.replace(seen, ended=Ended(-9, "", "", 40.0)),
    ):
        assert not hung.judge_after(worse).held


@pytest.mark.parametrize(
    ("used", "named", "code", "held"),
    [(799, [17], 0, True), (790, [17], 0, False), (800, [17], 0, False), (799, [18], 0, False), (799, [17], 4, False)],
)
def test_lost_samples_are_counted_and_must_be_named(used, named, code, held):
    report = {"samples_used": used, "faults": {"killers": named}}
    assert poison.judge_killers(poison.Seen(Ended(code, "", "", 5.0), report, None), "17").held is held


@pytest.mark.parametrize(("used", "deaths", "held"), [(800, 3, True), (799, 3, False), (800, 0, False)])
def test_a_sample_lost_to_a_random_death_is_found(used, deaths, held):
    assert poison.judge_random(poison.Seen(GOOD, {"samples_used": used}, None), deaths).held is held


@pytest.mark.parametrize(("where", "held"), [("1", True), ("0", False), ("2", False), ("model", False)])
def test_a_model_that_is_not_finite_is_found(tmp_path, where, held):
    (tmp_path / "nodes").mkdir()
    for name in ("model", "0", "1", "2"):
        folder = tmp_path if name == "model" else tmp_path / "nodes"
        values = torch.full((3,), float("inf" if name == where else 1))
        safetensors.torch.save_file({"w": values}, folder / f"{name}.safetensors")
    report = {"warnings": ["the model of worker 1 is not finite after its step 5"]}
    assert poison.judge_models(poison.Seen(GOOD, report, tmp_path)).held is held
    assert not poison.judge_models(poison.Seen(GOOD, {}, tmp_path)).held


def test_a_worker_that_is_not_set_aside_or_an_end_that_is_not_said_is_found(tmp_path):
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    aside = {"faults": {"set_aside": [1]}, "warnings": ["worker 1 is set aside: 32 gradients"]}
    assert poison.judge_gradients(poison.Seen(GOOD, aside, tmp_path)).held
    assert not poison.judge_gradients(poison.Seen(GOOD, {**aside, "faults": {}}, tmp_path)).held
    said = {"samples_used": 800, "warnings": ["worker 1 ended in the middle of its loop (exit code 0) at 1 s"]}
    assert poison.judge_quit(poison.Seen(GOOD, said, None)).held
    assert not poison.judge_quit(poison.Seen(GOOD, {**said, "warnings": []}, None)).held


@pytest.mark.parametrize(
    ("code", "runs", "timeouts", "whole", "held"),
    [(0, 20, 0, True, True), (1, 20, 0, True, False), (0, 19, 0, True, False), (0, 20, 1, True, False),
     (0, 20, 0, False, False)],
)  # fmt: skip
def test_a_healthy_worker_that_is_taken_out_of_one_of_many_runs_is_found(code, runs, timeouts, whole, held):
    told = [[seed, "bsp", 5.0, timeouts if seed == 7 else 0, whole or seed != 7] for seed in range(runs)]
    lines = "".join(f"{json.dumps(each)}\n" for each in told)
    assert hung.judge_runs(Ended(code, lines, "", 1.0)).held is held
