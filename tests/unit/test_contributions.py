"""Workers that compute and bring nothing are named once, and chance names nobody."""

import random

import pytest
import torch

import paceline
from paceline import scenario, strategies, tasks
from paceline.core.ledger import make_ledger
from paceline.records import journal
from paceline.records.metrics import fold
from paceline.server.contributions import MISSED, ROUNDS, Contributions, warning

SLOW = """
seed = 1
[compute]
seconds_per_sample = 0.002
jitter = "lognormal:0.1"
[[workers]]
count = 3
[[workers]]
speed = {speed}
"""
HEAD = f"worker 3 is present, but no push of it was used in {ROUNDS} updates and more: "


def watched(workers):
    found = Contributions()
    for worker in range(workers):
        found.joined(worker)
    return found


def test_who_brings_nothing_is_named_once_after_fifty_updates():
    contributions = watched(4)
    named = [contributions.applied([0, 1, 2]) for _ in range(400)]
    assert [place for place, worker in enumerate(named) if worker is not None] == [ROUNDS - 1]
    assert named[ROUNDS - 1] == 3


def test_of_many_workers_few_pushes_an_update_take_longer_to_say_anything():
    contributions = watched(60)
    named = [contributions.applied([number % 59]) for number in range(int(60 * MISSED) + 2)]
    assert [worker for worker in named if worker is not None] == [59]
    assert named.index(59) == pytest.approx(60 * MISSED, abs=1)


def test_a_worker_that_joins_later_or_has_left_gets_its_time():
    contributions = watched(3)
    for _ in range(40):
        assert contributions.applied([0, 1]) is None
    contributions.left(2)
    contributions.joined(3)
    contributions.joined(0)  # known: not begun anew
    named = [contributions.applied([0, 1]) for _ in range(60)]
    assert [(place, worker) for place, worker in enumerate(named) if worker is not None] == [(ROUNDS - 1, 3)]


def test_what_a_worker_missed_counts_on_after_it_waited_for_data():
    contributions, named = watched(4), []
    for _ in range(6):  # loops of 10 updates
        named += [contributions.applied([0, 1, 2]) for _ in range(10)]
        for worker in range(4):
            contributions.pause(worker)
        for worker in range(4):
            contributions.joined(worker)
    assert [(place, worker) for place, worker in enumerate(named) if worker is not None] == [(ROUNDS - 1, 3)]


def test_updates_while_a_worker_waits_for_data_are_none_that_it_misses():
    contributions = watched(3)
    named = [contributions.applied([0, 1]) for _ in range(40)]
    contributions.pause(2)
    named += [contributions.applied([0, 1]) for _ in range(200)]
    contributions.joined(2)
    assert {*named, *(contributions.applied([0, 1]) for _ in range(9))} == {None}
    assert contributions.applied([0, 1]) == 2


def test_of_several_the_one_that_missed_most_is_looked_at_first():
    contributions = watched(5)
    for _ in range(30):
        contributions.applied([0, 1, 4])
    contributions.left(2)
    contributions.joined(2)  # a stranger, while 3 has missed 30
    for worker in range(5):
        contributions.pause(worker)
        contributions.joined(worker)
    named = [contributions.applied([0, 1, 4]) for _ in range(60)]
    assert [(place, worker) for place, worker in enumerate(named) if worker is not None] == [(19, 3), (49, 2)]


def test_a_worker_that_is_gone_is_forgotten_though_it_waited():
    contributions = watched(3)
    for _ in range(40):
        contributions.applied([0, 1])
    contributions.pause(2)
    contributions.left(2)
    contributions.joined(2)
    assert [contributions.applied([0, 1]) for _ in range(ROUNDS)] == [None] * (ROUNDS - 1) + [2]


def test_pushes_of_workers_that_have_left_count_for_nobody():
    contributions = watched(2)
    assert contributions.applied([7]) is None
    assert Contributions().applied([7]) is None


def test_chance_names_nobody():
    chance, contributions = random.Random(0), watched(20)
    assert [contributions.applied(chance.sample(range(20), 4)) for _ in range(5000)] == [None] * 5000


@pytest.mark.parametrize(
    ("spec", "sampling", "says"),
    [
        ("fastest_k:k=3", "shard", 'its rows are not learned from; give `sampling="epoch"` to `session.batches`, or '
         "`cover=true` to fastest_k, which keeps its late pushes"),
        ("k_async:k=3", "shard", 'its rows are not learned from; give `sampling="epoch"` to `session.batches`'),
        ("adaptive_k", "epoch", "others compute its samples, and its own work is lost; give `cover=true` to "
         "adaptive_k, which keeps its late pushes, or leave the machine out"),
        ("k_async:k=3", "replacement", "others compute its samples, and its own work is lost; give a smaller k, or "
         "leave the machine out"),
        ("adaptive_k_load", "stream", "what it reads is not learned from; give `cover=true` to adaptive_k_load, which "
         "keeps its late pushes, or leave the machine out"),
    ],
)  # fmt: skip
def test_the_warning_says_what_to_do(spec, sampling, says):
    ledger = make_ledger(sampling, 100, 1.0, 0, 4)
    assert warning(3, strategies.build(spec, 0), ledger) == HEAD + says


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("fastest_k:k=3", True),
        ("adaptive_k:start=1,stop=3,burn_in=20", True),
        ("adaptive_k_load:stop=3,burn_in=20,window=10", True),
        ("fastest_k:k=3,cover=true", False),
        ("k_async:k=3", True),
        ("bsp", False),
    ],
)
def test_a_run_says_so_in_journal_and_report(spec, named):
    lines = journal.Lines()
    speed = 0.02 if spec.startswith("fastest_k") else 0.005
    run = paceline.launch(
        tasks.get("linreg"), engine="sim", scenario=scenario.parse(SLOW.format(speed=speed), "slow", None),
        strategy=spec, seed=0, sink=lines, max_versions=75 if spec != "bsp" else 10,
        options={"samples": "80", "features": "3", "lr": "0.01"},
    )  # fmt: skip
    warnings = [line for line in lines if isinstance(line, journal.Observation) and line.what == "warning"]
    found = [line.data["text"] for line in warnings if "no push of it was used" in line.data["text"]]
    assert [text.startswith(HEAD) for text in found] == [True] * named
    assert [text for text in run.summary.warnings if text.startswith(HEAD)] == found
    assert fold(lines).report(None).warnings == run.summary.warnings


def test_a_script_that_opens_a_loop_for_each_epoch_is_told_so_too():
    def train():
        session, model = paceline.init(), torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        session.prepare(model, optimizer)
        rows = torch.utils.data.TensorDataset(torch.zeros(4 * 8 * 15, 1))
        for _ in range(6):
            for (x,) in session.batches(rows, batch_size=8, epochs=1, sampling="shard"):
                optimizer.zero_grad()
                loss = (model(x) ** 2).mean()
                loss.backward()
                session.report(loss=loss)
                optimizer.step()

    cluster = scenario.parse(SLOW.format(speed=0.05), "slow", None)
    run = paceline.launch(train, engine="sim", scenario=cluster, strategy="fastest_k:k=3", evaluate_every="off")
    assert [text[: len(HEAD)] for text in run.summary.warnings] == [HEAD]


def test_rows_of_a_lastingly_slow_worker_are_learned_with_cover_alone():
    """The error floor: rows that are never used are not fitted, as 80 of 160 for 3 features with much noise show."""
    text = '[compute]\nseconds_per_sample = 0.002\njitter = "lognormal:0.1"\n[[workers]]\ncount = 2\n'
    cluster = scenario.parse(f"{text}[[workers]]\ncount = 2\nspeed = 0.4\n", "slow", None)
    errors = {}
    for spec in ("fastest_k:k=2", "fastest_k:k=2,cover=true", "fastest_k:k=4"):
        lines = journal.Lines()
        paceline.launch(
            tasks.get("linreg"), engine="sim", scenario=cluster, strategy=spec, seed=0, sink=lines, max_versions=600,
            evaluate_every="20v", options={"samples": "160", "features": "3", "lr": "0.008", "epochs": "100000"},
        )  # fmt: skip
        found = [float(line.data["metrics"]["error"]) for line in lines
                 if isinstance(line, journal.Observation) and line.what == "evaluation"]  # fmt: skip
        errors[spec] = sum(found[-10:]) / 10
    assert errors["fastest_k:k=4"] < 1e-6
    assert errors["fastest_k:k=2,cover=true"] < 0.5 * errors["fastest_k:k=2"]
