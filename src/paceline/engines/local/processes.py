"""Child processes: fresh interpreters that lead process groups of their own and speak over private sockets.

Never forks: a fork would copy the threads' locks and the random state of whoever called `launch`. Nothing has a name in
the file system. Being a leader of its own session keeps a terminal's Ctrl-C from a child, and lets the launcher end it
together with whatever it started.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

from paceline.engines.local import scratch
from paceline.engines.local.output import Stage, Target, Transcript, Voice
from paceline.transport.base import Lost
from paceline.transport.frames import Channel

# The child imports what this process would, whatever its sys.path has become; -P keeps the current folder out of it.
_BEGIN = "import sys; sys.path[:] = {path!r}; from paceline.engines.local.child import main; main()"


class Process:
    """One child."""

    def __init__(self, name: str, stage: Stage, transcript: Transcript) -> None:
        self.name = name
        self.code: int | None = None  # how it ended, once it has
        ours, theirs = socket.socketpair()
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _BEGIN.format(path=import_path()), name, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},  # what a script prints is shown when it prints it
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours)
        self.handle = _handle(self.pid)
        self._transcript = transcript
        self.voices = [self._voice("stdout", stage), self._voice("stderr", stage)]

    @property
    def pid(self) -> int:
        """Its number, and that of its process group."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self.code is None

    @property
    def exited(self) -> bool:
        """Whether there is an exit to be dealt with; it stays a zombie until `bury`, so its number is its own."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.alive and os.waitid(os.P_PID, self.pid, flags) is not None

    def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Tell it something; whoever is gone hears nothing."""
        with contextlib.suppress(Lost):
            self.channel.send(data, descriptors)

    def signal(self, number: int) -> None:
        """To its whole process group."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS has the latter for zombies
                os.killpg(self.pid, number)

    def bury(self) -> int:
        """Its exit was noticed, or it is to end here and now: nothing of it, or of what it started, is left.

        That holds even if its last words cannot be shown: standard output may be a pipe that nobody reads any more.
        """
        if self.code is not None:
            return self.code
        group = scratch.group_of(self.pid)
        self.signal(signal.SIGKILL)
        self.code = self._popen.wait()
        with contextlib.ExitStack() as last_steps:  # all are taken, from the last to the first, whichever fails
            last_steps.callback(scratch.clear, self.pid, group)
            last_steps.callback(self._transcript.close)
            last_steps.callback(self.channel.close)
            if self.handle is not None:
                last_steps.callback(os.close, self.handle)
            for pipe in (self._popen.stdout, self._popen.stderr):
                if pipe is not None:
                    last_steps.callback(pipe.close)
            for voice in reversed(self.voices):
                last_steps.callback(voice.finish)
        return self.code

    def _voice(self, target: Target, stage: Stage) -> Voice:
        pipe = self._popen.stdout if target == "stdout" else self._popen.stderr
        show: Callable[[str], None] = lambda line: stage.show(f"[{self.name}] ", line, target)  # noqa: E731
        return Voice(pipe.fileno() if pipe is not None else -1, show, self._transcript)


def import_path() -> list[str]:
    """What a child is to import from."""
    return [folder for folder in sys.path if isinstance(folder, str)]


def end_own_group() -> NoReturn:
    """End this process and all that it started, here and now."""
    own = os.getpid()
    others = [process for process in scratch.group_of(own) if process != own]
    for process in others:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    scratch.clear(own, others)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)  # where it leads no group


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _handle(pid: int) -> int | None:
    """A descriptor that tells of the process's end; where there is none, one has to look from time to time."""
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
