"""Two habits of the core's arithmetic: at least float32 everywhere, and buffers that are used again.

On the CPU most of the time of an elementwise pass goes into touching new memory, so a product whose left side is a temporary of
ours is written over it, unless somebody is looking: autograd, a compiler, a transform.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from dmst import tracing


def wide(x: Tensor) -> Tensor:
    """At least float32; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def in_place() -> bool:
    """Whether a temporary may be overwritten."""
    return not (torch.is_grad_enabled() or tracing.traced() or tracing.transformed())


def free(buffer: Tensor | None, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """Whether something of this dtype may be written into a buffer."""
    return buffer is not None and buffer.dtype == dtype and in_place()


def add(mine: Tensor, other: Tensor) -> Tensor:
    """mine + other, into `mine`, which nobody else may read afterwards."""
    return mine.add_(other) if in_place() else mine + other


def times(mine: Tensor, other: Tensor) -> Tensor:
    """mine * other, into `mine` likewise."""
    return mine.mul_(other) if in_place() else mine * other


def over(mine: Tensor, other: Tensor) -> Tensor:
    """mine / other, into `mine` likewise."""
    return mine.div_(other) if in_place() else mine / other


def product(x: Tensor, y: Tensor, into: Tensor | None) -> Tensor:
    """x * y, into a buffer of the same shape whose content is done with."""
    return torch.mul(x, y, out=into) if free(into, x.dtype) else x * y


def aligned(x: Tensor) -> Tensor:
    """Contiguous, from an address that wide loads can use: with others a kernel is compiled anew and sums in another order."""
    x = x.contiguous()
    real = type(x) in (Tensor, torch.nn.Parameter) and not tracing.traced()
    return x.clone() if real and x.data_ptr() % 16 else x


def cast(x: Any, dtype: torch.dtype) -> Any:
    """A tensor or None. `to` alone would take its time to find that there is nothing to do."""
    return x if x is None or x.dtype == dtype else x.to(dtype)
