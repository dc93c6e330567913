"""Interventions are exact: the network with a gate put in is what the closed form says, and afterwards nothing has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor

from dmst.analysis.intervene import forced_gates, groups_off, operator_of, switched_off
from dmst.errors import OptionError
from dmst.kernels import mixture, reference, use_kernels
from dmst.models import VisionModel
from dmst.operators import GMSA, MSSA, OPERATORS, XCA, Operator
from dmst.operators.family import TokenStatistics
from tests import cases, networks
from tests.networks import build, images

GATED: networks.Case = ("dmst_tiny", {})
GROUPED: list[networks.Case] = [
    ("gmst_tiny", {"groups": 3}),
    ("gmst_tiny", {"groups": 3, "mode": "equation", "rounds": 2}),
    ("gmst_tiny", {"groups": 3, "mode": "proximal", "gate_activation": "sigmoid"}),
    ("gmst_tiny", {"groups": 3, "own": False, "gate_activation": "none", "readout": "token"}),
]
KINDS = [
    GATED,
    *GROUPED,
    ("dmst_tiny", {"mode": "equation"}),
    ("dmst_tiny", {"mode": "proximal"}),
    ("crate_tiny", {"relaxed": 0.3}),
    *(("vit_tiny", {"operator": name} | cases.FEW.get(name, {})) for name in OPERATORS),
]
every = pytest.mark.parametrize("case", KINDS, ids=cases.label)


def clean(model: VisionModel) -> bool:
    modules = list(model.modules())
    return not any(
        "steps" in m.__dict__ or "is_plain" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in modules
    )


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@torch.no_grad()
def test_its_own_gate_changes_nothing(kernels: str) -> None:
    """Whatever kernel computes the other layers."""
    model, x = build(GATED).eval(), images(batch=1)
    with use_kernels(kernels):
        trace = model.trace(x)
        for layer, each in enumerate(trace.layers):
            gate = each.parts.gate
            assert gate is not None
            with forced_gates(model, {layer: {k: gate[0, k].item() for k in range(3)}}):
                assert (model(x) - trace.logits).abs().max() < 1e-12
            with forced_gates(model, {layer: {k: 0.5 * gate[0, k].item() for k in range(3)}}):
                assert (model(x) - trace.logits).abs().max() > 1e-3  # a gate that is not its own does


def contributions(operator: Operator, z: Tensor, gate: Tensor | None = None) -> Tensor:
    """(b, k, n, d): update_k W_out,k, what each head adds to the output for tokens z (b, n, d); with another `gate`, at that.
    Their sum is the output without its bias (and, of the relaxed MSSA, without -kappa z)."""
    projected, membership, found, attention, *_ = operator.decompose(z, grid=(2, 3))
    out: Any = getattr(operator, "out", None)
    weight = operator.subspaces().mT if out is None else rearrange(out.weight, "d (k p) -> k p d", k=operator.num_heads)
    if isinstance(operator, TokenStatistics):
        theta, gate = operator.weights().theta, found if gate is None else gate
        return reference.token_statistics(projected, membership, gate, theta, form=operator.form) @ weight
    if isinstance(operator, GMSA):
        return mixture.update_of(operator.steps(z, (2, 3)), operator.step_size(), operator.form) @ weight
    mixed = projected @ attention.mT if isinstance(operator, XCA) else attention @ projected
    return (mixed * (operator.relaxed or 1.0) if isinstance(operator, MSSA) else mixed) @ weight


@every
@torch.no_grad()
def test_a_head_that_is_off_takes_its_contribution_away(case: networks.Case) -> None:
    """And all contributions together are the output, but for what no head adds."""
    model, x = build(case).eval(), images()
    for layer, traced in enumerate(model.trace(x).layers):
        z, operator = traced.normed, operator_of(model, layer)
        output, told = operator(z, grid=(2, 3)), contributions(operator, z)
        for head in range(operator.num_heads):
            with switched_off(model, {layer: [head]}):
                lost = output - operator(z, grid=(2, 3))
            assert (lost - told[:, head]).abs().max() < 1e-12 * output.abs().max().clamp(min=1)
        assert told.abs().max() > 1e-3  # something was taken away
        out: Any = operator.out
        rest = out.bias if out is not None else -0.3 * z if case[0] == "crate_tiny" else torch.zeros(())
        assert (output - told.sum(1) - rest).abs().max() < 1e-12
    assert clean(model)


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
        assert (seen - contributions(operator, layer.normed, gate).sum(1)).abs().max() < 1e-12
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


def test_what_cannot_be_forced_is_refused() -> None:
    gated, softmax, plain = build(GATED), build(("vit_tiny", {})), build(("tost_tiny", {}))
    for model in (softmax, plain):
        with pytest.raises(OptionError, match="no gate"), forced_gates(model, {0: {0: 0.5}}):
            pass
    for wrong, word in (({7: {0: 0.0}}, "layer is 7"), ({0: {0: torch.nan}}, "gate")):
        with pytest.raises(OptionError, match=word), forced_gates(gated, wrong):
            pass
    assert clean(gated)


# --- groups --------------------------------------------------------------------------------------------------------------

grouped = pytest.mark.parametrize("case", GROUPED, ids=cases.label)


def by_hand(operator: GMSA, z: Tensor, off: dict[int, list[int]]) -> Tensor:
    """(b, k, n, p): the update as gmsa.py writes it, without the groups that are off."""
    s, membership, gate, _, means, spreads = operator.decompose(z, grid=(2, 3))
    gate = torch.ones(s.shape[:2], dtype=s.dtype) if gate is None else gate
    g = gate[..., None, None]
    attenuation = 1 / (1 + g.square() * spreads)
    for head, groups in off.items():
        attenuation[:, head, groups] = 0
    alpha = torch.einsum("bkgn,bkgp->bknp", membership, attenuation)
    beta = torch.einsum("bkgn,bkgp->bknp", membership, attenuation * means)
    if operator.form.mode == "proximal":
        theta = operator.step_size().reshape(-1, 1, 1) * g.square()
        return theta * (beta - alpha * s) / (1 + theta * alpha)
    return g**operator.form.power * (beta - alpha * s if operator.form.own else beta)


@grouped
@torch.no_grad()
def test_a_group_that_is_off_takes_its_own_term_away(case: networks.Case) -> None:
    """What the heads hand to the output is, head by head, what the equation gives without the group."""
    model, x = build(case).eval(), images()
    z, operator = model.trace(x).layers[1].normed, operator_of(model, 1)
    assert isinstance(operator, GMSA)
    with groups_off(model, {1: {2: [0, 2], 0: [1]}}):
        seen, steps = operator(z, grid=(2, 3)), operator.steps(z, (2, 3))
        shown, logits = operator.decompose(z, grid=(2, 3)), model(x)
        assert torch.equal(model.trace(x).logits, logits)
    update = mixture.update_of(steps, operator.step_size(), operator.form)
    wanted, whole = by_hand(operator, z, {2: [0, 2], 0: [1]}), by_hand(operator, z, {})
    assert (update - wanted).abs().max() < 1e-12
    assert (seen - operator.project_out(wanted, z)).abs().max() < 1e-12
    assert (wanted - whole)[:, 1].abs().max() < 1e-12  # the head without a group off
    assert (wanted - whole)[:, [0, 2]].flatten(2).abs().amax(-1).min() > 1e-6
    assert (logits - model(x)).abs().max() > 1e-6
    plain = operator.decompose(z, grid=(2, 3))
    assert all(a is b or (a - b).abs().max() < 1e-12 for a, b in zip(shown, plain, strict=True))  # memberships and means stay
    assert clean(model)


@grouped
@torch.no_grad()
def test_with_all_groups_off_the_head_is_off(case: networks.Case) -> None:
    model, x = build(case).eval(), images()
    for layer in range(2):
        with switched_off(model, {layer: [1]}):
            wanted = model(x)
        with groups_off(model, {layer: {1: range(3)}}):
            assert torch.equal(model(x), wanted)
        with groups_off(model, {layer: {1: [2]}}), switched_off(model, {layer: [0]}), groups_off(model, {layer: {1: [0, 1]}}):
            both = model(x)  # one inside another: all hold
        with switched_off(model, {layer: [0, 1]}):
            assert torch.equal(model(x), both) and not torch.equal(both, wanted)
    assert clean(model)


def test_groups_that_are_not_there_are_refused() -> None:
    grouped, other = build(GROUPED[0]), build(GATED)
    for wrong, word in (
        ({2: {0: [0]}}, "layer is 2: the model has layers 0 to 1"),
        ({0: {3: [0]}}, "head is 3: the layer has heads 0 to 2"),
        ({0: {0: [0, 3]}}, "group is 3: the heads have groups 0 to 2"),
        ({0: {0: [-1]}}, "group is -1"),
        ({0: {0: [True]}}, "group is True"),
        ({0: [1]}, r"groups of layer 0 are \[1\]: give"),
    ):
        with pytest.raises(OptionError, match=word), groups_off(grouped, wrong):
            pass
    with pytest.raises(OptionError, match="DMSA in layer 1 has no groups"), groups_off(other, {1: {0: [0]}}):
        pass
    with pytest.raises(OptionError, match="no gate"), forced_gates(build(GROUPED[-1]), {0: {0: 0.5}}):
        pass
    assert clean(grouped) and clean(other)
