"""GMSA between its projections, forward and backward, with memberships made again wherever they are needed.

    group_update     projected (b, n, k p), keys (b, n, k r), w = g^2 and t (b, k)   ->  update (b, n, k p)
    group_adjoint    the same and dupdate      ->  the gradients of keys, w and t; that of projected over dupdate

t multiplies the pull: g (listing), g^2 (equation), theta g^2 (proximal). The formulas are those of `kernels/mixture.py` and
`kernels/mixture_closed_form.py`. Sweeps over the tokens of one image and head, a tile at a time:

    centres      sums of the keys by cell                  statistics    mass, sums of pi s and of pi s^2
    update       from centres and statistics               sums          of pi dbeta and pi dalpha
    pull         ds, dq and the gradient of the centres    spread        dkeys = dq + what the centre of its cell asks

With enough images and heads a program takes all sweeps of one. Otherwise tokens are split over programs, a launch a sweep; each
leaves one row of partial sums. Sums over tokens are products of matrices, in float32 for float32 tokens, in TF32 for 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.fused.launch import launch, op

PROXIMAL: tl.constexpr = tl.constexpr(2)
NO_OWN: tl.constexpr = tl.constexpr(1)
ALL: tl.constexpr = tl.constexpr(0)
CENTRES: tl.constexpr = tl.constexpr(1)
STATISTICS: tl.constexpr = tl.constexpr(2)
UPDATE: tl.constexpr = tl.constexpr(3)
SUMS: tl.constexpr = tl.constexpr(1)
PULL: tl.constexpr = tl.constexpr(2)


# --- tiles -----------------------------------------------------------------------------------------------------------


@triton.jit
def _at(token, channel, n, K: tl.constexpr, WIDTH: tl.constexpr):
    """Where the rows of this program's image and head are in a tensor (b, n, k width)."""
    sample, head = (tl.program_id(0) // K).to(tl.int64), tl.program_id(0) % K
    return (sample * n + token[:, None]) * (K * WIDTH) + head * WIDTH + channel[None, :]


@triton.jit
def _load(ptr, token, stop, channel, n, K: tl.constexpr, WIDTH: tl.constexpr):
    here = (token[:, None] < stop) & (channel[None, :] < WIDTH)
    return tl.load(ptr + _at(token, channel, n, K, WIDTH), mask=here, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, value, token, stop, channel, n, K: tl.constexpr, WIDTH: tl.constexpr):
    here = (token[:, None] < stop) & (channel[None, :] < WIDTH)
    tl.store(ptr + _at(token, channel, n, K, WIDTH), value.to(ptr.dtype.element_ty), mask=here)


@triton.jit
def _row(ptr, row, group, channel, G: tl.constexpr, WIDTH: tl.constexpr):
    """A row of statistics (rows, g, width), zeros around it."""
    here = (group[:, None] < G) & (channel[None, :] < WIDTH)
    return tl.load(ptr + (row * G + group[:, None]) * WIDTH + channel[None, :], mask=here, other=0.0)


@triton.jit
def _leave(ptr, value, row, group, channel, G: tl.constexpr, WIDTH: tl.constexpr):
    here = (group[:, None] < G) & (channel[None, :] < WIDTH)
    tl.store(ptr + (row * G + group[:, None]) * WIDTH + channel[None, :], value, mask=here)


@triton.jit
def _dot(x, y, EXACT: tl.constexpr):
    return tl.dot(x, y, input_precision="ieee" if EXACT else "tf32")


@triton.jit
def _cell(token, n, rows, columns, down, across):
    """The cell of each token; -1 before the patches."""
    patch = token - (n - rows * columns)
    cell = (patch // columns * down // rows) * across + (patch % columns) * across // columns
    return tl.where(patch >= 0, cell, -1)


@triton.jit
def _per_size(group, rows, columns, down, across):
    """1 / how many patches a cell has."""
    row, column = group // across, group % across
    high = ((row + 1) * rows + down - 1) // down - (row * rows + down - 1) // down
    wide = ((column + 1) * columns + across - 1) // across - (column * columns + across - 1) // across
    return 1.0 / tl.maximum(high * wide, 1)


@triton.jit
def _memberships(q, centre, token, stop, group, SHARPNESS: tl.constexpr, G: tl.constexpr, EXACT: tl.constexpr):
    logits = SHARPNESS * _dot(q, tl.trans(centre), EXACT)
    logits = tl.where(group[None, :] < G, logits, -float("inf"))
    pi = tl.exp(logits - tl.max(logits, 1)[:, None])
    pi = pi / tl.sum(pi, 1)[:, None]
    return tl.where(token[:, None] < stop, pi, 0.0)


# --- sweeps ----------------------------------------------------------------------------------------------------------


@triton.jit
def _centres(
    keys_ptr, start, stop, n, rows, columns, down, across, key, group,
    K: tl.constexpr, R: tl.constexpr, EXACT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((group.shape[0], key.shape[0]), tl.float32)
    for first in tl.range(start, stop, TOKENS, num_stages=1):
        token = first + tl.arange(0, TOKENS)
        q = _load(keys_ptr, token, stop, key, n, K, R)
        inside = _cell(token, n, rows, columns, down, across)[:, None] == group[None, :]
        total += _dot(tl.trans(tl.where(inside & (token[:, None] < stop), 1.0, 0.0)), q, EXACT)
    return total


@triton.jit
def _statistics(
    projected_ptr, keys_ptr, centre, start, stop, n, channel, key, group, SHARPNESS: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, G: tl.constexpr, EXACT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    mass = tl.zeros((group.shape[0],), tl.float32)
    one = tl.zeros((group.shape[0], channel.shape[0]), tl.float32)
    two = tl.zeros((group.shape[0], channel.shape[0]), tl.float32)
    for first in tl.range(start, stop, TOKENS, num_stages=1):
        token = first + tl.arange(0, TOKENS)
        s = _load(projected_ptr, token, stop, channel, n, K, P)
        q = _load(keys_ptr, token, stop, key, n, K, R)
        pi = _memberships(q, centre, token, stop, group, SHARPNESS, G, EXACT)
        mass += tl.sum(pi, 0)
        one += _dot(tl.trans(pi), s, EXACT)
        two += _dot(tl.trans(pi), s * s, EXACT)
    return mass, one, two


@triton.jit
def _means(mass, one, two, w):
    """1/mass, mean, spread and attenuation. An empty group divides nothing by 1; NaN stays."""
    per_mass = 1.0 / tl.where(mass < 1.1754943508222875e-38, 1.0, mass)
    mean = one * per_mass[:, None]
    spread = tl.maximum(two * per_mass[:, None] - mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return per_mass, mean, spread, 1.0 / (1.0 + w * spread)


@triton.jit
def forward_kernel(
    projected_ptr, keys_ptr, w_ptr, t_ptr, update_ptr, centre_ptr, mass_ptr, one_ptr, two_ptr,
    n, span, splits, rows, columns, down, across, SHARPNESS: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr, EXACT: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, GROUPS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Rows of centres (sums), mass, one and two: an image and head has one when it is read, and when written one a split."""
    channel, key, group = tl.arange(0, CHANNELS), tl.arange(0, KEYS), tl.arange(0, GROUPS)
    image = tl.program_id(0).to(tl.int64)
    part = image * splits + tl.program_id(1)
    start, stop = tl.program_id(1) * span, tl.minimum((tl.program_id(1) + 1) * span, n)
    if PHASE <= CENTRES:  # or all of them
        centre = _centres(keys_ptr, start, stop, n, rows, columns, down, across, key, group, K, R, EXACT, TOKENS)
    else:
        centre = _row(centre_ptr, image, group, key, G, R)
    if PHASE == CENTRES:
        _leave(centre_ptr, centre, part, group, key, G, R)
    else:
        centre = centre * _per_size(group, rows, columns, down, across)[:, None]
        if PHASE == UPDATE:
            mass = tl.load(mass_ptr + image * G + group, mask=group < G, other=0.0)
            one, two = _row(one_ptr, image, group, channel, G, P), _row(two_ptr, image, group, channel, G, P)
        else:
            mass, one, two = _statistics(
                projected_ptr, keys_ptr, centre, start, stop, n, channel, key, group, SHARPNESS, K, P, R, G, EXACT, TOKENS
            )
        if PHASE == STATISTICS:
            tl.store(mass_ptr + part * G + group, mass, mask=group < G)
            _leave(one_ptr, one, part, group, channel, G, P)
            _leave(two_ptr, two, part, group, channel, G, P)
        else:
            t = tl.load(t_ptr + image)
            _, mean, _, a = _means(mass, one, two, tl.load(w_ptr + image))
            for first in tl.range(start, stop, TOKENS, num_stages=1):
                token = first + tl.arange(0, TOKENS)
                s = _load(projected_ptr, token, stop, channel, n, K, P)
                q = _load(keys_ptr, token, stop, key, n, K, R)
                pi = _memberships(q, centre, token, stop, group, SHARPNESS, G, EXACT)
                update = _dot(pi, a * mean, EXACT)
                if MODE != NO_OWN:
                    alpha = _dot(pi, a, EXACT)
                    update = update - alpha * s
                    if MODE == PROXIMAL:
                        update = update / (1.0 + t * alpha)
                _store(update_ptr, t * update, token, stop, channel, n, K, P)


@triton.jit
def _slopes(pi, a, mean, s, dupdate, t, MODE: tl.constexpr, EXACT: tl.constexpr):
    """dbeta, -dalpha, alpha, the update over t, and this tile's share of dt; zeros where there is no own term."""
    beta = _dot(pi, a * mean, EXACT)
    if MODE == NO_OWN:
        alpha, moved, pull, slope = tl.zeros_like(s), tl.zeros_like(s), beta, dupdate
    else:
        alpha = _dot(pi, a, EXACT)
        pull, slope, moved = beta - alpha * s, dupdate, s
        if MODE == PROXIMAL:
            pull, slope = pull / (1.0 + t * alpha), dupdate / (1.0 + t * alpha)
            moved = s + t * pull
    dt = tl.sum(slope * (beta - alpha * moved))
    return t * slope, t * slope * moved, alpha, pull, dt


@triton.jit
def backward_kernel(
    projected_ptr, keys_ptr, w_ptr, t_ptr, dupdate_ptr, centre_ptr, mass_ptr, one_ptr, two_ptr, beta_ptr, alpha_ptr,
    dq_ptr, update_ptr, dcentre_ptr, dw_ptr, dt_ptr,
    n, span, splits, rows, columns, down, across, SHARPNESS: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, G: tl.constexpr, MODE: tl.constexpr, EXACT: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, GROUPS: tl.constexpr, PHASE: tl.constexpr,
    WANTED: tl.constexpr,
):  # fmt: skip
    """beta and alpha are sum_n pi dbeta and sum_n -pi dalpha; dq is dkeys without what the centres ask."""
    channel, key, group = tl.arange(0, CHANNELS), tl.arange(0, KEYS), tl.arange(0, GROUPS)
    image = tl.program_id(0).to(tl.int64)
    part = image * splits + tl.program_id(1)
    start, stop = tl.program_id(1) * span, tl.minimum((tl.program_id(1) + 1) * span, n)
    if PHASE == ALL:
        centre = _centres(keys_ptr, start, stop, n, rows, columns, down, across, key, group, K, R, EXACT, TOKENS)
    else:
        centre = _row(centre_ptr, image, group, key, G, R)
    centre = centre * _per_size(group, rows, columns, down, across)[:, None]
    if PHASE == ALL:
        mass, one, two = _statistics(
            projected_ptr, keys_ptr, centre, start, stop, n, channel, key, group, SHARPNESS, K, P, R, G, EXACT, TOKENS
        )
    else:
        mass = tl.load(mass_ptr + image * G + group, mask=group < G, other=0.0)
        one, two = _row(one_ptr, image, group, channel, G, P), _row(two_ptr, image, group, channel, G, P)
    w, t = tl.load(w_ptr + image), tl.load(t_ptr + image)
    per_mass, mean, spread, a = _means(mass, one, two, w)

    if PHASE == PULL:
        sum_beta, sum_alpha = _row(beta_ptr, image, group, channel, G, P), _row(alpha_ptr, image, group, channel, G, P)
    else:
        sum_beta = tl.zeros((GROUPS, CHANNELS), tl.float32)
        sum_alpha = tl.zeros((GROUPS, CHANNELS), tl.float32)
        dt = 0.0
        for first in tl.range(start, stop, TOKENS, num_stages=1):
            token = first + tl.arange(0, TOKENS)
            s = _load(projected_ptr, token, stop, channel, n, K, P)
            dupdate = _load(dupdate_ptr, token, stop, channel, n, K, P)
            q = _load(keys_ptr, token, stop, key, n, K, R)
            pi = _memberships(q, centre, token, stop, group, SHARPNESS, G, EXACT)
            dbeta, minus, _, _, share = _slopes(pi, a, mean, s, dupdate, t, MODE, EXACT)
            dt += share
            sum_beta += _dot(tl.trans(pi), dbeta, EXACT)
            if MODE != NO_OWN:
                sum_alpha += _dot(tl.trans(pi), minus, EXACT)
        tl.store(dt_ptr + part, dt)
        if PHASE == SUMS:
            _leave(beta_ptr, sum_beta, part, group, channel, G, P)
            _leave(alpha_ptr, sum_alpha, part, group, channel, G, P)

    if PHASE != SUMS:
        bent = a * a * (mean * sum_beta - sum_alpha)
        if tl.program_id(1) == 0:
            tl.store(dw_ptr + image, -tl.sum(spread * bent))
        e = -w * bent * per_mass[:, None]
        dmean = a * sum_beta * per_mass[:, None]
        f = dmean - 2.0 * e * mean
        constant = tl.sum(e * (mean * mean - spread) - mean * dmean, 1)
        dcentre = tl.zeros((GROUPS, KEYS), tl.float32)
        for first in tl.range(start, stop, TOKENS, num_stages=1):
            token = first + tl.arange(0, TOKENS)
            s = _load(projected_ptr, token, stop, channel, n, K, P)
            dupdate = _load(dupdate_ptr, token, stop, channel, n, K, P)
            q = _load(keys_ptr, token, stop, key, n, K, R)
            pi = _memberships(q, centre, token, stop, group, SHARPNESS, G, EXACT)
            dbeta, minus, alpha, pull, _ = _slopes(pi, a, mean, s, dupdate, t, MODE, EXACT)
            if WANTED:
                _store(update_ptr, t * pull, token, stop, channel, n, K, P)
            ds = 2.0 * s * _dot(pi, e, EXACT) + _dot(pi, f, EXACT)
            dpi = _dot(dbeta, tl.trans(a * mean), EXACT) + constant[None, :]
            dpi += _dot(s * s, tl.trans(e), EXACT) + _dot(s, tl.trans(f), EXACT)
            if MODE != NO_OWN:
                ds -= dbeta * alpha
                dpi -= _dot(minus, tl.trans(a), EXACT)
            _store(dupdate_ptr, ds, token, stop, channel, n, K, P)  # in its place: nobody reads this tile again
            dlogits = SHARPNESS * pi * (dpi - tl.sum(pi * dpi, 1)[:, None])
            dcentre += _dot(tl.trans(dlogits), q, EXACT)
            _store(dq_ptr, _dot(dlogits, centre, EXACT), token, stop, key, n, K, R)
        _leave(dcentre_ptr, dcentre, part, group, key, G, R)


@triton.jit
def spread_kernel(
    dq_ptr, dcentre_ptr, dkeys_ptr, n, span, rows, columns, down, across,
    K: tl.constexpr, R: tl.constexpr, G: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dkeys = dq + the gradient of the centre of its cell, over how many patches that has. dq is float32: so small a share
    would be lost in 16 bits."""
    image, key = tl.program_id(0).to(tl.int64), tl.arange(0, KEYS)
    start, stop = tl.program_id(1) * span, tl.minimum((tl.program_id(1) + 1) * span, n)
    for first in tl.range(start, stop, TOKENS, num_stages=1):
        token = first + tl.arange(0, TOKENS)
        cell = _cell(token, n, rows, columns, down, across)
        inside = (cell[:, None] >= 0) & (token[:, None] < stop) & (key[None, :] < R)
        asked = tl.load(dcentre_ptr + (image * G + cell[:, None]) * R + key[None, :], mask=inside, other=0.0)
        asked = asked * _per_size(cell, rows, columns, down, across)[:, None]
        _store(dkeys_ptr, _load(dq_ptr, token, stop, key, n, K, R) + asked, token, stop, key, n, K, R)


# --- operators -------------------------------------------------------------------------------------------------------


def _sizes(projected: Tensor, keys: Tensor, heads: int, cells: list[int], sharpness: float, form: int) -> dict[str, Any]:
    p, r, groups = projected.shape[-1] // heads, keys.shape[-1] // heads, cells[0]
    padded = {name: max(16, plan.power_of_two(size)) for name, size in (("CHANNELS", p), ("KEYS", r), ("GROUPS", groups))}
    exact = projected.dtype == torch.float32
    return {"SHARPNESS": sharpness, "K": heads, "P": p, "R": r, "G": groups, "MODE": form, "EXACT": exact, **padded}


def _gathered(
    projected: Tensor, keys: Tensor, w: Tensor, t: Tensor, cells: list[int], cut: plan.Split, sizes: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Centres (as sums), mass, sums of pi s and of pi s^2, for samples that are split."""
    rows, n, (groups, *grid) = projected.shape[0] * sizes["K"], projected.shape[1], cells

    def empty(*shape: int) -> Tensor:
        return torch.empty(rows, cut.splits, groups, *shape, device=w.device, dtype=torch.float32)

    def sweep(phase: int, *found: Tensor) -> None:
        given = (projected, keys, w, t, projected, *found, n, cut.span, cut.splits, *grid)
        launch(forward_kernel, (rows, cut.splits), *given, **sizes, TOKENS=cut.tokens, PHASE=phase, num_warps=cut.warps)

    centre, mass, one, two = empty(sizes["R"]), empty(), empty(sizes["P"]), empty(sizes["P"])
    sweep(1, centre, mass, one, two)
    centre = centre.sum(1)
    sweep(2, centre, mass, one, two)
    return centre, mass.sum(1), one.sum(1), two.sum(1)


@op()
def group_update(
    projected: Tensor, keys: Tensor, w: Tensor, t: Tensor, heads: int, cells: list[int], sharpness: float, form: int
) -> Tensor:
    """`cells`: groups, rows and columns of the patches, cells down and across."""
    (b, n, _), grid = projected.shape, cells[1:]
    sizes = _sizes(projected, keys, heads, cells, sharpness, form)
    cut = plan.groups(b * heads, n, sizes["P"], cells[0])
    update = torch.empty_like(projected)
    found: tuple[Tensor, ...] = (w,) * 4
    if cut.splits > 1:
        found = _gathered(projected, keys, w, t, cells, cut, sizes)
    launch(
        forward_kernel, (b * heads, cut.splits), projected, keys, w, t, update, *found, n, cut.span, cut.splits, *grid,
        **sizes, TOKENS=cut.tokens, PHASE=3 if cut.splits > 1 else 0, num_warps=cut.warps,
    )  # fmt: skip
    return update


@op(mutates=("dupdate",))
def group_adjoint(
    projected: Tensor, keys: Tensor, w: Tensor, t: Tensor, dupdate: Tensor, heads: int, cells: list[int], sharpness: float,
    form: int, wants_update: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of keys, w and t, and the update once more, empty where it is not wanted; that of projected is written
    over dupdate. No argument may be called `mode`: torch passes those of an operator that writes by name, beside its own."""
    (b, n, _), groups, grid, rows = projected.shape, cells[0], cells[1:], projected.shape[0] * heads
    sizes = _sizes(projected, keys, heads, cells, sharpness, form)
    cut = plan.groups(rows, n, sizes["P"], cells[0], backward=True)
    dq, dw = torch.empty_like(keys, dtype=torch.float32), torch.empty_like(w)
    update = torch.empty_like(projected) if wants_update else projected.new_empty(0)
    dcentre = torch.empty(rows, cut.splits, groups, sizes["R"], device=w.device, dtype=torch.float32)
    dt = torch.empty(b, heads, cut.splits, device=w.device, dtype=torch.float32)

    def sweep(phase: int, *found: Tensor) -> None:
        launch(
            backward_kernel, (rows, cut.splits), projected, keys, w, t, dupdate, *found,
            dq, update, dcentre, dw, dt, n, cut.span, cut.splits, *grid,
            **sizes, TOKENS=cut.tokens, PHASE=phase, WANTED=wants_update, num_warps=cut.warps,
        )  # fmt: skip

    if cut.splits > 1:
        found = _gathered(projected, keys, w, t, cells, cut, sizes)
        beta = torch.empty(rows, cut.splits, groups, sizes["P"], device=w.device, dtype=torch.float32)
        alpha = torch.empty_like(beta)
        sweep(1, *found, beta, alpha)
        sweep(2, *found, beta.sum(1), alpha.sum(1))
    else:
        sweep(0, *(w,) * 6)
    spread = {name: sizes[name] for name in ("K", "R", "G", "KEYS")}
    dkeys = torch.empty_like(keys)
    given = (dq, dcentre.sum(1), dkeys, n, cut.span, *grid)
    launch(spread_kernel, (rows, cut.splits), *given, **spread, TOKENS=cut.tokens, num_warps=4)
    return dkeys, dw, dt.sum(-1), update
