"""Child processes: forks of a nursery, or fresh interpreters, each with its own session and a private control socket.

Never forks of this process: they would copy the locks and random state of the program that called `launch`. What they
name in the file system is in the run's private folder. Leading its own session shields a child from the terminal's
Ctrl-C, and lets the launcher end it together with all that it started.
"""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from paceline.engines.local import nursery as nurseries
from paceline.engines.local import scratch
from paceline.engines.local.nursery import Nursery, import_path
from paceline.engines.local.output import Console, Target, Transcript, Voice
from paceline.transport.base import Lost
from paceline.transport.shm import Channel

_BEGIN = "import sys; sys.path[:] = {path!r}; from paceline.engines.local.prctl import begin_fresh as main; main()"


class RunProcess(Protocol):
    """A process of a run: a child of the launcher, or one on another machine, which somebody there has started."""

    name: str
    pid: int  # also the id of its process group; 0: not a child of the launcher
    shares_memory: bool  # with the server

    @property
    def alive(self) -> bool: ...

    @property
    def voices(self) -> Sequence[Voice]: ...

    def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None: ...

    def warn(self, text: str, *, show: bool) -> None: ...

    def signal(self, number: int) -> None: ...

    def reap(self) -> int: ...


class Process:
    """One child process."""

    pid: int  # also the id of its process group
    shares_memory = True

    def __init__(
        self, name: str, stage: Console, transcript: Transcript, nursery: Nursery | None = None,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        """Start it, from the nursery if there is a usable one; `folder` is the run's temporary folder."""
        self.name = name
        self.folder = folder
        self.code: int | None = None  # exit code, once reaped
        self._transcript = transcript
        self._stage = stage
        self._popen: subprocess.Popen[bytes] | None = None  # of a fresh interpreter
        self._outputs: list[int] = []
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            inputs = []
            for _ in range(2):
                reader, writer = os.pipe()
                ours.callback(os.close, reader)
                theirs.callback(os.close, writer)
                self._outputs.append(reader)
                inputs.append(writer)
            born = None if nursery is None else nursery.start(name, *inputs)
            if born is None:
                control, self._popen = _fresh(name, *inputs)
                self.pid = self._popen.pid
            else:
                self.pid, control = born
            ours.pop_all()
        self.channel = Channel(control)
        self.handle = _handle(self.pid)
        self.voices: Sequence[Voice] = [self._voice("stdout", stage), self._voice("stderr", stage)]

    @property
    def alive(self) -> bool:
        return self.code is None

    @property
    def exited(self) -> bool:
        """Whether it has exited and awaits `reap`; until then it is a zombie, so its pid is not reused."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.alive and os.waitid(os.P_PID, self.pid, flags) is not None

    def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send it a message; a no-op if it is gone."""
        with contextlib.suppress(Lost):
            self.channel.send(data, descriptors)

    def warn(self, text: str, *, show: bool) -> None:
        """Log a warning of this process, and show it if asked to."""
        self._transcript.write(f"{text}\n".encode(errors="replace"))
        if show:
            for line in text.splitlines():
                self._stage.show(f"[{self.name}] ", line, "stderr")

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for zombies
                os.killpg(self.pid, number)

    def reap(self) -> int:
        """Kill the process if it still runs, with all that it started, clean up after it, and return its exit code.

        Cleans up even if its last output cannot be shown: standard output may be a pipe that nobody reads any more.
        """
        if self.code is not None:
            return self.code
        group = scratch.group_of(self.pid)
        self.signal(signal.SIGKILL)
        self.code = self._popen.wait() if self._popen is not None else _wait(self.pid)
        nurseries.reap_group(self.pid)
        with contextlib.ExitStack() as last_steps:  # runs all of them, last to first, whichever fails
            last_steps.callback(scratch.clear, self.folder, self.pid, group)
            last_steps.callback(self._transcript.close)
            last_steps.callback(self.channel.close)
            if self.handle is not None:
                last_steps.callback(os.close, self.handle)
            for pipe in self._outputs:
                last_steps.callback(os.close, pipe)
            for voice in reversed(self.voices):
                last_steps.callback(voice.finish)
        return self.code

    def _voice(self, target: Target, stage: Console) -> Voice:
        show: Callable[[str], None] = lambda line: stage.show(f"[{self.name}] ", line, target)  # noqa: E731
        return Voice(self._outputs[0 if target == "stdout" else 1], show, self._transcript)


def _fresh(name: str, stdout: int, stderr: int) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """Start a fresh interpreter; return it with the launcher's end of its control socket."""
    ours, theirs = socket.socketpair()
    try:
        return ours, subprocess.Popen(
            [*nurseries.command(_BEGIN.format(path=import_path())), name, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=nurseries.environment(),
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()


def _wait(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # the caller's SIGCHLD handler reaped it; `subprocess` returns 0 then, too
        return 0


def end_own_group() -> NoReturn:
    """Kill this process and all that it started, and remove its files: the launcher is gone."""
    own = os.getpid()
    others = [process for process in scratch.group_of(own) if process != own]
    for process in others:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    scratch.abandon(others)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)  # if it leads no group


def _handle(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process exits; None where the loop has to poll."""
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
