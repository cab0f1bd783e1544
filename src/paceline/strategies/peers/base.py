"""The base of a node's machine: a strategy of the kind `peer`, with what the engine that drives it needs to know."""

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from paceline.core.peer_actions import PeerAction
from paceline.core.peer_events import PeerEvent
from paceline.strategies.base import Machine

Wire = Literal["float32", "bfloat16", "int8"]
GossipWire = Annotated[
    Wire, Meta(description="what tensors are sent as; bfloat16 halves the bytes of float32, int8 takes a quarter")
]
CentreWire = Annotated[
    Literal["float32", "bfloat16"], Meta(description="what tensors are sent as; bfloat16 halves the bytes of float32")
]


class Peer(Machine):
    """A pure state machine that decides for one node when to exchange what with whom."""

    kind = "peer"

    has_centre: ClassVar[bool] = False  # the engine keeps a centre, which starts as the first node's model
    needs_change: bool = False  # put the whole model's change on each Stepped
    needs_changes: bool = False  # put the change of each tensor on each Stepped
    resets_on_mix: bool = True  # change is counted from a tensor's last Mix, too, not only from its last Send
    wire: Wire = "float32"  # what floating-point tensors are sent as

    @abstractmethod
    def handle(self, event: PeerEvent) -> list[PeerAction]:
        """Update the state with an event and return what to do."""
