"""Each guarantee that the documentation gives names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "concepts").glob("guarantees*.md"))
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def guarantees(text: str) -> list[str]:
    """The points of its lists."""
    return re.findall(r"^- .*(?:\n  .*)*", text, re.M)


def lacking(text: str) -> list[str]:
    """Tests it names that are not there."""
    return [f"{file}::{name}" for file, name in NAMED.findall(text) if name not in defined_in(ROOT / file)]


def defined_in(file: Path) -> set[str]:
    if not file.exists():
        return set()
    found = ast.parse(file.read_text()).body
    return {node.name for node in found if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_guarantee_names_a_test_that_exists() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert len(guarantees(text)) > 15
    assert [point for point in guarantees(text) if not NAMED.search(point)] == []
    assert lacking(text) == []


def test_a_test_that_is_gone_is_noticed() -> None:
    here = "tests/unit/test_guarantees.py"
    text = f"- One.\n  `{here}::test_a_test_that_is_gone_is_noticed`\n  `{here}::lacking` `tests/gone.py::test_it`\n"
    assert lacking(text) == [f"{here}::lacking", "tests/gone.py::test_it"]
    assert len(guarantees(text)) == 1
