"""Make a folder of dmst/weights from a trained network: half precision, measured as it ships.

    python -m dmst.engine.ship RUN --name dmst_digits --data digits [--data-dir DIR] [--out DIR]

Accuracy, calibration and the stored answers are those of the float16 weights, on a CPU in float32. The last line printed is the
entry of `SHIPPED` in dmst/models/shipped.py.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch

from dmst import whole
from dmst.calibration import BINS, calibration
from dmst.data import catalog
from dmst.data.loader import EvalStream
from dmst.data.sets import ImageSet
from dmst.engine import prepare
from dmst.errors import OptionError
from dmst.models import VisionModel, save_model
from dmst.models.files import CONFIG, WEIGHTS
from dmst.models.preprocessing import pretrained_cfg
from dmst.models.shipped import ANSWERS, CARD, FOLDER, digest, drawn


class Measured(NamedTuple):
    images: int
    top1: float
    calibration: float  # expected calibration error, 15 bins of equal width
    loss: float
    by_class: list[tuple[str, int, int]]  # name, right, of


@torch.no_grad()
def measure(model: VisionModel, image_set: ImageSet) -> Measured:
    stream = EvalStream(image_set, prepare.view_of(model), batch_size=min(256, len(image_set)))
    logits = torch.cat([model(batch.images)[batch.weight > 0] for batch in stream])
    labels = torch.from_numpy(image_set.labels)
    right = logits.argmax(1) == labels
    by_class = [(name, int(right[labels == i].sum()), int((labels == i).sum())) for i, name in enumerate(image_set.classes)]
    loss = torch.nn.functional.cross_entropy(logits.double(), labels).item()
    error, _ = calibration(logits.double().softmax(1).amax(1), right)
    return Measured(len(labels), right.double().mean().item(), error, loss, by_class)


def ship(source: str | Path, name: str, data: str, out: Path, *, data_dir: str | None = None, notes: Sequence[str] = ()) -> str:
    """Write out/<name>, whole or not at all; returns its entry of SHIPPED."""
    model = prepare.read_weights(source)
    image_set = catalog.open_set(data, "test", data_dir=data_dir)
    before, after = pretrained_cfg(model.config), pretrained_cfg(replace(model.config, name=name))
    model.config = replace(model.config, name=name)
    if (before["mean"], before["std"]) != (after["mean"], after["std"]):
        raise OptionError(f"under the name {name} images would be normalised otherwise than in training: choose another name.")
    model.class_names = model.class_names or image_set.classes
    with tempfile.TemporaryDirectory() as room:
        half = save_model(model.half(), Path(room) / name)
        files = {file: (half / file).read_bytes() for file in (WEIGHTS, CONFIG)}
        model = prepare.read_weights(half)
    images = drawn(model.config.in_chans, *model.config.img_size)  # type: ignore[misc]
    with torch.no_grad():
        stored = {"images": images, "logits": model(images)}
    told = card(model, image_set, measure(model, image_set), notes)
    files |= {ANSWERS: safetensors.torch.save(stored), CARD: told.encode()}
    return digest(whole.write_folder(out / name, files))


def card(model: VisionModel, image_set: ImageSet, found: Measured, notes: Sequence[str]) -> str:
    config = model.config
    rows, columns = config.img_size  # type: ignore[misc]
    count = sum(p.numel() for p in model.parameters())
    out = [
        f"# {config.name}", "",
        f"{config.operator} layers: dim {config.dim}, depth {config.depth}, {config.num_heads} heads, patches of "
        f"{config.patch_size} pixels, images of {rows} x {columns}; {count:,} parameters, float16.", "",
        *(line for note in notes for line in (note, "")),
        f"Measured on {image_set} ({found.images:,} images), on a CPU in float32: top-1 {found.top1:.2%}, expected calibration "
        f"error {found.calibration:.4f} ({BINS} bins), mean cross-entropy {found.loss:.4f}.", "",
        "| class | right | of | share |", "|---|---|---|---|",
        *(f"| {name} | {right} | {of} | {right / of:.1%} |" for name, right, of in found.by_class if of), "",
        f"It knows these {config.num_classes} classes and no others: whatever it is shown, it names one of them.",
        "Licence of the weights: Apache-2.0.", "",
    ]  # fmt: skip
    return "\n".join(out)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("source")
    asked.add_argument("--name", required=True)
    asked.add_argument("--data", required=True)
    asked.add_argument("--data-dir")
    asked.add_argument("--out", type=Path, default=FOLDER)
    asked.add_argument("--note", action="append", default=[], help="a paragraph of the card: the recipe, the data, the limits")
    told = asked.parse_args()
    found = ship(told.source, told.name, told.data, told.out, data_dir=told.data_dir, notes=told.note)
    print(f'    "{told.name}": "{found}",')


if __name__ == "__main__":
    main()
