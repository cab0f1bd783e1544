"""Replay reproduces every journal: of light workers and of scripts, under any strategy and whatever befell the run."""

from pathlib import Path

import msgspec
import pytest

import paceline
from paceline import strategies
from paceline.core.actions import Apply, Grant
from paceline.laws.checker import check
from paceline.laws.clusters import ClusterPlan, play
from paceline.records import journal
from paceline.records.journal import Decision, Header, Line, Observation, Writer
from paceline.records.replay import replay
from paceline.scenario import Scenario, parse
from paceline.tasks import get

SPECS = {
    "dssp": "dssp:lower=1,upper=4",
    "fastest_k": "fastest_k:k=2",
    "k_async": "k_async:k=2",
    "adaptive_k": "adaptive_k:burn_in=3,threshold=1",
    "adaptive_k_load": "adaptive_k_load:window=3,burn_in=3",
}
CLUSTER = """
seed = 5
[compute]
seconds_per_sample = 0.01
jitter = "lognormal:0.2"
[network]
latency_ms = 5
[[workers]]
count = 3
[[workers]]
speed = 0.25
[[events]]
kind = "crash"
worker = 1
at = 1.0
[[events]]
kind = "slow"
worker = 2
at = 1.5
for = 1.0
factor = 5.0
[[events]]
kind = "reorder"
at = 0.0
share = 0.2
[[events]]
kind = "rejoin"
worker = 1
at = 2.0
[[events]]
kind = "join"
at = 2.5
"""
PLAN = ClusterPlan(CLUSTER, work=16, seed=4, size=None, epochs=1.0, refused=0.05, max_versions=80, model_bytes=0)


def written(path: Path, lines: list[Line]) -> Path:
    writer = Writer(path)
    for line in lines:
        writer.write(line)
    writer.close()
    return path


def scenario() -> Scenario:
    return parse(CLUSTER, "troubled", Path())


def decisions(lines: list[Line]) -> int:
    return sum(isinstance(line, Decision) for line in lines)


@pytest.mark.parametrize("name", strategies.names())
@pytest.mark.parametrize("size", [None, 500])
def test_journals_of_light_workers(tmp_path: Path, name: str, size: int | None) -> None:
    spec = SPECS.get(name, name)
    plan = msgspec.structs.replace(PLAN, size=size)
    lines = play(strategies.build(spec, plan.seed), plan)
    found = replay(written(tmp_path / "light.jsonl.gz", lines))
    assert (found.decisions, found.difference) == (decisions(lines), None)


@pytest.mark.parametrize("spec", ["balanced", "dasp", "fastest_k:k=3", "adaptive_k_load:window=3,burn_in=2"])
def test_journals_of_scripts(tmp_path: Path, spec: str) -> None:
    path = tmp_path / "script.jsonl"
    settings = {"strategy": spec, "max_versions": 30, "journal": path, "seed": 3}
    paceline.launch(get("digits"), engine="sim", scenario=scenario(), **settings)
    lines = list(journal.read(path))
    found = replay(path)
    assert (found.decisions, found.difference) == (decisions(lines), None)
    broken = check(lines)
    assert not broken, "\n".join(map(str, broken))


def test_a_journal_of_two_strategies(tmp_path: Path) -> None:
    path = tmp_path / "diverging.jsonl"
    options = {"lr": "300"}
    paceline.launch(
        get("digits"),
        engine="sim",
        strategy="fastest_k:k=3",
        on_divergence="bsp",
        options=options,
        max_versions=80,
        journal=path,
    )
    lines = list(journal.read(path))
    assert [line.strategy for line in lines if isinstance(line, Header)] == ["fastest_k:k=3", "bsp"]
    assert replay(path).difference is None
    assert not check(lines)


@pytest.mark.parametrize("spec", ["bsp", "ssp", "balanced"])
def test_every_sample_of_a_script_is_settled_once(tmp_path: Path, spec: str) -> None:
    path = tmp_path / "epoch.jsonl"
    run = paceline.launch(get("digits"), engine="sim", scenario=scenario(), strategy=spec, epochs=1, journal=path)
    lines = list(journal.read(path))
    broken = check(lines)
    assert not broken, "\n".join(map(str, broken))
    phase = next(line for line in lines if isinstance(line, Observation) and line.what == "phase")
    end = lines[-1]
    assert isinstance(end, Observation)
    assert (run.ended, run.summary.samples_used) == ("done", phase.data["size"])
    assert end.data["samples_used"] == phase.data["size"]


def journal_of(spec: str) -> list[Line]:
    return list(play(strategies.build(spec, PLAN.seed), PLAN))


def nth_decision(lines: list[Line], kind: type, count: int) -> int:
    """Where in the lines the decision stands that has the n-th action of a kind."""
    places = [
        place
        for place, line in enumerate(lines)
        if isinstance(line, Decision) and any(isinstance(action, kind) for action in line.actions)
    ]
    return places[count]


@pytest.mark.parametrize(("kind", "field", "value"), [(Grant, "work", 3), (Apply, "weights", (0.5,))])
def test_a_planted_difference_is_named_with_its_line(tmp_path: Path, kind: type, field: str, value: object) -> None:
    lines = journal_of("ssp")
    place = nth_decision(lines, kind, 20)
    line = lines[place]
    assert isinstance(line, Decision)
    actions = [msgspec.structs.replace(a, **{field: value}) if isinstance(a, kind) else a for a in line.actions]
    lines[place] = Decision(line.event, actions)
    found = replay(written(tmp_path / "altered.jsonl", lines)).difference
    assert found is not None
    assert found.line == place + 1
    assert getattr(found.expected, field) == value
    assert f"line {place + 1}, action" in str(found)


def test_an_event_left_out_is_noticed_where_it_matters(tmp_path: Path) -> None:
    lines = journal_of("bsp")
    place = nth_decision(lines, Grant, 10)
    del lines[place]
    found = replay(written(tmp_path / "cut.jsonl", lines)).difference
    assert found is not None
    assert found.line > place


def test_another_seed_in_the_header_is_noticed_by_a_strategy_of_chance(tmp_path: Path) -> None:
    lines = journal_of(SPECS["adaptive_k_load"])
    header = lines[0]
    assert isinstance(header, Header)
    lines[0] = msgspec.structs.replace(header, seed=header.seed + 1)
    assert replay(written(tmp_path / "seed.jsonl", lines)).difference is not None
