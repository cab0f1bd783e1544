"""Local SGD: everybody steps alone, and all take the average every so often.

Rule: after every `period` steps a node waits for all others and goes on from the average of their models.
Published (Stich, "Local SGD converges fast and communicates little", ICLR 2019; the form with periodic model averaging
of McMahan et al., AISTATS 2017). It is the one machine of its kind that waits. Round r ends after r periods of steps;
a newcomer counts its steps on from the smallest count among those present, so it meets the others in their round.
"""

from typing import Annotated, assert_never

from msgspec import Meta

from paceline.core.events import TimerFired
from paceline.core.peer_actions import Average, PeerAction
from paceline.core.peer_events import Asked, Averaged, PeerEvent, PeerJoined, PeerLeft, Received, Sent, Started, Stepped
from paceline.strategies.base import Options
from paceline.strategies.peers.base import Peer


class LocalSgdOptions(Options, frozen=True, kw_only=True):
    """How often."""

    period: Annotated[int, Meta(ge=1, description="steps between two averages of all nodes")] = 8


class LocalSgd(Peer):
    """Average everybody every so many steps."""

    name = "local_sgd"
    rule = "Every node steps alone for period steps, then all wait for each other and take the average."
    citation = "Stich, Local SGD converges fast and communicates little, ICLR 2019"
    Options = LocalSgdOptions

    def handle(self, event: PeerEvent) -> list[PeerAction]:
        match event:
            case Stepped():
                rounds, rest = divmod(event.step, self.options.period)
                reason = f"step {event.step} ends round {rounds} of {self.options.period} steps"
                return [] if rest else [Average(rounds, reason)]
            case Started() | PeerJoined() | PeerLeft() | Received() | Asked() | Sent() | Averaged() | TimerFired():
                return []
            case _:
                assert_never(event)
