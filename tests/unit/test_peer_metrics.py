"""The peers' part of a report, line by line."""

from math import inf

import pytest

from paceline.core.actions import Track
from paceline.core.peer_actions import Ask, Exchange, Send
from paceline.core.peer_events import Asked, PeerLeft, Sent, Stepped
from paceline.records.journal import Observation, PeerDecision
from paceline.records.metrics import PeerMetrics
from paceline.records.report import NodesNumber, PeerPoint


def stepped(node: int, at: float, *actions: object) -> PeerDecision:
    event = Stepped(at, 1, change=None, changes=None, samples=8, compute_s=0.1, wait_s=0.0, loss=None)
    return PeerDecision(node, 0, event, list(actions))  # type: ignore[arg-type]


def test_a_run_with_a_server_has_none_of_it() -> None:
    assert PeerMetrics().report() is None


def test_each_point_of_the_course_is_about_what_was_since_the_one_before() -> None:
    fold = PeerMetrics()
    send = Send(1, 1.0, None, "due")
    for line in (
        stepped(0, 1.0, send, Track("threshold", 0.2, "at first")),
        stepped(1, 1.0, Track("threshold", 0.4, "at first")),
        PeerDecision(0, 0, Sent(1.5, 1, 4000, 0.25), []),
        stepped(0, 2.0),
    ):
        fold.decided(line)
    fold.measured(Observation(2.0, "consensus", {"distance": 0.5, "bytes": 800}))
    fold.measured(Observation(2.0, "consensus", {"distance": "inf", "bytes": 800}))  # as a journal read back has it
    fold.decided(stepped(1, 3.0, send, Track("threshold", 0.6, "over the budget")))
    fold.exchanged()
    fold.measured(Observation(3.0, "consensus", {"distance": 0.25}))
    report = fold.report()
    assert report is not None
    assert report.course == [
        PeerPoint(2.0, 3.0, pytest.approx(0.3), 0.5),
        PeerPoint(2.0, None, None, float("inf")),
        PeerPoint(3.0, 1.0, 0.6, 0.25),
    ]
    assert (report.mean_interval, report.sending_s, report.consensus, report.gathered_bytes) == (
        2.0,
        0.25,
        0.25,
        1600,
    )


def test_numbers_of_the_nodes_own_models_are_those_that_all_have() -> None:
    fold = PeerMetrics()
    fold.exchanged()
    fold.measured_own([{"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.75, "loss": "inf", "of_one": 3.0}])  # type: ignore[dict-item]
    report = fold.report()
    assert report is not None
    assert report.nodes == {"accuracy": NodesNumber(0.625, 0.5, 0.75), "loss": NodesNumber(inf, 1.0, inf)}


def test_a_journal_without_them_has_none() -> None:
    fold = PeerMetrics()
    fold.exchanged()
    report = fold.report()
    assert report is not None
    assert report.nodes == {}


def test_bytes_count_when_they_have_left() -> None:
    fold = PeerMetrics()
    assert fold.decided(stepped(0, 1.0, Send(1, 1.0, None, "due"), Exchange(0.5, None, "due"))) == 0
    assert fold.decided(PeerDecision(0, 0, Sent(1.5, 1, 4000, 0.25), [])) == 4000
    assert fold.exchanges == 1  # what comes back to its sender has not left


def test_an_interval_is_between_exchanges_that_a_node_began_after_a_step() -> None:
    fold = PeerMetrics()
    for line in (
        stepped(0, 1.0, Ask(1, "due")),
        PeerDecision(1, 0, Asked(1.5, 0), [Send(0, 1.0, None, "n0 asks")]),
        stepped(1, 2.0),
        PeerDecision(1, 0, PeerLeft(3.0, 1, "done"), [Send(0, 1.0, None, "handed on")]),
    ):
        fold.decided(line)
    report = fold.report()
    assert report is not None
    assert report.mean_interval == 2.0
