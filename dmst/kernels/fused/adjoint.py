"""From G = dL/dupdate back to the projected tokens, the membership and the gate. r = 1 (listing) or 2 (equation).

    sweep 1   A_ki = sum_n pi G s                           proximal: B_ki = sum_n pi q,  q = G s/(1+w)^2
    between   dT_i = g^(r+2) a^2 A                          proximal: theta g^4 a^2 B;  m = dT/divisor
              dg = -g^(r-1) sum_i A a (r - 2 (1 - a))       proximal: -2 theta g sum_i a^2 B,  dtheta = -sum g^2 a B
    sweep 2   dS = pi (c G + 2 m s)                         proximal: -G w/(1+w) + 2 pi m s
              dpi = sum_i s (c G + m s) - sum_i m T         proximal: -c sum_i q + ...
              dscores = pi (1 - pi) dpi for a sigmoid, else dpi itself (TSSA)
              update = f s once more, for the gradient of the output weight, since s is at hand

One program takes both sweeps where a sample is not split: the second finds its tokens in the cache. Otherwise the first leaves
partial sums, which are added up between. dS is written over G. Where a product goes into a sum it is written whether it is
rounded before: otherwise the compiler chooses, and may choose another way in a kernel that also writes the update.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.form import Form
from dmst.kernels.fused.core import LISTING, MODES, PROXIMAL, attenuation, factor, head_block, rounded, tile, weigh
from dmst.kernels.fused.launch import launch, op


@triton.jit
def adjoint_kernel(
    grad_ptr, s_ptr, membership_ptr, moment_ptr, gate_ptr, divisor_ptr, theta_ptr,
    part_ptr, dmembership_ptr, dgate_ptr, dtheta_ptr, dbias_ptr, update_ptr,
    n, span, splits,
    K: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
    TOKENS: tl.constexpr, MODE: tl.constexpr, GATED: tl.constexpr, SIGMOID: tl.constexpr,
    SUM: tl.constexpr, PULL: tl.constexpr, BIAS: tl.constexpr, UPDATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`SUM` alone leaves rows of A, `PULL` alone reads what they sum to."""
    sample, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, column, inside = head_block(HEADS, WIDTH, K, P, tl.program_id(2) * HEADS)
    gate = tl.load(gate_ptr + sample * K + head, mask=head < K, other=0.0)[:, None] if GATED else 1.0
    theta = tl.load(theta_ptr).to(tl.float32) if MODE == PROXIMAL else 1.0
    row, count = sample * n + split * span, tl.minimum(span, n - split * span)
    grad_ptr += row * (K * P)
    s_ptr += row * (K * P)
    update_ptr += row * (K * P)
    membership_ptr += row * K
    dmembership_ptr += row * K
    place_of_row = (sample * splits + split) * (K * P)
    moment, a, c = (), (), ()
    for i in tl.static_range(PIECES):
        moment += (tl.load(moment_ptr + sample * (K * P) + column + i * WIDTH, mask=inside, other=0.0),)
        a += (attenuation(moment[i], gate),)
        c += (factor(a[i], gate, theta, MODE)[None],)

    total = ()
    if SUM:
        share = ()
        for _ in tl.static_range(PIECES):
            share += (tl.zeros((TOKENS, HEADS, WIDTH), tl.float32),)
        for first in tl.range(0, count, TOKENS, num_stages=STAGES):
            at, real, place, some = tile(first, count, head, column, inside, K, P, TOKENS)
            pi = tl.load(membership_ptr + place, mask=some, other=0.0)[:, :, None]
            before, share = share, ()
            for i in tl.static_range(PIECES):
                grad = tl.load(grad_ptr + at + i * WIDTH, mask=real, other=0.0).to(tl.float32)
                q = grad * tl.load(s_ptr + at + i * WIDTH, mask=real, other=0.0).to(tl.float32)
                if MODE == PROXIMAL:
                    damp = 1.0 + rounded(pi * c[i])
                    q = q / (damp * damp)
                share += (tl.fma(pi, q, before[i]),)
        for i in tl.static_range(PIECES):
            total += (tl.sum(share[i], 0),)
            if not PULL:
                tl.store(part_ptr + place_of_row + column + i * WIDTH, total[i], mask=inside)
    else:
        for i in tl.static_range(PIECES):
            total += (tl.load(part_ptr + sample * (K * P) + column + i * WIDTH, mask=inside, other=0.0),)

    if PULL:
        divisor = tl.load(divisor_ptr + sample * K + head, mask=head < K, other=1.0)[:, None]
        dgate, dtheta, mean = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS,), tl.float32)
        m, bias = (), ()
        for i in tl.static_range(PIECES):
            bent = gate * gate * a[i] * a[i] * total[i]
            if MODE == PROXIMAL:
                dmoment = theta * gate * gate * bent
                dgate += -2.0 * theta * tl.sum(rounded(gate * a[i] * a[i] * total[i]), 1)
                dtheta += -tl.sum(rounded(gate * gate * a[i] * total[i]), 1)
            elif MODE == LISTING:
                dmoment = gate * bent
                dgate -= tl.sum(rounded(total[i] * a[i] * (2.0 * a[i] - 1.0)), 1)
            else:
                dmoment = gate * gate * bent
                dgate -= 2.0 * tl.sum(rounded(gate * total[i] * a[i] * a[i]), 1)
            m += ((dmoment / divisor)[None],)
            mean += tl.sum(rounded(dmoment / divisor * moment[i]), 1)
            if BIAS:
                bias += (tl.zeros((TOKENS, HEADS, WIDTH), tl.float32),)
        if split == 0:
            if GATED:
                tl.store(dgate_ptr + sample * K + head, dgate, mask=head < K)
            if MODE == PROXIMAL:
                tl.store(dtheta_ptr + sample * K + head, dtheta, mask=head < K)
        for first in tl.range(0, count, TOKENS, num_stages=STAGES):
            at, real, place, some = tile(first, count, head, column, inside, K, P, TOKENS)
            share_of_head = tl.load(membership_ptr + place, mask=some, other=0.0)
            pi = share_of_head[:, :, None]
            dpi = tl.zeros((TOKENS, HEADS), tl.float32)
            before, bias = bias, ()
            for i in tl.static_range(PIECES):
                grad = tl.load(grad_ptr + at + i * WIDTH, mask=real, other=0.0).to(tl.float32)
                s = tl.load(s_ptr + at + i * WIDTH, mask=real, other=0.0).to(tl.float32)
                lean = c[i] * grad
                if MODE == PROXIMAL:
                    w = rounded(pi * c[i])
                    ds = tl.fma(2.0 * pi * m[i], s, -grad * w / (1.0 + w))
                    lean = -lean / ((1.0 + w) * (1.0 + w))
                else:
                    ds = pi * tl.fma(2.0 * m[i], s, lean)
                dpi += tl.sum(rounded(tl.fma(m[i], s, lean) * s), 2)
                tl.store(grad_ptr + at + i * WIDTH, ds.to(grad_ptr.dtype.element_ty), mask=real)
                if UPDATE:
                    update = weigh(pi, c[i], MODE) * s
                    tl.store(update_ptr + at + i * WIDTH, update.to(update_ptr.dtype.element_ty), mask=real)
                if BIAS:
                    bias += (before[i] + ds,)
            dpi -= mean[None, :]
            if SIGMOID:
                dpi = dpi * share_of_head * (1.0 - share_of_head)
            tl.store(dmembership_ptr + place, dpi, mask=some)
        if BIAS:
            for i in tl.static_range(PIECES):
                tl.store(dbias_ptr + place_of_row + column + i * WIDTH, tl.sum(bias[i], 0), mask=inside)


@op(mutates=("grad",))
def pull(
    grad: Tensor, projected: Tensor, membership: Tensor, moment: Tensor, gate: Tensor | None, divisor: Tensor,
    theta: Tensor | None, form: str, wants_bias: bool, wants_update: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dS over G; the gradients of scores (or membership) (b, n, k), gate and theta (b, k), of the bias (b, splits, k, p); and
    the update once more. What there is not, or is not wanted, is empty."""
    told, (b, n, d) = Form.read(form), projected.shape
    k, p = told.num_heads, d // told.num_heads
    sweep = plan.sweep("adjoint", b, n, k, p, projected.dtype)
    split = sweep.splits > 1
    dmembership = torch.empty_like(membership)
    dgate, dtheta = (membership.new_empty(0 if x is None else b, k) for x in (gate, theta))
    dbias = membership.new_empty(b if wants_bias else 0, sweep.splits, k, p)
    update = torch.empty_like(projected) if wants_update else projected.new_empty(0)

    def sweeps(first: bool, second: bool, part: Tensor) -> None:
        launch(
            adjoint_kernel, (b, sweep.splits, sweep.blocks),
            grad, projected, membership, moment, gate, divisor, theta, part, dmembership, dgate, dtheta, dbias, update,
            n, sweep.span, sweep.splits,
            K=k, P=p, **sweep.block, MODE=MODES[told.mode], GATED=gate is not None, SIGMOID=told.membership == "sigmoid",
            SUM=first, PULL=second, BIAS=wants_bias, UPDATE=wants_update, STAGES=sweep.stages, num_warps=sweep.warps,
        )  # fmt: skip

    part = membership.new_empty(b if split else 0, sweep.splits, k, p)
    if split:
        sweeps(True, False, part)
        part = part.sum(1)
    sweeps(not split, True, part)
    return dmembership, dgate, dtheta, dbias, update
