"""What the directories of a TIFF say, looked over before Pillow unpacks them.

A directory is a list of entries, each of any number of values. Pillow makes an object of every value, and of every strip or
tile: a file of 60 MB can ask for ten gigabytes. `values` counts them from the entries alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

ORDERS = {b"II": "<", b"MM": ">"}
AS_THEY_ARE = (1, 2, 7)  # bytes, text, anything: kept as they stand in the file
TILES = (273, 324)  # where each strip, each tile begins
WITHIN = (34665, 34853, 40965)  # where EXIF, GPS and Interoperability have directories of their own
MOST_DIRECTORIES = 16


def values(raw: bytes) -> int:
    """How many objects Pillow would make of the first directory of a TIFF, and of those within; 0 where it is no TIFF."""
    return sum(count for tag, kind, count in _entries(raw) if kind not in AS_THEY_ARE or tag in TILES)


def _entries(raw: bytes) -> Iterator[tuple[int, int, int]]:
    """Tag, kind and number of values of every entry that is in the file."""
    order, big = ORDERS.get(raw[:2]), raw[2:3] == b"\x2b"  # numbers of 64 bits, as Pillow tells it
    head, length, entry = ("8xQ", "Q", "HHQQ") if big else ("4xL", "H", "HHLL")
    if order is None or len(raw) < struct.calcsize(order + head):
        return
    left, done = [struct.unpack_from(order + head, raw)[0]], 0
    while left and done < MOST_DIRECTORIES:
        at, done = left.pop(), done + 1
        start, size = at + struct.calcsize(order + length), struct.calcsize(order + entry)
        if start > len(raw):
            continue
        count = min(struct.unpack_from(order + length, raw, at)[0], (len(raw) - start) // size)
        for tag, kind, many, value in struct.iter_unpack(order + entry, memoryview(raw)[start : start + count * size]):
            yield tag, kind, many
            if tag in WITHIN:
                left.append(_pointer(value, kind, order, big))


def _pointer(value: int, kind: int, order: str, big: bool) -> int:
    """One number in the field of a longer one, where it stands first."""
    bits, width = {3: 16, 4: 32}.get(kind, 64), 64 if big else 32
    return value if bits >= width else value >> width - bits if order == ">" else value & (1 << bits) - 1
