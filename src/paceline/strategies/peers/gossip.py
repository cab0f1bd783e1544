"""Gossip: nodes average their models in pairs, without a server.

Rule: every `period` steps a node picks a peer; `push` sends it the node's own model, `pull` asks for the peer's, and
a node that receives a model averages it in, half and half, between two steps. `weighted` is push with weights.
Published (Blot et al., "Gossip training for deep learning", 2016; the weighted form is the push-sum of Kempe et al.,
FOCS 2003, as in Assran et al., "Stochastic gradient push for distributed deep learning", ICML 2019, and so are the
exponential peers).

Weighted: every node starts with weight 1, keeps half of its weight when it sends and sends the other half along; a node
that receives a model of weight v sets `x <- (w x + v x_message) / (w + v)` and `w <- w + v`. So no exchange changes the
sum of weights and the weighted mean of all models, those in transit included, in whatever order messages arrive. A node
takes back a message that could not be delivered in the same way, and sends its whole weight on when it leaves of its
own accord: what still reaches it after that replaces a model that has no weight any more, and is sent on too. A node
that crashes takes its weight along. A node keeps a weight below MIN_WEIGHT: sending it would change nothing, and
halving it for ever would end at zero.
In the other forms a node drops a message that comes back: it holds only what the node knows.

`scope=tensor` sends each tensor at a period of its own (periods.py), all that are due at a step to one peer. It needs
the push form, since a weight or an Ask stands for a whole model.
"""

from typing import Annotated, Literal, assert_never

from msgspec import Meta, field

from paceline.core.errors import OptionError
from paceline.core.events import TimerFired
from paceline.core.peer_actions import Ask, Mix, PeerAction, Send
from paceline.core.peer_events import Asked, Averaged, PeerEvent, PeerJoined, PeerLeft, Received, Sent, Started, Stepped
from paceline.strategies.base import Options, State
from paceline.strategies.peers import periods
from paceline.strategies.peers.base import GossipWire, Peer
from paceline.strategies.peers.partners import Choice, Partners

MIN_WEIGHT = 2.0**-30


Form = Annotated[
    Literal["push", "pull", "weighted"],
    Meta(description="push: send the model; pull: ask for the peer's; weighted: push that keeps the mean exact"),
]
Peers = Annotated[
    Choice, Meta(description="random: any peer; ring: the next node; exponential: in turn the 1st, 2nd, 4th, ... next")
]


Overlap = Annotated[
    bool, Meta(description="send while computing; false: the next step waits until everything is out, as published")
]


class GossipOptions(Options, frozen=True, kw_only=True):
    """How two nodes exchange, which two, and how often."""

    form: Form = "push"
    peers: Peers = "random"
    period: Annotated[int, Meta(ge=1, description="steps between two exchanges that this node begins")] = 1
    scope: periods.Scope = "model"
    share_power: periods.SharePower = 1.0
    wire: GossipWire = "float32"
    overlap: Overlap = True

    def __post_init__(self) -> None:
        periods.require_tensors(self.scope, self.share_power)
        if self.scope == "tensor":
            require_push(self.form)


def require_push(form: str) -> None:
    """Refuse other forms than push: only push can send single tensors."""
    if form != "push":
        because = "has one weight per model" if form == "weighted" else "asks for whole models"
        raise OptionError(f"form={form} {because}, so scope must be model, not tensor; add scope=model")


class GossipState(State):
    """The nodes present, the weight of this node's model, and the periods of the tensors."""

    partners: Partners = field(default_factory=Partners)
    weight: float = 1.0  # always 1 except in the weighted form
    gone: bool = False
    sizes: list[int] = []  # bytes of each tensor; empty unless each has its own period
    periods: list[float] = []  # of each tensor, in steps; likewise


class Gossip(Peer):
    """Exchange with some peer every so many steps."""

    name = "gossip"
    rule = "Every period steps a node averages its model with some peer's; there is no server and nobody waits."
    citation = "Blot et al., Gossip training for deep learning, 2016"
    Options = GossipOptions
    State = GossipState
    state: GossipState

    def set_up(self) -> None:
        self.wire = self.options.wire

    def handle(self, event: PeerEvent) -> list[PeerAction]:
        match event:
            case Stepped():
                return [] if self.state.gone else self._stepped(event)
            case Received():
                return self._received(event)
            case Asked():
                return self._asked(event)
            case PeerJoined():
                return self._joined(event)
            case PeerLeft():
                return self._left(event)
            case Started():
                return self._started(event)
            case Sent() | Averaged() | TimerFired():
                return []
            case _:
                assert_never(event)

    def _started(self, event: Started) -> list[PeerAction]:
        state = self.state = self.State()
        state.partners.node = event.node
        if isinstance(self.options, GossipOptions) and self.options.scope == "tensor":
            state.sizes = list(event.sizes)
            state.periods = periods.of_each(event.sizes, self.options.period, self.options.share_power)
        return []

    def _joined(self, event: PeerJoined) -> list[PeerAction]:
        state = self.state
        state.partners.join(event.peer)
        return self._hand_on(f"n{event.peer} is here to take it") if state.gone else []

    def _stepped(self, event: Stepped) -> list[PeerAction]:
        step, period, sizes = event.step, self.options.period, self.state.sizes
        tensors = periods.due(step, sizes, self.state.periods) if sizes else () if step % period else None
        if tensors == () or not self._can_exchange:
            return []
        return [self._exchange(tensors, periods.reason(step, period, tensors, sizes))]

    @property
    def _can_exchange(self) -> bool:
        """Whether a peer is present, and this node's model weighs enough to be worth sending."""
        return bool(self.state.partners.others) and self.state.weight >= MIN_WEIGHT

    def _exchange(self, tensors: tuple[int, ...] | None, why: str) -> PeerAction:
        """Begin an exchange of these tensors with one peer."""
        state, form = self.state, self.options.form
        peer = state.partners.draw(self.options.peers, self.rng)
        self._exchanged(tensors)
        if form == "pull":
            return Ask(peer, f"n{peer} is asked: {why}")
        if form == "push":
            return Send(peer, 1.0, tensors, f"to n{peer}: {why}")
        state.weight /= 2
        return Send(peer, state.weight, tensors, f"to n{peer} with half of weight {2 * state.weight:.4g}: {why}")

    def _exchanged(self, tensors: tuple[int, ...] | None) -> None:
        """Note tensors that this decision sends or asks for; a hook for the adaptive form."""

    def _mixed(self, tensors: tuple[int, ...] | None) -> None:
        """Note tensors that this decision mixes in; likewise a hook."""

    def _asked(self, event: Asked) -> list[PeerAction]:
        state, peer = self.state, event.peer
        if state.gone or peer not in state.partners or self.options.form != "pull":
            return []
        self._exchanged(None)
        return [Send(peer, 1.0, None, f"to n{peer}, which asked")]

    def _received(self, event: Received) -> list[PeerAction]:
        state = self.state
        if self.options.form == "weighted":
            return self._weigh(event)
        if event.peer == state.partners.node or state.gone:
            return []
        self._mixed(event.tensors)
        return [Mix(event.message, 0.5, f"n{event.peer}'s model and this one, half and half")]

    def _weigh(self, event: Received) -> list[PeerAction]:
        state, incoming = self.state, event.weight
        if not incoming > 0:
            return []
        own, state.weight = state.weight, state.weight + incoming
        share = incoming / state.weight
        self._mixed(event.tensors)
        mix = Mix(event.message, share, f"weight {incoming:.4g} from n{event.peer} to own weight {own:.4g}")
        return [mix, *(self._hand_on("arrived after this node had left") if state.gone else [])]

    def _left(self, event: PeerLeft) -> list[PeerAction]:
        state = self.state
        if event.peer != state.partners.node:
            state.partners.leave(event.peer)
            return []
        if state.gone:
            return []
        state.gone = True
        return self._hand_on(f"this node leaves ({event.cause})")

    def _hand_on(self, why: str) -> list[PeerAction]:
        """Send the whole weight, if there is any, to a peer that stays, if there is one."""
        state = self.state
        if self.options.form != "weighted" or not state.weight or not state.partners.others:
            return []
        peer = state.partners.draw(self.options.peers, self.rng)
        weight, state.weight = state.weight, 0.0
        return [Send(peer, weight, None, f"to n{peer} with the whole weight {weight:.4g}: {why}")]
