"""The one door for image bytes: pixels, or a BadImageError that says why not; never a crash, a hang or a wrong picture.

decode(data, name)              (h, w, 3) uint8, red green blue
decode(data, name, grey=True)   (h, w, 1) uint8

kinds      JPEG PNG WEBP GIF BMP TIFF, and no other, whatever the name of the file says
size       at least 1 x 1, at most 50 million pixels, no side more than 200 times the other; a file of at most 64 MiB
frame      the first of several, turned as its EXIF says
colour     grey, palette and CMYK become RGB; what is transparent lies on white
16 bits    grey v becomes (v + 128) // 257; 32-bit integers and floats are refused: their white is anybody's guess
effort     a file of countless pieces, or of more than 2 MiB beside its pixels, is refused: no picture takes 2 s or 1 GiB, but
           for honest work on megabytes of noise
"""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from dmst.errors import BadImageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MOST_BYTES = 64 * 2**20
MOST_PIXELS = 50_000_000
MOST_ASPECT = 200
MOST_WORK = 20 * MOST_PIXELS  # pixels x scans of a JPEG: a small file can hold a million scans, each over all pixels
MOST_READS = {"header": 10_000, "pixels": 200_000}  # of at most 32 KiB: a file can hold millions of empty chunks
MOST_BESIDE = 2 * 2**20  # bytes in pieces of more than 64 KiB, which pixels never come in: tables of a TIFF, profiles, remarks
MOST_EXIF = 2**20
BITS, PHOTOMETRIC = 258, 262  # tags of TIFF
REFUSED = {
    "I": "it has 32-bit or signed integer pixels, whose white level is not known: save it with 8 or 16 bits per channel",
    "F": "it has floating-point pixels, whose white level is not known: save it with 8 or 16 bits per channel",
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
    if raw.startswith(b"\xff\xd8") and raw.count(b"Exif\0\0") << 16 > MOST_EXIF:
        raise _Refusal("it has EXIF in more than 16 parts: decoding would take too long")
    reader = _Reader(raw)
    try:
        image: Image.Image = Image.open(reader, formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise _Refusal(f"it is not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image") from None
    except Image.DecompressionBombError:
        raise _Refusal(f"it has more than {MOST_PIXELS:,} pixels") from None
    with image:
        _measure(image, raw)
        reader.left = MOST_READS["pixels"]
        image.load()
        if image.format == "WEBP":
            image = image.copy()  # without its decoder, which keeps three more of the picture
    with contextlib.suppress(Exception):  # damaged remarks on a sound picture
        ImageOps.exif_transpose(image, in_place=True)
    pixels = np.array(_flat(image, "L" if grey else "RGB"))
    return pixels[:, :, None] if grey else pixels


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
    tags = getattr(image, "tag_v2", {})
    if tags.get(BITS, (16,)) != (16,) or tags.get(PHOTOMETRIC) == 0:
        raise _Refusal("it has 9 to 15 bits per pixel, or 16 with white as zero: save it with 8 bits")
    values = np.asarray(image).astype(np.uint32)
    values += 128  # in place: 50 million of them are 200 MB
    values //= 257
    return Image.fromarray(values.astype(np.uint8))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"it cannot be read ({error.strerror})"
    return str(error) if isinstance(error, _Refusal) else f"it cannot be decoded ({str(error) or type(error).__name__})"


class _Refusal(Exception):
    """A rule of this file, told in full."""


class _Reader(io.BytesIO):
    """The bytes of a file, for so many reads: Pillow would walk through millions of empty pieces one by one, and make an object
    of every number in the tables of a TIFF."""

    left, beside = MOST_READS["header"], MOST_BESIDE

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.left -= 1 + len(data) // 2**15
        if size is not None and size > 2**16:
            self.beside -= len(data)
        if self.left < 0:
            raise _Refusal("it is made of too many small pieces: decoding would take too long")
        if self.beside < 0:
            raise _Refusal(f"it holds more than {MOST_BESIDE >> 20} MiB beside its pixels: decoding would take too long")
        return data
