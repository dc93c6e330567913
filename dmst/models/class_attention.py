"""Class attention (CaiT, XCiT): a class token looks at the patches and leaves them almost alone.

    u = norm1([cls, patches])    [q k v] = u W + bias; q of cls alone is used
    cls    <- norm2(cls + scale * out(softmax(q k^T / sqrt p) v))        cls    <- cls + scale * mlp(cls)
    patch  <- norm2(patch + scale * u_patch)                             patch  <- 2 patch

The residual goes around the *normed* cls, and it doubles the patches as a side effect; the next norm hides that. Kept, so that
weights of the lineage mean the same here.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from dmst.models.config import ModelConfig
from dmst.models.feedforward import Mlp
from dmst.models.residual import Residual
from dmst.one_node import OneNode
from dmst.operators.base import linear


class ClassAttentionBlock(OneNode):
    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        dim = config.dim
        self.num_heads = config.num_heads
        self.norm1 = nn.LayerNorm(dim, eps=config.norm_eps, **factory)
        self.qkv = linear(dim, 3 * dim, bias=config.qkv_bias, **factory)
        self.out = linear(dim, dim, **factory)
        self.attention_residual = Residual(dim, config.layer_scale, **factory)
        self.norm2 = nn.LayerNorm(dim, eps=config.norm_eps, **factory)
        self.mlp = Mlp(config, **factory)
        self.residual = Residual(dim, config.layer_scale, **factory)
        self.drop = nn.Dropout(config.proj_drop_rate)

    def forward(self, cls: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Both in, both out: (b, 1, d) and (b, n, d), which are joined nowhere but where k and v are made."""
        u, rest = self.norm1(cls), self.norm1(patches)
        cls = self.norm2(self.attention_residual(cls, self.drop(self.out(self.look(u, rest)))))
        patches = self.norm2(self.attention_residual(patches, rest))
        return self.residual(cls, self.mlp(cls)), 2 * patches

    def look(self, cls: Tensor, patches: Tensor) -> Tensor:
        """What the class token sees, heads side by side (b, 1, d)."""
        q, k, v = self.qkv(torch.cat((cls, patches), 1)).chunk(3, -1)
        heads = self.num_heads, cls.shape[-1] // self.num_heads
        q, k, v = (x.unflatten(-1, heads).transpose(1, 2) for x in (q[:, :1], k, v))
        return rearrange(F.scaled_dot_product_attention(q, k, v), "b k n p -> b n (k p)")
