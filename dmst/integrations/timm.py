"""Importing this module registers every model of the zoo with timm.

    import timm, dmst.integrations.timm
    model = timm.create_model("dmst_small_patch16_224", num_classes=10)
    model = timm.create_model("dmst_cifar10", pretrained=True)           weights that ship (`dmst models --shipped`)
    model = timm.create_model("local-dir:folder", pretrained=True)       a folder that dmst.save_model or timm wrote

timm's scripts: `python -m dmst.integrations.timm validate.py --model dmst_cifar10 --pretrained ...`. Names are the zoo's, but
timm has a vit_* of its own, so ours are dmst_vit_*. Keywords are timm's, the fields of ModelConfig and the options of the
operator.
"""

from __future__ import annotations

import importlib
import math
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dmst.errors import DmstError, OptionError, need
from dmst.models import VisionModel, shipped, zoo
from dmst.models.files import WEIGHTS
from dmst.models.preprocessing import pretrained_cfg

if __name__ == "__main__":  # the models are registered by the module of that name, which the script may import too
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        raise SystemExit("Name a script of timm, such as its validate.py: python -m dmst.integrations.timm SCRIPT [ARGUMENTS]")
    del sys.argv[0]
    try:
        importlib.import_module("dmst.integrations.timm")
    except DmstError as error:
        raise SystemExit(str(error)) from None
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    raise SystemExit

need("torchvision", "timm")  # timm needs it, and a torchvision built for another torch fails: first, so that the error names it
layers, models = need("timm.layers", "timm"), need("timm.models", "timm")


def _cfg(name: str) -> dict[str, Any]:
    """timm writes tuples where JSON has lists."""
    told = pretrained_cfg(zoo.model_config(name))
    cfg = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}
    return cfg | ({"file": str(shipped.FOLDER / name / WEIGHTS)} if name in shipped.SHIPPED else {})


def _tag(name: str) -> str:
    """ "untrained" is timm's word for a configuration without weights."""
    return f"{zoo.timm_name(name)}.{'shipped' if name in shipped.SHIPPED else 'untrained'}"


# timm looks for this name in the module of an entry point
default_cfgs = models.generate_default_cfgs({_tag(name): _cfg(name) for name in zoo.MODELS})


def _build(
    name: str,
    pretrained: bool = False,
    *,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    in_chans: int | None = None,
    out_indices: Any = 3,
    **options: Any,
) -> Any:
    """What an entry point does: a VisionModel, or timm's wrapper around one with `features_only`."""
    cfg = models.resolve_pretrained_cfg(zoo.timm_name(name), pretrained_cfg, pretrained_cfg_overlay)
    return models.build_model_with_cfg(
        partial(zoo.create_model, name, in_chans=cfg.input_size[0] if in_chans is None else in_chans),
        zoo.timm_name(name),
        pretrained,
        pretrained_cfg=cfg,
        pretrained_filter_fn=_fit,
        kwargs_filter=("in_chans",),  # from timm: it takes all weights for those of three channels, and drops the others
        feature_cfg={"feature_cls": "getter", "out_indices": out_indices},
        **options,
    )


def _fit(weights: dict[str, Tensor], model: VisionModel) -> dict[str, Tensor]:
    """Weights of another size of image or number of channels, adapted as timm adapts its own."""
    config, cfg = model.config, model.pretrained_cfg
    first = f"{cfg['first_conv']}.weight"
    kernel, table = weights.get(first), weights.get("position.table")
    if kernel is not None and kernel.ndim == 4 and kernel.shape[1] != config.in_chans:
        if kernel.shape[1] != 3:
            raise OptionError(
                f"in_chans is {config.in_chans}, and the weights are for {kernel.shape[1]}: only those for 3 can be adapted. "
                "Leave in_chans as it is, or use pretrained=False."
            )
        weights[first] = models.adapt_input_conv(config.in_chans, kernel.float())  # sums, which float16 would round
    if table is not None:
        count = len(table) - config.prefix
        stated = tuple(side // config.patch_size for side in cfg["input_size"][1:])
        square = (math.isqrt(count),) * 2
        old = next((grid for grid in (stated, config.grid, square) if math.prod(grid) == count), config.grid)
        if old != config.grid:
            weights["position.table"] = layers.resample_abs_pos_embed(table[None], config.grid, old, config.prefix)[0]
    return weights


def _entry_point(name: str) -> Callable[..., Any]:
    def entry_point(pretrained: bool = False, **options: Any) -> Any:
        return _build(name, pretrained, **options)

    entry_point.__name__ = entry_point.__qualname__ = zoo.timm_name(name)
    entry_point.__doc__ = f"{name} of dmst.models.zoo, for timm.create_model."
    return entry_point


for _name in zoo.MODELS:
    # a reload finds its names there: they call the new _build
    if not models.is_model_in_modules(zoo.timm_name(_name), {"timm"}):
        models.register_model(_entry_point(_name))
