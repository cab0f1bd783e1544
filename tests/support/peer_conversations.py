"""Transcripts of conversations with one node's machine; the form is that of tests/conversations.py.

== title
strategy gossip:form=weighted            with a fresh machine of seed 0
0 start n0 400/800                       node 0, and the bytes of each tensor
0 join n1 n2                             peers; leave, crash, done and timeout too, n0 itself included
1 step [change=0.1 changes=0.1/inf]      the node's next step
1 receive n1 [weight=0.5 tensors=0/2]    what it sent itself comes back as `receive n0`
1 ask n1                                 n1 asks for its model
2 sent n1                                a Send has left the node
2 average n0 n1                          the group has met
restore                                  goes on with a machine restored from a snapshot
3 repeat 10: step changes=0.1/0.1        answers are left out
"""

import re
from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from paceline import strategies
from paceline.core.actions import Track
from paceline.core.peer_actions import Ask, Average, Exchange, Mix, PeerAction, Send
from paceline.core.peer_events import (
    Asked,
    Averaged,
    PeerCause,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    Received,
    Sent,
    Started,
    Stepped,
)
from paceline.records.journal import spelled_out

_LINE = re.compile(r"(?P<at>[\d.]+) +(?P<what>\w+) *(?P<rest>.*)")


class PeerTalk:
    """One conversation: numbers steps, messages and rounds."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._machine = strategies.build_peer(spec, 0, 0)
        self._node = -1
        self._steps = 0
        self._messages = 0
        self._round = 0

    def hear(self, line: str) -> Iterator[str]:
        """Everything that the machine answers to the line."""
        if line == "restore":
            data = msgspec.json.decode(msgspec.json.encode(spelled_out(self._machine.snapshot())))
            self._machine = strategies.build_peer(self._spec, 1, 1).restore(data)
            yield "restored from its snapshot"
            return
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError("a line is `TIME WHAT ...`, such as `1.5 step`")
        at, what, rest = float(found["at"]), found["what"], found["rest"]
        if what == "repeat":
            times, _, each = rest.partition(": ")
            for _ in range(int(times)):
                for event in self._events(at, *each.split()):
                    self._machine.handle(event)
            yield f"... {times} times"
            return
        told = [f"{_worded(a)} | {a.reason}" for e in self._events(at, what, *rest.split()) for a in self._tell(e)]
        yield from told or ["nothing"]

    def _tell(self, event: PeerEvent) -> list[PeerAction]:
        actions = self._machine.handle(event)
        for action in actions:
            if isinstance(action, Average):
                self._round = action.round
        return actions

    def _events(self, at: float, what: str, *words: str) -> Iterator[PeerEvent]:
        nodes = [int(word[1:]) for word in words if re.fullmatch(r"n\d+", word)]
        given: dict[str, Any] = dict(word.split("=") for word in words if "=" in word)
        if what == "start":
            self._node, self._steps = nodes[0], 0
            yield Started(at, nodes[0], tuple(map(int, words[1].split("/"))))
        elif what == "join":
            yield from (PeerJoined(at, node) for node in nodes)
        elif what in get_args(PeerCause):
            yield from (PeerLeft(at, node, what) for node in nodes)  # type: ignore[arg-type]
        elif what == "step":
            self._steps += 1
            yield Stepped(at, self._steps, _number(given.get("change")), _numbers(given.get("changes")), 8, 1.0, 0.0)
        elif what == "receive":
            self._messages += 1
            tensors = given.get("tensors")
            named = tuple(map(int, tensors.split("/"))) if tensors else None
            yield Received(at, nodes[0], self._messages, float(given.get("weight", 1)), named)
        elif what == "ask":
            yield from (Asked(at, node) for node in nodes)
        elif what == "sent":
            yield Sent(at, nodes[0], 1200, 0.1)
        elif what == "average":
            yield Averaged(at, self._round, tuple(nodes))
        else:
            raise ValueError(f"{what} is nothing that can happen")


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)


def _numbers(text: str | None) -> tuple[float, ...] | None:
    return None if text is None else tuple(map(float, text.split("/")))


def _worded(action: PeerAction) -> str:
    """The action in a few words, its reason apart."""
    match action:
        case Mix():
            return f"mix m{action.message}*{action.weight:.4g}"
        case Send():
            return f"send n{action.peer} {_tensors(action.tensors)}, weight {action.weight:.4g}"
        case Ask():
            return f"ask n{action.peer}"
        case Exchange():
            return f"exchange {_tensors(action.tensors)}, alpha {action.alpha:.4g}"
        case Average():
            return f"average, round {action.round}"
        case Track():
            return f"track {action.name} = {action.value:.4g}"


def _tensors(tensors: tuple[int, ...] | None) -> str:
    return "all" if tensors is None else "tensors " + "/".join(map(str, tensors))
