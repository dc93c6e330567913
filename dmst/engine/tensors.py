"""Tensors as a safetensors file, piece by piece, so that no second copy of them is held.

    8 bytes    length of the header, little end first
    header     JSON: name -> dtype, shape, data_offsets; spaces up to a multiple of 8
    data       one tensor after the other, the widest elements first, so that each is aligned

The bytes are those of `safetensors.torch.save`. Tensors may lie on any device, in any strides, and share memory: each is copied
to the CPU by itself when its turn comes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dmst.errors import BadFileError, OptionError
from dmst.models.files import tensors_from

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
LONGEST_HEADER = 100_000_000  # safetensors reads no longer one
MOST_AXES = 64  # torch computes with no more


def pieces(what: str, tensors: Mapping[str, Tensor]) -> tuple[int, Iterator[bytes | memoryview]]:
    """The size of the file, and its bytes as they come. `what` is how a message calls it."""
    ordered = _ordered(what, tensors)
    head = _header(what, ordered)
    return len(head) + sum(x.nbytes for x in ordered.values()), _stream(head, ordered)


def read(path: Path, raw: bytes) -> dict[str, Tensor]:
    """What `pieces` wrote, on the CPU, by name. Another header that means the same, or names one tensor twice, is refused."""
    found = tensors_from(path, raw)
    try:
        same = raw.startswith(_header(path.name, _ordered(path.name, found)))
    except OptionError:
        same = False
    if not same:
        raise BadFileError(f"{path} does not have the header that belongs to its tensors: it was not written by this program.")
    return dict(sorted(found.items()))


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first tensor that holds NaN or infinity."""
    return next((name for name, x in tensors.items() if x.is_floating_point() and not torch.isfinite(x).all()), None)


def fit(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str = "the checkpoint") -> None:
    """Exact names, shapes and dtypes, or BadFileError that names the first that differs."""
    if missing := [name for name in wanted if name not in tensors]:
        raise BadFileError(f"{what} does not fit: {missing[0]} is missing ({len(missing)} in all).")
    if unknown := [name for name in tensors if name not in wanted]:
        raise BadFileError(f"{what} does not fit: {unknown[0]} is unknown here ({len(unknown)} in all).")
    for name, x in wanted.items():
        here, there = ((y.dtype, tuple(y.shape)) for y in (x, tensors[name]))
        if here != there:
            raise BadFileError(
                f"{what} does not fit: {name} is {there[0]} of shape {there[1]}, and {here[0]} of shape {here[1]} is needed."
            )


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
        raise OptionError(f"{what}: safetensors takes no tensor called __metadata__ and no more names than fit in 100 MB.")
    return struct.pack("<Q", len(body)) + body


def _stream(head: bytes, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield head
    for x in tensors.values():
        if x.numel():
            yield x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
