"""What one node of a run without a server is to do: the outputs of its machine, each with the reason for it.

Within one decision they stand in the order of this file. `Track` is the one of actions.py.
"""

import msgspec

from paceline.core.actions import Track


class Mix(msgspec.Struct, frozen=True, gc=False, tag="mix", tag_field="kind"):
    """Average a received message in: `x <- (1 - weight) x + weight x_message` for the tensors that it holds."""

    message: int
    weight: float
    reason: str


class Send(msgspec.Struct, frozen=True, gc=False, tag="send", tag_field="kind"):
    """Send these tensors, as they are at this moment, and the weight with them."""

    peer: int
    weight: float  # of the model sent; 1 in the forms that keep no weights
    tensors: tuple[int, ...] | None  # None: all
    reason: str


class Ask(msgspec.Struct, frozen=True, gc=False, tag="ask", tag_field="kind"):
    """Ask a peer for its model; one that is gone does not answer, and nothing waits for it."""

    peer: int
    reason: str


class Exchange(msgspec.Struct, frozen=True, gc=False, tag="exchange", tag_field="kind"):
    """Exchange these tensors with the centre, at once for both: `e = alpha (x - centre); centre += e; x -= e`."""

    alpha: float
    tensors: tuple[int, ...] | None  # None: all
    reason: str


class Average(msgspec.Struct, frozen=True, gc=False, tag="average", tag_field="kind"):
    """Wait for all present nodes that have not passed this round, and take the average of their models."""

    round: int
    reason: str


PeerAction = Mix | Send | Ask | Exchange | Average | Track
