"""What one worker of another host may make the server allocate, judged before anything is allocated.

A worker that holds the keys may still be broken or hostile. The bytes of its messages are bounded by kind, since a byte
of MessagePack can become 64 bytes of Python objects; tensors that a message announces are bounded in number and bytes.
The model or tables that the worker has announced raise the bounds, and those must fit into memory.
"""

from paceline.core.errors import PeerError
from paceline.core.machine_limits import available_bytes
from paceline.transport.messages import Kind

MOST_TENSORS = 32_768  # of one message; each costs the server some 600 bytes however small it is
SPARE_BYTES = (
    32 << 20
)  # of one message's tensors before there is a model, and of values that have nothing to do with it
# Times the model that one message may bring besides: Adam's states of a model in half precision, twice. A worker may
# also have as much on its way to it that it has not taken.
PER_MODEL = 8


class Limits:
    """The bounds of one link."""

    def __init__(self) -> None:
        self._announced = 0
        self._tensors = 0
        self._bytes = 0
        self._most_bytes = 0

    @property
    def most_waiting(self) -> int:
        """Bytes for the worker that may wait for it to take them."""
        return SPARE_BYTES + PER_MODEL * self._announced

    def require_length(self, kind: Kind, nbytes: int) -> None:
        """Judge a message of so many bytes, its tensors aside."""
        most = kind.longest + (self._announced * PER_MODEL if kind.holds_state else 0)
        if nbytes > most:
            raise PeerError(f"a {kind.name} of {nbytes} bytes is sent, the most are {most}")

    def begin(self, kind: Kind, nbytes: int) -> None:
        """Judge a message before it is decoded."""
        self.require_length(kind, nbytes)
        self._tensors = self._bytes = 0
        self._most_bytes = self.most_waiting
        if kind.announces:
            self._most_bytes = available_bytes() or self._most_bytes  # compared with what it announces, once decoded

    def spend(self, nbytes: int) -> None:
        """Judge a tensor or array that the message describes, before it is made."""
        self._tensors += 1
        self._bytes += nbytes
        if self._tensors > MOST_TENSORS:
            raise ValueError(f"it has more than {MOST_TENSORS} tensors")
        if self._bytes > self._most_bytes:
            raise ValueError(f"its tensors have more than {self._most_bytes} bytes")

    def announce(self, nbytes: int) -> None:
        """Take note of a model or table of so many bytes that a decoded message announces; its tensors belong to it."""
        available = available_bytes()
        if available is not None and self._announced + nbytes > available:
            raise ValueError(f"it announces {nbytes} bytes, of which the server has {available}")
        if self._bytes > nbytes:
            raise ValueError(f"it announces {nbytes} bytes and brings {self._bytes}")
        self.allow(nbytes)

    def allow(self, nbytes: int) -> None:
        """Raise the bounds by a model or table of so many bytes."""
        self._announced += nbytes
