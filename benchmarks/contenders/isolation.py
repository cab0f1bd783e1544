"""Each contender runs in processes of its own, with its threads set, and none of them outlives its answer.

A contender may start daemons that leave its process group (Ray's do, and libp2p's). While it runs, this process adopts
the orphans among its descendants (Linux's child subreaper), so that whatever is left at the end can be found and ended.

    python -m contenders.isolation CONTENDER TASK_FILE ANSWER_FILE    # what `ask` starts
"""

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contenders.questions import QUESTIONS, Question

HOME = Path(__file__).parents[1]
LIMIT_S = 900.0  # no question takes a tenth of it; a contender that hangs must not hang the benchmark
PR_SET_CHILD_SUBREAPER = 36
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ContenderError(RuntimeError):
    """A contender ended without an answer."""


def ask(contender: str, question: Question, *, python: Path | str = sys.executable, limit_s: float = LIMIT_S) -> Any:
    """The contender's answer to the question."""
    with tempfile.TemporaryDirectory(prefix="contender-") as name, _orphans_ended():
        folder = Path(name)
        task, answer, log = folder / "task.json", folder / "answer.json", folder / "log.txt"
        task.write_text(json.dumps({"question": question.name, **dataclasses.asdict(question)}))
        command = [str(python), "-m", "contenders.isolation", contender, str(task), str(answer)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=_environment(question.threads, folder), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise ContenderError(
                    f"{contender} took more than {limit_s:g} s to {question.name}:\n{_tail(log)}"
                ) from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode or not answer.exists():
            raise ContenderError(
                f"{contender} could not {question.name} (exit code {process.returncode}):\n{_tail(log)}"
            )
        return question.answer(**json.loads(answer.read_text()))


def _environment(threads: int, folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    # This tree's sources, whatever is installed: the commit that a result names is this tree's.
    path = os.pathsep.join([str(HOME), str(HOME.parent / "src"), str(HOME.parent / "tests")])  # the last for netlab
    return environment | {"PYTHONPATH": path, "TMPDIR": str(folder)}


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])


@contextlib.contextmanager
def _orphans_ended() -> Iterator[None]:
    before = set(_descendants())
    _set_subreaper(True)
    asked_to_end = _on_terminate(lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        _end(before)
        _set_subreaper(False)
        _on_terminate(asked_to_end)


def _on_terminate(handler: Any) -> Any:
    """A SIGTERM must not leave a contender's processes alone; only the main thread may say so."""
    if threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGTERM, handler)
    return None


def _set_subreaper(on: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def _end(spared: set[int]) -> None:
    """Kill what was started since, until nothing is left: a dying process may still be starting others."""
    while left := [pid for pid in _descendants() if pid not in spared]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        young = children.get(waiting.pop(), [])
        found += young
        waiting += young
    return found


def _respond(contender: str, task: Path, answer: Path) -> None:
    given = json.loads(task.read_text())
    question = QUESTIONS[given.pop("question")](**given)
    module = importlib.import_module(f"contenders.{contender}")
    reply = getattr(module, question.name)(question)
    answer.write_text(json.dumps(dataclasses.asdict(reply)))


if __name__ == "__main__":
    _respond(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
