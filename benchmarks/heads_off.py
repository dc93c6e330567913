"""How many of 10,000 test images the networks that ship read with all heads of all layers switched off, beside as they are.

python benchmarks/heads_off.py --data-dir DIR [--json results/twins/heads-off.json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from dmst.analysis.intervene import switched_off
from dmst.engine.prepare import read_weights
from dmst.engine.samples import Sample, sample
from dmst.models import VisionModel

NETWORKS = {"dmst_cifar10": "cifar10", "tost_cifar10": "cifar10", "vit_cifar10": "cifar10", "dmst_cifar100": "cifar100"}


@torch.no_grad()
def right(model: VisionModel, images: Sample, off: Mapping[int, Iterable[int]]) -> int:
    with switched_off(model, off):
        return sum(int((model(batch).argmax(1) == labels).sum()) for batch, labels in images)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--data-dir", required=True)
    asked.add_argument("--json", type=Path)
    told, found = asked.parse_args(), {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, data in NETWORKS.items():
        model = read_weights(name).to(device)
        images = sample(model, data, data_dir=told.data_dir, limit=10_000, batch_size=500, device=device)
        every = {layer: range(model.config.num_heads) for layer in range(len(model.blocks))}
        found[name] = {
            "images": images.name,
            "as it is": right(model, images, {}),
            "all heads off": right(model, images, every),
        }
        print(name, found[name], flush=True)
    if told.json:
        told.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
