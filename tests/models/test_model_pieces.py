"""The pieces of a network against their equations: positions, feed-forwards, class attention, stems, drop-path."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmst import tracing
from dmst.errors import OptionError
from dmst.models import ModelConfig
from dmst.models.block import Block
from dmst.models.class_attention import ClassAttentionBlock
from dmst.models.feedforward import Ista, LocalStep, MlpStep
from dmst.models.positions import FourierPosition, LearnedPosition
from dmst.models.residual import Residual
from dmst.models.stems import STEMS, ConvStem, Gelu, PaddedConv
from dmst.operators.base import scaled
from tests.cases import relative
from tests.networks import (
    F64,
    build,
    images,
)

# --- the pieces, against their equations -----------------------------------------------------------------------------


def config(**options: Any) -> ModelConfig:
    return ModelConfig(**{"dim": 24, "num_heads": 3, "img_size": (32, 48)} | options)


@pytest.mark.parametrize("grid", [(2, 3), (5, 1)], ids=str)
@pytest.mark.parametrize("prefix", [0, 1])
def test_fourier_positions(grid: tuple[int, int], prefix: int) -> None:
    """The formula, feature by feature, for any grid with the same weights; a class token in front gets nothing."""
    position = FourierPosition(config(), dtype=F64)
    rows, columns = grid
    z = torch.randn(2, prefix + rows * columns, 24, dtype=F64)
    added = position(z, grid) - z
    assert added[:, :prefix].abs().sum() == 0
    for r in range(rows):
        for c in range(columns):
            features = []
            for index, last in ((r + 1, rows), (c + 1, columns)):
                angle = index / (last + 1e-6) * 2 * math.pi
                for i in range(32):
                    turned = angle / 10000 ** (2 * math.floor(i / 2) / 32)
                    features.append(math.cos(turned) if i % 2 else math.sin(turned))
            weight, bias = position.projection.weight[:, :, 0, 0], position.projection.bias
            wanted = weight @ torch.tensor(features, dtype=F64) + bias
            torch.testing.assert_close(added[:, prefix + r * columns + c], wanted.expand(2, -1), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_positions_of_one_transform_do_not_reach_another() -> None:
    """The table of a grid is kept for the next call, but not what a transform computed: that ends with it."""
    position, z = FourierPosition(config(), dtype=F64), torch.randn(1, 14, 24, dtype=F64)

    def loss(bias: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(position, {"projection.bias": bias}, (z, (2, 7))).square().sum()

    bias = torch.randn(24, dtype=F64)
    second, first = torch.func.hessian(loss)(bias), torch.func.grad(loss)(bias)
    torch.testing.assert_close(second, 2 * 14 * torch.eye(24, dtype=F64))
    assert first.isfinite().all()


@pytest.mark.parametrize("readout", ["token", "class_attention"])
def test_learned_positions(readout: str) -> None:
    position = LearnedPosition(config(readout=readout), dtype=F64)
    prefix, table = int(readout == "token"), position.table
    assert table.shape == (prefix + 6, 24)
    z = torch.randn(2, prefix + 6, 24, dtype=F64)
    assert torch.equal(position(z, (2, 3)), z + table)
    for grid in ((3, 2), (4, 6), (1, 1), (5, 7)):
        n = grid[0] * grid[1]
        z = torch.zeros(2, prefix + n, 24, dtype=F64)
        found = position(z, grid)
        assert torch.equal(found[:, :prefix], table[:prefix].expand(2, -1, -1))  # the class token's own, to the bit
        places = table[prefix:].T.reshape(1, 24, 2, 3)
        wanted = F.interpolate(places, grid, mode="bicubic", antialias=True)
        assert relative(found[:, prefix:].mT.reshape(2, 24, *grid), wanted.expand(2, -1, -1, -1)) < 1e-14  # in float64 too
    with torch.no_grad():
        table.copy_(torch.arange(24.0).expand_as(table))  # the same everywhere stays the same
    torch.testing.assert_close(position(z, (5, 7)), torch.arange(24.0, dtype=F64).expand_as(z))


def test_learned_positions_of_bfloat16_are_resized_in_float32() -> None:
    position = LearnedPosition(config(readout="token"), dtype=torch.bfloat16)
    found = position(torch.zeros(1, 36, 24, dtype=torch.bfloat16), (5, 7))
    exact = copy.deepcopy(position).float()(torch.zeros(1, 36, 24), (5, 7))
    assert torch.equal(found, exact.bfloat16())


def test_ista() -> None:
    """relu(x + eta (D^T x - D^T D x) - eta lambda), x = norm z, eta = lambda = 0.1; token by token."""
    step = Ista(config(), dtype=F64)
    nn.init.normal_(step.norm.weight)
    z = torch.randn(2, 7, 24, dtype=F64)
    found, d = step(z), step.dictionary
    for b in range(2):
        for n in range(7):
            centred = z[b, n] - z[b, n].mean()
            x = centred / (centred.square().mean() + 1e-6).sqrt() * step.norm.weight + step.norm.bias
            wanted = x + 0.1 * (d.T @ x - d.T @ (d @ x)) - 0.1 * 0.1
            torch.testing.assert_close(found[b, n], wanted.clamp(min=0), rtol=1e-10, atol=1e-10)
    assert (found >= 0).all() and (found == 0).any() and (found > 0).any()


def test_the_step_of_crate_has_no_residual() -> None:
    """z -> w = z + MSSA(norm z) -> ISTA(norm w), which is not added to w."""
    model, x = build(("crate_tiny", {})).eval(), images()
    for block, layer in zip(model.blocks, model.trace(x).layers, strict=True):
        w = layer.z + block.operator(F.layer_norm(layer.z, (24,), block.norm.weight, block.norm.bias, 1e-5))
        assert relative(layer.after_operator, w) < 1e-14
        norm, d = block.feedforward.norm, block.feedforward.dictionary
        u = F.layer_norm(w, (24,), norm.weight, norm.bias, 1e-5)
        assert relative(layer.after_feedforward, F.relu(u + 0.1 * (u @ d - u @ d.T @ d) - 0.01)) < 1e-13
        assert (layer.after_feedforward >= 0).all() and block.residual.scale is None


@pytest.mark.parametrize("readout", ["mean", "token"])
def test_a_local_feedforward_sees_eight_neighbours(readout: str) -> None:
    rows, columns, told = 2, 3, config(feedforward="local", readout=readout)
    step, plain = LocalStep(told, dtype=F64), MlpStep(told, dtype=F64)
    assert plain.load_state_dict(step.state_dict(), strict=False).unexpected_keys == ["mlp.local.weight"]
    first = 1 if readout == "token" else 0
    z = torch.randn(2, first + rows * columns, 24, dtype=F64)
    assert torch.equal(step(z, (rows, columns)), plain(z))  # a fresh one
    nn.init.normal_(step.mlp.local.weight)
    found = step(z, (rows, columns))
    hidden, near = step.mlp.fc1(step.norm(z)), step.mlp.local.weight[:, 0]
    for row in range(rows):
        for column in range(columns):
            n = first + row * columns + column
            total = hidden[:, n].clone()
            for i in (-1, 0, 1):
                for j in (-1, 0, 1):
                    if 0 <= row + i < rows and 0 <= column + j < columns:
                        total += near[:, 1 + i, 1 + j] * hidden[:, first + (row + i) * columns + column + j]
            wanted = z[:, n] + step.residual.scale * step.mlp.fc2(F.gelu(total))
            torch.testing.assert_close(found[:, n], wanted, rtol=1e-10, atol=1e-10)
    assert torch.equal(found[:, :first], plain(z)[:, :first])
    with pytest.raises(OptionError, match="call the block with grid"):
        step(z)


@pytest.mark.parametrize("name", ["tost_tiny", "vit_tiny"])
def test_the_block_is_its_two_lines(name: str) -> None:
    """z += scale operator(norm z); z += scale W2 gelu(W1 norm z), with the gelu of the error function."""
    model, x = build((name, {})).eval(), images()
    for block, layer in zip(model.blocks, model.trace(x).layers, strict=True):
        scales = [r.scale if r.scale is not None else 1.0 for r in (block.residual, block.feedforward.residual)]
        u = F.layer_norm(layer.z, (24,), block.norm.weight, block.norm.bias, 1e-6)
        w = layer.z + scales[0] * block.operator(u)
        norm, mlp = block.feedforward.norm, block.feedforward.mlp
        assert mlp.fc1.weight.shape == (96, 24)
        hidden = F.layer_norm(w, (24,), norm.weight, norm.bias, 1e-6) @ mlp.fc1.weight.T + mlp.fc1.bias
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        assert relative(layer.after_operator, w) < 1e-13
        assert relative(layer.after_feedforward, w + scales[1] * (hidden @ mlp.fc2.weight.T + mlp.fc2.bias)) < 1e-13


@pytest.mark.parametrize("operator", ["dmsa", "gmsa"])
def test_a_compiled_scale_goes_into_the_last_map(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, unless somebody listens. Output and gradients are those of the scaled update."""
    block = Block(config(operator=operator, layer_scale=0.3, dim=48, img_size=96), dtype=torch.bfloat16)
    exact, z = copy.deepcopy(block).double(), torch.randn(2, 36, 48, dtype=torch.bfloat16)

    def differentiate(block: Block) -> dict[str, Tensor]:
        given = z.to(block.norm.weight.dtype).requires_grad_()
        block.zero_grad()
        out = block(given, (6, 6))
        out.square().sum().backward()
        return {"out": out.detach(), "z": given.grad, **{name: p.grad for name, p in block.named_parameters()}}

    wanted, usual = differentiate(exact), differentiate(block)
    monkeypatch.setattr(tracing, "compiled", lambda: True)
    found = differentiate(block)
    assert not torch.equal(found["out"], usual["out"])
    for name, right in wanted.items():
        assert relative(found[name], right) < max(2e-2, 2 * relative(usual[name], right)), name
    for listened in (block.operator, block.feedforward.mlp):
        listened.register_forward_hook(lambda *_: None)
    assert torch.equal(differentiate(block)["out"], usual["out"])
    assert not block.residual.folds(z.half(), block.operator, block.operator.out)


@pytest.mark.parametrize("count", [48, 1])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_a_scaled_map_is_the_product_to_the_bit(count: int, autocast: bool, biased: bool) -> None:
    weight, bias, scale = (torch.randn(size, requires_grad=True) for size in ((48, 96), (48,), (count,)))
    leaves, x = [weight, bias, scale] if biased else [weight, scale], torch.randn(7, 96)
    found = []
    for made in (scaled(weight, bias if biased else None, scale), (weight * scale.unsqueeze(-1), bias * scale)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = F.linear(x, made[0], made[1] if biased else None)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*found, strict=True))


def test_class_attention() -> None:
    """The formulas, head by head. The residual goes around the normed class token, and the patches come out doubled."""
    block = ClassAttentionBlock(config(), dtype=F64).eval()
    with torch.no_grad():
        for x in block.parameters():
            x.add_(torch.randn_like(x), alpha=0.3)
    b, n, d, p = 2, 6, 24, 8
    x = torch.randn(b, 1 + n, d, dtype=F64)
    found = torch.cat(block(x[:, :1], x[:, 1:]), 1).detach()
    block.requires_grad_(False)

    def norm(z: Tensor, layer: nn.LayerNorm) -> Tensor:
        return F.layer_norm(z, (d,), layer.weight, layer.bias, 1e-6)

    for i in range(b):
        u = norm(x[i], block.norm1)
        q, k, v = ((u @ w.T + bias) for w, bias in zip(block.qkv.weight.split(d), block.qkv.bias.split(d), strict=True))
        heads = []
        for h in range(3):
            part = slice(h * p, h * p + p)
            scores = [float(q[0, part] @ k[m, part]) / math.sqrt(p) for m in range(1 + n)]  # q of the class token alone
            total = sum(math.exp(score) for score in scores)
            heads.append(sum(math.exp(score) / total * v[m, part] for m, score in enumerate(scores)))
        attended = torch.cat(heads) @ block.out.weight.T + block.out.bias
        scale1, scale2 = block.attention_residual.scale, block.residual.scale
        cls = norm(x[i, 0] + scale1 * attended, block.norm2)
        cls = cls + scale2 * (
            F.gelu(cls @ block.mlp.fc1.weight.T + block.mlp.fc1.bias) @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
        )
        patches = norm(x[i, 1:] + scale1 * u[1:], block.norm2)
        torch.testing.assert_close(found[i, 0], cls, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found[i, 1:], 2 * patches, rtol=1e-10, atol=1e-10)
    seen: list[Tensor] = []
    block.qkv.register_forward_hook(lambda _, given, out: seen.append(out))  # who listens hears q of every token
    again = torch.cat(block(x[:, :1], x[:, 1:]), 1)
    assert relative(again, found) < 1e-14 and seen[0].shape == (b, 1 + n, 3 * d)


@pytest.mark.parametrize(
    ("patch", "widths", "strides"),
    [
        (16, [3, 3, 6, 12, 24], [2, 2, 2, 2]),
        (8, [3, 6, 12, 24], [2, 2, 2]),
        (4, [3, 6, 12, 24], [1, 2, 2]),
        (2, [3, 6, 12, 24], [1, 1, 2]),
        (1, [3, 6, 12, 24], [1, 1, 1]),
    ],
)
def test_the_conv_stem(patch: int, widths: list[int], strides: list[int]) -> None:
    stem = ConvStem(config(patch_size=patch, img_size=16), dtype=F64)
    kinds = [type(layer) for layer in stem.layers]
    wanted = [PaddedConv, nn.BatchNorm2d, Gelu] * len(strides)
    assert kinds == wanted[:-1]  # no activation after the last
    layers = [layer for layer in stem.layers if isinstance(layer, nn.Conv2d)]
    assert [layer.in_channels for layer in layers] + [24] == widths
    assert [layer.stride for layer in layers] == [(s, s) for s in strides]
    assert all(layer.kernel_size == (3, 3) and layer.padding == (1, 1) and layer.bias is None for layer in layers)
    x = torch.randn(2, 3, 32, 48, dtype=F64)
    z = stem(x)
    assert z.shape == (2, 32 // patch * 48 // patch, 24) and (z < -0.5).any()
    maps = stem.layers(x)
    assert torch.equal(z, maps.flatten(2).mT) and maps.shape[2:] == (32 // patch, 48 // patch)


@pytest.mark.parametrize("kind", ["patch", "norm_patch"])
def test_the_linear_stems(kind: str) -> None:
    """Patch by patch: row-major; a patch flattened channel, row, column by `patch`, row, column, channel by `norm_patch`."""
    stem = STEMS[kind](config(stem=kind, patch_size=4, img_size=8), dtype=F64)
    with torch.no_grad():
        for x in stem.parameters():
            x.add_(torch.randn_like(x), alpha=0.1)
    x = torch.randn(2, 3, 8, 12, dtype=F64)
    found = stem(x)
    assert found.shape == (2, 6, 24)
    for row in range(2):
        for column in range(3):
            patch = x[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            if kind == "patch":
                wanted = patch.flatten(1) @ stem.projection.weight.flatten(1).T + stem.projection.bias
            else:
                flat = patch.permute(0, 2, 3, 1).flatten(1)
                flat = F.layer_norm(flat, (48,), stem.norm_in.weight, stem.norm_in.bias, 1e-5)
                wanted = flat @ stem.projection.weight.T + stem.projection.bias
                wanted = F.layer_norm(wanted, (24,), stem.norm_out.weight, stem.norm_out.bias, 1e-5)
            torch.testing.assert_close(found[:, 3 * row + column], wanted, rtol=1e-10, atol=1e-10)


# --- drop-path -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.9, 1.0])
def test_drop_path(rate: float) -> None:
    """A sample's update is left out as a whole, or scaled up so that the mean stays."""
    residual = Residual(3, 0.5, rate, dtype=F64)
    z, update = torch.randn(20_000, 2, 3, dtype=F64), torch.randn(2, 3, dtype=F64).expand(20_000, 2, 3)
    assert torch.equal(residual.eval()(z, update), z + 0.5 * update)
    added = residual.train()(z, update) - z
    share = added / (0.5 * update)  # 0, or 1 / (1 - rate)
    torch.testing.assert_close(share, share[:, :1, :1].expand_as(share), rtol=0, atol=1e-9)  # one draw a sample
    kept = (share[:, 0, 0] > 0.5).double()
    torch.testing.assert_close(share[:, 0, 0], kept / max(1 - rate, 1e-9), rtol=0, atol=1e-9)
    assert abs(kept.mean() - (1 - rate)) <= 4 * math.sqrt(rate * (1 - rate) / 20_000)


def test_drop_path_in_a_model() -> None:
    """The same rate in every block, on both lines; none in the class attention; nothing in evaluation."""
    model, x = build(("dmst_tiny", {}), drop_path_rate=1.0).eval(), images()
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, Residual):
            module.drop_path = 0.0
    assert torch.equal(model(x), plain(x))
    model.train()
    found = model.trace(x)
    for layer in found.layers:  # everything dropped: the blocks do nothing
        assert torch.equal(layer.z, layer.after_operator) and torch.equal(layer.z, layer.after_feedforward)
    rates = {key: module.drop_path for key, module in model.named_modules() if isinstance(module, Residual)}
    assert all(rate == (0.0 if key.startswith("class_blocks") else 1.0) for key, rate in rates.items()) and len(rates) == 8
