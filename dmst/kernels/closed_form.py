"""The layer as one autograd function: forward in the reference's steps, backward in closed form.

It keeps z, projected and membership, plus statistics without a token axis: 2 n d + n k + d + 3 k elements a sample, where
the printed listing keeps 7 n d. With save="nothing" it keeps z alone, n d, and the backward pass takes the steps again.
With G = dL/dupdate, sign = -1 (+1 in the gated channel), r = 1 (listing) or 2 (equation):

    gradient forms   A_i = sum_n G pi s         c1_i = sign g^r a       dT_i = -sign g^(r+2) a^2 A
                     dg  = sign g^(r-1) sum_i A a (r - 2 (1 - a))
                     dS  = pi c1 G              dpi = sum_i c1 G s
    proximal         q = G s/(1+w)^2            B_i = sum_n pi q        dT_i = theta g^4 a^2 B
                     dg  = -2 theta g sum_i a^2 B                       dtheta = -sum g^2 a B
                     dS  = -G w/(1+w)           dpi = -theta g^2 sum_i a q
    the moment adds  dS += 2 pi s dT/mass       dpi += sum_i dT (s^2 - T)/mass      (uniform: 2 s dT/n, and nothing)
    TSSA's energy    e = sum_i s^2/E_i,  E_i = sum_n s^2:   dS += 2 s/E (de - sum_n de s^2/E)
                     de = temperature dlogits,  dtemperature = sum e dlogits
    then             dscores = pullback(dpi) + pullback(gate_scale dg)/n
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
from dmst.kernels.arithmetic import plus, product, times, wide
from dmst.kernels.autocast import without_autocast
from dmst.kernels.form import GATE, MEMBERSHIP, Form, Weights
from dmst.kernels.reference import Steps


def attend(z: Tensor, weights: Weights, form: Form, *, grid: tuple[int, int] | None = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d); the large projections run in `dtype`."""
    return _Attend.apply(z, *weights, form, grid, dtype)[0]


class _Attend(torch.autograd.Function):
    """`forward` returns the steps beside the output because `setup_context` can save only inputs and outputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, *arguments: Any) -> tuple:
        *tensors, form, grid, dtype = arguments
        weights = Weights(*tensors)
        steps = reference.take_steps(z, weights, form, grid, dtype)
        out = reference.project_out(reference.update_of(steps, weights.theta, form), weights, dtype)
        return out, *((None,) * len(steps) if form.save == "nothing" else steps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        z, *tensors, ctx.form, ctx.grid, ctx.dtype = inputs
        _, *kept = output
        ctx.save_for_backward(z, *tensors, *kept)
        ctx.mark_non_differentiable(*(x for x in kept if x is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple:
        count, form = len(ctx.needs_input_grad) - 4, ctx.form
        z, *rest = ctx.saved_tensors
        if dout is None:
            return (None,) * (count + 4)
        weights, wanted = Weights(*rest[:count]), Weights(*ctx.needs_input_grad[1 : 1 + count])
        with without_autocast(dout):
            # nothing was kept, or a second derivative will follow: what was kept carries no graph
            if form.save == "nothing" or torch.is_grad_enabled():
                steps = reference.take_steps(z, weights, form, ctx.grid, ctx.dtype)
            else:
                steps = Steps(*rest[count:])
            dz, grads = pull_back(z, weights, form, ctx.grid, ctx.dtype, steps, dout, wanted, ctx.needs_input_grad[0])
        return dz, *(_fit(grads.get(name), x) for name, x in weights._asdict().items()), None, None, None


class _Core(NamedTuple):
    """Gradients of the core's inputs, at least float32."""

    projected: Tensor  # (b, k, n, p)
    membership: Tensor  # (b, k, n)
    gate: Tensor  # (b, k)
    theta: Tensor | None  # ()


def pull_back(
    z: Tensor,
    weights: Weights,
    form: Form,
    grid: tuple[int, int] | None,
    dtype: torch.dtype,
    steps: Steps,
    dout: Tensor,
    wanted: Weights,
    wants_z: bool,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """dz, and the gradients of weights by name."""
    grads: dict[str, Tensor] = {}

    # the output projection: its own gradient first, so that the update is gone before dupdate needs room
    tokens_out = dout.to(dtype).flatten(0, 1)  # (b n, d)
    if wanted.out or (wanted.subspace and weights.out is None):
        update = rearrange(reference.update_of(steps, weights.theta, form), "b k n p -> (b n) (k p)").to(dtype)
        dout_weight = tokens_out.mT @ update
        del update
    if wanted.out:
        grads["out"] = dout_weight
    if wanted.out_bias:
        grads["out_bias"] = wide(tokens_out).sum(0)
    weight_out = (weights.subspace.mT if weights.out is None else weights.out).to(dtype)
    dupdate = wide(rearrange(dout.to(dtype) @ weight_out, "b n (k p) -> b k n p", k=form.num_heads))

    # the core, then what fed it
    core = (_proximal_core if form.mode == "proximal" else _gradient_core)(steps, weights.theta, form, dupdate)
    dmembership = core.membership * steps.projected.shape[-2] if form.token_sparse_rescale else core.membership
    dprojected = core.projected
    if form.membership == "energy":
        dscores = MEMBERSHIP["softmax"].pullback(dmembership, None, steps.membership, form)
        denergy = wide(weights.temperature) * dscores  # type: ignore[arg-type]
        dprojected = dprojected + _energy_pullback(steps.projected, denergy, form)
        if wanted.temperature:
            energy = reference.token_energy(steps.projected, form)
            grads["temperature"] = (dscores * energy).sum((0, 2)).unsqueeze(-1)
    else:
        membership = steps.membership / steps.projected.shape[-2] if form.token_sparse_rescale else steps.membership
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
            grads["subspace"] = grads["subspace"] + dout_weight.mT
    if wanted.subspace_bias:
        grads["subspace_bias"] = wide(dflat).sum((0, 1))
    dz = dflat @ weights.subspace.to(dtype) if wants_z else None

    # the scores
    if weights.assign is not None:
        if wanted.assign_bias:
            grads["assign_bias"] = dscores.sum((0, 2))
        dz, grads["assign"] = _score_pullback(z, weights.assign, form, grid, dscores.mT, dz)
    return None if dz is None else dz.to(z.dtype), grads


def _fit(grad: Tensor | None, weight: Tensor | None) -> Tensor | None:
    return None if grad is None or weight is None else grad.to(weight.dtype).reshape(weight.shape)


def _gradient_core(steps: Steps, theta: Tensor | None, form: Form, dupdate: Tensor) -> _Core:
    """Listing and equation: update = sign g^r pi a s."""
    attenuation, gate = reference.attenuation_of(steps)
    values, membership = wide(steps.projected), steps.membership.unsqueeze(-1)
    r, sign = form.power, form.sign
    share = times(dupdate * values, membership)
    total = share.sum(-2)  # A
    slope = sign * gate**r * attenuation  # c1
    dmoment = -sign * gate ** (r + 2) * attenuation.square() * total
    dgate = (sign * gate ** (r - 1) * total * attenuation * (r - 2 * (1 - attenuation))).sum(-1)
    pulled = times(dupdate, slope.unsqueeze(-2))
    dmembership = product(pulled, values, share).sum(-1)
    return _add_moment(steps, form, dmoment, _Core(times(pulled, membership), dmembership, dgate, None), share)


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
    dmembership = -times(q, (theta * strength).unsqueeze(-2)).sum(-1)
    dvalues = times(-w / (1 + w), dupdate)
    return _add_moment(steps, form, dmoment, _Core(dvalues, dmembership, dgate, -(strength * total).sum()), q)


def _add_moment(steps: Steps, form: Form, dmoment: Tensor, core: _Core, buffer: Tensor) -> _Core:
    """Add what dT asks of the projected tokens and of the membership."""
    values = wide(steps.projected)
    per_mass = dmoment / steps.divisor.unsqueeze(-1)
    bent = product(values, per_mass.unsqueeze(-2), buffer)
    if form.uniform_moment:
        return core._replace(projected=core.projected + 2 * bent)
    mean = (per_mass * steps.second_moment).sum(-1, keepdim=True)
    dvalues = plus(core.projected, bent, steps.membership.unsqueeze(-1), 2.0)
    dmembership = core.membership + times(bent, values).sum(-1) - mean
    return core._replace(projected=dvalues, membership=dmembership)


def _energy_pullback(projected: Tensor, denergy: Tensor, form: Form) -> Tensor:
    """From de_nk to dS through TSSA's token energy."""
    values = wide(projected)
    if not form.normalize_tokens:
        return 2 * values * denergy.unsqueeze(-1)
    square = values.square()
    channel = reference.channel_energy(square)
    mean = (denergy.unsqueeze(-1) * (square / channel)).sum(-2, keepdim=True)
    mean = torch.where(square.sum(-2, keepdim=True) >= channel, mean, 0)  # at the floor the divisor is a constant
    return 2 * values / channel * (denergy.unsqueeze(-1) - mean)  # the difference first: it is 0 for one token, exactly


def _score_pullback(
    z: Tensor, assign: Tensor, form: Form, grid: tuple[int, int] | None, dscores: Tensor, dz: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """From dscores (b, n, k): dz + rot_n^T sum_k dscores assign_k (b, n, d), and sum_n dscores rot_n z_n (k, d)."""
    z, assign = wide(z), wide(assign)
    dz = None if dz is None else wide(dz)
    flat = dscores.flatten(0, 1)
    positions = rotary.table(form.rotary, z.shape[-1], z.shape[-2], grid, device=z.device, dtype=z.dtype)
    if positions is None:
        dz = None if dz is None else dz + (flat @ assign).view_as(z)
        return dz, flat.mT @ z.flatten(0, 1)
    if dz is not None:
        dz = plus(dz, (flat @ assign).view_as(z), positions.cos)
        dz = plus(dz, (flat @ rotary.turn(assign)).view_as(z), positions.sin)
    by_cos, by_sin = reference.turned_products(z, positions, lambda tokens, w: w.mT @ tokens.flatten(0, 1), flat, flat)
    return dz, by_cos + rotary.turn_back(by_sin)
