"""A run that is followed: lines as they are written, and how far it is."""

import threading

import pytest
from journals import decision, header, joined, observed, pushed, two_workers

from paceline.cli import main
from paceline.core.actions import Apply
from paceline.core.errors import JournalError
from paceline.records import Writer
from paceline.records.following import Followed, grown
from paceline.records.live_view import LiveView


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


def test_how_far_it_is_comes_from_the_journal_alone():
    view = LiveView()
    followed = Followed(view)
    phase = {"batch_size": 8, "sampling": "epoch", "rounds": 10}
    for line in [
        header(workers=1),
        observed(0.0, "phase", phase=0, size=100, epochs=2, **phase),
        joined(0.0, 0),
        decision(pushed(1.0, 0, 1, loss=0.5, samples=40), Apply((1,), (1.0,), "one")),
        observed(1.0, "evaluation", version=1, samples_used=40, epoch=0.1, metrics={"accuracy": 0.75}),
    ]:
        followed.write(line)
    followed.look(10.0)
    assert view.line() == "1.0 s · version 1 · 20% · 40 samples/s · accuracy 0.75 · loss 0.5"
    followed.write(decision(pushed(2.0, 0, 2, loss=0.25, samples=60, read_version=1), Apply((2,), (1.0,), "one")))
    followed.look(11.5)
    assert view.line() == "2.0 s · version 2 · 50% · 60 samples/s · 2 s left · accuracy 0.75 · loss 0.25"
    followed.write(observed(2.0, "phase", phase=1, size=50, epochs=1, **phase))
    followed.look(12.0)
    assert view.standing.total == 150


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
