"""Versions are whole and immutable, merges are exact, statistics are made only for those who ask."""

import pytest
import torch

from paceline.flat import Layout
from paceline.optimizers import OptimizerSpec
from paceline.store import Gradient, ModelSpec, Store, extend, flat_norm

OPTIONS = [{"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}]


def make(statistics=False, buffers=(), dtypes=(torch.float64, torch.float32)):
    values = [torch.zeros(3, dtype=dtypes[0]), torch.zeros(2, 2, dtype=dtypes[1])]
    parameters = tuple((f"p{i}", tuple(v.shape), str(v.dtype)) for i, v in enumerate(values))
    spec = ModelSpec(
        parameters,
        tuple((f"b{i}", tuple(b.shape), str(b.dtype)) for i, b in enumerate(buffers)),
        OptimizerSpec("SGD", tuple(OPTIONS), ((0, 1),)),
        tuple((f"p{i}", i) for i in range(2)),
    )
    return Store(spec, values, buffers, statistics)


def gradient(store, first, second, missing=(), buffers=()):
    flat = store.layout.pack([torch.full((3,), first), torch.full((2, 2), second)])
    return Gradient(flat, frozenset(missing), OPTIONS, list(buffers))


def values(store):
    return [float(view.flatten()[0]) for view in store.layout.views(store.read().flat)]


def test_an_apply_is_the_weighted_mean_times_its_mass():
    store = make()
    store.apply([gradient(store, 1.0, 2.0), gradient(store, 3.0, 4.0)], [0.25, 0.75], [1, 3], stock=False)
    assert values(store) == pytest.approx([-2.5, -3.5])
    store.apply([gradient(store, 1.0, 1.0)], [0.5], [1], stock=False)
    assert values(store) == pytest.approx([-3.0, -4.0])
    assert store.version == 2


def test_a_version_that_was_read_never_changes_and_is_shared():
    store = make()
    first = store.read()
    assert store.read() is first
    store.apply([gradient(store, 1.0, 1.0)], [1.0], [1], stock=False)
    assert float(first.flat[0].sum()) == 0.0
    assert (first.version, store.read().version) == (0, 1)


def test_a_parameter_nobody_has_a_gradient_for_is_left_alone():
    store = make()
    store.optimizer.torch.param_groups[0]["weight_decay"] = 1.0
    store.apply(
        [gradient(store, 1.0, 0.0, missing={1}), gradient(store, 1.0, 0.0, missing={1})],
        [0.5, 0.5],
        [1, 1],
        stock=False,
    )
    assert values(store) == pytest.approx([-1.0, 0.0])
    # One of two has none: it counts as zero, as in the union batch.
    store.apply([gradient(store, 1.0, 2.0), gradient(store, 1.0, 0.0, missing={1})], [0.5, 0.5], [1, 1], stock=False)
    assert values(store)[1] == pytest.approx(-1.0)


def test_statistics_only_for_those_who_ask():
    plain, measured = make(), make(statistics=True)
    for store in (plain, measured):
        first = store.apply([gradient(store, 1.0, 0.0)], [1.0], [1], stock=False)
        second = store.apply([gradient(store, -2.0, 0.0)], [0.5], [1], stock=False)
        if store is plain:
            assert (first.norm, second.inner_product) == (None, None)
        else:
            assert (first.norm, first.inner_product) == (pytest.approx(3**0.5), None)
            assert (second.norm, second.inner_product) == (pytest.approx(12**0.5), pytest.approx(-6.0))


def test_buffers_move_by_the_weighted_change_and_counters_take_the_maximum():
    store = make(buffers=[torch.tensor([10.0]), torch.tensor(5)])
    pushes = [
        gradient(store, 0.0, 0.0, buffers=[torch.tensor([2.0]), torch.tensor(9)]),
        gradient(store, 0.0, 0.0, buffers=[torch.tensor([-4.0]), torch.tensor(7)]),
    ]
    store.apply(pushes, [0.5, 0.25], [2, 1], stock=False)
    assert [float(b) for b in store.read().buffers] == [10.0, 9.0]
    assert store.nbytes == 3 * 8 + 4 * 4 + 4 + 8


def test_an_extended_push_is_the_mean_over_all_its_samples():
    store = make()
    held = gradient(store, 1.0, 2.0, missing={1})
    piece = gradient(store, 4.0, 8.0)
    held.loss, piece.loss = 1.0, 4.0
    total = extend(held, 10, piece, 5)
    assert [float(part[0]) for part in total.flat] == pytest.approx([2.0, 4.0])
    assert total.missing == frozenset()
    assert total.loss == pytest.approx(2.0)
    assert extend(held, 10, piece, 0) is held
    assert extend(held, 0, piece, 5) is piece


def test_a_norm_is_finite_exactly_if_the_values_are():
    layout = Layout([(5,)], [torch.float32])
    flat = layout.zeros()
    assert flat_norm(flat) == 0.0
    flat[0][3] = float("nan")
    assert flat_norm(flat) != flat_norm(flat)
    mixed = [torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)]
    assert flat_norm(mixed) == pytest.approx(5.0)


def test_views_are_apart_and_padding_stays_zero():
    layout = Layout([(3,), (2, 2), ()], [torch.float32] * 3)
    buffers = layout.pack([torch.ones(3), torch.full((2, 2), 2.0), torch.tensor(3.0)])
    assert [view.shape for view in layout.views(buffers)] == [(3,), (2, 2), ()]
    assert float(buffers[0].sum()) == 3 + 8 + 3
    assert layout.nbytes == 8 * 4


def test_half_precision_parameters_have_masters():
    store = make(dtypes=(torch.bfloat16, torch.float32))
    store.apply([gradient(store, -1.0, -1.0)], [1.0], [1], stock=False)
    for _ in range(200):
        store.apply([gradient(store, 1e-3, 1e-3)], [1.0], [1], stock=False)
    assert store.read().flat[0].dtype == torch.bfloat16
    assert values(store) == pytest.approx([0.8, 0.8], abs=0.01)
