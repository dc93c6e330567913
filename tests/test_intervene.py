"""Interventions are exact: the network with a gate put in is what the closed form says, and afterwards nothing has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dmst.analysis.intervene import (
    check_layer,
    contributions,
    forced_gates,
    head_effects,
    logit_changes,
    operator_of,
    switched_off,
)
from dmst.errors import OptionError, ShapeError
from dmst.kernels import use_kernels
from dmst.models import VisionModel
from dmst.operators import OPERATORS
from tests import cases, networks
from tests.networks import build, images

GATED: networks.Case = ("dmst_tiny", {})
KINDS = [
    GATED,
    ("dmst_tiny", {"mode": "equation"}),
    ("dmst_tiny", {"mode": "proximal"}),
    ("crate_tiny", {"relaxed": 0.3}),
    *(("vit_tiny", {"operator": name}) for name in OPERATORS),
]
every = pytest.mark.parametrize("case", KINDS, ids=cases.label)


def clean(model: VisionModel) -> bool:
    modules = list(model.modules())
    return not any(
        "forward" in m.__dict__ or "decompose" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in modules
    )


@pytest.mark.parametrize("kernels", ["reference", "auto", "fused"])
def test_its_own_gate_changes_nothing(kernels: str) -> None:
    """Whatever kernel computes the other layers; the fused ones, in Triton's interpreter, take no float64."""
    if kernels == "fused":
        pytest.importorskip("triton")
    dtype, near = (torch.float32, 1e-4) if kernels == "fused" else (torch.float64, 1e-12)
    model, x = build(GATED, dtype).eval(), images(batch=2, dtype=dtype)
    with use_kernels(kernels), torch.no_grad():
        trace = model.trace(x)
        for layer, each in enumerate(trace.layers):
            gate = each.parts.gate
            assert gate is not None
            with forced_gates(model, {layer: {k: gate[:, k] for k in range(3)}}):
                apart = (model(x) - trace.logits).abs().max().item()
            with forced_gates(model, {layer: {k: 0.5 * gate[:, k] for k in range(3)}}):
                assert (model(x) - trace.logits).abs().max() > 1e-3  # a gate that is not its own does
            assert apart == 0 if kernels == "reference" else apart < near


@every
def test_a_head_that_is_off_takes_its_contribution_away(case: networks.Case) -> None:
    model, x = build(case).eval(), images()
    for layer in (0, -1):
        check = check_layer(model, x, layer)
        assert max(check.apart) < 1e-12
        assert max(check.change) > 1e-3  # something was taken away
        assert check.to_dict()["layer"] == layer % 2
    assert clean(model)


@every
def test_contributions_sum_to_the_output(case: networks.Case) -> None:
    model, x = build(case).eval(), images()
    with torch.no_grad():
        z, operator = model.trace(x).layers[0].normed, operator_of(model, 0)
        rest = operator(z, grid=(2, 3)) - contributions(operator, z, grid=(2, 3)).sum(1)
        out: Any = operator.out
        told = out.bias if out is not None else -0.3 * z if case[0] == "crate_tiny" else torch.zeros(())
    assert (rest - told).abs().max() < 1e-12


def test_a_gate_of_any_size_follows_the_closed_form() -> None:
    """Not only off: the output at gate h is the sum of contributions at h."""
    model, x = build(("dmst_tiny", {"mode": "equation"})).eval(), images()
    with torch.no_grad():
        layer, operator = model.trace(x).layers[1], operator_of(model, 1)
        assert layer.parts.gate is not None
        gate = layer.parts.gate.clone()
        gate[:, 1] = 0.37
        with forced_gates(model, {1: {1: 0.37}}):
            seen = operator(layer.normed, grid=(2, 3))
            shown = operator.decompose(layer.normed, grid=(2, 3)).gate
            traced = model.trace(x)
            assert torch.equal(traced.logits, model(x))
        assert shown is not None and torch.equal(shown, gate)
        assert traced.layers[1].parts.gate is not None and (traced.layers[1].parts.gate[:, 1] == 0.37).all()
        assert (seen - contributions(operator, layer.normed, grid=(2, 3), gate=gate).sum(1)).abs().max() < 1e-12
        assert (seen - operator(layer.normed, grid=(2, 3))).abs().max() > 1e-3


def test_everything_is_restored_also_after_an_error() -> None:
    one, two, x = build(GATED).eval(), build(("vit_tiny", {})).eval(), images()
    twin = copy.deepcopy(one)
    before = one(x), two(x)

    def fail() -> None:
        with switched_off(one, {0: [1], 1: [0, 2]}), switched_off(two, {-1: [2]}):
            assert torch.equal(twin(x), before[0])  # another model of the same class
            assert not torch.equal(one(x), before[0]) and not torch.equal(two(x), before[1])
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert clean(one) and clean(two)
    assert torch.equal(one(x), before[0]) and torch.equal(two(x), before[1])
    with pytest.raises(OptionError, match="head is 9"), switched_off(one, {0: [1], 1: [9]}):
        pass
    assert clean(one)  # also when the second layer was refused


def test_one_inside_another_both_hold() -> None:
    model, x = build(GATED).eval(), images()
    with torch.no_grad():
        with forced_gates(model, {0: {0: 0.2, 1: 0.9}}):
            outer = model(x)
            with forced_gates(model, {0: {1: 0.0, 2: 0.4}}):
                both = model(x)
            assert torch.equal(model(x), outer)
        with forced_gates(model, {0: {0: 0.2, 1: 0.0, 2: 0.4}}):
            assert torch.equal(model(x), both)
    assert clean(model)


def test_gradients_flow_through_a_forced_gate() -> None:
    model, x = build(GATED).eval(), images()
    value = torch.full((), 0.5, dtype=torch.float64, requires_grad=True)
    with forced_gates(model, {0: {1: value}}):
        model(x).square().sum().backward()
    assert value.grad is not None and value.grad.abs() > 0


def test_what_cannot_be_forced_is_refused() -> None:
    gated, softmax, plain = build(GATED), build(("vit_tiny", {})), build(("tost_tiny", {}))
    for model in (softmax, plain):
        with pytest.raises(OptionError, match="no gate"), forced_gates(model, {0: {0: 0.5}}):
            pass
    for wrong, word in (({7: {0: 0.0}}, "layer is 7"), ({0: {0: torch.nan}}, "gate"), ({0: {0: torch.ones(2, 2)}}, "shape")):
        with pytest.raises(OptionError, match=word), forced_gates(gated, wrong):
            pass
    with pytest.raises(ShapeError, match="3 images"), forced_gates(gated, {0: {0: torch.ones(3)}}):
        gated(images())
    assert clean(gated)


@pytest.mark.parametrize("case", [GATED, ("vit_tiny", {})], ids=cases.label)
def test_head_effects_are_what_the_whole_network_loses(case: networks.Case) -> None:
    model, x = build(case), images(batch=5)
    effects = head_effects(model, x, batch_size=2)
    assert model.training  # as it was
    model.eval()
    with torch.no_grad():
        logits = model(x)
        for layer, head, change in logit_changes(model, x):
            with switched_off(model, {layer: [head]}):
                whole = model(x) - logits
            assert (change - whole).abs().max() < 1e-12
            assert effects.size[layer][head] == pytest.approx(whole.norm(dim=-1).mean().item())
            other = (logits + whole).argmax(-1) != logits.argmax(-1)
            assert effects.flipped[layer][head] == pytest.approx(other.double().mean().item())
    assert (effects.gate is None) == (case != GATED)
    assert effects.images == 5 and "matters most" in effects.verdict and effects.to_dict()["model"] == model.config.name
    assert len({size for row in effects.size for size in row}) > 3  # heads differ
    with pytest.raises(OptionError, match="no images"):
        head_effects(model, [])
