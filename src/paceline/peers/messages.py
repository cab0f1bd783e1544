"""Messages between a node of a run without a server and its engine, beside those of every worker.

In virtual time values are tensors, passed by reference; between processes they are byte arrays.
"""

from typing import Any

import msgspec

from paceline.core.peer_actions import PeerAction
from paceline.core.peer_events import PeerCause, PeerEvent
from paceline.transport.mail import Box as Box
from paceline.transport.messages import RawBytes, ToServer, ToWorker, Work, registered

# -- from a node -------------------------------------------------------------------------------------------------------


class Model(msgspec.Struct, frozen=True):
    """References to a virtual node's model; the exchange reads the tensors there to average all models."""

    tensors: Any  # a function that returns them, since a module may replace its buffers
    counters: Any  # likewise, for the buffers that are not averaged
    machine: Any  # of the node, which the exchange asks about its options and tells of what happens between steps


class Outgoing(msgspec.Struct, frozen=True):
    """Tensors for a peer, as they were when the machine decided to send them."""

    peer: int
    weight: float
    tensors: tuple[int, ...] | None
    values: list[Any]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values)


class Wanted(msgspec.Struct, frozen=True):
    """A request for a peer's model."""

    peer: int


@registered(23)
class CentreExchange(ToServer, frozen=True):
    """An exchange with the centre; the answer is Pulled, with the same ticket. Virtual nodes send no ticket."""

    alpha: float
    tensors: tuple[int, ...] | None
    values: list[RawBytes]
    ticket: int = 0  # of the grant whose step this follows


@registered(24)
class Averaging(ToServer, frozen=True):
    """A node is ready for that round's average. A virtual node sends its model and gets Averages; a process sends no
    values and gets Group, since the members average among themselves."""

    round: int
    values: list[RawBytes]


class Decided(msgspec.Struct, frozen=True):
    """An event and the actions that the node's machine answered with, for the journal."""

    event: PeerEvent
    actions: list[PeerAction]


@registered(22)
class Decisions(ToServer, frozen=True):
    """Several decisions, in order."""

    decided: list[Decided]


@registered(21)
class Mailbox(ToServer, frozen=True):
    """The address of this node's mailbox, and the key that senders need."""

    address: str
    key: str


@registered(25)
class Exchanged(ToServer, frozen=True):
    """This node has finished that round's average, for which it sent so many bytes."""

    round: int
    attempt: int
    bytes: int


@registered(26)
class Leaving(ToServer, frozen=True):
    """This node passes its weight on and leaves once a peer has it; peers send it nothing more."""

    cause: PeerCause


@registered(27)
class Snapshot(ToServer, frozen=True):
    """This node's model between two steps, to be evaluated or saved; `number` is that of Collect, 0 if unasked."""

    number: int
    values: list[RawBytes]
    counters: list[RawBytes]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in [*self.values, *self.counters])


@registered(44)
class NotFinite(ToServer, frozen=True):
    """This node's model has NaN or infinities after that step. It asks another node for its model; a virtual one gets
    Lent."""

    step: int


@registered(45)
class Here(ToServer, frozen=True):
    """The answer to AreYouThere."""


PeerToServer = Model | Outgoing | Wanted | CentreExchange | Averaging | Decided | NotFinite
NodeToServer = Mailbox | Decisions | CentreExchange | Averaging | Exchanged | Leaving | Snapshot | NotFinite | Here

# -- to a node ---------------------------------------------------------------------------------------------------------


class Arrived(msgspec.Struct, frozen=True):
    """An event for the node's machine, with the tensors that came with it, if any."""

    event: PeerEvent
    values: list[Any] | None = None


class Border(msgspec.Struct, frozen=True):
    """What a node needs at the end of its step: the time, what the step cost, and what has arrived."""

    at: float
    step: int
    compute_s: float
    wait_s: float
    arrived: list[Arrived]
    others: tuple[int, ...] | None = None  # the peers present, if the node's machine starts here


class Step(Work, frozen=True, kw_only=True):
    """A grant to a node."""

    border: Border


@registered(82)
class Pulled(ToWorker, frozen=True):
    """How far the centre pulls each tensor towards itself."""

    values: list[RawBytes]
    ticket: int = 0


class Averages(msgspec.Struct, frozen=True):
    """The average of a round, and the members whose models are in it."""

    values: list[Any]
    members: tuple[int, ...]


@registered(81)
class Peering(ToWorker, frozen=True):
    """The peers that joined and left since the last such message."""

    joined: list[Box] = []
    left: list[tuple[int, PeerCause]] = []
    fresh: bool = False  # the machine starts, and `joined` holds all peers present
    source: int | None = None  # the peer whose model a newcomer starts from
    elapsed_s: float = 0.0  # seconds of the run when this was sent
    latency_s: float = 0.0  # emulation: of this node's own link
    seconds_per_byte: float = 0.0  # likewise
    phase: int = 0  # the phase that the machine starts in
    leaving: bool = False  # the nodes in `left` still read their mailboxes, and pass on what they have


@registered(83)
class Group(ToWorker, frozen=True):
    """The members of that round's average; a later attempt leaves out a member that left during it."""

    round: int
    attempt: int
    members: list[int]
    seconds: float = 0.0  # emulation: the time that the average takes


@registered(84)
class Collect(ToWorker, frozen=True):
    """Send your model. `last`: the phase is over, so mix in first what has arrived. Number 0: leave the run."""

    number: int
    last: bool


class Lent(msgspec.Struct, frozen=True):
    """Another node's model, for a virtual node whose own is not finite; empty if there is none."""

    values: list[Any]


@registered(105)
class AreYouThere(ToWorker, frozen=True):
    """A node that waits for others answers with Here; one that computes, or hangs, does not."""


PeerToWorker = Pulled | Averages | Lent
NodeToWorker = Peering | Pulled | Group | Collect | AreYouThere
