"""From G = dL/dupdate back to the projected tokens, the membership and the gate (the formulas of `closed_form`).

    sweep 1   A_ki = sum_n pi G s                           proximal: B_ki = sum_n pi q,  q = G s/(1+w)^2
    between   dT, dg, dtheta from A; m = dT/divisor
    sweep 2   dS = pi (c G + 2 m s)                         proximal: -G w/(1+w) + 2 pi m s        (uniform: 2 m s without pi)
              dpi = sum_i s (c G + m s) - sum_i m T         proximal: -c sum_i q + ...             (uniform: no m)
              dscores = pi (1 - pi) dpi for a sigmoid, else dpi itself
              update = f s once more, for the gradient of the output weight, since s is at hand

One program takes both sweeps where a sample is not split: the second finds its tokens in the cache. Otherwise the first leaves
partial sums, and every program of the second adds them up for itself, in order. dS is written over G. Where a product goes into
a sum it is written whether it is rounded before: otherwise that is the compiler's choice, and may be another one in a kernel
that also writes the update or sums a bias.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.form import Form
from dmst.kernels.fused.core import (
    LISTING,
    MODES,
    PROXIMAL,
    added,
    attenuation,
    factor,
    gate_of_heads,
    head_block,
    rounded,
    tile,
    weigh,
)
from dmst.kernels.fused.launch import launch, op


@triton.jit
def adjoint_kernel(
    grad_ptr, s_ptr, membership_ptr, moment_ptr, gate_ptr, divisor_ptr, theta_ptr,
    part_ptr, dmembership_ptr, dgate_ptr, dtheta_ptr, dbias_ptr, update_ptr,
    n, span, splits,
    sign: tl.constexpr, K: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    MODE: tl.constexpr, GATED: tl.constexpr, UNIFORM: tl.constexpr, SIGMOID: tl.constexpr,
    SUM: tl.constexpr, PULL: tl.constexpr, BIAS: tl.constexpr, UPDATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sample, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, column, inside = head_block(HEADS, WIDTH, K, P, tl.program_id(2) * HEADS)
    gate = gate_of_heads(gate_ptr, sample, head, K, GATED)[:, None]
    moment = tl.load(moment_ptr + sample * (K * P) + column, mask=inside, other=0.0)
    a = attenuation(moment, gate)
    theta = tl.load(theta_ptr).to(tl.float32) if MODE == PROXIMAL else 1.0
    c = factor(a, gate, theta, sign, MODE)
    row, count = sample * n + split * span, tl.minimum(span, n - split * span)
    grad_ptr += row * (K * P)
    s_ptr += row * (K * P)
    update_ptr += row * (K * P)
    membership_ptr += row * K
    dmembership_ptr += row * K

    if SUM:
        share = tl.zeros((TOKENS, HEADS, WIDTH), tl.float32)
        for first in tl.range(0, count, TOKENS, num_stages=STAGES):
            at, real, place, some = tile(first, count, head, column, inside, K, P, TOKENS)
            grad = tl.load(grad_ptr + at, mask=real, other=0.0).to(tl.float32)
            s = tl.load(s_ptr + at, mask=real, other=0.0).to(tl.float32)
            pi = tl.load(membership_ptr + place, mask=some, other=0.0)[:, :, None]
            q = grad * s
            if MODE == PROXIMAL:
                damp = 1.0 + rounded(pi * c[None])
                q = q / (damp * damp)
            share = tl.fma(pi, q, share)
        total = tl.sum(share, 0)
        if not PULL:
            tl.store(part_ptr + (sample * splits + split) * (K * P) + column, total, mask=inside)
    else:
        total = added(part_ptr, sample, splits, column, inside, K * P)

    if PULL:
        if MODE == PROXIMAL:
            dmoment = theta * gate * gate * gate * gate * a * a * total
            dgate = -2.0 * theta * tl.sum(rounded(gate * a * a * total), 1)
            dtheta = -tl.sum(rounded(gate * gate * a * total), 1)
        elif MODE == LISTING:
            dmoment = -sign * gate * gate * gate * a * a * total
            dgate = sign * tl.sum(rounded(total * a * (2.0 * a - 1.0)), 1)
        else:
            dmoment = -sign * gate * gate * gate * gate * a * a * total
            dgate = 2.0 * sign * tl.sum(rounded(gate * total * a * a), 1)
        divisor = tl.load(divisor_ptr + sample * K + head, mask=head < K, other=1.0)
        m = dmoment / divisor[:, None]
        mean = tl.sum(rounded(m * moment), 1)
        if split == 0:
            if GATED:
                tl.store(dgate_ptr + sample * K + head, dgate, mask=head < K)
            if MODE == PROXIMAL:
                tl.store(dtheta_ptr + sample * K + head, dtheta, mask=head < K)
        bias = tl.zeros((TOKENS, HEADS, WIDTH), tl.float32)
        for first in tl.range(0, count, TOKENS, num_stages=STAGES):
            at, real, place, some = tile(first, count, head, column, inside, K, P, TOKENS)
            grad = tl.load(grad_ptr + at, mask=real, other=0.0).to(tl.float32)
            s = tl.load(s_ptr + at, mask=real, other=0.0).to(tl.float32)
            pi = tl.load(membership_ptr + place, mask=some, other=0.0)
            lean = c[None] * grad
            if MODE == PROXIMAL:
                w = rounded(pi[:, :, None] * c[None])
                ds = -grad * w / (1.0 + w)
                lean = -lean / ((1.0 + w) * (1.0 + w))
            elif UNIFORM:
                ds = pi[:, :, None] * lean
            else:
                ds = pi[:, :, None] * tl.fma(2.0 * m[None], s, lean)
            if UNIFORM:
                ds = tl.fma(2.0 * m[None], s, ds)
                dpi = tl.sum(rounded(lean * s), 2)
            else:
                if MODE == PROXIMAL:
                    ds = tl.fma(2.0 * pi[:, :, None] * m[None], s, ds)
                dpi = tl.sum(rounded(tl.fma(m[None], s, lean) * s), 2) - mean[None, :]
            if SIGMOID:
                dpi = dpi * pi * (1.0 - pi)
            tl.store(grad_ptr + at, ds.to(grad_ptr.dtype.element_ty), mask=real)
            tl.store(dmembership_ptr + place, dpi, mask=some)
            if UPDATE:
                update = weigh(pi[:, :, None], c[None], MODE) * s
                tl.store(update_ptr + at, update.to(update_ptr.dtype.element_ty), mask=real)
            if BIAS:
                bias += ds
        if BIAS:
            tl.store(dbias_ptr + (sample * splits + split) * (K * P) + column, tl.sum(bias, 0), mask=inside)


@op(mutates=("grad",))
def pull(
    grad: Tensor, projected: Tensor, membership: Tensor, moment: Tensor, gate: Tensor | None, divisor: Tensor,
    theta: Tensor | None, form: str, wants_bias: bool, wants_update: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dS over G; the gradients of scores (or membership) (b, n, k), gate and theta (b, k), of the bias (b, splits, k, p); and
    the update once more. What there is not, or is not wanted, is empty.
    """
    told, (b, n, d) = Form.read(form), projected.shape
    k, p = told.num_heads, d // told.num_heads
    sweep = plan.sweep("adjoint", b, n, k, p, projected.dtype)
    split = sweep.splits > 1
    part = membership.new_empty(b if split else 0, sweep.splits, k, p)
    dmembership = torch.empty_like(membership)
    dgate, dtheta = (membership.new_empty(0 if x is None else b, k) for x in (gate, theta))
    dbias = membership.new_empty(b if wants_bias else 0, sweep.splits, k, p)
    update = torch.empty_like(projected) if wants_update else projected.new_empty(0)

    def sweeps(first: bool, second: bool) -> None:
        launch(
            adjoint_kernel, (b, sweep.splits, sweep.blocks),
            grad, projected, membership, moment, gate, divisor, theta, part, dmembership, dgate, dtheta, dbias, update,
            n, sweep.span, sweep.splits,
            sign=told.sign, K=k, P=p, HEADS=sweep.heads, WIDTH=sweep.width, TOKENS=sweep.tokens, MODE=MODES[told.mode],
            GATED=gate is not None, UNIFORM=told.uniform_moment, SIGMOID=told.membership == "sigmoid",
            SUM=first, PULL=second, BIAS=wants_bias, UPDATE=wants_update, STAGES=sweep.stages, num_warps=sweep.warps,
        )  # fmt: skip

    if split:
        sweeps(True, False)
    sweeps(not split, True)
    return dmembership, dgate, dtheta, dbias, update
