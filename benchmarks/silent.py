"""Forward time of DMSA on a GPU, every head or without the silent ones, by how many are silent. CUDA-graph replay, bfloat16.

    python benchmarks/silent.py --json FILE                                   the table: 8 shapes by 5 numbers of active heads
    python benchmarks/silent.py --sweep --shapes 64x1024 --active 4 2         which tiles are best there, one product at a time

Each image has its own active heads: a cap on scores that lie close together leaves just so many on. "floor" is the two
projections alone. A row is written as soon as it is measured; a row whose two outputs differ by more than 1 % has no ratio.
`--folds` says from how many tokens a channel on each sample has an output weight (plan.FOLDS, plan.FOLDS_BY_ENGINE); 0 is
always, 1000 never.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dmst import provenance, use_kernels
from dmst.bench import timing
from dmst.bench.parity import SETS
from dmst.kernels import plan, reference
from dmst.kernels.fused import skip
from dmst.kernels.plan import Product
from dmst.operators import DMSA

SHAPES = ("256x197", "64x1024", "16x4096", "4x16384")
TILES = (  # tokens, columns, depth, warps, stages
    Product(64, 64, 64, 4, 4),
    Product(64, 128, 64, 4, 3),
    Product(64, 128, 64, 4, 4),
    Product(128, 64, 64, 4, 4),
    Product(128, 64, 64, 8, 4),
    Product(128, 128, 32, 8, 4),
    Product(128, 128, 64, 4, 3),
    Product(128, 128, 64, 8, 3),
    Product(128, 128, 64, 8, 4),
    Product(128, 256, 64, 8, 3),
)
SHORTS = tuple(  # tokens (as many as there are), columns, out, depth, warps, stages
    plan.Short(256, columns, out, depth, warps, stages)
    for columns, out, depth, warps, stages in (
        (64, 128, 64, 8, 3), (64, 128, 64, 8, 2), (64, 64, 64, 8, 3), (64, 64, 64, 8, 2), (32, 64, 64, 8, 2),
        (32, 64, 64, 8, 3),
        (64, 128, 32, 8, 4), (128, 128, 64, 16, 3), (64, 128, 64, 16, 3), (128, 128, 64, 8, 2), (128, 128, 32, 16, 4),
        (64, 128, 128, 8, 2), (64, 64, 64, 4, 2), (32, 32, 64, 8, 2),
    )
)  # fmt: skip
BAR = 1e-2  # relative, between the two outputs: each is within 5e-3 of float64


def layer_of(dim: int, heads: int, active: int, mode: str, device: str) -> DMSA:
    torch.manual_seed(0)
    layer = DMSA(dim, heads, mode=mode, max_active_heads=active).to(device, torch.bfloat16).eval()
    assert layer.assign is not None
    with torch.no_grad():
        layer.assign.weight.mul_(0.1)
    return layer


def milliseconds(layer: nn.Module, tokens: list[Tensor], clock: str) -> tuple[float, Tensor]:
    timed = timing.TIMERS[tokens[0].device.type, clock](lambda turn: (layer(tokens[turn]),))
    return timed.median, timed.last[0]


def share_silent(layer: DMSA, z: Tensor) -> float:
    gate = reference.gate_of(reference.score(z, layer.weights(), layer.form, None), layer.form)[1]
    assert gate is not None
    return (gate == 0).float().mean().item()


def skip_ms(layer: DMSA, tokens: list[Tensor], clock: str) -> tuple[float, Tensor]:
    layer.skip_silent = True
    return milliseconds(layer, tokens, clock)


def compare(ask: argparse.Namespace, shape: str, dim: int) -> Iterator[dict[str, Any]]:
    """A row for each number of active heads."""
    b, n = map(int, shape.split("x"))
    tokens = [torch.randn(b, n, dim, device=ask.device, dtype=torch.bfloat16) for _ in range(SETS)]
    both = nn.Sequential(nn.Linear(dim, dim), nn.Linear(dim, dim)).to(tokens[0])
    floor, _ = milliseconds(both, tokens, ask.clock)
    for active in ask.active:
        layer = layer_of(dim, ask.heads, active, ask.mode, ask.device)
        try:
            dense, usual = milliseconds(layer, tokens, ask.clock)
            skipping, mine = skip_ms(layer, tokens, ask.clock)
        except Exception as error:  # one shape that is refused costs the others nothing
            print(f"{shape}, width {dim}, {active} active: {type(error).__name__}: {str(error)[:200]}", flush=True)
            skip._broken.clear()
            continue
        differ = ((mine.float() - usual.float()).norm() / usual.float().norm()).item()
        yield {
            "batch": b, "tokens": n, "dim": dim, "heads": ask.heads, "active": active,
            "silent": round(share_silent(layer, tokens[0][: min(b, 8)]), 4), "mode": ask.mode,
            "floor_ms": floor, "dense_ms": dense, "skipping_ms": skipping, "difference": differ,
            "speedup": dense / skipping if differ < BAR else None,
        }  # fmt: skip


def sweep(ask: argparse.Namespace, shape: str, dim: int) -> Iterator[dict[str, Any]]:
    """The first product's tiles with the second's as planned, then the second's with the best first."""
    plan.BY_ENGINE = math.inf  # whose products have no tiles to choose
    b, n = map(int, shape.split("x"))
    tokens = [torch.randn(b, n, dim, device=ask.device, dtype=torch.bfloat16) for _ in range(SETS)]
    layers = [layer_of(dim, ask.heads, active, ask.mode, ask.device) for active in ask.active]
    if plan.short(n, dim, torch.bfloat16) is not None:
        yield from sweep_short(ask, b, n, dim, layers, tokens)
        return
    first, second = plan.active(n, dim, torch.bfloat16)
    for product in ("first", "second"):
        best: tuple[float, Product] = (math.inf, first)
        for tile in ask.tiles:
            plan.ACTIVE = [(math.inf, math.inf, *((tile, second) if product == "first" else (first, tile)))]
            try:
                times = [skip_ms(layer, tokens, ask.clock)[0] for layer in layers]
            except Exception as error:  # a tile that the device has no room for
                print(f"  {product} {tuple(tile)}: {type(error).__name__} {str(error)[:200]}", flush=True)
                skip._broken.clear()
                continue
            best = min(best, (sum(times), tile))
            row = {"batch": b, "tokens": n, "dim": dim, "active": ask.active, "product": product, "tile": list(tile)}
            yield row | {"skipping_ms": times}
        first, second = (best[1], second) if product == "first" else (first, best[1])
    yield {"batch": b, "tokens": n, "dim": dim, "active": ask.active, "best": [list(first), list(second)]}


def sweep_short(
    ask: argparse.Namespace, b: int, n: int, dim: int, layers: list[DMSA], tokens: list[Tensor]
) -> Iterator[dict[str, Any]]:
    """The tiles of a program that has a whole sample."""
    for tile in SHORTS:
        plan.SHORT = [(n, tile)]
        try:
            times = [skip_ms(layer, tokens, ask.clock)[0] for layer in layers]
        except Exception as error:  # a tile that the device has no room for
            print(f"  whole {tuple(tile)}: {type(error).__name__} {str(error)[:200]}", flush=True)
            skip._broken.clear()
            continue
        row = {"batch": b, "tokens": n, "dim": dim, "active": ask.active, "product": "whole", "tile": list(tile)}
        yield row | {"skipping_ms": times}


def told(row: dict[str, Any]) -> str:
    where = f"{row['batch']:>4} x {row['tokens']:<6} d {row['dim']:<4}"
    if "best" in row:
        return f"{where} best: first {row['best'][0]}, second {row['best'][1]}"
    if "tile" in row:
        return f"{where} {row['product']:<6} {row['tile']!s:<24} " + "  ".join(f"{ms:.4f}" for ms in row["skipping_ms"])
    speedup = "differ" if row["speedup"] is None else f"{row['speedup']:.2f}"
    times = f"floor {row['floor_ms']:.4f}  dense {row['dense_ms']:.4f}  skipping {row['skipping_ms']:.4f}"
    return f"{where} {row['active']}/{row['heads']} on, {row['silent']:.0%} silent  {times}  x {speedup}"


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--shapes", nargs="+", default=SHAPES, help="samples x tokens")
    parse.add_argument("--dims", nargs="+", type=int, default=[384, 768])
    parse.add_argument("--active", nargs="+", type=int, default=[8, 6, 4, 2, 1])
    parse.add_argument("--heads", type=int, default=8)
    parse.add_argument("--mode", default="listing", choices=("listing", "equation", "proximal"))
    parse.add_argument("--folds", type=float)
    parse.add_argument("--sweep", action="store_true", help="over tiles, in place of the table")
    parse.add_argument("--tiles", help="for the sweep: a list of [tokens, columns, depth, warps, stages]")
    parse.add_argument("--json", type=Path, help="write the rows here too")
    ask = parse.parse_args()
    ask.device = "cuda" if torch.cuda.is_available() else "cpu"
    ask.clock = "graph" if ask.device == "cuda" else "eager"
    ask.tiles = [Product(*tile) for tile in json.loads(ask.tiles)] if ask.tiles else TILES
    if ask.folds is not None:
        plan.FOLDS = plan.FOLDS_BY_ENGINE = ask.folds
    warnings.filterwarnings("error", "The kernels that leave silent heads out")  # a time of the dense layer is none of theirs
    if ask.device == "cpu":
        print("No CUDA device here: these are times of the CPU, which leaves silent heads out by itself.")
    rows: list[dict[str, Any]] = []
    facts = {
        "folds": [plan.FOLDS, plan.FOLDS_BY_ENGINE],
        "commit": provenance.commit(),
        "device": torch.cuda.get_device_name() if ask.device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    begun = time.perf_counter()
    with torch.no_grad(), use_kernels("fused" if ask.device == "cuda" else "auto"):
        for shape in ask.shapes:
            for dim in ask.dims:
                for row in (sweep if ask.sweep else compare)(ask, shape, dim):
                    rows.append(row)
                    print(told(row), flush=True)
                    if ask.json:
                        ask.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
