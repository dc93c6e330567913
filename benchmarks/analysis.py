"""How long rates, certificates and theorem take, and how much memory, as the number of images grows.

    python benchmarks/analysis.py --data-dir DIR [--model dmst_small] [--data cifar10] [--images 250 1000] [--json FILE]

The network is untrained unless its name ships: neither time nor memory depends on its weights.
"""

from __future__ import annotations

import resource
import time

import measure
import torch

import dmst
from dmst.analysis.certificates import certify
from dmst.analysis.rates import rates_at
from dmst.analysis.theorem import theorem
from dmst.engine.samples import sample
from dmst.models.shipped import SHIPPED

VERBS = {"rates": rates_at, "certify": certify, "theorem": theorem}


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--model", default="dmst_small")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--split", default="test")
    parser.add_argument("--images", type=int, nargs="+", default=[250, 1000])
    ask = parser.parse_args()
    device, rows = measure.device_here(), measure.Rows("analysis", ask, ("verb", "images"))
    rows.facts |= {"model": ask.model, "data": ask.data}
    model = dmst.create_model(ask.model, pretrained=ask.model in SHIPPED).to(device).eval()
    for verb, look in VERBS.items():
        for count in ask.images:
            images = sample(model, ask.data, split=ask.split, data_dir=ask.data_dir, limit=count, device=device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            look(model, (batch for batch, _ in images))
            row = {"verb": verb, "images": images.count, "seconds": time.perf_counter() - began}
            row["process_MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            if device.type == "cuda":
                row["device_MiB"] = torch.cuda.max_memory_allocated() // 2**20
            rows.add(row)
    rows.finish()


if __name__ == "__main__":
    main()
