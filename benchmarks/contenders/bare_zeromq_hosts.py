"""The same bytes there and back over a bare ZeroMQ socket between two hosts of a lab, with CURVE or without.

It does what paceline's own transport does with a tensor and nothing else: chunks that are sent from where they lie, no
limit on what waits, each chunk received straight into memory that is there already. One process is on each host.

    python -m contenders.bare_zeromq_hosts    # what a host runs; its part comes as JSON through its input
"""

import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import zmq

from contenders.questions import Exchanged, HostExchange
from netlab import Host, Lab, split_cpus

CHUNK = 1 << 20


def host_exchange(task: HostExchange) -> Exchanged:
    """Exchange on a lab of two hosts: the server is on the first, the worker on the second."""
    keys: list[str] = []
    if task.curve:
        keys = [key.decode() for _ in range(2) for key in zmq.curve_keypair()]
    with Lab(hosts=2, rate=task.rate, cpus=split_cpus(2) if task.apart else None) as lab:
        part = {"task": dataclasses.asdict(task), "keys": keys, "address": f"tcp://{lab.hosts[0].address}"}
        server = _start(lab.hosts[0], {**part, "role": "server"})
        part["address"] = _say(server)["address"]
        sent, received = lab.hosts[1].bytes_sent(), lab.hosts[1].bytes_received()
        worker = _start(lab.hosts[1], {**part, "role": "worker"})
        asked, answered = _say(worker), _say(server)
        for process in (worker, server):
            if process.wait():
                raise RuntimeError(f"a host's part ended with exit code {process.returncode}")
        exchanges = task.warmup + task.rounds
        facts = {
            "sent_bytes": (lab.hosts[1].bytes_sent() - sent) / exchanges,
            "received_bytes": (lab.hosts[1].bytes_received() - received) / exchanges,
            "worker_cpu_s": asked["cpu_s"] / task.rounds,
            "server_cpu_s": answered["cpu_s"] / task.rounds,
            "up_s": statistics.median(asked["up_s"]),  # until the server's first byte, which follows the worker's last
        }
    worst = max(asked["worst_error"], answered["worst_error"])
    copies = "gradient and parameters each through a TCP socket" + (", encrypted" if task.curve else "")
    return Exchanged(asked["round_s"], worst, facts, copies)


def _start(host: Host, part: dict[str, Any]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "contenders.bare_zeromq_hosts"]
    process = host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps(part))
    process.stdin.close()
    return process


def _say(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The next line of what a host's part prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a host's part ended with exit code {process.wait()} and without an answer")
    found: dict[str, Any] = json.loads(line)
    return found


# -- on a host -------------------------------------------------------------------------------------------------------


def _part() -> None:
    part = json.load(sys.stdin)
    task = HostExchange(**part["task"])
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, -1)
    answer = (_serve if part["role"] == "server" else _work)(socket, task, part)
    print(json.dumps(answer), flush=True)
    socket.close()
    context.term()


def _serve(socket: "zmq.Socket[bytes]", task: HostExchange, part: dict[str, Any]) -> dict[str, Any]:
    if task.curve:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = (key.encode() for key in part["keys"][:2])
    port = socket.bind_to_random_port(part["address"])
    received, weights = np.zeros(task.parameters, np.float32), _values(task, "weights")
    print(json.dumps({"address": f"{part['address']}:{port}"}), flush=True)
    used = 0.0
    for number in range(task.warmup + task.rounds):
        if number == task.warmup:
            used = _cpu_s()
        _receive(socket, received)
        _send(socket, weights)
    socket.recv()  # the worker has it all: nothing is left to be encrypted and sent
    cpu_s = _cpu_s() - used
    last = _values(task, "gradient") + np.float32(task.warmup + task.rounds - 1)
    return {"cpu_s": cpu_s, "worst_error": float(np.abs(received - last).max())}


def _work(socket: "zmq.Socket[bytes]", task: HostExchange, part: dict[str, Any]) -> dict[str, Any]:
    if task.curve:
        socket.curve_serverkey = part["keys"][0].encode()
        socket.curve_publickey, socket.curve_secretkey = (key.encode() for key in part["keys"][2:])
    socket.connect(part["address"])
    base = _values(task, "gradient")
    gradient, weights = np.zeros_like(base), np.zeros_like(base)
    round_s, up_s, cpu_s = [], [], 0.0
    for number in range(task.warmup + task.rounds):
        np.add(base, np.float32(number), out=gradient)  # other values in every round
        weights.fill(0)
        used, began = _cpu_s(), time.perf_counter()
        _send(socket, gradient)
        socket.poll()
        up_s.append(time.perf_counter() - began)
        _receive(socket, weights)
        round_s.append(time.perf_counter() - began)
        if number >= task.warmup:
            cpu_s += _cpu_s() - used
    socket.send(b"")
    worst = float(np.abs(weights - _values(task, "weights")).max())
    return {"round_s": round_s[task.warmup :], "up_s": up_s[task.warmup :], "cpu_s": cpu_s, "worst_error": worst}


def _values(task: HostExchange, what: str) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Values that both hosts can make, to see that those that arrive are right."""
    return np.random.default_rng(len(what)).random(task.parameters, np.float32)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _send(socket: "zmq.Socket[bytes]", values: "np.ndarray[Any, Any]") -> None:
    view = values.data.cast("B")
    for start in range(0, len(view), CHUNK):
        socket.send(view[start : start + CHUNK], copy=False)


def _receive(socket: "zmq.Socket[bytes]", values: "np.ndarray[Any, Any]") -> None:
    view = values.data.cast("B")
    for start in range(0, len(view), CHUNK):
        socket.recv_into(view[start : start + CHUNK])


if __name__ == "__main__":
    _part()
