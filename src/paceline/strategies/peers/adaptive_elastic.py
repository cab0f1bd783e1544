"""Adaptive elastic averaging: exchange what has changed with the centre, when it has changed.

Rule: elastic, where a node exchanges the tensors that have changed enough since their last exchange, in place of its
whole model every `period` steps. Published and reconstructed as trigger.py says (Ho, Wu, Liu, CCGrid 2018). With
threshold=0 the decisions are those of elastic with period=1.
"""

from typing import Annotated

from msgspec import Meta, field

from paceline.core.peer_actions import Exchange, PeerAction
from paceline.core.peer_events import Started, Stepped
from paceline.strategies.peers.base import CentreWire
from paceline.strategies.peers.elastic import Alpha, Elastic, ElasticState
from paceline.strategies.peers.trigger import FORMER, Threshold, Trigger, TriggerOptions


class AdaptiveElasticOptions(TriggerOptions, frozen=True, kw_only=True):
    """Elastic's tie, and the trigger in place of its period."""

    alpha: Alpha = None
    threshold: Threshold = 0.7
    wire: Annotated[
        CentreWire | None,
        Meta(
            description="what tensors are sent as; bfloat16 takes half of float32; none: bfloat16, but float32 with "
            "threshold=0, which is elastic at every step"
        ),
    ] = None


class AdaptiveElasticState(ElasticState):
    """Elastic's state, and the trigger."""

    trigger: Trigger = field(default_factory=Trigger)


class AdaptiveElastic(Elastic):
    """Exchange with the centre what has changed enough."""

    name = "adaptive_elastic"
    rule = "A node and a common centre exchange those tensors that have changed enough since their last exchange."
    citation = "Ho et al., Adaptive communication for distributed deep learning on commodity GPU cluster, CCGrid 2018"
    former = {**FORMER, "threshold": "0.3", "wire": "float32"}
    Options = AdaptiveElasticOptions  # type: ignore[assignment]  # the trigger stands in for the period
    State = AdaptiveElasticState
    state: AdaptiveElasticState

    def set_up(self) -> None:
        super().set_up()
        options = self.options
        self.needs_change = options.scope == "model"
        self.needs_changes = options.scope == "tensor"
        if options.wire is None:
            self.wire = "bfloat16" if options.threshold else "float32"

    def _started(self, event: Started) -> list[PeerAction]:
        super()._started(event)
        self.state.trigger = Trigger.start(event.sizes, self.options)
        return [self.state.trigger.track()]

    def _stepped(self, event: Stepped) -> list[PeerAction]:
        trigger, alpha = self.state.trigger, self._alpha
        due = trigger.step(event, self.options)
        if not alpha:
            return []
        exchange: list[PeerAction] = []
        if due is not None:
            trigger.exchanged(due.tensors)
            exchange.append(Exchange(alpha, due.tensors, f"{due.why}, alpha {alpha:.4g}"))
        return [*exchange, *trigger.settle(due, self.options)]
