"""Ours against the published operators, retyped independently in benchmarks/published.py: equal to 1e-12, with gradients.

CRATE's whole network is retyped here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.published import (
    AttentionDMSA,
    AttentionMHSA,
    AttentionTSSA,
    apply_rotary,
    rotary_table,
    soft_threshold,
    soft_threshold_topk,
)
from dmst.models import VisionModel, create_model
from dmst.operators import DMSA, MHSA, TSSA
from dmst.rotary import rotate, table
from dmst.sparsemax import sparsemax
from tests.cases import excite, gradients, relative, tokens

F64 = torch.float64
EXACT = torch.complex128
KEYS = {"qkv": "subspace", "PI_linear": "assign", "to_out.0": "out", "temp": "temperature", "proj": "out"}


def copy_into(published: nn.Module, ours: nn.Module, keys: dict[str, str] = KEYS) -> dict[str, str]:
    """Load ours into the published module; returns our name for each of its parameters."""
    names = {}
    for theirs, _ in published.named_parameters():
        stem = next(key for key in keys if theirs == key or theirs.startswith(key + "."))
        names[theirs] = keys[stem] + theirs[len(stem) :]
    mine = ours.state_dict()
    published.double()
    with torch.no_grad():
        for theirs, parameter in published.named_parameters():
            parameter.copy_(mine[names[theirs]])
    return names


def assert_same(ours: nn.Module, published: nn.Module, z: Tensor, keys: dict[str, str] = KEYS) -> None:
    names = copy_into(published, ours, keys)
    grad = torch.randn_like(z)
    mine, theirs = gradients(ours, z, grad), gradients(published, z, grad)
    assert relative(mine["out"], theirs["out"]) < 1e-12
    assert relative(mine["z"], theirs["z"]) < 1e-12
    for name, our_name in names.items():
        assert relative(mine[our_name], theirs[name]) < 1e-12, name
    with torch.no_grad():  # the path without gradients is another file
        assert relative(ours(z), published(z)) < 1e-12


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("n", "heads"), [(1, 3), (63, 1), (197, 8)])
def test_dmsa_is_the_printed_listing(n: int, heads: int, bias: bool) -> None:
    assert_same(
        excite(DMSA(24, heads, bias=bias, dtype=F64)), AttentionDMSA(24, heads, qkv_bias=bias, table=EXACT), tokens(n=n)
    )


def test_at_5000_tokens_where_the_listing_needs_a_larger_table() -> None:
    ours = excite(DMSA(24, 3, dtype=F64))
    assert_same(ours, AttentionDMSA(24, 3, qkv_bias=True, tokens=5000, table=EXACT), tokens(b=1, n=5000))
    printed = AttentionDMSA(24, 3, qkv_bias=True).double()
    with pytest.raises(RuntimeError):  # as printed, 4096 is the end
        printed(tokens(b=1, n=4097))


class Listing(nn.Module):
    """The listing's arithmetic with each option in its place, written from the equations and nothing of ours."""

    def __init__(self, source: DMSA, options: dict[str, Any]) -> None:
        super().__init__()
        self.source, self.options = source, options

    def forward(self, z: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        source, options = self.source, self.options
        b, n, d = z.shape
        k = source.num_heads
        weight = source.subspace.weight
        if options.get("mode") == "proximal":  # the rows' Gram-Schmidt, which is what training optimises
            weight = gram_schmidt(weight)
        s = (z @ weight.T + (0 if source.subspace.bias is None else source.subspace.bias)).view(b, n, k, -1)
        rotary = options.get("rotary", "1d")
        if rotary == "1d":
            turned = apply_rotary(z, rotary_table(d, n))
        elif rotary == "2d":
            rows, columns = grid
            row, column = torch.arange(n) // columns, torch.arange(n) % columns
            half = rotary_table(d // 2, max(rows, columns))
            turned = torch.cat((apply_rotary(z[..., : d // 2], half[row]), apply_rotary(z[..., d // 2 :], half[column])), -1)
        else:
            turned = z
        scores = turned @ source.assign.weight.T
        if source.assign.bias is not None:
            scores = scores + source.assign.bias
        pooled = scores.mean(1)
        cap = options.get("max_active_heads")
        if cap is not None:
            pooled = pooled.masked_fill(pooled < pooled.sort(1, descending=True).values[:, cap - 1 : cap], -torch.inf)
        gate = {
            "sparsemax": soft_threshold,
            "sigmoid": torch.sigmoid,
            "relu": torch.relu,
            "gelu": lambda x: x * torch.special.ndtr(x),
            "uniform": lambda x: 0 * x + 1 / k,
        }[options.get("gate_activation", "sparsemax")](pooled) * options.get("gate_scale", 1.0)
        pi = scores.softmax(-1) if options.get("membership_activation") == "softmax" else torch.sigmoid(scores)
        w = s * gate[:, None, :, None]
        mode = options.get("mode", "listing")
        delta = 1e-8 if mode == "listing" else 0.0
        dots = (pi[..., None] * w**2).sum(1, keepdim=True) / (pi.sum(1, keepdim=True)[..., None] + delta)
        if mode == "listing":
            return source.out((-w * pi[..., None] / (1 + dots)).reshape(b, n, d))
        strength = gate[:, None, :, None] ** 2 * pi[..., None] / (1 + dots)
        if mode == "equation":
            return (-strength * s).reshape(b, n, d) @ weight
        step = torch.log1p(torch.exp(source.theta)) * strength
        return (-step / (1 + step) * s).reshape(b, n, d) @ weight


def gram_schmidt(weight: Tensor) -> Tensor:
    rows: list[Tensor] = []
    for row in weight:
        for done in rows:
            row = row - (row @ done) * done
        rows.append(row / row.norm())
    return torch.stack(rows)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"mode": "equation"},
    {"mode": "proximal"},
    *({"gate_activation": gate} for gate in ("sigmoid", "relu", "gelu", "uniform")),
    {"mode": "equation", "gate_activation": "gelu"},
    {"mode": "proximal", "gate_activation": "sigmoid"},
    {"gate_scale": 3.0},
    {"gate_scale": -0.5, "mode": "equation"},
    {"gate_scale": 0.0},
    {"max_active_heads": 1},
    {"max_active_heads": 2, "mode": "proximal"},
    {"membership_activation": "softmax"},
    {"membership_activation": "softmax", "mode": "equation"},
    {"membership_bias": True},
    {"rotary": "2d"},
    {"rotary": "none"},
    {"rotary": "none", "bias": False, "membership_bias": True, "mode": "proximal"},
    {"proj_drop": 0.0, "rotary": "2d", "mode": "proximal", "gate_scale": 2.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "default")
@pytest.mark.parametrize(("b", "n", "grid"), [(2, 35, (5, 7)), (1, 1, (1, 1))])
def test_every_option_is_the_listing_with_that_option(options: dict[str, Any], b: int, n: int, grid: tuple[int, int]) -> None:
    ours = excite(DMSA(24, 3, dtype=F64, **options))
    written = Listing(ours, options)
    z, grad = tokens(b=b, n=n), torch.randn(b, n, 24, dtype=F64)
    mine, theirs = gradients(ours, z, grad, grid=grid), gradients(written, z, grad, grid=grid)
    assert relative(mine["out"], theirs["out"]) < 1e-12 or theirs["out"].norm() == mine["out"].norm() == 0
    for name, gradient in mine.items():
        expected = theirs["z" if name == "z" else "out" if name == "out" else f"source.{name}"]
        close = relative(gradient, expected) < 1e-12 or (gradient - expected).norm() < 1e-12
        assert close, name
    with torch.no_grad():
        torch.testing.assert_close(ours(z, grid=grid), theirs["out"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [7, 197])
def test_tssa_is_the_published_code(n: int) -> None:
    assert_same(excite(TSSA(24, 3, dtype=F64)), AttentionTSSA(24, 3, qkv_bias=True), tokens(n=n))


@pytest.mark.parametrize("scale", [1e-8, 1e-5])
def test_tssa_normalises_small_tokens_too(scale: float) -> None:
    """Membership does not depend on the tokens' size, down to the floor that the published code has."""
    ours = excite(TSSA(24, 3, bias=False, dtype=F64))
    z = tokens(n=13)
    torch.testing.assert_close(ours.decompose(scale * z).membership, ours.decompose(z).membership, rtol=1e-10, atol=0)
    assert_same(ours, AttentionTSSA(24, 3), scale * z)


def test_mhsa_is_ordinary_attention() -> None:
    keys = {"qkv": "qkv", "proj": "out"}
    assert_same(excite(MHSA(24, 3, dtype=F64)), AttentionMHSA(24, 3, qkv_bias=True), tokens(n=13), keys)


@pytest.mark.parametrize("topk", [1, 2, 3, 4, 8])
def test_the_published_topk_is_a_hint_not_a_cap(topk: int) -> None:
    """The listing's `topk=4` changes no result: up to all 8 heads stay on, and every value is the exact sparsemax's."""
    s = torch.randn(500, 8, dtype=F64) * torch.tensor([0.05, 0.3, 1.0], dtype=F64).repeat(167)[:500, None]
    published = soft_threshold_topk(s, topk)
    torch.testing.assert_close(published, sparsemax(s), rtol=0, atol=1e-14)
    assert (published > 0).sum(1).max() == 8


def test_row_20_one_call_to_assign_is_the_printed_two() -> None:
    """The listing calls PI_linear twice on the same rotated tokens; ours keeps the scores of one call."""
    ours = excite(DMSA(24, 3, dtype=F64))
    z = tokens()
    positions = table("1d", 24, 7, None, device=z.device, dtype=z.dtype)
    scores = rotate(z, positions) @ ours.assign.weight.T
    parts = ours.decompose(z)
    torch.testing.assert_close(parts.membership, scores.sigmoid().mT, rtol=1e-12, atol=0)
    torch.testing.assert_close(parts.gate, soft_threshold(scores.mean(1)), rtol=0, atol=1e-12)


def crate(x: Tensor, w: dict[str, Tensor], depth: int, heads: int, patch: int) -> Tensor:
    """The published CRATE, of Ma-Lab-Berkeley: every norm is a plain LayerNorm, whose eps is torch's own, 1e-5."""

    def norm(z: Tensor, name: str) -> Tensor:
        return F.layer_norm(z, z.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    b, c, rows, columns = x.shape
    x = x.reshape(b, c, rows // patch, patch, columns // patch, patch).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    x = F.linear(norm(x, "stem.norm_in"), w["stem.projection.weight"], w["stem.projection.bias"])
    x = torch.cat((w["cls_token"].expand(b, -1, -1), norm(x, "stem.norm_out")), 1) + w["position.table"]
    for i in range(depth):
        at = f"blocks.{i}"
        s = F.linear(norm(x, f"{at}.norm"), w[f"{at}.operator.subspace.weight"]).unflatten(-1, (heads, -1)).transpose(1, 2)
        mixed = (s @ s.mT * s.shape[-1] ** -0.5).softmax(-1) @ s
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), w[f"{at}.operator.out.weight"], w[f"{at}.operator.out.bias"])
        z, dictionary = norm(x, f"{at}.feedforward.norm"), w[f"{at}.feedforward.dictionary"]
        descent = F.linear(z, dictionary.T) - F.linear(F.linear(z, dictionary), dictionary.T)
        x = torch.relu(z + 0.1 * descent - 0.1 * 0.1)
    return F.linear(norm(x[:, 0], "norm"), w["head.weight"], w["head.bias"])


def small_crate(**options: Any) -> VisionModel:
    torch.manual_seed(0)
    model = create_model("crate_tiny", dim=24, depth=2, num_heads=3, img_size=32, num_classes=5, dtype=F64, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def test_crate_is_the_published_network() -> None:
    model, x = small_crate(), torch.randn(2, 3, 32, 32, dtype=F64)
    wanted = crate(x, model.state_dict(keep_vars=True), 2, 3, 16)
    assert relative(model(x), wanted) < 1e-12
    grad = torch.randn_like(wanted)
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(out, parameters, grad) for out in (model(x), wanted))
    assert all(relative(a, b) < 1e-12 for a, b in zip(ours, theirs, strict=True))
    assert relative(small_crate(norm_eps=1e-6)(x), wanted) > 1e-9  # the test sees the eps of the norms
