"""How many of 10,000 test images the shipped networks read with all heads of all layers switched off.

    python benchmarks/heads_off.py --data-dir DIR [--json results/twins/heads-off.json]

The same images both times: `lost` are read with heads only, `won` without them only, p is of McNemar's exact test.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dmst.analysis.intervene import switched_off
from dmst.engine.prepare import read_weights
from dmst.engine.samples import Sample, sample
from dmst.models import VisionModel

NETWORKS = {"dmst_cifar10": "cifar10", "tost_cifar10": "cifar10", "vit_cifar10": "cifar10", "dmst_cifar100": "cifar100"}


@torch.no_grad()
def right(model: VisionModel, images: Sample, off: Mapping[int, Iterable[int]]) -> Tensor:
    """Of each image whether it is read correctly."""
    with switched_off(model, off):
        return torch.cat([model(batch).argmax(1) == labels for batch, labels in images])


def every_head(model: VisionModel) -> dict[int, range]:
    return {layer: range(model.config.num_heads) for layer in range(len(model.blocks))}


def mcnemar(lost: int, won: int) -> float:
    """How often a fair coin would part them at least as far."""
    n = lost + won
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(lost, won) + 1)) / 2**n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--json", type=Path)
    ask, found = parser.parse_args(), {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, data in NETWORKS.items():
        model = read_weights(name).to(device)
        images = sample(model, data, data_dir=ask.data_dir, limit=10_000, batch_size=500, device=device)
        with_heads, without = right(model, images, {}), right(model, images, every_head(model))
        lost, won = int((with_heads & ~without).sum()), int((without & ~with_heads).sum())
        counts = {"as it is": int(with_heads.sum()), "all heads off": int(without.sum()), "lost": lost, "won": won}
        found[name] = {"images": images.name, **counts, "p": mcnemar(lost, won)}
        print(name, found[name], flush=True)
    if ask.json:
        ask.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
