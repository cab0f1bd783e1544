"""From a fresh clone to a comparison on one's own scenario: README and the first tutorial, followed word by word.

    make walkthrough

The commands of the two pages are taken out of them and typed into one shell, in a clone of this commit, with a home and
caches of its own and no environment but what finds programs and packages. Files that a page has its readers save are
written where the shell stands. Reading and typing take no time here.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs" / "tools"))

import page_blocks  # noqa: E402
import results  # noqa: E402
import sources  # noqa: E402
from results import Verdict  # noqa: E402

PAGES = ("README.md", "docs/tutorials/first-run.md")
MINUTES = 15.0
KEPT = ("PATH", "LANG", "SSL_CERT_FILE")  # of the environment, with pip's own settings of where packages are
NOTES = """\
One machine, one try. `command` is as the page has it, in the order of README and docs/tutorials/first-run.md; the clone
and the home are new folders, and pip's cache is empty. Packages come from wherever pip is told to look.

The last lines that the comparison printed:

```text
{verdict}
```
"""


class Shell:
    """One bash that commands are typed into."""

    def __init__(self, folder: Path) -> None:
        home = folder / "home"
        home.mkdir()
        kept = {name: os.environ[name] for name in os.environ if name in KEPT or name.startswith("PIP_")}
        kept["PATH"] = os.pathsep.join(p for p in kept["PATH"].split(os.pathsep) if ".venv" not in Path(p).parts)
        configuration = Path.home() / ".config" / "pip"
        if configuration.is_dir():  # where packages are is no cache
            shutil.copytree(configuration, home / ".config" / "pip")
        environment = {**kept, "HOME": str(home), "PIP_CACHE_DIR": str(home / "cache"), "TERM": "dumb"}
        self._bash = subprocess.Popen(
            ["bash", "--norc"], cwd=folder, env=environment, bufsize=1, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, command: str) -> tuple[int, str]:
        """Type a command, wait for its end, and return its exit code and what it printed."""
        self._bash.stdin.write(f"{command}\necho; echo @@ $?\n")
        lines: list[str] = []
        for line in self._bash.stdout:
            if line.startswith("@@ "):
                return int(line.split()[1]), "".join(lines)
            lines.append(line)
        raise SystemExit(f"the shell ended at {command!r}:\n{''.join(lines)}")

    def save(self, name: str, text: str) -> None:
        """Write a file where the shell stands."""
        _, where = self.run("pwd")
        (Path(where.strip()) / name).write_text(text, encoding="utf-8")

    def end(self) -> None:
        """End the shell."""
        self._bash.stdin.close()
        self._bash.wait()


def follow(shell: Shell, python: str) -> tuple[list[dict[str, object]], str]:
    """Run the commands of the pages; return a row for each, and the last lines of the comparison."""
    rows: list[dict[str, object]] = []
    verdict = ""
    for page in PAGES:
        for block in page_blocks.blocks((ROOT / page).read_text(encoding="utf-8")):
            if block.saved_as:
                shell.save(block.saved_as, block.text)
            for command in [] if block.not_run else block.commands:
                typed = command.replace("<this repository>", str(ROOT)).replace("python3 -m venv", f"{python} -m venv")
                began = time.monotonic()
                code, out = shell.run(typed)
                seconds = round(time.monotonic() - began, 1)
                rows.append({"page": page, "command": command, "seconds": seconds, "code": code})
                print(f"{seconds:7.1f} s  {command}", flush=True)
                if code:
                    raise SystemExit(f"exit code {code} of {typed}:\n{out}")
                if command.startswith("paceline compare"):
                    verdict = "\n".join(line.rstrip() for line in out.strip().splitlines()[-16:])
    return rows, verdict


def main() -> int:
    """Follow the pages and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sources.add_options(parser)
    given = parser.parse_args()
    of = sources.checked(given, measured=(*sources.MEASURED, "README.md", "docs"))
    with tempfile.TemporaryDirectory(prefix="paceline-walkthrough-") as folder:
        shell = Shell(Path(folder))
        try:
            rows, verdict = follow(shell, sys.base_prefix + "/bin/python3")
        finally:
            shell.end()
    minutes = sum(float(str(row["seconds"])) for row in rows) / 60
    passed = Verdict("minutes from the clone to the comparison", f"{minutes:.1f}", f"< {MINUTES:g}", minutes < MINUTES)
    results.write("walkthrough", "python benchmarks/walkthrough.py", [passed], rows, NOTES.format(verdict=verdict), of)
    return 0 if passed.passed else 1


if __name__ == "__main__":
    sys.exit(main())
