"""The long tests, all of them: `make soak`. Its dated result says how many ran and how they ended.

python benchmarks/soak.py                              # writes results/soak.md and .json
python benchmarks/soak.py tests/processes/test_local_faults.py  # some: writes results/soak_test_local_faults.md

"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import results
import sources

ROOT = Path(__file__).parents[1]
COMMAND = "python benchmarks/soak.py"


def main() -> int:
    """Run them and write the result."""
    parser = argparse.ArgumentParser(description="run the long tests and write their dated result")
    parser.add_argument("tests", nargs="*", help="files of tests; all, if none is named")
    sources.add_options(parser)
    given = parser.parse_args()
    of = sources.checked(given, measured=(*sources.MEASURED, "tests"))
    began, only = time.monotonic(), given.tests
    # A shell lets what it starts in the background ignore Ctrl-C, and some of these tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = ["-m", "pytest", "-v", "-m", "slow or soak", "-n", "2", "--dist", "worksteal", "--durations=25"]
    with subprocess.Popen(
        [sys.executable, *arguments, *only],
        cwd=ROOT,
        env={**os.environ, "PACELINE_SOAK": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as pytest:
        assert pytest.stdout is not None
        said = []
        for line in pytest.stdout:
            print(line, end="", flush=True)
            said.append(line)
    code, text = pytest.returncode, "".join(said)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text)}
    durations = re.findall(r"^\s*([\d.]+)s call\s+(\S+)", text, re.MULTILINE)
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    verdict = results.Verdict("failures", str(counts.get("failed", 0) + counts.get("error", 0)), "= 0", code == 0)
    notes = (
        f"{counts.get('passed', 0)} tests passed, {counts.get('failed', 0)} failed, {counts.get('skipped', 0)} skipped "
        f"in {time.monotonic() - began:.0f} s. The laws run with 20 times the usual examples.\n"
        + "".join(f"\n- failed: `{name}`" for name in failures)
    )
    rows = [{"test": f"`{name}`", "seconds": float(seconds)} for seconds, name in durations]
    question = "_".join(["soak", *(Path(name).stem for name in only)])
    print(results.write(question, " ".join([COMMAND, *only]), [verdict], rows, notes, of))
    return code


if __name__ == "__main__":
    sys.exit(main())
