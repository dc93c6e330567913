"""GMSA as one autograd function: forward in the steps of `mixture.py`, backward in closed form.

It keeps z, projected, keys and statistics without a token axis, n (2 d + k r) elements a sample and some; memberships are
computed again from the keys. With G = dL/dupdate, r = 1 (listing) or 2 (equation), t = theta g^2:

    gradient forms   dbeta = g^r G            dalpha = -g^r G s           dS = -g^r G alpha
                     dg = r g^(r-1) sum G (beta - alpha s)
    without own      dbeta = g G              dalpha = 0                  dS = 0                   dg = sum G beta
    proximal         dbeta = t G/(1 + t alpha)                            dalpha = -dbeta (s + update)
                     dS = -G t alpha/(1 + t alpha)                        dt = sum dbeta (beta - alpha (s + update))/t,
                                                                          dg = 2 theta g dt,  dtheta = g^2 dt
    attenuation      da = sum_n pi dalpha + mu sum_n pi dbeta             dV = -g^2 a^2 da         dg -= 2 g sum V a^2 da
    mean             dmu = a sum_n pi dbeta                               V does not move with mu: it is least there
    with e = dV/m, f = dmu/m - 2 e mu:
                     dS += 2 s (pi e) + pi f                              const_g = sum_i e (mu^2 - V) - mu dmu/m
                     dpi = dalpha a + dbeta a mu + s^2 e + s f + const    (each a sum over the channels)
    softmax          dl = pi (dpi - sum_g pi dpi)                         dq = t dl c              dc = t dl^T q
    a further round  c = pi^T q/m:   dq += pi dc/m,                       dpi = (q dc - c dc)/m    into the round before
    the cells        dq += P^T dc

No division by g, so it holds at g = 0. When a second derivative is asked for, the steps are taken again from z so that autograd
sees them, and these same formulas are differentiated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from dmst import rotary
from dmst.kernels import mixture
from dmst.kernels.arithmetic import wide
from dmst.kernels.autocast import without_autocast
from dmst.kernels.form import GATE
from dmst.kernels.mixture import Grid, MixtureForm, MixtureSteps, MixtureWeights, by_head, divisor


def attend(z: Tensor, weights: MixtureWeights, form: MixtureForm, *, grid: Grid = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d); the large projections run in `dtype`."""
    return _Attend.apply(z, *weights, form, grid, dtype)[0]


class _Attend(torch.autograd.Function):
    """`forward` returns what is kept beside the output because `setup_context` can save only inputs and outputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, *arguments: Any) -> tuple:
        *tensors, form, grid, dtype = arguments
        weights = MixtureWeights(*tensors)
        steps = mixture.take_steps(z, weights, form, grid, dtype)
        out = mixture.project_out(mixture.update_of(steps, weights.theta, form), weights, dtype)
        return out, steps.projected, steps.keys, steps.mass, steps.mean, steps.spread, steps.pooled, steps.gate

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        z, *tensors, ctx.form, ctx.grid, ctx.dtype = inputs
        _, *kept = output
        ctx.save_for_backward(z, *tensors, *kept)
        ctx.mark_non_differentiable(*(x for x in kept if x is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple:
        z, *rest = ctx.saved_tensors
        fields = len(MixtureWeights._fields)
        weights, form = MixtureWeights(*rest[:fields]), ctx.form
        if dout is None:
            return (None,) * (fields + 4)
        with without_autocast(dout):
            if torch.is_grad_enabled():  # a second derivative will follow: what was kept carries no graph
                steps = mixture.take_steps(z, weights, form, ctx.grid, ctx.dtype)
            else:
                projected, keys, *statistics = rest[fields:]
                membership = mixture.memberships_of(keys, form, ctx.grid)[-1]
                steps = MixtureSteps(projected, keys, membership, *statistics)
            wanted = MixtureWeights(*ctx.needs_input_grad[1 : 1 + fields])
            dz, grads = pull_back(z, weights, form, ctx.grid, ctx.dtype, steps, dout, wanted, ctx.needs_input_grad[0])
        return dz, *grads, None, None, None


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
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """dz, and the gradient of each weight that is wanted."""
    grads: dict[str, Tensor] = {}
    tokens_out, tokens_in = dout.to(dtype).flatten(0, 1), z.to(dtype).flatten(0, 1)  # (b n, d)
    weight_out = (weights.subspace.mT if weights.out is None else weights.out).to(dtype)
    dupdate = wide(mixture.split(dout.to(dtype) @ weight_out, form))
    core, update = _core_pullback(steps, weights.theta, form, dupdate)
    dkeys = _key_pullback(steps, form, grid, core.membership)

    # the output projection
    dout_weight = tokens_out.mT @ rearrange(update, "b k n p -> (b n) (k p)").to(dtype)
    if wanted.out:
        grads["out"] = dout_weight
    if wanted.out_bias:
        grads["out_bias"] = wide(tokens_out).sum(0)
    if core.theta is not None:
        grads["theta"] = core.theta

    # the two projections of the tokens
    dflat, dkey_flat = (rearrange(x, "b k n p -> b n (k p)").to(dtype) for x in (core.projected, dkeys))
    if wanted.subspace:
        grads["subspace"] = dflat.flatten(0, 1).mT @ tokens_in
        if weights.out is None:
            grads["subspace"] = grads["subspace"] + dout_weight.mT
    turned = mixture.turn(z, form, grid)
    if wanted.key:
        grads["key"] = dkey_flat.flatten(0, 1).mT @ turned.to(dtype).flatten(0, 1)
    if wanted.key_bias:
        grads["key_bias"] = wide(dkey_flat).sum((0, 1))
    dturned = dkey_flat @ weights.key.to(dtype) if wants_z else None

    # the gate
    if core.gate is not None:
        assert weights.gate is not None and steps.pooled is not None
        activation = GATE[str(form.gate)]
        dpooled = activation.pullback(form.gate_scale * core.gate, steps.pooled, activation.value(steps.pooled, form), form)
        grads["gate"] = dpooled.mT @ mixture.token_mean(turned)
        if dturned is not None:
            dturned = dturned + (dpooled @ wide(weights.gate) / z.shape[-2]).unsqueeze(-2)
    dz = None if dturned is None else (dflat @ weights.subspace.to(dtype) + _turn_back(dturned, form, grid)).to(z.dtype)
    pairs = zip(MixtureWeights._fields, weights, strict=True)
    return dz, tuple(None if x is None or name not in grads else grads[name].to(x.dtype).reshape(x.shape) for name, x in pairs)


def _turn_back(dturned: Tensor, form: MixtureForm, grid: Grid) -> Tensor:
    """rot_n^T of gradients: a turn by minus the angle."""
    positions = rotary.table(
        form.rotary, dturned.shape[-1], dturned.shape[-2], grid, device=dturned.device, dtype=wide(dturned[:0]).dtype
    )
    return dturned if positions is None else rotary.rotate(wide(dturned), rotary.Table(positions.cos, -positions.sin))


def _core_pullback(steps: MixtureSteps, theta: Tensor | None, form: MixtureForm, dupdate: Tensor) -> tuple[_Core, Tensor]:
    """From dupdate to the core's inputs; and the update, which is on the way."""
    a, gate = mixture.attenuation_of(steps)
    alpha, beta = mixture.pulls_of(steps, a)
    s, pi, mean, spread = wide(steps.projected), steps.membership, steps.mean, steps.spread
    dtheta = None
    if form.mode == "proximal":
        assert theta is not None
        step = by_head(theta)
        strength = step * gate.square()  # t
        shrink = 1 / (1 + strength * alpha)
        pull = beta - alpha * s
        update = strength * shrink * pull
        slope = dupdate * shrink  # dbeta / t
        dstrength = (slope * (beta - alpha * (s + update))).sum((-2, -1))
        dgate = dstrength * 2 * (step * gate).squeeze(-1).squeeze(-1)
        dtheta = dstrength * gate.square().squeeze(-1).squeeze(-1)  # (b, k)
        dtheta = dtheta.sum() if theta.numel() == 1 else dtheta.sum(0)
        dbeta = strength * slope
        dalpha = -dbeta * (s + update)
        dprojected = -dbeta * alpha
    else:
        pull = beta - alpha * s if form.own else beta
        update = gate**form.power * pull
        dbeta = gate**form.power * dupdate
        dgate = form.power * gate.squeeze(-1).squeeze(-1) ** (form.power - 1) * (dupdate * pull).sum((-2, -1))
        dalpha = -dbeta * s if form.own else torch.zeros_like(dbeta)
        dprojected = -dbeta * alpha if form.own else torch.zeros_like(dbeta)

    both = torch.cat((dalpha, dbeta), -1)
    sum_alpha, sum_beta = (pi.transpose(-2, -1) @ both).chunk(2, -1)  # (b, k, g, p) each
    bent = a.square() * (sum_alpha + mean * sum_beta)  # a^2 da
    dgate = dgate - 2 * gate.squeeze(-1).squeeze(-1) * (spread * bent).sum((-2, -1))
    mass = divisor(steps.mass).unsqueeze(-1)
    # where rounding has clamped a spread at 0 the slope is still that of the true one
    e, dmean = -gate.square() * bent / mass, a * sum_beta / mass
    f = dmean - 2 * e * mean
    constant = (e * (mean.square() - spread) - mean * dmean).sum(-1)  # (b, k, g)
    by_square, by_value = (pi @ torch.cat((e, f), -1)).chunk(2, -1)
    dprojected = dprojected + 2 * s * by_square + by_value
    rows = torch.cat((both, s.square(), s), -1) @ torch.cat((a, a * mean, e, f), -1).transpose(-2, -1)
    return _Core(dprojected, rows + constant.unsqueeze(-2), None if steps.gate is None else dgate, dtheta), update


def _key_pullback(steps: MixtureSteps, form: MixtureForm, grid: Grid, dmembership: Tensor) -> Tensor:
    """From the memberships of the last round to the keys, round by round."""
    keys = wide(steps.keys)
    q, n = mixture.unit(keys, form), keys.shape[-2]
    cells = mixture.cell_means(n, grid, form.groups, device=q.device, dtype=q.dtype)
    rounds = [steps.membership] if form.rounds == 1 else mixture.memberships_of(steps.keys, form, grid)
    dq = torch.zeros_like(q)
    for i in reversed(range(form.rounds)):
        before = rounds[i - 1] if i else cells.transpose(-2, -1)  # what the centres of this round are means of
        mass = divisor(before.sum(-2)).unsqueeze(-1) if i else 1.0
        centre = before.transpose(-2, -1) @ q / mass
        pi = rounds[i]
        dlogits = form.sharpness * pi * (dmembership - (pi * dmembership).sum(-1, keepdim=True))
        dq = dq + dlogits @ mixture.unit(centre, form)
        dcentre = _unit_pullback(centre, dlogits.transpose(-2, -1) @ q, form) / mass
        dq = dq + before @ dcentre
        if i:
            dmembership = q @ dcentre.transpose(-2, -1) - (centre * dcentre).sum(-1).unsqueeze(-2)
    return _unit_pullback(keys, dq, form)


def _unit_pullback(keys: Tensor, grad: Tensor, form: MixtureForm) -> Tensor:
    """Through q/|q|: what is along q does not move it. The floor of the length is that of F.normalize."""
    if not form.normalize_keys:
        return grad
    length = keys.norm(dim=-1, keepdim=True)
    q = F.normalize(keys, dim=-1)
    along = torch.where(length > 1e-12, (grad * q).sum(-1, keepdim=True), 0)
    return (grad - along * q) / length.clamp(min=1e-12)
