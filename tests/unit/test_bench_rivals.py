"""The comparison with rivals on a lab: how a side is tuned, which rows are kept, and which are no comparison."""

import json
import math

import pytest
import torch

import bench_rivals
from bench_rivals import Choice, Ledger, Side, beyond, judge, problems, tune
from contenders import lab_mnist
from contenders.lab_mnist import LabRace
from rival_labs import Outcome

SECONDS = {
    "balanced": 5.0,
    "dasp": 4.0,
    "bsp": 12.0,
    "ddp": 10.0,
    "ddp_split": 4.5,
    "ray_train": 11.0,
    "hivemind": 30.0,
    "torchft": 8.0,
}


def rows(**seconds):
    """Three seeds of every side, a tuned one, and speeds of which the last is a quarter."""
    found = [{"speeds": [20.0, 20.0, 5.0]}]
    for name, reached in {**SECONDS, **seconds}.items():
        common = {"side": name, "settings": "", "momentum": 0.9, "lr": 0.1, "limit_s": 60.0, "full_share": 1.0}
        found.append({**common, "seed": 100, "tuning": True, "reached_s": reached})
        found += [{**common, "seed": seed, "tuning": False, "reached_s": reached} for seed in range(3)]
    return found


def verdicts(found):
    return {bar.name: (bar.ratio, bar.passed) for bar in judge(found)}


# -- verdicts --------------------------------------------------------------------------------------------------------


def test_our_better_side_is_held_against_every_rival():
    found = verdicts(rows())
    assert found["ddp_over_ours"] == (pytest.approx(2.5), True)
    assert found["ddp_split_over_ours"] == (pytest.approx(4.5 / 4.0), True)
    assert all(passed for _, passed in found.values())


def test_a_rival_that_is_sooner_misses_the_bar_and_no_other():
    found = verdicts(rows(torchft=3.9, ddp=7.9))
    assert [name for name, (_, passed) in found.items() if not passed] == ["ddp_over_ours", "torchft_over_ours"]


def test_a_rival_that_never_arrives_took_its_limit_and_we_may_not_miss_a_seed():
    assert verdicts(rows(hivemind=None))["hivemind_over_ours"] == (pytest.approx(15.0), True)
    assert not any(passed for _, passed in verdicts(rows(dasp=None, balanced=None)).values())


def test_ratios_are_of_the_same_seed():
    found = rows()
    for row in found:
        if row.get("side") in ("ddp", "dasp") and row["seed"] == 2:
            row["reached_s"] *= 7  # a hard seed is hard for both
    assert verdicts(found)["ddp_over_ours"][0] == pytest.approx(2.5)


def drop(found, **where):
    return [row for row in found if not all(row.get(name) == value for name, value in where.items())]


def change(found, where, **new):
    return [{**row, **new} if all(row.get(n) == v for n, v in where.items()) else row for row in found]


PLANTED = {
    "tuned on as well": change(rows(), {"tuning": True}, seed=1),
    "several choices": change(rows(), {"side": "ddp", "seed": 1}, lr=0.2),
    "speed": change(rows(), {"speeds": [20.0, 20.0, 5.0]}, speeds=[20.0, 20.0, 15.0]),
    "disturbed": change(rows(), {"side": "dasp", "seed": 0}, full_share=0.5),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_rows_that_are_no_comparison_meet_no_bar(fault):
    (found,) = problems(PLANTED[fault])
    assert fault in found
    assert all(bar.ratio is None and not bar.passed and fault in bar.why for bar in judge(PLANTED[fault]))


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("took no part", drop(rows(), side="torchft")),
        ("different seeds", change(rows(), {"side": "torchft", "seed": 1}, seed=7)),
        ("different seeds", drop(rows(), side="torchft", seed=1)),
    ],
)
def test_a_rival_without_our_seeds_has_no_ratio_and_the_others_have_theirs(fault, found):
    unmeasured = [bar for bar in judge(found) if bar.ratio is None]
    assert [bar.name for bar in unmeasured] == ["torchft_over_ours"]
    assert fault in unmeasured[0].why


def test_two_seeds_are_too_few():
    assert all(bar.ratio is None and "fewer than 3 seeds" in bar.why for bar in judge(drop(rows(), seed=1)))


def test_a_sound_comparison_has_no_problems():
    assert problems(rows()) == []


# -- tuning ----------------------------------------------------------------------------------------------------------


def test_the_grid_is_extended_while_the_best_lies_on_its_edge():
    assert beyond({0.05: 9.0, 0.1: 8.0, 0.2: 7.0}) == 0.4
    assert beyond({0.05: 7.0, 0.1: 8.0}) == 0.025
    assert beyond({0.05: 9.0, 0.1: 8.0, 0.2: 9.0}) == 0.0
    assert beyond({0.05: math.inf, 0.1: math.inf}) == 0.0


def test_tuning_finds_a_best_choice_beyond_the_grid_and_cuts_the_others():
    limits = []

    def timed(choice, seed, limit):
        limits.append(limit)
        seconds = 5 + 10 * (choice.variant == 0) + 3 * abs(math.log2(choice.lr / 0.8)) + 2 * (choice.momentum > 0)
        return seconds if seconds <= limit else math.inf

    assert tune(2, timed, 60.0) == Choice(1, 0.0, 0.8)
    assert min(limits) == 7.5  # 1.5 times the best


# -- rows that are kept ----------------------------------------------------------------------------------------------


def test_a_race_is_made_once_and_again_where_it_was_disturbed_or_cut_too_early(tmp_path):
    path, side, made = tmp_path / "rows.jsonl", Side("ddp", "ddp"), []

    def race(ask):
        made.append(ask.limit_s)
        if ask.seed == 3:
            raise RuntimeError("rank 1 ended")
        return Outcome(None if ask.limit_s < 10 else 9.0, 100, 0.3 if len(made) == 1 else 1.0, 2.0)

    def seconds(seed, limit):
        return Ledger(path, race, "abc", math.inf).seconds(side, Choice(0, 0.9, 0.1), seed, limit, tuning=True)

    assert seconds(1, 5.0) == math.inf
    assert made == [5.0, 5.0]  # the first was disturbed
    assert seconds(1, 4.0) == math.inf
    assert seconds(1, 20.0) == seconds(1, 20.0) == 9.0
    assert made == [5.0, 5.0, 20.0]
    assert seconds(3, 20.0) == math.inf
    assert "rank 1 ended" in json.loads(path.read_text().splitlines()[-1])["error"]


def test_no_race_begins_when_the_minutes_are_over():
    ledger = Ledger(None, lambda ask: pytest.fail("it raced"), "abc", -math.inf)
    with pytest.raises(bench_rivals.TimeIsUpError):
        ledger.seconds(Side("ddp", "ddp"), Choice(0, 0.9, 0.1), 0, 5.0, tuning=True)


# -- what ranks do alike ---------------------------------------------------------------------------------------------


def test_ranks_share_every_shuffle_without_overlap_and_the_judge_reads_what_was_shown(tmp_path):
    data = torch.utils.data.TensorDataset(torch.arange(20), torch.arange(20))
    task = LabRace("", 0.1, 0.9, 3, [4, 3, 2], 9, 0, {})
    first = [next(lab_mnist.batches(data, task, rank))[0].tolist() for rank in range(3)]
    assert [len(each) for each in first] == [4, 3, 2]
    assert len({sample for each in first for sample in each}) == 9

    (tmp_path / "task.json").write_text(json.dumps({**vars(task)}))
    place, model, other = lab_mnist.RankPlace(tmp_path, 0), lab_mnist.build(1), lab_mnist.build(2)
    place.show(model, 8)
    assert not list(tmp_path.glob("snapshot-*"))
    place.show(model, 9)
    (snapshot,) = tmp_path.glob("snapshot-*")
    assert lab_mnist.restore(snapshot, other)[1] == 9
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(one.equal(two) for one, two in pairs)
