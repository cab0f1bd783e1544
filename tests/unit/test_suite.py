"""The suite's own rules: where tests lie, how they start processes, and that a commit always runs the same ones."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
ROOMS = {"unit", "strategies", "laws", "contracts", "sim", "processes", "scripts", "cuda", "netlab"}
SOURCES = {path.relative_to(TESTS).as_posix(): path.read_text() for path in TESTS.rglob("*.py")}
MOST_FRESH = 14  # tests that start a run in an interpreter of its own


def test_every_test_lies_in_a_room() -> None:
    assert {Path(name).parts[0] for name in SOURCES if Path(name).name.startswith("test_")} == ROOMS
    assert {Path(name).parts[0] for name in SOURCES} == {*ROOMS, "support", "scripts", "conftest.py"}


def test_a_commit_always_runs_the_same_tests() -> None:
    """Neither the calendar nor a variable nor chance decides which parameters a test gets."""
    assert hypothesis.settings().derandomize
    assert not re.search(r"\bdate\b|SEED|RANDOM", (ROOT / ".ci" / "run").read_text())
    asked = re.compile(r"""(?:environ\.get|getenv)\(["']([A-Z_]+)""")
    assert {name for text in SOURCES.values() for name in asked.findall(text)} == {
        "PACELINE_SOAK", "PACELINE_CI_NO_SKIPS", "PYTHONPATH", "CHANGED",  # the last two are for programs of their own
    }  # fmt: skip
    drawn = re.compile("strf" + r"time|\brandom\.sample\(|Random\(\)")
    assert [name for name, text in SOURCES.items() if drawn.search(text)] == []


def started_fresh(name: str) -> Iterator[tuple[str, bool]]:
    """Tests of a file that start an interpreter for a run, and whether they are marked so."""
    for node in ast.parse(SOURCES[name]).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            text = ast.unparse(node)
            marked = "@pytest.mark.fresh" in text
            by_hand = ("program(tmp_path" in text or "PROGRAM" in text) and "warm" not in text
            if marked or "start='fresh'" in text or by_hand:
                yield node.name, marked


def test_runs_on_fresh_interpreters_are_marked_and_few() -> None:
    found = [each for name in SOURCES if name.startswith(("processes/", "strategies/")) for each in started_fresh(name)]
    assert [name for name, marked in found if not marked] == []
    assert 10 < len(found) <= MOST_FRESH


def test_processes_are_started_by_one_helper() -> None:
    """A run on real processes that a test starts by hand would not have what all have in common."""
    by_hand = re.compile(r"""paceline\.launch\((?:(?!\n\n)[\s\S])*?engine="local\"""")
    found = {name for name, text in SOURCES.items() if name.startswith("processes/") and by_hand.search(text)}
    assert found == set()


@pytest.mark.parametrize("name", sorted(name for name in SOURCES if name.startswith("processes/")))
def test_what_starts_processes_is_checked_for_leaks(name: str) -> None:
    starts = re.search(r"\blaunch\(|Launcher\(|Process\(", SOURCES[name])
    assert not starts or "nothing_left" in SOURCES[name]
