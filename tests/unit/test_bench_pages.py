"""What the benchmarks of pages and of the live view make of their measurements, and that a missed bar is told."""

import msgspec
import pytest

import bench_live_view
import bench_pages
from bench_live_view import Measured
from bench_pages import Row
from paceline.records import journal

ROW = Row("asp", 10, 200, 1.0, 9.0, 8.0, 100.0, 5.0, 6, 1_000, 2.0, 2.5)


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, None),
        ({"report_s": 61.0}, "seconds of `paceline report`"),
        ({"peak_mb": 2_001.0}, "its largest memory"),
        ({"page_mb": 8.1}, "the page"),
        ({"open_s": 3.1}, "until every plot is drawn"),
    ],
)
def test_the_worst_journal_decides(change, missed):
    verdicts = bench_pages.judge([ROW, msgspec.structs.replace(ROW, **change), ROW])
    assert [each.name for each in verdicts if not each.passed] == ([missed] if missed else [])


def test_a_report_is_measured_in_a_process_of_its_own(tmp_path):
    bench_pages.make("dasp", 12, 400, tmp_path / "journal.jsonl")
    row = bench_pages.reported("dasp", 12, tmp_path / "journal.jsonl", tmp_path / "page.html")
    lines = list(journal.read(tmp_path / "journal.jsonl"))
    assert row.decisions == sum(isinstance(line, journal.Decision) for line in lines) >= 400
    assert (tmp_path / "page.html").stat().st_size / 1e6 == row.page_mb
    assert 20 < row.peak_mb < 2_000
    assert row.report_cpu_s > 0


def test_a_report_that_fails_is_no_measurement(tmp_path):
    (tmp_path / "journal.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match="failed: paceline: "):
        bench_pages.reported("asp", 1, tmp_path / "journal.jsonl", tmp_path / "page.html")


def view(draws_s, others_s, *, shown):
    return Measured("case", shown, 0, 20.0, draws_s, others_s, 1_000, 9_000)


@pytest.mark.parametrize(("draws_s", "passed"), [(0.29, True), (0.31, False)])
def test_the_view_is_held_against_all_processor_time(draws_s, passed):
    found = [view(0.1, 19.9, shown=False), view(draws_s, 21.9, shown=True)]
    ((draws, others),) = bench_live_view.shares(found).values()
    assert draws == pytest.approx((draws_s - 0.1) / 20)
    assert others == pytest.approx(0.1)
    (verdict,) = bench_live_view.judge(found)
    assert verdict.passed is passed
