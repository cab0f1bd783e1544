"""A shard's links to workers that share no memory with it, each with a mirror of the shard's part of their region."""

from collections.abc import Iterator

from paceline.core.errors import PacelineError
from paceline.model.memory_budget import require_region
from paceline.model.regions import Region, private_region
from paceline.model.sharding import ModelSplit
from paceline.model.store import Store, gradient_norm
from paceline.shards import commands as c
from paceline.shards.messages import PushPart, VersionPart
from paceline.transport.base import Lost, ServerEnd
from paceline.transport.zeromq import ZeromqHub, ZeromqServerEnd


class RemoteWorkers:
    """The workers that a shard expects or has."""

    def __init__(self, hub: ZeromqHub) -> None:
        self._hub = hub
        self._ends: dict[str, ZeromqServerEnd] = {}  # by token
        self._tokens: dict[int, str] = {}  # by the identity of an end
        self._regions: dict[str, int] = {}  # the number of each worker's latest region
        self._mirrors: dict[int, tuple[ZeromqServerEnd, Region]] = {}

    @property
    def address(self) -> str:
        return self._hub.address

    def fileno(self) -> int:
        return self._hub.fileno()

    def expect(self, token: str) -> None:
        """Let the worker with this token connect."""
        end = self._ends[token] = self._hub.expect(token)
        self._tokens[id(end)] = token

    def mirror(self, number: int, split: ModelSplit, token: str) -> Region | None:
        """Return a mirror of this shard's part of a worker's region; None if the worker is gone."""
        end = self._ends.get(token)
        if end is None:
            return None
        require_region(split.spec)
        region = private_region(split.spec)
        end.use_region(region)
        self._regions[token] = number
        self._mirrors[number] = (end, region)
        return region

    def drop(self, number: int) -> None:
        """Forget a mirror."""
        self._mirrors.pop(number, None)

    def forget(self, token: str) -> None:
        """Close the link to a worker."""
        end = self._ends.pop(token, None)
        if end is not None:
            del self._tokens[id(end)]
            self._regions.pop(token, None)
            end.close()

    def send_version(self, region: int, number: int, store: Store) -> None:
        """Send the store's current version."""
        found = self._mirrors.get(region)
        if found is not None:
            end, mirror = found
            end.deliver(VersionPart(number, store.hand_out(mirror.flat, mirror.buffers)))

    def pump(self) -> Iterator[c.Held | c.Broken]:
        """Receive what has come; yield what the coordinator has to know."""
        for end in self._hub.pump():
            token = self._tokens.get(id(end))
            if token is None:
                continue
            try:
                yield from self._collected(end, token)
            except PacelineError as error:
                yield c.Broken(token, str(error))

    def _collected(self, end: ServerEnd, token: str) -> Iterator[c.Held | c.Broken]:
        try:
            while (message := end.collect()) is not None:
                if isinstance(message, PushPart) and token in self._regions:
                    yield c.Held(self._regions[token], message.ticket, gradient_norm(message.gradient))
                else:
                    yield c.Broken(token, f"a shard takes parts of pushes, not a {type(message).__name__}")
        except Lost:
            return  # the coordinator learns of it by the worker's link to itself

    def close(self) -> None:
        self._hub.close()
