"""The memory transport keeps the contract of all transports."""

import pytest
import torch

from contracts.contract import SPEC, TransportContract
from paceline.model.store import Gradient
from paceline.transport.base import Closed, Lost
from paceline.transport.memory import MemoryLink
from paceline.transport.messages import Extra, Push


class TestMemory(TransportContract):
    def make(self):
        link = MemoryLink()
        return link, link


def test_on_wait_is_told_only_when_there_is_nothing_to_receive():
    told = []
    link = MemoryLink(on_wait=lambda: (told.append(1), link.deliver(Extra(None))))
    link.deliver(Extra(None))
    link.receive()
    assert told == []
    link.receive()
    assert told == [1]


def test_a_lost_server_takes_all_messages_with_it_until_another_is_found():
    link = MemoryLink()
    link.deliver(Extra(None))
    link.send(Push(1, 1, None))
    link.lose()
    assert link.collect() is None
    link.send(Push(2, 1, None))
    assert link.poll()
    for _ in range(2):
        with pytest.raises(Lost):
            link.receive()
    assert link.collect() is None
    link.lose()  # another one, before the worker has found it
    link.restore()
    link.reconnect()
    link.send(Push(3, 1, None))
    assert link.collect().ticket == 3
    link.deliver(Extra(None))
    assert link.receive() == Extra(None)


def test_a_worker_that_has_lost_no_server_cannot_find_another():
    link = MemoryLink()
    with pytest.raises(Closed):
        link.reconnect()


def test_a_link_may_be_closed_while_its_worker_looks_for_a_server():
    link = MemoryLink()
    link.lose()
    with pytest.raises(Lost):
        link.receive()
    link.close()
    with pytest.raises(Closed):
        link.reconnect()


def test_tensors_go_by_reference():
    link = MemoryLink()
    assert link.adopt(SPEC) is None
    gradient = Gradient([torch.ones(2)], frozenset(), [])
    link.send(Push(1, 1, gradient))
    assert link.collect().gradient is gradient
