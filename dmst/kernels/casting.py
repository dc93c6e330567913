"""Dtypes and layouts of the core: at least float32 between the products and no autocast there; tensors as kernels want them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dmst import tracing


def wide(x: Tensor) -> Tensor:
    """At least float32; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cast(x: Any, dtype: torch.dtype) -> Any:
    """A tensor or None. `to` alone would take its time to find that there is nothing to do."""
    return x if x is None or x.dtype == dtype else x.to(dtype)


def aligned(x: Tensor) -> Tensor:
    """Contiguous, from an address that wide loads can use: with others a kernel is compiled anew and sums in another order."""
    x = x.contiguous()
    real = type(x) in (Tensor, torch.nn.Parameter) and not tracing.traced()
    return x.clone() if real and x.data_ptr() % 16 else x


def autocast_is_on(z: Tensor) -> bool:
    return not z.is_meta and torch.is_autocast_enabled(z.device.type)  # meta knows no autocast, and says so by an error


def without_autocast(z: Tensor) -> AbstractContextManager:
    """No context at all where autocast is off, so that a traced graph stays plain."""
    if not autocast_is_on(z):
        return nullcontext()
    return _Off(z.device.type) if tracing.is_plain_eager() else torch.autocast(z.device.type, enabled=False)


class _Off:
    """The switch alone: torch's own context costs the host more than a kernel."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.device, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self.device, True)
