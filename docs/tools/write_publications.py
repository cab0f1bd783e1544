"""Write what the publications claim beside what was measured: `python docs/tools/write_publications.py`.

The page docs/results/publications.md and what `paceline strategies` says, which the package has as a file. Claims are
in benchmarks/publications.toml; numbers come from benchmarks/results.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import publications  # noqa: E402

PAGE = ROOT / "docs" / "results" / "publications.md"
PACKAGED = ROOT / "src" / "paceline" / "cli" / "claims.json"


def pages() -> dict[Path, str]:
    """Return both files and their contents."""
    found = publications.read()
    return {PACKAGED: publications.packaged(found), PAGE: publications.page(found)}


if __name__ == "__main__":
    for path, contents in pages().items():
        path.write_text(contents, encoding="utf-8")
