"""Numerical cores. `attend` is the layer; `choice.py` decides which file computes it."""

from __future__ import annotations

import torch
from torch import Tensor

from dmst.errors import ShapeError
from dmst.kernels import reference
from dmst.kernels.casting import autocast_is_on, without_autocast
from dmst.kernels.choice import AnyForm, AnyWeights, kernel_for, use_kernels
from dmst.kernels.form import Form, Weights

__all__ = ["Form", "Weights", "attend", "compute_dtype", "reference", "use_kernels", "without_autocast"]


def compute_dtype(z: Tensor) -> torch.dtype:
    """The dtype of the large projections: autocast's where it is on (it leaves float64 alone), else that of z."""
    if autocast_is_on(z) and z.dtype != torch.float64:
        return torch.get_autocast_dtype(z.device.type)
    return z.dtype


def attend(z: Tensor, weights: AnyWeights, form: AnyForm, *, grid: tuple[int, int] | None = None) -> Tensor:
    """The layer on z (b, n, d): projections in the compute dtype, everything between them in at least float32."""
    check(z, weights, form)
    dtype = compute_dtype(z)
    kernel = kernel_for(z, weights, form, dtype)
    with without_autocast(z):  # the scores must not be rounded on their way
        return kernel(z, weights, form, grid=grid, dtype=dtype)


def check(z: Tensor, weights: AnyWeights, form: AnyForm) -> None:
    """Refuse what does not fit before anything is launched: a kernel would read beyond its memory."""
    if z.ndim != 3 or not z.is_floating_point():
        raise ShapeError(f"z is {tuple(z.shape)} in {z.dtype}: it must be (batch, tokens, width) in a floating-point dtype.")
    d, k = z.shape[-1], form.num_heads
    if d % k:
        raise ShapeError(f"z has width {d}, which {k} heads do not divide.")
    for name, shape in form.shapes(d).items():
        weight = getattr(weights, name)
        if weight is None:
            continue
        if weight.shape != shape:
            raise ShapeError(f"{name} has shape {tuple(weight.shape)}: for z of width {d} and {k} heads it must be {shape}.")
        if weight.device != z.device:
            raise ShapeError(f"{name} is on {weight.device} and z on {z.device}: move one with .to().")
