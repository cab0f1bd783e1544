"""The pages of docs: short, and where a script writes them, written by it last."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TOOLS = DOCS / "tools"
MOST_WORDS = 1_500  # of a page that is not reference
LISTS = ("publications.md",)  # of claims, which are looked up
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "reference" and page.name not in LISTS]


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_is_read_in_one_go(page: Path) -> None:
    assert words(page.read_text(encoding="utf-8")) <= MOST_WORDS, "split it by need, or move lists to reference"


def stale(made: dict[Path, str]) -> list[str]:
    """Files that are not what a script makes of them."""
    return [path.name for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


@pytest.mark.parametrize("script", ["write_pictures", "write_results"])
def test_what_a_script_makes_is_committed(script: str) -> None:
    made = runpy.run_path(str(TOOLS / f"{script}.py"))["pages"]()
    assert stale(made) == [], "run `make pages`"
    folder = next(iter(made)).parent
    assert set(folder.glob("*.svg")) <= set(made), "left over from a result or a picture that is gone"


def test_the_list_of_commands_is_that_of_the_command_line() -> None:
    written = runpy.run_path(str(TOOLS / "write_commands.py"))
    assert stale({written["PAGE"]: written["page"]()}) == [], "run `make pages`"


def test_every_result_page_has_date_commit_machine_and_caveats() -> None:
    for page in sorted((DOCS / "results").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if page.name not in ("index.md", *LISTS) and "There is no result yet" not in text:
            assert " UTC · commit " in text, page.name
            assert "\n## What to keep in mind\n\n- " in text, page.name
            assert f"]({page.stem}.svg)" in text, f"{page.name} has no plot"


def test_a_change_by_hand_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text("<svg/>", encoding="utf-8")
    made = {tmp_path / "a.svg": "<svg></svg>", tmp_path / "b.svg": ""}
    assert stale(made) == ["a.svg", "b.svg"]
