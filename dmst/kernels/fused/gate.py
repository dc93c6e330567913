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
GATES = {"sparsemax": 1, "sigmoid": 2, "relu": 3, "gelu": 4, "uniform": 5}
SPARSEMAX: tl.constexpr = tl.constexpr(1)
SIGMOID: tl.constexpr = tl.constexpr(2)
RELU: tl.constexpr = tl.constexpr(3)
GELU: tl.constexpr = tl.constexpr(4)


@triton.jit
def _sparsemax(s, heads, K: tl.constexpr, ACTIVE: tl.constexpr):
    """`ACTIVE` > 0 keeps that many of the largest, the lower index first. A NaN anywhere makes all of it NaN."""
    valid = heads < K
    s = tl.where(valid, s, float("-inf"))
    if ACTIVE > 0:
        before = (s[None, :] == s[:, None]) & (heads[None, :] < heads[:, None])
        larger = s[None, :] > s[:, None]
        rank = tl.sum((larger | before).to(tl.int32), 1)
        s = tl.where((rank >= ACTIVE) & (s == s), float("-inf"), s)
    s = s - tl.max(s, 0)
    broken = tl.max((valid & (s != s)).to(tl.int32), 0) > 0
    at_least = s[None, :] >= s[:, None]  # [j, i]: s_i >= s_j
    total = tl.sum(tl.where(at_least, s[None, :], 0.0), 1)
    count = tl.sum(at_least.to(tl.float32), 1)
    finite = s > float("-inf")
    tau = tl.max(tl.where(finite, (total - 1.0) / tl.maximum(count, 1.0), float("-inf")), 0)
    value = tl.maximum(s - tau, 0.0)
    value = tl.where(finite, value, 0.0)
    return tl.where(broken, float("nan"), value)


@triton.jit
def activate(pooled, heads, K: tl.constexpr, GATE: tl.constexpr, ACTIVE: tl.constexpr):
    """The activation, before the scale; 0 beyond the last head."""
    if GATE == SPARSEMAX:
        value = _sparsemax(pooled, heads, K, ACTIVE)
    elif GATE == SIGMOID:
        value = tl.sigmoid(pooled)
    elif GATE == RELU:
        value = tl.where(pooled != pooled, pooled, tl.maximum(pooled, 0.0))
    elif GATE == GELU:
        value = 0.5 * pooled * (1.0 + tl.erf(pooled * 0.7071067811865476))
    else:
        value = tl.full(heads.shape, 1.0 / K, tl.float32)
    return tl.where(heads < K, value, 0.0)


@triton.jit
def pull_back(grad, pooled, heads, K: tl.constexpr, GATE: tl.constexpr, ACTIVE: tl.constexpr):
    """From the gradient of the activation's value to that of `pooled`."""
    if GATE == SPARSEMAX:
        support = activate(pooled, heads, K, GATE, ACTIVE) > 0
        inside = tl.where(support, grad, 0.0)
        mean = tl.sum(inside, 0) / tl.maximum(tl.sum(support.to(tl.float32), 0), 1.0)
        slope = tl.where(support, grad - mean, 0.0)
    elif GATE == SIGMOID:
        value = tl.sigmoid(pooled)
        slope = grad * value * (1.0 - value)
    elif GATE == RELU:
        slope = tl.where(pooled > 0, grad, 0.0)
    elif GATE == GELU:
        density = tl.exp(-0.5 * pooled * pooled) * 0.3989422804014327
        slope = grad * (0.5 * (1.0 + tl.erf(pooled * 0.7071067811865476)) + pooled * density)
    else:
        slope = tl.zeros_like(grad)
    return tl.where(heads < K, slope, 0.0)


@triton.jit
def opened(
    sums_ptr, sample, n, tiles,
    scale: tl.constexpr, K: tl.constexpr, ALL: tl.constexpr, GATE: tl.constexpr, ACTIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Pooled scores and gate of all heads of a sample (ALL), from sums of its scores (b, tiles, k)."""
    head = tl.arange(0, ALL)
    total = tl.zeros((ROWS, ALL), tl.float32)
    for first in range(0, tiles, ROWS):
        which = first + tl.arange(0, ROWS)
        real = (which[:, None] < tiles) & (head[None, :] < K)
        total += tl.load(sums_ptr + (sample * tiles + which[:, None]) * K + head[None, :], mask=real, other=0.0)
    pooled = tl.sum(total, 0) / tl.maximum(n * 1.0, 1.0)
    return pooled, scale * activate(pooled, head, K, GATE, ACTIVE)


@triton.jit
def of_heads(x, heads):
    """Of numbers (ALL), those of these heads."""
    every = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(heads[:, None] == every[None, :], x[None, :], 0.0), 1)


@triton.jit
def gate_adjoint_kernel(
    dgate_ptr, pooled_ptr, dpooled_ptr, n,
    scale: tl.constexpr, K: tl.constexpr, ALL: tl.constexpr, GATE: tl.constexpr, ACTIVE: tl.constexpr,
):  # fmt: skip
    sample, head = tl.program_id(0).to(tl.int64), tl.arange(0, ALL)
    dgate = tl.load(dgate_ptr + sample * K + head, mask=head < K, other=0.0) * scale
    pooled = tl.load(pooled_ptr + sample * K + head, mask=head < K, other=0.0)
    pulled = pull_back(dgate, pooled, head, K, GATE, ACTIVE)
    tl.store(dpooled_ptr + sample * K + head, pulled / (n * 1.0), mask=head < K)


def sizes(sums: Tensor | None, gate_name: str, scale: float, active: int) -> tuple[Tensor | None, dict[str, Any]]:
    """The sums that `opened` reads, few rows of them, and its constants; `active`: heads at most, 0: all."""
    if sums is None:
        return None, {"scale": 1.0, "ALL": 1, "GATE": 0, "ACTIVE": 0, "ROWS": 1}
    if sums.shape[1] > MOST_ROWS:
        sums = sums.sum(1, keepdim=True)
    every = power_of_two(sums.shape[2])
    return sums, {
        "scale": scale,
        "ALL": every,
        "GATE": GATES[gate_name],
        "ACTIVE": active,
        "ROWS": max(1, min(16, 512 // every)),
    }


@op()
def gate_adjoint(dgate: Tensor, pooled: Tensor, n: int, gate_name: str, scale: float, active: int) -> Tensor:
    """What each token's scores get of dgate, (b, k)."""
    b, k = dgate.shape
    dpooled = torch.empty_like(dgate)
    launch(
        gate_adjoint_kernel, (b,), dgate, pooled, dpooled, n,
        scale=scale, K=k, ALL=power_of_two(k), GATE=GATES[gate_name], ACTIVE=active, num_warps=1,
    )  # fmt: skip
    return dpooled
