"""Pixels from the quantized DCT coefficients of 32x32 JPEG images with halved chroma (4:2:0).

An image is 24 blocks of 8x8 in zig-zag order: 4x4 of luma, then 2x2 each of blue and red difference, row by row.
Every stage is linear but for the rounding that the JPEG standard prescribes between them, so each is a matrix product.
"""

import numpy as np
import numpy.typing as npt

BLOCKS = 24
LUMA_BLOCKS = 16
Floats = npt.NDArray[np.float32]

# Rows give red, green and blue from luma and the two centred colour differences (ITU-R BT.601, full range).
_TO_RGB = np.array([[1, 0, 1.402], [1, -0.344136, -0.714136], [1, 1.772, 0]], np.float32)


def decode(coefficients: npt.NDArray[np.int16], quantization: npt.NDArray[np.integer]) -> npt.NDArray[np.uint8]:
    """Decode (n, 24, 64) coefficients with (2, 64) step sizes, luma's first, to (n, 3, 32, 32) RGB bytes."""
    steps: Floats = np.repeat(quantization.astype(np.float32), [LUMA_BLOCKS, BLOCKS - LUMA_BLOCKS], axis=0)
    scaled: Floats = coefficients.astype(np.float32) * steps
    blocks = _to_bytes(np.matmul(scaled, _block_basis()) + 128)
    luma = _assemble(blocks[:, :LUMA_BLOCKS], side=4)
    blue = _enlarge(_assemble(blocks[:, LUMA_BLOCKS : LUMA_BLOCKS + 4], side=2))
    red = _enlarge(_assemble(blocks[:, LUMA_BLOCKS + 4 :], side=2))
    channels = np.stack([luma, blue - 128, red - 128], axis=1)
    return _to_bytes(np.einsum("ij,njyx->niyx", _TO_RGB, channels, optimize=True)).astype(np.uint8)


def zigzag() -> list[tuple[int, int]]:
    """Return each coefficient's (row, column): along anti-diagonals, upwards on even ones, downwards on odd ones."""
    cells = [(row, column) for row in range(8) for column in range(8)]
    return sorted(cells, key=lambda cell: (sum(cell), cell[0] if sum(cell) % 2 else cell[1]))


def _block_basis() -> Floats:
    """Return one row per zig-zag coefficient: the 64 pixels that it stands for."""
    frequency, position = np.arange(8)[:, None], np.arange(8)
    cosines = np.cos((2 * position + 1) * frequency * np.pi / 16) / 2
    cosines[0] /= np.sqrt(2)
    return np.stack([np.outer(cosines[row], cosines[column]).ravel() for row, column in zigzag()]).astype(np.float32)


def _to_bytes(values: Floats) -> Floats:
    return np.clip(np.rint(values), 0, 255)


def _assemble(blocks: Floats, side: int) -> Floats:
    """Assemble (n, side * side, 64) blocks to (n, 8 * side, 8 * side) pixels."""
    grid = blocks.reshape(-1, side, side, 8, 8)
    return grid.swapaxes(2, 3).reshape(-1, 8 * side, 8 * side)


def _enlarge(plane: Floats) -> Floats:
    """Double the size; each pixel is 3/4 its nearest and 1/4 its second-nearest source pixel, in both directions."""
    size = plane.shape[-1]
    target = np.arange(2 * size)
    nearest = target // 2
    second = np.clip(nearest + np.where(target % 2, 1, -1), 0, size - 1)
    weights = np.zeros((2 * size, size), np.float32)
    np.add.at(weights, (target, nearest), 0.75)
    np.add.at(weights, (target, second), 0.25)
    # Halves are rounded up in even columns and down in odd ones, as the usual decoders do, so that no bias builds up.
    rounding = np.where(target % 2, 7 / 16, 8 / 16).astype(np.float32)
    enlarged: Floats = np.floor(weights @ plane @ weights.T + rounding)
    return enlarged
