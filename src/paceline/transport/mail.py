"""Messages between nodes, from one to another without anybody in between: a header, and tensors as bytes.

A node's mailbox has an address and a key; the coordinator tells both to the node's peers and sees no message. Posting
never waits for whoever is to read: a message that cannot be taken at the moment, because its reader is gone or has not
read those before it, is the sender's again.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
import torch

UNREAD = 2  # messages to one peer that it has not read; a further one would only be older when it is
Kind = Literal["model", "asked", "lend", "lent", "part", "mean"]


class Box(msgspec.Struct, frozen=True):
    """A peer and where it is reached."""

    node: int
    incarnation: int
    address: str
    key: str
    latency_s: float = 0.0  # emulation: of its own link, one way


class PeerHeader(msgspec.Struct, frozen=True, array_like=True):
    """What one node says to another, beside the values."""

    key: str  # of the reader's mailbox
    sender: int
    incarnation: int  # of the sender
    kind: Kind
    weight: float = 1.0
    tensors: tuple[int, ...] | None = None
    phase: int = 0  # what is left over from an earlier one is void
    round: int = 0  # of an average, with its attempt and the part of the model
    attempt: int = 0
    part: int = 0
    at: float = 0.0  # emulation: by the host's clock it is not there before
    sizes: tuple[int, ...] = ()  # bytes of each value
    slot: int = -1  # where the values lie, if they do not come with the message,
    number: int = 0  # and what says there that they are still this message's


class Delivered(msgspec.Struct, frozen=True):
    """A message and its values, each as bytes; they may be looked at until `release`."""

    header: PeerHeader
    values: list[torch.Tensor]


class Departed(msgspec.Struct, frozen=True):
    """A message has left this node."""

    peer: int
    bytes: int
    seconds: float


class Mail(Protocol):
    """One node's mailbox, and its way to those of others."""

    address: str
    key: str
    tracks: bool  # whether it knows when messages leave; otherwise they are gone as soon as they are posted

    def reserve(self, sizes: Sequence[int]) -> None:
        """The largest message has values of so many bytes each."""

    def add_peer(self, peer: Box) -> None:
        """Messages can be posted to this peer from here on."""

    def remove_peer(self, peer: int) -> list[Delivered]:
        """The peer is gone; messages that are known not to have reached it."""

    def post(self, peer: int, header: PeerHeader, values: Sequence[torch.Tensor]) -> bool:
        """Send the values as they are now; False if that is not possible at the moment. The message's key and sizes are
        filled in here."""

    def collect(self, seconds: float = 0.0) -> list[Delivered]:
        """What has arrived; waits so long for the first."""

    def departed(self) -> list[Departed]:
        """Messages that have left since this was last asked."""

    @property
    def on_their_way(self) -> int:
        """Messages that were posted and have not left, but for those that seem to be stuck."""

    @property
    def unread(self) -> int:
        """Models that are known to lie unread where they were posted to."""

    def release(self) -> None:
        """What was collected is not looked at any more."""

    def close(self) -> None:
        """Let what is posted leave, then be reached no more."""


_decoder = msgspec.msgpack.Decoder(PeerHeader)
_encoder = msgspec.msgpack.Encoder()


def encode(header: PeerHeader) -> bytes:
    """A message's header as bytes."""
    return _encoder.encode(header)


def decode(data: Any) -> PeerHeader | None:
    """A message's header; None if it is none."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        return None


def from_bytes(raw: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Bytes as the tensor that they are; one without any is made, since a view of nothing need not be possible."""
    return raw.view(dtype).view(tuple(shape)) if raw.numel() else torch.empty(tuple(shape), dtype=dtype)


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """A tensor's own memory as bytes, or a copy's where it lies scattered or on a device."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
