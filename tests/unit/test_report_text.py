"""The report for people, and the pages that explain report and journal."""

import io
from pathlib import Path
from typing import get_args

import pytest
from journals import decision, header, joined, observed, pushed, two_workers
from rich.console import Console

from paceline.core.actions import Action
from paceline.core.events import Event
from paceline.records.journal import Header, Line
from paceline.records.metrics import Report, Staleness, WorkerReport, fold
from paceline.records.text import show
from paceline.records.wait_attribution import EPISODES


def shown(report: Report, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_summary_names_every_worker_the_target_and_the_warnings() -> None:
    lines = two_workers()
    lines.insert(-1, observed(6.0, "warning", text="w1 is [very] late"))
    text = shown(fold(lines).report("runs/1/journal.jsonl"))
    assert "bsp" in text
    assert "6.0 s virtual" in text
    assert "accuracy 0.9 not reached" in text
    assert "33.3% of the workers' time" in text
    assert "w1 is [very] late" in text
    assert "journal runs/1/journal.jsonl" in text
    rows = [line.split() for line in text.splitlines() if line.strip()[:2] in ("0 ", "1 ")]
    assert [row[:3] for row in rows] == [["0", "2", "8"], ["1", "1", "24"]]


def test_the_files_of_the_run_are_named_at_its_end() -> None:
    report = fold(two_workers()).report("runs/1/journal.jsonl", "runs/1", "runs/1/model.safetensors")
    last = shown(report).splitlines()[-3:]
    assert last == ["folder  runs/1", "model   runs/1/model.safetensors", "journal runs/1/journal.jsonl"]
    assert "model " not in shown(fold(two_workers()).report(None))


def test_it_is_said_what_a_score_is_where_there_is_one() -> None:
    said = "score: speed relative to the fastest worker's; higher is better"
    assert said in shown(fold(two_workers()).report(None))
    assert said not in shown(fold([header(), joined(0.0, 0)]).report(None))


def test_many_workers_are_shown_in_groups_of_similar_speed() -> None:
    lines: list[Line] = [header(workers=40)]
    for worker in range(40):
        seconds = 1.0 if worker < 30 else 4.0
        lines += [joined(0.0, worker), decision(pushed(5.0, worker, worker, compute_s=seconds))]
    text = shown(fold(lines).report(None))
    assert "0-29 (30)" in text
    assert "30-39 (10)" in text
    assert len(text.splitlines()) < 20


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0213, "21.3 ms virtual"), (12.34, "12.3 s virtual"), (4000.0, "1 h 06 min virtual")]
)
def test_times_are_shown_in_a_fitting_unit(seconds: float, text: str) -> None:
    assert text in shown(fold([header(), observed(seconds, "end", cause="done")]).report(None))


DOCS = Path(__file__).parents[2] / "docs"


def test_every_field_and_cause_is_documented() -> None:
    text = (DOCS / "reference" / "report.md").read_text()
    fields = [*Report.__struct_fields__, *WorkerReport.__struct_fields__, *Staleness.__struct_fields__]
    assert [name for name in [*fields, *EPISODES] if f"`{name}`" not in text] == []


def test_every_kind_of_line_event_and_action_is_documented() -> None:
    text = (DOCS / "reference" / "journal.md").read_text()
    for union in (Event, Action):
        for kind in get_args(union):
            missing = [name for name in kind.__struct_fields__ if f"`{name}`" not in text]
            assert f"| `{kind.__struct_config__.tag}` |" in text
            assert missing == [], kind
    assert [name for name in Header.__struct_fields__ if f"`{name}`" not in text] == []
