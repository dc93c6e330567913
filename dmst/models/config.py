"""ModelConfig: everything that decides a network, checked once, when it is made.

stem          conv          3x3 convolutions of stride 2 with batch norm (XCiT, ToST)
              patch         one linear map per patch (ViT)
              norm_patch    the same between two LayerNorms (CRATE)
position      fourier       fixed waves of row and column, one linear map; any grid (XCiT, ToST)
              learned       one vector per place, resized to other grids (ViT, CRATE)
feedforward   mlp           z + scale mlp(norm z)
              local         the same, its hidden channels also seeing the eight neighbours of a patch
              ista          one proximal step of sparse coding, no residual (CRATE)
readout       class_attention   the blocks see patches only; a class token then looks at them `readout_depth` times
              token             the class token goes through the blocks
              mean              no class token: the mean of the patches
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Integral
from typing import Any

from dmst.errors import OptionError, choose, flag, number, shown, unknown_name
from dmst.models.feedforward import FEEDFORWARDS
from dmst.models.positions import POSITIONS
from dmst.models.stems import STEMS
from dmst.operators import OPERATORS, Operator, create

READOUTS = ("class_attention", "token", "mean")
POOLS = ("token", "avg", "")
# what no network needs more of; that a config alone could ask for terabytes, or for hours
MOST = {
    "dim": 65_536, "depth": 256, "num_heads": 65_536, "patch_size": 4_096, "readout_depth": 256, "in_chans": 4_096,
    "num_classes": 10_000_000,
}  # fmt: skip
MOST_PIXELS, MOST_PATCHES = 4_096, 65_536  # along a side; of an image
OURS = ("dim", "num_heads", "bias", "proj_drop", "device", "dtype")  # what a block passes to every operator by itself


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One network. Fields keep timm's spelling where timm has a word for them."""

    name: str = "custom"
    dim: int = 192
    depth: int = 12
    num_heads: int = 4
    operator: str = "dmsa"
    operator_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    patch_size: int = 16
    stem: str = "conv"
    position: str = "fourier"
    feedforward: str = "mlp"
    mlp_ratio: float = 4.0
    readout: str = "class_attention"
    readout_depth: int = 2
    global_pool: str | None = None  # what the classifier reads: token, avg, or "" for every token; None: the readout's own
    layer_scale: float | None = 1.0  # the start of every LayerScale; None: none
    token_std: float = 0.02  # the start of class token and learned positions
    norm_eps: float = 1e-6  # of every LayerNorm but those of the stem
    qkv_bias: bool = True
    drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    drop_path_rate: float = 0.0  # the same in every block; class attention has none
    img_size: int | tuple[int, int] = 224  # other sizes run too; learned positions are stored for this one
    in_chans: int = 3
    num_classes: int = 1000

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            self._set(name, _whole(name, getattr(self, name), 0 if name in ("readout_depth", "num_classes") else 1, most))
        choose("stem", self.stem, STEMS)
        choose("position", self.position, POSITIONS)
        choose("feedforward", self.feedforward, FEEDFORWARDS)
        choose("readout", self.readout, READOUTS)
        flag("qkv_bias", self.qkv_bias)
        for name in ("drop_rate", "proj_drop_rate", "drop_path_rate"):
            number(name, getattr(self, name), 0, 1)
        number("mlp_ratio", self.mlp_ratio, 1 / self.dim, 1e6)
        number("token_std", self.token_std, 0, 1e6)
        number("norm_eps", self.norm_eps, 1e-12, 1)
        if self.layer_scale is not None:
            number("layer_scale", self.layer_scale, -1e6, 1e6)
        OPERATORS.find(self.operator)
        self._set("img_size", sides("img_size", self.img_size, self.patch_size))
        if (patches := math.prod(self.grid)) > MOST_PATCHES:
            raise OptionError(
                f"img_size is {shown(self.img_size)}: that is {patches:,} patches, and at most {MOST_PATCHES:,} are possible; "
                "take smaller images or a larger patch_size."
            )
        self._set("operator_options", _options(self.operator_options))
        if not isinstance(self.name, str):
            raise OptionError(f"name is {shown(self.name)}: it must be text.")
        pools = POOLS if self.readout != "mean" else POOLS[1:]
        self._set("global_pool", pools[0] if self.global_pool is None else self.global_pool)
        choose(f"global_pool of readout {self.readout!r}", self.global_pool, pools)
        if self.stem == "conv":
            steps = self.patch_size.bit_length() - 1
            if self.patch_size != 1 << steps:
                raise OptionError(f"patch_size is {self.patch_size}: the conv stem halves, so it must be a power of two.")
            share = 1 << (max(3, steps) - 1)
            if self.dim % share:
                raise OptionError(
                    f"dim is {self.dim}: a conv stem for patch_size {self.patch_size} needs a multiple of {share}."
                )
        if self.readout == "token" and "2d" in (
            self.operator_options.get("rotary"),
            self.operator_options.get("gate_rotary"),
            self.operator_options.get("position_scores"),
        ):
            raise OptionError("2d positions need a grid of patches alone, and readout 'token' puts a class token among them.")
        if self.readout == "class_attention" and self.global_pool == "token" and not self.readout_depth:
            raise OptionError("readout_depth is 0: then the class token never looks at the patches; it must be at least 1.")
        self.create_operator(device="meta")  # its own options are refused here too, by the operator itself

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def create_operator(self, **factory: Any) -> Operator:
        """The operator of one block."""
        bias, drop = self.qkv_bias, self.proj_drop_rate
        return create(self.operator, self.dim, self.num_heads, bias=bias, proj_drop=drop, **factory, **self.operator_options)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches at `img_size`."""
        rows, columns = self.img_size  # type: ignore[misc]  # __post_init__ made it a pair
        return rows // self.patch_size, columns // self.patch_size

    @property
    def prefix(self) -> int:
        """Tokens before the patches inside the blocks."""
        return int(self.readout == "token")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"img_size": list(self.img_size), "operator_options": dict(self.operator_options)}  # type: ignore[arg-type]

    def change(self, **overrides: Any) -> ModelConfig:
        """Another config. What is no field is taken as an option of the operator: `mode="equation"`, `rotary="2d"`.

        The options of another operator do not carry over.
        """
        names = [f.name for f in fields(self)]
        operator = self.operator if overrides.get("operator") is None else overrides["operator"]
        operator_class = OPERATORS.find(operator)
        options = _options(overrides.pop("operator_options", self.operator_options if operator == self.operator else {}))
        known = [
            p.name
            for p in inspect.signature(operator_class.__init__).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name not in OURS
        ]
        for name in [name for name in overrides if name not in names]:
            if name not in known:
                raise unknown_name(f"option of a model with operator {operator!r}", name, names + known)
            options[name] = overrides.pop(name)
        if overrides.get("readout", self.readout) != self.readout:  # the default pool belongs to the readout
            overrides.setdefault("global_pool", None)
        return replace(self, **overrides | {"operator": operator, "operator_options": options})


def sides(name: str, size: Any, patch_size: int) -> tuple[int, int]:
    """`size` as (height, width), each a multiple of the patch."""
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2:
        raise OptionError(f"{name} is {shown(size)}: it must be one whole number, or (height, width).")
    pair = tuple(_whole(name, side, 1, MOST_PIXELS) for side in pair)
    for side in pair:
        if side % patch_size:
            near = max(round(side / patch_size), 1) * patch_size
            raise OptionError(f"{name} is {shown(size)}: {side} is not a multiple of the patch size {patch_size}; {near} is.")
    return pair


def _whole(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int, if it is a whole number in the range; numpy's are, True is not."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise OptionError(f"{name} is {shown(value)}: it must be a whole number from {low} to {high:,}.")
    return int(value)


def _options(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key not in OURS for key in value):
        raise OptionError(
            f"operator_options is {shown(value)}: it must map options of the operator, other than {OURS}, to values."
        )
    return dict(value)
