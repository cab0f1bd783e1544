"""`paceline check-strategy`: sound strategies pass, and each planted fault is named by the law it breaks."""

from pathlib import Path

import pytest

from paceline import strategies
from paceline.cli import main
from paceline.laws import clusters
from paceline.laws.check import check_strategy
from paceline.laws.purity import impurities_of

HEAD = """from paceline.strategies import Apply, Grant, Joined, Left, Pushed, SetTimer, TimerFired
from paceline.strategies.asp import Asp
from paceline.strategies.bsp import Bsp
from paceline.strategies.ssp import Ssp


"""
FAULTS = {
    "purity": "import time\nclass Mine(Bsp):\n    pass\n",
    "errors": (
        "class Mine(Bsp):\n"
        "    def handle(self, event):\n"
        "        return [1 / 0] if isinstance(event, Left) else super().handle(event)\n"
    ),
    "replay": (
        "COUNT = [0]\n"
        "class Mine(Asp):\n"
        "    def handle(self, event):\n"
        "        COUNT[0] += 1\n"
        "        actions = super().handle(event)\n"
        "        return [*actions, SetTimer(f'{COUNT[0]}', None, 'counted')] if COUNT[0] % 7 == 0 else actions\n"
    ),
    "snapshot": (
        "class Mine(Asp):\n"
        "    seen = 0\n"
        "    def handle(self, event):\n"
        "        self.seen += 1\n"
        "        actions = super().handle(event)\n"
        "        return [*actions, SetTimer('x', None, f'{self.seen} events')]\n"
    ),
    "progress": (
        "class Mine(Bsp):\n"
        "    def handle(self, event):\n"
        "        return [] if isinstance(event, Left) else super().handle(event)\n"
    ),
    "weights": (
        "class Mine(Asp):\n"
        "    def handle(self, event):\n"
        "        return [Apply(a.pushes, (-1.0,), a.reason) if isinstance(a, Apply) else a\n"
        "                for a in super().handle(event)]\n"
    ),
    "reasons": (
        "class Mine(Asp):\n"
        "    def handle(self, event):\n"
        "        return [Grant(a.worker, a.work, a.through, '') if isinstance(a, Grant) else a\n"
        "                for a in super().handle(event)]\n"
    ),
    "form": ("class Mine(Asp):\n    def handle(self, event):\n        return super().handle(event)[::-1]\n"),
}
ENDLESS = (
    "class Mine(Asp):\n"
    "    def handle(self, event):\n"
    "        again = [SetTimer('x', event.at, 'again')] if isinstance(event, Joined | TimerFired) else []\n"
    "        return super().handle(event) + again\n"
)


@pytest.mark.parametrize("name", strategies.names())
def test_what_comes_with_the_package_passes(name: str) -> None:
    spec = f"{name}:k=2" if name in ("fastest_k", "k_async") else name
    verdict = check_strategy(spec, clusters=8)
    assert verdict.breaches == []
    assert verdict.clusters == 8
    assert verdict.decisions > 100


@pytest.fixture(autouse=True)
def _ended_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that does not end is known as such by far fewer lines than a user's own is granted."""
    monkeypatch.setattr(clusters, "MAX_LINES", 5_000)


@pytest.mark.parametrize("law", FAULTS)
def test_a_planted_fault_is_named(law: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(HEAD + FAULTS[law])
    assert main(["check-strategy", "mine.py:Mine", "--clusters", "12"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("mine.py:Mine breaks ")
    assert f"\n  {law}" in out


def test_a_strategy_that_keeps_itself_busy_is_stopped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(HEAD + ENDLESS)
    assert main(["check-strategy", "mine.py:Mine", "--clusters", "1"]) == 1
    assert "the run does not end" in capsys.readouterr().out


def test_a_sound_one_is_said_to_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(HEAD + "class Mine(Ssp):\n    pass\n")
    assert main(["check-strategy", "mine.py:Mine:staleness=1", "--clusters", "5", "--seed", "3"]) == 0
    assert capsys.readouterr().out.startswith("mine.py:Mine:staleness=1 keeps the laws: 5 clusters, ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["dsap"], "did you mean 'dasp'"),
        (["nowhere.py:Mine"], "No such file"),
        (["gossip"], "trains without a server"),
        (["fastest_k:k=10"], "refuses every cluster of up to 9 workers"),
        (["bsp", "--clusters", "0"], "--clusters"),
    ],
)
def test_what_cannot_be_checked(
    arguments: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-strategy", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_files_beside_a_strategy_are_looked_at_too(folder: Path) -> None:
    (folder / "mine.py").write_text("from helping import later\n" + HEAD + "class Mine(Bsp):\n    pass\n")
    (folder / "helping.py").write_text("import math\nimport socket\n\n\ndef later() -> float:\n    return math.inf\n")
    assert impurities_of(strategies.machine_class("mine.py:Mine")) == ["helping.py, line 2: imports socket"]
