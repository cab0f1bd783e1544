"""The measurement of a start reads moments from a command's output and judges their medians."""

import pytest

import bench_startup


def rows_of(**seconds):
    return [{"start": start, "first_batch_s": s, "first_line_s": 0.2} for start, each in seconds.items() for s in each]


def test_lines_become_seconds_since_the_command():
    row = dict.fromkeys(bench_startup.MOMENTS)
    lines = [
        "moment nursery begun 101.5\n",
        "paceline: starting 4 workers\n",
        "[worker 2] first batch 103.0 103.25\n",
        "[worker 0] first batch 103.5 103.75\n",  # later than the first
    ]
    for number, line in enumerate(lines):
        bench_startup.note(row, line, 100.0, 102.0 + number)
    assert {name: value for name, value in row.items() if value is not None} == {
        "nursery_begun_s": 1.5, "first_line_s": 3.0, "first_batch_s": 4.0, "script_begun_s": 3.0, "prepared_s": 3.25,
    }  # fmt: skip


@pytest.mark.parametrize(("nursery", "passed"), [([1.0, 3.9, 9.0], True), ([1.0, 4.1, 4.2], False)])
def test_the_median_is_held_to_the_bar(nursery, passed):
    first, ratio, line = bench_startup.judge(rows_of(nursery=nursery, fresh=[8.2] * 3))
    assert (first.ratio, first.passed) == (nursery[1], passed)
    assert ratio.ratio == pytest.approx(8.2 / nursery[1])
    assert line.passed


@pytest.mark.slow
def test_a_command_is_measured(tmp_path):
    (tmp_path / "train.py").write_text(bench_startup.SCRIPT)
    row = bench_startup.measure(tmp_path, "nursery", 0)
    moments = [row[name] for name in bench_startup.MOMENTS]
    assert None not in moments
    assert row["first_batch_s"] <= row["total_s"]
