"""The server's parameters in shared memory, from which workers copy each version straight to their device.

A worker on a device would need a main-memory copy of the model only to copy it on. So the store lies in memory that
such workers map too, and a grant lends it to them: the worker clears a flag in its region when it has read the version,
and the server does not write to the store before that. The wait is shorter than the copy it saves, since the worker was
waiting for its grant.

If a worker does not read in time, because it was stopped or killed just then, the store moves once to private memory,
and from there on the server copies versions to the workers' regions, as it does for workers on the CPU.
"""

import mmap
import os
import time
from collections.abc import Callable

from torch import Tensor

from paceline.engines.local.server_links import Member
from paceline.model.memory_budget import ShortOfMemoryError
from paceline.model.regions import RegionLayout, parameters_in
from paceline.model.store import Parameters, Store
from paceline.transport.shm import ShmServerEnd, anonymous_file

PATIENCE_S = 1.0  # for a worker that reads, beyond the time that its bytes take
SLOW_BYTES_PER_S = 1e9  # a tenth of what the older buses carry
LOOK_S = 0.0001  # between checks for workers that still read


class SharedWeights:
    """The shared memory of the store, the workers that may read it, and those that are reading."""

    def __init__(self, remark: Callable[[str], None]) -> None:
        self._remark = remark
        self._store: Store | None = None
        self._flat: list[Tensor] = []
        self._descriptor: int | None = None
        self.borrowers: set[Member] = set()
        self._reading: list[Member] = []
        self._over = False

    def offer(self, member: Member, store: Store) -> None:
        """Lend the store's memory to a worker that copies versions itself, if possible; called before its Welcome."""
        if self._over or not store.lendable or not isinstance(member.link, ShmServerEnd):
            return
        if self._descriptor is None and not self._begin(store):
            return
        assert self._descriptor is not None  # for the type checker
        member.link.lend(self._flat, self._descriptor)
        self.borrowers.add(member)

    def version_for(self, member: Member) -> Parameters | None:
        """Return the current version for a worker that waits for it; None if it needs a copy."""
        store = self._store
        region = member.link.region
        if store is None or region is None or self._over or member not in self.borrowers:
            return None
        store.write_buffers(region.buffers)
        region.lent = True
        self._reading.append(member)
        return Parameters(store.version, self._flat, region.buffers)

    def await_readers(self) -> None:
        """Wait for all readers before a write to the store."""
        if not self._reading or self._store is None:
            return
        until = time.monotonic() + PATIENCE_S + self._store.nbytes / SLOW_BYTES_PER_S
        while reading := [member for member in self._reading if _reads(member)]:
            if time.monotonic() > until:
                self._end(self._store, reading)
                break
            time.sleep(LOOK_S)
        self._reading.clear()

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as a process maps it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _begin(self, store: Store) -> bool:
        """Move the store to shared memory; return False if there is not enough."""
        nbytes = RegionLayout(store.spec).parameter_bytes
        try:
            self._descriptor = anonymous_file(nbytes)
        except ShortOfMemoryError:
            self._over = True
            return False
        self._flat = parameters_in(store.spec, mmap.mmap(self._descriptor, nbytes))
        store.move_to(self._flat)
        store.before_apply = self.await_readers
        self._store = store
        return True

    def _end(self, store: Store, reading: list[Member]) -> None:
        self._over = True
        store.move_home()
        names = ", ".join(member.name for member in reading)
        self._remark(f"{names} did not read a version in time: from here on every worker gets a copy of its own")


def _reads(member: Member) -> bool:
    region = member.link.region
    return not member.hung_up and region is not None and region.lent
