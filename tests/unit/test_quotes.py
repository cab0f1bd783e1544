"""Pages say what the dated results say."""

import pytest

import quote


@pytest.mark.parametrize("page", quote.PAGES)
def test_tables_are_those_of_the_results(page):
    text = (quote.ROOT / page).read_text()
    assert quote.BLOCK.search(text), f"{page} quotes nothing"
    assert quote.quoted(text) == text, "run `python benchmarks/quote.py`"


def test_a_changed_number_is_noticed():
    text = (quote.ROOT / "README.md").read_text()
    head, table, tail = text.partition("| `balanced` |")
    assert quote.quoted(head + table.replace("balanced", "unbalanced") + tail) == text
