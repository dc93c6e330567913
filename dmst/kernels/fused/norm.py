"""LayerNorm with the scores of its tokens, and its way back with the residual's gradient: each row of z is read once.

    x_n = (z_n - mean_n) rstd_n,    rstd_n = 1 / sqrt(mean((z_n - mean_n)^2) + eps),    y_n = gamma x_n + beta
    l_nk = <rot_n y_n, assign_k> + bias           of y before it is rounded; memberships and sums by tile as in `score`
    dy_n = (dS U^T)_n + rot_n^T sum_k dl_nk assign_k
    dz_n = dout_n + rstd_n (dx_n - mean(dx_n) - x_n mean(dx_n x_n)),    dx = gamma dy
    dgamma = sum_n dy_n x_n,    dbeta = sum_n dy_n           one row of partial sums a program

A program has whole rows in registers, a tuple of chunks of channels; forward as pairs, which rotate. The mean is known before
the variance is summed. Plain float32 arithmetic, one sum over the lanes for each head.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.fused.launch import flops, launch, op
from dmst.kernels.fused.turn import PLAIN, fetch, kind, places, turn, turns, unpack, weight_pairs
from dmst.kernels.plan import over


@triton.jit
def norm_score_kernel(
    z_ptr, gamma_ptr, beta_ptr, assign_ptr, bias_ptr, far_cos, far_sin, near_cos, near_sin,
    y_ptr, mean_ptr, rstd_ptr, out_ptr, sum_ptr,
    n, step, tiles,
    eps: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, Z: tl.constexpr,
    ASSIGN: tl.constexpr, ROTARY: tl.constexpr, LEVEL: tl.constexpr, SCORES: tl.constexpr,
    BIAS: tl.constexpr, SIGMOID: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = CHANNELS // 2
    CHUNKS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    EVEN: tl.constexpr = D % CHANNELS == 0
    sample, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    token, far, near = places(tile, n, step, TOKENS, LEVEL)
    here = token < n
    row = sample * n + token
    evens, odds = (), ()
    total = tl.zeros((TOKENS, PAIRS), tl.float32)
    for c in tl.static_range(CHUNKS):
        pair = c * PAIRS + tl.arange(0, PAIRS)[None, :]
        first, second = fetch(z_ptr, row, pair, here if EVEN else here & (2 * pair < D), Z, D)
        even, odd = unpack(first, second, Z)
        total += even + odd
        evens += (even,)
        odds += (odd,)
    mean = tl.sum(total, 1)[:, None] / D
    square = tl.zeros((TOKENS, PAIRS), tl.float32)
    for c in tl.static_range(CHUNKS):
        pair = c * PAIRS + tl.arange(0, PAIRS)[None, :]
        even, odd = evens[c] - mean, odds[c] - mean
        if not EVEN:
            even, odd = tl.where(2 * pair < D, even, 0.0), tl.where(2 * pair + 1 < D, odd, 0.0)
        square += even * even + odd * odd
    rstd = 1.0 / tl.sqrt_rn(tl.sum(square, 1)[:, None] / D + eps)
    tl.store(mean_ptr + row, mean, mask=here)
    tl.store(rstd_ptr + row, rstd, mask=here)

    turned_evens, turned_odds = (), ()
    for c in tl.static_range(CHUNKS):
        pair = c * PAIRS + tl.arange(0, PAIRS)[None, :]
        gamma_even, gamma_odd = weight_pairs(gamma_ptr, 0, pair, PLAIN, D, 1, EVEN)
        beta_even, beta_odd = weight_pairs(beta_ptr, 0, pair, PLAIN, D, 1, EVEN)
        even, odd = (evens[c] - mean) * rstd * gamma_even + beta_even, (odds[c] - mean) * rstd * gamma_odd + beta_odd
        y = tl.reshape(tl.join(even, odd), (TOKENS, CHANNELS))
        channel = c * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        tl.store(y_ptr + row * D + channel, y.to(y_ptr.dtype.element_ty), mask=here if EVEN else here & (channel < D))
        if ROTARY:
            cos, sin = turns(far_cos, far_sin, near_cos, near_sin, far, near, pair, D // 2, EVEN)
            even, odd = even * cos - odd * sin, odd * cos + even * sin
        turned_evens += (even,)
        turned_odds += (odd,)

    if SCORES:
        for first_head in tl.range(0, K, 8, num_stages=1):
            scores = tl.zeros((TOKENS, 8), tl.float32)
            for h in tl.static_range(8):
                if h < K:
                    product = tl.zeros((TOKENS, PAIRS), tl.float32)
                    for c in tl.static_range(CHUNKS):
                        at = c * PAIRS + tl.arange(0, PAIRS)[None, :]
                        w_even, w_odd = weight_pairs(assign_ptr, first_head + h, at, ASSIGN, D, K, EVEN and K % 8 == 0)
                        product = tl.fma(turned_evens[c], tl.broadcast_to(w_even, product.shape), product)
                        product = tl.fma(turned_odds[c], tl.broadcast_to(w_odd, product.shape), product)
                    scores += tl.where(tl.arange(0, 8)[None, :] == h, tl.sum(product, 1)[:, None], 0.0)
            head = first_head + tl.arange(0, 8)[None, :]
            if BIAS:
                scores += tl.load(bias_ptr + head, mask=head < K, other=0.0).to(tl.float32)
            if SUMS:
                which = first_head + tl.arange(0, 8)
                added = tl.sum(tl.where(here, scores, 0.0), 0)
                tl.store(sum_ptr + (sample * tiles + tile) * K + which, added, mask=which < K)
            value = tl.sigmoid(scores) if SIGMOID else scores
            tl.store(out_ptr + row * K + head, value, mask=here & (head < K))


@triton.jit
def _from_scores(
    dscores_ptr, dpooled_ptr, assign_ptr, far_cos, far_sin, near_cos, near_sin, row, here, sample, far, near, pair,
    D: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, ASSIGN: tl.constexpr,
    ROTARY: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """rot_n^T sum_k dl_nk assign_k in some channels, (tokens, channels)."""
    even, odd = tl.zeros((TOKENS, PAIRS), tl.float32), tl.zeros((TOKENS, PAIRS), tl.float32)
    for first_head in tl.range(0, K, 8, num_stages=1):
        for h in tl.static_range(8):
            if h < K:
                head = first_head + h
                dl = tl.load(dscores_ptr + row * K + head, mask=here & (head < K), other=0.0)
                if GATED:
                    dl += tl.load(dpooled_ptr + sample * K + head, mask=here & (head < K), other=0.0)
                w_even, w_odd = weight_pairs(assign_ptr, head, pair, ASSIGN, D, K, EVEN and K % 8 == 0)
                even = tl.fma(tl.broadcast_to(dl, even.shape), tl.broadcast_to(w_even, even.shape), even)
                odd = tl.fma(tl.broadcast_to(dl, even.shape), tl.broadcast_to(w_odd, even.shape), odd)
    if ROTARY:
        cos, sin = turns(far_cos, far_sin, near_cos, near_sin, far, near, pair, D // 2, EVEN)
        even, odd = even * cos + odd * sin, odd * cos - even * sin
    return tl.reshape(tl.join(even, odd), (TOKENS, 2 * PAIRS))


@triton.jit
def norm_adjoint_kernel(
    dy_ptr, dscores_ptr, dpooled_ptr, assign_ptr, far_cos, far_sin, near_cos, near_sin,
    dout_ptr, z_ptr, gamma_ptr, mean_ptr, rstd_ptr, dz_ptr, part_ptr, rows, run, n, step,
    D: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, ASSIGN: tl.constexpr,
    ROTARY: tl.constexpr, SCORES: tl.constexpr, GATED: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """A run of rows, a few at a time; part (2, programs, D): dgamma, dbeta."""
    PAIRS: tl.constexpr = CHANNELS // 2
    CHUNKS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    EVEN: tl.constexpr = D % CHANNELS == 0
    none = tl.zeros((TOKENS, CHANNELS), tl.float32)
    gammas, dgammas, dbetas = (), (), ()
    for c in tl.static_range(CHUNKS):
        channel = c * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        gammas += (tl.load(gamma_ptr + channel, mask=channel < D, other=0.0).to(tl.float32),)
        dgammas += (none,)
        dbetas += (none,)
    begin = tl.program_id(0).to(tl.int64) * run
    stop = tl.minimum(begin + run, rows)
    for first in tl.range(begin, stop, TOKENS, num_stages=1):
        row = first + tl.arange(0, TOKENS)[:, None]
        here = row < stop
        mean = tl.load(mean_ptr + row, mask=here, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=here, other=0.0)
        sample = row // n
        token = tl.where(here, row - sample * n, 0).to(tl.int32)
        far, near = token // step, token % step
        lean, along = none, none
        xs, dxs, douts, new_dgammas, new_dbetas = (), (), (), (), ()
        for c in tl.static_range(CHUNKS):
            channel = c * CHANNELS + tl.arange(0, CHANNELS)[None, :]
            real = here if EVEN else here & (channel < D)
            z = tl.load(z_ptr + row * D + channel, mask=real, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + row * D + channel, mask=real, other=0.0).to(tl.float32)
            douts += (tl.load(dout_ptr + row * D + channel, mask=real, other=0.0).to(tl.float32),)
            if SCORES:
                pair = c * PAIRS + tl.arange(0, PAIRS)[None, :]
                dy += _from_scores(
                    dscores_ptr, dpooled_ptr, assign_ptr, far_cos, far_sin, near_cos, near_sin,
                    row, here, sample, far, near, pair, D, K, TOKENS, PAIRS, ASSIGN, ROTARY, GATED, EVEN,
                )  # fmt: skip
            x, dx = (z - mean) * rstd, dy * gammas[c]
            lean += dx
            along += dx * x
            xs += (x,)
            dxs += (dx,)
            new_dgammas += (dgammas[c] + dy * x,)
            new_dbetas += (dbetas[c] + dy,)
        dgammas, dbetas = new_dgammas, new_dbetas
        lean, along = tl.sum(lean, 1)[:, None] / D, tl.sum(along, 1)[:, None] / D
        for c in tl.static_range(CHUNKS):
            channel = c * CHANNELS + tl.arange(0, CHANNELS)[None, :]
            real = here if EVEN else here & (channel < D)
            dz = douts[c] + rstd * (dxs[c] - lean - xs[c] * along)
            tl.store(dz_ptr + row * D + channel, dz.to(dz_ptr.dtype.element_ty), mask=real)
    if WEIGHTS:
        for c in tl.static_range(CHUNKS):
            place = c * CHANNELS + tl.arange(0, CHANNELS)
            part = part_ptr + tl.program_id(0) * D + place
            tl.store(part, tl.sum(dgammas[c], 0), mask=place < D)
            tl.store(part + tl.num_programs(0) * D, tl.sum(dbetas[c], 0), mask=place < D)


@op()
def norm_score(
    z: Tensor, gamma: Tensor, beta: Tensor, eps: float, assign: Tensor | None, bias: Tensor | None, tables: list[Tensor],
    step: int, dtype: torch.dtype, sigmoid: bool, pooled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y (b, n, d) in `dtype`, mean and rstd (b, n), and what `score.score` makes of y, empty without `assign`."""
    (b, n, d), k = z.shape, 1 if assign is None else assign.shape[0]
    tile, scored = plan.norm(d), assign is not None
    tiles = over(n, tile.tokens)
    y = torch.empty_like(z, dtype=dtype)
    mean, rstd = (torch.empty(b, n, device=z.device, dtype=torch.float32) for _ in range(2))
    out = torch.empty(b if scored else 0, n, k, device=z.device, dtype=torch.float32)
    sums = torch.empty(b, tiles if pooled else 0, k, device=z.device, dtype=torch.float32)
    turned = turn(tables, step, d, tile, z)
    launch(
        norm_score_kernel, (b * tiles,), z, gamma, beta, assign, bias, *turned.tables, y, mean, rstd, out, sums,
        n, step, tiles,
        eps=eps,
        K=k, Z=kind(z), ASSIGN=0 if assign is None else kind(assign), SCORES=scored, BIAS=bias is not None, SIGMOID=sigmoid,
        SUMS=pooled, maxnreg=128, **turned.constants,
    )  # fmt: skip
    return y, mean, rstd, out, sums


@op()
def norm_adjoint(
    product: Tensor, dscores: Tensor | None, dpooled: Tensor | None, assign: Tensor | None, tables: list[Tensor], step: int,
    dout: Tensor, z: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, weigh: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dz = dout + what the norm makes of dy; with `weigh` partial sums (2, rows, d) of the gradients of its weights."""
    (b, n, d), k = z.shape, 1 if dscores is None else dscores.shape[-1]
    tile = plan.norm_adjoint(d)
    run = over(over(b * n, tile.tokens), plan.NORM_PROGRAMS) * tile.tokens
    programs = over(b * n, run)
    dz = torch.empty_like(z)
    part = torch.empty(2 if weigh else 0, programs, d, device=z.device, dtype=torch.float32)
    turned = turn(tables, step, d, tile, z)
    constants = {name: value for name, value in turned.constants.items() if name != "LEVEL"}
    launch(
        norm_adjoint_kernel, (programs,), product, dscores, dpooled, assign, *turned.tables,
        dout, z, gamma, mean, rstd, dz, part, b * n, run, n, step,
        K=k, ASSIGN=0 if assign is None else kind(assign), SCORES=dscores is not None, GATED=dpooled is not None,
        WEIGHTS=weigh, **constants,
    )  # fmt: skip
    return dz, part


flops("norm_score", lambda z, gamma, beta, eps, assign, *_: 2 * math.prod(z) * assign[0] if assign else 0)
flops("norm_adjoint", lambda product, dscores, *_: 2 * math.prod(product) * dscores[-1] if dscores else 0)
