"""What workers are told of the run's phases, and what of it a checkpoint holds."""

import json

import pytest

from paceline.server.phases import PhaseRecord, PhaseRecords


def records(*phases):
    """Phases with these rounds and names of schedulers, one after the other."""
    made, rounds = PhaseRecords(), 0.0
    for phase, (length, names) in enumerate(phases):
        made.begin(phase, rounds, {})
        for name in names:
            made.stepped(phase, name)
        if length is not None:
            rounds += length
            made.end(phase, rounds, int(rounds * 10), rounds / 5)
    return made


def restored(before):
    after = PhaseRecords()
    after.restore(json.loads(json.dumps(before.snapshot())))
    return after


def test_a_phase_is_known_by_its_ends_and_by_what_was_stepped_inside_it():
    made = records((4.5, ["StepLR", "LambdaLR", "StepLR"]), (None, []))
    assert made.get(0) == PhaseRecord(0.0, 4.5, 45, 0.9, ("LambdaLR", "StepLR"))
    assert made.get(1) == PhaseRecord(4.5, followed={"LambdaLR": 4.5, "StepLR": 4.5})
    assert made.get(2) is None
    made.stepped(7, "StepLR")  # by a worker that knows more than a restored server
    assert made.get(7) is None


def test_a_resumed_phase_keeps_its_beginning():
    again = restored(records((4.5, ["StepLR"]), (None, ["StepLR"])))
    again.begin(1, 6.0, {})
    assert again.get(0) == PhaseRecord(0.0, 4.5, 45, 0.9, ("StepLR",))
    assert again.get(1) == PhaseRecord(4.5, stepped=("StepLR",), followed={"StepLR": 4.5})


@pytest.mark.parametrize(
    ("last", "names"),
    [
        ((1.0, []), ("StepLR",)),  # its only step comes after the checkpoint
        ((3.0, []), ()),  # had it been stepped, that would be known
        ((1.0, ["LambdaLR"]), ("LambdaLR",)),
    ],
)
def test_a_phase_of_one_round_is_saved_before_its_schedulers_are_stepped(last, names):
    again = restored(records((1.0, ["StepLR"]), last))
    assert again.get(1).stepped == names
