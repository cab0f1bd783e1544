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


def tuned(side, reached, seconds, settings=""):
    return {"side": side, "settings": settings, "seed": 100, "tuning": True, "reached_s": reached, "seconds": seconds}


def test_a_race_whose_tuning_gave_up_soon_says_so():
    rows = [{"side": "asp", "to_target_s": None}, tuned("asp", 10.0, 10.2), tuned("asp", None, 12.5),
            tuned("bsp", None, 5.0), tuned("bsp", 4.0, 4.1)]  # fmt: skip
    assert quote.given_up_at(rows) == 1.25  # bsp's was not given up for another
    assert "at 1.25 times the best so far" in quote._hasty(rows)
    assert "that `asp` missed the target" in " ".join(quote._hasty(rows).split())
    rows[2] = tuned("asp", None, 30.1)
    assert quote._hasty(rows) == ""
    assert quote._hasty(rows[:2]) == ""
