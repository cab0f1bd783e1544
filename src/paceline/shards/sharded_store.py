"""The coordinator's side of a sharded model: a store whose steps and copies are made by shards.

It behaves as `Store` does, and keeps what needs no arithmetic on parameters: which pushes are held and where they lie,
module buffers, the version's number. Every change of parameters is a command to all shards. The parameters lie in
memory that coordinator and shards map; whoever reads or writes them here first waits until the shards have done all
that they were told. A shard on another machine maps nothing: its range is fetched before it is read here, and sent
after it was written.

Norms that shards measure are added as squares, and inner products as they are. The last bits may differ from those of
one store, which sums over the whole buffer in single precision; only strategies that ask for `Applied` see them.
"""

import errno
import math
import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import torch

from paceline.core.errors import InternalError, UserError
from paceline.core.updates import UNMEASURED, UNMEASURED_PLAIN, Contents, Merged, PushRef
from paceline.model.mass_optimizer import mean_options
from paceline.model.regions import MasterMemory, Region
from paceline.model.sharding import (
    GRADIENT,
    ModelSplit,
    joined_data,
    joined_tensors,
    require_splittable,
    shapes_of,
)
from paceline.model.spec import ModelSpec
from paceline.model.store import MODEL, SERVER, Gradient, Lending, Parameters, Store, StoreSnapshot, extend, sorted_out
from paceline.records import private_files
from paceline.shards import commands as c
from paceline.shards.remote_links import CommandLink, RemoteLink, ShardPort
from paceline.tables.messages import Tick, TickParts
from paceline.transport.base import Lost
from paceline.transport.shm import Frame, anonymous_file
from paceline.transport.zeromq import ZeromqServerEnd

A = TypeVar("A")
FileSums = dict[str, tuple[int, int]]  # the length and checksum of each file
Ranges = Sequence[Sequence[torch.Tensor]]  # each shard's part of the flat buffers
MOST_HELD = 64  # pushes of one worker that some shards hold and the coordinator has not seen; an honest one has two
MOST_TICKS = 512  # likewise, clocks, of which an honest one has half as many (`MOST_AHEAD` of the worker's side)


class TickArrivals:
    """The clocks whose increments shards hold, whole or in part, by the worker that sent them.

    A clock that all hold is dropped there when nothing here refers to it any more: then it is applied and saved, or
    never will be.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._holders: dict[str, dict[int, set[int]]] = {}  # of clocks that were not taken yet, by token and number
        self._taken: dict[str, int] = {}  # the last one of each worker
        self.dropped: list[tuple[str, int]] = []

    def expect(self, token: str) -> None:
        """Count clocks of the worker with this token."""
        self._holders[token], self._taken[token] = {}, 0

    def note(self, shard: int, held: c.TickHeld) -> int:
        """Note that a shard holds a clock; return how many of them do. A part that comes twice counts once."""
        holders = self._holders[held.token].setdefault(held.number, set())
        holders.add(shard)
        return len(holders)

    def knows(self, token: str) -> bool:
        """Return whether the worker is there."""
        return token in self._holders

    def too_many(self, token: str) -> bool:
        """Return whether a worker has sent shards far more clocks than it has told the coordinator of."""
        return len(self._holders[token]) > MOST_TICKS

    def take(self, token: str, tick: Tick) -> Tick | None:
        """Return a clock that all shards hold; None if some do not."""
        parts, holders = tick.parts, self._holders[token]
        if parts is None:
            return tick
        if len(holders.get(parts.number, ())) < self._shards:
            return None
        del holders[parts.number]
        self._taken[token] = parts.number
        return msgspec.structs.replace(tick, parts=self.referred(TickParts(parts.number, parts.nbytes, token)))

    def referred(self, parts: TickParts) -> TickParts:
        """Let shards drop a clock with the last reference to this."""
        weakref.finalize(parts, self.dropped.append, (parts.owner, parts.number)).atexit = False
        return parts

    def forget(self, token: str) -> int:
        """Forget a worker; return the number of its last clock that all shards hold."""
        self._holders.pop(token, None)
        return self._taken.pop(token, 0)


class ShardLinks:
    """The links to all shards: one ordered stream of commands to each, and their answers.

    `on_lost` is called when a shard is gone, and does not return: its range of the weights is lost.
    """

    def __init__(self, links: Sequence[CommandLink], on_lost: Callable[[int], NoReturn]) -> None:
        self._links = list(links)
        self.far = [isinstance(link, RemoteLink) for link in links]  # which of them share no memory with this process
        self._on_lost = on_lost
        self._regions: dict[int, int] = {}  # numbers, by the identity of a region's lists of tensors
        self._last = 0
        self._dropped: list[int] = []  # regions that nothing here refers to any more
        # Norms of the parts that shards hold, by region, ticket and shard.
        self._held: dict[int, dict[int, dict[int, float]]] = {}
        self._tokens: dict[int, str] = {}  # of workers that share no memory, by region
        self.broken: list[c.Broken] = []  # workers that have sent what is no message
        self.news = False  # all shards hold a push, or a worker is broken
        self._versions = 0  # sent so far to workers that share no memory
        self.behind = False  # commands were sent after the last one that was answered
        self.ticks = TickArrivals(len(links))
        self.addresses = [answer.address for answer in self.collect(c.Listens)]  # for workers that share no memory

    def __len__(self) -> int:
        return len(self._links)

    def send(self, command: c.Command, descriptors: Sequence[int] = ()) -> None:
        """Send a command to all shards."""
        self._drop()
        self.behind = True
        data = c.encode(command)
        for shard in range(len(self._links)):
            self._post(shard, data, descriptors)

    def _drop(self) -> None:
        """Let shards forget what nothing here refers to any more."""
        while self._dropped:
            self.send(c.DropRegion(self._dropped.pop()))
        if self.ticks.dropped:
            count = len(self.ticks.dropped)  # each command may let go of more
            self.send(c.DropTicks([self.ticks.dropped.pop() for _ in range(count)]))

    def ask(self, command: c.Command, kind: type[A], descriptors: Sequence[int] = ()) -> list[A]:
        """Send a command to all shards and return their answers."""
        self.send(command, descriptors)
        return self.collect(kind)

    def ask_each(
        self, commands: Sequence[c.Command], kind: type[A], tensors: Sequence[Mapping[str, torch.Tensor]] = ()
    ) -> list[A]:
        """Send each shard its own command, with its tensors if there are any, and return their answers."""
        for shard, command in enumerate(commands):
            if tensors:
                self._post_tensors(shard, command, tensors[shard])
            else:
                self._post(shard, c.encode(command), ())
        return self.collect(kind)

    def send_some(self, commands: Sequence[c.Command | None]) -> None:
        """Send shards their own commands; None: it has none."""
        self.behind = True
        for shard, command in enumerate(commands):
            if command is not None:
                self._post(shard, c.encode(command), ())

    def save(self, folder: Path, name: str, command: Callable[[str], c.Command]) -> tuple[FileSums, list[c.Saved]]:
        """Let each shard write its file into a checkpoint, and write those of shards on other machines, which may have
        no such folder; `name` has a place for its number. Return lengths and checksums, and the answers."""
        names = [name.format(shard) for shard in range(len(self._links))]
        for shard, each in enumerate(names):
            self._post(shard, c.encode(command("" if self.far[shard] else os.fspath(folder / each))), ())
        found = self._answers(c.Saved)
        with ExitStack() as last:
            for descriptor in (one for _, descriptors in found for one in descriptors):
                last.callback(os.close, descriptor)
            for each, (saved, descriptors) in zip(names, found, strict=True):
                if saved.error:
                    raise OSError(errno.EIO, f"{each}: {saved.error}")
                for descriptor in descriptors:
                    _copy_to(folder / each, descriptor, saved.crc32)
        sums = {each: (saved.nbytes, saved.crc32) for each, (saved, _) in zip(names, found, strict=True)}
        return sums, [saved for saved, _ in found]

    # -- parameters --------------------------------------------------------------------------------------------------

    def make_store(self, spec: ModelSpec, statistics: bool, memory: int, ranges: Ranges) -> list[c.Made]:
        """Let the shards train a model whose parameters are in this memory; `ranges` are each shard's part of it."""
        for shard, far in enumerate(self.far):
            if far:
                self._post_tensors(shard, c.MakeStore(spec, statistics, shared=False), _numbered(ranges[shard]))
            else:
                self._post(shard, c.encode(c.MakeStore(spec, statistics)), (memory,))
        return self.collect(c.Made)

    def fetch(self, ranges: Ranges) -> None:
        """Wait until all shards have done what they were told, and bring here what those on other machines have."""
        self._drop()
        for shard, far in enumerate(self.far):
            self._post(shard, c.encode(c.ReadParameters() if far else c.Reach()), ())
        kinds: Any = c.StateRead | c.CommandDone
        for mine, (_, descriptors) in zip(ranges, self._answers(kinds), strict=True):
            for descriptor in descriptors:
                given = c.from_memory(descriptor)
                for place, flat in enumerate(mine):
                    flat.copy_(given[str(place)])

    def spread(self, ranges: Ranges) -> None:
        """Send shards on other machines their part of what was written here."""
        for shard, far in enumerate(self.far):
            if far:
                self._post_tensors(shard, c.WriteParameters(), _numbered(ranges[shard]))
            else:
                self._post(shard, c.encode(c.Reach()), ())
        self.collect(c.CommandDone)

    def read_states(self, command: c.ReadState | c.ReadTables) -> Iterator[tuple[c.StateRead, dict[str, torch.Tensor]]]:
        """Yield the state of each shard's optimizer, or its tables."""
        self.send(command)
        for answer, descriptors in self._answers(c.StateRead):
            yield answer, c.from_memory(descriptors[0])

    def collect(self, kind: type[A]) -> list[A]:
        """Return the answer of each shard to the last command."""
        return [answer for answer, _ in self._answers(kind)]

    def _answers(self, kind: type[A]) -> list[tuple[A, list[int]]]:
        """Return the answer of each shard to the last command, with its descriptors."""
        answers = [self._answer(shard, kind) for shard in range(len(self._links))]
        self.behind = False
        for shard in range(len(self._links)):
            self._read_ahead(shard)
        return answers

    def _post_tensors(self, shard: int, command: c.Command, tensors: Mapping[str, torch.Tensor]) -> None:
        descriptor = c.in_memory(tensors)
        try:
            self._post(shard, c.encode(command), (descriptor,))
        finally:
            os.close(descriptor)

    def _post(self, shard: int, data: bytes, descriptors: Sequence[int]) -> None:
        try:
            self._links[shard].send(data, descriptors)
        except Lost:
            self._on_lost(shard)

    def _answer(self, shard: int, kind: type[A]) -> tuple[A, list[int]]:
        while True:
            try:
                frame = self._links[shard].receive()
            except Lost:
                self._on_lost(shard)
            answer = c.answer_of(frame.data) if frame is not None else None
            if not self._noted(shard, answer):
                break
        self._require_sound(shard, answer)
        if frame is None or not isinstance(answer, kind):
            raise InternalError(f"shard {shard} answered {answer!r} where {kind} was due")
        return answer, frame.descriptors

    def _read_ahead(self, shard: int) -> None:
        """Take in what was read together with an answer, of this shard or another: no event loop would report it."""
        with suppress(Lost):  # the next command will show it
            while (frame := self._links[shard].buffered()) is not None:
                self._require_note(shard, frame)

    def _require_sound(self, shard: int, answer: c.Answer | None) -> None:
        """Raise what went wrong in a shard."""
        if isinstance(answer, c.Fault):
            if answer.blame == "user":
                raise UserError(answer.text)
            error = InternalError(f"shard {shard} failed: {answer.text}")
            error.add_note(answer.traceback)
            raise error

    def _require_note(self, shard: int, frame: Frame) -> None:
        answer = c.answer_of(frame.data)
        self._require_sound(shard, answer)
        if not self._noted(shard, answer):
            raise InternalError(f"shard {shard} sent {answer!r} unasked")

    # -- what shards send unasked ------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Take in what shards have sent unasked. All is received before any is handled: receiving from one shard of
        another machine brings what others have sent, which no event loop would report again."""
        for shard, link in enumerate(self._links):
            try:
                link.listen()
            except Lost:
                self._on_lost(shard)
        for shard in range(len(self._links)):
            try:
                while (frame := self._links[shard].buffered()) is not None:
                    self._require_note(shard, frame)
            except Lost:
                self._on_lost(shard)

    def look(self) -> None:
        """Notice a shard on another machine whose link has ended while it had nothing to answer."""
        for shard, link in enumerate(self._links):
            if isinstance(link, RemoteLink) and link.lost:
                self._on_lost(shard)

    def _noted(self, shard: int, answer: c.Answer | None) -> bool:
        """Take note of what is no answer; return whether it was that. A part that comes twice counts once."""
        if isinstance(answer, c.Held) and answer.region in self._tokens:  # else its worker has gone meanwhile
            held = self._held.setdefault(answer.region, {})
            norms = held.setdefault(answer.ticket, {})
            norms[shard] = answer.norm
            self.news = self.news or len(norms) == len(self._links)
            if len(held) > MOST_HELD:
                self.broken.append(
                    c.Broken(self._tokens[answer.region], f"it sent parts of {len(held)} pushes at once")
                )
                self.news = True
        elif isinstance(answer, c.TickHeld) and self.ticks.knows(answer.token):
            self.news = self.ticks.note(shard, answer) == len(self._links) or self.news
            if self.ticks.too_many(answer.token):
                self.broken.append(c.Broken(answer.token, f"it sent parts of more than {MOST_TICKS} clocks at once"))
                self.news = True
        elif isinstance(answer, c.Broken):
            self.broken.append(answer)
            self.news = True
        return isinstance(answer, c.Held | c.TickHeld | c.Broken)

    def take(self, region: Region, ticket: int) -> float | None:
        """Return the norm of a push that all shards hold, of the worker with this region; None if some do not."""
        held = self._held.get(self.region_of(region.flat), {})
        if len(held.get(ticket, ())) < len(self._links):
            return None
        norms = held.pop(ticket)
        return math.hypot(*(norms[shard] for shard in range(len(self._links))))

    def send_version(self, flat: list[torch.Tensor]) -> int:
        """Let the shards send the current version to the worker with these parameters; return its number."""
        self._versions += 1
        self.send(c.SendVersion(self.region_of(flat), self._versions))
        return self._versions

    # -- regions -----------------------------------------------------------------------------------------------------

    def share(self, region: Region, spec: ModelSpec, descriptor: int) -> None:
        """Let the shards map the region of a worker that shares its memory."""
        if any(self.far):
            raise InternalError("a worker shares its memory, and there are shards on other machines")
        number = self._number(region)
        self.send(c.MapRegion(number, spec), (descriptor,))

    def mirror(self, region: Region, spec: ModelSpec, token: str) -> None:
        """Let the shards mirror their parts of the region of a worker that shares no memory."""
        number = self._number(region)
        self._tokens[number] = token
        self.send(c.MirrorRegion(number, spec, token))

    def expect(self, token: str, end: ZeromqServerEnd) -> None:
        """Let a worker that shares no memory connect to the shards; `end` is its link to the coordinator."""
        self.ticks.expect(token)
        self.send(c.ExpectWorker(token))
        end.leave_to_shards(lambda region, spec: self.mirror(region, spec, token))

    def connect(self, token: str, descriptors: Sequence[int]) -> None:
        """Give each shard its end of a link to a worker of this host."""
        self.ticks.expect(token)
        self.behind = True
        for shard, descriptor in enumerate(descriptors):
            self._post(shard, c.encode(c.LinkWorker(token)), (descriptor,))
            os.close(descriptor)

    def drain(self, token: str) -> None:
        """Take in all that a worker has sent whose process has ended."""
        self.ask(c.DrainWorker(token), c.CommandDone)

    def forget(self, token: str, region: Region | None) -> None:
        """Let the shards close their links to a worker; what was not handled of it is void."""
        self.send(c.ForgetWorker(token, self.ticks.forget(token)))
        if region is not None:
            number = self.region_of(region.flat)
            self._held.pop(number, None)
            self._tokens.pop(number, None)

    def _number(self, region: Region) -> int:
        number = self._last = self._last + 1
        for tensors in (region.flat, *(slot.views for slot in region.slots)):
            self._regions[id(tensors)] = number
        weakref.finalize(region.memory, self._dropped.append, number).atexit = False
        return number

    def region_of(self, tensors: list[torch.Tensor]) -> int:
        """Return the number of the region that these tensors are of: its parameters, or a slot's views."""
        found = self._regions.get(id(tensors))
        if found is None:
            raise InternalError("a model's tensors lie in no region that the shards know")
        return found

    @property
    def channels(self) -> list[CommandLink | ShardPort]:
        """What an event loop has to watch: call `listen` when one is readable."""
        ports = {id(link.port): link.port for link in self._links if isinstance(link, RemoteLink)}
        return [*(link for link in self._links if not isinstance(link, RemoteLink)), *ports.values()]

    def flush(self) -> bool:
        """Send what full links have not taken yet; return whether there was something."""
        full = [shard for shard, link in enumerate(self._links) if link.wants_write]
        for shard in full:
            try:
                self._links[shard].flush()
            except Lost:
                self._on_lost(shard)
        return bool(full)

    def close(self) -> None:
        """Close all links; the shards then exit."""
        watched = self.channels
        for link in self._links:
            link.close()
        for port in watched:
            if isinstance(port, ShardPort):
                port.close()


def _numbered(flat: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(place): part for place, part in enumerate(flat)}


def _copy_to(path: Path, descriptor: int, crc32: int) -> None:
    """Write a file of a checkpoint that a shard has sent."""
    with open(descriptor, "rb", closefd=False) as sent, private_files.open_file(path, "wb") as file:
        sent.seek(0)
        content = sent.read()
        if zlib.crc32(content) != crc32:
            raise OSError(errno.EIO, f"{path.name} has arrived with another checksum than it was sent with")
        file.write(content)


class CopiedGradient(Gradient):
    """A push that shards have copied out of its slot."""

    __slots__ = ("number",)

    def __init__(self, number: int, gradient: Gradient) -> None:
        change = [None if one is None else one.clone() for one in gradient.buffer_change]
        super().__init__([], gradient.missing, gradient.options, change, gradient.loss, gradient.norm)
        self.number = number


class ShardedOptimizer:
    """The optimizer of all shards, as a run sees it."""

    def __init__(self, links: ShardLinks, spec: ModelSpec) -> None:
        self._links = links
        self._shapes = shapes_of(spec)
        self.splits = [ModelSplit(spec, shard, len(links)) for shard in range(len(links))]

    def scale_rate(self, factor: float) -> None:
        """Multiply every learning rate that pushes bring by this factor."""
        self._links.send(c.ScaleRate(factor))

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the state as a script sees it."""
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, Any] = {}
        for answer, parts in self._links.read_states(c.ReadState()):
            tensors |= parts
            numbers = {**answer.numbers, **numbers}
        return joined_tensors(tensors, self._shapes), numbers

    def load(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Continue from a state that a script has loaded."""
        commands = [c.LoadState(split.taken_values(numbers)) for split in self.splits]
        self._links.ask_each(commands, c.CommandDone, [split.taken(tensors, self._shapes) for split in self.splits])

    def restore(self, snapshot: StoreSnapshot) -> None:
        """Continue from a checkpoint."""
        previous = [snapshot.previous[str(i)] for i in range(len(snapshot.previous))]
        tensors = []
        for split in self.splits:
            parts = split.narrow(previous) if previous else []
            last = {f"{GRADIENT}{i}": part for i, part in enumerate(parts)}
            tensors.append({**split.taken(snapshot.optimizer_tensors, self._shapes), **last})
        commands = [c.Restore(snapshot.version, split.taken_data(snapshot.optimizer)) for split in self.splits]
        self._links.ask_each(commands, c.CommandDone, tensors)


class ShardedStore(Store):
    """A store whose parameters and optimizer are in shards."""

    def __init__(
        self, spec: ModelSpec, values: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], statistics: bool,
        links: ShardLinks,
    ) -> None:  # fmt: skip
        require_splittable(spec)
        self.spec = spec
        self.layout = spec.layout
        self.version = 0
        self.statistics = statistics
        self._links = links
        self._buffers = [b.detach().clone() for b in buffers]
        self._read = None
        self._pushes = {}
        self._handed_out, self._lending, self._is_shared = [], Lending(), True
        self.before_apply = None
        self._copies = 0  # made so far of pushes whose slots were needed
        self._sent_to: list[torch.Tensor] | None = None  # whose version is the last command, of those without memory
        home = MasterMemory(spec)
        descriptor = anonymous_file(home.nbytes)
        with ExitStack() as last:
            last.callback(os.close, descriptor)
            self._flat = home.tensors(mmap.mmap(descriptor, home.nbytes))
            self._parameters = self.layout.views(self._flat)
            for mine, value in zip(self._parameters, values, strict=True):
                mine.copy_(value)
            optimizer = ShardedOptimizer(links, spec)
            self._ranges = [split.narrow(self._flat) for split in optimizer.splits]
            made = links.make_store(spec, statistics, descriptor, self._ranges)
        self.notice = next((answer.notice for answer in made if answer.notice is not None), None)
        self.optimizer = optimizer  # type: ignore[assignment]

    @property
    def lendable(self) -> bool:
        """Shards write to the parameters while others read theirs, so workers get copies."""
        return False

    def _fetch(self) -> None:
        """Wait until the parameters here are those of the current version."""
        self._links.fetch(self._ranges)

    # -- versions ----------------------------------------------------------------------------------------------------

    def read(self) -> Parameters:
        if self._read is None:
            self._fetch()
        return super().read()

    def state(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self._fetch()
        return super().state()

    def overwrite(self, values: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        self._links.ask(c.Reach(), c.CommandDone)
        super().overwrite(values, buffers)
        self._links.spread(self._ranges)

    def write_to(self, flat: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> int:
        """Let the shards copy the current version into a region; return its number."""
        if not isinstance(flat, list):
            raise InternalError("a version is copied to a region's own list of tensors")
        self.write_buffers(buffers)
        self._links.ask(c.Publish(self._links.region_of(flat)), c.CommandDone)
        return self.version

    def hand_out(self, flat: list[torch.Tensor], buffers: list[torch.Tensor]) -> Parameters:
        """Let the shards send the current version to a worker that shares no memory."""
        self.write_buffers(buffers)
        self._sent_to = flat
        return Parameters(self.version, flat, buffers, parts=self._links.send_version(flat))

    # -- pushes ------------------------------------------------------------------------------------------------------

    def _place(self, gradient: Gradient) -> c.PushPlace:
        if isinstance(gradient, CopiedGradient):
            return c.PushPlace(gradient.number, None)
        if gradient.slot is None or gradient.views is None:
            raise InternalError("a push lies in no slot, where no shard can find it")
        return c.PushPlace(self._links.region_of(gradient.views), gradient.slot)

    def free_slot(self, region: Region, last: int) -> int:
        """Return the slot for the worker's next push, once no shard reads from it any more.

        A worker that waits for its version from the shards cannot come too early: they send it after that.
        """
        copies = self._copies
        slot = super().free_slot(region, last)
        if self._links.behind and (self._sent_to is not region.flat or copies != self._copies):
            self._links.ask(c.Reach(), c.CommandDone)
        return slot

    def _extended(self, held: Gradient, samples: int, piece: Gradient, piece_samples: int) -> Gradient:
        if piece_samples and not samples:
            self._drop_copy(held)
        return extend(held, samples, piece, piece_samples, add=self._add)

    def _add(self, held: Gradient, samples: int, piece: Gradient, piece_samples: int) -> None:
        self._sent_to = None
        self._links.send(c.Extend(self._place(held), samples, self._place(piece), piece_samples))

    def _out_of_slot(self, gradient: Gradient) -> Gradient:
        self._copies += 1
        self._links.send(c.CopyOut(self._place(gradient), self._copies))
        return CopiedGradient(self._copies, gradient)

    def _drop_copy(self, gradient: Gradient | None) -> None:
        if isinstance(gradient, CopiedGradient):
            self._links.send(c.DropCopy(gradient.number))

    def discard(self, push: PushRef) -> None:
        self._drop_copy(self._pushes.pop(push.ticket, None))

    def merge(
        self, gradients: Sequence[Gradient], weights: Sequence[float], samples: Sequence[int], *, stock: bool
    ) -> Merged:
        """Let the shards merge these gradients into one version."""
        options = list(mean_options([gradient.options for gradient in gradients], samples))
        absent = frozenset.intersection(*[gradient.missing for gradient in gradients])
        places = [self._place(gradient) for gradient in gradients]
        self._sent_to = None
        self._links.send(c.Merge(places, list(weights), options, sorted(absent), stock))
        self._merge_buffers(gradients, weights)
        self.version += 1
        self._read = None
        plain = len(gradients) == 1 and self._is_plain(options)
        if not self.statistics:
            return UNMEASURED_PLAIN if plain else UNMEASURED
        return self._combined(self._links.collect(c.PartMeasured), plain)

    def _combined(self, parts: Sequence[c.PartMeasured], plain: bool) -> Merged:
        norm = math.hypot(*(part.norm for part in parts))
        products = [part.inner_product for part in parts if part.inner_product is not None]
        return Merged(norm, math.fsum(products) if len(products) == len(parts) else None, plain)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def contents(self) -> Contents:
        """Return the model, and how shards write the rest: each its own file."""
        self._fetch()
        names = [name for name, _, _ in self.spec.parameters]
        parameters = dict(zip(names, self._parameters, strict=True))
        buffers = {name: b for (name, _, _), b in zip(self.spec.buffers, self._buffers, strict=True)}
        taken = StoreSnapshot(self.version, parameters, buffers, {}, {}, {})
        model, beside = sorted_out(self.spec, taken)
        files = {MODEL: model, **({SERVER: beside} if beside else {})}
        return Contents(files, {"spec": msgspec.to_builtins(self.spec)}, self._save)

    def _save(self, folder: Path) -> tuple[FileSums, dict[str, Any]]:
        """Let each shard write its file into the folder; return lengths and checksums, and the optimizer's data."""
        sums, found = self._links.save(folder, "optimizer-{}.safetensors", c.SaveState)
        return sums, {"optimizer": joined_data([saved.data for saved in found])}

    def restore(self, snapshot: StoreSnapshot) -> None:
        """Continue from a snapshot, whatever number of shards it was saved by."""
        self._links.ask(c.Reach(), c.CommandDone)
        for (name, _, _), mine in zip(self.spec.parameters, self._parameters, strict=True):
            mine.copy_(snapshot.parameters[name])
        for (name, _, _), mine in zip(self.spec.buffers, self._buffers, strict=True):
            mine.copy_(snapshot.buffers[name])
        self._links.spread(self._ranges)
        self.optimizer.restore(snapshot)  # type: ignore[call-arg, arg-type]
        self.version = snapshot.version
        self._read = None
