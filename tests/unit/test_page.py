"""The page of a run: its times add up to the report's, it stays small, and it opens from any journal."""

import json
import re
import stat
from itertools import pairwise

import msgspec
import pytest
from journals import decision, header, joined, observed, pushed, two_workers

import paceline
import paceline.tasks
from paceline.cli import main
from paceline.core.actions import Apply, Cancel, Grant, Mark, Track
from paceline.core.events import Left
from paceline.records import Lines, Writer, fold_metrics, page
from paceline.records.diagnosis import diagnose
from paceline.records.export import export
from paceline.records.figures import figures
from paceline.records.history import KINDS, MOST_MARKS, MOST_POINTS, MOST_SPANS, Curve, fold
from paceline.records.journal import Restored, spelled_out
from paceline.records.wait_attribution import fold as attribute


def kept(lines, path):
    writer = Writer(path)
    for line in lines:
        writer.write(line)
    writer.close()
    return path


def both(lines):
    report = fold_metrics(lines).report(None)
    return report, fold(lines, report.seconds, max((w.worker for w in report.per_worker), default=-1) + 1)


def require_sums(lines):
    """Spans, their sums over time and the report agree, and attribution adds up to the waiting."""
    report, history = both(lines)
    for kind in KINDS:
        seconds = sum(getattr(worker, f"{kind}_s") for worker in report.per_worker)
        assert history.seconds_of(kind) == pytest.approx(seconds, abs=1e-9)
        if not history.left_out:
            assert sum(s.seconds for s in history.spans if s.kind == kind) == pytest.approx(seconds, abs=1e-9)
    waited = sum(each.seconds for each in attribute(lines).waited_for())
    assert waited == pytest.approx(sum(worker.wait_s for worker in report.per_worker), abs=1e-9)


def trained(strategy, scenario="uneven8", **settings):
    lines = Lines()
    paceline.launch(
        paceline.tasks.get("digits"), engine="sim", strategy=strategy, scenario=scenario, sink=lines, epochs=0.5,
        **settings,
    )  # fmt: skip
    return lines


@pytest.mark.parametrize("strategy", ["bsp", "dasp", "fastest_k:k=5", "balanced", "adaptive_gossip"])
def test_times_add_up_to_those_of_the_report(strategy):
    require_sums(trained(strategy))


def test_times_add_up_by_hand():
    require_sums(two_workers())
    cancelled = [
        header(), joined(0.0, 0), joined(0.0, 1),
        decision(pushed(1.0, 0, 1, compute_s=1.0), Cancel(1, "slow"), Apply((1,), (1.0,), "one"), Grant(0, 8, 2, "go")),
        observed(1.0, "cancelled", 1, samples=8, seconds=1.0, cause="cancel"),
        decision(pushed(2.5, 0, 2, compute_s=1.0, transfer_s=0.5), Grant(1, 8, 2, "go"), Grant(0, 8, 3, "go")),
        decision(Left(3.0, 1, "crash")),
        observed(3.0, "cancelled", 1, samples=8, seconds=0.5, cause="crash"),
        observed(4.0, "cancelled", 0, samples=8, seconds=1.5, cause="stop"),
        observed(4.0, "end", cause="limit", versions=1, samples_used=8, samples_lost=0),
    ]  # fmt: skip
    report, history = both(cancelled)
    assert history.seconds_of("compute") == pytest.approx(2.0)
    assert history.seconds_of("lost") == pytest.approx(sum(worker.lost_s for worker in report.per_worker))
    reasons = {span.reason for span in history.spans if span.kind == "lost"}
    assert "slow" in reasons


def test_a_restored_run_goes_on_from_its_checkpoint():
    again = header(restored=Restored(0, 4.0, 0, 0, 0))
    lines = [
        *two_workers()[:5],
        again,
        joined(6.0, 0),
        decision(pushed(7.0, 0, 1, compute_s=1.0)),
        observed(7.0, "end", cause="x"),
    ]
    _, history = both(lines)
    assert history.seconds_of("compute") == pytest.approx(1.0 + 3.0 + 1.0)
    assert history.seconds_of("lost") == pytest.approx(0.0)


def test_curves_keep_an_even_selection_and_the_last_point():
    curve = Curve()
    for number in range(100_001):
        curve.add(float(number), 2.0 * number)
    at, values = curve.columns()
    assert MOST_POINTS <= len(at) <= 2 * MOST_POINTS + 1
    assert (at[0], at[-1], values[-1]) == (0.0, 100_000.0, 200_000.0)
    assert len({after - before for before, after in pairwise(at[:-1])}) == 1


def test_a_long_run_makes_no_long_page():
    lines = [header(workers=1), joined(0.0, 0)]
    for number in range(1, 12_000):
        event = pushed(float(number), 0, number, compute_s=1.0, clock=number)
        lines.append(
            decision(event, Apply((number,), (1.0,), "one"), Grant(0, 8, number + 1, "go"), Track("k", 1.0, ""))
        )
    report, history = both(lines)
    assert len(history.spans) == MOST_SPANS
    assert history.left_out == 11_999 - MOST_SPANS
    assert history.seconds_of("compute") == pytest.approx(11_999)
    drawn = figures(history, [])
    assert len(json.dumps(drawn)) < 1_500_000
    assert "the first 6e+03 s" in drawn[0]["note"]
    assert report.pushes == 11_999


def test_many_workers_share_lanes():
    lines = [header(workers=1_000), *(joined(0.0, worker) for worker in range(1_000))]
    lines += [decision(pushed(1.0, worker, worker + 1, compute_s=1.0)) for worker in range(1_000)]
    _, history = both(lines)
    assert history.lanes == 64
    assert history.seconds_of("compute") == pytest.approx(1_000.0)
    assert {history.lane(worker) for worker in range(1_000)} == set(range(64))


def test_of_many_workers_some_are_drawn():
    lines = [header(workers=1_000), *(joined(0.0, worker) for worker in range(1_000))]
    for number in range(8):
        lines += [
            decision(
                pushed(1.0 + number, worker, 1_000 * number + worker + 1, compute_s=1.0),
                Mark(worker, "slow" if number % 2 else "fast", "why"),
            )
            for worker in range(1_000)
        ]
    _, history = both(lines)
    shown = {span.worker for span in history.spans}
    assert len(shown) == 64
    assert min(shown) == 0
    assert max(shown) > 980
    assert set(history.states) == shown
    assert history.seconds_of("compute") == pytest.approx(8_000.0)
    drawn = {each["id"]: each for each in figures(history, [])}
    assert "Shown: 64 of 1,000 workers" in drawn["lanes"]["note"]
    assert drawn["lanes"]["layout"]["height"] < 2_000
    assert drawn["states"]["note"] == "Shown: 64 of 1,000 workers."


@pytest.mark.parametrize(
    "wrong",
    [{"at": float("inf")}, {"at": float("nan")}, {"at": -5.0}, {"at": 1e308}, {"at": 1e-320},
     {"compute_s": float("inf")}, {"compute_s": 1e308, "wait_s": float("nan")}, {"worker": 10**9}],
    ids=str,
)  # fmt: skip
def test_numbers_that_no_run_has_make_no_traceback(tmp_path, wrong):
    event = {"at": 1.0, "worker": 0, "push": 2, "compute_s": 0.5} | wrong
    odd = decision(pushed(event.pop("at"), event.pop("worker"), event.pop("push"), **event))
    lines = [header(workers=1), joined(0.0, 0), decision(pushed(1.0, 0, 1, compute_s=1.0)), odd]
    told = [json.dumps(spelled_out(msgspec.to_builtins(line))) for line in lines]
    (tmp_path / "journal.jsonl").write_text("".join(f"{text}\n" for text in told))
    assert page.written(tmp_path / "journal.jsonl", tmp_path / "page.html")
    export(tmp_path / "journal.jsonl", "perfetto", tmp_path / "trace.json")
    json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(("workers", "height"), [((0, 1, 2, 3), 0.85), ((0, 15, 31), 0.85 * 15), ((3,), 0.85)])
def test_bars_of_every_kind_are_as_high_as_a_lane(workers, height):
    """Whatever few workers have must not cover the lanes of others, nor make lanes for workers that there are not."""
    lines = [header(workers=40), *(joined(0.0, worker) for worker in workers)]
    lines += [decision(pushed(2.0, w, w, compute_s=1.0, wait_s=1.0), Mark(w, f"of {w}", "")) for w in workers]
    lines += [observed(3.0, "cancelled", workers[-1], samples=8, seconds=1.0, cause="stop")]
    lines += [observed(4.0, "end", cause="limit", versions=1, samples_used=8, samples_lost=0)]
    for figure in (each for each in figures(both(lines)[1], []) if each["id"] in ("lanes", "states")):
        assert {data["width"] for data in figure["data"]} == {height}
        above, below = figure["layout"]["yaxis"]["range"]
        assert above - workers[-1] == workers[0] - below == height / 0.85 / 2


def test_marks_are_bounded():
    lines = [header(workers=1), joined(0.0, 0)]
    for at in range(1, MOST_MARKS + 9):
        lines.append(decision(pushed(float(at), 0, at, compute_s=1.0), Mark(0, f"s{at % 2}", "why")))
    _, history = both(lines)
    (states,) = (each for each in figures(history, []) if each["id"] == "states")
    assert sum(len(bars["x"]) for bars in states["data"]) == MOST_MARKS
    assert states["note"] == f"Shown: the first {MOST_MARKS + 1:.3g} s."


def test_staleness_of_many_values_is_binned():
    _, history = both([header(workers=1), joined(0.0, 0)])
    history.staleness = dict.fromkeys(range(10, 5010), 2)
    (found,) = (each for each in figures(history, []) if each["id"] == "staleness")
    (bar,) = found["data"]
    assert sum(bar["y"]) == 10_000
    assert len(bar["x"]) == 200
    assert bar["customdata"][0] == "10 to 34"
    assert found["note"] == "Each bar is of 25 numbers of updates."


# -- what is said ------------------------------------------------------------------------------------------------------


def diagnosis_of(lines):
    return diagnose(fold_metrics(lines).report(None), attribute(lines).culprits())


def test_the_verdict_names_who_was_waited_for():
    found = diagnosis_of(trained("bsp"))
    assert re.match(r"Workers waited \d\d% of their time\.", found.what)
    assert re.search(
        r"for worker [67], at \d\d% of the fastest worker's speed: its computing takes longest\.", found.why
    )
    assert "`balanced`" in found.advice


def test_a_strategy_is_not_advised_to_who_has_it():
    for name in ("balanced", "dasp:alpha=0.5"):
        lines = trained("bsp")
        lines[0] = header(strategy=name, workers=8)
        assert f"`{name.partition(':')[0]}`" not in diagnosis_of(lines).advice
        assert diagnosis_of(lines).advice.count("`") >= 4


def test_a_lone_cause_and_a_lone_curve_are_named():
    _, history = both(two_workers())
    history.loss.add(1.0, 8, 1, 0.5)
    (course,) = (each for each in figures(history, []) if each["id"] == "course")
    assert course["layout"]["showlegend"]
    assert course["data"][0]["name"] == "loss of pushes"
    (staleness,) = (each for each in figures(history, []) if each["id"] == "staleness")
    assert staleness["layout"]["xaxis"]["dtick"] == 1


def test_verdicts_of_other_runs():
    assert "were discarded" in diagnosis_of(trained("fastest_k:k=5")).what
    busy = [header(workers=1), joined(0.0, 0), decision(pushed(1.0, 0, 1, compute_s=1.0), Apply((1,), (1.0,), ""))]
    assert diagnosis_of(busy).what == "Little: workers waited 0% of their time."
    sending = [
        header(workers=1),
        joined(0.0, 0),
        decision(pushed(1.0, 0, 1, compute_s=0.5, transfer_s=0.5), Apply((1,), (1.0,), "")),
    ]
    assert "50% of their busy time in transfers" in diagnosis_of(sending).what
    stale = busy[:2]
    for push in range(1, 20):
        stale.append(
            decision(pushed(float(push), 0, push, compute_s=1.0), Apply((push,), (1.0,), ""), Grant(0, 8, push, ""))
        )
    assert "missed 9.0 updates on average" in diagnosis_of(stale).what


# -- the page ----------------------------------------------------------------------------------------------------------


def test_a_page_has_everything_in_it_escaped(tmp_path):
    lines = two_workers()
    lines[3:3] = [
        decision(pushed(0.5, 0, 9, compute_s=0.5), Mark(0, "<b>fast</b>", "</script>"), Track("</script>", 2.0, "why")),
        observed(0.5, "warning", text="<script>alert(1)</script>"),
        observed(0.5, "evaluation", version=0, samples_used=0, epoch=0.0, metrics={"accuracy": 0.5, "loss": "nan"}),
    ]
    place = tmp_path / "page.html"
    size = page.written(kept(lines, tmp_path / "journal.jsonl"), place)
    text = place.read_text()
    assert size == len(text.encode()) < 6_000_000
    assert "&lt;script&gt;alert(1)" in text
    data = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)
    names = [figure["id"] for figure in json.loads(data[1])]
    assert names == ["lanes", "waits", "course", "staleness", "shares", "work", "tracks", "states", "traffic"]
    assert not re.search(r'(src|href)="http', text.replace(page._plotly(), ""))
    assert text.count("<script") == 3 + page._plotly().count("<script")


@pytest.mark.parametrize("name", ["journal.jsonl", "journal.jsonl.gz"])
def test_growing_and_cut_journals_have_pages(tmp_path, name, capsys):
    journal = kept(two_workers()[:6], tmp_path / name)
    journal.write_bytes(journal.read_bytes()[:-9])
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert "The run goes on, or was killed" in (tmp_path / "report.html").read_text()


def test_what_is_no_run_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    def said(*words):
        assert main(["report", *map(str, words)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "there is no run" in said("nothing")
    assert "holds no journal" in said(tmp_path)
    journal = kept(two_workers(), tmp_path / "journal.jsonl")
    assert "must end in .html" in said(journal, "-o", tmp_path / "page.txt")
    assert "cannot write" in said(journal, "-o", tmp_path / "none" / "page.html")
    newer = tmp_path / "newer.jsonl"
    newer.write_text(journal.read_text().replace('"format":1', '"format":9', 1))
    assert "journal format 9" in said(newer)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "holds no run yet" in said(empty)
    (tmp_path / "words.jsonl").write_text("hello\n")
    assert "line 1 is not a line of a journal" in said(tmp_path / "words.jsonl")
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    assert "pip install 'paceline[report]'" in said(journal)


def test_a_folder_that_may_not_be_read_is_named(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "private"
    folder.mkdir()

    def refused(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(folder), "iterdir", refused)  # root may read everything
    assert main(["report", str(folder)]) == 2
    assert "Permission denied" in capsys.readouterr().err
    assert stat.S_ISDIR(folder.stat().st_mode)
