"""The second sweep of the adjoint over long samples, where A is known: each token read once, straight into registers. In Gluon.

    m = dT/divisor from A    dS = pi (c G + 2 m s), written over G    dscores, dg, dtheta, sums of dS    as `resident.pull`
    weighted                 s' = pi s is kept:  dS = pi c G + 2 m s',  pi dpi = sum_i s' (c G + m s'/pi) - pi sum_i m T

A program takes `span` tokens of one sample and whole heads, each padded to a power of two in registers, never in memory. A
thread has 8 channels of one token, 16 bytes, and asks for those of `TILES` tokens before it uses the first: enough is on its
way without shared memory or barriers.
"""

# mypy: disallow-untyped-defs=False, disable-error-code="assignment, misc, var-annotated"
from __future__ import annotations

import torch
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.form import Form
from dmst.kernels.fused import resident
from dmst.kernels.fused.core import MODES, PROXIMAL, attenuation, factor
from dmst.kernels.fused.launch import is_fake, op
from dmst.kernels.fused.resident import between, gl, gluon, pulled
from dmst.kernels.plan import over

WARPS, TILES = 8, 2  # within 3 % of the fastest of twelve, with 512 or 1,056 programs, at 65,536 and 262,144 tokens


@gluon.jit
def stream_kernel(
    grad_ptr, s_ptr, membership_ptr, moment_ptr, gate_ptr, divisor_ptr, theta_ptr, total_ptr,
    dmembership_ptr, dgate_ptr, dtheta_ptr, dbias_ptr, n, span, splits, sign,
    K: gl.constexpr, P: gl.constexpr, HEADS: gl.constexpr, WIDTH: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr,
    MODE: gl.constexpr, GATED: gl.constexpr, UNIFORM: gl.constexpr, SIGMOID: gl.constexpr, WEIGHTED: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Tiles (ROWS, HEADS, WIDTH)."""
    PIECES: gl.constexpr = WIDTH // 8
    ROWS: gl.constexpr = WARPS * (32 // (HEADS * PIECES))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [32 // (HEADS * PIECES), HEADS, PIECES], [WARPS, 1, 1], [2, 1, 0])
    SHARE: gl.constexpr = gl.SliceLayout(2, LAYOUT)  # (ROWS, HEADS)
    CHANNEL: gl.constexpr = gl.SliceLayout(0, LAYOUT)  # (HEADS, WIDTH)
    sample, split = gl.program_id(0).to(gl.int64), gl.program_id(1)
    head = gl.program_id(2) * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, CHANNEL))
    channel = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, CHANNEL)), 0)
    some = head < K
    inside = (channel < P) & gl.expand_dims(some, 1)
    column = gl.expand_dims(head, 1) * P + channel
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, SHARE)), 1)
    across = gl.expand_dims(gl.convert_layout(head, gl.SliceLayout(0, SHARE), assert_trivial=True), 0)
    token = gl.expand_dims(row, 2)

    moment = gl.load(moment_ptr + sample * (K * P) + column, mask=inside, other=0.0)
    total = gl.load(total_ptr + sample * (K * P) + column, mask=inside, other=0.0)
    divisor = gl.expand_dims(gl.load(divisor_ptr + sample * K + head, mask=some, other=1.0), 1)
    gate = gl.expand_dims(gl.load(gate_ptr + sample * K + head, mask=some, other=0.0), 1) if GATED else 1.0
    theta = gl.load(theta_ptr).to(gl.float32) if MODE == PROXIMAL else 1.0
    a = attenuation(moment, gate)
    c = gl.expand_dims(factor(a, gate, theta, sign, MODE), 0)
    dmoment, dgate, dtheta = between(total, a, gate, theta, sign, MODE)
    if split == 0:
        if GATED:
            gl.store(dgate_ptr + sample * K + head, dgate, mask=some)
        if MODE == PROXIMAL:
            gl.store(dtheta_ptr + sample * K + head, dtheta, mask=some)
    m = dmoment / divisor
    mean = gl.sum(m * moment, axis=1)
    mean = gl.expand_dims(gl.convert_layout(mean, gl.SliceLayout(0, SHARE), assert_trivial=True), 0)
    m = gl.expand_dims(m, 0)

    bias = gl.zeros([ROWS, HEADS, WIDTH], gl.float32, LAYOUT)
    stop = gl.minimum((split + 1) * span, n)
    for first in range(split * span, stop, ROWS * TILES):
        begin = sample * n + first
        at = begin * (K * P) + (token * (K * P) + gl.expand_dims(column, 0))
        place = begin * K + (row * K + across)
        grads = ()
        tokens = ()
        shares = ()
        for t in gl.static_range(TILES):
            real = (token + (first + t * ROWS) < stop) & gl.expand_dims(inside, 0)
            here = (row + (first + t * ROWS) < stop) & (across < K)
            grads += (gl.load(grad_ptr + at + t * ROWS * (K * P), mask=real, other=0.0),)
            tokens += (gl.load(s_ptr + at + t * ROWS * (K * P), mask=real, other=0.0),)
            shares += (gl.load(membership_ptr + place + t * ROWS * K, mask=here, other=0.0),)
        for t in gl.static_range(TILES):
            grad, s, share = grads[t].to(gl.float32), tokens[t].to(gl.float32), shares[t]
            if WEIGHTED:
                lean, bent = c * grad, m * s
                ds = gl.expand_dims(share, 2) * lean + 2.0 * bent
                dpi = gl.sum(lean * s, axis=2) + gl.where(share > 0, gl.sum(bent * s, axis=2) / share, 0.0) - share * mean
                dpi = dpi * (1.0 - share)
            else:
                ds, dpi = pulled(grad, s, share, c, m, mean, MODE, UNIFORM, SIGMOID)
            real = (token + (first + t * ROWS) < stop) & gl.expand_dims(inside, 0)
            here = (row + (first + t * ROWS) < stop) & (across < K)
            ds = ds.to(grad_ptr.dtype.element_ty)
            gl.store(grad_ptr + at + t * ROWS * (K * P), ds, mask=real)
            gl.store(dmembership_ptr + place + t * ROWS * K, dpi, mask=here)
            if BIAS:  # where nothing is real both tokens are zero, and so is dS
                bias += ds.to(gl.float32)
    if BIAS:
        gl.store(dbias_ptr + (sample * splits + split) * (K * P) + column, gl.sum(bias, axis=0), mask=inside)


def serves(p: int, dtype: torch.dtype, device: torch.device) -> bool:
    return plan.STREAM and resident.serves(p, dtype, device)


@op(gluon=True, mutates=("grad",))
def stream_pull(
    grad: Tensor, projected: Tensor, membership: Tensor, moment: Tensor, gate: Tensor | None, divisor: Tensor,
    theta: Tensor | None, total: Tensor, form: str, weighted: bool, wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `adjoint.pull`, with A = total (b, k, p)."""
    told, (b, n, d), k = Form.read(form), projected.shape, membership.shape[-1]
    cut = plan.sweep(b, n, k, d // k)
    made = resident.empties(membership, gate, theta, (b, cut.splits, k, d // k), wants_bias)
    if not is_fake(grad):
        stream_kernel[(b, cut.splits, over(k, cut.heads))](
            grad, projected, membership, moment, gate, divisor, theta, total, *made, n, cut.span, cut.splits, float(told.sign),
            K=k, P=d // k, HEADS=cut.heads, WIDTH=cut.width, TILES=TILES, WARPS=WARPS, MODE=MODES[told.mode],
            GATED=gate is not None, UNIFORM=told.uniform_moment, SIGMOID=told.membership == "sigmoid", WEIGHTED=weighted,
            BIAS=wants_bias, num_warps=WARPS, **resident.AS_WRITTEN,
        )  # fmt: skip
    return made
