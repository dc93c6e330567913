"""Numerical cores. `attend` is the layer; which file computes it is decided here and nowhere else.

traced, or forward-mode derivatives       reference     plain torch: the compiler fuses it and chooses what to keep
a gradient is wanted                      closed_form   one autograd function, keeps 2 n d
no gradient, CPU, sparsemax gate, eager   silent        heads with gate 0 left out where that is faster
no gradient, otherwise                    reference
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dmst import watched
from dmst.kernels import closed_form, reference, silent
from dmst.kernels.autocast import autocast_is_on, without_autocast
from dmst.kernels.form import Form, Weights

__all__ = ["Form", "Weights", "attend", "compute_dtype", "reference", "without_autocast"]


def compute_dtype(z: Tensor) -> torch.dtype:
    """The dtype of the large projections: autocast's where it is on (it leaves float64 alone), else that of z."""
    if autocast_is_on(z) and z.dtype != torch.float64:
        return torch.get_autocast_dtype(z.device.type)
    return z.dtype


def attend(z: Tensor, weights: Weights, form: Form, *, grid: tuple[int, int] | None = None) -> Tensor:
    """The layer on z (b, n, d): projections in the compute dtype, everything between them in at least float32."""
    kernel, dtype = _choose(z, weights, form), compute_dtype(z)
    with without_autocast(z):  # the scores must not be rounded on their way
        return kernel(z, weights, form, grid=grid, dtype=dtype)


def _choose(z: Tensor, weights: Weights, form: Form) -> Callable[..., Tensor]:
    if watched.traced() or watched.dual():
        return reference.attend
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (z, *weights)):
        return closed_form.attend
    readable = not (watched.transformed() or watched.dispatched())  # by the host: which heads are on
    if z.device.type == "cpu" and form.gate == "sparsemax" and readable:
        return silent.attend
    return reference.attend
