"""The residual step as operators that PyTorch knows, `dmst::step` and `dmst::step_backward`, in the manner of registered.py.

step             z, what is around the layer, its weights -> z', the normed tokens, mean and rstd, what the layer keeps
step_backward    dz' and all of these -> dz, and the gradients of the norm's weights, the scale and the layer's weights

`low` is keep * dz' in the compute dtype: made in the graph, where the compiler writes it beside dz'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dmst import rotary, tracing
from dmst.kernels import plan, registered
from dmst.kernels.arithmetic import wide
from dmst.kernels.autocast import without_autocast
from dmst.kernels.form import Form, Weights
from dmst.kernels.fused import layer, step
from dmst.kernels.fused.calls import NOTHING, Kept
from dmst.kernels.fused.scale import inner, scaled, unscaled
from dmst.kernels.fused.step import Around, Normed
from dmst.kernels.registered import KEPT, T, W, library

UNNORMED = (None,) * len(Normed._fields)
A, N = len(Around._fields), len(Normed._fields)
GRADS = 1 + A - 1 + W  # of z, of what stands around but for `keep`, of the weights
_AROUND = "Tensor norm_weight, Tensor norm_bias, Tensor? scale, Tensor? keep"
_INPUTS = registered._INPUTS.replace("Tensor z", f"Tensor z, {_AROUND}", 1)
_OPTIONS = f"float eps, {registered._OPTIONS}"
_NORMED = ", ".join(f"Tensor {name}" for name in Normed._fields)

library.define(f"step({_INPUTS}, {_OPTIONS}) -> ({', '.join(['Tensor'] * (1 + N + KEPT))})")
library.define(
    f"step_backward(Tensor dout, Tensor low, {_INPUTS}, {_NORMED}, {registered._KEPT}, bool[] wanted, {_OPTIONS}) "
    f"-> ({', '.join(['Tensor'] * GRADS)})"
)


def residual_step(
    z: Tensor, norm_weight: Tensor, norm_bias: Tensor, scale: Tensor | None, keep: Tensor | None,
    eps: float, weights: Weights, form: Form, *, grid: tuple[int, int] | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """z' (b, n, d); where nobody is looking without the operators, as `registered.attend`."""
    factors, around = None, Around(norm_weight, norm_bias, scale, keep)
    if weights.assign is not None:
        _, n, d = z.shape
        factors = rotary.factors(form.rotary, d, n, grid, step=plan.STEP, device=z.device, dtype=torch.float32)
    tensors = (z, *around, *weights)
    if not tracing.is_plain_eager() or not registered._PLAIN.issuperset(map(type, tensors)):
        tables, length = registered._tables(factors), registered._step(factors)
        text = form.text if torch.is_grad_enabled() else form.lean
        return torch.ops.dmst.step(*tensors, *tables, eps, text, length, dtype)[0]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _Eager.apply(*tensors, eps, form, factors, dtype)
    return _run_forward(z, around, eps, weights, form, factors, dtype, keeps=False)[0]


def _run_forward(
    z: Tensor, around: Around, eps: float, weights: Weights, form: Form, factors: rotary.Factors | None, dtype: torch.dtype,
    keeps: bool = True,
) -> tuple[Tensor, tuple[Tensor | None, ...], Kept]:  # fmt: skip
    call = (z, around, eps, weights, form, factors, dtype, keeps and form.save != "nothing")
    return registered._attempt(_fused_forward, _plain_forward, call, z, form, dtype)


def _run_backward(
    dout: Tensor, low: Tensor | None, z: Tensor, around: Around, eps: float, weights: Weights, form: Form,
    factors: rotary.Factors | None, dtype: torch.dtype, normed: Normed, kept: Kept, asked: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """In the order of GRADS, None where it is not asked for."""
    call = (dout, low, z, around, eps, weights, form, factors, dtype, normed, kept, asked)
    return registered._attempt(_fused_backward, _unfused_backward, call, z, form, dtype)


def _fused_forward(
    z: Tensor, around: Around, eps: float, weights: Weights, form: Form, factors: rotary.Factors | None, dtype: torch.dtype,
    keeps: bool,
) -> tuple[Tensor, tuple[Tensor | None, ...], Kept]:  # fmt: skip
    out, normed, kept = step.forward(z, around, eps, weights, form, registered._ordered(factors), dtype)
    return (out, normed, kept) if keeps else (out, UNNORMED, NOTHING)


def _fused_backward(
    dout: Tensor, low: Tensor | None, z: Tensor, around: Around, eps: float, weights: Weights, form: Form,
    factors: rotary.Factors | None, dtype: torch.dtype, normed: Normed, kept: Kept, asked: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    given = (dout, low, z, around, eps, weights, form, registered._ordered(factors), dtype, normed, kept)
    return _in_order(*step.backward(*given, *_split(asked)), around, weights, asked)


def _unfused_backward(*call: Any) -> tuple[Tensor | None, ...]:
    *given, asked = call
    plain: Callable[..., Any] = _plain_backward
    dz, grads = plain(*given, *_split(asked))
    return _in_order(dz, grads, call[3], call[5], asked)


def _split(asked: Sequence[bool]) -> tuple[bool, Around, Weights]:
    wants_z, *rest = asked
    return wants_z, Around(*rest[: A - 1], keep=None), Weights(*rest[A - 1 :])  # type: ignore[arg-type, misc]


def _in_order(
    dz: Tensor | None, grads: dict[str, Tensor], around: Around, weights: Weights, asked: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    wants_z, *rest = asked
    names = (*Around._fields[:-1], *Weights._fields)
    given = zip(names, (*around[:-1], *weights), rest, strict=True)
    return (dz if wants_z else None), *(registered._like(grads.get(name), x) if ask else None for name, x, ask in given)


class _Eager(torch.autograd.Function):
    """The operators' autograd formula, without them."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, *arguments: Any) -> Tensor:
        *tensors, ctx.eps, ctx.form, ctx.factors, ctx.dtype = arguments
        given = (Around(*tensors[:A]), ctx.eps, Weights(*tensors[A:]), ctx.form, ctx.factors, ctx.dtype)
        out, normed, kept = _run_forward(z, *given)
        ctx.save_for_backward(z, *tensors, *normed, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        z, *rest = ctx.saved_tensors
        around, weights, rest = Around(*rest[:A]), Weights(*rest[A : A + W]), rest[A + W :]
        asked = _asked(ctx.needs_input_grad)
        with without_autocast(dout):
            if torch.is_grad_enabled() or tracing.traced() or tracing.dispatched():  # it refuses a second derivative in words
                low = _rounded(dout, around.keep, ctx.dtype)
                tensors = (dout, low, z, *around, *weights, *registered._tables(ctx.factors), *registered._filled(rest, z))
                options = (ctx.eps, ctx.form.text, registered._step(ctx.factors), ctx.dtype)
                grads = torch.ops.dmst.step_backward(*tensors, asked, *options)
                grads = tuple(grad if ask else None for grad, ask in zip(grads, asked, strict=True))
            else:
                given = (around, ctx.eps, weights, ctx.form, ctx.factors, ctx.dtype)
                grads = _run_backward(dout, None, z, *given, Normed(*rest[:N]), Kept(*rest[N:]), asked)
        return (*_placed(grads), None, None, None, None)


def _rounded(dout: Tensor, keep: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`step.thinned`, as a graph takes it."""
    return (dout if keep is None else dout * keep).to(dtype)


def _asked(needs: Sequence[bool]) -> list[bool]:
    """Of the inputs in order, without `keep`, which has no gradient."""
    return [*needs[:A], *needs[1 + A : 1 + A + W]]


def _placed(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Back from `_asked`."""
    return (*grads[:A], None, *grads[A:])


# --- the two operators ----------------------------------------------------------------------------------------------


def _forward(z: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    around, eps, weights, form, factors, dtype = _unpack(arguments, z)
    out, normed, kept = _run_forward(z, around, eps, weights, form, factors, dtype)
    return out, *registered._filled((*normed, *kept), z)


def _backward(dout: Tensor, low: Tensor, z: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *inputs, asked, eps, text, length, dtype = arguments
    given = _unpack((*inputs[: A + W + T], eps, text, length, dtype), z)
    present: list[Any] = [value if value.numel() or not z.numel() else None for value in inputs[A + W + T :]]
    grads = _run_backward(dout, low, z, *given, Normed(*present[:N]), Kept(*present[N:]), asked)
    return tuple(z.new_empty(0) if grad is None else grad for grad in grads)


def _unpack(arguments: tuple[Any, ...], z: Tensor) -> tuple[Around, float, Weights, Form, rotary.Factors | None, torch.dtype]:
    *tensors, eps, text, length, dtype = arguments
    weights, factors, form, dtype = registered._unpack((*tensors[A:], text, length, dtype), z)
    return Around(*tensors[:A]), eps, weights, form, factors, dtype


def _plain_forward(
    z: Tensor, around: Around, eps: float, weights: Weights, form: Form, factors: rotary.Factors | None, dtype: torch.dtype,
    keeps: bool = True,
) -> tuple[Tensor, tuple[Tensor | None, ...], Kept]:  # fmt: skip
    y, mean, rstd = _norm(z, around, eps)
    update, kept = registered._plain_forward(y, scaled(weights, around.scale), form, factors, dtype)
    out = layer.add(z.contiguous(), update, around.keep)
    normed = Normed(y.to(dtype), mean.squeeze(-1), rstd.squeeze(-1))
    return (out, normed, kept) if keeps else (out, UNNORMED, NOTHING)


def _plain_backward(
    dout: Tensor, low: Tensor | None, z: Tensor, around: Around, eps: float, weights: Weights, form: Form,
    factors: rotary.Factors | None, dtype: torch.dtype, normed: Normed, kept: Kept, wants_z: bool, wants: Around,
    wanted: Weights,
) -> tuple[Tensor | None, dict[str, Tensor]]:  # fmt: skip
    """From z alone."""
    y, mean, rstd = _norm(z, around, eps)
    asked = inner(wanted, weights, around.scale, bool(wants.scale))
    dy, grads = registered._plain_backward(
        step.thinned(dout, around.keep, dtype), y, scaled(weights, around.scale), form, factors, dtype, kept, asked, True
    )
    grads = unscaled(grads, weights, around.scale, wanted)
    gamma, beta = wide(around.norm_weight), wide(around.norm_bias)
    given = (wide(z), z.shape[-1:], mean, rstd, gamma, beta, [True] * 3)
    dz, grads["norm_weight"], grads["norm_bias"] = torch.ops.aten.native_layer_norm_backward(dy, *given)
    dz = dz + dout
    return dz.to(z.dtype), grads


def _norm(z: Tensor, around: Around, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.native_layer_norm(wide(z), z.shape[-1:], wide(around.norm_weight), wide(around.norm_bias), eps)


for _device in ("CPU", "CUDA"):
    library.impl("step", _forward, _device)
    library.impl("step_backward", _backward, _device)


# --- shapes without values ------------------------------------------------------------------------------------------


@torch.library.register_fake("dmst::step", lib=library)
def _fake_forward(z: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *tensors, _, text, length, dtype = arguments
    update, *kept = registered._fake_forward(z, *tensors[A:], text, length, dtype)
    b, n, _ = z.shape
    out = z.new_empty(z.shape)
    if Form.read(text).save == "nothing":
        return out, *(z.new_empty(0, dtype=torch.float32) for _ in range(N)), *kept
    mean, rstd = (z.new_empty(b, n, dtype=torch.float32) for _ in range(2))
    return out, update, mean, rstd, *kept


@torch.library.register_fake("dmst::step_backward", lib=library)
def _fake_backward(dout: Tensor, low: Tensor, z: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *tensors, wanted, _, _, _, _ = arguments
    inputs = [z, *tensors[: A - 1], *tensors[A : A + W]]
    return tuple(
        torch.empty_like(value, memory_format=torch.contiguous_format) if asked and value is not None else z.new_empty(0)
        for asked, value in zip(wanted, inputs, strict=True)
    )


# --- derivatives ----------------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.eps, ctx.form, ctx.step, ctx.dtype = inputs
    _, *kept = output
    ctx.save_for_backward(*tensors, *kept)
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, *_: Any) -> tuple:
    nothing = (None,) * (T + 4)
    if dout is None:
        return (None,) * (1 + A + W) + nothing
    asked = _asked(ctx.needs_input_grad)
    with without_autocast(dout):
        low = _rounded(dout, ctx.saved_tensors[A], ctx.dtype)
        grads = torch.ops.dmst.step_backward(dout, low, *ctx.saved_tensors, asked, ctx.eps, ctx.form, ctx.step, ctx.dtype)
    return *_placed([grad if ask else None for grad, ask in zip(grads, asked, strict=True)]), *nothing


registered.differentiable("step", _forward, _differentiate, _setup)
registered.differentiable("step_backward", _backward, registered.no_second, lambda ctx, inputs, output: None)


# --- operations -----------------------------------------------------------------------------------------------------


@register_flop_formula(torch.ops.dmst.step)
def _flops(z: Any, gamma: Any, beta: Any, scale: Any, keep: Any, *rest: Any, **__: Any) -> int:
    """The layer's alone, as counters count no norm and no addition."""
    return registered._flops(z, *rest)


@register_flop_formula(torch.ops.dmst.step_backward)
def _backward_flops(dout: Any, low: Any, z: Any, gamma: Any, beta: Any, scale: Any, keep: Any, *rest: Any, **__: Any) -> int:
    return registered._backward_flops(dout, z, *rest)
