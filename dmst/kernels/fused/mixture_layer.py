"""GMSA from the kernels of `mixture.py` and the library's products, as one autograd function in closed form.

    forward     keys and gate from rot(z) | s = z U | update | output = update W
    backward    G = dout W^T | ds, dkeys, the update again | dW, dU, dA, dgate | dz = ds U^T + rot^T(dkeys A + gate's)

It keeps z, s, the keys, the gate and its pooled scores. In eager calls a kernel that fails is reported once, and plain torch
takes its place in every layer of that form, shape and dtype: slower, never different.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import rotary
from dmst.kernels import mixture, mixture_closed_form, plan
from dmst.kernels.arithmetic import aligned, cast, wide
from dmst.kernels.attempt import attempt
from dmst.kernels.autocast import without_autocast
from dmst.kernels.fused import front
from dmst.kernels.fused.gate import gate_adjoint, open_gate
from dmst.kernels.fused.launch import Once
from dmst.kernels.fused.mixture import group_adjoint, group_update
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
    z = cast(z, dtype)  # under autocast: the compiler joins it with the norm that makes z
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (z, *weights)):
        return _Layer.apply(z, *weights, form, grid)
    return attempt(_forward, _plain_forward, (z, weights, form, grid), z, _kind(z, form))[0]


def _forward(z: Tensor, weights: MixtureWeights, form: MixtureForm, grid: Grid) -> tuple[Any, ...]:
    """The output, and what is kept beside z: s, keys and the pooled scores of the gate."""
    z, dtype = aligned(z), z.dtype
    tables, step = _tables(z, form, grid)
    key, key_bias, assign = aligned(weights.key.to(dtype)), cast(weights.key_bias, dtype), _flat(weights.gate)
    _, sums, keys = front.front(z, tables, step, assign, None, key, key_bias, False, assign is not None)
    gate = pooled = None
    if assign is not None:
        gate, pooled = open_gate(sums, z.shape[1], *_gate(form))
    projected = F.linear(z, weights.subspace.to(dtype))
    _, w, t = _strength(z, gate, weights.theta, form)
    update = group_update(projected, keys, _cell(z, form, grid), w, t, *_how(z, form, grid))
    return F.linear(update, _weight_out(weights).to(dtype), cast(weights.out_bias, dtype)), projected, keys, gate, pooled


def _tables(z: Tensor, form: MixtureForm, grid: Grid) -> tuple[list[Tensor], int]:
    """Of the rotation; none where nothing turns."""
    factors = rotary.factors(form.rotary, z.shape[-1], z.shape[1], grid, step=plan.STEP, device=z.device, dtype=torch.float32)
    return ([], 1) if factors is None else ([x.contiguous() for x in (*factors.far, *factors.near)], factors.step)


def _gate(form: MixtureForm) -> tuple[str, float, int]:
    return str(form.gate), form.gate_scale, 0


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else aligned(x)


def _strength(z: Tensor, gate: Tensor | None, theta: Tensor | None, form: MixtureForm) -> tuple[Tensor, Tensor, Tensor]:
    """The gate, w and t, (b, k)."""
    if gate is None:
        gate = torch.ones(z.shape[0], form.num_heads, dtype=torch.float32, device=z.device)
    w = gate.square()
    if form.mode == "proximal":
        assert theta is not None
        return gate, w, wide(theta).flatten() * w
    return gate, w, gate if form.mode == "listing" else w


def _how(z: Tensor, form: MixtureForm, grid: Grid) -> tuple[int, list[int], float, int]:
    down, across, patches = mixture.cells(z.shape[-2], grid, form.groups)
    mode = 2 if form.mode == "proximal" else int(not form.own)
    return form.num_heads, [form.groups, *patches, down, across], form.sharpness, mode


def _cell(z: Tensor, form: MixtureForm, grid: Grid) -> Tensor:
    return mixture.cell_of(z.shape[-2], grid, form.groups, device=z.device, dtype=torch.int32)


def _weight_out(weights: MixtureWeights) -> Tensor:
    return weights.subspace.mT if weights.out is None else weights.out


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, *arguments: Any) -> Tensor:
        *tensors, form, grid = arguments
        weights: Any = tensors
        given = (z, MixtureWeights(*weights), form, grid)
        out, *kept = attempt(_forward, _plain_forward, given, z, _kind(z, form))
        ctx.rest = form, grid
        ctx.save_for_backward(z, *tensors, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        z, *rest = ctx.saved_tensors
        tensors, kept = rest[:W], rest[W:]
        wanted = ctx.needs_input_grad[: 1 + W]
        with torch.no_grad(), without_autocast(dout):
            form = ctx.rest[0]
            given = (z, MixtureWeights(*tensors), *ctx.rest, dout, wanted, *kept)
            grads = attempt(_backward, _plain_backward, given, z, _kind(z, form))
        if torch.is_grad_enabled():
            grads = Once.apply(len(grads), *grads, dout, z, *tensors)
        return *grads, None, None


def _backward(
    z: Tensor, weights: MixtureWeights, form: MixtureForm, grid: Grid, dout: Tensor,
    asked: Sequence[bool], projected: Tensor, keys: Tensor, gate: Tensor | None, pooled: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dz, and the gradient of each weight that is wanted."""
    wants_z, wanted = asked[0], MixtureWeights(*asked[1:])  # type: ignore[arg-type]
    grads: dict[str, Tensor] = {}
    z, dout, dtype = aligned(z), aligned(dout.to(z.dtype)), z.dtype
    tokens_out = dout.flatten(0, 1)
    opened, w, t = _strength(z, gate, weights.theta, form)
    ds = dout @ _weight_out(weights).to(dtype)  # dupdate until `group_adjoint` writes over it
    wants_out = bool(wanted.out or (wanted.subspace and weights.out is None))
    heads, cells, sharpness, mode = _how(z, form, grid)
    dkeys, dw, dt, update = group_adjoint(
        projected, keys, _cell(z, form, grid), w, t, ds, heads, cells, sharpness, mode, wants_out
    )
    if wants_out:
        dweight = tokens_out.mT @ update.flatten(0, 1)
    del update
    if wanted.out:
        grads["out"] = dweight
    if wanted.out_bias:
        grads["out_bias"] = tokens_out.sum(0, dtype=torch.float32)
    if wanted.subspace:
        grads["subspace"] = ds.flatten(0, 1).mT @ z.flatten(0, 1)
        if weights.out is None:
            grads["subspace"] = grads["subspace"] + dweight.mT
    if wanted.key_bias:
        grads["key_bias"] = dkeys.sum((0, 1), dtype=torch.float32)

    # w = g^2; t = g, g^2 or theta g^2
    dgate = 2 * opened * dw
    if form.mode == "listing":
        dgate = dgate + dt
    elif form.mode == "equation":
        dgate = dgate + 2 * opened * dt
    else:
        assert weights.theta is not None
        theta = wide(weights.theta).flatten()
        dgate = dgate + 2 * theta * opened * dt
        dtheta = (w * dt).sum(0)
        grads["theta"] = dtheta if theta.numel() > 1 else dtheta.sum()
    dpooled = None if pooled is None else gate_adjoint(dgate.contiguous(), pooled, z.shape[1], *_gate(form))
    tables, step = _tables(z, form, grid)
    if wanted.key or wanted.gate:
        dassign, dkey = front.into_weights(z, None, dpooled, dkeys, tables, step)
        grads["gate"], grads["key"] = dassign.sum(0), dkey.sum(0)
    dz = None
    if wants_z:
        product, key = ds @ weights.subspace.to(dtype), aligned(weights.key.to(dtype))
        dz = front.into_tokens(product, None, dpooled, _flat(weights.gate), dkeys, key, tables, step)
    given_weights = zip(MixtureWeights._fields, weights, wanted, strict=True)
    return dz, *(
        grads[name].to(x.dtype).reshape(x.shape) if ask and x is not None and name in grads else None
        for name, x, ask in given_weights
    )


# --- plain torch in its place ----------------------------------------------------------------------------------------


def _kind(z: Tensor, form: MixtureForm) -> tuple:
    """What fails once fails for all of these."""
    return "GMSA", form, z.shape[1:], z.dtype, z.device


def _plain_forward(z: Tensor, weights: MixtureWeights, form: MixtureForm, grid: Grid) -> tuple[Any, ...]:
    return mixture.attend(z, weights, form, grid=grid, dtype=z.dtype), None, None, None, None


def _plain_backward(
    z: Tensor, weights: MixtureWeights, form: MixtureForm, grid: Grid, dout: Tensor,
    asked: Sequence[bool], *_: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """From z alone, by autograd."""
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_(ask) for x, ask in zip((z, *weights), asked, strict=True)]
        tensors: Any = leaves[1:]
        assert leaves[0] is not None
        out = mixture_closed_form.attend(leaves[0], MixtureWeights(*tensors), form, grid=grid, dtype=z.dtype)
        grads = iter(
            torch.autograd.grad(out, [x for x in leaves if x is not None and x.requires_grad], dout, allow_unused=True)
        )
    return tuple(next(grads) if x is not None and x.requires_grad else None for x in leaves)
