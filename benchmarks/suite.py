"""The tests of `make check` under every Python at hand, and how much of the source they run through.

    python benchmarks/suite.py                                       # this interpreter: writes results/suite.md
    python benchmarks/suite.py --pythons ~/v312/bin/python ~/v313/bin/python    # and these

An interpreter's environment needs torch and the extras `all` and `dev`; this tree's `src` is put on its path. Coverage
is measured with this interpreter, in a run of its own, in the tests' own processes and in those that they start
as fresh interpreters; a process that is forked or killed tells nothing.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results
import sources

ROOT = Path(__file__).parents[1]
COMMAND = "python benchmarks/suite.py"
PYTEST = ("-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-m", "not slow")
AGAIN = ("-m", "pytest", "-q", "-p", "no:xdist", "--last-failed")
VERSIONS = "import platform, torch; print(platform.python_version(), torch.__version__)"
SETTINGS = """
[run]
branch = False
parallel = True
source = paceline
data_file = {folder}/coverage
sigterm = True

[report]
ignore_errors = True
"""  # errors: copies of the source that a test made are gone by the time of the report


def main() -> int:
    """Run them and write the result."""
    parser = argparse.ArgumentParser(description="run the tests under several Pythons and write their dated result")
    parser.add_argument("--pythons", nargs="+", default=[], metavar="PATH", help="further interpreters")
    sources.add_options(parser)
    given = parser.parse_args()
    # A shell lets what it starts in the background ignore Ctrl-C, and some of these tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    of = sources.checked(given, measured=(*sources.MEASURED, "tests"))
    rows = [run(python) for python in (sys.executable, *given.pythons)]
    covered = coverage()
    verdicts = [
        results.Verdict(
            f"failures under Python {row['python']}, alone", str(row["failed again, alone"]), "= 0", row["code"] == 0
        )
        for row in rows
    ]
    notes = f"""
The tests that are not marked slow (`make check`), two at a time; those of CUDA are skipped where there is none. What
fails is run again alone, one test after the other: on a busy machine a process may be slower than a test waits for.
They pass through {covered:.1%} of the lines of `src`. Lines that only forked or killed processes pass through count as
not covered.
"""
    print(results.write("suite", COMMAND, verdicts, rows, notes, of))
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def run(python: str) -> dict[str, Any]:
    """One run of the tests."""
    asked = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True, cwd=ROOT)
    version, torch = asked.stdout.split()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        cache = ("-o", f"cache_dir={name}")
        code, text = _tests([python, *PYTEST, *cache], {})
        seconds = round(time.monotonic() - began)
        counts = _counted(text)
        failed = again = _failures(counts)
        if failed:
            code, text = _tests([python, *AGAIN, *cache], {})
            again = _failures(_counted(text))
    row = {"python": version, "torch": torch, "passed": counts.get("passed", 0), "skipped": counts.get("skipped", 0)}
    return {**row, "failed": failed, "failed again, alone": again, "seconds": seconds, "code": code}


def _counted(text: str) -> dict[str, int]:
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text)}


def _failures(counts: dict[str, int]) -> int:
    return counts.get("failed", 0) + counts.get("error", 0)


def coverage() -> float:
    """The share of the source's lines that a run of the tests passes through."""
    with tempfile.TemporaryDirectory() as name:
        settings = Path(name) / "settings"
        settings.write_text(SETTINGS.format(folder=name))
        measured = [sys.executable, "-m", "coverage"]
        _tests([*measured, "run", f"--rcfile={settings}", *PYTEST], {"COVERAGE_PROCESS_START": str(settings)})
        for step in (["combine"], ["report", "--format=total", "--precision=1"]):
            asked = subprocess.run([*measured, *step, f"--rcfile={settings}"], capture_output=True, text=True, cwd=ROOT)
            if asked.returncode:
                raise SystemExit(f"coverage {step[0]} failed: {asked.stderr or asked.stdout}")
        return float(asked.stdout) / 100


def _has_this_tree(python: str) -> bool:
    """Whether paceline is this tree's there without being told."""
    where = "import paceline; print(paceline.__file__)"
    asked = subprocess.run([python, "-c", where], capture_output=True, text=True, cwd=tempfile.gettempdir())
    return Path(asked.stdout.strip() or "/").is_relative_to(ROOT)


def _tests(command: list[str], settings: dict[str, str]) -> tuple[int, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
    if not _has_this_tree(command[0]):
        environment["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout[-400:], flush=True)
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
