"""Light clients of a run: connections that hold a valid key, say hello to the server and nothing else.

    python -m contenders.idle_members ADDRESS TOKEN_FILE COUNT READY_FILE

ZeroMQ sends their heartbeats, as it does for workers. The ready file appears when all have finished the handshake.
"""

import resource
import secrets
import sys
import time
from pathlib import Path

import zmq

from paceline.transport.join_token import read_token
from paceline.transport.security import Security
from paceline.transport.zeromq import HANDSHAKE, bound_link

PATIENCE_S = 120.0  # for the server to be there and to finish all handshakes
FOREVER_S = 3600.0  # whoever started this ends it


def main(address: str, token: Path, count: int, ready: Path) -> None:
    """Connect, say hello, and stay."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    security = Security(read_token(token.read_text()))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 16)
    unheard = [_connected(context, security, address) for _ in range(count)]
    kept = list(unheard)
    until = time.monotonic() + PATIENCE_S
    while unheard:
        if time.monotonic() > until:
            raise SystemExit(f"{len(unheard)} of {count} connections were not admitted within {PATIENCE_S:g} s")
        unheard = [socket for socket in unheard if not _says_hello(socket)]
        time.sleep(0.05)
    ready.write_text(str(len(kept)))
    time.sleep(FOREVER_S)


def _connected(context: "zmq.Context[zmq.Socket[bytes]]", security: Security, address: str) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.DEALER)
    security.connect_as(socket, "worker", to="server")
    bound_link(socket)
    socket.setsockopt(zmq.ROUTING_ID, secrets.token_hex(16).encode())
    socket.setsockopt(zmq.IMMEDIATE, 1)  # sending fails until the handshake is done
    socket.connect(address)
    return socket


def _says_hello(socket: "zmq.Socket[bytes]") -> bool:
    try:
        socket.send(HANDSHAKE, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
