"""A layer, from the kernels of this folder and the library's products: what all of the family share.

    forward     scores or keys of z, gate | s = z U | statistics, update | output = update W
    backward    G = dout W^T | statistics: dS over G, dscores or dkeys | dW | dU | dassign, dkey | dz = dS U^T + their part

`statistics_layer.py` (TSSA, DMSA and relatives) and `mixture_layer.py` (GMSA) have what is between the products: `steps` on the
way there, `pull` on the way back. This is one autograd function in closed form, in memory order (b, n, k, p). It keeps z and
what `steps` says; with save="nothing" z alone, and the backward pass takes the steps again. z comes in the dtype of the
products: under autocast the cast stands before, where the compiler joins it with the norm that makes z.

Under torch.compile the compiler sees everything in here. In eager calls a kernel that fails is reported once, and plain torch
takes its place in every layer of that form, width and dtype: slower, never different.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst.kernels.attempt import attempt
from dmst.kernels.casting import aligned, cast, without_autocast
from dmst.kernels.choice import AnyForm, AnyWeights, reference_of
from dmst.kernels.form import Form, Weights
from dmst.kernels.fused import front, mixture_layer, statistics_layer
from dmst.kernels.fused.launch import Once, total
from dmst.kernels.mixture import Grid, MixtureForm, MixtureWeights

Grads = dict[str, Tensor]
WAYS: dict[type, ModuleType] = {Form: statistics_layer, MixtureForm: mixture_layer}


def attend(z: Tensor, weights: AnyWeights, form: AnyForm, *, grid: Grid = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d); the two large projections run in `dtype`."""
    z, subspace, out = (cast(x, dtype) for x in (z, weights.subspace, weights.out))  # here once for both passes
    weights = weights._replace(subspace=subspace, out=out)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (z, *weights)):
        return _Layer.apply(z, *weights, form, grid)
    return _attempt(_forward, _plain_forward, z, weights, form, grid)[0]


def _attempt(fused: Any, plain: Any, z: Tensor, weights: AnyWeights, form: AnyForm, grid: Grid, *rest: Any) -> Any:
    """What fails once fails for all of this kind."""
    name = "GMSA" if isinstance(form, MixtureForm) else "the layer"
    return attempt(fused, plain, (z, weights, form, grid, *rest), z, (name, form, z.shape[-1], z.dtype, z.device))


def weights_of(tensors: Sequence[Any], form: AnyForm) -> Any:
    return MixtureWeights(*tensors) if isinstance(form, MixtureForm) else Weights(*tensors)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, *arguments: Any) -> Tensor:
        *tensors, form, grid = arguments
        out, *kept = _attempt(_forward, _plain_forward, z, weights_of(tensors, form), form, grid)
        ctx.rest = form, grid
        ctx.save_for_backward(z, *tensors, *(() if form.save == "nothing" else kept))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        z, *rest = ctx.saved_tensors
        (form, grid), count = ctx.rest, len(ctx.needs_input_grad) - 3
        weights, kept = weights_of(rest[:count], form), rest[count:]
        wants_z, *asked = ctx.needs_input_grad[: 1 + count]
        wanted = weights_of(asked, form)
        with torch.no_grad(), without_autocast(dout):
            dz, found = _attempt(_backward, _plain_backward, z, weights, form, grid, dout, wants_z, wanted, kept)
            pairs = weights._asdict().items()
            grads = (dz, *(_like(found.get(name), x) if ask else None for (name, x), ask in zip(pairs, wanted, strict=True)))
        if torch.is_grad_enabled():
            grads = Once.apply(len(grads), *grads, dout, z, *weights)
        return *grads, None, None


def _like(grad: Tensor | None, weight: Tensor | None) -> Tensor | None:
    if grad is None or weight is None:
        return None
    grad = cast(grad, weight.dtype)
    return grad if grad.shape == weight.shape else grad.reshape(weight.shape)


def _forward(z: Tensor, weights: AnyWeights, form: AnyForm, grid: Grid) -> tuple[Any, ...]:
    """The output and what there is to keep."""
    update, kept = WAYS[type(form)].steps(aligned(z), weights, form, grid)
    last = weights.subspace.mT if weights.out is None else weights.out
    return F.linear(update, last, cast(weights.out_bias, z.dtype)), *kept


def _backward(
    z: Tensor, weights: AnyWeights, form: AnyForm, grid: Grid, dout: Tensor, wants_z: bool, wanted: Any, kept: Sequence[Any]
) -> tuple[Tensor | None, Grads]:
    """dz, and gradients by the names of the weights."""
    z, dout, dtype, way = aligned(z), aligned(cast(dout, z.dtype)), z.dtype, WAYS[type(form)]
    if not kept:
        kept = way.steps(z, weights, form, grid)[1]  # the update, as large as z, is let go
    tokens_in, tokens_out = z.flatten(0, 1), dout.flatten(0, 1)
    flow = tokens_out @ (weights.subspace.mT if weights.out is None else weights.out)  # G, then dS in its place
    wants_out = bool(wanted.out or (wanted.subspace and weights.out is None))
    update, dscores, dpooled, dkeys, grads = way.pull(flow, z, weights, form, grid, kept, wanted, wants_out)
    if wanted.out_bias:
        grads["out_bias"] = total(tokens_out)
    if wants_out:
        grads["out"] = tokens_out.mT @ update.flatten(0, 1)
    del update
    if wanted.subspace:
        dsubspace = flow.mT @ tokens_in
        grads["subspace"] = dsubspace + grads["out"].mT if weights.out is None else dsubspace
    product = (flow @ weights.subspace).view_as(z) if wants_z else None
    del flow
    name, key_weight = ("gate", weights.key) if isinstance(weights, MixtureWeights) else ("assign", None)
    scored, key = getattr(weights, name), cast(key_weight, dtype)
    if scored is None and key is None:
        return product, grads
    turn = front.tables(form.rotary, z, grid)
    if getattr(wanted, name) or getattr(wanted, "key", False):
        dscored, dkey = front.into_weights(z, dscores, dpooled, dkeys, *turn)
        grads |= {x: parts.sum(0) for x, parts in ((name, dscored), ("key", dkey)) if getattr(wanted, x, False)}
    if product is not None:
        scored, key = (None if x is None else aligned(x) for x in (scored, key))
        product = front.into_tokens(product, dscores, dpooled, scored, dkeys, key, *turn)
    return product, grads


# --- plain torch in their place --------------------------------------------------------------------------------------


def _plain_forward(z: Tensor, weights: AnyWeights, form: AnyForm, grid: Grid) -> tuple[Tensor]:
    """The backward pass of it keeps nothing: it begins with z."""
    return (reference_of(form)(z, weights, form, grid=grid, dtype=z.dtype),)


def _plain_backward(
    z: Tensor, weights: AnyWeights, form: AnyForm, grid: Grid, dout: Tensor, wants_z: bool, wanted: Any, _: Any
) -> tuple[Tensor | None, Grads]:
    asked = {"z": wants_z, **wanted._asdict()}
    given = {"z": z, **weights._asdict()}
    leaves = {name: x.detach().requires_grad_(asked[name]) for name, x in given.items() if x is not None}
    mine = weights_of([leaves.get(name) for name in weights._fields], form)
    with torch.enable_grad():
        out = reference_of(form)(leaves["z"], mine, form, grid=grid, dtype=z.dtype)
        found = torch.autograd.grad(out, [x for x in leaves.values() if x.requires_grad], dout.to(z.dtype), allow_unused=True)
    grads = dict(zip((name for name, x in leaves.items() if x.requires_grad), found, strict=True))
    return grads.pop("z", None), {name: x for name, x in grads.items() if x is not None}
