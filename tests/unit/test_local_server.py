"""The server's engine on real processes, as far as it can be seen without one."""

import contextlib
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.core.ledger import Allotment
from paceline.core.settings import RunConfig
from paceline.engines.local.server import IDLE_S, LocalEngine
from paceline.server.emulation import Timing
from paceline.transport.messages import Extra, Work
from paceline.transport.shm import Channel

LIMIT_S = 3.0


@pytest.fixture
def make():
    with contextlib.ExitStack() as last:

        def make_engine(*, append=False, seconds=0.0):
            ours, theirs = socket.socketpair()
            last.callback(theirs.close)
            channel = Channel(ours)
            last.callback(channel.close)
            plan = SimpleNamespace(scenario=None, config=RunConfig(max_seconds=LIMIT_S))
            engine = LocalEngine(channel, SimpleNamespace(plan=plan, append=append), Path(), lambda: None)
            last.callback(engine.close)
            engine._clock = SimpleNamespace(now=lambda: seconds)
            return engine

        yield make_engine


@pytest.mark.parametrize(("running", "seconds", "wanted"), [
    (True, LIMIT_S - 0.05, 0.05), (True, LIMIT_S + 1, 0.0), (False, LIMIT_S + 1, IDLE_S), (False, 0.0, IDLE_S),
])  # fmt: skip
def test_a_limit_that_passes_between_phases_does_not_keep_the_server_busy(make, monkeypatch, running, seconds, wanted):
    engine, waits = make(seconds=seconds), []
    engine.run = SimpleNamespace(active=True, phases=SimpleNamespace(running=running), on_quiet=lambda _: None)
    monkeypatch.setattr(engine._links, "wait", waits.append)
    engine._wait()
    assert waits == [pytest.approx(wanted)]


def test_modelled_times_count_from_the_decision_whatever_the_server_did_since(make, monkeypatch):
    engine, sent = make(seconds=10.25), []
    monkeypatch.setattr(engine, "send", lambda _, message: sent.append(message))
    work = Work(1, Allotment(0, 1, np.array([0])), None, 0.0)
    engine.dispatch(0, work, Timing(0, granted_at=10.0, begin=10.5, compute_s=2.0))
    engine.dispatch(0, work, Timing(0, granted_at=10.0, begin=10.0, compute_s=2.0))
    engine.dispatch(0, Extra(None), Timing(0, granted_at=10.0, begin=10.0, compute_s=2.0))
    assert [(m.delay_s, m.compute_s) for m in sent[:2]] == [(0.25, 2.0), (-0.25, 2.0)]
    assert sent[2] == Extra(None, 2.0)


@pytest.mark.parametrize(("append", "asked"), [(False, 1), (True, 0)])
def test_memory_is_asked_for_once_and_not_again_by_a_server_that_finds_its_workers_there(
    make, monkeypatch, append, asked
):  # fmt: skip
    from hand_driven import hello

    checks = []
    monkeypatch.setattr(
        "paceline.engines.local.server.require_server", lambda spec, *, regions: checks.append((spec, regions))
    )
    engine = make(append=append)
    engine.carry(SimpleNamespace(workers=SimpleNamespace(alive={0, 1}), on_message=lambda *_: None))
    for number in (0, 1):
        engine._links._take(SimpleNamespace(number=number, incarnation=0, came=True), hello())
    assert [regions for _, regions in checks] == [1] * asked
