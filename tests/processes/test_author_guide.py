"""The guide for authors of strategies, followed word by word in an empty folder."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import warm_python

from paceline import strategies
from paceline.cli import main
from paceline.core import actions, events
from paceline.laws import clusters

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "howto" / "write-a-strategy.md").read_text(encoding="utf-8")
EXAMPLE = (ROOT / "examples" / "my_strategy.py").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", GUIDE, re.S)


def matches(expected: str, got: str) -> bool:
    """Equal, where `...` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("..."))
    return re.fullmatch(pattern, got.strip(), re.S) is not None


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_the_guide_does_what_it_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], warm: type[warm_python.Popen]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(clusters, "MAX_LINES", 5_000)  # the wrong one makes runs that do not end
    saved = re.findall(r"[Ss]ave (?:this|it) as `(\w+\.py)`", GUIDE)
    assert saved == ["my_strategy.py", "wrong.py"]
    commands = 0
    for kind, text in BLOCKS:
        if kind == "python" and "launch(" in text:
            done = warm_python.run([sys.executable, "-c", text])
            assert done.returncode == 0, done.stderr
            assert done.stdout == "my_strategy:Damped:power=1 40\n"
        elif kind == "python":
            (folder / saved.pop(0)).write_text(text, encoding="utf-8")
        elif kind == "console":
            for command, expected in re.findall(r"^\$ paceline (.*)\n((?:(?!\$ ).*\n)*)", text, re.M):
                commands += 1
                code = main(shlex.split(command))
                out, err = capfd.readouterr()
                assert matches(expected, out), f"{command}\n{out}{err}"
                assert code == (1 if "wrong.py" in command else 0), err
    assert not saved
    assert commands == 5


def test_the_example_of_the_guide_is_the_one_in_the_tree() -> None:
    assert next(text for kind, text in BLOCKS if kind == "python") == EXAMPLE
    assert len(EXAMPLE.splitlines()) < 40


def test_every_event_and_every_action_is_in_the_guide() -> None:
    for module, union in ((events, events.Event), (actions, actions.Action)):
        for cls in union.__args__:
            assert f"`{cls.__name__}" in GUIDE, cls
            assert getattr(strategies, cls.__name__) is getattr(module, cls.__name__)
            for field in cls.__struct_fields__:
                assert re.search(rf"\b{field}\b", GUIDE) or field == "stock", f"{cls.__name__}.{field}"


def test_a_wrong_output_would_be_noticed() -> None:
    assert matches("a ... c\n", "a b c")
    assert not matches("a ... c", "a b d")
    assert not matches("ab", "abc")
