"""paceline between two hosts of a lab: `paceline serve` on one, `paceline join` on the other, and this file as script.

The timed part is `optimizer.step()`, with the gradient in ordinary memory, as in `paceline_local`: copying it to where
it is sent from, sending it, applying it, sending the parameters back and copying them into the model are all in it.
Bytes are those of the worker's network interface in the timed rounds; the run's start and end move the model, too.

    paceline serve ... contenders/paceline_hosts.py TASK_FILE ANSWER_FILE    # what the hosts run
"""

import contextlib
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import paceline
from contenders import vectors
from contenders.questions import Exchanged, HostExchange
from netlab import Host, Lab, split_cpus
from paceline.engines.hosts import tokens
from paceline.records import journal

PORT = 7000
ENOUGH = 1_000_000  # samples: the worker leaves the loop when it has made its rounds
IDLE = "idle"  # the file that says that all idle clients are connected
IDLE_S = 120.0
END_S = 60.0  # for the others to end after the first has


def host_exchange(task: HostExchange) -> Exchanged:
    """Exchange on a lab of two hosts: the server is on the first, the worker on the second."""
    hosts = 3 if task.idle else 2
    cpus = split_cpus(hosts) if task.apart else None
    with tempfile.TemporaryDirectory() as name, Lab(hosts=hosts, rate=task.rate, cpus=cpus) as lab:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps(dataclasses.asdict(task)))
        lines = folder / "journal.jsonl"
        server = serve(
            lab.hosts[0], folder, "--workers", "1", "--servers", str(task.servers), "--strategy", "asp",
            "--evaluate-every", "off", "--journal", lines, trusted=not task.curve, threads=task.threads,
        )  # fmt: skip
        if task.idle:
            connect_idle(lab.hosts[2], lab.hosts[0], folder, task.idle)
        worker = join(lab.hosts[1], lab.hosts[0], folder, trusted=not task.curve)
        require_end(folder, server=server, worker=worker)
        found = json.loads((folder / "answer.json").read_text())
        spent = server_facts(lines)
    rounds = task.rounds
    facts = {
        "sent_bytes": found["sent_bytes"] / rounds,
        "received_bytes": found["received_bytes"] / rounds,
        "worker_cpu_s": found["cpu_s"] / rounds,
        "server_cpu_s": spent["cpu_s"] / (task.warmup + rounds),
    }
    copies = (
        "gradient 1 (to where it is sent from), parameters 2 (from the store, to the model), and a TCP socket each way"
    )
    return Exchanged(found["round_s"], found["worst_error"], facts, copies)


# -- the commands ----------------------------------------------------------------------------------------------------


def serve(
    host: Host, folder: Path, *options: str | os.PathLike[str], trusted: bool = False, threads: int = 1
) -> "subprocess.Popen[bytes]":
    """Serve a run of this script on a host; what it reads and writes is in the folder."""
    token = folder / "token"
    tokens.write_new(token)
    given = ["--listen", f"{host.address}:{PORT}", "--threads", str(threads), "--token-file", os.fspath(token)]
    rest = [__file__, folder / "task.json", folder / "answer.json"]
    return _start(host, folder, "serve", [*given, "--runs-dir", folder / "runs", *options], trusted, rest)


def join(host: Host, server: Host, folder: Path, *, trusted: bool = False) -> "subprocess.Popen[bytes]":
    """Join that run from a host."""
    given = ["--token-file", folder / "token", "--start", "fresh"]
    return _start(host, folder, "join", given, trusted, [f"{server.address}:{PORT}", __file__])


def connect_idle(host: Host, server: Host, folder: Path, count: int) -> None:
    """Let a host connect so many light clients to the server, which never become workers."""
    words = [f"tcp://{server.address}:{PORT + 1}", folder / "token", str(count), folder / IDLE]
    with (folder / "idle.log").open("ab") as log:
        host.popen(
            [sys.executable, "-m", "contenders.idle_members", *words], stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def _start(
    host: Host, folder: Path, command: str, given: list[Any], trusted: bool, rest: list[Any]
) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "paceline", command, *["--trusted-network"] * trusted, *given, *rest]
    with (folder / f"{command}.log").open("ab") as log:
        return host.popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=folder)


def require_end(folder: Path, **processes: "subprocess.Popen[bytes]") -> None:
    """Wait until all have ended well; the log of one that has not is in the error."""
    running = dict(processes)
    until = None
    while running:
        for name, process in list(running.items()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.1)
                del running[name]
                until = until or time.monotonic() + END_S
                if code:
                    raise RuntimeError(f"the {name} ended with exit code {code}:\n{logs(folder)}")
        if until is not None and time.monotonic() > until:
            raise RuntimeError(f"{' and '.join(running)} did not end:\n{logs(folder)}")


def logs(folder: Path) -> str:
    """What the commands have said."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.log")))


def server_facts(lines: Path) -> dict[str, float]:
    """What the server says of itself in the journal."""
    for line in journal.read(lines):
        if isinstance(line, journal.Observation) and line.what == "server":
            return {key: float(value) for key, value in line.data.items()}
    raise RuntimeError(f"the journal {lines} has no line about the server")


# -- on the worker's host --------------------------------------------------------------------------------------------


def _exchange() -> None:
    task = HostExchange(**json.loads(Path(sys.argv[1]).read_text()))
    session = paceline.init()
    model, gradients = vectors.Flat(task.parameters), vectors.Gradients(task.parameters)
    optimizer = vectors.sgd(list(model.parameters()), task.lr)
    session.prepare(model, optimizer)
    gradient, round_s = torch.empty(task.parameters), []
    rounds = task.warmup + task.rounds
    counted, cpu_s = (0, 0), 0.0
    batches = session.batches(vectors.Counted(ENOUGH), batch_size=1, collate_fn=_as_is)
    for number, _ in zip(range(rounds), batches, strict=False):
        if number == task.warmup:
            _await_idle(task.idle)
            counted, cpu_s = interface_bytes(), 0.0
        optimizer.zero_grad()
        model.values.grad = gradients.write(number, gradient)
        used, began = _cpu_s(), time.perf_counter()
        optimizer.step()
        round_s.append(time.perf_counter() - began)
        cpu_s += _cpu_s() - used
    sent, received = (after - before for after, before in zip(interface_bytes(), counted, strict=True))
    error = vectors.worst_error(model.values.detach(), rounds, task.lr)
    answer = {"round_s": round_s[task.warmup :], "worst_error": error, "cpu_s": cpu_s}
    Path(sys.argv[2]).write_text(json.dumps({**answer, "sent_bytes": sent, "received_bytes": received}))


def _await_idle(count: int) -> None:
    """Wait for the clients that are connected during the timed rounds."""
    ready, until = Path(sys.argv[1]).with_name(IDLE), time.monotonic() + IDLE_S
    while count and not ready.exists():
        if time.monotonic() > until:
            raise RuntimeError(f"{count} idle clients were not connected within {IDLE_S:g} s")
        time.sleep(0.05)


def _as_is(batch: list[int]) -> list[int]:
    return batch


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def interface_bytes() -> tuple[int, int]:
    """Bytes that this host has sent over its cable and received."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            counted = numbers.split()
            return int(counted[8]), int(counted[0])
    raise RuntimeError("this host has no eth0")


if __name__ == "__main__":
    _exchange()
