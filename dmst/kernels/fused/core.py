"""What one head does to one token, for every kernel that needs it.

a = 1/(1 + g^2 T)      listing  c = -g a      equation  c = -g^2 a      proximal  c = theta g^2 a
update = f s           listing, equation  f = pi c                              proximal  f = -w/(1+w), w = pi c
"""

from __future__ import annotations

import triton
import triton.language as tl

MODES = {"listing": 0, "equation": 1, "proximal": 2}
LISTING: tl.constexpr = tl.constexpr(0)
PROXIMAL: tl.constexpr = tl.constexpr(2)


@triton.jit
def rounded(product):
    """A product by itself, not as the first half of a fused multiply and add, where threads add up each other's products.

    There a + b is taken by both of two threads, with their own product unrounded: two sums that may differ in the last bit, and
    both threads store theirs in one place (triton-lang/triton issue 7264; racecheck reports it). Not needed where a thread
    holds several products of a sum, as in large tiles: it adds up its own first.
    """
    return product + 0.0


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
