"""A shard's links to workers. One of this host has a socket of its own to each shard, which only tables use: gradients
and versions lie in memory that all map. Of one that shares no memory the shard mirrors its part of the region."""

import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

from paceline.core.errors import InternalError, PacelineError
from paceline.model.memory_budget import require_region
from paceline.model.regions import Region, private_region
from paceline.model.sharding import ModelSplit
from paceline.model.store import Store, gradient_norm
from paceline.shards import commands as c
from paceline.shards.messages import PushPart, RowsPart, TickPart, VersionPart
from paceline.transport.base import Lost, ServerEnd
from paceline.transport.shm import Channel, ShmServerEnd
from paceline.transport.zeromq import ZeromqHub, ZeromqServerEnd

Note = c.Held | c.TickHeld | c.Broken  # what the coordinator has to know


class WorkerEnds:
    """The workers that a shard expects or has."""

    def __init__(self, hub: ZeromqHub | None, hold: Callable[[str, TickPart], None]) -> None:
        """`hub`: for workers that share no memory, where there are such. `hold` keeps a part of a clock."""
        self._hub = hub
        self._hold = hold
        self._selector = selectors.DefaultSelector()
        if hub is not None:
            self._selector.register(hub, selectors.EVENT_READ, hub)
        self._ends: dict[str, ZeromqServerEnd | ShmServerEnd] = {}  # by token
        self._tokens: dict[int, str] = {}  # by the identity of an end
        self._regions: dict[str, int] = {}  # the number of each worker's latest region
        self._mirrors: dict[int, tuple[ZeromqServerEnd, Region]] = {}
        self._allowed = 0  # bytes of tables

    @property
    def address(self) -> str:
        return "" if self._hub is None else self._hub.address

    def fileno(self) -> int:
        """Readable while `pump` has something to do."""
        return self._selector.fileno()

    def expect(self, token: str) -> None:
        """Let the worker with this token connect."""
        if self._hub is None:
            raise InternalError("a shard was told of a worker that shares no memory, and does not listen")
        end = self._hub.expect(token)
        end.allow(self._allowed)
        self._add(token, end)

    def link(self, token: str, descriptor: int) -> None:
        """Take the shard's end of the link to a worker of this host."""
        end = ShmServerEnd(Channel(socket.socket(fileno=descriptor)))
        self._selector.register(end, selectors.EVENT_READ, end)
        self._add(token, end)

    def _add(self, token: str, end: ZeromqServerEnd | ShmServerEnd) -> None:
        self._ends[token] = end
        self._tokens[id(end)] = token

    def allow(self, nbytes: int) -> None:
        """Raise the bounds of what workers may send by a table of so many bytes."""
        self._allowed += nbytes
        for end in self._ends.values():
            if isinstance(end, ZeromqServerEnd):
                end.allow(nbytes)

    def mirror(self, number: int, split: ModelSplit, token: str) -> Region | None:
        """Return a mirror of this shard's part of a worker's region; None if the worker is gone."""
        end = self._ends.get(token)
        if not isinstance(end, ZeromqServerEnd):
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
            self._unregister(end)
            del self._tokens[id(end)]
            self._regions.pop(token, None)
            end.close()

    def send_version(self, region: int, number: int, store: Store) -> None:
        """Send the store's current version."""
        found = self._mirrors.get(region)
        if found is not None:
            end, mirror = found
            end.deliver(VersionPart(number, store.hand_out(mirror.flat, mirror.buffers)))

    def send_rows(self, token: str, part: RowsPart) -> None:
        """Send a worker rows of a table."""
        end = self._ends.get(token)
        if end is not None:
            end.deliver(part)

    def flush(self) -> bool:
        """Send what full links have not taken yet; return whether there was something."""
        full = [end for end in self._ends.values() if end.wants_write]
        for end in full:
            end.flush()
        return bool(full)

    def pump(self) -> Iterator[Note]:
        """Receive what has come; yield what the coordinator has to know."""
        for key, _ in self._selector.select(0):
            for end in key.data.pump():
                yield from self._taken(end)

    def drain(self, token: str) -> Iterator[Note]:
        """Receive all that a worker has sent whose process has ended."""
        end = self._ends.get(token)
        if isinstance(end, ZeromqServerEnd) and self._hub is not None:
            for each in self._hub.drain(end):
                yield from self._taken(each)
        elif end is not None:
            yield from self._taken(end)

    def _taken(self, end: ServerEnd) -> Iterator[Note]:
        token = self._tokens.get(id(end))
        if token is None:
            return
        try:
            while (message := end.collect()) is not None:
                if isinstance(message, PushPart) and token in self._regions:
                    yield c.Held(self._regions[token], message.ticket, gradient_norm(message.gradient))
                elif isinstance(message, TickPart):
                    self._hold(token, message)
                    yield c.TickHeld(token, message.number)
                else:
                    if isinstance(end, ZeromqServerEnd):
                        end.expel()  # else its connection would stay, and what still comes would be a stranger's
                    yield c.Broken(token, f"a shard takes parts of pushes and clocks, not a {type(message).__name__}")
                    return
        except Lost:
            self._unregister(end)  # the coordinator learns of it by the worker's link to itself
        except PacelineError as error:
            self._unregister(end)
            yield c.Broken(token, str(error))

    def _unregister(self, end: ServerEnd) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(end)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close all links: to workers the shard is lost, as its coordinator is."""
        self._selector.close()
        for end in self._ends.values():
            if isinstance(end, ShmServerEnd):
                end.abandon()
        if self._hub is not None:
            self._hub.close()
