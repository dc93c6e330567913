"""The contract: every entry of OPERATORS, with every kind of option, keeps the same promises."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dmst.errors import ShapeError
from dmst.kernels import reference
from dmst.operators import GMSA, OPERATORS, Parts, Spatial, create
from dmst.operators.family import TokenStatistics
from dmst.testing import check_operator
from tests.cases import FAMILY, VARIANTS, build, gradients, label, relative, tokens

F64 = torch.float64
variants = pytest.mark.parametrize("case", VARIANTS, ids=label)
every = pytest.mark.parametrize("name", OPERATORS)


@variants
def test_the_contract(case: tuple) -> None:
    """What every operator promises, also one from outside the package; and its biases start at 0."""
    name, options = case
    check_operator(OPERATORS[name], options=options)
    fresh = create(name, 24, 3, **options).state_dict()
    assert not any(value.any() for key, value in fresh.items() if key.endswith("bias"))
    assert {name for name, _ in VARIANTS} == set(OPERATORS)


@pytest.mark.parametrize("case", [case for case in FAMILY if build(*case).form.gate == "sparsemax"], ids=label)
def test_silent_heads_get_zeros_not_none(case: tuple) -> None:
    """Even with a closed gate every parameter has a gradient: an optimizer must not skip it."""
    operator = build(case[0], {**case[1], "membership_bias": True})
    with torch.no_grad():
        operator.assign.bias.copy_(torch.tensor([9.0, -9.0, -9.0]))
    gate = operator.decompose(tokens(), grid=(1, 7)).gate
    assert (gate[:, 1:] == 0).all()
    found = gradients(operator, tokens(), torch.randn(2, 7, 24, dtype=F64), grid=(1, 7))
    assert all(gradient is not None for gradient in found.values())
    if operator.form.mode != "proximal":  # there an orthonormal matrix ties all rows together
        assert torch.equal(found["subspace.weight"][8:], torch.zeros(16, 24, dtype=F64))


@variants
def test_the_output_is_the_callers_to_change(case: tuple) -> None:
    """A residual added in place, an in-place activation: ordinary code, so it must work and give the right gradient."""
    operator = build(*case)
    z = tokens(n=12).requires_grad_()
    expected = torch.autograd.grad((operator(z, grid=(3, 4)) + z).relu().sum(), (z, *operator.parameters()))
    out = operator(z, grid=(3, 4))
    out += z
    found = torch.autograd.grad(out.relu_().sum(), (z, *operator.parameters()))
    assert all(relative(a, b) < 1e-13 for a, b in zip(found, expected, strict=True))


@variants
@pytest.mark.parametrize("value", [0.0, -1e4, 1e-8])
def test_finite_at_extremes(case: tuple, value: float) -> None:
    operator = build(*case, dtype=torch.float32)
    for z in (torch.full((2, 7, 24), value), value * tokens(dtype=torch.float32)):
        found = gradients(operator, z, torch.randn(2, 7, 24), grid=(1, 7))
        assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("name", ["tssa", "dmsa", "gmsa", "tpusa", "tpsusa", "gated_channel", "xca"])
def test_long_sequences(name: str) -> None:
    """What the listing cannot do: past 4096 tokens, forward and backward."""
    operator = build(name, {}, dtype=torch.float32)
    z = tokens(b=1, n=10_000, dtype=torch.float32)
    found = gradients(operator, z, torch.randn_like(z))
    assert found["z"].isfinite().all()
    assert relative(found["out"], copy.deepcopy(operator).double()(z.double())) < 1e-5


@every
def test_cost_in_tokens(name: str) -> None:
    """Multiply-adds at n and 2n tokens, by PyTorch's own counter: double, or more for the two quadratic ones."""
    operator, counts = build(name, {}, dtype=torch.float32), []
    for n in (64, 128):
        plain = sdpa_kernel(SDPBackend.MATH)  # the fused kernel hides its products from the counter
        with torch.no_grad(), plain, FlopCounterMode(display=False) as counter:
            operator(tokens(n=n, dtype=torch.float32))
        counts.append(counter.get_total_flops())
    assert counts[0] > 0
    once = 2 * 2 * 24 * 3 if name == "gmsa" else 0  # its gate reads one vector an image, whatever its tokens
    assert (counts[1] > 2.2 * counts[0]) if name in ("mhsa", "mssa") else (counts[1] == 2 * counts[0] - once)


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        (("dmsa", {}), "subspace.weight subspace.bias assign.weight out.weight out.bias"),
        (("dmsa", {"bias": False, "membership_bias": True}), "subspace.weight assign.weight assign.bias out.weight out.bias"),
        (("dmsa", {"mode": "equation"}), "subspace.weight subspace.bias assign.weight"),
        (("dmsa", {"mode": "proximal"}), "subspace.weight subspace.bias assign.weight theta"),
        (("gmsa", {}), "subspace.weight key.weight key.bias gate.weight out.weight out.bias"),
        (("gmsa", {"mode": "equation", "bias": False}), "subspace.weight key.weight gate.weight"),
        (("gmsa", {"mode": "proximal", "gate_activation": "none"}), "subspace.weight key.weight key.bias theta"),
        (("tpusa", {}), "subspace.weight subspace.bias assign.weight out.weight out.bias"),
        (("tpsusa", {}), "subspace.weight subspace.bias assign.weight out.weight out.bias"),
        (("gated_channel", {}), "subspace.weight subspace.bias assign.weight out.weight out.bias"),
        (("tssa", {}), "subspace.weight subspace.bias temperature out.weight out.bias"),
        (("tssa", {"position_scores": "1d"}), "subspace.weight subspace.bias temperature assign.weight out.weight out.bias"),
        (("mssa", {}), "subspace.weight subspace.bias out.weight out.bias"),
        (("mssa", {"relaxed": 0.5}), "subspace.weight subspace.bias"),
        (("mhsa", {}), "qkv.weight qkv.bias out.weight out.bias"),
        (("xca", {}), "qkv.weight qkv.bias temperature out.weight out.bias"),
    ],
    ids=lambda x: label(x) if isinstance(x, tuple) else None,
)
def test_checkpoint_keys(case: tuple, keys: str) -> None:
    operator = create(case[0], 24, 3, **case[1])
    assert set(operator.state_dict()) == set(keys.split())
    assert not list(operator.buffers())  # the rotary table is never saved


@variants
def test_decompose_shows_what_forward_computed(case: tuple) -> None:
    """`forward` is the core applied to the parts; for the others, the mix of the parts. Every head, also the silent ones."""
    operator = build(*case)
    z = tokens(n=12)
    parts = operator.decompose(z, grid=(3, 4))
    assert parts.projected.shape == (2, 3, 12, 8)
    if isinstance(operator, TokenStatistics):
        assert parts.membership.shape == (2, 3, 12)
        assert (parts.membership >= 0).all()
        assert parts.attention is None
        weights = operator.weights()
        update = reference.token_statistics(parts.projected, parts.membership, parts.gate, weights.theta, form=operator.form)
        expected = reference.project_out(update, weights, F64)
        if operator.form.gate is None:
            assert parts.gate is None
        else:
            assert parts.gate.shape == (2, 3)
    elif isinstance(operator, GMSA):
        assert parts.membership.shape == (2, 3, operator.form.groups, 12)
        torch.testing.assert_close(parts.membership.sum(2), torch.ones(2, 3, 12, dtype=F64))
        assert parts.means.shape == parts.spreads.shape == (2, 3, operator.form.groups, 8)
        expected = by_hand(operator, parts)
    else:
        name = type(operator).__name__
        mixed = parts.projected @ parts.attention.mT if name == "XCA" else parts.attention @ parts.projected
        assert parts.attention.shape == ((2, 3, 8, 8) if name == "XCA" else (2, 3, 12, 12))
        torch.testing.assert_close(parts.attention.sum(-1), torch.ones_like(parts.attention[..., 0]))
        mixed = mixed.transpose(1, 2).flatten(2)
        expected = operator.relaxed * (mixed @ operator.subspace.weight - z) if operator.out is None else operator.out(mixed)
    assert relative(operator(z, grid=(3, 4)), expected) < 1e-12
    with torch.no_grad():
        assert relative(operator(z, grid=(3, 4)), expected) < 1e-12


def by_hand(operator: GMSA, parts: Parts) -> torch.Tensor:
    """The update of GMSA token by token and group by group, from its parts."""
    gate = torch.ones(2, 3, dtype=F64) if parts.gate is None else parts.gate
    gate, s = gate[..., None, None], parts.projected
    attenuation = 1 / (1 + gate**2 * parts.spreads)
    pull = torch.zeros_like(s), torch.zeros_like(s)
    for g in range(operator.form.groups):
        weight = parts.membership[:, :, g, :, None] * attenuation[:, :, g, None]
        away = parts.means[:, :, g, None] - (s if operator.form.own else 0)
        pull = pull[0] + weight * away, pull[1] + weight
    if operator.form.mode == "proximal":
        strength = operator.step_size().reshape(-1, 1, 1) * gate**2
        update = strength * pull[0] / (1 + strength * pull[1])
    else:
        update = gate**operator.form.power * pull[0]
    flat = update.transpose(1, 2).flatten(2)
    return flat @ operator.weights().subspace if operator.out is None else operator.out(flat)


@variants
def test_gradcheck(case: tuple) -> None:
    dim = 12 if "2d" in case[1].values() else 6  # two axes turn pairs of pairs
    operator = build(*case, dim=dim)
    z = tokens(b=2, n=4, d=dim).requires_grad_()
    names = [name for name, _ in operator.named_parameters()]
    parameters = [parameter.detach().clone().requires_grad_() for parameter in operator.parameters()]

    def call(z: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(operator, dict(zip(names, values, strict=True)), (z,), {"grid": (2, 2)})

    assert torch.autograd.gradcheck(call, (z, *parameters), eps=1e-6, atol=1e-5, rtol=1e-3, nondet_tol=0.0)


@every
def test_non_contiguous_input(name: str) -> None:
    operator = build(name, {})
    plain = tokens(b=3, n=8)
    layouts = {
        "transposed": plain.transpose(0, 1).contiguous().transpose(0, 1),
        "channels first": plain.mT.contiguous().mT,
        "slice": torch.randn(3, 9, 30, dtype=F64),
        "stride 0": plain[:1].expand(3, 8, 24),
    }
    layouts["slice"][:, 1:, 3:27] = plain
    layouts["slice"] = layouts["slice"][:, 1:, 3:27]
    for layout, z in layouts.items():
        grad = torch.randn_like(plain)
        for key, value in gradients(operator, z, grad).items():
            assert relative(value, gradients(operator, z.contiguous(), grad)[key]) < 1e-13, (layout, key)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch has no batching rule for its own softmax attention
@every
def test_mapped_over_models_and_samples(name: str) -> None:
    """Stacked seeds (vmap over parameters) and per-sample gradients work: no operator hides a host read."""
    z, models = tokens(), [build(name, {}) for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(models)
    skeleton = copy.deepcopy(models[0]).to("meta")
    stacked = torch.func.vmap(lambda p: torch.func.functional_call(skeleton, p, (z,)))(parameters)
    outside = torch.autograd.grad(stacked.square().sum(), list(parameters.values()))
    for i, model in enumerate(models):
        assert relative(stacked[i], model(z)) < 1e-12
        for a, b in zip(outside, torch.autograd.grad(model(z).square().sum(), list(model.parameters())), strict=True):
            assert relative(a[i], b) < 1e-12

    model = models[0]
    weights = dict(model.named_parameters())

    def loss(p: dict, one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, p, (one.unsqueeze(0),)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, z)
    for sample in range(2):
        expected = torch.autograd.grad(model(z[sample : sample + 1]).square().sum(), list(weights.values()))
        for key, gradient in zip(weights, expected, strict=True):
            assert relative(per_sample[key][sample], gradient) < 1e-12, key


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # inside PyTorch's own forward mode
@pytest.mark.parametrize("case", FAMILY, ids=label)
def test_forward_mode_derivatives(case: tuple) -> None:
    operator = build(*case).eval()
    z, v = tokens(n=6), tokens(n=6)
    tangent = torch.func.jvp(lambda x: operator(x, grid=(2, 3)), (z,), (v,))[1]
    with torch.no_grad():
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(operator(forward_ad.make_dual(z, v), grid=(2, 3))).tangent
        assert relative(dual, tangent) < 1e-12
        near = [operator(z + h * v, grid=(2, 3)) for h in (1e-6, -1e-6)]
    assert relative(tangent, (near[0] - near[1]) / 2e-6) < 1e-6


def test_spatial_takes_any_operator_to_maps() -> None:
    x = torch.randn(2, 24, 3, 4, dtype=F64)
    for name, options in (("dmsa", {"rotary": "2d"}), ("tssa", {}), ("mhsa", {})):
        operator = build(name, options)
        expected = operator(x.flatten(2).mT, grid=(3, 4)).mT.reshape(x.shape)
        assert torch.equal(Spatial(operator)(x), expected)
    with pytest.raises(ShapeError, match="channels, height, width"):
        Spatial(operator)(x[0])
