"""Versions are whole and immutable, merges are exact, statistics are made only for those who ask."""

import copy

import pytest
import torch

from paceline.core.updates import PushRef
from paceline.model.flat import Layout
from paceline.model.mass_optimizer import EXACT, SCALED, OptimizerSpec, describe
from paceline.model.regions import SLOTS, Region, RegionLayout
from paceline.model.spec import ModelSpec, dtype_of
from paceline.model.store import Gradient, Store, extend, flat_norm, gradient_norm, out_of_slot
from paceline.transport.codec import bytes_of

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
    store.merge([gradient(store, 1.0, 2.0), gradient(store, 3.0, 4.0)], [0.25, 0.75], [1, 3], stock=False)
    assert values(store) == pytest.approx([-2.5, -3.5])
    store.merge([gradient(store, 1.0, 1.0)], [0.5], [1], stock=False)
    assert values(store) == pytest.approx([-3.0, -4.0])
    assert store.version == 2


def test_a_version_that_was_read_never_changes_and_is_shared():
    store = make()
    first = store.read()
    assert store.read() is first
    store.merge([gradient(store, 1.0, 1.0)], [1.0], [1], stock=False)
    assert float(first.flat[0].sum()) == 0.0
    assert (first.version, store.read().version) == (0, 1)


def test_a_parameter_nobody_has_a_gradient_for_is_left_alone():
    store = make()
    store.optimizer.torch.param_groups[0]["weight_decay"] = 1.0
    store.merge(
        [gradient(store, 1.0, 0.0, missing={1}), gradient(store, 1.0, 0.0, missing={1})],
        [0.5, 0.5],
        [1, 1],
        stock=False,
    )
    assert values(store) == pytest.approx([-1.0, 0.0])
    # One of two has none: it counts as zero, as in the union batch.
    store.merge([gradient(store, 1.0, 2.0), gradient(store, 1.0, 0.0, missing={1})], [0.5, 0.5], [1, 1], stock=False)
    assert values(store)[1] == pytest.approx(-1.0)


def test_statistics_only_for_those_who_ask():
    plain, measured = make(), make(statistics=True)
    for store in (plain, measured):
        first = store.merge([gradient(store, 1.0, 0.0)], [1.0], [1], stock=False)
        second = store.merge([gradient(store, -2.0, 0.0)], [0.5], [1], stock=False)
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
    store.merge(pushes, [0.5, 0.25], [2, 1], stock=False)
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
    store.merge([gradient(store, -1.0, -1.0)], [1.0], [1], stock=False)
    for _ in range(200):
        store.merge([gradient(store, 1e-3, 1e-3)], [1.0], [1], stock=False)
    assert store.read().flat[0].dtype == torch.bfloat16
    assert values(store) == pytest.approx([0.8, 0.8], abs=0.01)


KINDS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "betas": (0.8, 0.99), "maximize": True}),
]
SHAPES = [((7, 3), torch.float32), ((11,), torch.float64), ((5, 2), torch.float32), ((), torch.float32)]
MATRICES = [((7, 3), torch.float32), ((11, 2), torch.float64), ((5, 2), torch.float32), ((1, 1), torch.float32)]


def store_and_torch(name, options):
    """A store, and torch's own fused optimizer in two groups over copies of its parameters."""
    shapes = MATRICES if name == "Muon" else SHAPES  # it orthogonalizes matrices and takes nothing else
    values = [torch.randn(shape, dtype=dtype) for shape, dtype in shapes]
    theirs = [torch.nn.Parameter(value.clone()) for value in values]
    groups = [{"params": theirs[:3]}, {"params": theirs[3:], "lr": 0.5}]
    fused = {"fused": True} if name in EXACT else {}
    reference = getattr(torch.optim, name)(groups, **options, **fused)
    spec = ModelSpec(
        tuple((f"p{i}", tuple(v.shape), str(v.dtype)) for i, v in enumerate(values)),
        (),
        describe(reference, {id(p): i for i, p in enumerate(theirs)}),
        tuple((f"p{i}", i) for i in range(len(values))),
    )
    return Store(spec, values, [], statistics=False), theirs, reference


def random_push(store, missing=()):
    shapes = [(shape, dtype_of(dtype)) for _, shape, dtype in store.spec.parameters]
    flat = store.layout.pack([torch.randn(shape, dtype=dtype) for shape, dtype in shapes])
    views = store.layout.views(flat)
    for place in missing:
        views[place].zero_()
    return Gradient(flat, frozenset(missing), list(store.spec.optimizer.groups), views=views)


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_a_step_of_mass_one_is_torchs_own_to_the_last_bit(name, options):
    store, theirs, reference = store_and_torch(name, options)
    for number in range(4):
        # Torch has no fused momentum step in which some parameters have their first gradient.
        push = random_push(store, missing={2} if number == 2 else ())
        for place, (parameter, view) in enumerate(zip(theirs, push.views, strict=True)):
            parameter.grad = None if place in push.missing else view.clone()
        reference.step()
        store.merge([push], [1.0], [1], stock=False)
    assert all(map(torch.equal, store.state()[0], theirs))
    for position, parameter in enumerate(theirs):
        for key, value in reference.state[parameter].items():
            assert torch.equal(store.optimizer.snapshot()[0][f"{position}.{key}"], value)


def test_momentum_of_a_parameter_whose_first_gradient_comes_late():
    store, theirs, _ = store_and_torch("SGD", {"lr": 0.1, "momentum": 0.9})
    alone = [
        torch.optim.SGD([parameter], lr=0.5 if i == 3 else 0.1, momentum=0.9) for i, parameter in enumerate(theirs)
    ]
    for missing in ({0, 2}, {0}, set(), {1}, set()):
        push = random_push(store, missing)
        for place, optimizer in enumerate(alone):
            theirs[place].grad = None if place in missing else push.views[place].clone()
            optimizer.step()
        store.merge([push], [1.0], [1], stock=False)
    for mine, their in zip(store.state()[0], theirs, strict=True):
        torch.testing.assert_close(mine, their.detach())


@pytest.mark.parametrize("name", [*EXACT, *SCALED])
@pytest.mark.parametrize("stock", [False, True])
def test_no_push_is_written_to(name, stock):
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    for options in ({"lr": 0.01}, {"lr": 0.01, **momentum}):
        store, _, _ = store_and_torch(name, options)
        for weights in ([1.0], [0.25], [0.5, 0.25]):
            pushes = [random_push(store) for _ in weights]
            before = [[part.clone() for part in push.flat] for push in pushes]
            store.merge(pushes, weights, [1] * len(weights), stock=stock)
            for push, parts in zip(pushes, before, strict=True):
                assert all(map(torch.equal, push.flat, parts))


def test_a_push_is_applied_alike_from_its_views_and_from_its_flat_memory():
    first, second = (store_and_torch("SGD", {"lr": 0.1})[0] for _ in range(2))
    second.restore(first.snapshot())
    push = random_push(first)
    first.merge([push], [0.5], [1], stock=False)
    push.views = None
    second.merge([push], [0.5], [1], stock=False)
    assert all(map(torch.equal, first.state()[0], second.state()[0]))


def test_memory_for_sums_is_made_when_something_is_summed():
    store = store_and_torch("SGD", {"lr": 0.1})[0]
    store.merge([random_push(store)], [0.5], [1], stock=False)
    assert store._sum is None
    store.merge([random_push(store), random_push(store)], [0.5, 0.5], [1, 1], stock=False)
    assert [part.shape for part in store._sum] == [part.shape for part in store.read().flat]


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("large", [1, 1 << 30])
def test_a_version_is_written_into_given_memory(dtypes, large, monkeypatch):
    monkeypatch.setattr("paceline.model.store.LARGE_BYTES", large)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    store = make(buffers=[torch.tensor([10.0]), torch.tensor(5)], dtypes=dtypes)
    push = gradient(store, -1.00390625, 2.0, buffers=[torch.tensor([2.0]), torch.tensor(9)])
    store.merge([push], [1.0], [1], stock=False)
    flat, buffers = store.layout.zeros(), [torch.zeros(1), torch.tensor(0)]
    assert store.write_to(flat, buffers) == 1
    version = store.read()
    assert all(map(torch.equal, flat, version.flat))
    assert all(map(torch.equal, buffers, version.buffers))
    assert flat[0].dtype == dtypes[0]
    assert store._read is version


def change(store, how, taken):
    """Change the store's parameters in one of the ways there are."""
    if how == "merge":
        store.merge(
            [gradient(store, -1.0, 2.0, buffers=[torch.tensor([2.0]), torch.tensor(9)])], [1.0], [1], stock=False
        )
    elif how == "overwrite":
        store.overwrite([value + 1 for value in store.state()[0]], [torch.tensor([1.0]), torch.tensor(6)])
    elif how == "restore":
        taken.parameters[next(iter(taken.parameters))].add_(1)
        store.restore(taken)
    else:
        store.move_home()


def hand_out(store):
    return store.hand_out(store.layout.zeros(), [torch.zeros(1), torch.tensor(0)])


CHANGES = pytest.mark.parametrize("how", ["merge", "overwrite", "restore", "move_home"])


@CHANGES
@pytest.mark.parametrize("mapped", [False, True], ids=["masters", "mapped by others"])
def test_a_version_that_was_handed_out_is_written_before_the_store_changes(how, mapped):
    dtypes = (torch.float64, torch.float32) if mapped else (torch.bfloat16, torch.float32)
    store = make(buffers=[torch.tensor([10.0]), torch.tensor(5)], dtypes=dtypes)
    if mapped:
        store.move_to([torch.empty_like(flat) for flat in store.read().flat])
    expected, taken = store.read(), copy.deepcopy(store.snapshot())
    handed, sent = hand_out(store), hand_out(store)
    assert handed.lent is None
    sent.unwritten.write()  # by its link
    for part in sent.flat:
        part.zero_()
    change(store, how, taken)
    assert not handed.unwritten.left
    assert all(map(torch.equal, handed.flat, expected.flat))
    assert all(map(torch.equal, handed.buffers, expected.buffers))
    assert not any(part.any() for part in sent.flat)  # what was sent is not written again


@CHANGES
def test_a_version_that_is_sent_from_the_store_stays_as_it_was(how):
    store = make(buffers=[torch.tensor([10.0]), torch.tensor(5)])
    expected, taken = store.read(), copy.deepcopy(store.snapshot())
    views = [bytes_of(part) for part in hand_out(store).lent]  # all that a link keeps of a version
    change(store, how, taken)
    assert [bytes(view) for view in views] == [bytes(bytes_of(part)) for part in expected.flat]


def test_a_store_leaves_memory_that_is_read_and_comes_back_when_it_is_not():
    store = make(buffers=[torch.tensor([10.0]), torch.tensor(5)])
    place = store._flat[0].data_ptr()
    change(store, "merge", None)
    assert store._flat[0].data_ptr() == place  # nobody read it
    lent = hand_out(store).lent
    change(store, "merge", None)
    assert store._flat[0].data_ptr() != place
    assert values(store) == [2.0, -4.0]
    assert [float(part[0]) for part in lent] == [1.0, -2.0]
    lent = [lent, hand_out(store).lent]
    change(store, "merge", None)
    assert hand_out(store).lent is None  # enough is read: this one is copied to where it is sent from
    del lent[0]
    lent.append(hand_out(store).lent)
    change(store, "merge", None)
    assert store._flat[0].data_ptr() == place
    assert values(store) == [4.0, -8.0]


def test_an_extension_in_a_slot_is_summed_there_and_frees_the_older_slot():
    store = make()
    held, piece = gradient(store, 1.0, 2.0, missing={1}), gradient(store, 4.0, 8.0)
    piece.slot, piece.views, held.slot = 1, store.layout.views(piece.flat), 0
    piece.norm = held.norm = 1.0
    total = extend(held, 10, piece, 5)
    assert total.slot == 1
    assert total.norm is None
    assert all(mine is theirs for mine, theirs in zip(total.flat, piece.flat, strict=True))
    assert [float(view.flatten()[0]) for view in total.views] == pytest.approx([2.0, 4.0])
    assert [float(part[0]) for part in held.flat] == [1.0, 2.0]
    assert extend(held, 10, piece, 0).slot == 0
    assert extend(held, 0, piece, 5).slot == 1


def test_a_push_leaves_its_slot_as_it_is():
    store = make()
    push = gradient(store, 1.0, 2.0, missing={1}, buffers=[torch.tensor([2.0]), None])
    push.slot, push.views, push.norm, push.loss = 1, store.layout.views(push.flat), 3.0, 0.5
    moved = out_of_slot(push)
    push.flat[0].fill_(9.0)
    push.buffer_change[0].fill_(9.0)
    assert (moved.slot, moved.views, moved.norm, moved.loss, moved.missing) == (None, None, 3.0, 0.5, {1})
    assert [float(part[0]) for part in moved.flat] == [1.0, 2.0]
    assert float(moved.buffer_change[0]) == 2.0


def test_a_norm_the_worker_has_measured_is_taken_for_it():
    store = make()
    push = gradient(store, 3.0, 0.0, buffers=[torch.tensor([float("inf")])])
    assert gradient_norm(push) != gradient_norm(push)
    push.norm = 7.0
    assert gradient_norm(push) == 7.0


# -- pushes by reference -----------------------------------------------------------------------------------------------


def held(store, ticket, first, samples=1, loss=None):
    """A push that waits at the store, and what a decision knows of it."""
    push = gradient(store, first, 0.0)
    push.loss = loss
    return PushRef(0, 0, ticket, samples, norm=store.hold(ticket, push), loss=loss)


def test_pushes_are_applied_by_reference_once():
    store = make()
    one, two = held(store, 7, 1.0), held(store, 9, 3.0, samples=3)
    assert (one.norm, two.norm) == (pytest.approx(3**0.5), pytest.approx(27**0.5))
    store.apply([one, two], [0.25, 0.75], stock=False)
    assert values(store)[0] == pytest.approx(-2.5)
    with pytest.raises(KeyError):
        store.apply([one], [1.0], stock=False)


def test_a_discarded_push_is_forgotten_and_may_be_discarded_again():
    store = make()
    one = held(store, 7, 1.0)
    store.discard(one)
    store.discard(one)
    with pytest.raises(KeyError):
        store.apply([one], [1.0], stock=False)
    assert store.version == 0


def test_an_extended_push_goes_by_its_last_ticket():
    store = make()
    whole = store.extend(held(store, 7, 1.0, samples=10, loss=1.0), held(store, 8, 4.0, samples=5, loss=4.0))
    assert (whole.ticket, whole.samples, whole.loss) == (8, 15, 2.0)
    store.apply([whole], [1.0], stock=False)
    assert values(store)[0] == pytest.approx(-2.0)
    assert not store._pushes


def test_a_piece_of_a_push_that_brought_nothing_is_all_there_is():
    store = make()
    nothing = PushRef(0, 0, 7, 0)
    whole = store.extend(nothing, held(store, 8, 4.0, samples=5))
    assert (whole.ticket, whole.samples) == (8, 5)
    store.apply([whole], [1.0], stock=False)
    assert values(store)[0] == pytest.approx(-4.0)


def test_a_push_that_waits_keeps_its_slot_until_there_is_no_other():
    store = make()
    layout = RegionLayout(store.spec)
    region, other = (Region(layout, bytearray(layout.nbytes)) for _ in range(2))

    def waits_in(region, slot, ticket, value):
        place = region.slots[slot]
        for part in place.flat:
            part.fill_(value)
        store.hold(ticket, Gradient(place.flat, frozenset(), OPTIONS, slot=slot, views=place.views))

    assert store.free_slot(region, 1) == 1  # that of the last push, which the caches know
    waits_in(region, 1, 7, 1.0)
    waits_in(other, 0, 8, 5.0)
    assert store.free_slot(region, 1) == 0
    for slot in range(SLOTS):
        if slot != 1:
            waits_in(region, slot, 20 + slot, 3.0)
    assert store.free_slot(region, 1) == 1  # where the oldest lay: it was copied to another place
    for part in region.slots[1].flat:
        part.fill_(100.0)
    store.apply([PushRef(0, 0, 7, 1, norm=1.0)], [1.0], stock=False)
    assert values(store)[0] == pytest.approx(-1.0)
