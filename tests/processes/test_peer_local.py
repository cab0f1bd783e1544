"""Nodes in real processes: every machine trains over shared memory and over TCP, and what must hold of models holds.

All machines on both ways are run by `make soak`, one of them by an ordinary run.
"""

import os
import signal
import threading
import time

import pytest
import torch
from clusters import cluster, event, mean_square, network
from local_nodes import EVEN, ROWS, Job, decided, nodes, observed

import paceline
from paceline.core.errors import UserError
from paceline.core.events import Joined as WorkerJoined
from paceline.core.peer_actions import Mix, Send
from paceline.core.peer_events import Averaged, PeerLeft, Received, Sent, Started, Stepped
from paceline.records.journal import Decision, Lines, PeerDecision
from paceline.records.replay import replay
from paceline.server.checkpoint import files as checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

MODEL_BYTES = sum(p.nbytes for p in network().parameters())
MACHINES = [
    "gossip", "gossip:form=pull", "gossip:form=weighted,peers=ring", "gossip:peers=exponential,period=3",
    "elastic:period=2", "adaptive_gossip:warmup=2", "adaptive_gossip:warmup=2,wire=bfloat16",
    "gossip:period=2,wire=int8", "adaptive_gossip:warmup=2,wire=int8",
    "adaptive_gossip:scope=model,form=weighted", "adaptive_elastic:warmup=2,max_interval=5",
    "adaptive_elastic:warmup=2,wire=bfloat16", "local_sgd:period=2",
]  # fmt: skip
WAYS = ("shm", "zeromq")
ORDINARY = [("adaptive_gossip:warmup=2,wire=int8", "zeromq")]  # parity runs every machine over shared memory


def cases():
    pairs = [(machine, way) for machine in MACHINES for way in WAYS]
    assert set(ORDINARY) <= set(pairs)
    return [pytest.param(*pair, marks=() if pair in ORDINARY else (pytest.mark.soak,)) for pair in pairs]


@pytest.mark.parametrize(("machine", "way"), cases())
def test_every_machine_trains_settles_every_sample_and_replays(tmp_path, machine, way):
    done, lines = nodes(machine, tmp_path, Job(notes=tmp_path), transport=way, evaluate_every="1e")
    assert done.ended == "done"
    assert done.summary.samples_used == 4 * len(ROWS)
    losses = [line.data["metrics"]["loss"] for line in observed(lines, "evaluation")]
    assert losses[-1] < losses[0] / 3
    assert replay(done.journal).difference is None
    assert done.summary.exchanges > 0
    assert done.summary.bytes_up > 0
    assert done.summary.peers.gathered_bytes >= 4 * MODEL_BYTES
    (own,) = observed(lines, "evaluation_nodes")
    assert own.data["nodes"] == [0, 1, 2, 3]
    assert done.summary.peers.nodes["loss"].max == max(each["loss"] for each in own.data["metrics"])
    used = {report.worker: report.samples for report in done.summary.per_worker}
    for name, value in done.model_state.items():
        mean = sum(state[name] * used[node] for node, state in done.nodes.items()) / sum(used.values())
        torch.testing.assert_close(value, mean)
        for worker in range(4):  # whoever goes on after the loop has the average
            torch.testing.assert_close(torch.load(tmp_path / f"model-{worker}.pt")[name], value)


@pytest.mark.soak
def test_a_lone_node_trains_as_in_the_simulator_which_is_as_torch_does(tmp_path):
    done, lines = nodes("gossip", tmp_path, workers=1)
    simulated = paceline.launch(Job(), engine="sim", scenario=cluster(1.0), strategy="gossip", evaluate_every="off")
    for name, value in simulated.model_state.items():
        assert torch.equal(value, done.model_state[name])
    assert done.summary.exchanges == 0
    assert len(decided(lines, Stepped)) == done.summary.versions == 96


@pytest.mark.parametrize("way", [pytest.param("shm", marks=pytest.mark.soak), "zeromq"])
@pytest.mark.parametrize(
    "machine",
    [
        "adaptive_gossip:warmup=4",
        pytest.param("gossip:period=2", marks=pytest.mark.soak),
        pytest.param("elastic:period=4", marks=pytest.mark.soak),
        pytest.param("local_sgd:period=4", marks=pytest.mark.soak),
    ],
)
def test_traffic_is_that_of_the_simulator(tmp_path, machine, way):
    real, lines = nodes(machine, tmp_path, transport=way)
    simulated = paceline.launch(Job(), engine="sim", scenario=EVEN, strategy=machine, evaluate_every="off")
    assert real.summary.exchanges == pytest.approx(simulated.summary.exchanges, rel=0.1)
    assert real.summary.bytes_up == pytest.approx(simulated.summary.bytes_up, rel=0.1)
    if machine.startswith("gossip"):
        assert real.summary.bytes_up == len(decided(lines, Sent)) * MODEL_BYTES


def test_weights_are_kept_whatever_is_on_its_way_and_a_leaver_hands_its_own_on(tmp_path):
    job = Job(epochs=6, batches={2: 12})
    done, lines = nodes("gossip:form=weighted", tmp_path, job)
    weight = dict.fromkeys(range(4), 1.0)
    for line in lines:
        if not isinstance(line, PeerDecision):
            continue
        for action in line.actions:
            if isinstance(action, Send):
                weight[line.node] -= action.weight
            if isinstance(action, Mix):
                weight[line.node] += line.event.weight
    assert weight[2] == pytest.approx(0.0)
    assert sum(weight.values()) == pytest.approx(4.0)
    (farewell,) = [line for line in decided(lines, PeerLeft) if line.node == line.event.peer]
    assert (farewell.node, farewell.event.cause, len(farewell.actions)) == (2, "done", 1)
    assert {line.event.cause for line in decided(lines, PeerLeft) if line.event.peer == 2} == {"done"}
    assert set(done.nodes) == {0, 1, 2, 3}


@pytest.mark.soak
def test_a_node_that_is_sent_away_hands_on_its_weight_and_counts_no_more(tmp_path):
    scenario = cluster(1.0, 1.0, 1.0, events=event("leave", 0.6, worker=1))
    done, lines = nodes("gossip:form=weighted", tmp_path, Job(epochs=6), scenario=scenario)
    assert done.summary.samples_used == 6 * len(ROWS)
    (farewell,) = [line for line in decided(lines, PeerLeft) if line.node == line.event.peer]
    assert (farewell.node, farewell.event.cause) == (1, "leave")
    assert set(done.nodes) == {0, 2}


@pytest.mark.soak
@pytest.mark.parametrize("way", ["shm", pytest.param("zeromq", marks=pytest.mark.soak)])
def test_a_newcomer_starts_from_the_model_of_a_node_that_is_there(tmp_path, way):
    scenario = cluster(1.0, 1.0, events=event("join", 0.5))
    job = Job(epochs=6, notes=tmp_path, awaits=2)
    done, lines = nodes("gossip:period=1000", tmp_path, job, scenario=scenario, transport=way)
    joined = next(line.event.at for line in lines if isinstance(line, Decision) and isinstance(line.event, WorkerJoined)
                  and line.event.worker == 2)  # fmt: skip
    first = next(line.event for line in decided(lines, Stepped) if line.node == 2)
    before = [line.event for line in decided(lines, Stepped) if line.node == 0 and line.event.at < joined]
    assert before
    assert first.step > 1
    assert first.loss < before[0].loss / 2  # nobody exchanges anything: it cannot have learned that by itself
    assert set(done.nodes) == {0, 1, 2}


@pytest.mark.soak
def test_a_killed_node_is_missed_by_nobody(tmp_path):
    killed = threading.Event()

    def kill():
        until = time.monotonic() + 60
        file = tmp_path / "pid-1"
        while time.monotonic() < until and not file.exists():
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(int(file.read_text()), signal.SIGKILL)
        killed.set()

    thread = threading.Thread(target=kill)
    thread.start()
    scenario = cluster(1.0, 1.0, 1.0)
    done, lines = nodes("local_sgd:period=2", tmp_path, Job(epochs=8, notes=tmp_path), scenario=scenario)
    thread.join()
    assert killed.is_set()
    assert done.summary.samples_used == 8 * len(ROWS)
    assert set(done.nodes) == {0, 2}
    members = [line.event.members for line in decided(lines, Averaged)]
    assert members[0] == (0, 1, 2)
    assert (0, 2) in members
    assert (0, 1, 2) not in members[members.index((0, 2)) :]


def test_an_interrupted_run_goes_on_with_every_nodes_own_model(tmp_path):
    done, _ = nodes("gossip:period=1000,peers=ring", tmp_path, workers=2, checkpoint_every="1v", max_versions=16)
    newest = checkpoint.newest(done.folder)
    states = [checkpoint.read(newest).state(worker) for worker in (0, 1)]
    assert all(states)
    different = [name for name, value in done.nodes[0].items() if not torch.equal(value, done.nodes[1][name])]
    assert different  # they never exchanged anything
    settings = {"workers": 2, "resume": done.folder, "max_versions": 24, "options": {"lr": "0.0"}}
    again, lines = nodes("gossip:peers=ring,form=push,period=1000", tmp_path, **settings)  # the same, spelt otherwise
    assert again.ended == "limit"
    assert replay(again.journal).difference is None
    assert decided(lines, Stepped)
    for node in (0, 1):
        for name, value in again.nodes[node].items():
            assert torch.equal(value, done.nodes[node][name])


def test_a_stopped_peer_is_not_waited_for(tmp_path):
    scenario = cluster(1.0, 1.0, 1.0, events=event("pause", 0.3, worker=1, for_=2.0))
    done, lines = nodes("gossip", tmp_path, Job(epochs=6), scenario=scenario)
    assert done.summary.samples_used == 6 * len(ROWS)
    meanwhile = [line for line in decided(lines, Stepped) if line.node != 1 and 0.4 < line.event.at < 2.0]
    assert len(meanwhile) > 20
    back = [line for line in decided(lines, Received) if line.event.peer == line.node]
    assert back  # what it did not read came back to those who sent it


@pytest.mark.soak
def test_batch_statistics_are_averaged_with_the_parameters(tmp_path):
    done, _ = nodes("gossip", tmp_path, BatchNormJob(), scenario=cluster(1.0, 1.0))
    used = {report.worker: report.samples for report in done.summary.per_worker}
    name = "1.running_mean"
    mean = sum(state[name] * used[node] for node, state in done.nodes.items()) / sum(used.values())
    torch.testing.assert_close(done.model_state[name], mean)
    counts = {int(state["1.num_batches_tracked"]) for state in done.nodes.values()}
    assert int(done.model_state["1.num_batches_tracked"]) == max(counts)


class TwoLoops:
    def __call__(self):
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for _ in range(2):
            for x, y, _ in session.batches(ROWS, batch_size=4, epochs=1):
                optimizer.zero_grad()
                mean_square(model, x, y).backward()
                optimizer.step()


@pytest.mark.parametrize(
    "machine", ["gossip:form=weighted", pytest.param("local_sgd:period=2", marks=pytest.mark.soak)]
)  # fmt: skip
def test_a_second_loop_begins_anew(tmp_path, machine):
    done, lines = nodes(machine, tmp_path, TwoLoops(), scenario=cluster(1.0, 1.0, 0.5))
    assert done.summary.samples_used == 2 * len(ROWS)
    assert replay(done.journal).difference is None
    starts = decided(lines, Started)
    assert len(starts) == 6
    weight = dict.fromkeys(range(3), 1.0)
    for line in lines:
        if isinstance(line, PeerDecision):
            if isinstance(line.event, Started):
                weight[line.node] = 1.0
            weight[line.node] -= sum(a.weight for a in line.actions if isinstance(a, Send))
            weight[line.node] += sum(line.event.weight for a in line.actions if isinstance(a, Mix))
    assert sum(weight.values()) <= 3.0 + 1e-9
    assert sum(weight.values()) == pytest.approx(3.0, abs=1.0)  # what was posted after a reader's last look is void


class BatchNormJob:
    def __call__(self):
        session = paceline.init()
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for x, y, _ in session.batches(ROWS, batch_size=4, epochs=1):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()


class TableJob:
    def __call__(self):
        paceline.init().table("x", 3)


@pytest.mark.soak
def test_tables_are_refused(tmp_path):
    with pytest.raises(UserError, match="has no server that could keep tables"):
        nodes("gossip", tmp_path, TableJob(), workers=2)


@pytest.mark.soak
def test_lines_reach_a_sink_as_they_are_written(tmp_path):
    heard = Lines()
    done, lines = nodes("gossip", tmp_path, Job(epochs=1), workers=2, sink=heard)
    assert done.ended == "done"
    assert len(decided(heard, Stepped)) == len(decided(lines, Stepped)) == 24
