"""MHSA, ordinary softmax attention: the baseline. It descends no rate.

[q k v] = z W + bias        out( softmax_n'(q_nk . k_n'k / sqrt p) v_n'k )
"""

from __future__ import annotations

from typing import Any

from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from dmst.errors import number
from dmst.kernels import without_autocast
from dmst.kernels.casting import wide
from dmst.operators.base import Grid, Operator, Parts, lineage_options


class MHSA(Operator):
    """Every token looks at every token; n^2 in tokens."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, num_heads)
        scale = options.pop("qk_scale", None)
        bias = lineage_options(MHSA, bias, options)
        self.scale = self.head_dim**-0.5 if scale is None else number("qk_scale", scale, -1e6, 1e6)
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.attn_drop = number("attn_drop", attn_drop, 0, 1)
        self.proj_drop = nn.Dropout(number("proj_drop", proj_drop, 0, 1))
        self.reset_parameters()

    def _project(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.check(z)
        q, k, v = rearrange(self.qkv(z), "b n (three k p) -> three b k n p", three=3, k=self.num_heads)
        return q, k, v

    def forward(self, z: Tensor, *, grid: Grid = None) -> Tensor:
        q, k, v = self._project(z)
        drop = self.attn_drop if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, scale=self.scale)
        return self.proj_drop(self.out(rearrange(mixed, "b k n p -> b n (k p)")))

    def decompose(self, z: Tensor, *, grid: Grid = None) -> Parts:
        """`projected` is v: what is mixed."""
        q, k, v = self._project(z)
        with without_autocast(z):
            attention = (wide(q) @ wide(k).mT * self.scale).softmax(-1)
        return Parts(projected=v, attention=attention)
