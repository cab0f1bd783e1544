"""The foreign checker of journals: it finds nothing in sound ones, and every fault that is planted."""

import copy
from types import SimpleNamespace

import pytest
import torch

import paceline
from attacks import foreign_checker, foreign_runs

CLUSTER = """
[compute]
seconds_per_sample = 0.01
jitter = "lognormal:0.2"
[[workers]]
[[workers]]
speed = 0.4
[[workers]]
speed = 0.7
[[events]]
kind = "crash"
worker = 1
at = 0.35
[[events]]
kind = "rejoin"
worker = 1
at = 0.5
"""
GRADIENTS = ["ssp:staleness=1", "bsp", "k_async:k=2", "fastest_k:k=2", "balanced", "adaptive_k:burn_in=2"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A sound journal of each strategy, as lines."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "cluster.toml").write_text(CLUSTER)
    jobs = dict.fromkeys(GRADIENTS, foreign_runs.gradients(30, 3, 2, "epoch"))
    jobs["gossip:form=weighted"] = jobs[GRADIENTS[0]]
    jobs["dssp:lower=0,upper=2"] = foreign_runs.tables(8, None, eager=False, barrier=True)
    journals = {}
    for number, (strategy, job) in enumerate(jobs.items()):
        place = folder / f"{number}.jsonl"
        paceline.launch(job, engine="sim", scenario=folder / "cluster.toml", strategy=strategy,
                        evaluate_every="off", journal=place)  # fmt: skip
        journals[strategy] = foreign_checker.read(place)
    return journals


def test_sound_journals_have_no_fault(sound):
    assert {strategy: foreign_checker.faults(lines) for strategy, lines in sound.items()} == {key: [] for key in sound}


def events(lines, kind):
    return [number for number, line in enumerate(lines) if line.get("event", {}).get("kind") == kind]


def actions(lines, kind):
    """Places of actions of this kind, as pairs of line and action."""
    return [(line, action) for line in lines for action in line.get("actions", ()) if action["kind"] == kind]


def middle(found):
    return found[len(found) // 2]


def a_push_arrives_twice(lines):
    at = middle(events(lines, "pushed"))
    lines.insert(at, copy.deepcopy(lines[at]))


def a_push_is_lost(lines):
    del lines[middle(events(lines, "pushed"))]


def a_push_is_applied_twice(lines):
    line, action = middle(actions(lines, "apply"))
    line["actions"].append(copy.deepcopy(action))


def a_push_is_never_settled(lines):
    line, action = middle(actions(lines, "apply"))
    line["actions"].remove(action)


def a_version_is_skipped(lines):
    lines[-1]["data"]["versions"] += 1


def a_sample_is_counted_twice(lines):
    lines[-1]["data"]["samples_used"] += 1


def an_epoch_ends_early(lines):
    phase = next(line for line in lines if line.get("what") == "phase")
    phase["data"]["size"] += 1


def a_worker_runs_ahead(lines):
    """The grants of the slowest worker are delayed by the journal; the fastest go on."""
    header = lines[0]
    header["strategy"] = "ssp:staleness=0"


def a_gone_worker_pushes(lines):
    at = next(n for n in events(lines, "left") if lines[n]["event"]["cause"] == "crash")
    gone = lines[at]["event"]["worker"]
    later = next(n for n in events(lines, "pushed") if n > at)
    lines[later]["event"]["worker"] = gone


def a_gone_worker_is_granted_work(lines):
    at = next(n for n in events(lines, "left") if lines[n]["event"]["cause"] == "crash")
    line, action = next((line, action) for line, action in actions(lines[at:], "grant"))
    line["actions"].append({**action, "worker": lines[at]["event"]["worker"]})


def two_grants_at_once(lines):
    line, action = middle(actions(lines, "grant"))
    line["actions"].append(copy.deepcopy(action))


def a_push_of_another_version(lines):
    lines[middle(events(lines, "pushed"))]["event"]["read_version"] += 1


def a_push_of_another_clock(lines):
    lines[middle(events(lines, "pushed"))]["event"]["clock"] += 1


def a_weight_is_wrong(lines):
    _, action = middle(actions(lines, "apply"))
    action["weights"] = [2 * weight for weight in action["weights"]]


def a_line_follows_the_end(lines):
    lines.append({"type": "observation", "at": 9.0, "what": "checkpoint", "data": {"version": 1}})


def the_end_is_missing(lines):
    lines.pop()


def time_goes_back(lines):
    lines[middle(events(lines, "pushed"))]["event"]["at"] -= 100.0


def a_checkpoint_of_the_future(lines):
    lines.insert(-1, {"type": "observation", "at": 9.0, "what": "checkpoint", "data": {"version": 10**6}})


def a_present_worker_is_left_out(lines):
    action = middle([action for _, action in actions(lines, "apply") if len(action["pushes"]) > 1])
    action["pushes"], action["weights"] = action["pushes"][1:], action["weights"][1:]


def a_piece_is_of_another_push(lines):
    _, action = next((line, action) for line, action in actions(lines, "grant") if action["extends"] is not None)
    action["extends"] += 1


def applied_tells_something_else(lines):
    lines[middle(events(lines, "applied"))]["event"]["mass"] += 0.5


def a_message_arrives_twice(lines):
    at = middle(events(lines, "received"))
    lines.insert(at, copy.deepcopy(lines[at]))


def a_message_of_nobody(lines):
    lines[middle(events(lines, "received"))]["event"]["weight"] *= 1.5


def weight_is_made_of_nothing(lines):
    _, action = middle(actions(lines, "send"))
    action["weight"] = 3.0


def a_read_is_too_old(lines):
    next(line for line in lines if line.get("what") == "reads")["data"]["first"] = 3


def work_is_taken_back_twice(lines):
    at = next(number for number, line in enumerate(lines) if line.get("what") == "cancelled")
    lines.insert(at, copy.deepcopy(lines[at]))


PLANTED = {
    "ssp:staleness=1": [
        a_push_arrives_twice, a_push_is_lost, a_push_is_applied_twice, a_push_is_never_settled, a_version_is_skipped,
        a_sample_is_counted_twice, an_epoch_ends_early, a_worker_runs_ahead, a_gone_worker_pushes,
        a_gone_worker_is_granted_work, two_grants_at_once, a_push_of_another_version, a_push_of_another_clock,
        a_weight_is_wrong, a_line_follows_the_end, the_end_is_missing, time_goes_back, a_checkpoint_of_the_future,
        work_is_taken_back_twice,
    ],
    "bsp": [a_present_worker_is_left_out, a_weight_is_wrong, a_push_of_another_version, a_push_is_never_settled],
    "k_async:k=2": [a_present_worker_is_left_out, a_weight_is_wrong],
    "fastest_k:k=2": [a_present_worker_is_left_out, two_grants_at_once],
    "balanced": [a_piece_is_of_another_push, a_weight_is_wrong],
    "adaptive_k:burn_in=2": [applied_tells_something_else],
    "gossip:form=weighted": [a_message_arrives_twice, a_message_of_nobody, weight_is_made_of_nothing],
    "dssp:lower=0,upper=2": [a_read_is_too_old],
}  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "fault"), [(strategy, fault) for strategy, faults in PLANTED.items() for fault in faults]
)
def test_a_planted_fault_is_found(strategy, fault, sound):
    lines = copy.deepcopy(sound[strategy])
    fault(lines)
    assert foreign_checker.faults(lines), f"{fault.__name__} is not found in a journal of {strategy}"


@pytest.mark.parametrize(("weights", "unused"), [([0.0, -0.1], 1), ([-0.1, -0.1], 0)])
def test_a_sample_that_moved_nothing_was_not_used(weights, unused, monkeypatch, tmp_path):
    model = {"weight": torch.tensor(weights)}
    monkeypatch.setattr(paceline, "launch", lambda *_, **__: SimpleNamespace(ended="done", model_state=model))
    monkeypatch.setattr(foreign_runs, "job", lambda *_: (None, True))
    assert foreign_runs.virtual_run(1, tmp_path)["unused"] == unused


def test_a_journal_that_was_cut_short_is_read_up_to_there(tmp_path):
    place = tmp_path / "cut.jsonl"
    place.write_text('{"type": "header"}\n{"type": "observ')
    assert foreign_checker.read(place) == [{"type": "header"}]
