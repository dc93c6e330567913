"""The fused layer against float64: output and every gradient, for every form.

On a GPU where there is one (`pytest -m gpu`), else in Triton's interpreter. What only a GPU can do is in test_gpu.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dmst import kernels, use_kernels
from dmst.kernels import Weights, plan, reference
from dmst.operators import DMSA
from tests.cases import FUSED, build, excite, gradients, label, relative
from tests.parity import (
    BARS,
    BF16,
    DEVICE,
    EQUATION,
    F16,
    F32,
    LAYOUTS,
    LISTING,
    PRECISE,
    PROXIMAL,
    TSSA,
    Layer,
    check,
    decided_anew,
    differentiate,
    draw,
    fresh_memory_is_nan,
    fused,
    guarded,
    needs_triton,
    plain,
    same_bits,
    strided,
    transposed,
)

pytestmark = needs_triton
interpreter = pytest.mark.interpreter
# A program costs the interpreter as much as a large tile costs a GPU, and a new width costs a GPU a compilation.
SMALL = (3, 198, 96, 2) if DEVICE == "cuda" else (2, 7, 72, 3)  # b, n, d, k; heads of 48 or 24 channels, three pieces
LOW = [LISTING, EQUATION, PROXIMAL, TSSA]
BIASED = ("dmsa", {"membership_bias": True})


# --- every form, every dtype ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FUSED, ids=label)
def test_every_form(case: tuple) -> None:
    """Every buffer starts as NaN, and behind the end of every input there is nothing but NaN."""
    made = draw(case, SMALL)
    with fresh_memory_is_nan():
        found = fused(made.map(guarded))
    check(found, made)


@interpreter
@pytest.mark.parametrize("case", FUSED, ids=label)
def test_where_gates_close(case: tuple) -> None:
    """Two token tiles, the second one short."""
    torch.manual_seed(1)  # with 0 a pooled score nearly cancels, and the interpreter adds up a tile one by one
    made = draw(case, (1, 65, 24, 3), excited=True)
    check(fused(made), made, like_plain=True)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("case", LOW, ids=label)
def test_autocast(case: tuple, dtype: torch.dtype) -> None:
    """float32 tokens and weights. Heads of 48 channels, which are three pieces, in float16."""
    made = draw(case, (1, 70, 96, 2) if dtype == F16 else (2, 63, 24, 3), dtype)
    found = fused(made, dtype)
    assert found["output"].dtype == dtype
    assert found["z"].dtype == found["subspace"].dtype == F32
    check(found, made, dtype)


@interpreter
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("case", [LISTING, PROXIMAL, TSSA], ids=label)
def test_a_layer_stored_in_low_precision(case: tuple, dtype: torch.dtype) -> None:
    made = draw(case, (2, 17, 32, 4), dtype)
    found = fused(made.map(lambda x: x.to(dtype)), dtype)
    assert {x.dtype for x in found.values()} == {dtype}
    check(found, made, dtype)


@interpreter
@pytest.mark.parametrize("case", PRECISE, ids=label)
@pytest.mark.parametrize("scale", [1e-8, 1e2, 1e4])
def test_other_scales(case: tuple, scale: float) -> None:
    for dtype in (F32, F16) if case in (PROXIMAL, TSSA) else (F32,):
        made = draw(case, (1, 17, 48, 3), dtype, scale=scale)
        check(fused(made, dtype), made, dtype, like_plain=True, scale=scale)


@interpreter
def test_scores_stay_float32_where_products_do_not() -> None:
    """Near a tie, scores in low precision would move the gate, and so the output, by percents."""
    for dtype in (F16, BF16):
        for options in ({}, {"rotary": "2d"}, {"rotary": "none", "membership_bias": True}):
            made = draw(("dmsa", options), (2, 70, 48, 4), dtype, scale=30.0)
            found, right = fused(made, dtype)["output"], plain(made.map(Tensor.double), torch.float64)["output"]
            assert relative(found, right) < BARS[dtype][0]


# --- sizes and ways ---------------------------------------------------------------------------------------------------

SIZES = [
    *((1, 9, 2, p) for p in (1, 5, 16, 48, 128)),  # b, n, k, p
    (1, 9, 1, 8), (1, 3, 64, 6),
    *((1, n, 2, 6) for n in (0, 1, 2, 63, 64, 65, 197)),
    (0, 5, 3, 4), (7, 5, 3, 4),
    (2, 7, 3, 5),
]  # fmt: skip


@interpreter
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: tuple) -> None:
    """Any number of tokens, none too; one head and 64; heads of one channel and of 128; an odd width."""
    b, n, k, p = size
    turned = {} if k * p % 2 == 0 else {"rotary": "none"}
    for case in (("dmsa", {"membership_bias": True, **turned}), TSSA)[: 1 + (n < 6)]:
        made = draw(case, (b, n, k * p, k), excited=True)
        check(fused(made), made, like_plain=True)


WAYS: dict[str, dict[str, Any]] = {
    "a sample is one program": {"WARPS": 1},
    "a sample is many programs": {"WARPS": 10**6},
    "programs of the scores' adjoint take several tiles": {"PROGRAMS": dict.fromkeys(plan.PROGRAMS, 3)},
}


@interpreter
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "case",
    [("dmsa", {"membership_bias": True}), PROXIMAL, ("tssa", {"position_scores": "1d"})],
    ids=label,
)
def test_every_way_to_cut_the_work(case: tuple, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` chooses by size what small layers would never meet."""
    for name, value in WAYS[way].items():
        monkeypatch.setattr(plan, name, value)
    made = draw(case, (2, 130, 72, 3))
    with fresh_memory_is_nan(), decided_anew():
        found = fused(made.map(guarded))
    check(found, made)


@interpreter
@pytest.mark.parametrize("warps", [1, 10**6])
def test_a_head_that_no_token_belongs_to(warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score of -200 is a membership of 0 in float32. The head divides by nothing: its mass of 0 counts as 1."""
    monkeypatch.setattr(plan, "WARPS", warps)
    made = draw(("dmsa", {"mode": "equation", "membership_bias": True}), (1, 600, 24, 3))
    bias = torch.tensor([0.5, -200.0, 0.1], device=DEVICE)
    made = made._replace(weights=made.weights._replace(assign_bias=bias))
    with decided_anew():
        found = fused(made)
    check(found, made, like_plain=True)


@interpreter
def test_backward_inside_autocast_is_the_same() -> None:
    operator, z = excite(DMSA(24, 3, device=DEVICE)), torch.randn(2, 7, 24, device=DEVICE)
    grads = []
    for inside in (True, False):
        moving = z.clone().requires_grad_()
        with use_kernels("fused"), torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = operator(moving)
            if inside:
                out.sum().backward()
        if not inside:
            out.sum().backward()
        grads.append(moving.grad)
    assert torch.equal(*grads)


# --- memory: layouts, what is wanted, what is not ours ----------------------------------------------------------------


@interpreter
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_layouts_of_tokens_and_of_the_output_gradient(dtype: torch.dtype) -> None:
    made = draw(LISTING, SMALL, dtype, excited=True)
    right = fused(made, dtype)
    for view in LAYOUTS.values():
        same_bits(fused(made._replace(z=view(made.z), grad=view(made.grad)), dtype), right)
    ones = torch.ones((), device=DEVICE).expand(made.z.shape)  # the gradient of out.sum(): one number in memory
    seen = made._replace(z=made.z[:, :1].expand(made.z.shape), grad=ones)
    same_bits(fused(seen, dtype), fused(seen._replace(z=seen.z.contiguous(), grad=ones.contiguous()), dtype))


@interpreter
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("case", [BIASED, PROXIMAL, TSSA], ids=label)
def test_layouts_of_the_weights(case: tuple, dtype: torch.dtype) -> None:
    """Strided and transposed, in the layer's own dtype, where nothing is copied on the way in."""
    made = draw(case, SMALL, dtype, excited=True).map(lambda x: x.to(dtype))
    for view in (strided, transposed):
        weights = Weights(*(None if w is None else view(w) for w in made.weights))
        check(fused(made._replace(weights=weights), dtype), made, dtype)


@interpreter
@pytest.mark.parametrize("case", [BIASED, PROXIMAL, TSSA], ids=label)
def test_nothing_of_the_callers_is_written(case: tuple) -> None:
    made = draw(case, SMALL, excited=True)
    before = made.map(torch.clone)
    z = made.z.requires_grad_()
    tensors = (z, *(w.requires_grad_() for w in made.weights if w is not None))
    with use_kernels("fused"):
        out = kernels.attend(z, made.weights, made.form, grid=made.grid)
    first = torch.autograd.grad(out, tensors, made.grad, retain_graph=True)
    second = torch.autograd.grad(out, tensors, made.grad)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    for mine, was in zip((made.z, made.grad, *made.weights), (before.z, before.grad, *before.weights), strict=True):
        assert mine is None or torch.equal(mine, was)


def check_wanted(made: Layer, dtype: torch.dtype = F32) -> None:
    """Frozen weights get no gradient, and the others the same bits as when all are wanted."""
    full = fused(made, dtype)
    for field, weight in zip(Weights._fields, made.weights, strict=True):
        if weight is not None:
            one = fused(made, dtype, wanted=Weights(*(name == field for name in Weights._fields)))
            assert one.keys() == {"output", "z", field}
            same_bits(one, full)


@interpreter
@pytest.mark.parametrize("case", [BIASED, PROXIMAL, ("tssa", {"position_scores": "1d"})], ids=label)
def test_only_what_is_wanted(case: tuple) -> None:
    made = draw(case, SMALL, excited=True)
    check_wanted(made)
    full = fused(made)
    weights = made.weights._replace(subspace=made.weights.subspace.detach().requires_grad_())
    with use_kernels("fused"):
        kernels.attend(made.z, weights, made.form, grid=made.grid).backward(made.grad)  # tokens that want none
        assert torch.equal(weights.subspace.grad, full["subspace"])
        for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
            with context:
                out = kernels.attend(made.z, made.weights, made.form, grid=made.grid)
                assert torch.equal(out, full["output"]) and not out.requires_grad


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_a_module_under_autocast(dtype: torch.dtype) -> None:
    """The backward pass inside autocast or outside of it gives the same bits; low tokens are fine too."""
    operator = build("dmsa", {}, dtype=F32).to(DEVICE)
    z, grad = torch.randn(2, 7, 24, device=DEVICE), torch.randn(2, 7, 24, device=DEVICE)
    with use_kernels("fused"), torch.autocast(DEVICE, dtype=dtype):
        inside = gradients(operator, z, grad)
        moving = z.clone().requires_grad_()
        out = operator(moving)
        low = operator(z.to(dtype))
    out.backward(grad.to(dtype))
    assert inside["out"].dtype == out.dtype == low.dtype == dtype
    assert inside["z"].dtype == inside["subspace.weight"].dtype == F32
    assert torch.equal(moving.grad, inside["z"])
    with use_kernels("reference"), torch.autocast(DEVICE, dtype=dtype):
        usual = gradients(operator, z, grad)
    assert relative(low, usual["out"]) < 4 * BARS[dtype][0]
    assert all(relative(inside[name], usual[name]) < 4 * BARS[dtype][1] for name in usual)


# --- bits -------------------------------------------------------------------------------------------------------------


@interpreter
@pytest.mark.parametrize("case", [PROXIMAL, TSSA, ("dmsa", {"rotary": "2d"})], ids=label)
def test_nan_in_scratch_changes_no_bit(case: tuple) -> None:
    made = draw(case, SMALL, F16, excited=True)
    clean = fused(made, F16)
    with fresh_memory_is_nan():
        found = fused(made.map(guarded), F16)
    assert all(value is None or value.isfinite().all() for value in clean.values())
    same_bits(found, clean)


def check_isolation(made: Layer, dtype: torch.dtype) -> None:
    """The other samples keep every bit, and what the reference makes NaN in its own sample is NaN here too."""
    clean = fused(made, dtype)
    for where in ("z", "grad"):
        value = getattr(made, where).clone()
        value[1, 4, 5] = float("nan")
        sick = made._replace(**{where: value})
        found, usual = fused(sick, dtype), plain(sick, dtype)
        others = torch.arange(len(value)) != 1
        for key in ("output", "z"):
            assert torch.equal(found[key][others], clean[key][others]), (where, key)
            assert torch.equal(found[key].isnan(), usual[key].isnan()), (where, key)
            assert found[key][1].isnan().any() or (where, key) == ("grad", "output")


@pytest.mark.parametrize("case", [LISTING, PROXIMAL, TSSA], ids=label)
def test_a_nan_stays_in_its_sample(case: tuple) -> None:
    check_isolation(draw(case, (3, 9, 24, 3), excited=True), F32)


def test_repeats_are_equal_to_the_bit() -> None:
    made = draw(LISTING, (1, 7, 16, 2), excited=True)
    first = fused(made)
    for _ in range(10):
        same_bits(fused(made), first)


@interpreter
@pytest.mark.parametrize("case", LOW, ids=label)
def test_what_is_computed_again_has_the_same_bits(case: tuple) -> None:
    """By `save="nothing"`, and by checkpointing."""
    made = draw(case, SMALL, excited=True)
    right = fused(made)
    same_bits(fused(made._replace(form=replace(made.form, save="nothing"))), right)

    def again(z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return checkpoint(functools.partial(kernels.attend, **kwargs), z, *args, use_reentrant=False)

    with use_kernels("fused"):
        same_bits(differentiate(again, made), right)


# --- gates ------------------------------------------------------------------------------------------------------------


@interpreter
@pytest.mark.parametrize("gate", ["sparsemax", "gelu"])
def test_gates_at_ties_and_at_zero(gate: str) -> None:
    """All scores equal, for any reason or for none: zeros."""
    for value in (0.0, 1.0):
        options = {"gate_activation": gate, "membership_bias": True, "rotary": "none"}
        made = draw(("dmsa", options), (2, 7, 48, 12), excited=True)
        tied = torch.zeros(12, 48).index_fill_(1, torch.tensor([3]), value)
        made = made._replace(weights=made.weights._replace(assign=tied.to(DEVICE), assign_bias=torch.zeros(12, device=DEVICE)))
        check(fused(made), made, like_plain=True)


@interpreter
@pytest.mark.parametrize("options", [{}, {"mode": "equation"}, {"mode": "proximal"}], ids=str)
def test_a_silent_head_learns_nothing(options: dict) -> None:
    """Gate 0 for the sample: exactly 0 in every gradient that belongs to the head."""
    made = draw(("dmsa", {"membership_bias": True, **options}), (1, 9, 48, 6), excited=True)
    bias = torch.tensor([3.0, -3.0, 2.9, -2.9, 0.0, -4.0], device=DEVICE)
    made = made._replace(weights=made.weights._replace(assign_bias=bias))
    off = gates(made)[0] == 0
    assert 0 < off.sum() < 6
    owned: dict[str, Callable[[Tensor], Tensor]] = {
        "subspace": lambda g: g.unflatten(0, (6, 8)),
        "subspace_bias": lambda g: g.unflatten(0, (6, 8)),
        "assign": lambda g: g,
        "assign_bias": lambda g: g,
        "out": lambda g: g.mT.unflatten(0, (6, 8)),
    }
    found = fused(made)
    for name, by_head in owned.items():
        if found.get(name) is not None:
            assert not by_head(found[name])[off].any(), name
            assert by_head(found[name])[~off].any() or name.startswith("assign"), name


def gates(made: Layer) -> Tensor:
    wide = made.map(Tensor.double)
    return reference.gate_of(reference.score(wide.z, wide.weights, wide.form, wide.grid), wide.form)[1]


# --- fuzz -------------------------------------------------------------------------------------------------------------

DRAWN = {
    "case": st.sampled_from(FUSED if DEVICE == "cpu" else [LISTING, PROXIMAL, TSSA]),
    "b": st.integers(0, 2 if DEVICE == "cpu" else 9),
    "n": st.one_of(st.integers(0, 9), st.sampled_from([63, 64, 65]), st.integers(0, 70 if DEVICE == "cpu" else 3000)),
    "k": st.integers(1, 3) if DEVICE == "cpu" else st.just(2),  # a new width is a compilation
    "p": st.integers(1, 16) if DEVICE == "cpu" else st.just(48),
    "dtype": st.sampled_from([F32, F32, F16, BF16]),
    "excited": st.booleans(),
    "layouts": st.tuples(*(st.sampled_from([None, *LAYOUTS]) for _ in range(2))),
    "wanted": st.tuples(*(st.booleans() for _ in Weights._fields)),
}


@interpreter
@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])  # shrinking in the interpreter takes minutes
@given(st.fixed_dictionaries(DRAWN))
def test_any_shape_stride_and_dtype(drawn: dict[str, Any]) -> None:
    name, options = drawn["case"]
    b, n, k, p, dtype = (drawn[key] for key in ("b", "n", "k", "p", "dtype"))
    d = k * p
    turns = 4 if "2d" in options.values() else 1 if "none" in options.values() else 2
    d *= turns // min(turns, next(t for t in (4, 2, 1) if d % t == 0))  # rotary wants pairs, 2d pairs of pairs
    torch.manual_seed(b + 7 * n + 1000 * k + 9000 * p)
    made = draw((name, options), (b, n, d, k), dtype, excited=drawn["excited"])
    z, grad = (
        x if layout is None or not x.numel() else LAYOUTS[layout](x)
        for layout, x in zip(drawn["layouts"], (made.z, made.grad), strict=True)
    )
    made = made._replace(z=z, grad=grad)
    check(fused(made, dtype, wanted=Weights(*drawn["wanted"])), made, dtype, like_plain=True, some=True)
