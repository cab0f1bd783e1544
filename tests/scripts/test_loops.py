"""The loops people write: alone each comes to its original's bits, and on workers to its original's score."""

import functools
import tempfile
from pathlib import Path

import loop_runs
import pytest

from scripts.catalogue import FOLDER, LOOPS, MODULES, ORIGINALS

BY_NAME = {loop.name: loop for loop in LOOPS}
IN_SIM = [
    "sgd", "onecycle", "accumulation", "target_loss", "frozen_backbone", "gan", "muon_adamw", "own_optimizer",
    "stream_dataset", "epochs_loop", "shared_metric", "clamping",
]  # fmt: skip
ON_PROCESSES = ["sgd", "plateau", "own_checkpoint", "loader_workers"]
LONGEST = 100  # lines of a script


def test_the_catalogue_has_every_script_and_every_script_its_original():
    ports = {path.name for path in FOLDER.glob("*.py") if not path.name.startswith("test_")} - {"catalogue.py"}
    assert ports - MODULES >= {loop.port.name for loop in LOOPS}
    assert all(loop.original.exists() for loop in LOOPS)
    assert len(BY_NAME) == len(LOOPS) >= 25
    assert all((FOLDER / name).read_text() == (ORIGINALS / name).read_text() for name in MODULES)


@functools.cache
def result_of_original(name):
    """What the plain script ends with; it is judged alone, on virtual workers and on processes."""
    with tempfile.TemporaryDirectory() as folder:
        return loop_runs.run_original(BY_NAME[name], Path(folder) / "original.pt")


@pytest.mark.parametrize("name", BY_NAME)
def test_scripts_are_short_and_originals_know_nothing_of_paceline(name):
    loop = BY_NAME[name]
    assert "paceline" not in loop.original.read_text()
    assert len(loop.port.read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("name", BY_NAME)
def test_alone_a_port_comes_to_its_originals_bits(name, tmp_path):
    loop, original = BY_NAME[name], result_of_original(name)
    port = loop_runs.run_port(loop, tmp_path / "port.pt")
    assert loop_runs.difference(original, port) is None
    assert original["model"]
    assert original["optimizer"]


def test_another_order_or_one_step_less_is_noticed(tmp_path):
    loop = BY_NAME["leftover_sampler"]
    one, other = (loop_runs.run_original(loop, tmp_path / f"{seed}.pt", seed) for seed in (0, 1))
    assert "differs by up to" in loop_runs.difference(one, other)
    assert loop_runs.difference({"a": [1, 2]}, {"a": [1, 3]}) == "a[1] is 2 and 3"
    assert loop_runs.difference({"a": 1}, {"b": 1}) == "the result has ['a'] and ['b']"
    assert loop_runs.difference({"a": 1}, {"a": 1.0}) == "a is 1 and 1.0"


def test_lines_changed_are_those_added_and_removed():
    assert loop_runs.lines_changed("a\nb\nc", "a\nx\nb\ny") == 3


@pytest.mark.parametrize(
    ("code", "said", "score", "problem"),
    [
        (0, "", 0.87, None),
        (0, "", 0.85, "score 0.85, the original's is 0.9, allowed 0.04 worse"),
        (2, "no such option", None, "exit code 2: no such option"),
        (0, "", None, "no result was saved"),
    ],
)
def test_a_run_on_workers_is_judged_by_its_score(tmp_path, code, said, score, problem):
    result = tmp_path / "result.pt"
    if score is not None:
        loop_runs.torch.save({"score": score}, result)
    assert loop_runs.unexpected(BY_NAME["ema"], "works", code, said, result, 0.9) == problem


@pytest.mark.parametrize(("code", "said", "good"), [(2, "is refused: why", True), (2, "else", False), (0, "", False)])
def test_a_refusal_is_judged_by_its_words(tmp_path, code, said, good):
    problem = loop_runs.unexpected(BY_NAME["ema"], "refused: refused: why", code, said, tmp_path / "none", 0.0)
    assert (problem is None) is good


def test_a_refused_run_is_one_with_an_exit_code_and_words(tmp_path):
    loop = loop_runs.Loop(name="ema", kind="any", batch=8 * 100)
    code, said = loop_runs.run_on_workers(loop, tmp_path / "result.pt", "sim", 7)
    assert code == 2
    assert "uneven8" in said


@pytest.mark.parametrize(("lower", "score", "good"), [(True, 1.03, True), (True, 1.1, False), (False, 1.1, True)])
def test_a_better_score_is_good_enough(lower, score, good):
    loop = loop_runs.Loop(name="any", kind="any", lower=lower)
    assert loop.reaches(score, 1.0) is good


def trained_on(loop, tmp_path, engine, workers):
    """Run it by the command line; say what was not as expected."""
    of_original = result_of_original(loop.name)["score"]
    result = tmp_path / "result.pt"
    expected = loop.sim if engine == "sim" else loop.local
    code, said = loop_runs.run_on_workers(loop, result, engine, workers)
    return loop_runs.unexpected(loop, expected, code, said, result, of_original)


@pytest.mark.parametrize("name", IN_SIM)
def test_on_virtual_workers_a_port_comes_to_its_originals_score(name, tmp_path):
    assert trained_on(BY_NAME[name], tmp_path, "sim", 8) is None


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", ON_PROCESSES)
def test_on_worker_processes_a_port_comes_to_its_originals_score(name, tmp_path):
    assert trained_on(BY_NAME[name], tmp_path, "local", 4) is None
