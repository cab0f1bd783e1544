"""Nodes in real processes that come, go, die and pause at the wrong moment, and models with odd tensors."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from clusters import cluster, event, mean_square, network
from local_nodes import ROWS, Job, decided, evaluate, nodes

import paceline
from paceline.core.peer_actions import Mix, Send
from paceline.core.peer_events import Averaged
from paceline.peers.group_average import GroupAverage
from paceline.records.journal import PeerDecision
from paceline.records.replay import replay
from paceline.server.checkpoint import files as checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

SLOW_LINE = "latency_ms = 200\nbandwidth_mbps = 1000"


@pytest.mark.soak
def test_a_newcomer_is_given_a_model_by_a_node_that_has_nothing_to_do(tmp_path):
    events = event("crash", 0.2, worker=0) + event("rejoin", 0.3, worker=0) + event("crash", 7.0, worker=2)
    scenario = cluster(1.0, 1.0, 0.004, events=events)  # worker 2 sits on the last batch until it dies
    done, _ = nodes("gossip", tmp_path, Job(epochs=1), scenario=scenario)
    assert done.summary.samples_used == len(ROWS)


class DyingJob(Job):
    """Worker 2 dies in the middle of an average, when it has told one of the others its part's mean."""

    def __call__(self):
        post = GroupAverage._post

        def dying(meeting, member, kind, part):
            if kind == "mean" and member == 1 and meeting._group.round == 2 and meeting._node == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            post(meeting, member, kind, part)

        GroupAverage._post = dying
        super().__call__()


@pytest.mark.soak
@pytest.mark.parametrize("line", [SLOW_LINE, ""])
def test_a_node_that_dies_in_the_middle_of_an_average_is_left_out(tmp_path, line):
    scenario = cluster(1.0, 1.0, 1.0, network=line)
    done, lines = nodes("local_sgd:period=2", tmp_path, DyingJob(epochs=1), scenario=scenario)
    assert done.summary.samples_used == len(ROWS)
    assert replay(done.journal).difference is None
    assert set(done.nodes) == {0, 1}
    assert (0, 1, 2) in {line.event.members for line in decided(lines, Averaged)}


@pytest.mark.soak
def test_several_nodes_that_leave_at_once_lose_no_weight(tmp_path):
    events = event("leave", 0.5, worker=1) + event("leave", 0.5, worker=2) + event("leave", 0.52, worker=3)
    scenario = cluster(1.0, 1.0, 1.0, 1.0, events=events)
    _, lines = nodes("gossip:form=weighted", tmp_path, Job(epochs=6), scenario=scenario)
    weight = dict.fromkeys(range(4), 1.0)
    for line in lines:
        if isinstance(line, PeerDecision):
            weight[line.node] -= sum(a.weight for a in line.actions if isinstance(a, Send))
            weight[line.node] += sum(line.event.weight for a in line.actions if isinstance(a, Mix))
    assert weight == pytest.approx({0: 4.0, 1: 0.0, 2: 0.0, 3: 0.0})


class LeavingJob:
    """Worker 1 leaves while worker 2, who has not read what it sent, is about to die."""

    def __call__(self):
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        session.prepare(model, optimizer)
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=4, epochs=8), 1):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            time.sleep(0.02)
            optimizer.step()
            if session.worker == 1 and number == 6:
                break
            if session.worker == 2 and number == 4:
                time.sleep(1.5)
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.soak
def test_a_leaver_whose_reader_dies_gives_its_weight_to_another(tmp_path):
    done, lines = nodes("gossip:form=weighted,peers=ring", tmp_path, LeavingJob(), workers=3)
    assert replay(done.journal).difference is None
    weight, of_leaver = dict.fromkeys(range(3), 1.0), 0
    for line in lines:
        if isinstance(line, PeerDecision):
            weight[line.node] -= sum(a.weight for a in line.actions if isinstance(a, Send))
            weight[line.node] += sum(line.event.weight for a in line.actions if isinstance(a, Mix))
            of_leaver += line.node == 1
    assert weight[1] == pytest.approx(0.0)
    assert weight[0] > 1.5  # its own, and that of the leaver; what was sent to the dead is lost with it
    assert of_leaver < 500  # what comes back is not handed on again at once


class StoppingJob(Job):
    """Worker 0 ends the loop for all, who are in the middle of their steps."""

    def __call__(self):
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        session.prepare(model, optimizer, evaluate=evaluate)
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=4, epochs=8), 1):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()
            if session.worker == 0 and number == 9:
                session.stop("enough")
        torch.save(model.state_dict(), Path(self.notes) / f"model-{session.worker}.pt")


@pytest.mark.soak
def test_a_loop_that_is_stopped_ends_with_one_average_which_everybody_has(tmp_path):
    for attempt in range(3):
        notes = tmp_path / str(attempt)
        notes.mkdir()
        done, _ = nodes("gossip", notes, StoppingJob(notes=notes), workers=3, evaluate_every="3v")
        used = {report.worker: report.samples for report in done.summary.per_worker}
        for name, value in done.model_state.items():
            mean = sum(done.nodes[node][name] * used[node] for node in used) / sum(used.values())
            torch.testing.assert_close(value, mean)
            for node in used:
                assert torch.equal(torch.load(notes / f"model-{node}.pt")[name], value)


class OddJob:
    """Tensors without a byte, among parameters and buffers."""

    def __call__(self):
        session = paceline.init()
        model = network()
        model.nothing = torch.nn.Parameter(torch.zeros(0, 3))
        model.register_buffer("empty", torch.zeros(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer, evaluate=evaluate)
        for x, y, _ in session.batches(ROWS, batch_size=4, epochs=1):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()


@pytest.mark.soak
@pytest.mark.parametrize("machine", ["gossip", "elastic:period=1", "local_sgd:period=2", "adaptive_gossip"])
def test_tensors_without_a_byte_are_no_trouble(tmp_path, machine):
    done, _ = nodes(machine, tmp_path, OddJob(), scenario=cluster(1.0, 1.0), evaluate_every="1e")
    assert done.ended == "done"
    assert done.model_state["nothing"].shape == (0, 3)


@pytest.mark.soak
def test_a_checkpoint_in_mid_run_holds_the_average_of_the_nodes(tmp_path):
    done, _ = nodes("gossip", tmp_path, scenario=cluster(1.0, 1.0), checkpoint_every="16v", max_versions=40)
    taken = sorted((done.folder / checkpoint.FOLDER).iterdir())
    assert taken
    start = {name: value.detach() for name, value in network().named_parameters()}
    for folder in taken:
        found = checkpoint.read(folder)
        if found.run.version:
            names = [name for name, _, _ in found.head.spec.parameters]
            values, _ = found.store(statistics=False).state()
            moved = [not torch.equal(value, start[name]) for name, value in zip(names, values, strict=True)]
            assert all(moved)


@pytest.mark.soak
def test_a_pause_that_outlasts_the_run_does_not_hold_it_up(tmp_path):
    scenario = cluster(1.0, 1.0, events=event("pause", 0.2, worker=1, for_=20.0))
    done, _ = nodes("gossip", tmp_path, Job(epochs=50), scenario=scenario, max_seconds=1)
    assert done.ended == "limit"
    assert done.summary.seconds < 10
