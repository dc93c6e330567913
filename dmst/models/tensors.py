"""Tensors as a safetensors file: to bytes and back, and whether they are those of a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dmst.errors import BadFileError

LONGEST_HEADER = 2**23  # bytes, some 60,000 tensors; safetensors would read 100 MB, in a minute
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file of copies: tensors may lie on any device, in any strides, and share memory."""
    return safetensors.torch.save({name: x.detach().to("cpu", copy=True).contiguous() for name, x in tensors.items()})


def from_bytes(path: Path, raw: bytes) -> dict[str, Tensor]:
    """What a safetensors file holds, by name; nothing in it is NaN or infinite."""
    try:
        if (length := int.from_bytes(raw[:8], "little")) > LONGEST_HEADER:
            raise ValueError(f"its header is said to have {length:,} bytes, and {LONGEST_HEADER:,} is the most")
        found = safetensors.torch.load(raw)
        bad = not_finite(found)  # a RuntimeError where a tensor has more axes than torch computes with
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise BadFileError(f"{path} is not a safetensors file ({str(error).partition(chr(10))[0]}).") from error
    if bad:
        raise BadFileError(f"{path}: {bad} holds NaN or infinity.")
    return found


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first tensor that holds NaN or infinity."""
    return next((name for name, x in tensors.items() if x.dtype in FLOATS and not torch.isfinite(x).all()), None)


def fit(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str, *, any_float: bool = False) -> None:
    """Exact names, shapes and dtypes, or BadFileError that says which differ. `any_float`: one floating dtype for all."""
    lists = (("missing", sorted(wanted.keys() - found.keys())), ("unknown", sorted(found.keys() - wanted.keys())))
    if told := [f"{word} {len(names)} ({', '.join(names[:3])}...)" for word, names in lists if names]:
        raise BadFileError(f"{what} does not fit: {'; '.join(told)}.")
    for name, x in wanted.items():
        there, here = found[name], x
        same_shape = there.shape == here.shape or (there.shape, here.shape) == ((), (1,))  # () in files of before 0.1.0
        same_dtype = there.dtype == here.dtype or (any_float and there.dtype in FLOATS and here.dtype in FLOATS)
        if not (same_shape and same_dtype):
            raise BadFileError(
                f"{what} does not fit: {name} is {there.dtype} of shape {tuple(there.shape)}, and {here.dtype} of shape "
                f"{tuple(here.shape)} is needed."
            )
    if len(kinds := {x.dtype for x in found.values() if x.is_floating_point()}) > 1 and any_float:
        raise BadFileError(f"{what} mixes {', '.join(sorted(map(str, kinds)))}: a model has one dtype.")
