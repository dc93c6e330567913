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

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from dmst.errors import OptionError, choose, shown, unknown_name
from dmst.models.feedforward import FEEDFORWARDS
from dmst.models.positions import POSITIONS
from dmst.models.stems import STEMS
from dmst.operators import OPERATORS, Operator, create
from dmst.settings import Settings, check, setting

READOUTS = ("class_attention", "token", "mean")
POOLS = ("token", "avg", "")
MOST_PATCHES = 65_536  # of an image
OURS = ("dim", "num_heads", "bias", "proj_drop", "device", "dtype")  # what a block passes to every operator by itself


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """One network. Fields keep timm's spelling where timm has a word for them.

    The upper ends are what no network needs more of: a config alone could ask for terabytes, or for hours.
    """

    name: str = setting("custom", "how messages call it")
    dim: int = setting(192, "width of a token", low=1, high=65_536)
    depth: int = setting(12, "blocks", low=1, high=256)
    num_heads: int = setting(4, "heads of the operator", low=1, high=65_536)
    operator: str = "dmsa"  # a name of OPERATORS
    operator_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    patch_size: int = setting(16, "side of a patch, in pixels", low=1, high=4_096)
    stem: str = setting("conv", "from pixels to tokens", choices=STEMS)
    position: str = setting("fourier", "how places are told", choices=POSITIONS)
    feedforward: str = setting("mlp", "second half of a block", choices=FEEDFORWARDS)
    mlp_ratio: float = setting(4.0, "hidden width of the feedforward, in dims", above=0, high=1e6)
    readout: str = setting("class_attention", "from tokens to the classifier", choices=READOUTS)
    readout_depth: int = setting(2, "blocks of class attention", low=0, high=256)
    global_pool: str | None = setting(
        None, 'what the classifier reads; "": every token; None: the readout\'s own', choices=POOLS
    )
    layer_scale: float | None = setting(1.0, "start of every LayerScale; None: none", low=-1e6, high=1e6)
    token_std: float = setting(0.02, "start of class token and learned positions", low=0, high=1e6)
    norm_eps: float = setting(1e-6, "of every LayerNorm but those of the stem", low=1e-12, high=1)
    qkv_bias: bool = setting(True, "biases in the operator")
    drop_rate: float = setting(0.0, "dropout before the classifier", low=0, high=1)
    proj_drop_rate: float = setting(0.0, "dropout after operator and feedforward", low=0, high=1)
    drop_path_rate: float = setting(0.0, "the same in every block; class attention has none", low=0, high=1)
    img_size: int | tuple[int, int] = 224  # other sizes run too; learned positions are stored for this one
    in_chans: int = setting(3, "channels of an image", low=1, high=4_096)
    num_classes: int = setting(1000, "0: no classifier", low=0, high=10_000_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("img_size", _sides(self.img_size, self.patch_size))
        if (patches := math.prod(self.grid)) > MOST_PATCHES:
            raise OptionError(
                f"img_size is {shown(self.img_size)}: that is {patches:,} patches, and at most {MOST_PATCHES:,} are possible; "
                "take smaller images or a larger patch_size."
            )
        self._set("operator_options", _options(self.operator_options))
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
        by_place = ("rotary", "gate_rotary", "key_rotary", "position_scores")
        if self.readout == "token" and any(self.operator_options.get(name) == "2d" for name in by_place):
            raise OptionError("2d positions need a grid of patches alone, and readout 'token' puts a class token among them.")
        if self.readout == "class_attention" and self.global_pool == "token" and not self.readout_depth:
            raise OptionError("readout_depth is 0: then the class token never looks at the patches; it must be at least 1.")
        operator = self.create_operator(device="meta")  # its own options are refused here too, by the operator itself
        if (tokens := math.prod(self.grid) + self.prefix) < operator.least_tokens:
            raise OptionError(
                f"img_size {shown(self.img_size)} gives {tokens} tokens, and {self.operator} needs at least "
                f"{operator.least_tokens}: take larger images, a smaller patch_size or fewer groups."
            )

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
        options = _options(overrides.pop("operator_options", self.operator_options if operator == self.operator else {}))
        known = [name for name in OPERATORS.find(operator).keywords() if name not in OURS]
        for name in [name for name in overrides if name not in names]:
            if name not in known:
                raise unknown_name(f"option of a model with operator {operator!r}", name, names + known)
            options[name] = overrides.pop(name)
        if overrides.get("readout", self.readout) != self.readout:  # the default pool belongs to the readout
            overrides.setdefault("global_pool", None)
        return replace(self, **overrides | {"operator": operator, "operator_options": options})


def _sides(size: Any, patch_size: int) -> tuple[int, int]:
    """`size` as (height, width), each a multiple of the patch."""
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2:
        raise OptionError(f"img_size is {shown(size)}: it must be one whole number, or (height, width).")
    height, width = (check(ModelConfig.rules()["patch_size"], side, "img_size") for side in pair)  # both are sides in pixels
    for side in (height, width):
        if side % patch_size:
            near = max(round(side / patch_size), 1) * patch_size
            raise OptionError(f"img_size is {shown(size)}: {side} is not a multiple of the patch size {patch_size}; {near} is.")
    return height, width


def _options(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key not in OURS for key in value):
        raise OptionError(
            f"operator_options is {shown(value)}: it must map options of the operator, other than {OURS}, to values."
        )
    return dict(value)
