"""GMSA between its projections, forward and backward, with memberships made again wherever they are needed.

    group_update     projected (b, n, k p), keys (b, n, k r), w = g^2 and t (b, k)   ->  update (b, n, k p)
    group_adjoint    the same and dupdate      ->  the gradients of keys, w and t; that of projected over dupdate

t multiplies the pull: g (listing), g^2 (equation), theta g^2 (proximal). Forward the formulas are those of
`kernels/mixture.py`. Backward, P being the matrix of the means of cells:

    slope = dupdate, moved = s               proximal: slope = dupdate/(1 + t pi a), moved = s + update
    beta = sum_n pi slope    alpha = sum_n pi slope moved    B = mu beta - alpha
    dt = sum a B             dw = -t sum V a^2 B             V does not move with mu: it is least there
    e = -w t a^2 B/m         f = t a beta/m - 2 e mu         const = sum_i e (mu^2 - V) - t a beta mu/m
    dS = 2 s (pi e) + pi f - t slope (pi a)
    dpi = t slope (a mu) - t slope moved a + s^2 e + s f + const             without own: no moved, no dS by slope
    dl = pi (dpi - sum_g pi dpi)             dq = sharpness dl c             dkeys = dq + P^T sharpness dl^T q

Sweeps over the tokens of one image and head, a tile at a time:

    centres      sums of the keys by cell
    statistics   mass, sums of pi s and pi s^2; backward also beta = sum_n pi slope and alpha = sum_n pi slope moved
    update       from centres and statistics
    pull         ds, dq and the gradient of the centres
    spread       dkeys = dq + what the centre of its cell asks

For the proximal step beta and alpha need the update, and take a sweep of their own. With enough images and heads a program
takes all sweeps of one. Otherwise tokens are split over programs, a launch a sweep; each leaves one row of partial sums. All
sums are products of matrices: exact for float32 tokens, TF32 for float16. For bfloat16 tokens their factors are bfloat16 too,
in such a way that mu - s is a difference of numbers that were rounded alike: the same rounded pi and a stand in both, and a
mu is a sum of two bfloat16 numbers. What the softmax over groups reads has its mean over the groups taken out before it is
rounded (`_centred`), and so has its gradient: groups are alike, and differences count.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.choice import interpreted
from dmst.kernels.fused.launch import launch, op

NO_OWN: tl.constexpr = tl.constexpr(1)
PROXIMAL: tl.constexpr = tl.constexpr(2)
ALL: tl.constexpr = tl.constexpr(0)
CENTRES: tl.constexpr = tl.constexpr(1)
STATISTICS: tl.constexpr = tl.constexpr(2)
SUMS: tl.constexpr = tl.constexpr(3)
LAST: tl.constexpr = tl.constexpr(4)  # update, pull
TF32: tl.constexpr = tl.constexpr(1)
BF16: tl.constexpr = tl.constexpr(2)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_PRODUCTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


# --- tiles -----------------------------------------------------------------------------------------------------------


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
def _row(ptr, row, group, channel, G: tl.constexpr, WIDTH: tl.constexpr):
    """A row of statistics (rows, g, width) as (channels, groups), zeros around it."""
    here = (group[None, :] < G) & (channel[:, None] < WIDTH)
    return tl.load(ptr + (row * G + group[None, :]) * WIDTH + channel[:, None], mask=here, other=0.0)


@triton.jit
def _leave(ptr, value, row, group, channel, G: tl.constexpr, WIDTH: tl.constexpr):
    here = (group[None, :] < G) & (channel[:, None] < WIDTH)
    tl.store(ptr + (row * G + group[None, :]) * WIDTH + channel[:, None], value, mask=here)


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
def _per_size(group, rows, columns, down, across):
    """1 / how many patches a cell has."""
    row, column = group // across, group % across
    high = ((row + 1) * rows + down - 1) // down - (row * rows + down - 1) // down
    wide = ((column + 1) * columns + across - 1) // across - (column * columns + across - 1) // across
    return 1.0 / tl.maximum(high * wide, 1)


@triton.jit
def _centred(x, group, G: tl.constexpr):
    """x (any, groups) less its mean over the groups."""
    real = group[None, :] < G
    mean = tl.sum(tl.where(real, x, 0.0), 1) / G
    return tl.where(real, x - mean[:, None], 0.0)


@triton.jit
def _scaled(sums, per_size, group, SHARPNESS: tl.constexpr, G: tl.constexpr):
    """Centres as `_memberships` wants them: what 2^x is taken of is their product with a key."""
    return _centred(sums * per_size[None, :] * (SHARPNESS * LOG2E), group, G)


@triton.jit
def _memberships(q, centre, token, count, group, G: tl.constexpr, LOW: tl.constexpr):
    """pi (tokens, groups), from keys and scaled centres (keys, groups)."""
    logits = _fine_dot(q, centre, LOW)
    logits = tl.where(group[None, :] < G, logits, -float("inf"))
    pi = tl.exp2(logits - tl.max(logits, 1)[:, None])
    pi = pi / tl.sum(pi, 1)[:, None]
    return _rounded(tl.where(token[:, None] < count, pi, 0.0), LOW)


# --- sweeps ----------------------------------------------------------------------------------------------------------


@triton.jit
def _centres(
    keys_ptr, cell_ptr, count, key, group,
    K: tl.constexpr, R: tl.constexpr, LOW: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of the keys by cell, (keys, groups)."""
    total = tl.zeros((key.shape[0], group.shape[0]), tl.float32)
    for first in tl.range(0, count, TOKENS, num_stages=STAGES):
        token = first + tl.arange(0, TOKENS)
        q = _load(keys_ptr, token, count, key, K, R)
        total += _dot(tl.trans(q), _inside(cell_ptr, token, count, group), LOW)
    return total


@triton.jit
def _statistics(
    projected_ptr, keys_ptr, dupdate_ptr, centre, count, channel, key, group,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, G: tl.constexpr, LOW: tl.constexpr, TOKENS: tl.constexpr,
    BACKWARD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mass (groups), sums of pi s and pi s^2 and, with `BACKWARD`, of pi dupdate and pi dupdate s, (channels, groups)."""
    mass = tl.zeros((TOKENS, group.shape[0]), tl.float32)
    one = tl.zeros((channel.shape[0], group.shape[0]), tl.float32)
    two, beta, alpha = one, one, one
    for first in tl.range(0, count, TOKENS, num_stages=STAGES):
        token = first + tl.arange(0, TOKENS)
        q = _load(keys_ptr, token, count, key, K, R)
        s = _load(projected_ptr, token, count, channel, K, P)
        pi = _memberships(q, centre, token, count, group, G, LOW)
        mass += pi
        wide = s.to(tl.float32)
        one += _dot(tl.trans(s), pi, LOW)
        two += _dot(tl.trans(wide * wide), pi, LOW)
        if BACKWARD:
            dupdate = _load(dupdate_ptr, token, count, channel, K, P)
            beta += _dot(tl.trans(dupdate), pi, LOW)
            alpha += _dot(tl.trans(dupdate.to(tl.float32) * wide), pi, LOW)
    return tl.sum(mass, 0), one, two, beta, alpha


@triton.jit
def _means(mass, one, two, w):
    """1/mass (groups), mean, spread and attenuation (channels, groups). An empty group divides nothing by 1; NaN stays."""
    per_mass = 1.0 / tl.where(mass < 1.1754943508222875e-38, 1.0, mass)
    mean = one * per_mass[None, :]
    spread = tl.maximum(two * per_mass[None, :] - mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return per_mass, mean, spread, 1.0 / (1.0 + w * spread)


@triton.jit
def forward_kernel(
    projected_ptr, keys_ptr, cell_ptr, w_ptr, t_ptr, update_ptr, centre_ptr, mass_ptr, one_ptr, two_ptr,
    n, span, splits, rows, columns, down, across, SHARPNESS: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr, LOW: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, GROUPS: tl.constexpr, PHASE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of centres (sums), mass, one and two: an image and head has one when it is read, and when written one a split."""
    channel, key, group = tl.arange(0, CHANNELS), tl.arange(0, KEYS), tl.arange(0, GROUPS)
    image = tl.program_id(0).to(tl.int64)
    part = image * splits + tl.program_id(1)
    place, count = _place(n, span, K)
    projected_ptr += place * P
    keys_ptr += place * R
    update_ptr += place * P
    cell_ptr += tl.program_id(1) * span
    if PHASE <= CENTRES:  # or all of them
        centre = _centres(keys_ptr, cell_ptr, count, key, group, K, R, LOW, TOKENS, STAGES)
    else:
        centre = _row(centre_ptr, image, group, key, G, R)
    if PHASE == CENTRES:
        _leave(centre_ptr, centre, part, group, key, G, R)
    else:
        centre = _scaled(centre, _per_size(group, rows, columns, down, across), group, SHARPNESS, G)
        if PHASE == LAST:
            mass = tl.load(mass_ptr + image * G + group, mask=group < G, other=0.0)
            one, two = _row(one_ptr, image, group, channel, G, P), _row(two_ptr, image, group, channel, G, P)
        else:
            mass, one, two, _, _ = _statistics(
                projected_ptr, keys_ptr, update_ptr, centre, count, channel, key, group,
                K, P, R, G, LOW, TOKENS, False, STAGES,
            )  # fmt: skip
        if PHASE == STATISTICS:
            tl.store(mass_ptr + part * G + group, mass, mask=group < G)
            _leave(one_ptr, one, part, group, channel, G, P)
            _leave(two_ptr, two, part, group, channel, G, P)
        else:
            t = tl.load(t_ptr + image)
            _, mean, _, a = _means(mass, one, two, tl.load(w_ptr + image))
            a = _rounded(t * a, LOW)
            low, a = tl.trans(a * mean), tl.trans(a)
            for first in tl.range(0, count, TOKENS, num_stages=STAGES):
                token = first + tl.arange(0, TOKENS)
                q = _load(keys_ptr, token, count, key, K, R)
                s = _load(projected_ptr, token, count, channel, K, P)
                pi = _memberships(q, centre, token, count, group, G, LOW)
                update = _fine_dot(pi, low, LOW)
                if MODE != NO_OWN:
                    alpha = _dot(pi, a, LOW)
                    update = update - alpha * s.to(tl.float32)
                    if MODE == PROXIMAL:
                        update = update / (1.0 + alpha)
                _store(update_ptr, update, token, count, channel, K, P)


@triton.jit
def _implicit_sums(
    projected_ptr, keys_ptr, dupdate_ptr, centre, a, mean, count, channel, key, group,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, G: tl.constexpr, LOW: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """beta and alpha of the proximal step, with t in a."""
    beta = tl.zeros((channel.shape[0], group.shape[0]), tl.float32)
    alpha = beta
    for first in tl.range(0, count, TOKENS, num_stages=STAGES):
        token = first + tl.arange(0, TOKENS)
        q = _load(keys_ptr, token, count, key, K, R)
        s = _load(projected_ptr, token, count, channel, K, P).to(tl.float32)
        dupdate = _load(dupdate_ptr, token, count, channel, K, P)
        pi = _memberships(q, centre, token, count, group, G, LOW)
        share = _dot(pi, tl.trans(a), LOW)
        damp = 1.0 / (1.0 + share)
        slope = dupdate.to(tl.float32) * damp
        beta += _dot(tl.trans(slope), pi, LOW)
        moved = s + damp * (_fine_dot(pi, tl.trans(a * mean), LOW) - share * s)
        alpha += _dot(tl.trans(slope * moved), pi, LOW)
    return beta, alpha


@triton.jit
def backward_kernel(
    projected_ptr, keys_ptr, cell_ptr, w_ptr, t_ptr, dupdate_ptr, centre_ptr, mass_ptr, one_ptr, two_ptr, beta_ptr, alpha_ptr,
    dq_ptr, dkeys_ptr, update_ptr, dcentre_ptr, dw_ptr, dt_ptr,
    n, span, splits, rows, columns, down, across, SHARPNESS: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr, LOW: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, GROUPS: tl.constexpr, PHASE: tl.constexpr,
    WANTED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq is dkeys without what the centres ask, float32: so small a share would be lost in 16 bits."""
    channel, key, group = tl.arange(0, CHANNELS), tl.arange(0, KEYS), tl.arange(0, GROUPS)
    image = tl.program_id(0).to(tl.int64)
    part = image * splits + tl.program_id(1)
    place, count = _place(n, span, K)
    projected_ptr += place * P
    dupdate_ptr += place * P
    update_ptr += place * P
    keys_ptr += place * R
    dq_ptr += place * R
    dkeys_ptr += place * R
    cell_ptr += tl.program_id(1) * span
    size = _per_size(group, rows, columns, down, across)
    if PHASE == ALL:
        centre = _centres(keys_ptr, cell_ptr, count, key, group, K, R, LOW, TOKENS, STAGES)
    else:
        centre = _row(centre_ptr, image, group, key, G, R)
    centre = _scaled(centre, size, group, SHARPNESS, G)
    if PHASE <= STATISTICS:
        mass, one, two, beta, alpha = _statistics(
            projected_ptr, keys_ptr, dupdate_ptr, centre, count, channel, key, group,
            K, P, R, G, LOW, TOKENS, MODE != PROXIMAL, STAGES,
        )  # fmt: skip
    else:
        mass = tl.load(mass_ptr + image * G + group, mask=group < G, other=0.0)
        one, two = _row(one_ptr, image, group, channel, G, P), _row(two_ptr, image, group, channel, G, P)
    if PHASE == STATISTICS:
        tl.store(mass_ptr + part * G + group, mass, mask=group < G)
        _leave(one_ptr, one, part, group, channel, G, P)
        _leave(two_ptr, two, part, group, channel, G, P)
    w, t = tl.load(w_ptr + image), tl.load(t_ptr + image)
    per_mass, mean, spread, a = _means(mass, one, two, w)
    pulls = _rounded(t * a, LOW)
    if MODE == PROXIMAL and (PHASE == ALL or PHASE == SUMS):  # noqa: SIM109
        beta, alpha = _implicit_sums(
            projected_ptr, keys_ptr, dupdate_ptr, centre, pulls, mean, count, channel, key, group,
            K, P, R, G, LOW, TOKENS, STAGES,
        )  # fmt: skip
    if PHASE == LAST:
        beta, alpha = _row(beta_ptr, image, group, channel, G, P), _row(alpha_ptr, image, group, channel, G, P)
    elif PHASE == SUMS or (PHASE == STATISTICS and MODE != PROXIMAL):
        _leave(beta_ptr, beta, part, group, channel, G, P)
        _leave(alpha_ptr, alpha, part, group, channel, G, P)

    if PHASE == ALL or PHASE == LAST:  # noqa: SIM109
        if MODE == NO_OWN:
            alpha = tl.zeros_like(alpha)
        bent = t * a * a * (mean * beta - alpha)
        if tl.program_id(1) == 0:
            tl.store(dw_ptr + image, -tl.sum(spread * bent))
            tl.store(dt_ptr + image, tl.sum(a * (mean * beta - alpha)))
        e = _rounded(-w * bent * per_mass[None, :], LOW)
        dmean = t * a * beta * per_mass[None, :]
        f = dmean - 2.0 * e * mean
        constant = tl.sum(e * (mean * mean - spread) - mean * dmean, 0)
        into_e, into_f, into_a, into_low = tl.trans(2.0 * e), tl.trans(f), tl.trans(pulls), tl.trans(pulls * mean)
        e, f, own = _centred(e, group, G), _centred(f, group, G), _centred(t * a, group, G)
        given, constant = _centred(t * a * mean, group, G), constant - tl.sum(constant, 0) / G
        into_q, dcentre = tl.trans(centre / LOG2E), tl.zeros((KEYS, GROUPS), tl.float32)
        for first in tl.range(0, count, TOKENS, num_stages=STAGES):
            token = first + tl.arange(0, TOKENS)
            q = _load(keys_ptr, token, count, key, K, R)
            s = _load(projected_ptr, token, count, channel, K, P).to(tl.float32)
            dupdate = _load(dupdate_ptr, token, count, channel, K, P).to(tl.float32)
            pi = _memberships(q, centre, token, count, group, G, LOW)
            slope, moved = dupdate, s
            if MODE == NO_OWN:
                if WANTED:
                    _store(update_ptr, _fine_dot(pi, into_low, LOW), token, count, channel, K, P)
            else:
                share = _dot(pi, into_a, LOW)
                if WANTED or MODE == PROXIMAL:
                    pull = _fine_dot(pi, into_low, LOW) - share * s
                    if MODE == PROXIMAL:
                        damp = 1.0 / (1.0 + share)
                        pull, slope = pull * damp, slope * damp
                        moved = s + pull
                    if WANTED:
                        _store(update_ptr, pull, token, count, channel, K, P)
            ds = s * _dot(pi, into_e, LOW) + _fine_dot(pi, into_f, LOW)
            dpi = _dot(slope, given, LOW) + _dot(s * s, e, LOW) + _dot(s, f, LOW) + constant[None, :]
            if MODE != NO_OWN:
                ds -= slope * share
                dpi -= _dot(slope * moved, own, LOW)
            _store(dupdate_ptr, ds, token, count, channel, K, P)  # in its place: nobody reads this tile again
            mean_dpi = tl.sum(pi * dpi, 1) / tl.maximum(tl.sum(pi, 1), 0.5)  # rounded pi sum to 1 nearly; to 0 beyond the end
            dlogits = pi * (dpi - mean_dpi[:, None])
            dcentre += _dot(tl.trans(q), dlogits, LOW)
            _store(dq_ptr, _dot(dlogits, into_q, LOW), token, count, key, K, R)
        dcentre *= SHARPNESS
        if PHASE == LAST:
            _leave(dcentre_ptr, dcentre, part, group, key, G, R)
        else:
            tl.debug_barrier()  # dq is read again
            _spread(dq_ptr, dkeys_ptr, cell_ptr, dcentre, size, count, key, group, K, R, G, LOW, TOKENS)


@triton.jit
def _spread(
    dq_ptr, dkeys_ptr, cell_ptr, dcentre, size, count, key, group,
    K: tl.constexpr, R: tl.constexpr, G: tl.constexpr, LOW: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """dkeys = dq + the gradient of the centre of its cell, over how many patches that has."""
    asked = tl.trans(_centred(dcentre, group, G) * size[None, :])
    for first in tl.range(0, count, TOKENS, num_stages=1):
        token = first + tl.arange(0, TOKENS)
        inside = _inside(cell_ptr, token, count, group)
        dkeys = _load(dq_ptr, token, count, key, K, R) + _fine_dot(inside, asked, LOW)
        _store(dkeys_ptr, dkeys, token, count, key, K, R)


@triton.jit
def spread_kernel(
    dq_ptr, dcentre_ptr, dkeys_ptr, cell_ptr, n, span, rows, columns, down, across,
    K: tl.constexpr, R: tl.constexpr, G: tl.constexpr, LOW: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """The last sweep of samples that are split."""
    key, group = tl.arange(0, KEYS), tl.arange(0, GROUPS)
    place, count = _place(n, span, K)
    dq_ptr += place * R
    dkeys_ptr += place * R
    cell_ptr += tl.program_id(1) * span
    dcentre = _row(dcentre_ptr, tl.program_id(0).to(tl.int64), group, key, G, R)
    size = _per_size(group, rows, columns, down, across)
    _spread(dq_ptr, dkeys_ptr, cell_ptr, dcentre, size, count, key, group, K, R, G, LOW, TOKENS)


# --- operators -------------------------------------------------------------------------------------------------------


def _sizes(projected: Tensor, keys: Tensor, heads: int, cells: list[int], sharpness: float, form: int) -> dict[str, Any]:
    p, r, groups = projected.shape[-1] // heads, keys.shape[-1] // heads, cells[0]
    padded = {name: max(16, plan.power_of_two(size)) for name, size in (("CHANNELS", p), ("KEYS", r), ("GROUPS", groups))}
    low = 0 if interpreted() else _PRODUCTS[projected.dtype]  # the interpreter's products of bfloat16 are wrong
    return {"SHARPNESS": sharpness, "K": heads, "P": p, "R": r, "G": groups, "MODE": form, "LOW": low, **padded}


@op()
def group_update(
    projected: Tensor, keys: Tensor, cell: Tensor, cells: list[int], w: Tensor, t: Tensor, heads: int, sharpness: float,
    form: int,
) -> Tensor:  # fmt: skip
    """`cell`: of each token, -1 before the patches. `cells`: groups, rows and columns of the patches, cells down and across."""
    (b, n, _), (groups, *grid) = projected.shape, cells
    sizes = _sizes(projected, keys, heads, cells, sharpness, form)
    cut = plan.groups("groups", b * heads, n, projected.shape[-1], sizes["P"], groups, projected.dtype)
    update = torch.empty_like(projected)

    def sweep(phase: int, *found: Tensor) -> None:
        given = (projected, keys, cell, w, t, update, *found, n, cut.span, cut.splits, *grid)
        launch(
            forward_kernel, (b * heads, cut.splits), *given, **sizes, TOKENS=cut.tokens, STAGES=cut.stages, PHASE=phase,
            num_warps=cut.warps,
        )  # fmt: skip

    if cut.splits == 1:
        sweep(0, w, w, w, w)
        return update
    centre, mass, one, two = _partial(w, cut.splits, groups, sizes["R"], 1, sizes["P"], sizes["P"])
    sweep(1, centre, mass, one, two)
    centre = centre.sum(1)
    sweep(2, centre, mass, one, two)
    sweep(4, centre, mass.sum(1), one.sum(1), two.sum(1))
    return update


def _partial(w: Tensor, splits: int, groups: int, *widths: int) -> list[Tensor]:
    """Room for rows of partial sums (rows, splits, g, width)."""
    return [torch.empty(w.numel(), splits, groups, width, device=w.device, dtype=torch.float32) for width in widths]


@op(mutates=("dupdate",))
def group_adjoint(
    projected: Tensor, keys: Tensor, cell: Tensor, cells: list[int], w: Tensor, t: Tensor, dupdate: Tensor, heads: int,
    sharpness: float, form: int, wants_update: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of keys, w and t, and the update once more, empty where it is not wanted; that of projected is written
    over dupdate. No argument may be called `mode`: torch passes those of an operator that writes by name, beside its own."""
    (groups, *grid), rows, n = cells, projected.shape[0] * heads, projected.shape[1]
    sizes = _sizes(projected, keys, heads, cells, sharpness, form)
    p, r = sizes["P"], sizes["R"]
    cut = plan.groups("groups back", rows, n, projected.shape[-1], p, groups, projected.dtype)
    dq, dkeys, dw, dt = (
        torch.empty_like(keys, dtype=torch.float32),
        torch.empty_like(keys),
        torch.empty_like(w),
        torch.empty_like(t),
    )
    update = torch.empty_like(projected) if wants_update else projected.new_empty(0)

    def sweep(phase: int, dcentre: Tensor, *found: Tensor) -> None:
        launch(
            backward_kernel, (rows, cut.splits), projected, keys, cell, w, t, dupdate, *found,
            dq, dkeys, update, dcentre, dw, dt, n, cut.span, cut.splits, *grid,
            **sizes, TOKENS=cut.tokens, STAGES=cut.stages, PHASE=phase, WANTED=wants_update, num_warps=cut.warps,
        )  # fmt: skip

    if cut.splits == 1:
        sweep(0, w, *(w,) * 6)
        return dkeys, dw, dt, update
    centre, mass, dcentre, *partial = _partial(w, cut.splits, groups, r, 1, r, p, p, p, p)
    launch(
        forward_kernel, (rows, cut.splits), projected, keys, cell, w, t, projected, centre, *(w,) * 3,
        n, cut.span, cut.splits, *grid, **sizes, TOKENS=cut.tokens, STAGES=cut.stages, PHASE=1, num_warps=cut.warps,
    )  # fmt: skip
    centre = centre.sum(1)
    sweep(2, dcentre, centre, mass, *partial)
    if form == 2:
        moments = [x.sum(1) for x in (mass, *partial[:2])]
        sweep(3, dcentre, centre, *moments, *partial[2:])
    sweep(4, dcentre, centre, *(x.sum(1) for x in (mass, *partial)))
    spread = {name: sizes[name] for name in ("K", "R", "G", "LOW", "KEYS", "GROUPS")}
    given = (dq, dcentre.sum(1), dkeys, cell, n, cut.span, *grid)
    launch(spread_kernel, (rows, cut.splits), *given, **spread, TOKENS=cut.tokens, num_warps=4)
    return dkeys, dw, dt, update
