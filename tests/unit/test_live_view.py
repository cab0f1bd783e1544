"""The live view: a screen that fits, from a selection of the journal's lines, and where it is shown."""

import io
import sys

import pytest
from journals import decision, header, joined, observed, pushed
from rich.console import Console

from paceline.cli import live_screen
from paceline.core.actions import Apply, Cancel, Grant, Mark
from paceline.core.events import Applied, Left
from paceline.core.peer_actions import Send
from paceline.core.peer_events import Stepped
from paceline.records.journal import PeerDecision
from paceline.records.live_view import OTHER_ROWS, Headway, LiveView
from paceline.server import progress as reports
from paceline.server.progress import Progress, RecentLine, RecentLines


def view_of(lines, version=0, **standing):
    view = LiveView()
    for line in lines:
        view.write(line, version)
    view.stands(Headway(**standing), 0.0)
    return view


def screen(view, width=140, height=None):
    console = Console(file=io.StringIO(), width=width)
    console.print(view.drawn(width, height))
    return console.file.getvalue()


THREE = [
    header(workers=3),
    *(joined(0.0, worker) for worker in range(3)),
    decision(pushed(1.0, 0, 1, compute_s=0.5, transfer_s=0.5), Mark(0, "fast", ""), Apply((1,), (1.0,), "one"),
             Grant(0, 16, 2, "w0 is twice as fast")),
    decision(pushed(2.0, 1, 2, compute_s=2.0, loss=0.25), Apply((2,), (1.0,), "one"), Cancel(2, "too late")),
    decision(Left(2.0, 2, "crash")),
]  # fmt: skip


def test_the_screen_has_a_line_for_each_worker_with_its_last_reason():
    view = view_of(
        THREE, 1, seconds=2.0, versions=2, done=16, total=200, metrics={"accuracy": 0.75, "loss": 0.3}, loss=0.5
    )
    found = screen(view).splitlines()
    assert found[0] == "bsp · sim · 3 workers  2.0 s · version 2 · accuracy 0.75 · loss 0.3"
    assert found[1].endswith(" 8%, 8 samples/s")
    rows = [line.split() for line in found[3:]]
    assert rows[1] == ["0", "works", "1", "8", "0%", "1", "16", "fast", "is", "twice", "as", "fast"]
    assert rows[2] == ["1", "waits", "1", "4", "0%", "1", "8", "-", "go"]
    assert rows[3] == ["2", "away", "0", "-", "-", "0", "8", "-", "left:", "crash"]


def test_a_reason_does_not_repeat_the_rows_number_and_state():
    for reason in ("w0: full work", "SYNC: full work", "full work"):
        lines = [header(workers=1), joined(0.0, 0),
                 decision(pushed(1.0, 0, 1, compute_s=1.0), Mark(0, "SYNC", ""), Grant(0, 8, 2, reason))]  # fmt: skip
        assert screen(view_of(lines)).splitlines()[4].split("SYNC")[1].split() == ["full", "work"]


def test_a_column_that_says_nothing_leaves_its_room_to_the_reasons():
    lines = [header(workers=1), joined(0.0, 0), decision(pushed(1.0, 0, 1, compute_s=1.0), Grant(0, 8, 2, "x" * 80))]
    without = screen(view_of(lines), width=80).splitlines()
    assert "state" not in without[3]
    assert "stale" in without[3]
    assert len(without[4]) == 80
    lines.append(decision(pushed(2.0, 0, 2, compute_s=1.0), Mark(0, "fast", ""), Grant(0, 8, 3, "x" * 80)))
    known = screen(view_of(lines), width=80).splitlines()
    assert "state" in known[3]
    assert without[4].count("x") == known[4].count("x") + len("state ")


def test_a_push_in_pieces_counts_each_sample_once_for_the_speed():
    def piece(at, samples, granted):
        return decision(pushed(at, 0, 7, samples=samples, compute_s=1.0), Grant(0, granted, 2, "more", extends=7))

    first = decision(pushed(1.0, 0, 6, samples=8, compute_s=1.0), Grant(0, 8, 2, ""))
    lines = [header(workers=1), joined(0.0, 0), first]
    lines += [piece(2.0, 8, 4), piece(2.5, 12, 4)]
    assert view_of(lines).workers[0].speed == pytest.approx(0.8 * 8 + 0.2 * 4)
    missed = [*lines, piece(9.0, 200, 4)]  # pieces before it were not told
    assert view_of(missed).workers[0].speed == view_of(lines).workers[0].speed


@pytest.mark.parametrize("width", [20, 50, 80, 100])
def test_the_screen_is_never_wider_than_the_terminal(width):
    lines = screen(view_of(THREE, metrics={"accuracy of a very long name " * 3: 0.5}), width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("last reason" in line for line in lines) == (width >= 80)
    assert len(lines) == 8


def test_a_narrow_terminal_shows_whole_numbers():
    view = view_of(THREE, seconds=3.0, versions=7, done=64, total=128, metrics={"accuracy": 0.5})
    view.stands(Headway(seconds=4.0, versions=8, done=96, total=128, metrics={"accuracy": 0.5}), 1.0)
    name, numbers, bar, _, headings, *_ = screen(view, 40).splitlines()
    assert (name, numbers) == ("bsp · sim · 3 workers", "4.0 s · version 8 · accuracy 0.5")
    assert bar.endswith("75%, 32 samples/s, 1 s left")
    assert headings.split() == ["worker", "now", "clock", "samples/s", "waits", "state"]
    assert "…" not in screen(view, 40)


def test_workers_that_do_not_fit_are_summed_up():
    lines = [header(workers=100), *(joined(0.0, worker) for worker in range(100))]
    lines += [decision(pushed(2.0, worker, worker, compute_s=1.0, wait_s=1.0, samples=8)) for worker in range(90, 100)]
    lines += [decision(Left(2.0, worker, "crash")) for worker in range(95, 100)]
    found = screen(view_of(lines), height=30).splitlines()
    assert len(found) == 29
    shown = 30 - OTHER_ROWS
    assert found[-2].split()[0] == str(shown - 1)
    counts = f"{90 - shown} works, 5 waits, 5 away"
    assert found[-1] == f"... {100 - shown} more: {counts}, 80 samples/s, waits 50%"


def test_time_left_is_by_the_watchers_clock_and_starts_anew_after_a_rollback():
    view = LiveView()
    view.stands(Headway(seconds=0.0, done=0, total=1000), 100.0)
    view.stands(Headway(seconds=50.0, done=500, total=1000), 102.0)
    assert (view.rate(), view.seconds_left()) == (10.0, 2.0)
    view.stands(Headway(seconds=60.0, done=200, total=1000), 103.0)
    assert view.seconds_left() is None
    view.stands(Headway(seconds=61.0, done=1000, total=1000), 104.0)
    assert view.seconds_left() == 0.0


def step(node, number):
    return PeerDecision(
        node, 0, Stepped(float(number), number, None, None, 8, 0.1, 0.0), [Send(1, 1.0, None, f"n0 sends at {number}")]
    )


def test_nodes_without_a_server_have_their_own_reasons_and_no_staleness():
    view = view_of([header(), joined(0.0, 0), step(0, 3)])
    assert screen(view).splitlines()[4].split()[5:] == ["8", "sends", "at", "3"]


def test_control_characters_of_a_script_do_not_reach_the_terminal():
    view = view_of([header(), decision(pushed(1.0, 0, 1), Grant(0, 8, 1, "a\x1b[2Jb\nc"))], metrics={"\x07": 1.0})
    found = screen(view)
    assert "\x1b" not in found
    assert "\x07" not in found
    assert len(found.splitlines()) == 5


# -- which lines a view gets -------------------------------------------------------------------------------------------


def test_few_lines_are_all_reported_in_their_order():
    recent = RecentLines()
    for number, line in enumerate(THREE):
        recent.add(line, number)
    assert [(each.version, each.line) for each in recent.take()] == list(enumerate(THREE))
    assert recent.take() == []


def test_of_many_lines_every_worker_gets_its_turn_with_its_latest():
    recent, workers = RecentLines(), 3 * reports.MOST_PUSHES
    for number in range(reports.FEW_LINES):
        recent.add(observed(0.0, "report", name="x", value=number), 0)
    seen = {}
    for turn in range(4):
        for worker in range(workers):
            recent.add(decision(pushed(float(turn), worker, 1, clock=turn)), turn)
            recent.add(decision(Applied(float(turn), 1, (1,), 1.0)), turn)
            recent.add(observed(0.0, "report", name="x", value=1.0), turn)
        taken = recent.take()[reports.FEW_LINES :]
        assert len(taken) == reports.MOST_PUSHES or turn == 3
        seen |= {each.line.event.worker: each.line.event.clock for each in taken if hasattr(each.line, "event")}
        for number in range(reports.FEW_LINES):
            recent.add(observed(0.0, "report", name="x", value=number), 0)
    assert sorted(seen) == list(range(workers))
    assert max(seen.values()) == 3


def test_what_is_rare_is_not_lost_among_pushes():
    recent = RecentLines()
    for _ in range(reports.FEW_LINES):
        recent.add(decision(pushed(0.0, 0, 1)), 0)
    rare = [decision(Left(1.0, 1, "crash")), decision(pushed(1.0, 0, 2), Mark(0, "slow", "")), header()]
    for line in rare:
        recent.add(line, 7)
    recent.add(step(1, 1), 7)
    recent.add(step(1, 2), 7)
    assert [each.line for each in recent.take()[reports.FEW_LINES :]] == [*rare, step(1, 2)]
    for _ in range(5 * reports.MOST_OTHERS):
        recent.add(decision(Left(1.0, 1, "crash")), 0)
    assert len(recent.take()) == reports.FEW_LINES + reports.MOST_OTHERS


# -- where it is shown -------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal(monkeypatch):
    """Make standard error a terminal; no fixture, since pytest sets the streams before each test."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    for name, value in {"TERM": "xterm", "COLUMNS": "120", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    return found


def progress(**more):
    recent = [RecentLine(0, line) for line in THREE]
    return Progress(3.0, 7, 48, 128, {"accuracy": 0.5}, None, samples_lost=16, recent=recent, **more)


def test_a_listener_draws_and_leaves_the_cursor_visible(monkeypatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(live_screen, "DRAW_S", 0.0)
    with live_screen.progress_shown(quiet=False) as listen:
        assert "starting" in terminal.getvalue()
        listen(progress())
        drawn = terminal.getvalue()
        print("a word of the script", file=sys.stderr)
        listen(progress(paused=True))
    assert "version 7 · accuracy 0.5" in drawn
    assert "50%" in drawn
    assert "is twice as fast" in drawn
    assert "a word of the script" in terminal.getvalue()
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")  # the cursor is shown even if this process is killed
    assert sys.stderr is terminal


def test_screens_are_at_least_a_moment_apart(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with live_screen.progress_shown(quiet=False) as listen:
        listen(progress())
        once = len(terminal.getvalue())
        listen(progress())
        assert len(terminal.getvalue()) == once
        listen(progress(paused=True))
        paused = len(terminal.getvalue())
        listen(progress())  # after a debugger has had the terminal, at once
        assert "is twice as fast" in terminal.getvalue()[paused:]


def test_without_a_terminal_there_are_plain_lines_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(live_screen, "LINE_S", 0.0)
    with live_screen.progress_shown(quiet=False) as listen:
        listen(progress())
        monkeypatch.setattr(live_screen, "LINE_S", 3600.0)
        listen(progress())
        listen(progress())
    said = capsys.readouterr().err.splitlines()
    assert said == ["paceline: 3.0 s · version 7 · 50% · 21 samples/s · accuracy 0.5"] * 2


@pytest.mark.parametrize("options", [{"quiet": True}, {"quiet": False, "json": True}])
def test_nothing_is_shown_if_nobody_wants_it(options):
    with live_screen.progress_shown(**options) as listen:
        assert listen is None
