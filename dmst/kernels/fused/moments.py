"""Second moments of the projected tokens, by membership, and the update that they attenuate.

    energy_ki = sum_n pi_nk s_nki^2        mass_k = sum_n pi_nk        T = energy/(mass + delta)     (uniform: pi = 1, mass = n)
    update_nki = f(pi_nk, c_ki) s_nki      with f and c of `core`, in the dtype of s

Where there are many samples a program takes a whole one, and finds its tokens in the cache the second time. Otherwise the
tokens of a sample are split over programs; each leaves one row of partial sums, and `finish_kernel` adds them up in order.
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
from dmst.kernels.plan import over, power_of_two

F32 = torch.float32


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
    NORMALIZE: tl.constexpr, UPDATE: tl.constexpr, DELTA: tl.constexpr, GATED: tl.constexpr, MODE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`NORMALIZE` divides each square by channel_ki first. With `UPDATE` energy and mass become T and its divisor."""
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
    if UPDATE:
        gate = gate_of_heads(gate_ptr, sample, head, K, GATED)[:, None]
        theta = tl.load(theta_ptr).to(tl.float32) if MODE == PROXIMAL else 1.0
        c = factor(attenuation(total, gate), gate, theta, sign, MODE)
        for first in tl.range(0, stop, TOKENS, num_stages=STAGES):
            at, real, place, some = tile(first, stop, sample, n, head, column, inside, K, P, TOKENS)
            s = tl.load(s_ptr + at, mask=real, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + place, mask=some, other=0.0)
            update = weigh(weight[:, :, None], c[None], MODE) * s
            tl.store(update_ptr + at, update.to(update_ptr.dtype.element_ty), mask=real)


@triton.jit
def update_kernel(
    s_ptr, membership_ptr, moment_ptr, gate_ptr, theta_ptr, out_ptr, n, span,
    sign: tl.constexpr, K: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    MODE: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sample, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, column, inside = head_block(HEADS, WIDTH, K, P, tl.program_id(2) * HEADS)
    gate = gate_of_heads(gate_ptr, sample, head, K, GATED)[:, None]
    a = attenuation(tl.load(moment_ptr + sample * (K * P) + column, mask=inside, other=0.0), gate)
    theta = tl.load(theta_ptr).to(tl.float32) if MODE == PROXIMAL else 1.0
    c = factor(a, gate, theta, sign, MODE)
    stop = tl.minimum((split + 1) * span, n)
    for first in tl.range(split * span, stop, TOKENS, num_stages=STAGES):
        at, real, place, some = tile(first, stop, sample, n, head, column, inside, K, P, TOKENS)
        s = tl.load(s_ptr + at, mask=real, other=0.0).to(tl.float32)
        pi = tl.load(membership_ptr + place, mask=some, other=0.0)
        update = weigh(pi[:, :, None], c[None], MODE) * s
        tl.store(out_ptr + at, update.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def finish_kernel(
    energy_ptr, mass_ptr, moment_ptr, divisor_ptr, n, splits,
    delta: tl.constexpr, K: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    UNIFORM: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """One head of one sample: partial sums, `PARTS` at a time, to T and its divisor."""
    sample, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, WIDTH)
    inside = channel < P
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


@op()
def settle(
    projected: Tensor, membership: Tensor, gate: Tensor | None, theta: Tensor | None, form: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Of projected (b, n, k p) and membership (b, n, k): update (b, n, k p), T (b, k, p) and its divisor (b, k)."""
    told, (b, n, d) = Form.read(form), projected.shape
    k, p = told.num_heads, d // told.num_heads
    sweep = plan.sweep("settle", b, n, k, p, projected.dtype)
    if sweep.splits > 1:
        moment, divisor = finish(*sums(projected, membership, None, told, sweep), n, told)
        return update(projected, membership, moment, gate, theta, form), moment, divisor
    made = torch.empty_like(projected)
    moment, divisor = sums(projected, membership, None, told, sweep, (gate, theta, made))
    return made, moment.squeeze(1), divisor.squeeze(1)


def sums(
    projected: Tensor, weight: Tensor | None, channel: Tensor | None, form: Form, sweep: plan.Sweep,
    whole: tuple[Tensor | None, Tensor | None, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Partial energies (b, splits, k, p) and masses (b, splits, k); `whole`: gate, theta and room for the update."""
    (b, n, d), k = projected.shape, form.num_heads
    energy = torch.empty(b, sweep.splits, k, d // k, device=projected.device, dtype=F32)
    mass = torch.empty(b, sweep.splits, k, device=projected.device, dtype=F32)
    gate, theta, made = whole or (None, None, None)
    launch(
        moments_kernel, (b, sweep.splits, over(k, sweep.heads)),
        projected, weight, channel, gate, theta, energy, mass, made, n, sweep.span, sweep.splits,
        delta=form.delta, sign=form.sign,
        K=k, P=d // k, HEADS=sweep.heads, WIDTH=sweep.width, TOKENS=sweep.tokens,
        UNIFORM=weight is None or (form.uniform_moment and channel is None), NORMALIZE=channel is not None,
        UPDATE=made is not None, DELTA=bool(form.delta), GATED=gate is not None, MODE=MODES[form.mode],
        STAGES=sweep.stages, num_warps=sweep.warps,
    )  # fmt: skip
    return energy, mass


def finish(energy: Tensor, mass: Tensor, n: int, form: Form) -> tuple[Tensor, Tensor]:
    """T (b, k, p) and its divisor (b, k)."""
    b, splits, k, p = energy.shape
    width = power_of_two(p)
    moment = torch.empty(b, k, p, device=energy.device, dtype=F32)
    divisor = torch.empty(b, k, device=energy.device, dtype=F32)
    parts = min(16384 // width, next((parts for parts in (16, 64) if splits <= parts), 256))  # 128 numbers a thread
    launch(
        finish_kernel, (b, k), energy, mass, moment, divisor, n, splits,
        delta=form.delta, K=k, P=p, WIDTH=width, PARTS=parts, UNIFORM=form.uniform_moment, DELTA=bool(form.delta), num_warps=4,
    )  # fmt: skip
    return moment, divisor


@op()
def update(
    projected: Tensor, membership: Tensor, moment: Tensor, gate: Tensor | None, theta: Tensor | None, form: str
) -> Tensor:
    told, (b, n, d) = Form.read(form), projected.shape
    k = told.num_heads
    sweep, out = plan.sweep("settle", b, n, k, d // k, projected.dtype), torch.empty_like(projected)
    launch(
        update_kernel, (b, sweep.splits, over(k, sweep.heads)),
        projected, membership, moment, gate, theta, out, n, sweep.span,
        sign=told.sign, K=k, P=d // k, HEADS=sweep.heads, WIDTH=sweep.width, TOKENS=sweep.tokens,
        MODE=MODES[told.mode], GATED=gate is not None, STAGES=sweep.stages, num_warps=sweep.warps,
    )  # fmt: skip
    return out
