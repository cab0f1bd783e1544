"""Copies between a region and a CUDA device that overlap with the device's computation.

The driver can overlap copies only from and to page-locked host memory, so the region is registered with it. If that
fails, copies have the same result without overlap, and a warning says so.

Uploads run on the stream that computes, so later kernels see the version. Downloads run on their own stream, which
waits for what has been computed so far and for nothing later.
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
        """Page-lock host memory until `unlock`, or for as long as this object lives."""
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
        """Undo `lock` for these tensors."""
        ours = [one for one in self._locked if any(one is tensor for tensor in tensors)]
        self._locked[:] = [one for one in self._locked if all(one is not tensor for tensor in ours)]
        if ours:
            _unlock(self._device, ours)

    def upload(self, home: torch.Tensor, value: torch.Tensor) -> None:
        """Start a copy to the device; later computations see it."""
        home.copy_(value, non_blocking=True)
        self._uploaded.record(torch.cuda.current_stream(self._device))

    def finish_uploads(self) -> None:
        """Wait until the uploads' host memory may be written again."""
        self._uploaded.synchronize()

    def download(self, home: torch.Tensor, value: torch.Tensor) -> None:
        """Start a copy to the host of what has been computed so far."""
        self._way_down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._way_down):
            home.copy_(value, non_blocking=True)

    def finish_downloads(self) -> None:
        """Wait until the downloads may be read."""
        self._way_down.synchronize()


def _unlock(device: torch.device, locked: list[torch.Tensor]) -> None:
    """Unregister memory, once no copy can still be using it."""
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        torch.cuda.synchronize()
        for tensor in locked:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
    locked.clear()


def _forget_error(device: torch.device) -> None:
    """Clear CUDA's pending error, which would otherwise be reported for the next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
