"""The published operators, retyped from their papers' formulas and printed code: what ours are compared with.

Nothing here imports dmst. Listing: the appendix of the DMSA paper (arXiv 2601.17042), names as printed. TSSA: ToST's vision
code. MHSA: ordinary attention, one fused projection and PyTorch's kernel. In low precision they compute as their authors' do:
in the dtype itself, but for the rotation, which is made of float32 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rotary_table(dim: int, tokens: int, theta: float = 10000.0) -> Tensor:
    """exp(i n theta^(-2j/dim)), complex, (tokens, dim/2)."""
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2)[: dim // 2].double() / dim)
    angle = torch.outer(torch.arange(tokens).double(), frequency)
    return torch.polar(torch.ones_like(angle), angle)


def apply_rotary(x: Tensor, table: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    pairs = torch.view_as_complex(wide.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * table.to(pairs.dtype)).flatten(-2).type_as(x)


def soft_threshold(s: Tensor) -> Tensor:
    """ST over dimension 1, by sorting: the largest rho with 1 + rho s_(rho) > s_(1) + .. + s_(rho) sets the threshold."""
    ordered, _ = torch.sort(s, dim=1, descending=True)
    prefix = ordered.cumsum(1) - 1
    rank = torch.arange(1, s.shape[1] + 1, dtype=s.dtype, device=s.device).view(1, -1)
    support = (rank * ordered > prefix).sum(1, keepdim=True)
    return torch.clamp(s - prefix.gather(1, support - 1) / support.to(s.dtype), min=0)


def soft_threshold_topk(s: Tensor, topk: int) -> Tensor:
    """ST as its authors compute it: look at the `topk` largest; rows whose support may reach further look at twice as many."""
    k = min(topk, s.shape[1])
    ordered = torch.topk(s, k, dim=1).values
    prefix = ordered.cumsum(1) - 1
    rank = torch.arange(1, k + 1, dtype=s.dtype, device=s.device).view(1, -1)
    support = (rank * ordered > prefix).sum(1, keepdim=True)
    result = torch.clamp(s - prefix.gather(1, support - 1) / support.to(s.dtype), min=0)
    open_ended = (support == k).squeeze(1)
    if k < s.shape[1] and open_ended.any():
        result[open_ended] = soft_threshold_topk(s[open_ended], 2 * topk)
    return result


class AttentionDMSA(nn.Module):
    """The printed listing, line by line: rotated input to PI_linear, which is called twice; the gate before the square."""

    freqs_cis: Tensor

    def __init__(
        self, dim: int, num_heads: int = 8, qkv_bias: bool = False, tokens: int = 4096, table: torch.dtype = torch.complex64
    ) -> None:
        super().__init__()
        self.heads = num_heads
        self.qkv = nn.Linear(dim, dim, bias=qkv_bias)
        self.register_buffer("freqs_cis", rotary_table(dim, tokens).to(table))
        self.PI_linear = nn.Linear(dim, num_heads, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        s = self.qkv(x).view(b, n, self.heads, -1).transpose(1, 2)
        x = apply_rotary(x, self.freqs_cis[:n])
        gate = self.PI_linear(x).mean(dim=1)
        head_mask = soft_threshold(gate).view(b, self.heads, 1, 1)
        w = s * head_mask
        pi = torch.sigmoid(self.PI_linear(x).transpose(1, 2))
        dots = torch.matmul((pi / (pi.sum(dim=-1, keepdim=True) + 1e-8)).unsqueeze(-2), w**2)
        attn = 1.0 / (1 + dots)
        out = -torch.mul(w.mul(pi.unsqueeze(-1)), attn)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class AttentionTSSA(nn.Module):
    """TSSA as ToST's vision code computes it."""

    def __init__(self, dim: int, num_heads: int = 8, qkv_bias: bool = False) -> None:
        super().__init__()
        self.heads = num_heads
        self.qkv = nn.Linear(dim, dim, bias=qkv_bias)
        self.temp = nn.Parameter(torch.ones(num_heads, 1))
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        w = self.qkv(x).view(b, n, self.heads, -1).transpose(1, 2)
        normed = torch.nn.functional.normalize(w, dim=-2)
        pi = torch.softmax(torch.sum(normed**2, dim=-1) * self.temp, dim=1)
        dots = torch.matmul((pi / (pi.sum(dim=-1, keepdim=True) + 1e-8)).unsqueeze(-2), w**2)
        out = -torch.mul(w.mul(pi.unsqueeze(-1)), 1.0 / (1 + dots))
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class AttentionMHSA(nn.Module):
    """Softmax attention with PyTorch's own kernel."""

    def __init__(self, dim: int, num_heads: int = 8, qkv_bias: bool = False) -> None:
        super().__init__()
        self.heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(b, n, d))
