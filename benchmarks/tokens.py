"""How time and memory grow with the tokens of one sample, 65,536 to 1,048,576, and a whole network on one huge picture.

    python benchmarks/tokens.py [--json results/h200/tokens.json] [--dim 384] [--most 1048576] [--pixels 4096]

A CUDA device: graph replay of forward, and of forward with backward, bfloat16, medians (dmst.bench.timing). `per_token` is the
time of a token relative to the first row's, 1 where cost is linear; `more_ms` what 65,536 tokens more than in the row before
took each time, which leaves out what a layer costs at any length. The network: dmst_small without gradients, bf16 autocast.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import dmst
from dmst import provenance
from dmst.bench import timing
from dmst.bench.parity import SETS

FIRST = 65_536


def layer_rows(dim: int, most: int) -> list[dict[str, Any]]:
    layer = dmst.DMSA(dim, 8, device="cuda", dtype=torch.bfloat16)
    parameters = list(layer.parameters())
    rows: list[dict[str, Any]] = []
    n = FIRST
    while n <= most:
        sets = [torch.randn(1, n, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(SETS)]
        pull = torch.randn(1, n, dim, device="cuda", dtype=torch.bfloat16)

        def infer(turn: int, sets: list[torch.Tensor] = sets) -> timing.Results:
            with torch.no_grad():
                return (layer(sets[turn]),)

        def train(turn: int, sets: list[torch.Tensor] = sets, pull: torch.Tensor = pull) -> timing.Results:
            return torch.autograd.grad(layer(sets[turn]), [sets[turn], *parameters], pull)

        row = {"tokens": n, "forward_ms": timing.graph(infer).median, "train_ms": timing.graph(train).median}
        row["peak_mb"] = timing.peak(train)
        row["finite"] = all(bool(torch.isfinite(x).all()) for x in train(0))
        for what in ("forward", "train"):
            row[f"{what}_per_token"] = row[f"{what}_ms"] / n / ((rows or [row])[0][f"{what}_ms"] / FIRST)
            if rows:
                more = (n - rows[-1]["tokens"]) / FIRST
                row[f"{what}_more_ms"] = (row[f"{what}_ms"] - rows[-1][f"{what}_ms"]) / more
        rows.append(row)
        print(row, flush=True)
        n *= 2
    return rows


@torch.no_grad()
def picture_row(pixels: int) -> dict[str, Any]:
    model = dmst.create_model("dmst_small", img_size=pixels).cuda().eval()
    image = torch.randn(1, 3, pixels, pixels, device="cuda")

    def look(turn: int) -> timing.Results:
        with torch.autocast("cuda", torch.bfloat16):
            return (model(image),)

    timed = timing.eager(look)
    row = {"model": "dmst_small", "pixels": pixels, "tokens": (pixels // 16) ** 2, "ms": timed.median}
    row |= {"peak_mb": timing.peak(look), "finite": bool(torch.isfinite(timed.last[0]).all())}
    print(row, flush=True)
    return row


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--json", type=Path)
    asked.add_argument("--dim", type=int, default=384)
    asked.add_argument("--most", type=int, default=1_048_576)
    asked.add_argument("--pixels", type=int, default=4096)
    told = asked.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/tokens.py needs a CUDA device.")
    found: dict[str, Any] = {"device": provenance.device_name(torch.device("cuda")), "commit": provenance.commit()}
    found |= {"versions": provenance.versions(), "dim": told.dim, "dtype": "bfloat16"}
    for key, rows in (("layer", lambda: layer_rows(told.dim, told.most)), ("network", lambda: [picture_row(told.pixels)])):
        found[key] = rows()
        if told.json:
            told.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
