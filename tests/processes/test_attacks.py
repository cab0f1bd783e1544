"""A sample of every attack of `make attack`, against this tree, and the harness that judges them."""

import importlib
import os
import subprocess

import pytest

import attack as command
from attacks import harness

ATTACKS = {
    f"{module}-{each.name}": each
    for module in command.modules()
    for each in importlib.import_module(f"attacks.{module}").ATTACKS
}

# These look at the environment of processes, or start them as somebody else than the test: on fresh interpreters.
NOT_WARM = ("leftovers", "other_users")


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_a_sample_of_each_attack_is_held_off(name, warm):
    attack = ATTACKS[name]
    if attack.root and os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    popen = subprocess.Popen if name.startswith(NOT_WARM) else warm
    with harness.this_tree() as source:
        (trial,) = harness.attempts(attack, source, [0], popen)
    assert trial.held, trial.what


@pytest.mark.parametrize(("held", "broke", "passed"), [(True, True, True), (True, False, False), (False, True, False)])
def test_an_attack_must_have_succeeded_before_and_fail_now(held, broke, passed, monkeypatch):
    """A check that cannot fail proves nothing: one that never succeeded does not pass."""
    trials = iter([harness.Trial(not broke, "then"), harness.Trial(held, "now")])
    planted = harness.Attack("planted", "nothing", lambda target, seed: next(trials), trials=1)
    row, verdict = command.judged(planted, "HEAD", None)
    assert verdict.passed is passed
    assert row["held here"] == f"{int(held)} of 1"
