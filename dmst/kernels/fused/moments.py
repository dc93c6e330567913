"""Second moments of the projected tokens, by membership, and the update that they attenuate.

    energy_ki = sum_n pi_nk s_nki^2        mass_k = sum_n pi_nk        T = energy/(mass + delta)     (uniform: pi = 1, mass = n)
    update_nki = f(pi_nk, c_ki) s_nki      with f and c of `core`, in the dtype of s

Where there are many samples a program takes a whole one, and finds its tokens in the cache the second time. Otherwise the
tokens of a sample are split over programs, a launch a sweep; each leaves one row of partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.form import Form
from dmst.kernels.fused.core import MODES, PROXIMAL, attenuation, factor, gate_of_heads, head_block, tile, weigh
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
    s_ptr, weight_ptr, channel_ptr, gate_ptr, theta_ptr, energy_ptr, mass_ptr, update_ptr, n, span, splits,
    delta: tl.constexpr, sign: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, UNIFORM: tl.constexpr,
    NORMALIZE: tl.constexpr, SUM: tl.constexpr, UPDATE: tl.constexpr, DELTA: tl.constexpr, GATED: tl.constexpr,
    MODE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`SUM` alone leaves partial sums of energy and mass, `UPDATE` alone reads T; both leave T and its divisor. `NORMALIZE`
    divides each square by channel_ki first.
    """
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
        if NORMALIZE:
            channel = tl.load(channel_ptr + sample * (K * P) + column, mask=inside, other=1.0)
        for first in tl.range(0, count, TOKENS, num_stages=STAGES):
            at, real, place, some = tile(first, count, head, column, inside, K, P, TOKENS)
            s = tl.load(s_ptr + at, mask=real, other=0.0).to(tl.float32)
            square = s * s / channel[None] if NORMALIZE else s * s
            if UNIFORM:
                energy += square
            else:
                weight = tl.load(weight_ptr + place, mask=some, other=0.0)
                energy += square * weight[:, :, None]
                mass += weight
        total, whole = tl.sum(energy, 0), tl.sum(mass, 0)
        if UPDATE:
            whole = _divisor(whole, n, delta, UNIFORM, DELTA)
            total = total / whole[:, None]
        part = sample * splits + split
        tl.store(energy_ptr + part * (K * P) + column, total, mask=inside)
        tl.store(mass_ptr + part * K + head, whole, mask=head < K)
    else:
        total = tl.load(energy_ptr + sample * (K * P) + column, mask=inside, other=0.0)
    if UPDATE:
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
    told, n, update = Form.read(form), projected.shape[1], torch.empty_like(projected)
    sweep = sweep_of(projected, told)
    if sweep.splits == 1:
        moment, divisor = _rows(projected, told)
        _launch(sweep, projected, membership, None, gate, theta, moment, divisor, update, told, True)
        return update, moment, divisor
    moment, mass = (x.sum(1) for x in sums(projected, membership, None, told))
    if told.uniform_moment:
        divisor = torch.full_like(mass, max(n, 1))
    else:
        divisor = mass + told.delta if told.delta else torch.where(mass <= 0, 1, mass)  # NaN stays
    moment = moment / divisor.unsqueeze(-1)
    _launch(sweep, projected, membership, None, gate, theta, moment, divisor, update, told, False)
    return update, moment, divisor


def sums(projected: Tensor, weight: Tensor | None, channel: Tensor | None, form: Form) -> tuple[Tensor, Tensor]:
    """Partial energies (b, splits, k, p) and masses (b, splits, k)."""
    sweep = sweep_of(projected, form)
    energy, mass = _rows(projected, form, sweep.splits)
    _launch(sweep, projected, weight, channel, None, None, energy, mass, None, form, True)
    return energy, mass


def sweep_of(projected: Tensor, form: Form) -> plan.Sweep:
    (b, n, d), k = projected.shape, form.num_heads
    return plan.sweep("settle", b, n, k, d // k, projected.dtype)


def _rows(projected: Tensor, form: Form, *splits: int) -> tuple[Tensor, Tensor]:
    (b, _, d), k, f32 = projected.shape, form.num_heads, torch.float32
    energy = torch.empty(b, *splits, k, d // k, device=projected.device, dtype=f32)
    return energy, torch.empty(b, *splits, k, device=projected.device, dtype=f32)


def _launch(
    sweep: plan.Sweep, projected: Tensor, weight: Tensor | None, channel: Tensor | None, gate: Tensor | None,
    theta: Tensor | None, energy: Tensor, mass: Tensor, made: Tensor | None, form: Form, adds: bool,
) -> None:  # fmt: skip
    (b, n, d), k = projected.shape, form.num_heads
    launch(
        moments_kernel, (b, sweep.splits, sweep.blocks),
        projected, weight, channel, gate, theta, energy, mass, made, n, sweep.span, sweep.splits,
        delta=form.delta, sign=form.sign,
        K=k, P=d // k, HEADS=sweep.heads, WIDTH=sweep.width, TOKENS=sweep.tokens,
        UNIFORM=weight is None or (form.uniform_moment and channel is None), NORMALIZE=channel is not None,
        SUM=adds, UPDATE=made is not None, DELTA=bool(form.delta), GATED=gate is not None, MODE=MODES[form.mode],
        STAGES=sweep.stages, num_warps=sweep.warps,
    )  # fmt: skip
