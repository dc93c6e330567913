"""What one head does to one token, for every kernel that needs it.

a = 1/(1 + g^2 T)      listing  c = -g a      equation  c = -g^2 a      proximal  c = theta g^2 a
update = f s           listing, equation  f = pi c                              proximal  f = -w/(1+w), w = pi c
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmst.kernels.choice import interpreted

MODES = {"listing": 0, "equation": 1, "proximal": 2}
LISTING: tl.constexpr = tl.constexpr(0)
PROXIMAL: tl.constexpr = tl.constexpr(2)
COMPILED: tl.constexpr = tl.constexpr(not interpreted())


@triton.jit
def rounded(product):
    """A product by itself, not as the first half of a fused multiply and add, where threads add up each other's products.

    There a + b is taken by both of two threads, with their own product unrounded: two sums that may differ in the last bit, and
    both threads store theirs in one place (triton-lang/triton issue 7264; racecheck reports it). Not needed where a thread
    holds several products of a sum, as in large tiles: it adds up its own first.
    """
    return product + 0.0


@triton.jit
def held_on(x, n):
    """x in 16 bits, to be widened anew: otherwise the compiler keeps what it was widened to before, in twice the registers. Only
    we know that n is not negative, and that therefore nothing changes."""
    if COMPILED and x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, (n >> 31).to(tl.int16)], x.dtype, True, 2)
    return x


@triton.jit
def attenuation(moment, gate):
    return 1.0 / (1.0 + gate * gate * moment)


@triton.jit
def factor(a, gate, theta, MODE: tl.constexpr):
    """c, from the attenuation a."""
    if MODE == PROXIMAL:
        return theta * gate * gate * a
    if MODE == LISTING:
        return -gate * a
    return -gate * gate * a


@triton.jit
def weigh(membership, c, MODE: tl.constexpr):
    """f, what the projected token is multiplied by."""
    w = membership * c
    if MODE == PROXIMAL:
        return -w / (1.0 + w)
    return w


@triton.jit
def group_block(GROUPS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, P: tl.constexpr, first):
    """Groups of channels (GROUPS), the head of each, their columns in a token (GROUPS, WIDTH), and which of these exist. PARTS
    groups make a head, so that all channels of a program follow each other in memory. Where PARTS is 1, WIDTH may be larger
    than P: a head is then padded, in registers only."""
    group, channel = first + tl.arange(0, GROUPS), tl.arange(0, WIDTH)
    inside = (group[:, None] < K * PARTS) & (channel[None, :] < P // PARTS)
    return group, group // PARTS, group[:, None] * (P // PARTS) + channel[None, :], inside


@triton.jit
def rows(
    first,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
):
    """Of a tensor (b, n, k p): where the channels of `first` and later groups lie from the first token of a tile on (tokens,
    channels), which exist, and the tokens. Rows, not groups: else the compiler lets a warp load many short runs."""
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
