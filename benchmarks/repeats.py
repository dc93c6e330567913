"""Ten thousand times the same layer on the same tokens, forward and backward: every result must have the bits of the first.

    python benchmarks/repeats.py [--repeats 10000] [--only NUMBER ...] [--json results/h200/repeats.json]

One case for each route and table choice of docs/kernels.md. A CUDA graph of one training step and its comparison with the
first results is replayed; the device counts the repeats in which some bit of the output or of any gradient differed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dmst
from dmst import provenance
from dmst.kernels import hidden, plan, registered
from dmst.kernels.fused import skip
from dmst.models.block import Block
from dmst.models.feedforward import Mlp
from dmst.models.zoo import model_config

# what, samples, tokens, dtype: the route
CASES: list[tuple[str, int, int, str]] = [
    ("dmsa", 256, 197, "bfloat16"),  # resident, scores by position
    ("dmsa", 64, 1024, "bfloat16"),  # an output weight a sample, scores by position
    ("dmsa", 16, 4096, "bfloat16"),  # the same, scores by tokens
    ("dmsa", 1, 65536, "bfloat16"),
    ("dmsa", 3, 1000, "bfloat16"),  # folded weights, the library's products
    ("dmsa", 16, 1500, "bfloat16"),  # split sweeps, the update apart
    ("dmsa", 64, 197, "float32"),
    ("dmsa", 4, 4096, "float32"),
    ("dmsa:proximal", 64, 1024, "bfloat16"),
    ("tssa", 64, 197, "bfloat16"),
    ("block", 256, 197, "float32"),  # the residual step, under autocast
    ("block", 64, 1024, "float32"),
    ("silent:2", 256, 197, "bfloat16"),  # two heads on, the others left out: forward alone
    ("silent:6", 256, 197, "bfloat16"),
    ("silent:2", 64, 1024, "bfloat16"),  # by the copy engine
    ("silent:4", 4, 16384, "bfloat16"),
    ("silent:2", 256, 1024, "bfloat16"),  # several runs a program
    ("silent:2", 16, 1000, "bfloat16"),  # in plain Triton
    ("mlp", 256, 197, "bfloat16"),  # GELU of the first product in one kernel: forward alone
]
DIM, HEADS = 384, 8


def made(what: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    if what == "block":
        return Block(model_config("dmst_small")).to("cuda", dtype)
    if what == "mlp":
        return Mlp(model_config("dmst_small")).to("cuda", dtype).requires_grad_(False)
    name, _, mode = what.partition(":")
    if name == "silent":
        layer = dmst.DMSA(DIM, HEADS, max_active_heads=int(mode)).to("cuda", dtype)
        layer.skip_silent = True
        return layer.requires_grad_(False)
    return dmst.operators.create(name, DIM, HEADS, **({"mode": mode} if mode else {})).to("cuda", dtype)


def repeat(what: str, b: int, n: int, dtype: torch.dtype, times: int) -> int:
    """In how many repeats something differed."""
    layer = made(what, dtype)
    call: Any = layer.attend if isinstance(layer, Block) else layer
    learns = what != "mlp" and not what.startswith("silent")
    z = torch.randn(b, n, DIM, device="cuda", dtype=dtype, requires_grad=learns)
    pull = torch.randn_like(z)
    parameters = [p for name, p in layer.named_parameters() if not name.startswith("feedforward")]

    def step() -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16, enabled=what == "block"), torch.set_grad_enabled(learns):
            out = call(z)
        if not learns:
            return (out,)
        return out.detach(), *torch.autograd.grad(out, (z, *parameters), pull.to(out.dtype))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            first = [x.clone() for x in step()]
    torch.cuda.current_stream().wait_stream(side)
    differed = torch.zeros((), device="cuda", dtype=torch.int64)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        pairs = zip(step(), first, strict=True)
        differed += torch.stack([(x != y).any() for x, y in pairs]).any()  # NaN differs from itself, and so it shows
    for _ in range(times):
        recorded.replay()
    return int(differed.item())


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--repeats", type=int, default=10_000)
    asked.add_argument("--only", nargs="+", type=int, default=range(len(CASES)), help="cases by number")
    asked.add_argument("--json", type=Path)
    ask = asked.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/repeats.py needs a CUDA device.")
    facts = {"device": provenance.device_name(torch.device("cuda")), "versions": provenance.versions()}
    facts |= {"commit": provenance.commit(), "steps in one": plan.STEPS}
    rows = []
    with dmst.use_kernels("fused"):
        for what, b, n, name in (CASES[i] for i in ask.only):
            begun = time.perf_counter()
            count = repeat(what, b, n, getattr(torch, name), ask.repeats)
            if registered._broken or skip._broken or hidden._broken:
                raise SystemExit(f"{what} was computed by plain torch: its kernel does not work here")
            rows.append({"what": what, "B": b, "N": n, "dtype": name, "repeats": ask.repeats, "differed": count})
            print(f"{rows[-1]} {time.perf_counter() - begun:.0f} s", flush=True)
            if ask.json:
                ask.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    raise SystemExit(1 if any(row["differed"] for row in rows) else 0)


if __name__ == "__main__":
    main()
