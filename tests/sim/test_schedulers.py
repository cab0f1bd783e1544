"""Schedulers in a run: the same rate at the same place on fast, slow and late workers, and alone that of the script."""

import math
from collections import defaultdict

import pytest
import torch
from clusters import UNEVEN, Rows, cluster, event, mean_square, network
from torch.optim import lr_scheduler

import paceline
from paceline.core.errors import OptionError, UserError
from paceline.records.journal import Lines, Observation
from paceline.worker.run_position import RunProgress

ROWS = Rows()
EPOCHS = 4
NEWCOMERS = event("crash", 0.12, worker=1) + event("rejoin", 0.2, worker=1) + event("join", 0.25)


def launch(train, scenario=None, **settings):
    lines = Lines()
    run = paceline.launch(train, engine="sim", scenario=scenario or cluster(*UNEVEN), sink=lines, **settings)
    return run, lines


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    mean_square(model, x, y).backward()
    optimizer.step()


def warm_up(optimizer, steps):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, steps)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULERS = {
    "cosine": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, steps),
    "step": lambda optimizer, steps: lr_scheduler.StepLR(optimizer, max(1, steps // 4), gamma=0.5),
    "one cycle": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps + 1),
    "sequence": warm_up,
    "function": lambda optimizer, steps: lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / (2 * steps)),
}


def rates_by_step(make, steps, count):
    """What the scheduler does by itself."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.01)
    optimizer._opt_called = True
    scheduler, rates = make(optimizer, steps), []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


class Train:
    """A script that steps its scheduler after every batch or every epoch, and notes the rate that each push had."""

    def __init__(self, kind, per_batch, given=True):
        self.make, self.per_batch, self.given = SCHEDULERS[kind], per_batch, given
        self.seen = defaultdict(set)  # rates by the place in the schedule
        self.workers = set()
        self.ended = {}

    def __call__(self):
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rounds = EPOCHS * session.rounds(ROWS, 5)
        steps = rounds if self.per_batch else EPOCHS
        scheduler = self.make(optimizer, steps) if self.given else None
        session.prepare(model, optimizer, scheduler)
        scheduler = scheduler or self.make(optimizer, steps)
        for epoch in range(EPOCHS):
            for x, y, _ in session.batches(ROWS, batch_size=5):
                place = math.floor(session.progress.rounds + 1e-9) if self.per_batch else epoch
                self.seen[place].add(optimizer.param_groups[0]["lr"])
                self.workers.add(session.worker)
                step(model, optimizer, x, y)
                if self.per_batch:
                    scheduler.step()
            if not self.per_batch:
                scheduler.step()
        self.ended[session.worker] = (session.progress.rounds, optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize(("per_batch", "steps"), [(False, EPOCHS), (True, 12)])
def test_every_worker_has_the_same_rate_at_the_same_place(kind, per_batch, steps, given):
    train = Train(kind, per_batch, given)
    launch(train, cluster(*UNEVEN, events=NEWCOMERS), strategy="asp")
    assert train.workers == {0, 1, 2, 3, 4}
    plain = rates_by_step(SCHEDULERS[kind], steps, steps + 1)
    assert train.seen == {place: {plain[place]} for place in train.seen}
    assert len(train.seen) > 7 if per_batch else len(train.seen) == EPOCHS
    assert train.ended == {worker: (rounds, plain[math.floor(rounds + 1e-9) if per_batch else EPOCHS])
                           for worker, (rounds, _) in train.ended.items()}  # fmt: skip
    assert len({rounds for rounds, _ in train.ended.values()}) == 1


@pytest.mark.parametrize("per_batch", [True, False])
def test_nodes_without_a_server_have_the_runs_rate_too(per_batch):
    train = Train("cosine", per_batch, given=False)
    launch(train, cluster(*UNEVEN), strategy="gossip")
    plain = rates_by_step(SCHEDULERS["cosine"], 12 if per_batch else EPOCHS, 13)
    assert train.seen == {place: {plain[place]} for place in train.seen}
    assert len(train.seen) > 3


def test_two_schedulers_each_have_their_own_place():
    ended = {}

    def train():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        session.prepare(model, optimizer)
        by_round = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
        by_epoch = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for epoch in range(3):
            for x, y, _ in session.batches(ROWS, batch_size=5):
                step(model, optimizer, x, y)
                if epoch < 2:
                    by_round.step()
            by_epoch.step()
        ended[session.worker] = (by_round.last_epoch, by_epoch.last_epoch)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 8)

    launch(train, cluster(*UNEVEN, events=event("join", 0.5)), strategy="asp")
    assert ended == dict.fromkeys(range(5), (5, 3))


@pytest.mark.parametrize("places", ["both", "odd"])
def test_one_scheduler_at_two_places_makes_the_steps_of_both(places):
    """By rounds in the first epoch and by epochs after it; or by rounds with a further step after every epoch."""
    ended = {}

    def train():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        session.prepare(model, optimizer)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        for epoch in range(4):
            for x, y, _ in session.batches(ROWS, batch_size=5):
                step(model, optimizer, x, y)
                if places == "both" or epoch == 0:
                    scheduler.step()
            if places == "both" or epoch > 0:
                scheduler.step()
        rounds = math.floor(session.progress.rounds + 1e-9)
        ended[session.worker] = (scheduler.last_epoch, rounds + 4 if places == "both" else 2 + 3)

    launch(train, cluster(*UNEVEN, events=event("join", 0.25)), strategy="asp")
    assert [made == expected for made, expected in ended.values()] == [True] * 5


# -- by a metric -------------------------------------------------------------------------------------------------------


def plateau_run(plateau=None, events=""):
    """Return the rates after each number of evaluations, and the journal's evaluations."""
    seen = defaultdict(set)
    scores = iter([5.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 2.0, 2.0] + [2.0] * 50)

    def train():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

        def evaluate(_):
            score = next(scores)
            return {"error": score, "quality": -score}

        session.prepare(model, optimizer, scheduler, evaluate=evaluate, plateau=plateau)
        for _ in range(3):
            for x, y, _ in session.batches(ROWS, batch_size=5):
                place = session._schedules.position.standing.evaluations
                if session.progress.fraction < 1:  # else the phase is over, and the batch has no effect
                    seen[place].add((optimizer.param_groups[0]["lr"], scheduler.num_bad_epochs, scheduler.best))
                step(model, optimizer, x, y)

    _, lines = launch(train, cluster(*UNEVEN, events=events), strategy="asp", evaluate_every="0.2e")
    metrics = [line.data["metrics"] for line in lines if isinstance(line, Observation) and line.what == "evaluation"]
    return dict(seen), metrics


@pytest.mark.parametrize(("plateau", "metric"), [(None, "error"), ("quality", "quality")])
def test_a_plateau_follows_the_runs_evaluations_on_every_worker(plateau, metric):
    seen, metrics = plateau_run(plateau, NEWCOMERS)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.01)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    plain = {}
    for number, values in enumerate(metrics, 1):
        scheduler.step(values[metric])
        plain[number] = {(optimizer.param_groups[0]["lr"], scheduler.num_bad_epochs, scheduler.best)}
    assert seen == {number: plain[number] for number in seen}
    assert len({rate for states in seen.values() for rate, _, _ in states}) > 2
    assert plateau_run(plateau, NEWCOMERS)[0] == seen


def test_a_plateau_by_a_number_that_is_not_measured_is_refused():
    with pytest.raises(OptionError, match="plateau='f1', but evaluate\\(\\) returns error, quality"):
        plateau_run("f1")


@pytest.mark.parametrize("inside", [True, False])
def test_a_plateau_of_the_scripts_own_metrics_is_stepped_between_loops(inside):
    ended = {}

    def train():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        session.prepare(model, optimizer, scheduler)
        for metric in (3.0, 2.0, 2.0, 2.0):
            for x, y, _ in session.batches(ROWS, batch_size=5):
                step(model, optimizer, x, y)
                if inside:
                    scheduler.step(metric)
            scheduler.step(metric)
        ended[session.worker] = optimizer.param_groups[0]["lr"]

    if inside:
        with pytest.raises(UserError, match="between loops, or give prepare\\(\\) an evaluate"):
            launch(train)
    else:
        launch(train)
        assert ended == dict.fromkeys(range(4), 0.01 / 4)


# -- how far the run is ------------------------------------------------------------------------------------------------


def test_progress_is_that_of_the_run_on_every_worker():
    between, inside = defaultdict(list), defaultdict(list)

    def train():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        session.prepare(model, optimizer)
        between[session.worker].append(session.progress)
        for _ in range(3):
            for x, y, _ in session.batches(ROWS, batch_size=5, epochs=2):
                if session.progress.fraction < 1:  # else the phase is over, and the batch has no effect
                    inside[session.worker].append(session.progress)
                step(model, optimizer, x, y)
            between[session.worker].append(session.progress)

    run, _ = launch(train, cluster(*UNEVEN, events=event("join", 0.8)), strategy="asp")
    start = RunProgress(fraction=0.0, rounds=0.0, epochs=0.0, samples=0)
    rounds = [5.0, 10.0, 14.0]  # 20 samples a round, and 25 in the last loop, which five workers begin
    ends = [RunProgress(1.0, pytest.approx(r), pytest.approx(2.0 * n), 100 * n) for n, r in enumerate(rounds, 1)]
    assert dict(between) == {worker: [start, *ends] for worker in range(5)}
    assert inside[4][0].samples > 100  # it came in a later loop
    for seen in inside.values():
        for progress in seen:
            later = max(0.0, progress.rounds - 10.0)
            assert progress.samples == round((progress.rounds - later) * 20 + later * 25) == round(progress.epochs * 50)
            assert progress.fraction == pytest.approx(progress.samples % 100 / 100)
        assert seen == sorted(seen, key=lambda progress: progress.samples)
    assert run.summary.samples_used == 300


def test_progress_counts_lost_samples_towards_the_loops_end():
    fractions = []

    def train():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        session.prepare(model, optimizer)
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5)):
            fractions.append((session.progress.fraction, session.progress.samples))
            if number % 2:
                step(model, optimizer, x, y)

    launch(train, cluster(1.0))
    assert fractions == [(pytest.approx(n / 10), n // 2 * 5) for n in range(10)]


def test_a_script_on_tables_has_clocks_instead():
    def train():
        session = paceline.init()
        session.table("weights", 3)
        with pytest.raises(UserError, match="use session.clocks"):
            session.progress  # noqa: B018

    launch(train, strategy="bsp")


# -- alone -------------------------------------------------------------------------------------------------------------


def trained(loop, make, per_batch, metric=False):
    """Train on what `loop` hands out, and return the rates and the model, bit by bit."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = make(optimizer)
    rates = []
    for epoch in loop(model, optimizer, scheduler):
        for x, y, *_ in epoch:
            step(model, optimizer, x, y)
            rates.append(optimizer.param_groups[0]["lr"])
            if per_batch:
                scheduler.step()
        if not per_batch:
            scheduler.step(*([mean_square(model, ROWS.x, ROWS.y).item()] if metric else []))
    return rates, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("kind", "per_batch"),
    [("plateau", False), *((kind, per_batch) for kind in SCHEDULERS for per_batch in (True, False))],
)
def test_alone_it_is_the_script_to_the_last_bit(kind, per_batch, given):
    """With batches of 8 the last of an epoch has 2 rows: a scheduler stepped per batch counts it like any other."""
    batches = []  # of each epoch

    def make(optimizer):
        if kind == "plateau":
            return lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
        return SCHEDULERS[kind](optimizer, 7 * EPOCHS if per_batch else EPOCHS)

    def alone(model, optimizer, scheduler):
        session = paceline.init()
        assert session.rounds(ROWS, 8) == 7
        session.prepare(model, optimizer, scheduler if given else None)
        for _ in range(EPOCHS):
            batches.append([])
            yield noted(session.batches(ROWS, batch_size=8))

    def noted(loop):
        for batch in loop:
            batches[-1].append(batch)
            yield batch

    mine = trained(alone, make, per_batch, kind == "plateau")
    plain = trained(lambda *_: batches, make, per_batch, kind == "plateau")
    assert len(mine[0]) == 7 * EPOCHS
    assert len(set(mine[0])) > 2
    assert mine[0] == plain[0]
    assert all(torch.equal(one, other) for one, other in zip(mine[1], plain[1], strict=True))


def test_alone_progress_and_evaluations_are_there_too():
    session = paceline.init()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    session.prepare(model, optimizer, scheduler, evaluate=lambda _: {"loss": 1.0})
    fractions = []
    for x, y, _ in session.batches(ROWS, batch_size=10):
        fractions.append(session.progress.fraction)
        step(model, optimizer, x, y)
    assert fractions == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    assert session.progress == RunProgress(1.0, 5.0, 1.0, 50)
    assert optimizer.param_groups[0]["lr"] == 0.01 / 2**4  # the evaluations before the last grant, but for the first


@pytest.mark.parametrize("strategy", ["bsp", "asp"])
def test_a_newcomer_that_skips_epochs_has_the_schedulers_and_calls_of_the_others(strategy):
    ended = {}

    def train():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        by_epoch, by_round = lr_scheduler.StepLR(optimizer, 1, 0.9), lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        session.prepare(model, optimizer)
        means = []
        for epoch in session.epochs(5):
            for x, y, _ in session.batches(ROWS, batch_size=5, epochs=2):
                step(model, optimizer, x, y)
                by_round.step()
            by_epoch.step()
            means.append((epoch, session.mean(float(epoch))))
        ended[session.worker] = by_epoch.last_epoch, by_round.last_epoch, means

    launch(train, cluster(*UNEVEN, events=event("join", 1.4)), strategy=strategy)
    first, last = ended[0], ended[4]
    assert sorted(ended) == [0, 1, 2, 3, 4]
    assert len({(epochs, rounds) for epochs, rounds, _ in ended.values()}) == 1
    assert first[0] == 5
    assert [epoch for epoch, _ in first[2]] == [0, 1, 2, 3, 4]
    assert 0 < len(last[2]) < 5  # it came later
    assert last[2] == first[2][-len(last[2]) :]
