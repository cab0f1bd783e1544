"""Files in the safetensors format: written tensor by tensor without a copy, read back with every length checked.

The format's own library copies all tensors into one block of bytes before it writes; a server that saves a model must
not need its memory twice. This module writes the same format: an eight-byte length, a JSON head with the offsets of
each tensor, and the bytes, large elements first so that all of them are aligned.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import safetensors
import safetensors.torch
import torch

from paceline.core.errors import CheckpointError, OptionError

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
ALIGNED = 8  # bytes; the head is padded so that the first tensor starts at a multiple of it


def parts(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file in order, without copying contiguous tensors."""
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    head: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        head[name] = {"dtype": _spelled(name, tensor), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        if tensors[name].numel():
            yield _memory(tensors[name])


def _spelled(name: str, tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided or tensor.dtype not in NAMES:
        kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        raise OptionError(
            f"tensor {name} is of kind {kind}, which a checkpoint cannot hold: make it dense, of a real dtype"
        )
    return NAMES[tensor.dtype]


def _memory(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def write(file: IO[bytes], tensors: Mapping[str, torch.Tensor]) -> int:
    """Write the tensors to an open file; return the checksum of the bytes."""
    checksum = 0
    for part in parts(tensors, {}):
        file.write(part)
        checksum = zlib.crc32(part, checksum)
    return checksum


def read(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a file, each copied to its own memory: floating-point sums depend on alignment."""
    try:
        return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def to_bytes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a file as one block."""
    return b"".join(parts(tensors, metadata))


def from_bytes(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read tensors and metadata from the bytes of a file."""
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{len(data)} bytes of saved state cannot be read: {error}") from error
    length = int.from_bytes(data[:8], "little")
    return tensors, json.loads(data[8 : 8 + length]).get("__metadata__", {})
