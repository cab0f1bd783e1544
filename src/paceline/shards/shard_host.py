"""One shard: a store over its range of the weights, or its rows of tables, which follows the coordinator's stream of
commands.

Near the coordinator, the parameters lie in memory that it maps, too: it reads them there after the shard has answered,
and writes to them only while no command is under way. On another machine they are sent when it asks. Workers' regions
are mapped by every shard; of each it touches its own range alone. Module buffers are the coordinator's.
"""

import contextlib
import mmap
import os
import selectors
import time
import traceback
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import InternalError, UserError
from paceline.model import tensor_files
from paceline.model.regions import SLOTS, MasterMemory, RegionLayout, tensor_in
from paceline.model.sharding import GRADIENT, ModelSplit
from paceline.model.spec import dtype_of
from paceline.model.store import Gradient, Store, StoreSnapshot, add_in_place
from paceline.records import private_files
from paceline.shards import commands as c
from paceline.shards.messages import RowsPart, TickPart
from paceline.shards.remote_links import LOOK_S, CommandLink
from paceline.shards.table_stripes import TableStripes
from paceline.shards.worker_ends import WorkerEnds
from paceline.transport.base import Lost
from paceline.transport.shm import Channel, Frame, require_sealed
from paceline.transport.zeromq import ZeromqHub

WRITE_S = 0.001  # between attempts to write to a full link


class ShardRegion:
    """A shard's range of one worker's region: parameters, and each slot's gradients."""

    def __init__(self, flat: list[torch.Tensor], slots: list[list[torch.Tensor]]) -> None:
        self.flat = flat
        self.slots = slots

    @staticmethod
    def mapped(split: ModelSplit, layout: RegionLayout, memory: mmap.mmap) -> "ShardRegion":
        """Return the range in memory that holds the whole region."""

        def own(offsets: Sequence[int]) -> list[torch.Tensor]:
            dtypes = [layout.parameters.dtypes[mine.buffer] for mine in split.ranges]
            pairs = zip(split.ranges, dtypes, strict=True)
            return [tensor_in(memory, dtype, mine.end - mine.begin, offsets[mine.buffer] + mine.begin * dtype.itemsize)
                    for mine, dtype in pairs]  # fmt: skip

        return ShardRegion(own(layout.parameter_offsets), [own(layout.slot_offsets[slot]) for slot in range(SLOTS)])


class ShardHost:
    """Carries out commands, one after the other."""

    def __init__(self, link: CommandLink, shard: int, shards: int, hub: ZeromqHub | None = None) -> None:
        """`hub`: for workers that share no memory, where there are such."""
        self._link = link
        self._workers = WorkerEnds(hub, self._hold)
        self._tables = TableStripes(shard, shards)
        self._shard, self._shards = shard, shards
        self._split: ModelSplit | None = None
        self._store: Store | None = None
        self._home: list[torch.Tensor] = []  # the memory of its parameters
        self._regions: dict[int, ShardRegion] = {}
        self._copies: dict[int, list[torch.Tensor]] = {}  # of pushes whose slots were needed
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}  # of each slot, by region and slot
        self._faulty = False
        self._since = time.process_time()
        self._apply_s = self._copy_s = 0.0

    def serve(self, control: Channel | None = None) -> Frame | None:
        """Carry out commands until the coordinator closes its link, or a message comes over `control`, which is
        returned. Raises `Lost` if the end of `control` is gone."""
        with contextlib.ExitStack() as last, selectors.DefaultSelector() as selector:
            last.callback(self._workers.close)
            for each in (self._link, self._workers, *(() if control is None else (control,))):
                selector.register(each, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(WRITE_S if self._writes_wait() else LOOK_S)}
                if control is not None and control in ready and (frame := control.collect()) is not None:
                    return frame
                if (self._link in ready or not ready) and not self._follow():
                    return None
                if self._workers in ready:
                    self._pump()

    def _follow(self) -> bool:
        """Carry out the commands that have come; return False once the coordinator has closed the link."""
        try:
            self._link.listen()
            while (frame := self._link.buffered()) is not None:
                self.handle(frame)
        except Lost:
            return False
        return True

    def _writes_wait(self) -> bool:
        with contextlib.suppress(Lost):  # reading will report it
            self._link.flush()
        return self._workers.flush() or self._link.wants_write

    def _pump(self) -> None:
        """Receive what workers have sent, and tell the coordinator."""
        for note in self._workers.pump():
            self._link.send(c.encode(note))

    def _hold(self, token: str, part: TickPart) -> None:
        self._tables.hold(token, part.number, part.logs)

    def handle(self, frame: Frame) -> None:
        """Carry out one command and answer it. After a fault the coordinator ends the run, so the rest is dropped."""
        if self._faulty:
            for descriptor in frame.descriptors:
                os.close(descriptor)
            return
        carried: tuple[int, ...] = ()
        try:
            answer, carried = self._carry_out(c.command_of(frame.data), frame.descriptors)
        except Exception as error:  # noqa: BLE001 - the coordinator reports whatever it was
            self._faulty = True
            answer = _as_fault(error)
        if answer is not None:
            try:
                self._link.send(c.encode(answer), carried)
            finally:
                for descriptor in carried:
                    os.close(descriptor)

    def _carry_out(self, command: c.Command, given: list[int]) -> tuple[c.Answer | None, tuple[int, ...]]:
        """Return the answer and the descriptors that go with it."""
        match command:
            case c.Merge():
                return self._merge(command), ()
            case c.Publish():
                return self._publish(command.region), ()
            case c.Extend():
                add_in_place(self._flat(command.held), command.samples, self._flat(command.piece),
                             command.piece_samples)  # fmt: skip
                if command.held.slot is None:
                    del self._copies[command.held.number]
            case c.CopyOut():
                self._copies[command.copy] = [part.clone() for part in self._flat(command.push)]
            case c.DropCopy():
                self._copies.pop(command.copy, None)
            case c.MakeStore():
                return self._make_store(command, given[0]), ()
            case c.MapRegion():
                self._map_region(command, given[0])
            case c.SendVersion():
                self._workers.send_version(command.region, command.number, self.store)
            case c.SendRows():
                rows = self._tables.rows(command.table, command.rows)
                self._workers.send_rows(command.token, RowsPart(command.number, rows))
            case c.ExpectWorker():
                self._workers.expect(command.token)
            case c.LinkWorker():
                self._workers.link(command.token, given[0])
            case c.DrainWorker():
                for note in self._workers.drain(command.token):
                    self._link.send(c.encode(note))
                return c.CommandDone(), ()
            case c.ForgetWorker():
                self._workers.forget(command.token)
                self._tables.drop_after(command.token, command.ticks)
            case c.MirrorRegion():
                split = ModelSplit(command.spec, self._shard, self._shards)
                mirror = self._workers.mirror(command.region, split, command.token)
                if mirror is not None:
                    self._regions[command.region] = ShardRegion(mirror.flat, [slot.flat for slot in mirror.slots])
            case c.DropRegion():
                self._workers.drop(command.region)
                self._regions.pop(command.region, None)
                self._views = {key: views for key, views in self._views.items() if key[0] != command.region}
            case c.ScaleRate():
                self.store.optimizer.scale_rate(command.factor)
            case c.Reach():
                return c.CommandDone(), ()
            case c.ReadParameters():
                named = {str(place): flat for place, flat in enumerate(self._home)}
                return c.StateRead({}), (c.in_memory(named),)
            case c.WriteParameters():
                given_flat = _in_order(c.from_memory(given[0]))
                self.store.overwrite(self.store.layout.views(given_flat), [])
                return c.CommandDone(), ()
            case c.CountEffort():
                return self._effort(begin=command.begin), ()
            case c.ReadState() | c.LoadState() | c.SaveState() | c.Restore():
                return self._carry_state(command, given)
            case _:
                return self._on_tables(command, given)
        return None, ()

    def introduce(self) -> None:
        """Send the coordinator the first message."""
        self._link.send(c.encode(c.Listens(self._workers.address)))

    @property
    def store(self) -> Store:
        if self._store is None:
            raise InternalError("a shard was given work before its model")
        return self._store

    @property
    def split(self) -> ModelSplit:
        if self._split is None:
            raise InternalError("a shard was given work before its model")
        return self._split

    # -- the model ---------------------------------------------------------------------------------------------------

    def _make_store(self, command: c.MakeStore, descriptor: int) -> c.Made:
        split = self._split = ModelSplit(command.spec, self._shard, self._shards)
        if command.shared:
            memory = MasterMemory(command.spec)
            with open(descriptor, "rb+") as file:
                home = split.narrow(memory.tensors(mmap.mmap(file.fileno(), memory.nbytes)))
        else:
            memory = MasterMemory(split.spec)
            home = memory.tensors(mmap.mmap(-1, memory.nbytes))  # as aligned as shared memory is
            for mine, given in zip(home, _in_order(c.from_memory(descriptor)), strict=True):
                mine.copy_(given)
        pairs = zip(split.spec.layout.views(home), split.spec.parameters, strict=True)
        values = [view.to(dtype_of(dtype)) for view, (_, _, dtype) in pairs]
        self._store = Store(split.spec, values, [], command.statistics)
        self._store.move_to(home)
        self._home = home
        self._views.clear()
        return c.Made(self._store.notice)

    def _map_region(self, command: c.MapRegion, descriptor: int) -> None:
        layout = RegionLayout(command.spec)
        require_sealed(descriptor)
        with open(descriptor, "rb+") as file:
            memory = mmap.mmap(file.fileno(), layout.nbytes)
        # The worker may come before the first store, and with the spec of the next one.
        self._regions[command.region] = ShardRegion.mapped(
            ModelSplit(command.spec, self._shard, self._shards), layout, memory
        )

    def _flat(self, push: c.PushPlace) -> list[torch.Tensor]:
        if push.slot is None:
            return self._copies[push.number]
        return self._regions[push.number].slots[push.slot]

    def _gradient(self, push: c.PushPlace, command: c.Merge, absent: frozenset[int]) -> Gradient:
        flat = self._flat(push)
        if push.slot is None:
            del self._copies[push.number]
            return Gradient(flat, absent, command.options)
        key = (push.number, push.slot)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = self.store.layout.views(flat)
        return Gradient(flat, absent, command.options, slot=push.slot, views=views)

    def _merge(self, command: c.Merge) -> c.PartMeasured | None:
        began = time.process_time()
        absent = self.split.own(command.absent)
        gradients = [self._gradient(push, command, absent) for push in command.pushes]
        merged = self.store.merge(gradients, command.weights, [1] * len(gradients), stock=command.stock)
        self._apply_s += time.process_time() - began
        return None if merged.norm is None else c.PartMeasured(merged.norm, merged.inner_product)

    def _publish(self, region: int) -> c.CommandDone:
        began = time.process_time()
        self.store.write_to(self._regions[region].flat, ())
        self._copy_s += time.process_time() - began
        return c.CommandDone()

    def _effort(self, *, begin: bool) -> c.ShardEffort:
        found = c.ShardEffort(time.process_time() - self._since, self._apply_s, self._copy_s)
        if begin:
            self._since = time.process_time()
            self._apply_s = self._copy_s = 0.0
        return found

    # -- saved state -------------------------------------------------------------------------------------------------

    def _carry_state(
        self, command: c.ReadState | c.LoadState | c.SaveState | c.Restore, given: list[int]
    ) -> tuple[c.Answer, tuple[int, ...]]:
        store, split = self.store, self.split
        if isinstance(command, c.ReadState):
            tensors, numbers = store.optimizer.state()
            return c.StateRead(split.numbered_values(numbers)), (c.in_memory(split.named(tensors)),)
        if isinstance(command, c.SaveState):
            return self._save(command.path)
        tensors = c.from_memory(given[0])
        if isinstance(command, c.LoadState):
            store.optimizer.load(tensors, command.numbers)
            return c.CommandDone(), ()
        own = {key: value for key, value in tensors.items() if not key.startswith(GRADIENT)}
        previous = {key.removeprefix(GRADIENT): value for key, value in tensors.items() if key.startswith(GRADIENT)}
        parameters = store.snapshot().parameters  # which are where they belong: the coordinator has written them
        store.restore(StoreSnapshot(command.version, parameters, {}, own, command.data, previous))
        return c.CommandDone(), ()

    def _save(self, path: str) -> tuple[c.Saved, tuple[int, ...]]:
        taken = self.store.snapshot()
        tensors = self.split.named(taken.optimizer_tensors)
        tensors |= self.split.named_gradient(list(taken.previous.values())) if taken.previous else {}
        return _written(path, tensors, self.split.numbered(taken.optimizer))

    # -- tables ------------------------------------------------------------------------------------------------------

    def _on_tables(self, command: c.TableCommand, given: list[int]) -> tuple[c.Answer | None, tuple[int, ...]]:
        began = time.process_time()
        tensors = self._tables.carry_out(command, c.from_memory(given[0]) if given else {})
        if isinstance(command, c.ApplyTick):
            self._apply_s += time.process_time() - began
        elif isinstance(command, c.MakeTable):
            self._workers.allow(self._tables.nbytes_of_last)
        if tensors is None:
            return None, ()
        if isinstance(command, c.ReadTables):
            return c.StateRead({}), (c.in_memory(tensors),)
        if isinstance(command, c.SaveTables | c.SaveTicks):
            return _written(command.path, tensors, {})
        return c.CommandDone(), ()


def _written(
    path: str, tensors: Mapping[str, torch.Tensor], data: dict[str, Any]
) -> tuple[c.Saved, tuple[int, ...]]:  # fmt: skip
    """Write a shard's file of a checkpoint; without a path, return memory with its bytes."""
    if not path:
        descriptor = c.in_memory(tensors)
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(0)
            content = file.read()
        return c.Saved(len(content), zlib.crc32(content), data), (descriptor,)
    try:
        with private_files.open_file(Path(path), "wb") as file:
            checksum = tensor_files.write(file, tensors)
            return c.Saved(file.tell(), checksum, data), ()
    except OSError as error:
        return c.Saved(0, 0, {}, error.strerror or str(error)), ()


def _in_order(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return flat buffers that were sent under their numbers."""
    return [tensors[str(place)] for place in range(len(tensors))]


def _as_fault(error: Exception) -> c.Fault:
    if isinstance(error, UserError):
        return c.Fault("user", str(error), "")
    text = str(error) if isinstance(error, InternalError) else f"{type(error).__name__}: {error}"
    return c.Fault("internal", text, traceback.format_exc())
