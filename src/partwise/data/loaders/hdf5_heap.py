"""Check the global heaps of an HDF5 file, in which its texts are stored.

A heap has collections of objects, one after the other (HDF5 File Format Specification, III.E). If an object
has a size of zero, the HDF5 library looks for the next one at the same place forever, and nothing can stop
it. So the sizes are checked first.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

MARK = b"GCOL\x01\0\0\0"  # signature, version, reserved
HEADER = struct.Struct("<HHIQ")  # an object's header: number (0: free space), references, reserved, size


def check_heaps(path: Path) -> None:
    """Raise `ValueError` if an object of a heap has an impossible size."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for first, last in _collections(data):
            place = first + HEADER.size
            while place + HEADER.size <= last:
                number, _, _, size = HEADER.unpack_from(data, place)
                step = HEADER.size + -(-size // 8) * 8 if number else size
                if not HEADER.size <= step <= last - place:
                    raise ValueError(f"an object of {size} bytes in the heap at byte {first}")
                place += step


def _collections(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Where each collection begins and ends."""
    first = data.find(MARK)
    while first >= 0:
        (size,) = struct.unpack_from("<Q", data[first + 8 : first + 16].ljust(8, b"\0"))
        yield first, min(first + size, len(data))
        first = data.find(MARK, first + len(MARK))
