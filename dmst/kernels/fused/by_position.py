"""The scores and their way back for large batches of bfloat16 tokens: the weights are rotated, not the tokens.

    rot_k(n)    = rot_n^T assign_k                                      once for all samples, (n, k, d)
    l_bnk       = <z_bn, rot_k(n)> + bias                               for each position a product over the batch
    dassign_k   = sum_n rot_n sum_b dscores_bnk z_bn

With k heads and b samples this rotates k rows a position in place of b. The tokens go to the tensor cores as they are. A weight
is written as the sum of three bfloat16 numbers (24 bits), so that its products with bfloat16 tokens are those of float32;
dscores as the sum of two, which is finer than the gradient's own rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.fused.launch import launch
from dmst.kernels.fused.turn import kind, turns, weight_pairs
from dmst.kernels.plan import over, power_of_two


@triton.jit
def rotated_kernel(
    assign_ptr, far_cos, far_sin, near_cos, near_sin, out_ptr, step, n,
    D: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, ASSIGN: tl.constexpr,
):  # fmt: skip
    """rot_k(n) in three terms: out (n, 3, HEADS, D), zeros beyond the last head."""
    position = tl.program_id(0)
    head = tl.arange(0, HEADS)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    even, odd = weight_pairs(assign_ptr, head[:, None], pair[None, :], ASSIGN, D, K, False)
    cos, sin = turns(far_cos, far_sin, near_cos, near_sin, position // step, position % step, pair[None, :], D // 2, False)
    even, odd = even * cos + odd * sin, odd * cos - even * sin
    x = tl.reshape(tl.join(even, odd), (HEADS, 2 * PAIRS))
    channel = tl.program_id(1) * 2 * PAIRS + tl.arange(0, 2 * PAIRS)
    at = out_ptr + (position.to(tl.int64) * 3 * HEADS + head[:, None]) * D + channel[None, :]
    inside = (head[:, None] < HEADS) & (channel[None, :] < D)
    for _ in tl.static_range(3):
        term = x.to(out_ptr.dtype.element_ty)
        tl.store(at, term, mask=inside)
        x -= term.to(tl.float32)
        at += HEADS * D


@triton.jit
def position_score_kernel(
    z_ptr, rotated_ptr, bias_ptr, out_ptr, score_ptr, b, n,
    D: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, SAMPLES: tl.constexpr, CHANNELS: tl.constexpr,
    BIAS: tl.constexpr, SIGMOID: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Membership (or score) and score (b, n, k). The columns of the product are the three terms of every head, and zeros."""
    position = tl.program_id(0)
    sample = tl.program_id(1) * SAMPLES + tl.arange(0, SAMPLES)
    row = sample.to(tl.int64) * n + position
    here = sample < b
    slot = tl.arange(0, 4 * HEADS)
    acc = tl.zeros((SAMPLES, 4 * HEADS), tl.float32)
    for first in tl.range(0, D, CHANNELS, num_stages=STAGES):
        channel = first + tl.arange(0, CHANNELS)
        z = tl.load(z_ptr + row[:, None] * D + channel[None, :], mask=here[:, None] & (channel[None, :] < D), other=0.0)
        real = (slot[None, :] < 3 * HEADS) & (channel[:, None] < D)
        at = rotated_ptr + (position * 3 * HEADS + slot[None, :]).to(tl.int64) * D + channel[:, None]
        acc = tl.dot(z, tl.load(at, mask=real, other=0.0), acc)
    scores = tl.sum(tl.reshape(acc, (SAMPLES, 4, HEADS)), 1)
    head = tl.arange(0, HEADS)
    some = here[:, None] & (head[None, :] < K)
    if BIAS:
        scores += tl.load(bias_ptr + head, mask=head < K, other=0.0).to(tl.float32)[None, :]
    if SUMS:
        tl.store(score_ptr + row[:, None] * K + head[None, :], scores, mask=some)
    value = tl.sigmoid(scores) if SIGMOID else scores
    tl.store(out_ptr + row[:, None] * K + head[None, :], value, mask=some)


@triton.jit
def _whole_dscores(dscores_ptr, dpooled_ptr, sample, row, here, head, K: tl.constexpr, GATED: tl.constexpr):
    some = here[:, None] & (head[None, :] < K)
    value = tl.load(dscores_ptr + row[:, None] * K + head[None, :], mask=some, other=0.0)
    if GATED:
        value += tl.load(dpooled_ptr + sample[:, None] * K + head[None, :], mask=some, other=0.0)
    return value


@triton.jit
def position_assign_kernel(
    z_ptr, dscores_ptr, dpooled_ptr, far_cos, far_sin, near_cos, near_sin, part_ptr, b, n, step, run,
    D: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, SAMPLES: tl.constexpr, CHANNELS: tl.constexpr, GATED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """sum_n rot_n sum_b dscores_bnk z_bn over a run of positions: part (runs, k, d)."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    pair = tl.program_id(1) * (CHANNELS // 2) + tl.arange(0, CHANNELS // 2)
    slot = tl.arange(0, 2 * HEADS)
    even_sum = tl.zeros((HEADS, CHANNELS // 2), tl.float32)
    odd_sum = even_sum
    begin = tl.program_id(0) * run
    for position in tl.range(begin, tl.minimum(begin + run, n), num_stages=1):
        acc = tl.zeros((2 * HEADS, CHANNELS), tl.float32)
        for first in tl.range(0, b, SAMPLES, num_stages=STAGES):
            sample = first + tl.arange(0, SAMPLES)
            row = sample.to(tl.int64) * n + position
            here = sample < b
            z = tl.load(z_ptr + row[:, None] * D + channel[None, :], mask=here[:, None] & (channel[None, :] < D), other=0.0)
            dscores = _whole_dscores(dscores_ptr, dpooled_ptr, sample, row, here, slot % HEADS, K, GATED)
            leading = dscores.to(z.dtype)
            terms = tl.where(slot[None, :] < HEADS, leading, (dscores - leading.to(tl.float32)).to(leading.dtype))
            acc = tl.dot(tl.trans(terms), z, acc)
        y = tl.sum(tl.reshape(acc, (2, HEADS, CHANNELS)), 0)
        even, odd = tl.split(tl.reshape(y, (HEADS, CHANNELS // 2, 2)))
        cos, sin = turns(far_cos, far_sin, near_cos, near_sin, position // step, position % step, pair[None, :], D // 2, False)
        even_sum += even * cos - odd * sin
        odd_sum += odd * cos + even * sin
    total = tl.reshape(tl.join(even_sum, odd_sum), (HEADS, CHANNELS))
    head = tl.arange(0, HEADS)
    real = (head[:, None] < K) & (channel[None, :] < D)
    tl.store(part_ptr + (tl.program_id(0).to(tl.int64) * K + head[:, None]) * D + channel[None, :], total, mask=real)


def score(
    z: Tensor, assign: Tensor, bias: Tensor | None, tables: list[Tensor], step: int, sigmoid: bool, pooled: bool
) -> tuple[Tensor, Tensor]:
    """As `score.score`; the scores themselves stand for the sums."""
    (b, n, d), k = z.shape, assign.shape[0]
    heads, pairs, batch = max(8, power_of_two(k)), min(64, power_of_two(d // 2)), plan.position_score(b, d)
    rotated = torch.empty(n, 3, heads, d, device=z.device, dtype=z.dtype)
    launch(
        rotated_kernel, (n, over(d // 2, pairs)), assign, *tables, rotated, step, n,
        D=d, K=k, HEADS=heads, PAIRS=pairs, ASSIGN=kind(assign), num_warps=4,
    )  # fmt: skip
    out = torch.empty(b, n, k, device=z.device, dtype=torch.float32)
    scores = torch.empty(b, n if pooled else 0, k, device=z.device, dtype=torch.float32)
    launch(
        position_score_kernel, (n, over(b, batch.samples)), z, rotated, bias, out, scores, b, n,
        D=d, K=k, HEADS=heads, SAMPLES=batch.samples, CHANNELS=batch.channels,
        BIAS=bias is not None, SIGMOID=sigmoid, SUMS=pooled, STAGES=3, num_warps=batch.warps,
    )  # fmt: skip
    return out, scores


def into_assign(z: Tensor, dscores: Tensor, dpooled: Tensor | None, tables: list[Tensor], step: int) -> Tensor:
    """As `score_adjoint.into_assign`: one row of partial sums a run of positions."""
    (b, n, d), k, batch = z.shape, dscores.shape[-1], plan.position_adjoint(z.shape[-1])
    run = max(1, n * over(d, batch.channels) // plan.POSITION_PROGRAMS)
    part = torch.empty(over(n, run), k, d, device=z.device, dtype=torch.float32)
    launch(
        position_assign_kernel, (over(n, run), over(d, batch.channels)), z, dscores, dpooled, *tables, part, b, n, step, run,
        D=d, K=k, HEADS=max(8, power_of_two(k)), GATED=dpooled is not None,
        SAMPLES=batch.samples, CHANNELS=batch.channels, STAGES=3, num_warps=batch.warps,
    )  # fmt: skip
    return part
