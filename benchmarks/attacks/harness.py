"""What every attack needs: a tree of the source to attack, programs that run in it, and what came of a trial."""

import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
STRANGER = 23_001  # a user id that nobody has


class Trial(msgspec.Struct, frozen=True):
    """One attempt: whether paceline held, and what was seen."""

    held: bool
    what: str
    kills: int = 0  # of processes


class Ended(msgspec.Struct, frozen=True):
    """How a program ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def said(self) -> str:
        """All that it wrote."""
        return self.out + self.err


class Target(msgspec.Struct, frozen=True):
    """A tree of the source, and a folder in which an attempt may write; every user can read both.

    The victim is whoever runs the attack.
    """

    source: Path
    folder: Path
    popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen  # how programs are started

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a program of this tree."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
        return {
            **kept,
            "PYTHONPATH": str(self.source / "src"),
            "OMP_NUM_THREADS": "1",
            "HOME": str(self.folder),
            **more,
        }

    def start(
        self,
        *arguments: str,
        program: Sequence[str] = ("-m", "paceline"),
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> subprocess.Popen[str]:
        """Start `python -m paceline` (or another program of Python) in the folder, in a session of its own.

        `before` runs in the new process, for limits.
        """
        return self.popen(
            [sys.executable, *program, *arguments],
            cwd=self.folder,
            env=self.environment(**(environment or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=before,
        )

    def run(
        self,
        *arguments: str,
        program: Sequence[str] = ("-m", "paceline"),
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
        timeout: float = 120,
    ) -> Ended:
        """Run it to its end. One that takes longer than `timeout` seconds is killed; its code is then -9."""
        return finish(self.start(*arguments, program=program, environment=environment, before=before), timeout)


def finish(started: subprocess.Popen[str], timeout: float = 120) -> Ended:
    """Wait for the end of a program, and kill it with its session if it takes too long."""
    began = time.monotonic()
    try:
        out, err = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(started)
        out, err = started.communicate()
    return Ended(started.returncode, out, err, time.monotonic() - began)


def kill(started: subprocess.Popen[str]) -> None:
    """Kill a program and all of its session that still has its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)


class Attack(msgspec.Struct, frozen=True):
    """One attack: what it does, how often, and an attempt."""

    name: str
    what: str  # one sentence: what the attacker does
    attempt: Callable[[Target, int], Trial]  # with a seed: 0, 1, ...
    trials: int
    before: int = 1  # attempts against the commit before the mend, of which one must succeed; 0: there was none to mend
    root: bool = False  # needs to become other users
    kills: int = 0  # of processes, in all attempts together, at least


@contextlib.contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """The source of a commit, in a folder that every user can read."""
    with scratch("tree") as folder:
        packed = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield folder


@contextlib.contextmanager
def this_tree() -> Iterator[Path]:
    """The source as it is now, in a folder that every user can read."""
    with scratch("tree") as folder:
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        yield folder


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A folder for one attempt, removed after it."""
    folder = Path(tempfile.mkdtemp(prefix=f"attack-{name}-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def stranger(act: Callable[[Connection], None]) -> Iterator[Connection]:
    """Another user of this host, who acts in a forked process while the block lasts, and can send what was found.

    The one who attacks must be root, to become somebody else.
    """
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=_as_stranger, args=(act, there), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        process.kill()
        process.join()
        here.close()


def _as_stranger(act: Callable[[Connection], None], there: Connection) -> None:
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    act(there)


def attempts(
    attack: Attack, source: Path, seeds: Sequence[int], popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen
) -> list[Trial]:
    """Try it with each seed against a tree. `popen` starts the programs of the tree."""
    found = []
    for seed in seeds:
        with scratch(attack.name) as folder:
            found.append(attack.attempt(Target(source, folder, popen), seed))
    return found
