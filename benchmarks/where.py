"""Where the time of a network goes, kernel by kernel, by torch's profiler. Device: CUDA if there is one, else the CPU.

    python benchmarks/where.py dmst_small [gmst_small ...] [--modes compiled eager] [--pixels 224] [--batch 256] [--rows 25]

Networks, modes and steps are those of models.py. A line is milliseconds of one call, share, launches of one call, and the name.
The first line compares what the kernels take with what the clock says: the rest is the device waiting for the host, or kernels
side by side. Nothing is checked here; models.py does.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import measure
import models
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

CALLS = 5


def told(step: Callable[[int], object], device: torch.device, rows: int) -> list[str]:
    """Lines about a step that is warm."""
    on_gpu = device.type == "cuda"

    def run() -> float:
        begun = time.perf_counter()
        for turn in range(CALLS):
            if on_gpu:
                torch.compiler.cudagraph_mark_step_begin()
            step(turn % measure.SETS)
        if on_gpu:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begun) / CALLS

    run()
    by_clock = run()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        run()
    found = [
        (1e-3 * (each.self_device_time_total if on_gpu else each.self_cpu_time_total) / CALLS, each.count / CALLS, each.key)
        for each in seen.key_averages()
    ]
    found = sorted((row for row in found if row[0]), reverse=True)
    total = sum(ms for ms, _, _ in found)
    launches = sum(count for _, count, _ in found)
    lines = [f"{by_clock:8.2f} ms by the clock, {total:.2f} by {launches:.0f} kernels"]
    return lines + [f"{ms:8.3f} {ms / total:6.1%} {count:6.1f}  {name[:90]}" for ms, count, name in found[:rows]]


def main() -> None:
    device = measure.device_here()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", metavar="NETWORK")
    parser.add_argument(
        "--modes", nargs="+", default=["compiled" if device.type == "cuda" else "eager"], choices=list(models.MODES)
    )
    parser.add_argument("--pixels", type=int, default=models.USUAL)
    parser.add_argument("--batch", type=int, default=models.BATCH[device.type])
    parser.add_argument("--dtype", default="bfloat16" if device.type == "cuda" else "float32", choices=list(measure.DTYPES))
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--beside", type=Path, metavar="FILE", help="the device is shared with processes that name this file")
    ask = parser.parse_args()
    if ask.beside:
        measure.share_device(ask.beside)
    dtype = measure.DTYPES[ask.dtype]
    for what, mode in itertools.product(ask.networks, ask.modes):
        model = models.build(what, ask.pixels).to(device)
        channels = next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels
        images = [torch.randn(ask.batch, channels, ask.pixels, ask.pixels, device=device) for _ in range(measure.SETS)]
        compiler = models.MODES[mode][2]
        call = measure.compiled(model, compiler) if compiler else model
        labels, parameters = torch.zeros(ask.batch, dtype=torch.long, device=device), list(model.parameters())
        steps: dict[str, Callable[[int], object]] = {
            "inference": lambda turn, call=call, images=images: models.infer(call, images[turn], dtype),
            "training": lambda turn, call=call, images=images, labels=labels, parameters=parameters: models.train(
                call, parameters, images[turn], labels, dtype
            ),
        }
        for name, step in steps.items():  # both are compiled before one is timed: what shares the device waits once
            model.train(name == "training")
            step(0)
        for name, step in steps.items():
            model.train(name == "training")
            with measure.alone():
                lines = told(step, device, ask.rows)
            print(
                f"\n{what}, {mode}, {name}, {ask.batch} images of {ask.pixels} pixels, {ask.dtype}",
                *lines,
                sep="\n",
                flush=True,
            )


if __name__ == "__main__":
    main()
