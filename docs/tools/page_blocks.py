"""The blocks of the pages: commands, files to be saved, and what the tests make of them.

A block of shell is fenced as `sh`, every line a command, or as `console`, where commands follow a `$` and the rest is
what they print. A file is a fenced block whose paragraph before it says "Save this as `NAME`". A line in italics below
a block of shell tells readers and tests who runs it: `*Run by ...*` or `*Not run by the tests: why.*`; without such a
line the tests of the pages do. "*All commands of this page are run by ...*" says it for a whole page.
"""

import re
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
SHELLS = ("sh", "console")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
SAVED = re.compile(r"[Ss]ave (?:this|it) as `([\w.-]+)`[^`]*\Z")
NOT_RUN = re.compile(r"\A\n*\*Not run by the tests: (.+?)\*\n", re.S)
RUN_BY = re.compile(r"\A\n*\*Run by `(make walkthrough|tests/[\w/]+\.py)`.*?\*\n", re.S)
ALL_RUN_BY = re.compile(r"^\*All commands of this page are run by `(tests/[\w/]+\.py)`.*?\*$", re.M | re.S)
LOOKS_LIKE_SHELL = re.compile(r"^    \$? ?(?:paceline|python3?|pip|make|git|torchrun|docker) \S", re.M)


class Block(msgspec.Struct, frozen=True):
    """One fenced block of a page."""

    language: str
    text: str
    saved_as: str = ""
    run_by: str = ""
    not_run: str = ""

    @property
    def commands(self) -> list[str]:
        """Return the commands of a block of shell, a line each."""
        if self.language == "console":
            return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        if self.language == "sh":
            lines = self.text.replace("\\\n", " ").splitlines()
            return [line for line in lines if line.strip() and not line.startswith("#")]
        return []


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page in their order."""
    found = []
    of_page = ALL_RUN_BY.search(page)
    for match in FENCE.finditer(page):
        before, after = page[: match.start()].rpartition("\n\n```")[2], page[match.end() :]
        saved, not_run = SAVED.search(before), NOT_RUN.search(after)
        run_by = RUN_BY.search(after) or of_page
        found.append(
            Block(
                language=match[1],
                text=match[2],
                saved_as=saved[1] if saved else "",
                run_by=run_by[1] if run_by else "",
                not_run=" ".join(not_run[1].split()) if not_run else "",
            )
        )
    return found


def unfenced(page: str) -> list[str]:
    """Return indented lines that look like commands: nobody would run them."""
    return [line.strip() for line in LOOKS_LIKE_SHELL.findall(FENCE.sub("", page))]


def all_pages() -> list[Path]:
    """Return README and every page of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
