"""Every registered message, whatever its fields hold: it arrives as it was sent, and none that is damaged arrives.

Messages are made from their declarations, so a message is tested by being registered.
"""

import math
import subprocess
import sys
import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.contract import alike
from paceline.core.errors import PeerError
from paceline.core.ledger import Indices
from paceline.model.regions import private_region
from paceline.model.store import Gradient, Parameters
from paceline.peers import messages as peers
from paceline.shards import messages as shards
from paceline.tables import messages as tables
from paceline.transport import messages
from paceline.transport.codec import Codec, bytes_of
from paceline.transport.messages import KIND_OF_NUMBER, KINDS, Array, Hello, RawBytes, ToServer, ToWorker

KNOWN = sorted(KINDS, key=lambda kind: KINDS[kind].number)
NUMBERS = {
    1: "Hello", 2: "Ready", 3: "Push", 4: "More", 5: "Done", 6: "Stop", 7: "Note", 8: "Remark", 9: "OptionAsked",
    10: "SavedState", 11: "Evaluated", 12: "Failed", 13: "Ended", 14: "OpenTable", 15: "TableInit", 16: "Measures",
    17: "Fetch", 18: "Forget", 19: "Tick", 20: "AtBarrier", 21: "Mailbox", 22: "Decisions", 23: "CentreExchange",
    24: "Averaging", 25: "Exchanged", 26: "Leaving", 27: "Snapshot", 28: "OptimizerAsked",
    29: "OptimizerLoaded", 30: "ModelLoaded", 31: "EpochAsked", 32: "Fewer", 40: "CollectiveCall", 41: "CollectiveKept",
    42: "SchedulerStepped", 43: "EvaluationsAsked", 44: "NotFinite", 45: "Here", 50: "ClockStanding", 57: "PushPart",
    58: "TickPart", 59: "ShardAnswer",
    65: "Welcome", 66: "Work", 67: "Extra", 68: "Over", 69: "Cancelled", 70: "Evaluate", 71: "Bye", 72: "Opened",
    73: "ClockRoster",
    74: "Entered", 75: "Rows", 76: "Clocked", 77: "Included", 78: "Passed", 79: "EvaluateTables", 80: "Save",
    81: "Peering", 82: "Pulled", 83: "Group", 84: "Collect", 85: "OptimizerHeld", 86: "EpochHeld",
    95: "EvaluationsHeld", 104: "CollectiveAnswer", 105: "AreYouThere", 110: "Stored", 120: "VersionPart",
    121: "RowsPart", 122: "ShardCommand",
}  # fmt: skip
SIZES = [0, 1, 3, 5000]  # the last is carried beside its message
SIMPLE = {
    int: st.integers(-(1 << 50), 1 << 50), float: st.floats(allow_nan=False), str: st.text(max_size=5),
    bool: st.booleans(), bytes: st.binary(max_size=9), type(None): st.none(), Any: st.none(),
}  # fmt: skip


@st.composite
def arrays(draw, dtypes, dimensions):
    shape = [draw(st.sampled_from(SIZES)), *(draw(st.integers(0, 3)) for _ in range(dimensions - 1))]
    count = math.prod(shape)
    return (np.arange(count) + draw(st.integers(0, 99))).astype(draw(st.sampled_from(dtypes))).reshape(shape)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    return torch.arange(math.prod(shape)).to(dtype).reshape(shape)


TENSORS = st.lists(tensors(), max_size=3)
MADE = {
    Indices: arrays(["int64"], 1),
    RawBytes: arrays(["uint8"], 1),
    Array: st.integers(1, 2).flatmap(lambda n: arrays(["float32", "float64", "int32", "int64"], n)),
    torch.Tensor: tensors(),
    Parameters: st.builds(Parameters, SIMPLE[int], TENSORS, TENSORS),
}


def values(kind):
    """What a field of this type may hold."""
    if kind in MADE or kind in SIMPLE:
        return MADE[kind] if kind in MADE else SIMPLE[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.deferred(lambda: instances(kind))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*map(values, arguments))
    inner = [values(argument) for argument in arguments if argument is not Ellipsis]
    if origin is dict:
        return st.dictionaries(*inner, max_size=3)
    made = {list: list, Sequence: list, tuple: tuple, frozenset: frozenset}[origin]
    return st.lists(*inner, max_size=3).map(made)


OPTIONS = get_type_hints(Gradient.__init__)["options"]
MADE[Gradient] = st.builds(
    Gradient, TENSORS, st.frozensets(SIMPLE[int], max_size=3), values(OPTIONS),
    st.lists(st.none() | tensors(), max_size=3), values(float | None), values(float | None),
)  # fmt: skip


def instances(kind):
    """Any message of that kind, or any struct in it; what does not travel is left out."""
    hints = get_type_hints(kind)
    left_out = {*(KINDS[kind].local if kind in KINDS else ()), *(["in_region"] if kind is Hello else [])}
    return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__ if name not in left_out})


def decoder(kind):
    return Codec().at_worker if issubclass(kind, ToWorker) else Codec(private_region).at_server


def equal(one, other):
    """Alike, tensors and what holds them included."""
    if isinstance(other, Gradient | Parameters):
        return type(one) is type(other) and all(equal(getattr(one, n), getattr(other, n)) for n in other.__slots__)
    if isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(other, list | tuple) and isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in other)
    if isinstance(other, msgspec.Struct):
        return type(one) is type(other) and all(
            equal(getattr(one, f), getattr(other, f)) for f in one.__struct_fields__
        )
    return alike(one, other)


def test_numbers_stay_what_they_are_and_every_message_has_one():
    assert {number: kind.name for number, kind in KIND_OF_NUMBER.items()} == NUMBERS
    travel = [
        tables.TableToServer, tables.TableToWorker, peers.NodeToServer, peers.NodeToWorker,
    ]  # fmt: skip
    declared = {kind for union in travel for kind in union.__args__} | {
        shards.PushPart, shards.TickPart, shards.VersionPart, shards.RowsPart, shards.ShardAnswer, shards.ShardCommand,
    }  # fmt: skip
    declared |= {
        kind for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, ToServer | ToWorker) and kind not in (ToServer, ToWorker)
    }  # fmt: skip
    assert set(KINDS) == declared
    assert all((kind.number > 64) == kind.to_worker == issubclass(kind.type, ToWorker) for kind in KINDS.values())


def test_a_process_of_the_local_engine_knows_every_kind():
    code = (
        "import paceline.engines.local.child; from paceline.transport.messages import KIND_OF_NUMBER as known; "
        "print(*sorted(known))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [int(number) for number in done.stdout.split()] == sorted(NUMBERS)


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_what_arrives_is_what_was_sent(kind, data):
    message = data.draw(instances(kind))
    encoded, loose = Codec().encode(message)
    got, targets = decoder(kind)(bytearray(encoded))
    for target, source in zip(targets, loose, strict=True):
        bytes_of(target)[:] = bytes_of(source)
    assert equal(got, message)


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
@settings(max_examples=5)
@given(data=st.data())
def test_a_damaged_message_does_not_arrive(kind, data):
    encoded, _ = Codec().encode(data.draw(instances(kind)))
    begin = 3 if kind is Hello else 1
    head, fields = encoded[:begin], msgspec.msgpack.decode(encoded[begin:])
    decode = decoder(kind)

    def refused(changed, match=f"malformed {kind.__name__}"):
        with pytest.raises(PeerError, match=match):
            decode(bytearray(changed))

    refused(head + msgspec.msgpack.encode([*fields, None]))  # a field too many
    refused(head + msgspec.msgpack.encode(dict(enumerate(fields))))
    refused(encoded + b"\x00")
    for place in range(len(fields)):
        refused(head + msgspec.msgpack.encode([*fields[:place], {"?": b""}, *fields[place + 1 :]]))
    if kind.__struct_fields__ and not kind.__struct_defaults__:
        refused(head + msgspec.msgpack.encode(fields[:-1]))
    cut = data.draw(st.integers(begin, len(encoded) - 1))
    refused(encoded[:cut])
    for other in KNOWN:
        if issubclass(other, ToWorker) != issubclass(kind, ToWorker):
            refused(bytes([KINDS[other].number]) + encoded[1:], "the wrong end of the link")


def of_arrays():
    """Every field that holds an array or a list of them: its message, its place, what it demands."""
    for kind in KNOWN:
        hints = get_type_hints(kind)
        for place, name in enumerate(kind.__struct_fields__):
            inside = {hints[name], *get_args(hints[name])}
            for demand in inside & {Array, Indices, RawBytes}:
                yield kind, place, demand, get_origin(hints[name]) is list


@pytest.mark.parametrize(
    ("kind", "place", "demand", "listed"), list(of_arrays()), ids=lambda value: getattr(value, "__name__", "")
)
@settings(max_examples=3)
@given(data=st.data())
def test_arrays_that_are_not_what_they_should_be_are_refused(kind, place, demand, listed, data):
    encoded, _ = Codec().encode(data.draw(instances(kind)))
    fields = msgspec.msgpack.decode(encoded[1:])
    wrong = [
        ["float16", [1]], ["object", [1]], ["float64", [-1]], ["float64", [True]], ["float64", [0.5]], ["float64", 3],
        ["float64", [2], b"12345678"], ["float64", [1], "12345678"], ["float64", [1], b"12345678", 0], ["float64"],
        [["float64"], [1]], b"123", 5, [], ["float64", [1 << 62, 1 << 62]], ["float64", [-1], b"12345678"],
    ]  # fmt: skip
    if demand is not Array:
        wrong += [["float64", [1]], ["float64", [1], b"12345678"], ["int64", [1, 1], b"12345678"], ["uint8", [1, 1]]]
    if demand is Indices:
        wrong += [["uint8", [1], b"1"], ["int64", []]]
    for form in wrong:
        planted = [*fields[:place], [form] if listed else form, *fields[place + 1 :]]
        with pytest.raises(PeerError, match=f"malformed {kind.__name__}"):
            decoder(kind)(bytearray(encoded[:1] + msgspec.msgpack.encode(planted)))


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_functions_stay_where_they_are(kind):
    functions = {name for name, hint in get_type_hints(kind).items() if "Callable" in str(hint)}
    assert functions == set(KINDS[kind].local)
