"""N workers under bsp are one process that trains on the union of what the ledger allotted to each version."""

import pytest
import torch
from clusters import EVEN, UNEVEN, Rows, cluster, mean_square, network
from local_jobs import unions

import paceline
from paceline.records.journal import Lines

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def groups(model):
    """Two groups with options of their own."""
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.03}]


def train_on(scenario, strategy, optimizer_name, epochs, batch_size, seed=0, size=50):
    """The trained state, the samples of every version in order, and what a one-process optimizer starts from."""
    rows = Rows(size)
    pushed: dict[int, list[list[int]]] = {}

    def train():
        session = paceline.init()
        model = network()
        optimizer = OPTIMIZERS[optimizer_name](groups(model))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
        session.prepare(model, optimizer, scheduler)
        mine = pushed.setdefault(session.worker, [])
        for x, y, index in session.batches(rows, batch_size=batch_size, epochs=epochs):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            mine.append(index.tolist())
            optimizer.step()
            scheduler.step()

    lines = Lines()
    run = paceline.launch(train, engine="sim", scenario=scenario, strategy=strategy, seed=seed, sink=lines)
    return run, rows, unions(lines, pushed), lines


def one_process(rows, versions, optimizer_name, round_samples):
    model = network()
    optimizer = OPTIMIZERS[optimizer_name](groups(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    used = 0
    for indices in versions:
        optimizer.zero_grad()
        mean_square(model, rows.x[indices], rows.y[indices]).backward()
        optimizer.step()
        used += len(indices)
        while scheduler.last_epoch < used // round_samples:
            scheduler.step()
    return model.state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("speeds", [EVEN, UNEVEN])
@pytest.mark.parametrize("strategy", ["bsp", "fastest_k:k=4", "balanced"])
def test_equals_one_process_on_the_union(optimizer, speeds, strategy):
    run, rows, versions, _ = train_on(cluster(*speeds, jitter="lognormal:0.2"), strategy, optimizer, 6, batch_size=4)
    assert len(versions) == run.summary.versions
    assert sorted(i for union in versions for i in union) == sorted(list(range(50)) * 6)
    expected = one_process(rows, versions, optimizer, round_samples=16)
    assert run.model_state is not None
    for name, value in expected.items():
        torch.testing.assert_close(run.model_state[name], value, rtol=1e-9, atol=1e-9)


def test_short_rounds_at_the_end_of_an_epoch_are_among_them():
    _, _, versions, _ = train_on(cluster(*EVEN), "bsp", "sgd", 2, batch_size=4)
    assert [len(union) for union in versions] == [16, 16, 16, 14, 16, 16, 6]


def test_balanced_covers_the_global_batch_in_every_version_but_short_ones():
    _, _, versions, _ = train_on(cluster(*UNEVEN), "balanced", "sgd", 8, batch_size=4)
    assert max(map(len, versions)) == 16
    assert sum(len(union) == 16 for union in versions) >= len(versions) - 8


def test_a_seed_fixes_the_model_and_another_changes_the_shuffle():
    states = [train_on(cluster(*UNEVEN), "bsp", "sgd", 1, 4, seed)[0].model_state for seed in (0, 0, 1)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


@pytest.mark.parametrize("speeds", [EVEN, UNEVEN])
def test_guided_pieces_agree_with_bsp_where_rounds_tile_the_epoch(speeds):
    scenario = cluster(*speeds, jitter="lognormal:0.2")
    runs = [train_on(scenario, name, "momentum", 5, 4, size=48) for name in ("bsp", "balanced")]
    assert [sorted(union) for union in runs[0][2]] == [sorted(union) for union in runs[1][2]]
    for name, value in runs[0][0].model_state.items():
        torch.testing.assert_close(runs[1][0].model_state[name], value, rtol=1e-9, atol=1e-9)
