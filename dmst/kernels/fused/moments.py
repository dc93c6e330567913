"""Second moments of the projected tokens, by membership, and the update that they attenuate.

    energy_ki = sum_n pi_nk s_nki^2        mass_k = sum_n pi_nk        T = energy/(mass + delta)     (uniform: pi = 1, mass = n)
    update_nki = f(pi_nk, c_ki) s_nki      with f and c of `core`, in the dtype of s

Where there are many samples a program takes a whole one, and finds its tokens in the cache the second time. Otherwise the
tokens of a sample are split over programs, a launch a sweep; each leaves one row of partial sums, and every program of the
second sweep adds them up for itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.form import Form
from dmst.kernels.fused.core import MODES, PROXIMAL, added, attenuation, factor, gate_of_heads, head_block, tile, weigh
from dmst.kernels.fused.launch import launch, op


@triton.jit
def _divisor(mass, n, delta, UNIFORM: tl.constexpr, DELTA: tl.constexpr):
    if UNIFORM:
        return tl.zeros_like(mass) + tl.maximum(n * 1.0, 1.0)
    if DELTA:
        return mass + delta
    return tl.where(mass > 0, mass, tl.where(mass != mass, mass, 1.0))


@triton.jit
def moments_kernel(
    s_ptr, weight_ptr, gate_ptr, theta_ptr, energy_ptr, mass_ptr, moment_ptr, divisor_ptr, update_ptr,
    n, span, splits,
    delta: tl.constexpr, sign: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, UNIFORM: tl.constexpr,
    SUM: tl.constexpr, UPDATE: tl.constexpr, DELTA: tl.constexpr, GATED: tl.constexpr,
    MODE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`SUM` alone leaves partial sums of energy and mass, `UPDATE` alone reads them."""
    sample, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, column, inside = head_block(HEADS, WIDTH, K, P, tl.program_id(2) * HEADS)
    row, count = sample * n + split * span, tl.minimum(span, n - split * span)
    s_ptr += row * (K * P)
    if UPDATE:
        update_ptr += row * (K * P)
    if UPDATE or not UNIFORM:
        weight_ptr += row * K
    if SUM:
        energy = tl.zeros((TOKENS, HEADS, WIDTH), tl.float32)
        mass = tl.zeros((TOKENS, HEADS), tl.float32)
        for first in tl.range(0, count, TOKENS, num_stages=STAGES):
            at, real, place, some = tile(first, count, head, column, inside, K, P, TOKENS)
            s = tl.load(s_ptr + at, mask=real, other=0.0).to(tl.float32)
            square = s * s
            if UNIFORM:
                energy += square
            else:
                weight = tl.load(weight_ptr + place, mask=some, other=0.0)
                energy += square * weight[:, :, None]
                mass += weight
        total, whole = tl.sum(energy, 0), tl.sum(mass, 0)[:, None]
        if not UPDATE:
            part = sample * splits + split
            tl.store(energy_ptr + part * (K * P) + column, total, mask=inside)
            tl.store(mass_ptr + part * K + head[:, None], whole, mask=head[:, None] < K)
    else:
        total = added(energy_ptr, sample, splits, column, inside, K * P)
        whole = added(mass_ptr, sample, splits, head[:, None], head[:, None] < K, K)
    if UPDATE:
        whole = _divisor(whole, n, delta, UNIFORM, DELTA)
        total = total / whole
        if split == 0:
            tl.store(moment_ptr + sample * (K * P) + column, total, mask=inside)
            tl.store(divisor_ptr + sample * K + head[:, None], whole, mask=head[:, None] < K)
        gate = gate_of_heads(gate_ptr, sample, head, K, GATED)[:, None]
        theta = tl.load(theta_ptr).to(tl.float32) if MODE == PROXIMAL else 1.0
        c = factor(attenuation(total, gate), gate, theta, sign, MODE)
        for first in tl.range(0, count, TOKENS, num_stages=STAGES):
            at, real, place, some = tile(first, count, head, column, inside, K, P, TOKENS)
            s = tl.load(s_ptr + at, mask=real, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + place, mask=some, other=0.0)
            update = weigh(weight[:, :, None], c[None], MODE) * s
            tl.store(update_ptr + at, update.to(update_ptr.dtype.element_ty), mask=real)


@op()
def settle(
    projected: Tensor, membership: Tensor, gate: Tensor | None, theta: Tensor | None, form: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Of projected (b, n, k p) and membership (b, n, k): update (b, n, k p), T (b, k, p) and its divisor (b, k)."""
    told, update = Form.read(form), torch.empty_like(projected)
    moment, divisor = _rows(projected, told)
    parts = sums(projected, membership, told) if sweep_of(projected, told).splits > 1 else None
    _launch(projected, membership, gate, theta, parts, (moment, divisor, update), told)
    return update, moment, divisor


def sums(projected: Tensor, weight: Tensor | None, form: Form) -> tuple[Tensor, Tensor]:
    """Partial energies (b, splits, k, p) and masses (b, splits, k)."""
    parts = _rows(projected, form, sweep_of(projected, form).splits)
    _launch(projected, weight, None, None, parts, None, form)
    return parts


def sweep_of(projected: Tensor, form: Form) -> plan.Sweep:
    (b, n, d), k = projected.shape, form.num_heads
    return plan.sweep("settle", b, n, k, d // k, projected.dtype)


def _rows(projected: Tensor, form: Form, *splits: int) -> tuple[Tensor, Tensor]:
    (b, _, d), k, f32 = projected.shape, form.num_heads, torch.float32
    energy = torch.empty(b, *splits, k, d // k, device=projected.device, dtype=f32)
    return energy, torch.empty(b, *splits, k, device=projected.device, dtype=f32)


def _launch(
    projected: Tensor, weight: Tensor | None, gate: Tensor | None, theta: Tensor | None,
    parts: tuple[Tensor, Tensor] | None, made: tuple[Tensor, Tensor, Tensor] | None, form: Form,
) -> None:  # fmt: skip
    (b, n, d), k, sweep = projected.shape, form.num_heads, sweep_of(projected, form)
    launch(
        moments_kernel, (b, sweep.splits, sweep.blocks),
        projected, weight, gate, theta, *(parts or (None,) * 2), *(made or (None,) * 3), n, sweep.span, sweep.splits,
        delta=form.delta, sign=form.sign,
        K=k, P=d // k, HEADS=sweep.heads, WIDTH=sweep.width, TOKENS=sweep.tokens,
        UNIFORM=weight is None or form.uniform_moment, SUM=parts is None or made is None, UPDATE=made is not None,
        DELTA=bool(form.delta), GATED=gate is not None, MODE=MODES[form.mode],
        STAGES=sweep.stages, num_warps=sweep.warps,
    )  # fmt: skip
