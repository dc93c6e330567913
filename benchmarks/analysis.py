"""How long rates, certificates and theorem take, and how much memory, as the number of images grows.

python benchmarks/analysis.py --data-dir DIR [--model dmst_small] [--data imagenet-sample] [--images 250 1000] [--json FILE]

The network is untrained unless its name ships: neither time nor memory depends on its weights.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch

import dmst
from dmst import provenance
from dmst.analysis.certificates import certify
from dmst.analysis.rates import rates_at
from dmst.analysis.theorem import theorem
from dmst.engine.samples import sample
from dmst.models.shipped import SHIPPED

VERBS = {"rates": rates_at, "certify": certify, "theorem": theorem}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--data-dir", required=True)
    asked.add_argument("--model", default="dmst_small")
    asked.add_argument("--data", default="imagenet-sample")
    asked.add_argument("--split", default="sample")
    asked.add_argument("--images", type=int, nargs="+", default=[250, 1000])
    asked.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked.add_argument("--json", type=Path)
    told = asked.parse_args()
    device = torch.device(told.device)
    model = dmst.create_model(told.model, pretrained=told.model in SHIPPED).to(device).eval()
    lines = []
    for verb, look in VERBS.items():
        for count in told.images:
            images = sample(model, told.data, split=told.split, data_dir=told.data_dir, limit=count, device=device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            look(model, (batch for batch, _ in images))
            line = {"verb": verb, "images": images.count, "seconds": round(time.perf_counter() - began, 1)}
            line["process_MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            if device.type == "cuda":
                line["device_MiB"] = torch.cuda.max_memory_allocated() // 2**20
            lines.append(line)
            print(line, flush=True)
    about = {
        "model": told.model, "size": list(model.config.img_size), "data": told.data, "commit": provenance.commit(),
        "device": provenance.device_name(device), "versions": provenance.versions(),
    }  # fmt: skip
    if told.json:
        told.json.write_text(json.dumps({**about, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
