"""A model split by range over several shards, and its optimizer's state taken apart and put together again.

Each flat buffer is cut into one range per shard, at multiples of `BLOCK` elements, wherever that falls in a tensor: an
element-wise optimizer does not care. Muon and Adafactor look at a whole tensor, so there the ranges end between two
tensors. A shard trains the parameters of its ranges, some of them parts of one, as if they were a model of their own:
`ModelSplit` makes its spec.

Saved state does not depend on how many shards there were. A tensor of a whole parameter has its usual key, such as
`3.exp_avg`; of a part the key says which, such as `3.exp_avg[1024:4096]`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from paceline.core.errors import CheckpointError, OptionError
from paceline.model.flat import Layout
from paceline.model.mass_optimizer import OptimizerSpec
from paceline.model.own_optimizer import OWN
from paceline.model.spec import ModelSpec

BLOCK = 1_024  # elements; pages of every dtype are whole multiples of it or divide it
OF_TENSORS = ("Muon", "Adafactor")  # optimizers that are not element-wise
GRADIENT = "gradient."  # before the number of a flat buffer: the gradient that was applied last
_FILE = re.compile(r"optimizer-\d+\.safetensors")  # of a shard, in a checkpoint
_PART = re.compile(r"(.*)\[(\d+):(\d+)\]")

Tensors = Mapping[str, torch.Tensor]


class Piece(msgspec.Struct, frozen=True):
    """Elements `begin` to `end` of a parameter, all of it if `whole`."""

    parameter: int
    begin: int
    end: int
    whole: bool


class Range(msgspec.Struct, frozen=True):
    """A shard's part of one flat buffer, in elements."""

    buffer: int
    begin: int
    end: int


class ModelSplit:
    """One shard's share of a model."""

    def __init__(self, spec: ModelSpec, shard: int, shards: int) -> None:
        layout = spec.layout
        cuts = _cuts(spec, layout, shards)
        found = [Range(buffer, ends[shard], ends[shard + 1]) for buffer, ends in enumerate(cuts)]
        self.pieces = []
        for number, place in enumerate(layout.places):
            mine = found[place.buffer]
            begin, end = max(place.offset, mine.begin), min(place.offset + place.size, mine.end)
            if begin < end or (not place.size and not shard):
                whole = not place.size or end - begin == place.size
                first, last = (0, place.size) if whole else (begin - place.offset, end - place.offset)
                self.pieces.append(Piece(number, first, last, whole))
        # In the order in which the layout of the pieces meets their dtypes.
        self.ranges = [
            found[buffer] for buffer in dict.fromkeys(layout.places[p.parameter].buffer for p in self.pieces)
        ]
        self._of = {piece.parameter: i for i, piece in enumerate(self.pieces)}
        self.spec = ModelSpec(
            tuple(_entry(spec, piece) for piece in self.pieces), (), self._optimizer(spec.optimizer), (), spec.calls
        )

    def _optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        members = tuple(tuple(self._of[i] for i in group if i in self._of) for group in spec.members)
        return msgspec.structs.replace(spec, members=members)

    def narrow(self, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the shard's parts of the model's flat buffers."""
        return [flat[mine.buffer][mine.begin : mine.end] for mine in self.ranges]

    def own(self, parameters: Iterable[int]) -> frozenset[int]:
        """Return which pieces are of these parameters."""
        return frozenset(self._of[i] for i in parameters if i in self._of)

    # -- state out of the shard --------------------------------------------------------------------------------------

    def named(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return an optimizer's tensors, by the shard's pieces, under keys of the whole model."""
        named: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            position, _, name = key.partition(".")
            piece = self.pieces[int(position)]
            whole = f"{piece.parameter}.{name}"
            if piece.whole:
                named[whole] = tensor
            elif tuple(tensor.shape) == (piece.end - piece.begin,):
                named[f"{whole}[{piece.begin}:{piece.end}]"] = tensor
            elif not piece.begin:  # of the parameter as such, and the same in each of its parts
                named[whole] = tensor
        return named

    def named_gradient(self, flat: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return parts of flat buffers under keys of the whole model."""
        pairs = zip(self.ranges, flat, strict=True)
        return {f"{GRADIENT}{mine.buffer}[{mine.begin}:{mine.end}]": part for mine, part in pairs}

    def numbered(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's plain data with the numbers of the whole model's parameters."""
        if "parts" in data:
            return {**data, "parts": [self.numbered(part) for part in data["parts"]]}
        names = [str(piece.parameter) for piece in self.pieces]
        mass = {names[int(i)]: total for i, total in data["mass"].items()}
        return {**data, "mass": mass, "numbers": self.numbered_values(data["numbers"])}

    def numbered_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain values likewise."""
        return {f"{self.pieces[int(key.partition('.')[0])].parameter}.{key.partition('.')[2]}": value
                for key, value in values.items()}  # fmt: skip

    # -- state into the shard ----------------------------------------------------------------------------------------

    def taken(self, tensors: Tensors, shapes: Sequence[tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """Return this shard's part of the whole model's optimizer state; `shapes` are the parameters'."""
        taken: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            position, _, name = key.partition(".")
            own = self._of.get(int(position))
            if own is None:
                continue
            piece = self.pieces[own]
            if piece.whole or tuple(tensor.shape) != tuple(shapes[piece.parameter]):
                taken[f"{own}.{name}"] = tensor
            else:
                taken[f"{own}.{name}"] = tensor.reshape(-1)[piece.begin : piece.end]
        return taken

    def taken_data(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain data with this shard's own numbers."""
        if "parts" in data:
            return {**data, "parts": [self.taken_data(part) for part in data["parts"]]}
        mass = {str(self._of[int(i)]): total for i, total in data["mass"].items() if int(i) in self._of}
        return {**data, "mass": mass, "numbers": self.taken_values(data["numbers"])}

    def taken_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain values likewise."""
        split = ((key.partition("."), value) for key, value in values.items())
        return {f"{self._of[int(i)]}.{name}": value for (i, _, name), value in split if int(i) in self._of}


def joined_tensors(tensors: Tensors, shapes: Sequence[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Join parts of tensors that shards have named; of a parameter's state, in the parameter's shape."""
    whole: dict[str, torch.Tensor] = {}
    parts: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
    for key, tensor in tensors.items():
        found = _PART.fullmatch(key)
        if found is None:
            whole[key] = tensor
        else:
            parts.setdefault(found[1], []).append((int(found[2]), int(found[3]), tensor))
    for key, known in parts.items():
        known.sort(key=lambda part: part[0])
        ends = [0, *(end for _, end, _ in known)]
        if [begin for begin, _, _ in known] != ends[:-1]:
            raise CheckpointError(f"the parts of {key} that shards have saved are not all of it")
        joined = torch.cat([tensor for _, _, tensor in known])
        position = key.partition(".")[0]
        whole[key] = joined.reshape(shapes[int(position)]) if position.isdigit() else joined
    return whole


def joined_files(files: Mapping[str, Tensors], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Join what the shards of a run have written into a checkpoint; nothing if there were none."""
    parts = {key: tensor for name, tensors in files.items() if _FILE.fullmatch(name) for key, tensor in tensors.items()}
    return joined_tensors(parts, [tuple(shape) for _, shape, _ in spec.parameters])


def joined_data(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the plain data of the shards' optimizers, as `numbered` returns it."""
    first = each[0]
    if "parts" in first:
        return {**first, "parts": [joined_data(parts) for parts in zip(*(data["parts"] for data in each), strict=True)]}
    mass, numbers = ({key: v for data in reversed(each) for key, v in data[field].items()} for field in
                     ("mass", "numbers"))  # fmt: skip
    return {**first, "mass": mass, "numbers": numbers, "fractional": any(data["fractional"] for data in each)}


def shapes_of(spec: ModelSpec) -> list[tuple[int, ...]]:
    """Return the shape of each parameter."""
    return [tuple(shape) for _, shape, _ in spec.parameters]


def require_splittable(spec: ModelSpec) -> None:
    """Refuse an optimizer of the user's own: what it does with other parameters than its own is not known."""
    for optimizer in spec.optimizer.split():
        if OWN in optimizer.name:
            raise OptionError(
                f"--servers: the optimizer {optimizer.name} is a class of your own, which may look at all parameters "
                "at once, and shards see a part of them: leave --servers out, or use one of torch.optim"
            )


def _entry(spec: ModelSpec, piece: Piece) -> tuple[str, tuple[int, ...], str]:
    name, shape, dtype = spec.parameters[piece.parameter]
    return (name, shape, dtype) if piece.whole else (f"{name}[{piece.begin}:{piece.end}]", (piece.end - piece.begin,),
                                                     dtype)  # fmt: skip


def _cuts(spec: ModelSpec, layout: Layout, shards: int) -> list[list[int]]:
    """Return the ends of all shards' ranges of each flat buffer, and 0 before the first."""
    elementwise = all(optimizer.name not in OF_TENSORS for optimizer in spec.optimizer.split())
    cuts = []
    for buffer, length in enumerate(layout.lengths):
        wishes = [shard * length / shards for shard in range(1, shards)]
        if elementwise:
            inner = [min(round(wish / BLOCK) * BLOCK, length) for wish in wishes]
        else:
            borders = [*(place.offset for place in layout.places if place.buffer == buffer), length]
            inner = [_nearest(borders, wish) for wish in wishes]
        cuts.append([0, *inner, length])
    return cuts


def _nearest(borders: Sequence[int], wish: float) -> int:
    return min(borders, key=lambda border: abs(border - wish))
