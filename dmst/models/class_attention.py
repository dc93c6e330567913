"""Class attention (CaiT, XCiT): a class token looks at the patches and leaves them almost alone.

    x = [cls, patches]    u = norm1(x)    q of cls; k, v of all
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
from dmst.models.linear import Linear
from dmst.models.residual import Residual


class ClassAttentionBlock(nn.Module):
    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        dim = config.dim
        self.num_heads = config.num_heads
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, **factory)
        self.qkv = Linear(dim, 3 * dim, bias=config.qkv_bias, **factory)
        self.out = Linear(dim, dim, **factory)
        self.attention_residual = Residual(dim, config.layer_scale, **factory)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, **factory)
        self.mlp = Mlp(config, **factory)
        self.residual = Residual(dim, config.layer_scale, **factory)
        self.drop = nn.Dropout(config.proj_drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        u = self.norm1(x)
        q, k, v = rearrange(self.qkv(u), "b n (three k p) -> three b k n p", three=3, k=self.num_heads)
        mixed = rearrange(F.scaled_dot_product_attention(q[:, :, :1], k, v), "b k n p -> b n (k p)")
        attended = self.drop(self.out(mixed))
        x = self.norm2(self.attention_residual(x, torch.cat((attended, u[:, 1:]), 1)))
        cls, patches = x[:, :1], x[:, 1:]
        cls = self.residual(cls, self.mlp(cls))
        return torch.cat((cls, 2 * patches), 1)
