"""Gated channel attention: DMSA without its gate, its membership out of the moment, and the opposite sign.

    G_nk = sigmoid(<rot_n z_n, w_k>)        T_ki = mean_n s_nki^2        out( +G a s ),   a_ki = 1 / (1 + T_ki)

In words: channel attention, each head's output multiplied by a sigmoid gate per token (the G1 gate of gated attention).
The paper calls it a special case of DMSA. What is true: in DMSA's listing the G1 gate is the membership, not the sparse gate.
`moment_weight="membership"` weighs the moment by G. It descends no rate: its sign is that of an expansion.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dmst.errors import choose
from dmst.kernels import Form
from dmst.operators.base import Grid
from dmst.operators.family import TokenStatistics


class GatedChannel(TokenStatistics):
    """A sigmoid gate per token and head on channel attention. `Parts.membership` is G."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        moment_weight: str = "uniform",
        rotary: str = "1d",
        **options: Any,
    ) -> None:
        uniform = choose("moment_weight", moment_weight, ("uniform", "membership")) == "uniform"
        form = Form(num_heads=num_heads, gate=None, rotary=rotary, uniform_moment=uniform, sign=1.0)
        super().__init__(dim, form, **options)

    def rate(self, z: Tensor, *, eps: float, grid: Grid = None) -> None:
        return None
