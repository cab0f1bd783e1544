"""What a node of a run without a server and its engine say to each other, beside what every worker says."""

from typing import Any

import msgspec

from paceline.peer_actions import PeerAction
from paceline.peer_events import PeerEvent
from paceline.transport.messages import Work

# -- from a node -------------------------------------------------------------------------------------------------------


class Model(msgspec.Struct, frozen=True):
    """The tensors that this node trains, where they lie: whoever averages all nodes' models reads them there."""

    tensors: Any  # a function that gives them, since a module may put other buffers in their place
    counters: Any  # likewise, of buffers that are not averaged


class Outgoing(msgspec.Struct, frozen=True):
    """Tensors for a peer, as they were when this was decided."""

    peer: int
    weight: float
    tensors: tuple[int, ...] | None
    values: list[Any]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values)


class Wanted(msgspec.Struct, frozen=True):
    """A peer is asked for its model."""

    peer: int


class Elastic(msgspec.Struct, frozen=True):
    """An exchange with the centre; the answer is Pulled."""

    alpha: float
    tensors: tuple[int, ...] | None
    values: list[Any]


class Averaging(msgspec.Struct, frozen=True):
    """This node's model for that round's average; the answer is Averages."""

    round: int
    values: list[Any]


class Decided(msgspec.Struct, frozen=True):
    """What the node's machine made of an event, for the journal."""

    event: PeerEvent
    actions: list[PeerAction]


PeerToServer = Model | Outgoing | Wanted | Elastic | Averaging | Decided

# -- to a node ---------------------------------------------------------------------------------------------------------


class Arrived(msgspec.Struct, frozen=True):
    """Something for the node's machine, with the values that belong to it, if any."""

    event: PeerEvent
    values: list[Any] | None = None


class Border(msgspec.Struct, frozen=True):
    """What a node has to know at the end of the step that it is about to make."""

    at: float
    step: int
    compute_s: float
    wait_s: float
    arrived: list[Arrived]
    others: tuple[int, ...] | None = None  # who is there, where the node's machine is to start


class Step(Work, frozen=True, kw_only=True):
    """A grant to a node."""

    border: Border


class Pulled(msgspec.Struct, frozen=True):
    """By how much the exchange with the centre pulls each tensor towards it."""

    values: list[Any]


class Averages(msgspec.Struct, frozen=True):
    """The average of a round, and whose it is."""

    values: list[Any]
    members: tuple[int, ...]


PeerToWorker = Pulled | Averages
