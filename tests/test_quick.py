"""Triton's interpreter as the tests have it (tests/quick.py) gives every bit of the interpreter as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dmst.kernels import choice, plan

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from dmst.kernels import registered
from tests import quick, test_fused, test_fused_step
from tests.test_fused import BF16, F16, F32, draw
from tests.test_fused_active import attend, capped
from tests.test_fused_step import bits, draw_step

pytestmark = [
    pytest.mark.skipif(
        not choice.interpreted(),
        reason="Triton's interpreter is off: there is a CUDA device (`pytest -m gpu`), or TRITON_INTERPRET is not 1",
    ),
    pytest.mark.skipif(
        ".".join(triton.__version__.split(".")[:2]) not in quick.READ, reason="this Triton's interpreter is left as it is"
    ),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]


@contextmanager
def as_it_is(patch: pytest.MonkeyPatch) -> Iterator[None]:
    assert interpreter._patch_lang.__module__ == quick.__name__
    patch.undo()
    assert interpreter._patch_lang.__module__ == interpreter.__name__
    try:
        yield
    finally:
        quick.quicken(patch)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_a_layer_and_a_step(dtype: torch.dtype, quickened: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary and scores by position, gates of two kinds, products, casts, tables of pointers, samples without silent heads."""
    monkeypatch.setattr(plan, "STEPS", True)
    cases = [("dmsa", {"rotary": "2d", "membership_bias": True}), ("tssa", {}), ("gated_channel", {})]
    made = [draw(case, (2, 37, 24, 3), dtype, excited=True) for case in cases]
    stepped, some = draw_step(test_fused_step.LISTING, (2, 6, 24, 3), dtype), capped((2, 9, 24, 3), 2, dtype)

    def run() -> list[dict]:
        found = [test_fused.fused(each, dtype) for each in made]
        if dtype != F16:  # the step has no float16
            found.append(test_fused_step.fused(stepped, dtype))
        return [*found, {"some": attend(some, dtype)}]

    found = run()
    with as_it_is(quickened):
        right = run()
    assert not registered._broken
    for mine, told in zip(found, right, strict=True):
        assert mine.keys() == told.keys()
        bits(mine, told)


@triton.jit
def wrong_kernel(x_ptr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == 0:
        x = tl.arange(0, 12)  # no power of two
    if KIND == 1:
        x = tl.arange(0, 8) + tl.arange(0, 16)
    if KIND == 2:
        x = tl.load(x_ptr + tl.arange(0, 8)) << 1  # of reals
    if KIND == 3:
        x = tl.zeros((4, 12), tl.float32)
    tl.store(x_ptr + tl.arange(0, 8), x)


@pytest.mark.parametrize("kind", range(4))
def test_what_is_wrong_is_refused_in_the_same_words(kind: int, quickened: pytest.MonkeyPatch) -> None:
    told = []
    for _ in range(2):  # the second time types are known
        with pytest.raises(InterpreterError) as error:
            wrong_kernel[(1,)](torch.zeros(8), kind)
        told.append(str(error.value))
    with as_it_is(quickened), pytest.raises(InterpreterError) as error:
        wrong_kernel[(1,)](torch.zeros(8), kind)
    assert told == [str(error.value)] * 2
