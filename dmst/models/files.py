"""A saved model: a folder with two files, whole or refused. No pickle, neither written nor read.

    model.safetensors    weights and buffers, by name
    config.json          what timm reads (architecture, num_classes, label_names where they are known, model_args,
                         pretrained_cfg), and under "dmst" the whole ModelConfig, size and sha256 of the weights; last of
                         all `self_sha256`, which covers the rest

The folder loads with `dmst.load_model(folder)` and, after `import dmst.integrations.timm`, with timm's
`create_model("local-dir:folder", pretrained=True)`. The config is read first: it says which tensors the weights have, so how
many bytes at most. Hashes are compared before a model takes a weight: safetensors itself does not see a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

import dmst
from dmst import atomic
from dmst.errors import BadFileError, OptionError, shown
from dmst.models import hub
from dmst.models.config import ModelConfig
from dmst.models.preprocessing import pretrained_cfg, set_mean_std
from dmst.models.vision import VisionModel
from dmst.models.zoo import MODELS, model_config, timm_name
from dmst.operators import OPERATORS
from dmst.operators.orthonormal import OrthonormalLinear, is_orthonormal, orthonormal_rows
from dmst.operators.table import REMEDY

WEIGHTS, CONFIG = "model.safetensors", "config.json"
LARGEST_CONFIG = 2**24  # timm's can hold the names of 21,841 classes
LONGEST_HEADER = 2**23  # bytes, some 60,000 tensors; safetensors would read 100 MB, in a minute
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def save_model(model: VisionModel, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write `model` to `folder`, whole or not at all. Returns the folder.

    A folder that exists is refused unless `overwrite`; then the old one stays until the new one is complete.
    """
    if not isinstance(model, VisionModel):
        raise OptionError(f"save_model takes a VisionModel of this package, not {type(model).__name__}: unwrap it first.")
    folder = Path(folder)
    taken = folder.exists() or folder.is_symlink()
    if taken and not overwrite:
        raise OptionError(f"{folder} exists: choose another folder, or pass overwrite=True.")
    if taken and not (folder.is_dir() and all(x.name in (WEIGHTS, CONFIG) and x.is_file() for x in folder.iterdir())):
        raise OptionError(f"{folder} contains files that are not of a saved model: choose another folder.")
    names, classes = model.class_names, model.config.num_classes
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names) or len(names) not in (0, classes):
        raise OptionError(f"class_names is {shown(names)}: it must be a tuple of {classes} names, one per class, or ().")
    options = dict(model.config.operator_options)
    try:
        same = json.loads(json.dumps(options, allow_nan=False)) == options
    except (TypeError, ValueError):
        same = False
    if not same:
        raise OptionError(
            f"operator_options are {options!r}: a saved model can store only text, numbers, lists, and dicts with text keys."
        )
    tensors = model.state_dict()
    for name, module in model.named_modules():  # orthonormal matrices are retracted, as the model uses them
        if isinstance(module, OrthonormalLinear) and not is_orthonormal(module.weight):
            tensors[f"{name}.weight"] = orthonormal_rows(module.weight)
    try:
        fit(tensors, VisionModel(model.config, device="meta").state_dict(), "the model", any_float=True)
    except BadFileError as error:  # what could not be loaded is not written
        raise OptionError(
            f"not saved, because it could not be loaded again: {error} (To change the classes: model.reset_classifier.)"
        ) from error
    if bad := not_finite(tensors):
        raise OptionError(f"not saved: {bad} holds NaN or infinity.")
    weights = to_bytes(tensors)
    config = atomic.sealed(_describe(model, weights))
    return atomic.write_folder(folder, [(WEIGHTS, weights), (CONFIG, config)], len(weights) + len(config))


def load_model(folder: str | Path, *, unverified: bool = False, device: Any = None) -> VisionModel:
    """The model saved in `folder`, in final/ of a finished run, or on the hub (hf://owner/name), in evaluation mode.

    `unverified` admits a folder of the same form without hashes, such as timm's `save_for_hf(..., safe_serialization=True)`
    writes. For other classes: `model.reset_classifier`.
    """
    folder = _found(hub.download(folder) if isinstance(folder, str) and folder.startswith(hub.SCHEME) else Path(folder))
    path = folder / CONFIG
    if not path.exists():
        raise BadFileError(f"{path} cannot be read: there is none, and a saved model is a folder with {WEIGHTS} and {CONFIG}.")
    told = atomic.read_sealed(path, most=LARGEST_CONFIG, links=True, required=False)  # caches of models are made of links
    if "self_sha256" not in told and not unverified:
        raise BadFileError(f"{path} has no sha256, so damage could not be detected: pass unverified=True to load it anyway.")
    size, digest = None, ""
    try:
        if "dmst" in told:
            config, size, digest = _own_config(path, told)
        else:
            config = _foreign_config(path, told)
    except TypeError as error:  # a keyword that no signature takes
        raise BadFileError(f"{path} is not a valid config: {error}.") from error
    model = VisionModel(config, device="meta")
    path, wanted = folder / WEIGHTS, model.state_dict()
    most = LONGEST_HEADER + 8 * sum(x.numel() for x in wanted.values())
    weights = from_bytes(path, atomic.read(path, size, sha256=digest, most=most, links=True))
    fit(weights, wanted, f"{path} for {config.name}", any_float=True)
    model.load_state_dict({name: x.to(device) for name, x in weights.items()}, strict=True, assign=True)
    names = told.get("label_names")  # timm's config may name fewer, or describe them otherwise
    if isinstance(names, list) and len(names) == config.num_classes and all(isinstance(name, str) for name in names):
        model.class_names = tuple(names)
    if isinstance(stated := told.get("pretrained_cfg"), dict):
        set_mean_std(model.pretrained_cfg, stated.get("mean"), stated.get("std"))
    return model.eval()


# --- writing ---------------------------------------------------------------------------------------------------------


def _describe(model: VisionModel, weights: bytes) -> dict[str, Any]:
    """What config.json says, but for the hash of itself."""
    config = model.config
    known = config.name in MODELS
    base = model_config(config.name).to_dict() if known else {}
    mine = config.to_dict()
    tied = {"global_pool": "readout", "operator_options": "operator"}  # `change` starts these anew with those
    return {
        "architecture": timm_name(config.name) if known else config.name,
        "num_classes": config.num_classes,
        "num_features": config.dim,
        "global_pool": config.global_pool,
        **({"label_names": list(model.class_names)} if model.class_names else {}),
        "model_args": {
            key: value
            for key, value in mine.items()
            if known
            and key != "num_classes"  # stated above: transformers would pass it to timm twice
            and any(mine[name] != base[name] for name in (key, tied.get(key, key)))
        },
        "pretrained_cfg": pretrained_cfg(config) | {key: list(model.pretrained_cfg[key]) for key in ("mean", "std")},
        "dmst": {
            "version": dmst.__version__,
            "config": mine,
            "files": {WEIGHTS: {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}},
        },
    }


# --- reading ---------------------------------------------------------------------------------------------------------


def _found(folder: Path) -> Path:
    """The folder; or the model before it, where an overwriting save was killed between its two renames."""
    kept = atomic.set_aside(folder)
    if kept and not folder.exists():
        warnings.warn(f"a save to {folder} was interrupted: loading the model that was there before, {kept[-1]}.", stacklevel=3)
        return kept[-1]
    inside = folder / "final"  # of a finished run
    return inside if inside.is_dir() and not (folder / CONFIG).exists() else folder


def _own_config(path: Path, told: dict[str, Any]) -> tuple[ModelConfig, int, str]:
    """What save_model wrote: the config, size and sha256 of the weights."""
    try:
        stated, written = told["dmst"]["files"][WEIGHTS], dict(told["dmst"]["config"])
        size, digest = int(stated["size"]), str(stated["sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadFileError(
            f"{path} was not written by save_model: size, sha256 and config are not as it states them ({error})."
        ) from error
    if unknown := sorted(set(written) - {each.name for each in fields(ModelConfig)}):
        version = told["dmst"].get("version")
        raise BadFileError(f"{path} was written by dmst {version} and says {unknown}, unknown to {dmst.__version__}.")
    if isinstance(written.get("operator"), str) and written["operator"] not in OPERATORS:
        raise BadFileError(
            f"{path}: the model was saved with operator {written['operator']!r}, which is not in dmst.OPERATORS. {REMEDY}"
        )
    return ModelConfig(**written), size, digest


def _foreign_config(path: Path, told: dict[str, Any]) -> ModelConfig:
    """What timm wrote."""
    args = told.get("model_args") or {}
    if not isinstance(told.get("architecture"), str) or not isinstance(args, dict) or "name" in args:
        raise BadFileError(f"{path} is no config of a model: it needs a text architecture, and options as model_args.")
    own = {key: told[key] for key in ("num_classes", "global_pool") if key in told}
    return model_config(told["architecture"], **own | args)


# --- tensors ---------------------------------------------------------------------------------------------------------


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file of copies: tensors may lie on any device, in any strides, and share memory."""
    return safetensors.torch.save({name: x.detach().to("cpu", copy=True).contiguous() for name, x in tensors.items()})


def from_bytes(path: Path, raw: bytes) -> dict[str, Tensor]:
    """What a safetensors file holds, by name; nothing in it is NaN or infinite."""
    try:
        if (length := int.from_bytes(raw[:8], "little")) > LONGEST_HEADER:
            raise ValueError(f"its header is said to have {length:,} bytes, and {LONGEST_HEADER:,} is the most")
        found = safetensors.torch.load(raw)
        bad = not_finite(found)  # a RuntimeError where a tensor has more axes than torch computes with
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise BadFileError(f"{path} is not a safetensors file ({str(error).partition(chr(10))[0]}).") from error
    if bad:
        raise BadFileError(f"{path}: {bad} holds NaN or infinity.")
    return found


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first tensor that holds NaN or infinity."""
    return next((name for name, x in tensors.items() if x.dtype in FLOATS and not torch.isfinite(x).all()), None)


def fit(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str, *, any_float: bool = False) -> None:
    """Exact names, shapes and dtypes, or BadFileError that says which differ. `any_float`: one floating dtype for all."""
    lists = (("missing", sorted(wanted.keys() - found.keys())), ("unknown", sorted(found.keys() - wanted.keys())))
    if told := [f"{word} {len(names)} ({', '.join(names[:3])}...)" for word, names in lists if names]:
        raise BadFileError(f"{what} does not fit: {'; '.join(told)}.")
    for name, x in wanted.items():
        there, here = found[name], x
        same_shape = there.shape == here.shape or (there.shape, here.shape) == ((), (1,))  # () in files of before 0.1.0
        same_dtype = there.dtype == here.dtype or (any_float and there.dtype in FLOATS and here.dtype in FLOATS)
        if not (same_shape and same_dtype):
            raise BadFileError(
                f"{what} does not fit: {name} is {there.dtype} of shape {tuple(there.shape)}, and {here.dtype} of shape "
                f"{tuple(here.shape)} is needed."
            )
    if len(kinds := {x.dtype for x in found.values() if x.is_floating_point()}) > 1 and any_float:
        raise BadFileError(f"{what} mixes {', '.join(sorted(map(str, kinds)))}: a model has one dtype.")
