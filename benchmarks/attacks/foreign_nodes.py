"""What must hold of nodes in a journal: docs/internals/peer-machines.md. Shares no code with paceline."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

Line = dict[str, Any]
CLOSE = 1e-9


class Nodes:
    """The machines of a run without a server: every message arrives once, and weights are kept."""

    def __init__(self, blame: Callable[[str, str], None], *, known: bool = True) -> None:
        self._blame = blame
        self._known = known  # from the beginning; else messages may have been sent before
        self._sent: Counter[tuple[int, int, float]] = Counter()
        self._received: Counter[tuple[int, int, float]] = Counter()
        self._returned: Counter[tuple[int, float]] = Counter()
        self._weights: dict[tuple[int, int], float] = {}
        self._messages: dict[tuple[int, int], set[int]] = {}
        self._rounds: dict[tuple[int, int], int] = {}
        self._steps: dict[tuple[int, int], int] = {}

    def take(self, line: Line, *, weighted: bool) -> None:
        """Follow one decision of one node."""
        node, who, event = line["node"], (line["node"], line["life"]), line["event"]
        kind = event["kind"]
        if who not in self._weights:
            if kind != "started" and self._known:
                self._blame("a machine's first event is started", f"node {who} begins with {kind}")
            self._weights[who] = 1.0
        if kind == "stepped":
            if event["step"] <= self._steps.get(who, -1):
                self._blame("steps go forward", f"node {who} makes step {event['step']} after {self._steps[who]}")
            self._steps[who] = event["step"]
        elif kind == "averaged":
            if event["round"] <= self._rounds.get(who, -1) or node not in event["members"]:
                self._blame("rounds go forward", f"node {who} averages round {event['round']} of {event['members']}")
            self._rounds[who] = event["round"]
        elif kind == "received":
            self._on_received(who, event, line["actions"], weighted=weighted)
        for action in line["actions"]:
            if action["kind"] == "send":
                weight = float(action["weight"])
                self._sent[node, action["peer"], weight] += 1
                if weighted:
                    self._weights[who] -= weight
                    if weight <= 0 or (self._known and self._weights[who] < -CLOSE):
                        self._blame("weights are kept", f"node {who} sends {weight}, {self._weights[who]} are left")

    def _on_received(self, who: tuple[int, int], event: Line, actions: list[Line], *, weighted: bool) -> None:
        node, weight = who[0], float(event["weight"])
        seen = self._messages.setdefault(who, set())
        if event["message"] in seen:
            self._blame("every message arrives once", f"node {who} receives message {event['message']} twice")
        seen.add(event["message"])
        if event["peer"] == node:
            self._returned[node, weight] += 1
        else:
            self._received[event["peer"], node, weight] += 1
        mixes = [action for action in actions if action["kind"] == "mix"]
        passes_on = any(action["kind"] == "send" for action in actions)
        if weighted and mixes:
            before = self._weights[who]
            share = weight / (before + weight)
            if self._known and not math.isclose(float(mixes[0]["weight"]), share, rel_tol=1e-6):
                self._blame("weights are kept", f"node {who} mixes by {mixes[0]['weight']} instead of {share}")
            self._weights[who] += weight
        elif weighted and passes_on:
            self._weights[who] += weight
        elif weighted and event["peer"] != node:
            self._blame("weights are kept", f"node {who} drops a message with weight {weight}")

    def close(self) -> None:
        """Judge messages: none arrives that was not sent."""
        if not self._known:
            return
        for (sender, node, weight), count in self._received.items():
            if count > self._sent[sender, node, weight]:
                self._blame("every message arrives once", f"{count} of weight {weight} from node {sender} at {node}")
        for (node, weight), count in self._returned.items():
            sent = sum(n for (sender, _, value), n in self._sent.items() if sender == node and value == weight)
            if count > sent:
                self._blame("every message arrives once", f"{count} of weight {weight} came back to node {node}")
