"""GMSA between its projections: one program per image and head, forward and backward, all tokens of the head in registers.

    forward     projected (b, n, k p), keys (b, n, k r), w = g^2 and t (b, k)   ->  update (b, n, k p)
    backward    the same and dupdate                                            ->  their gradients

t multiplies the pull: g (listing), g^2 (equation), theta g^2 (proximal). The formulas are those of `kernels/mixture.py` and
`kernels/mixture_closed_form.py`; the backward pass computes memberships and statistics again, so nothing else is kept. Sums
over tokens are products of matrices, in float32 for float32 tokens and in TF32 for 16 bits. No atomics: repeats are bit-equal.
For up to 256 tokens, heads of up to 32 channels, and as many groups as shared memory has room for (`serves`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from torch.nn import functional as F

from dmst.kernels import mixture
from dmst.kernels.arithmetic import cast, wide
from dmst.kernels.choice import interpreted
from dmst.kernels.form import GATE
from dmst.kernels.fused.launch import no_second
from dmst.kernels.mixture import Grid, MixtureForm, MixtureWeights

MOST_TOKENS, WIDEST = 256, 32
MOST_PAIRS = 4096  # of tokens and groups, both padded: what shared memory holds
LARGE = 150 << 10  # bytes of shared memory that the backward pass of more than 128 tokens takes
PROXIMAL: tl.constexpr = tl.constexpr(2)
NO_OWN: tl.constexpr = tl.constexpr(1)


def serves(n: int, dim: int, form: MixtureForm, shared_memory: int) -> str:
    """Why it cannot compute this layer, on a card with this much shared memory; nothing where it can."""
    most_tokens = MOST_TOKENS if shared_memory >= LARGE else MOST_TOKENS // 2
    sizes = {"tokens": (n, most_tokens), "channels a head": (dim // form.num_heads, WIDEST)}
    pairs = _padded(n) * _padded(form.groups)
    sizes |= {"key_dim": (form.key_dim, WIDEST), "tokens times groups": (pairs, MOST_PAIRS), "rounds": (form.rounds, 1)}
    over = [f"up to {most} {name}, not {size}" for name, (size, most) in sizes.items() if size > most]
    return f"the fused GMSA takes {', '.join(over)}" if over else ""


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


@triton.jit
def _load(ptr, token, channel, n, K: tl.constexpr, WIDTH: tl.constexpr):
    """The rows of one image and head from a tensor (b, n, k width), zeros around them."""
    here = (token[:, None] < n) & (channel[None, :] < WIDTH)
    program = tl.program_id(0)
    place = ((program // K).to(tl.int64) * n + token[:, None]) * (K * WIDTH) + (program % K) * WIDTH + channel[None, :]
    return tl.load(ptr + place, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, value, token, channel, n, K: tl.constexpr, WIDTH: tl.constexpr):
    here = (token[:, None] < n) & (channel[None, :] < WIDTH)
    program = tl.program_id(0)
    place = ((program // K).to(tl.int64) * n + token[:, None]) * (K * WIDTH) + (program % K) * WIDTH + channel[None, :]
    tl.store(ptr + place, value, mask=here)


@triton.jit
def _dot(x, y, EXACT: tl.constexpr):
    return tl.dot(x, y, input_precision="ieee" if EXACT else "tf32")


@triton.jit
def _unit(keys, UNIT: tl.constexpr):
    """Keys of length 1 and 1/length; themselves and 1 where they are not normalised."""
    if UNIT:
        scale = 1.0 / tl.maximum(tl.sqrt(tl.sum(keys * keys, 1)), 1e-12)
        return keys * scale[:, None], scale
    return keys, tl.full((keys.shape[0],), 1.0, tl.float32)


@triton.jit
def _unit_pullback(grad, unit, scale, UNIT: tl.constexpr):
    if UNIT:
        return (grad - tl.sum(grad * unit, 1)[:, None] * unit) * scale[:, None]
    return grad


@triton.jit
def _cells(token, group, n, rows, columns, down, across):
    """(n, g): 1 where a token is in a cell, and 1/size of the cells."""
    patch = token - (n - rows * columns)
    cell = (patch // columns * down // rows) * across + (patch % columns) * across // columns
    inside = (cell[:, None] == group[None, :]) & (patch[:, None] >= 0) & (token[:, None] < n)
    one = tl.where(inside, 1.0, 0.0)
    return one, 1.0 / tl.maximum(tl.sum(one, 0), 1.0)


@triton.jit
def _statistics(
    s, keys, token, group, n, rows, columns, down, across, w,
    SHARPNESS: tl.constexpr, G: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """q, its 1/length, cells, 1/size, centres, their unit and 1/length, pi, 1/mass, mean, spread, attenuation."""
    q, length = _unit(keys, UNIT)
    cells, size = _cells(token, group, n, rows, columns, down, across)
    centre, centre_length = _unit(_dot(tl.trans(cells), q, EXACT) * size[:, None], UNIT)
    logits = SHARPNESS * _dot(q, tl.trans(centre), EXACT)
    logits = tl.where(group[None, :] < G, logits, -float("inf"))
    pi = tl.exp(logits - tl.max(logits, 1)[:, None])
    pi = pi / tl.sum(pi, 1)[:, None]
    pi = tl.where(token[:, None] < n, pi, 0.0)
    mass = tl.sum(pi, 0)
    per_mass = 1.0 / tl.where(mass < 1.1754943508222875e-38, 1.0, mass)
    share = tl.trans(pi * per_mass[None, :])
    mean = _dot(share, s, EXACT)
    spread = tl.maximum(_dot(share, s * s, EXACT) - mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return q, length, cells, size, centre, centre_length, pi, per_mass, mean, spread, 1.0 / (1.0 + w * spread)


@triton.jit
def forward_kernel(
    projected_ptr, keys_ptr, w_ptr, t_ptr, update_ptr, n, rows, columns, down, across, SHARPNESS: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr, UNIT: tl.constexpr,
    EXACT: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    token, channel, group = tl.arange(0, TOKENS), tl.arange(0, CHANNELS), tl.arange(0, GROUPS)
    key = tl.arange(0, KEYS)
    s = _load(projected_ptr, token, channel, n, K, P)
    keys = _load(keys_ptr, token, key, n, K, R)
    w, t = tl.load(w_ptr + tl.program_id(0)), tl.load(t_ptr + tl.program_id(0))
    _, _, _, _, _, _, pi, _, mean, _, a = _statistics(
        s, keys, token, group, n, rows, columns, down, across, w, SHARPNESS, G, UNIT, EXACT
    )
    update = _dot(pi, a * mean, EXACT)
    if MODE != NO_OWN:
        alpha = _dot(pi, a, EXACT)
        update = update - alpha * s
        if MODE == PROXIMAL:
            update = update / (1.0 + t * alpha)
    _store(update_ptr, t * update, token, channel, n, K, P)


@triton.jit
def backward_kernel(
    projected_ptr, keys_ptr, w_ptr, t_ptr, dupdate_ptr, dprojected_ptr, dkeys_ptr, dw_ptr, dt_ptr,
    n, rows, columns, down, across, SHARPNESS: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr, UNIT: tl.constexpr,
    EXACT: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    token, channel, group = tl.arange(0, TOKENS), tl.arange(0, CHANNELS), tl.arange(0, GROUPS)
    key = tl.arange(0, KEYS)
    s = _load(projected_ptr, token, channel, n, K, P)
    keys = _load(keys_ptr, token, key, n, K, R)
    dupdate = _load(dupdate_ptr, token, channel, n, K, P)
    w, t = tl.load(w_ptr + tl.program_id(0)), tl.load(t_ptr + tl.program_id(0))
    q, length, cells, size, centre, centre_length, pi, per_mass, mean, spread, a = _statistics(
        s, keys, token, group, n, rows, columns, down, across, w, SHARPNESS, G, UNIT, EXACT
    )
    beta = _dot(pi, a * mean, EXACT)
    pi_turned = tl.trans(pi)
    if MODE == NO_OWN:
        dt = tl.sum(dupdate * beta)
        dbeta = t * dupdate
        sum_beta = _dot(pi_turned, dbeta, EXACT)
        bent = a * a * mean * sum_beta
        ds = tl.zeros_like(s)
        dpi = _dot(dbeta, tl.trans(a * mean), EXACT)
    else:
        alpha = _dot(pi, a, EXACT)
        if MODE == PROXIMAL:
            slope = dupdate / (1.0 + t * alpha)
            moved = s + t * (beta - alpha * s) / (1.0 + t * alpha)
        else:
            slope = dupdate
            moved = s
        dt = tl.sum(slope * (beta - alpha * moved))
        dbeta = t * slope
        dalpha = -dbeta * moved
        sum_beta = _dot(pi_turned, dbeta, EXACT)
        bent = a * a * (_dot(pi_turned, dalpha, EXACT) + mean * sum_beta)
        ds = -dbeta * alpha
        dpi = _dot(dalpha, tl.trans(a), EXACT) + _dot(dbeta, tl.trans(a * mean), EXACT)
    tl.store(dt_ptr + tl.program_id(0), dt)
    tl.store(dw_ptr + tl.program_id(0), -tl.sum(spread * bent))
    e = -w * bent * per_mass[:, None]
    dmean = a * sum_beta * per_mass[:, None]
    f = dmean - 2.0 * e * mean
    constant = tl.sum(e * (mean * mean - spread) - mean * dmean, 1)
    ds += 2.0 * s * _dot(pi, e, EXACT) + _dot(pi, f, EXACT)
    _store(dprojected_ptr, ds, token, channel, n, K, P)
    dpi += _dot(s * s, tl.trans(e), EXACT) + _dot(s, tl.trans(f), EXACT) + constant[None, :]
    dlogits = SHARPNESS * pi * (dpi - tl.sum(pi * dpi, 1)[:, None])
    dcentre = _unit_pullback(_dot(tl.trans(dlogits), q, EXACT), centre, centre_length, UNIT) * size[:, None]
    dq = _dot(dlogits, centre, EXACT) + _dot(cells, dcentre, EXACT)
    _store(dkeys_ptr, _unit_pullback(dq, q, length, UNIT), token, key, n, K, R)


# --- as an operator --------------------------------------------------------------------------------------------------


def _launch(kernel: Any, tensors: list[Tensor], heads: int, sizes: list[int], sharpness: float, mode: int, unit: bool) -> None:
    """`sizes` are groups, rows, columns, cells down and across."""
    projected, keys = tensors[:2]
    b, n, p, r = projected.shape[0], projected.shape[1], projected.shape[-1] // heads, keys.shape[-1] // heads
    groups, *cells = sizes
    shape = {"TOKENS": n, "CHANNELS": p, "KEYS": r, "GROUPS": groups}
    padded = {name: _padded(size) for name, size in shape.items()}
    (kernel if interpreted() else wrap_triton(kernel))[(b * heads,)](
        *tensors, n, *cells, SHARPNESS=sharpness, K=heads, P=p, R=r, G=groups, MODE=mode, UNIT=unit,
        EXACT=projected.dtype == torch.float32, **padded, num_warps=8 if padded["TOKENS"] > 128 else 4,
    )  # fmt: skip


@triton_op("dmst::mixture_forward", mutates_args={})
def _forward_op(
    projected: Tensor, keys: Tensor, w: Tensor, t: Tensor, heads: int, sizes: list[int], sharpness: float, mode: int, unit: bool
) -> Tensor:
    update = torch.empty_like(projected)
    _launch(forward_kernel, [projected, keys, w, t, update], heads, sizes, sharpness, mode, unit)
    return update


@triton_op("dmst::mixture_backward", mutates_args={})
def _backward_op(
    projected: Tensor, keys: Tensor, w: Tensor, t: Tensor, dupdate: Tensor,
    heads: int, sizes: list[int], sharpness: float, mode: int, unit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    found = [torch.empty_like(x) for x in (projected, keys, w, t)]
    _launch(backward_kernel, [projected, keys, w, t, dupdate, *found], heads, sizes, sharpness, mode, unit)
    dprojected, dkeys, dw, dt = found
    return dprojected, dkeys, dw, dt


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.rest = inputs[4:]


def _pull_back(ctx: Any, dupdate: Tensor) -> tuple[Any, ...]:
    return *_backward_op(*ctx.saved_tensors, dupdate.contiguous(), *ctx.rest), *(None,) * len(ctx.rest)


_forward_op.register_autograd(_pull_back, setup_context=_keep)
_backward_op.register_autograd(no_second, setup_context=lambda ctx, inputs, output: None)


def attend(z: Tensor, weights: MixtureWeights, form: MixtureForm, *, grid: Grid = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d); the large projections run in `dtype`."""
    down, across, patches = mixture.cells(z.shape[-2], grid, form.groups)
    turned = mixture.turn(z, form, grid)
    projected = F.linear(z.to(dtype), weights.subspace.to(dtype))
    keys = F.linear(turned.to(dtype), weights.key.to(dtype), cast(weights.key_bias, dtype))
    if weights.gate is None:
        gate = torch.ones(z.shape[0], form.num_heads, dtype=torch.float32, device=z.device)
    else:
        pooled = (mixture.token_mean(turned).unsqueeze(-2) * wide(weights.gate)).sum(-1)  # too small for a product of matrices
        gate = form.gate_scale * GATE[str(form.gate)].value(pooled, form)
    w = gate.square()
    t = gate if form.mode == "listing" else w
    if form.mode == "proximal":
        assert weights.theta is not None
        t = wide(weights.theta) * w
    mode = 2 if form.mode == "proximal" else int(not form.own)
    sizes = [form.groups, *patches, down, across]
    update = _forward_op(projected, keys, w, t.contiguous(), form.num_heads, sizes, form.sharpness, mode, form.normalize_keys)
    weight = weights.subspace.transpose(-2, -1) if weights.out is None else weights.out
    out = F.linear(update, weight.to(dtype))
    return out if weights.out_bias is None else out + weights.out_bias.to(dtype)
