"""The victim of `bench_hostile.py`: a listening hub with the whole path to decoded messages, in a process of its own.

It reads a join token from its standard input, writes its address, and takes every member in. A worker whose message is
refused is hung up. A Note is answered, by which an honest worker sees that the process is alive. When the input ends it
writes what it has seen as one line of JSON and exits. `--planted` gives it a fault that the judges must find.
"""

import argparse
import collections
import json
import select
import sys
import time

from paceline.core.errors import PacelineError
from paceline.peers import messages as _node_messages  # noqa: F401 - registers what a worker may send
from paceline.tables import messages as _table_messages  # noqa: F401 - likewise
from paceline.transport.base import Lost
from paceline.transport.join_token import read_token
from paceline.transport.messages import Cancelled, Note
from paceline.transport.security import Security
from paceline.transport.value_codec import PackedValue, unpack_value
from paceline.transport.zeromq import ZeromqHub

PLANTED = ("crash", "hang", "leak")
LEAK = 512 << 10  # bytes for every fault


class Seen:
    """What arrived."""

    def __init__(self) -> None:
        self.messages: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self.leaked: list[bytes] = []

    def fault(self, error: PacelineError, planted: str | None) -> None:
        words = str(error).split()
        self.faults[words[2] if words[1:2] == ["malformed"] else words[1]] += 1
        if planted == "crash" and self.faults.total() > 50:
            raise error
        if planted == "hang" and self.faults.total() > 50:
            time.sleep(3600)
        if planted == "leak":
            self.leaked.append(b"x" * LEAK)


def serve(hub: ZeromqHub, planted: str | None) -> Seen:
    """Take members in and read what they send, until the standard input ends."""
    seen, ends = Seen(), {}
    poller = select.poll()
    poller.register(hub, select.POLLIN)
    poller.register(sys.stdin, select.POLLIN)
    while not any(descriptor == sys.stdin.fileno() for descriptor, _ in poller.poll(100)):
        for end in hub.pump():
            drain(end, seen, planted)
        for token in list(hub._strangers):
            ends[token] = hub.expect(token.decode("utf-8", "replace")) if _is_text(token) else None
        for token, end in list(ends.items()):
            if end is None or not drain(end, seen, planted):
                del ends[token]
    return seen


def _is_text(token: bytes) -> bool:
    return token == token.decode("utf-8", "replace").encode()


def drain(end, seen: Seen, planted: str | None) -> bool:
    """Read what has arrived over a link; return whether it is still of use."""
    try:
        while (message := end.collect()) is not None:
            seen.messages[type(message).__name__] += 1
            if isinstance(message, Note):
                end.deliver(Cancelled(int(message.value) if abs(message.value) < 1e9 else 0))
            elif type(message).__name__ == "CollectiveCall":  # the server decodes these values as well
                unpack_value(PackedValue(message.value, message.tensors))
    except Lost:
        end.close()
        return False
    except PacelineError as error:
        seen.fault(error, planted)
        end.close()
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planted", choices=PLANTED)
    parser.add_argument("--trusted", action="store_true")
    given = parser.parse_args()
    security = Security(read_token(sys.stdin.readline()), encrypted=not given.trusted)
    hub = ZeromqHub("tcp://127.0.0.1:*", security)
    print(hub.address, flush=True)
    seen = serve(hub, given.planted)
    hub.close()
    print(json.dumps({"messages": seen.messages, "faults": seen.faults}), flush=True)


if __name__ == "__main__":
    main()
