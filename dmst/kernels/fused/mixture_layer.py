"""GMSA from the kernels of `mixture.py` and the library's products, as one autograd function in closed form.

    forward     keys = A rot(z), gate from the mean of rot(z) | s = z U | update | output = update W
    backward    G = dout W^T | ds, dkeys, the update again | dW, dU, dA, dgate | dz = ds U^T + rot^T(dkeys A^T + gate's)

It keeps z, s, the keys and the pooled scores of the gate. In eager calls a kernel that fails is reported once, and plain torch
takes its place in every layer of that form, shape and dtype: slower, never different.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import rotary, tracing
from dmst.kernels import mixture, mixture_closed_form, plan
from dmst.kernels.arithmetic import aligned, cast, wide
from dmst.kernels.attempt import attempt
from dmst.kernels.autocast import without_autocast
from dmst.kernels.form import GATE
from dmst.kernels.fused.launch import Once
from dmst.kernels.fused.mixture import group_adjoint, group_update
from dmst.kernels.fused.turn import turn_tokens, turn_tokens_back
from dmst.kernels.mixture import Grid, MixtureForm, MixtureWeights

W = len(MixtureWeights._fields)


def serves(dim: int, form: MixtureForm) -> str:
    """Why it cannot compute this layer; nothing where it can."""
    p = dim // form.num_heads
    means = max(16, plan.power_of_two(p)) * max(16, plan.power_of_two(form.groups))
    sizes = {"channels a head": (p, plan.WIDEST), "groups times channels": (means, plan.MOST_MEANS)}
    sizes |= {"key_dim": (form.key_dim, plan.MOST_KEYS), "rounds": (form.rounds, 1)}
    over = [f"up to {most} {name}, not {size}" for name, (size, most) in sizes.items() if size > most]
    over += ["keys that are not normalised"] if form.normalize_keys else []
    return f"the fused GMSA takes {', '.join(over)}" if over else ""


def attend(z: Tensor, weights: MixtureWeights, form: MixtureForm, *, grid: Grid = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d); the large projections run in `dtype`."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (z, *weights)):
        return _Layer.apply(z, *weights, form, grid, dtype)
    return attempt(_forward, _plain_forward, (z, weights, form, grid, dtype), z, _kind(z, form, dtype))[0]


def _forward(z: Tensor, weights: MixtureWeights, form: MixtureForm, grid: Grid, dtype: torch.dtype) -> tuple[Any, ...]:
    """The output, and what is kept beside z: s, keys and the pooled scores of the gate."""
    low, turned, mean = _turned(z, form, grid, dtype)
    keys = F.linear(turned, weights.key.to(dtype), cast(weights.key_bias, dtype))
    pooled = None
    if weights.gate is not None:  # too small for a product of matrices
        pooled = (mean.unsqueeze(-2) * wide(weights.gate)).sum(-1)
    projected = F.linear(low, weights.subspace.to(dtype))
    _, w, t = _strength(z, pooled, weights.theta, form)
    update = group_update(projected, keys, w, t, *_how(z, form, grid))
    out = F.linear(update, _weight_out(weights).to(dtype))
    out = out if weights.out_bias is None else out + weights.out_bias.to(dtype)
    return out, projected, keys, pooled


def _tables(z: Tensor, form: MixtureForm, grid: Grid) -> rotary.Factors | None:
    """Of the rotation; None where nothing turns, and where the compiler makes one pass of norm, rotation and casts itself."""
    if tracing.traced():
        return None
    return rotary.factors(form.rotary, z.shape[-1], z.shape[1], grid, step=plan.STEP, device=z.device, dtype=torch.float32)


def _turned(z: Tensor, form: MixtureForm, grid: Grid, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """z and rot(z) in `dtype`, and the mean of rot(z) over the tokens, (b, d)."""
    factors = _tables(z, form, grid)
    if factors is None:
        turned = mixture.turn(z, form, grid)
        return z.to(dtype), turned.to(dtype), mixture.token_mean(turned)
    low, turned, sums = turn_tokens(aligned(z), [*factors.far, *factors.near], factors.step, dtype)
    return z if z.dtype == dtype else low, turned, sums.sum(1) / z.shape[1]


def _strength(z: Tensor, pooled: Tensor | None, theta: Tensor | None, form: MixtureForm) -> tuple[Tensor, Tensor, Tensor]:
    """The gate, w and t, (b, k)."""
    if pooled is None:
        gate = torch.ones(z.shape[0], form.num_heads, dtype=torch.float32, device=z.device)
    else:
        gate = form.gate_scale * GATE[str(form.gate)].value(pooled, form)
    w = gate.square()
    if form.mode == "proximal":
        assert theta is not None
        return gate, w, wide(theta).flatten() * w
    return gate, w, gate if form.mode == "listing" else w


def _how(z: Tensor, form: MixtureForm, grid: Grid) -> tuple[int, list[int], float, int]:
    down, across, patches = mixture.cells(z.shape[-2], grid, form.groups)
    mode = 2 if form.mode == "proximal" else int(not form.own)
    return form.num_heads, [form.groups, *patches, down, across], form.sharpness, mode


def _weight_out(weights: MixtureWeights) -> Tensor:
    return weights.subspace.mT if weights.out is None else weights.out


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, *arguments: Any) -> Tensor:
        *tensors, form, grid, dtype = arguments
        weights: Any = tensors
        given = (z, MixtureWeights(*weights), form, grid, dtype)
        out, *kept = attempt(_forward, _plain_forward, given, z, _kind(z, form, dtype))
        ctx.rest = form, grid, dtype
        ctx.save_for_backward(z, *tensors, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        z, *rest = ctx.saved_tensors
        tensors, kept = rest[:W], rest[W:]
        wanted = ctx.needs_input_grad[: 1 + W]
        with torch.no_grad(), without_autocast(dout):
            form, _, dtype = ctx.rest
            given = (z, MixtureWeights(*tensors), *ctx.rest, dout, wanted, *kept)
            grads = attempt(_backward, _plain_backward, given, z, _kind(z, form, dtype))
        if torch.is_grad_enabled():
            grads = Once.apply(len(grads), *grads, dout, z, *tensors)
        return *grads, None, None, None


def _backward(
    z: Tensor, weights: MixtureWeights, form: MixtureForm, grid: Grid, dtype: torch.dtype, dout: Tensor,
    asked: Sequence[bool], projected: Tensor, keys: Tensor, pooled: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dz, and the gradient of each weight that is wanted."""
    wants_z, wanted = asked[0], MixtureWeights(*asked[1:])  # type: ignore[arg-type]
    grads: dict[str, Tensor] = {}
    dout = dout.to(dtype)
    tokens_out = dout.flatten(0, 1)
    gate, w, t = _strength(z, pooled, weights.theta, form)
    ds = dout @ _weight_out(weights).to(dtype)  # dupdate until `group_adjoint` writes over it
    wants_out = bool(wanted.out or (wanted.subspace and weights.out is None))
    heads, cells, sharpness, mode = _how(z, form, grid)
    dkeys, dw, dt, update = group_adjoint(projected, keys, w, t, ds, heads, cells, sharpness, mode, wants_out)
    if wants_out:
        dweight = tokens_out.mT @ update.flatten(0, 1)
    del update
    if wanted.out:
        grads["out"] = dweight
    if wanted.out_bias:
        grads["out_bias"] = tokens_out.sum(0, dtype=torch.float32)
    low, turned, mean = _turned(z, form, grid, dtype)
    if wanted.subspace:
        grads["subspace"] = ds.flatten(0, 1).mT @ low.flatten(0, 1)
        if weights.out is None:
            grads["subspace"] = grads["subspace"] + dweight.mT
    if wanted.key:
        grads["key"] = dkeys.flatten(0, 1).mT @ turned.flatten(0, 1)
    if wanted.key_bias:
        grads["key_bias"] = dkeys.sum((0, 1), dtype=torch.float32)

    # w = g^2; t = g, g^2 or theta g^2
    dgate = 2 * gate * dw
    if form.mode == "listing":
        dgate = dgate + dt
    elif form.mode == "equation":
        dgate = dgate + 2 * gate * dt
    else:
        assert weights.theta is not None
        theta = wide(weights.theta).flatten()
        dgate = dgate + 2 * theta * gate * dt
        dtheta = (w * dt).sum(0)
        grads["theta"] = dtheta if theta.numel() > 1 else dtheta.sum()
    dpooled = None
    if pooled is not None:
        activation = GATE[str(form.gate)]
        dpooled = activation.pullback(form.gate_scale * dgate, pooled, activation.value(pooled, form), form)
        grads["gate"] = (dpooled.unsqueeze(-1) * mean.unsqueeze(-2)).sum(0)
    dz = None
    if wants_z:
        del low, turned
        dturned, product, share = dkeys @ weights.key.to(dtype), ds @ weights.subspace.to(dtype), None
        if dpooled is not None:
            assert weights.gate is not None
            share = (dpooled.unsqueeze(-1) * wide(weights.gate)).sum(-2) / z.shape[1]
        factors = _tables(z, form, grid)
        if factors is None:
            dturned = wide(dturned) if share is None else wide(dturned) + share.unsqueeze(1)
            dz = (mixture_closed_form.turn_back(dturned, form, grid) + product).to(z.dtype)
        else:
            dz = turn_tokens_back(dturned, share, product, [*factors.far, *factors.near], factors.step, z.dtype)
    given_weights = zip(MixtureWeights._fields, weights, wanted, strict=True)
    return dz, *(
        grads[name].to(x.dtype).reshape(x.shape) if ask and x is not None and name in grads else None
        for name, x, ask in given_weights
    )


# --- plain torch in its place ----------------------------------------------------------------------------------------


def _kind(z: Tensor, form: MixtureForm, dtype: torch.dtype) -> tuple:
    """What fails once fails for all of these."""
    return "GMSA", form, z.shape[1:], dtype, z.device


def _plain_forward(z: Tensor, weights: MixtureWeights, form: MixtureForm, grid: Grid, dtype: torch.dtype) -> tuple[Any, ...]:
    return mixture.attend(z, weights, form, grid=grid, dtype=dtype), None, None, None


def _plain_backward(
    z: Tensor, weights: MixtureWeights, form: MixtureForm, grid: Grid, dtype: torch.dtype, dout: Tensor,
    asked: Sequence[bool], *_: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """From z alone, by autograd."""
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_(ask) for x, ask in zip((z, *weights), asked, strict=True)]
        tensors: Any = leaves[1:]
        assert leaves[0] is not None
        out = mixture_closed_form.attend(leaves[0], MixtureWeights(*tensors), form, grid=grid, dtype=dtype)
        grads = iter(
            torch.autograd.grad(out, [x for x in leaves if x is not None and x.requires_grad], dout, allow_unused=True)
        )
    return tuple(next(grads) if x is not None and x.requires_grad else None for x in leaves)
