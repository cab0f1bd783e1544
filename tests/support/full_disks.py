"""A disk with little room, for what writes through `os.write`."""

import errno
import os


def writer_with_room(room, afterwards=0):
    """Stands in for `os.write`: takes so many bytes, fails once there is no room, and then has `afterwards`."""
    left, write = [room], os.write

    def full(descriptor, data):
        if left[0] <= 0:
            left[0] = afterwards
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[: left[0]])
        left[0] -= written
        return written

    return full
