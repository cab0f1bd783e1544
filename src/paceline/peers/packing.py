"""What tensors are sent as: as they are, as bfloat16, or as a byte for each element.

`int8`: an element is a whole number from -127 to 127 times a scale; each row (what the first index selects) has the
scale at which its largest element is 127, so that an element is off by at most 1 / 254 of that. The bytes are those of
all scales, as float32, and then those of the elements. Rows shorter than SHORT share one scale: theirs would cost too
much.
"""

import math
from collections.abc import Sequence

import torch

from paceline.transport.mail import from_bytes

DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}  # None: as the tensor is
SHORT = 32  # elements; a scale for each row of so many costs an eighth more
SCALE_BYTES = 4


def on_wire(tensor: torch.Tensor, wire: str, *, copy: bool) -> torch.Tensor:
    """Return what is sent of a tensor."""
    if wire == "int8":
        return _packed(tensor.detach())
    return tensor.detach().to(DTYPES[wire] or tensor.dtype, copy=copy)


def from_wire(raw: torch.Tensor, wire: str, like: torch.Tensor) -> torch.Tensor:
    """Return bytes that arrived as what `on_wire` gave; ValueError or RuntimeError if they are not of such a tensor."""
    if wire != "int8":
        return from_bytes(raw, DTYPES[wire] or like.dtype, like.shape)
    expected = SCALE_BYTES * _rows(like.shape) + like.numel() if like.numel() else 0
    if raw.numel() != expected:
        raise ValueError(f"{raw.numel()} bytes came of a tensor that is sent as {expected}")
    return raw


def off_wire(values: Sequence[torch.Tensor], wire: str, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors that can be mixed in, of what was sent of tensors like these."""
    if wire != "int8":
        return list(values)
    return [_unpacked(value, tensor) for value, tensor in zip(values, like, strict=True)]


def _rows(shape: Sequence[int]) -> int:
    whole = len(shape) < 2 or math.prod(shape[1:]) < SHORT
    return 1 if whole else shape[0]


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    rows = tensor.reshape(_rows(tensor.shape), -1).float()
    scales = rows.abs().amax(dim=1, keepdim=True) / 127
    steps = torch.where(scales > 0, rows / scales, torch.zeros_like(rows)).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([scales.reshape(-1).view(torch.uint8), steps.reshape(-1).view(torch.uint8)])


def _unpacked(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not like.numel():
        return torch.empty_like(like)
    count = _rows(like.shape)
    scales = packed[: SCALE_BYTES * count].clone().view(torch.float32)  # a copy begins at an address for floats
    steps = packed[SCALE_BYTES * count :].view(torch.int8).reshape(count, -1)
    return (steps.float() * scales[:, None]).reshape(like.shape)
