"""A short sample without its silent heads, the whole layer but for its scores: one program has all its tokens (`active.py`).

    s = z U_on + bias        some columns at a time, every token: so their moments are sums within the program
    update = f(pi, c) s      to memory, where the same program finds it again in the cache
    out = update W_on + bias

Columns are those of `active.py`: the active heads side by side. Nothing of a silent head is read, written or computed. Samples
of at most `LEAST` columns are left to another kernel; -1 for none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmst.kernels.fused.active import _origin, _spread
from dmst.kernels.fused.core import PROXIMAL, attenuation, factor, weigh
from dmst.kernels.fused.launch import launched
from dmst.kernels.fused.moments import _divisor


@launched
@triton.jit
def short_kernel(
    z_ptr, weight_in_ptr, bias_in_ptr, membership_ptr, gate_ptr, active_ptr, theta_ptr, weight_out_ptr, bias_out_ptr,
    update_ptr, out_ptr,
    n, delta, sign, in_row, in_column, out_row, out_column,
    D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, RUN: tl.constexpr, SLOTS: tl.constexpr, ALL: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OUT: tl.constexpr, STAGES: tl.constexpr,
    BIAS_IN: tl.constexpr, BIAS_OUT: tl.constexpr, DELTA: tl.constexpr, MODE: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    list_ptr = active_ptr + sample * (K + 1)
    count = tl.load(list_ptr)
    list_ptr += 1
    total = count * P
    if total <= LEAST:  # `few.py` has it
        return
    token = tl.arange(0, TOKENS)
    here = token < n
    at = sample * n + token
    depth = tl.arange(0, DEPTH)
    theta = tl.load(theta_ptr).to(tl.float32) if MODE == PROXIMAL else 1.0

    for first in tl.range(0, total, COLUMNS, num_stages=1):
        column = first + tl.arange(0, COLUMNS)
        real = column < total
        origin = _origin(list_ptr, column, total, P, RUN)
        z = z_ptr + at[:, None] * D + depth[None, :]
        u = weight_in_ptr + origin[None, :] * in_row + depth[:, None] * in_column
        s = tl.zeros((TOKENS, COLUMNS), tl.float32)
        for start in tl.range(0, D, DEPTH, num_stages=STAGES):
            inside = start + depth < D
            x = tl.load(z, mask=here[:, None] & inside[None, :], other=0.0)
            w = tl.load(u, mask=inside[:, None] & real[None, :], other=0.0)
            s = tl.dot(x, w, s, input_precision="ieee")
            z += DEPTH
            u += DEPTH * in_column
        if BIAS_IN:
            s += tl.load(bias_in_ptr + origin, mask=real, other=0.0).to(tl.float32)[None, :]
        pi = _spread(list_ptr, membership_ptr + at * K, here, column, first, count, SLOTS, P)
        mass = tl.where(real, tl.sum(pi, 0), 1.0)
        moment = tl.sum(pi * s * s, 0) / _divisor(mass, n, delta, False, DELTA)
        gate = tl.load(gate_ptr + sample * K + origin // P, mask=real, other=0.0)
        c = factor(attenuation(moment, gate), gate, theta, sign, MODE)
        update = weigh(pi, c[None, :], MODE) * s
        place = update_ptr + at[:, None] * D + column[None, :]
        tl.store(place, update.to(update_ptr.dtype.element_ty), mask=here[:, None] & real[None, :])

    tl.debug_barrier()  # what other threads of this program have written
    slots = tl.arange(0, ALL)
    heads = tl.load(list_ptr + slots, mask=slots < count, other=0)
    for first in tl.range(0, D, OUT, num_stages=1):
        column = first + tl.arange(0, OUT)
        real = column < D
        out = tl.zeros((TOKENS, OUT), tl.float32)
        for start in tl.range(0, total, DEPTH, num_stages=STAGES):
            kept = start + depth
            inside = kept < total
            x = tl.load(update_ptr + at[:, None] * D + kept[None, :], mask=here[:, None] & inside[None, :], other=0.0)
            head = tl.sum(tl.where((kept // P)[:, None] == slots[None, :], heads[None, :], 0), 1)
            origin = tl.max_contiguous(tl.multiple_of(head * P + kept % P, RUN), RUN)
            w = weight_out_ptr + column[None, :] * out_row + origin[:, None] * out_column
            w = tl.load(w, mask=inside[:, None] & real[None, :], other=0.0)
            out = tl.dot(x, w, out, input_precision="ieee")
        if BIAS_OUT:
            out += tl.load(bias_out_ptr + column, mask=real, other=0.0).to(tl.float32)[None, :]
        place = out_ptr + at[:, None] * D + column[None, :]
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=here[:, None] & real[None, :])
