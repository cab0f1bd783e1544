"""How often nodes are asked for their models, whatever the number of those who want to know."""

import numpy as np
import pytest
from hand_driven import HandDrivenRun

from paceline.peers.messages import Collect, Mailbox, Snapshot
from paceline.peers.server import PeerExchange
from paceline.transport.messages import Push


class Asked:
    """Two nodes in a phase, and the gathering of their run."""

    def __init__(self, monkeypatch):
        self.hand = HandDrivenRun("local_sgd", 2, exchanges=[PeerExchange])
        for node in range(2):
            self.hand.says(node, Mailbox("somewhere", "key"))
        self.hand.train()
        self.exchange = self.hand.run.exchange
        self.gathering = self.exchange.gathering
        self.averages = []  # of each average, whether it was the last of its phase
        average = self.gathering._average

        def noted(models):
            self.averages.append(self.gathering._queue[0].last)
            average(models)

        monkeypatch.setattr(self.gathering, "_average", noted)

    @property
    def asked(self):
        return [message for node in range(2) for message in self.hand.engine.sent[node] if isinstance(message, Collect)]

    def answer(self):
        number = self.hand.last(1, Collect).number
        for node in range(2):
            model = np.full(1, node, np.float32).view(np.uint8)
            self.hand.says(node, Snapshot(number, [model], []))


@pytest.fixture
def nodes(monkeypatch):
    return Asked(monkeypatch)


def test_who_asks_while_another_waits_shares_it(nodes):
    heard = []
    for number in range(5):
        nodes.gathering.begin(lambda number=number: heard.append(number), last=False)
    assert [collect.number for collect in nodes.asked] == [1, 1]
    nodes.answer()
    assert heard == [0]
    nodes.answer()
    assert heard == [0, 1, 2, 3, 4]
    assert len(nodes.asked) == 4
    assert not nodes.gathering.busy


def test_nothing_follows_the_last_one_of_a_phase(nodes):
    heard = []
    nodes.gathering.begin(lambda: heard.append("evaluation"), last=False)
    nodes.gathering.begin(lambda: heard.append("checkpoint"), last=False)
    nodes.gathering.begin(lambda: heard.append("end"), last=True)
    nodes.gathering.begin(lambda: heard.append("late"), last=False)
    nodes.answer()
    assert heard == ["evaluation"]
    assert nodes.hand.last(0, Collect) == Collect(2, last=True)
    nodes.gathering.begin(lambda: heard.append("later"), last=False)
    nodes.answer()
    assert heard == ["evaluation", "checkpoint", "end", "late", "later"]
    assert nodes.averages == [False, True]


def test_the_store_has_the_mean_weighted_by_samples(nodes):
    nodes.hand.pushes(1)
    nodes.gathering.begin(lambda: None, last=False)
    nodes.answer()
    assert nodes.hand.model == 1.0
    nodes.hand.pushes(0)
    nodes.gathering.begin(lambda: None, last=False)
    nodes.answer()
    assert nodes.hand.model == 0.5


def test_a_step_that_was_not_made_gives_no_weight(nodes):
    nodes.exchange.count(0, Push(1, 8, None))
    assert nodes.exchange.used == {}
