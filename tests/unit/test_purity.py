"""The law of imports: events, actions <- strategies <- coordinator <- engines <- cli, and strategies are pure.

Purity is read off the source, so that a line which no test runs is found too. A strategy has no clock, no chance of its
own, no sockets, no tensors and no logging.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.laws.purity import imports, impurities, within

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
HEAVY = ("torch", "numpy", "ray", "zmq", "plotly", "starlette", "rich", "typer")


def modules(*places: str) -> list[Path]:
    """Source files at these places, files or folders."""
    paths = [SOURCE / place for place in places]
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))


def imported_from(file: Path) -> set[str]:
    package = ".".join(("paceline", *file.relative_to(SOURCE).parts[:-1]))
    return {name for _, name in imports(ast.parse(file.read_text(encoding="utf-8")), package)}


PURE = [file for file in modules("strategies") if file.name != "sources.py"]  # which finds classes and decides nothing


@pytest.mark.parametrize("file", PURE, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_strategies_are_pure(file: Path) -> None:
    assert impurities(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import time", "imports time"),
        ("from datetime import datetime", "imports datetime.datetime"),
        ("import logging", "imports logging"),
        ("import torch", "imports torch"),
        ("import numpy as np", "imports numpy"),
        ("from os import environ", "imports os.environ"),
        ("import sys", "imports sys"),
        ("from paceline.server.coordinator import Coordinator", "imports paceline.server.coordinator.Coordinator"),
        ("from paceline.core import ledger", "imports paceline.core.ledger"),
        ("from ..model import store", "imports paceline.model.store"),
        ("import random\nx = random.random()", "random.random is randomness"),
        ("from random import shuffle", "imports random.shuffle"),
        ("print('hello')", "print() is an effect"),
        ("def f():\n    import socket", "imports socket"),
        ("x = 0\ndef f():\n    global x", "state outside"),
    ],
)
def test_a_planted_impurity_is_caught(line: str, says: str) -> None:
    sound = (SOURCE / "strategies" / "bsp.py").read_text(encoding="utf-8")
    assert [impurity for impurity in impurities(f"{sound}\n{line}\n") if says in impurity]


def test_machines_of_nodes_are_looked_at_too() -> None:
    looked_at = {file.relative_to(SOURCE).as_posix() for file in modules("strategies")}
    assert {f"strategies/peers/{name}.py" for name in ("gossip", "elastic", "trigger", "partners")} <= looked_at


def test_what_a_strategy_may_use_is_let_through() -> None:
    assert (
        impurities("import random\nfrom math import inf\n\ndef f(rng: random.Random) -> float:\n    return inf") == []
    )


# What may not be imported where; the arrows of the law point from right to left.
FORBIDDEN = [
    (("core/events.py", "core/actions.py", "core/errors.py"), ("paceline",)),
    (
        ("core/peer_events.py", "core/peer_actions.py"),
        ("torch", "numpy", "paceline.strategies", "paceline.records.journal"),
    ),
    (
        ("core/ledger.py", "records/journal.py", "records/metrics.py", "records/replay.py"),
        ("torch", "paceline.server.coordinator", "paceline.engines"),
    ),
    (
        ("server/coordinator.py", "server/workers.py", "model/store.py"),
        ("paceline.engines", "paceline.cli", "paceline.session"),
    ),
    (("engines", "transport"), ("paceline.cli",)),
    (("transport",), ("paceline.tables", "paceline.peers", "paceline.worker", "paceline.server", "paceline.engines")),
]


@pytest.mark.parametrize(("places", "forbidden"), FORBIDDEN, ids=lambda value: value[0])
def test_imports_follow_the_arrows(places: tuple[str, ...], forbidden: tuple[str, ...]) -> None:
    files = modules(*places)
    assert files
    wrong = {file.name: {name for name in imported_from(file) if within(name, forbidden)} for file in files}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_nothing_but_the_cli_imports_the_cli() -> None:
    others = [file for file in modules("") if "cli" not in file.parts and file.name != "__main__.py"]
    assert [file.name for file in others if any(within(name, ("paceline.cli",)) for name in imported_from(file))] == []


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has after the statement."""
    code = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import paceline",
        "from paceline import strategies; [strategies.strategy_class(n) for n in strategies.names()]",
        "from paceline import strategies; [strategies.peer_class(n) for n in strategies.peer_names()]",
    ],
)
def test_importing_loads_nothing_heavy(statement: str) -> None:
    assert loaded_by(statement) & set(HEAVY) == set()
