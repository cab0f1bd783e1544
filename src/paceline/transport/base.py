"""The contract of every transport: two ends, whole messages, in order, each delivered once.

Tensors are part of the messages. Where both ends share memory they are not sent: a transport that has a `Region` puts
views of it into the messages it hands out, and names the slot where a message it is given lies in one.
"""

from typing import Protocol

from paceline.model.regions import Region
from paceline.model.spec import ModelSpec
from paceline.transport.messages import ToServer, ToWorker


class Endpoint(Protocol):
    """A worker's end."""

    def send(self, message: ToServer) -> None:
        """Hand a message over; returns at once. On a lost link it goes nowhere: the next `receive` will say so."""

    def receive(self) -> ToWorker:
        """The next message for this worker; waits for it. Raises `Closed` if there will be none, `Lost` if the server
        is gone and may come back. Rows of a table may lie in memory that the next call lets the server use again."""

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether `receive` would return or raise at once; waits so long for that to become true."""

    def adopt(self, spec: ModelSpec) -> Region | None:
        """Memory for a model of this spec, shared with or mirrored to the server; None if tensors go by reference."""

    def reconnect(self) -> None:
        """After `Lost`: wait for a server to be there again. Raises `Closed` if there will be none."""


class ServerEnd(Protocol):
    """The server's end of one worker's link."""

    def deliver(self, message: ToWorker) -> None:
        """Hand a message over; returns at once."""

    def collect(self) -> ToServer | None:
        """The worker's next message, or None if there is none at the moment. Raises `Lost` if there will be none."""

    def close(self) -> None:
        """The worker's next `receive` raises `Closed`."""


class Closed(BaseException):
    """The link is down for good. Not an Exception: a script's own error handling must not swallow its end."""


class Lost(BaseException):
    """The other end went away without a word."""
