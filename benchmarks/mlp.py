"""An MLP in inference: hidden channels by one kernel (docs/kernels.md), beside product and GELU as torch.compile has them.

    python benchmarks/mlp.py [--shapes 256x197 64x1024] [--dims 384 192] [--json results/h200/mlp.json]

    hidden    gelu(z W1^T + b1) alone
    mlp       the whole, W2 gelu(W1 z) with both biases

each `plain` (by torch.compile, the kernel switched off) and `kernel`; CUDA-graph replay, bfloat16 tokens and weights, medians.
A row has a time only if it is as near to float64 as half a bit of the output allows.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmst import provenance, use_kernels
from dmst.bench import timing
from dmst.bench.measure import FELL_BACK
from dmst.kernels import hidden
from dmst.models.feedforward import Mlp
from dmst.models.zoo import model_config

SETS, BAR = 3, {"hidden": 4e-3, "mlp": 6e-3}


def made(dim: int) -> Mlp:
    torch.manual_seed(0)
    mlp = Mlp(model_config("vit_small", dim=dim, num_heads=dim // 64)).to("cuda", torch.bfloat16).eval()
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=mlp.fc1.in_features**-0.5)
    return mlp


def measure(call: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], tokens: list[Tensor], bar: float) -> float:
    """Milliseconds; an error where the last call is not near enough."""
    timed = timing.graph(lambda turn: (call(tokens[turn]),))
    right = exact(tokens[0].double())
    off = ((timed.last[0].double() - right).norm() / right.norm()).item()
    if not off < bar:
        raise SystemExit(f"off by {off:.1e}, and {bar:.1e} is allowed")
    return timed.median


def rows(b: int, n: int, dim: int) -> list[dict[str, Any]]:
    mlp, wide = made(dim), made(dim).double()
    tokens = [torch.randn(b, n, dim, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]
    with torch.no_grad():
        if not hidden.serves(tokens[0], mlp.fc1.weight):
            raise SystemExit(f"the kernel does not serve {b} x {n} tokens of {dim} channels here")
    found = []
    for what in ("hidden", "mlp"):
        call, exact = (mlp.enter, wide.enter) if what == "hidden" else (mlp, wide)
        row: dict[str, Any] = {"what": what, "B": b, "N": n, "dim": dim, "commit": provenance.commit()}
        for way, kernels in (("plain", "reference"), ("kernel", "auto")):
            torch._dynamo.reset()
            with use_kernels(kernels), torch.no_grad():
                row[f"{way}_ms"] = measure(torch.compile(call, dynamic=False), exact, tokens, BAR[what])
        found.append(row | {"times": row["plain_ms"] / row["kernel_ms"]})
        print(f"{b:>4} x {n:<6} d {dim:<4} {what:<7} plain {row['plain_ms']:.4f}  kernel {row['kernel_ms']:.4f}", flush=True)
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--shapes", nargs="+", default=["256x197", "64x1024"], help="samples x tokens")
    asked.add_argument("--dims", nargs="+", type=int, default=[384, 192])
    asked.add_argument("--json", type=Path)
    ask = asked.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/mlp.py needs a CUDA device.")
    facts = {"device": provenance.device_name(torch.device("cuda")), "versions": provenance.versions()}
    all_rows: list[dict[str, Any]] = []
    warnings.filterwarnings("error", FELL_BACK)
    for dim in ask.dims:
        for shape in ask.shapes:
            b, n = map(int, shape.split("x"))
            all_rows += rows(b, n, dim)
            if ask.json:
                ask.json.write_text(json.dumps({**facts, "rows": all_rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
