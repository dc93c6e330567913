"""Tensors as a safetensors file, piece by piece, so that no second copy of them is held.

    8 bytes    length of the header, little end first
    header     JSON: name -> dtype, shape, data_offsets; spaces up to a multiple of 8
    data       one tensor after the other, the widest elements first, so that each is aligned

Written are the bytes of `safetensors.torch.save`. Tensors may lie on any device, in any strides, and share memory: each is
copied to the CPU by itself when its turn comes. A header is read with care: it is no longer than the tensors that are wanted
could make it, no name comes twice, and its tensors fill the file. Only then may the data be read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dmst.errors import BadFileError, OptionError, shown

DTYPES = {  # as safetensors names them, in its order
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
WORDS = {word: dtype for dtype, word in DTYPES.items()}
LONGEST_HEADER = 2**23  # some 60,000 tensors; safetensors would read 100 MB, in a minute
METADATA = 2**16  # bytes, where another program wrote the header
MOST_AXES = 64  # torch computes with no more


class Entry(NamedTuple):
    """A tensor, as a header states it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def pieces(what: str, tensors: Mapping[str, Tensor]) -> tuple[int, Iterator[bytes | memoryview]]:
    """The size of the file, and its bytes as they come. `what` is how a message calls it."""
    ordered = _ordered(what, tensors)
    head = _header(what, ordered)
    return len(head) + sum(x.nbytes for x in ordered.values()), _stream(head, ordered)


def read(path: Path, raw: bytes) -> dict[str, Tensor]:
    """What `pieces` wrote, on the CPU, by name. Another header that means the same, or names one tensor twice, is refused."""
    if (length := int.from_bytes(raw[:8], "little")) > LONGEST_HEADER:
        raise _not_one(path, f"its header is said to have {length:,} bytes, and {LONGEST_HEADER:,} is the most")
    found = tensors_from(path, raw)
    try:
        same = raw.startswith(_header(path.name, _ordered(path.name, found)))
    except OptionError:
        same = False
    if not same:
        raise BadFileError(f"{path} does not have the header that belongs to its tensors: it was not written by this program.")
    return dict(sorted(found.items()))


def tensors_from(path: Path, raw: bytes) -> dict[str, Tensor]:
    """What a safetensors file holds, by name."""
    try:
        return safetensors.torch.load(raw)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _not_one(path, str(error).partition("\n")[0]) from error  # torch adds a stack of C++


def most_bytes(wanted: Mapping[str, Tensor]) -> tuple[int, int]:
    """How many bytes a header of such tensors can have, whoever wrote it, and their data in the widest dtype."""
    head = METADATA + sum(256 + 6 * len(name) + 32 * x.ndim for name, x in wanted.items())
    return head, 8 * sum(x.numel() for x in wanted.values())


def header(path: Path, file: BinaryIO, size: int, most: int) -> dict[str, Entry]:
    """What the tensors of a file of `size` bytes are by its header of at most `most` bytes; the data are not read."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, most):
        raise _not_one(path, f"its header is said to have {length:,} bytes, and {max(min(size - 8, most), 0):,} is the most")
    try:
        told = json.loads(file.read(length), object_pairs_hook=_once)
        if type(told) is not dict or type(told.pop("__metadata__", {})) is not dict:
            raise ValueError("its header is no object")
        placed = sorted((*_place(name, entry), name) for name, entry in told.items())
    except (ValueError, RecursionError) as error:
        raise _not_one(path, str(error)) from error
    end = 0
    for start, stop, name in placed:
        if start != end:
            raise _not_one(path, f"{shown(name)} begins at {start:,} of the data, and {end:,} is where it must")
        end = stop
    if end != size - 8 - length:
        raise _not_one(path, f"its tensors have {end:,} bytes, and it has {size - 8 - length:,} for them")
    return {name: Entry(WORDS[entry["dtype"]], tuple(entry["shape"])) for name, entry in told.items()}


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first tensor that holds NaN or infinity."""
    return next((name for name, x in tensors.items() if x.is_floating_point() and not torch.isfinite(x).all()), None)


def fits(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape loads as another: what is one number in a row was a scalar in old files."""
    return found == wanted or (found, wanted) == ((), (1,))


def fit(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str = "the checkpoint") -> None:
    """Exact names, shapes and dtypes, or BadFileError that names the first that differs."""
    if missing := [name for name in wanted if name not in tensors]:
        raise BadFileError(f"{what} does not fit: {missing[0]} is missing ({len(missing)} in all).")
    if unknown := [name for name in tensors if name not in wanted]:
        raise BadFileError(f"{what} does not fit: {unknown[0]} is unknown here ({len(unknown)} in all).")
    for name, x in wanted.items():
        here, there = ((y.dtype, tuple(y.shape)) for y in (x, tensors[name]))
        if here[0] != there[0] or not fits(there[1], here[1]):
            raise BadFileError(
                f"{what} does not fit: {name} is {there[0]} of shape {there[1]}, and {here[0]} of shape {here[1]} is needed."
            )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; JSON itself would let the last of two equal names win."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(name for name in found if names.count(name) > 1))} comes twice")
    return found


def _place(name: str, entry: Any) -> tuple[int, int]:
    """From where to where the data of a tensor go, if its entry of the header is whole and says so of its shape too."""
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown(name)} does not have dtype, shape and data_offsets alone")
    word, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(word) is not str or word not in WORDS:
        raise ValueError(f"{shown(name)} is of dtype {shown(word)}, and {', '.join(WORDS)} are read")
    if not all(type(x) is list and all(type(i) is int and 0 <= i < 2**63 for i in x) for x in (shape, place)):
        raise ValueError(f"the shape or data_offsets of {shown(name)} are no lists of whole numbers")
    if len(shape) > MOST_AXES or len(place) != 2 or place[1] - place[0] != math.prod(shape) * WORDS[word].itemsize:
        raise ValueError(f"{shown(name)} of shape {shown(shape)} in {word} does not take the bytes {shown(place)}")
    return place[0], place[1]


def _not_one(path: Path, why: str) -> BadFileError:
    return BadFileError(f"{path} is not a safetensors file ({why}).")


def _ordered(what: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    order = list(DTYPES)
    for name, x in tensors.items():
        if x.dtype not in DTYPES or x.is_meta or x.layout != torch.strided or x.ndim > MOST_AXES:
            kind = "on the meta device" if x.is_meta else f"{x.layout} of {x.dtype} with {x.ndim} axes"
            raise OptionError(
                f"{what}: {name} is {kind}. Kept are plain tensors of {', '.join(map(str, order))} with up to {MOST_AXES} axes."
            )
    return dict(sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0])))


def _header(what: str, tensors: Mapping[str, Tensor]) -> bytes:
    told, end = {}, 0
    for name, x in tensors.items():
        start, end = end, end + x.nbytes
        told[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    try:
        body = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"{what}: a name is no text ({error}).") from error
    body += b" " * (-len(body) % 8)
    if "__metadata__" in told or len(body) > LONGEST_HEADER:
        raise OptionError(f"{what}: safetensors takes no tensor called __metadata__ and no more names than fit in 8 MiB.")
    return struct.pack("<Q", len(body)) + body


def _stream(head: bytes, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield head
    for x in tensors.values():
        if x.numel():
            yield x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
