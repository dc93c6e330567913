"""XCA, cross-covariance attention (XCiT): channels look at channels, linear in tokens. It descends no rate.

[q k v] = z W + bias, as (p, n) a head, rows of q and k scaled to length 1 over tokens
out( softmax_i'(temperature_k q_ki . k_ki') v_ki' )
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from dmst.errors import number
from dmst.kernels import without_autocast
from dmst.kernels.casting import wide
from dmst.operators.base import Grid, Operator, Parts, lineage_options


class XCA(Operator):
    """Attention between the p channels of a head; `Parts.attention` is (b, k, p, p)."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        bias: bool = True,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, num_heads)
        bias = lineage_options(XCA, bias, options)
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.temperature = nn.Parameter(torch.empty(num_heads, 1, 1, device=device, dtype=dtype))
        self.proj_drop = nn.Dropout(number("proj_drop", proj_drop, 0, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.ones_(self.temperature)

    def decompose(self, z: Tensor, *, grid: Grid = None) -> Parts:
        """`projected` is v: what is mixed."""
        self.check(z)
        q, k, v = rearrange(self.qkv(z), "b n (three k p) -> three b k n p", three=3, k=self.num_heads)
        with without_autocast(z):  # norms over many tokens overflow float16
            q, k = (F.normalize(wide(x), dim=-2) for x in (q, k))
            attention = (wide(self.temperature) * (q.transpose(-2, -1) @ k)).softmax(-1)
        return Parts(projected=v, attention=attention)

    def forward(self, z: Tensor, *, grid: Grid = None) -> Tensor:
        parts = self.decompose(z)
        assert parts.projected is not None and parts.attention is not None
        mixed = parts.projected @ parts.attention.transpose(-2, -1).to(parts.projected.dtype)
        return self.proj_drop(self.out(rearrange(mixed, "b k n p -> b n (k p)")))
