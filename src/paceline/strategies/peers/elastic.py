"""Elastic averaging: nodes are tied to a common centre by a spring, and to nobody else.

Rule: every `period` steps a node and the centre move towards each other by `alpha` of the distance between them,
`e = alpha (x - centre); centre += e; x -= e`, so that their sum stays as it was; nobody waits.
Published, the asynchronous form (Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", NIPS 2015), and
so are the defaults: a period of 10 steps, and alpha = 0.9 over the number of nodes. `scope=tensor` gives each tensor a
period of its own (periods.py).
"""

from typing import Annotated, assert_never

from msgspec import Meta, field

from paceline.core.events import TimerFired
from paceline.core.peer_actions import Exchange, PeerAction
from paceline.core.peer_events import Asked, Averaged, PeerEvent, PeerJoined, PeerLeft, Received, Sent, Started, Stepped
from paceline.strategies.base import Options, State
from paceline.strategies.peers import periods
from paceline.strategies.peers.base import CentreWire, Peer
from paceline.strategies.peers.partners import Partners

BETA = 0.9  # divided by the number of nodes present


Alpha = (
    Annotated[
        float, Meta(ge=0, lt=1, description="share of the distance that each side moves; none: 0.9 / nodes, 0: no tie")
    ]
    | None
)


class ElasticOptions(Options, frozen=True, kw_only=True):
    """How strong the tie to the centre is, and how often a node exchanges."""

    alpha: Alpha = None
    period: Annotated[int, Meta(ge=1, description="steps between two exchanges with the centre")] = 10
    scope: periods.Scope = "model"
    share_power: periods.SharePower = 1.0
    wire: CentreWire = "float32"

    def __post_init__(self) -> None:
        periods.require_tensors(self.scope, self.share_power)


class ElasticState(State):
    """The nodes present, and the periods of the tensors."""

    partners: Partners = field(default_factory=Partners)
    gone: bool = False
    sizes: list[int] = []  # bytes of each tensor; empty unless each has its own period
    periods: list[float] = []  # of each tensor, in steps; likewise


class Elastic(Peer):
    """Exchange with the centre every so many steps."""

    name = "elastic"
    rule = "Every period steps a node and a common centre move towards each other by alpha of their distance."
    citation = "Zhang et al., Deep learning with elastic averaging SGD, NIPS 2015"
    Options = ElasticOptions
    State = ElasticState
    state: ElasticState
    has_centre = True

    def set_up(self) -> None:
        self.wire = self.options.wire

    def handle(self, event: PeerEvent) -> list[PeerAction]:
        match event:
            case Stepped():
                return [] if self.state.gone else self._stepped(event)
            case PeerJoined():
                self.state.partners.join(event.peer)
            case PeerLeft():
                self.state.partners.leave(event.peer)
                self.state.gone |= event.peer == self.state.partners.node
            case Started():
                return self._started(event)
            case Received() | Asked() | Sent() | Averaged() | TimerFired():
                pass
            case _:
                assert_never(event)
        return []

    @property
    def _alpha(self) -> float:
        given: float | None = self.options.alpha
        return BETA / (1 + len(self.state.partners.others)) if given is None else given

    def _started(self, event: Started) -> list[PeerAction]:
        state = self.state = self.State()
        state.partners.node = event.node
        if isinstance(self.options, ElasticOptions) and self.options.scope == "tensor":
            state.sizes = list(event.sizes)
            state.periods = periods.of_each(event.sizes, self.options.period, self.options.share_power)
        return []

    def _stepped(self, event: Stepped) -> list[PeerAction]:
        alpha, step, period, sizes = self._alpha, event.step, self.options.period, self.state.sizes
        tensors = periods.due(step, sizes, self.state.periods) if sizes else () if step % period else None
        if tensors == () or not alpha:
            return []
        return [Exchange(alpha, tensors, f"{periods.reason(step, period, tensors, sizes)}, alpha {alpha:.4g}")]
