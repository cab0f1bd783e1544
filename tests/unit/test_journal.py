"""The journal's file format: what is written is what is read, and what cannot be read is refused by name."""

import errno
import gzip
import io
import math
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from journals import decision, header, observed, pushed

from paceline.core.actions import Apply, Cancel, Discard, Grant, Mark, SetTimer, Track
from paceline.core.errors import JournalError
from paceline.core.events import Applied, Joined, Left, TimerFired
from paceline.records import journal
from paceline.records.journal import Decision, Header, Line, Lines, Observation, Tee, Writer, read

EVERY_KIND: list[Line] = [
    header(strategy="ssp:staleness=2", options={"target": None}, scenario={"seed": 7}, versions={"paceline": "0.1"}),
    decision(Joined(0.0, 0, 8), Grant(0, 8, 1, "w0 joins"), Mark(0, "SYNC", "measured"), Track("k", 3.0, "start")),
    decision(pushed(1.5, 0, 1, norm=0.25, loss=2.5), Apply((1,), (0.5,), "at once"), Grant(0, 8, 2, "more", 1)),
    decision(Applied(1.5, 1, (1,), 0.5, -0.125, 0.25, 2.5), SetTimer("late", 9.5, "T"), SetTimer("old", None, "gone")),
    decision(TimerFired(9.5, "late"), Discard(2, "late"), Cancel(0, "late"), Track("s", 1.0, "score", 0)),
    decision(Left(10.0, 0, "crash")),
    observed(10.0, "evaluation", version=1, metrics={"accuracy": 0.5}),
    observed(10.0, "end", cause="done", versions=1),
]


def written(path: Path, lines: list[Line]) -> Path:
    writer = Writer(path)
    for line in lines:
        writer.write(line)
    writer.close()
    return path


@pytest.mark.parametrize("name", ["journal.jsonl", "journal.jsonl.gz"])
def test_every_kind_of_line_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "deeper" / name, EVERY_KIND)
    assert list(read(path)) == EVERY_KIND
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    numbers = [1 / 3, 1e-300, 5e-324, 1.7976931348623157e308, 123456789.12345679, -0.0]
    lines: list[Line] = [decision(pushed(1.0, 0, 1, loss=number)) for number in numbers]
    back = [line.event.loss for line in read(written(tmp_path / "j", lines))]  # type: ignore[union-attr]
    assert [number.hex() for number in back] == [number.hex() for number in numbers]


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "make",
    [
        lambda number: decision(pushed(1.0, 0, 1, loss=number)),
        lambda number: decision(pushed(1.0, 0, 1, norm=number)),
        lambda number: decision(Applied(1.0, 1, (1,), 1.0, number)),
        lambda number: decision(Applied(1.0, 1, (1,), 1.0, None, number)),
        lambda number: decision(Applied(1.0, 1, (1,), 1.0, None, None, number)),
        lambda number: decision(TimerFired(1.0, "t"), Track("bound", number, "no bound")),
        lambda number: decision(TimerFired(1.0, "t"), Apply((1, 2), (0.5, number), "weights")),
        lambda number: decision(TimerFired(1.0, "t"), SetTimer("late", number, "never")),
    ],
)
def test_non_finite_numbers_are_strings_in_the_file_and_numbers_again_after_reading(
    tmp_path: Path, number: float, make: Any
) -> None:
    line = make(number)
    path = written(tmp_path / "j", [line])
    assert f'"{number}"' in path.read_text()
    (back,) = read(path)
    assert repr(back) == repr(line)


def test_non_finite_numbers_deep_in_data_are_strings(tmp_path: Path) -> None:
    lines: list[Line] = [
        header(snapshot={"state": {"bound": math.inf, "times": [math.nan, 1.0]}}),
        observed(1.0, "evaluation", metrics={"loss": math.nan, "accuracy": 0.5}),
    ]
    first, second = read(written(tmp_path / "j", lines))
    assert isinstance(first, Header)
    assert first.snapshot == {"state": {"bound": "inf", "times": ["nan", 1.0]}}
    assert isinstance(second, Observation)
    assert second.data["metrics"] == {"loss": "nan", "accuracy": 0.5}


def test_overflowing_sum_of_finite_numbers_is_written_as_numbers(tmp_path: Path) -> None:
    line = decision(pushed(1.0, 0, 1, norm=1.7e308, loss=1.7e308))
    assert list(read(written(tmp_path / "j", [line]))) == [line]


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "j", EVERY_KIND)
    whole = path.read_bytes()
    for cut in (1, 2, 30):
        path.write_bytes(whole[:-cut])
        assert list(read(path)) == EVERY_KIND[:-1]
    path.write_bytes(b"")
    assert list(read(path)) == []


def test_a_compressed_journal_of_a_killed_run_is_read_up_to_the_cut(tmp_path: Path) -> None:
    many = EVERY_KIND[:1] + EVERY_KIND[1:-1] * 400 + EVERY_KIND[-1:]
    path = written(tmp_path / "j.gz", many)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    lines = list(read(path))
    assert 10 < len(lines) < len(many)
    assert lines == many[: len(lines)]


def test_a_reader_sees_what_was_flushed_while_the_run_goes_on(tmp_path: Path) -> None:
    for name in ("j", "j.gz"):
        writer = Writer(tmp_path / name)
        for line in EVERY_KIND[:3]:
            writer.write(line)
        writer.flush()
        assert list(read(tmp_path / name)) == EVERY_KIND[:3]
        writer.close()
        writer.close()


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "j", EVERY_KIND)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3][:40] + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(JournalError, match=r"j, line 4 is not a line of a journal"):
        list(read(path))


@pytest.mark.parametrize("text", [b"\x1f\x8bnot really", b"plain text\n"])
def test_a_file_that_is_not_compressed_as_its_name_says_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "j.gz").write_bytes(text)
    with pytest.raises(JournalError, match=r"j\.gz cannot be read as a journal"):
        list(read(tmp_path / "j.gz"))


def test_damaged_compressed_bytes_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "j.gz", EVERY_KIND)
    damaged = bytearray(path.read_bytes())
    damaged[12:20] = b"\xff" * 8
    path.write_bytes(bytes(damaged))
    with pytest.raises(JournalError, match=r"j\.gz"):
        list(read(path))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(JournalError, match="cannot open journal"):
            list(read(path))


@pytest.mark.parametrize("beyond", [{}, {"seed": {"of": "another shape"}}])
def test_a_newer_format_is_refused_by_name(tmp_path: Path, beyond: dict[str, Any]) -> None:
    """Also where the rest of the header is of a shape this version does not know."""
    data = {**msgspec.to_builtins(header()), "format": journal.FORMAT + 1, **beyond}
    (tmp_path / "j").write_bytes(msgspec.json.encode(data) + b"\n")
    with pytest.raises(JournalError, match=rf"format {journal.FORMAT + 1}.*up to {journal.FORMAT}.*newer paceline"):
        list(read(tmp_path / "j"))


def test_unknown_fields_of_the_same_format_are_passed_over(tmp_path: Path) -> None:
    data = {**msgspec.to_builtins(header()), "colour": "red"}
    (tmp_path / "j").write_bytes(msgspec.json.encode(data) + b"\n")
    assert list(read(tmp_path / "j")) == [header()]


@pytest.mark.parametrize("name", ["j", "j.gz"])
def test_equal_runs_make_equal_bytes_however_slowly_they_are_written(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = EVERY_KIND * 300
    quick = written(tmp_path / "a" / name, lines).read_bytes()
    monkeypatch.setattr(journal, "FLUSH_SECONDS", 1e-4)
    assert written(tmp_path / "b" / name, lines).read_bytes() == quick


@pytest.mark.parametrize("name", ["j", "j.gz"])
def test_what_was_written_is_flushed_although_nothing_follows(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "FLUSH_SECONDS", 1e-3)
    writer = Writer(tmp_path / name)
    lines = [header(started="2025-01-01T00:00:00Z"), EVERY_KIND[1]]
    for line in lines:
        writer.write(line)
    while list(read(tmp_path / name)) != lines:
        time.sleep(1e-3)
    writer.close()


@pytest.mark.parametrize("name", ["j", "j.gz"])
def test_a_writer_leaves_no_thread(tmp_path: Path, name: str) -> None:
    written(tmp_path / name, [header(started="2025-01-01T00:00:00Z"), EVERY_KIND[1]])
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline-journal"]


class FullDisk(io.BytesIO):
    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def on_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> Writer:
    """Return a writer whose thread failed to write the header."""
    monkeypatch.setattr(journal, "FLUSH_SECONDS", 1e-3)
    writer = Writer(path)
    monkeypatch.setattr(writer, "_file", FullDisk())
    writer.write(header(started="2025-01-01T00:00:00Z"))
    while writer._failure is None:
        time.sleep(1e-3)
    return writer


def test_lines_that_were_lost_after_the_last_write_are_an_error_of_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = on_a_full_disk(tmp_path / "j", monkeypatch)
    with pytest.raises(JournalError, match="cannot write journal .*j: No space left on device; free some space"):
        writer.close()
    writer.close()
    assert writer._raw.closed


def test_a_failure_that_a_write_has_raised_is_not_raised_again_by_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = on_a_full_disk(tmp_path / "j", monkeypatch)
    for raises in (lambda: writer.write(EVERY_KIND[1]), writer.flush):
        with pytest.raises(JournalError, match="No space left"):
            raises()
    writer.close()
    assert writer._raw.closed


def test_sinks_with_equal_lines_are_told_apart() -> None:
    one, other = Lines(), Lines()
    Tee(one, observations=other).write(EVERY_KIND[-1])
    assert (len(one), len(other)) == (1, 1)
    Tee(one, observations=one).write(EVERY_KIND[-1])
    assert len(one) == 2


def test_nothing_of_the_machine_is_in_the_compressed_file(tmp_path: Path) -> None:
    path = written(tmp_path / "telling-name.gz", EVERY_KIND)
    data = path.read_bytes()
    assert data[4:8] == b"\0\0\0\0"
    assert b"telling-name" not in data
    assert gzip.decompress(data).count(b"\n") == len(EVERY_KIND)


def test_lines_in_memory_are_a_sink(tmp_path: Path) -> None:
    lines = Lines()
    for line in EVERY_KIND:
        lines.write(line)
    assert lines == EVERY_KIND
    assert isinstance(lines[1], Decision)


def test_a_push_of_an_older_journal_has_no_queueing_times(tmp_path: Path) -> None:
    line = decision(pushed(1.5, 0, 1), Grant(0, 8, 2, "more"))
    plain = msgspec.to_builtins(line)
    for name in ("queued_down_s", "queued_up_s"):
        assert plain["event"].pop(name) is None
    path = tmp_path / "old.jsonl"
    path.write_bytes(
        msgspec.json.encode(msgspec.to_builtins(EVERY_KIND[0])) + b"\n" + msgspec.json.encode(plain) + b"\n"
    )
    assert list(read(path))[1] == line
