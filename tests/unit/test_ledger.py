"""Every sample of an epoch is settled exactly once, whoever is fast and whatever is given back."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import CheckpointError, InternalError, OptionError
from paceline.core.ledger import Allotment, EpochLedger, ShardLedger, Tally, make_ledger, whole_epochs


def drain(ledger, worker=0, work=7):
    while (allotment := ledger.allot(worker, work)) is not None:
        yield allotment


@settings(max_examples=200)
@given(
    size=st.integers(1, 60),
    epochs=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20), st.booleans()), max_size=200),
)
def test_each_sample_of_each_epoch_is_used_exactly_once(size, epochs, steps):
    ledger = make_ledger("epoch", size, epochs, seed=3, workers=5)
    used = Counter()

    def settle(allotment):
        used.update((allotment.epoch, int(i)) for i in allotment.indices)
        ledger.settle(allotment.samples)

    open_allotments: list[tuple[int, Allotment]] = []
    for worker, work, returns in steps:
        allotment = ledger.allot(worker, work)
        if allotment is None:
            break
        assert 0 < allotment.samples == len(allotment.indices)
        open_allotments.append((worker, allotment))
        if returns and len(open_allotments) > 1:
            ledger.give_back(*open_allotments.pop(0))
    for _, allotment in open_allotments:
        settle(allotment)
    for allotment in drain(ledger):
        settle(allotment)
    assert used == Counter({(e, i): 1 for e in range(epochs) for i in range(size)})
    assert ledger.finished
    assert not ledger.has_unallotted


def test_an_allotment_never_crosses_the_end_of_an_epoch_and_the_next_one_opens_at_once():
    ledger = make_ledger("epoch", 10, 2, seed=0, workers=1)
    first, short, following = ledger.allot(0, 8), ledger.allot(1, 8), ledger.allot(2, 8)
    assert [(a.epoch, a.samples) for a in (first, short, following)] == [(0, 8), (0, 2), (1, 8)]


def test_returned_samples_are_issued_again_in_their_own_epoch_before_anything_else():
    ledger = make_ledger("epoch", 10, 2, seed=0, workers=1)
    first, _, _ = ledger.allot(0, 8), ledger.allot(1, 8), ledger.allot(2, 8)
    ledger.give_back(0, first)
    again = ledger.allot(3, 16)
    assert again.epoch == 0
    assert sorted(again.indices) == sorted(first.indices)


def test_the_shuffle_is_fixed_by_seed_phase_and_epoch():
    def order(seed, phase=0):
        return [a.indices.tolist() for a in drain(make_ledger("epoch", 20, 2, seed, 1, phase))]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != order(1, phase=1)
    assert order(1)[:3] != order(1)[3:]  # another shuffle in the second epoch


def test_batch_norm_leaves_no_piece_of_one_sample():
    ledger = EpochLedger(9, 9, (0, 0), least=2)
    sizes = [a.samples for a in drain(ledger, work=4)]
    assert sizes == [4, 5]
    ledger = EpochLedger(9, 9, (0, 0), least=2)
    assert min(a.samples for a in drain(ledger, work=1)) == 2


@pytest.mark.parametrize(("size", "epochs", "total"), [(10, 1.1, 12), (10, 0.05, 2), (2, 1.5, 4), (10, 1.2, 12)])
def test_batch_norm_ends_in_no_epoch_of_one_sample(size, epochs, total):
    ledger = make_ledger("epoch", size, epochs, 0, 1, least=2)
    found = list(drain(ledger, work=3))
    assert min(a.samples for a in found) >= 2
    assert sum(a.samples for a in found) == total
    each = Counter((a.epoch, int(i)) for a in found for i in a.indices)
    assert set(each.values()) == {1}


def test_epochs_are_raised_only_where_batch_norm_needs_it():
    assert whole_epochs(10, 1.1, least=2) * 10 == 12
    assert whole_epochs(10, 1.1, least=1) == 1.1
    assert [whole_epochs(10, epochs, least=2) for epochs in (1.5, 3)] == [1.5, 3]
    assert whole_epochs(10, 1e308, least=2) == 1e308  # make_ledger refuses it


@settings(max_examples=200)
@given(
    sampling=st.sampled_from(["epoch", "shard", "replacement"]),
    size=st.integers(6, 40),
    epochs=st.floats(0.05, 3.0),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.sampled_from(["keep", "settle", "back"]))),
)
def test_batch_norm_gets_no_allotment_of_one_sample_whatever_is_given_back(sampling, size, epochs, steps):
    ledger = make_ledger(sampling, size, epochs, seed=3, workers=3, least=2)
    out = []
    for worker, work, fate in steps:
        if (allotment := ledger.allot(worker, work)) is None:
            break
        assert 2 <= allotment.samples == len(allotment.indices)
        if fate == "settle":
            ledger.settle(allotment.samples)
        elif fate == "back":
            ledger.give_back(worker, allotment)
        else:
            out.append((worker, allotment))
    again = make_ledger(sampling, size, epochs, seed=3, workers=3, least=2)
    again.restore(json.loads(json.dumps(ledger.snapshot(out))))
    for number in range(100):
        if (allotment := again.allot(number % 3, 1 + number % 4)) is None:
            break
        assert 2 <= allotment.samples == len(allotment.indices)
        again.settle(allotment.samples)


def test_a_shard_of_one_row_is_refused_for_batch_norm():
    with pytest.raises(OptionError, match="5 samples for 3 workers, .* needs 2 rows per worker: use at most 2"):
        make_ledger("shard", 5, 1, 0, 3, least=2)
    make_ledger("shard", 6, 1, 0, 3, least=2)


def test_a_fraction_of_an_epoch():
    assert sum(a.samples for a in drain(make_ledger("epoch", 10, 1.5, 0, 1))) == 15


def test_settling_more_than_there_is_is_noticed():
    ledger = make_ledger("epoch", 5, 1, 0, 1)
    ledger.settle(5)
    with pytest.raises(InternalError, match="only 5 exist"):
        ledger.settle(1)


def test_shards_are_fixed_rows_gone_through_in_passes():
    ledger = ShardLedger(12, 24, (0, 0), workers=3)
    passes = [ledger.allot(1, 4).indices for _ in range(3)]
    for rows in passes:
        assert sorted(rows) == [1, 4, 7, 10]
    part, rest = ledger.allot(2, 3), ledger.allot(2, 3)
    assert (part.samples, rest.samples) == (3, 1)
    assert sorted([*part.indices, *rest.indices]) == [2, 5, 8, 11]


def test_a_shard_takes_cancelled_rows_again():
    ledger = ShardLedger(12, 24, (0, 0), workers=3)
    first = ledger.allot(0, 2)
    ledger.give_back(0, first)
    assert np.array_equal(ledger.allot(0, 2).indices, first.indices)


@pytest.mark.parametrize("sampling", ["shard", "replacement"])
def test_unbounded_samplings_end_when_enough_was_used(sampling):
    ledger = make_ledger(sampling, 12, 2, seed=0, workers=3)
    while (allotment := ledger.allot(0, 4)) is not None:
        assert ledger.has_unallotted
        ledger.settle(allotment.samples)
    assert ledger.used == 24


def test_draws_with_replacement_cover_the_data():
    ledger = make_ledger("replacement", 5, 100, seed=0, workers=1)
    seen = Counter(int(i) for _ in range(50) for i in ledger.allot(0, 10).indices)
    assert set(seen) == set(range(5))


def test_a_tally_counts():
    tally = Tally(10)
    assert tally.allot(0, 6).samples == 6
    tally.settle(12)
    assert tally.allot(0, 1) is None
    assert tally.finished


@pytest.mark.parametrize(
    ("sampling", "size", "epochs", "workers", "message"),
    [
        ("epoch", 0, 1, 1, "at least 1 sample, not 0"),
        ("epoch", 5, 0, 1, "epochs must be > 0"),
        ("epoch", 5, float("inf"), 1, "finite"),
        ("shard", 5, 1, 6, "6 workers, but 5 samples"),
        ("random", 5, 1, 1, "epoch, shard, replacement"),
    ],
)
def test_bad_ledgers(sampling, size, epochs, workers, message):
    with pytest.raises(OptionError, match=message):
        make_ledger(sampling, size, epochs, 0, workers)


@settings(max_examples=200)
@given(
    sampling=st.sampled_from(["epoch", "shard", "replacement"]),
    size=st.integers(5, 60),
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.sampled_from(["keep", "settle", "back"]))),
)
def test_a_restored_ledger_issues_what_was_out_again_and_then_goes_on_as_the_first(sampling, size, steps):
    ledger, twin = (make_ledger(sampling, size, 2, seed=3, workers=5) for _ in range(2))
    out = {}
    for worker, work, fate in steps:
        allotments = [side.allot(worker, work) for side in (ledger, twin)]
        if allotments[0] is None:
            break
        assert np.array_equal(allotments[0].indices, allotments[1].indices)
        for side, allotment in zip((ledger, twin), allotments, strict=True):
            if fate == "settle":
                side.settle(allotment.samples)
            elif fate == "back":
                side.give_back(worker, allotment)
        if fate == "keep":
            out.setdefault(worker, []).append(allotments[0])
        json.dumps(ledger.snapshot([(w, a) for w in sorted(out) for a in out[w]]))  # disturbs nothing
    outstanding = [(worker, allotment) for worker in sorted(out) for allotment in out[worker]]
    data = json.loads(json.dumps(ledger.snapshot(outstanding)))
    again = make_ledger(sampling, size, 2, seed=3, workers=5)
    again.restore(data)
    assert (again.used, again.lost, again.finished) == (ledger.used, ledger.lost, ledger.finished)
    if sampling == "epoch":
        for _, allotment in outstanding:
            twin.give_back(0, allotment)
        assert _left(again) == _left(twin)
    elif sampling == "shard":
        for worker, allotments in out.items():
            rows = [a for a in allotments if a.epoch == ledger._passes[worker] - 1]
            for allotment in rows:
                assert np.array_equal(again.allot(worker, allotment.samples).indices, allotment.indices)
        for worker in range(5):
            assert _next(again, worker) == _next(ledger, worker)
    else:
        for _, allotment in outstanding:
            assert np.array_equal(again.allot(0, allotment.samples).indices, allotment.indices)
        assert _next(again, 0) == _next(ledger, 0)


def _left(ledger):
    return [(a.epoch, a.indices.tolist()) for a in drain(ledger)]


def _next(ledger, worker):
    allotment = ledger.allot(worker, 4)
    return None if allotment is None else allotment.indices.tolist()


def test_draws_issued_again_are_cut_to_the_work_asked_for():
    ledger = make_ledger("replacement", 12, 2, seed=0, workers=1)
    drawn = ledger.allot(0, 6)
    again = make_ledger("replacement", 12, 2, seed=0, workers=1)
    again.restore(ledger.snapshot([(0, drawn)]))
    parts = [again.allot(0, 4), again.allot(0, 4)]
    assert [part.samples for part in parts] == [4, 2]
    assert [*parts[0].indices, *parts[1].indices] == list(drawn.indices)


def test_the_end_of_a_shards_pass_is_kept_as_a_number():
    ledger = ShardLedger(120, 240, (0, 0), workers=3)
    first, _ = ledger.allot(1, 4), ledger.allot(2, 3)
    assert ledger.snapshot([])["passes"] == [[1, 1, 36], [2, 1, 37]]
    assert ledger.snapshot([(1, first)])["passes"] == [[1, 1, 40], [2, 1, 37]]
    ledger.allot(1, 4)
    ledger.give_back(1, first)  # out of order: these rows have to be named
    assert len(ledger.snapshot([])["passes"][0][2]) == 36


def test_another_amount_of_data_cannot_be_gone_on_with():
    ledger = make_ledger("epoch", 10, 2, 0, 1)
    with pytest.raises(CheckpointError, match="has 20 samples .*the script's 30: resume with the data"):
        make_ledger("epoch", 10, 3, 0, 1).restore(ledger.snapshot([]))


def test_a_tally_is_its_counts():
    tally = Tally(10)
    tally.settle(4)
    again = Tally(10)
    again.restore(json.loads(json.dumps(tally.snapshot([]))))
    assert (again.used, again.finished) == (4, False)
