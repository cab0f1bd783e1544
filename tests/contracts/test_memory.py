"""The memory transport keeps the contract of all transports."""

import torch

from contracts.contract import SPEC, TransportContract
from paceline.model.store import Gradient
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


def test_tensors_go_by_reference():
    link = MemoryLink()
    assert link.adopt(SPEC) is None
    gradient = Gradient([torch.ones(2)], frozenset(), [])
    link.send(Push(1, 1, gradient))
    assert link.collect().gradient is gradient
