"""The contract of every transport: two ends, whole messages, in order, each delivered once.

Tensors are part of the messages. Where both ends share memory, the transport does not send them: a received message
holds views of the `Region`, and a sent one names the slot that its tensors are in.
"""

from typing import Protocol

from paceline.model.regions import Region
from paceline.model.spec import ModelSpec
from paceline.transport.messages import ToServer, ToWorker


class Endpoint(Protocol):
    """A worker's end."""

    def send(self, message: ToServer) -> None:
        """Send a message without waiting. On a lost link it is dropped, and the next `receive` raises `Lost`."""

    def receive(self) -> ToWorker:
        """Wait for the next message to this worker. Raises `Closed` if there will be none, `Lost` if the server is gone
        and may come back. Rows of a table are valid until the next call, which lets the server reuse their memory."""

    def poll(self, seconds: float = 0.0) -> bool:
        """Return whether `receive` would return or raise at once, waiting up to `seconds` for that."""

    def adopt(self, spec: ModelSpec) -> Region | None:
        """Return memory for this model, shared with or mirrored to the server; None if tensors go by reference."""

    def reconnect(self) -> None:
        """After `Lost`, wait for a server to come back. Raises `Closed` if none will."""


class ServerEnd(Protocol):
    """The server's end of one worker's link."""

    def deliver(self, message: ToWorker) -> None:
        """Send a message without waiting."""

    def collect(self) -> ToServer | None:
        """Return the worker's next message, None if none has arrived. Raises `Lost` if there will be none."""

    def close(self) -> None:
        """Close the link: the worker's next `receive` raises `Closed`."""


class Closed(BaseException):
    """The link is down for good. Not an Exception: a script's own error handling must not swallow its end."""


class Lost(BaseException):
    """The other end went away without a `Bye`."""
