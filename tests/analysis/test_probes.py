"""Numbers of layers over many images: streamed, the model left as it was; and what training asks of them."""

from __future__ import annotations

import json
import math

import pytest
import torch

from dmst.analysis.probes import AT_ONCE, layers
from dmst.analysis.rates import layer_rates
from dmst.analysis.running import measure
from dmst.errors import OptionError
from tests.analysed import network

IMAGES = torch.randn(AT_ONCE + 3, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def test_batches_of_any_size_give_the_same_numbers() -> None:
    """Mean, standard deviation and signs of the whole, with empty batches among them."""
    model = network()
    with torch.no_grad():
        whole = torch.stack([layer.normed.mean(1).T.double() for layer in model.trace(IMAGES).layers])  # (layers, d, b)
    batches = [(IMAGES[:3], "labels"), IMAGES[:0], IMAGES[3:4], IMAGES[4:]]
    seen: list[int] = []
    for images in (IMAGES, iter(batches)):
        count, found = measure(model, images, lambda block, layer, grid: layer.normed.mean(1).T, tick=seen.append)
        assert count == len(IMAGES)
        for running, values in zip(found, whole, strict=True):
            assert torch.allclose(running.mean, values.mean(-1), atol=1e-6)
            assert torch.allclose(running.std, values.std(-1), atol=1e-6)
            shares = running.numbers(5)
            assert shares.below == (values[5] < 0).double().mean().item() and shares.above + shares.below == 1
    assert seen == [len(IMAGES), 3, 1, len(IMAGES) - 4]
    for nothing in ([], [IMAGES[:0]]):
        with pytest.raises(OptionError, match="no images"):
            measure(model, nothing, lambda *_: None)


def test_they_are_the_rates_and_the_gates() -> None:
    """More images than at once; a head that an image of the second batch alone chooses counts as chosen."""
    model = network(num_heads=6)
    told = layers(model, IMAGES)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    rates = layer_rates(model, IMAGES, eps=told["eps"])
    assert told["coding"] == pytest.approx(rates.mean["coding"], rel=1e-6)
    assert told["variational"] == pytest.approx(rates.mean["variational"], rel=1e-6)
    assert told["active"] == pytest.approx(rates.mean["active"], rel=1e-6)
    with torch.no_grad():
        gates = [layer.parts.gate for layer in model.trace(IMAGES).layers]
    assert told["zero_gates"] == pytest.approx([(gate == 0).double().mean().item() for gate in gates])
    assert told["zero_memberships"] == told["idle_tokens"] == [0.0] * 3
    assert told["never"] == [[k for k in range(6) if not any(row[k] for row in gate.tolist())] for gate in gates]
    assert any(told["never"]) and told["images"] == len(IMAGES) and told["heads"] == [6, 6, 6]
    late = [(gate[:AT_ONCE] == 0).all(0) & (gate[AT_ONCE:] != 0).any(0) for gate in gates]
    assert any(x.any() for x in late)  # or the line above says nothing about the second batch


@pytest.mark.parametrize(
    ("name", "more"), [("tost_digits", {"variational", "zero_memberships", "idle_tokens"}), ("vit_digits", set())]
)
def test_operators_tell_what_they_have(name: str, more: set[str]) -> None:
    told = layers(network(name), IMAGES[:5])
    assert told.keys() == {"images", "eps", "heads", "coding"} | more
    assert all(len(told[key]) == 3 and all(math.isfinite(x) for x in told[key]) for key in {"coding"} | more)


def test_the_model_is_left_as_it_was() -> None:
    model = network(drop_rate=0.5, drop_path_rate=0.5).train()
    model.stem.eval()
    weight = next(model.parameters())
    weight.grad = torch.ones_like(weight)
    before, state = {name: x.clone() for name, x in model.state_dict().items()}, torch.get_rng_state()
    grads: list[bool] = []
    model.stem.register_forward_hook(lambda *_: grads.append(torch.is_grad_enabled()))
    first, again = layers(model, IMAGES), layers(model, IMAGES)
    assert first == again and torch.equal(torch.get_rng_state(), state)
    assert model.training and model.blocks[2].training and not model.stem.training
    assert torch.is_grad_enabled() and grads and not any(grads)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.requires_grad and (p.grad is not None) is (p is weight) for p in model.parameters())
    assert weight.grad.min() == weight.grad.max() == 1


def test_memberships_of_exactly_0() -> None:
    """Sparsemax memberships over heads: zeros, and no token without a head."""
    model = network("tost_digits", operator="tpusa")
    with torch.no_grad():
        members = [layer.parts.membership for layer in model.trace(IMAGES).layers]
    told = layers(model, IMAGES)
    assert told["zero_memberships"] == pytest.approx([(pi == 0).double().mean().item() for pi in members])
    assert told["idle_tokens"] == pytest.approx([(pi == 0).all(1).double().mean().item() for pi in members])
    assert max(told["zero_memberships"]) > 0


def test_groups() -> None:
    """GMSA: R_mix, and a token is idle where it belongs to no group of any head."""
    model = network("gmst_digits", groups=4, gate_activation="relu")
    told = layers(model, IMAGES)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["variational"] == pytest.approx(layer_rates(model, IMAGES, eps=told["eps"]).mean["variational"], rel=1e-6)
    with torch.no_grad():
        parts = [layer.parts for layer in model.trace(IMAGES).layers]
    assert told["zero_memberships"] == pytest.approx([(x.membership == 0).double().mean().item() for x in parts])
    assert told["zero_gates"] == pytest.approx([(x.gate == 0).double().mean().item() for x in parts])
    assert told["idle_tokens"] == [0.0] * 3 and max(told["zero_gates"]) > 0


def test_what_is_not_finite_is_none() -> None:
    model = network(depth=2)
    with torch.no_grad():
        model.blocks[1].norm.weight.fill_(math.nan)
    told = layers(model, IMAGES[:2])
    assert told["coding"][0] is not None and told["coding"][1] is None and told["variational"][1] is None
    json.dumps(told, allow_nan=False)
