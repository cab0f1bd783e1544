"""Does a run bear strangers: idle connections, an unfinished message of 1 GB, and a flood?

    python benchmarks/bench_strangers.py            # writes results/strangers.md and .json
    python benchmarks/bench_strangers.py --attack flood --pairs 1 --seconds 20 --json

A whole `paceline serve` with two honest workers (hostile_serve.py), which starts with 1,024 descriptors. In every pair
one attacker process attacks the run's two ports, and the same attacker attacks two ports of a sink, a process that
accepts and reads, while the run goes on: what the attacker itself takes from the processors is on both sides. Steps of
the honest workers per second beside the attack on the run, over those beside the attack on the sink, must be at least
0.8 in the median; the run must end with exit code 0, with at most 50 MB more memory than before the attack in launcher
and server together, and with at most 100 KB of log.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import results
import sources
from hostile_serve import Serve
from results import Verdict

ATTACKS = ("idle", "unfinished", "flood")
SECONDS = {"idle": 10.0, "unfinished": 10.0, "flood": 60.0}
SINK_S = 20.0  # beside the sink, at most
PAIRS = {"idle": 4, "unfinished": 4, "flood": 2}  # as many begin with the run as with the sink: who is first is slower
IDLE = 5_000
DESCRIPTORS = 1_024
UNFINISHED = 1 << 30  # bytes that a stranger announces, and sends as far as it is let
LEAST_SPEED = 0.8
MOST_BYTES = 50_000_000
MOST_LOG = 100_000
SETTLE_S = 2.0  # after which an attack has begun
WIDTH = 256  # of the honest workers' model: 6,000 parameters
GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"CURVE".ljust(20, b"\x00") + bytes(32)
HERE = Path(__file__)


class Beside(msgspec.Struct, frozen=True):
    """A run beside one attack."""

    attack: str
    target: str
    steps_per_s: float
    more_bytes: int
    connections: int  # that the attacker made


# -- attackers, each in a process of its own ---------------------------------------------------------------------------


def attack_idle(ports: list[int], until: float) -> int:
    """Hold thousands of connections open, and open each anew that is closed."""
    selector, made = selectors.DefaultSelector(), 0
    open_ones = 0
    while time.monotonic() < until:
        while open_ones < IDLE and time.monotonic() < until:
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", ports[made % len(ports)]))
            selector.register(stranger, selectors.EVENT_READ)
            made, open_ones = made + 1, open_ones + 1
            if made > IDLE and made % 50 == 0:
                time.sleep(0.05)  # one thousand a second, once all are there
        for key, _ in selector.select(0.05):
            with contextlib.suppress(OSError):
                if key.fileobj.recv(1 << 12):  # type: ignore[union-attr]
                    continue
            selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
            open_ones -= 1
    return made


def attack_unfinished(ports: list[int], until: float) -> int:
    """Announce a command of 1 GB, and send it as fast as it is taken, again and again."""
    made, block = 0, bytes(1 << 18)
    while time.monotonic() < until:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", ports[made % len(ports)])) as stranger,
        ):
            stranger.settimeout(1.0)
            stranger.sendall(GREETING + b"\x06" + UNFINISHED.to_bytes(8, "big"))
            left = UNFINISHED - 1
            while left > 0 and time.monotonic() < until:
                left -= stranger.send(block[: min(left, len(block))])
        made += 1
        time.sleep(0.01)
    return made


def attack_flood(ports: list[int], until: float) -> int:
    """Connect as often as possible: wrong keys, garbage, connections that are closed at once, handshakes cut short."""
    chance, made = random.Random(1), 0
    hello = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72)
    while time.monotonic() < until:
        open_ones = []
        for _ in range(32):
            saying = chance.choice([b"", chance.randbytes(300), GREETING, GREETING + hello + chance.randbytes(120)])
            stranger = socket.socket()
            stranger.setblocking(False)
            with contextlib.suppress(OSError):
                stranger.connect_ex(("127.0.0.1", ports[made % len(ports)]))
                stranger.send(saying)
            open_ones.append(stranger)
            made += 1
        for stranger in open_ones:
            stranger.close()
    return made


def sink(count: int) -> None:
    """Accept and read at so many ports, and print them."""
    selector = selectors.DefaultSelector()
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(count)]
    for listener in listeners:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, True)
    print(json.dumps([listener.getsockname()[1] for listener in listeners]), flush=True)
    while True:
        for key, _ in selector.select():
            with contextlib.suppress(OSError):
                if key.data:
                    found, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    found.setblocking(False)
                    selector.register(found, selectors.EVENT_READ, False)
                    continue
                if key.fileobj.recv(1 << 18):  # type: ignore[union-attr]
                    continue
            if not key.data:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def a_sink(count: int = 2) -> Iterator[list[int]]:
    """Yield the ports of a sink in a process of its own."""
    command = [sys.executable, str(HERE), "--be", "sink", str(count)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


# -- measuring ---------------------------------------------------------------------------------------------------------


def beside(run: Serve, attack: str, seconds: float, target: str) -> Beside:
    """Attack the run, or the sink, for so long; return how the honest workers went on."""
    with contextlib.ExitStack() as stack:
        ports = [run.port, run.port + 1] if target == "run" else stack.enter_context(a_sink())
        before = resident(run)
        command = [sys.executable, str(HERE), "--be", attack, json.dumps(ports)]
        attacker = subprocess.Popen([*command, str(seconds + SETTLE_S)], stdout=subprocess.PIPE)
        time.sleep(SETTLE_S)
        first, began, most = run.steps, time.monotonic(), before
        while time.monotonic() - began < seconds and run.runs:
            time.sleep(0.1)
            most = max(most, resident(run))
        steps, took = run.steps - first, time.monotonic() - began
        out, _ = attacker.communicate(timeout=60)
    return Beside(attack, target, steps / took, most - before, int(out or b"0"))


def resident(run: Serve) -> int:
    """Bytes of launcher and server in memory."""
    return sum(now for now, _ in run.memory().values())


def measure(attacks: list[str], pairs: dict[str, int], seconds: dict[str, float]) -> dict[str, Any]:
    """Attack one run by all of these, each beside a sink; return what came of it."""
    found: list[Beside] = []
    with Serve(steps=None, pause_s=0.0, width=WIDTH, descriptors=DESCRIPTORS) as run:
        run.await_steps(20)
        for attack in attacks:
            for number in range(pairs[attack]):
                order = ["run", "sink"] if number % 2 == 0 else ["sink", "run"]
                for target in order:
                    lasts = seconds[attack] if target == "run" else min(SINK_S, seconds[attack])
                    found.append(beside(run, attack, lasts, target))
                    print(msgspec.to_builtins(found[-1]), file=sys.stderr, flush=True)
        run.relent()
        codes = run.end()
        return {"found": found, "codes": codes, "log": run.said()}


def ratios(found: list[Beside], attack: str) -> list[float]:
    """The speed beside the attacked run over that beside the attacked sink, of each pair."""
    speeds: dict[str, list[float]] = {"run": [], "sink": []}
    for one in found:
        if one.attack == attack:
            speeds[one.target].append(one.steps_per_s)
    return [one / other for one, other in zip(speeds["run"], speeds["sink"], strict=True)]


def verdicts_of(outcome: dict[str, Any], attacks: list[str]) -> list[Verdict]:
    """What must hold."""
    found: list[Beside] = outcome["found"]
    verdicts = []
    for attack in attacks:
        speed = statistics.median(ratios(found, attack))
        more = max(b.more_bytes for b in found if (b.attack, b.target) == (attack, "run"))
        verdicts += [
            Verdict(f"{attack}: speed over that beside a sink", f"{speed:.2f}", ">= 0.80", speed >= LEAST_SPEED),
            Verdict(f"{attack}: more memory", f"{more / 1e6:.1f} MB", "<= 50 MB", more <= MOST_BYTES),
        ]
    log = len(outcome["log"])
    return [
        *verdicts,
        Verdict("log", f"{log} bytes", "<= 100 KB", log <= MOST_LOG),
        Verdict("exit codes", f"{outcome['codes']}", "all 0", not any(outcome["codes"].values())),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Strangers against a whole serve.")
    parser.add_argument("--be", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--attack", choices=ATTACKS, action="append")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--json", action="store_true", help="print one JSON object and write nothing")
    sources.add_options(parser)
    given = parser.parse_args()
    if given.be:
        be(*given.be)
        return
    of = None if given.json else sources.checked(given)
    attacks = given.attack or list(ATTACKS)
    pairs = {name: given.pairs or PAIRS[name] for name in attacks}
    seconds = {name: given.seconds or SECONDS[name] for name in attacks}
    before = os.getloadavg()[0]
    outcome = measure(attacks, pairs, seconds)
    verdicts = verdicts_of(outcome, attacks)
    rows: list[dict[str, Any]] = [msgspec.to_builtins(one) for one in outcome["found"]]
    if of is None:
        told = {"rows": rows, "verdicts": [msgspec.to_builtins(one) for one in verdicts]}
        print(json.dumps({**told, "log": outcome["log"][-4_000:]}))
    else:
        shown = {name: ", ".join(f"{r:.2f}" for r in ratios(outcome["found"], name)) for name in attacks}
        notes = (
            f"{IDLE:,} idle connections, 1 GB announced and sent as far as it is taken, and a flood of connections "
            f"with garbage, cut or wrong handshakes. The machine's load was {before:.1f} before. Ratios of the pairs: "
            f"{'; '.join(f'{name} {values}' for name, values in shown.items())}."
        )
        details = {"log": outcome["log"][-4_000:]}
        print(results.write("strangers", " ".join(["python", *sys.argv]), verdicts, rows, notes, of, details=details))
    sys.exit(not all(verdict.passed for verdict in verdicts))


def be(what: str, *words: str) -> None:
    """Be an attacker, or the sink, with as many descriptors as there may be."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if what == "sink":
        sink(int(words[0]))
        return
    attack = {"idle": attack_idle, "unfinished": attack_unfinished, "flood": attack_flood}[what]
    print(attack(json.loads(words[0]), time.monotonic() + float(words[1])), flush=True)


if __name__ == "__main__":
    main()
