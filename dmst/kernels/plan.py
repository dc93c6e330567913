"""How the fused layers are cut into programs: a function of the shape, so that equal shapes give equal bits.

Tiles are rows of one table, by compute capability, width and dtype. What the table does not have takes the nearest width of the
same capability and dtype, else `USUAL`, or `WIDE` in float32. To fill it for another GPU: `python benchmarks/tune.py` times the
candidates and prints rows to paste here. Nothing is tuned at run time.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

STEP = 64  # tokens in one rotary step: a tile that lies within one reads little of the tables
WARPS = 2048  # about what fills the device: samples are split over programs until these have so many
PROGRAMS = {  # of kernels that hold weights: as many as have room at once
    "into_tokens": 660, "into_tokens keys": 396, "into_weights": 660, "into_weights keys": 264, "norm": 528,
}  # fmt: skip
HELD = (64, 128, 208, 256)  # tokens of a sample that a program holds in registers: the next size is taken
MOST_HEADS = 64
MOST_KEYS = 64  # of GMSA: channels of a key
MOST_MEANS = 2048  # and groups times channels, both padded: what 99 KiB of shared memory hold
WIDEST = 128  # channels of one head


class Cut(NamedTuple):
    """The tile of a kernel; what it does not have is 0."""

    tokens: int
    channels: int  # of a token; in `settle` and `adjoint` all that a program has
    columns: int  # of keys
    warps: int
    stages: int  # of a loop whose loads run ahead


Row = dict[str, Cut]
USUAL: Row = {  # "keys": the same kernel with GMSA's keys
    "front": Cut(32, 64, 0, 2, 2),
    "front keys": Cut(64, 64, 128, 4, 2),
    "into_tokens": Cut(16, 128, 0, 4, 1),
    "into_tokens keys": Cut(64, 64, 128, 4, 1),
    "into_weights": Cut(16, 128, 0, 4, 1),
    "into_weights keys": Cut(32, 64, 128, 4, 1),
    "settle": Cut(32, 256, 0, 4, 3),
    "settle held": Cut(16, 64, 0, 4, 1),
    "adjoint": Cut(16, 256, 0, 8, 1),
    "adjoint held": Cut(32, 64, 0, 8, 1),
    "groups": Cut(32, 0, 0, 1, 1),
    "groups back": Cut(32, 0, 0, 2, 1),
    "norm": Cut(4, 512, 0, 4, 1),
}
# float32: exact products are unrolled into sums of single products, which fill the registers if tiles are large.
WIDE: Row = USUAL | {
    "front": Cut(32, 64, 0, 4, 1),
    "front keys": Cut(64, 32, 64, 4, 2),
    "into_tokens": Cut(16, 128, 0, 4, 1),
    "into_tokens keys": Cut(32, 64, 64, 4, 1),
    "into_weights": Cut(16, 64, 0, 4, 1),
    "into_weights keys": Cut(32, 64, 64, 8, 2),
    "groups": Cut(32, 0, 0, 4, 1),
    "groups back": Cut(16, 0, 0, 4, 1),
}
TABLE: dict[tuple[tuple[int, int], int, torch.dtype], Row] = {
    ((9, 0), 384, torch.bfloat16): USUAL
    | {  # NVIDIA H200, 8 heads: good at 256x197 and at 4x16384
        "front": Cut(32, 64, 0, 2, 3),
        "front keys": Cut(64, 64, 128, 4, 3),
        "into_weights keys": Cut(32, 128, 128, 4, 2),
        "settle": Cut(16, 128, 0, 4, 3),
        "adjoint": Cut(8, 128, 0, 2, 2),
        "groups": Cut(16, 0, 0, 1, 2),
        "groups back": Cut(32, 0, 0, 1, 2),
        "settle held": Cut(32, 64, 0, 4, 1),
        "adjoint held": Cut(32, 64, 0, 8, 1),
        "norm": Cut(4, 512, 0, 2, 1),
    },
}


@functools.cache
def capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


_decided: list[Any] = []


def forget() -> None:
    """Decide anew, after a change of what is above."""
    for known in _decided:
        known.cache_clear()


def _kept(decide: Any) -> Any:
    """Decides once a shape. Symbolic sizes, which a compiler traces, are no keys."""
    known = functools.lru_cache(1024)(decide)
    _decided.append(known)

    @functools.wraps(decide)
    def call(*sizes: Any) -> Any:
        try:
            return known(*sizes)
        except TypeError:
            return decide(*sizes)

    return call


@_kept
def cut(kernel: str, width: int, dtype: torch.dtype, columns: int = 0) -> Cut:
    """The tile of a kernel, no larger than what there is to cut."""
    near = [key for key in TABLE if key[0] == capability() and key[2] == dtype]
    usual = WIDE if dtype == torch.float32 else USUAL
    row = TABLE[min(near, key=lambda key: abs(key[1] - width))] if near else usual
    made = row[kernel]
    return made._replace(channels=_within(made.channels, width), columns=_within(made.columns, columns))


def _within(size: int, least: int) -> int:
    """A tile of at most `size`; products of matrices want 16."""
    return max(16, min(size, power_of_two(least)))


def over(a: int, b: int) -> int:
    """a / b, rounded up."""
    return (a + b - 1) // b


def power_of_two(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


class Sweep(NamedTuple):
    """A pass over (tokens, groups, channels) of each sample; for GMSA over the tokens of each sample and head."""

    block: dict[str, int]  # of one step: tokens; groups, the channels of each, and how many make a head
    blocks: int  # programs along the channels
    splits: int  # programs along the tokens
    span: int  # tokens of one of them
    warps: int
    stages: int
    held: int = 0  # steps whose tokens stay in registers; 0: they are read again


@_kept
def sweep(kernel: str, b: int, n: int, k: int, p: int, dtype: torch.dtype) -> Sweep:
    """A short sample is held in registers. With enough samples a program takes all tokens of its own, else they are split."""
    width, parts = pieces_of(p)
    tile, fits = cut(f"{kernel} held", k * p, dtype), dtype.itemsize == 2
    held = next((size for size in HELD if fits and width <= tile.channels and n <= size), 0)
    if not held:
        tile = cut(kernel, k * p, dtype)
    groups = max(1, min(power_of_two(k * parts), tile.channels // width))
    tokens, blocks = max(1, tile.tokens * tile.channels // (groups * width)), over(k * parts, groups)
    block = {"GROUPS": groups, "WIDTH": width, "PARTS": parts, "TOKENS": tokens}
    if held:
        return Sweep(block, blocks, 1, n, tile.warps, tile.stages, over(held, tokens))
    return Sweep(block, blocks, *_split(b * blocks, n, tokens, tile.warps), tile.warps, tile.stages)


def pieces_of(p: int, least: int = 8) -> tuple[int, int]:
    """Channels of a piece, a power of two, and pieces of a head: 48 is 3 x 16. What cannot be cut so is one piece, padded."""
    width = p & -p
    return (width, p // width) if width >= least and p // width <= 7 else (max(least, power_of_two(p)), 1)


class Share(NamedTuple):
    """Of all tiles of all samples, what a program takes: `samples` of `some` tiles, `chunks` programs beside each other."""

    programs: int
    b: int
    tiles: int
    samples: int
    some: int
    chunks: int


@_kept
def share(kernel: str, b: int, n: int, d: int, tile: Cut) -> Share:
    """First the samples of one tile, whose angles stay in registers, then further tiles."""
    tiles = over(n, tile.tokens)
    run = over(b * tiles, max(1, PROGRAMS[kernel] // over(d, tile.channels)))
    samples, some = max(1, min(b, run)), max(1, run // max(b, 1))
    chunks = over(b, samples)
    return Share(chunks * over(tiles, some), b, tiles, samples, some, chunks)


@_kept
def groups(kernel: str, rows: int, n: int, d: int, p: int, g: int, dtype: torch.dtype) -> Sweep:
    """`rows`: images times heads. Where heads or groups are large, fewer tokens and more warps: a tile is in registers."""
    tile, widest = cut(kernel, d, dtype), power_of_two(max(p, g, 64))
    tokens = max(16, tile.tokens * 64 // widest)
    many = max(16, power_of_two(p)) * max(16, power_of_two(g)) > MOST_MEANS // 2
    warps = tile.warps * (2 if many else 1)
    return Sweep({"TOKENS": tokens}, 1, *_split(rows, n, tokens, warps), warps, tile.stages)


def _split(rows: int, n: int, tokens: int, warps: int) -> tuple[int, int]:
    """Programs along n tokens, and the tokens of one."""
    splits = 1 if 2 * rows * warps >= WARPS else max(1, min(over(WARPS, rows * warps), over(n, 4 * tokens)))
    span = over(over(n, splits), tokens) * tokens
    return over(n, span), span
