"""Column sums of a matrix in float32, for the gradient of a bias: one row of partial sums a program, added up in order.

Partial sums of several gradients are added up by one launch, `totals_kernel`: each has rows and columns of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def columns_kernel(
    x_ptr, out_ptr, rows, span, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):
    split = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    stop = tl.minimum((split + 1) * span, rows)
    for first in tl.range(split * span, stop, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        real = (row[:, None] < stop) & (column[None, :] < D)
        total += tl.load(x_ptr + row[:, None] * D + column[None, :], mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + split * D + column, tl.sum(total, 0), mask=column < D)


@triton.jit
def _total(part_ptr, out_ptr, rows, columns, block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, rows, ROWS, num_stages=1):
        row = first + tl.arange(0, ROWS)
        real = (row[:, None] < rows) & (column[None, :] < columns)
        total += tl.load(part_ptr + row[:, None].to(tl.int64) * columns + column[None, :], mask=real, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=column < columns)


# what the compiler knew of one gradient's sizes would decide in which order it adds up the others, which go with it or not
SIZES = [f"{kind}{place}" for kind in "rc" for place in range(6)]


@triton.jit(do_not_specialize=SIZES)
def totals_kernel(
    p0, p1, p2, p3, p4, p5, o0, o1, o2, o3, o4, o5, r0, r1, r2, r3, r4, r5, c0, c1, c2, c3, c4, c5,
    COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out_i = the sum of the rows of part_i (r_i, c_i); a program has a few columns of one of them."""
    block = tl.program_id(0)
    blocks = tl.cdiv(c0, COLUMNS)
    if block < blocks:
        _total(p0, o0, r0, c0, block, ROWS, COLUMNS)
    if COUNT > 1:
        block -= blocks
        blocks = tl.cdiv(c1, COLUMNS)
        if (block >= 0) & (block < blocks):
            _total(p1, o1, r1, c1, block, ROWS, COLUMNS)
    if COUNT > 2:
        block -= blocks
        blocks = tl.cdiv(c2, COLUMNS)
        if (block >= 0) & (block < blocks):
            _total(p2, o2, r2, c2, block, ROWS, COLUMNS)
    if COUNT > 3:
        block -= blocks
        blocks = tl.cdiv(c3, COLUMNS)
        if (block >= 0) & (block < blocks):
            _total(p3, o3, r3, c3, block, ROWS, COLUMNS)
    if COUNT > 4:
        block -= blocks
        blocks = tl.cdiv(c4, COLUMNS)
        if (block >= 0) & (block < blocks):
            _total(p4, o4, r4, c4, block, ROWS, COLUMNS)
    if COUNT > 5:
        block -= blocks
        blocks = tl.cdiv(c5, COLUMNS)
        if (block >= 0) & (block < blocks):
            _total(p5, o5, r5, c5, block, ROWS, COLUMNS)
