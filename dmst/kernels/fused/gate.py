"""The gate of one sample, k numbers, and its pullback: the tables of `form.GATE`, inside a kernel.

pooled_k = score_sum_k / n        gate_k = scale * activation_k(pooled)
sparsemax: with s -= max(s),  tau = max_j (sum of the s_i >= s_j, less 1) / (how many they are),  gate = max(s - tau, 0)
its pullback: the mean over the support is taken out
"""

from __future__ import annotations

import triton
import triton.language as tl

GATES = {None: 0, "sparsemax": 1, "sigmoid": 2, "relu": 3, "gelu": 4, "uniform": 5}
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
