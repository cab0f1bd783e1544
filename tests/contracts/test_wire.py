"""Messages as bytes: what comes out is what went in, and what is none is named."""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts.contract import SPEC, same, values_of
from paceline.core.errors import OptionError, PeerError
from paceline.core.ledger import Allotment
from paceline.model.regions import private_region
from paceline.model.store import Gradient, Parameters
from paceline.peers.messages import NodeToServer, NodeToWorker
from paceline.transport import array_wire, messages, wire_forms
from paceline.transport.messages import Bye, Cancelled, Extra, Failed, Hello, More, Note, Push, ToServer, ToWorker, Work
from paceline.transport.wire import FORMAT, Codec, bytes_of, tensors_of
from paceline.transport.wire_forms import KINDS


def codecs():
    """A worker's and its server's, with a region each."""
    worker, server = Codec(), Codec(private_region)
    worker.region = private_region(SPEC)
    data, loose = worker.encode(Hello(SPEC, [], []))
    assert not loose
    hello, _ = server.at_server(bytearray(data))
    assert hello.values is server.region.parameters
    return worker, server


def blamed(decode, data):
    """What a decoder has to say against these bytes, if anything; it may raise nothing else."""
    try:
        decode(bytearray(data))
    except PeerError as error:
        return str(error)
    return None


def test_every_message_has_a_kind_of_its_own():
    to_worker = {*ToWorker.__args__, *NodeToWorker.__args__}
    assert set(KINDS) == {*ToServer.__args__, *NodeToServer.__args__} | to_worker
    numbers = [number for number, _ in KINDS.values()]
    assert len(set(numbers)) == len(numbers)
    assert all((number > 64) == (kind in to_worker) for kind, (number, _) in KINDS.items())


def test_no_field_of_a_message_is_left_behind():
    left_out = {messages.Hello: {"evaluator"}, Gradient: {"views"}}
    renamed = {"values": "tensors", "buffers": "tensors", "flat": "tensors", "buffer_change": "changed"}
    pairs = [(kind, form) for kind, (_, form) in KINDS.items() if kind not in array_wire.FORMS]
    for message, form in [*pairs, (Gradient, wire_forms.Gradient), (Parameters, wire_forms.Parameters)]:
        said = {renamed.get(name, name) for name in message.__struct_fields__} - left_out.get(message, set())
        where = {"tensors", "lent"} - said  # fields that say where tensors lie
        assert said == set(form.__struct_fields__) - where, message.__name__


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
    parameters = Parameters(9, server.region.flat, list(server.region.buffers))
    data, loose = server.encode(Work(1, Allotment(0, 2, np.array([3, 4])), parameters, 0.25))
    assert not loose
    work, _ = worker.at_worker(bytearray(data))
    assert (work.parameters.version, work.parameters.flat) == (9, worker.region.flat)


def test_a_version_that_lies_elsewhere_is_loose_although_there_is_a_region():
    worker, server = codecs()
    flat = [tensor.clone() for tensor in server.region.flat]
    data, loose = server.encode(Work(1, Allotment(0, 1, None), Parameters(2, flat, server.region.buffers), 0.0))
    assert loose
    got, loose = worker.at_worker(bytearray(data))
    assert loose
    assert [t.shape for t in tensors_of(got)] == [t.shape for t in [*flat, *server.region.buffers]]


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
    data[1:3] = (FORMAT + 1).to_bytes(2, "little")
    with pytest.raises(PeerError, match=f"wire format {FORMAT + 1}, this server {FORMAT}: install the same version"):
        Codec().at_server(data)


def test_kinds_go_their_own_way_only():
    with pytest.raises(PeerError, match="none that goes this way"):
        Codec().at_worker(bytearray(Codec().encode(More(1))[0]))
    with pytest.raises(PeerError, match="none that goes this way"):
        Codec().at_server(bytearray(Codec().encode(Cancelled(1))[0]))


@pytest.mark.parametrize("slot", [-1, 2, None])
def test_a_slot_that_does_not_exist_is_named(slot):
    _, server = codecs()
    kind, _ = KINDS[messages.Push]
    body = msgspec.msgpack.encode([1, 1, [[], [], [], None, None, slot, None], None, None, 0.0, 0.0])
    with pytest.raises(PeerError, match=f"malformed Push arrived: slot must be 0 to 1, not {slot}"):
        server.at_server(bytearray(bytes([kind]) + body))


def test_a_region_that_nobody_has_is_named():
    worker, _ = codecs()
    data, _ = worker.encode(Push(1, 1, Gradient(worker.region.slots[0].flat, frozenset(), [], [], None, None, 0)))
    with pytest.raises(PeerError, match="lie in a region, and this link has none"):
        Codec().at_server(bytearray(data))
    with pytest.raises(PeerError, match="lie in a region, and this link has none"):
        Codec().at_server(bytearray(worker.encode(Hello(SPEC, [], []))[0]))


def test_indices_are_whole_numbers_of_eight_bytes():
    kind, _ = KINDS[messages.Extra]
    body = msgspec.msgpack.encode([[0, 1, b"123"], None])
    with pytest.raises(PeerError, match="malformed Extra"):
        Codec().at_worker(bytearray(bytes([kind]) + body))


@pytest.mark.parametrize("form", [["torch.os", [1]], ["torch.float32", [-3]], ["float32", [1 << 62, 1 << 62]]])
def test_tensors_that_cannot_be_are_named(form):
    kind, _ = KINDS[messages.Push]
    body = msgspec.msgpack.encode([1, 1, [[], [], [], None, None, None, [[form], []]], None, None, 0.0, 0.0])
    with pytest.raises(PeerError, match="malformed Push"):
        Codec().at_server(bytearray(bytes([kind]) + body))


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


def test_messages_without_tensors_have_none():
    assert tensors_of(Extra(None)) == tensors_of(Bye()) == tensors_of(Push(1, 0, None)) == []
    values, buffers = values_of(SPEC.parameters, 1), values_of(SPEC.buffers, 2)
    assert same(tensors_of(Hello(SPEC, values, buffers)), [*values, *buffers])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(number for number, _ in KINDS.values())), st.binary(max_size=120))
@example(1, FORMAT.to_bytes(2, "little") + b"\x92")
@example(3, b"\x97")
def test_random_bytes_are_a_message_or_the_peers_fault(kind, noise):
    for decode in (Codec(private_region).at_server, Codec().at_worker):
        for data in (noise, bytes([kind]) + noise):
            assert blamed(decode, data) != ""


VALUES = st.none() | st.booleans() | st.integers(-3, 70) | st.floats() | st.binary(max_size=16) | st.text(max_size=4)


@settings(max_examples=150, deadline=None)
@example(15, [[], [], []])
@example(17, [[], [], []])
@given(
    st.sampled_from(sorted(number for number, _ in KINDS.values())),
    st.recursive(VALUES, lambda inner: st.lists(inner, max_size=8), max_leaves=30),
)
def test_random_fields_are_a_message_or_the_peers_fault(kind, fields):
    data = bytes([kind]) + (FORMAT.to_bytes(2, "little") if kind == 1 else b"") + msgspec.msgpack.encode(fields)
    worker, server = codecs()
    for decode in (server.at_server, worker.at_worker):
        assert blamed(decode, data) != ""


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_messages_are_messages_or_the_peers_fault(data):
    worker, server = codecs()
    slot = worker.region.slots[0]
    sent = data.draw(st.sampled_from([
        worker.encode(Push(1, 1, Gradient(slot.flat, frozenset({0}), [{"betas": (0.5, 0.5)}], [None] * 3, 0.5, 1.0, 0),
                           [np.array([1])], 3)),
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
