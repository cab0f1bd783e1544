"""The memory transport keeps the contract of all transports."""

from paceline.transport.memory import MemoryLink
from paceline.transport.messages import Extra
from transport.contract import TransportContract


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
