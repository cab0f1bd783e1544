"""Events of one node in a run without a server: the inputs of its machine.

Every node has its own machine, which gets the events of that node alone. The conventions are those of events.py: frozen
values, each stamped with `at`, which a journal holds unchanged. `TimerFired` is imported from events.py; no machine
sets a timer.

Between two steps an engine feeds `Stepped` first, then every `Asked` and `Received` that has arrived, in the order of
their arrival, and carries out each decision before it feeds the next event.
"""

from typing import Literal

import msgspec

from paceline.core.events import TimerFired

PeerCause = Literal["done", "crash", "leave", "timeout"]  # no "idle": a node that waits for data stays present


class Started(msgspec.Struct, frozen=True, gc=False, tag="started", tag_field="kind"):
    """The first event of each phase: the node is alone until others have `PeerJoined`.

    The machine drops all earlier state except its random generator's.
    """

    at: float
    node: int  # the machine's own node
    sizes: tuple[int, ...]  # bytes of each tensor; other events and actions name a tensor by its index here


class PeerJoined(msgspec.Struct, frozen=True, gc=False, tag="peer_joined", tag_field="kind"):
    """`peer` can be sent to from here on. For a peer already present, or the node itself, it changes nothing."""

    at: float
    peer: int


class PeerLeft(msgspec.Struct, frozen=True, gc=False, tag="peer_left", tag_field="kind"):
    """`peer` can no longer be reached. A node that leaves by itself gets this event about itself, followed only by
    messages that still arrive, so that it can send on what the others must not lose."""

    at: float
    peer: int
    cause: PeerCause


class Stepped(msgspec.Struct, frozen=True, gc=False, tag="stepped", tag_field="kind"):
    """This node's optimizer has made a step.

    `change` and `changes` are `|x - x_last| / |x_last|` of the whole model and of each tensor, where x_last is the
    tensor right after its last exchange (at first: when the machine started). The engine keeps x_last and resets it
    for every tensor that a Send, Ask, Mix or Exchange of the machine names, after carrying out that action (a Mix does
    not count for a machine whose `resets_on_mix` is false); so the machine, which knows the same actions, can count the
    steps since. The change is infinite for a tensor that was zero and no longer is, and 0 for one that stayed zero.
    """

    at: float
    step: int  # steps of this node; a newcomer starts at the smallest count among those present
    change: float | None  # None if the machine does not need it
    changes: tuple[float, ...] | None  # likewise
    samples: int
    compute_s: float
    wait_s: float
    loss: float | None = None


class Asked(msgspec.Struct, frozen=True, gc=False, tag="asked", tag_field="kind"):
    """`peer` asks for this node's model."""

    at: float
    peer: int


class Received(msgspec.Struct, frozen=True, gc=False, tag="received", tag_field="kind"):
    """A model, or some of its tensors, has arrived. If the decision does not mix it in, it is dropped.

    A Send that could not be delivered comes back unchanged, as received from the node itself.
    """

    at: float
    peer: int  # the sender
    message: int  # its number, unique at this node
    weight: float  # of the Send
    tensors: tuple[int, ...] | None  # of the Send; None: all


class Sent(msgspec.Struct, frozen=True, gc=False, tag="sent", tag_field="kind"):
    """A Send has left this node, at this cost."""

    at: float
    peer: int
    bytes: int  # on the wire
    seconds: float


class Averaged(msgspec.Struct, frozen=True, gc=False, tag="averaged", tag_field="kind"):
    """This node has adopted the group's average of that round; `members` are in node order and include this node."""

    at: float
    round: int
    members: tuple[int, ...]


PeerEvent = Started | PeerJoined | PeerLeft | Stepped | Asked | Received | Sent | Averaged | TimerFired
