"""Who is called together for an average, as the coordinator of real processes decides it."""

from types import SimpleNamespace

import pytest

from paceline.engines.local.peer_server import LocalPeers
from paceline.peers import messages as p


class Link:
    def __init__(self):
        self.told = []

    def deliver(self, message):
        self.told.append(message)


@pytest.fixture
def three():
    members = {
        n: SimpleNamespace(worker=n, link=Link(), gone=False, incarnation=0, name=f"worker {n}") for n in range(3)
    }
    coordinator = SimpleNamespace(
        seats={n: SimpleNamespace(present=True, ticket=n + 1) for n in range(3)}, now=0.0, observe=lambda *_: None
    )
    cluster = SimpleNamespace(
        conduct=SimpleNamespace(peer="local_sgd", active=True), members=members, coordinator=coordinator,
        phases=SimpleNamespace(members={0, 1, 2}, running=True), emulation=None,
        clock=SimpleNamespace(now=lambda: 0.0),
    )  # fmt: skip
    peers = LocalPeers(cluster)
    peers._present, peers._started = {0, 1, 2}, {0, 1, 2}
    for member in members.values():
        peers.hear_from(member, p.Averaging(1, []))
    assert all(member.link.told == [p.Group(1, 0, [0, 1, 2], 0.0)] for member in members.values())
    return SimpleNamespace(peers=peers, members=members, seats=coordinator.seats)


def dies(three, node):
    three.members[node].gone, three.seats[node].present = True, False
    three.peers.left(node, "crash")


def groups(three, node):
    return [message for message in three.members[node].link.told if isinstance(message, p.Group)]


@pytest.mark.parametrize("done", [True, False])
def test_those_who_are_not_done_begin_again_without_a_member_that_dies(three, done):
    """A member that was done may have died before its last letters were out."""
    if done:
        three.peers.hear_from(three.members[2], p.Exchanged(1, 0, 10))
    dies(three, 2)
    assert groups(three, 0)[1:] == groups(three, 1)[1:] == [p.Group(1, 1, [0, 1], 0.0)]


def test_the_last_one_averages_alone(three):
    for node in (1, 2):
        three.peers.hear_from(three.members[node], p.Exchanged(1, 0, 10))
    dies(three, 2)
    assert groups(three, 0)[1:] == [p.Group(1, 1, [0], 0.0)]
    three.peers.hear_from(three.members[0], p.Exchanged(1, 1, 0))
    dies(three, 1)
    assert len(groups(three, 0)) == 2


def test_an_average_that_everybody_has_is_over(three):
    for member in three.members.values():
        three.peers.hear_from(member, p.Exchanged(1, 0, 10))
    dies(three, 2)
    assert len(groups(three, 0)) == 1
