"""How often nodes are asked for their models, whatever the number of those who want to know."""

from types import SimpleNamespace

import pytest

from paceline.engines.local.gathering import Gathering
from paceline.peers.messages import Collect, Snapshot
from paceline.transport.messages import Push


@pytest.fixture
def gathering(monkeypatch):
    asked = []
    link = SimpleNamespace(deliver=asked.append)
    members = {n: SimpleNamespace(worker=n, link=link, gone=False) for n in range(2)}
    gathering = Gathering(SimpleNamespace(members=members, phases=SimpleNamespace(members={0, 1})))
    averaged = []
    monkeypatch.setattr(gathering, "_typed", lambda snapshot: snapshot)
    monkeypatch.setattr(gathering, "_average", lambda _: averaged.append(gathering._queue[0].last))
    gathering.asked, gathering.averages = asked, averaged
    return gathering


def answer(gathering):
    number = gathering.asked[-1].number
    for node in range(2):
        gathering.take(node, Snapshot(number, [], []))


def test_who_asks_while_another_waits_shares_it(gathering):
    heard = []
    for number in range(5):
        gathering.begin(lambda number=number: heard.append(number), last=False)
    assert [collect.number for collect in gathering.asked] == [1, 1]
    answer(gathering)
    assert heard == [0]
    answer(gathering)
    assert heard == [0, 1, 2, 3, 4]
    assert len(gathering.asked) == 4
    assert not gathering.busy


def test_nothing_follows_the_last_one_of_a_phase(gathering):
    heard = []
    gathering.begin(lambda: heard.append("evaluation"), last=False)
    gathering.begin(lambda: heard.append("checkpoint"), last=False)
    gathering.begin(lambda: heard.append("end"), last=True)
    gathering.begin(lambda: heard.append("late"), last=False)
    answer(gathering)
    assert heard == ["evaluation"]
    assert gathering.asked[-1] == Collect(2, last=True)
    gathering.begin(lambda: heard.append("later"), last=False)
    answer(gathering)
    assert heard == ["evaluation", "checkpoint", "end", "late", "later"]
    assert gathering.averages == [False, True]


def test_a_step_that_was_not_made_gives_no_weight(gathering):
    gathering.count(0, Push(1, 8, None))
    assert gathering.used == {}
