"""Runs on real processes: what they compute, how they end, what they leave."""

import pytest
import torch
from clusters import Rows, mean_square, network
from launching import launch
from local_jobs import Job, batches_of, unions

from paceline import strategies
from paceline.records import journal
from paceline.records.replay import replay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]


def one_process(rows, versions, make_optimizer):
    model = network()
    optimizer = make_optimizer(model.parameters())
    for indices in versions:
        optimizer.zero_grad()
        mean_square(model, rows.x[indices], rows.y[indices]).backward()
        optimizer.step()
    return model.state_dict()


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def test_bsp_on_four_processes_is_one_process_on_the_union_batch(tmp_path):
    job = Job(tmp_path, size=80, epochs=20, batch_size=4, make_optimizer=momentum, evaluates=False)
    done = launch(job, tmp_path, workers=4)
    versions = unions(journal.read(done.journal), batches_of(tmp_path))
    assert len(versions) == done.summary.versions == 100
    expected = one_process(Rows(80), versions, momentum)
    for name, value in expected.items():
        torch.testing.assert_close(done.model_state[name], value, rtol=0, atol=1e-9)


def test_two_runs_with_one_seed_are_bit_identical(tmp_path):
    states = []
    for number in range(2):
        notes = tmp_path / str(number)
        notes.mkdir()
        states.append(launch(Job(notes, epochs=4), notes, workers=3, seed=3).model_state)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


NEED_OPTIONS = {"fastest_k": "fastest_k:k=2", "k_async": "k_async:k=2"}


OVER_TCP = ("bsp", "ssp", "dasp")  # all others run over TCP in `make soak`, and over shared memory in the parity tests


def cases():
    found = []
    for name in strategies.names():
        for transport in ("shm", "zeromq"):
            marks = () if transport == "zeromq" and name in OVER_TCP else pytest.mark.soak
            found.append(pytest.param(NEED_OPTIONS.get(name, name), transport, marks=marks, id=f"{name}-{transport}"))
    return found


@pytest.mark.parametrize(("strategy", "transport"), cases())
def test_every_strategy_ends_with_every_sample_settled_and_replays(tmp_path, strategy, transport):
    done = launch(
        Job(tmp_path, size=40, epochs=3), tmp_path, strategy=strategy, transport=transport, evaluate_every="1e"
    )
    assert done.ended == "done"
    assert done.summary.samples_used == 120
    assert replay(done.journal).difference is None
    # The evaluator's last numbers are those of the model that comes back.
    model, rows = network(), Rows(40)
    model.load_state_dict(done.model_state)
    assert done.summary.metrics["loss"] == pytest.approx(float(mean_square(model, rows.x, rows.y).detach()), rel=1e-9)
