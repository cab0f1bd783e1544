"""The contract of every transport: two ends, whole messages, in order, each delivered once."""

from typing import Protocol

from paceline.transport.messages import ToServer, ToWorker


class Endpoint(Protocol):
    """A worker's end."""

    def send(self, message: ToServer) -> None:
        """Hand a message over; returns at once."""

    def receive(self) -> ToWorker:
        """The next message for this worker; waits for it. Raises `Closed` if there will be none."""


class ServerEnd(Protocol):
    """The server's end of one worker's link."""

    def deliver(self, message: ToWorker) -> None:
        """Hand a message over; returns at once."""

    def collect(self) -> ToServer | None:
        """The worker's next message, or None if there is none at the moment."""

    def close(self) -> None:
        """The worker's next `receive` raises `Closed`."""


class Closed(BaseException):
    """The link is down for good. Not an Exception: a script's own error handling must not swallow its end."""
