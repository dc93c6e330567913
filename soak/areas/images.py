"""Image bytes: the right pixels or a BadImageError that says why, whatever the bytes are.

Each is decoded in at most 2 s of the processor and 1 GiB above what the process had, in silence, and nothing is written,
started or asked of the network. The 26 images of test_images.py; seeded damage to every kind that is read, much of it
with checksums and lengths made good again, so that it is the decoder that meets it; bombs, each decoded in a process of its
own; and scans of folders that hold bad files.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import resource
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dmst.data.images import FORMATS, MOST_ASPECT, MOST_BYTES, MOST_PIXELS, decode
from dmst.errors import BadImageError
from soak.case import Case
from tests.data.test_images import BUILT, CMYK, JPEG, PICTURE, SEEDS, encoded, mutated, oriented, png, test_built
from tests.data.test_scan import Counting, folder_of, scan

TITLE = "Hostile images"
SECONDS, BYTES = 2.0, 2**30
MUTATIONS = 5000
ROOM = 3 * 2**30  # for a bomb that goes off: seen as too much, and no harm to the machine


# --- watched ---------------------------------------------------------------------------------------------------------

TOUCHES = {"os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "os.exec", "os.posix_spawn"}
TOUCHES |= {"os.system", "os.fork", "subprocess.Popen", "socket.connect", "socket.getaddrinfo"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
touched: list[str] | None = None  # while anything is watched


def _heard(event: str, about: tuple[Any, ...]) -> None:
    if touched is not None and (event in TOUCHES or (event == "open" and (about[2] or 0) & WRITING)):
        touched.append(f"{event} {about!r}"[:200])


def peak(start: bool = False) -> int:
    """The most memory that this process held, in bytes; since the last `start`, where the system can tell."""
    try:
        if start:
            Path("/proc/self/clear_refs").write_text("5")
        found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    return 1024 * int(found[1] if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@contextmanager
def watched(folder: Path) -> Iterator[dict[str, Any]]:
    """What is done inside is quick, small and silent, and touches nothing."""
    global touched
    if not getattr(sys, "_dmst_soak_hears", False):
        sys.addaudithook(_heard)
        sys._dmst_soak_hears = True  # type: ignore[attr-defined]
    here, before = Path.cwd(), list(folder.iterdir())
    os.chdir(folder)
    tempfile.tempdir, held, facts = str(folder), peak(start=True), {}
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            filters, begun, touched = list(warnings.filters), time.process_time(), []
            try:
                yield facts
            finally:
                facts["cpu"], touches, touched = round(time.process_time() - begun, 2), touched, None
            assert warnings.filters == filters, "the filters of warnings were changed"
        facts["mib"] = (peak() - held) >> 20
    finally:
        tempfile.tempdir = None
        os.chdir(here)
    assert facts["cpu"] < SECONDS, f"it took {facts['cpu']} s"
    assert facts["mib"] << 20 < BYTES, f"it took {facts['mib']:,} MiB"
    assert not touches, f"it touched {touches}"
    assert not warned, f"it warned: {warned[0].message}"
    assert list(folder.iterdir()) == before, "it left files"


def apart(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """`work` in a fork, with clean memory and a limit on it; what it raises is raised here, and its death is a failure."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        told: dict[str, Any] = {}
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + ROOM,) * 2)
            told = work() or {}
        except BaseException as error:
            told = {"why": f"{type(error).__name__}: {error}"[:400]}
        finally:
            os.write(theirs, json.dumps(told).encode())
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the process ended with status {status}: a signal if it is below 128"
    found: dict[str, Any] = json.loads(said)
    assert "why" not in found, found["why"]
    return found


def built(name: str, folder: Path) -> dict[str, Any]:
    with watched(folder) as facts:
        test_built(name)
    return facts


# --- mutations -------------------------------------------------------------------------------------------------------

STRIPES = PICTURE[:, :, 0] > 127
MORE: list[bytes] = [
    encoded(CMYK, "JPEG"),
    encoded(PICTURE, "JPEG", progressive=True, restart_marker_rows=1),
    encoded(STRIPES, "PNG"),
    encoded(PICTURE, "PNG", save_all=True, append_images=[Image.fromarray(PICTURE[::-1])]),
    encoded(Image.fromarray(PICTURE).convert("RGBA"), "WEBP", save_all=True, append_images=[Image.new("RGBA", (72, 48))]),
    encoded(PICTURE, "GIF", save_all=True, append_images=[Image.fromarray(PICTURE[::-1])], transparency=0),
    encoded(Image.fromarray(PICTURE).quantize(16), "BMP"),
    encoded(PICTURE[:, :, 0].astype(np.uint16) * 257, "TIFF", compression="tiff_adobe_deflate"),
    oriented(6, "TIFF", PICTURE),
    *(encoded(PICTURE, "TIFF", compression=how) for how in ("tiff_adobe_deflate", "packbits", "jpeg")),
    encoded(STRIPES, "TIFF", compression="group4"),
]
STARTS = SEEDS + MORE
Piece = list[bytes]  # a name, what it says, and what follows as it stands


def png_pieces(data: bytes) -> list[Piece]:
    found, at = [], 8
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        found.append([data[at + 4 : at + 8], data[at + 8 : end]])
        at = end + 4
    return found


def png_of(pieces: list[Piece]) -> bytes:
    body = (struct.pack(">I", len(x)) + name + x + struct.pack(">I", zlib.crc32(name + x)) for name, x in pieces)
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def riff_pieces(data: bytes) -> list[Piece]:
    found, at = [], 12
    while at + 8 <= len(data):
        end = at + 8 + int.from_bytes(data[at + 4 : at + 8], "little")
        found.append([data[at : at + 4], data[at + 8 : end]])
        at = end + end % 2
    return found


def riff_of(pieces: list[Piece]) -> bytes:
    body = b"".join(name + struct.pack("<I", len(x)) + x + b"\0" * (len(x) % 2) for name, x in pieces)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def jpeg_pieces(data: bytes) -> list[Piece]:
    found, at = [], 2
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        found.append([data[at : at + 2], data[at + 4 : end]])
        at = end
    return [*found, [b"", data[at:]]]


def jpeg_of(pieces: list[Piece]) -> bytes:
    body = (name + struct.pack(">H", len(x) + 2 & 0xFFFF) + x if name else x for name, x in pieces)
    return b"\xff\xd8" + b"".join(body)


def tiff_pieces(data: bytes) -> list[Piece]:
    """The entries of the first directory, and at the end what is before and behind it."""
    at = int.from_bytes(data[4:8], "little")
    end = at + 2 + 12 * int.from_bytes(data[at : at + 2], "little")
    return [*([b"", data[k : k + 12]] for k in range(at + 2, end, 12)), [b"", data[:at]], [b"", data[end:]]]


def tiff_of(pieces: list[Piece]) -> bytes:
    *entries, (_, before), (_, behind) = pieces
    return before + struct.pack("<H", len(entries)) + b"".join(x for _, x in entries) + behind


def block_pieces(data: bytes) -> list[Piece]:
    return [[b"", data[at : at + 13]] for at in range(0, len(data), 13)]  # 13: the header of a GIF


def block_of(pieces: list[Piece]) -> bytes:
    return b"".join(x for _, x in pieces)


KINDS: dict[bytes, tuple[Callable[[bytes], list[Piece]], Callable[[list[Piece]], bytes]]] = {
    b"\x89PNG": (png_pieces, png_of),
    b"RIFF": (riff_pieces, riff_of),
    b"\xff\xd8": (jpeg_pieces, jpeg_of),
    b"II": (tiff_pieces, tiff_of),
    b"": (block_pieces, block_of),
}
EDGES = (0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 7071, 2**24 - 1, 2**31 - 1, 2**31, 2**32 - 1)


def number(chance: random.Random, data: bytes) -> bytes:
    """An edge value over one, two or four bytes: sizes, counts and offsets are among them."""
    width = chance.choice((1, 2, 4))
    edge = (chance.choice(EDGES) & (1 << 8 * width) - 1).to_bytes(width, chance.choice(("big", "little")))  # type: ignore[arg-type]
    at = chance.randrange(max(len(data) - width, 1))
    return data[:at] + edge + data[at + width :]


def in_pieces(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Pieces dropped, doubled, moved, taken of another file or changed inside; lengths and checksums fit again."""
    split, join = next(pair for start, pair in KINDS.items() if data.startswith(start))
    pieces = split(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(max(len(pieces) - 2, 1))
        match chance.randrange(6):
            case 0:
                del pieces[at]
            case 1:
                pieces[at:at] = [list(pieces[at])] * chance.choice((1, 2, 300))
            case 2:
                pieces.insert(chance.randrange(len(pieces)), pieces.pop(at))
            case 3:
                pieces[at] = list(chance.choice(split(other) if other[:2] == data[:2] else pieces))
            case 4 | 5:
                pieces[at][1] = number(chance, pieces[at][1]) if pieces[at][1] else b"\xff"
        if len(pieces) < 3:
            break
    return join(pieces)


def cut(chance: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: chance.randrange(len(data))]


def spliced(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """The beginning of one and the end of another, or the inside of one in the other."""
    at, to = chance.randrange(len(data)), chance.randrange(len(other))
    return data[:at] + other[to:] if chance.random() < 0.5 else data[:at] + other[to : to + 400] + data[at:]


def moved(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Two stretches change places, or one is there many times."""
    a, b, c = sorted(chance.randrange(len(data)) for _ in range(3))
    if chance.random() < 0.5:
        return data[:a] + data[b:c] + data[a:b] + data[c:]
    return data[:a] + data[a:b] * chance.choice((2, 3, 50)) + data[b:]


def numbers(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """In the header, where sizes are, and anywhere."""
    head = chance.randint(16, 200)
    for _ in range(chance.randint(1, 3)):
        data = number(chance, data[:head]) + data[head:]
    return number(chance, data) if chance.random() < 0.3 else data


def flips(chance: random.Random, data: bytes, other: bytes) -> bytes:
    return mutated(data, chance.randrange(2**32))


DAMAGE = (in_pieces, in_pieces, in_pieces, in_pieces, flips, flips, numbers, cut, spliced, moved)


def mutation(seed: int) -> bytes:
    chance = random.Random(seed)
    return DAMAGE[seed // len(STARTS) % len(DAMAGE)](chance, STARTS[seed % len(STARTS)], chance.choice(STARTS))


def shape_of(data: bytes) -> list[int]:
    with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        return sorted(image.size)


def mutations(seed: int, folder: Path) -> None:
    data, grey = mutation(seed), seed % 5 == 0
    pixels = None
    with watched(folder):
        try:
            pixels, told = decode(data, "it", grey=grey), ""
        except BadImageError as bad:
            told = str(bad)
    if pixels is None:
        assert re.fullmatch("it: .{4,500}", told), told  # one line
        assert "MemoryError" not in told, told
    if pixels is not None:
        assert pixels.dtype == np.uint8 and pixels.shape[2:] == ((1,) if grey else (3,)), f"{pixels.dtype} {pixels.shape}"
        assert pixels.flags.c_contiguous and pixels.flags.writeable
        low, high = sorted(pixels.shape[:2])
        assert low >= 1 and low * high <= MOST_PIXELS and high <= MOST_ASPECT * low, f"{pixels.shape}"
        assert [low, high] == shape_of(data), f"{pixels.shape} instead of {shape_of(data)}"
        assert np.array_equal(decode(data, grey=grey), pixels), "decoded twice, it is another picture"


# --- bombs -----------------------------------------------------------------------------------------------------------

WIDE, HIGH = 8000, 6250  # as many pixels as are read


def chunk(name: bytes, x: bytes = b"") -> bytes:
    return png_of([[name, x]])[8:]


def png_with(more: bytes) -> bytes:
    """A sound PNG with something more after its header."""
    return SEEDS[2][:33] + more + SEEDS[2][33:]


def png_of_data(data: bytes) -> bytes:
    return png(64, 64).replace(chunk(b"IDAT", zlib.compress(b"")), chunk(b"IDAT", data))


def text(data: bytes) -> bytes:
    return chunk(b"zTXt", b"a\0\0" + data)


def jpeg_with(more: bytes) -> bytes:
    return JPEG[:2] + more + JPEG[2:]


def large_png(colour: int, bits: int, line: int, filter: int, before: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", WIDE, HIGH, bits, colour, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress((bytes([filter]) + bytes(line)) * HIGH, 1))
    return b"\x89PNG\r\n\x1a\n" + header + before + pixels + chunk(b"IEND", b"")


def large(kind: str, mode: str, **options: Any) -> bytes:
    return encoded(Image.new("RGBA", (1, 1), (77, 10, 30, 99)).convert(mode).resize((WIDE, HIGH)), kind, **options)


def inflates(size: int) -> bytes:
    """A zlib stream of `size` zeros that takes no time to make, and never says that it ends."""
    packer = zlib.compressobj(9)
    start = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return start + again * (size // 2**24 - 1)


def jpeg_of_size(width: int, height: int) -> bytes:
    at = JPEG.index(b"\xff\xc0")
    return JPEG[: at + 5] + struct.pack(">HH", height, width) + JPEG[at + 9 :]


def webp_of_size(width: int, height: int) -> bytes:
    """What it says of its canvas, and of its pixels."""
    canvas = struct.pack("<I", 16) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    pixels = b"\x2f" + struct.pack("<I", (width - 1 & 0x3FFF) | (height - 1 & 0x3FFF) << 14) + bytes(20)
    return riff_of([[b"VP8X", canvas], [b"VP8L", pixels]])


def bmp_of_size(width: int, height: int) -> bytes:
    data = encoded(PICTURE, "BMP")
    return data[:18] + struct.pack("<ii", width, height) + data[26:]


def gif_start() -> int:
    """Where the palette ends and the pictures begin."""
    assert SEEDS[7][10] & 0x80, "it has a palette"
    return 13 + 3 * 2 ** ((SEEDS[7][10] & 7) + 1)


def gif_with(more: bytes) -> bytes:
    return SEEDS[7][: gif_start()] + more + SEEDS[7][gif_start() :]


UNITS = {1: "B", 3: "H", 4: "I", 5: "II"}
Entry = tuple[int, int, list[int]]  # a tag, a type, values


def tiff(data: bytes, *entries: Entry, within: list[Entry] | None = None) -> bytes:
    """A TIFF of these entries, with `data` from its eighth byte on, and more entries in a directory of EXIF."""
    file = bytearray(8) + data

    def directory(entries: list[Entry]) -> int:
        rows = b""
        for tag, kind, values in sorted(entries):
            raw, count = struct.pack(f"<{len(values)}{UNITS[kind][0]}", *values), len(values) // len(UNITS[kind])
            where = raw.ljust(4, b"\0") if len(raw) <= 4 else struct.pack("<I", len(file))
            rows += struct.pack("<HHI", tag, kind, count) + where
            file.extend(raw if len(raw) > 4 else b"")
        file.extend(struct.pack("<H", len(entries)) + rows + bytes(4))
        return len(file) - len(rows) - 6

    inside = [(34665, 4, [directory(within)])] if within else []
    file[:8] = b"II*\0" + struct.pack("<I", directory([*entries, *inside]))
    return bytes(file)


def grey_tiff(width: int, height: int, data: bytes, *entries: Entry, packed: int = 1, **more: Any) -> bytes:
    """One byte a pixel, or what `packed` says."""
    tags: dict[int, tuple[int, list[int]]] = {
        256: (4, [width]), 257: (4, [height]), 258: (3, [8]), 259: (3, [packed]), 262: (3, [1]), 277: (3, [1]),
        278: (4, [height]), 273: (4, [8]), 279: (4, [len(data)]),
    } | {tag: (kind, values) for tag, kind, values in entries}  # fmt: skip
    return tiff(data, *((tag, kind, values) for tag, (kind, values) in tags.items()), **more)


def strips(width: int, height: int, data: bytes, size: int, packed: int = 1) -> bytes:
    """A strip for every row, all of them the same bytes."""
    return grey_tiff(width, height, data, (273, 4, [8] * height), (279, 4, [size] * height), (278, 4, [1]), packed=packed)


def tiles(count: int, side: int, kind: int = 4) -> bytes:
    size = (2000, 2000, bytes(side * side))
    return grey_tiff(*size, (322, 4, [side]), (323, 4, [side]), (324, kind, [8] * count), (325, 4, [1])).replace(
        struct.pack("<HHI", 273, 4, 1),
        struct.pack("<HHI", 266, 4, 1),  # no strips beside them
    )


def frames(kind: str, count: int) -> bytes:
    one, two = (Image.fromarray(PICTURE[::step]).resize((16, 16)) for step in (1, -1))
    return encoded(one, kind, save_all=True, append_images=[two, one] * (count // 2))


def circle() -> bytes:
    """The directory that follows the first is the first."""
    data = encoded(Image.fromarray(PICTURE).resize((16, 16)), "TIFF")
    first = data[4:8]
    end = int.from_bytes(first, "little") + 2 + 12 * len(tiff_pieces(data)[:-2])
    return data[:end] + first + data[end + 4 :]


def exif_parts() -> bytes:
    """EXIF in 900 segments, of eight million fractions."""
    body = tiff(b"", (282, 5, [1, 1] * 7_000_000))
    part = 60_000
    return b"".join(
        b"\xff\xe1" + struct.pack(">H", len(x) + 8) + b"Exif\0\0" + x
        for x in (body[at : at + part] for at in range(0, len(body), part))
    )


def scans() -> bytes:
    image = large("JPEG", "RGB", progressive=True)
    return image[:-2] + image[image.rindex(b"\xff\xda") : -2] * 30 + b"\xff\xd9"


FULL = (HIGH, WIDE, 3)
SMALL = (*PICTURE.shape,)
HUGE = 2**31 - 1
BUSY = "decoding would take too long"
BOMBS: dict[str, tuple[Callable[[], bytes], tuple[int, ...] | str]] = {  # what makes it; its shape, or part of the refusal
    # sizes that are declared, and not there
    "PNG of 50 million pixels, none there": (lambda: png(WIDE, HIGH), "truncated"),
    "PNG of one row too many": (lambda: png(WIDE, HIGH + 1), "8000 x 6251"),
    "PNG of 30000 x 30000": (lambda: png(30000, 30000), "more than 50,000,000 pixels"),
    "PNG of 2147483647 x 2147483647": (lambda: png(HUGE, HUGE), "more than 50,000,000 pixels"),
    "PNG of 50000000 x 1": (lambda: png(MOST_PIXELS, 1), "more than 200 times"),
    "JPEG of 65535 x 65535": (lambda: jpeg_of_size(65535, 65535), "more than 50,000,000 pixels"),
    "JPEG of one row too many": (lambda: jpeg_of_size(WIDE, HIGH + 1), "8000 x 6251"),
    "JPEG of 50 million pixels, few there": (lambda: jpeg_of_size(WIDE, HIGH), FULL),
    "GIF of 65535 x 65535": (lambda: SEEDS[7][:6] + b"\xff" * 4 + SEEDS[7][10:], "more than 50,000,000 pixels"),
    "BMP of 2147483647 x 2147483647": (lambda: bmp_of_size(HUGE, HUGE), "more than 50,000,000 pixels"),
    "BMP of one row too many": (lambda: bmp_of_size(WIDE, HIGH + 1), "8000 x 6251"),
    "BMP of 50 million pixels, few there": (lambda: bmp_of_size(WIDE, HIGH), "truncated"),
    "WebP of 16777216 x 16777216": (lambda: webp_of_size(2**24, 2**24), "more than 50,000,000 pixels"),
    "WebP of 16383 x 16383": (lambda: webp_of_size(16383, 16383), "more than 50,000,000 pixels"),
    "TIFF of 4294967295 x 4294967295": (lambda: grey_tiff(2**32 - 1, 2**32 - 1, b""), "more than 50,000,000 pixels"),
    "TIFF of 50 million pixels, none there": (lambda: grey_tiff(WIDE, HIGH, b""), "truncated"),
    # as many pixels as are read, in few bytes
    "PNG, 50 million pixels, colour": (lambda: large_png(2, 8, 3 * WIDE, 0), FULL),
    "PNG, 50 million pixels, alpha": (lambda: large_png(6, 8, 4 * WIDE, 0), FULL),
    "PNG, 50 million pixels, alpha of 16 bits": (lambda: large_png(6, 16, 8 * WIDE, 4), FULL),
    "PNG, 50 million pixels, grey of 16 bits": (lambda: large_png(0, 16, 2 * WIDE, 0), FULL),
    "PNG, 50 million pixels, grey and alpha": (lambda: large_png(4, 8, 2 * WIDE, 0), FULL),
    "PNG, 50 million pixels, palette": (
        lambda: large_png(3, 8, WIDE, 0, chunk(b"PLTE", bytes(768)) + chunk(b"tRNS", bytes(256))),
        FULL,
    ),
    "JPEG, 50 million pixels, progressive": (lambda: large("JPEG", "RGB", progressive=True), FULL),
    "JPEG, 50 million pixels, CMYK": (lambda: large("JPEG", "CMYK"), FULL),
    "WebP, 50 million pixels, lossless, alpha": (
        lambda: large("WEBP", "RGBA", lossless=True, quality=0, method=0),
        FULL,
    ),
    "WebP, 50 million pixels, lossy, alpha": (lambda: large("WEBP", "RGBA", quality=10, method=0), FULL),
    "GIF, 50 million pixels": (lambda: large("GIF", "L"), FULL),
    "TIFF, 50 million pixels, LZW": (lambda: large("TIFF", "RGB", compression="tiff_lzw"), FULL),
    "TIFF, 50 million pixels, deflate": (lambda: large("TIFF", "RGBA", compression="tiff_adobe_deflate"), FULL),
    "TIFF, 50 million pixels, JPEG": (lambda: large("TIFF", "RGB", compression="jpeg"), FULL),
    "TIFF, 50 million pixels, fax": (lambda: large("TIFF", "1", compression="group4"), FULL),
    "TIFF, 50 million pixels, grey of 16 bits, turned": (
        lambda: oriented(6, "TIFF", np.zeros((HIGH, WIDE), np.uint16), compression="tiff_adobe_deflate"),
        (WIDE, HIGH, 3),
    ),
    # a little that becomes a lot
    "PNG whose data is 16 GiB": (lambda: png_of_data(inflates(2**34)), (64, 64, 3)),
    "PNG with 1 GiB of text": (lambda: png_with(text(inflates(2**30))), "too large"),
    "PNG with 1,000 x 1 MiB of text": (lambda: png_with(text(zlib.compress(bytes(2**20 - 1))) * 1000), "Too much memory"),
    "PNG with a colour profile of 1 GiB": (lambda: png_with(chunk(b"iCCP", b"a\0\0" + inflates(2**30))), "too large"),
    "PNG with 60 MiB of EXIF": (lambda: png_with(chunk(b"eXIf", tiff(b"", (274, 3, [6] * 30_000_000)))), BUSY),
    "TIFF whose strip is 16 GiB": (lambda: grey_tiff(64, 64, inflates(2**34), packed=8), (64, 64, 3)),
    # countless pieces
    "PNG of five million chunks": (lambda: png_with(chunk(b"aaAa") * 5_000_000), BUSY),
    "PNG of five million chunks of data": (lambda: png_with(chunk(b"IDAT") * 5_000_000), BUSY),
    "JPEG of 16 million comments": (lambda: jpeg_with(b"\xff\xfe\0\2" * 16_000_000), BUSY),
    "JPEG of 60 million filling bytes": (lambda: jpeg_with(b"\xff" * 60_000_000), BUSY),
    "JPEG of 900 parts of EXIF": (lambda: jpeg_with(exif_parts()), BUSY),
    "JPEG of 40 scans": (scans, BUSY),
    "GIF of 20 million extensions": (lambda: gif_with(b"!\xfe\0" * 20_000_000), BUSY),
    "GIF of 60,000 long comments": (lambda: gif_with((b"!\xfe\xff" + b"a" * 255 + b"\0") * 60_000), BUSY),
    "GIF of one comment of 60 MB": (lambda: gif_with(b"!\xfe" + (b"\xff" + b"a" * 255) * 230_000 + b"\0"), BUSY),
    "GIF of 20,000 frames": (lambda: gif_with(SEEDS[7][gif_start() : -1] * 20_000), SMALL),
    "PNG of 2,000 frames": (lambda: frames("PNG", 2000), (16, 16, 3)),
    "WebP of 2,000 frames": (lambda: frames("WEBP", 2000), (16, 16, 3)),
    "TIFF of 500 pages": (lambda: frames("TIFF", 500), (16, 16, 3)),
    "TIFF whose pages go in a circle": (circle, (16, 16, 3)),
    "TIFF of 60,000 strips": (lambda: strips(500, 60_000, bytes(500), 500), (60_000, 500, 3)),
    "TIFF of 100,000 strips in one place of a large file": (lambda: strips(500, 100_000, bytes(2**20), 500), BUSY),
    "TIFF of 100,000 deflated strips": (
        lambda: strips(500, 100_000, zlib.compress(bytes(500)), len(zlib.compress(bytes(500))), packed=8),
        BUSY,
    ),
    "TIFF of four million tiles": (lambda: tiles(4_000_000, 1), BUSY),
    "TIFF of 60 million tiles, in bytes": (lambda: tiles(60_000_000, 1, kind=1), BUSY),
    "TIFF of 15 million numbers of bits": (lambda: grey_tiff(64, 64, bytes(4096), (258, 4, [8] * 15_000_000)), BUSY),
    "TIFF with seven million fractions in its EXIF": (
        lambda: grey_tiff(64, 64, bytes(4096), within=[(282, 5, [1, 1] * 7_000_000)]),
        BUSY,
    ),
}  # fmt: skip


def bomb(name: str, folder: Path) -> dict[str, Any]:
    make, expected = BOMBS[name]
    file, empty = folder / "bomb", folder / "empty"
    empty.mkdir()

    def write() -> None:
        file.write_bytes(make())

    def defuse() -> dict[str, Any]:
        with watched(empty) as facts:
            try:
                found: Any = decode(file).shape
            except BadImageError as bad:
                found = bad.reason
        assert found == expected if isinstance(expected, tuple) else expected in found, f"{found}, not {expected}"
        return facts

    apart(write)
    assert file.stat().st_size <= MOST_BYTES, "it is refused for its size alone"
    return apart(defuse)


# --- scans -----------------------------------------------------------------------------------------------------------

BAD = [data for data, expected in BUILT.values() if isinstance(expected, str)]


def bad_files(chance: random.Random, count: int, bad: int) -> dict[int, bytes]:
    return {i: chance.choice(BAD) for i in sorted(chance.sample(range(count), bad))}


def refused_scan(seed: int, count: int, bad: int, on_bad: str, folder: Path) -> None:
    """Every bad file is counted, the first twenty are named in order, and nothing is kept."""
    wrong = bad_files(random.Random(seed), count, bad)
    images, cache = folder_of(folder / "set", count, wrong), folder / "scan.json"
    try:
        scan(images, workers=2 * (seed == 0), on_bad=on_bad, cache=cache)
        raise AssertionError("the scan found nothing")
    except BadImageError as error:
        told = error.reason.splitlines()
    assert told[0].startswith(f"{bad:,} of {count:,} images cannot be used"), told[0]
    assert ("may be left out" in told[0]) == (on_bad == "skip"), told[0]
    names = [line.split(":")[0].strip() for line in told[1 : 1 + min(bad, 20)]]
    assert names == [images.where(i) for i in list(wrong)[:20]], names
    assert not cache.exists()


def skipping_scan(seed: int, folder: Path) -> None:
    """One in a thousand may be bad: exactly those are left out, again without a look where it was kept."""
    count, bad = 2000, 1 + seed % 2
    wrong = bad_files(random.Random(seed), count, bad)
    images, cache = Counting(folder_of(folder / "set", count, wrong)), folder / "scan.json"
    for _ in range(2):
        found = scan(images, on_bad="skip", cache=cache)
        assert found == set(wrong) and images.reads == count, f"{sorted(found)}, not {list(wrong)}; {images.reads} read"


SCANS: dict[str, Callable[[int, Path], None]] = {
    "1 % bad": lambda seed, folder: refused_scan(seed, 1000, 10, "fail", folder),
    "1 % bad, to be skipped": lambda seed, folder: refused_scan(seed, 1000, 10, "skip", folder),
    "all bad": lambda seed, folder: refused_scan(seed, 200, 200, ("fail", "skip")[seed % 2], folder),
    "0.1 % bad, to be skipped": skipping_scan,
}


# --- all -------------------------------------------------------------------------------------------------------------


def cases(place: Path) -> Iterator[Case]:
    for name in BUILT:
        yield Case("images of every kind and damage, built by hand", f"built {name}", partial(built, name), 30)
    for name in BOMBS:
        yield Case("image bombs: giant sizes, little that inflates, countless pieces", f"bomb {name}", partial(bomb, name), 90)
    for name, check in SCANS.items():
        for seed in range(5):
            yield Case("scans of folders with bad files", f"scan {name} {seed}", partial(check, seed), 120)
    for seed in range(MUTATIONS):
        row = f"damaged images: {len(STARTS)} files of six kinds, mutated"
        yield Case(row, f"mutation {seed}", partial(mutations, seed), 30)
