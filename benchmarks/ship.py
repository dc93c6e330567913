"""Make a folder of dmst/weights from a trained network: half precision, measured as it ships.

    python benchmarks/ship.py RUN --name dmst_digits --data digits [--data-dir DIR] [--out DIR] [--note TEXT ...]

Accuracy, calibration and the stored answers are those of the float16 weights, on a CPU in float32. The last line printed is the
entry of `SHIPPED` in dmst/models/shipped.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from dmst import atomic
from dmst.calibration import BINS, Measured, measured
from dmst.data import catalog
from dmst.data.loader import EvalStream
from dmst.data.sets import ImageSet
from dmst.engine import prepare
from dmst.models import VisionModel, save_model
from dmst.models.files import CONFIG, WEIGHTS
from dmst.models.shipped import ANSWERS, CARD, FOLDER, MEASURED, digest
from dmst.terminal import say


@torch.no_grad()
def measure(model: VisionModel, image_set: ImageSet) -> tuple[Measured, float]:
    """What it gets right, and the mean cross-entropy."""
    stream = EvalStream(image_set, prepare.view_of(model), batch_size=256)
    logits = torch.cat([model(batch.images) for batch in stream]).double()
    labels = torch.from_numpy(image_set.labels)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    sure, says = logits.softmax(1).max(1)
    in_top5 = (logits.topk(min(5, model.num_classes)).indices == labels[:, None]).any(1)
    return measured(str(image_set), model.num_classes, says, sure, labels, in_top5), loss


def ship(source: str | Path, name: str, data: str, out: Path, *, data_dir: str | None = None, notes: Sequence[str] = ()) -> str:
    """Write out/<name>, whole or not at all; returns its entry of SHIPPED."""
    model = prepare.read_weights(source)
    image_set = catalog.open_set(data, "test", data_dir=data_dir)
    model.config = replace(model.config, name=name)
    model.class_names = model.class_names or image_set.classes
    with tempfile.TemporaryDirectory() as room:
        half = save_model(model.half(), Path(room) / name)
        files = {file: (half / file).read_bytes() for file in (WEIGHTS, CONFIG)}
        model = prepare.read_weights(half)
    images = drawn(model.config.in_chans, *model.config.img_size)  # type: ignore[misc]
    with torch.no_grad():
        stored = {"images": images, "logits": model(images)}
    found, loss = measure(model, image_set)
    files |= {ANSWERS: safetensors.torch.save(stored), CARD: card(model, image_set, found, loss, notes).encode()}
    files[MEASURED] = json.dumps(found.to_dict()).encode()
    return digest(atomic.write_folder(out / name, files.items(), sum(map(len, files.values()))))


def drawn(channels: int, height: int, width: int, count: int = 8) -> Tensor:
    """Pictures by a formula, roughly of mean 0 and size 1 (count, channels, height, width): rings and stripes that turn."""
    y = torch.linspace(-1, 1, height, dtype=torch.float64)[:, None]
    x = torch.linspace(-1, 1, width, dtype=torch.float64)[None]
    found = []
    for i in range(count):
        for c in range(channels):
            turn = 0.7 * i + 2.1 * c
            stripes = torch.sin((2 + i) * (x * torch.cos(torch.tensor(turn)) + y * torch.sin(torch.tensor(turn))))
            rings = torch.cos((3 + c) * (x.square() + y.square()).sqrt() * (1 + i / 3))
            found.append(stripes + rings)
    return torch.stack(found).unflatten(0, (count, channels)).float()


def card(model: VisionModel, image_set: ImageSet, found: Measured, loss: float, notes: Sequence[str]) -> str:
    config = model.config
    right, of = found.confusion.diagonal().tolist(), found.confusion.sum(1).tolist()
    rows, columns = config.img_size  # type: ignore[misc]
    count = sum(p.numel() for p in model.parameters())
    out = [
        f"# {config.name}", "",
        f"{config.operator} layers: dim {config.dim}, depth {config.depth}, {config.num_heads} heads, patches of "
        f"{config.patch_size} pixels, images of {rows} x {columns}; {count:,} parameters, float16.", "",
        *(line for note in notes for line in (note, "")),
        f"Measured on {image_set} ({found.images:,} images), on a CPU in float32: top-1 {found.top1:.2%}, expected calibration "
        f"error {found.error:.4f} ({BINS} bins), mean cross-entropy {loss:.4f}.", "",
        "| class | right | of | share |", "|---|---|---|---|",
        *(f"| {name} | {a} | {b} | {a / b:.1%} |" for name, a, b in zip(image_set.classes, right, of, strict=True) if b), "",
        f"It knows these {config.num_classes} classes and no others: whatever it is shown, it names one of them.",
        "Licence of the weights: Apache-2.0.", "",
    ]  # fmt: skip
    return "\n".join(out)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("source")
    asked.add_argument("--name", required=True)
    asked.add_argument("--data", required=True)
    asked.add_argument("--data-dir")
    asked.add_argument("--out", type=Path, default=FOLDER)
    asked.add_argument("--note", action="append", default=[], help="a paragraph of the card: the recipe, the data, the limits")
    told = asked.parse_args()
    entry = ship(told.source, told.name, told.data, told.out, data_dir=told.data_dir, notes=told.note)
    say(f'    "{told.name}": "{entry}",')


if __name__ == "__main__":
    main()
