"""What a scenario does to the messages of nodes: copies are refused, late ones arrive, a partition holds back all."""

import pytest
from clusters import cluster, event
from reference_runs import PEERS, ROWS, Train

import paceline
from attacks import foreign_checker

SPEEDS = (1.0, 0.7, 0.5)
CUT, BEGIN, END = 1, 0.3, 1.1


def journal_of(strategy, events, folder):
    scenario = cluster(*SPEEDS, jitter="lognormal:0.2", network="latency_ms = 5", events=events)
    run = paceline.launch(
        Train((4,)), engine="sim", scenario=scenario, strategy=strategy, evaluate_every="off",
        journal=folder / "journal.jsonl",
    )  # fmt: skip
    assert run.summary.samples_used == 4 * len(ROWS)
    lines = foreign_checker.read(run.journal)
    assert foreign_checker.faults(lines, whole=True) == []
    return lines


def refusals(lines):
    return [line["data"]["reason"] for line in lines if line.get("what") == "refused"]


@pytest.mark.parametrize("strategy", [*PEERS.values(), "gossip:form=pull", "gossip"])
def test_second_copies_are_refused(strategy, tmp_path):
    reasons = refusals(journal_of(strategy, event("duplicate", 0.0, share=1.0), tmp_path))
    assert any("ticket" in reason for reason in reasons)  # of steps that the server was told of twice
    sends_models = "gossip" in strategy
    assert any("has arrived before" in reason for reason in reasons) == sends_models


@pytest.mark.parametrize("strategy", PEERS.values())
def test_messages_may_overtake_each_other(strategy, tmp_path):
    in_order = journal_of(strategy, "", tmp_path)
    assert journal_of(strategy, event("reorder", 0.0, share=0.5), tmp_path) != in_order


@pytest.mark.parametrize("strategy", [*PEERS.values(), "gossip:form=pull"])
def test_nothing_of_a_node_that_is_cut_off_arrives(strategy, tmp_path):
    lines = journal_of(strategy, event("partition", BEGIN, worker=CUT, for_=END - BEGIN), tmp_path)
    inside = [line for line in lines if BEGIN + 0.2 < line.get("event", line).get("at", 0.0) < END]  # steps take 0.1 s
    of_others = [line for line in inside if line["type"] == "peer_decision" and line["node"] != CUT]
    if strategy != PEERS["local_sgd"]:  # whose nodes wait for the one that is cut off
        assert of_others
    assert not [line for line in inside if line["type"] == "peer_decision" and line["node"] == CUT]
    heard = [line["event"] for line in of_others if line["event"]["kind"] in ("received", "asked")]
    assert CUT not in [event["peer"] for event in heard]
    assert not [line for line in inside if line.get("what") == "exchange" and line["worker"] == CUT]
    after = [line for line in lines if line["type"] == "peer_decision" and line["event"]["at"] >= END]
    assert [line for line in after if line["node"] == CUT]
