"""Runs of a comparison as commands of their own: `paceline run --json ...`, each with a folder, and kept for next time.

A finished run is used again if nothing has changed that it depends on: options and variables, the script and the Python
files beside it, a scenario's or a strategy's file, this package and torch. What a script imports from elsewhere, and
its data, are taken to be the same.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from paceline._version import __version__
from paceline.comparison.outcome import Trial
from paceline.core.errors import OptionError
from paceline.core.settings import PREFIX
from paceline.records import private_files
from paceline.records.report import Report

FOLDER = "compare"  # in the folder of runs
RESULT = "result.json"
GOOD = (0, 3)  # exit codes of a run with a report that says how it went; 3: the convergence guard has ended it
LOOK_S = 0.2  # between two looks whether another comparison is done with a run
LAST_LETTERS = 400  # of what a failed run said
_BEGIN = (
    "import sys\n"
    "from paceline.engines.local.prctl import interrupt_when_parent_dies\n"
    "interrupt_when_parent_dies()\n"
    "from paceline.cli import main\n"
    "sys.exit(main())"
)


class KeptTrial(msgspec.Struct, frozen=True):
    """How a run ended, in its folder's `result.json`."""

    code: int
    report: Report | None = None
    said: str = ""  # by one that failed


class Commands:
    """Makes each run by a command."""

    def __init__(
        self, options: Sequence[str], workload: Sequence[str], runs_dir: Path, at_once: int, *, fresh: bool = False
    ) -> None:
        """`options` are all but strategy, seed and folder; `workload` is the script with its arguments, or a task."""
        self.at_once = at_once
        self._options, self._workload = list(options), list(workload)
        self._folder = runs_dir / FOLDER
        self._fresh = fresh
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, trial: Trial) -> Trial:
        """Make this run, unless there is one already."""
        place = self._folder / self._digest(trial)
        kept = None if self._fresh else _kept(place)
        reused = kept is not None
        if kept is None:
            with self._alone(place):  # another comparison may be making the same run
                kept = None if self._fresh else _kept(place)
                reused = kept is not None
                kept = kept or (KeptTrial(130) if self._stopped else self._made(trial, place))
        if kept.code in GOOD and kept.report is not None:
            return msgspec.structs.replace(trial, report=kept.report, reused=reused)
        return msgspec.structs.replace(trial, failure=kept.said or f"it ended with exit code {kept.code}")

    def stop(self) -> None:
        """End the runs that are under way, and begin no other."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.send_signal(signal.SIGINT)

    def _words(self, trial: Trial) -> list[str]:
        own = ["--strategy", trial.strategy, "--seed", str(trial.seed)]
        sets = [word for name, value in trial.options.items() for word in ("--set", f"{name}={value}")]
        return ["run", "--json", *self._options, *own, *sets]

    @contextlib.contextmanager
    def _alone(self, place: Path) -> Iterator[None]:
        """Make the folder of a run and lock it, however long another process takes with it."""
        try:
            private_files.make_folder(place)
            descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(place, error) from error
        try:
            while not self._stopped and _is_taken(descriptor):
                time.sleep(LOOK_S)
            yield
        finally:
            os.close(descriptor)

    def _made(self, trial: Trial, place: Path) -> KeptTrial:
        try:
            for left in place.iterdir():  # of a run that was ended early
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        except OSError as error:
            raise _unusable(place, error) from error
        words = [*self._words(trial), "--runs-dir", os.fspath(place), *self._workload]
        with self._lock:
            if self._stopped:
                return KeptTrial(130)
            process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )  # fmt: skip
            self._running.add(process)
        try:
            out, said = process.communicate()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.communicate()  # it may still have much to say
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        words_said = said.decode(errors="replace").strip()[-LAST_LETTERS:]
        if process.returncode not in GOOD:
            return KeptTrial(process.returncode, None, words_said)
        found = KeptTrial(process.returncode, msgspec.json.decode(out, type=Report, strict=False))
        text = f'{{"code":{process.returncode},"report":{out.decode()}}}'  # as printed: JSON has no infinities
        private_files.write_text(place / RESULT, text)
        return found

    def _digest(self, trial: Trial) -> str:
        versions = [__version__, importlib.metadata.version("torch"), sys.version]
        variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(PREFIX))
        words = [*self._words(trial), *self._workload]
        parts = [os.fspath(Path.cwd()), *versions, *words, json.dumps(variables), *_files(words)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _unusable(place: Path, error: OSError) -> OptionError:
    return OptionError(f"--runs-dir: cannot make the folder {place}: {error.strerror}")


def _is_taken(descriptor: int) -> bool:
    """Take the lock of a folder, and return whether somebody else has it; some file systems have no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _kept(place: Path) -> KeptTrial | None:
    try:
        return msgspec.json.decode((place / RESULT).read_bytes(), type=KeptTrial, strict=False)
    except (OSError, msgspec.MsgspecError):
        return None


def _files(words: Sequence[str]) -> list[str]:
    """Return a digest of every file that the command names, and of the Python files beside a script."""
    found: dict[Path, str] = {}
    for word in words:
        name = Path(word.partition(".py:")[0] + ".py" if ".py:" in word else word)
        with contextlib.suppress(OSError, ValueError):
            if not name.is_file():
                continue
            beside = sorted(name.absolute().parent.glob("*.py")) if name.suffix == ".py" else [name.absolute()]
            for file in beside:
                found[file] = hashlib.sha256(file.read_bytes()).hexdigest()
    return [f"{file}={digest}" for file, digest in sorted(found.items())]


def written(given: Mapping[str, object]) -> list[str]:
    """Return settings that a command line gave as its words again."""
    from paceline.core.settings import SETTINGS

    words: list[str] = []
    for name, value in given.items():
        setting = SETTINGS[name]
        if value is True:
            words.append(setting.flag)
        elif value is False and setting.about.opposite:
            words.append(f"--{setting.about.opposite}")
        elif isinstance(value, list):
            words += [word for each in value for word in (setting.flag, str(each))]
        elif value is not None and value is not False:
            words += [setting.flag, str(value)]
    return words
