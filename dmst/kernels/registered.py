"""The fused layer as operators that PyTorch knows: `dmst::attend` and `dmst::attend_backward`.

With a fake implementation (shapes only), an autograd formula and a FLOP count each, so that torch.compile takes the layer as
one node, CUDA graphs record it and counters count it. The form travels as text, the rotary factors as tensors: a traced graph
computes its own. What does not exist (no gate, no bias) leaves as an empty tensor, with save="nothing" all that would be kept.

A kernel that does not compile is reported once, with the shape, and the plain steps take its place in every layer of that form,
width and dtype: slower, never different.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dmst import kernels, rotary, tracing
from dmst.errors import DmstError
from dmst.kernels import closed_form, plan, reference
from dmst.kernels.arithmetic import cast, wide
from dmst.kernels.attempt import attempt, remembered
from dmst.kernels.autocast import without_autocast
from dmst.kernels.form import Form, Weights
from dmst.kernels.fused import layer
from dmst.kernels.fused.calls import NOTHING, Kept

_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})  # a subclass may have no memory to give to a kernel
W, T, KEPT = len(Weights._fields), 4, len(Kept._fields)
_INPUTS = ", ".join(
    ["Tensor z", "Tensor subspace", *(f"Tensor? {name}" for name in Weights._fields[1:])]
    + [f"Tensor? {name}" for name in ("far_cos", "far_sin", "near_cos", "near_sin")]
)
_OPTIONS = "str form, SymInt step, ScalarType dtype"

library = torch.library.Library("dmst", "DEF")
library.define(f"attend({_INPUTS}, {_OPTIONS}) -> ({', '.join(['Tensor'] * (1 + KEPT))})")
_KEPT = ", ".join(f"Tensor {name}" for name in Kept._fields)
library.define(
    f"attend_backward(Tensor dout, {_INPUTS}, {_KEPT}, bool[] wanted, {_OPTIONS}) -> ({', '.join(['Tensor'] * (1 + W))})"
)


def attend(z: Tensor, weights: Weights, form: Form, *, grid: tuple[int, int] | None = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d); the two large projections run in `dtype`.

    Where nobody is looking, without the operators: going through them costs the host more than the layer's own work.
    """
    factors = None
    if weights.assign is not None:
        _, n, d = z.shape
        factors = rotary.factors(form.rotary, d, n, grid, step=plan.STEP, device=z.device, dtype=torch.float32)
    if not tracing.is_plain_eager() or not _PLAIN.issuperset(map(type, (z, *weights))):
        kernels.check(z, weights, form)
        text = form.text if torch.is_grad_enabled() else form.lean  # what is kept costs the host as much as a kernel
        return torch.ops.dmst.attend(z, *weights, *_tables(factors), text, _step(factors), dtype)[0]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (z, *weights)):
        return _Eager.apply(z, *weights, form, factors, dtype)
    return _run_forward(z, weights, form, factors, dtype, keeps=False)[0]


def _tables(factors: rotary.Factors | None) -> tuple[Tensor | None, ...]:
    return (None,) * T if factors is None else (*factors.far, *factors.near)


def _step(factors: rotary.Factors | None) -> int:
    return 0 if factors is None else factors.step


def _ordered(factors: rotary.Factors | None) -> rotary.Factors | None:
    """The tables in plain order: a graph may hold them in another."""
    if factors is None:
        return None
    far, near = (rotary.Table(*(x.contiguous() for x in table)) for table in (factors.far, factors.near))
    return rotary.Factors(far, near, factors.step)


def _run_forward(
    z: Tensor, weights: Weights, form: Form, factors: rotary.Factors | None, dtype: torch.dtype, keeps: bool = True
) -> tuple[Tensor, Kept]:
    """The output, and what is kept for the way back; nothing without `keeps`, or where the form says so."""
    call = (z, weights, form, factors, dtype, keeps and form.save != "nothing")
    return _attempt(_fused_forward, _plain_forward, call, z, form, dtype)


def _run_backward(
    dout: Tensor, z: Tensor, weights: Weights, form: Form, factors: rotary.Factors | None, dtype: torch.dtype, kept: Kept,
    asked: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dz and the gradient of each weight, None where it is not asked for."""
    call = (dout, z, weights, form, factors, dtype, kept, asked)
    return _attempt(_fused_backward, _unfused_backward, call, z, form, dtype)


def _fused_forward(
    z: Tensor, weights: Weights, form: Form, factors: rotary.Factors | None, dtype: torch.dtype, keeps: bool
) -> tuple[Tensor, Kept]:
    kernels.check(z, weights, form)
    out, kept = layer.forward(z, weights, form, _ordered(factors), dtype)
    return out, kept if keeps else NOTHING


def _fused_backward(
    dout: Tensor, z: Tensor, weights: Weights, form: Form, factors: rotary.Factors | None, dtype: torch.dtype, kept: Kept,
    asked: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    wants_z, *rest = asked
    wanted = Weights(*rest)  # type: ignore[arg-type]
    return _in_order(*layer.backward(dout, z, weights, form, _ordered(factors), dtype, kept, wanted, wants_z), weights)


def _unfused_backward(*call: Any) -> tuple[Tensor | None, ...]:
    *given, (wants_z, *wanted) = call
    plain: Callable[..., Any] = _plain_backward
    dz, grads = plain(*given, Weights(*wanted), wants_z)
    return _in_order(dz, grads, call[2])


def _in_order(dz: Tensor | None, grads: dict[str, Tensor], weights: Weights) -> tuple[Tensor | None, ...]:
    return dz, *(_like(grads.get(name), weight) for name, weight in zip(Weights._fields, weights, strict=True))


def _like(grad: Tensor | None, weight: Tensor | None) -> Tensor | None:
    if grad is None or weight is None:
        return None
    grad = cast(grad, weight.dtype)
    return grad if grad.shape == weight.shape else grad.reshape(weight.shape)


class _Eager(torch.autograd.Function):
    """The operators' autograd formula, without them."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, *arguments: Any) -> Tensor:
        *tensors, ctx.form, ctx.factors, ctx.dtype = arguments
        out, kept = _run_forward(z, Weights(*tensors), ctx.form, ctx.factors, ctx.dtype)
        ctx.save_for_backward(z, *tensors, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        z, *rest = ctx.saved_tensors
        weights, kept, asked = Weights(*rest[:W]), Kept(*rest[W:]), ctx.needs_input_grad[: 1 + W]
        with without_autocast(dout):
            if torch.is_grad_enabled() or tracing.traced() or tracing.dispatched():  # it refuses a second derivative in words
                tensors = (dout, z, *weights, *_tables(ctx.factors), *_filled(kept, z))
                text, step = ctx.form.text, _step(ctx.factors)
                grads = torch.ops.dmst.attend_backward(*tensors, list(asked), text, step, ctx.dtype)
                grads = tuple(grad if wanted else None for grad, wanted in zip(grads, asked, strict=True))
            else:
                grads = _run_backward(dout, z, weights, ctx.form, ctx.factors, ctx.dtype, kept, asked)
        return (*grads, None, None, None)


# --- the two operators ----------------------------------------------------------------------------------------------


def _filled(values: Iterable[Tensor | None], z: Tensor) -> tuple[Tensor, ...]:
    return tuple(z.new_empty(0, dtype=torch.float32) if value is None else value for value in values)


def _forward(z: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    weights, factors, form, dtype = _unpack(arguments, z)
    out, kept = _run_forward(z, weights, form, factors, dtype)
    return out, *_filled(kept, z)


def _backward(dout: Tensor, z: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *inputs, asked, text, step, dtype = arguments
    weights, factors, form, dtype = _unpack((*inputs[: W + T], text, step, dtype), z)
    present = [value if value.numel() or not z.numel() else None for value in inputs[W + T :]]
    kept = Kept(*present)  # type: ignore[arg-type]  # the two tensors of every token are there, or nothing is and nothing is read
    grads = _run_backward(dout, z, weights, form, factors, dtype, kept, asked)
    return tuple(z.new_empty(0) if grad is None else grad for grad in grads)


def _unpack(arguments: tuple[Any, ...], z: Tensor) -> tuple[Weights, rotary.Factors | None, Form, torch.dtype]:
    *tensors, text, step, dtype = arguments
    far_cos, far_sin, near_cos, near_sin = tensors[W:]
    factors = None
    if far_cos is not None:
        factors = rotary.Factors(rotary.Table(far_cos, far_sin), rotary.Table(near_cos, near_sin), step)
    return Weights(*tensors[:W]), factors, Form.read(text), dtype


_broken = remembered()


def _attempt(
    fused: Callable[..., Any], plain: Callable[..., Any], call: tuple, z: Tensor, form: Form, dtype: torch.dtype
) -> Any:
    kind = _key(z, form, dtype)
    if not z.numel() or (_broken and kind in _broken):
        return plain(*call)

    def says(why: str) -> str:
        return (
            f"The fused kernel does not work here for tokens {tuple(z.shape)} in {z.dtype}, {form.num_heads} heads ({why}). "
            "Using the plain one from now on; `dmst doctor` says more."
        )

    return attempt(z, fused, plain, call, _broken, kind, says)


def _key(z: Tensor, form: Form, dtype: torch.dtype) -> tuple:
    return form, z.shape[-1], z.dtype, dtype, z.device


def _grid(z: Tensor, form: Form, factors: rotary.Factors | None) -> tuple[int, int] | None:
    return (z.shape[1] // max(factors.step, 1), factors.step) if factors is not None and form.rotary == "2d" else None


def _plain_forward(
    z: Tensor, weights: Weights, form: Form, factors: rotary.Factors | None, dtype: torch.dtype, keeps: bool = True
) -> tuple[Tensor, Kept]:
    kernels.check(z, weights, form)
    scores = reference.score(z, weights, form, _grid(z, form, factors))
    steps = reference.take_steps(z, scores, weights, form, dtype)
    out = reference.project_out(reference.update_of(steps, weights.theta, form), weights, dtype)
    if not keeps:
        return out, NOTHING
    flat, channel = steps.projected.transpose(1, 2).flatten(2), None
    if form.membership == "energy" and form.normalize_tokens:
        channel = reference.channel_energy(wide(steps.projected).square()).squeeze(-2)
    kept = Kept(flat, steps.membership.mT.contiguous(), steps.pooled, steps.gate, steps.second_moment, steps.divisor, channel)
    return out, kept


def _plain_backward(
    dout: Tensor, z: Tensor, weights: Weights, form: Form, factors: rotary.Factors | None, dtype: torch.dtype,
    kept: Kept, wanted: Weights, wants_z: bool,
) -> tuple[Tensor | None, dict[str, Tensor]]:  # fmt: skip
    """From z alone: what a fused forward pass has kept depends on its route."""
    grid = _grid(z, form, factors)
    steps = reference.take_steps(z, reference.score(z, weights, form, grid), weights, form, dtype)
    dz, grads = closed_form.pull_back(z, weights, form, grid, dtype, steps, dout, wanted, wants_z)
    named = zip(Weights._fields, grads, wanted, strict=True)
    return dz if wants_z else None, {name: grad for name, grad, asked in named if grad is not None and asked}


for _device in ("CPU", "CUDA"):
    library.impl("attend", _forward, _device)
    library.impl("attend_backward", _backward, _device)


# --- shapes without values ------------------------------------------------------------------------------------------


@torch.library.register_fake("dmst::attend", lib=library)
def _fake_forward(z: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *_, text, _, dtype = arguments
    form, (b, n, d) = Form.read(text), z.shape
    k = form.num_heads
    gated = (b, k) if form.gate is not None else (0,)
    channel = (b, k, d // k) if form.membership == "energy" and form.normalize_tokens else (0,)
    new = functools.partial(z.new_empty, dtype=torch.float32)
    if form.save == "nothing":
        return z.new_empty(b, n, d, dtype=dtype), *(new(0) for _ in range(KEPT))
    return (
        z.new_empty(b, n, d, dtype=dtype), z.new_empty(b, n, d, dtype=dtype), new(b, n, k), new(gated), new(gated),
        new(b, k, d // k), new(b, k), new(channel),
    )  # fmt: skip


@torch.library.register_fake("dmst::attend_backward", lib=library)
def _fake_backward(dout: Tensor, z: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *tensors, wanted, _, _, _ = arguments
    return tuple(
        torch.empty_like(value, memory_format=torch.contiguous_format) if asked and value is not None else z.new_empty(0)
        for asked, value in zip(wanted, (z, *tensors[:W]), strict=True)
    )


# --- derivatives ----------------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.form, ctx.step, ctx.dtype = inputs
    _, *kept = output
    ctx.save_for_backward(*tensors, *kept)
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, *_: Any) -> tuple:
    tensors = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[: 1 + W])
    nothing = (None,) * (T + 3)
    if dout is None:
        return (None,) * (1 + W) + nothing
    with without_autocast(dout):
        grads = torch.ops.dmst.attend_backward(dout, *tensors, wanted, ctx.form, ctx.step, ctx.dtype)
    return (*(grad if asked else None for grad, asked in zip(grads, wanted, strict=True)), *nothing)


def no_second(ctx: Any, *_: Any) -> tuple:
    raise DmstError(
        "The fused kernels have no second derivative: take the forward pass that it is asked of inside "
        'dmst.use_kernels("reference"), which has every order.'
    )


class _Between:
    """The library, for a formula that is asked only where there are gradients: else straight to the operator below.

    torch goes from the dispatcher to Python, back and to Python again, which costs the host a good part of the layer; inside
    compiled graphs there is never a gradient. Straight only where the dispatcher would come to `below` by itself: no mode, no
    transform, no subclass stands between.
    """

    def __init__(self, below: Callable[..., Any]) -> None:
        self.below = below

    def impl(self, name: str, kernel: Callable[..., Any], key: str, **options: Any) -> None:
        library.impl(name, kernel, key, **options)
        if key != "Autograd" or options != {"with_keyset": True}:  # torch registers formulas in another way now
            return
        below, after, grad = self.below, torch._C._after_ADInplaceOrView_keyset, torch.is_grad_enabled

        def quick(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if grad() or kwargs or (keyset & after).highestPriorityTypeId() not in _BACKENDS:
                return kernel(keyset, *args, **kwargs)
            return below(*args)

        for device in ("CPU", "CUDA"):
            library.impl(name, quick, f"Autograd{device}", with_keyset=True)


_BACKENDS = {torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA}


def differentiable(name: str, below: Callable[..., Any], formula: Callable[..., Any], setup: Callable[..., None]) -> None:
    lib: Any = _Between(below)
    torch.library.register_autograd(f"dmst::{name}", formula, setup_context=setup, lib=lib)


differentiable("attend", _forward, _differentiate, _setup)
differentiable("attend_backward", _backward, no_second, lambda ctx, inputs, output: None)


# --- operations -----------------------------------------------------------------------------------------------------


@register_flop_formula(torch.ops.dmst.attend)
def _flops(z: Any, subspace: Any, subspace_bias: Any, assign: Any, *_: Any, **__: Any) -> int:
    """Multiplications and additions of the products: 4 n d^2 + 2 n d k a sample."""
    b, n, d = z
    return 4 * b * n * d * d + (2 * b * n * d * assign[0] if assign else 0)


@register_flop_formula(torch.ops.dmst.attend_backward)
def _backward_flops(dout: Any, z: Any, subspace: Any, subspace_bias: Any, assign: Any, *rest: Any, **__: Any) -> int:
    """Twice those; where nothing was kept, once more without the output product."""
    forward, (b, n, d), text = _flops(z, subspace, subspace_bias, assign), z, rest[-3]
    return 2 * forward + (forward - 2 * b * n * d * d if Form.read(text).save == "nothing" else 0)
