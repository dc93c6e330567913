"""The weights of a layer in the compute dtype, by one launch for all that need it: torch's own takes five times as long."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from dmst.kernels.arithmetic import cast
from dmst.kernels.fused.launch import Cut, launch, planned
from dmst.kernels.plan import over

MOST, BLOCK = 4, 2048  # tensors; numbers of one program


@triton.jit
def _cast(x_ptr, out_ptr, size, block, BLOCK: tl.constexpr):
    at = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < size).to(out_ptr.dtype.element_ty), mask=at < size)


@triton.jit
def casts_kernel(
    x0, x1, x2, x3, o0, o1, o2, o3, s0, s1, s2, s3, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """o_i = x_i, of s_i numbers each; a program has a block of one of them."""
    block = tl.program_id(0)
    blocks = tl.cdiv(s0, BLOCK)
    if block < blocks:
        _cast(x0, o0, s0, block, BLOCK)
    if COUNT > 1:
        block -= blocks
        blocks = tl.cdiv(s1, BLOCK)
        if (block >= 0) & (block < blocks):
            _cast(x1, o1, s1, block, BLOCK)
    if COUNT > 2:
        block -= blocks
        blocks = tl.cdiv(s2, BLOCK)
        if (block >= 0) & (block < blocks):
            _cast(x2, o2, s2, block, BLOCK)
    if COUNT > 3:
        block -= blocks
        blocks = tl.cdiv(s3, BLOCK)
        if (block >= 0) & (block < blocks):
            _cast(x3, o3, s3, block, BLOCK)


def cast_all(dtype: torch.dtype, *tensors: Any) -> list[Any]:
    """Each tensor or None, four at most."""
    out = list(tensors)
    plain = [i for i, x in enumerate(out) if x is not None and x.dtype != dtype and x.is_contiguous()]
    if len(plain) > 1:
        given = [out[i] for i in plain]
        made = [torch.empty_like(x, dtype=dtype) for x in given]
        sizes, spare = [x.numel() for x in given], MOST - len(plain)
        none = (None,) * spare
        launch(casts_kernel, _plan(tuple(sizes)), *given, *none, *made, *none, *sizes, *(0,) * spare)
        for i, x in zip(plain, made, strict=True):
            out[i] = x
    return [cast(x, dtype) for x in out]


@lru_cache(1024)
def _plan(sizes: tuple[int, ...]) -> Cut:
    return planned((sum(over(size, BLOCK) for size in sizes),), COUNT=len(sizes), BLOCK=BLOCK, num_warps=4)
