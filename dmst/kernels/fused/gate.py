"""The gate of each sample, k numbers, and its pullback: the tables of `form.GATE`, in registers.

pooled_k = score_sum_k / n        gate_k = scale * activation_k(pooled)        dpooled_k = pullback(scale dgate)_k / n
sparsemax: with s -= max(s),  tau = max_j (sum of the s_i >= s_j, less 1) / (how many they are),  gate = max(s - tau, 0)
its pullback: the mean over the support is taken out
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels.fused.launch import launch, op
from dmst.kernels.plan import power_of_two

MOST_ROWS = 128  # that a program adds up for itself
GATES = {"sparsemax": 1, "gelu": 2}
SPARSEMAX: tl.constexpr = tl.constexpr(1)


@triton.jit
def _sparsemax(s, heads, K: tl.constexpr):
    """A NaN anywhere makes all of it NaN."""
    valid = heads < K
    s = tl.where(valid, s, float("-inf"))
    s = s - tl.max(s, 0)
    broken = tl.max((valid & (s != s)).to(tl.int32), 0) > 0
    at_least = s[None, :] >= s[:, None]  # [j, i]: s_i >= s_j
    total = tl.sum(tl.where(at_least, s[None, :], 0.0), 1)
    count = tl.sum(at_least.to(tl.float32), 1)
    tau = tl.max(tl.where(valid, (total - 1.0) / count, float("-inf")), 0)
    return tl.where(broken, float("nan"), tl.where(valid, tl.maximum(s - tau, 0.0), 0.0))


@triton.jit
def activate(pooled, heads, K: tl.constexpr, GATE: tl.constexpr):
    """The activation, before the scale; 0 beyond the last head."""
    if GATE == SPARSEMAX:
        return _sparsemax(pooled, heads, K)
    return tl.where(heads < K, 0.5 * pooled * (1.0 + tl.erf(pooled * 0.7071067811865476)), 0.0)


@triton.jit
def pull_back(grad, pooled, heads, K: tl.constexpr, GATE: tl.constexpr):
    """From the gradient of the activation's value to that of `pooled`."""
    if GATE == SPARSEMAX:
        support = _sparsemax(pooled, heads, K) > 0
        mean = tl.sum(tl.where(support, grad, 0.0), 0) / tl.maximum(tl.sum(support.to(tl.float32), 0), 1.0)
        return tl.where(support, grad - mean, 0.0)
    density = tl.exp(-0.5 * pooled * pooled) * 0.3989422804014327
    return grad * (0.5 * (1.0 + tl.erf(pooled * 0.7071067811865476)) + pooled * density)


@triton.jit
def opened(
    sums_ptr, sample, n, tiles, scale: tl.constexpr, K: tl.constexpr, ALL: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Pooled scores and gate of all heads of a sample (ALL), from sums of its scores (b, tiles, k)."""
    head = tl.arange(0, ALL)
    total = tl.zeros((ROWS, ALL), tl.float32)
    for first in range(0, tiles, ROWS):
        which = first + tl.arange(0, ROWS)
        real = (which[:, None] < tiles) & (head[None, :] < K)
        total += tl.load(sums_ptr + (sample * tiles + which[:, None]) * K + head[None, :], mask=real, other=0.0)
    pooled = tl.sum(total, 0) / tl.maximum(n * 1.0, 1.0)
    return pooled, scale * activate(pooled, head, K, GATE)


@triton.jit
def of_heads(x, heads):
    """Of numbers (ALL), those of these heads."""
    every = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(heads[:, None] == every[None, :], x[None, :], 0.0), 1)


@triton.jit
def gate_adjoint_kernel(
    dgate_ptr, pooled_ptr, dpooled_ptr, n, scale: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    sample, head, dgate = tl.program_id(0).to(tl.int64), tl.arange(0, ALL), tl.zeros((ALL,), tl.float32)
    for part in tl.static_range(PARTS):
        dgate += scale * tl.load(dgate_ptr + (sample * K + head) * PARTS + part, mask=head < K, other=0.0)
    pooled = tl.load(pooled_ptr + sample * K + head, mask=head < K, other=0.0)
    pulled = pull_back(dgate, pooled, head, K, GATE)
    tl.store(dpooled_ptr + sample * K + head, pulled / (n * 1.0), mask=head < K)


def sizes(sums: Tensor | None, gate: str, scale: float) -> tuple[Tensor | None, dict[str, Any]]:
    """The sums that `opened` reads, few rows of them, and its constants."""
    if sums is None:
        return None, {"scale": 1.0, "ALL": 1, "GATE": 0, "ROWS": 1}
    if sums.shape[1] > MOST_ROWS:
        sums = sums.sum(1, keepdim=True)
    every = power_of_two(sums.shape[2])
    return sums, {"scale": scale, "ALL": every, "GATE": GATES[gate], "ROWS": max(1, min(16, 512 // every))}


@op()
def gate_adjoint(dgate: Tensor, pooled: Tensor, n: int, gate: str, scale: float) -> Tensor:
    """What each token's scores get of dgate, (b, k); dgate may come in parts, (b, k parts)."""
    (b, k), dpooled = pooled.shape, torch.empty_like(pooled)
    constants = {"scale": scale, "K": k, "PARTS": dgate.shape[1] // k, "ALL": power_of_two(k), "GATE": GATES[gate]}
    launch(gate_adjoint_kernel, (b,), dgate, pooled, dpooled, n, **constants, num_warps=1)
    return dpooled
