"""A run that is followed: lines as they are written, and how far it is."""

import errno
import os
import threading

import pytest
from journals import decision, header, joined, observed, pushed, two_workers

from paceline.cli import main
from paceline.core.actions import Apply
from paceline.core.errors import JournalError
from paceline.records import Writer, following, journal_file
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


@pytest.fixture
def soon(monkeypatch):
    """Let a killed run be noticed at once; one that cannot be told from a silent one, never."""
    monkeypatch.setattr(following, "FREE_S", 0.0)
    monkeypatch.setattr(following, "LEFT_S", 0.0)
    monkeypatch.setattr(following, "SILENT_S", 1e9)


def killed(path, host=None):
    first, *others = two_workers()
    writer = Writer(path)
    writer.write(header(host=host) if host else first)
    for line in others[:-1]:
        writer.write(line)
    writer.close()  # without an end, and without its lock


def test_nobody_waits_for_a_killed_run(soon, tmp_path, capsys):
    killed(tmp_path / "journal.jsonl")
    assert main(["watch", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "bsp · sim · 2 workers" in out
    assert err.startswith("paceline: nobody writes '")
    assert f"its run has not ended: it was killed, or its machine is gone; `paceline report {tmp_path}` shows" in err
    assert err.count("\n") == 1


def test_nobody_waits_for_a_run_that_never_began(soon, tmp_path, capsys):
    (tmp_path / "journal.jsonl").touch()
    assert main(["watch", str(tmp_path)]) == 2
    assert "nobody writes" in (said := capsys.readouterr().err)
    assert said.endswith("and no run has begun in it\n")


def test_a_silent_run_is_followed_while_it_holds_its_journal(soon, tmp_path):
    path = tmp_path / "journal.jsonl"
    writer = Writer(path)
    writer.write(header())
    writer.flush()
    followed = grown(path, 0.0)
    assert [len(next(followed)) for _ in range(4)] == [1, 0, 0, 0]
    writer.close()
    assert list(followed) == []


def test_a_lock_that_is_free_for_a_moment_is_a_server_that_starts_again(monkeypatch, tmp_path):
    monkeypatch.setattr(following, "FREE_S", 0.0)
    monkeypatch.setattr(following, "LEFT_S", 1e9)
    path = tmp_path / "journal.jsonl"
    killed(path)
    with path.open("ab") as file:
        file.write(b'{"type":"observation","at":6.0,"wh')  # half a line, which is dropped
    followed = grown(path, 0.0)
    before = [*next(followed), *next(followed), *next(followed)]
    writer = Writer(path, append=True)
    writer.write(two_workers()[-1])
    writer.close()
    assert [*before, *next(followed)] == two_workers()


@pytest.mark.parametrize("kind", ["another machine", "no locks"])
def test_where_locks_say_nothing_silence_must_be_long(soon, tmp_path, monkeypatch, kind):
    def none(descriptor, what):
        raise OSError(errno.ENOLCK, "No locks available")

    path = tmp_path / "journal.jsonl"
    killed(path, "elsewhere" if kind == "another machine" else None)
    if kind == "no locks":
        monkeypatch.setattr(journal_file.fcntl, "flock", none)
    followed = grown(path, 0.0)
    assert [len(next(followed)) for _ in range(3)] == [len(two_workers()) - 1, 0, 0]
    monkeypatch.setattr(following, "SILENT_S", 0.0)
    assert list(followed) == []


def test_a_lock_that_was_seen_held_is_trusted_from_another_machine(soon, tmp_path):
    path = tmp_path / "journal.jsonl"
    writer = Writer(path)
    writer.write(header(host="elsewhere"))
    writer.flush()
    followed = grown(path, 0.0)
    assert [len(next(followed)) for _ in range(3)] == [1, 0, 0]
    writer.close()
    assert list(followed) == []


def test_a_journal_that_is_begun_anew_is_not_followed_into_the_next_run(tmp_path, capsys):
    path = tmp_path / "journal.jsonl"
    killed(path)
    followed = grown(path, 0.0)
    next(followed)
    Writer(path).close()
    with pytest.raises(JournalError, match="another run has begun to write .*: watch it again"):
        next(followed)


def test_a_run_takes_its_journal_while_somebody_looks_whether_it_is_written(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    killed(path)
    with path.open("rb") as looking:
        journal_file.fcntl.flock(looking, journal_file.fcntl.LOCK_SH)
        monkeypatch.setattr(journal_file.time, "sleep", lambda _: journal_file.fcntl.flock(looking, 8))
        Writer(path).close()


def test_a_run_is_replayed_by_its_folder_and_what_is_no_run_is_named(tmp_path, capsys):
    writer = Writer(tmp_path / "journal.jsonl")
    writer.write(header())
    writer.close()
    assert main(["replay", str(tmp_path)]) == 0
    assert "0 decisions replayed" in capsys.readouterr().out
    os.mkfifo(tmp_path / "pipe")
    for command in ("replay", "watch", "report"):
        assert main([command, str(tmp_path / "pipe")]) == 2
        assert "is neither a folder nor a file; give a run's folder, or a journal" in capsys.readouterr().err


def test_a_compressed_journal_cannot_be_followed(tmp_path, capsys):
    (tmp_path / "journal.jsonl.gz").write_bytes(b"")
    assert main(["watch", str(tmp_path)]) == 2
    assert "cannot be followed" in capsys.readouterr().err
