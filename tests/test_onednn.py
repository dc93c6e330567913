"""Linear maps of oneDNN on a CPU: torch's own products, chosen where they pay, and never where somebody looks on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dmst
from dmst import onednn

# 197 x 101 x 103 multiply-adds are above SMALL, 17 x 101 x 103 below
LARGE, LITTLE, D, H = 197, 17, 101, 103


class Seen(TorchDispatchMode):
    """A mode of somebody else."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which activations oneDNN was asked for."""
    if not onednn._present():
        pytest.skip("torch has no linear map of oneDNN here")
    found: list[str] = []

    class Operators:
        @staticmethod
        def _linear_pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, name: str, *rest: Any) -> Tensor:
            found.append(name)
            return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, name, *rest)

    monkeypatch.setattr(onednn, "_operators", Operators)
    return found


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [LARGE, LITTLE])
def test_it_is_the_linear_map(tokens: int, bias: bool, activation: str, calls: list[str]) -> None:
    x, weight, b = torch.randn(3, tokens, D), torch.randn(D, H).T, torch.randn(H) if bias else None
    right = F.linear(x.double(), weight.double(), None if b is None else b.double())
    with torch.no_grad():
        found = onednn.linear(x, weight, b, activation)
    torch.testing.assert_close(found.double(), F.gelu(right) if activation == "gelu" else right, atol=1e-4, rtol=1e-5)
    assert calls == ([activation] if tokens == LARGE else [])


def test_memory_of_any_layout(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(H, D), torch.randn(H, 2 * D)[:, ::2], torch.randn(D, H).T
    biases = torch.randn(2 * H)[::2], torch.randn(1).expand(H), torch.randn(H)
    tokens = torch.randn(2, LARGE, D), torch.randn(2, D, LARGE).mT, torch.randn(2, LARGE, 2 * D)[..., 1::2]
    with torch.no_grad():
        for x in tokens:
            for weight in weights:
                for b in biases:
                    torch.testing.assert_close(onednn.linear(x, weight, b), F.linear(x, weight, b), atol=1e-4, rtol=1e-4)
        assert len(calls) == 27
        assert onednn.linear(torch.randn(D), weights[0]).shape == (H,)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            onednn.linear(tokens[0], torch.randn(4 * H, D + 1))
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
        onednn.linear(tokens[0], weights[0])
    assert len(calls) == 27


def test_asked_first_where_tensors_are_made_elsewhere() -> None:
    """On the device 'meta', or where new numbers are float64."""
    present = onednn._works()
    for where in (torch.device("meta"),):
        onednn._works.cache_clear()
        with where:
            assert onednn._works() == present
    onednn._works.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert onednn._works() == present
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_image_changes_another_one() -> None:
    x, weight = torch.randn(5, LARGE, D), torch.randn(H, D)
    with torch.no_grad():
        assert torch.equal(onednn.linear(x, weight)[1:2], onednn.linear(x[1:2], weight))


def test_who_wants_more_than_numbers_gets_torch_itself(calls: list[str]) -> None:
    x, weight = torch.randn(2, LARGE, D), torch.randn(H, D, requires_grad=True)
    onednn.linear(x, weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        onednn.linear(x.double(), weight.double())
        onednn.linear(x[:0], weight)
        with torch.autocast("cpu", torch.bfloat16):
            assert onednn.linear(x, weight).dtype == torch.bfloat16
        with Seen():
            onednn.linear(x, weight)
        torch.func.vmap(lambda one: onednn.linear(one, weight))(x)
    assert not calls


@pytest.mark.parametrize("name", ["dmst_tiny", "gmst_tiny", "tost_tiny", "vit_tiny"])
def test_networks_give_the_same_answers(name: str, calls: list[str]) -> None:
    """Inference, with batch norm folded and oneDNN, against what has a gradient: plain maps in the MLPs, plain batch norm."""
    model = dmst.create_model(name, depth=2, num_classes=7).eval()
    torch.nn.init.normal_(model.head.weight)
    for x in model.buffers():
        if x.is_floating_point():
            x.uniform_(0.5, 2)
    images = torch.randn(2, 3, 224, 224)
    right = model(images)
    assert "gelu" not in calls
    calls.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(images), right.detach(), atol=1e-4, rtol=1e-4)
    assert {"none", "gelu"} <= set(calls)
    model.train()
    with torch.no_grad():  # statistics of the batch: nothing to fold
        moved = [x.clone() for x in model.buffers()]
        model(images)
    assert not moved or any(not torch.equal(x, y) for x, y in zip(moved, model.buffers(), strict=True))


@pytest.mark.compile
def test_the_compiler_has_it_too(calls: list[str]) -> None:
    """In one graph; without one for a length that is not known."""
    model = dmst.create_model("dmst_tiny", depth=1).eval()
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(images)
        assert {"none", "gelu"} <= set(calls)
        torch.testing.assert_close(found, model(images), atol=1e-4, rtol=1e-4)
        calls.clear()
        open_ended = torch.compile(onednn.linear, fullgraph=True, backend="aot_eager", dynamic=True)
        x, weight = torch.randn(2, LARGE, D), torch.randn(H, D)
        torch.testing.assert_close(open_ended(x, weight), F.linear(x, weight), atol=1e-4, rtol=1e-4)
        assert not calls


def test_a_batch_norm_without_statistics() -> None:
    """As test-time adaptation makes it."""
    model = dmst.create_model("dmst_tiny", depth=1, img_size=32).eval()
    for layer in model.stem.layers[1::3]:
        layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    images = torch.randn(3, 3, 32, 32)
    right = model(images).detach()
    with torch.no_grad():
        torch.testing.assert_close(model(images), right)


def test_a_hook_on_a_layer_of_the_stem_is_heard() -> None:
    model, seen = dmst.create_model("dmst_tiny", depth=1, img_size=32).eval(), []
    model.stem.layers[1].register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert seen == [1]
