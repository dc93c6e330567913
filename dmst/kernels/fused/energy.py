"""TSSA's membership from projected energy, and its way back.

forward     e_nk = sum_i s_nki^2/E_ki,  E_ki = sum_n s_nki^2         membership = softmax_k(temperature_k e_nk + score_nk)
backward    dS_nki += 2 s/E temperature_k (x_nk - mean_ki),  x = dlogits,  mean_ki = sum_n x_nk s_nki^2/E_ki
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels.form import Form
from dmst.kernels.fused.launch import launch, op
from dmst.kernels.fused.moments import energies, sweep_of
from dmst.kernels.fused.tiles import by_group, group_block, places, read, rows, write
from dmst.kernels.plan import over, power_of_two


@triton.jit
def energy_kernel(
    s_ptr, channel_ptr, temperature_ptr, score_ptr, out_ptr,
    n, tiles,
    K: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    NORMALIZE: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """HEADS covers every head: the softmax runs over them."""
    sample, start = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * TOKENS
    _, head, column, inside = group_block(HEADS, WIDTH, 1, K, P, 0)
    row = sample * n + start
    place, some, nth = places(head, TOKENS, K)
    place, some = row * K + place, some & (nth < n - start)
    s = by_group(read(s_ptr + row * (K * P), *rows(0, TOKENS, HEADS, WIDTH, 1, K, P), n - start), HEADS)
    square = s * s
    if NORMALIZE:
        square = square / tl.load(channel_ptr + sample * (K * P) + column, mask=inside, other=1.0)[None]
    temperature = tl.load(temperature_ptr + head, mask=head < K, other=0.0).to(tl.float32)
    logits = tl.sum(square, 2, keep_dims=True) * temperature[None, :, None]
    if SCORED:
        logits += tl.load(score_ptr + place, mask=some, other=0.0)
    logits = tl.where(head[None, :, None] < K, logits, float("-inf"))
    weight = tl.exp(logits - tl.max(logits, 1)[:, None])
    tl.store(out_ptr + place, weight / tl.sum(weight, 1)[:, None], mask=some)


@triton.jit
def energy_adjoint_kernel(
    ds_ptr, s_ptr, x_ptr, channel_ptr, mean_ptr, temperature_ptr, dbias_ptr,
    n, span, splits,
    K: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    NORMALIZE: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sample, split, start = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * GROUPS
    _, head, column, inside = group_block(GROUPS, WIDTH, PARTS, K, P, start)
    at, known, token = rows(start, TOKENS, GROUPS, WIDTH, PARTS, K, P)
    place, some, nth = places(head, TOKENS, K)
    slope, mean = 2.0 * tl.load(temperature_ptr + head, mask=head < K, other=0.0).to(tl.float32)[:, None], 0.0
    if NORMALIZE:
        slope = slope / tl.load(channel_ptr + sample * (K * P) + column, mask=inside, other=1.0)
        mean = tl.load(mean_ptr + sample * (K * P) + column, mask=inside, other=0.0)[None]
    bias = tl.zeros((TOKENS, GROUPS, WIDTH), tl.float32)
    row, count = sample * n + split * span, tl.minimum(span, n - split * span)
    ds_ptr += row * (K * P)
    s_ptr += row * (K * P)
    x_ptr += row * K
    for first in tl.range(0, count, TOKENS, num_stages=STAGES):
        x = read(x_ptr + first * K, place, some, nth, count - first)
        s = by_group(read(s_ptr + first * (K * P), at, known, token, count - first), GROUPS)
        ds = by_group(read(ds_ptr + first * (K * P), at, known, token, count - first), GROUPS) + s * slope[None] * (x - mean)
        write(ds_ptr + first * (K * P), ds, at, known, token, count - first)
        if BIAS:
            bias += ds
    if BIAS:
        tl.store(dbias_ptr + (sample * splits + split) * (K * P) + column, tl.sum(bias, 0), mask=inside)


@op()
def energy(projected: Tensor, scores: Tensor | None, temperature: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Membership (b, n, k), and E (b, k, p), empty where energies are not normalised."""
    told, (b, n, d) = Form.read(form), projected.shape
    k, p = told.num_heads, d // told.num_heads
    channel = projected.new_empty(0, k, p, dtype=torch.float32)
    if told.normalize_tokens:
        channel = energies(projected, None, told).clamp(min=1e-24)
    out = torch.empty(b, n, k, device=projected.device, dtype=torch.float32)
    heads, width = power_of_two(k), power_of_two(p)
    tokens = max(1, min(16, 4096 // (heads * width)))
    tiles = over(n, tokens)
    launch(
        energy_kernel, (b * tiles,), projected, channel, temperature, scores, out, n, tiles,
        K=k, P=p, HEADS=heads, WIDTH=width, TOKENS=tokens, NORMALIZE=told.normalize_tokens, SCORED=scores is not None,
    )  # fmt: skip
    return out, channel


@op(mutates=("ds",))
def energy_adjoint(
    ds: Tensor, projected: Tensor, dlogits: Tensor, channel: Tensor, temperature: Tensor, form: str, wants_bias: bool
) -> tuple[Tensor, Tensor]:
    """Adds to dS what the energies ask of it; the gradients of the temperature (k, 1) and of the bias (b, splits, d)."""
    told, (b, n, d) = Form.read(form), projected.shape
    k, p = told.num_heads, d // told.num_heads
    sweep, normalize = sweep_of(projected, told), told.normalize_tokens
    mean = energies(projected, dlogits, told)
    mean = mean / channel if normalize else mean
    dtemperature = mean.sum((0, 2)).unsqueeze(-1)
    if normalize:  # at the floor the divisor is a constant
        mean = torch.where(channel > 1e-24, mean, 0)
    dbias = torch.empty(b if wants_bias else 0, sweep.splits, d, device=ds.device, dtype=torch.float32)
    launch(
        energy_adjoint_kernel, (b, sweep.splits, sweep.blocks),
        ds, projected, dlogits, channel, mean, temperature, dbias, n, sweep.span, sweep.splits,
        K=k, P=p, **sweep.block, NORMALIZE=normalize, BIAS=wants_bias, STAGES=sweep.stages, num_warps=sweep.warps,
    )  # fmt: skip
    return dtemperature, dbias
