"""The stream of commands from the coordinator to every shard, and what shards answer.

All shards get the same commands in the same order, over private sockets, so that at any command all of them stand at
one version. Tensors are never in a command: pushes and versions lie in workers' regions, and saved state goes through
unnamed memory whose descriptor travels with the command. To a shard on another machine the memory's bytes do
(`remote_links.py`).
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import torch

from paceline.core.errors import PeerError
from paceline.model import tensor_files
from paceline.model.mass_optimizer import GroupOptions
from paceline.model.spec import ModelSpec
from paceline.tables.table_spec import TableSpec
from paceline.transport.shm import anonymous_file

# -- to a shard --------------------------------------------------------------------------------------------------------


class PushPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a push lies: in a slot of a region, or, without a slot, in the shard's copy of this number."""

    number: int
    slot: int | None


class MakeStore(msgspec.Struct, frozen=True, tag=True):
    """Train this model. Answer: `Made`. Carries the descriptor of the memory with all parameters; of one that is not
    `shared`, that of a copy of the shard's range."""

    spec: ModelSpec
    statistics: bool
    shared: bool = True


class MapRegion(msgspec.Struct, frozen=True, tag=True):
    """Map the region of a worker that has prepared this model. Carries its descriptor."""

    region: int
    spec: ModelSpec


class ExpectWorker(msgspec.Struct, frozen=True, tag=True):
    """A worker that shares no memory will connect, and prove itself by this token."""

    token: str


class MirrorRegion(msgspec.Struct, frozen=True, tag=True):
    """Mirror the shard's part of the region of such a worker, which has prepared this model."""

    region: int
    spec: ModelSpec
    token: str


class ForgetWorker(msgspec.Struct, frozen=True, tag=True):
    """Close the link to a worker, and drop clocks of it after the one of this number, which not all shards hold."""

    token: str
    ticks: int = 0


class DropRegion(msgspec.Struct, frozen=True, tag=True):
    """Forget a region that nobody needs any more."""

    region: int


class Merge(msgspec.Struct, frozen=True, tag=True):
    """Merge these pushes into one version. Answer, if the store measures statistics: `Measured`."""

    pushes: list[PushPlace]
    weights: list[float]
    options: list[GroupOptions]
    absent: list[int]  # parameters that no push has a gradient for
    stock: bool


class Extend(msgspec.Struct, frozen=True, tag=True):
    """Add a held push, of so many samples, to a further piece of it, in the piece's slot."""

    held: PushPlace
    samples: int
    piece: PushPlace
    piece_samples: int


class CopyOut(msgspec.Struct, frozen=True, tag=True):
    """Copy a push out of its slot, to the copy of this number."""

    push: PushPlace
    copy: int


class DropCopy(msgspec.Struct, frozen=True, tag=True):
    """Forget a copy whose push will not be applied."""

    copy: int


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Copy the current version into a region. Answer: `Done`."""

    region: int


class SendVersion(msgspec.Struct, frozen=True, tag=True):
    """Send the current version to the worker of a mirrored region, under this number."""

    region: int
    number: int


class Reach(msgspec.Struct, frozen=True, tag=True):
    """Answer `Done`: every command before this one is carried out."""


class ReadParameters(msgspec.Struct, frozen=True, tag=True):
    """Send the shard's range of the parameters, which the coordinator does not map. Answer: `StateRead`."""


class WriteParameters(msgspec.Struct, frozen=True, tag=True):
    """Replace the shard's range of the parameters. Carries it. Answer: `CommandDone`."""


class ScaleRate(msgspec.Struct, frozen=True, tag=True):
    """Multiply every learning rate that pushes bring."""

    factor: float


class ReadState(msgspec.Struct, frozen=True, tag=True):
    """Send the optimizer's state as a script sees it. Answer: `StateRead`."""


class LoadState(msgspec.Struct, frozen=True, tag=True):
    """Continue from the state that a script has loaded. Carries this shard's tensors of it. Answer: `Done`."""

    numbers: dict[str, Any]


class SaveState(msgspec.Struct, frozen=True, tag=True):
    """Write the optimizer's state, and the last gradient if it is kept, to a file; without a path, send its bytes.
    Answer: `Saved`."""

    path: str


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Continue from a checkpoint's state. Carries this shard's tensors of it. Answer: `Done`."""

    version: int
    data: dict[str, Any]


class CountEffort(msgspec.Struct, frozen=True, tag=True):
    """Answer with the `ShardEffort` so far; `begin`: count from here on."""

    begin: bool = False


# -- to a shard of tables ----------------------------------------------------------------------------------------------


class LinkWorker(msgspec.Struct, frozen=True, tag=True):
    """A worker of this host has a link to each shard. Carries the shard's end of it."""

    token: str


class DrainWorker(msgspec.Struct, frozen=True, tag=True):
    """Take in all that a worker has sent whose process has ended. Answer: `CommandDone`."""

    token: str


class MakeTable(msgspec.Struct, frozen=True, tag=True):
    """Make the next table, of which the shard has some rows."""

    spec: TableSpec


class FillTable(msgspec.Struct, frozen=True, tag=True):
    """Set a table's first values; `saved`: with its rule's state. Carries the shard's rows. Answer: `CommandDone`."""

    table: int
    saved: bool


class HoldTick(msgspec.Struct, frozen=True, tag=True):
    """Hold a clock of a checkpoint. Carries the shard's rows of its increments. Answer: `CommandDone`."""

    number: int
    tables: list[int]


class ApplyTick(msgspec.Struct, frozen=True, tag=True):
    """Apply the increments of a clock that the shard holds."""

    owner: str  # the token of the worker that sent it; empty: `HoldTick` has brought it
    number: int


class DropTicks(msgspec.Struct, frozen=True, tag=True):
    """Forget clocks that are applied and saved, or never will be."""

    ticks: list[tuple[str, int]]


class SendRows(msgspec.Struct, frozen=True, tag=True):
    """Send a worker these rows of a table, counted in the shard, under this number; None: all that the shard has."""

    token: str
    number: int
    table: int
    rows: bytes | None


class ReadTables(msgspec.Struct, frozen=True, tag=True):
    """Send the values of all tables. Answer: `StateRead`."""


class SaveTables(msgspec.Struct, frozen=True, tag=True):
    """Write the tables, with their rules' state, to a file; without a path, send its bytes. Answer: `Saved`."""

    path: str


class SaveTicks(msgspec.Struct, frozen=True, tag=True):
    """Write clocks that the shard holds, each under this name, to a file; without a path, send its bytes. Answer:
    `Saved`."""

    path: str
    ticks: list[tuple[str, str, int]]  # name, owner, number


TableCommand = MakeTable | FillTable | HoldTick | ApplyTick | DropTicks | ReadTables | SaveTables | SaveTicks
Command = (
    MakeStore | MapRegion | ExpectWorker | MirrorRegion | ForgetWorker | DropRegion | Merge | Extend | CopyOut
    | DropCopy | Publish | SendVersion | Reach | ReadParameters | WriteParameters | ScaleRate | ReadState
    | LoadState | SaveState | Restore | CountEffort | LinkWorker | DrainWorker | SendRows | TableCommand
)  # fmt: skip


# -- from a shard ------------------------------------------------------------------------------------------------------


class Listens(msgspec.Struct, frozen=True, tag=True):
    """The first message: where workers that share no memory find this shard; empty: they do not."""

    address: str


class Held(msgspec.Struct, frozen=True, tag=True):
    """All bytes of the shard's part of this push have come. Sent unasked."""

    region: int
    ticket: int
    norm: float  # of this part


class TickHeld(msgspec.Struct, frozen=True, tag=True):
    """All bytes of the shard's part of this clock have come. Sent unasked."""

    token: str
    number: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """A worker has sent what is no message. Sent unasked."""

    token: str
    text: str


class Made(msgspec.Struct, frozen=True, tag=True):
    """The store is made; `notice` is what its optimizer has to say to the user."""

    notice: str | None


class PartMeasured(msgspec.Struct, frozen=True, tag=True):
    """Statistics of the shard's part of one applied gradient."""

    norm: float
    inner_product: float | None


class CommandDone(msgspec.Struct, frozen=True, tag=True):
    """The command is carried out."""


class StateRead(msgspec.Struct, frozen=True, tag=True):
    """The optimizer's state, by the keys of the whole model, or tables, or parameters. Carries the tensors."""

    numbers: dict[str, Any]


class Saved(msgspec.Struct, frozen=True, tag=True):
    """The file is written, or its bytes are carried; `data` belongs into the head of the checkpoint."""

    nbytes: int
    crc32: int
    data: dict[str, Any]
    error: str = ""  # why it could not be written


class ShardEffort(msgspec.Struct, frozen=True, tag=True):
    """Processor seconds of the shard."""

    cpu_s: float
    apply_s: float
    copy_s: float


class Fault(msgspec.Struct, frozen=True, tag=True):
    """A command failed; commands after it are not carried out."""

    blame: Literal["user", "internal"]
    text: str
    traceback: str


Answer = (
    Listens | Held | TickHeld | Broken | Made | PartMeasured | CommandDone | StateRead | Saved | ShardEffort | Fault
)  # fmt: skip

_encode = msgspec.msgpack.Encoder().encode
_command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Command | Answer) -> bytes:
    """Encode a command or an answer."""
    return _encode(message)


def command_of(data: bytes | bytearray) -> Command:
    """Decode a command."""
    return _command.decode(data)


def answer_of(data: bytes | bytearray) -> Answer:
    """Decode an answer."""
    try:
        return _answer.decode(data)
    except msgspec.MsgspecError as error:
        raise PeerError(f"a shard's answer cannot be read: {error}") from error


def in_memory(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the descriptor of unnamed memory that holds these tensors."""
    parts = list(tensor_files.parts(tensors, {}))
    descriptor = anonymous_file(sum(len(part) for part in parts))
    with open(descriptor, "wb", closefd=False) as file:
        for part in parts:
            file.write(part)
    return descriptor


def from_memory(descriptor: int) -> dict[str, torch.Tensor]:
    """Return the tensors behind a descriptor, each in its own memory (sums depend on alignment), and close it."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return {name: tensor.clone() for name, tensor in tensor_files.from_bytes(file.read())[0].items()}
