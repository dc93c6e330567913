"""Tiles of tokens in tensors (b, n, k p) and (b, n, k), for the kernels that work by head.

A head is PARTS groups of WIDTH channels, so that all channels of a program follow each other in memory: 48 is 3 x 16. Where
PARTS is 1, WIDTH may be larger than P: a head is then padded, in registers only. Memory is read and written by rows of channels
and not by groups of them: else the compiler lets a warp load many short runs. What is computed is (tokens, groups, channels).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmst.kernels.choice import interpreted

COMPILED: tl.constexpr = tl.constexpr(not interpreted())


@triton.jit
def group_block(GROUPS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, P: tl.constexpr, first):
    """Groups of channels (GROUPS), the head of each, their columns in a token (GROUPS, WIDTH), and which of these exist."""
    group, channel = first + tl.arange(0, GROUPS), tl.arange(0, WIDTH)
    inside = (group[:, None] < K * PARTS) & (channel[None, :] < P // PARTS)
    return group, group // PARTS, group[:, None] * (P // PARTS) + channel[None, :], inside


@triton.jit
def rows(
    first, TOKENS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """Of a tensor (b, n, k p): where the channels of `first` and later groups lie, from the first token of a tile on (tokens,
    channels), which of them exist, and the tokens."""
    token, channel = tl.arange(0, TOKENS)[:, None], tl.arange(0, GROUPS * WIDTH)[None, :]
    group, channel = first + channel // WIDTH, channel % WIDTH
    known = (group < K * PARTS) & (channel < P // PARTS)
    return token * (K * P) + group * (P // PARTS) + channel, known, token


@triton.jit
def places(which, TOKENS: tl.constexpr, ALL: tl.constexpr):
    """The same of a tensor (b, n, ALL), for some heads or groups: (tokens, groups, 1)."""
    token, which = tl.arange(0, TOKENS)[:, None, None], which[None, :, None]
    return token * ALL + which, which < ALL, token


@triton.jit
def read(ptr, at, known, token, left):
    """Of a tile that has `left` tokens: 0 for others."""
    return tl.load(ptr + at, mask=known & (token < left), other=0.0)


@triton.jit
def write(ptr, x, at, known, token, left):
    """x (tokens, groups, channels) into rows."""
    tl.store(ptr + at, tl.reshape(x.to(ptr.dtype.element_ty), at.shape), mask=known & (token < left))


@triton.jit
def by_group(x, GROUPS: tl.constexpr):
    """Rows as (tokens, groups, channels), in float32."""
    return tl.reshape(x, (x.shape[0], GROUPS, x.shape[1] // GROUPS)).to(tl.float32)


@triton.jit
def held_on(x, count):
    """x in 16 bits, to be widened anew: else the compiler keeps what it was widened to before, in twice the registers. It does
    not know that count >= 0, so that nothing changes."""
    if COMPILED and x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, (count >> 31).to(tl.int16)], x.dtype, True, 2)
    return x
