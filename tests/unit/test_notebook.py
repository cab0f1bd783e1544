"""A run and its report in an interpreter and in a notebook."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from journals import decision, header, joined, observed, pushed, two_workers

import paceline
from paceline.records import Report, TargetReport, fold_metrics
from paceline.records.journal import Line

HOSTILE = '<script>alert("1")</script>'


class Page(HTMLParser):
    """Tags that were opened and not closed, attributes, and the text of every cell."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str | None]] = set()
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes |= set(attrs)
        self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert self.open
        self.cells[-1] += data

    def after(self, name: str) -> str:
        return self.cells[self.cells.index(name) + 1]


def two() -> Report:
    return fold_metrics(two_workers()).report("runs/1/journal.jsonl")


def run_of(report: Report, folder: Path | None = None) -> paceline.Run:
    return paceline.Run(report, None, folder, "target", None)


def test_a_run_is_one_readable_line() -> None:
    report = msgspec.structs.replace(
        two(), strategy="dasp:rho=2", versions=1200, metrics={"accuracy": 0.91234}, accuracy=0.91234, loss=None,
        target=TargetReport("accuracy", 0.9, 3.14),
    )  # fmt: skip
    assert repr(run_of(report)) == (
        "Run(dasp:rho=2 on sim, 2 workers: 6.0 s virtual, 1,200 versions, accuracy 0.9123, "
        "target accuracy 0.9 reached at 3.1 s, ended: target)"
    )
    one = msgspec.structs.replace(report, engine="local", workers=1, seconds=0.0, versions=1, target=None)
    assert repr(one) == "Report(dasp:rho=2 on local, 1 worker: 0 s wall-clock, 1 version, accuracy 0.9123)"


def test_many_metrics_do_not_make_the_line_long() -> None:
    report = msgspec.structs.replace(two(), metrics={f"m{i}": float(i) for i in range(9)}, target=None, loss=None)
    assert "m0 0, m1 1, m2 2, ...)" in repr(msgspec.structs.replace(report, accuracy=None))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_can_be_shown(odd: float) -> None:
    report = msgspec.structs.replace(
        two(), seconds=odd, loss=odd, samples_per_second=odd, metrics={"m": odd}, target=TargetReport("m", odd, odd)
    )
    assert f"m {odd}" in repr(run_of(report))
    assert f"{odd} s virtual" in Page(run_of(report)._repr_html_()).after("time")


def test_a_notebook_shows_facts_and_workers() -> None:
    page = Page(run_of(two(), Path("runs/1"))._repr_html_())
    assert page.after("time") == "6.0 s virtual"
    assert page.after("target") == "accuracy 0.9 not reached"
    assert page.after("ended") == "target"
    assert page.after("folder") == "runs/1"
    assert page.after("journal") == "runs/1/journal.jsonl"
    start = page.cells.index("waiting", page.cells.index("each worker")) + 1
    assert page.cells[start + 2 : start + 5] == ["0", "2", "8"]  # behind the end of the heading and the row's begin
    assert "ended" not in Page(two()._repr_html_()).cells


def test_nothing_is_loaded_and_no_colour_is_set() -> None:
    page = Page(two()._repr_html_())
    assert page.tags <= {
        "div",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "details",
        "summary",
        "ul",
        "li",
    }
    assert {name for name, _ in page.attributes} == {"style", "scope"}
    assert {value for name, value in page.attributes if name == "style"} == {"text-align:left", "text-align:right"}


@pytest.mark.parametrize("text", [HOSTILE, "[bold]x[/]", "a\\", "a\\[b]", ":smile:", "&lt;", "' onload='x"])
def test_hostile_text_is_text(text: str) -> None:
    lines: list[Line] = [header(), joined(0.0, 0), decision(pushed(5.0, 0, 0, compute_s=1.0))]
    lines.append(observed(6.0, "warning", text=text))
    report = fold_metrics(lines).report(text)
    state = msgspec.structs.replace(report.per_worker[0], state=text)
    report = msgspec.structs.replace(
        report, strategy=text, metrics={text: 1.0}, target=TargetReport(text, 2.0, None), per_worker=[state]
    )
    page = Page(run_of(report, Path(text))._repr_html_())
    assert "script" not in page.tags
    assert page.after("result").endswith(f"{text} 1")
    assert page.after("target") == f"{text} 2 not reached"
    assert page.after("journal") == page.after("folder") == text
    assert f"warning: {text}" in page.cells
    assert text in page.cells  # the worker's state
    assert repr(report).startswith(f"Report({text} on sim, ")
    assert f"{text} 1, target {text} 2 not reached" in repr(report)


def test_a_line_stays_a_line_and_can_be_written_to_a_file() -> None:
    report = msgspec.structs.replace(two(), strategy="a\nb\x1b[2J\ud800", warnings=["c\x00\ud800"])
    assert repr(report).startswith(r"Report(a\nb\x1b[2J\ud800 on sim")
    assert r"c\x00\ud800" in report._repr_html_().encode().decode()


def test_rich_is_loaded_when_something_is_shown() -> None:
    code = (
        "import sys; from paceline.records import *; r = fold_metrics([]); print('rich' in sys.modules);"
        "r = r.report(None); repr(r); print('rich' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
