"""GMSA between its projections, forward and backward, with memberships made again wherever they are needed.

    group_update     projected (b, n, k p), keys (b, n, k r), sums of scores   ->  update (b, n, k p), centres, gate
    group_adjoint    projected, keys, centres, gate g and dupdate   ->  the gradients of keys, gate and theta; that of
                     projected is written over dupdate

w = g^2 multiplies the spread, t the pull: g (listing), g^2 (equation), theta g^2 (proximal). Forward the formulas are those
of `kernels/mixture.py`. Backward, P being the matrix of the means of cells:

    slope = dupdate, moved = s               proximal: slope = dupdate/(1 + t pi a), moved = s + update
    beta = sum_n pi slope    alpha = sum_n pi slope moved    B = mu beta - alpha
    dt = sum a B             dw = -t sum V a^2 B             V does not move with mu: it is least there
    dg = 2 g dw + dt | 2 g (dw + dt) | 2 g (dw + theta dt)   dtheta = g^2 dt
    e = -w t a^2 B/m         f = t a beta/m - 2 e mu         const = sum_i e (mu^2 - V) - t a beta mu/m
    dS = 2 s (pi e) + pi f - slope (pi t a)
    dpi = slope (t a mu) - slope moved (t a) + s^2 e + s f + const             without own: no moved, no dS by slope
    dl = pi (dpi - sum_g pi dpi)             dq = sharpness dl c               dkeys = dq + P^T sharpness dl^T q

A kernel is one sweep over the tokens of an image and head, a tile at a time; its loop is all that it does with them:

    centres      sums of the keys by cell, and sizes of the cells
    statistics   mass, sums of pi s and pi s^2; backward also beta and alpha
    implicit     beta and alpha of the proximal step, which need the update
    update       from centres and statistics
    pull         dS, dq, the update again, and the gradient of the centres
    spread       dkeys = dq + what the centre of its cell asks

Where there are few images and heads, tokens are split over programs; each leaves one row of partial sums. All sums are
products of matrices: exact for float32 tokens, TF32 for float16. For bfloat16 tokens their factors are bfloat16 too, in such a
way that mu - s is a difference of numbers that were rounded alike: the same rounded pi and t a stand in both, and t a mu is a
sum of two bfloat16 numbers. What the softmax over groups reads has its mean over the groups taken out before it is rounded
(`_centred`), and so has its gradient: groups are alike, and differences count.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.choice import interpreted
from dmst.kernels.fused.core import LISTING, MODES, PROXIMAL
from dmst.kernels.fused.gate import opened, sizes
from dmst.kernels.fused.launch import launch, op
from dmst.kernels.mixture import MixtureForm

TF32: tl.constexpr = tl.constexpr(1)
BF16: tl.constexpr = tl.constexpr(2)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_PRODUCTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


# --- tiles and rows --------------------------------------------------------------------------------------------------


@triton.jit
def _place(n, span, K: tl.constexpr):
    """Where the tokens of this program's image and head begin in tensors (b, n, k width), over the width, and how many it has:
    offsets from there fit 32 bits."""
    start = tl.program_id(1) * span
    sample, head = (tl.program_id(0) // K).to(tl.int64), tl.program_id(0) % K
    return (sample * n + start) * K + head, tl.minimum(span, n - start)


@triton.jit
def _load(ptr, token, count, channel, K: tl.constexpr, WIDTH: tl.constexpr):
    """Of a tensor (b, n, k width), from the first token of this program's image and head on."""
    here = (token[:, None] < count) & (channel[None, :] < WIDTH)
    return tl.load(ptr + token[:, None] * (K * WIDTH) + channel[None, :], mask=here, other=0.0)


@triton.jit
def _store(ptr, value, token, count, channel, K: tl.constexpr, WIDTH: tl.constexpr):
    here = (token[:, None] < count) & (channel[None, :] < WIDTH)
    tl.store(ptr + token[:, None] * (K * WIDTH) + channel[None, :], value.to(ptr.dtype.element_ty), mask=here)


@triton.jit
def _row(ptr, first, group, channel, G: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """SIZE numbers of this image and head from `first` on, (channels, groups), from a tensor (images heads, WIDTH, g)."""
    here = (group[None, :] < G) & (channel[:, None] < SIZE)
    row = tl.program_id(0).to(tl.int64) * WIDTH + first + channel[:, None]
    return tl.load(ptr + row * G + group[None, :], mask=here, other=0.0)


@triton.jit
def _leave(ptr, value, first, group, channel, G: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """The same of this program, into a tensor (images heads, splits, WIDTH, g)."""
    here = (group[None, :] < G) & (channel[:, None] < SIZE)
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(ptr + (part * WIDTH + first + channel[:, None]) * G + group[None, :], value, mask=here)


@triton.jit
def _dot(x, y, LOW: tl.constexpr):
    if LOW == BF16:
        return tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16))
    return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="tf32" if LOW == TF32 else "ieee")


@triton.jit
def _fine_dot(x, y, LOW: tl.constexpr):
    """The same with all digits of y: as a sum of two bfloat16 numbers it has 16."""
    product = _dot(x, y, LOW)
    if LOW == BF16:
        product += _dot(x, y - y.to(tl.bfloat16).to(tl.float32), LOW)
    return product


@triton.jit
def _rounded(x, LOW: tl.constexpr):
    """As products read it, so that every use has the same number."""
    if LOW == BF16:
        x = x.to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def _inside(cell_ptr, token, count, group):
    """1 where a token is in a cell, (tokens, groups)."""
    cell = tl.load(cell_ptr + token, mask=token < count, other=-1)
    return tl.where(cell[:, None] == group[None, :], 1.0, 0.0)


@triton.jit
def _centred(x, group, G: tl.constexpr):
    """x (any, groups) less its mean over the groups."""
    real = group[None, :] < G
    mean = tl.sum(tl.where(real, x, 0.0), 1) / G
    return tl.where(real, x - mean[:, None], 0.0)


@triton.jit
def _centres(centre_ptr, group, key, G: tl.constexpr, R: tl.constexpr):
    """Centres less their mean, (keys, groups), and 1 / the size of each cell."""
    size = _row(centre_ptr, R, group, tl.arange(0, 1), G, 1, R + 1)
    per = 1.0 / tl.maximum(size, 1.0)
    return _centred(_row(centre_ptr, 0, group, key, G, R, R + 1) * per, group, G), per


@triton.jit
def _memberships(q, centre, token, count, group, SHARPNESS: tl.constexpr, G: tl.constexpr, LOW: tl.constexpr):
    """pi (tokens, groups), from keys and centres (keys, groups)."""
    logits = _fine_dot(q, centre * (SHARPNESS * LOG2E), LOW)
    logits = tl.where(group[None, :] < G, logits, -float("inf"))
    pi = tl.exp2(logits - tl.max(logits, 1)[:, None])
    pi = pi / tl.sum(pi, 1)[:, None]
    return tl.where(token[:, None] < count, pi, 0.0)


@triton.jit
def _means(sums_ptr, w, group, channel, G: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr):
    """1/mass (1, groups), mean, spread and attenuation (channels, groups). An empty group divides nothing by 1; NaN stays."""
    mass = _row(sums_ptr, 0, group, tl.arange(0, 1), G, 1, WIDTH)
    per = 1.0 / tl.where(mass < 1.1754943508222875e-38, 1.0, mass)
    mean = _row(sums_ptr, 1, group, channel, G, P, WIDTH) * per
    square = _row(sums_ptr, 1 + P, group, channel, G, P, WIDTH) * per
    spread = tl.maximum(square - mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return per, mean, spread, 1.0 / (1.0 + w * spread)


@triton.jit
def _strengths(gate, theta_ptr, K: tl.constexpr, THETAS: tl.constexpr, MODE: tl.constexpr):
    """w, t and theta of this image and head; `THETAS`: 1 for all, or one for each head."""
    w, theta = gate * gate, 1.0
    if MODE == PROXIMAL:
        theta = tl.load(theta_ptr + tl.program_id(0) % K % THETAS).to(tl.float32)
    return w, gate if MODE == LISTING else theta * w, theta


# --- sweeps ----------------------------------------------------------------------------------------------------------


@triton.jit
def centres_kernel(
    keys_ptr, cell_ptr, centre_ptr, n, span,
    K: tl.constexpr, R: tl.constexpr, G: tl.constexpr, LOW: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
    GROUPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    key, group = tl.arange(0, KEYS), tl.arange(0, GROUPS)
    place, count = _place(n, span, K)
    keys_ptr += place * R
    cell_ptr += tl.program_id(1) * span
    total, size = tl.zeros((KEYS, GROUPS), tl.float32), tl.zeros((1, GROUPS), tl.float32)
    for first in tl.range(0, count, TOKENS, num_stages=STAGES):
        token = first + tl.arange(0, TOKENS)
        inside = _inside(cell_ptr, token, count, group)
        total += _dot(tl.trans(_load(keys_ptr, token, count, key, K, R)), inside, LOW)
        size += tl.sum(inside, 0)[None, :]
    _leave(centre_ptr, total, 0, group, key, G, R, R + 1)
    _leave(centre_ptr, size, R, group, tl.arange(0, 1), G, 1, R + 1)


@triton.jit
def statistics_kernel(
    projected_ptr, keys_ptr, dupdate_ptr, centre_ptr, pi_ptr, sums_ptr, n, span, SHARPNESS: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, G: tl.constexpr, LOW: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, KEYS: tl.constexpr, GROUPS: tl.constexpr, ROW: tl.constexpr,
    BACKWARD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row: mass, pi s, pi s^2 and, with `BACKWARD`, beta and alpha of a slope that is dupdate."""
    channel, key, group = tl.arange(0, WIDTH), tl.arange(0, KEYS), tl.arange(0, GROUPS)
    place, count = _place(n, span, K)
    projected_ptr += place * P
    dupdate_ptr += place * P
    keys_ptr += place * R
    pi_ptr += place * G
    centre, _ = _centres(centre_ptr, group, key, G, R)
    mass = tl.zeros((TOKENS, GROUPS), tl.float32)
    one, two, beta, alpha = (), (), (), ()
    for _ in tl.static_range(PIECES):
        zero = tl.zeros((WIDTH, GROUPS), tl.float32)
        one += (zero,)
        two += (zero,)
        if BACKWARD:
            beta += (zero,)
            alpha += (zero,)
    now = ()
    for i in tl.static_range(PIECES):
        now += (_load(projected_ptr, tl.arange(0, TOKENS), count, channel + i * WIDTH, K, P),)
    for first in tl.range(0, count, TOKENS, num_stages=STAGES):
        token = first + tl.arange(0, TOKENS)
        q = _load(keys_ptr, token, count, key, K, R)
        before, one, two, beta, alpha, now = (one, two, beta, alpha, now), (), (), (), (), ()
        for i in tl.static_range(PIECES):  # the next tile, on its way while this one is computed
            now += (_load(projected_ptr, token + TOKENS, count, channel + i * WIDTH, K, P),)
        pi = _memberships(q, centre, token, count, group, SHARPNESS, G, LOW).to(pi_ptr.dtype.element_ty)
        _store(pi_ptr, pi, token, count, group, K, G)
        mass += pi.to(tl.float32)
        for i in tl.static_range(PIECES):
            s = tl.cast(before[4][i], projected_ptr.dtype.element_ty)
            wide = s.to(tl.float32)
            one += (before[0][i] + _dot(tl.trans(s), pi, LOW),)
            two += (before[1][i] + _dot(tl.trans(wide * wide), pi, LOW),)
            if BACKWARD:
                dupdate = _load(dupdate_ptr, token, count, channel + i * WIDTH, K, P)
                beta += (before[2][i] + _dot(tl.trans(dupdate), pi, LOW),)
                alpha += (before[3][i] + _dot(tl.trans(dupdate.to(tl.float32) * wide), pi, LOW),)
    _leave(sums_ptr, tl.sum(mass, 0)[None, :], 0, group, tl.arange(0, 1), G, 1, ROW)
    for i in tl.static_range(PIECES):
        _leave(sums_ptr, one[i], 1, group, channel + i * WIDTH, G, P, ROW)
        _leave(sums_ptr, two[i], 1 + P, group, channel + i * WIDTH, G, P, ROW)
        if BACKWARD:
            _leave(sums_ptr, beta[i], 1 + 2 * P, group, channel + i * WIDTH, G, P, ROW)
            _leave(sums_ptr, alpha[i], 1 + 3 * P, group, channel + i * WIDTH, G, P, ROW)


@triton.jit
def _pulls(
    sums_ptr, w, t, group, channel,
    G: tl.constexpr, P: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """t a and t a mu of every piece, (groups, channels): what memberships are multiplied by."""
    into_a, into_low = (), ()
    for i in tl.static_range(PIECES):
        _, mean, _, a = _means(sums_ptr, w, group, channel + i * WIDTH, G, P, ROW)
        a = _rounded(t * a, LOW)
        into_a += (tl.trans(a),)
        into_low += (tl.trans(a * mean),)
    return into_a, into_low


@triton.jit
def update_kernel(
    projected_ptr, pi_ptr, sums_ptr, score_ptr, theta_ptr, update_ptr, gate_ptr, pooled_ptr, tiles, n, span,
    scale: tl.constexpr, K: tl.constexpr, P: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr, OWN: tl.constexpr,
    THETAS: tl.constexpr, LOW: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
    GROUPS: tl.constexpr, ROW: tl.constexpr, ALL: tl.constexpr, GATE: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """And the gate, from sums of its scores (b, tiles, k)."""
    channel, group = tl.arange(0, WIDTH), tl.arange(0, GROUPS)
    place, count = _place(n, span, K)
    projected_ptr += place * P
    update_ptr += place * P
    pi_ptr += place * G
    gate = 1.0
    if GATE:
        pooled, every = opened(score_ptr, (tl.program_id(0) // K).to(tl.int64), n, tiles, scale, K, ALL, GATE, ROWS)
        mine = tl.arange(0, ALL) == tl.program_id(0) % K
        gate = tl.sum(tl.where(mine, every, 0.0))
        if tl.program_id(1) == 0:
            tl.store(gate_ptr + tl.program_id(0), gate)
            tl.store(pooled_ptr + tl.program_id(0), tl.sum(tl.where(mine, pooled, 0.0)))
    w, t, _ = _strengths(gate, theta_ptr, K, THETAS, MODE)
    into_a, into_low = _pulls(sums_ptr, w, t, group, channel, G, P, ROW, WIDTH, PIECES, LOW)
    for first in tl.range(0, count, TOKENS, num_stages=STAGES):
        token = first + tl.arange(0, TOKENS)
        pi = _load(pi_ptr, token, count, group, K, G)
        for i in tl.static_range(PIECES):
            update = _fine_dot(pi, into_low[i], LOW)
            if OWN:
                alpha = _dot(pi, into_a[i], LOW)
                update -= alpha * _load(projected_ptr, token, count, channel + i * WIDTH, K, P).to(tl.float32)
                if MODE == PROXIMAL:
                    update /= 1.0 + alpha
            _store(update_ptr, update, token, count, channel + i * WIDTH, K, P)


@triton.jit
def implicit_kernel(
    projected_ptr, pi_ptr, dupdate_ptr, sums_ptr, made_ptr, gate_ptr, theta_ptr, n, span,
    K: tl.constexpr, P: tl.constexpr, G: tl.constexpr, GATED: tl.constexpr, THETAS: tl.constexpr, MODE: tl.constexpr,
    LOW: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, GROUPS: tl.constexpr, ROW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """beta and alpha of the proximal step, into the rows that `statistics_kernel` made."""
    channel, group = tl.arange(0, WIDTH), tl.arange(0, GROUPS)
    place, count = _place(n, span, K)
    projected_ptr += place * P
    dupdate_ptr += place * P
    pi_ptr += place * G
    w, t, _ = _strengths(tl.load(gate_ptr + tl.program_id(0)) if GATED else 1.0, theta_ptr, K, THETAS, MODE)
    into_a, into_low = _pulls(sums_ptr, w, t, group, channel, G, P, ROW, WIDTH, PIECES, LOW)
    beta, alpha = (), ()
    for _ in tl.static_range(PIECES):
        zero = tl.zeros((WIDTH, GROUPS), tl.float32)
        beta += (zero,)
        alpha += (zero,)
    for first in tl.range(0, count, TOKENS, num_stages=STAGES):
        token = first + tl.arange(0, TOKENS)
        pi = _load(pi_ptr, token, count, group, K, G)
        before, beta, alpha = (beta, alpha), (), ()
        for i in tl.static_range(PIECES):
            s = _load(projected_ptr, token, count, channel + i * WIDTH, K, P).to(tl.float32)
            dupdate = _load(dupdate_ptr, token, count, channel + i * WIDTH, K, P).to(tl.float32)
            share = _dot(pi, into_a[i], LOW)
            slope = dupdate / (1.0 + share)
            beta += (before[0][i] + _dot(tl.trans(slope), pi, LOW),)
            moved = s + (_fine_dot(pi, into_low[i], LOW) - share * s) / (1.0 + share)
            alpha += (before[1][i] + _dot(tl.trans(slope * moved), pi, LOW),)
    for i in tl.static_range(PIECES):
        _leave(made_ptr, beta[i], 1 + 2 * P, group, channel + i * WIDTH, G, P, ROW)
        _leave(made_ptr, alpha[i], 1 + 3 * P, group, channel + i * WIDTH, G, P, ROW)


@triton.jit
def pull_kernel(
    projected_ptr, keys_ptr, dupdate_ptr, centre_ptr, pi_ptr, sums_ptr, gate_ptr, theta_ptr, dq_ptr, update_ptr, dcentre_ptr,
    dgate_ptr, dtheta_ptr, n, span, SHARPNESS: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr, OWN: tl.constexpr,
    GATED: tl.constexpr, THETAS: tl.constexpr, LOW: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    PIECES: tl.constexpr, KEYS: tl.constexpr, GROUPS: tl.constexpr, ROW: tl.constexpr, WANTED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dq is dkeys without what the centres ask, float32: so small a share would be lost in 16 bits."""
    channel, key, group = tl.arange(0, WIDTH), tl.arange(0, KEYS), tl.arange(0, GROUPS)
    place, count = _place(n, span, K)
    projected_ptr += place * P
    dupdate_ptr += place * P
    update_ptr += place * P
    keys_ptr += place * R
    pi_ptr += place * G
    dq_ptr += place * R
    gate = tl.load(gate_ptr + tl.program_id(0)) if GATED else 1.0
    w, t, theta = _strengths(gate, theta_ptr, K, THETAS, MODE)
    centre, _ = _centres(centre_ptr, group, key, G, R)
    constant, dw, dt = tl.zeros((GROUPS,), tl.float32), 0.0, 0.0
    into_e, into_f, into_a, into_low, squares, straight, own, given = (), (), (), (), (), (), (), ()
    for i in tl.static_range(PIECES):
        at = channel + i * WIDTH
        per_mass, mean, spread, a = _means(sums_ptr, w, group, at, G, P, ROW)
        beta = _row(sums_ptr, 1 + 2 * P, group, at, G, P, ROW)
        alpha = tl.zeros_like(beta)
        if OWN:
            alpha = _row(sums_ptr, 1 + 3 * P, group, at, G, P, ROW)
        bent = t * a * a * (mean * beta - alpha)
        dw -= tl.sum(spread * bent)
        dt += tl.sum(a * (mean * beta - alpha))
        e = _rounded(-w * bent * per_mass, LOW)
        dmean = t * a * beta * per_mass
        f = dmean - 2.0 * e * mean
        constant += tl.sum(e * (mean * mean - spread) - mean * dmean, 0)
        pulls = _rounded(t * a, LOW)
        into_e += (tl.trans(2.0 * e),)
        into_f += (tl.trans(f),)
        into_a += (tl.trans(pulls),)
        into_low += (tl.trans(pulls * mean),)
        squares += (_centred(e, group, G),)
        straight += (_centred(f, group, G),)
        own += (_centred(t * a, group, G),)
        given += (_centred(t * a * mean, group, G),)
    if tl.program_id(1) == 0:
        if GATED:
            tl.store(dgate_ptr + tl.program_id(0), 2.0 * gate * dw + (dt if MODE == LISTING else 2.0 * theta * gate * dt))
        if MODE == PROXIMAL:
            tl.store(dtheta_ptr + tl.program_id(0), w * dt)
    constant -= tl.sum(constant, 0) / G
    into_q, dcentre = tl.trans(SHARPNESS * centre), tl.zeros((KEYS, GROUPS), tl.float32)
    for first in tl.range(0, count, TOKENS, num_stages=STAGES):
        token = first + tl.arange(0, TOKENS)
        pi = _load(pi_ptr, token, count, group, K, G)
        dpi = tl.zeros((TOKENS, GROUPS), tl.float32) + constant[None, :]
        for i in tl.static_range(PIECES):
            s = _load(projected_ptr, token, count, channel + i * WIDTH, K, P).to(tl.float32)
            dupdate = _load(dupdate_ptr, token, count, channel + i * WIDTH, K, P).to(tl.float32)
            slope, moved = dupdate, s
            if OWN:
                share = _dot(pi, into_a[i], LOW)
            if WANTED or MODE == PROXIMAL:
                update = _fine_dot(pi, into_low[i], LOW)
                if OWN:
                    update -= share * s
                if MODE == PROXIMAL:
                    damp = 1.0 / (1.0 + share)
                    update, slope = update * damp, slope * damp
                    moved = s + update
                if WANTED:
                    _store(update_ptr, update, token, count, channel + i * WIDTH, K, P)
            ds = s * _dot(pi, into_e[i], LOW) + _fine_dot(pi, into_f[i], LOW)
            dpi += _dot(slope, given[i], LOW) + _dot(s * s, squares[i], LOW) + _dot(s, straight[i], LOW)
            if OWN:
                ds -= slope * share
                dpi -= _dot(slope * moved, own[i], LOW)
            _store(dupdate_ptr, ds, token, count, channel + i * WIDTH, K, P)  # in its place: nobody reads this tile again
        pi = pi.to(tl.float32)
        mean_dpi = tl.sum(pi * dpi, 1) / tl.maximum(tl.sum(pi, 1), 0.5)  # rounded pi sum to 1 nearly; to 0 beyond the end
        dlogits = pi * (dpi - mean_dpi[:, None])
        dcentre += _dot(tl.trans(_load(keys_ptr, token, count, key, K, R)), dlogits, LOW)
        _store(dq_ptr, _dot(dlogits, into_q, LOW), token, count, key, K, R)
    _leave(dcentre_ptr, SHARPNESS * dcentre, 0, group, key, G, R, R)


@triton.jit
def spread_kernel(
    dq_ptr, centre_ptr, dcentre_ptr, cell_ptr, dkeys_ptr, sums_ptr, n, span,
    K: tl.constexpr, R: tl.constexpr, G: tl.constexpr, LOW: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
    GROUPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """And their sum over the tokens of this program, before they are rounded: its terms cancel."""
    key, group = tl.arange(0, KEYS), tl.arange(0, GROUPS)
    place, count = _place(n, span, K)
    dq_ptr += place * R
    dkeys_ptr += place * R
    cell_ptr += tl.program_id(1) * span
    _, per_size = _centres(centre_ptr, group, key, G, R)
    asked = tl.trans(_centred(_row(dcentre_ptr, 0, group, key, G, R, R), group, G) * per_size)
    total = tl.zeros((TOKENS, KEYS), tl.float32)
    for first in tl.range(0, count, TOKENS, num_stages=STAGES):
        token = first + tl.arange(0, TOKENS)
        dkeys = _load(dq_ptr, token, count, key, K, R) + _fine_dot(_inside(cell_ptr, token, count, group), asked, LOW)
        _store(dkeys_ptr, dkeys, token, count, key, K, R)
        total += dkeys
    sums_ptr += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * R
    tl.store(sums_ptr + key, tl.sum(total, 0), mask=key < R)


# --- operators -------------------------------------------------------------------------------------------------------


class _Sweeps:
    """Launches on the tokens of every image and head, cut alike."""

    def __init__(self, kernel: str, projected: Tensor, keys: Tensor, theta: Tensor | None, form: MixtureForm) -> None:
        (b, n, d), heads, groups = projected.shape, form.num_heads, form.groups
        self.n, self.groups, self.rows = n, groups, b * heads
        self.cut = plan.groups(kernel, self.rows, n, d, d // heads, groups, projected.dtype)
        low = 0 if interpreted() else _PRODUCTS[projected.dtype]  # the interpreter's products of bfloat16 are wrong
        width, pieces = plan.pieces_of(d // heads, 16)
        common = {"K": heads, "G": groups, "LOW": low, "GROUPS": _padded(groups)}
        self.keys = {**common, "R": form.key_dim, "KEYS": _padded(form.key_dim)}
        self.channels = {**common, "P": d // heads, "WIDTH": width, "PIECES": pieces}
        self.strengths = {"MODE": MODES[form.mode], "THETAS": 1 if theta is None else theta.numel()}

    def launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        cut = self.cut
        launch(
            kernel, (self.rows, cut.splits), *arguments, self.n, cut.span,
            **cut.block, STAGES=cut.stages, num_warps=cut.warps, **constants,
        )  # fmt: skip

    def room(self, like: Tensor, width: int) -> Tensor:
        """For a row of sums of every program."""
        return torch.empty(self.rows, self.cut.splits, width, self.groups, device=like.device, dtype=torch.float32)


def _padded(size: int) -> int:
    return max(16, plan.power_of_two(size))


def _added(parts: Tensor) -> Tensor:
    return parts.sum(1) if parts.shape[1] > 1 else parts.squeeze(1)


@op()
def group_update(
    projected: Tensor, keys: Tensor, cell: Tensor, scores: Tensor | None, theta: Tensor | None, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cell`: of each token, -1 before the patches; `scores`: sums (b, tiles, k), for a gate. Update, sums of the keys of each
    cell and its size (b heads, r + 1, g), gate and pooled scores (b, k), which are empty where there is none."""
    told, (b, n, d) = MixtureForm.read(form), projected.shape
    sweeps, heads, update = _Sweeps("groups", projected, keys, theta, told), told.num_heads, torch.empty_like(projected)
    gate, pooled = (cell.new_empty(b if scores is not None else 0, heads, dtype=torch.float32) for _ in range(2))
    pi, row = keys.new_empty(b, n, heads * told.groups), 1 + 2 * d // heads
    centres, sums = sweeps.room(cell, told.key_dim + 1), sweeps.room(cell, row)
    sweeps.launch(centres_kernel, keys, cell, centres, **sweeps.keys)
    centre = _added(centres)
    sweeps.launch(
        statistics_kernel, projected, keys, projected, centre, pi, sums,
        SHARPNESS=told.sharpness, ROW=row, BACKWARD=False, **sweeps.keys | sweeps.channels,
    )  # fmt: skip
    scores, opening = sizes(scores, *told.gate_choice)
    tiles = 0 if scores is None else scores.shape[1]
    sweeps.launch(
        update_kernel, projected, pi, _added(sums), scores, theta, update, gate, pooled, tiles,
        ROW=row, OWN=told.own, **sweeps.channels, **sweeps.strengths, **opening,
    )  # fmt: skip
    return update, centre, gate, pooled


@op(mutates=("dupdate",))
def group_adjoint(
    projected: Tensor, keys: Tensor, cell: Tensor, centre: Tensor, gate: Tensor | None, theta: Tensor | None, dupdate: Tensor,
    form: str, wants_update: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of keys, of their bias (k r), of gate and theta (b, k), and the update once more; what there is not, or is
    not wanted, is empty. The gradient of projected is written over dupdate."""
    told, (b, n, d) = MixtureForm.read(form), projected.shape
    sweeps, heads = _Sweeps("groups back", projected, keys, theta, told), told.num_heads
    proximal, row = told.mode == "proximal", 1 + 4 * d // heads
    dgate, dtheta = (centre.new_empty(b if there else 0, heads) for there in (gate is not None, proximal))
    dkeys = torch.empty_like(keys)
    # the last kernel writes dkeys, and reads no membership
    pi = dkeys if told.key_dim == told.groups else keys.new_empty(b, n, heads * told.groups)
    both, strengths = sweeps.keys | sweeps.channels, {"GATED": gate is not None, **sweeps.strengths}
    start, sums = (projected, keys, dupdate, centre, pi), sweeps.room(centre, row)
    sweeps.launch(statistics_kernel, *start, sums, SHARPNESS=told.sharpness, ROW=row, BACKWARD=not proximal, **both)
    if proximal:
        given = (projected, pi, dupdate, _added(sums), sums, gate, theta)
        sweeps.launch(implicit_kernel, *given, ROW=row, **sweeps.channels, **strengths)
    sums = _added(sums)  # their rows are let go before what is large is made
    dq, update = torch.empty_like(keys, dtype=torch.float32), projected.new_empty(projected.shape if wants_update else 0)
    dcentre, parts = sweeps.room(centre, told.key_dim), centre.new_empty(sweeps.rows, sweeps.cut.splits, told.key_dim)
    sweeps.launch(
        pull_kernel, *start, sums, gate, theta, dq, update, dcentre, dgate, dtheta,
        SHARPNESS=told.sharpness, ROW=row, OWN=told.own, WANTED=wants_update, **both, **strengths,
    )  # fmt: skip
    sweeps.launch(spread_kernel, dq, centre, _added(dcentre), cell, dkeys, parts, **sweeps.keys)
    return dkeys, parts.view(b, heads, -1, told.key_dim).sum((0, 2)).flatten(), dgate, dtheta, update
