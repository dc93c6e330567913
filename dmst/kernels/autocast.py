"""Autocast, switched off around what must stay in at least float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_is_on(z: Tensor) -> bool:
    return not z.is_meta and torch.is_autocast_enabled(z.device.type)  # meta knows no autocast, and says so by an error


def without_autocast(z: Tensor) -> AbstractContextManager:
    """No context at all where autocast is off, so that a traced graph stays plain."""
    return torch.autocast(z.device.type, enabled=False) if autocast_is_on(z) else nullcontext()
