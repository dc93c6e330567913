"""Second moments of the projected tokens, by membership, in one sweep over them; and what comes next while they are at hand.

    energy_ki = sum_n pi_nk s_nki^2        mass_k = sum_n pi_nk        T = energy/(mass + delta)     (uniform: pi = 1, mass = n)
    whole sample:  update = f s            a second sweep, which finds its tokens in the cache
    split sample:  weighted = pi s         and `finish` makes W_b = W diag(c_b), so that weighted W_b is update W

A sample's tokens are split over programs where there are few samples; each leaves one row of partial sums, and `finish` adds
them in order. A sample that is not split is finished at once, its gate opened from the sums of the scores on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmst.kernels.fused.core import PROXIMAL, attenuation, factor, head_block, tile, weigh
from dmst.kernels.fused.gate import activate


@triton.jit
def _divisor(mass, n, delta, UNIFORM: tl.constexpr, DELTA: tl.constexpr):
    if UNIFORM:
        return tl.zeros_like(mass) + tl.maximum(n * 1.0, 1.0)
    if DELTA:
        return mass + delta
    return tl.where(mass > 0, mass, tl.where(mass != mass, mass, 1.0))


@triton.jit
def _open_gate(
    sum_ptr, sample, n, tiles, scale,
    K: tl.constexpr, ALL: tl.constexpr, GATE: tl.constexpr, ACTIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The pooled scores and the gate (ALL) of one sample."""
    head = tl.arange(0, ALL)
    total = tl.zeros((ROWS, ALL), tl.float32)
    for first in range(0, tiles, ROWS):
        which = first + tl.arange(0, ROWS)
        real = (which[:, None] < tiles) & (head[None, :] < K)
        total += tl.load(sum_ptr + (sample * tiles + which[:, None]) * K + head[None, :], mask=real, other=0.0)
    pooled = tl.sum(total, 0) / tl.maximum(n * 1.0, 1.0)
    return pooled, scale * activate(pooled, head, K, GATE, ACTIVE)


@triton.jit
def _pick(values, head, ALL: tl.constexpr):
    """values[head], for values (ALL)."""
    return tl.sum(tl.where(tl.arange(0, ALL)[None, :] == head[:, None], values[None, :], 0.0), 1)


@triton.jit
def gate_kernel(
    sum_ptr, gate_ptr, pooled_ptr, n, tiles, scale,
    K: tl.constexpr, ALL: tl.constexpr, GATE: tl.constexpr, ACTIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gate alone, of one sample: where many programs need it, it is opened once."""
    sample, head = tl.program_id(0).to(tl.int64), tl.arange(0, ALL)
    pooled, gates = _open_gate(sum_ptr, sample, n, tiles, scale, K, ALL, GATE, ACTIVE, ROWS)
    tl.store(pooled_ptr + sample * K + head, pooled, mask=head < K)
    tl.store(gate_ptr + sample * K + head, gates, mask=head < K)


@triton.jit
def moments_kernel(
    s_ptr, weight_ptr, channel_ptr, sum_ptr, theta_ptr, energy_ptr, mass_ptr, gate_ptr, pooled_ptr, update_ptr,
    n, span, splits, tiles, scale, delta, sign,
    K: tl.constexpr, P: tl.constexpr, ALL: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    UNIFORM: tl.constexpr, NORMALIZE: tl.constexpr, FINISH: tl.constexpr, DELTA: tl.constexpr, GATE: tl.constexpr,
    ACTIVE: tl.constexpr, UPDATE: tl.constexpr, WEIGHTED: tl.constexpr, MODE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`NORMALIZE` divides each square by channel_ki first. With `FINISH` energy and mass become T and its divisor."""
    sample, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, column, inside = head_block(HEADS, WIDTH, K, P, tl.program_id(2) * HEADS)
    energy = tl.zeros((TOKENS, HEADS, WIDTH), tl.float32)
    mass = tl.zeros((TOKENS, HEADS), tl.float32)
    if NORMALIZE:
        channel = tl.load(channel_ptr + sample * (K * P) + column, mask=inside, other=1.0)
    stop = tl.minimum((split + 1) * span, n)
    for first in tl.range(split * span, stop, TOKENS, num_stages=STAGES):
        at, real, place, some = tile(first, stop, sample, n, head, column, inside, K, P, TOKENS)
        s = tl.load(s_ptr + at, mask=real, other=0.0).to(tl.float32)
        square = s * s / channel[None] if NORMALIZE else s * s
        if not UNIFORM or WEIGHTED:
            weight = tl.load(weight_ptr + place, mask=some, other=0.0)
        if UNIFORM:
            energy += square
        else:
            energy += square * weight[:, :, None]
            mass += weight
        if WEIGHTED:
            tl.store(update_ptr + at, (weight[:, :, None] * s).to(update_ptr.dtype.element_ty), mask=real)
    total, whole = tl.sum(energy, 0), tl.sum(mass, 0)
    if FINISH:
        divisor = _divisor(whole, n, delta, UNIFORM, DELTA)
        total, whole = total / divisor[:, None], divisor
        if GATE:
            pooled, gates = _open_gate(sum_ptr, sample, n, tiles, scale, K, ALL, GATE, ACTIVE, 64)
            if tl.program_id(2) == 0:
                every = tl.arange(0, ALL)
                tl.store(pooled_ptr + sample * K + every, pooled, mask=every < K)
                tl.store(gate_ptr + sample * K + every, gates, mask=every < K)
    part = sample * splits + split
    tl.store(energy_ptr + part * (K * P) + column, total, mask=inside)
    tl.store(mass_ptr + part * K + head, whole, mask=head < K)
    if UPDATE:
        gate = _pick(gates, head, ALL)[:, None] if GATE else tl.full((HEADS, 1), 1.0, tl.float32)
        theta = tl.load(theta_ptr).to(tl.float32) if MODE == PROXIMAL else 1.0
        c = factor(attenuation(total, gate), gate, theta, sign, MODE)
        for first in tl.range(0, stop, TOKENS, num_stages=STAGES):
            at, real, place, some = tile(first, stop, sample, n, head, column, inside, K, P, TOKENS)
            s = tl.load(s_ptr + at, mask=real, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + place, mask=some, other=0.0)
            update = weigh(weight[:, :, None], c[None], MODE) * s
            tl.store(update_ptr + at, update.to(update_ptr.dtype.element_ty), mask=real)


@triton.jit
def finish_kernel(
    energy_ptr, mass_ptr, moment_ptr, divisor_ptr, gate_ptr, weight_ptr, folded_ptr,
    n, splits, delta, sign, weight_row, weight_column,
    D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, UNIFORM: tl.constexpr, DELTA: tl.constexpr, GATED: tl.constexpr, FOLD: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """One head of one sample: partial sums, `PARTS` at a time, to T and its divisor; with `FOLD` `SPAN` rows of its columns of
    W_b (b, D, K P).
    """
    sample, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, WIDTH)
    inside = channel < P
    if FOLD:  # all that can be is asked for before the sums are waited for
        gate = tl.load(gate_ptr + sample * K + which) if GATED else 1.0
        row, last = tl.program_id(2) * SPAN + tl.arange(0, ROWS), tl.minimum((tl.program_id(2) + 1) * SPAN, D)
        weight_ptr += (which * P + channel[None, :]) * weight_column
        w = tl.load(weight_ptr + row[:, None] * weight_row, mask=(row[:, None] < last) & inside[None, :], other=0.0)
    energy = tl.zeros((PARTS, WIDTH), tl.float32)
    mass = tl.zeros((PARTS,), tl.float32)
    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        at = sample * splits + part
        real = part < splits
        energy += tl.load(
            energy_ptr + (at[:, None] * K + which) * P + channel[None, :], mask=real[:, None] & inside[None, :], other=0.0
        )
        mass += tl.load(mass_ptr + at * K + which, mask=real, other=0.0)
    divisor = _divisor(tl.sum(mass, 0), n, delta, UNIFORM, DELTA)
    moment = tl.sum(energy, 0) / divisor
    tl.store(moment_ptr + (sample * K + which) * P + channel, moment, mask=inside)
    tl.store(divisor_ptr + sample * K + which, divisor)
    if FOLD:
        c = factor(attenuation(moment, gate), gate, 1.0, sign, MODE)
        for _ in range(0, SPAN, ROWS):
            at = (sample * D + row[:, None]) * (K * P) + which * P + channel[None, :]
            here = (w.to(tl.float32) * c[None, :]).to(folded_ptr.dtype.element_ty)
            tl.store(folded_ptr + at, here, mask=(row[:, None] < last) & inside[None, :])
            row += ROWS
            w = tl.load(weight_ptr + row[:, None] * weight_row, mask=(row[:, None] < last) & inside[None, :], other=0.0)
