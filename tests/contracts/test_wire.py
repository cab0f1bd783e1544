"""Messages as bytes: what comes out is what went in, and what is none is named."""

import math
import weakref
from operator import is_

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts.contract import SPEC, values_of
from paceline.core.errors import InternalError, OptionError, PeerError
from paceline.core.ledger import Allotment
from paceline.model.regions import private_region
from paceline.model.store import Gradient, Parameters
from paceline.peers.messages import Step
from paceline.transport.codec import FORMAT, INLINE_BYTES, Codec, bytes_of
from paceline.transport.messages import (
    KIND_OF_NUMBER,
    KINDS,
    Bye,
    Cancelled,
    Evaluate,
    Extra,
    Failed,
    Hello,
    More,
    Note,
    Push,
    ToServer,
    ToWorker,
    Welcome,
    Work,
    registered,
)


def codecs():
    """A worker's and its server's, with a region each."""
    worker, server = Codec(), Codec(private_region)
    worker.region = private_region(SPEC)
    data, loose = worker.encode(Hello(SPEC, [], []))
    assert not loose
    hello, loose = server.at_server(bytearray(data))
    assert not loose
    assert hello.values is server.region.parameters
    return worker, server


def blamed(decode, data):
    """What a decoder has to say against these bytes, if anything; it may raise nothing else."""
    try:
        decode(bytearray(data))
    except PeerError as error:
        return str(error)
    return None


def framed(kind, *fields):
    """What the fields of a message would be on a wire."""
    head = bytes([KINDS[kind].number]) + (FORMAT.to_bytes(2, "little") if kind is Hello else b"")
    return bytearray(head + msgspec.msgpack.encode(fields))


def test_what_lies_in_the_region_is_named_only():
    worker, server = codecs()
    slot = worker.region.slots[1]
    push = Push(3, 5, Gradient(slot.flat, frozenset({1}), [{"lr": 0.1}], [slot.changes[0], None, None], 0.5, 2.0, 1))
    data, loose = worker.encode(push)
    assert not loose
    assert len(data) < 100
    got, loose = server.at_server(bytearray(data))
    assert not loose
    assert got.gradient.flat is server.region.slots[1].flat
    assert got.gradient.views is server.region.slots[1].views
    assert got.gradient.buffer_change == [server.region.slots[1].changes[0], None, None]
    parameters = Parameters(9, server.region.flat, server.region.buffers)
    data, loose = server.encode(Work(1, Allotment(0, 2, np.array([3, 4])), parameters, 0.25))
    assert not loose
    work, _ = worker.at_worker(bytearray(data))
    assert (work.parameters.version, work.parameters.flat) == (9, worker.region.flat)


def test_a_version_that_lies_elsewhere_is_loose_although_there_is_a_region():
    worker, server = codecs()
    flat = [tensor.clone() for tensor in server.region.flat]
    data, loose = server.encode(Work(1, Allotment(0, 1, None), Parameters(2, flat, server.region.buffers), 0.0))
    assert all(map(is_, loose, [*flat, *server.region.buffers]))
    got, targets = worker.at_worker(bytearray(data))
    assert all(map(is_, targets, [*got.parameters.flat, *got.parameters.buffers]))
    assert [t.shape for t in targets] == [t.shape for t in loose]


def test_what_the_server_lends_is_named_only():
    worker, server = codecs()
    server.lent = [tensor.clone() for tensor in server.region.flat]
    sent = Work(1, Allotment(0, 1, None), Parameters(2, server.lent, server.region.buffers), 0.0)
    data, loose = server.encode(sent)
    assert not loose
    with pytest.raises(PeerError, match="malformed Work arrived: its parameters lie in the server's memory, which"):
        worker.at_worker(bytearray(data))
    worker.lent = [tensor.clone() for tensor in server.lent]
    got, _ = worker.at_worker(bytearray(data))
    assert got.parameters.flat is worker.lent
    assert got.parameters.buffers is worker.region.buffers


def test_arrays_are_written_in_place_up_to_a_limit_and_carried_beside_the_message_from_there_on():
    fits, not_any_more = np.arange(INLINE_BYTES // 16), np.arange(INLINE_BYTES // 8)
    data, loose = Codec().encode(Push(1, 0, None, [fits, not_any_more, fits]))
    assert [array.size for array in loose] == [not_any_more.size]
    got, targets = Codec().at_server(bytearray(data))
    assert len(targets) == 1
    assert targets[0] is got.kept[1]
    assert np.array_equal(got.kept[0], fits)
    assert np.array_equal(got.kept[2], fits)


def test_nothing_of_a_message_is_kept_by_its_codec():
    codec = Codec()
    alive = weakref.ref(tensor := torch.ones(3))
    data, loose = codec.encode(Welcome(Parameters(0, [tensor], [])))
    del tensor, loose
    assert alive() is None
    got, targets = codec.at_worker(bytearray(data))
    arrived = weakref.ref(targets[0])
    del got, targets
    assert arrived() is None


def test_a_push_without_changes_needs_none():
    worker, server = codecs()
    data, _ = worker.encode(Push(1, 1, Gradient(worker.region.slots[0].flat, frozenset(), [], [], None, None, 0)))
    assert server.at_server(bytearray(data))[0].gradient.buffer_change == []


def test_the_evaluator_never_travels():
    data, _ = Codec().encode(Hello(SPEC, [], [], (torch.nn.Linear(1, 1), len)))
    assert Codec().at_server(bytearray(data))[0].evaluator is None


def test_numbers_of_numpy_are_numbers():
    options = [{"lr": np.float64(0.5), "betas": (np.float32(0.5), 0.25), "steps": np.int64(3)}]
    data, _ = Codec().encode(Push(1, 1, Gradient([], frozenset(), options)))
    assert Codec().at_server(bytearray(data))[0].gradient.options == [{"lr": 0.5, "betas": (0.5, 0.25), "steps": 3}]


def test_an_option_that_cannot_travel_is_named():
    with pytest.raises(OptionError, match="object"):
        Codec().encode(Push(1, 1, Gradient([], frozenset(), [{"lr": object()}])))


def test_an_error_gets_through_whatever_it_says():
    data, _ = Codec().encode(Failed("script", "no file 'a\udce9'", "Traceback \ud800"))
    got, _ = Codec().at_server(bytearray(data))
    assert got == Failed("script", "no file 'a\\udce9'", "Traceback \\ud800")


def test_numbers_that_are_none_stay_so():
    for value in (math.inf, -math.inf, math.nan):
        got, _ = Codec().at_server(bytearray(Codec().encode(Note("x", value))[0]))
        assert got.value == value or (math.isnan(value) and math.isnan(got.value))


def test_another_format_is_refused_by_its_number():
    data = bytearray(Codec().encode(Hello(SPEC, [], []))[0])
    for other in (1, FORMAT + 1):
        data[1:3] = other.to_bytes(2, "little")
        with pytest.raises(PeerError, match=f"wire format {other}, this server {FORMAT}: install the same version"):
            Codec().at_server(data)


def test_kinds_go_their_own_way_only():
    with pytest.raises(PeerError, match="the wrong end of the link"):
        Codec().at_worker(bytearray(Codec().encode(More(1))[0]))
    with pytest.raises(PeerError, match="the wrong end of the link"):
        Codec().at_server(bytearray(Codec().encode(Cancelled(1))[0]))


@pytest.mark.parametrize("slot", [-1, 2, None, True])
def test_a_slot_that_does_not_exist_is_named(slot):
    _, server = codecs()
    with pytest.raises(PeerError, match=f"malformed Push arrived: slot must be 0 to 1, not {slot}"):
        server.at_server(framed(Push, 1, 1, [slot, b"", [], [], None, None]))


@pytest.mark.parametrize("moved", [b"\x01", b"\x01" * 4, [True] * 3, 1], ids=str)
def test_buffers_that_moved_are_as_many_as_the_model_has(moved):
    _, server = codecs()
    with pytest.raises(PeerError, match="malformed Push arrived: flags of changed buffers are .*, the model has 3"):
        server.at_server(framed(Push, 1, 1, [0, moved, [], [], None, None]))


@pytest.mark.parametrize("where", [2, -1, "region", None])
def test_a_place_of_parameters_that_there_is_not_is_named(where):
    worker, _ = codecs()
    with pytest.raises(PeerError, match="malformed Evaluate arrived"):
        worker.at_worker(framed(Evaluate, 1, [3, where]))
    with pytest.raises(PeerError, match="a version is a whole number, not 0.5"):
        worker.at_worker(framed(Evaluate, 1, [0.5, 0]))


def test_a_kind_that_nobody_has_registered_is_named():
    unknown = next(number for number in range(1, 64) if number not in KIND_OF_NUMBER)
    with pytest.raises(PeerError, match=f"kind {unknown} arrived, which this process does not know"):
        Codec().at_server(bytearray([unknown]))


def test_a_message_that_is_not_registered_cannot_be_sent():
    with pytest.raises(InternalError, match="a Step has no number and cannot be sent"):
        Codec().encode(Step(1, Allotment(0, 1, None), None, 0.0, border=None))


def test_a_number_is_given_once_and_on_its_own_side():
    with pytest.raises(InternalError, match="Twice has number 3, which is Push's"):
        registered(3)(type("Twice", (ToServer,), {}))
    with pytest.raises(InternalError, match="Astray's number must be 65 to 127, not 3"):
        registered(3)(type("Astray", (ToWorker,), {}))


def test_a_region_that_nobody_has_is_named():
    worker, _ = codecs()
    data, _ = worker.encode(Push(1, 1, Gradient(worker.region.slots[0].flat, frozenset(), [], [], None, None, 0)))
    with pytest.raises(PeerError, match="lie in a region, and this link has none"):
        Codec().at_server(bytearray(data))
    with pytest.raises(PeerError, match="lie in a region, and this link has none"):
        Codec().at_server(bytearray(worker.encode(Hello(SPEC, [], []))[0]))


def test_indices_are_whole_numbers_of_eight_bytes():
    for wrong in (b"123", ["float64", [1], b"12345678"], ["int64", [1, 1], b"12345678"], ["int64", [-1], b"12345678"]):
        with pytest.raises(PeerError, match="malformed Extra"):
            Codec().at_worker(framed(Extra, [0, 1, wrong]))


@pytest.mark.parametrize(
    "form",
    [["torch.os", [1]], [5, [1]], ["torch.float32", [-3]], ["torch.float32", [0.5]], ["float32", [1 << 62] * 2], 5],
)
def test_tensors_that_cannot_be_are_named(form):
    with pytest.raises(PeerError, match="malformed Push"):
        Codec().at_server(framed(Push, 1, 1, [[form], [], [], [], None, None]))


def test_a_model_with_a_negative_side_is_named():
    spec = msgspec.structs.replace(SPEC, parameters=(("w", (-1, 2), "torch.float32"),))
    worker, _ = codecs()
    with pytest.raises(PeerError, match=r"malformed Hello arrived: w has shape \[-1, 2\]"):
        Codec(private_region).at_server(bytearray(worker.encode(Hello(spec, [], []))[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_bytes_of_a_tensor_are_its_own(dtype, shape):
    tensor = torch.zeros(shape, dtype=dtype)
    view = bytes_of(tensor)
    assert len(view) == tensor.nbytes
    if len(view):
        view[:1] = b"\x01"
        assert bool(tensor.reshape(-1)[0] != 0)


def test_bytes_of_a_scattered_tensor_are_in_its_order():
    assert bytes(bytes_of(torch.arange(6).reshape(2, 3).T)) == torch.tensor([0, 3, 1, 4, 2, 5]).numpy().tobytes()


def test_a_tensor_is_carried_where_it_lies():
    for message in (Extra(None), Bye(), Push(1, 0, None)):
        assert Codec().encode(message)[1] == []
    values, buffers = values_of(SPEC.parameters, 1), values_of(SPEC.buffers, 2)
    assert all(map(is_, Codec().encode(Hello(SPEC, values, buffers))[1], [*values, *buffers]))


@settings(max_examples=200)
@given(st.sampled_from(sorted(KIND_OF_NUMBER)), st.binary(max_size=120))
@example(1, FORMAT.to_bytes(2, "little") + b"\x92")
@example(3, b"\x97")
def test_random_bytes_are_a_message_or_the_peers_fault(kind, noise):
    for decode in (Codec(private_region).at_server, Codec().at_worker):
        for data in (noise, bytes([kind]) + noise):
            assert blamed(decode, data) != ""


VALUES = st.none() | st.booleans() | st.integers(-3, 70) | st.floats() | st.binary(max_size=16) | st.text(max_size=4)


@settings(max_examples=150)
@example(15, [[], [], []])
@example(17, [[], [], []])
@given(
    st.sampled_from(sorted(KIND_OF_NUMBER)),
    st.recursive(VALUES, lambda inner: st.lists(inner, max_size=8), max_leaves=30),
)
def test_random_fields_are_a_message_or_the_peers_fault(kind, fields):
    data = bytes([kind]) + (FORMAT.to_bytes(2, "little") if kind == 1 else b"") + msgspec.msgpack.encode(fields)
    worker, server = codecs()
    for decode in (server.at_server, worker.at_worker):
        assert blamed(decode, data) != ""


@settings(max_examples=150)
@given(st.data())
def test_damaged_messages_are_messages_or_the_peers_fault(data):
    worker, server = codecs()
    slot = worker.region.slots[0]
    sent = data.draw(st.sampled_from([
        worker.encode(Push(1, 1, Gradient(slot.flat, frozenset({0}), [{"betas": (0.5, 0.5)}], [None] * 3, 0.5, 1.0,
                                             0), [np.array([1])], 3)),
        worker.encode(Hello(SPEC, [], [])),
        Codec().encode(Hello(SPEC, values_of(SPEC.parameters, 1), [])),
        server.encode(Work(1, Allotment(0, 1, np.array([3])), Parameters(1, server.region.flat, server.region.buffers),
                           0.5)),
    ]))[0]  # fmt: skip
    damaged = bytearray(sent)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    for decode in (server.at_server, worker.at_worker):
        assert blamed(decode, damaged) != ""
