"""The idx format of MNIST and its relatives: two zero bytes, a type code, the number of dimensions, their sizes
(big-endian, 32 bits), then the values row by row. Only unsigned bytes are read, which is all that these data sets use.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError
from paceline.tasks.folders import require_file

UNSIGNED_BYTE = 0x08


def find_idx(folder: Path, name: str) -> Path:
    """The file as it is, or compressed."""
    return require_file(folder, name, f"{name}.gz")


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array in an idx file, decompressed if its name ends in `.gz`."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; fetch the file again") from error
    if len(content) < 4 or content[:3] != bytes((0, 0, UNSIGNED_BYTE)):
        raise DataError(f"{path} starts with {content[:4].hex()}, not with 000008, as idx files of bytes do")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{path} ends within its header of {start} bytes; fetch the file again")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} has {len(content) - start} values where its header promises {math.prod(shape)}; fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
