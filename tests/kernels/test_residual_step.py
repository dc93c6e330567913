"""The residual step as one operator, z' = z + keep * scale * attend(norm(z)), against float64; and blocks that take it.

On a GPU where there is one, else in Triton's interpreter. The bars are those of tests/parity.py, or a few times the error of
plain torch in the same dtype. They hold for what the step adds to z and to dz': the identity would hide the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dmst
from dmst import use_kernels
from dmst.kernels import Form, Weights, plan, step
from dmst.models.block import Block
from dmst.models.config import ModelConfig
from tests.cases import excite, label, relative
from tests.parity import (
    BARS,
    BF16,
    DEVICE,
    EQUATION,
    F32,
    F64,
    LISTING,
    PROXIMAL,
    TSSA,
    by_default,
    draw,
    excess,
    fresh_memory_is_nan,
    guarded,
    needs_triton,
    same_bits,
    transposed,
)

pytestmark = needs_triton
interpreter = pytest.mark.interpreter
EPS = 1e-6
CASES = [("dmsa", {"membership_bias": True}), EQUATION, PROXIMAL, TSSA]
OTHERS = [("tssa", {"position_scores": "1d"}), ("dmsa", {"rotary": "2d", "bias": False}), ("gated_channel", {}), ("tpsusa", {})]
SMALL = (3, 198, 96, 2) if DEVICE == "cuda" else (3, 6, 48, 4)  # b, n, d, k
CANCELLING = ("weights.theta", "weights.temperature", "weights.assign_bias")  # sums whose terms cancel: judged in float32


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
    z = made.z * (0.5 + torch.rand(b, n, 1, device=DEVICE)) + torch.randn(b, n, 1, device=DEVICE)
    scale = scale or ("one" if "proximal" in case[1].values() else "vector")
    scales = {"vector": torch.randn(d), "one": torch.tensor(0.7), "none": None}[scale]
    keeps = (torch.arange(b) % 3 > 0).float().view(b, 1, 1) * 1.25 if keep else None
    made_step = Step(z, 1 + 0.3 * torch.randn(d), 0.3 * torch.randn(d), scales, keeps, *made[1:3], made.grad, made.grid)
    return made_step.map(lambda x: x.to(DEVICE))


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
    with use_kernels("fused"), torch.autocast(DEVICE, dtype=dtype if low else BF16, enabled=low):
        return differentiate(step.residual_step, made, **options)


def plain(made: Step, dtype: torch.dtype = F32) -> dict[str, Tensor | None]:
    low = dtype not in (F32, F64) and made.z.dtype == F32
    with use_kernels("reference"), torch.autocast(DEVICE, dtype=dtype if low else BF16, enabled=low):
        return differentiate(step.plain, made)


def check(found: dict[str, Tensor | None], made: Step, dtype: torch.dtype = F32, times: int = 1) -> None:
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
        bar = max(times * BARS[dtype][name != "output"], (2 + (name != "output")) * excess(usual[name], right, dtype))
        assert excess(mine, right, dtype) <= bar, name


# --- parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", by_default(CASES + OTHERS, 3), ids=label)
def test_every_form(case: tuple) -> None:
    """Every buffer starts as NaN, and behind the end of every input there is nothing but NaN."""
    for keep in (False, True):
        made = draw_step(case, SMALL, keep=keep)
        with fresh_memory_is_nan():
            found = fused(made.map(guarded))
        check(found, made)


@interpreter
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


@interpreter
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
    assert not any(x.any() for x in found.values() if x is not None)


def test_tokens_far_from_the_origin() -> None:
    """The variance is that of what is left when the mean is gone; the mean itself is rounded, to 3e-5 of a token here."""
    made = draw_step(LISTING, SMALL)
    made = made._replace(z=made.z + 1000)
    found, told = fused(made), plain(made.map(Tensor.double), F64)
    assert all(value is None or relative(value, told[name]) < 3e-4 for name, value in found.items())


@pytest.mark.parametrize("case", by_default(CASES, 1), ids=label)
def test_autocast(case: tuple) -> None:
    """Float32 tokens under autocast. The interpreter cuts where it should round: twice the bars."""
    made = draw_step(case, (2, 37, 96, 4), BF16)
    found = fused(made, BF16)
    assert {x.dtype for x in found.values() if x is not None} == {F32}
    check(found, made, BF16, times=1 if DEVICE == "cuda" else 2)


@interpreter
def test_a_block_stored_in_bfloat16() -> None:
    made = draw_step(LISTING, SMALL, BF16).map(lambda x: x.to(BF16))
    found, told = fused(made, BF16), plain(made.map(Tensor.double), F64)
    assert {x.dtype for x in found.values() if x is not None} == {BF16}
    assert relative(found["weights.subspace"], told["weights.subspace"]) < 2e-2
    assert relative(found["output"] + made.z, told["output"] + made.z.double()) < BARS[BF16][0]  # z' is rounded itself


# --- bits and memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", by_default([LISTING, PROXIMAL, TSSA], 1), ids=label)
def test_repeats_and_nothing_kept_give_the_same_bits(case: tuple) -> None:
    """And nothing of the caller's is written."""
    made = draw_step(case, (1, 7, 16, 2))
    before, first = made.map(torch.clone), fused(made)
    for _ in range(3):
        same_bits(fused(made), first)
    same_bits(fused(made._replace(form=replace(made.form, save="nothing"))), first)
    for mine, was in zip((*made[:5], *made.weights, made.grad), (*before[:5], *before.weights, before.grad), strict=True):
        assert mine is None or torch.equal(mine, was)


@interpreter
@pytest.mark.parametrize("case", [LISTING, EQUATION], ids=label)
def test_only_what_is_wanted(case: tuple) -> None:
    """Each thing by itself, with the bits that it has when all are wanted."""
    made = draw_step(case, (2, 5, 24, 3))
    full = fused(made)
    names = [name for name in full if name != "output"]
    for name in names:
        one = fused(made, frozen=tuple(other for other in names if other != name))
        assert one.keys() == {"output", name}
        same_bits(one, full)


@interpreter
def test_layouts() -> None:
    made = draw_step(LISTING, SMALL)
    right = fused(made)
    for view in (transposed, lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)):
        same_bits(fused(made._replace(z=view(made.z), grad=view(made.grad))), right)
    ones = torch.ones((), device=DEVICE).expand(made.z.shape)
    same_bits(fused(made._replace(grad=ones)), fused(made._replace(grad=ones.contiguous())))


def test_a_nan_stays_in_its_sample() -> None:
    made = draw_step(LISTING, SMALL)
    clean, value = fused(made), made.z.clone()
    value[1, 4, 5] = float("nan")
    found = fused(made._replace(z=value))
    for name in ("output", "z"):
        assert torch.equal(found[name][[0, 2]], clean[name][[0, 2]])
        assert found[name][1].isnan().any()


# --- blocks and networks ----------------------------------------------------------------------------------------------


def block_of(**options: Any) -> Block:
    torch.manual_seed(0)
    options = {"operator": "dmsa", "dim": 24, "num_heads": 3, "layer_scale": 0.5} | options
    block = Block(ModelConfig(**options), dtype=F32)
    excite(block.operator)
    with torch.no_grad():
        block.norm.weight.normal_(1, 0.2)
        block.norm.bias.normal_(std=0.2)
    return block.to(DEVICE)


def run(block: nn.Module, call: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
    torch.manual_seed(1)
    z, grad = torch.randn(4, 6, 24, device=DEVICE), torch.randn(4, 6, 24, device=DEVICE)
    z.requires_grad_()
    out = (call or block)(z, (2, 3))
    named = dict(block.named_parameters())
    found = torch.autograd.grad(out, (z, *named.values()), grad)
    return {"out": out.detach(), "z": found[0], **dict(zip(named, found[1:], strict=True))}


BLOCKS: list[dict[str, Any]] = [
    {"drop_path_rate": 0.5}, {}, {"layer_scale": None}, {"operator_options": {"mode": "proximal"}}, {"operator": "tssa"},
    {"operator": "gated_channel", "operator_options": {"rotary": "2d"}},
]  # fmt: skip


@pytest.mark.parametrize("options", by_default(BLOCKS, 1), ids=str)
def test_a_block_in_one_and_apart(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, samples left out at random included; the same bits without gradients and checkpointed."""
    block = block_of(**options).train()
    with use_kernels("fused"):
        found = run(block)
        same_bits(run(block, lambda z, grid: checkpoint(block, z, grid, use_reentrant=False)), found)
        monkeypatch.setattr(plan, "step", lambda *_: False)
        apart = run(block)
    for name, value in apart.items():
        assert relative(found[name], value) < 1e-5, name


def test_a_hook_on_a_part_is_called() -> None:
    """And the numbers stay."""
    block, heard = block_of().eval(), []
    with use_kernels("fused"):
        right = run(block)
        for part in (block.norm, block.operator, block.residual):
            handle = part.register_forward_hook(lambda *_: heard.append(1))
            found = run(block)
            handle.remove()
            assert heard.pop() and not heard
            assert all(relative(found[name], value) < 1e-5 for name, value in right.items())


NETWORKS = [{}, {"layer_scale": None}, {"drop_path_rate": 0.3}, {"feedforward": "local"}]


@pytest.mark.parametrize("options", by_default(NETWORKS, 1), ids=str)
def test_a_network_of_blocks(options: dict) -> None:
    """Fused and plain under autocast; a listener changes no bit, and a trace has the bits."""
    torch.manual_seed(0)
    small = {"img_size": 16, "patch_size": 8, "dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    model: Any = dmst.create_model("dmst_tiny", **small, **options).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape).to(DEVICE))
    images = torch.randn(3, 3, 16, 16).to(DEVICE)

    def outcome(kernels: str) -> list[Tensor]:
        torch.manual_seed(1)
        with use_kernels(kernels), torch.autocast(DEVICE, BF16):
            out = model(images).float()
        return [out.detach(), *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    found, usual = outcome("fused"), outcome("reference")
    assert relative(found[0], usual[0]) < 1e-2
    assert all(relative(x, y) < 5e-2 for x, y in zip(found, usual, strict=True))
    hook = model.blocks[1].register_forward_hook(lambda *_: None)
    assert torch.equal(outcome("fused")[0], found[0])
    hook.remove()
    model.eval()
    for low in (False, True):
        with torch.no_grad(), use_kernels("fused"), torch.autocast(DEVICE, BF16, enabled=low):
            assert torch.equal(model.trace(images).logits, model(images))
