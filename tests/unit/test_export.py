"""Journals for other tools: slices add up to the report's seconds, and every push has its row."""

import csv
import json

import pytest
from journals import decision, header, joined, observed, pushed, two_workers

from paceline.cli import main
from paceline.core.actions import Apply, Discard, Grant
from paceline.records import Writer, fold_metrics
from paceline.records.export import FORMATS, pushes
from paceline.records.scalars import points


@pytest.fixture
def journal(tmp_path):
    def keep(lines):
        writer = Writer(tmp_path / "journal.jsonl")
        for line in lines:
            writer.write(line)
        writer.close()
        return tmp_path / "journal.jsonl"

    return keep


def test_slices_of_a_trace_add_up_to_the_reports_seconds(journal):
    path = journal(two_workers())
    assert main(["export", str(path), "--format", "perfetto"]) == 0
    events = json.loads(path.with_name("journal.perfetto.json").read_text())["traceEvents"]
    report = fold_metrics(two_workers()).report(None)
    for kind in ("compute", "transfer", "wait", "lost"):
        for worker in report.per_worker:
            found = sum(e["dur"] for e in events if (e["ph"], e["name"], e["tid"]) == ("X", kind, worker.worker))
            assert found / 1e6 == pytest.approx(getattr(worker, f"{kind}_s"))
    begun = {event["id"] for event in events if event["ph"] == "s"}
    ended = {event["id"] for event in events if event["ph"] == "f"}
    assert (begun, ended) == ({1, 2, 3}, {1, 2})
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"worker 0", "worker 1"}


def lines():
    """A push that is extended and applied, one that is discarded, one that is neither."""
    return [
        header(), joined(0.0, 0), joined(0.0, 1),
        decision(pushed(1.0, 0, 1, compute_s=1.0, samples=4), Grant(0, 4, 1, "more", extends=1)),
        decision(pushed(2.0, 0, 1, compute_s=0.5, samples=8, loss=1.5), Apply((1,), (1.0,), "all"), Grant(0, 8, 2, "")),
        decision(pushed(3.0, 1, 2, compute_s=3.0), Discard(2, "late")),
        decision(pushed(4.0, 0, 3, compute_s=1.0, read_version=1)),
        observed(4.0, "evaluation", version=1, samples_used=8, epoch=0.5, metrics={"accuracy": 0.5}),
        observed(4.0, "report", 0, name="rate", value=0.1),
    ]  # fmt: skip


def test_every_push_has_one_row(journal):
    first, second, third = pushes(iter(lines()))
    assert (first.push, first.samples, first.compute_s, first.bytes_up) == (1, 8, 1.5, 200)
    assert (first.applied_at, first.version, first.staleness, first.weight) == (2.0, 1, 0, 1.0)
    assert (second.push, second.applied_at, second.version) == (2, None, None)
    assert (third.push, third.read_version) == (3, 1)
    path = journal(lines())
    assert main(["export", str(path), "--format", "csv"]) == 0
    rows = list(csv.DictReader(path.with_name("journal.csv").read_text().splitlines()))
    assert [row["push"] for row in rows] == ["1", "2", "3"]
    assert (rows[0]["loss"], rows[1]["version"]) == ("1.5", "")


def test_a_parquet_file_has_the_same_rows(journal):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    path = journal(lines())
    assert main(["export", str(path), "--format", "parquet"]) == 0
    table = parquet.read_table(path.with_name("journal.parquet"))
    assert table.column("push").to_pylist() == [1, 2, 3]
    assert table.column("version").to_pylist() == [1, None, None]


def test_scalars_reach_tensorboard(journal):
    assert list(points(lines())) == [
        (2.0, 1, {"loss": 1.5}), (4.0, 1, {"accuracy": 0.5}), (4.0, 1, {"report/rate": 0.1})
    ]  # fmt: skip
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader", reason="needs tensorboard")
    path = journal(lines())
    assert main(["export", str(path), "--format", "tensorboard"]) == 0
    (file,) = path.with_name("journal.tb").iterdir()
    found = [
        (event.wall_time, event.step, value.tag)
        for event in loader.EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]
    assert found == [(2.0, 1, "loss"), (4.0, 1, "accuracy"), (4.0, 1, "report/rate")]


def test_unknown_formats_and_places_are_refused(journal, capsys, tmp_path, monkeypatch):
    path = journal(lines())
    assert main(["export", str(path), "--format", "perfeto"]) == 2
    assert "did you mean 'perfetto'?" in capsys.readouterr().err
    for form in FORMATS:
        place = path / "none" if form == "tensorboard" else tmp_path / "none" / "file"
        assert main(["export", str(path), "--format", form, "-o", str(place)]) == 2
        assert "cannot write" in capsys.readouterr().err
    for name, form in (("pyarrow", "parquet"), ("tensorboard.compat.proto.event_pb2", "tensorboard")):
        monkeypatch.setitem(__import__("sys").modules, name, None)
        assert main(["export", str(path), "--format", form]) == 2
        assert "pip install 'paceline[export]'" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["perfetto", "csv", "parquet", "tensorboard"])
@pytest.mark.parametrize("text", ["", '{"type":"hea'], ids=["empty", "cut in its first line"])
def test_a_journal_without_a_run_is_refused_and_nothing_is_written(form, text, tmp_path, capsys):
    (tmp_path / "journal.jsonl").write_text(text)
    assert main(["export", str(tmp_path / "journal.jsonl"), "--format", form]) == 2
    assert "holds no run yet: it has no header" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["journal.jsonl"]
