"""Randomness by index: the formula bit by bit, draws that are even, and independent of all that is not the same."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from dmst.data import chance

N = 20_000
WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15


def mixed(x: int) -> int:
    """The finalizer of splitmix64, in Python's own numbers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def word(key: int, epoch: int, index: int, step: int) -> int:
    start = mixed((epoch * GOLDEN + key) % WORD)
    stream = mixed((start + index) * GOLDEN % WORD)
    return mixed((stream + step) * GOLDEN % WORD)


def test_the_formula() -> None:
    """By arithmetic that knows no overflow: torch's int64 must wrap, and its shift must not copy the sign."""
    index = torch.tensor([0, 1, 2, 3, 59_999, 7 + 2 * chance.COPY])
    for seed, epoch in ((0, 0), (3, 41), (-1, 2**40), (2**70, 5)):
        key = chance.key("crop", seed)
        assert key == int.from_bytes(hashlib.blake2b(repr(["crop", seed]).encode(), digest_size=8).digest(), "little") >> 1
        expected = [[(word(key, epoch, i, j) >> 40) * 2.0**-24 for j in range(5)] for i in index.tolist()]
        assert chance.uniform("crop", seed, epoch, index, 5).tolist() == expected
        assert chance.uniform("crop", seed, epoch, index, 5).dtype == torch.float32


def test_draws_are_even() -> None:
    u = chance.uniform("a", 0, 0, torch.arange(N), 7).double()
    assert 0 <= u.min() < 1e-4 and 1 - 1e-4 < u.max() < 1
    sigma = 1 / math.sqrt(12 * N)
    assert ((u.mean(0) - 0.5).abs() < 4 * sigma).all()
    assert ((u.var(0) - 1 / 12).abs() < 4 / math.sqrt(180 * N)).all()
    counts = torch.histc(u.float(), 64, 0, 1)  # chi-squared with 63 degrees of freedom: 63 +- 11
    assert 25 < ((counts - 7 * N / 64) ** 2 / (7 * N / 64)).sum() < 115
    low = (chance.words(chance.key("a", 0), 0, torch.arange(N), torch.arange(1))[:, 0, None] >> torch.arange(64)) & 1
    assert ((low.double().mean(0) - 0.5).abs() < 4.5 * 0.5 / math.sqrt(N)).all()  # every bit of the words, not only those used


@pytest.mark.parametrize("other", ["draw", "neighbour", "epoch", "seed", "long seed", "purpose", "copy", "far"])
def test_draws_are_independent(other: str) -> None:
    """Of the next draw, index, epoch and seed, a seed of the same low 32 bits, another purpose, another copy, a far index."""
    index = torch.arange(N)
    u = chance.uniform("a", 5, 3, index, 2).double()
    v = {
        "draw": lambda: u[:, 1:],
        "neighbour": lambda: chance.uniform("a", 5, 3, index + 1, 1),
        "epoch": lambda: chance.uniform("a", 5, 4, index, 1),
        "seed": lambda: chance.uniform("a", 6, 3, index, 1),
        "long seed": lambda: chance.uniform("a", 5 + 2**32, 3, index, 1),
        "purpose": lambda: chance.uniform("b", 5, 3, index, 1),
        "copy": lambda: chance.uniform("a", 5, 3, index + chance.COPY, 1),
        "far": lambda: chance.uniform("a", 5, 3, index + 2**39, 1),
    }[other]()
    x, y = u[:, 0] - 0.5, v[:, 0].double() - 0.5
    limit = 4 / math.sqrt(N)
    assert (x * y).mean().abs() * 12 < limit
    assert ((x**2 - 1 / 12) * (y**2 - 1 / 12)).mean().abs() * 180 < limit  # nor in size


def test_permutation() -> None:
    order = chance.permutation("order", 0, 0, 1009)
    assert order.dtype == torch.int64 and torch.equal(order.sort().values, torch.arange(1009))
    assert torch.equal(order, chance.permutation("order", 0, 0, 1009))
    for other in (("order", 0, 1), ("order", 1, 0), ("order", 2**32, 0), ("else", 0, 0)):
        assert (chance.permutation(*other, 1009) == order).sum() < 12  # 1 is expected
    places = torch.stack([chance.permutation("order", 0, epoch, 53) for epoch in range(1000)]).double()
    assert ((places.mean(0) - 26).abs() < 4.5 * math.sqrt((53**2 - 1) / 12 / 1000)).all()  # no place favours an image


def test_small_seed() -> None:
    told = [(1, 23), (12, 3), ("1", 23), ("1, 23",), (2**32 + 1, 23), ("a", "b"), ("ab",), ("a', 'b",)]
    seeds = [chance.small_seed(*parts) for parts in told]
    assert len(set(seeds)) == len(told) and all(0 <= seed < 2**32 for seed in seeds)
    assert chance.small_seed("a", np.int64(3)) == chance.small_seed("a", 3)
