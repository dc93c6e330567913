"""Column sums of a matrix in float32, for the gradient of a bias: one row of partial sums a program, added up in order."""

from __future__ import annotations

import triton
import triton.language as tl

from dmst.kernels.fused.launch import launched


@launched
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
