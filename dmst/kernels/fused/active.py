"""The layer without its silent heads: what a gate of exactly 0 multiplies is neither computed nor read, sample by sample.

    on_j                     the j-th head of a sample whose gate is not 0, j < count; a NaN gate is on, so that it shows
    column j p + i           of everything here belongs to channel i of head on_j: a sample's active heads stand side by side
    s   = z U_on + bias      kept as pi s (weighted) or as s; energy = sum_n pi s^2 and mass = sum_n pi, a row a tile of tokens
    c                        from the moments of these heads; W_b = W_on diag(c) (fold), or c by itself
    out = (pi s) W_b + bias  or f(pi, c) s W_on + bias, s turned into the update on its way to the product

Both products are plain ones over count p columns in place of d: what is left out are programs (first product) and steps of the
loop (second). How many there are is read by the device alone. No sum runs over two samples, and none over two programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmst.kernels.fused.core import PROXIMAL, attenuation, factor, weigh
from dmst.kernels.fused.launch import launched
from dmst.kernels.fused.moments import _divisor, _open_gate

MANY: tl.constexpr = tl.constexpr(9)  # heads in one tile, beyond which each is not taken by itself: 128 columns of 16 channels


@launched
@triton.jit
def gate_active_kernel(
    sum_ptr, gate_ptr, active_ptr, n, tiles, scale,
    K: tl.constexpr, ALL: tl.constexpr, GATE: tl.constexpr, ACTIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gate of one sample, and in active (b, 1 + k), int32, how many heads are on and which, in order."""
    sample, head = tl.program_id(0).to(tl.int64), tl.arange(0, ALL)
    _, gates = _open_gate(sum_ptr, sample, n, tiles, scale, K, ALL, GATE, ACTIVE, ROWS)
    on = ((gates != 0.0) & (head < K)).to(tl.int32)
    before = tl.sum(tl.where(head[None, :] < head[:, None], on[None, :], 0), 1)
    tl.store(gate_ptr + sample * K + head, gates, mask=head < K)
    tl.store(active_ptr + sample * (K + 1) + 1 + before, head, mask=on > 0)
    tl.store(active_ptr + sample * (K + 1), tl.sum(on, 0))


@triton.jit
def _origin(list_ptr, column, total, P: tl.constexpr, RUN: tl.constexpr):
    """Where the columns stand in the weights, on_j p + i: runs of `RUN`, which divides p, stay side by side."""
    head = tl.load(list_ptr + column // P, mask=column < total, other=0)
    return tl.max_contiguous(tl.multiple_of(head * P + column % P, RUN), RUN)


@triton.jit
def _spread(list_ptr, membership_ptr, here, column, first, count, SLOTS: tl.constexpr, P: tl.constexpr):
    """pi of the head of each column, (tokens, columns), 0 beyond the last. From `first` on, of `SLOTS` heads at most."""
    if SLOTS > MANY:
        real = column < count * P
        head = tl.load(list_ptr + column // P, mask=real, other=0)
        pi = tl.load(membership_ptr[:, None] + head[None, :], mask=here[:, None] & real[None, :], other=0.0)
    else:
        pi = tl.zeros((here.shape[0], column.shape[0]), tl.float32)
        for i in tl.static_range(SLOTS):
            slot = first // P + i
            mine = _membership(list_ptr, membership_ptr, here, slot, count)
            pi = tl.where((column // P == slot)[None, :], mine[:, None], pi)
    return pi


@triton.jit
def _membership(list_ptr, membership_ptr, here, slot, count):
    """pi of one active head, (tokens)."""
    head = tl.load(list_ptr + slot, mask=slot < count, other=0)
    return tl.load(membership_ptr + head, mask=here & (slot < count), other=0.0)


@launched
@triton.jit
def project_active_kernel(
    z_ptr, weight_ptr, bias_ptr, membership_ptr, active_ptr, s_ptr, energy_ptr, mass_ptr,
    n, tiles, weight_row, weight_column,
    D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, RUN: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """A tile of tokens and a block of columns of one sample; programs that share tokens follow each other."""
    block, row = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    sample, part = (row // tiles).to(tl.int64), row % tiles
    list_ptr = active_ptr + sample * (K + 1)
    count = tl.load(list_ptr)
    list_ptr += 1
    first, total = block * COLUMNS, count * P
    if first >= total:
        return
    token = part * TOKENS + tl.arange(0, TOKENS)
    here = token < n
    at = sample * n + token
    column = first + tl.arange(0, COLUMNS)
    real = column < total
    origin = _origin(list_ptr, column, total, P, RUN)
    depth = tl.arange(0, DEPTH)
    z = z_ptr + at[:, None] * D + depth[None, :]
    u = weight_ptr + origin[None, :] * weight_row + depth[:, None] * weight_column
    s = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for start in tl.range(0, D, DEPTH, num_stages=STAGES):
        inside = start + depth < D
        x = tl.load(z, mask=here[:, None] & inside[None, :], other=0.0)
        w = tl.load(u, mask=inside[:, None] & real[None, :], other=0.0)
        s = tl.dot(x, w, s, input_precision="ieee")
        z += DEPTH
        u += DEPTH * weight_column
    if BIAS:
        s += tl.load(bias_ptr + origin, mask=real, other=0.0).to(tl.float32)[None, :]
    pi = _spread(list_ptr, membership_ptr + at * K, here, column, first, count, SLOTS, P)
    tl.store(energy_ptr + row.to(tl.int64) * D + column, tl.sum(pi * s * s, 0), mask=real)
    mass_ptr += row.to(tl.int64) * K
    if SLOTS > MANY:
        tl.store(mass_ptr + column // P, tl.sum(pi, 0), mask=real & (column % P == 0))
    else:  # fewer registers: pi as a matrix is read in one layout only
        for i in tl.static_range(SLOTS):
            slot = first // P + i
            mass = tl.sum(_membership(list_ptr, membership_ptr + at * K, here, slot, count), 0)
            begins = (slot < count) & (slot * P >= first) & (slot * P < first + COLUMNS)  # the first of its columns is here
            tl.store(mass_ptr + slot, mass, mask=begins)
    value = pi * s if WEIGHTED else s
    tl.store(s_ptr + at[:, None] * D + column[None, :], value.to(s_ptr.dtype.element_ty), mask=here[:, None] & real[None, :])


@launched
@triton.jit
def finish_active_kernel(
    energy_ptr, mass_ptr, gate_ptr, active_ptr, theta_ptr, weight_ptr, factor_ptr, folded_ptr,
    n, tiles, delta, sign, weight_row, weight_column,
    D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, DELTA: tl.constexpr, FOLD: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """One active head of one sample: rows of sums, `PARTS` at a time, to c (b, d); with `FOLD` `SPAN` rows of W_b (b, d, d)
    instead, with zeros behind the last head up to a multiple of 64, if D is one.
    """
    sample, slot = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count, head = tl.load(active_ptr + sample * (K + 1)), tl.load(active_ptr + sample * (K + 1) + 1 + slot)
    if slot >= count:
        return
    channel = tl.arange(0, WIDTH)
    inside = channel < P
    gate = tl.load(gate_ptr + sample * K + head)
    if FOLD:  # all that can be is asked for before the sums are waited for
        row, last = tl.program_id(2) * SPAN + tl.arange(0, ROWS), tl.minimum((tl.program_id(2) + 1) * SPAN, D)
        weight_ptr += (head * P + channel[None, :]) * weight_column
        w = tl.load(weight_ptr + row[:, None] * weight_row, mask=(row[:, None] < last) & inside[None, :], other=0.0)
    energy = tl.zeros((PARTS, WIDTH), tl.float32)
    mass = tl.zeros((PARTS,), tl.float32)
    for first in range(0, tiles, PARTS):
        part = first + tl.arange(0, PARTS)
        at = sample * tiles + part
        real = part < tiles
        place = at[:, None] * D + slot * P + channel[None, :]
        energy += tl.load(energy_ptr + place, mask=real[:, None] & inside[None, :], other=0.0)
        mass += tl.load(mass_ptr + at * K + slot, mask=real, other=0.0)
    moment = tl.sum(energy, 0) / _divisor(tl.sum(mass, 0), n, delta, False, DELTA)
    theta = tl.load(theta_ptr).to(tl.float32) if MODE == PROXIMAL else 1.0
    c = factor(attenuation(moment, gate), gate, theta, sign, MODE)
    if FOLD:
        rest = count * P + tl.arange(0, 64)  # zeros, as `active_hopper.py` reads them
        behind = (rest < (count * P + 63) // 64 * 64) & (slot == count - 1)
        for _ in range(0, SPAN, ROWS):
            real, at = row[:, None] < last, folded_ptr + (sample * D + row[:, None]) * D
            here = (w.to(tl.float32) * c[None, :]).to(folded_ptr.dtype.element_ty)
            tl.store(at + slot * P + channel[None, :], here, mask=real & inside[None, :])
            if D % 64 == 0:
                tl.store(at + rest[None, :], 0.0, mask=real & behind[None, :])
            row += ROWS
            w = tl.load(weight_ptr + row[:, None] * weight_row, mask=(row[:, None] < last) & inside[None, :], other=0.0)
    else:
        tl.store(factor_ptr + sample * D + slot * P + channel, c, mask=inside)


@launched
@triton.jit
def out_active_kernel(
    s_ptr, weight_ptr, factor_ptr, bias_ptr, membership_ptr, active_ptr, out_ptr,
    n, tiles, weight_row, weight_column,
    D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, RUN: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, WEIGHTED: tl.constexpr, FOLD: tl.constexpr, MODE: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """With `FOLD` the weight is W_b (b, d, d). `WEIGHTED`: what is kept is pi s, and c alone is missing."""
    block, row = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    sample, part = (row // tiles).to(tl.int64), row % tiles
    list_ptr = active_ptr + sample * (K + 1)
    count = tl.load(list_ptr)
    list_ptr += 1
    total = count * P
    token = part * TOKENS + tl.arange(0, TOKENS)
    here = token < n
    at = sample * n + token
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    real = column < D
    depth = tl.arange(0, DEPTH)
    if FOLD:
        weight_ptr += sample * (D * D)
    slots = tl.arange(0, ALL)
    heads = tl.load(list_ptr + slots, mask=slots < count, other=0)
    out = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for start in tl.range(0, total, DEPTH, num_stages=STAGES):
        kept = start + depth
        inside = kept < total
        x = tl.load(s_ptr + at[:, None] * D + kept[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        if FOLD:
            origin = kept
        else:
            head = tl.sum(tl.where((kept // P)[:, None] == slots[None, :], heads[None, :], 0), 1)
            origin = tl.max_contiguous(tl.multiple_of(head * P + kept % P, RUN), RUN)
        w = weight_ptr + column[None, :] * weight_row + origin[:, None] * weight_column
        w = tl.load(w, mask=inside[:, None] & real[None, :], other=0.0)
        if not FOLD:
            c = tl.load(factor_ptr + sample * D + kept, mask=inside, other=0.0)
            f = c[None, :]
            if not WEIGHTED:
                if SLOTS > MANY:
                    pi = _spread(list_ptr, membership_ptr + at * K, here, kept, start, count, SLOTS, P)
                else:
                    pi = tl.zeros((TOKENS, DEPTH), tl.float32)
                    for i in tl.static_range(SLOTS):
                        slot = start // P + i
                        one = tl.sum(tl.where(slots == slot, heads, 0), 0)
                        mine = tl.load(membership_ptr + at * K + one, mask=here & (slot < count), other=0.0)
                        pi = tl.where((kept // P == slot)[None, :], mine[:, None], pi)
                f = weigh(pi, f, MODE)
            x = (f * x.to(tl.float32)).to(x.dtype)
        out = tl.dot(x, w, out, input_precision="ieee")
    if BIAS:
        out += tl.load(bias_ptr + column, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + at[:, None] * D + column[None, :], out.to(out_ptr.dtype.element_ty), mask=here[:, None] & real[None, :])
