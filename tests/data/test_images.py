"""Image bytes: the right pixels, or a BadImageError; quickly, in silence, whatever the bytes."""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
import struct
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dmst.data import images
from dmst.data.images import decode
from dmst.errors import BadImageError, DmstError

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)  # 5 high, 7 wide
BLOCKS = np.kron(
    np.array([[0, 255, 255], [255, 0, 0]], np.uint8), np.ones((8, 8), np.uint8)
)  # 16 high, 24 wide: a JPEG keeps it
WHITE_BLACK = np.array([[255, 0, 255, 0, 0]], np.uint8)
EXIF_TURN = {  # what a camera held so has to be turned by, in numpy's words
    1: lambda x: x,
    2: np.fliplr,
    3: lambda x: np.rot90(x, 2),
    4: np.flipud,
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
    8: np.rot90,
}


def encoded(pixels: np.ndarray | Image.Image, kind: str, mode: str | None = None, **options: Any) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, kind, **options)
    return file.getvalue()


def oriented(orientation: int, kind: str, pixels: np.ndarray = COLOURS, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    return encoded(pixels, kind, exif=exif, **options)


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that says what it likes about its size."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    body = (struct.pack(">I", len(x)) + name + x + struct.pack(">I", zlib.crc32(name + x)) for name, x in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def rgb(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[:, :, None], 3, axis=2)


def palette_with_alpha() -> bytes:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "L")
    image.putpalette([255, 0, 0, 0, 255, 0, 10, 20, 30])
    return encoded(image, "PNG", transparency=bytes([128, 0, 255]))


JPEG = encoded(rgb(BLOCKS), "JPEG", quality=100, subsampling=0)
PHOTO = encoded(RNG.integers(0, 256, (40, 60, 3), dtype=np.uint8), "JPEG")
PNG = encoded(RNG.integers(0, 256, (40, 60, 3), dtype=np.uint8), "PNG")
BAD_CRC = bytearray(encoded(COLOURS, "PNG"))
BAD_CRC[29] ^= 1  # of the header
SIXTEEN = np.array([[0, 128, 129, 40000, 65407, 65535]], np.uint16)
EIGHT = np.array([[0, 0, 1, 156, 255, 255]], np.uint8)
HALF_RED = Image.fromarray(np.array([[[255, 0, 0, 128], [7, 8, 9, 0], [7, 8, 9, 255]]], np.uint8), "RGBA")
ON_WHITE = np.array([[[255, 127, 127], [255, 255, 255], [7, 8, 9]]], np.uint8)
HALF_GREY = Image.fromarray(np.array([[[10, 128], [7, 0], [9, 255]]], np.uint8), "LA")
CMYK = Image.fromarray(np.kron(np.array([[[0, 255, 0, 0], [0, 0, 0, 255]]], np.uint8), np.ones((8, 8, 1), np.uint8)), "CMYK")
TWO_FRAMES: dict[str, Any] = {"save_all": True, "append_images": [Image.fromarray(COLOURS[::-1].copy())], "duration": 50}
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n"

BUILT: dict[str, tuple[bytes, np.ndarray | str]] = {  # bytes, and their pixels or what the refusal says
    "empty": (b"", "it is empty"),
    "random": (random.Random(0).randbytes(5000), "it is not a JPEG, PNG, WEBP, GIF, BMP or TIFF image"),
    "HTML": (b"\n<!DOCTYPE html><html><body>404</body></html>", "it is not a JPEG"),
    "JPEG cut in the middle": (PHOTO[: len(PHOTO) // 2], "truncated"),
    "JPEG without its last two bytes": (PHOTO[:-2], "truncated"),
    "JPEG, header only": (PHOTO[: PHOTO.index(b"\xff\xda")], "cannot be decoded"),
    "PNG cut": (PNG[: len(PNG) // 2], "truncated"),
    "PNG with a wrong checksum": (bytes(BAD_CRC), "it is not a"),
    "PNG of 30000 x 30000": (png(30000, 30000), "more than 50,000,000 pixels"),
    "PNG of 0 x 0": (png(0, 0), "it is not a"),
    "1 x 1": (encoded(COLOURS[:1, :1], "PNG"), COLOURS[:1, :1]),
    "1 x 20000": (encoded(np.zeros((20000, 1, 3), np.uint8), "PNG"), "more than 200 times"),
    "grey": (encoded(COLOURS[:, :, 0], "PNG"), rgb(COLOURS[:, :, 0])),
    "grey of 16 bits": (encoded(SIXTEEN, "PNG"), rgb(EIGHT)),
    "colour and alpha": (encoded(HALF_RED, "PNG"), ON_WHITE),
    "grey and alpha": (encoded(HALF_GREY, "PNG"), rgb(np.array([[132, 255, 9]], np.uint8))),
    "palette and alpha": (palette_with_alpha(), np.array([[[255, 127, 127], [255, 255, 255], [10, 20, 30]]], np.uint8)),
    "one bit": (encoded(WHITE_BLACK, "PNG", mode="1"), rgb(WHITE_BLACK)),
    "CMYK": (encoded(CMYK, "JPEG", quality=100), np.kron([[[255, 0, 255], [0, 0, 0]]], np.ones((8, 8, 1)))),
    "TIFF of floats": (encoded(np.full((5, 7), 0.5, np.float32), "TIFF"), "floating-point"),
    "animated": (encoded(COLOURS, "PNG", **TWO_FRAMES), COLOURS),
    "turned by EXIF": (oriented(6, "JPEG", rgb(BLOCKS), quality=100, subsampling=0), np.rot90(rgb(BLOCKS), -1)),
    "WebP": (encoded(COLOURS, "WEBP", lossless=True), COLOURS),
    "EPS": (EPS, "it is not a"),
}


@pytest.fixture(autouse=True)
def _untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nothing is printed but what libtiff says itself; nothing is written; the filters of warnings are as they were."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    before = list(warnings.filters)
    yield
    out, err = capfd.readouterr()
    assert out == "" and all("LZWDecode" in line or "tempfile.tif" in line for line in err.splitlines())  # libtiff will talk
    assert list(here.iterdir()) == []
    assert warnings.filters == before


def refused(data: bytes | Path, name: str = "cats/17.png") -> str:
    with pytest.raises(BadImageError) as bad:
        decode(data, name)
    assert bad.value.name == name and str(bad.value) == f"{name}: {bad.value.reason}"
    assert "0x" not in bad.value.reason.replace("0x0", "") and "\n" not in bad.value.reason
    return bad.value.reason


@pytest.mark.parametrize("name", BUILT)
def test_built(name: str) -> None:
    data, expected = BUILT[name]
    start = time.perf_counter()
    if isinstance(expected, str):
        assert expected in refused(data)
    else:
        pixels = decode(data, name)
        assert pixels.dtype == np.uint8 and pixels.flags.c_contiguous and pixels.flags.writeable
        np.testing.assert_array_equal(pixels, expected)
    assert time.perf_counter() - start < 2


# --- what the built ones leave open -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_every_orientation(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    for orientation, turn in EXIF_TURN.items():
        np.testing.assert_array_equal(decode(oriented(orientation, kind, **options)), turn(COLOURS))


def test_odd_orientations() -> None:
    """A compressed TIFF is turned once; a number that is none, and damaged EXIF, turn nothing."""
    np.testing.assert_array_equal(decode(oriented(8, "TIFF", compression="tiff_lzw")), np.rot90(COLOURS))
    np.testing.assert_array_equal(decode(oriented(9, "PNG")), COLOURS)
    damaged = oriented(6, "PNG").replace(b"MM\x00*", b"XX\x00*")
    chunk = damaged.index(b"eXIf")
    length = struct.unpack(">I", damaged[chunk - 4 : chunk])[0]
    end = chunk + 4 + length
    damaged = damaged[:end] + struct.pack(">I", zlib.crc32(damaged[chunk:end])) + damaged[end + 4 :]
    np.testing.assert_array_equal(decode(damaged), COLOURS)


def test_grey_is_asked_for() -> None:
    grey = decode(encoded(COLOURS[:, :, 0], "PNG"), grey=True)
    assert grey.shape == (5, 7, 1)
    np.testing.assert_array_equal(grey[:, :, 0], COLOURS[:, :, 0])
    np.testing.assert_array_equal(decode(encoded(SIXTEEN, "PNG"), grey=True)[:, :, 0], EIGHT)
    np.testing.assert_array_equal(decode(encoded(HALF_GREY, "PNG"), grey=True)[:, :, 0], [[132, 255, 9]])
    red = decode(encoded(np.full((2, 3, 3), (255, 0, 0), np.uint8), "PNG"), grey=True)
    np.testing.assert_array_equal(red, np.full((2, 3, 1), 76))  # 0.299 x 255


@pytest.mark.parametrize("kind", ["GIF", "BMP", "WEBP", "TIFF"])
def test_the_other_kinds_and_their_first_frame(kind: str) -> None:
    if kind == "BMP":
        np.testing.assert_array_equal(decode(encoded(COLOURS, kind)), COLOURS)
        return
    first, second = Image.fromarray(rgb(BLOCKS)), Image.fromarray(rgb(255 - BLOCKS))
    data = encoded(first, kind, save_all=True, append_images=[second], **({"lossless": True} if kind == "WEBP" else {}))
    np.testing.assert_array_equal(decode(data), rgb(BLOCKS))


def test_sixteen_bits_in_colour_and_in_tiff() -> None:
    for kind in ("TIFF", "PNG"):
        np.testing.assert_array_equal(decode(encoded(SIXTEEN, kind)), rgb(EIGHT))
    swapped = Image.frombytes("I;16B", (6, 1), SIXTEEN.astype(">u2").tobytes())
    np.testing.assert_array_equal(decode(encoded(swapped, "TIFF")), rgb(EIGHT))
    for tag, was, becomes in ((258, 16, 12), (262, 1, 0)):  # 12 bits; white is zero
        rows = (struct.pack("<HHIHH", tag, 3, 1, value, 0) for value in (was, becomes))
        assert "9 to 15 bits" in refused(encoded(SIXTEEN, "TIFF").replace(*rows))
    assert "32-bit" in refused(encoded(SIXTEEN.astype(np.int32), "TIFF"))
    raw = b"".join(b"\0" + SIXTEEN.astype(">u2")[0, 3:4].tobytes() * 3 for _ in range(2))  # 40000 three times, 16-bit RGB
    data = png(1, 2, raw).replace(struct.pack(">IIBB", 1, 2, 8, 2), struct.pack(">IIBB", 1, 2, 16, 2))
    data = data[:29] + struct.pack(">I", zlib.crc32(data[12:29])) + data[33:]
    np.testing.assert_array_equal(decode(data), np.full((2, 1, 3), 156))


def test_one_value_is_transparent() -> None:
    np.testing.assert_array_equal(decode(encoded(EIGHT, "PNG", transparency=156))[0, :, 0], [0, 0, 1, 255, 255, 255])
    clear = decode(encoded(COLOURS, "PNG", transparency=tuple(COLOURS[2, 3].tolist())))
    assert clear[2, 3].tolist() == [255, 255, 255]
    np.testing.assert_array_equal(np.delete(clear.reshape(-1, 3), 17, 0), np.delete(COLOURS.reshape(-1, 3), 17, 0))


def test_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert decode(encoded(np.zeros((200, 1, 3), np.uint8), "PNG")).shape == (200, 1, 3)
    assert "201 x 1 pixels: one side" in refused(encoded(np.zeros((1, 201, 3), np.uint8), "PNG"))
    assert "8000 x 6251 pixels" in refused(png(8000, 6251))
    assert "truncated" in refused(png(8000, 6250))  # 50 million may come, and do not
    monkeypatch.setattr(images, "MOST_BYTES", 2**20)
    assert "larger than 1 MiB" in refused(JPEG + bytes(2**20 - len(JPEG) + 1))
    assert decode(JPEG + bytes(2**20 - len(JPEG))).shape == (16, 24, 3)
    path = tmp_path / "large.jpg"
    path.write_bytes(JPEG + bytes(2**21))
    assert "larger than 1 MiB" in refused(path)


def test_a_jpeg_of_a_thousand_scans() -> None:
    """20 KB that would keep a decoder busy for minutes: every scan goes over every pixel."""
    image = encoded(Image.new("RGB", (2000, 2000), (200, 10, 30)), "JPEG", progressive=True)
    scan = image[image.rindex(b"\xff\xda") : -2]
    assert decode(image).shape == (2000, 2000, 3)
    assert "1,010 scans" in refused(image[:-2] + scan * 1000 + b"\xff\xd9")


def chunk(name: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


GIF = encoded(np.stack([BLOCKS] * 3, axis=2), "GIF")
PICTURES = 13 + 3 * 2 ** ((GIF[10] & 7) + 1)  # of a GIF begin behind its palette
COUNTLESS = {  # a sound picture with this many more pieces
    "chunks": lambda count: PNG[:33] + chunk(b"aaAa") * count + PNG[33:],
    "fill bytes": lambda count: JPEG[:2] + b"\xff" * count + JPEG[2:],
    "comments": lambda count: JPEG[:2] + b"\xff\xfe\0\2" * count + JPEG[2:],
    "extensions": lambda count: GIF[:PICTURES] + b"!\xfe\0" * count + GIF[PICTURES:],
    "one comment": lambda count: GIF[:PICTURES] + b"!\xfe" + b"\1a" * count + b"\0" + GIF[PICTURES:],
}


@pytest.mark.parametrize("what", COUNTLESS)
def test_countless_pieces(what: str) -> None:
    """64 MiB of them would take Pillow half a minute and gigabytes."""
    assert decode(COUNTLESS[what](1000)).shape[2] == 3
    assert "too many small pieces" in refused(COUNTLESS[what](20_000))


@pytest.mark.parametrize("tag", [324, 700])
def test_a_tiff_with_large_tables(tag: int) -> None:
    """Pillow would make an object of each value: places of tiles here, or remarks."""
    rows = [(256, 4, 1, 100), (257, 4, 1, 100), (258, 3, 1, 8), (322, 4, 1, 1), (323, 4, 1, 1), (tag, 1, 2_200_000, 80)]
    data = b"II*\0" + struct.pack("<IH", 8, len(rows)) + b"".join(struct.pack("<HHII", *row) for row in rows)
    assert "more than 2 MiB beside its pixels" in refused(data + bytes(2_300_000))


def test_too_much_exif() -> None:
    note = b"Exif\0\0II*\0\x08\0\0\0\0\0"
    assert decode(JPEG[:2] + (b"\xff\xe1" + struct.pack(">H", len(note) + 2) + note) * 16 + JPEG[2:]).shape == (16, 24, 3)
    assert "EXIF in more than 16" in refused(JPEG[:2] + (b"\xff\xe1" + struct.pack(">H", len(note) + 2) + note) * 17 + JPEG[2:])
    assert "EXIF data is larger than 1 MiB" in refused(PNG[:33] + chunk(b"eXIf", note[6:] + bytes(2**20)) + PNG[33:])


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"  # what is inside counts
    path.write_bytes(JPEG)
    np.testing.assert_array_equal(decode(path), rgb(BLOCKS))
    path.write_bytes(b"")
    with pytest.raises(BadImageError) as bad:
        decode(path)
    assert str(bad.value) == f"{path}: it is empty"
    assert refused(tmp_path / "b.png") == "it cannot be read (No such file or directory)"
    assert refused(tmp_path) == "it is not a regular file"
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe") == "it is not a regular file"
    np.testing.assert_array_equal(decode(memoryview(bytearray(JPEG)), "a view"), rgb(BLOCKS))  # type: ignore[arg-type]


def test_the_error_travels() -> None:
    error = BadImageError("a.png", "it is empty")
    again = pickle.loads(pickle.dumps(error))
    assert (again.name, again.reason, str(again)) == ("a.png", "it is empty", "a.png: it is empty")
    assert isinstance(again, DmstError) and isinstance(again, ValueError)
    assert str(BadImageError("Caught BadImageError in worker 1")) == "Caught BadImageError in worker 1"  # as torch re-raises it


# --- mutations ------------------------------------------------------------------------------------------------------

PICTURE = np.kron(RNG.integers(0, 256, (6, 9, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8))
SEEDS = [
    encoded(PICTURE, "JPEG"),
    oriented(6, "JPEG", PICTURE, progressive=True),
    encoded(PICTURE, "PNG"),
    encoded(PICTURE[:, :, 0].astype(np.uint16) * 257, "PNG"),
    palette_with_alpha(),
    encoded(PICTURE, "WEBP"),
    encoded(
        Image.fromarray(PICTURE), "WEBP", lossless=True, **TWO_FRAMES | {"append_images": [Image.fromarray(PICTURE[::-1])]}
    ),
    encoded(PICTURE, "GIF"),
    encoded(PICTURE, "BMP"),
    encoded(PICTURE, "TIFF", compression="tiff_lzw"),
]


def mutated(data: bytes, seed: int) -> bytes:
    chance = random.Random(seed)
    raw = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at, length = chance.randrange(len(raw)), chance.randint(1, 16)
        match chance.randrange(6):
            case 0:
                raw[at] ^= 1 << chance.randrange(8)
            case 1:
                raw[at : at + length] = chance.randbytes(length)
            case 2:
                raw[at : at + length] = b"\xff" * length
            case 3:
                raw[at:at] = raw[at : at + 20 * length]
            case 4:
                del raw[at : at + length]
            case 5:
                at = min(at, 64)  # numbers of the header
                raw[at : at + 4] = chance.choice((0, 1, 0x7FFF, 0xFFFF, 2**31 - 1)).to_bytes(
                    4, chance.choice(("big", "little"))
                )  # type: ignore[arg-type]
    return bytes(raw)


@pytest.mark.parametrize("which", range(len(SEEDS)))
def test_mutations(which: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = []
    for seed in range(10):
        start = time.perf_counter()
        try:
            pixels = decode(mutated(SEEDS[which], 100 * which + seed), "mutated")
            outcomes.append(pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.size > 0)
        except BadImageError as error:
            outcomes.append(error.reason != "")
        assert time.perf_counter() - start < 2
    assert outcomes == [True] * 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
