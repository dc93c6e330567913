"""The way back of GMSA in closed form; `closed_form.py` makes an autograd function of it and of the steps in `mixture.py`.

That keeps z, projected, keys and statistics without a token axis, n (2 d + k r) elements a sample and some; memberships are
computed again from the keys. With G = dL/dupdate, w = t a the weights and t the strengths of `mixture.py`:

    gradient forms   dbeta = G                dalpha = -G s               dS = -G alpha            (without own: 0, 0)
    proximal         dbeta = G/(1 + alpha)    dalpha = -dbeta (s + update)                         dS = -dbeta alpha
    weights          dw = sum_n pi dalpha + mu sum_n pi dbeta             da = t dw                dt = sum a dw
                     listing dg = dt, equation dg = 2 g dt, proximal dg = 2 theta g dt, dtheta = g^2 dt
    attenuation      dV = -g^2 a^2 da                                     dg -= 2 g sum V a^2 da
    mean             dmu = w sum_n pi dbeta                               V does not move with mu: it is least there
    with e = dV/m, f = dmu/m - 2 e mu:
                     dS += 2 s (pi e) + pi f                              const_g = sum_i e (mu^2 - V) - mu dmu/m
                     dpi = dalpha w + dbeta w mu + s^2 e + s f + const    (each a sum over the channels)
    softmax          dl = pi (dpi - sum_g pi dpi)                         dq = t dl c              dc = t dl^T q
    a further round  c = pi^T q/m:   dq += pi dc/m,                       dpi = (q dc - c dc)/m    into the round before
    the cells        dq += P^T dc

No division by g, so it holds at g = 0. When a second derivative is asked for, the steps are taken again from z so that autograd
sees them, and these same formulas are differentiated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import rotary
from dmst.kernels import mixture
from dmst.kernels.arithmetic import add, matmul, over, plus, plus_matmul, product, reshaped, times, wide
from dmst.kernels.form import GATE
from dmst.kernels.mixture import Grid, MixtureForm, MixtureSteps, MixtureWeights, divisor


class _Core(NamedTuple):
    """Gradients of the core's inputs, at least float32."""

    projected: Tensor  # (b, k, n, p)
    membership: Tensor  # (b, k, n, g)
    gate: Tensor | None  # (b, k)
    theta: Tensor | None  # that of the weights


def pull_back(
    z: Tensor,
    weights: MixtureWeights,
    form: MixtureForm,
    grid: Grid,
    dtype: torch.dtype,
    steps: MixtureSteps,
    dout: Tensor,
    wanted: MixtureWeights,
    wants_z: bool,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """dz, and the gradients of weights by name."""
    grads: dict[str, Tensor] = {}
    rounds = mixture.memberships_of(steps.keys, form, grid)
    steps = steps._replace(membership=rounds[-1])
    tokens_out, tokens_in = dout.to(dtype).flatten(0, 1), z.to(dtype).flatten(0, 1)  # (b n, d)

    # the output projection: its own gradient first, so that buffers are free when the core needs some
    weight_out = (weights.subspace.mT if weights.out is None else weights.out).to(dtype)
    dflat = dout.to(dtype) @ weight_out
    dupdate = wide(mixture.split(dflat, form))
    alpha, update = mixture.pulls_of(steps, weights.theta, form)
    if wanted.out or (wanted.subspace and weights.out is None):
        dout_weight = tokens_out.mT @ mixture.join(update, dtype, dflat).flatten(0, 1)
    if wanted.out:
        grads["out"] = dout_weight
    if wanted.out_bias:
        grads["out_bias"] = wide(tokens_out).sum(0)

    # the core, then the two projections of the tokens
    core = _core_pullback(steps, weights.theta, form, alpha, update, dupdate)
    if core.theta is not None:
        grads["theta"] = core.theta
    dkeys = _key_pullback(wide(steps.keys), rounds, form, grid, core.membership)
    dflat, dkey_flat = mixture.join(core.projected, dtype, dflat), mixture.join(dkeys, dtype)
    if wanted.subspace:
        grads["subspace"] = dflat.flatten(0, 1).mT @ tokens_in
        if weights.out is None:
            grads["subspace"] = grads["subspace"] + dout_weight.mT
    turned = mixture.turn(z, form, grid)
    if wanted.key:
        grads["key"] = dkey_flat.flatten(0, 1).mT @ turned.to(dtype).flatten(0, 1)
    if wanted.key_bias:
        grads["key_bias"] = wide(dkey_flat).sum((0, 1))
    dturned = wide(matmul(dkey_flat, weights.key.to(dtype), reshaped(alpha, z.shape))) if wants_z else None

    # the gate
    if core.gate is not None:
        assert weights.gate is not None and steps.pooled is not None
        activation = GATE[str(form.gate)]
        dpooled = activation.pullback(form.gate_scale * core.gate, steps.pooled, activation.value(steps.pooled, form), form)
        grads["gate"] = dpooled.mT @ mixture.token_mean(turned)
        if dturned is not None:
            dturned = add(dturned, (dpooled @ wide(weights.gate) / z.shape[-2]).unsqueeze(-2))
    dz = None
    if dturned is not None:
        dprojected = matmul(dflat, weights.subspace.to(dtype), reshaped(dupdate, z.shape))
        dz = add(turn_back(dturned, form, grid), dprojected).to(z.dtype)
    return dz, grads


def turn_back(dturned: Tensor, form: MixtureForm, grid: Grid) -> Tensor:
    """rot_n^T of gradients: a turn by minus the angle."""
    positions = rotary.table(
        form.rotary, dturned.shape[-1], dturned.shape[-2], grid, device=dturned.device, dtype=wide(dturned[:0]).dtype
    )
    return dturned if positions is None else rotary.rotate(wide(dturned), rotary.Table(positions.cos, -positions.sin))


def _core_pullback(
    steps: MixtureSteps, theta: Tensor | None, form: MixtureForm, alpha: Tensor, update: Tensor, dupdate: Tensor
) -> _Core:
    """From dupdate to the core's inputs. The last two are written over; the gradient of the coordinates is in `update`."""
    a, gate = mixture.attenuation_of(steps)
    strength = mixture.strength_of(gate, theta, form)  # t
    s, pi, mean, spread = wide(steps.projected), steps.membership, steps.mean, steps.spread
    to_groups, weight = pi.transpose(-2, -1), strength * a

    dbeta = over(dupdate, 1 + alpha) if form.mode == "proximal" else dupdate
    sum_beta = to_groups @ dbeta  # (b, k, g, p)
    dweight, dmembership = mean * sum_beta, dbeta @ (weight * mean).transpose(-2, -1)
    if form.own:
        minus = times(add(update, s), dbeta) if form.mode == "proximal" else product(s, dbeta, update)  # -dalpha
        dweight = dweight - to_groups @ minus
        dmembership = plus_matmul(dmembership, minus, -weight.transpose(-2, -1))

    dstrength, dtheta = (a * dweight).sum((-2, -1), keepdim=True), None
    dgate = dstrength if form.mode == "listing" else 2 * gate * dstrength
    if form.mode == "proximal":
        assert theta is not None
        dtheta = (gate.square() * dstrength).sum(0)
        dgate, dtheta = mixture.by_head(theta) * dgate, dtheta if theta.numel() > 1 else dtheta.sum()
    bent = strength * a.square() * dweight  # a^2 da
    dgate = dgate - 2 * gate * (spread * bent).sum((-2, -1), keepdim=True)

    mass = divisor(steps.mass).unsqueeze(-1)
    # where rounding has clamped a spread at 0 the slope is still that of the true one
    e, dmean = -gate.square() * bent / mass, weight * sum_beta / mass
    f = dmean - 2 * e * mean
    constant = (e * (mean.square() - spread) - mean * dmean).sum(-1)  # (b, k, g)
    square = product(s, s, update)
    dmembership = plus_matmul(dmembership, square, e.transpose(-2, -1))
    dmembership = plus_matmul(dmembership, s, f.transpose(-2, -1))
    dmembership = add(dmembership, constant.unsqueeze(-2))
    dprojected = plus_matmul(times(matmul(pi, 2 * e, square), s), pi, f)
    if form.own:
        dprojected = plus(dprojected, alpha, dbeta, -1.0)
    return _Core(dprojected, dmembership, None if steps.gate is None else dgate.squeeze(-1).squeeze(-1), dtheta)


def _key_pullback(keys: Tensor, rounds: list[Tensor], form: MixtureForm, grid: Grid, dmembership: Tensor) -> Tensor:
    """From the memberships of the last round to the keys, round by round."""
    q = mixture.unit(keys, form)
    cells = mixture.cell_means(q.shape[-2], grid, form.groups, device=q.device, dtype=q.dtype)
    dq = None
    for i in reversed(range(form.rounds)):
        before = rounds[i - 1] if i else cells.transpose(-2, -1)  # what the centres of this round are means of
        mass = divisor(before.sum(-2)).unsqueeze(-1) if i else 1.0
        centre = before.transpose(-2, -1) @ q / mass
        share = rounds[i] * dmembership
        dlogits = plus(share, rounds[i], share.sum(-1, keepdim=True), -1.0)
        into_q = dlogits @ (form.sharpness * mixture.unit(centre, form))
        dcentre = _unit_pullback(centre, form.sharpness * (dlogits.transpose(-2, -1) @ q), form) / mass
        into_q = add(into_q, before @ dcentre)
        dq = into_q if dq is None else add(dq, into_q)
        if i:
            dmembership = q @ dcentre.transpose(-2, -1) - (centre * dcentre).sum(-1).unsqueeze(-2)
    assert dq is not None
    return _unit_pullback(keys, dq, form)


def _unit_pullback(keys: Tensor, grad: Tensor, form: MixtureForm) -> Tensor:
    """Through q/|q|: what is along q does not move it. The floor of the length is that of F.normalize."""
    if not form.normalize_keys:
        return grad
    length = keys.norm(dim=-1, keepdim=True)
    q = F.normalize(keys, dim=-1)
    along = torch.where(length > 1e-12, (grad * q).sum(-1, keepdim=True), 0)
    return (grad - along * q) / length.clamp(min=1e-12)
