"""The file of a journal: what is not overwritten, who may write, and what is left where a disk is full."""

import contextlib
import errno
import gzip
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from full_disks import writer_with_room
from journals import header, observed

from paceline.core.errors import JournalError, StorageError
from paceline.records import journal_file
from paceline.records.journal import Line, Writer, read
from paceline.records.journal_file import open_locked, require_usable
from paceline.records.journal_tail import JournalTail

LINES = [header(), *[observed(float(n), "note", text=os.urandom(40).hex()) for n in range(3000)]]


def tried(path: Path) -> str | None:
    """Return what a run that is told to write there is told; None if it may."""
    try:
        require_usable(path)
        Writer(path).close()
    except JournalError as error:
        return str(error)
    return None


OTHERS = {
    "script": b"print('mine')\n", "other json": b'{"type": "other"}\n', "bracket": b"{", "zeros": b"\0" * 100,
    "archive": gzip.compress(b"an archive"), "empty parts": gzip.compress(b"") * 5, "magic": b"\x1f\x8bnot really",
    "other line": gzip.compress(b'{"type":"obser'),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", ["x.jsonl", "x.tar.gz"])
def test_what_is_no_journal_is_left_as_it_is(tmp_path: Path, kind: str, name: str) -> None:
    path, contents = tmp_path / name, OTHERS[kind]
    path.write_bytes(contents)
    assert tried(path) == f"{path} exists and is no journal: it is not overwritten; choose another --journal"
    assert path.read_bytes() == contents


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_a_journal_is_overwritten_also_one_that_was_cut(tmp_path: Path, name: str) -> None:
    writer = Writer(tmp_path / name)
    for line in LINES:
        writer.write(line)
    writer.close()
    whole = (tmp_path / name).read_bytes()
    for length in (len(whole), 100, 10, 0):
        (tmp_path / name).write_bytes(whole[:length])
        assert tried(tmp_path / name) is None


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    require_usable(tmp_path / "j.jsonl")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(JournalError, match="cannot write journal .*: it is a device, not a file; choose another"):
        require_usable(Path("/dev/null"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(JournalError, match="it is a named pipe, not a file"):
        require_usable(tmp_path / "pipe")


def _hold(path: Path, there: Connection) -> None:
    with_lines = Writer(path, append=True)
    with_lines.write(header())
    with_lines.flush()
    there.send(None)
    there.recv()


@pytest.mark.parametrize("name", ["j.jsonl", "j.jsonl.gz"])
def test_a_second_run_is_refused_until_the_first_is_gone_however_it_ends(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    Writer(path).close()
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=_hold, args=(path, there), daemon=True)
    process.start()
    here.recv()
    before = path.read_bytes()
    assert tried(path) == f"another run writes the journal {str(path)!r}: wait for its end, or choose another --journal"
    with pytest.raises(JournalError, match="another run writes"):
        Writer(path, append=True)
    assert path.read_bytes() == before
    process.kill()
    process.join()
    process.close()
    here.close()
    there.close()
    assert tried(path) is None


def test_a_file_that_took_the_place_of_the_one_that_was_opened_is_locked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "j", journal_file._lock

    def replaced(descriptor: int, where: Path) -> None:
        monkeypatch.setattr(journal_file, "_lock", lock)
        (tmp_path / "other").touch()
        (tmp_path / "other").replace(path)
        lock(descriptor, where)

    monkeypatch.setattr(journal_file, "_lock", replaced)
    held = open_locked(path)
    with pytest.raises(JournalError, match="another run writes"):
        open_locked(path)
    held.close()
    open_locked(path).close()


def test_a_file_system_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, what: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(journal_file.fcntl, "flock", none)
    assert tried(tmp_path / "j") is None


def write_all(path: Path) -> None:
    writer = Writer(path)
    try:
        for line in LINES:
            writer.write(line)
        writer.close()
    except StorageError:
        with pytest.raises(StorageError):  # again, and not in another way
            writer.write(LINES[0])
        raise
    finally:
        writer.close()


@pytest.mark.parametrize("name", ["j.jsonl", "j.jsonl.gz"])
@pytest.mark.parametrize("room", [0, 1, 5000, 70_000, 120_000])
def test_where_a_disk_is_full_the_journal_is_cut_and_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, room: int
) -> None:
    """Also when there is room again: what would follow has a gap before it."""
    with monkeypatch.context() as patched:
        patched.setattr(journal_file.os, "write", writer_with_room(room, afterwards=10**9))
        with pytest.raises(StorageError, match="cannot write journal .*: No space left on device; free some space"):
            write_all(tmp_path / name)
    assert (tmp_path / name).stat().st_size <= room
    found = list(read(tmp_path / name))
    assert found == LINES[: len(found)]
    assert len(found) < len(LINES)


# -- lines that a killed writer had not passed on ---------------------------------------------------------------------


def killed_in(path: Path, tail: Path, lines: list[Line], *, append: bool = False, flushed: int = 0) -> None:
    """Let a process write these lines and be killed, when it has flushed some of them."""
    child = os.fork()
    if not child:
        try:
            writer = Writer(path, append=append, tail=JournalTail(tail))
            for number, line in enumerate(lines, 1):
                writer.write(line)
                if number == flushed:
                    writer.flush()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_no_line_of_killed_writers_is_missing_in_a_journal_that_is_continued(tmp_path: Path, name: str) -> None:
    path, tail = tmp_path / name, tmp_path / "tail"
    killed_in(path, tail, LINES[:300], flushed=200)
    killed_in(path, tail, LINES[300:600], append=True, flushed=7)
    killed_in(path, tail, LINES[600:2900], append=True)  # more than are kept, so that some are flushed by their size
    writer = Writer(path, append=True, tail=JournalTail(tail))
    assert list(read(path)) == LINES[:2900]
    for line in LINES[2900:]:
        writer.write(line)
    writer.close()
    assert list(read(path)) == LINES


def test_a_writer_that_is_killed_while_it_flushes_leaves_no_line_twice(tmp_path: Path) -> None:
    path, tail = tmp_path / "x.jsonl", tmp_path / "tail"
    killed_in(path, tail, LINES[:100], flushed=50)
    behind = JournalTail(tail).beyond(path.stat().st_size)
    for written in (0, 1, len(behind) // 2, len(behind)):  # of what was to be flushed
        other = tmp_path / f"{written}.jsonl"
        other.write_bytes(path.read_bytes() + behind[:written])
        again = tmp_path / f"{written}.tail"
        again.write_bytes(tail.read_bytes())
        Writer(other, append=True, tail=JournalTail(again)).close()
        assert list(read(other)) == LINES[:100]


def test_a_tail_of_another_journal_adds_nothing(tmp_path: Path) -> None:
    killed_in(tmp_path / "x.jsonl", tmp_path / "tail", LINES[:100], flushed=50)
    other = tmp_path / "other.jsonl"
    with contextlib.closing(Writer(other)) as writer:
        writer.write(LINES[0])
    Writer(other, append=True, tail=JournalTail(tmp_path / "tail")).close()
    assert list(read(other)) == LINES[:1]
    Writer(other, tail=JournalTail(tmp_path / "tail")).close()
    assert list(read(other)) == []


def test_a_tail_needs_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        JournalTail(tmp_path / "tail")
