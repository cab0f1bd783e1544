"""The ring through which arrays travel: what was written is what is read, and what does not fit goes another way."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.model.memory_budget import ShortOfMemoryError
from paceline.transport.lanes import FIRST_BYTES, LEAST_BYTES, MOST_BYTES, LaneIn, LaneOut


def anonymous_file(size):
    descriptor = os.memfd_create("lane")
    os.ftruncate(descriptor, size)
    return descriptor


def carry(out, into, arrays):
    """Through the ring and back, or None if it did not take them."""
    placed = out.place(arrays)
    if placed is None:
        return None
    if placed.descriptor is not None:
        into.adopt(placed.descriptor)
    take = into.arrays(placed.offset, placed.total, placed.end)
    return [take(array.dtype, array.shape) for array in arrays]


def numbers(count, value=0):
    return np.arange(value, value + count, dtype=np.int64)


@given(st.lists(st.integers(LEAST_BYTES // 8, FIRST_BYTES // 20), min_size=1, max_size=40), st.booleans())
def test_what_was_written_is_what_is_read_however_often_the_ring_comes_round(counts, reads):
    out, into = LaneOut(anonymous_file), LaneIn()
    for place, count in enumerate(counts):
        sent = [numbers(count, place), np.float32([place])]
        found = carry(out, into, sent)
        if found is None:
            assert not reads  # nobody gave anything back: it is full
            break
        assert all(np.array_equal(a, b) for a, b in zip(sent, found, strict=True))
        del found
        if reads:
            into.give_back()


def test_rows_not_yet_given_back_are_never_written_over():
    out, into = LaneOut(anonymous_file), LaneIn()
    kept = carry(out, into, [numbers(FIRST_BYTES // 20)])[0]
    while carry(out, into, [numbers(FIRST_BYTES // 20, 7)]) is not None:
        pass
    assert np.array_equal(kept, numbers(FIRST_BYTES // 20))


@pytest.mark.parametrize("count", [LEAST_BYTES // 8 - 8, MOST_BYTES // 8 + 8])
def test_too_little_and_too_much_go_over_the_socket(count):
    assert LaneOut(anonymous_file).place([numbers(count)]) is None


def test_where_memory_is_short_they_go_over_the_socket():
    def refuse(size):
        raise ShortOfMemoryError(f"{size} bytes are not there")

    assert LaneOut(refuse).place([numbers(LEAST_BYTES)]) is None


def test_a_larger_message_gets_a_larger_ring_and_the_old_one_is_left():
    out, into = LaneOut(anonymous_file), LaneIn()
    small = carry(out, into, [numbers(LEAST_BYTES)])[0]
    large = carry(out, into, [numbers(FIRST_BYTES)])[0]
    assert np.array_equal(large, numbers(FIRST_BYTES))
    assert np.array_equal(small, numbers(LEAST_BYTES))  # its memory lives as long as somebody looks at it


@pytest.mark.parametrize("wrong", [{"offset": 8}, {"total": 1 << 40}, {"offset": 1 << 40}])
def test_a_place_that_is_not_in_the_ring_is_refused(wrong):
    out, into = LaneOut(anonymous_file), LaneIn()
    placed = out.place([numbers(LEAST_BYTES)])
    into.adopt(placed.descriptor)
    place = {"offset": placed.offset, "total": placed.total, "end": placed.end, **wrong}
    with pytest.raises(ValueError, match="not a valid range of the ring"):
        into.arrays(**place)


def test_an_array_larger_than_its_message_is_refused():
    out, into = LaneOut(anonymous_file), LaneIn()
    placed = out.place([numbers(LEAST_BYTES)])
    into.adopt(placed.descriptor)
    with pytest.raises(ValueError, match="does not fit"):
        into.arrays(placed.offset, placed.total, placed.end)(np.dtype("int64"), (LEAST_BYTES + 64,))
