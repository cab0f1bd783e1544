"""What tensors are sent as, and what is mixed in of it."""

import pytest
import torch

from paceline.peers.packing import SHORT, from_wire, off_wire, on_wire
from paceline.transport.mail import as_bytes

SHAPES = [(), (1,), (7,), (64,), (5, 3), (4, SHORT), (3, 2, 4, 4), (2, 64, 3), (0,), (0, 5), (5, 0)]
WIRES = ["float32", "bfloat16", "int8"]


def travelled(tensor: torch.Tensor, wire: str) -> torch.Tensor:
    """A tensor after its way through bytes."""
    raw = as_bytes(on_wire(tensor, wire, copy=True)).clone()
    (value,) = off_wire([from_wire(raw, wire, tensor)], wire, [tensor])
    return value


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tensor_comes_back_in_its_shape_and_nearly_itself(wire, shape, dtype):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    back = travelled(tensor, wire)
    assert back.shape == tensor.shape
    if tensor.numel():
        most = float(tensor.abs().max())
        # bfloat16 has 8 binary digits, and a float32 of it is cut once more where int8 is mixed into bfloat16.
        allowed = {"float32": 0.0, "bfloat16": most / 256, "int8": 1.001 * most / 254}[wire]
        assert float((back.double() - tensor.double()).abs().max()) <= allowed


def test_bytes_are_a_quarter_and_the_scales():
    tensor = torch.randn(10, 400)
    assert [on_wire(tensor, wire, copy=True).nbytes for wire in WIRES] == [16_000, 8_000, 4_040]


def test_each_long_row_has_a_scale_of_its_own_and_short_ones_share_one():
    long = torch.tensor([[1.0], [1e-4]]) * torch.linspace(-1, 1, SHORT)
    off = (travelled(long, "int8") - long).abs().amax(dim=1)
    assert float(off[1]) <= 1e-4 / 254 * 1.001
    short = torch.tensor([[1.0, 0.5], [1e-4, 1e-4]])
    assert torch.equal(travelled(short, "int8")[1], torch.zeros(2))


def test_zeros_stay_and_so_does_what_the_scale_is_taken_from():
    assert torch.equal(travelled(torch.zeros(3, 40), "int8"), torch.zeros(3, 40))
    tensor = torch.tensor([0.0, -2.5, 1.0])
    assert float(travelled(tensor, "int8")[1]) == pytest.approx(-2.5)


def test_what_is_sent_is_a_copy():
    for wire in WIRES:
        tensor = torch.ones(3, 40)
        sent = on_wire(tensor, wire, copy=True)
        tensor.zero_()
        (back,) = off_wire([sent], wire, [tensor])
        assert torch.equal(back.float(), torch.ones(3, 40))


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_of_another_tensor_are_refused(wire):
    raw = as_bytes(on_wire(torch.ones(3, 41), wire, copy=True)).clone()
    with pytest.raises((ValueError, RuntimeError)):
        from_wire(raw, wire, torch.ones(3, 40))


def test_a_scale_that_is_not_finite_is_seen_when_it_is_unpacked():
    raw = as_bytes(on_wire(torch.ones(2, 40), "int8", copy=True)).clone()
    raw[:4] = torch.tensor([float("nan")]).view(torch.uint8)
    (back,) = off_wire([from_wire(raw, "int8", torch.ones(2, 40))], "int8", [torch.ones(2, 40)])
    assert not bool(torch.isfinite(back).all())
