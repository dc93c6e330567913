"""How the fused layer is cut into programs: a function of the shape, so that equal shapes give equal bits.

Chosen by times on one H200 in bfloat16 at width 384 with 8 heads (docs/kernels.md); other widths follow unmeasured. Nothing is
tuned at run time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

STEP = 32  # tokens in one rotary step: a tile of the score kernels lies within one
PROGRAMS = 512  # about what fills the device: samples are split over programs until there are so many
ASSIGN_PROGRAMS = 132  # rows of partial sums for the gradient of `assign`
BY_HAND = 16384  # rows from which our own product serves
NORM_PROGRAMS = 4224  # rows of partial sums for the gradients of a norm's weights
MOST_HEADS = 64
MOST_KEYS = 64  # of GMSA: channels of a key
MOST_MEANS = 2048  # and groups times channels, both padded: what 99 KiB of shared memory hold
WIDEST = 128  # channels of one head
WIDEST_NORM = 1024  # channels of a token that registers hold


class Sweep(NamedTuple):
    """A pass over (tokens, heads, channels) of each sample."""

    heads: int  # a program
    width: int  # p, padded
    tokens: int  # a step of its loop
    splits: int  # programs along the tokens of one sample
    span: int  # tokens of one of them
    warps: int
    stages: int


def over(a: int, b: int) -> int:
    """a / b, rounded up."""
    return (a + b - 1) // b


def power_of_two(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


def sweep(b: int, n: int, k: int, p: int) -> Sweep:
    width = power_of_two(p)
    heads = max(1, min(power_of_two(k), 256 // width))
    tokens = max(1, 2048 // (heads * width))
    splits = max(1, min(over(PROGRAMS, b * over(k, heads)), over(n, max(tokens, 64))))
    span = over(over(n, splits), tokens) * tokens
    return Sweep(heads, width, tokens, over(n, span), span, warps=4, stages=3)


def whole(b: int, n: int, k: int, p: int) -> Sweep | None:
    """Each sample in one program for its heads, twice over its tokens; None where there are too few samples for that."""
    width = power_of_two(p)
    for columns, least in ((256, PROGRAMS), (128, PROGRAMS // 2)):
        heads = max(1, min(power_of_two(k), columns // width))
        if b * over(k, heads) >= least:
            tokens = max(1, 8192 // (heads * width))
            return Sweep(heads, width, tokens, 1, over(n, tokens) * tokens, warps=4, stages=3)
    return None


class Tile(NamedTuple):
    """Of tokens and channels, for the kernels of the scores: a thread has eight neighbouring channels of a few tokens."""

    tokens: int
    channels: int
    warps: int


def score(d: int) -> Tile:
    return Tile(32, min(64, max(8, power_of_two(d))), 2)


def into_tokens(d: int) -> Tile:
    return Tile(16, min(128, max(8, power_of_two(d))), 4)


def into_assign(d: int) -> Tile:
    return Tile(16, min(32, max(8, power_of_two(d))), 1)


def norm(d: int) -> Tile:
    """Rows of all channels, in chunks: at most 64 numbers a thread."""
    return Tile(4 if d <= 512 else 2, _chunk(d), 1)


def norm_adjoint(d: int) -> Tile:
    """A row at a time: a program keeps two sums for each of its channels."""
    return Tile(1, _chunk(d), 1)


def _chunk(d: int) -> int:
    """Channels; 64 where chunks of 128 would leave the last one half empty."""
    return 64 if d % 128 == 64 and d <= 512 else min(128, max(8, power_of_two(d)))


def step(d: int, dtype: torch.dtype) -> bool:
    """Whether a block takes its residual step in one. float16 has no room for an output weight times a small LayerScale."""
    return d <= WIDEST_NORM and dtype != torch.float16


def by_hand(rows: int) -> bool:
    """Whether our own product is the faster one."""
    return rows >= BY_HAND


class Split(NamedTuple):
    """A pass over the tokens of each image and head, for GMSA."""

    tokens: int  # a step of its loop
    splits: int  # programs along the tokens
    span: int  # tokens of one of them
    warps: int


def groups(rows: int, n: int, p: int, g: int, backward: bool = False) -> Split:
    """`rows`: images times heads. On the way back a tile has six tensors in registers, which spill if they are large."""
    widest = power_of_two(max(p, g))
    tokens = 64 if not backward or widest <= 32 else 2048 // max(widest, 64)
    splits = 1 if rows >= PROGRAMS // 2 else max(1, min(over(PROGRAMS, rows), over(n, 4 * tokens)))
    span = over(over(n, splits), tokens) * tokens
    return Split(tokens, over(n, span), span, warps=4)
