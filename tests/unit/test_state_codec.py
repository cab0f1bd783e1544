"""What is kept comes back exactly as it was; what cannot be kept is named with its place; nothing is unpickled."""

import contextlib
import math
import random
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from paceline.core.errors import CheckpointError, OptionError
from paceline.model.tensor_files import NAMES, from_bytes, to_bytes
from paceline.worker.state_codec import pack, unpack


class Digest(bytes):
    """Bytes of a class of their own, which could not come back as such."""


def same(one, other):
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.contiguous().reshape(-1).view(torch.uint8).tolist() == other.reshape(-1).view(torch.uint8).tolist()
        )
    if isinstance(one, np.ndarray | np.generic):
        return type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape and (
            one.tobytes() == other.tobytes()
        )  # fmt: skip
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        # Zipped, since an inner NaN is a key that equals nothing.
        return len(one) == len(other) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one.hex() == other.hex()
    return bool(one == other)


def tensors():
    def make(dtype, shape):
        size = math.prod(shape) * dtype.itemsize
        raw = torch.from_numpy(np.random.default_rng(size).integers(0, 2, size, dtype=np.uint8).copy())
        return raw.view(dtype).reshape(shape) if size else torch.zeros(shape, dtype=dtype)

    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    return st.builds(make, st.sampled_from(list(NAMES)), shapes)


arrays = npst.arrays(
    st.one_of(npst.scalar_dtypes(), npst.unicode_string_dtypes(max_len=4)), npst.array_shapes(min_dims=0, min_side=0)
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.binary().map(bytearray)
    | st.binary().map(np.bytes_)
    | tensors()
    | arrays
    | st.floats(width=32).map(np.float32)
    | st.floats().map(np.float64)
)
keys = st.text() | st.integers() | st.booleans() | st.floats()
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=150)
@given(values)
def test_everything_comes_back_as_it_was(value):
    assert same(value, unpack(pack(value)))


def test_state_of_generators_schedulers_and_optimizers_comes_back():
    parameter = torch.nn.Parameter(torch.randn(3, 2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    parameter.grad = torch.randn(3, 2)
    optimizer.step()
    scheduler.step()
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(3).bit_generator.state,  # whole numbers of 128 bits
        "optimizer": optimizer.state_dict(),
        "module": OrderedDict(torch.nn.BatchNorm1d(3).state_dict()),
        "rates": scheduler.state_dict()["_last_lr"],
    }
    back = unpack(pack(state))
    assert same({**state, "module": dict(state["module"])}, back)
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])


def test_views_and_gradients_are_kept_by_value():
    base = torch.arange(12.0).reshape(3, 4)
    back = unpack(pack({"turned": base.t(), "tracked": torch.nn.Parameter(base), "every second": base[:, ::2]}))
    assert torch.equal(back["turned"], base.t())
    assert torch.equal(back["every second"], base[:, ::2])
    assert not back["tracked"].requires_grad


@pytest.mark.parametrize(
    ("value", "place", "what"),
    [
        ({"kept": {"scaler": {"growth_tracker": Fraction(1, 2)}}}, "kept.scaler.growth_tracker", "a Fraction"),
        ({"kept": [1, {2, 3}]}, "kept.1", "a set"),
        ({"kept": {"f": print}}, "kept.f", "a builtin_function_or_method"),
        ({"kept": [Digest(b"abc")]}, "kept.0", "a Digest"),
        ({"kept": {(1, 2): 3}}, "kept", "a dict with the key (1, 2)"),
        ({"x": torch.eye(2).to_sparse()}, "x", "a tensor of kind torch.sparse_coo"),
        ({"x": torch.zeros(1, dtype=torch.complex128)}, "x", "torch.complex128"),
        ({"x": np.array([None])}, "x", "an array of object"),
        (object(), "the state", "a object"),
    ],
)
def test_what_cannot_be_kept_is_named_with_its_place(value, place, what):
    with pytest.raises(OptionError, match=f"^{place} is .*which a checkpoint cannot hold: keep numbers") as caught:
        pack(value)
    assert what in str(caught.value)


def test_a_value_that_contains_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(OptionError, match="contains itself"):
        pack(value)


@settings(max_examples=100)
@given(st.binary(max_size=200), st.integers(0, 300), st.integers(1, 255))
def test_damaged_bytes_are_an_error_of_their_own(noise, place, flip):
    whole = bytearray(pack({"a": [1, 2.5, None], "b": torch.arange(4)}))
    for data in (noise, bytes(whole[:place]), bytes(whole[:place]) + noise):
        if data != whole:
            with pytest.raises(CheckpointError):
                unpack(data)
    whole[place % len(whole)] ^= flip
    with contextlib.suppress(CheckpointError):  # a flipped bit may leave another whole value
        unpack(bytes(whole))


def test_a_newer_format_is_refused():
    with pytest.raises(CheckpointError, match="format 2; this version reads up to 1"):
        unpack(to_bytes({}, {"format": "2", "tree": "null"}))
    tensors, metadata = from_bytes(to_bytes({"a": torch.ones(2)}, {"b": "c"}))
    assert torch.equal(tensors["a"], torch.ones(2))
    assert metadata == {"b": "c"}
