"""Theorem 1 asked of layers: the counter-example, the split, the identities, and what a person is told."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from torch import Tensor

from dmst import objective
from dmst.analysis.theorem import split_of, theorem
from dmst.errors import OptionError, UnknownNameError
from dmst.models.block import LayerTrace
from dmst.operators import DMSA
from tests.analysed import IMAGES, analyze, network

F64 = torch.float64


def read_by(operator: DMSA, tokens: Tensor) -> LayerTrace:
    return LayerTrace(tokens, tokens, operator.decompose(tokens), tokens, tokens)


@torch.no_grad()
def test_the_counter_example() -> None:
    """A real DMSA layer on tokens 3 u_1: scores (2, 0), gate (1, 0), coupled weight .501. The claimed gain is -0.437 nats."""
    operator = DMSA(2, 2, bias=False, rotary="none", dtype=F64).eval()
    operator.subspace.weight.copy_(torch.eye(2))
    operator.assign.weight.copy_(torch.tensor([[2 / 3, 0.0], [0.0, 0.0]]))
    layer = read_by(operator, torch.tensor([3.0, 0.0], dtype=F64).expand(1, 6, 2))
    assert layer.parts.gate.tolist() == [[1.0, 0.0]]
    found = split_of(layer, operator, c=1.0, basis="raw", temperature=1 / 2000, energy="formula")
    coupled = 1 / (1 + math.exp(-9 / 2000))
    assert found["coupled"].item() == pytest.approx(coupled / 2 * math.log(10), rel=1e-9)
    assert found["gain"].item() == pytest.approx(-0.437, abs=1e-3) and found["premise"].item() == 0
    assert found["gate"].item() == 0  # the head that is off carries nothing, so all of it is mass and membership


@torch.no_grad()
def test_the_premise_of_the_true_theorem() -> None:
    """Memberships below the coupled ones, entry by entry, and a gate of at most 1: the claim holds."""
    operator = DMSA(4, 2, bias=False, rotary="none", membership_bias=True, dtype=F64).eval()
    layer = read_by(operator, torch.randn(3, 5, 4, dtype=F64))
    operator.assign.bias.fill_(-5.0)  # sigmoids near 0, softmaxes near 1/2
    layer = read_by(operator, layer.z)
    found = split_of(layer, operator, c=1.0, basis="raw", temperature=1.0, energy="formula")
    assert found["premise"].tolist() == [1.0] * 3 and (found["gain"] > 0).all() and (found["mass"] > 0).all()


@pytest.mark.parametrize("eps", [None, 0.3])
@pytest.mark.parametrize("energy", ["formula", "code"])
def test_every_number_is_that_of_the_trace(eps: float | None, energy: str) -> None:
    model = network()
    found = theorem(model, IMAGES, eps=eps, temperature=0.7, energy=energy)
    with torch.no_grad():
        layers = model.trace(IMAGES).layers
    for told, layer in zip(found.layers, layers, strict=True):
        s, pi, g = (x.double() for x in layer.parts[:3])
        square = s**2 / (s**2).sum(2, keepdim=True) if energy == "code" else s**2
        coupled = (0.7 * square.sum(-1)).softmax(1)
        share = pi / pi.sum(1, keepdim=True)
        at = {"eps": math.sqrt(24) if eps is None else eps}
        chain = [objective.variational_rate(s, x, **at) for x in (coupled, share, pi)]
        chain.append(objective.variational_rate(s, pi, g, **at))
        steps = {name: chain[i] - chain[i + 1] for i, name in enumerate(("membership", "mass", "gate"))}
        expected = {"coupled": chain[0], "decoupled": chain[3], "gain": chain[0] - chain[3], **steps}
        for name, values in expected.items():
            numbers = told.quantities[name]
            assert numbers.mean == pytest.approx(values.mean().item(), rel=1e-6, abs=1e-9), name
            assert numbers.std == pytest.approx(values.std().item(), rel=1e-5, abs=1e-9), name
            assert numbers.above == pytest.approx((values > 0).double().mean().item()), name
        means = {name: numbers.mean for name, numbers in told.quantities.items()}
        assert means["gain"] == pytest.approx(means["membership"] + means["mass"] + means["gate"], abs=1e-9)
        assert told.quantities["gate"].above == 1 and means["gate"] > 0  # a simplex gate only shrinks


def test_other_operators() -> None:
    tost = theorem(network("tost_digits"), IMAGES)
    assert all(layer.quantities["gate"].mean == layer.quantities["gate"].above == 0 for layer in tost.layers)
    assert all(abs(layer.quantities["mass"].mean) < 1e-6 for layer in tost.layers)  # its memberships sum to 1
    vit = theorem(network("vit_digits"), IMAGES)
    assert vit.layers == [None] * 3
    assert theorem(network("gmst_digits", groups=4), IMAGES).layers == [None] * 3  # groups are no memberships in heads
    orthonormal = theorem(network(), IMAGES, basis="orthonormal")
    assert orthonormal.layers[0].quantities["coupled"].mean != tost.layers[0].quantities["coupled"].mean
    assert "U orthonormal by QR" in orthonormal.convention


def test_bad_input() -> None:
    for options in ({"eps": 0.0}, {"temperature": -1.0}):
        with pytest.raises(OptionError, match=next(iter(options))):
            theorem(network(), IMAGES, **options)
    for options in ({"energy": "text"}, {"basis": "qr"}):
        with pytest.raises(UnknownNameError):
            theorem(network(), IMAGES, **options)


def test_the_command() -> None:
    text = analyze("theorem", "dmst_digits", "--limit", "20")
    assert "dmst_digits on digits test: 20 of 359 images by hash" in text and "by the formula, temperature 1; 20 images" in text
    told = json.loads(analyze("theorem", "dmst_digits", "--limit", "20", "--json"))
    table = [line.split() for line in text.splitlines() if re.match(r"\s+\d ", line)]
    assert len(table) == 4
    for row, layer in zip(table, told["layers"], strict=True):
        mean = {name: numbers["mean"] for name, numbers in layer["quantities"].items()}
        assert row[1:4] == [f"{mean['coupled']:.2f}", f"{mean['decoupled']:.2f}", f"{mean['gain']:+.2f}"]
        holds = f"{layer['quantities']['gain']['above']:.0%}"
        assert row[4:8] == [holds, *(f"{mean[name]:+.2f}" for name in ("membership", "mass", "gate"))]
    other = analyze("theorem", "dmst_digits", "--limit", "5", "--energy", "code", "--temperature", "0.5")
    assert "by the code, temperature 0.5" in other
