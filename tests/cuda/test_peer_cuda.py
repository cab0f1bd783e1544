"""Nodes whose models lie on a CUDA device: messages go through the host's memory, and the average is that of all."""

import pytest
import torch
from clusters import Rows, cluster, event, mean_square, network

import paceline
from paceline.records.replay import replay

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: no device was found"),
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_left"),
]

ROWS = Rows(96)
MACHINES = [
    ("gossip", "shm"), ("gossip:form=weighted", "zeromq"), ("adaptive_gossip:warmup=2,wire=bfloat16", "shm"),
    ("elastic:period=2", "shm"), ("adaptive_elastic:warmup=2", "zeromq"), ("local_sgd:period=2", "shm"),
]  # fmt: skip


class Job:
    def __call__(self):
        session = paceline.init()
        device = torch.device("cuda", 0)
        model = network().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
        session.prepare(model, optimizer, evaluate=evaluate)
        for x, y, _ in session.batches(ROWS, batch_size=4, epochs=4):
            optimizer.zero_grad()
            loss = mean_square(model, x.to(device), y.to(device))
            loss.backward()
            session.report(loss=loss)
            optimizer.step()
        assert all(parameter.device == device for parameter in model.parameters())


def evaluate(model):
    device = next(model.parameters()).device
    return {"loss": float(mean_square(model, ROWS.x.to(device), ROWS.y.to(device)))}


@pytest.mark.parametrize(("machine", "way"), MACHINES)
def test_nodes_on_a_device_train(tmp_path, machine, way):
    scenario = cluster(1.0, 1.0, 1.0, events=event("join", 0.4))
    done = paceline.launch(
        Job(), engine="local", scenario=scenario, strategy=machine, transport=way, evaluate_every="1e", threads=1,
        runs_dir=tmp_path / "runs",
    )  # fmt: skip
    assert done.ended == "done"
    assert done.summary.samples_used == 4 * len(ROWS)
    assert done.summary.loss < 30  # of 99 at first
    assert done.summary.exchanges > 0
    assert replay(done.journal).difference is None
    used = {report.worker: report.samples for report in done.summary.per_worker}
    for name, value in done.model_state.items():
        mean = sum(state[name] * used[node] for node, state in done.nodes.items())
        torch.testing.assert_close(value, mean / sum(used[node] for node in done.nodes))
