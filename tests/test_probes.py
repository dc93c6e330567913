"""What the layers do, asked in training: the numbers of `layer_rates` and of the gates themselves; nothing is changed."""

from __future__ import annotations

import json
import math

import pytest
import torch

from dmst import create_model
from dmst.analysis.probes import AT_ONCE, layers
from dmst.analysis.rates import layer_rates
from dmst.errors import OptionError
from dmst.models import VisionModel

IMAGES = torch.randn(AT_ONCE + 3, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def model(name: str = "dmst_digits", **options: object) -> VisionModel:
    network = create_model(name, **{"dim": 24, "depth": 3, "num_heads": 6, **options})
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


def test_they_are_the_rates_and_the_gates() -> None:
    """More images than at once; a head that an image of the second batch alone chooses counts as chosen."""
    network = model().eval()
    told = layers(network, IMAGES)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    rates = layer_rates(network, IMAGES, eps=told["eps"])
    assert told["coding"] == pytest.approx(rates.mean["coding"], rel=1e-6)
    assert told["variational"] == pytest.approx(rates.mean["variational"], rel=1e-6)
    assert told["active"] == pytest.approx(rates.mean["active"], rel=1e-6)
    with torch.no_grad():
        gates = [layer.parts.gate for layer in network.trace(IMAGES).layers]
    assert told["never"] == [[k for k in range(6) if not any(row[k] for row in gate.tolist())] for gate in gates]
    assert any(told["never"]) and told["images"] == len(IMAGES) and told["heads"] == [6, 6, 6]
    late = [(gate[:AT_ONCE] == 0).all(0) & (gate[AT_ONCE:] != 0).any(0) for gate in gates]
    assert any(x.any() for x in late)  # or the line above says nothing about the second batch


@pytest.mark.parametrize(("name", "more"), [("tost_digits", {"variational"}), ("vit_digits", set()), ("crate_digits", set())])
def test_operators_tell_what_they_have(name: str, more: set[str]) -> None:
    told = layers(model(name), IMAGES[:5])
    assert told.keys() == {"images", "eps", "heads", "coding"} | more
    assert all(len(told[key]) == 3 and all(math.isfinite(x) for x in told[key]) for key in {"coding"} | more)


def test_the_model_is_left_as_it_was() -> None:
    network = model(drop_rate=0.5, drop_path_rate=0.5).train()
    network.stem.eval()
    weight = next(network.parameters())
    weight.grad = torch.ones_like(weight)
    before, state = {name: x.clone() for name, x in network.state_dict().items()}, torch.get_rng_state()
    grads: list[bool] = []
    network.stem.register_forward_hook(lambda *_: grads.append(torch.is_grad_enabled()))
    first, again = layers(network, IMAGES), layers(network, IMAGES)
    assert first == again and torch.equal(torch.get_rng_state(), state)
    assert network.training and network.blocks[2].training and not network.stem.training
    assert torch.is_grad_enabled() and grads and not any(grads)
    assert all(torch.equal(x, before[name]) for name, x in network.state_dict().items())
    assert all(p.requires_grad and (p.grad is not None) is (p is weight) for p in network.parameters())
    assert weight.grad.min() == weight.grad.max() == 1


def test_double_precision() -> None:
    network = model()
    single = layers(network, IMAGES)
    double = layers(network.double(), IMAGES.double())
    for name in ("coding", "variational"):
        assert double[name] == pytest.approx(single[name], rel=1e-4) and double[name] != single[name]


def test_what_is_not_finite_is_none() -> None:
    network = model(depth=2)
    with torch.no_grad():
        network.blocks[1].norm.weight.fill_(math.nan)
    told = layers(network, IMAGES[:2])
    assert told["coding"][0] is not None and told["coding"][1] is None and told["variational"][1] is None
    json.dumps(told, allow_nan=False)
    with pytest.raises(OptionError, match="no images"):
        layers(network, IMAGES[:0])
