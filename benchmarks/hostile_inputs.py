"""Hostile inputs: frames of every message to the server, recorded as they are sent and then damaged, and what strangers
say who hold no key.

A message is made from its declaration with random values, encoded and cut by the code that sends it, so new messages
are attacked by being registered. One input is what one client sends over one connection.
"""

import math
import random
import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import torch

from paceline.core.ledger import Indices
from paceline.model.mass_optimizer import OptimizerSpec
from paceline.model.regions import private_region
from paceline.model.spec import ModelSpec
from paceline.model.store import Gradient
from paceline.peers import messages as _node_messages  # noqa: F401 - registers what a worker may send
from paceline.shards import messages as _shard_messages  # noqa: F401 - likewise
from paceline.tables import messages as _table_messages  # noqa: F401 - likewise
from paceline.tables.table_spec import TableSpec
from paceline.transport.codec import Codec
from paceline.transport.messages import KINDS, Array, Hello, Push, RawBytes, ToServer
from paceline.transport.zeromq import CHUNK, FRAME, LONG, post

SPEC = ModelSpec(
    (("weight", (300, 40), "torch.float32"), ("bias", (7,), "torch.float64"), ("half", (5,), "torch.bfloat16")),
    (("mean", (3,), "torch.float32"), ("count", (), "torch.int64"), ("empty", (0,), "torch.float32")),
    OptimizerSpec("Adam", ({"lr": 0.1, "betas": (0.9, 0.999), "foreach": None},), ((0, 1, 2),)),
    (("weight", 0), ("bias", 1), ("half", 2), ("mean", 3)),
)
TO_SERVER = sorted((kind for kind in KINDS if issubclass(kind, ToServer)), key=lambda kind: KINDS[kind].number)
Frames = list[bytes]


class Recorder:
    """Stands in for a socket and keeps what is sent."""

    def __init__(self) -> None:
        self.frames: Frames = []

    def send(self, data: Any, _flags: int = 0, _copy: bool = True) -> None:
        self.frames.append(bytes(data))


class Maker:
    """Makes messages from their declarations."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def frames(self, kind: type[ToServer]) -> Frames:
        """Return the frames of a message of this kind; a push follows its Hello, by whose region it goes."""
        recorder, codec = Recorder(), Codec()
        in_region = kind in (Hello, Push) and self._chance.random() < 0.6
        if in_region:
            codec.region = private_region(SPEC)
            post(recorder, codec, Hello(SPEC, codec.region.parameters, codec.region.buffers))  # type: ignore[arg-type]
        if not in_region or kind is Push:
            post(recorder, codec, self.message(kind, codec))  # type: ignore[arg-type]
        return recorder.frames

    def message(self, kind: type[ToServer], codec: Codec) -> ToServer:
        if kind is Push and codec.region is not None:
            slot = codec.region.slots[0]
            changes = [slot.changes[0], None, None]
            return Push(1, 4, Gradient(slot.flat, frozenset({1}), [{"lr": 0.1}], changes, 0.5, 1.0, 0), None, 4, 0.1)
        hints = get_type_hints(kind)
        left_out = {*KINDS[kind].local, "in_region"}
        return kind(**{name: self.value(hints[name]) for name in kind.__struct_fields__ if name not in left_out})

    def value(self, kind: Any) -> Any:
        """Return some value of a field of this type."""
        chance = self._chance
        simple = {
            int: lambda: chance.choice([0, 1, 7, 300, -1, 1 << 40]), float: lambda: chance.uniform(-2, 2),
            str: lambda: "a name of something"[: chance.randrange(20)], bool: lambda: chance.random() < 0.5,
            bytes: lambda: chance.randbytes(chance.choice([0, 9, 300, CHUNK + 5])), type(None): lambda: None,
            Any: lambda: None, ModelSpec: lambda: SPEC,
            TableSpec: lambda: TableSpec("t", chance.choice([1, 10_000]), 3, "float64", 2, "add", True),
            Indices: lambda: np.arange(chance.choice([0, 3, 5_000])),
            RawBytes: lambda: np.zeros(chance.choice([0, 3, 40_000]), np.uint8),
            Array: lambda: np.ones((chance.choice([1, 20, 4_000]), 3), chance.choice(["float32", "float64", "int64"])),
            torch.Tensor: lambda: torch.zeros(chance.choice([0, 3, 9_000])),
            Gradient: lambda: Gradient([torch.zeros(9_000), torch.zeros(3)], frozenset({0}), [{"lr": 0.5}], [None]),
        }  # fmt: skip
        if kind in simple:
            return simple[kind]()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            hints = get_type_hints(kind)
            return kind(**{name: self.value(hints[name]) for name in kind.__struct_fields__})
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Literal:
            return chance.choice(arguments)
        if origin in (Union, types.UnionType):
            return self.value(chance.choice(arguments))
        if origin is tuple and arguments[-1] is not Ellipsis:
            return tuple(map(self.value, arguments))
        inner = [argument for argument in arguments if argument is not Ellipsis]
        count = chance.choice([0, 1, 2, 5])
        if origin is dict:
            return {self.value(inner[0]): self.value(inner[1]) for _ in range(count)}
        made = {list: list, Sequence: list, tuple: tuple, frozenset: frozenset}[origin]
        return made(self.value(inner[0]) for _ in range(count))


class Mutator:
    """Damages recorded frames; `name` of the last damage says how."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.name = ""

    def damage(self, frames: Frames) -> Frames:
        """Return damaged frames, none of them the caller's."""
        ways = [
            self.flip, self.flip, self.numbers, self.numbers, self.numbers, self.lengths, self.lengths, self.cut,
            self.lengthen, self.drop, self.double, self.swap, self.kind, self.version, self.announce, self.oversize,
            self.empty, self.replay, self.nest,
        ]  # fmt: skip
        way = self._chance.choice(ways)
        self.name = way.__name__
        return way(list(frames))

    def _place(self, frames: Frames) -> int:
        return self._chance.choice([0, self._chance.randrange(len(frames))])

    def _edit(self, frames: Frames, edit: Any) -> Frames:
        place = self._place(frames)
        data = bytearray(frames[place])
        edit(data)
        frames[place] = bytes(data)
        return frames

    def flip(self, frames: Frames) -> Frames:
        def edit(data: bytearray) -> None:
            for _ in range(self._chance.choice([1, 1, 3, 20])):
                if data:
                    data[self._chance.randrange(min(len(data), 400))] ^= 1 << self._chance.randrange(8)

        return self._edit(frames, edit)

    def numbers(self, frames: Frames) -> Frames:
        """Put a large or odd number where some value begins."""
        odd = [
            1 << 63,
            (1 << 64) - 1,
            -(1 << 63),
            -1,
            1 << 31,
            1 << 40,
            0.5,
            math.nan,
            math.inf,
            None,
            True,
            b"",
            "x",
            [],
            {},
        ]

        def edit(data: bytearray) -> None:
            at = self._chance.randrange(1, max(2, min(len(data), 400)))
            value = msgspec.msgpack.encode(self._chance.choice(odd))
            data[at : at + self._chance.choice([1, len(value)])] = value

        return self._edit(frames, edit)

    def lengths(self, frames: Frames) -> Frames:
        """Let a list, a mapping, some text or bytes say that it has very many members."""

        def edit(data: bytearray) -> None:
            at = self._chance.randrange(1, max(2, min(len(data), 400)))
            data[at : at + 1] = self._chance.choice([0xC6, 0xDB, 0xDD, 0xDF, 0xC9]).to_bytes(1, "little") + (
                self._chance.choice([(1 << 32) - 1, 1 << 31, 1 << 24, 70_000]).to_bytes(4, "big")
            )

        return self._edit(frames, edit)

    def cut(self, frames: Frames) -> Frames:
        place = self._place(frames)
        frames[place] = frames[place][: self._chance.randrange(len(frames[place]) + 1)]
        return frames

    def lengthen(self, frames: Frames) -> Frames:
        place = self._place(frames)
        frames[place] += self._chance.randbytes(self._chance.choice([1, 100, 40_000]))
        return frames

    def drop(self, frames: Frames) -> Frames:
        del frames[self._place(frames)]
        return frames

    def double(self, frames: Frames) -> Frames:
        place = self._place(frames)
        return frames[:place] + [frames[place]] * self._chance.choice([2, 3, 200]) + frames[place:]

    def swap(self, frames: Frames) -> Frames:
        self._chance.shuffle(frames)
        return frames

    def kind(self, frames: Frames) -> Frames:
        frames[0] = bytes([self._chance.randrange(256)]) + frames[0][1:]
        return frames

    def version(self, frames: Frames) -> Frames:
        """Speak another wire format, in a Hello."""
        frames[0] = bytes([KINDS[Hello].number]) + self._chance.randrange(1 << 16).to_bytes(2, "little") + frames[0][3:]
        return frames

    def announce(self, frames: Frames) -> Frames:
        """Announce a long message, of which only parts follow."""
        length = self._chance.choice([CHUNK + 1, 40 << 20, 1 << 30, 1 << 63, 0])
        head = frames[0][:1] * CHUNK if self._chance.random() < 0.5 else frames[0]
        return [LONG + length.to_bytes(8, "little"), head, *frames]

    def oversize(self, frames: Frames) -> Frames:
        return [*frames, bytes(FRAME + 1)]

    def empty(self, frames: Frames) -> Frames:
        return [*[b""] * self._chance.choice([1, 5]), *frames]

    def replay(self, frames: Frames) -> Frames:
        return frames * self._chance.choice([2, 5])

    def nest(self, frames: Frames) -> Frames:
        """Lists in lists, deeper than any stack."""
        return [frames[0][:1] + b"\x91" * self._chance.choice([100, 10_000, 400_000])]


def strangers(chance: random.Random, recorded: bytes) -> bytes:
    """Return what somebody without a key says; `recorded` is what a member said who did not notice the listener."""
    greeting = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"CURVE".ljust(20, b"\x00") + bytes(32)
    sayings = [
        b"", chance.randbytes(chance.choice([1, 64, 5_000])), greeting[: chance.randrange(64)], greeting,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500),
        recorded, recorded[: chance.randrange(len(recorded))], _flipped(recorded, chance),
        greeting[:10] + bytes([chance.randrange(256), chance.randrange(256)]) + greeting[12:],  # another version
        greeting.replace(b"CURVE", b"NULL\x00") + b"\x04\x19\x05READY" + bytes(19),
        greeting.replace(b"CURVE", b"PLAIN") + b"\x04\x0c\x05HELLO\x01a\x01b\x00\x00",
        greeting + b"\x06" + (1 << 30).to_bytes(8, "big") + chance.randbytes(200_000),  # a command of 1 GB
        greeting + b"\x02" + (1 << 62).to_bytes(8, "big") + chance.randbytes(1_000),  # a message of 4 EB
        greeting + b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + chance.randbytes(120),  # a HELLO in a box nobody can open
        b"\x01\x00" + chance.randbytes(200),  # ZMTP 1.0
    ]  # fmt: skip
    return chance.choice(sayings)


def _flipped(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)
