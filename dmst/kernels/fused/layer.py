"""The layer, from the kernels of this folder and the library's products.

    forward     scores of z, gate | s = z U | moments, update | output = update W
    backward    G = dout W^T | adjoint: dS, dscores | dW | dU | dassign | dz = dS U^T + the scores' part

One autograd function, in closed form (`closed_form.py`), in memory order (b, n, k, p). It keeps z, s, membership and statistics
without a token axis; with save="nothing" z alone, and the backward pass begins with the forward pass. z comes in the dtype of
the products: under autocast the cast stands before, where the compiler joins it with the norm that makes z. Under torch.compile
the compiler sees everything in here. In eager calls a kernel that fails is reported once, and plain torch takes its place in
every layer of that form, width and dtype: slower, never different.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import rotary
from dmst.kernels import closed_form, plan, reference
from dmst.kernels.arithmetic import aligned, cast
from dmst.kernels.attempt import attempt
from dmst.kernels.autocast import without_autocast
from dmst.kernels.form import MEMBERSHIP, Form, Weights
from dmst.kernels.fused import adjoint, energy, front, gate, moments
from dmst.kernels.fused.launch import Once

F32 = torch.float32


class Kept(NamedTuple):
    """For the backward pass; None where a layer has none."""

    projected: Tensor | None = None  # (b, n, k p)
    membership: Tensor | None = None  # (b, n, k)
    pooled: Tensor | None = None  # (b, k)
    gate: Tensor | None = None  # (b, k)
    moment: Tensor | None = None  # (b, k, p)
    divisor: Tensor | None = None  # (b, k)
    channel: Tensor | None = None  # (b, k, p), TSSA's energy of each channel


class Call(NamedTuple):
    """What a pass is given beside z."""

    weights: Weights
    tables: list[Tensor]  # of the rotation
    form: Form
    step: int  # of the tables


W, T = len(Weights._fields), 4


def attend(z: Tensor, weights: Weights, form: Form, *, grid: tuple[int, int] | None = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d); the two large projections run in `dtype`."""
    z = cast(z, dtype)
    tables: Sequence[Tensor | None] = (None,) * T
    step = 1
    if weights.assign is not None:
        factors = rotary.factors(form.rotary, z.shape[-1], z.shape[1], grid, step=plan.STEP, device=z.device, dtype=F32)
        if factors is not None:
            tables, step = (*factors.far, *factors.near), factors.step
    tensors = (*weights, *tables)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (z, *tensors)):
        return _Layer.apply(z, *tensors, form, step)
    return _forward(z, _call(tensors, form, step))[0]


def _call(tensors: Sequence[Tensor | None], form: Form, step: int) -> Call:
    weights: Any = tensors[:W]
    return Call(Weights(*weights), [x.contiguous() for x in tensors[W : W + T] if x is not None], form, step)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, *arguments: Any) -> Tensor:
        *tensors, form, step = arguments
        out, kept = _forward(z, _call(tensors, form, step))
        ctx.rest = form, step
        ctx.save_for_backward(z, *tensors, *(Kept() if form.save == "nothing" else kept))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        z, *rest = ctx.saved_tensors
        tensors, kept = rest[: W + T], Kept(*rest[W + T :])
        wanted = ctx.needs_input_grad
        with torch.no_grad(), without_autocast(dout):
            grads = _backward(dout, z, _call(tensors, *ctx.rest), kept, wanted[0], wanted[1 : 1 + W])
        if torch.is_grad_enabled():
            grads = Once.apply(len(grads), *grads, dout, z, *tensors)
        return *grads, *(None,) * (T + len(ctx.rest))


# --- forward ---------------------------------------------------------------------------------------------------------


def _forward(z: Tensor, call: Call) -> tuple[Tensor, Kept]:
    return attempt(_fused_forward, _plain_forward, (z, call), z, _kind(z, call))


def _fused_forward(z: Tensor, call: Call) -> tuple[Tensor, Kept]:
    kept, update = _steps(aligned(z), call)
    return F.linear(update, _weight_out(call.weights).to(z.dtype), cast(call.weights.out_bias, z.dtype)), kept


def _steps(z: Tensor, call: Call) -> tuple[Kept, Tensor]:
    """What there is to keep, and the update."""
    weights, form, assign = call.weights, call.form, _flat(call.weights.assign)
    scores = opened = pooled = None
    if assign is not None:
        how = (form.membership == "sigmoid", form.gate is not None)
        scores, sums, _ = front.front(z, call.tables, call.step, assign, _flat(weights.assign_bias), None, None, *how)
        if form.gate is not None:
            opened, pooled = gate.open_gate(sums, z.shape[1], *_gate(form))
    projected = F.linear(z, weights.subspace.to(z.dtype), cast(weights.subspace_bias, z.dtype))
    membership, channel = _membership(projected, scores, weights, form)
    update, moment, divisor = moments.settle(projected, membership, opened, weights.theta, form.text)
    return Kept(projected, membership, pooled, opened, moment, divisor, channel), update


def _gate(form: Form) -> tuple[str, float, int]:
    return str(form.gate), form.gate_scale, form.max_active_heads or 0


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


def _backward(dout: Tensor, z: Tensor, call: Call, kept: Kept, wants_z: bool, wanted: Sequence[bool]) -> Grads:
    """The gradients of z and of the weights, None where they are not wanted."""
    asked: Any = (wants_z, Weights(*wanted))  # type: ignore[arg-type]
    dz, grads = attempt(_fused_backward, _plain_backward, (dout, z, call, kept, *asked), z, _kind(z, call))
    given = call.weights._asdict().items()
    return dz, *(_like(grads.get(name), x) if ask else None for (name, x), ask in zip(given, wanted, strict=True))


def _like(grad: Tensor | None, weight: Tensor | None) -> Tensor | None:
    if grad is None or weight is None:
        return None
    grad = cast(grad, weight.dtype)
    return grad if grad.shape == weight.shape else grad.reshape(weight.shape)


def _fused_backward(
    dout: Tensor, z: Tensor, call: Call, kept: Kept, wants_z: bool, wanted: Weights
) -> tuple[Tensor | None, dict[str, Tensor]]:
    z, dout, dtype = aligned(z), aligned(dout), z.dtype
    weights, form, text = call.weights, call.form, call.form.text
    if kept.projected is None:
        kept = _steps(z, call)[0]  # the update, as large as z, is let go
    projected, membership, pooled, opened, moment, divisor, channel = kept
    assert projected is not None and membership is not None and moment is not None and divisor is not None
    tokens_in, tokens_out = z.flatten(0, 1), cast(dout, dtype).flatten(0, 1)
    grads: dict[str, Tensor] = {}

    # the output product
    wants_out = bool(wanted.out or (wanted.subspace and weights.out is None))
    if wanted.out_bias:
        grads["out_bias"] = tokens_out.sum(0, dtype=F32)

    # between the products
    flow = tokens_out @ _weight_out(weights).to(dtype)  # G, then dS in its place
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
    product = (flow @ weights.subspace.to(dtype)).view_as(z) if wants_z else None
    del given, flow

    # the scores
    assign = _flat(weights.assign)
    if assign is None:
        return product, grads
    dpooled = None if pooled is None else gate.gate_adjoint(dgate, pooled, z.shape[1], *_gate(form))
    if wanted.assign_bias:
        total = dscores.sum((0, 1))
        grads["assign_bias"] = total if dpooled is None else total + z.shape[1] * dpooled.sum(0)
    if wanted.assign:
        grads["assign"] = front.into_weights(z, dscores, dpooled, None, call.tables, call.step)[0].sum(0)
    if product is not None:
        product = front.into_tokens(product, dscores, dpooled, assign, None, None, call.tables, call.step)
    return product, grads


# --- plain torch in their place --------------------------------------------------------------------------------------


def _kind(z: Tensor, call: Call) -> tuple:
    """What fails once fails for all of these."""
    return "the layer", call.form, z.shape[-1], z.dtype, z.device


def _grid(z: Tensor, call: Call) -> tuple[int, int] | None:
    return (z.shape[1] // max(call.step, 1), call.step) if call.form.rotary == "2d" else None


def _plain_forward(z: Tensor, call: Call) -> tuple[Tensor, Kept]:
    """The backward pass of these keeps nothing: it begins with z."""
    return reference.attend(z, call.weights, call.form, grid=_grid(z, call), dtype=z.dtype), Kept()


def _plain_backward(
    dout: Tensor, z: Tensor, call: Call, kept: Kept, wants_z: bool, wanted: Weights
) -> tuple[Tensor | None, dict[str, Tensor]]:
    weights, form, grid = call.weights, call.form, _grid(z, call)
    steps = reference.take_steps(z, reference.score(z, weights, form, grid), weights, form, z.dtype)
    dz, found = closed_form.pull_back(z, weights, form, grid, z.dtype, steps, dout.to(z.dtype), wanted, wants_z)
    return dz if wants_z else None, {name: x for name, x in zip(Weights._fields, found, strict=True) if x is not None}
