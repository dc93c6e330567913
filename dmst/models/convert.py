"""Published weights as networks of ours: the names of their tensors, one table for each layout.

    made = convert(safetensors.torch.load_file("vit.safetensors"))        made.model, made.layout, made.left_over

ToST (its XCiT and ViT twins too), CRATE, and timm's VisionTransformer. Shapes say the sizes; the number of heads is in the
weights of ToST alone, and elsewhere that of the published size, or `num_heads`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from dmst.errors import BadFileError, OptionError, shown
from dmst.models.files import fit
from dmst.models.vision import VisionModel
from dmst.models.zoo import LAYERS, MODELS, SIZES, model_config

SAME = {"cls_token": "cls_token", r"norm\.(.*)": r"norm.\1", r"head\.(weight|bias)": r"head.\1"}
MLP = {r"blocks\.(\d+)\.mlp\.(fc\d\..*)": r"blocks.\1.feedforward.mlp.\2"}
NORMS = {r"blocks\.(\d+)\.norm1\.(.*)": r"blocks.\1.norm.\2", r"blocks\.(\d+)\.norm2\.(.*)": r"blocks.\1.feedforward.norm.\2"}
TABLES: dict[str, dict[str, str]] = {
    "tost": SAME | NORMS | MLP | {
        r"patch_embed\.proj\.(\d+)\.([01])\.(.*)": "",  # `_stem`
        r"pos_embeder\.token_projection\.(.*)": r"position.projection.\1",
        r"blocks\.(\d+)\.attn\.temp(?:erature)?": r"blocks.\1.operator.temperature",
        r"blocks\.(\d+)\.attn\.qkv\.(.*)": r"blocks.\1.operator.subspace.\2",
        r"blocks\.(\d+)\.attn\.(?:to_out\.0|proj)\.(.*)": r"blocks.\1.operator.out.\2",
        r"blocks\.(\d+)\.gamma1": r"blocks.\1.residual.scale",
        r"blocks\.(\d+)\.gamma2": r"blocks.\1.feedforward.residual.scale",
        r"cls_attn_blocks\.(\d+)\.(norm\d|mlp\.fc\d)\.(.*)": r"class_blocks.\1.\2.\3",
        r"cls_attn_blocks\.(\d+)\.attn\.qkv\.(.*)": r"class_blocks.\1.qkv.\2",
        r"cls_attn_blocks\.(\d+)\.attn\.proj\.(.*)": r"class_blocks.\1.out.\2",
        r"cls_attn_blocks\.(\d+)\.gamma1": r"class_blocks.\1.attention_residual.scale",
        r"cls_attn_blocks\.(\d+)\.gamma2": r"class_blocks.\1.residual.scale",
    },
    "crate": {
        "cls_token": "cls_token",
        "pos_embedding": "position.table",
        r"to_patch_embedding\.1\.(.*)": r"stem.norm_in.\1",
        r"to_patch_embedding\.2\.(.*)": r"stem.projection.\1",
        r"to_patch_embedding\.3\.(.*)": r"stem.norm_out.\1",
        r"transformer\.layers\.(\d+)\.0\.norm\.(.*)": r"blocks.\1.norm.\2",
        r"transformer\.layers\.(\d+)\.0\.fn\.qkv\.(.*)": r"blocks.\1.operator.subspace.\2",
        r"transformer\.layers\.(\d+)\.0\.fn\.to_out\.0\.(.*)": r"blocks.\1.operator.out.\2",
        r"transformer\.layers\.(\d+)\.1\.norm\.(.*)": r"blocks.\1.feedforward.norm.\2",
        r"transformer\.layers\.(\d+)\.1\.fn\.weight": r"blocks.\1.feedforward.dictionary",
        r"mlp_head\.0\.(.*)": r"norm.\1",
        r"mlp_head\.1\.(.*)": r"head.\1",
    },
    "vit": SAME | NORMS | MLP | {
        "pos_embed": "position.table",
        r"patch_embed\.proj\.(.*)": r"stem.projection.\1",
        r"blocks\.(\d+)\.attn\.qkv\.(.*)": r"blocks.\1.operator.qkv.\2",
        r"blocks\.(\d+)\.attn\.proj\.(.*)": r"blocks.\1.operator.out.\2",
        r"blocks\.(\d+)\.ls1\.gamma": r"blocks.\1.residual.scale",
        r"blocks\.(\d+)\.ls2\.gamma": r"blocks.\1.feedforward.residual.scale",
    },
}  # fmt: skip
MARKS = {"pos_embeder.token_projection.weight": "tost", "to_patch_embedding.2.weight": "crate", "pos_embed": "vit"}
CALLED = {"tost": "ToST", "crate": "CRATE", "vit": "timm's ViT"}


class Converted(NamedTuple):
    model: VisionModel
    layout: str  # tost, crate or vit
    left_over: list[str]  # tensors that have no place in the network


def convert(weights: Mapping[str, Tensor], *, num_heads: int | None = None, partial: bool = False) -> Converted:
    """A network of ours with these weights, in evaluation mode. Tensors without a place are an error, or, with `partial`, left
    out: the network then computes something else than the published one."""
    theirs = {name.removeprefix("module."): x for name, x in weights.items()}
    layout = next((MARKS[name] for name in MARKS if name in theirs), None)
    if layout is None:
        raise BadFileError(f"these tensors are of no known layout ({', '.join(CALLED.values())}): {shown(sorted(theirs)[:3])}")
    ours: dict[str, Tensor] = {}
    left = []
    for name, x in theirs.items():
        if (mine := _rename(name, layout)) is None:
            left.append(name)
        else:
            ours[mine] = x[0] if mine == "position.table" and x.ndim == 3 else x
    operator, heads = _operator(theirs, layout)
    if operator != "tssa" and layout == "tost":
        ours = {re.sub(r"operator\.subspace", "operator.qkv", name): x for name, x in ours.items()}
    if left and not partial:
        raise OptionError(
            f"{len(left)} tensors of {CALLED[layout]} have no place in a network of dmst ({', '.join(sorted(left)[:3])}): it "
            "would compute something else. Take a network without them, or leave them out: partial=True (--partial)."
        )
    model = _network(ours, layout, operator, num_heads or heads)
    wanted = model.state_dict()
    for name in wanted.keys() - ours.keys():
        if name.endswith("num_batches_tracked"):
            ours[name] = wanted[name]
    fit(ours, wanted, f"what was converted from {CALLED[layout]}", any_float=True)
    model.load_state_dict(ours)
    return Converted(model.eval(), layout, sorted(left))


def _rename(name: str, layout: str) -> str | None:
    if layout == "tost" and (found := re.fullmatch(r"patch_embed\.proj\.(\d+)\.([01])\.(.*)", name)):
        return f"stem.layers.{3 * (int(found[1]) // 2) + int(found[2])}.{found[3]}"  # convolution, norm, GELU
    return next((re.sub(old, new, name) for old, new in TABLES[layout].items() if re.fullmatch(old, name)), None)


def _operator(theirs: Mapping[str, Tensor], layout: str) -> tuple[str, int | None]:
    """And the number of heads, where the weights tell it."""
    if layout != "tost":
        return LAYERS[layout]["operator"], None
    for name, operator in (("temp", "tssa"), ("temperature", "xca")):
        if (x := theirs.get(f"blocks.0.attn.{name}")) is not None:
            return operator, len(x)
    return "mhsa", None


def _network(ours: Mapping[str, Tensor], layout: str, operator: str, heads: int | None) -> VisionModel:
    def count(pattern: str) -> int:
        return 1 + max((int(found[1]) for name in ours if (found := re.match(pattern, name))), default=-1)

    try:
        dim, depth = ours["cls_token"].shape[-1], count(r"blocks\.(\d+)\.")
        stem = next(ours[name] for name in ("stem.layers.0.weight", "stem.projection.weight") if name in ours)
        classes = len(ours["head.weight"]) if "head.weight" in ours else 0
    except (IndexError, KeyError, StopIteration) as error:
        first = "the class token or the patch embedding"
        raise BadFileError(f"these are not all tensors of {CALLED[layout]}: {first} is missing.") from error
    known = [(size, row) for size, row in SIZES[layout].items() if (row["dim"], row["depth"]) == (dim, depth)]
    size, row = (*known, ("tiny", {}))[0]
    heads = heads or row.get("num_heads")
    if not heads:
        raise OptionError(f"{depth} blocks of width {dim} are no published size, and weights do not tell their heads: --heads.")
    if dim % heads:
        raise OptionError(f"num_heads is {heads}, which does not divide the width of the weights, {dim}.")
    told: dict[str, Any] = {"dim": dim, "depth": depth, "num_heads": heads, "num_classes": classes, "operator": operator}
    if layout == "tost":
        convolutions = sum(name.startswith("stem.layers.") and x.ndim == 4 for name, x in ours.items())
        told |= {"patch_size": 2**convolutions, "in_chans": stem.shape[1], "readout_depth": count(r"class_blocks\.(\d+)\.")}
    else:
        patch = stem.shape[-1] if layout == "vit" else math.isqrt(stem.shape[1] // 3)
        places = math.isqrt(max(len(ours["position.table"]) - 1, 0))
        told |= {"patch_size": patch, "in_chans": stem.shape[1] if layout == "vit" else 3, "img_size": places * patch}
    told["layer_scale"] = 1.0 if "blocks.0.residual.scale" in ours else None
    if "blocks.0.feedforward.mlp.fc1.weight" in ours:
        told["mlp_ratio"] = len(ours["blocks.0.feedforward.mlp.fc1.weight"]) / dim
    if layout != "crate":
        bias = "blocks.0.operator.subspace.bias" if operator == "tssa" else "blocks.0.operator.qkv.bias"
        told["qkv_bias"] = bias in ours
    name = f"{layout}_{size}_patch{told['patch_size']}_224"
    return VisionModel(model_config(name if name in MODELS else f"{layout}_{size}", **told))
