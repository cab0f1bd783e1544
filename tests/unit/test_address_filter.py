"""Addresses that flood a listening socket are not heard for a while; others are, and so are connections that exist."""

import contextlib
import select
import socket

import pytest

from paceline.transport.address_filter import (
    FIRST_S,
    LONGEST_S,
    MOST_ADDRESSES,
    MOST_KNOCKS,
    Knocks,
    _program,
    set_filter,
)


def flooded(knocks, address="10.0.0.1"):
    for _ in range(MOST_KNOCKS + 1):
        knocks.knocked(address)


def test_an_address_without_a_key_is_not_heard_for_twice_as_long_each_time():
    knocks, now = Knocks(), 100.0
    knocks.look(now)
    seconds = FIRST_S
    while seconds < 2 * LONGEST_S:
        flooded(knocks)
        assert knocks.look(now)
        assert knocks.deaf_to == {"10.0.0.1"}
        assert not knocks.look(now + min(seconds, LONGEST_S) - 0.1)
        now += min(seconds, LONGEST_S) + 0.1
        assert knocks.look(now)
        assert knocks.deaf_to == frozenset()
        seconds *= 2
    assert not knocks.look(now + 10 * LONGEST_S)
    flooded(knocks)
    knocks.look(now + 10 * LONGEST_S)
    assert not knocks.look(now + 10 * LONGEST_S + FIRST_S - 0.1)
    assert knocks.look(now + 10 * LONGEST_S + FIRST_S + 0.1)


def test_members_and_few_strangers_are_always_heard():
    knocks = Knocks()
    knocks.look(0.0)
    for number in range(10 * MOST_KNOCKS):
        knocks.knocked("10.0.0.2")
        knocks.showed_key("10.0.0.2")
        if number < MOST_KNOCKS:
            knocks.knocked("10.0.0.3")
    assert not knocks.look(0.1)
    assert not knocks.deaf_to
    knocks.look(1_000.0)
    assert not knocks._counts


def test_a_filter_has_a_bounded_number_of_addresses():
    knocks = Knocks()
    for number in range(MOST_ADDRESSES + 50):
        flooded(knocks, f"10.0.{number // 250}.{number % 250}")
    assert knocks.look(1.0)
    assert len(knocks.deaf_to) == MOST_ADDRESSES


def test_the_largest_filter_is_one_that_the_kernel_takes():
    addresses = [f"fd00:0:{number:x}::1" for number in range(MOST_ADDRESSES)]
    assert len(_program(addresses)) // 8 <= 4_096  # instructions
    with socket.create_server(("127.0.0.1", 0)) as listener:
        set_filter(listener.fileno(), [*addresses[1:], "127.0.0.1"])
        with socket.socket() as late:
            late.setblocking(False)
            late.connect_ex(listener.getsockname())
            assert not select.select([listener], [], [], 0.2)[0]


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_kernel_drops_what_an_address_sends_to_the_listening_socket_alone(family, address):
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((address, 0), family=family))
        before = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
        accepted = stack.enter_context(listener.accept()[0])
        set_filter(listener.fileno(), [address, "10.1.2.3", "fd00::1"])
        late = stack.enter_context(socket.socket(family))
        late.setblocking(False)
        late.connect_ex(listener.getsockname()[:2])
        before.sendall(b"still heard")
        assert accepted.recv(100) == b"still heard"
        assert not select.select([listener], [], [], 0.2)[0]
        set_filter(listener.fileno(), ["10.1.2.3", "fd00::1"])
        again = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
        stack.enter_context(listener.accept()[0])
        again.close()
