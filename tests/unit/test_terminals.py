"""A closed terminal costs what it would have shown, and nothing else."""

import errno
import io
import os
import pty
import signal

import pytest

from paceline.cli.streams import say, termination_as_interrupt
from paceline.engines.local.output import Console
from paceline.records import terminals


class Broken(io.StringIO):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def write(self, text):
        raise OSError(self.number, os.strerror(self.number))


def test_what_a_closed_terminal_does_not_show_is_not_missed(monkeypatch):
    monkeypatch.setattr("sys.stderr", Broken(errno.EIO))
    Console().show("[server] ", "a line", "stderr")
    say("a line")


def test_a_broken_pipe_is_still_an_error(monkeypatch):
    monkeypatch.setattr("sys.stderr", Broken(errno.EPIPE))
    with pytest.raises(BrokenPipeError):
        Console().show("[server] ", "a line", "stderr")


def test_only_terminals_are_left(monkeypatch, tmp_path):
    ours, theirs = pty.openpty()
    file = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    monkeypatch.setattr(terminals, "STANDARD", (theirs, file))
    os.close(ours)  # the terminal's window is closed
    with pytest.raises(OSError, match="Input/output error"):
        os.write(theirs, b"lost")
    terminals.leave_terminal()
    os.write(theirs, b"nowhere")
    os.write(file, b"kept")
    os.close(theirs)
    os.close(file)
    assert (tmp_path / "out").read_bytes() == b"kept"


@pytest.mark.parametrize(("before", "inside"), [(signal.SIG_DFL, signal.default_int_handler), (signal.SIG_IGN, None)])
def test_a_hangup_ends_a_run_unless_it_is_ignored(before, inside):
    outside = signal.signal(signal.SIGHUP, before)
    try:
        with termination_as_interrupt():
            assert signal.getsignal(signal.SIGHUP) is (inside or before)
            assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, outside)
