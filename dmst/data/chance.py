"""Randomness by index: every draw is a function of (purpose, seed, epoch, index) alone, never of what was drawn before.

    uniform(purpose, seed, epoch, index, draws)   (n, draws) float32 in [0, 1), whole batches, the same bits on every device
    draw(key, epoch, index, step)                 the same, by the key of purpose and seed, inside a compiled function
    permutation(purpose, seed, epoch, n)          an order of 0..n-1, int64 on the CPU
    small_seed(*parts)                            32 bits, for code that asks for a seed

    word_j = mix((mix((mix(epoch G + key) + index) G) + j) G),   G = 2^64 / golden ratio,   mix = the finalizer of splitmix64

in int64 that wraps; a draw is the upper 24 bits of its word. Keys are made by blake2b, so every bit of a seed counts. Inside a
compiled function key and epoch are tensors: text cannot be hashed there, and numbers would be compiled in.

Repeated augmentation shows an image more than once in an epoch: copy c of image i draws as index i + c * 2^40, its sample.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

COPY = 1 << 40  # more images than any set has


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


GOLDEN, FIRST, SECOND = (_signed(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def key(purpose: str, seed: int) -> int:
    """63 bits that stand for a purpose of a run."""
    return _digest(8, purpose, seed) >> 1


def words(key: int | Tensor, epoch: int | Tensor, index: Tensor, step: Tensor) -> Tensor:
    """All 64 bits of each draw, int64 (n, k). `step` (k,) numbers the draws."""
    epoch = epoch if isinstance(epoch, Tensor) else torch.full((), epoch, dtype=torch.int64, device=index.device)
    stream = _mix((_mix(epoch * GOLDEN + key) + index.unsqueeze(-1)) * GOLDEN)
    return _mix((stream + step) * GOLDEN)  # inductor multiplies a bare arange by a constant in numbers that do not wrap


def draw(key: int | Tensor, epoch: int | Tensor, index: Tensor, step: Tensor) -> Tensor:
    return _shift(words(key, epoch, index, step), 40).to(torch.float32) * 2.0**-24


def uniform(purpose: str, seed: int, epoch: int | Tensor, index: Tensor, draws: int) -> Tensor:
    return draw(key(purpose, seed), epoch, index, torch.arange(draws, device=index.device))


def permutation(purpose: str, seed: int, epoch: int, n: int) -> Tensor:
    """0..n-1 sorted by a word of 64 bits each; of equal ones (a million has any with probability 3e-8) the lower is first."""
    return torch.argsort(words(key(purpose, seed), epoch, torch.arange(n), torch.arange(1))[:, 0], stable=True)


def small_seed(*parts: int | str) -> int:
    return _digest(4, *parts)


def _digest(size: int, *parts: int | str) -> int:
    told = repr([part if isinstance(part, str) else int(part) for part in parts])  # 1, 23 and 12, 3 read differently
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=size).digest(), "little")


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * FIRST
    x = (x ^ _shift(x, 27)) * SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits, zeros coming in from the left: torch's own shift of int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
