"""Run in a network namespace of its own: one job without a server over TCP, and what its loopback has carried.

Prints the report's bytes and the interface's own count as one JSON object.
"""

import array
import fcntl
import json
import socket
import struct
import sys
import tempfile
from pathlib import Path

import torch
from clusters import Rows, mean_square

import paceline
from paceline.engines.local import addresses

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
WIDTH = 700
ROWS = Rows(120)


def script():
    session = paceline.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    session.prepare(model, optimizer)
    for x, y, _ in session.batches(ROWS, batch_size=4, epochs=4):
        optimizer.zero_grad()
        mean_square(model, x, y).backward()
        optimizer.step()


def bring_loopback_up():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = array.array("b", struct.pack("16sh", b"lo", 0) + bytes(24))
        fcntl.ioctl(any_socket, SIOCGIFFLAGS, request)
        _, flags = struct.unpack("16sh", request[:18])
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | IFF_UP) + bytes(24))


def carried():
    """Bytes that the loopback has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    raise LookupError("there is no loopback")


def main():
    bring_loopback_up()
    before = carried()
    with tempfile.TemporaryDirectory() as folder, addresses.loopback():
        done = paceline.launch(
            script, engine="local", workers=4, strategy=sys.argv[1], transport="zeromq", evaluate_every="off",
            runs_dir=folder,
        )  # fmt: skip
        model_bytes = sum(value.nbytes for value in done.model_state.values())
    report = done.summary
    print(json.dumps({
        "carried": carried() - before, "sent": report.bytes_up, "gathered": report.peers.gathered_bytes,
        # Everybody's first model up and down, and the last one down.
        "model": model_bytes, "workers": 4, "exchanges": report.exchanges,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
