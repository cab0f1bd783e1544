"""The table of loops counts those that do what the catalogue expects, and names those that do not."""

import pytest

import scripts_table
from scripts.catalogue import LOOPS


def rows_of(good, bad=()):
    return [
        {"loop": name, "as expected": "yes" if name in good else "no"}
        for name in (*good, *bad)
    ]  # fmt: skip


def test_all_loops_as_expected_meet_both_bars():
    enough, others = scripts_table.verdicts_of(rows_of([f"loop{i}" for i in range(25)]))
    assert (enough.value, enough.passed, others.value, others.passed) == ("25", True, "0", True)


def test_a_loop_too_few_and_one_that_fails_miss_them():
    enough, others = scripts_table.verdicts_of(rows_of([f"loop{i}" for i in range(24)], ["gan"]))
    assert (enough.passed, others.value, others.passed) == (False, "1 (gan)", False)


def test_a_port_that_raises_is_a_row_and_not_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(scripts_table.loop_runs, "run_port", lambda *_: {}["score"])
    assert scripts_table.alone(LOOPS[0], tmp_path / "x.pt", {}) == "no: KeyError: 'score'"


def test_a_cell_is_cut_and_ends_no_cell():
    shown = scripts_table.shown({"4 local": "no: a|b" + "x" * 500, "seconds": 1.0})
    assert shown["4 local"].startswith("no: a/b")
    assert len(shown["4 local"]) == scripts_table.SHOWN
    assert "seconds" not in shown


def test_a_loop_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match="no loop sdg"):
        scripts_table.main(["sdg"])
