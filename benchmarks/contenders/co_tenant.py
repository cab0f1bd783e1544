"""Another program on a host: it compresses text for as long as it is let live. Needs nothing but the standard library.

python -I -S co_tenant.py READY_FILE
"""

import pathlib
import sys
import zlib

BLOCK = bytes(range(256)) * 256  # 64 KiB


def main() -> None:
    checksum, block = 0, bytearray(BLOCK)
    pathlib.Path(sys.argv[1]).touch()
    while True:
        checksum = zlib.crc32(zlib.compress(block, 6), checksum)
        block[:4] = checksum.to_bytes(4, "big")


if __name__ == "__main__":
    main()
