"""Actions of one node in a run without a server: the outputs of its machine, each with its reason.

Within one decision they come in the order of this file. `Track` is imported from actions.py.
"""

import msgspec

from paceline.core.actions import Track


class Mix(msgspec.Struct, frozen=True, gc=False, tag="mix", tag_field="kind"):
    """Average in a received message: `x <- (1 - weight) x + weight x_message` for the tensors that it holds."""

    message: int
    weight: float
    reason: str


class Send(msgspec.Struct, frozen=True, gc=False, tag="send", tag_field="kind"):
    """Send these tensors, as they are at this moment, with the weight."""

    peer: int
    weight: float  # of the model sent; 1 in strategies without weights
    tensors: tuple[int, ...] | None  # None: all
    reason: str


class Ask(msgspec.Struct, frozen=True, gc=False, tag="ask", tag_field="kind"):
    """Ask a peer for its model. A peer that is gone does not answer, and the node does not wait."""

    peer: int
    reason: str


class Exchange(msgspec.Struct, frozen=True, gc=False, tag="exchange", tag_field="kind"):
    """Exchange these tensors with the centre, both sides at once: `e = alpha (x - centre); centre += e; x -= e`."""

    alpha: float
    tensors: tuple[int, ...] | None  # None: all
    reason: str


class Average(msgspec.Struct, frozen=True, gc=False, tag="average", tag_field="kind"):
    """Wait for all present nodes that have not passed this round, and adopt the average of their models."""

    round: int
    reason: str


PeerAction = Mix | Send | Ask | Exchange | Average | Track
