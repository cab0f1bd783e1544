"""Every attack on this host's runs: `make attack`. A dated result for each module of `benchmarks/attacks`.

    python benchmarks/attack.py                 # all: writes results/attack_<module>.md and .json
    python benchmarks/attack.py --only disk     # one module

Each attack is tried against the commit before its mend, where it must succeed, and against this tree, which must hold.
Loops are bounded, nothing outside this host is touched, and attackers are other users of it (that needs root).
"""

import argparse
import importlib
import os
import signal
import sys
import time
from pathlib import Path

import attacks
import results
import sources
from attacks.harness import Attack, attempts, this_tree, tree_of

COMMAND = "python benchmarks/attack.py"


def modules() -> list[str]:
    """The names of all modules with attacks."""
    return sorted(path.stem for path in Path(attacks.__path__[0]).glob("*.py") if "\nATTACKS = " in path.read_text())


def main() -> int:
    """Make the attacks and write what came of them."""
    parser = argparse.ArgumentParser(description="attack runs of this host and write the dated results")
    parser.add_argument("--only", choices=modules(), help="one module")
    parser.add_argument("--trials", type=int, help="at most so many attempts of each attack; writes nothing")
    sources.add_options(parser)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    of = None if given.trials else sources.checked(given)
    missed = 0
    for name in [given.only] if given.only else modules():
        module = importlib.import_module(f"attacks.{name}")
        rows, verdicts = [], []
        for attack in module.ATTACKS:
            row, verdict = judged(attack, module.BEFORE, given.trials)
            print(f"{name}: {verdict.name}: {verdict.value}", flush=True)
            rows.append(row)
            verdicts.append(verdict)
        if of is not None:
            command = f"{COMMAND} --only {name}"
            print(results.write(f"attack_{name}", command, verdicts, rows, (module.__doc__ or "").strip(), of))
        missed += sum(not verdict.passed for verdict in verdicts)
    return 1 if missed else 0


def judged(attack: Attack, commit: str, most: int | None) -> tuple[dict[str, object], results.Verdict]:
    """One attack against both trees."""
    if attack.root and os.geteuid() != 0:
        raise SystemExit(f"{attack.name}: attackers are other users of this host, which needs root")
    began = time.monotonic()
    trials, before = (min(each, most) if most else each for each in (attack.trials, attack.before))
    with tree_of(commit) as old:
        earlier = attempts(attack, old, range(before)) if before else []
    with this_tree() as new:
        now = attempts(attack, new, range(trials))
    held, broke = sum(trial.held for trial in now), sum(not trial.held for trial in earlier)
    failures = [trial.what for trial in now if not trial.held]
    kills, least = sum(trial.kills for trial in now), attack.kills if trials == attack.trials else 0
    row = {
        "attack": attack.what,
        "against": commit,
        "succeeded there": f"{broke} of {before}",
        "there": next((trial.what for trial in earlier if not trial.held), ""),
        "held here": f"{held} of {trials}",
        "here": failures[0] if failures else now[-1].what,
        "kills": kills or "",
        "seconds": round(time.monotonic() - began),
    }
    passed = held == trials and (broke > 0 or not before) and kills >= least
    bar = f"held {trials} of {trials}" + (f", having succeeded against {commit}" if before else "")
    value = f"{held} of {trials}; before: {broke} of {before}"
    if least:
        bar, value = f"{bar}, with {least} kills or more", f"{value}; {kills} kills"
    return row, results.Verdict(attack.name, value, bar, passed)


if __name__ == "__main__":
    sys.exit(main())
