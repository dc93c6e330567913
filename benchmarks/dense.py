"""Patch features and a plain head learn the masks of Pets, from nothing, on a CPU. Which operator finds the animal?

    python benchmarks/dense.py --data-dir DIR [--only vit_cifar gmst_cifar] [--epochs 8] [--seeds 0] [--json results/dense.json]

One skeleton, the small one of the zoo (`NAME_cifar`) with six layers, at 64 px: 256 tokens. The head is one 1x1 convolution of
the features of all layers, side by side; its logits are resized to the image. Trunk and head learn together: AdamW, cosine,
flips and shifts. Classes are pet and background; pixels of the border are not counted. The score is the mean of their IoU over
all pixels of the test images, which are read once, at the end.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from dmst import provenance
from dmst.engine.samples import sample
from dmst.models import VisionModel, create_model

NETWORKS = ["vit_cifar", "gmst_cifar", "tost_cifar", "dmst_cifar"]
SIZE, DEPTH, BATCH, RATE, DECAY, SHIFT = 64, 6, 32, 1e-3, 0.05, 6
IGNORED = 255


class Segmenter(nn.Module):
    """Logits (b, classes, height, width) from the features of every layer."""

    def __init__(self, trunk: VisionModel, classes: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Conv2d(len(trunk.blocks) * trunk.config.dim, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.trunk.forward_intermediates(images, norm=True, intermediates_only=True)
        return F.interpolate(self.head(torch.cat(maps, 1)), images.shape[-2:], mode="bilinear")


def read(data_dir: str, split: str) -> tuple[Tensor, Tensor]:
    """Images (n, 3, SIZE, SIZE) and targets: 0 pet, 1 background, IGNORED at the border."""
    model = create_model("vit_cifar", img_size=SIZE)
    batches = list(sample(model, "pets", split=split, data_dir=data_dir, limit=10**6).masked())
    images, masks = (torch.cat(each) for each in zip(*batches, strict=True))
    return images, torch.where(masks == 3, IGNORED, masks.long() - 1)


def shaken(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each image mirrored or not, and moved by up to SHIFT pixels; what comes in is not counted."""
    images, targets = F.pad(images, (SHIFT,) * 4), F.pad(targets, (SHIFT,) * 4, value=IGNORED)
    flips, moves = (torch.rand(len(images)) < 0.5).tolist(), torch.randint(2 * SHIFT + 1, (len(images), 2)).tolist()
    cut = [(slice(y, y + SIZE), slice(x, x + SIZE)) for y, x in moves]
    pairs = [(images[i][(..., *at)], targets[i][at]) for i, at in enumerate(cut)]
    pairs = [(x.flip(-1), y.flip(-1)) if flip else (x, y) for (x, y), flip in zip(pairs, flips, strict=True)]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def iou(model: nn.Module, images: Tensor, targets: Tensor) -> list[float]:
    """Of each class, over all pixels."""
    model.eval()
    met, joined = torch.zeros(2), torch.zeros(2)
    with torch.inference_mode():
        for x, y in zip(images.split(64), targets.split(64), strict=True):
            found = model(x).argmax(1)
            for c in range(2):
                mine, theirs = (found == c) & (y != IGNORED), y == c
                met[c] += (mine & theirs).sum()
                joined[c] += (mine | theirs).sum()
    return (met / joined).tolist()


def learn(name: str, seed: int, epochs: int, train: tuple[Tensor, Tensor], limit: int) -> Segmenter:
    torch.manual_seed(seed)
    model = Segmenter(create_model(name, img_size=SIZE, depth=DEPTH, num_classes=0), 2)
    steps = epochs * (min(limit, len(train[0])) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * i / steps))
    )
    order = torch.cat([torch.randperm(len(train[0])) for _ in range(epochs + 1)])
    for rows in track(order[: steps * BATCH].split(BATCH), f"{name}, seed {seed}"):
        images, targets = shaken(train[0][rows], train[1][rows])
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), targets, ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--only", nargs="+", default=NETWORKS, metavar="NETWORK")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--limit", type=int, default=10**6, help="training images an epoch, to try it out")
    parser.add_argument("--json", type=Path, metavar="FILE")
    ask = parser.parse_args()
    train, test = read(ask.data_dir, "train"), read(ask.data_dir, "test")
    pet = (test[1] == 0).sum() / (test[1] != IGNORED).sum()
    rows: list[dict[str, Any]] = [{"network": "all background", "iou": [0.0, 1 - pet.item()]}]
    for seed in ask.seeds:
        for name in ask.only:
            model = learn(name, seed, ask.epochs, train, ask.limit)
            found = {"iou": iou(model, *test), "parameters": sum(x.numel() for x in model.parameters())}
            rows.append({"network": name, "seed": seed, **found})
            pet_iou, background = found["iou"]
            print(f"{name:12} seed {seed}  pet {pet_iou:.4f}  background {background:.4f}", flush=True)
            if ask.json:
                told = {"commit": provenance.commit(), "versions": provenance.versions(), "epochs": ask.epochs}
                ask.json.parent.mkdir(parents=True, exist_ok=True)
                lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
                ask.json.write_text(f'{{\n "facts": {json.dumps(told)},\n "rows": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
