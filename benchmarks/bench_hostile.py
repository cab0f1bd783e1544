"""Does a whole `paceline serve` bear ten thousand hostile inputs?

    python benchmarks/bench_hostile.py            # writes results/hostile.md and .json
    python benchmarks/bench_hostile.py --inputs 500 --json

The victim is a run with two honest workers over TCP (hostile_serve.py). Six of ten inputs come from machines that hold
a valid token (hostile_clients.py). Most of these get a worker's place and then send recorded frames of every message,
damaged (hostile_inputs.py), as that worker; the others send damaged messages of every kind to the launcher. The rest
comes from clients with wrong keys and from strangers who send bytes: cut, oversized, replayed, of other versions.
A damaged message that is still one by which a member may steer the run (STEERING) is damaged again: a member may end a
run, and that is not what is asked here. Then the same, with fewer inputs, is tried on a run with two shards, which
listen, too. Bars: the honest workers go on all along, the run exits with 0 and with the
bits of an undisturbed run, launcher and server have at most 50 MB more memory than after the first hundred inputs, and
the log has at most 100 KB. `--planted` gives the victim a fault that must be found.
"""

import argparse
import collections
import json
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

import hostile_clients
import hostile_inputs
import hostile_serve
import results
import sources
from hostile_clients import Machine, WrongKeys
from hostile_inputs import TO_SERVER, Frames, Maker, Mutator
from hostile_serve import Serve
from paceline.core.errors import PacelineError
from paceline.engines.hosts import messages as m
from paceline.model.regions import private_region
from paceline.transport.codec import Codec
from paceline.transport.limits import Limits
from results import Verdict

INPUTS = 10_000
SHARDS = 2
AT_SHARDS = 3_000  # inputs for the run with shards
MEMBERS_SHARE = 0.62
AT_ONCE = 20  # inputs of one turn
WARM = 100  # inputs before the memory counts: the first load code and fill caches
STEPS = 10_000  # of the honest workers: more than they make during the attack
STEPS_OF_SHARDS = 4_000
PAUSE_S = 0.05
MOST_BYTES = 50_000_000
MOST_LOG = 100_000
PATIENCE_S = 20.0  # for the honest workers to make a step
STEERING = ("Stop", "Ready", "ModelLoaded", "OptimizerLoaded", "CollectiveKept")
PLANTED = {  # code that the victim's processes run at their start
    "crash": "import paceline.engines.local.server_links as s; s._MISFITS = ()",
    "leak": "import paceline.transport.zeromq as z; kept = []; take = z.ZeromqServerEnd.take; "
            "z.ZeromqServerEnd.take = lambda *a: (kept.append(bytearray(b'x') * (1 << 20)), take(*a))[1]",
}  # fmt: skip


class Outcome(msgspec.Struct, frozen=True):
    """What the victim bore, and how it ended."""

    members: int
    strangers: int
    stalled: bool  # the honest workers made no step for PATIENCE_S
    codes: dict[str, int]
    same_bits: bool
    more_bytes: int
    log_bytes: int
    seconds: float
    answered: dict[str, int]  # inputs by their kind after which the server still listened to that worker
    hung_up: dict[str, int]  # after which it had hung up
    silent: int  # inputs after which neither was the case
    damages: dict[str, int]
    log: str

    def complaints(self) -> list[str]:
        """Say what the victim did not bear."""
        found = []
        if self.stalled:
            found.append(f"honest workers made no step for {PATIENCE_S:g} s")
        if any(self.codes.values()):
            found.append(f"exit codes {self.codes}")
        if not self.same_bits:
            found.append("other bits than undisturbed")
        if self.more_bytes > MOST_BYTES:
            found.append(f"{self.more_bytes / 1e6:.1f} MB more")
        if self.log_bytes > MOST_LOG:
            found.append(f"{self.log_bytes} bytes of log")
        if "Traceback" in self.log:
            found.append("a traceback")
        return found


class Attack:
    """All attackers of one run."""

    def __init__(self, run: Serve, chance: random.Random) -> None:
        self._run, self._chance = run, chance
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        script = hostile_clients.name_of_script(str(run.folder / "train.py"))
        self._machines = [Machine(self._context, run.port, run.token, script) for _ in range(AT_ONCE)]
        self._maker, self._mutator = Maker(chance), Mutator(chance)
        self._wrong = WrongKeys(self._context, run.token, chance)
        self._recorded = hostile_clients.record(run.port, run.token)
        self._words = [m.encode(message) for message in hostile_clients.machine_messages()]  # type: ignore[arg-type]
        self.members = self.strangers = self.silent = 0
        self.answered: collections.Counter[str] = collections.Counter()
        self.hung_up: collections.Counter[str] = collections.Counter()
        self.damages: collections.Counter[str] = collections.Counter()

    def as_workers(self) -> None:
        """Join with every machine, and send an input as a worker with each."""
        for machine in self._machines:
            machine.ask()
        sent = []
        for machine in self._machines:
            if machine.enter(self._chance.randrange(self._run.ports - 1)):
                kind = TO_SERVER[self.members % len(TO_SERVER)]
                machine.send(self._damaged(kind))
                self.members += 1
                sent.append((machine, kind.__name__))
            else:
                machine.reset()
        for machine, name in sent:
            outcome = machine.outcome()
            if outcome == "answered":
                self.answered[name] += 1
            elif outcome == "hung up":
                self.hung_up[name] += 1
            else:
                self.silent += 1
            machine.leave(hang_up=self._chance.random() < 0.8)
        for machine in self._machines:
            machine.forget_worker()

    def _damaged(self, kind: Any) -> Frames:
        while True:
            frames = self._mutator.damage(self._maker.frames(kind))
            if not steers(frames):
                self.damages[self._mutator.name] += 1
                return frames

    def as_machines(self) -> None:
        """Send the launcher damaged messages."""
        for machine in self._machines:
            (data, *_) = self._mutator.damage([self._chance.choice(self._words)]) or [b""]
            self.damages[self._mutator.name] += 1
            with suppress(zmq.Again):
                machine.say(data)
            self.members += 1
        for machine in self._machines:
            machine.reset()

    def as_strangers(self) -> None:
        """Try to get in without a key, at all ports."""
        port = self._run.port + self._chance.randrange(self._run.ports)
        if self._chance.random() < 0.3:
            self._wrong.attack(port, AT_ONCE)
        else:
            sayings = [hostile_inputs.strangers(self._chance, self._recorded) for _ in range(AT_ONCE)]
            hostile_clients.say(port, sayings, self._chance)
        self.strangers += AT_ONCE

    def close(self) -> None:
        self._context.destroy(linger=0)


def steers(frames: Frames) -> bool:
    """Whether these frames begin with a whole message that a member may steer the run by."""
    codec = Codec(private_region)
    codec.limits = Limits()
    for frame in frames:
        with suppress(PacelineError):
            if type(codec.at_server(memoryview(bytearray(frame)))[0]).__name__ in STEERING:
                return True
    return False


def attack(
    inputs: int = INPUTS, seed: int = 1, planted: str | None = None, steps: int = STEPS, servers: int = 1
) -> Outcome:
    """Attack a run with so many inputs, and return what came of it."""
    began, chance = time.monotonic(), random.Random(seed)
    digest = hostile_serve.undisturbed_digest(steps, servers=servers)
    with tempfile.TemporaryDirectory() as name:
        environment = {}
        if planted is not None:
            (Path(name) / "sitecustomize.py").write_text(PLANTED[planted])
            environment["PYTHONPATH"] = name
        how = {"pause_s": PAUSE_S, "environment": environment, "servers": servers}
        with Serve("--start", "fresh", steps=steps, **how) as run:
            run.await_steps(5)
            return _attacked(run, Attack(run, chance), inputs, digest, began)


def _attacked(run: Serve, attackers: Attack, inputs: int, digest: str, began: float) -> Outcome:
    base = most = 0
    stalled = False
    while (done := attackers.members + attackers.strangers) < inputs and run.runs and not stalled:
        if attackers.members >= MEMBERS_SHARE * (done + AT_ONCE):
            attackers.as_strangers()
        elif attackers.members % 4 == 3 or attackers.members % (5 * AT_ONCE) == 0:
            attackers.as_machines()
        else:
            attackers.as_workers()
        stalled = not goes_on(run)
        resident = sum(now for now, _ in run.memory().values())
        base, most = (resident if done <= WARM else base), max(most, resident)
    peak = sum(top for _, top in run.memory().values())
    attackers.close()
    run.relent()
    codes = run.end()
    return Outcome(
        attackers.members, attackers.strangers, stalled, codes, run.digest() == digest, max(most, peak) - base,
        len(run.said()), time.monotonic() - began, dict(attackers.answered), dict(attackers.hung_up), attackers.silent,
        dict(attackers.damages), run.said()[-4_000:],
    )  # fmt: skip


def goes_on(run: Serve) -> bool:
    """Whether the honest workers make another step."""
    before, until = run.steps, time.monotonic() + PATIENCE_S
    while run.steps <= before and run.runs:
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def verdicts_of(outcome: Outcome) -> list[Verdict]:
    """What must hold."""
    total = outcome.members + outcome.strangers
    silent = [kind.__name__ for kind in TO_SERVER if not reached(outcome, kind.__name__)]
    return [
        Verdict("hostile inputs", f"{total}", ">= 10,000", total >= INPUTS),
        Verdict("of them with a valid key", f"{outcome.members}", ">= 6,000", outcome.members >= 6_000),
        Verdict("honest workers", "stood still" if outcome.stalled else "went on", "go on", not outcome.stalled),
        Verdict("exit codes", f"{outcome.codes}", "all 0", not any(outcome.codes.values())),
        Verdict("bits", "the same" if outcome.same_bits else "others", "as undisturbed", outcome.same_bits),
        Verdict("most memory beyond that after 100 inputs", f"{outcome.more_bytes / 1e6:.1f} MB", "<= 50 MB",
                outcome.more_bytes <= MOST_BYTES),
        Verdict("log", f"{outcome.log_bytes} bytes", "<= 100 KB", outcome.log_bytes <= MOST_LOG),
        Verdict("kinds of message that never came to their decoder", f"{len(silent)}", "none", not silent),
    ]  # fmt: skip


def verdicts_on_shards(outcome: Outcome) -> list[Verdict]:
    """What must hold of the run with shards."""
    bars = ("honest workers", "exit codes", "bits", "most memory beyond that after 100 inputs", "log")
    same = [verdict for verdict in verdicts_of(outcome) if verdict.name in bars]
    return [msgspec.structs.replace(each, name=f"{SHARDS} shards: {each.name}") for each in same]


def reached(outcome: Outcome, kind: str) -> int:
    """How many inputs of this kind the server has judged."""
    return outcome.answered.get(kind, 0) + outcome.hung_up.get(kind, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hostile inputs against a whole serve.")
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1, help="of the victim, with --json or --planted")
    parser.add_argument("--planted", choices=list(PLANTED))
    parser.add_argument("--json", action="store_true", help="print one JSON object and write nothing")
    sources.add_options(parser)
    given = parser.parse_args()
    of = None if given.json or given.planted else sources.checked(given)
    steps = STEPS if given.servers == 1 else STEPS_OF_SHARDS
    outcome = attack(given.inputs, given.seed, given.planted, steps, given.servers)
    if of is None:
        print(json.dumps({**msgspec.to_builtins(outcome), "complaints": outcome.complaints()}))
        sys.exit(bool(outcome.complaints()))
    on_shards = attack(AT_SHARDS, given.seed + 1, steps=STEPS_OF_SHARDS, servers=SHARDS)
    rows: list[dict[str, Any]] = [
        {"kind": kind.__name__, "the server listened on": outcome.answered.get(kind.__name__, 0),
         "it hung up": outcome.hung_up.get(kind.__name__, 0)}
        for kind in TO_SERVER
    ]  # fmt: skip
    notes = (
        "A whole run with encryption: launcher, server and two honest workers over TCP. Damaged frames that are still "
        "messages are handled; who sends others, or one that does not fit the run, is taken out of it and hung up. "
        f"{outcome.silent} inputs were followed by neither an answer nor a hang-up. It took {outcome.seconds:.0f} s. "
        f"With {SHARDS} shards: {on_shards.members + on_shards.strangers} inputs, {on_shards.members} of them with a "
        "valid key, each at the coordinator or at a shard. The rows are of the first run."
    )
    details = {"outcome": msgspec.to_builtins(outcome), "on_shards": msgspec.to_builtins(on_shards)}
    command = " ".join(["python", *sys.argv])
    print(results.write("hostile", command, [*verdicts_of(outcome), *verdicts_on_shards(on_shards)], rows, notes, of,
                        details=details))  # fmt: skip
    sys.exit(bool(outcome.complaints() or on_shards.complaints()))


if __name__ == "__main__":
    main()
