"""The layer as one autograd function: forward in the reference's steps, backward in closed form.

It keeps z, projected and membership, plus (b, k)-sized statistics: 2 n d + n k elements a sample, where the printed
listing keeps 7 n d. With G = dL/dupdate, sign = -1 (+1 in the gated channel), r = 1 (listing) or 2 (equation):

    gradient forms   A_i = sum_n G pi s         c1_i = sign g^r a       dT_i = -sign g^(r+2) a^2 A
                     dg  = sign g^(r-1) sum_i A a (r - 2 (1 - a))
                     dS  = pi c1 G              dpi = sum_i c1 G s
    proximal         q = G s/(1+w)^2            B_i = sum_n pi q        dT_i = theta g^4 a^2 B
                     dg  = -2 theta g sum_i a^2 B                       dtheta = -sum g^2 a B
                     dS  = -G w/(1+w)           dpi = -theta g^2 sum_i a q
    the moment adds  dS += 2 pi s dT/mass       dpi += sum_i dT (s^2 - T)/mass      (uniform: 2 s dT/n, and nothing)
    TSSA's energy    e = sum_i s^2/E_i,  E_i = sum_n s^2:   dS += 2 s (de/E - sum_n(de s^2)/E^2)
    then             dscores = pullback(dpi) + pullback(dg)/n
    d subspace = dS^T z    d out = dout^T update (recomputed)    d assign_k = sum_n dscores_nk rot_n z_n
    dz = dS W_in + rot_n^T sum_k dscores_nk assign_k

No division by g, so it holds at g = 0. Sums over tokens are at least float32. When a second derivative is asked for,
the steps are taken again from z so that autograd sees them, and these same formulas are differentiated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from dmst import rotary
from dmst.kernels import reference
from dmst.kernels.form import GATE, MEMBERSHIP, Form, Weights
from dmst.kernels.reference import Steps, wide


def attend(z: Tensor, weights: Weights, form: Form, *, grid: tuple[int, int] | None = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d); the two large projections run in `dtype`."""
    return _Attend.apply(z, *weights, form, grid, dtype)[0]


class _Attend(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, *arguments: Any) -> tuple:  # type: ignore[override]
        *tensors, form, grid, dtype = arguments
        weights = Weights(*tensors)
        steps = reference.take_steps(z, reference.score(z, weights, form, grid), weights, form, dtype)
        out = reference.project_out(reference.update_of(steps, weights.theta, form), weights, dtype)
        return out, *steps

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        z, *tensors, ctx.form, ctx.grid, ctx.dtype = inputs
        out, *steps = output
        ctx.save_for_backward(z, *tensors, *steps)
        ctx.mark_non_differentiable(*(step for step in steps if step is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple:  # type: ignore[override]
        z, *rest = ctx.saved_tensors
        tensors, kept = rest[: len(Weights._fields)], rest[len(Weights._fields) :]
        weights, form = Weights(*tensors), ctx.form
        if dout is None:
            return (None,) * (len(tensors) + 4)
        with torch.autocast(dout.device.type, enabled=False):
            if torch.is_grad_enabled():  # a second derivative will follow: what was kept carries no graph
                scores = reference.score(z, weights, form, ctx.grid)
                steps = reference.take_steps(z, scores, weights, form, ctx.dtype)
            else:
                steps = Steps(*kept)
            wanted = Weights(*ctx.needs_input_grad[1 : 1 + len(tensors)])
            dz, grads = _pull_back(z, weights, form, ctx.grid, ctx.dtype, steps, dout, wanted, ctx.needs_input_grad[0])
        return dz, *grads, None, None, None


class _Core(NamedTuple):
    """Gradients of the core's inputs, at least float32."""

    projected: Tensor  # (b, k, n, p)
    membership: Tensor  # (b, k, n)
    gate: Tensor  # (b, k)
    theta: Tensor | None  # ()


def _pull_back(
    z: Tensor,
    weights: Weights,
    form: Form,
    grid: tuple[int, int] | None,
    dtype: torch.dtype,
    steps: Steps,
    dout: Tensor,
    wanted: Weights,
    wants_z: bool,
) -> tuple[Tensor | None, Weights]:
    grads: dict[str, Tensor] = {}

    # the output projection
    tokens_out = dout.to(dtype).flatten(0, 1)  # (b n, d)
    weight_out = (weights.subspace.mT if weights.out is None else weights.out).to(dtype)
    dupdate = wide(rearrange(dout.to(dtype) @ weight_out, "b n (k p) -> b k n p", k=form.heads))
    update = rearrange(reference.update_of(steps, weights.theta, form), "b k n p -> (b n) (k p)").to(dtype)
    if wanted.out:
        grads["out"] = tokens_out.mT @ update
    if wanted.out_bias:
        grads["out_bias"] = wide(tokens_out).sum(0)

    # the core, then what fed it
    core = (_proximal_core if form.update == "proximal" else _gradient_core)(steps, weights.theta, form, dupdate)
    dmembership = core.membership * steps.projected.shape[-2] if form.rescale else core.membership
    dprojected = core.projected
    if form.membership == "energy":
        dscores = MEMBERSHIP["softmax"].pullback(dmembership, None, steps.membership, form)
        denergy = wide(weights.temperature) * dscores  # type: ignore[arg-type]
        dprojected = dprojected + _energy_pullback(steps.projected, denergy, form)
        if wanted.temperature:
            energy = reference.token_energy(steps.projected, form)
            grads["temperature"] = (dscores * energy).sum((0, 2)).unsqueeze(-1)
    else:
        membership = steps.membership / steps.projected.shape[-2] if form.rescale else steps.membership
        dscores = MEMBERSHIP[form.membership].pullback(dmembership, None, membership, form)
    if form.gate is not None:
        activation = GATE[form.gate]
        value = activation.value(steps.pooled, form)
        dpooled = activation.pullback(form.gate_scale * core.gate, steps.pooled, value, form)
        dscores = dscores + (dpooled / max(z.shape[1], 1)).unsqueeze(-1)
    if wanted.theta and core.theta is not None:
        grads["theta"] = core.theta

    # the input projection
    dflat = rearrange(dprojected, "b k n p -> b n (k p)").to(dtype)
    if wanted.subspace:
        grads["subspace"] = dflat.flatten(0, 1).mT @ z.to(dtype).flatten(0, 1)
        if weights.out is None:
            grads["subspace"] = grads["subspace"] + update.mT @ tokens_out
    if wanted.subspace_bias:
        grads["subspace_bias"] = wide(dflat).sum((0, 1))
    dz = dflat @ weights.subspace.to(dtype) if wants_z else None

    # the scores
    if weights.assign is not None:
        if wanted.assign_bias:
            grads["assign_bias"] = dscores.sum((0, 2))
        from_scores, grads["assign"] = _score_pullback(z, weights.assign, form, grid, dscores.mT)
        dz = None if dz is None else dz + from_scores
    dz = None if dz is None else dz.to(z.dtype)
    return dz, Weights(*(_fit(grads.get(name), weight) for name, weight in zip(Weights._fields, weights, strict=True)))


def _fit(grad: Tensor | None, weight: Tensor | None) -> Tensor | None:
    return None if grad is None or weight is None else grad.to(weight.dtype).reshape(weight.shape)


def _gradient_core(steps: Steps, theta: Tensor | None, form: Form, dupdate: Tensor) -> _Core:
    """Listing and equation: update = sign g^r pi a s."""
    attenuation, gate = reference.attenuation_of(steps)
    values, membership = wide(steps.projected), steps.membership.unsqueeze(-1)
    r, sign = form.power, form.sign
    share = dupdate * values
    total = (membership * share).sum(-2)  # A
    slope = sign * gate**r * attenuation  # c1
    dmoment = -sign * gate ** (r + 2) * attenuation.square() * total
    dgate = (sign * gate ** (r - 1) * total * attenuation * (r - 2 * (1 - attenuation))).sum(-1)
    dvalues, dmembership = _moment_pullback(steps, form, values, dmoment)
    dvalues = dvalues + membership * dupdate * slope.unsqueeze(-2)
    dmembership = dmembership + (share * slope.unsqueeze(-2)).sum(-1)
    return _Core(dvalues, dmembership, dgate, None)


def _proximal_core(steps: Steps, theta: Tensor | None, form: Form, dupdate: Tensor) -> _Core:
    """update = -w/(1+w) s, w = theta g^2 pi a."""
    assert theta is not None
    theta = wide(theta)
    attenuation, gate = reference.attenuation_of(steps)
    values, membership = wide(steps.projected), steps.membership.unsqueeze(-1)
    strength = gate.square() * attenuation  # g^2 a
    w = membership * (theta * strength).unsqueeze(-2)
    q = dupdate * values / (1 + w).square()
    total = (membership * q).sum(-2)  # B
    dmoment = theta * gate**4 * attenuation.square() * total
    dgate = (-2 * theta * gate * attenuation.square() * total).sum(-1)
    dvalues, dmembership = _moment_pullback(steps, form, values, dmoment)
    dvalues = dvalues - dupdate * w / (1 + w)
    dmembership = dmembership - (q * (theta * strength).unsqueeze(-2)).sum(-1)
    return _Core(dvalues, dmembership, dgate, -(strength * total).sum())


def _moment_pullback(steps: Steps, form: Form, values: Tensor, dmoment: Tensor) -> tuple[Tensor, Tensor]:
    """From dT to its part of dS and dpi."""
    per_mass = dmoment / steps.mass.unsqueeze(-1)
    bent = values * per_mass.unsqueeze(-2)
    if form.uniform_moment:
        return 2 * bent, torch.zeros_like(steps.membership)
    dmembership = (bent * values).sum(-1) - (per_mass * steps.second_moment).sum(-1, keepdim=True)
    return 2 * steps.membership.unsqueeze(-1) * bent, dmembership


def _energy_pullback(projected: Tensor, denergy: Tensor, form: Form) -> Tensor:
    """From de_nk to dS through TSSA's token energy."""
    values = wide(projected)
    if not form.normalize_tokens:
        return 2 * values * denergy.unsqueeze(-1)
    square = values.square()
    channel = reference.channel_energy(square)
    spread = (denergy.unsqueeze(-1) * square).sum(-2, keepdim=True) / channel.square()
    return 2 * values * (denergy.unsqueeze(-1) / channel - spread)


def _score_pullback(
    z: Tensor, assign: Tensor, form: Form, grid: tuple[int, int] | None, dscores: Tensor
) -> tuple[Tensor, Tensor]:
    """From dscores (b, n, k) to rot_n^T sum_k dscores assign_k (b, n, d) and sum_n dscores rot_n z_n (k, d)."""
    z, assign = wide(z), wide(assign)
    b, n, d = z.shape
    positions = rotary.table(form.rotary, d, n, grid, device=z.device, dtype=z.dtype)
    if positions is None:
        return dscores @ assign, dscores.flatten(0, 1).mT @ z.flatten(0, 1)
    if form.heads >= 2 * b:  # the same choice as in `reference.score`
        flat = dscores.flatten(0, 1).mT
        by_cos, by_sin = (flat @ (z * side).flatten(0, 1) for side in positions)
        dz = dscores @ assign * positions.cos + dscores @ rotary.turn(assign) * positions.sin
    else:
        by_token = dscores.transpose(0, 1)  # (n, b, k)
        dz = torch.bmm(by_token, reference.turned_weights(assign, positions)).transpose(0, 1)
        gathered = torch.bmm(by_token.mT, z.transpose(0, 1))  # (n, k, d)
        by_cos, by_sin = ((gathered * side.unsqueeze(1)).sum(0) for side in positions)
    return dz, by_cos + rotary.turn_back(by_sin)
