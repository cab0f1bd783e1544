"""What a worker that shares no memory and a shard send each other: parts of pushes and of versions."""

from paceline.model.store import Gradient, Parameters
from paceline.transport.messages import ToServer, ToWorker, registered

BETWEEN = "\0"  # addresses of a server and of its shards; the name of a socket's file may hold any other character


@registered(57)
class PushPart(ToServer, frozen=True):
    """A shard's part of the push with this ticket; the push itself goes to the coordinator."""

    ticket: int
    gradient: Gradient


@registered(120)
class VersionPart(ToWorker, frozen=True):
    """A shard's part of the version that a message of the coordinator refers to by this number."""

    number: int
    parameters: Parameters
