"""Linear maps with the lineage's start. Plain `nn.Linear`s, which every tool knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dmst.operators.base import start


def linear(inputs: int, outputs: int, *, bias: bool = True, device: Any = None, dtype: Any = None) -> nn.Linear:
    place = torch.get_default_device() if device is None else device
    made = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, device=place, dtype=dtype)  # nothing else is drawn
    start(made)
    return made
