"""Values that scripts exchange: all that is allowed comes back, all else is refused by type and place."""

import collections
import enum
import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import OptionError, PeerError
from paceline.server.collectives import mean_of_values
from paceline.transport.value_codec import PackedValue, pack_value, placed_like, unpack_value

CPU = torch.device("cpu")
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=9)
VALUES = st.recursive(PLAIN, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=5), v, max_size=4))
DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def back(value):
    return unpack_value(pack_value(value, "gather()"))


@given(VALUES)
def test_plain_values_come_back_as_they_were(value):
    assert back(value) == value


def test_what_comes_back_in_a_simpler_form():
    class Kind(enum.IntEnum):
        ONE = 1

    found = back([(1, (2,)), collections.OrderedDict(a=1), np.float32(0.5), np.int8(-3), np.bool_(True), Kind.ONE])
    assert found == [[1, [2]], {"a": 1}, 0.5, -3, True, 1]
    assert [type(one) for one in found] == [list, dict, float, int, bool, int]
    assert math.isnan(back(math.nan))
    assert back([math.inf, -math.inf]) == [math.inf, -math.inf]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_tensors_of_every_type_and_shape(dtype, shape):
    given = torch.arange(math.prod(shape)).to(torch.float32).reshape(shape).to(dtype)
    found = back({"t": given})["t"]
    assert found.dtype == dtype
    assert found.shape == given.shape
    assert torch.equal(found.view(torch.uint8) if shape else found, given.view(torch.uint8) if shape else given)


def test_views_and_gradients_are_copied_as_they_look():
    whole = torch.arange(12.0).reshape(3, 4)
    weight = torch.nn.Parameter(whole.clone())
    given = [whole.t(), whole[:, 1], whole[0].expand(2, 4), weight, torch.tensor([1 + 2j]).conj()]
    found = back(given)
    for one, other in zip(found, given, strict=True):
        assert torch.equal(one, other)
        assert type(one) is torch.Tensor
        assert not one.requires_grad
    whole.zero_()
    assert found[0].sum() == 66


def looped():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"value is a object, which is not sent; give numbers, text"),
        ([1, {"a": {2}}], r"value\[1\]\['a'\] is a set,"),
        ({"a": (1, b"x")}, r"value\['a'\]\[1\] is a bytes,"),
        ({1: 2}, r"value is a dict with the key 1 \(int\)"),
        (np.zeros(2), r"value is a ndarray,"),
        (1j, r"value is a complex,"),
        (np.complex64(1), r"value is a complex,"),
        (np.datetime64("2020-01-01"), r"value is a date,"),
        ([2**64], r"value\[0\] is 18446744073709551616; whole numbers go from -2\*\*63 to 2\*\*64 - 1"),
        ("\udc80", r"value is text that is not valid Unicode"),
        (torch.eye(2).to_sparse(), r"value is a tensor that is torch.sparse_coo, on cpu: it must be dense"),
        ([torch.empty(2, device="meta")], r"value\[0\] is a tensor that is torch.strided, on meta"),
        (looped(), r"the value contains itself"),
    ],
)
def test_everything_else_is_refused_by_type_and_place(value, message):
    with pytest.raises(OptionError, match=rf"gather\(\): {message}"):
        pack_value(value, "gather()")


@pytest.mark.parametrize(
    "packed",
    [
        PackedValue(b"\xc1", []),
        PackedValue(msgspec.msgpack.encode([1]) + b"x", []),
        PackedValue(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"\x00\x00\x00\x00")), []),
        PackedValue(msgspec.msgpack.encode(msgspec.msgpack.Ext(2, b"\x00\x00\x00\x00")), [torch.zeros(1)]),
        PackedValue(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"\x00")), [torch.zeros(1)]),
    ],
)
def test_damaged_bytes_are_refused(packed):
    with pytest.raises(PeerError, match="a malformed value arrived"):
        unpack_value(packed)


def test_tensors_go_where_the_callers_own_are():
    """The meta device stands in for another one."""
    own = {"a": [torch.zeros(2, device="meta"), 1], "b": torch.zeros(1)}
    others = {"a": [torch.ones(2), torch.ones(1)], "b": torch.ones(1), "c": torch.ones(1)}
    placed = placed_like(others, own, torch.device("meta"))
    devices = [placed["a"][0], placed["a"][1], placed["b"], placed["c"]]
    assert [tensor.device.type for tensor in devices] == ["meta", "meta", "cpu", "meta"]
    assert placed["b"] is not others["b"]
    assert placed_like([torch.ones(1)], [1, 2], CPU)[0].device == CPU


def mean(*values):
    packed = {worker: pack_value(value, "mean()") for worker, value in enumerate(values)}
    return unpack_value(mean_of_values(packed))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6))
def test_the_mean_of_numbers(numbers):
    assert mean(*numbers) == pytest.approx(math.fsum(numbers) / len(numbers), abs=1e-6)
    tensors = [torch.tensor([number, 1.0], dtype=torch.float64) for number in numbers]
    assert mean(*tensors).tolist() == pytest.approx([math.fsum(numbers) / len(numbers), 1.0], abs=1e-6)


def test_the_mean_of_half_precision_is_summed_in_single():
    values = [torch.full((1,), 60_000.0, dtype=torch.float16) for _ in range(4)]  # their sum overflows
    assert mean(*values).tolist() == values[0].tolist()
    assert mean(*values).dtype == torch.float16


def test_keys_may_stand_in_another_order():
    assert mean({"a": 1, "b": 3}, {"b": 5, "a": 3}) == {"a": 2.0, "b": 4.0}


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"a": 1}, {"b": 1}, r"value is a dict with the keys b in worker 1 and a dict with the keys a in worker 0"),
        ([1], 1, r"value is a number in worker 1 and a list of 1 in worker 0"),
        ([[1]], [[1, 2]], r"value\[0\] is a list of 2 in worker 1 and a list of 1 in worker 0"),
        (torch.zeros(2), torch.zeros(3), r"shape \[3\] and torch.float32 in worker 1 and a tensor of shape \[2\]"),
        (torch.zeros(2), torch.zeros(2).half(), r"\[2\] and torch.float16 in worker 1 .* \[2\] and torch.float32"),
    ],
)
def test_a_mean_needs_values_of_one_form(one, other, message):
    with pytest.raises(OptionError, match=message):
        mean(one, other)
