"""Who is called together for an average, as the coordinator of real processes decides it."""

import pytest
from hand_driven import HandDrivenRun

from paceline.peers import messages as p
from paceline.peers.server import PeerExchange


@pytest.fixture
def three():
    hand = HandDrivenRun("local_sgd", 3, exchanges=[PeerExchange])
    for node in range(3):
        hand.says(node, p.Mailbox("somewhere", "key"))
    hand.train()
    for node in range(3):
        hand.says(node, p.Averaging(1, []))
    assert all(groups(hand, node) == [p.Group(1, 0, [0, 1, 2], 0.0)] for node in range(3))
    return hand


def dies(three, node):
    three.exits(node, -9)


def groups(three, node):
    return [message for message in three.engine.sent[node] if isinstance(message, p.Group)]


@pytest.mark.parametrize("done", [True, False])
def test_those_who_are_not_done_begin_again_without_a_member_that_dies(three, done):
    """A member that was done may have died before its last messages were out."""
    if done:
        three.says(2, p.Exchanged(1, 0, 10))
    dies(three, 2)
    assert groups(three, 0)[1:] == groups(three, 1)[1:] == [p.Group(1, 1, [0, 1], 0.0)]


def test_the_last_one_averages_alone(three):
    for node in (1, 2):
        three.says(node, p.Exchanged(1, 0, 10))
    dies(three, 2)
    assert groups(three, 0)[1:] == [p.Group(1, 1, [0], 0.0)]
    three.says(0, p.Exchanged(1, 1, 0))
    dies(three, 1)
    assert len(groups(three, 0)) == 2


def test_an_average_that_everybody_has_is_over(three):
    for node in range(3):
        three.says(node, p.Exchanged(1, 0, 10))
    dies(three, 2)
    assert len(groups(three, 0)) == 1
