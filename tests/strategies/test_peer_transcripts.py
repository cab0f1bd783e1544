"""What each peer machine says in scripted conversations, word for word; `pytest --rewrite` writes the answers down."""

from pathlib import Path

import pytest
from conversations import answered, titles
from peer_conversations import PeerTalk

from paceline import strategies

SCENARIOS = Path(__file__).parents[1] / "scenarios" / "peers"
EVERYWHERE = ("plain", "joins", "leaves", "alone", "restored")  # what each transcript must have a conversation on


@pytest.mark.parametrize("name", strategies.peer_names())
def test_transcript(name: str, request: pytest.FixtureRequest) -> None:
    file = SCENARIOS / f"{name}.txt"
    text = file.read_text(encoding="utf-8")
    actual = answered(text, file.name, PeerTalk)
    if request.config.getoption("--rewrite"):
        file.write_text(actual, encoding="utf-8")
        return
    assert actual == text, f"{file.name} is not what {name} answers: if it is right, run pytest with --rewrite"


@pytest.mark.parametrize("name", strategies.peer_names())
def test_every_machine_is_heard_on_everything(name: str) -> None:
    about = " ".join(titles((SCENARIOS / f"{name}.txt").read_text(encoding="utf-8"))).lower()
    assert [word for word in EVERYWHERE if word not in about] == []


def test_there_is_no_transcript_of_nothing() -> None:
    assert sorted(file.stem for file in SCENARIOS.glob("*.txt")) == sorted(strategies.peer_names())


def test_an_impossible_script_is_refused_with_its_line() -> None:
    with pytest.raises(ValueError, match="talk, line 2: '1 dance n0': dance is nothing that can happen"):
        answered("strategy gossip\n1 dance n0\n", "talk", PeerTalk)
