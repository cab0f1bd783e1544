"""Rows that are kept: under what they depend on, and measured anew when that has changed."""

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec

import kept_rows
from kept_rows import Kept, behaviour, key_of, learning
from paceline import scenario
from paceline.core.actions import Grant
from paceline.strategies.asp import Asp

CLUSTER = scenario.parse(
    '[compute]\nseconds_per_sample = 0.01\njitter = "lognormal:0.1"\n'
    "[[workers]]\ncount = 2\n[[workers]]\nspeed = 0.5\n",
    "three",
    Path(),
)


class Counter:
    """Measures, and counts how often."""

    def __init__(self, **row: Any) -> None:
        self.count = 0
        self._row = row

    def __call__(self) -> dict[str, Any]:
        self.count += 1
        return {**self._row, "number": self.count}


def test_a_row_is_measured_once_also_by_the_next_call(tmp_path: Path) -> None:
    measure = Counter(a=1)
    assert Kept("q", "abc", tmp_path).row("k", measure) == {"a": 1, "number": 1, "key": "k", "commit": "abc"}
    assert Kept("q", "def", tmp_path).row("k", measure)["commit"] == "abc"  # where it was measured
    assert measure.count == 1


def test_a_row_that_is_not_good_enough_is_replaced(tmp_path: Path) -> None:
    measure = Counter()
    Kept("q", "abc", tmp_path).row("k", measure)
    kept = Kept("q", "abc", tmp_path)
    assert kept.row("k", measure, good=lambda row: row["number"] > 1)["number"] == 2
    assert Kept("q", "abc", tmp_path).row("k", measure)["number"] == 2  # of two with one key the later counts


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps({"key": "k", "number": 7}) + '\n{"key": "l", "num')
    kept = Kept("q", "abc", tmp_path)
    assert kept.row("k", Counter())["number"] == 7
    assert kept.row("l", Counter())["number"] == 1


def test_a_result_has_the_rows_that_were_asked_for_and_the_same_rows_are_the_same_bytes(tmp_path: Path) -> None:
    kept, file = Kept("q", "abc", tmp_path), tmp_path / "q.rows.jsonl.gz"
    kept.row("old", Counter())
    asking = Kept("q", "abc", tmp_path)
    asking.row("k", Counter())
    asking.save(file)
    first = file.read_bytes()
    asking.save(file)
    assert file.read_bytes() == first
    assert [json.loads(line)["key"] for line in gzip.decompress(first).splitlines()] == ["k"]
    elsewhere = Kept("q", "def", tmp_path / "empty", committed=file)
    measure = Counter()
    assert elsewhere.row("k", measure)["commit"] == "abc"
    assert measure.count == 0


def test_a_line_of_the_last_call_that_was_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"key": "l", "num')
    Kept("q", "abc", tmp_path).row("k", Counter())
    measure = Counter()
    Kept("q", "abc", tmp_path).row("k", measure)
    assert measure.count == 0


def test_keys_differ_by_whatever_is_asked() -> None:
    assert key_of("race", 0.1, ("a", 1)) == key_of("race", 0.1, ["a", 1])
    assert len({key_of("race", 0.1), key_of("race", 0.2), key_of("cost", 0.1)}) == 3


def test_behaviour_is_what_is_decided_and_when_and_not_how_it_is_said(monkeypatch: Any) -> None:
    asp = behaviour("asp", CLUSTER, 4, 60)
    assert behaviour("asp", CLUSTER, 4, 60) == asp
    assert behaviour("ssp:staleness=inf", CLUSTER, 4, 60) == asp  # one identity of the strategies
    assert behaviour("ssp:staleness=0", CLUSTER, 4, 60) != asp
    assert behaviour("asp", CLUSTER, 4, 64) != asp
    decide = Asp.handle
    reworded = msgspec.structs.replace
    monkeypatch.setattr(
        Asp, "handle", lambda self, event: [reworded(each, reason="why not") for each in decide(self, event)]
    )
    assert behaviour("asp", CLUSTER, 4, 60) == asp
    monkeypatch.setattr(Asp, "handle", lambda self, event: decide(self, event)[::-1])
    assert behaviour("asp", CLUSTER, 4, 60) != asp


def test_a_field_that_nobody_sets_changes_no_behaviour() -> None:
    plain = Grant(1, 4, 2, "reason one")
    assert kept_rows._bare(plain) == kept_rows._bare(msgspec.structs.replace(plain, reason="two"))
    assert "extends" not in kept_rows._bare(plain)[1]
    assert kept_rows._bare(msgspec.structs.replace(plain, extends=7))[1]["extends"] == 7


def test_learning_is_what_training_ends_with() -> None:
    plain = learning("linreg", "asp", CLUSTER, {"lr": 1e-4})
    assert learning("linreg", "asp", CLUSTER, {"lr": 1e-4}) == plain
    assert learning("linreg", "asp", CLUSTER, {"lr": 2e-4}) != plain
