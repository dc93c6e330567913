"""`save="nothing"`: for the backward pass a layer keeps its inputs alone, and output and gradients are the same to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

import dmst
from dmst import kernels, use_kernels
from dmst.errors import DmstError, OptionError
from dmst.kernels import Form, Weights, choice, plan
from dmst.operators import OPERATORS
from dmst.operators.family import TokenStatistics
from tests.cases import FAMILY, MODES, build, gradients, grid_of, label, tokens, with_form

F32 = torch.float32
MEMBERS = [name for name, operator in OPERATORS.items() if issubclass(operator, TokenStatistics)]
CASES = [*(("dmsa", {"mode": mode}) for mode in MODES), *((name, {}) for name in MEMBERS if name != "dmsa")]
SPLIT = ("dmsa", {"gate_rotary": "none"})  # by the reference, under autograd
interpreter = pytest.mark.skipif(not choice.interpreted(), reason="Triton's interpreter is off")
quiet = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")


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
        """Elements that autograd holds between forward and backward, other than the inputs."""
        mine, found = {x.untyped_storage().data_ptr() for x in self.leaves}, {}

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


# --- plain torch ------------------------------------------------------------------------------------------------------


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


def test_a_weight_that_changed_in_between_is_refused() -> None:
    """The steps are taken again from the weights: others would give a wrong gradient in silence."""
    for case in (CASES[0], SPLIT):
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


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_compiled_plain_layer_keeps_what_the_compiler_chooses() -> None:
    """There the option does not apply: one graph of plain steps, the same for both."""
    torch._dynamo.reset()
    operator, z, grad = build("dmsa", {}, dtype=F32), tokens(dtype=F32), torch.randn(2, 7, 24)
    compiled = [torch.compile(with_form(operator, save=save), backend="aot_eager") for save in ("nothing", "projected")]
    found, usual = (gradients(layer, z, grad) for layer in compiled)
    check_equal(tuple(found.values()), tuple(usual.values()))


# --- the option -------------------------------------------------------------------------------------------------------


def test_forms_that_compute_the_same_are_equal() -> None:
    """So that the plans of the kernels, kept by form, are shared; as text they differ, and are read back."""
    usual, other = Form(3), Form(3, save="nothing")
    assert usual == other and hash(usual) == hash(other)
    assert usual.text != other.text
    assert Form.read(other.text).save == "nothing" and Form.read(usual.text).save == "projected"
    assert Form.read('{"num_heads": 3}').save == "projected"  # written before there was a choice


@pytest.mark.parametrize("name", MEMBERS)
def test_operators_take_it(name: str) -> None:
    assert OPERATORS[name](24, 3).form.save == "projected"
    assert OPERATORS[name](24, 3, save="nothing").form.save == "nothing"
    for wrong in ("Nothing", None, False):
        with pytest.raises(OptionError, match=r"save.*Known: nothing, projected"):
            OPERATORS[name](24, 3, save=wrong)


def test_networks_take_it(tmp_path: Path) -> None:
    """And a saved one says so; one that was saved without it loads as ever."""
    options = {"num_classes": 3, "dim": 24, "depth": 2, "num_heads": 3, "img_size": 32, "patch_size": 8}
    usual = dmst.create_model("dmst_tiny", **options)
    model = dmst.create_model("dmst_tiny", **options, save="nothing")
    assert all(block.operator.form.save == "nothing" for block in model.blocks)
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
    with pytest.raises(OptionError, match="save"):
        dmst.create_model("dmst_tiny", **options, save="everything")


# --- the fused layer, in Triton's interpreter -------------------------------------------------------------------------


@pytest.fixture
def registered() -> Iterator[Any]:
    pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
    from dmst.kernels import registered

    registered._broken.clear()
    with use_kernels("fused"):
        yield registered
    assert not registered._broken  # else the plain layer was compared with itself
    torch._dynamo.reset()


@interpreter
@quiet
@pytest.mark.parametrize("case", CASES, ids=label)
def test_fused_gives_the_same_bits_and_keeps_nothing(case: tuple, registered: Any) -> None:
    layer = Layer(case)
    check_equal(layer.run("nothing"), layer.run("projected"))
    assert layer.saved("nothing") == 0
    assert layer.saved("projected") >= layer.z.numel()


@interpreter
@quiet
@pytest.mark.parametrize("route", ["along", "fold", "apart", "weighted", "resident"])
def test_each_route_is_taken_again(route: str, registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same kernels, all but the output product."""
    from dmst.kernels.fused import calls
    from dmst.kernels.fused import layer as fused
    from tests.standins import Products, Resident
    from tests.test_fused import weigh_early

    monkeypatch.setattr(plan, "PROGRAMS", 1 if route in ("along", "resident") else 10**6)
    monkeypatch.setattr(plan, "FOLDED", 4 if route == "fold" else 0)
    if route == "weighted":
        weigh_early(monkeypatch)
    if route == "resident":
        monkeypatch.setattr(plan, "BUSY", 0)
        for module in (fused, calls):
            monkeypatch.setattr(module, "resident", Resident)
    made: list[str] = []

    def counted(name: str, original: Callable[..., Tensor], *args: Any) -> Tensor:
        made.append(name)
        return original(*args)

    for owner, name in ((calls, "linear"), (fused, "_fold_out"), (Products, "fold_out")):
        monkeypatch.setattr(owner, name, functools.partial(counted, name, getattr(owner, name)))
    sweep = plan.whole(2, 66, 3, 8) or plan.sweep(2, 66, 3, 8)
    assert route in ("weighted", "resident") or plan.route(2, sweep.splits, "listing") == route
    layer = Layer(("dmsa", {}), n=66)
    found, again = layer.run("nothing"), made.copy()
    made.clear()
    check_equal(found, layer.run("projected"))
    first, last = {"weighted": ([], "fold_out"), "fold": (["linear"], "_fold_out")}.get(route, (["linear"], "linear"))
    assert made == [*first, last]
    assert again == [*first, last, *first]  # the first product once more, the last one not


@interpreter
@quiet
def test_the_operators_with_nothing(registered: Any) -> None:
    """Empty tensors leave in place of what would be kept, as the fake implementation says, also of no tokens."""
    from tests.test_fused_registration import arguments

    for n in (6, 0):
        layer = Layer(("dmsa", {}), n=n)
        layer.form = replace(layer.form, save="nothing")
        given = arguments(layer)  # type: ignore[arg-type]
        _, *kept = torch.ops.dmst.attend(*given)
        assert len(kept) == registered.KEPT and not any(x.numel() for x in kept)
        torch.library.opcheck(torch.ops.dmst.attend.default, given)


@interpreter
@quiet
def test_compiled_with_nothing(registered: Any) -> None:
    """One operator forward, one backward, and nothing of the first in the second; another choice is another graph."""
    graphs: list[torch.fx.GraphModule] = []

    def look(graph: torch.fx.GraphModule, _: list) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    operator, z, grad = build("dmsa", {}, dtype=F32), torch.randn(2, 34, 24), torch.randn(2, 34, 24)
    usual = gradients(operator, z, grad)
    compiled = torch.compile(operator, fullgraph=True, backend=aot_autograd(fw_compiler=look, bw_compiler=look))
    kept = []
    for save in ("projected", "nothing"):
        operator.form = replace(operator.form, save=save)
        check_equal(tuple(gradients(compiled, z, grad).values()), tuple(usual.values()))
        forward, backward = graphs[-2:]
        assert [node.target for node in backward.graph.nodes].count(torch.ops.dmst.attend_backward.default) == 1
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        parts = [node for node in output.args[0][1:] if node.target is getitem]  # of what the operator returned
        kept.append(sum(node.meta["val"].numel() for node in parts))
    assert len(graphs) == 4
    assert kept[0] >= z.numel() and kept[1] == 0


@interpreter
@quiet
def test_fused_as_documented(registered: Any) -> None:
    """A second derivative is refused in words; FLOPs count the first product and the scores once more."""
    layer = Layer(("dmsa", {}))
    (first,) = torch.autograd.grad(layer.attend("nothing").sum(), layer.z, create_graph=True)
    with pytest.raises(DmstError, match=r'use_kernels\("reference"\)'):
        first.sum().backward()
    (b, n, d), k = layer.z.shape, 3
    with FlopCounterMode(display=False) as counter:
        layer.run("nothing")
    assert counter.get_total_flops() == 3 * (4 * b * n * d * d + 2 * b * n * d * k) + 2 * b * n * d * d + 2 * b * n * d * k


@interpreter
@quiet
@pytest.mark.parametrize("broken", ["forward", "backward", "take_steps"])
def test_a_kernel_that_fails_gives_way(broken: str, registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dmst.kernels.fused import layer as fused
    from tests.test_fused_registration import boom

    monkeypatch.setattr(fused, broken, boom)
    layer = Layer(("dmsa", {}))
    with pytest.warns(RuntimeWarning, match="boom") as seen:
        found = layer.run("nothing")
    assert len(seen) == 1
    registered._broken.clear()
    with use_kernels("reference"):
        usual = layer.run("nothing")
    assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(found, usual, strict=True))
