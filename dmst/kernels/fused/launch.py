"""Kernels as operators that PyTorch knows.

    @op()                   above a function that allocates and launches: `dmst::name`, its annotations are the schema
    launch(kernel, grid, tensors and integers, CONSTANT=..., num_warps=...)      floats are constants: Inductor makes float64
                                                                                of those that are arguments

In plain eager calls the function itself runs: the dispatcher costs the host more than a launch. Everywhere else the operator
does. torch.compile looks inside (`torch.library.triton_op`) and launches the kernels itself. In Triton's interpreter, which it
cannot look into, an operator is one node; there the same function, without its launches, tells the shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import custom_op, triton_op, wrap_triton
from torch.utils.flop_counter import register_flop_formula

from dmst import rotary, tracing
from dmst.errors import DmstError
from dmst.kernels.choice import interpreted
from dmst.kernels.plan import power_of_two

PLAIN = {Tensor, torch.nn.Parameter, list, bool, int, float, str, torch.dtype, type(None)}  # a subclass may have no memory
Function = TypeVar("Function", bound=Callable[..., Any])


def op(*, mutates: Iterable[str] = ()) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        make = custom_op if interpreted() else triton_op
        known: Any = make(f"dmst::{function.__name__}", function, mutates_args=mutates)
        if interpreted():
            known.register_fake(function)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            plain = tracing.is_plain_eager() and PLAIN.issuperset(map(type, args))
            return function(*args) if plain else known(*args)

        return call  # type: ignore[return-value]

    return register


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    if interpreted():
        if not any(isinstance(x, FakeTensor) or (isinstance(x, Tensor) and x.is_meta) for x in args):
            kernel[grid](*args, **constants)
    elif tracing.is_plain_eager():
        _start(kernel, grid, args, constants)
    else:
        wrap_triton(kernel)[grid](*args, **constants)


_made: dict[tuple, tuple[Any, list]] = {}


def _start(kernel: Any, grid: tuple[int, ...], args: tuple, constants: dict[str, Any]) -> None:
    """kernel[grid](*args, **constants), less of the time that Triton takes to find what it made for a call of this kind."""
    kinds = [x.dtype if isinstance(x, Tensor) and x.data_ptr() % 16 == 0 else _kind(x) for x in args]
    key = (kernel.fn, torch.cuda.current_device(), *kinds, *constants.values())
    if key not in _made:
        _made[key] = kernel[grid](*args, **constants), [constants[name] for name in kernel.arg_names[len(args) :]]
        return
    made, values = _made[key]
    made[(*grid, 1, 1)](*args, *values)


def _kind(x: Any) -> Any:
    """What Triton makes a kernel for, if not for the dtype of an aligned tensor: of a number 1, 16 and 32 bits."""
    if isinstance(x, Tensor):
        return (x.dtype,)  # not aligned
    return x if x is None or x == 1 else (x % 16 == 0, x < 2**31)


def total(x: Tensor) -> Tensor:
    """The sum over all axes but the last. In bfloat16 as a product with ones: the library adds in float32 and reads at the
    speed of memory, torch's own sum of few columns takes five times as long."""
    rows = x.flatten(0, -2)
    if x.dtype != torch.bfloat16:
        return rows.sum(0, dtype=torch.float32)
    count = rows.shape[0]
    kept = rotary.cached(_ones, count if tracing.traced() else power_of_two(count), x.device, x.dtype)  # few lengths
    return torch.mm(kept[:, :count], rows).squeeze(0)


def _ones(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.ones(1, count, device=device, dtype=dtype)


def flops(name: str, count: Callable[..., int]) -> None:
    """Tell FLOP counters what `dmst::name` costs; `count` is given shapes in place of tensors."""
    register_flop_formula(getattr(torch.ops.dmst, name))(lambda *shapes, **_: count(*shapes))


class Once(torch.autograd.Function):
    """Hands on gradients that have none themselves, and says so: apply(how many, gradients, what they were computed from)."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> tuple:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple:
        raise DmstError(
            "The fused kernels have no second derivative: take the forward pass that it is asked of inside "
            'dmst.use_kernels("reference"), which has every order.'
        )
