"""Does a listening hub bear ten thousand hostile inputs?

    python benchmarks/bench_hostile.py            # writes results/hostile.md and .json
    python benchmarks/bench_hostile.py --inputs 500 --json

The victim is `hostile_hub.py`: socket, keys, decoders, in a process of its own; whatever reads a join token and writes
its address can take its place. Six of ten inputs come from a client that holds a valid key: recorded frames of every
message, damaged (`hostile_inputs.py`), each over a connection of its own. The others come from clients with wrong keys
and from strangers who send bytes: cut, oversized, replayed, of other versions. An honest worker exchanges a message
with the victim all along. Bars: the victim answers, exits with 0 at the end, has at most 50 MB more memory than after
its first hundred inputs, and has written at most 100 KB.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

import hostile_inputs
import results
import sources
from hostile_inputs import TO_SERVER, Frames, Maker, Mutator
from paceline.transport.base import Lost
from paceline.transport.join_token import JoinToken, new_token
from paceline.transport.messages import Note
from paceline.transport.security import Security
from paceline.transport.zeromq import HANDSHAKE, ZeromqEndpoint
from results import Verdict

INPUTS = 10_000
MEMBERS_SHARE = 0.62
AT_ONCE = 25  # connections of one turn
WARM = 100  # inputs before the memory counts: the first load code and fill caches
MOST_BYTES = 50_000_000
MOST_LOG = 100_000
PATIENCE_S = 20.0
HUB = Path(__file__).parent / "hostile_hub.py"


class Outcome(msgspec.Struct, frozen=True):
    """What the victim bore, and how it ended."""

    members: int
    strangers: int
    answered: int  # of the honest worker's messages
    asked: int
    code: int
    more_bytes: int
    log_bytes: int
    seconds: float
    messages: dict[str, int]
    faults: dict[str, int]
    damages: dict[str, int]
    log: str

    def complaints(self) -> list[str]:
        """Say what the victim did not bear."""
        found = []
        if self.answered < self.asked:
            found.append(f"{self.asked - self.answered} of {self.asked} honest messages were not answered")
        if self.code != 0:
            found.append(f"exit code {self.code}")
        if self.more_bytes > MOST_BYTES:
            found.append(f"{self.more_bytes / 1e6:.1f} MB more")
        if self.log_bytes > MOST_LOG:
            found.append(f"{self.log_bytes} bytes of log")
        if "Traceback" in self.log:
            found.append("a traceback")
        return found


class Victim:
    """A process that listens, and an honest worker of it."""

    def __init__(self, command: list[str], token: JoinToken) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(token.reveal().encode() + b"\n")
        self._process.stdin.flush()
        self.address = self._process.stdout.readline().decode().strip()
        self.port = int(self.address.rpartition(":")[2])
        self._worker = ZeromqEndpoint(self.address, "honest", security=Security(token))
        self.asked = self.answered = 0

    def ask(self) -> bool:
        """Exchange a message; return whether the victim answered."""
        self.asked += 1
        until = time.monotonic() + PATIENCE_S
        with suppress(Lost):
            self._worker.send(Note("honest", float(self.asked)))
            while time.monotonic() < until:
                if self._worker.poll(1.0) and self._worker.receive().ticket == self.asked:  # type: ignore[union-attr]
                    self.answered += 1
                    return True
        return False

    def memory(self) -> tuple[int, int]:
        """Return the bytes in memory, and the most that there have been."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return 0, 0
        found = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Vm")}
        return int(found.get("VmRSS", 0)) * 1024, int(found.get("VmHWM", 0)) * 1024

    def end(self) -> tuple[int, str, str]:
        """End it; return its exit code, what it reports and its log."""
        with suppress(Lost):
            self._worker.close()
        try:
            out, _ = self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, _ = self._process.communicate()
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")
        self._log.close()
        return self._process.returncode, out.decode(), log


class Members:
    """Clients that hold the run's key, each with a connection of its own."""

    def __init__(self, address: str, security: Security) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._address, self._security, self._number = address, security, 0

    def attack(self, inputs: list[Frames]) -> None:
        """Send each input over a connection of its own, once it is let in."""
        clients = [self._connect() for _ in inputs]
        until = time.monotonic() + PATIENCE_S
        for client, frames in zip(clients, inputs, strict=True):
            if client.poll(max(0, int((until - time.monotonic()) * 1000))):
                for frame in frames:
                    with suppress(zmq.Again):
                        client.send(frame, zmq.NOBLOCK)
        for client in clients:
            client.close(linger=300)

    def _connect(self) -> "zmq.Socket[bytes]":
        self._number += 1
        client = self._context.socket(zmq.DEALER)
        client.setsockopt(zmq.ROUTING_ID, b"hostile %d" % self._number)
        client.setsockopt(zmq.RECONNECT_IVL, 3_600_000)
        self._security.connect_as(client, "worker", to="server")
        client.connect(self._address)
        client.send(HANDSHAKE)
        return client

    def close(self) -> None:
        self._context.destroy(linger=0)


class WrongKeys(Members):
    """Clients with keys of another run, another role, or none."""

    def __init__(self, address: str, token: JoinToken, chance: random.Random) -> None:
        super().__init__(address, Security(new_token()))
        self._token, self._chance = token, chance

    def attack(self, inputs: list[Frames]) -> None:
        clients = []
        for _ in inputs:
            client = self._context.socket(zmq.DEALER)
            client.setsockopt(zmq.RECONNECT_IVL, 3_600_000)
            pose = self._chance.choice(["none", "run", "role", "own", "password"])
            if pose == "run":
                self._security.connect_as(client, "worker", to="server")
            elif pose == "role":
                Security(self._token).connect_as(client, "node", to="server")
            elif pose == "own":
                client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
                client.curve_serverkey = self._token.keys("server").public
            elif pose == "password":
                Security(self._token, encrypted=False).connect_as(client, "worker", to="server")
            client.connect(self._address)
            with suppress(zmq.Again):
                client.send(HANDSHAKE, zmq.NOBLOCK)
            clients.append(client)
        time.sleep(0.05)
        for client in clients:
            assert not client.poll(0), "a client without a key got an answer"
            client.close(linger=0)


def say(port: int, sayings: list[bytes]) -> None:
    """Connect as strangers and send bytes; half of them stay a little."""
    open_ones = []
    for words in sayings:
        with suppress(OSError):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
            open_ones.append(stranger)
            stranger.settimeout(0.2)
            stranger.sendall(words)
    for stranger in open_ones:
        stranger.close()


def record(victim: Victim, token: JoinToken) -> bytes:
    """Return the bytes that a member sends from its first to its first message, for others to replay."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen = bytearray()

    def relay() -> None:
        one, _ = listener.accept()
        other = socket.create_connection(("127.0.0.1", victim.port))
        back = threading.Thread(target=_copy, args=(other, one, None))
        back.start()
        _copy(one, other, seen)
        back.join()
        one.close()
        other.close()

    thread = threading.Thread(target=relay)
    thread.start()
    worker = ZeromqEndpoint(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "recorded", security=Security(token))
    worker.send(Note("recorded", 1.0))
    worker.poll(PATIENCE_S)
    worker.close()
    thread.join()
    listener.close()
    return bytes(seen)


def _copy(source: socket.socket, sink: socket.socket, seen: bytearray | None) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            if seen is not None:
                seen += data
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def attack(inputs: int = INPUTS, seed: int = 1, command: list[str] | None = None, *options: str) -> Outcome:
    """Attack a victim with so many inputs, and return what came of it."""
    begun, chance, token = time.monotonic(), random.Random(seed), new_token()
    victim = Victim(command or [sys.executable, str(HUB), *options], token)
    maker, mutator = Maker(chance), Mutator(chance)
    damages: dict[str, int] = {}
    members, wrong = Members(victim.address, Security(token)), WrongKeys(victim.address, token, chance)
    recorded = record(victim, token)
    by_members = by_strangers = 0
    base = 0
    while by_members + by_strangers < inputs:
        if by_members < MEMBERS_SHARE * (by_members + by_strangers + AT_ONCE):
            batch = []
            for number in range(by_members, by_members + AT_ONCE):
                batch.append(mutator.damage(maker.frames(TO_SERVER[number % len(TO_SERVER)])))
                damages[mutator.name] = damages.get(mutator.name, 0) + 1
            members.attack(batch)
            by_members += AT_ONCE
        else:
            if chance.random() < 0.3:
                wrong.attack([[]] * AT_ONCE)
            else:
                say(victim.port, [hostile_inputs.strangers(chance, recorded) for _ in range(AT_ONCE)])
            by_strangers += AT_ONCE
        if not victim.ask():
            break
        if by_members + by_strangers <= WARM:
            base = victim.memory()[0]
    _, most = victim.memory()
    members.close()
    wrong.close()
    code, said, log = victim.end()
    report = json.loads(said) if said.strip() else {"messages": {}, "faults": {}}
    return Outcome(
        by_members, by_strangers, victim.answered, victim.asked, code, most - base, len(log),
        time.monotonic() - begun, report["messages"], report["faults"], damages, log[-4_000:],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Hostile inputs against a listening hub.")
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object and write nothing")
    given = parser.parse_args()
    of = sources.look()
    outcome = attack(given.inputs, given.seed)
    if given.json:
        print(json.dumps(msgspec.to_builtins(outcome)))
        sys.exit(bool(outcome.complaints()))
    silent = [kind.__name__ for kind in TO_SERVER if not outcome.messages.get(kind.__name__)]
    total = outcome.members + outcome.strangers
    memory = f"{outcome.more_bytes / 1e6:.1f} MB"
    answers = f"{outcome.answered} of {outcome.asked}"
    verdicts = [
        Verdict("hostile inputs", f"{total}", ">= 10,000", total >= INPUTS),
        Verdict("of them with a valid key", f"{outcome.members}", ">= 6,000", outcome.members >= 6_000),
        Verdict("honest messages answered meanwhile", answers, "all", outcome.answered == outcome.asked),
        Verdict("exit code", f"{outcome.code}", "0", outcome.code == 0),
        Verdict("most memory beyond that after 100 inputs", memory, "<= 50 MB", outcome.more_bytes <= MOST_BYTES),
        Verdict("log", f"{outcome.log_bytes} bytes", "<= 100 KB", outcome.log_bytes <= MOST_LOG),
        Verdict("kinds of message that were never decoded", f"{len(silent)}", "none", not silent),
    ]
    names = [kind.__name__ for kind in TO_SERVER]
    rows: list[dict[str, Any]] = [
        {"kind": name, "decoded": outcome.messages.get(name, 0), "refused as malformed": outcome.faults.get(name, 0)}
        for name in names
    ]
    notes = (
        "A hub with encryption, in a process of its own, and all decoders behind it. Damaged frames that are still "
        "messages are decoded; the others are refused and their links dropped. The victim is no whole server: what a "
        f"run makes of a decoded message is not attacked here. It took {outcome.seconds:.0f} s."
    )
    page = results.write(
        "hostile",
        " ".join(["python", *sys.argv]),
        verdicts,
        rows,
        notes,
        of,
        details={"outcome": msgspec.to_builtins(outcome)},
    )
    print(page)
    sys.exit(bool(outcome.complaints()))


if __name__ == "__main__":
    main()
