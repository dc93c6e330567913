"""Layers to compare kernels on, and how far from float64 they may be.

    exact   the reference in float64, of the same rounded numbers
    plain   the reference in the same dtype, by autograd
    fused   the Triton kernels: on a GPU where there is one, else in Triton's interpreter

Weights of nn.Linear's size meet the bars of `BARS` (docs/reliability.md 3.7). Weights of size 1, at which gates close and
memberships saturate, cannot: no float32 arithmetic does. There the error may be twice (output) or three times (gradient) that
of `plain`, or what moving every input by half a bit of float32 does to `exact`. theta, temperature and the bias of the scores
are sums whose terms cancel: their bar is relative to the sizes of the terms.

A fused kernel that fails falls back to plain torch with a warning, and a warning is an error in these tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dmst import kernels, use_kernels
from dmst.kernels import Form, Weights, choice, plan, reference
from dmst.operators import DMSA, create
from tests.cases import build, excite, grid_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
BARS = {F32: (1e-6, 2e-6), BF16: (5e-3, 1e-2), F16: (1e-3, 2e-3)}  # of the output, of a gradient
CANCELLING = ("theta", "temperature", "assign_bias")
PRECISE = [
    ("dmsa", {}), ("dmsa", {"mode": "equation"}), ("dmsa", {"mode": "proximal"}), ("dmsa", {"rotary": "2d"}),
    ("tssa", {}),
]  # fmt: skip
LISTING, EQUATION, PROXIMAL, TSSA = PRECISE[0], PRECISE[1], PRECISE[2], PRECISE[4]

on_gpu = [pytest.mark.gpu] if DEVICE == "cuda" else []
needs_triton = [
    *on_gpu,
    pytest.mark.skipif(
        bool(choice.triton_problem()) or not (DEVICE == "cuda" or choice.interpreted()),
        reason=choice.triton_problem() or "neither a CUDA device nor Triton's interpreter (TRITON_INTERPRET=1)",
    ),
    # the interpreter is numpy, which warns where a NaN or an infinity is meant
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|All-NaN slice) encountered:RuntimeWarning"),
]


def by_default(cases: list, count: int) -> list:
    """The first so many in the default run, and all of them in the slow one."""
    return [*cases[:count], *(pytest.param(case, marks=pytest.mark.interpreter) for case in cases[count:])]


def excess(found: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Relative error beyond one subnormal of the dtype for each element."""
    subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    error = (found.double() - exact).norm() - subnormal * exact.numel() ** 0.5
    return (error.clamp(min=0) / exact.norm().clamp(min=1e-300)).item()


# --- a layer and its computations -------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """Tokens, weights and output gradient, stored in float32, in numbers that the dtype they were drawn for can hold."""

    z: Tensor
    weights: Weights
    form: Form
    grad: Tensor
    grid: tuple[int, int]

    def map(self, change: Callable[[Tensor], Tensor]) -> Layer:
        weights = Weights(*(None if w is None else change(w) for w in self.weights))
        return Layer(change(self.z), weights, self.form, change(self.grad), self.grid)


def rounded(case: tuple, dtype: torch.dtype, scale: float, b: int, n: int, d: int, heads: int) -> tuple:
    """Weights of nn.Linear's size, tokens and output gradient, all of which `dtype` can hold; stored in float32."""
    operator = create(case[0], d, heads, **case[1]).eval()
    if "proximal" in case[1].values():  # a rounded matrix is not orthonormal any more: take it as the numbers it is
        basis = operator.subspace.weight.detach()
        operator.subspace = nn.Linear(d, d)
        operator.subspace.weight.data.copy_(basis)
    with torch.no_grad():
        for key, parameter in operator.named_parameters():
            if parameter.shape == (d, d) and operator.state_dict().keys() >= {"theta"}:
                pass  # orthonormal, then rounded
            elif key.split(".")[0] in ("subspace", "assign", "out", "qkv"):
                parameter.uniform_(-(d**-0.5), d**-0.5)
            parameter.copy_(parameter.to(dtype))
    z = (scale * torch.randn(b, n, d)).to(dtype).float()
    return operator, z, torch.randn(b, n, d).to(dtype).float()


def draw(
    case: tuple, shape: tuple[int, int, int, int], dtype: torch.dtype = F32, *,
    scale: float = 1.0, excited: bool = False, device: str = DEVICE,
) -> Layer:  # fmt: skip
    """A layer of shape (b, n, d, k); `excited` with weights of size 1."""
    b, n, d, k = shape
    if excited:
        operator = build(*case, dim=d, heads=k, dtype=F32)
        z, grad = scale * torch.randn(b, n, d), torch.randn(b, n, d)
    else:
        operator, z, grad = rounded(case, dtype, scale, b, n, d, k)
    made = Layer(z, operator.weights(), operator.form, grad, grid_of(n))
    return made.map(lambda x: x.detach().to(dtype).float().contiguous().to(device))


def differentiate(attend: Callable[..., Tensor], made: Layer, wanted: Weights | None = None) -> dict[str, Tensor | None]:
    """The output, dz and the gradient of each weight there is (or is `wanted`)."""
    z = made.z.detach().requires_grad_()
    asked = {
        name: w.detach().requires_grad_()
        for name, w, ask in zip(Weights._fields, made.weights, wanted or (True,) * len(made.weights), strict=True)
        if w is not None and ask
    }
    out = attend(z, made.weights._replace(**asked), made.form, grid=made.grid)
    found = torch.autograd.grad(out, (z, *asked.values()), made.grad.to(out.dtype), allow_unused=True)
    return {"output": out.detach(), **dict(zip(("z", *asked), found, strict=True))}


def fused(made: Layer, dtype: torch.dtype = F32, **options: Any) -> dict[str, Tensor | None]:
    """By the fused kernels, under autocast where the dtype is a low one and the layer is stored in float32."""
    low = dtype != F32 and made.z.dtype == F32
    with use_kernels("fused"), torch.autocast(made.z.device.type, dtype=dtype if low else F16, enabled=low):
        return differentiate(kernels.attend, made, **options)


def plain(made: Layer, dtype: torch.dtype = F32) -> dict[str, Tensor | None]:
    return differentiate(functools.partial(reference.attend, dtype=dtype), made)


def exact(made: Layer) -> dict[str, Tensor | None]:
    return plain(made.map(Tensor.double), F64)


# --- the bars ---------------------------------------------------------------------------------------------------------


def nudged(x: Tensor) -> Tensor:
    """Half a bit of float32 up or down, each number by itself."""
    return x * (1 + 2.0**-24 * (2 * torch.randint(0, 2, x.shape, device=x.device) - 1))


def size_of_terms(made: Layer, name: str) -> float:
    """sum |terms| of the sum that a gradient is: over tokens for the bias of the scores, else over the output's elements."""
    wide = made.map(Tensor.double)
    value = getattr(wide.weights, name)
    if name == "assign_bias":
        scores = reference.score(wide.z, wide.weights, wide.form, wide.grid).requires_grad_()
        projected = reference.project(wide.z, wide.weights, wide.form.num_heads, F64)
        steps = reference.steps_from(projected, scores, wide.weights.temperature, wide.form)
        out = reference.project_out(reference.update_of(steps, wide.weights.theta, wide.form), wide.weights, F64)
        return torch.autograd.grad(out, scores, wide.grad)[0].abs().sum((0, 2)).norm().item()

    def by(x: Tensor) -> Tensor:
        return reference.attend(wide.z, wide.weights._replace(**{name: x}), wide.form, grid=wide.grid, dtype=F64)

    sizes = []
    for index in range(value.numel()):
        along = torch.zeros_like(value)
        along.view(-1)[index] = 1e-5
        sizes.append((wide.grad * (by(value + along) - by(value - along)) / 2e-5).abs().sum())
    return torch.stack(sizes).norm().item()


def check(
    found: dict[str, Tensor | None], made: Layer, dtype: torch.dtype = F32, *,
    like_plain: bool = False, scale: float = 1.0, some: bool = False,
) -> None:  # fmt: skip
    """`found` is as near to float64 as its bars ask; with `like_plain` as near as the plain reference, or the bars."""
    told = exact(made)
    if some:  # only those weights were asked for
        told = {name: right for name, right in told.items() if name in found}
    others = (plain(made, dtype), exact(made.map(Tensor.double).map(nudged))) if like_plain else ()
    bars = (1e-4, 5e-4) if dtype == F32 and scale != 1 else BARS[dtype]
    assert found.keys() == told.keys()
    for name, right in told.items():
        mine = found[name]
        if right is None:
            assert mine is None or mine.count_nonzero() == 0, name
            continue
        assert mine is not None, name
        assert mine.shape == right.shape, name
        assert mine.isfinite().all() == right.isfinite().all(), name
        bar, ratio = (bars[0], 2) if name == "output" else (bars[1], 3)
        if name in CANCELLING:
            bar = bar * size_of_terms(made, name) / right.norm().clamp(min=1e-300).item()
        bar = max(bar, *(ratio * excess(other[name], right, dtype) for other in others), 0.0)
        assert excess(mine, right, dtype) <= bar, (name, excess(mine, right, dtype), bar)


@contextmanager
def decided_anew() -> Iterator[None]:
    """Inside, `plan` decides by what a test has set."""
    plan.forget()
    yield
    plan.forget()


def same_bits(found: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> None:
    """Everything in `found` is that of `right`."""
    for name, value in found.items():
        assert (value is None and right[name] is None) or torch.equal(value, right[name]), name


# --- memory -----------------------------------------------------------------------------------------------------------


def guarded(x: Tensor) -> Tensor:
    """The same numbers at the start of a memory that goes on with NaN for longer than any tile."""
    memory = torch.full((x.numel() + 16_384,), float("nan"), dtype=x.dtype, device=x.device)
    return memory[: x.numel()].view(x.shape).copy_(x)


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """torch fills what it allocates with NaN while its algorithms have to be deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def strided(x: Tensor) -> Tensor:
    """The same numbers, every second one of a memory full of NaN along each axis."""
    memory = torch.full([2 * size for size in x.shape], float("nan"), dtype=x.dtype, device=x.device)
    return memory[tuple(slice(None, None, 2) for _ in x.shape)].copy_(x)


def transposed(x: Tensor) -> Tensor:
    """The same numbers with the last two axes swapped in memory, if there are two."""
    return x.mT.contiguous().mT if x.ndim > 1 else x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a map (b, c, h, w)": transposed,
    "every second token": lambda x: torch.stack((x, torch.full_like(x, float("nan"))), 2).flatten(1, 2)[:, ::2],
    "every second channel": strided,
    "batch last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "not aligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}


class Net(nn.Module):
    """Two layers with a residual, for tests of whole training steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([excite(DMSA(24, 3)), excite(DMSA(24, 3, mode="equation"))])

    def forward(self, z: Tensor) -> Tensor:
        for inner in self.layers:
            z = z + inner(z)
        return z
