"""Second moments of the projected tokens, by membership, and the update that they attenuate.

    energy_ki = sum_n pi_nk s_nki^2        mass_k = sum_n pi_nk        T = energy/(mass + delta)
    update_nki = f(pi_nk, c_ki) s_nki      with f and c of `core`, in the dtype of s; the gate on the way, by `gate.opened`

Where there are many samples a program takes a whole one, and finds its tokens in the cache the second time. Otherwise the
tokens of a sample are split over programs, a launch a sweep; each leaves one row of partial sums, which are added up between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.form import Form
from dmst.kernels.fused import gate as gates
from dmst.kernels.fused.core import MODES, PROXIMAL, attenuation, factor, head_block, tile, weigh
from dmst.kernels.fused.gate import of_heads, opened
from dmst.kernels.fused.launch import launch, op


@triton.jit
def _divisor(mass, delta: tl.constexpr):
    if delta > 0:
        return mass + delta
    return tl.where(mass > 0, mass, tl.where(mass != mass, mass, 1.0))


@triton.jit
def moments_kernel(
    s_ptr, weight_ptr, score_ptr, theta_ptr, sums_ptr, moment_ptr, divisor_ptr, update_ptr, gate_ptr, pooled_ptr,
    n, span, splits, tiles,
    delta: tl.constexpr, scale: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, TOKENS: tl.constexpr,
    UNIFORM: tl.constexpr, SUM: tl.constexpr, UPDATE: tl.constexpr, MODE: tl.constexpr,
    ALL: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`SUM` alone leaves rows of energy and mass (`UNIFORM`: of pi = 1); `UPDATE` alone reads what they sum to."""
    sample, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, column, inside = head_block(HEADS, WIDTH, K, P, tl.program_id(2) * HEADS)
    row, count = sample * n + split * span, tl.minimum(span, n - split * span)
    s_ptr += row * (K * P)
    if UPDATE:
        update_ptr += row * (K * P)
    if not UNIFORM:
        weight_ptr += row * K
    if not (SUM and UPDATE):
        sums_ptr += (sample * splits + split if SUM else sample) * (K * P + K)
    here = head[:, None] < K
    totals = ()
    if SUM:
        energy = ()
        for _ in tl.static_range(PIECES):
            energy += (tl.zeros((TOKENS, HEADS, WIDTH), tl.float32),)
        mass = tl.zeros((TOKENS, HEADS), tl.float32)
        for first in tl.range(0, count, TOKENS, num_stages=STAGES):
            at, real, place, some = tile(first, count, head, column, inside, K, P, TOKENS)
            if not UNIFORM:
                weight = tl.load(weight_ptr + place, mask=some, other=0.0)
                mass += weight
            before, energy = energy, ()
            for i in tl.static_range(PIECES):
                s = tl.load(s_ptr + at + i * WIDTH, mask=real, other=0.0).to(tl.float32)
                square = s * s if UNIFORM else s * s * weight[:, :, None]
                energy += (before[i] + square,)
        whole = tl.sum(mass, 0)[:, None]
        for i in tl.static_range(PIECES):
            totals += (tl.sum(energy[i], 0),)
            if not UPDATE:
                tl.store(sums_ptr + column + i * WIDTH, totals[i], mask=inside)
        if not UPDATE:
            tl.store(sums_ptr + K * P + head[:, None], whole, mask=here)
    else:
        for i in tl.static_range(PIECES):
            totals += (tl.load(sums_ptr + column + i * WIDTH, mask=inside, other=0.0),)
        whole = tl.load(sums_ptr + K * P + head[:, None], mask=here, other=0.0)
    if UPDATE:
        whole = _divisor(whole, delta)
        if split == 0:
            tl.store(divisor_ptr + sample * K + head[:, None], whole, mask=here)
        gate = tl.full((HEADS, 1), 1.0, tl.float32)
        if GATE:
            pooled, every = opened(score_ptr, sample, n, tiles, scale, K, ALL, GATE, ROWS)
            gate = of_heads(every, head)[:, None]
            if split == 0:
                tl.store(gate_ptr + sample * K + head[:, None], gate, mask=here)
                tl.store(pooled_ptr + sample * K + head[:, None], of_heads(pooled, head)[:, None], mask=here)
        theta = tl.load(theta_ptr).to(tl.float32) if MODE == PROXIMAL else 1.0
        c = ()
        for i in tl.static_range(PIECES):
            moment = totals[i] / whole
            if split == 0:
                tl.store(moment_ptr + sample * (K * P) + column + i * WIDTH, moment, mask=inside)
            c += (factor(attenuation(moment, gate), gate, theta, MODE)[None],)
        for first in tl.range(0, count, TOKENS, num_stages=STAGES):
            at, real, place, some = tile(first, count, head, column, inside, K, P, TOKENS)
            weight = tl.load(weight_ptr + place, mask=some, other=0.0)[:, :, None]
            for i in tl.static_range(PIECES):
                s = tl.load(s_ptr + at + i * WIDTH, mask=real, other=0.0).to(tl.float32)
                update = weigh(weight, c[i], MODE) * s
                tl.store(update_ptr + at + i * WIDTH, update.to(update_ptr.dtype.element_ty), mask=real)


@op()
def settle(
    projected: Tensor, membership: Tensor, scores: Tensor | None, theta: Tensor | None, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of projected (b, n, k p), membership (b, n, k) and, for a gate, sums of scores (b, tiles, k): update (b, n, k p), T
    (b, k, p) and its divisor (b, k), the gate and the pooled scores (b, k), which are empty where there is none."""
    told, update, (b, _, d) = Form.read(form), torch.empty_like(projected), projected.shape
    k = told.num_heads
    gated = (b if scores is not None else 0, k)
    sizes = (b, k, d // k), (b, k), gated, gated
    moment, divisor, gate, pooled = (torch.empty(size, device=projected.device, dtype=torch.float32) for size in sizes)
    found = _rows(projected, membership, told) if sweep_of(projected, told).splits > 1 else None
    _launch(projected, membership, scores, theta, found, (moment, divisor, update, gate, pooled), told)
    return update, moment, divisor, gate, pooled


def energies(projected: Tensor, weight: Tensor | None, form: Form) -> Tensor:
    """sum_n weight s^2 (b, k, p), by weights (b, n, k)."""
    (b, _, d), k = projected.shape, form.num_heads
    return _rows(projected, weight, form)[:, :d].view(b, k, d // k)


def _rows(projected: Tensor, weight: Tensor | None, form: Form) -> Tensor:
    """Energies and masses, (b, k p + k)."""
    b, _, d = projected.shape
    rows = torch.empty(b, sweep_of(projected, form).splits, d + form.num_heads, device=projected.device, dtype=torch.float32)
    _launch(projected, weight, None, None, rows, None, form)
    return rows.sum(1)


def sweep_of(projected: Tensor, form: Form) -> plan.Sweep:
    (b, n, d), k = projected.shape, form.num_heads
    return plan.sweep("settle", b, n, k, d // k, projected.dtype)


def _launch(
    projected: Tensor, weight: Tensor | None, scores: Tensor | None, theta: Tensor | None,
    sums: Tensor | None, made: tuple[Tensor, ...] | None, form: Form,
) -> None:  # fmt: skip
    (b, n, d), k, sweep = projected.shape, form.num_heads, sweep_of(projected, form)
    scores, gate = gates.sizes(scores, *form.gate_choice)
    launch(
        moments_kernel, (b, sweep.splits, sweep.blocks),
        projected, weight, scores, theta, sums, *(made or (None,) * 5),
        n, sweep.span, sweep.splits, 0 if scores is None else scores.shape[1],
        delta=form.delta, K=k, P=d // k, **sweep.block, **gate, UNIFORM=weight is None, SUM=sums is None or made is None,
        UPDATE=made is not None, MODE=MODES[form.mode], STAGES=sweep.stages, num_warps=sweep.warps,
    )  # fmt: skip
