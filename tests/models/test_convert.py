"""Published weights become networks of ours: the same logits as the published layouts, which are retyped here."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from dmst import cli, load_model
from dmst.errors import BadFileError, OptionError
from dmst.models.convert import convert
from dmst.models.zoo import SIZES
from tests.cases import relative

Weights = dict[str, Tensor]
D, HEADS, DEPTH, PATCH, SIDE, CLASSES = 24, 3, 2, 8, 32, 5


def norm(x: Tensor, w: Weights, name: str, eps: float = 1e-6) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def mlp(x: Tensor, w: Weights, name: str) -> Tensor:
    return linear(F.gelu(linear(x, w, f"{name}.fc1")), w, f"{name}.fc2")


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def softmax_attention(x: Tensor, w: Weights, name: str) -> Tensor:
    q, k, v = (heads_of(part) for part in linear(x, w, f"{name}.qkv").chunk(3, -1))
    mixed = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    return linear(mixed.transpose(1, 2).flatten(2), w, f"{name}.proj")


# --- the published networks, with the published names of their weights -----------------------------------------------


def vit(x: Tensor, w: Weights) -> Tensor:
    x = F.conv2d(x, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], PATCH).flatten(2).mT
    x = torch.cat((w["cls_token"].expand(len(x), -1, -1), x), 1) + w["pos_embed"]
    for i in range(DEPTH):
        at = f"blocks.{i}"
        x = x + w.get(f"{at}.ls1.gamma", 1) * softmax_attention(norm(x, w, f"{at}.norm1"), w, f"{at}.attn")
        x = x + w.get(f"{at}.ls2.gamma", 1) * mlp(norm(x, w, f"{at}.norm2"), w, f"{at}.mlp")
    return linear(norm(x, w, "norm")[:, 0], w, "head")


def crate(x: Tensor, w: Weights) -> Tensor:
    side = SIDE // PATCH
    x = x.unflatten(3, (side, PATCH)).unflatten(2, (side, PATCH)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    x = norm(x, w, "to_patch_embedding.1", 1e-5)
    x = norm(linear(x, w, "to_patch_embedding.2"), w, "to_patch_embedding.3", 1e-5)
    x = torch.cat((w["cls_token"].expand(len(x), -1, -1), x), 1) + w["pos_embedding"]
    for i in range(DEPTH):
        first, second = (f"transformer.layers.{i}.{j}" for j in (0, 1))
        s = heads_of(linear(norm(x, w, f"{first}.norm", 1e-5), w, f"{first}.fn.qkv"))
        mixed = (s @ s.mT * s.shape[-1] ** -0.5).softmax(-1) @ s
        x = x + linear(mixed.transpose(1, 2).flatten(2), w, f"{first}.fn.to_out.0")
        z, dictionary = norm(x, w, f"{second}.norm", 1e-5), w[f"{second}.fn.weight"]
        step = 0.1 * (z @ dictionary - F.linear(z, dictionary) @ dictionary)
        x = F.relu(z + step - 0.1 * 0.1)
    return linear(norm(x[:, 0], w, "mlp_head.0", 1e-5), w, "mlp_head.1")


def tost(x: Tensor, w: Weights) -> Tensor:
    for i in (0, 2, 4):
        at = f"patch_embed.proj.{i}"
        x = F.conv2d(x, w[f"{at}.0.weight"], stride=2, padding=1)
        x = F.batch_norm(x, *(w[f"{at}.1.{key}"] for key in ("running_mean", "running_var", "weight", "bias")))
        x = F.gelu(x) if i < 4 else x
    b, _, h, width = x.shape
    row, column = (torch.arange(1, n + 1, dtype=x.dtype) / (n + 1e-6) * 2 * torch.pi for n in (h, width))
    frequency = 10000 ** (2 * (torch.arange(32) // 2) / 32)

    def waves(place: Tensor) -> Tensor:
        angle = place[:, None] / frequency
        return torch.stack((angle[:, 0::2].sin(), angle[:, 1::2].cos()), 2).flatten(1)

    places = torch.cat((waves(row)[:, None].expand(h, width, 32), waves(column)[None].expand(h, width, 32)), 2)
    kernel, bias = (w[f"pos_embeder.token_projection.{key}"] for key in ("weight", "bias"))
    x = x.flatten(2).mT + F.linear(places.flatten(0, 1), kernel[:, :, 0, 0], bias)
    for i in range(DEPTH):
        at = f"blocks.{i}"
        z = norm(x, w, f"{at}.norm1")
        if f"{at}.attn.temp" in w:
            s = heads_of(linear(z, w, f"{at}.attn.qkv"))
            pi = ((F.normalize(s, dim=-2) ** 2).sum(-1) * w[f"{at}.attn.temp"]).softmax(1)
            dots = (pi / (pi.sum(-1, keepdim=True) + 1e-8)).unsqueeze(-2) @ s**2
            out = linear((-s * pi.unsqueeze(-1) / (1 + dots)).transpose(1, 2).flatten(2), w, f"{at}.attn.to_out.0")
        else:
            out = softmax_attention(z, w, f"{at}.attn")
        x = x + w[f"{at}.gamma1"] * out
        x = x + w[f"{at}.gamma2"] * mlp(norm(x, w, f"{at}.norm2"), w, f"{at}.mlp")
    x = torch.cat((w["cls_token"].expand(b, -1, -1), x), 1)
    for i in range(2):
        at = f"cls_attn_blocks.{i}"
        z = norm(x, w, f"{at}.norm1")
        q, k, v = (heads_of(part) for part in linear(z, w, f"{at}.attn.qkv").chunk(3, -1))
        cls = ((q[:, :, :1] * k).sum(-1) * q.shape[-1] ** -0.5).softmax(-1).unsqueeze(2) @ v
        cls = linear(cls.transpose(1, 2).flatten(2), w, f"{at}.attn.proj")
        x = norm(x + w[f"{at}.gamma1"] * torch.cat((cls, z[:, 1:]), 1), w, f"{at}.norm2")
        x = x + torch.cat((w[f"{at}.gamma2"] * mlp(x[:, :1], w, f"{at}.mlp"), x[:, 1:]), 1)
    return linear(norm(x, w, "norm")[:, 0], w, "head")


# --- their weights, at random ----------------------------------------------------------------------------------------


def draw(shapes: dict[str, tuple[int, ...]]) -> Weights:
    torch.manual_seed(0)
    return {name: torch.rand(shape).double() + 0.5 if "running_var" in name else torch.randn(shape).double() * (
        0.3 if len(shape) > 1 else 0.5) for name, shape in shapes.items()}  # fmt: skip


def both(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def mlp_shapes(at: str) -> dict[str, tuple[int, ...]]:
    return both(f"{at}.fc1", 4 * D, D) | both(f"{at}.fc2", D, 4 * D)


def vit_weights(scales: bool = False) -> Weights:
    shapes = (
        {"cls_token": (1, 1, D), "pos_embed": (1, (SIDE // PATCH) ** 2 + 1, D)} | both("norm", D) | both("head", CLASSES, D)
    )
    shapes |= both("patch_embed.proj", D, 3, PATCH, PATCH)
    for i in range(DEPTH):
        at = f"blocks.{i}"
        shapes |= both(f"{at}.norm1", D) | both(f"{at}.norm2", D) | mlp_shapes(f"{at}.mlp")
        shapes |= both(f"{at}.attn.qkv", 3 * D, D) | both(f"{at}.attn.proj", D, D)
        shapes |= {f"{at}.ls1.gamma": (D,), f"{at}.ls2.gamma": (D,)} if scales else {}
    return draw(shapes)


def crate_weights() -> Weights:
    shapes = {"cls_token": (1, 1, D), "pos_embedding": (1, (SIDE // PATCH) ** 2 + 1, D)}
    shapes |= both("to_patch_embedding.1", 3 * PATCH**2) | both("to_patch_embedding.2", D, 3 * PATCH**2)
    shapes |= both("to_patch_embedding.3", D) | both("mlp_head.0", D) | both("mlp_head.1", CLASSES, D)
    for i in range(DEPTH):
        first, second = (f"transformer.layers.{i}.{j}" for j in (0, 1))
        shapes |= both(f"{first}.norm", D) | both(f"{second}.norm", D) | both(f"{first}.fn.to_out.0", D, D)
        shapes |= {f"{first}.fn.qkv.weight": (D, D), f"{second}.fn.weight": (D, D)}
    return draw(shapes)


def tost_weights(attention: str = "tssa") -> Weights:
    shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, D)} | both("norm", D) | both("head", CLASSES, D)
    shapes |= both("pos_embeder.token_projection", D, 64, 1, 1)
    for i, (a, b) in enumerate(((3, D // 4), (D // 4, D // 2), (D // 2, D))):
        at = f"patch_embed.proj.{2 * i}"
        shapes |= {f"{at}.0.weight": (b, a, 3, 3)} | both(f"{at}.1", b)
        shapes |= {f"{at}.1.running_mean": (b,), f"{at}.1.running_var": (b,)}
    for i in range(DEPTH):
        at = f"blocks.{i}"
        shapes |= both(f"{at}.norm1", D) | both(f"{at}.norm2", D) | mlp_shapes(f"{at}.mlp")
        shapes |= {f"{at}.gamma1": (D,), f"{at}.gamma2": (D,)}
        if attention == "tssa":
            shapes |= {f"{at}.attn.temp": (HEADS, 1)} | both(f"{at}.attn.qkv", D, D) | both(f"{at}.attn.to_out.0", D, D)
        else:
            shapes |= both(f"{at}.attn.qkv", 3 * D, D) | both(f"{at}.attn.proj", D, D)
    for i in range(2):
        at = f"cls_attn_blocks.{i}"
        shapes |= both(f"{at}.norm1", D) | both(f"{at}.norm2", D) | mlp_shapes(f"{at}.mlp")
        shapes |= both(f"{at}.attn.qkv", 3 * D, D) | both(f"{at}.attn.proj", D, D)
        shapes |= {f"{at}.gamma1": (D,), f"{at}.gamma2": (D,)}
    return draw(shapes)


PUBLISHED = {
    "vit": (vit, vit_weights), "vit with LayerScale": (vit, lambda: vit_weights(scales=True)), "crate": (crate, crate_weights),
    "tost": (tost, tost_weights), "tost with softmax": (tost, lambda: tost_weights("mhsa")),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_converted_network_has_the_published_logits(name: str) -> None:
    published, weights = PUBLISHED[name][0], PUBLISHED[name][1]()
    images = torch.randn(2, 3, SIDE, SIDE).double()
    made = convert(weights, num_heads=HEADS)
    assert made.layout == name.split()[0] and not made.left_over and not made.model.training
    assert relative(made.model.double()(images), published(images, weights)) < 1e-6  # weights are loaded in float32


def test_heads_of_tost_are_in_its_weights() -> None:
    assert convert(tost_weights()).model.config.num_heads == HEADS


def test_data_parallel_prefixes_and_published_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {f"module.{name}": x for name, x in vit_weights().items()}
    assert convert(weights, num_heads=HEADS).model.config.img_size == (SIDE, SIDE)
    for depth in (12, 3):  # a published width alone does not tell the heads
        monkeypatch.setitem(SIZES["vit"], "odd", {"dim": 24, "depth": depth, "num_heads": 2})
        with pytest.raises(OptionError, match="2 blocks of width 24 are no published size"):
            convert(weights)


def test_what_has_no_place_is_an_error_or_left_out() -> None:
    weights = vit_weights() | {"reg_token": torch.zeros(1, 4, D), "fc_norm.weight": torch.ones(D)}
    with pytest.raises(OptionError, match=r"2 tensors of timm's ViT have no place .*fc_norm\.weight, reg_token"):
        convert(weights, num_heads=HEADS)
    made = convert(weights, num_heads=HEADS, partial=True)
    assert made.left_over == ["fc_norm.weight", "reg_token"]


def test_what_is_missing_or_unknown() -> None:
    weights = vit_weights()
    del weights["blocks.1.mlp.fc2.bias"]
    with pytest.raises(BadFileError, match=r"missing 1 \(blocks\.1\.feedforward\.mlp\.fc2\.bias"):
        convert(weights, num_heads=HEADS)
    with pytest.raises(BadFileError, match=r"no known layout \(ToST, CRATE, timm's ViT\)"):
        convert({"layer1.weight": torch.zeros(2)})
    with pytest.raises(BadFileError, match="the class token or the patch embedding is missing"):
        convert({"pos_embed": torch.zeros(1, 5, D)})


def test_the_command(tmp_path: Path) -> None:
    weights = vit_weights()
    safetensors.torch.save_file({name: x.float() for name, x in weights.items()}, tmp_path / "vit.safetensors")
    words = ["convert", str(tmp_path / "vit.safetensors"), "--out", str(tmp_path / "vit"), "--heads", str(HEADS)]
    said = CliRunner().invoke(cli.app, [*words, "--mean", "0.5", "--std", "0.25"])
    assert said.exit_code == 0, said.output
    assert "timm's ViT, 2 blocks of width 24, 3 heads, patch 8, 5 classes" in said.output
    model, images = load_model(tmp_path / "vit"), torch.randn(2, 3, SIDE, SIDE)
    assert model.pretrained_cfg["mean"] == [0.5] * 3 and model.pretrained_cfg["std"] == [0.25] * 3
    assert relative(model.double()(images.double()), vit(images.double(), weights)) < 1e-6
    for wrong, told in (
        (["convert", str(tmp_path / "a.pth"), "--out", "x"], "a.pth is not a .safetensors file. `dmst convert --help`"),
        ([*words[:3], str(tmp_path / "b"), *words[4:], "--mean", "0.5"], "--mean and --std need 1 or 3 numbers"),
        (words, "exists: choose another folder"),
    ):
        said = CliRunner().invoke(cli.app, wrong)
        assert said.exit_code == 1 and told in str(said.exception)
