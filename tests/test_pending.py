"""What a block leaves for the next one to add (`pending`): the same bits as if it had been added at once, and less kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dmst
from dmst import use_kernels
from dmst.errors import ShapeError
from dmst.kernels import choice, plan, step
from dmst.models import in_one
from dmst.models.block import Block
from tests.cases import label, relative

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from dmst.kernels import registered
from tests.test_fused import BF16, F32
from tests.test_fused_step import EPS, LISTING, PROXIMAL, Step, draw_step

pytestmark = [
    pytest.mark.skipif(
        not (choice.interpreted() or torch.cuda.is_available()),
        reason="neither Triton's interpreter (TRITON_INTERPRET=1) nor a CUDA device",
    ),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (3, 197, 96, 2) if DEVICE == "cuda" else (3, 9, 24, 3)
FORMS = [LISTING, PROXIMAL, ("tssa", {})]


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    """A kernel that fell back would be compared with itself."""
    registered._broken.clear()
    yield
    broken = set(registered._broken)
    registered._broken.clear()
    torch._dynamo.reset()
    assert not broken


def same(x: Tensor, y: Tensor, dtype: torch.dtype = BF16) -> bool:
    """To the bit; the interpreter cuts float32 off to bfloat16 where the device rounds."""
    if DEVICE == "cuda" or dtype == F32:
        return torch.equal(x, y)
    return relative(x.double(), y.double()) < 5e-2


def there(case: tuple, dtype: torch.dtype, **options: Any) -> tuple[Step, Tensor]:
    """A step on z, and what is pending there, in the compute dtype."""
    made = draw_step(case, SHAPE, dtype, **options).map(lambda x: x.to(DEVICE))
    return made, torch.randn(made.z.shape, generator=torch.Generator().manual_seed(7)).to(DEVICE, dtype)


def leaves_of(made: Step) -> dict[str, Tensor]:
    named = {"norm_weight": made.norm_weight, "norm_bias": made.norm_bias, "scale": made.scale, **made.weights._asdict()}
    return {name: x.detach().requires_grad_() for name, x in named.items() if x is not None}


def pulled(made: Step, z: Tensor, pending: Tensor | None, dtype: torch.dtype, form: Any = None) -> dict[str, Tensor]:
    leaves = leaves_of(made)
    z = z.detach().requires_grad_()
    inputs = {"z": z, **leaves}
    if pending is not None:
        inputs["pending"] = pending = pending.detach().requires_grad_()
    weights = made.weights._replace(**{name: leaves[name] for name in made.weights._fields if name in leaves})
    around = {"scale": leaves.get("scale"), "keep": made.keep, "pending": pending, "grid": made.grid}
    with use_kernels("fused"), torch.autocast(DEVICE, dtype=BF16, enabled=dtype == BF16):
        out = step.residual_step(z, leaves["norm_weight"], leaves["norm_bias"], EPS, weights, form or made.form, **around)
    return {"output": out.detach(), **dict(zip(inputs, torch.autograd.grad(out, [*inputs.values()], made.grad), strict=True))}


@pytest.mark.parametrize(
    ("dtype", "keep", "save"), [(F32, True, "projected"), (BF16, False, "projected"), (BF16, True, "nothing")], ids=str
)
@pytest.mark.parametrize("case", FORMS, ids=label)
def test_it_is_added_on_the_way_in(case: tuple, dtype: torch.dtype, keep: bool, save: str) -> None:
    """To the bit; but on a GPU Triton may lay the rows of a norm without scores out anew, and add them up in another order."""
    made, pending = there((case[0], {**case[1], "save": save}), dtype, keep=keep)
    wanted = pulled(made, made.z + pending, None, dtype)
    for _ in range(3):  # as it is written, recorded, replayed
        found = pulled(made, made.z, pending, dtype)
        assert same(found.pop("pending"), found["z"].to(dtype), dtype)
        assert found.keys() == wanted.keys()
        if DEVICE == "cuda" and made.weights.assign is None:
            bar = 5e-3 if dtype == BF16 else 1e-5
            assert all(relative(found[name].double(), wanted[name].double()) < bar for name in wanted)
        else:
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_definition_adds_it_too() -> None:
    made, pending = there(LISTING, F32)
    given = (made.norm_weight, made.norm_bias, EPS, made.weights, made.form)
    around = {"scale": made.scale, "keep": made.keep, "grid": made.grid}
    assert torch.equal(step.plain(made.z, *given, pending=pending, **around), step.plain(made.z + pending, *given, **around))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("save", ["projected", "nothing"])
def test_compiled(save: str) -> None:
    """As an operator that the compiler knows."""
    made, pending = there(("dmsa", {"save": save}), F32)
    wanted = pulled(made, made.z, pending, F32)
    leaves = leaves_of(made)
    weights = made.weights._replace(**{name: leaves[name] for name in made.weights._fields if name in leaves})
    z, late = made.z.detach().requires_grad_(), pending.detach().requires_grad_()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def take(z: Tensor, late: Tensor) -> Tensor:
        around = {"scale": leaves.get("scale"), "keep": made.keep, "pending": late}
        return step.residual_step(z, leaves["norm_weight"], leaves["norm_bias"], EPS, weights, made.form, **around)

    with use_kernels("fused"):
        out = take(z, late)
    found = dict(zip(("z", "pending"), torch.autograd.grad(out, (z, late), made.grad), strict=True))
    assert torch.equal(out, wanted["output"])
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("kernels", ["fused", "reference"])
def test_a_stream_in_bfloat16_stays_so_with_a_wider_factor(kernels: str) -> None:
    """Stochastic depth draws its factors in float32."""
    made, pending = there(LISTING, BF16)
    assert made.keep is not None and made.keep.dtype == F32
    low = made.map(lambda x: x.to(BF16))
    given = (low.norm_weight, low.norm_bias, EPS, low.weights, low.form)
    with use_kernels(kernels), torch.no_grad():
        out = step.residual_step(low.z, *given, scale=low.scale, keep=made.keep, pending=pending, grid=made.grid)
    assert out.dtype == BF16


def test_a_wrong_shape_is_named() -> None:
    made, pending = there(LISTING, F32)
    with pytest.raises(ShapeError, match="pending has shape"):
        step.residual_step(made.z, made.norm_weight, made.norm_bias, EPS, made.weights, made.form, pending=pending[:1])


@pytest.mark.parametrize("save", ["projected", "nothing"])
def test_what_is_kept(save: str) -> None:
    """The sum in place of z, and not what was pending; with save="nothing" these two, and not their sum."""
    made, pending = there(("dmsa", {"save": save}), BF16)
    z, kept = made.z.detach().requires_grad_(), []
    late = pending.detach().requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with use_kernels("fused"), torch.autocast(DEVICE, dtype=BF16), hooks:
        step.residual_step(
            z, made.norm_weight, made.norm_bias, EPS, made.weights, made.form, pending=late, scale=made.scale, grid=made.grid
        )
    sizes = [x for x in kept if x.shape == z.shape]
    places = {x.data_ptr() for x in sizes}
    assert (late.data_ptr() in places) == (z.data_ptr() in places) == (save == "nothing")
    if save == "projected":  # the sum, the normed tokens, what the layer keeps
        assert sorted(str(x.dtype) for x in sizes) == ["torch.bfloat16", "torch.bfloat16", "torch.float32"]


# --- networks ---------------------------------------------------------------------------------------------------------


def network(**options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    small = {"img_size": 16, "patch_size": 8, "dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = dmst.create_model("dmst_tiny", **(small | options)).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape).to(DEVICE))
    return model


def outcome(model: torch.nn.Module, images: Tensor) -> list[Tensor]:
    with use_kernels("fused"), torch.autocast(DEVICE, BF16):
        out = model(images).float()
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(model.parameters()))]


@pytest.mark.parametrize("options", [{}, {"layer_scale": None}, {"drop_path_rate": 0.3}, {"feedforward": "local"}], ids=str)
def test_a_network_has_the_same_bits(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = network(**options), torch.randn(3, 3, 16, 16, device=DEVICE)
    taken = []
    monkeypatch.setattr(Block, "carry", lambda *a, _do=Block.carry: taken.append(a[2]) or _do(*a))
    torch.manual_seed(1)
    found = outcome(model, images)
    assert [x is not None for x in taken] == [False, True]
    monkeypatch.setattr(Block, "carries", lambda self, z: False)
    torch.manual_seed(1)
    wanted = outcome(model, images)
    assert len(taken) == 2
    assert torch.equal(found[0], wanted[0])
    assert all(same(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("low", [False, True])
def test_a_trace_makes_the_calls_of_the_forward_pass(low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so it has its bits. Nobody is called twice who listens."""
    model, images = network(), torch.randn(3, 3, 16, 16, device=DEVICE)
    steps: list[bool] = []
    monkeypatch.setattr(in_one, "step", lambda *a, _do=in_one.step: steps.append(len(a) > 5 and a[5] is not None) or _do(*a))
    heard: list[int] = []

    def both() -> None:
        steps.clear()
        heard.clear()
        with torch.no_grad(), use_kernels("fused"), torch.autocast(DEVICE, BF16, enabled=low):
            logits, calls, told = model(images), steps[:], len(heard)
            assert torch.equal(model.trace(images).logits, logits)  # type: ignore[operator]
        assert steps == calls * 2
        assert len(heard) == 2 * told

    both()
    assert steps == [False, low] * 2  # what is pending waits in the low dtype alone
    for place in ("blocks.1.norm", "blocks.0.operator", "blocks.1.feedforward.norm"):
        hook = model.get_submodule(place).register_forward_hook(lambda *_: heard.append(1))
        both()
        hook.remove()
        assert len(heard) == 2


def test_a_first_line_of_ones_own_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = network()
    images = torch.randn(3, 3, 16, 16, device=DEVICE)
    model.blocks[1].attend = lambda z, grid=None: 2 * z
    traced = []
    usual = model.blocks[0].trace
    model.blocks[0].trace = lambda *a: traced.append(1) or usual(*a)
    with torch.no_grad(), use_kernels("fused"), torch.autocast(DEVICE, BF16):
        found = model.trace(images)
        assert torch.equal(found.logits, model(images))
    assert traced == [1]
    assert torch.equal(found.layers[1].after_operator, 2 * found.layers[1].z)


def test_a_network_in_bfloat16_drops_paths() -> None:
    model = network(drop_path_rate=0.5).bfloat16().train()
    with use_kernels("fused"):
        assert model(torch.randn(3, 3, 16, 16, device=DEVICE, dtype=BF16)).dtype == BF16


def carried(model: Any, z: Tensor) -> list[bool]:
    with use_kernels("fused"), torch.autocast(DEVICE, BF16):
        return [block.carries(z) for block in model.blocks]


def test_who_looks_gets_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = network()
    z = torch.randn(2, 4, 24, device=DEVICE)
    assert carried(model, z) == [True] * 2
    with use_kernels("fused"):
        assert not any(block.carries(z) for block in model.blocks)  # float32 adds at once, as it always did
    places = ("blocks.0", "blocks.1.feedforward", "blocks.0.feedforward.mlp.fc2", "blocks.0.norm", "blocks.1.operator")
    for place in places:
        hook = model.get_submodule(place).register_forward_hook(lambda *_: None)
        assert carried(model, z).count(False) == 1, place
        hook.remove()
    for place in ("blocks.0", "blocks.1.feedforward", "blocks.0.feedforward.mlp.fc2"):  # compiled by itself
        module = model.get_submodule(place)
        module._compiled_call_impl = module._call_impl
        assert carried(model, z).count(False) == 1, place
        module._compiled_call_impl = None
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert carried(model, z) == [False] * 2
    everywhere.remove()
    seen = []
    hook = model.blocks[1].register_forward_hook(lambda module, given, out: seen.append((given[0], out)))
    images = torch.randn(2, 3, 16, 16, device=DEVICE)
    found = outcome(model, images)
    hook.remove()
    again = outcome(model, images)
    assert torch.equal(found[0], again[0])
    assert all(same(x, y) for x, y in zip(found, again, strict=True))
    assert len(seen) == 1
    monkeypatch.setattr(plan, "STEPS", False)
    assert carried(model, z) == [False] * 2
