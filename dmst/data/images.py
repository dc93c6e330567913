"""The one door for image bytes: pixels, or a BadImageError that says why not; never a crash, a hang or a wrong picture.

decode(data, name)              (h, w, 3) uint8, red green blue
decode(data, name, grey=True)   (h, w, 1) uint8

kinds      JPEG PNG WEBP GIF BMP TIFF, and no other, whatever the name of the file says
size       at least 1 x 1, at most 50 million pixels, no side more than 200 times the other; a file of at most 64 MiB
frame      the first of several, turned as its EXIF says
colour     grey, palette and CMYK become RGB; what is transparent lies on white
16 bits    grey v becomes (v + 128) // 257; 32-bit integers and floats are refused: their white is anybody's guess
effort     a file made of countless pieces is refused: no picture takes 2 s or 1 GiB, but for honest work on megabytes of noise
"""

from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

from dmst.errors import BadImageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MOST_BYTES = 64 * 2**20
MOST_PIXELS = 50_000_000
MOST_ASPECT = 200
MOST_WORK = 20 * MOST_PIXELS  # pixels x scans of a JPEG: a small file can hold a million scans, each over all pixels
MOST_READS = {"header": 10_000, "pixels": 200_000}  # of at most 32 KiB: a file can hold millions of empty chunks
MOST_VALUES = 500_000  # numbers, strips and tiles of the directories of a TIFF
MOST_EXIF = 2**20
MOST_DIRECTORIES = 16
TIFF_ORDERS = {b"II": "<", b"MM": ">"}
TIFF_BYTES = (1, 2, 7)  # kinds of values that are kept as they stand in the file: bytes, text, anything
TIFF_TILES = (273, 324)  # where each strip, each tile begins
TIFF_WITHIN = (34665, 34853, 40965)  # where EXIF, GPS and Interoperability have directories of their own
ORIENTATION, BITS, PHOTOMETRIC = 274, 258, 262  # tags of EXIF and TIFF
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
REFUSED = {
    "I": "it has 32-bit or signed integer pixels, whose white level is not known: save it with 8 or 16 bits per channel",
    "F": "it has floating-point pixels, whose white level is not known: save it with 8 or 16 bits per channel",
}
BEGINNINGS = {  # of what is not read, as a hint
    b"%!ps": "PostScript",
    b"%pdf": "PDF",
    b"<svg": "SVG, a drawing and not pixels",
    b"<?xml": "XML or SVG, not pixels",
    b"<!doctype": "a web page, often the error page of a server in place of the file",
    b"<html": "a web page, often the error page of a server in place of the file",
    b"pk\x03\x04": "a zip file",
    b"\xff\xd8\xff": "a JPEG with a damaged header",
    b"\x89png": "a PNG with a damaged header",
    b"riff": "a WebP with a damaged header, or a sound",
}


def decode(data: bytes | Path, name: str = "", *, grey: bool = False) -> np.ndarray:
    """The pixels of an encoded image, or of the file at a path; `name` is how an error calls it, else the path."""
    try:
        raw = _read(data) if isinstance(data, Path) else bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's; what counts is an error
            return _decode(raw, grey)
    except Exception as error:  # Pillow raises almost anything: OSError, SyntaxError, struct.error, DecompressionBombError, ...
        raise BadImageError(name or (str(data) if isinstance(data, Path) else "an image"), _reason(error)) from error


def _read(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise _Refusal("it is not a regular file")  # a pipe would never end
    with path.open("rb") as file:
        return file.read(MOST_BYTES + 1)


def _decode(raw: bytes, grey: bool) -> np.ndarray:
    if not raw:
        raise _Refusal("it is empty")
    if len(raw) > MOST_BYTES:
        raise _Refusal(f"its file is larger than {MOST_BYTES >> 20} MiB")
    _inspect(raw)
    reader = _Reader(raw)
    try:
        image: Image.Image = Image.open(reader, formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise _Refusal(f"it is not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image{_hint(raw)}") from None
    except Image.DecompressionBombError:
        raise _Refusal(f"it has more than {MOST_PIXELS:,} pixels") from None
    with image:
        _measure(image, raw)
        reader.left = MOST_READS["pixels"]
        image.load()
        turn = _turn(image)
        if image.format == "WEBP":
            image = image.copy()  # without its decoder, which keeps three more of the picture
    flat = _flat(image, "L" if grey else "RGB")
    pixels = np.array(flat.transpose(turn) if turn is not None else flat)
    return pixels[:, :, None] if grey else pixels


def _inspect(raw: bytes) -> None:
    """Before Pillow sees it: what Pillow would unpack at once, as much as there is."""
    if raw[:4] in (b"II+\0", b"MM\0+"):
        raise _Refusal("it is a BigTIFF, for files of gigabytes: save it as a plain TIFF")
    if raw[:2] in TIFF_ORDERS and (count := _tiff_values(raw, TIFF_ORDERS[raw[:2]])) > MOST_VALUES:
        raise _Refusal(f"its directory lists {count:,} values: decoding would take too long")
    if raw.startswith(b"\xff\xd8") and raw.count(b"Exif\0\0") << 16 > MOST_EXIF:
        raise _Refusal("it has EXIF in more than 16 parts: decoding would take too long")


def _tiff_values(raw: bytes, order: str) -> int:
    """How many objects Pillow would make of the first directory of a TIFF, and of those within: one per value, strip or tile.

    A directory is a count and entries of a tag, a kind, a number of values and a field: a file of 60 MB can ask for gigabytes.
    """
    total, left = 0, [raw[4:8]]
    for _ in range(MOST_DIRECTORIES):
        if not left:
            break
        at = int.from_bytes(left.pop(), "little" if order == "<" else "big")
        if at + 2 > len(raw):
            continue
        count = min(struct.unpack_from(order + "H", raw, at)[0], (len(raw) - at - 2) // 12)
        for tag, kind, many, field in struct.iter_unpack(order + "HHL4s", memoryview(raw)[at + 2 : at + 2 + 12 * count]):
            if kind not in TIFF_BYTES or tag in TIFF_TILES:
                total += many
            if tag in TIFF_WITHIN:
                left.append(field[:2] if kind == 3 else field)  # a short stands first in the field
    return total


def _measure(image: Image.Image, raw: bytes) -> None:
    """Before any pixel is decoded."""
    width, height = image.size
    if min(width, height) < 1 or width * height > MOST_PIXELS:
        raise _Refusal(
            f"it has {width} x {height} pixels: at least 1 x 1 and at most {MOST_PIXELS:,} pixels in all are accepted"
        )
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise _Refusal(f"it has {width} x {height} pixels: one side is more than {MOST_ASPECT} times the other")
    if image.mode in REFUSED:
        raise _Refusal(REFUSED[image.mode])
    if image.format in ("JPEG", "MPO") and (scans := raw.count(b"\xff\xda")) * width * height > MOST_WORK:
        raise _Refusal(f"it has {width} x {height} pixels in {scans:,} scans: decoding would take too long")
    if len(image.info.get("exif", b"")) > MOST_EXIF:
        raise _Refusal(f"its EXIF data is larger than {MOST_EXIF >> 20} MiB")


def _turn(image: Image.Image) -> Image.Transpose | None:
    """How to set the picture upright. TIFFs are turned as they are loaded, and then say nothing more."""
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged remarks on a sound picture
        return None


def _flat(image: Image.Image, mode: str) -> Image.Image:
    """Eight bits, without transparency."""
    if image.mode.startswith("I;16"):
        image = _eight_bits(image)
    elif image.has_transparency_data:
        above = _as(image, "RGBA")
        image = Image.new("RGB", image.size, "white")
        image.paste(above, mask=above)
    return _as(image, mode)


def _as(image: Image.Image, mode: str) -> Image.Image:
    return image if image.mode == mode else image.convert(mode)  # which would copy


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit grey, (v + 128) // 257; Pillow itself clips at 255."""
    values, tags, clear = np.asarray(image).astype(np.uint32), getattr(image, "tag_v2", {}), image.info.get("transparency")
    if tags.get(BITS, (16,)) != (16,):
        raise _Refusal(f"it has {tags[BITS]} bits per pixel: only 8 and 16 are supported")
    if tags.get(PHOTOMETRIC) == 0:
        values = 65535 - values  # white is zero, which Pillow heeds with 8 bits only
    if isinstance(clear, int):
        values[values == clear] = 65535
    values += 128  # in place: 50 million of them are 200 MB
    values //= 257
    return Image.fromarray(values.astype(np.uint8))


def _hint(raw: bytes) -> str:
    start = raw[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return next((f"; it looks like {what}" for beginning, what in BEGINNINGS.items() if start.startswith(beginning)), "")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"it cannot be read ({error.strerror})"
    return str(error) if isinstance(error, _Refusal) else f"it cannot be decoded ({str(error) or type(error).__name__})"


class _Refusal(Exception):
    """A rule of this file, told in full."""


class _Reader(io.BytesIO):
    """The bytes of a file, for so many reads: Pillow would walk through millions of empty pieces one by one."""

    left = MOST_READS["header"]

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.left -= 1 + len(data) // 2**15
        if self.left < 0:
            raise _Refusal("it is made of too many small pieces: decoding would take too long")
        return data
