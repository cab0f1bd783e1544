"""A run that is followed: lines as they are written, and a screen that fits."""

import io
import threading

import pytest
from journals import decision, header, joined, observed, pushed, two_workers
from rich.console import Console

from paceline.cli import main
from paceline.core.actions import Apply, Cancel, Grant, Mark
from paceline.core.errors import JournalError
from paceline.core.events import Left
from paceline.records import Writer
from paceline.records.following import MOST_WORKERS, LiveView, grown


def screen(lines, width=140):
    view = LiveView()
    for line in lines:
        view.write(line)
    console = Console(file=io.StringIO(), width=width)
    console.print(view.drawn(width))
    return console.file.getvalue()


def test_a_growing_journal_is_read_line_by_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    writer = Writer(path)
    first, *others = two_workers()
    writer.write(first)
    writer.flush()
    followed = grown(path, 0.01)
    assert next(followed) == [first]
    with path.open("ab") as file:
        file.write(b'{"type":"observation","at":1.0,"wh')
    assert next(followed) == []
    with path.open("ab") as file:
        file.write(b'at":"phase"}\n')
    (line,) = next(followed)
    assert (line.at, line.what) == (1.0, "phase")
    for each in others:
        writer.write(each)
    writer.close()


def test_what_is_no_journal_is_named_with_its_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text("hello\n")
    with pytest.raises(JournalError, match="line 1 is not a line of a journal"):
        next(grown(path, 0.01))


def test_the_screen_has_a_line_for_each_worker_with_its_last_reason():
    lines = [
        header(workers=3),
        observed(0.0, "phase", phase=0, size=100, batch_size=8, epochs=2, sampling="epoch", rounds=10),
        *(joined(0.0, worker) for worker in range(3)),
        decision(
            pushed(1.0, 0, 1, compute_s=0.5, transfer_s=0.5), Mark(0, "fast", ""), Apply((1,), (1.0,), "one"),
            Grant(0, 16, 2, "it is twice as fast"),
        ),
        decision(pushed(2.0, 1, 2, compute_s=2.0, loss=0.25), Apply((2,), (1.0,), "one"), Cancel(2, "too late")),
        decision(Left(2.0, 2, "crash")),
        observed(2.0, "evaluation", version=2, samples_used=16, epoch=0.1, metrics={"accuracy": 0.75}),
    ]  # fmt: skip
    found = screen(lines).splitlines()
    assert "bsp · sim · 3 workers" in found[0]
    assert "accuracy 0.75" in found[0]
    assert "8%" in found[1]
    rows = [line.split() for line in found[3:]]
    assert rows[1] == ["0", "works", "1", "8", "0%", "0", "16", "fast", "it", "is", "twice", "as", "fast"]
    assert rows[2] == ["1", "waits", "1", "4", "0%", "1", "8", "-", "go"]
    assert rows[3] == ["2", "away", "0", "-", "-", "0", "8", "-", "left:", "crash"]
    narrow = screen(lines, 80)
    assert "twice" not in narrow
    assert max(map(len, narrow.splitlines())) <= 80


def test_many_workers_are_counted():
    found = screen([header(workers=100), *(joined(0.0, worker) for worker in range(100))])
    assert f"{100 - MOST_WORKERS} more" in found


def test_a_run_is_followed_to_its_end(tmp_path, capsys):
    path = tmp_path / "journal.jsonl"
    writer = Writer(path)
    first, *others = two_workers()
    writer.write(first)
    writer.flush()

    def go_on():
        for line in others:
            writer.write(line)
        writer.close()

    later = threading.Timer(0.3, go_on)
    later.start()
    assert main(["watch", str(tmp_path), "--every", "0.1"]) == 0
    later.join()
    assert "ended: limit" in capsys.readouterr().out


def test_a_compressed_journal_cannot_be_followed(tmp_path, capsys):
    (tmp_path / "journal.jsonl.gz").write_bytes(b"")
    assert main(["watch", str(tmp_path)]) == 2
    assert "cannot be followed" in capsys.readouterr().err
