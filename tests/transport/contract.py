"""What every transport promises. A transport is tested by giving `TransportContract` a pair of ends."""

import threading

import numpy as np
import pytest
import torch

from paceline.ledger import Allotment
from paceline.store import Gradient
from paceline.transport.base import Closed
from paceline.transport.messages import Done, Extra, More, Note, Over, Push, Ready, Stop, Work


class TransportContract:
    """Whole messages, in order, each delivered once, both ways; a closed link says so."""

    def make(self):
        """A worker's end and the server's end of one link."""
        raise AssertionError("a subclass makes the link")

    def test_messages_reach_the_server_whole_and_in_order(self):
        worker, server = self.make()
        sent = [Ready(0, 10, 2, 1.0, "epoch", 1), More(3), Note("x", 1.5), Done(0), Stop("enough")]
        for message in sent:
            worker.send(message)
        assert [server.collect() for _ in sent] == sent
        assert server.collect() is None

    def test_messages_reach_the_worker_whole_and_in_order(self):
        worker, server = self.make()
        sent = [Work(number, Allotment(0, 1, np.array([number])), None, 0.5) for number in range(50)]
        for message in [*sent, Extra(None), Over(0, None, 1.0)]:
            server.deliver(message)
        for message in sent:
            got = worker.receive()
            assert (got.ticket, got.allotment.indices.tolist()) == (message.ticket, message.allotment.indices.tolist())
        assert worker.receive() == Extra(None)
        assert worker.receive() == Over(0, None, 1.0)

    def test_a_push_carries_its_tensors_unchanged(self):
        worker, server = self.make()
        values = torch.arange(1000, dtype=torch.float32)
        worker.send(Push(7, 3, Gradient([values.clone()], frozenset({2}), [{"lr": 0.1}], [], 0.25)))
        got = server.collect()
        assert torch.equal(got.gradient.flat[0], values)
        assert (got.gradient.missing, got.gradient.options, got.gradient.loss) == (frozenset({2}), [{"lr": 0.1}], 0.25)

    def test_receive_waits_for_a_message(self):
        worker, server = self.make()
        got = []
        thread = threading.Thread(target=lambda: got.append(worker.receive()))
        thread.start()
        server.deliver(Extra(None))
        thread.join(10)
        assert got == [Extra(None)]

    def test_a_closed_link_ends_whoever_waits_and_whoever_comes_later(self):
        worker, server = self.make()
        ended = threading.Event()

        def wait():
            try:
                worker.receive()
            except Closed:
                ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        server.close()
        thread.join(10)
        assert ended.is_set()
        with pytest.raises(Closed):
            worker.receive()
        with pytest.raises(Closed):
            worker.send(More(1))

    def test_closing_is_no_exception_a_script_could_swallow(self):
        assert not issubclass(Closed, Exception)
