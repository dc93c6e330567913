"""A block's first line, z + scale * operator(norm z), beside the least that it can cost: z + out(subspace(norm z)), compiled.

    python benchmarks/block.py [--shapes 256x197 64x1024] [--streams float32 bfloat16] [--json results/h200/block.json]

    floor       LayerNorm, the two projections and the addition, by torch.compile
    parts       norm, fused operator, LayerScale and addition one by one        parts compiled    the same by torch.compile
    step        all of it as one operator (docs/kernels.md, the residual step)  step compiled

CUDA-graph replay, forward alone and with backward, medians. `float32` is a stream of float32 tokens under bfloat16 autocast, as
networks train; `bfloat16` has tokens and weights in it. A row has a time only if its output and every gradient hold the bars
against float64.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dmst
from dmst import provenance
from dmst.bench import parity, timing
from dmst.bench.measure import FELL_BACK
from dmst.kernels import plan
from dmst.models.block import Block
from dmst.models.zoo import model_config

SHAPES = ("256x197", "64x1024", "16x4096", "4x16384", "1x65536")
STREAMS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WAYS = {"parts": (False, False), "parts compiled": (False, True), "step": (True, False), "step compiled": (True, True)}


class Floor(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.subspace, self.out = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, z: Tensor) -> Tensor:
        return z + self.out(self.subspace(self.norm(z)))


class Line(nn.Module):
    """The first line of a block of DMST-S."""

    def __init__(self) -> None:
        super().__init__()
        block = Block(model_config("dmst_small", layer_scale=0.1, drop_path_rate=0.0))
        self.norm, self.operator, self.residual = block.norm, block.operator, block.residual

    attend = Block.attend

    def forward(self, z: Tensor) -> Tensor:
        return self.attend(z)  # type: ignore[arg-type]


def filled(module: nn.Module) -> nn.Module:
    """Weights of nn.Linear's size, so that every head is on; norms and scales that differ from channel to channel."""
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or "scale" in name:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=chance)).add_(0.01)
            else:
                parameter.uniform_(-(parameter.shape[-1] ** -0.5), parameter.shape[-1] ** -0.5, generator=chance)
    return module


def under(call: Callable[[Tensor], Tensor], stream: torch.dtype) -> Callable[[Tensor], Tensor]:
    def run(z: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=stream == torch.float32):
            return call(z)

    return run


def measure(made: nn.Module, compiled: bool, stream: torch.dtype, inputs: parity.Inputs, judged: bool) -> dict[str, Any]:
    """Times of one way, and how far the output and every gradient are from float64."""
    torch._dynamo.reset()
    call = under(torch.compile(made, dynamic=False) if compiled else made, stream)  # type: ignore[arg-type]
    parameters = list(made.parameters())
    forward = timing.graph(lambda turn: parity.forward(call, inputs[turn][0]))
    both = timing.graph(lambda turn: parity.train(call, parameters, *inputs[turn]))
    row: dict[str, Any] = {"forward_ms": forward.median, "train_ms": both.median}
    row["peak_mb"] = timing.peak(lambda turn: parity.train(call, parameters, *inputs[turn]))
    if judged:
        names = ["out", "z", *(name for name, _ in made.named_parameters())]
        exact = parity.truth(copy.deepcopy(made).double(), *inputs[0])
        found = [dict(zip(names, each, strict=False)) for each in (forward.last, both.last)]
        verdict = parity.judge(found[0], exact, parity.BARS[torch.bfloat16])
        verdict = verdict.and_then(parity.judge(found[1], exact, parity.BARS[torch.bfloat16]))
        row |= {"error": verdict.error, "failure": verdict.problem or None}
    return row


def shape_rows(shape: str, name: str, commit: str) -> list[dict[str, Any]]:
    (b, n), stream, dim = map(int, shape.split("x")), STREAMS[name], 384
    inputs = parity.draw(b, n, dim, torch.device("cuda"), stream)
    plan.STEPS = False
    floor = measure(filled(Floor(dim)).to("cuda", stream), True, stream, inputs, judged=False)
    rows = [{"what": "floor", "B": b, "N": n, "stream": name, "commit": commit, **floor}]
    for what, (step, compiled) in WAYS.items():
        plan.STEPS = step
        with warnings.catch_warnings():
            warnings.filterwarnings("error", FELL_BACK)
            row = measure(filled(Line()).to("cuda", stream), compiled, stream, inputs, judged=True)
        for key in ("forward", "train"):
            row[f"{key}_x_floor"] = row[f"{key}_ms"] / floor[f"{key}_ms"]
        if row["failure"]:
            row |= dict.fromkeys(key for key in row if key.startswith(("forward", "train", "peak")))
        rows.append({"what": what, "B": b, "N": n, "stream": name, "commit": commit, **row})
    return rows


def told(row: dict[str, Any]) -> str:
    where = f"{row['B']:>4} x {row['N']:<6} {row['stream']:<9} {row['what']:<15}"
    if row.get("failure"):
        return f"{where} {row['failure']}"
    ratios = f"x {row['forward_x_floor']:.3f} / {row['train_x_floor']:.3f}" if "forward_x_floor" in row else ""
    return f"{where} {row['forward_ms']:.4f} / {row['train_ms']:.4f} ms, peak {row['peak_mb']:.0f} MiB  {ratios}"


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--shapes", nargs="+", default=SHAPES, help="samples x tokens")
    asked.add_argument("--streams", nargs="+", default=list(STREAMS), choices=list(STREAMS))
    asked.add_argument("--json", type=Path)
    ask = asked.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/block.py needs a CUDA device.")
    facts = {"device": provenance.device_name(torch.device("cuda")), "versions": provenance.versions(), "dim": 384, "heads": 8}
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    with dmst.use_kernels("auto"):
        for name in ask.streams:
            for shape in ask.shapes:
                for row in shape_rows(shape, name, provenance.commit()):
                    rows.append(row)
                    print(told(row), flush=True)
                if ask.json:
                    ask.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
