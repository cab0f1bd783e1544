"""What happened to one node of a run without a server: the inputs of its machine.

Every node has a machine of its own, which is fed what concerns that node and nothing else. The conventions are those of
events.py: frozen values, each stamped with `at`, which a journal holds as they are. `TimerFired` is events.py's own; no
machine sets a timer so far.

At a step's border an engine feeds `Stepped` first, then every `Asked` and `Received` that has arrived, in the order of
their arrival, and carries each decision out before it feeds the next event.
"""

from typing import Literal

import msgspec

from paceline.core.events import TimerFired

PeerCause = Literal["done", "crash", "leave", "timeout"]  # a node that only waits for data stays where it is


class Started(msgspec.Struct, frozen=True, gc=False, tag="started", tag_field="kind"):
    """The machine's first event, and the first of each phase after that: it is alone until others have `PeerJoined`.

    Whatever a machine knew before is void, its chance aside.
    """

    at: float
    node: int  # whose machine this is
    sizes: tuple[int, ...]  # bytes of each tensor; elsewhere a tensor is named by its place here


class PeerJoined(msgspec.Struct, frozen=True, gc=False, tag="peer_joined", tag_field="kind"):
    """`peer` can be sent to from here on. For a peer that is present, or for oneself, it changes nothing."""

    at: float
    peer: int


class PeerLeft(msgspec.Struct, frozen=True, gc=False, tag="peer_left", tag_field="kind"):
    """`peer` can no longer be reached. A node that leaves of its own accord is told of itself, as its last event but
    for what still arrives, so that it can send on what the others must not lose."""

    at: float
    peer: int
    cause: PeerCause


class Stepped(msgspec.Struct, frozen=True, gc=False, tag="stepped", tag_field="kind"):
    """This node's optimizer has made a step.

    `change` and `changes` are `|x - x_last| / |x_last|` of the whole model and of each tensor, where x_last is the
    tensor right after its last exchange (at first: as it was when the machine started). The engine keeps x_last and
    sets it for every tensor that a Send, an Ask, a Mix or an Exchange of the machine names, when that action has been
    carried out (for a machine whose `resets_on_mix` is false, a Mix does not count); so the machine, which knows the
    same actions, can count the steps since. A tensor that was zero then and is not any more has changed infinitely; one
    that has stayed zero has not changed.
    """

    at: float
    step: int  # steps this node has made; a newcomer counts on from the smallest count among those present
    change: float | None  # None where the machine does not need it
    changes: tuple[float, ...] | None  # likewise
    samples: int
    compute_s: float
    wait_s: float
    loss: float | None = None


class Asked(msgspec.Struct, frozen=True, gc=False, tag="asked", tag_field="kind"):
    """`peer` wants this node's model."""

    at: float
    peer: int


class Received(msgspec.Struct, frozen=True, gc=False, tag="received", tag_field="kind"):
    """A model, or some of its tensors, has arrived. One that the answer does not mix in is dropped.

    A Send that could not be delivered comes back as received from oneself, as it was when it was sent.
    """

    at: float
    peer: int  # the sender
    message: int  # its number, unique at this node
    weight: float  # of the Send
    tensors: tuple[int, ...] | None  # of the Send; None: all


class Sent(msgspec.Struct, frozen=True, gc=False, tag="sent", tag_field="kind"):
    """A Send has left this node: what it took."""

    at: float
    peer: int
    bytes: int  # on the wire
    seconds: float


class Averaged(msgspec.Struct, frozen=True, gc=False, tag="averaged", tag_field="kind"):
    """The group's average of that round is this node's model; the members are in node order, this node among them."""

    at: float
    round: int
    members: tuple[int, ...]


PeerEvent = Started | PeerJoined | PeerLeft | Stepped | Asked | Received | Sent | Averaged | TimerFired
