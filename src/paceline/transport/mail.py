"""Direct messages between nodes: a header, and tensors as bytes.

A node's mailbox has an address and a key; the coordinator tells both to the node's peers and sees no message. Posting
never waits for the reader: `post` returns False if the reader is gone or has not read earlier messages, and the sender
keeps the message.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
import torch

UNREAD = 2  # most unread messages to one peer; further ones would only be staler when read
Kind = Literal["model", "asked", "lend", "lent", "part", "mean"]


class Box(msgspec.Struct, frozen=True):
    """A peer and the address of its mailbox."""

    node: int
    incarnation: int
    address: str
    key: str
    latency_s: float = 0.0  # emulation: of the peer's own link, one way


class PeerHeader(msgspec.Struct, frozen=True, array_like=True):
    """A message from one node to another, without its values."""

    key: str  # of the reader's mailbox
    sender: int
    incarnation: int  # of the sender
    kind: Kind
    weight: float = 1.0
    tensors: tuple[int, ...] | None = None
    phase: int = 0  # messages left over from an earlier phase are dropped
    round: int = 0  # of an average; `attempt` and `part` (of the model) belong to it
    attempt: int = 0
    part: int = 0
    at: float = 0.0  # emulation: the time of arrival on the host's clock
    sizes: tuple[int, ...] = ()  # bytes of each value
    slot: int = -1  # that holds the values, if they do not come with the message
    number: int = 0  # the slot's state while its values are still this message's


class Delivered(msgspec.Struct, frozen=True):
    """A message and its values as bytes, valid until `release`."""

    header: PeerHeader
    values: list[torch.Tensor]


class Departed(msgspec.Struct, frozen=True):
    """A message has left this node."""

    peer: int
    bytes: int
    seconds: float


class Mail(Protocol):
    """One node's mailbox, and its links to those of its peers."""

    address: str
    key: str
    tracks: bool  # whether it knows when messages leave; otherwise they count as gone once posted

    def reserve(self, sizes: Sequence[int]) -> None:
        """Announce the sizes in bytes of the largest message's values."""

    def add_peer(self, peer: Box) -> None:
        """Allow posting to this peer."""

    def remove_peer(self, peer: int) -> list[Delivered]:
        """Remove a peer that is gone; return the messages known not to have reached it."""

    def post(self, peer: int, header: PeerHeader, values: Sequence[torch.Tensor]) -> bool:
        """Send the values as they are now, filling in the header's key and sizes; False if that is not possible at the
        moment."""

    def collect(self, seconds: float = 0.0) -> list[Delivered]:
        """Return what has arrived, waiting up to `seconds` for the first."""

    def departed(self) -> list[Departed]:
        """Return the messages that left since the last call."""

    @property
    def on_their_way(self) -> int:
        """How many posted messages have not left, except those that seem stuck."""

    @property
    def unread(self) -> int:
        """How many posted models are known to be unread."""

    def release(self) -> None:
        """Free the memory of the collected messages."""

    def close(self) -> None:
        """Let posted messages leave, then close the mailbox."""


_decoder = msgspec.msgpack.Decoder(PeerHeader)
_encoder = msgspec.msgpack.Encoder()


def encode(header: PeerHeader) -> bytes:
    """Encode a header."""
    return _encoder.encode(header)


def decode(data: Any) -> PeerHeader | None:
    """Decode a header; None if the bytes are not one."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        return None


def same_key(one: str, other: str) -> bool:
    """Compare keys in constant time, whatever text was sent as one."""
    return secrets.compare_digest(one.encode("utf-8", "replace"), other.encode())


def from_bytes(raw: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """View bytes as a tensor; an empty one is made anew, since a view of no bytes may be refused."""
    return raw.view(dtype).view(tuple(shape)) if raw.numel() else torch.empty(tuple(shape), dtype=dtype)


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes: its own memory, or a copy if it is not contiguous or on a device."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
