"""A run without a server in a few lines: nodes are machines, models are vectors, and the caller is the network.

It does the bookkeeping of an engine (who is present, x_last, messages, the centre, the groups of local SGD) and decides
nothing: what is delivered when, and who comes and goes, is the caller's choice. News of who came and left reaches each
node late, in its own time. Everything that was said is in `lines`.
"""

from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

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
from paceline.strategies import Peer

BYTES = 4  # of an element
SHAPES = (3, 8, 0, 1)  # elements of each tensor
Model = list[np.ndarray]
Tensors = tuple[int, ...] | None


class Line(msgspec.Struct, frozen=True):
    """One decision of one node."""

    node: int
    life: int  # a node that comes back is another process
    event: PeerEvent
    actions: list[PeerAction]


class Message(msgspec.Struct):
    """A model, or a question, on its way."""

    sender: "Node"
    receiver: int
    ask: bool = False
    weight: float = 0.0
    tensors: Tensors = None
    values: dict[int, np.ndarray] = {}


class Node:
    """One process: its machine, its model, and the model as it was at each tensor's last exchange."""

    def __init__(self, number: int, life: int, machine: Peer, model: Model, steps: int) -> None:
        self.number, self.life, self.machine = number, life, machine
        self.model = model
        self.last = [tensor.copy() for tensor in model]
        self.steps = steps
        self.weight = 1.0
        self.present = True
        self.crashed = False
        self.news: deque[Callable[[float], PeerEvent]] = deque()
        self.waits_for: int | None = None  # a round of local SGD
        self.passed = 0

    def changes(self) -> tuple[float | None, tuple[float, ...] | None]:
        """As Stepped wants them."""
        moved = [float(np.linalg.norm(x - y)) for x, y in zip(self.model, self.last, strict=True)]
        was = [float(np.linalg.norm(y)) for y in self.last]
        change = _ratio(float(np.linalg.norm(moved)), float(np.linalg.norm(was)))
        each = tuple(_ratio(one, other) for one, other in zip(moved, was, strict=True))
        return change if self.machine.needs_change else None, each if self.machine.needs_changes else None

    def remember(self, tensors: Tensors) -> None:
        """These have been exchanged."""
        for tensor in range(len(self.model)) if tensors is None else tensors:
            self.last[tensor] = self.model[tensor].copy()


def _ratio(moved: float, was: float) -> float:
    return moved / was if was else float("inf") if moved else 0.0


class Network:
    """All nodes that there ever were, and all that is on its way."""

    def __init__(self, make: Callable[[int], Peer], seed: int = 0) -> None:
        self.make = make
        self.chance = np.random.default_rng(seed)
        self.now = 0.0
        self.lines: list[Line] = []
        self.nodes: dict[int, Node] = {}  # the latest process of each number
        self.former: list[Node] = []
        self.flying: list[Message] = []
        self.received: dict[int, Message] = {}
        self.centre: Model | None = None
        self.expected: Model = self.zeros()  # what the weighted sum of all models must be

    def zeros(self) -> Model:
        return [np.zeros(size) for size in SHAPES]

    @property
    def present(self) -> list[Node]:
        return [node for _, node in sorted(self.nodes.items()) if node.present]

    @property
    def listening(self) -> list[Node]:
        """Those present and those that left of their own accord, who stay until what they sent has arrived."""
        return [node for node in (*self.former, *self.nodes.values()) if not node.crashed]

    # -- what the caller can make happen -----------------------------------------------------------------------------

    def join(self, number: int, model: Model | None = None) -> Node:
        """A process starts; whoever is there hears of it later, and it hears of them."""
        model = model or [self.chance.normal(size=size) for size in SHAPES]
        others, life = self.present, 0
        if number in self.nodes:
            self.former.append(self.nodes[number])
            life = self.nodes[number].life + 1
        steps = min((node.steps for node in others), default=0)
        node = self.nodes[number] = Node(number, life, self.make(number), model, steps)
        if self.centre is None and node.machine.has_centre:
            self.centre = self.zeros()
        self._expect(node.weight, model)
        self._feed(node, Started(self.now, number, tuple(size * BYTES for size in SHAPES)))
        self._spread(node, lambda at: PeerJoined(at, number))
        for other in others:
            node.news.append(lambda at, peer=other.number: PeerJoined(at, peer))
        return node

    def step(self, node: Node, size: float = 0.1) -> None:
        """The node's optimizer makes a step."""
        move = [size * self.chance.normal(size=tensor.shape) for tensor in node.model]
        node.model = [x + d for x, d in zip(node.model, move, strict=True)]
        self._expect(node.weight, move)
        node.steps += 1
        self._feed(node, Stepped(self.now, node.steps, *node.changes(), 8, 1.0, 0.0, 0.5))

    def deliver(self, place: int) -> None:
        """A message arrives; a model that cannot be delivered comes back to its sender."""
        message = self.flying.pop(place)
        receiver = self.nodes[message.receiver]
        if message.ask:
            if receiver.present:
                self._feed(receiver, Asked(self.now, message.sender.number))
            return
        target = receiver if receiver.present else message.sender
        if target.crashed:
            self._expect(-message.weight, [message.values.get(t, z) for t, z in enumerate(self.zeros())])
            return
        number = len(self.received)
        self.received[number] = message
        self._feed(target, Received(self.now, message.sender.number, number, message.weight, message.tensors))

    def tell(self, node: Node) -> None:
        """The next news reaches the node."""
        self._feed(node, node.news.popleft()(self.now))

    def leave(self, node: Node, cause: PeerCause) -> None:
        """The node is gone from here on; of its own accord, or with all that it holds."""
        node.present, node.waits_for = False, None
        if cause == "leave":
            self._feed(node, PeerLeft(self.now, node.number, cause))
        else:
            node.crashed = True
            self._expect(-node.weight, node.model)
        self._spread(node, lambda at: PeerLeft(at, node.number, cause))
        self._meet()

    def settle(self) -> None:
        """Everybody hears everything, and all messages arrive."""
        for _ in range(10_000):
            for node in self.listening:
                while node.news:
                    self.tell(node)
            if not self.flying:
                return
            self.deliver(0)
        raise AssertionError("messages go round for ever")

    def _spread(self, about: Node, news: Callable[[float], PeerEvent]) -> None:
        for node in self.listening:
            if node is not about:
                node.news.append(news)

    # -- what an engine does ------------------------------------------------------------------------------------------

    def _feed(self, node: Node, event: PeerEvent) -> None:
        self.now += 1.0
        actions = node.machine.handle(event)
        self.lines.append(Line(node.number, node.life, event, actions))
        for action in actions:
            match action:
                case Mix():
                    self._mix(node, action)
                case Send():
                    self._send(node, action)
                case Ask():
                    self.flying.append(Message(node, action.peer, ask=True))
                    node.remember(None)
                case Exchange():
                    self._exchange(node, action)
                case Average():
                    node.waits_for = action.round
                    self._meet()

    def _mix(self, node: Node, action: Mix) -> None:
        message, share = self.received[action.message], action.weight
        for tensor, value in message.values.items():
            node.model[tensor] = (1 - share) * node.model[tensor] + share * value
        node.weight += message.weight
        if node.machine.resets_on_mix:
            node.remember(message.tensors)

    def _send(self, node: Node, action: Send) -> None:
        tensors = range(len(node.model)) if action.tensors is None else action.tensors
        values = {tensor: node.model[tensor].copy() for tensor in tensors}
        self.flying.append(Message(node, action.peer, False, action.weight, action.tensors, values))
        node.weight -= action.weight
        node.remember(action.tensors)
        size = sum(value.size * BYTES for value in values.values())
        self._feed(node, Sent(self.now, action.peer, size, 0.1))

    def _exchange(self, node: Node, action: Exchange) -> None:
        assert self.centre is not None
        for tensor in range(len(node.model)) if action.tensors is None else action.tensors:
            pull = action.alpha * (node.model[tensor] - self.centre[tensor])
            self.centre[tensor] = self.centre[tensor] + pull
            node.model[tensor] = node.model[tensor] - pull
        node.remember(action.tensors)

    def _meet(self) -> None:
        """Groups of local SGD that are complete take their average."""
        rounds = {node.waits_for for node in self.present if node.waits_for is not None}
        for number in sorted(rounds):
            members = [node for node in self.present if node.passed < number]
            if all(node.waits_for == number for node in members):
                mean = [sum(each) / len(members) for each in zip(*(node.model for node in members), strict=True)]
                for node in members:
                    node.model, node.waits_for, node.passed = [x.copy() for x in mean], None, number
                for node in members:
                    self._feed(node, Averaged(self.now, number, tuple(each.number for each in members)))

    # -- what must stay as it is --------------------------------------------------------------------------------------

    def _expect(self, weight: float, model: Model) -> None:
        self.expected = [e + weight * x for e, x in zip(self.expected, model, strict=True)]

    def weighted_sum(self) -> Model:
        """Of all models there are, those on their way and the centre included."""
        total = self.zeros() if self.centre is None else [x.copy() for x in self.centre]
        for node in self.listening:
            total = [t + node.weight * x for t, x in zip(total, node.model, strict=True)]
        for message in self.flying:
            for tensor, value in message.values.items():
                total[tensor] = total[tensor] + message.weight * value
        return total

    def error(self) -> float:
        """By how much the weighted sum is off."""
        pairs = zip(self.weighted_sum(), self.expected, strict=True)
        return max(float(np.abs(a - b).max(initial=0.0)) for a, b in pairs)
