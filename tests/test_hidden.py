"""GELU of a product in one kernel: its formula, which MLPs take it and when, as one node of a traced graph."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dmst[kernels]'")

import dmst
from dmst.kernels import choice, hidden, plan
from dmst.kernels.fused import casts, hopper
from dmst.models.feedforward import Mlp
from dmst.models.zoo import model_config
from tests.cases import relative
from tests.standins import Products

BF16 = torch.bfloat16


def exact(x: Tensor) -> Tensor:
    """Phi by erfc, which has no cancellation below 0."""
    x = x.double()
    return 0.5 * x * torch.special.erfc(-x / 2**0.5)


def test_the_formula_is_gelu_to_the_bits_of_16_bit_numbers() -> None:
    x = torch.linspace(-40, 40, 2_000_001)
    found, right = Products.gelu(x).double(), exact(x)
    assert (found - right).abs().max() < 6e-7
    near = x > -3
    assert ((found - right).abs()[near] <= 2e-5 * right.abs()[near]).all()


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_every_16_bit_number(dtype: torch.dtype) -> None:
    """Rounded as the exact one, but for a few that lie in the middle between two; never NaN, and 0 far below."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    x = x[x.isfinite()]
    found, right = Products.gelu(x.float()).to(dtype), exact(x).to(dtype)
    assert found.isfinite().all()
    assert (found[x < -40] == 0).all() and torch.equal(found[x > 40], x[x > 40])
    matters = x > -3  # below, 6e-7 is more than half a bit
    steps = (found.view(torch.int16).int() - right.view(torch.int16).int()).abs()[matters]
    assert steps.max() <= 1 and (steps == 0).float().mean() > 0.995
    assert Products.gelu(torch.tensor([float("nan")])).isnan().all()


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A Hopper GPU that is not there: the kernel in plain torch, on this CPU. A list of what it was called with."""
    seen: list[tuple[int, ...]] = []
    assert not choice.triton_problem()  # and so what watches the kernels' files for what is replaced is there

    class Watched(Products):
        @staticmethod
        def hidden(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            assert {x.dtype, weight.dtype, BF16 if bias is None else bias.dtype} == {BF16}
            seen.append(tuple(x.shape))
            return Products.hidden(x, weight, bias)

    monkeypatch.setattr(hopper, "hidden", Watched.hidden)
    monkeypatch.setattr(casts, "cast_all", lambda dtype, *tensors: [None if x is None else x.to(dtype) for x in tensors])
    monkeypatch.setattr(hidden, "_on_gpu", lambda z: True)
    monkeypatch.setattr(hidden, "_fits", lambda index, dtype, h, d: dtype == BF16 and h % 64 == 0)
    monkeypatch.setattr(hidden, "_broken", set())
    monkeypatch.setattr(plan, "BY_HAND", 8)
    return seen


def mlp(**options: object) -> Mlp:
    torch.manual_seed(0)
    made = Mlp(model_config("vit_tiny", **{"dim": 64, "num_heads": 4, **options})).eval()
    for p in made.parameters():
        nn.init.normal_(p, std=0.1)
    return made


def autocast() -> torch.autocast:
    return torch.autocast("cpu", BF16)


def test_an_mlp_takes_it_without_gradients(there: list) -> None:
    made, z = mlp(), torch.randn(2, 5, 64)
    with torch.no_grad():
        right = made.double()(z.double())
        made.float()
        with autocast():
            found = made(z)
        low = made.to(BF16)(z.to(BF16))
    assert there == [(2, 5, 64)] * 2
    for out in (found, low):
        assert out.dtype == BF16 and relative(out.double(), right) < 1e-2


def test_who_does_not_take_it(there: list) -> None:
    made, z = mlp(), torch.randn(2, 5, 64)
    ways = {
        "a gradient": lambda: made(z),
        "float32": lambda: plain(made, z, low=False),
        "few tokens": lambda: plain(made, z[:1]),
        "the plain kernels": lambda: reference(made, z),
        "a listener": lambda: heard(made, z),
        "an odd width": lambda: plain(mlp(mlp_ratio=1.5), z),
    }

    def plain(made: Mlp, z: Tensor, low: bool = True) -> None:
        with torch.no_grad(), torch.autocast("cpu", BF16, enabled=low):
            made(z)

    def reference(made: Mlp, z: Tensor) -> None:
        with dmst.use_kernels("reference"):
            plain(made, z)

    def heard(made: Mlp, z: Tensor) -> None:
        calls: list[int] = []
        handle = made.fc1.register_forward_hook(lambda *_: calls.append(1))
        plain(made, z)
        handle.remove()
        assert calls == [1]

    for what, way in ways.items():
        with autocast() if what == "a gradient" else torch.autocast("cpu", enabled=False):
            way()
        assert not there, what
    with torch.no_grad(), pytest.raises(RuntimeError):  # as plain torch says it: two dtypes, two widths
        made(z.to(BF16))
    with torch.no_grad(), autocast(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        made(torch.randn(8, 5, 32))
    plain(made, z)
    assert there == [(2, 5, 64)]


def test_tokens_in_any_order_and_no_bias(there: list) -> None:
    """What the copy engine reads is contiguous; an MLP without a bias has none."""
    made, z = mlp(), torch.randn(5, 2, 64)
    made.fc1.bias = None
    with torch.no_grad(), autocast():
        assert torch.equal(made(z.transpose(0, 1)), made(z.transpose(0, 1).contiguous()))
    assert there == [(2, 5, 64)] * 2


def test_a_traced_graph_has_it_as_one_node(there: list) -> None:
    made, z, names = mlp(), torch.randn(2, 5, 64), []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad(), autocast():
        right = made(z)
        compiled = torch.compile(made, backend=backend, fullgraph=True, dynamic=False)
        assert torch.equal(compiled(z), right)
        assert torch.equal(torch.compile(made, backend="aot_eager", fullgraph=True)(z), right)
    assert sum("linear_gelu" in name for name in names) == 1
    names.clear()
    with autocast():
        torch.compile(made, backend=backend, fullgraph=True, dynamic=False)(z)  # another graph, with gradients
    assert names and not any("linear_gelu" in name for name in names)
    with torch.no_grad():
        exported = [torch.export.export(made.to(BF16), (z.to(BF16),), strict=strict) for strict in (False, True)]
    for text in map(str, exported):  # with what is inside of its graphs
        assert "linear" in text and "linear_gelu" not in text


def test_a_graph_for_every_length_stays_one(there: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """No guard on a size: of tokens that may be too few, plain torch."""
    monkeypatch.setattr(plan, "BY_HAND", 64)
    made, seen = mlp(), []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        seen.append([str(node.target) for node in graph.graph.nodes])
        return graph

    compiled = torch.compile(made, backend=backend, fullgraph=True)
    with torch.no_grad(), autocast():
        for b in (2, 1, 30):
            z = torch.randn(b + 1, 5, 64)
            torch._dynamo.mark_dynamic(z, 0, min=2, max=1024)
            assert relative(compiled(z), made(z)) < 1e-2
        some = torch.compile(lambda z, mask: made(z[mask]), backend=backend, fullgraph=True)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            z = torch.randn(40, 64)
            assert relative(some(z, z[:, 0] > 0), made(z[z[:, 0] > 0])) < 1e-2
    assert len(seen) == 2 and not any("linear_gelu" in name for names in seen for name in names)


def test_the_operator_keeps_its_promises(there: list) -> None:
    z, weight, bias = torch.randn(2, 5, 64, dtype=BF16), torch.randn(128, 64, dtype=BF16), torch.randn(128, dtype=BF16)
    for given in ((z, weight, bias), (z, weight, None)):
        torch.library.opcheck(torch.ops.dmst.linear_gelu.default, given)


def test_a_kernel_that_fails_is_told_once(there: list, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Tensor:
        raise ValueError("no such layout")

    made, z = mlp(), torch.randn(2, 5, 64)
    monkeypatch.setattr(hopper, "hidden", fails)
    with torch.no_grad(), autocast():
        with pytest.warns(RuntimeWarning, match=r"does not work here for the hidden channels of MLPs .*no such layout"):
            found = made(z)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(made(z), found)
        with dmst.use_kernels("reference"):
            assert torch.equal(made(z), found)


def test_out_of_memory_is_raised(there: list, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(hopper, "hidden", fails)
    with torch.no_grad(), autocast(), pytest.raises(torch.cuda.OutOfMemoryError):
        mlp()(torch.randn(2, 5, 64))
    assert not hidden._broken


def test_this_machine_is_asked() -> None:
    """Without stand-ins: no CUDA device, or one that is asked what it is."""
    assert not hidden.serves(torch.randn(20_000, 64), torch.randn(256, 64))
    if choice.machine_problem("cuda", 0, False):
        assert not hidden._fits(0, BF16, 256, 64)
    else:
        assert hidden._fits(0, BF16, 256, 64) == hopper.serves(torch.device("cuda", 0), BF16, 64, 16)
        assert not hidden._fits(0, BF16, 250, 64) and not hidden._fits(0, torch.float32, 256, 64)
