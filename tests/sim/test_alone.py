"""`python train.py` without a launcher: one worker in its own process, and the same model as plain PyTorch."""

import torch
from clusters import Rows, mean_square, network

import paceline

ROWS = Rows()


def test_alone_it_equals_plain_pytorch_on_the_same_batches():
    session = paceline.init()
    assert (session.worker, session.workers) == (0, 1)
    model, seen = network(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer, evaluate=lambda module: {"x": 1.0})
    for x, y, index in session.batches(ROWS, batch_size=8, epochs=3):
        optimizer.zero_grad()
        mean_square(model, x, y).backward()
        optimizer.step()
        seen.append(index.tolist())
    plain = network()
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    for index in seen:
        reference.zero_grad()
        mean_square(plain, ROWS.x[index], ROWS.y[index]).backward()
        reference.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert sorted(i for index in seen for i in index) == sorted(list(range(50)) * 3)


def test_accumulation_break_stop_and_a_second_phase():
    session = paceline.init()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=1), 1):
        mean_square(model, x, y).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    for _ in session.batches(ROWS, batch_size=5):
        break
    count = 0
    for x, y, _ in session.batches(ROWS, batch_size=5, epochs=10):
        optimizer.zero_grad()
        mean_square(model, x, y).backward()
        count += 1
        if count == 3:
            session.stop("enough")
        optimizer.step()
    assert count == 3


def test_a_stream_and_an_epoch_loop():
    session = paceline.init()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    seen = []
    for epoch in session.epochs(2):
        for x, y in session.batches((ROWS.x[n : n + 5], ROWS.y[n : n + 5]) for n in (0, 5, 10)):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()
            seen.append(epoch)
    assert seen == [0, 0, 0, 1, 1, 1]
    plain = network()
    reference = torch.optim.SGD(plain.parameters(), lr=0.01)
    for n in (0, 5, 10) * 2:
        reference.zero_grad()
        mean_square(plain, ROWS.x[n : n + 5], ROWS.y[n : n + 5]).backward()
        reference.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True))
