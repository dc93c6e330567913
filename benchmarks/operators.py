"""Time and kept memory of one layer on the CPU, ours beside the published ones, in one run.

    python benchmarks/operators.py [--batch 8 --tokens 196 --dim 384 --heads 8 --rounds 100] [--json FILE] [--readme FILE]

"floor" is the two projections alone, out(subspace(z)): the least a layer of this kind can cost. Every round times each layer
once, in a new random order, and the median over rounds is taken, so that a slow moment of the machine falls on all alike.
"kept" counts the elements that autograd holds between forward and backward, parameters left out, input included,
in units of b n d. Milliseconds belong to one machine and one moment; the ratios to the floor of the same run are what counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dmst.bench.published import AttentionDMSA, AttentionMHSA, AttentionTSSA
from dmst.operators import DMSA, MHSA, TSSA

BEGIN, END = "<!-- begin results/cpu/operators.json -->", "<!-- end results/cpu/operators.json -->"


def markdown(rows: list[dict]) -> str:
    """The rows as the README shows them."""
    lines = ["| layer | forward | forward + backward | kept |", "|---|---|---|---|"]
    for row in rows:
        cells = ("" if row[key] is None else f"{row[key]:.2f}" for key in ("forward", "train", "kept"))
        lines.append(f"| {row['what']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def kept_elements(layer: nn.Module, z: Tensor) -> int:
    """Elements of distinct storages that one forward leaves for its backward."""
    own = {p.untyped_storage().data_ptr() for p in (*layer.parameters(), *layer.buffers())}
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        held = layer(z)
    del held
    return sum(seen.values())


def silence(layer: DMSA, heads: int) -> DMSA:
    """Close the gate on the first `heads` for every input: their membership bias falls far below the others'."""
    assert layer.assign is not None and layer.assign.bias is not None
    with torch.no_grad():
        layer.assign.bias[:heads] = -5.0
    return layer


def medians(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds, the median over rounds in which every case runs once in a random order."""
    order = list(cases)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in track(range(-3, rounds), description="timing", transient=True):
        random.shuffle(order)
        for name in order:
            start = time.perf_counter()
            cases[name]()
            if round_ >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 8), ("tokens", 196), ("dim", 384), ("heads", 8), ("rounds", 100)):
        parse.add_argument(f"--{name}", type=int, default=default)
    parse.add_argument("--json", type=Path, help="write the rows here too")
    parse.add_argument("--readme", type=Path, help="and as a table into this file, between its marks")
    ask = parse.parse_args()
    random.seed(0)
    torch.manual_seed(0)

    layers: dict[str, nn.Module] = {
        "floor: two projections": nn.Sequential(nn.Linear(ask.dim, ask.dim), nn.Linear(ask.dim, ask.dim)),
        "DMSA listing": DMSA(ask.dim, ask.heads),
        "DMSA equation": DMSA(ask.dim, ask.heads, mode="equation"),
        "TSSA": TSSA(ask.dim, ask.heads),
        "MHSA": MHSA(ask.dim, ask.heads),
        "listing as printed": AttentionDMSA(ask.dim, ask.heads, qkv_bias=True),
        "TSSA as published": AttentionTSSA(ask.dim, ask.heads, qkv_bias=True),
        "MHSA as published": AttentionMHSA(ask.dim, ask.heads, qkv_bias=True),
        "DMSA, no head silent": DMSA(ask.dim, ask.heads, membership_bias=True),
        "DMSA, half silent, the same for all": silence(DMSA(ask.dim, ask.heads, membership_bias=True), ask.heads // 2),
        "DMSA, half silent, each image its own": DMSA(ask.dim, ask.heads, max_active_heads=max(ask.heads // 2, 1)),
        "DMSA, 3 of 4 silent, the same for all": silence(DMSA(ask.dim, ask.heads, membership_bias=True), 3 * ask.heads // 4),
        "DMSA, 3 of 4 silent, each image its own": DMSA(ask.dim, ask.heads, max_active_heads=max(ask.heads // 4, 1)),
    }
    inference_only = {name for name in layers if "silent" in name}
    z = torch.randn(ask.batch, ask.tokens, ask.dim)
    grown = z.clone().requires_grad_()
    grad = torch.randn_like(z)

    def infer(layer: nn.Module) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                layer(z)

        return run

    def train(layer: nn.Module) -> Callable[[], object]:
        def run() -> None:
            for p in (grown, *layer.parameters()):
                p.grad = None
            layer(grown).backward(grad)

        return run

    forward = medians({name: infer(layer) for name, layer in layers.items()}, ask.rounds)
    both = medians({name: train(layer) for name, layer in layers.items() if name not in inference_only}, ask.rounds)
    floor_forward, floor_both = (times["floor: two projections"] for times in (forward, both))

    table = Table("layer", "forward, x floor", "forward+backward, x floor", "kept, b n d", title="ratios within this run")
    rows = []
    for name, layer in layers.items():
        row = {"what": name, "forward": round(forward[name] / floor_forward, 3), "train": None, "kept": None}
        if name in both:
            row |= {"train": round(both[name] / floor_both, 3), "kept": round(kept_elements(layer, grown) / z.numel(), 3)}
        rows.append(row)
        table.add_row(name, *("" if row[key] is None else f"{row[key]:.2f}" for key in ("forward", "train", "kept")))
    facts = {key: getattr(ask, key) for key in ("batch", "tokens", "dim", "heads", "rounds")}
    facts |= {
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    console = Console(width=110)
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()))
    console.print(f"floor here: {floor_forward:.2f} ms forward, {floor_both:.2f} ms forward+backward")
    if ask.json:
        ask.json.parent.mkdir(parents=True, exist_ok=True)
        ask.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    if ask.readme:
        before, _, after = ask.readme.read_text().partition(BEGIN)
        ask.readme.write_text(before + BEGIN + "\n" + markdown(rows) + END + after.partition(END)[2])


if __name__ == "__main__":
    main()
