"""Copies between a region and a CUDA device that go on while the device computes.

The driver can only copy beside other work if the host's memory is page-locked, so the region is registered with it. If
that fails, every copy still comes to the same, only not beside anything, which is said once.

The way up is part of the stream that computes: what follows sees the version. The way down is a stream of its own that
waits for what has been computed so far and for nothing that follows.
"""

import contextlib
import logging
import weakref
from collections.abc import Sequence

import torch

PORTABLE = 1  # cudaHostRegisterPortable: locked for every device, whichever is current

logger = logging.getLogger("paceline")


class CudaCopies:
    """The copies of one worker."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._way_down = torch.cuda.Stream(device)
        self._uploaded = torch.cuda.Event()
        self._locked: list[torch.Tensor] = []
        weakref.finalize(self, _unlock, self._device, self._locked)

    def lock(self, tensors: Sequence[torch.Tensor]) -> None:
        """Page-lock memory of the host for as long as this object lives."""
        locked = self._locked
        with torch.cuda.device(self._device):
            register = torch.cuda.cudart().cudaHostRegister
            for tensor in tensors:
                if not tensor.nbytes:
                    continue
                error = int(register(tensor.data_ptr(), tensor.nbytes, PORTABLE))
                if error:
                    logger.warning(
                        "%d bytes of shared memory could not be page-locked for %s (CUDA error %d): copies will not "
                        "overlap with computing; raise the limit of locked memory (ulimit -l)",
                        tensor.nbytes, self._device, error,
                    )  # fmt: skip
                    _forget_error(self._device)
                    return
                locked.append(tensor)

    def unlock(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let memory be moved and given back again."""
        ours = [one for one in self._locked if any(one is tensor for tensor in tensors)]
        self._locked[:] = [one for one in self._locked if all(one is not tensor for tensor in ours)]
        if ours:
            _unlock(self._device, ours)

    def upload(self, home: torch.Tensor, value: torch.Tensor) -> None:
        """Start a copy to the device, which whatever is computed from here on sees."""
        home.copy_(value, non_blocking=True)
        self._uploaded.record(torch.cuda.current_stream(self._device))

    def finish_uploads(self) -> None:
        """Wait until the host's side of them may be written again."""
        self._uploaded.synchronize()

    def download(self, home: torch.Tensor, value: torch.Tensor) -> None:
        """Start a copy to the host of what has been computed so far."""
        self._way_down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._way_down):
            home.copy_(value, non_blocking=True)

    def finish_downloads(self) -> None:
        """Wait until they may be read."""
        self._way_down.synchronize()


def _unlock(device: torch.device, locked: list[torch.Tensor]) -> None:
    """No copy may be under way when its memory is let go."""
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        torch.cuda.synchronize()
        for tensor in locked:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
    locked.clear()


def _forget_error(device: torch.device) -> None:
    """CUDA keeps an error until somebody asks; else the next kernel would be blamed for it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
