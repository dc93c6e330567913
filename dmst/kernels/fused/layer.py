"""The layer, and a block's residual step around it, from the kernels of this folder and the library's products.

    forward     y = norm(z) and its scores, or the scores of z | s = y U | moments, update | output = update W, added to z
    backward    G = dout W^T | adjoint: dS, dscores | dW | dU | dassign | dz = dS U^T + the scores' part, through the norm

One autograd function, in closed form (`closed_form.py`), in memory order (b, n, k, p). It keeps z, s, membership and statistics
without a token axis; with a norm also y, mean and rstd; with save="nothing" z alone, and the backward pass begins with the
forward pass. Under torch.compile the compiler sees everything in here. In eager calls a kernel that fails is reported once, and
plain torch takes its place in every layer of that form, width and dtype: slower, never different.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import rotary
from dmst.kernels import closed_form, plan, reference
from dmst.kernels.arithmetic import aligned, cast, wide
from dmst.kernels.attempt import attempt
from dmst.kernels.autocast import without_autocast
from dmst.kernels.form import MEMBERSHIP, Form, Weights
from dmst.kernels.fused import adjoint, energy, gate, moments, norm, score, score_adjoint
from dmst.kernels.fused.launch import Once

F32 = torch.float32


class Around(NamedTuple):
    """What stands around the layer in a residual step; nothing around the layer alone."""

    gamma: Tensor | None = None  # (d)
    beta: Tensor | None = None  # (d)
    keep: Tensor | None = None  # (b, 1, 1): 0 where stochastic depth leaves a sample's update out


class Kept(NamedTuple):
    """For the backward pass; None where a layer has none."""

    projected: Tensor | None = None  # (b, n, k p)
    membership: Tensor | None = None  # (b, n, k)
    pooled: Tensor | None = None  # (b, k)
    gate: Tensor | None = None  # (b, k)
    moment: Tensor | None = None  # (b, k, p)
    divisor: Tensor | None = None  # (b, k)
    channel: Tensor | None = None  # (b, k, p), TSSA's energy of each channel
    y: Tensor | None = None  # (b, n, d), compute dtype
    mean: Tensor | None = None  # (b, n)
    rstd: Tensor | None = None  # (b, n)


class Call(NamedTuple):
    """What a pass is given beside z."""

    around: Around
    weights: Weights
    tables: list[Tensor]
    form: Form
    step: int  # of the rotary tables
    eps: float
    dtype: torch.dtype  # of the products


A, W, T = len(Around._fields), len(Weights._fields), 4


def attend(z: Tensor, weights: Weights, form: Form, *, grid: tuple[int, int] | None = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d); the two large projections run in `dtype`."""
    return _run(z, Around(), weights, form, grid, 0.0, dtype)


def residual_step(
    z: Tensor, gamma: Tensor, beta: Tensor, keep: Tensor | None, eps: float, weights: Weights, form: Form, *,
    grid: tuple[int, int] | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """z + keep * attend(norm(z)) (b, n, d), in the dtype of z."""
    return _run(z, Around(gamma, beta, keep), weights, form, grid, eps, dtype)


def _run(
    z: Tensor, around: Around, weights: Weights, form: Form, grid: tuple[int, int] | None, eps: float, dtype: torch.dtype
) -> Tensor:
    tables: Sequence[Tensor | None] = (None,) * T
    step = 1
    if weights.assign is not None:
        factors = rotary.factors(form.rotary, z.shape[-1], z.shape[1], grid, step=plan.STEP, device=z.device, dtype=F32)
        if factors is not None:
            tables, step = (*factors.far, *factors.near), factors.step
    tensors = (z, *around, *weights, *tables)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _Layer.apply(*tensors, form, step, eps, dtype)
    return _forward(z, _call(tensors[1:], form, step, eps, dtype))[0]


def _call(tensors: Sequence[Tensor | None], form: Form, step: int, eps: float, dtype: torch.dtype) -> Call:
    tables = [x.contiguous() for x in tensors[A + W : A + W + T] if x is not None]
    weights: Any = tensors[A : A + W]
    return Call(Around(*tensors[:A]), Weights(*weights), tables, form, step, eps, dtype)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, *arguments: Any) -> Tensor:
        *tensors, form, step, eps, dtype = arguments
        out, kept = _forward(z, _call(tensors, form, step, eps, dtype))
        ctx.rest = form, step, eps, dtype
        ctx.save_for_backward(z, *tensors, *(Kept() if form.save == "nothing" else kept))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        z, *rest = ctx.saved_tensors
        tensors, kept = rest[: A + W + T], Kept(*rest[A + W + T :])
        wanted = ctx.needs_input_grad
        with torch.no_grad(), without_autocast(dout):
            given = (dout, z, _call(tensors, *ctx.rest), kept)
            grads = _backward(*given, wanted[0], wanted[1 : 1 + A], wanted[1 + A : 1 + A + W])
        if torch.is_grad_enabled():
            grads = Once.apply(len(grads), *grads, dout, z, *tensors)
        return *grads, *(None,) * (T + len(ctx.rest))


# --- forward ---------------------------------------------------------------------------------------------------------


def _forward(z: Tensor, call: Call) -> tuple[Tensor, Kept]:
    return attempt(_fused_forward, _plain_forward, (z, call), z, _kind(z, call))


def _fused_forward(z: Tensor, call: Call) -> tuple[Tensor, Kept]:
    z = aligned(z)
    kept, update = _steps(z, call)
    out = F.linear(update, _weight_out(call.weights).to(call.dtype), cast(call.weights.out_bias, call.dtype))
    return (out if call.around.gamma is None else _add(z, out, call.around.keep)), kept


def _add(z: Tensor, update: Tensor, keep: Tensor | None) -> Tensor:
    """z + keep * update, in z's dtype."""
    return torch.add(z, update) if keep is None else cast(torch.addcmul(z, keep, update), z.dtype)  # keep may be wider


def _steps(z: Tensor, call: Call) -> tuple[Kept, Tensor]:
    """What there is to keep, and the update."""
    (gamma, beta, _), weights, form, dtype = call.around, call.weights, call.form, call.dtype
    text, n, assign, bias = form.text, z.shape[1], _flat(weights.assign), _flat(weights.assign_bias)
    how = (form.membership == "sigmoid", form.gate is not None)
    scores = sums = mean = rstd = None
    if gamma is not None and beta is not None:
        y, mean, rstd, scores, sums = norm.norm_score(
            z, gamma.contiguous(), beta.contiguous(), call.eps, assign, bias, call.tables, call.step, dtype, *how
        )
    else:
        y = cast(z, dtype)
        if assign is not None:
            scores, sums = score.score(z, assign, bias, call.tables, call.step, *how)
    if assign is None:
        scores = sums = None
    opened, pooled = (None, None) if form.gate is None or sums is None else gate.open_gate(sums, n, text)
    projected = F.linear(y, weights.subspace.to(dtype), cast(weights.subspace_bias, dtype))
    membership, channel = _membership(projected, scores, weights, form)
    update, moment, divisor = moments.settle(projected, membership, opened, weights.theta, text)
    normed = (None if gamma is None else y, mean, rstd)
    return Kept(projected, membership, pooled, opened, moment, divisor, channel, *normed), update


def _membership(
    projected: Tensor, scores: Tensor | None, weights: Weights, form: Form
) -> tuple[Tensor, Tensor | None]:  # (b, n, k), and TSSA's energy of each channel
    if form.membership == "energy":
        assert weights.temperature is not None
        return energy.energy(projected, scores, weights.temperature.contiguous(), form.text)
    assert scores is not None
    if form.membership == "sigmoid":
        return scores, None
    value = MEMBERSHIP[form.membership].value(scores.mT, form).mT.contiguous()
    return (value * value.shape[1] if form.token_sparse_rescale else value), None


def _weight_out(weights: Weights) -> Tensor:
    return weights.subspace.mT if weights.out is None else weights.out


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else aligned(x)


# --- backward --------------------------------------------------------------------------------------------------------

Grads = tuple[Tensor | None, ...]


def _backward(
    dout: Tensor, z: Tensor, call: Call, kept: Kept, wants_z: bool, around: Sequence[bool], wanted: Sequence[bool]
) -> Grads:
    """The gradients of z, of what is around and of the weights, None where they are not wanted."""
    asked: Any = (wants_z, Around(*around), Weights(*wanted))  # type: ignore[arg-type]
    dz, grads = attempt(_fused_backward, _plain_backward, (dout, z, call, kept, *asked), z, _kind(z, call))
    given = {**call.around._asdict(), **call.weights._asdict()}
    ask = dict(zip(given, (*around, *wanted), strict=True))
    return dz, *(_like(grads.get(name), x) if ask[name] else None for name, x in given.items())


def _like(grad: Tensor | None, weight: Tensor | None) -> Tensor | None:
    if grad is None or weight is None:
        return None
    grad = cast(grad, weight.dtype)
    return grad if grad.shape == weight.shape else grad.reshape(weight.shape)


def _fused_backward(
    dout: Tensor, z: Tensor, call: Call, kept: Kept, wants_z: bool, around: Around, wanted: Weights
) -> tuple[Tensor | None, dict[str, Tensor]]:
    z, dout, (gamma, _, keep) = aligned(z), aligned(dout), call.around
    weights, form, dtype, text = call.weights, call.form, call.dtype, call.form.text
    if kept.projected is None:
        kept = _steps(z, call)[0]  # the update, as large as z, is let go
    projected, membership, pooled, opened, moment, divisor, channel, y, mean, rstd = kept
    assert projected is not None and membership is not None and moment is not None and divisor is not None
    tokens = cast(z, dtype) if y is None else y
    low = (dout if keep is None else dout * keep).to(dtype)
    tokens_in, tokens_out = tokens.flatten(0, 1), low.flatten(0, 1)
    weight_in, weight_out = weights.subspace.to(dtype), _weight_out(weights).to(dtype)
    grads: dict[str, Tensor] = {}

    # the output product
    wants_out = bool(wanted.out or (wanted.subspace and weights.out is None))
    if wanted.out_bias:
        grads["out_bias"] = tokens_out.sum(0, dtype=F32)

    # between the products
    flow = tokens_out @ weight_out  # G, then dS in its place
    wants_bias = bool(wanted.subspace_bias)
    now = wants_bias and form.membership != "energy"  # there the bias is summed in the next pass
    given = (flow, projected, membership, moment, opened, divisor, weights.theta)
    dscores, dgate, dtheta, dbias, update = adjoint.pull(*given, text, now, wants_out)
    dweight = tokens_out.mT @ update.flatten(0, 1) if wants_out else None
    del update
    if form.membership == "energy":
        assert weights.temperature is not None and channel is not None
        dscores = MEMBERSHIP["softmax"].pullback(dscores.mT, None, membership.mT, form).mT.contiguous()
        temperature = weights.temperature.contiguous()
        dtemperature, dbias = energy.energy_adjoint(flow, projected, dscores, channel, temperature, text, wants_bias)
        grads["temperature"] = dtemperature
    elif form.membership != "sigmoid":
        scale = projected.shape[1] if form.token_sparse_rescale else 1
        pulled = MEMBERSHIP[form.membership].pullback(dscores.mT * scale, None, membership.mT / scale, form)
        dscores = pulled.mT.contiguous()
    if form.mode == "proximal":
        grads["theta"] = dtheta.sum()
    if wants_bias:
        grads["subspace_bias"] = dbias.sum((0, 1)).flatten()

    # the first product
    if wanted.out and dweight is not None:
        grads["out"] = dweight
    if wanted.subspace:
        grads["subspace"] = flow.mT @ tokens_in
        if weights.out is None and dweight is not None:
            grads["subspace"] = grads["subspace"] + dweight.mT
    weigh = bool(around.gamma or around.beta)
    product = (flow @ weight_in).view_as(z) if wants_z or weigh else None
    del given, flow

    # the scores and the norm
    dpooled = None
    tables, step, assign = call.tables, call.step, _flat(weights.assign)
    if assign is not None:
        dpooled = None if pooled is None else gate.gate_adjoint(dgate, pooled, z.shape[1], text)
        if wanted.assign_bias:
            total_bias = dscores.sum((0, 1))
            grads["assign_bias"] = total_bias if dpooled is None else total_bias + z.shape[1] * dpooled.sum(0)
        if wanted.assign:
            grads["assign"] = score_adjoint.into_assign(z if y is None else y, dscores, dpooled, tables, step).sum(0)
    if product is None:
        return None, grads
    if gamma is None:
        if assign is None:
            return cast(product, z.dtype), grads
        return score_adjoint.into_tokens(product, dscores, dpooled, assign, tables, step, z.dtype), grads
    assert mean is not None and rstd is not None
    asked = None if assign is None else dscores
    gamma = gamma.contiguous()
    dz, part = norm.norm_adjoint(product, asked, dpooled, assign, tables, step, dout, z, gamma, mean, rstd, weigh)
    if weigh:
        grads["gamma"], grads["beta"] = part.sum(1).unbind(0)
    return dz, grads


# --- plain torch in their place --------------------------------------------------------------------------------------


def _kind(z: Tensor, call: Call) -> tuple:
    """What fails once fails for all of these."""
    return "the layer", call.form, z.shape[-1], z.dtype, call.dtype, z.device


def _grid(z: Tensor, call: Call) -> tuple[int, int] | None:
    return (z.shape[1] // max(call.step, 1), call.step) if call.form.rotary == "2d" else None


def _norm(z: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    gamma, beta, _ = call.around
    assert gamma is not None and beta is not None
    return torch.native_layer_norm(wide(z), z.shape[-1:], wide(gamma), wide(beta), call.eps)


def _plain_forward(z: Tensor, call: Call) -> tuple[Tensor, Kept]:
    """The backward pass of these keeps nothing: it begins with z."""
    y = z if call.around.gamma is None else _norm(z, call)[0]
    out = reference.attend(y, call.weights, call.form, grid=_grid(z, call), dtype=call.dtype)
    return (out if call.around.gamma is None else _add(z.contiguous(), out, call.around.keep)), Kept()


def _plain_backward(
    dout: Tensor, z: Tensor, call: Call, kept: Kept, wants_z: bool, around: Around, wanted: Weights
) -> tuple[Tensor | None, dict[str, Tensor]]:
    weights, form, dtype, grid = call.weights, call.form, call.dtype, _grid(z, call)
    gamma, beta, keep = call.around
    y, mean, rstd = (z, None, None) if gamma is None else _norm(z, call)
    steps = reference.take_steps(y, reference.score(y, weights, form, grid), weights, form, dtype)
    low = (dout if keep is None else dout * keep).to(dtype)
    wants_y = wants_z or gamma is not None
    dy, found = closed_form.pull_back(y, weights, form, grid, dtype, steps, low, wanted, wants_y)
    grads = {name: grad for name, grad in zip(Weights._fields, found, strict=True) if grad is not None}
    if gamma is None or beta is None:
        return dy if wants_z else None, grads
    given = (wide(z), z.shape[-1:], mean, rstd, wide(gamma), wide(beta), [True] * 3)
    assert dy is not None
    dz, grads["gamma"], grads["beta"] = torch.ops.aten.native_layer_norm_backward(wide(dy), *given)
    return (dz + dout).to(z.dtype), grads
