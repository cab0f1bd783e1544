"""Models for tests of shards, and what a store holds and saves."""

import torch

from paceline.core.updates import Contents
from paceline.model import sharding, tensor_files
from paceline.model.mass_optimizer import describe, joined
from paceline.model.spec import ModelSpec

SHAPES = [(70, 30), (5,), (41, 90), (), (33, 64), (0, 3)]


def values_of(shapes, dtypes=(torch.float32,)):
    torch.manual_seed(3)
    return [torch.randn(shape).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]


def spec_of(values, optimizers, buffers=()):
    names = [f"p{i}" for i in range(len(values))]
    return ModelSpec(
        tuple((name, tuple(v.shape), str(v.dtype)) for name, v in zip(names, values, strict=True)),
        tuple((f"b{i}", tuple(b.shape), str(b.dtype)) for i, b in enumerate(buffers)),
        joined([describe(each, {id(v): i for i, v in enumerate(values)}) for each in optimizers]),
        tuple((name, i) for i, name in enumerate([*names, *(f"b{i}" for i in range(len(buffers)))])),
    )


def model(name="SGD", dtypes=(torch.float32,), buffers=(), **options):
    """Values and a spec; Muon takes matrices alone, and it and Adafactor no empty tensors."""
    shapes = SHAPES if name not in sharding.OF_TENSORS else [shape for shape in SHAPES if 0 not in shape]
    shapes = [shape for shape in shapes if name != "Muon" or len(shape) == 2]
    values = values_of(shapes, dtypes)
    leaves = [torch.nn.Parameter(v) for v in values]
    half = len(leaves) // 2
    groups = [{"params": leaves[:half], "lr": 0.02}, {"params": leaves[half:]}]
    optimizer = getattr(torch.optim, name)(groups, lr=0.01, **options)
    return values, spec_of(leaves, [optimizer], buffers)


def parameters(store):
    return store.state()[0]


def whole(store):
    values, buffers = store.state()
    return values + buffers


def assert_same(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.shape == theirs.shape
        assert torch.equal(mine, theirs)


class Elsewhere:
    """A user's checkpoint: what a store saves, read back."""

    def __init__(self, store, folder):
        taken = store.contents()
        files = {name: {key: t.clone() for key, t in tensors.items()} for name, tensors in taken.files.items()}
        head = dict(taken.head)
        if taken.save is not None:
            sums, more = taken.save(folder)
            for name, (nbytes, _) in sums.items():
                assert (folder / name).stat().st_size == nbytes
                files[name] = tensor_files.read(folder / name)
            head |= more
        self.contents = Contents(files, head)
