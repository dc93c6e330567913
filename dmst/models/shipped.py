"""Weights that ship inside the package: no download, no network.

    dmst/weights/<name>/model.safetensors      float16
                        config.json            as of every saved model (files.py)
                        card.md                data, recipe, accuracy by class, calibration, limits, licence
                        measured.json          confusion and calibration on the test images
                        answers.safetensors    images by a formula and the logits that these weights gave for them

`SHIPPED` holds one sha256 of weights and config: files that were exchanged together are refused too.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmst import atomic
from dmst.calibration import Measured
from dmst.errors import BadFileError, OptionError
from dmst.models.files import CONFIG, WEIGHTS, from_bytes, load_model
from dmst.models.vision import VisionModel
from dmst.operators.orthonormal import retract

FOLDER = Path(__file__).parents[1] / "weights"
CARD, ANSWERS, MEASURED = "card.md", "answers.safetensors", "measured.json"
SHIPPED = {
    "dmst_cifar10": "6a3d891eeb850ed3292bb16a3ad1c92c0ab84be2526ea89d5397ef600b8266e6",
    "dmst_cifar100": "bbf1c99eeec883a012eb650210f15331b921e20e764d620c0e0848246bcda6bd",
    "dmst_digits": "175c1b33901cdd9a73a27ddcdf580aee67e49e177efad0e323175df0ad5997df",
    "tost_cifar10": "44440f88ad15a9d75fe948dd6a35d5fd0bf4e8fde230dd5f52edbdcda2e5dbea",
    "vit_cifar10": "6321a9c027612996ac514a85c21d449a48f4e83223e75d083f8c071da8fd8c86",
}
NEAR = 1e-3  # of stored logits: other machines add in another order


def pretrained(name: str, device: Any = None, dtype: Any = None) -> VisionModel:
    """The network `name` with the weights that ship, in float32 if nothing else is asked for, in evaluation mode."""
    _known(name)
    if digest(FOLDER / name) != SHIPPED[name]:
        raise BadFileError(f"{FOLDER / name} does not hold the files that were released: install the package again.")
    model = load_model(FOLDER / name).to(device, torch.float32 if dtype is None else dtype)
    retract(model)  # once, not in every call
    return model


def _known(name: str) -> None:
    if name not in SHIPPED:
        raise OptionError(f"no weights ship for {name}. Those that do: {', '.join(SHIPPED)}. For others: load_model(folder).")


def digest(folder: Path) -> str:
    """One sha256 of the weights and the config."""
    return hashlib.sha256(atomic.read(folder / WEIGHTS) + atomic.read(folder / CONFIG)).hexdigest()


def verify(name: str) -> float:
    """How far this machine's logits are from the stored ones; an error where that is too far."""
    stored = answers(name)
    with torch.no_grad():
        logits = pretrained(name)(stored["images"])
    apart = (logits - stored["logits"]).abs().max().item()
    if not apart <= NEAR:
        raise BadFileError(f"{name} answers {apart:.1e} off what was stored (at most {NEAR:g}): run `dmst doctor`.")
    return apart


def answers(name: str) -> dict[str, Tensor]:
    path = FOLDER / name / ANSWERS
    return from_bytes(path, atomic.read(path))


def card(name: str) -> str:
    _known(name)
    return (FOLDER / name / CARD).read_text(encoding="utf-8")


def measured(name: str) -> str:
    """The line of its card that says so."""
    return next(line for line in card(name).splitlines() if line.startswith("Measured on "))


def measurement(name: str) -> Measured:
    """What it got right on its test images, when it was released."""
    _known(name)
    return Measured.from_dict(json.loads((FOLDER / name / MEASURED).read_bytes()))
