"""What a node of a run without a server and its engine say to each other, beside what every worker says.

Values are tensors where they go by reference, in virtual time; between processes they are their bytes, as arrays.
"""

from typing import Any

import msgspec

from paceline.core.peer_actions import PeerAction
from paceline.core.peer_events import PeerCause, PeerEvent
from paceline.transport.mail import Box as Box
from paceline.transport.messages import RawBytes, ToServer, ToWorker, Work, registered

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


@registered(23)
class CentreExchange(ToServer, frozen=True):
    """An exchange with the centre; the answer is Pulled, with the same ticket. Virtual nodes need none."""

    alpha: float
    tensors: tuple[int, ...] | None
    values: list[RawBytes]
    ticket: int = 0  # of the grant whose step it follows


@registered(24)
class Averaging(ToServer, frozen=True):
    """This node's model for that round's average; the answer is Averages. Between processes the values stay where they
    are: the answer is Group, and the members average among themselves."""

    round: int
    values: list[RawBytes]


class Decided(msgspec.Struct, frozen=True):
    """What the node's machine made of an event, for the journal."""

    event: PeerEvent
    actions: list[PeerAction]


@registered(22)
class Decisions(ToServer, frozen=True):
    """Several of them, in their order."""

    decided: list[Decided]


@registered(21)
class Mailbox(ToServer, frozen=True):
    """Where this node's peers reach it; whoever has the key may."""

    address: str
    key: str


@registered(25)
class Exchanged(ToServer, frozen=True):
    """The average of that round was taken, for which this node has sent so many bytes."""

    round: int
    attempt: int
    bytes: int


@registered(26)
class Leaving(ToServer, frozen=True):
    """This node hands its weight on and is sent nothing more from here on; it goes when that is taken."""

    cause: PeerCause


@registered(27)
class Snapshot(ToServer, frozen=True):
    """This node's model between two steps, for whoever measures or keeps it; `number` is that of Collect, 0 unasked."""

    number: int
    values: list[RawBytes]
    counters: list[RawBytes]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in [*self.values, *self.counters])


PeerToServer = Model | Outgoing | Wanted | CentreExchange | Averaging | Decided
NodeToServer = Mailbox | Decisions | CentreExchange | Averaging | Exchanged | Leaving | Snapshot

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


@registered(82)
class Pulled(ToWorker, frozen=True):
    """By how much the exchange with the centre pulls each tensor towards it."""

    values: list[RawBytes]
    ticket: int = 0


class Averages(msgspec.Struct, frozen=True):
    """The average of a round, and whose it is."""

    values: list[Any]
    members: tuple[int, ...]


@registered(81)
class Peering(ToWorker, frozen=True):
    """Who came and who went, since the last time that this was said."""

    joined: list[Box] = []
    left: list[tuple[int, PeerCause]] = []
    fresh: bool = False  # the machine starts: those who joined are all that are there
    source: int | None = None  # a newcomer takes this peer's model
    elapsed_s: float = 0.0  # of the run, when this was sent
    latency_s: float = 0.0  # emulation: of this node's own link
    seconds_per_byte: float = 0.0  # likewise
    phase: int = 0  # which it is that the machine starts in
    leaving: bool = False  # those who left still read what is in their mailboxes, and hand on what they have


@registered(83)
class Group(ToWorker, frozen=True):
    """Who averages in that round; a later attempt is one without a member that went away in the middle of it."""

    round: int
    attempt: int
    members: list[int]
    seconds: float = 0.0  # emulation: the average takes so long


@registered(84)
class Collect(ToWorker, frozen=True):
    """Send your model. `last`: the phase is over, take in first what has arrived. Number 0: leave, you are not needed
    any more."""

    number: int
    last: bool


PeerToWorker = Pulled | Averages
NodeToWorker = Peering | Pulled | Group | Collect
