"""Replay: a journal's events reproduce its actions, and the first action that does not is named."""

import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from journals import JournalledCluster, decision, header, pushed

from paceline import strategies
from paceline.core.actions import Action, Apply, Grant, Track
from paceline.core.errors import JournalError
from paceline.core.events import Event, HostLoad, Joined, Pushed, TimerFired
from paceline.records import replay as replaying
from paceline.records.journal import Decision, Header, Line, Writer
from paceline.records.replay import replay
from paceline.strategies.base import Strategy


def journal_of(spec: str, seed: int = 0, pushes: int = 120) -> list[Line]:
    """An uneven run with a crash, a return and a newcomer."""
    strategy = strategies.build(spec, seed)
    made = JournalledCluster(
        strategy,
        [1.0, 1.0, 2.0, 4.0],
        transfer=0.1,
        jitter=0.2,
        seed=seed,
        loss_of=lambda worker, version: 1 / (1 + version),
    )
    made.lines[0] = header(strategy=spec, seed=seed, workers=4)
    made.at(9.3, "crash", worker=1)
    made.at(15.1, "join", worker=1)
    made.run(pushes=pushes)
    return made.finish()


def written(path: Path, lines: list[Line]) -> Path:
    writer = Writer(path)
    for line in lines:
        writer.write(line)
    writer.close()
    return path


def altered(lines: list[Line], which: Callable[[Action], bool], change: Callable[[Any], list[Action]]) -> int:
    """Replace the first action that fits, past the start of the run; the number of its line."""
    for number, line in enumerate(lines[20:], 20):
        if isinstance(line, Decision):
            for index, action in enumerate(line.actions):
                if which(action):
                    line.actions[index : index + 1] = change(action)
                    return number + 1
    raise AssertionError("no action fits")


NEED_OPTIONS = {"fastest_k": "fastest_k:k=2", "k_async": "k_async:k=2"}


@pytest.mark.parametrize("name", strategies.names())
@pytest.mark.parametrize("file", ["j.jsonl", "j.jsonl.gz"])
def test_a_journal_reproduces_itself(tmp_path: Path, name: str, file: str) -> None:
    lines = journal_of(NEED_OPTIONS.get(name, name), pushes=300)
    found = replay(written(tmp_path / file, lines))
    assert found == replaying.Replay(sum(isinstance(line, Decision) for line in lines), None)


class OnSharedHosts(JournalledCluster):
    """Every push says what others do on its worker's host: w2's are loaded from 8 s on, while it is slower."""

    def _feed(self, event: Event) -> None:
        if isinstance(event, Pushed):
            load = HostLoad(1.9, 0.25, 0.0) if event.worker == 2 and event.at > 8 else HostLoad(0.2)
            event = msgspec.structs.replace(event, host=load)
        super()._feed(event)


def test_a_journal_that_says_what_others_do_on_hosts_reproduces_itself(tmp_path: Path) -> None:
    made = OnSharedHosts(strategies.build("adaptive_sync", 0), [1.0] * 4, jitter=0.1)
    made.lines[0] = header(strategy="adaptive_sync", workers=4)
    made.at(8.0, "slow", worker=2, value=3.0)
    path = written(tmp_path / "j", made.run(until=160.0) and made.finish())
    reasons = [a.reason for line in made.lines if isinstance(line, Decision) for a in line.actions]
    assert any("; load 1.9 per core, 25% stolen, 0% throttled" in reason for reason in reasons)
    assert any("is a level of its own after 32 overdue pushes" in reason for reason in reasons)
    decisions = sum(isinstance(line, Decision) for line in made.lines)
    assert replay(path) == replaying.Replay(decisions, None)
    silent: list[Line] = []
    for line in made.lines:
        if isinstance(line, Decision) and isinstance(line.event, Pushed):
            line = Decision(msgspec.structs.replace(line.event, host=msgspec.UNSET), line.actions)
        silent.append(line)
    assert replay(written(tmp_path / "silent", silent)).difference is not None, "hosts decide"


def is_apply(action: Action) -> bool:
    return isinstance(action, Apply)


def test_the_first_differing_action_is_named_with_its_line_and_event(tmp_path: Path) -> None:
    lines = journal_of("bsp")
    number = altered(lines, is_apply, lambda a: [msgspec.structs.replace(a, weights=(0.5, *a.weights[1:]))])
    difference = replay(written(tmp_path / "j", lines)).difference
    assert difference is not None
    line = lines[number - 1]
    assert isinstance(line, Decision)
    assert (difference.line, difference.event, difference.position) == (number, line.event, 1)
    assert isinstance(difference.expected, Apply)
    assert difference.expected.weights[0] == 0.5
    assert isinstance(difference.got, Apply)
    assert difference.got.weights[0] != 0.5
    text = str(difference)
    assert f"line {number}, action 1 differs" in text
    assert "event:    Pushed(at=" in text
    assert "expected: Apply(pushes=" in text


def test_a_changed_reason_is_a_difference(tmp_path: Path) -> None:
    lines = journal_of("ssp")
    altered(lines, is_apply, lambda a: [msgspec.structs.replace(a, reason="because")])
    difference = replay(written(tmp_path / "j", lines)).difference
    assert difference is not None
    assert difference.expected is not None
    assert difference.expected.reason == "because"


def test_a_missing_and_an_added_action_are_differences(tmp_path: Path) -> None:
    lines = journal_of("asp")
    altered(lines, lambda a: isinstance(a, Grant), lambda a: [])
    difference = replay(written(tmp_path / "less", lines)).difference
    assert difference is not None
    assert difference.expected is None
    assert isinstance(difference.got, Grant)
    assert "expected: no action" in str(difference)
    lines = journal_of("asp")
    altered(lines, lambda a: isinstance(a, Grant), lambda a: [a, Track("k", 1.0, "extra")])
    difference = replay(written(tmp_path / "more", lines)).difference
    assert difference is not None
    assert (difference.got, difference.position) == (None, 3)
    assert "got:      no action" in str(difference)


def test_a_strategy_that_raises_on_an_event_is_a_difference(tmp_path: Path) -> None:
    unknown = decision(pushed(1.0, 7, 1), Grant(7, 8, 2, "go"))
    difference = replay(written(tmp_path / "j", [header(strategy="ssp"), unknown])).difference
    assert difference is not None
    assert difference.error is not None
    assert "got:      the strategy raised KeyError" in str(difference)


def test_decisions_are_counted_up_to_the_difference(tmp_path: Path) -> None:
    lines = journal_of("bsp")
    number = altered(lines, is_apply, lambda a: [msgspec.structs.replace(a, reason="because")])
    before = sum(isinstance(line, Decision) for line in lines[:number])
    assert replay(written(tmp_path / "j", lines)).decisions == before


def split_by_a_restore(spec: str) -> list[Line]:
    """The same run, but with a header that restores a snapshot in the middle."""
    strategy = strategies.build(spec, 0)
    lines: list[Line] = []
    for number, line in enumerate(journal_of(spec)):
        if number == 60:
            lines.append(header(strategy=spec, workers=4, snapshot=strategy.snapshot()))
        lines.append(line)
        if isinstance(line, Decision):
            strategy.handle(line.event)
    return lines


@pytest.mark.parametrize("spec", ["bsp", "ssp:staleness=inf", "dssp"])
def test_a_restore_goes_on_from_its_snapshot(tmp_path: Path, spec: str) -> None:
    lines = split_by_a_restore(spec)
    assert replay(written(tmp_path / "whole", lines)).difference is None
    restored = next(n for n, line in enumerate(lines) if isinstance(line, Header) and line.snapshot)
    assert replay(written(tmp_path / "rest", lines[restored:])).difference is None
    fresh = [msgspec.structs.replace(lines[restored], snapshot=None), *lines[restored + 1 :]]
    assert replay(written(tmp_path / "fresh", fresh)).difference is not None


def test_a_switch_of_strategy_goes_on_with_the_next_header(tmp_path: Path) -> None:
    lines = journal_of("asp") + journal_of("bsp")
    assert replay(written(tmp_path / "j", lines)).difference is None


class Drawing(Strategy):
    """Draws a number per event, and NaN on timers."""

    name = "drawing"
    rule = "draws"
    citation = "none"

    def handle(self, event: Event) -> list[Action]:
        value = math.nan if isinstance(event, TimerFired) else self.rng.random()
        return [Track("draw", value, "drawn"), Apply((1, 2), (value, 0.5), "drawn")]


def test_chance_is_reproduced_and_nan_equals_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "build_central", lambda spec, seed: Drawing(None, Random(seed)))
    strategy = Drawing(None, Random(3))
    events: list[Event] = [Joined(0.0, 0, 8), TimerFired(1.0, "t"), Joined(2.0, 1, 8)]
    decisions: list[Line] = [Decision(event, strategy.handle(event)) for event in events]
    path = written(tmp_path / "j", [header(seed=3), *decisions])
    assert replay(path) == replaying.Replay(3, None, complete=False)
    other = replay(written(tmp_path / "other-seed", [header(seed=4), *decisions]))
    assert other.difference is not None
    assert other.decisions == 1


def test_files_without_a_usable_header_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(JournalError, match="no header"):
        replay(tmp_path / "empty")
    headless = written(tmp_path / "headless", journal_of("bsp")[1:])
    with pytest.raises(JournalError, match="line 1: a decision before any header"):
        replay(headless)
    unknown = written(tmp_path / "unknown", [header(strategy="bps")])
    with pytest.raises(JournalError, match="'bps'; did you mean 'bsp'"):
        replay(unknown)
