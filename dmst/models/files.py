"""A saved model: a folder with two files, whole or refused. No pickle, neither written nor read.

    model.safetensors    weights and buffers, by name
    config.json          what timm reads (architecture, num_classes, label_names where they are known, model_args,
                         pretrained_cfg), and under "dmst" the whole ModelConfig, size and sha256 of the weights; last of
                         all `self_sha256`, which covers the rest

The folder loads with `dmst.load_model(folder)` and, after `import dmst.integrations.timm`, with timm's
`create_model("local-dir:folder", pretrained=True)`. Loading checks bytes, hashes, names, shapes and dtypes, and only then
builds a model. A flipped bit inside safetensors' data is invisible to safetensors itself: hence the hashes.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

import dmst
from dmst import whole
from dmst.errors import BadFileError, OptionError, shown
from dmst.models.config import ModelConfig
from dmst.models.preprocessing import pretrained_cfg
from dmst.models.vision import VisionModel
from dmst.models.zoo import MODELS, model_config, timm_name
from dmst.operators import OPERATORS
from dmst.operators.orthonormal import OrthonormalLinear, is_orthonormal, orthonormal_rows
from dmst.operators.table import REMEDY

WEIGHTS, CONFIG = "model.safetensors", "config.json"
LARGEST_CONFIG = 2**24  # timm's can hold the names of 21,841 classes
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
    if any(x.is_meta for x in model.state_dict().values()):
        raise OptionError(
            "the model is on the meta device and has no values to save: model.to_empty(...), then load or init_weights."
        )
    names = model.class_names
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise OptionError(f"class_names is {shown(names)}: it must be a tuple of names, one per class, or ().")
    if names and len(names) != model.config.num_classes:
        raise OptionError(f"class_names has {len(names)} names for {model.config.num_classes} classes: set it again.")
    _plain(model.config)
    tensors = _tensors_of(model)
    try:
        _fit(Path("the model"), tensors, VisionModel(model.config, device="meta"))
    except BadFileError as error:  # what could not be loaded is not written
        raise OptionError(
            f"not saved, because it could not be loaded again: {error} (To change the classes: model.reset_classifier.)"
        ) from error
    weights = safetensors.torch.save(tensors)
    return whole.write_folder(folder, {WEIGHTS: weights, CONFIG: whole.sealed(_describe(model, weights))})


def load_model(
    folder: str | Path, *, num_classes: int | None = None, unverified: bool = False, device: Any = None
) -> VisionModel:
    """The model saved in `folder`, or in final/ of a finished run, in evaluation mode.

    `num_classes` asks for a count: another one is refused, `model.reset_classifier` changes it afterwards. `unverified` admits
    a folder of the same form without hashes, such as timm's `save_for_hf(..., safe_serialization=True)` writes.
    """
    folder = _found(Path(folder))
    told = _read_config(folder / CONFIG)
    raw = _read(folder / WEIGHTS, _stated(folder, told)[0] if "dmst" in told else None)
    try:
        config = _verified_config(folder, told, raw) if "dmst" in told else _foreign_config(folder, told, unverified)
    except TypeError as error:  # a keyword that no signature takes
        raise BadFileError(f"{folder / CONFIG} is not a valid config: {error}.") from error
    weights = tensors_from(folder / WEIGHTS, raw)
    _fit_classes(folder, config, num_classes)
    _fit_depth(folder / WEIGHTS, config, weights)
    try:
        model = VisionModel(config, device="meta")
    except RuntimeError as error:  # more elements than 64 bits can count
        raise BadFileError(f"{folder / CONFIG} describes a network that cannot be built ({_line(error)}).") from error
    _fit(folder / WEIGHTS, weights, model)
    model.load_state_dict({name: x.to(device) for name, x in weights.items()}, strict=True, assign=True)
    model.class_names = _class_names(folder, told, config.num_classes)
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
            if known and any(mine[name] != base[name] for name in (key, tied.get(key, key)))
        },
        "pretrained_cfg": pretrained_cfg(config),
        "dmst": {
            "version": dmst.__version__,
            "config": mine,
            "files": {WEIGHTS: {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}},
        },
    }


def _tensors_of(model: VisionModel) -> dict[str, Tensor]:
    """Copies on the CPU, shared ones apart; orthonormal matrices retracted, as the model uses them."""
    found = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, OrthonormalLinear) and not is_orthonormal(module.weight):
            found[f"{name}.weight"] = orthonormal_rows(module.weight)
    return {name: x.detach().to("cpu", copy=True).contiguous() for name, x in found.items()}


def _plain(config: ModelConfig) -> None:
    """Refuse options that JSON would bring back changed."""
    options = dict(config.operator_options)
    try:
        same = json.loads(json.dumps(options, allow_nan=False)) == options
    except (TypeError, ValueError):
        same = False
    if not same:
        raise OptionError(
            f"operator_options are {options!r}: a saved model can store only text, numbers, lists, and dicts with text keys."
        )


# --- reading ---------------------------------------------------------------------------------------------------------


def _found(folder: Path) -> Path:
    """The folder; or the model before it, where an overwriting save was killed between its two renames."""
    kept = whole.set_aside(folder)
    if kept and not folder.exists():
        warnings.warn(f"a save to {folder} was interrupted: loading the model that was there before, {kept[-1]}.", stacklevel=3)
        return kept[-1]
    inside = folder / "final"  # of a finished run
    return inside if inside.is_dir() and not (folder / CONFIG).exists() else folder


def _read(path: Path, most: int | None) -> bytes:
    """The bytes of a file, or of what a link leads to: the caches that models come from are made of links."""
    try:
        return whole.read(path, most=most, links=True)
    except BadFileError:
        raise
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        raise BadFileError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}): "
            f"a saved model is a folder with {WEIGHTS} and {CONFIG}."
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    raw = _read(path, LARGEST_CONFIG)
    told = whole.json_object(path, raw, "the config of a model")
    if "self_sha256" in told or "dmst" in told:
        whole.check_seal(path, told, raw)
    return told


def _stated(folder: Path, told: dict[str, Any]) -> tuple[int, Any, dict[str, Any]]:
    """Size and sha256 of the weights, and the config, as they are stated."""
    try:
        stated, written = told["dmst"]["files"][WEIGHTS], told["dmst"]["config"]
        size, digest = stated["size"], stated["sha256"]
    except (KeyError, TypeError) as error:
        raise BadFileError(f"{folder / CONFIG} has no entry {error}: it was not written by save_model.") from error
    if type(size) is not int or not isinstance(written, dict):
        raise BadFileError(f"{folder / CONFIG} has no config or no size: it was not written by save_model.")
    return size, digest, written


def _verified_config(folder: Path, told: dict[str, Any], raw: bytes) -> ModelConfig:
    size, digest, written = _stated(folder, told)
    if len(raw) != size:
        raise BadFileError(f"{folder / WEIGHTS} is damaged: {len(raw):,} bytes instead of {size:,}. Copy it again.")
    if hashlib.sha256(raw).hexdigest() != digest:
        raise BadFileError(f"{folder / WEIGHTS} is damaged: its sha256 is not the one in {CONFIG}. Copy it again.")
    unknown = set(written) - {f.name for f in fields(ModelConfig)}
    if unknown:
        version = told["dmst"].get("version")
        raise BadFileError(
            f"{folder / CONFIG} was written by dmst {version} and says {sorted(unknown)}, unknown to {dmst.__version__}."
        )
    if isinstance(written.get("operator"), str) and written["operator"] not in OPERATORS:
        raise BadFileError(
            f"{folder / CONFIG}: the model was saved with operator {written['operator']!r}, which is not in dmst.OPERATORS. "
            f"{REMEDY}"
        )
    return ModelConfig(**written)


def _class_names(folder: Path, told: dict[str, Any], classes: int) -> tuple[str, ...]:
    names = told.get("label_names")
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) != classes:
        if "dmst" not in told:  # timm's may name fewer or describe them otherwise: then there are none
            return ()
        raise BadFileError(f"{folder / CONFIG}: label_names must be {classes} names, one per class.")
    return tuple(names)


def _foreign_config(folder: Path, told: dict[str, Any], unverified: bool) -> ModelConfig:
    if not unverified:
        raise BadFileError(
            f"{folder / CONFIG} has no sha256, so damage could not be detected: pass unverified=True to load it anyway."
        )
    if not isinstance(told.get("architecture"), str):
        raise BadFileError(f"{folder / CONFIG} names no architecture.")
    args = told.get("model_args") or {}
    if not isinstance(args, dict) or "name" in args:
        raise BadFileError(f"{folder / CONFIG}: model_args is {args!r}, not options of {told['architecture']}.")
    args = dict(args)
    for key in ("num_classes", "global_pool"):
        if key in told:
            args.setdefault(key, told[key])
    return model_config(told["architecture"], **args)


def tensors_from(path: Path, raw: bytes) -> dict[str, Tensor]:
    """What a safetensors file holds, by name."""
    try:
        return safetensors.torch.load(raw)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise BadFileError(f"{path} is not a safetensors file ({_line(error)}).") from error


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]  # torch adds a stack of C++


def _fit_classes(folder: Path, config: ModelConfig, asked: int | None) -> None:
    if asked is not None and asked != config.num_classes:
        raise OptionError(
            f"num_classes is {asked}, and the weights in {folder} have {config.num_classes}: "
            f"load them without it, then model.reset_classifier({asked})."
        )


def _fit_depth(path: Path, config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """First of all, so that no network of a million blocks is built to find that the weights are of twelve."""
    depth = max(config.depth, config.readout_depth if config.readout == "class_attention" else 0)
    if depth > max(len(weights), 100):  # so many are made in no time
        raise BadFileError(f"{path} does not hold the weights of {config.name}: {len(weights)} tensors for {depth} blocks.")


def _fit(path: Path, weights: dict[str, Tensor], model: VisionModel) -> None:
    """Exact names, shapes and one floating dtype, or an error that says which differs."""
    wanted = model.state_dict()
    missing, extra = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    if missing or extra:
        told = [
            f"{what} {len(names)} ({', '.join(names[:3])}...)"
            for what, names in (("missing", missing), ("unknown", extra))
            if names
        ]
        raise BadFileError(f"{path} does not hold the weights of {model.config.name}: {'; '.join(told)}.")
    for name, x in weights.items():
        if x.shape != wanted[name].shape:
            raise BadFileError(
                f"{path}: {name} has shape {tuple(x.shape)}, and {model.config.name} needs {tuple(wanted[name].shape)}."
            )
        if x.dtype != wanted[name].dtype and not (x.dtype in FLOATS and wanted[name].is_floating_point()):
            raise BadFileError(f"{path}: {name} is {x.dtype}, and {model.config.name} needs {wanted[name].dtype}.")
    if len(kinds := {x.dtype for x in weights.values() if x.is_floating_point()}) > 1:
        raise BadFileError(f"{path} mixes {', '.join(sorted(str(kind) for kind in kinds))}: a model has one dtype.")
    if bad := [name for name, x in weights.items() if x.is_floating_point() and not torch.isfinite(x).all()]:
        raise BadFileError(f"{path}: {bad[0]} holds NaN or infinity.")
