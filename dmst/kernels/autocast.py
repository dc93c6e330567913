"""Autocast, switched off around what must stay in at least float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dmst import tracing


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
