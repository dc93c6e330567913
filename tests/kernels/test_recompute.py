"""`save="nothing"`: for the backward pass a layer keeps its inputs alone, and output and gradients are the same to the bit.

Plain torch here; the fused kernels are in test_parity.py and test_residual_step.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dmst
from dmst import kernels, rotary, use_kernels
from dmst.errors import OptionError
from dmst.kernels import Form, Weights, plan
from dmst.operators import OPERATORS
from dmst.operators.family import TokenStatistics
from tests.cases import FAMILY, MODES, build, grid_of, label
from tests.parity import F32, needs_triton

MEMBERS = [name for name, operator in OPERATORS.items() if issubclass(operator, TokenStatistics)]
CASES = [*(("dmsa", {"mode": mode}) for mode in MODES), *((name, {}) for name in MEMBERS if name != "dmsa")]
FUSED = [case for case in CASES if case[0] in ("dmsa", "tssa")]
SPLIT = ("dmsa", {"gate_rotary": "none"})  # by the reference, under autograd


class Layer:
    """One layer whose inputs are leaves, so that whatever else is saved was saved by the layer."""

    def __init__(self, case: tuple, b: int = 2, n: int = 7, dtype: torch.dtype = F32) -> None:
        torch.manual_seed(n)
        operator = build(*case, dtype=dtype)
        self.form, self.grid = operator.form, grid_of(n)
        self.z, self.grad = (torch.randn(b, n, 24, dtype=dtype) for _ in range(2))
        self.z.requires_grad_()
        self.weights = Weights(*(None if w is None else w.detach().clone().requires_grad_() for w in operator.weights()))

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.z, *(w for w in self.weights if w is not None))

    def attend(self, save: str) -> Tensor:
        return kernels.attend(self.z, self.weights, replace(self.form, save=save), grid=self.grid)

    def run(self, save: str) -> tuple[Tensor | None, ...]:
        """The output and the gradient of every input."""
        out = self.attend(save)
        return out, *torch.autograd.grad(out, self.leaves, self.grad, allow_unused=True)

    def saved(self, save: str) -> int:
        """Elements that autograd holds between forward and backward, other than the inputs and the positions, which all layers
        share."""
        n = self.z.shape[1]
        factors = rotary.factors(self.form.rotary, 24, n, self.grid, step=plan.STEP, device=self.z.device, dtype=F32)
        shared = () if factors is None else (*factors.far, *factors.near)
        mine, found = {x.untyped_storage().data_ptr() for x in (*self.leaves, *shared)}, {}

        def pack(x: Tensor) -> Tensor:
            if x.untyped_storage().data_ptr() not in mine:
                found[x.untyped_storage().data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = self.attend(save)
        held = vars(out.grad_fn) if hasattr(out.grad_fn, "__dict__") else {}
        for value in held.values():  # out of the hooks' sight
            if isinstance(value, Tensor):
                pack(value)
        return sum(found.values())


def check_equal(found: tuple, usual: tuple) -> None:
    for a, b in zip(found, usual, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("case", [*FAMILY, SPLIT], ids=label)
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_the_same_bits(case: tuple, dtype: torch.dtype) -> None:
    layer = Layer(case, n=63)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != F32):
        check_equal(layer.run("nothing"), layer.run("projected"))


@pytest.mark.parametrize("case", [*CASES, SPLIT], ids=label)
def test_nothing_is_kept(case: tuple) -> None:
    """Not a number beside z and the weights; by default at least one for each channel of each token."""
    layer = Layer(case)
    assert layer.saved("nothing") == 0
    assert layer.saved("projected") >= layer.z.numel()


class TestFused:
    pytestmark = needs_triton

    @pytest.mark.skipif(torch.cuda.is_available(), reason="memory of a GPU is counted in test_gpu.py")
    @pytest.mark.parametrize("case", FUSED, ids=label)
    def test_nothing_is_kept(self, case: tuple) -> None:
        with use_kernels("fused"):
            test_nothing_is_kept(case)


@pytest.mark.parametrize("case", [*CASES, SPLIT], ids=label)
def test_a_second_derivative(case: tuple) -> None:
    layer = Layer(case, n=4, dtype=torch.float64)
    found = []
    for save in ("nothing", "projected"):
        out = layer.attend(save)
        (first,) = torch.autograd.grad(out.square().sum(), layer.z, create_graph=True)
        found.append((out, first, *torch.autograd.grad(first.square().sum(), layer.leaves, allow_unused=True)))
    check_equal(*found)
    assert found[0][2].abs().max() > 0


@pytest.mark.parametrize("case", [CASES[0], SPLIT], ids=label)
def test_a_weight_that_changed_in_between_is_refused(case: tuple) -> None:
    """The steps are taken again from the weights: others would give a wrong gradient in silence."""
    layer = Layer(case)
    out = layer.attend("nothing")
    with torch.no_grad():
        layer.weights.subspace.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("case", [CASES[0], SPLIT], ids=label)
def test_transforms(case: tuple) -> None:
    layer = Layer(case)

    def each(save: str) -> Tensor:
        form = replace(layer.form, save=save)
        weights = Weights(*(None if w is None else w.detach() for w in layer.weights))
        loss = torch.func.grad(lambda z, grad: (kernels.attend(z[None], weights, form)[0] * grad).sum())
        return torch.func.vmap(loss)(layer.z.detach(), layer.grad)

    assert torch.equal(each("nothing"), each("projected"))


# --- the option -------------------------------------------------------------------------------------------------------


def test_forms_that_compute_the_same_are_equal() -> None:
    usual, other = Form(3), Form(3, save="nothing")
    assert usual == other and hash(usual) == hash(other)
    assert Form.read(other.text).save == "nothing" and Form.read(usual.text).save == "projected"


@pytest.mark.parametrize("name", MEMBERS)
def test_operators_take_it(name: str) -> None:
    assert OPERATORS[name](24, 3).form.save == "projected"
    assert OPERATORS[name](24, 3, save="nothing").form.save == "nothing"
    with pytest.raises(OptionError, match=r"save.*Known: nothing, projected"):
        OPERATORS[name](24, 3, save="Nothing")


def test_networks_take_it(tmp_path: Path) -> None:
    """And a saved one says so; one that was saved without it loads as ever."""
    options = {"num_classes": 3, "dim": 24, "depth": 2, "num_heads": 3, "img_size": 32, "patch_size": 8}
    usual = dmst.create_model("dmst_tiny", **options)
    model = dmst.create_model("dmst_tiny", **options, save="nothing")
    model.load_state_dict(usual.state_dict())
    dmst.save_model(model, tmp_path / "model")
    assert dmst.load_model(tmp_path / "model").blocks[1].operator.form.save == "nothing"
    dmst.save_model(usual, tmp_path / "usual")
    assert "save" not in (tmp_path / "usual" / "config.json").read_text()
    images, found = torch.randn(2, 3, 32, 32), []
    for each in (model, usual):
        out = each.eval()(images)
        found.append((out, *torch.autograd.grad(out.square().sum(), tuple(each.parameters()), allow_unused=True)))
    check_equal(*found)
