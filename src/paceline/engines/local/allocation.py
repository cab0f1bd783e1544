"""Freed memory stays with the process: arrays of the same size come and go with every push, step and clock.

glibc hands large blocks back to the kernel as soon as they are freed, and the next array of that size pays for every
page anew, which costs more than what is done with it. Up to `KEPT` bytes are kept instead.
"""

import ctypes
import os

KEPT = 64 << 20
LARGEST = 32 << 20  # of a block that is kept; the most that glibc takes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>


def keep_freed_memory() -> bool:
    """Whether it could be arranged; a setting of the user's own stands."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEPT)) and bool(mallopt(_MMAP_THRESHOLD, LARGEST))
