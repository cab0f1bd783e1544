"""Adaptive gossip: exchange what has changed, when it has changed.

Rule: gossip, where a node sends a peer the tensors that have changed enough since their last exchange, in place of its
whole model every `period` steps. Published and reconstructed as trigger.py says (Ho, Wu, Liu, CCGrid 2018: 92 % less
traffic and 52 % less time than gossip at the same accuracy).

All tensors that are due at a step go to one peer. With `mixed=changed`, paceline's own, change is counted from the
last Send alone, so that a node that took over much from a distant peer has much to pass on, and distant models come
together even when no node moves by itself; with `mixed=exchanged` a tensor that is mixed in counts as exchanged, too.
int8 on the wire is paceline's own as well: with it the defaults send less than 8 % of gossip's bytes, of which it
saves three quarters; `wire=float32` leaves the saving to the trigger.
With threshold=0 the decisions are those of gossip with period=1, and so is what is sent. One weight stands for a whole
model and an Ask for a whole model, so the weighted and the pull form go with `scope=model`. In the pull form the budget
counts what this node asks for.
"""

from typing import Annotated, Literal

from msgspec import Meta, field

from paceline.core.peer_actions import PeerAction
from paceline.core.peer_events import Started, Stepped
from paceline.strategies.peers.base import GossipWire
from paceline.strategies.peers.gossip import Form, Gossip, GossipState, Overlap, Peers, require_push
from paceline.strategies.peers.trigger import FORMER, Trigger, TriggerOptions


class AdaptiveGossipOptions(TriggerOptions, frozen=True, kw_only=True):
    """Gossip's forms, and the trigger in place of its period."""

    form: Form = "push"
    peers: Peers = "random"
    wire: Annotated[
        GossipWire | None,
        Meta(
            description="what tensors are sent as; int8 takes a quarter of float32, bfloat16 half; none: int8, but "
            "float32 with threshold=0, which is gossip at every step"
        ),
    ] = None
    overlap: Overlap = True
    mixed: Annotated[
        Literal["exchanged", "changed"],
        Meta(description="exchanged: a tensor mixed in begins anew; changed: what it took over is due to be passed on"),
    ] = "changed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scope == "tensor":
            require_push(self.form)


class AdaptiveGossipState(GossipState):
    """Gossip's state, and the trigger."""

    trigger: Trigger = field(default_factory=Trigger)


class AdaptiveGossip(Gossip):
    """Exchange with some peer what has changed enough."""

    name = "adaptive_gossip"
    rule = "A node averages with some peer those tensors that have changed enough since their last exchange."
    citation = "Ho et al., Adaptive communication for distributed deep learning on commodity GPU cluster, CCGrid 2018"
    former = {**FORMER, "mixed": "exchanged", "wire": "float32"}
    Options = AdaptiveGossipOptions  # type: ignore[assignment]  # the trigger stands in for the period
    State = AdaptiveGossipState
    state: AdaptiveGossipState

    def set_up(self) -> None:
        super().set_up()
        options = self.options
        self.needs_change = options.scope == "model"
        self.needs_changes = options.scope == "tensor"
        self.resets_on_mix = options.mixed == "exchanged"
        if options.wire is None:
            self.wire = "int8" if options.threshold else "float32"

    def _started(self, event: Started) -> list[PeerAction]:
        super()._started(event)
        self.state.trigger = Trigger.start(event.sizes, self.options)
        return [self.state.trigger.track()]

    def _stepped(self, event: Stepped) -> list[PeerAction]:
        trigger = self.state.trigger
        due = trigger.step(event, self.options)
        if not self._can_exchange:
            return []
        exchange = [self._exchange(due.tensors, due.why)] if due is not None else []
        return [*exchange, *trigger.settle(due, self.options)]

    def _exchanged(self, tensors: tuple[int, ...] | None) -> None:
        self.state.trigger.exchanged(tensors)

    def _mixed(self, tensors: tuple[int, ...] | None) -> None:
        if self.resets_on_mix:
            self.state.trigger.exchanged(tensors)
