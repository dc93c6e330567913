"""From G = dL/dupdate back to the projected tokens, the membership and the gate. r = 1 (listing) or 2 (equation).

    sweep 1   A_ki = sum_n pi G s                           proximal: B_ki = sum_n pi q,  q = G s/(1+w)^2
    between   dT_i = g^(r+2) a^2 A                          proximal: theta g^4 a^2 B;  m = dT/divisor
              dg = -g^(r-1) sum_i A a (r - 2 (1 - a))       proximal: -2 theta g sum_i a^2 B,  dtheta = -sum g^2 a B
    sweep 2   dS = pi (c G + 2 m s)                         proximal: -G w/(1+w) + 2 pi m s
              dpi = sum_i s (c G + m s) - sum_i m T         proximal: -c sum_i q + ...
              dscores = pi (1 - pi) dpi for a sigmoid, else dpi itself (TSSA)
              update = f s once more, for the gradient of the output weight, since s is at hand

One program takes both sweeps where a sample is not split, and holds a short one in registers (`moments.py`). Otherwise the
first leaves partial sums, which are added up between. dS is written over G. Where a product goes into a sum it is written
whether it is rounded before: else the compiler chooses, and may choose another way in a kernel that also writes the update.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.form import Form
from dmst.kernels.fused.core import LISTING, MODES, PROXIMAL, attenuation, factor, rounded, weigh
from dmst.kernels.fused.launch import launch, op
from dmst.kernels.fused.tiles import by_group, group_block, held_on, places, read, rows, write


@triton.jit
def _pull(grad, s, pi, c, m, mean, MODE: tl.constexpr, SIGMOID: tl.constexpr):
    """dS, and of each group its part of dscores."""
    lean = c * grad
    if MODE == PROXIMAL:
        w = rounded(pi * c)
        ds = tl.fma(2.0 * pi * m, s, -grad * w / (1.0 + w))
        lean = -lean / ((1.0 + w) * (1.0 + w))
    else:
        ds = pi * tl.fma(2.0 * m, s, lean)
    dpi = tl.sum(rounded(tl.fma(m, s, lean) * s), 2, keep_dims=True) - mean[None]
    return ds, dpi * pi * (1.0 - pi) if SIGMOID else dpi


@triton.jit
def adjoint_kernel(
    grad_ptr, s_ptr, membership_ptr, moment_ptr, gate_ptr, divisor_ptr, theta_ptr,
    part_ptr, dmembership_ptr, dgate_ptr, dtheta_ptr, dbias_ptr, update_ptr,
    n, span, splits,
    K: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    HELD: tl.constexpr, MODE: tl.constexpr, GATED: tl.constexpr, SIGMOID: tl.constexpr,
    SUM: tl.constexpr, PULL: tl.constexpr, BIAS: tl.constexpr, UPDATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`SUM` alone leaves rows of A, `PULL` alone reads what they sum to. What is of a head is left by group."""
    sample, split, start = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * GROUPS
    group, head, column, inside = group_block(GROUPS, WIDTH, PARTS, K, P, start)
    at, known, token = rows(start, TOKENS, GROUPS, WIDTH, PARTS, K, P)
    place, some, nth = places(head, TOKENS, K)
    part, real, _ = places(group, TOKENS, K * PARTS)
    here = head < K
    gate = tl.load(gate_ptr + sample * K + head, mask=here, other=0.0)[:, None] if GATED else 1.0
    theta = tl.load(theta_ptr).to(tl.float32) if MODE == PROXIMAL else 1.0
    row, count = sample * n + split * span, tl.minimum(span, n - split * span)
    grad_ptr += row * (K * P)
    s_ptr += row * (K * P)
    update_ptr += row * (K * P)
    membership_ptr += row * K
    dmembership_ptr += row * (K * PARTS)
    place_of_row = (sample * splits + split) * (K * P)
    moment = tl.load(moment_ptr + sample * (K * P) + column, mask=inside, other=0.0)
    a = attenuation(moment, gate)
    c = factor(a, gate, theta, MODE)[None]

    grads, held = (), ()
    if SUM:
        share = tl.zeros((TOKENS, GROUPS, WIDTH), tl.float32)
        for i in tl.static_range(HELD):
            grads += (read(grad_ptr + i * TOKENS * K * P, at, known, token, count - i * TOKENS),)
            held += (read(s_ptr + i * TOKENS * K * P, at, known, token, count - i * TOKENS),)
        for first in tl.range(0, 1 if HELD else count, TOKENS, num_stages=STAGES):
            for i in tl.static_range(max(HELD, 1)):
                left = count - first - i * TOKENS
                if HELD:
                    q = by_group(grads[i], GROUPS) * by_group(held[i], GROUPS)
                else:
                    q = by_group(read(grad_ptr + first * (K * P), at, known, token, left), GROUPS)
                    q *= by_group(read(s_ptr + first * (K * P), at, known, token, left), GROUPS)
                pi = read(membership_ptr + (first + i * TOKENS) * K, place, some, nth, left)
                if MODE == PROXIMAL:
                    damp = 1.0 + rounded(pi * c)
                    q = q / (damp * damp)
                share = tl.fma(pi, q, share)
        total = tl.sum(share, 0)
        if not PULL:
            tl.store(part_ptr + place_of_row + column, total, mask=inside)
    else:
        total = tl.load(part_ptr + sample * (K * P) + column, mask=inside, other=0.0)

    if PULL:
        divisor = tl.load(divisor_ptr + sample * K + head, mask=here, other=1.0)[:, None]
        bent = gate * gate * a * a * total
        if MODE == PROXIMAL:
            dmoment = theta * gate * gate * bent
            dgate = -2.0 * theta * tl.sum(rounded(gate * a * a * total), 1)
            dtheta = -tl.sum(rounded(gate * gate * a * total), 1)
        elif MODE == LISTING:
            dmoment = gate * bent
            dgate = -tl.sum(rounded(total * a * (2.0 * a - 1.0)), 1)
        else:
            dmoment = gate * gate * bent
            dgate = -2.0 * tl.sum(rounded(gate * total * a * a), 1)
        m = (dmoment / divisor)[None]
        mean = tl.sum(rounded(dmoment / divisor * moment), 1)[:, None]
        bias = tl.zeros((TOKENS, GROUPS, WIDTH), tl.float32)
        if split == 0:
            if GATED:
                tl.store(dgate_ptr + sample * (K * PARTS) + group, dgate, mask=here)
            if MODE == PROXIMAL:
                tl.store(dtheta_ptr + sample * (K * PARTS) + group, dtheta, mask=here)
        for first in tl.range(0, 1 if HELD else count, TOKENS, num_stages=STAGES):
            for i in tl.static_range(max(HELD, 1)):
                left = count - first - i * TOKENS
                if HELD:
                    grad, s = by_group(held_on(grads[i], count), GROUPS), by_group(held_on(held[i], count), GROUPS)
                else:
                    grad = by_group(read(grad_ptr + first * (K * P), at, known, token, left), GROUPS)
                    s = by_group(read(s_ptr + first * (K * P), at, known, token, left), GROUPS)
                pi = read(membership_ptr + (first + i * TOKENS) * K, place, some, nth, left)
                ds, dpi = _pull(grad, s, pi, c, m, mean, MODE, SIGMOID)
                tl.store(dmembership_ptr + (first + i * TOKENS) * (K * PARTS) + part, dpi, mask=real & (nth < left))
                write(grad_ptr + (first + i * TOKENS) * (K * P), ds, at, known, token, left)
                if UPDATE:
                    write(update_ptr + (first + i * TOKENS) * (K * P), weigh(pi, c, MODE) * s, at, known, token, left)
                if BIAS:
                    bias += ds
        if BIAS:
            tl.store(dbias_ptr + place_of_row + column, tl.sum(bias, 0), mask=inside)


@op(mutates=("grad",))
def pull(
    grad: Tensor, projected: Tensor, membership: Tensor, moment: Tensor, gate: Tensor | None, divisor: Tensor,
    theta: Tensor | None, form: str, wants_bias: bool, wants_update: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dS over G; the gradients of scores (or membership) (b, n, k), in parts those of gate and theta (b, k parts), of the bias
    (b, splits, d); and the update once more. What there is not, or is not wanted, is empty."""
    told, (b, n, d) = Form.read(form), projected.shape
    k, p = told.num_heads, d // told.num_heads
    sweep = plan.sweep("adjoint", b, n, k, p, projected.dtype)
    split, parts = sweep.splits > 1, sweep.block["PARTS"]
    dmembership = membership.new_empty(b, n, k * parts)
    dgate, dtheta = (membership.new_empty(0 if x is None else b, k * parts) for x in (gate, theta))
    dbias = membership.new_empty(b if wants_bias else 0, sweep.splits, d)
    update = torch.empty_like(projected) if wants_update else projected.new_empty(0)

    def sweeps(first: bool, second: bool, part: Tensor) -> None:
        launch(
            adjoint_kernel, (b, sweep.splits, sweep.blocks),
            grad, projected, membership, moment, gate, divisor, theta, part, dmembership, dgate, dtheta, dbias, update,
            n, sweep.span, sweep.splits,
            K=k, P=p, **sweep.block, MODE=MODES[told.mode], GATED=gate is not None, SIGMOID=told.membership == "sigmoid",
            SUM=first, PULL=second, HELD=sweep.held, BIAS=wants_bias, UPDATE=wants_update, STAGES=sweep.stages,
            num_warps=sweep.warps,
        )  # fmt: skip

    part = membership.new_empty(b if split else 0, sweep.splits, d)
    if split:
        sweeps(True, False, part)
        part = part.sum(1)
    sweeps(not split, True, part)
    if parts > 1:
        dmembership = dmembership.unflatten(-1, (k, parts)).sum(-1)
    return dmembership, dgate, dtheta, dbias, update
