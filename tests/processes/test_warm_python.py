"""A program from the warm interpreter is what `subprocess` would have started."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

pytestmark = [pytest.mark.usefixtures("nothing_left")]

FOUND = """
import json, os, signal, sys
open("found.json", "w").write(json.dumps({
    "argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "main": __name__, "stdin": sys.stdin.read(),
    "environment": dict(os.environ), "leads": os.getsid(0) == os.getpid(), "parent": os.getppid(),
    "descriptors": len(os.listdir("/proc/self/fd")), "handlers": [str(signal.getsignal(n)) for n in (1, 2, 3, 15)],
    "streams": [(s.encoding, s.errors, s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)],
}))
"""
ENDS = {
    "nothing": "print('out'); print('err', file=sys.stderr)",
    "code": "sys.exit(3)",
    "text": "sys.exit('why')",
    "error": "raise ValueError('why')",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); time.sleep(10)",
    "signal": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(10)",
}


def both(
    warm: type[warm_python.Popen], folder: Path, arguments: list[str], said: str = ""
) -> list[tuple[int, str, str]]:
    """How a program ends as a fresh interpreter and as a warm one: exit code, output, and the last line of errors."""
    ended = []
    for popen in (subprocess.Popen, warm):
        started = popen(
            [sys.executable, *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": "/nowhere", "OWN": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        with started as process:
            out, err = process.communicate(said)
        if (folder / "found.json").exists():
            out = (folder / "found.json").read_text()
            (folder / "found.json").unlink()
        ended.append((process.returncode, out, err.strip().split("\n")[-1]))
    return ended


@pytest.mark.parametrize("how", ["-c", "-m", "file"])
def test_it_finds_what_a_fresh_interpreter_finds(warm: type[warm_python.Popen], tmp_path: Path, how: str) -> None:
    (tmp_path / "found.py").write_text(FOUND)
    arguments = {"-c": ["-c", FOUND], "-m": ["-m", "found"], "file": ["found.py"]}[how]
    (code, found, _), (its, warmly, said) = both(warm, tmp_path, [*arguments, "--own", "argument"], "a line\n")
    assert (code, its) == (0, 0), said
    assert json.loads(warmly) == json.loads(found)
    assert json.loads(warmly)["parent"] == os.getpid()


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_a_fresh_interpreter(warm: type[warm_python.Popen], tmp_path: Path, end: str) -> None:
    fresh, its = both(warm, tmp_path, ["-c", f"import os, signal, sys, time\n{ENDS[end]}"])
    assert its == fresh


def test_it_can_be_killed_and_is_a_process_of_its_own(warm: type[warm_python.Popen]) -> None:
    code = "import time; print('there', flush=True); time.sleep(1000)"
    with warm([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as first:
        with warm([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as second:
            for process in (first, second):
                assert process.stdout is not None
                assert process.stdout.readline() == "there\n"
            first.kill()
            assert first.wait() == -signal.SIGKILL
            assert second.poll() is None
            second.terminate()
        assert second.returncode == -signal.SIGTERM


def test_another_program_is_refused(warm: type[warm_python.Popen]) -> None:
    with pytest.raises(AssertionError, match="only programs of this interpreter can be forked, not true"):
        warm(["true"])
