"""The residual step as one operator, z' = z + keep * scale * attend(norm(z)): parity, registration, and where a block takes it.

Everything runs in Triton's interpreter on the CPU; tests/test_device_step.py asks the same of a GPU. Bars are those of
tests/test_fused.py, or a few times the error of plain torch in the same dtype. Of the output and of dz they hold for what the
step adds to z and to dz': the identity would hide the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dmst import kernels, rotary, use_kernels
from dmst.errors import DmstError
from dmst.kernels import Form, Weights, choice, plan, step
from dmst.models.block import Block
from dmst.models.config import ModelConfig
from dmst.operators import DMSA
from tests.cases import excite, label, relative
from tests.test_precision import BARS, excess

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from dmst.kernels import registered, registered_step
from dmst.kernels.fused import layer
from dmst.kernels.fused import step as fused_step
from tests.standins import Products
from tests.test_fused import BF16, F16, F32, F64, coarsen, draw, guarded, poison, weigh_early

pytestmark = [
    pytest.mark.skipif(
        not choice.interpreted(),
        reason="Triton's interpreter is off: there is a CUDA device (`pytest -m gpu`), or TRITON_INTERPRET is not 1",
    ),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|All-NaN slice) encountered:RuntimeWarning"),
]
EPS = 1e-6
LISTING, EQUATION, PROXIMAL = (("dmsa", {"mode": mode}) for mode in ("listing", "equation", "proximal"))
CASES = [("dmsa", {"membership_bias": True}), EQUATION, PROXIMAL, ("tssa", {})]
OTHERS = [("tssa", {"position_scores": "1d"}), ("dmsa", {"rotary": "2d", "bias": False}), ("gated_channel", {}), ("tpsusa", {})]
SMALL = (3, 5, 48, 4)  # b, n, d, k
CANCELLING = ("weights.theta", "weights.temperature", "weights.assign_bias")  # sums whose terms cancel: judged in float32


@pytest.fixture(autouse=True, scope="module")
def _coarse() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        coarsen(patch)
        yield


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel that fell back would be compared with itself."""
    monkeypatch.setattr(plan, "STEPS", True)
    registered._broken.clear()
    yield
    broken = set(registered._broken)
    registered._broken.clear()
    torch._dynamo.reset()
    assert not broken


# --- a step, its computations, and the bars ---------------------------------------------------------------------------


class Step(NamedTuple):
    """Tokens, norm, scale, factors of the samples, weights and output gradient, stored in float32."""

    z: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    scale: Tensor | None
    keep: Tensor | None
    weights: Weights
    form: Form
    grad: Tensor
    grid: tuple[int, int]

    def map(self, change: Callable[[Tensor], Tensor]) -> Step:
        def over(x: Any) -> Any:
            if isinstance(x, Weights):
                return Weights(*map(over, x))
            return change(x) if isinstance(x, Tensor) else x

        return Step(*map(over, self))


def draw_step(case: tuple, shape: tuple, dtype: torch.dtype = F32, *, scale: str = "", keep: bool = True) -> Step:
    """Tokens off the origin, of different sizes; a scale of size 1: a vector, `one` number or `none`."""
    made, (b, n, d, _) = draw(case, shape, dtype), shape
    z = made.z * (0.5 + torch.rand(b, n, 1)) + torch.randn(b, n, 1)
    scale = scale or ("one" if "proximal" in case[1].values() else "vector")
    scales = {"vector": torch.randn(d), "one": torch.tensor(0.7), "none": None}[scale]
    keeps = (torch.arange(b) % 3 > 0).float().view(b, 1, 1) * 1.25 if keep else None
    return Step(z, 1 + 0.3 * torch.randn(d), 0.3 * torch.randn(d), scales, keeps, *made[1:3], made.grad, made.grid)


def differentiate(take: Callable[..., Tensor], made: Step, frozen: tuple[str, ...] = ()) -> dict[str, Tensor | None]:
    """What the step adds to z and to dz', and the gradient of everything that has one."""
    named = {"z": made.z, "norm_weight": made.norm_weight, "norm_bias": made.norm_bias, "scale": made.scale}
    named |= {f"weights.{name}": w for name, w in made.weights._asdict().items()}
    leaves = {name: x.detach().requires_grad_(name not in frozen) for name, x in named.items() if x is not None}
    weights = Weights(*(leaves.get(f"weights.{name}") for name in Weights._fields))  # type: ignore[arg-type]
    rest = (leaves["z"], leaves["norm_weight"], leaves["norm_bias"], EPS, weights, made.form)
    out = take(*rest, scale=leaves.get("scale"), keep=made.keep, grid=made.grid)
    assert out.dtype == made.z.dtype
    asked = {name: x for name, x in leaves.items() if x.requires_grad}
    found = dict(zip(asked, torch.autograd.grad(out, [*asked.values()], made.grad, allow_unused=True), strict=True))
    if "z" in found:
        found["z"] = found["z"] - made.grad
    return {"output": out.detach() - made.z, **found}


def fused(made: Step, dtype: torch.dtype = F32, **options: Any) -> dict[str, Tensor | None]:
    """In one, under autocast where the dtype is a low one and z is float32."""
    low = dtype != F32 and made.z.dtype == F32
    with use_kernels("fused"), torch.autocast(made.z.device.type, dtype=dtype if low else BF16, enabled=low):
        return differentiate(step.residual_step, made, **options)


def plain(made: Step, dtype: torch.dtype = F32) -> dict[str, Tensor | None]:
    low = dtype not in (F32, F64) and made.z.dtype == F32
    with use_kernels("reference"), torch.autocast(made.z.device.type, dtype=dtype if low else BF16, enabled=low):
        return differentiate(step.plain, made)


def check(found: dict[str, Tensor | None], made: Step, dtype: torch.dtype = F32) -> None:
    told, usual = plain(made.map(Tensor.double), F64), plain(made, dtype)
    assert found.keys() <= told.keys()
    for name, mine in found.items():
        right = told[name]
        if right is None:
            assert mine is None or not mine.any(), name
            continue
        if dtype != F32 and name in CANCELLING:
            continue
        assert mine is not None and mine.shape == right.shape, name
        bar = max(BARS[dtype][name != "output"], (2 + (name != "output")) * excess(usual[name], right, dtype))
        assert excess(mine, right, dtype) <= bar, name


def spoil(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As `poison`, the buffers of the step too."""
    seen = poison(monkeypatch)
    monkeypatch.setattr(fused_step, "torch", layer.torch)
    return seen


def bits(found: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> None:
    for name, value in found.items():
        assert (value is None and right[name] is None) or torch.equal(value, right[name]), name


# --- parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", [SMALL, (2, 37, 96, 4)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_parity(case: tuple, shape: tuple, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer starts as NaN, and behind the end of every input there is nothing but NaN."""
    made = draw_step(case, shape, keep=keep).map(guarded)
    seen = spoil(monkeypatch)
    check(fused(made), made)
    assert len(seen) > 6


@pytest.mark.parametrize("case", OTHERS, ids=label)
def test_parity_of_other_forms(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    made = draw_step(case, (2, 6, 48, 4)).map(guarded)
    spoil(monkeypatch)
    check(fused(made), made)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("case", CASES, ids=label)
def test_the_output_product_adds(case: tuple, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of Hopper, by sample or not: one product of the step is made onto z. It is plain torch here."""
    weigh_early(monkeypatch)
    onto = []

    def spy(make: Callable[..., Tensor], *args: Any) -> Tensor:
        onto.append(args[3:])
        return make(*args)

    for name in ("product", "fold_out"):
        monkeypatch.setattr(Products, name, staticmethod(partial(spy, getattr(Products, name))))
    made = draw_step(case, SMALL, keep=keep).map(guarded)
    spoil(monkeypatch)
    check(fused(made), made)
    assert [torch.equal(args[0], made.z) and args[1] is made.keep for args in onto if args] == [True]
    low = draw_step(case, SMALL, BF16, keep=keep)
    assert relative(fused(low, BF16)["output"], plain(low.map(Tensor.double), F64)["output"]) < 2 * BARS[BF16][0]
    onto.clear()
    monkeypatch.setattr(plan, "ONTO", False)
    check(fused(made), made)
    assert onto and not any(onto)


@pytest.mark.parametrize("scale", ["vector", "one", "none"])
@pytest.mark.parametrize("case", [LISTING, EQUATION], ids=label)
def test_scales(case: tuple, scale: str) -> None:
    """One that is 0 has a gradient too: nothing is divided by it."""
    made = draw_step(case, (2, 5, 24, 3), scale=scale, keep=False)
    check(fused(made), made)
    if made.scale is not None:
        made = made._replace(scale=torch.zeros_like(made.scale))
        found = fused(made)
        assert found["scale"].any() and not found["output"].any() and not found["norm_weight"].any()
        check(found, made)


SIZES = [(2, 7, 15, 3), (1, 1, 8, 1), (1, 9, 192, 12), (1, 3, 200, 2), (1, 17, 144, 9), (1, 3, 640, 5)]


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_sizes(shape: tuple) -> None:
    """An odd width, one head of one token, more than eight heads, rows of several chunks, half a chunk at the end."""
    turn = "none" if shape[2] % 2 else "1d"
    made = draw_step(("dmsa", {"rotary": turn, "membership_bias": True}), shape)
    check(fused(made), made)


@pytest.mark.parametrize("shape", [(2, 0, 24, 3), (0, 5, 24, 3)], ids=str)
def test_nothing_at_all(shape: tuple) -> None:
    found = fused(draw_step(LISTING, shape))
    assert found["output"].shape == shape[:3]
    assert not any(x.any() for x in found.values())


@pytest.mark.parametrize("programs", [1, 3])
def test_runs_of_rows(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the norm's adjoint that go through several tiles, the last one short."""
    monkeypatch.setattr(plan, "NORM_PROGRAMS", programs)
    made = draw_step(LISTING, (2, 11, 24, 3)).map(guarded)
    check(fused(made), made)


def test_tokens_far_from_the_origin() -> None:
    """The variance is that of what is left when the mean is gone; the mean itself is rounded, to 3e-5 of a token here."""
    made = draw_step(LISTING, SMALL)
    made = made._replace(z=made.z + 1000)
    found, told = fused(made), plain(made.map(Tensor.double), F64)
    assert all(value is None or relative(value, told[name]) < 3e-4 for name, value in found.items())


@pytest.mark.parametrize("case", CASES, ids=label)
def test_parity_in_bfloat16(case: tuple) -> None:
    """Float32 tokens under autocast. The interpreter cuts where it should round: twice the bars."""
    made = draw_step(case, (2, 37, 96, 4), BF16)
    found, told = fused(made, BF16), plain(made.map(Tensor.double), F64)
    for name, value in found.items():
        if value is not None:
            assert value.dtype == F32, name
            if name not in CANCELLING:
                assert excess(value, told[name], BF16) <= 2 * BARS[BF16][name != "output"], name


def test_a_block_stored_in_bfloat16() -> None:
    made = draw_step(LISTING, SMALL, BF16).map(lambda x: x.to(BF16))
    found, told = fused(made, BF16), plain(made.map(Tensor.double), F64)
    assert {x.dtype for x in found.values() if x is not None} == {BF16}
    assert relative(found["weights.subspace"], told["weights.subspace"]) < 2e-2
    assert relative(found["output"] + made.z, told["output"] + made.z.double()) < BARS[BF16][0]  # z' is rounded itself


def test_the_scores_are_those_of_tokens_that_were_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = layer.forward

    def spy(*args: Any) -> Any:
        seen.append(args[0])
        return original(*args)

    monkeypatch.setattr(layer, "forward", spy)
    made = draw_step(LISTING, SMALL, BF16)
    normed, scored = fused_step.norm_score(
        made.z, fused_step.Around(*made[1:4], None, made.keep), EPS, made.weights, made.form, factors_of(made), BF16
    )
    y = nn.functional.layer_norm(made.z.double(), (48,), made.norm_weight.double(), made.norm_bias.double(), EPS)
    wide = made.map(Tensor.double)
    scores = kernels.reference.score(y, wide.weights, wide.form, wide.grid)
    assert relative(scored[0].mT, scores.sigmoid()) < 1e-6
    assert relative(scored[1].sum(1) / 5, scores.mean(-1)) < 1e-6
    assert relative(normed.y, y) < 1e-2
    fused(made, BF16)
    assert torch.equal(seen[0], normed.y)


def factors_of(made: Step) -> rotary.Factors | None:
    _, n, d = made.z.shape
    return rotary.factors(made.form.rotary, d, n, made.grid, step=plan.STEP, device=made.z.device, dtype=F32)


def test_repeats_are_equal_to_the_bit() -> None:
    made = draw_step(LISTING, (1, 7, 16, 2))
    first = fused(made)
    for _ in range(10):
        bits(fused(made), first)


@pytest.mark.parametrize("case", [LISTING, PROXIMAL, ("tssa", {})], ids=label)
def test_nothing_kept_gives_the_same_bits(case: tuple) -> None:
    made = draw_step(case, SMALL)
    bits(fused(made._replace(form=replace(made.form, save="nothing"))), fused(made))


@pytest.mark.parametrize("case", [LISTING, EQUATION], ids=label)
def test_only_what_is_wanted(case: tuple) -> None:
    """Each thing by itself, with the bits that it has when all are wanted."""
    made = draw_step(case, (2, 5, 24, 3))
    full = fused(made)
    names = [name for name in full if name != "output"]
    for name in names:
        one = fused(made, frozen=tuple(other for other in names if other != name))
        assert one.keys() == {"output", name}
        bits(one, full)


def test_nothing_of_the_callers_is_written() -> None:
    made = draw_step(LISTING, SMALL)
    before = made.map(torch.clone)
    fused(made)
    for mine, was in zip((*made[:5], *made.weights, made.grad), (*before[:5], *before.weights, before.grad), strict=True):
        assert mine is None or torch.equal(mine, was)


def test_layouts() -> None:
    made = draw_step(LISTING, SMALL)
    right = fused(made)
    for view in (lambda x: x.mT.contiguous().mT, lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)):
        bits(fused(made._replace(z=view(made.z), grad=view(made.grad))), right)
    ones = torch.ones(()).expand(made.z.shape)
    bits(fused(made._replace(grad=ones)), fused(made._replace(grad=ones.contiguous())))


def test_a_nan_stays_in_its_sample() -> None:
    made = draw_step(LISTING, SMALL)
    clean, value = fused(made), made.z.clone()
    value[1, 4, 5] = float("nan")
    found = fused(made._replace(z=value))
    for name in ("output", "z"):
        assert torch.equal(found[name][[0, 2]], clean[name][[0, 2]])
        assert found[name][1].isnan().any()


# --- what PyTorch knows of it -----------------------------------------------------------------------------------------


def arguments(made: Step, pending: Tensor | None = None) -> tuple[Any, ...]:
    factors = factors_of(made) if made.weights.assign is not None else None
    return (
        *made[:4],
        pending,
        made.keep,
        *made.weights,
        *registered._tables(factors),
        EPS,
        made.form.text,
        registered._step(factors),
        F32,
    )


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("case", [LISTING, ("tssa", {})], ids=label)
def test_opcheck(case: tuple, late: bool) -> None:
    made = draw_step(case, (2, 6, 24, 3))
    moving = made.map(lambda x: x.clone().requires_grad_())
    pending = torch.randn(2, 6, 24) if late else None
    opcheck(
        torch.ops.dmst.step.default,
        arguments(moving._replace(keep=made.keep), pending.clone().requires_grad_() if pending is not None else None),
    )
    *tensors, eps, text, length, dtype = arguments(made, pending)
    _, *kept = torch.ops.dmst.step(*tensors, eps, text, length, dtype)
    there = [True, True, True, True, late, *(w is not None for w in made.weights)]
    given = (made.grad, made.grad * made.keep, *tensors, *kept, there, eps, text, length, dtype)
    opcheck(torch.ops.dmst.step_backward.default, given)


def test_fake_tensors_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_step, "forward", None)
    made = draw_step(LISTING, (2, 6, 24, 3))
    with FakeTensorMode() as mode:
        found = fused(made.map(mode.from_tensor))
    assert found["z"].shape == made.z.shape


def test_the_operators_give_the_same_bits() -> None:
    """As a compiled graph or a counter sees them; operations are the layer's."""
    made = draw_step(LISTING, (2, 6, 24, 3))
    right = fused(made)
    with FlopCounterMode(display=False) as counter:
        bits(fused(made), right)
    assert counter.get_total_flops() == 3 * (4 * 2 * 6 * 24**2 + 2 * 2 * 6 * 24 * 3)


def test_a_second_derivative_says_no() -> None:
    made = draw_step(LISTING, (2, 6, 24, 3))
    z = made.z.requires_grad_()
    with use_kernels("fused"):
        out = step.residual_step(z, *made[1:3], EPS, made.weights, made.form)
    (dz,) = torch.autograd.grad(out.square().sum(), z, create_graph=True)
    with pytest.raises(DmstError, match="no second derivative"):
        dz.sum().backward()


@pytest.mark.parametrize("case", CASES, ids=label)
def test_a_kernel_that_fails_is_told_once_and_replaced(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    made = draw_step(case, (2, 6, 24, 3))
    monkeypatch.setattr(fused_step, "launch", lambda *_: (_ for _ in ()).throw(RuntimeError("no such instruction")))
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        found = fused(made)
    check(found, made)
    check(fused(made), made)
    assert registered._broken
    registered._broken.clear()


# --- the block --------------------------------------------------------------------------------------------------------


def block_of(**options: Any) -> Block:
    torch.manual_seed(0)
    options = {"operator": "dmsa", "dim": 24, "num_heads": 3, "layer_scale": 0.5} | options
    block = Block(ModelConfig(**options), dtype=F32)
    excite(block.operator)
    with torch.no_grad():
        block.norm.weight.normal_(1, 0.2)
        block.norm.bias.normal_(std=0.2)
    return block


def run(block: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    z, grad = torch.randn(4, 6, 24), torch.randn(4, 6, 24)
    z.requires_grad_()
    torch.manual_seed(seed + 1)
    out = block(z, grid=(2, 3))
    named = dict(block.named_parameters())
    found = torch.autograd.grad(out, (z, *named.values()), grad.to(out.dtype))
    return {"out": out.detach(), "z": found[0], **dict(zip(named, found[1:], strict=True))}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each step that was taken in one."""
    seen: list[int] = []
    original = registered_step.residual_step

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(registered_step, "residual_step", spy)
    return seen


BLOCKS: list[dict[str, Any]] = [
    {}, {"layer_scale": None}, {"drop_path_rate": 0.5}, {"operator_options": {"mode": "proximal"}}, {"operator": "tssa"},
    {"operator": "gated_channel", "operator_options": {"rotary": "2d"}},
]  # fmt: skip


@pytest.mark.parametrize("options", BLOCKS, ids=str)
def test_a_block_takes_it_in_one(options: dict, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, samples left out at random included."""
    block = block_of(**options).train()
    with use_kernels("fused"):
        found = run(block)
        assert taken == [1]
        monkeypatch.setattr(plan, "STEPS", False)
        apart = run(block)
    assert taken == [1]
    for name, value in apart.items():
        assert relative(found[name], value) < 1e-5, name


def test_without_gradients_and_checkpointed() -> None:
    """The same bits."""
    block = block_of().train()
    with use_kernels("fused"):
        right = run(block)
        torch.manual_seed(1)
        z, grad = torch.randn(4, 6, 24), torch.randn(4, 6, 24)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert torch.equal(block(z, grid=(2, 3)), right["out"])
        moving = z.clone().requires_grad_()
        out = checkpoint(block, moving, (2, 3), use_reentrant=False)
        out.backward(grad)
    assert torch.equal(out, right["out"])
    assert torch.equal(moving.grad, right["z"])
    assert all(torch.equal(p.grad, right[name]) for name, p in block.named_parameters())


class Louder(DMSA):
    def forward(self, z: Tensor, **call: Any) -> Tensor:
        return 2 * super().forward(z, **call)


class Norm(nn.LayerNorm):
    pass


CHANGES: dict[str, Callable[[Block], Any]] = {
    "a hook on the norm": lambda block: block.norm.register_forward_hook(lambda *_: None),
    "a hook on the operator": lambda block: block.operator.register_forward_pre_hook(lambda *_: None),
    "a backward hook": lambda block: block.operator.register_full_backward_hook(lambda *_: None),
    "a norm of its own": lambda block: setattr(block, "norm", Norm(24)),
    "a norm without bias": lambda block: setattr(block, "norm", nn.LayerNorm(24, bias=False)),
    "an operator of its own": lambda block: setattr(block, "operator", Louder(24, 3)),
    "a forward of its own": lambda block: setattr(block.operator, "forward", block.operator.forward),
    "dropout": lambda block: setattr(block.operator.proj_drop, "p", 0.1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_where_a_part_was_changed_it_is_not(change: Callable[[Block], Any], taken: list[int]) -> None:
    block = block_of().train()
    change(block)
    with use_kernels("fused"):
        run(block)
    assert not taken


def test_where_silent_heads_are_left_out_it_is_not_but_in_training(taken: list[int]) -> None:
    block, z = block_of(), torch.randn(2, 6, 24)
    block.operator.skip_silent = True
    with use_kernels("fused"):
        with torch.no_grad():
            block(z)
        assert not taken
        block(z)
    assert taken == [1]


def test_where_somebody_looks_or_nothing_serves_it_is_not(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    block, z = block_of(proj_drop_rate=0.1), torch.randn(2, 6, 24)
    with use_kernels("reference"):
        block.eval()(z)
    other = block_of(operator="mhsa")
    with use_kernels("fused"):
        other(z)
        with torch.autocast("cpu", dtype=F16):
            block(z)
        assert not taken
        block.eval().trace(z)  # without dropout, and a trace has the bits of the forward pass
        assert taken == [1]
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            block(z)
        finally:
            handle.remove()
        monkeypatch.setattr(plan, "WIDEST_NORM", 16)
        block(z)
    assert taken == [1]


def test_a_compiled_block_is_one_graph() -> None:
    """Full graph, forward and backward, with the step as one node each."""
    targets = []

    def look(graph: torch.fx.GraphModule, _: list) -> Any:
        targets.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    block = block_of().train()
    compiled = torch.compile(block, fullgraph=True, backend=aot_autograd(fw_compiler=look, bw_compiler=look))
    with use_kernels("fused"):
        eager, traced = run(block), run(compiled)
    for name, value in eager.items():
        assert relative(traced.get(name, traced.get(f"_orig_mod.{name}")), value) < 1e-5, name
    assert targets.count(torch.ops.dmst.step.default) == targets.count(torch.ops.dmst.step_backward.default) == 1
    assert torch.ops.dmst.attend.default not in targets


def test_a_block_under_autocast_keeps_its_residual_in_float32(taken: list[int]) -> None:
    block = block_of().train()
    with use_kernels("fused"), torch.autocast("cpu", dtype=BF16):
        assert block(torch.randn(2, 6, 24), grid=(2, 3)).dtype == F32
    assert taken == [1]
