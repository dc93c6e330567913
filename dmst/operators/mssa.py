"""MSSA, Multi-head Subspace Self-Attention (CRATE).

    s_nk = z_n U_k        mix_k = softmax(s_k s_k^T / sqrt p) s_k

    plain      out( mix )                                    free output with bias, as CRATE's code (which has bias=False)
    relaxed    kappa ( sum_k mix_k U_k^T - z )               tied, so that z + update = (1 - kappa) z + kappa sum_k mix_k U_k^T

In words: q, k and v are one projection. With orthonormal subspaces and kappa = .3 the relaxed step lowered `subspace_rate` in
every random draw tried; CRATE's plain residual z + MSSA(z) raised it in every one (norms grow; the next LayerNorm hides it).
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from dmst import objective
from dmst.errors import OptionError, number, shown
from dmst.kernels import without_autocast
from dmst.kernels.casting import wide
from dmst.operators.base import Grid, Operator, Parts, lineage_options


class MSSA(Operator):
    """One projection, softmax similarity inside each subspace; n^2 in tokens."""

    out: nn.Linear | None

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        relaxed: float | None = None,
        bias: bool = True,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, num_heads)
        bias = lineage_options(MSSA, bias, options)
        if relaxed is not None and (type(relaxed) not in (int, float) or not 0 < relaxed <= 1):
            raise OptionError(
                f"relaxed is {shown(relaxed)}: the step kappa must be above 0 and at most 1, or None for CRATE's plain form."
            )
        self.relaxed = relaxed
        self.subspace = nn.Linear(dim, dim, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(dim, dim, device=device, dtype=dtype) if relaxed is None else None
        self.proj_drop = nn.Dropout(number("proj_drop", proj_drop, 0, 1))
        self.reset_parameters()

    def _project(self, z: Tensor) -> Tensor:
        self.check(z)
        return rearrange(self.subspace(z), "b n (k p) -> b k n p", k=self.num_heads)

    def forward(self, z: Tensor, *, grid: Grid = None) -> Tensor:
        s = self._project(z)
        mixed = rearrange(F.scaled_dot_product_attention(s, s, s), "b k n p -> b n (k p)")
        if self.out is None:
            assert self.relaxed is not None
            return self.proj_drop(self.relaxed * (F.linear(mixed, self.subspace.weight.transpose(-2, -1)) - z))
        return self.proj_drop(self.out(mixed))

    def decompose(self, z: Tensor, *, grid: Grid = None) -> Parts:
        s = self._project(z)
        with without_autocast(z):
            attention = (wide(s) @ wide(s).mT * self.head_dim**-0.5).softmax(-1)
        return Parts(projected=s, attention=attention)

    def subspaces(self) -> Tensor:
        return rearrange(self.subspace.weight, "(k p) d -> k d p", k=self.num_heads)

    def rate(self, z: Tensor, *, eps: float, grid: Grid = None) -> Tensor:
        subspaces = self.subspaces()
        if self.subspace.bias is not None:  # the coordinates that are mixed: a constant channel carries the bias
            z = torch.cat((z, torch.ones_like(z[..., :1])), -1)
            bias = rearrange(self.subspace.bias, "(k p) -> k 1 p", k=self.num_heads)
            subspaces = torch.cat((subspaces, bias), 1)
        return objective.subspace_rate(z, subspaces, eps=eps)
