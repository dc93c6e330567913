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

from dmst import onednn, tracing
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

    def forward(self, cls: Tensor, patches: Tensor, last: bool = False) -> tuple[Tensor, Tensor]:
        """Both in, both out: (b, 1, d) and (b, n, d), which are joined nowhere but where k and v are made. With `last` nobody
        reads the patches afterwards, and they stay as they are."""
        u, rest = self.norm1(cls), self.norm1(patches)
        cls = self.norm2(self.attention_residual(cls, self.drop(self.out(self.look(u, rest)))))
        if not last:
            patches = 2 * self.norm2(self.attention_residual(patches, rest))
        return self.residual(cls, self.mlp(cls)), patches

    def look(self, cls: Tensor, patches: Tensor) -> Tensor:
        """What the class token sees, heads side by side (b, 1, d)."""
        q, k, v = self.project(cls, torch.cat((cls, patches), 1))
        heads = self.num_heads, cls.shape[-1] // self.num_heads
        q, k, v = (x.unflatten(-1, heads).transpose(1, 2) for x in (q, k, v))
        return rearrange(F.scaled_dot_product_attention(q, k, v), "b k n p -> b n (k p)")

    def project(self, cls: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q of cls; k and v of all tokens. An adapter or a hook gets to see all of `qkv`."""
        if not tracing.is_plain(self.qkv):
            q, k, v = self.qkv(tokens).chunk(3, -1)
            return q[:, :1], k, v
        sizes = [cls.shape[-1], 2 * cls.shape[-1]]  # split, not sliced: on the way back one tensor is written, without zeros
        weights, bias = self.qkv.weight.split(sizes), self.qkv.bias
        biases = (None, None) if bias is None else bias.split(sizes)
        q = F.linear(cls, weights[0], biases[0])
        k, v = onednn.linear(tokens, weights[1], biases[1]).chunk(2, -1)
        return q, k, v
