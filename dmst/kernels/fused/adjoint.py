"""From G = dL/dupdate back to the projected tokens, the membership and the gate (the formulas of `closed_form`).

    sweep 1   A_ki = sum_n pi G s                           proximal: B_ki = sum_n pi q,  q = G s/(1+w)^2
    between   dT, dg, dtheta from A; m = dT/divisor
    sweep 2   dS = pi (c G + 2 m s)                         proximal: -G w/(1+w) + 2 pi m s        (uniform: 2 m s without pi)
              dpi = sum_i s (c G + m s) - sum_i m T         proximal: -c sum_i q + ...             (uniform: no m)
              dscores = pi (1 - pi) dpi for a sigmoid, else dpi itself

    weighted  s' = pi s is kept: A = sum_n G s',  dS = pi c G + 2 m s',  pi dpi = sum_i s' (c G + m s'/pi) - pi sum_i m T

One program takes both sweeps where a sample is not split: the second finds its tokens in the cache. Otherwise the first leaves
partial sums, and every program of the second adds them up for itself, in order; they may come from elsewhere too (`long.py`).
dS is written over G.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.form import Form
from dmst.kernels.fused import resident, stream
from dmst.kernels.fused.core import LISTING, MODES, PROXIMAL, attenuation, factor, gate_of_heads, head_block, rounded, tile
from dmst.kernels.fused.launch import launch, op
from dmst.kernels.fused.moments import update
from dmst.kernels.plan import over


@triton.jit
def adjoint_kernel(
    grad_ptr, s_ptr, membership_ptr, moment_ptr, gate_ptr, divisor_ptr, theta_ptr,
    part_ptr, dmembership_ptr, dgate_ptr, dtheta_ptr, dbias_ptr,
    n, span, splits, rows,
    sign: tl.constexpr, K: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    MODE: tl.constexpr, GATED: tl.constexpr, UNIFORM: tl.constexpr, SIGMOID: tl.constexpr,
    WEIGHTED: tl.constexpr, SUM: tl.constexpr, PULL: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sample, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, column, inside = head_block(HEADS, WIDTH, K, P, tl.program_id(2) * HEADS)
    gate = gate_of_heads(gate_ptr, sample, head, K, GATED)[:, None]
    moment = tl.load(moment_ptr + sample * (K * P) + column, mask=inside, other=0.0)
    a = attenuation(moment, gate)
    theta = tl.load(theta_ptr).to(tl.float32) if MODE == PROXIMAL else 1.0
    c = factor(a, gate, theta, sign, MODE)
    start, stop = split * span, tl.minimum((split + 1) * span, n)

    if SUM:
        share = tl.zeros((TOKENS, HEADS, WIDTH), tl.float32)
        for first in tl.range(start, stop, TOKENS, num_stages=STAGES):
            at, real, place, some = tile(first, stop, sample, n, head, column, inside, K, P, TOKENS)
            grad = tl.load(grad_ptr + at, mask=real, other=0.0).to(tl.float32)
            s = tl.load(s_ptr + at, mask=real, other=0.0).to(tl.float32)
            pi = tl.load(membership_ptr + place, mask=some, other=0.0)[:, :, None]
            q = grad * s
            if MODE == PROXIMAL:
                damp = 1.0 + pi * c[None]
                q = q / (damp * damp)
            share += q if WEIGHTED else pi * q
        total = tl.sum(share, 0)
        if not PULL:
            tl.store(part_ptr + (sample * splits + split) * (K * P) + column, total, mask=inside)
    else:
        parts = tl.zeros((16, HEADS, WIDTH), tl.float32)
        for first in range(0, rows, 16):
            part = first + tl.arange(0, 16)[:, None, None]
            at = (sample * rows + part) * (K * P) + column[None]
            parts += tl.load(part_ptr + at, mask=(part < rows) & inside[None], other=0.0)
        total = tl.sum(parts, 0)

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
        for first in tl.range(start, stop, TOKENS, num_stages=STAGES):
            at, real, place, some = tile(first, stop, sample, n, head, column, inside, K, P, TOKENS)
            grad = tl.load(grad_ptr + at, mask=real, other=0.0).to(tl.float32)
            s = tl.load(s_ptr + at, mask=real, other=0.0).to(tl.float32)
            pi = tl.load(membership_ptr + place, mask=some, other=0.0)
            if WEIGHTED:
                pulled = c[None] * grad
                bent = m[None] * s
                ds = pi[:, :, None] * pulled + 2.0 * bent
                dpi = tl.sum(pulled * s, 2) + tl.where(pi > 0, tl.sum(bent * s, 2) / pi, 0.0) - pi * mean[None, :]
                dpi = dpi * (1.0 - pi)
            else:
                if MODE == PROXIMAL:
                    w = pi[:, :, None] * c[None]
                    ds = -grad * w / (1.0 + w)
                    dpi = -tl.sum(c[None] * grad * s / ((1.0 + w) * (1.0 + w)), 2)
                else:
                    pulled = c[None] * grad
                    ds = pi[:, :, None] * pulled
                    dpi = tl.sum(pulled * s, 2)
                bent = m[None] * s
                if UNIFORM:
                    ds += 2.0 * bent
                else:
                    ds += 2.0 * pi[:, :, None] * bent
                    dpi += tl.sum(bent * s, 2) - mean[None, :]
                if SIGMOID:
                    dpi = dpi * pi * (1.0 - pi)
            ds = ds.to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + at, ds, mask=real)
            tl.store(dmembership_ptr + place, dpi, mask=some)
            if BIAS:
                bias += tl.where(real, ds.to(tl.float32), 0.0)
        if BIAS:
            tl.store(dbias_ptr + (sample * splits + split) * (K * P) + column, tl.sum(bias, 0), mask=inside)


@op(mutates=("grad",))
def pull(
    grad: Tensor, projected: Tensor, membership: Tensor, moment: Tensor, gate: Tensor | None, divisor: Tensor,
    theta: Tensor | None, total: Tensor | None, form: str, weighted: bool, wants_bias: bool, wants_update: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dS over G; the gradients of scores (or membership) (b, n, k), gate and theta (b, k), of the bias (b, splits, k, p); and
    the update once more. What there is not, or is not wanted, is empty. `total`: A (b, k, p), where it is known.
    """
    told, (b, n, d) = Form.read(form), projected.shape
    k, p = told.num_heads, d // told.num_heads
    given = (grad, projected, membership, moment, gate, divisor, theta)
    whole = plan.whole(b, n, k, p) is not None and not weighted
    if whole and resident.fits_pull(n, d, p, projected.dtype, projected.device):
        return resident.resident_pull(*given, form, wants_bias, wants_update)
    made_update = grad.new_empty(0)
    if wants_update:
        made_update = update(projected, membership, moment, gate, theta, form, weighted)
    sweep = plan.sweep(b, n, k, p)
    split = sweep.splits > 1 and total is None
    part = torch.empty(b, sweep.splits if split else 0, k, p, device=grad.device, dtype=torch.float32)
    known = part if total is None else total.unsqueeze(1)
    made = resident.empties(membership, gate, theta, (b, sweep.splits, k, p), wants_bias)

    def sweeps(first: bool, second: bool) -> None:
        launch(
            adjoint_kernel, (b, sweep.splits, over(k, sweep.heads)),
            *given, known, *made, n, sweep.span, sweep.splits, known.shape[1],
            sign=told.sign, K=k, P=p, HEADS=sweep.heads, WIDTH=sweep.width, TOKENS=sweep.tokens, MODE=MODES[told.mode],
            GATED=gate is not None, UNIFORM=told.uniform_moment, SIGMOID=told.membership == "sigmoid", WEIGHTED=weighted,
            SUM=first, PULL=second, BIAS=wants_bias, STAGES=sweep.stages, num_warps=sweep.warps,
        )  # fmt: skip

    if split:
        sweeps(True, False)
    if known.shape[1] and stream.serves(p, grad.dtype, grad.device):
        known = known.sum(1)
        return *stream.stream_pull(*given, known, form, weighted, wants_bias), made_update
    sweeps(not known.shape[1], True)
    return *made, made_update
