"""What each strategy says in scripted conversations, word for word; `pytest --rewrite` writes the answers down."""

from pathlib import Path

import pytest
from conversations import answered, titles

from paceline import strategies

SCENARIOS = Path(__file__).parents[1] / "scenarios"
EVERYWHERE = ("plain", "joins", "leaves", "crash", "refused")  # what each transcript must have a conversation on


@pytest.mark.parametrize("name", strategies.names())
def test_transcript(name: str, request: pytest.FixtureRequest) -> None:
    file = SCENARIOS / f"{name}.txt"
    text = file.read_text(encoding="utf-8")
    actual = answered(text, file.name)
    if request.config.getoption("--rewrite"):
        file.write_text(actual, encoding="utf-8")
        return
    assert actual == text, f"{file.name} is not what {name} answers: if it is right, run pytest with --rewrite"


@pytest.mark.parametrize("name", strategies.names())
def test_every_strategy_is_heard_on_everything(name: str) -> None:
    about = " ".join(titles((SCENARIOS / f"{name}.txt").read_text(encoding="utf-8"))).lower()
    assert [word for word in EVERYWHERE if word not in about] == []


def test_there_is_no_transcript_of_nothing() -> None:
    assert sorted(file.stem for file in SCENARIOS.glob("*.txt")) == sorted(strategies.names())


TALK = "== two\nstrategy bsp\n0 join w0 w1 8\n1 push w0\n2 push w1 samples=4\n"


def test_answers_stand_below_what_happened() -> None:
    lines = answered(TALK, "talk").splitlines()
    assert lines[5] == "1 push w0"
    assert lines[6] == "    nothing"
    assert lines[8].startswith("    apply p1*0.6667 + p2*0.3333 | round 1 ends")
    assert answered("\n".join(lines) + "\n", "talk").splitlines() == lines


def test_a_changed_answer_is_noticed() -> None:
    text = answered(TALK, "talk")
    assert answered(text.replace("0.6667", "0.5"), "talk") == text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("3 push w7", "w7 has no grant"),
        ("3 dance w0", "dance is nothing that can happen"),
        ("3 timer barrier", "does not ring at 3 s"),
        ("later", "a line is `TIME WHAT"),
    ],
)
def test_an_impossible_script_is_refused_with_its_line(line: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"talk, line 6: '{line}': .*{says}"):
        answered(TALK + line, "talk")
