"""One conversation, through the memory transport and through real processes: the same actions.

Two ways to have one. Scripted: the simulator's run fixes the order in which pushes arrive, and real workers push in
that order; each waits until the journal holds all the pushes before its own. Emulated: both engines act out the same
scenario, in which no two pushes of different workers come within 50 ms of each other, so that strategies that look at
times come to the same numbers, too. What is compared there:

- every decision of the central strategy, event and actions, but for the clock's numbers, the load of the host, which
  the simulator has none of, and the order in which scripts end; losses to 6 digits,
- every decision of each node up to its last step, likewise, messages numbered in the order in which the node saw them:
  what is still on its way when a loop ends may arrive or not,
- how the run ended, what the report counts, and with a server the model.

A machine that is too busy to keep the scenario's times shows other decisions; where an event came late before the first
difference, or took longer than it should, the run is made again with all times of the scenario doubled.
"""

import time
from pathlib import Path

import msgspec
import pytest
import torch
from clusters import cluster
from digests import lines_of, shown
from launching import launch
from local_jobs import Job
from reference_runs import CENTRAL, PEERS, Train

import paceline
from paceline import strategies
from paceline.core.events import Pushed
from paceline.records import journal
from paceline.records.journal import Decision, Lines
from paceline.scenario import parse

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

SPEEDS = (1.0, 0.7, 0.25)
MEASURED = ("at", "compute_s", "transfer_s")
TIMES = {"at", "compute_s", "transfer_s", "wait_s", "reason", "host"}  # of clock and host


class Scripted(Job):
    """Pushes in a given order of workers."""

    def __init__(self, notes, order, path):
        super().__init__(notes, size=24, epochs=2, batch_size=4, evaluates=False)
        self.order = order
        self.path = str(path)

    def before_batch(self, worker, number):
        places = [place for place, who in enumerate(self.order) if who == worker]
        place = places[number] if number < len(places) else len(self.order)
        while pushes_in(self.path) < place:
            time.sleep(0.02)


def pushes_in(path):
    try:
        return Path(path).read_bytes().count(b'"kind":"pushed"')
    except FileNotFoundError:
        return 0


def conversation(lines):
    """Events and actions without the clock's numbers, up to where the scripts end, which they do in any order."""
    decisions = [line for line in lines if isinstance(line, Decision)]
    ends = [line.event.worker for line in decisions if getattr(line.event, "cause", None) == "done"]
    told = [line for line in decisions if getattr(line.event, "cause", None) != "done"]
    return [[_timeless(line.event), *map(_timeless, line.actions)] for line in told], sorted(ends)


def _timeless(part):
    return {key: value for key, value in msgspec.to_builtins(part).items() if key not in TIMES}


@pytest.mark.parametrize(
    "strategy",
    [
        "ssp:staleness=1",
        *[pytest.param(s, marks=pytest.mark.soak) for s in ("bsp", "asp", "k_async:k=2", "fastest_k:k=2")],
    ],
)
def test_the_same_actions_through_memory_and_through_processes(tmp_path, strategy):
    virtual = Lines()
    job = Job(tmp_path, size=24, epochs=2, batch_size=4, evaluates=False)
    paceline.launch(job, engine="sim", scenario=cluster(*SPEEDS), strategy=strategy, sink=virtual)
    order = [line.event.worker for line in virtual if isinstance(line, Decision) and isinstance(line.event, Pushed)]
    path = tmp_path / "real.jsonl"
    launch(Scripted(tmp_path, order, path), workers=len(SPEEDS), strategy=strategy, journal=path)
    assert conversation(journal.read(path)) == conversation(virtual)


EMULATED = """
seed = 1
[compute]
seconds_per_sample = {seconds}
[[workers]]
latency_ms = {fast_ms}
[[workers]]
speed = {speed}
latency_ms = {slow_ms}
"""
SLOWER = (0.55, 52.5)  # speed, latency in milliseconds
SLOWER_UNDER = {"dasp": (0.44, 30), "local_sgd": (0.55, 110)}  # with the other one two pushes come too close
OPTIONS = {
    "fastest_k": "fastest_k:k=1",
    "adaptive_k": "adaptive_k:burn_in=1,threshold=0",
    "adaptive_k_load": "adaptive_k_load:window=2,burn_in=2",
}
STRATEGIES = {**CENTRAL, **PEERS, **OPTIONS}
COUNTED = ("versions", "pushes", "samples_used", "samples_discarded", "bytes_up", "bytes_down", "exchanges")
LATE_S = 0.004  # shares are rounded to whole samples: balanced decides otherwise if one takes 15 ms longer
STRETCHES = (1, 2, 4, 8)


def emulate(engine, name, folder, seed=4, stretch=1):
    """The run and its journal's lines."""
    path = folder / f"{engine}.jsonl"
    speed, slow_ms = SLOWER_UNDER.get(name, SLOWER)
    times = {"seconds": 0.09 * stretch, "fast_ms": 30 * stretch, "slow_ms": slow_ms * stretch}
    scenario = parse(EMULATED.format(speed=speed, **times), "parity", folder)
    settings = {"strategy": STRATEGIES[name], "seed": seed, "journal": path}
    run = launch(Train((0.6,), batch_size=4), engine=engine, scenario=scenario, **settings)
    return run, lines_of(path)


def decided(lines):
    """Who decided (a node, or None for the central strategy): the clock's numbers, and what."""
    found, numbers = {None: []}, {}
    for line in lines:
        if "event" not in line or line["event"].get("cause") == "done":
            continue
        node = line.get("node")
        parts = [line["event"], *line["actions"]]
        clock = {key: parts[0][key] for key in MEASURED if parts[0].get(key) is not None}
        found.setdefault(node, []).append((clock, [_numbered(part, node, numbers) for part in parts]))
    for node, decisions in found.items():
        if node is not None:
            last = max(place for place, (_, parts) in enumerate(decisions) if parts[0]["kind"] == "stepped")
            del decisions[last + 1 :]
    return found


def _numbered(part, node, numbers):
    told = {key: shown(value, 6) for key, value in part.items() if key not in {*TIMES, "seconds"}}
    if "message" in part:
        seen = numbers.setdefault(node, {})
        told["message"] = seen.setdefault(part["message"], len(seen))
    return told


def first_difference(virtual, real):
    """In words, or None; and the most seconds by which anything up to there came late or took longer."""
    told, late = None, 0.0
    for who in virtual.keys() | real.keys():
        ours, theirs = virtual.get(who, []), real.get(who, [])
        for place in range(max(len(ours), len(theirs))):
            due, expected = ours[place] if place < len(ours) else ({}, "nothing")
            came, found = theirs[place] if place < len(theirs) else ({}, "nothing")
            late = max([late, *(came[key] - due[key] for key in came.keys() & due.keys())])
            if expected != found:
                told = f"{who}, decision {place + 1}\n  sim:   {due} {expected}\n  local: {came} {found}"
                break
    return told, late


@pytest.mark.parametrize("name", [*strategies.names(), *strategies.peer_names()])
def test_an_emulated_cluster_decides_as_the_simulated_one(tmp_path, name):
    central = name in strategies.names()
    counted = COUNTED if central else ("versions", "pushes", "samples_used", "samples_discarded")
    for stretch in STRETCHES:
        folder = tmp_path / str(stretch)
        folder.mkdir()
        virtual, expected = emulate("sim", name, folder, stretch=stretch)
        real, found = emulate("local", name, folder, stretch=stretch)
        told, late = first_difference(decided(expected), decided(found))
        # A push that is under way at the end may have been sent already where the end came late.
        other = [field for field in counted if getattr(real.summary, field) != getattr(virtual.summary, field)]
        if (told is None and not other) or late < LATE_S * stretch:
            break
    assert told is None, f"{told}\n  latest event by {late:.3f} s"
    assert real.ended == virtual.ended == "done"
    assert not other, [(field, getattr(real.summary, field), getattr(virtual.summary, field)) for field in other]
    if central:
        for key, value in virtual.model_state.items():
            torch.testing.assert_close(real.model_state[key], value, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["asp", "gossip"])
def test_another_seed_or_a_missing_decision_is_noticed(tmp_path, name):
    expected = decided(emulate("sim", name, tmp_path)[1])
    assert first_difference(expected, expected) == (None, 0.0)
    assert first_difference(expected, decided(emulate("sim", name, tmp_path, seed=5)[1]))[0] is not None
    cut = {who: decisions[:-1] for who, decisions in expected.items()}
    told, late = first_difference(expected, cut)
    assert "local: {} nothing" in told
    assert late == 0.0
