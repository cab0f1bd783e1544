"""A worker's end where the weights are in shards that share no memory with it: a link to each of them, and one to the
coordinator.

A push or a clock goes to all shards at once, each gets its part, and the rest of it to the coordinator. A message with
a version or with rows comes from the coordinator; its tensors come from the shards, under the number that the message
names, and are read when the message is.
"""

from collections.abc import Callable
from typing import Any

import torch

from paceline.model.regions import Region
from paceline.model.sharding import ModelSplit
from paceline.model.spec import ModelSpec
from paceline.model.store import Gradient, Parameters
from paceline.shards.messages import BETWEEN, PushPart, VersionPart
from paceline.shards.table_endpoint import TableParts, next_part
from paceline.transport.messages import Push, ToServer, ToWorker
from paceline.transport.security import Security
from paceline.transport.zeromq import KNOCKING_S, ZeromqEndpoint


class PartOfSlot:
    """A shard's part of one slot."""

    def __init__(self, flat: list[torch.Tensor]) -> None:
        self.flat = self.views = flat
        self.changes: list[torch.Tensor] = []


class PartOfRegion:
    """A shard's part of a worker's region, without module buffers."""

    def __init__(self, region: Region, split: ModelSplit) -> None:
        self.flat = split.narrow(region.flat)
        self.parameters = self.flat
        self.buffers: list[torch.Tensor] = []
        self.slots = [PartOfSlot(split.narrow(slot.flat)) for slot in region.slots]


class ShardedEndpoint(ZeromqEndpoint):
    """The link to the coordinator, and those to the shards. The address names all of them, the coordinator first."""

    def __init__(
        self, address: str, token: str, relink: Callable[[], tuple[str, str]] | None = None,
        security: Security | None = None, knocking_s: float = KNOCKING_S,
    ) -> None:  # fmt: skip
        self._shards: list[ZeromqEndpoint] = []
        self._tables = TableParts()
        super().__init__(address, token, relink, security, knocking_s)
        self._codec.in_parts = True

    def _connect(self, address: str, token: str) -> None:
        first, *others = address.split(BETWEEN)
        super()._connect(first, token)
        for shard, other in zip(self._shards, others, strict=bool(self._shards)):
            shard.move_to(other, token)
        self._shards = self._shards or [
            ZeromqEndpoint(other, token, None, self._security, self._knocking_s) for other in others
        ]

    def adopt(self, spec: ModelSpec) -> Region:
        region = super().adopt(spec)
        for number, shard in enumerate(self._shards):
            part: Any = PartOfRegion(region, ModelSplit(spec, number, len(self._shards)))
            shard.use_region(part)
        return region

    def _look(self) -> None:
        """Notice the end of any of the links: without one shard, a worker can go on no more than without all."""
        super()._look()
        self._lost = self._lost or any(shard.lost for shard in self._shards)

    @property
    def unreached(self) -> list[str]:
        """The addresses of those that were given up before they had answered."""
        return [*super().unreached, *(address for shard in self._shards for address in shard.unreached)]

    def send(self, message: ToServer) -> None:
        if isinstance(message, Push) and message.gradient is not None and message.gradient.slot is not None:
            self._send_parts(message.ticket, message.gradient, message.gradient.slot)
        super().send(self._tables.split(message, self._shards))

    def _send_parts(self, ticket: int, gradient: Gradient, slot: int) -> None:
        """Send each shard its part; what the slot does not have yet is written on the way."""
        for shard in self._shards:
            own = shard.region.slots[slot]  # type: ignore[union-attr]
            part = Gradient(own.flat, frozenset(), (), slot=slot, views=own.views, unwritten=gradient.unwritten)
            shard.send(PushPart(ticket, part))
        if gradient.unwritten is not None:
            gradient.unwritten.write()
        gradient.in_parts = True

    def receive(self) -> ToWorker:
        message = super().receive()
        version = getattr(message, "parameters", None)
        if isinstance(version, Parameters) and version.parts is not None:
            for shard in self._shards:
                next_part(shard, version.parts, VersionPart)
        return self._tables.join(message, self._shards)

    def close(self) -> None:
        super().close()
        for shard in self._shards:
            shard.close()
