"""Fully asynchronous: nobody waits for anybody.

Rule: apply every push at once and release the pusher at once. The baseline without synchronization (Dean et al.,
"Large scale distributed deep networks", NIPS 2012); it is SSP without a bound, and shares its code.
"""

from math import inf
from typing import Any

from paceline.strategies.base import Options
from paceline.strategies.ssp import Ssp, WholeSteps


class AspOptions(Options, frozen=True, kw_only=True):
    """How a push becomes a step."""

    whole_steps: WholeSteps = False


class Asp(Ssp):
    """Apply at once, release at once."""

    name = "asp"
    rule = "Every push is applied at once and its worker goes on at once; nobody ever waits."
    citation = "Dean et al., Large scale distributed deep networks, NIPS 2012"
    Options = AspOptions  # type: ignore[assignment]  # without a staleness, which `bound_of` stands in for

    @staticmethod
    def bound_of(options: Any) -> float:  # noqa: ARG004
        """Return no bound."""
        return inf

    @staticmethod
    def cache_of(options: Any) -> None:
        """Return no cache: without a bound nothing would ask for a newer model."""
