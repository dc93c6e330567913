"""The fused kernels on 20 shapes, for NVIDIA's sanitizer to watch. It prints a line a shape.

    compute-sanitizer --tool memcheck  python benchmarks/sanitize.py [--ways eager stream step silent] [--part 1/4]
    compute-sanitizer --tool racecheck python benchmarks/sanitize.py

    eager     the layer, forward and backward, on the default stream, where fewer launches serve
    stream    the same on a stream of its own, where CUDA graphs are recorded: the kernels for a busy device
    step      a block's residual step with all that can be around it, by our own products where they serve
    silent    the layer without its silent heads, forward alone; and the hidden channels of an MLP, where their kernel serves
    idle      none of ours: groups of warps that do next to nothing. Only where it is asked for

`--part 1/4` takes every fourth shape from the first on, for several processes. Small: under the sanitizer a kernel takes a
hundred times as long. Every route of docs/kernels.md is taken by some shape.

    python benchmarks/sanitize.py --read LOG ...     what the logs of racecheck say, counted; 1 if any of it is about our memory

Not about our memory: the library's own kernels (nvjet), and the byte by which Triton tells a group of warps what to do. It is
written where `warp_specialize` is called and at the end, and read at the head of the kernel, with a barrier of all warps
between (`barrier.sync 1` in the PTX). racecheck reports it as soon as some warps have had a barrier of their own: `idle` too.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

import dmst
from dmst.kernels import plan, step
from dmst.kernels.fused import active_hopper, few, hopper

# samples, tokens, width, heads; odd ones, one token, short and long samples, narrow and wide heads
SHAPES = [
    (1, 1, 48, 1), (2, 7, 48, 4), (3, 37, 96, 2), (5, 64, 96, 12), (4, 197, 384, 8), (2, 197, 192, 3), (1, 256, 64, 1),
    (64, 17, 128, 8), (70, 33, 96, 2), (1, 768, 384, 8), (2, 256, 128, 2), (5, 384, 192, 4), (140, 257, 64, 4),
    (1, 300, 256, 2), (2, 255, 384, 6), (130, 5, 384, 8), (1, 512, 128, 1), (2, 65, 768, 12), (1, 131, 1024, 8),
    (9, 100, 72, 9),
]  # fmt: skip
FORMS = ("dmsa:listing", "dmsa:proximal", "tssa")
WAYS = ("eager", "stream", "step", "silent", "idle")


@gluon.jit
def _store(out_ptr, WHICH: gl.constexpr):
    gl.store(out_ptr + WHICH, WHICH + 1.0)


@gluon.jit
def idle_kernel(out_ptr):
    barriers = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(8):
        mbarrier.init(barriers.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize([(_store, (out_ptr, 0)), (_store, (out_ptr, 1)), (_store, (out_ptr, 2))], [4, 1], [240, 24])


def layer_of(form: str, d: int, k: int, dtype: torch.dtype, **options: int | None) -> torch.nn.Module:
    name, _, mode = form.partition(":")
    options |= {"mode": mode} if mode else {}
    return dmst.operators.create(name, d, k, device="cuda", dtype=dtype, **options)


def backward(out: Tensor, z: Tensor) -> None:
    out.backward(torch.randn_like(out))
    assert z.grad is not None and torch.isfinite(z.grad).all()


def idle() -> None:
    out = torch.zeros(3, device="cuda")
    idle_kernel[(64,)](out, num_warps=4, maxnreg=168)
    assert out.tolist() == [1.0, 2.0, 3.0]


def run(way: str, form: str, b: int, n: int, d: int, k: int, dtype: torch.dtype) -> None:
    layer = layer_of(form, d, k, dtype)
    z = torch.randn(b, n, d, device="cuda", dtype=dtype, requires_grad=True)
    if way == "silent":
        for most in (None, max(1, min(k, plan.FEW * k // d))):  # and so few that `few.py` serves, where it does
            layer = layer_of("dmsa:listing", d, k, dtype, max_active_heads=most)
            layer.skip_silent = True
            with torch.no_grad():
                assert torch.isfinite(layer(z)).all()
        if hopper.serves(z.device, dtype, d, 16):
            weight, bias = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((2 * d + 64, d), (2 * d + 64,)))
            assert torch.isfinite(hopper.hidden(z.detach(), weight, bias)).all()
        return
    if way == "step":
        norm = (torch.ones(d, device="cuda", dtype=dtype), torch.zeros(d, device="cuda", dtype=dtype), 1e-6)
        keep, pending = torch.rand(b, 1, 1, device="cuda").round() * 2, torch.randn_like(z)
        scale = torch.full((d,), 0.5, device="cuda", dtype=dtype, requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32 and d % 16 == 0):
            around = {"scale": scale, "keep": keep, "pending": pending}
            backward(step.residual_step(z, *norm, layer.weights(), layer.form, **around), z)
        return
    side = torch.cuda.Stream() if way == "stream" else torch.cuda.current_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        backward(layer(z), z)


def read(logs: list[Path]) -> int:
    """Print how often each place was reported; the number of those about our memory, or that are not understood."""
    found: Counter[str] = Counter()
    for log in logs:
        text, understood = log.read_text(), 0
        for report in re.split(r"^=+ +$", text, flags=re.MULTILINE):
            places = re.findall(r"(Read|Write) access at (\w+)\S*(?: in (\S+):(\d+))?", report)
            if "Race reported" in report and places:
                found[_about(places)] += 1
                understood += 1
        shown = sum(map(int, re.findall(r"RACECHECK SUMMARY: (\d+) hazard", text)))
        other = len(re.findall(r"^=+ (?:Internal Sanitizer )?Error(?!: Race reported)", text, flags=re.MULTILINE))
        found["not understood"] += abs(shown - understood) + other
        found["not finished"] += "RACECHECK SUMMARY" not in text or "all done" not in text
    for about, count in (+found).items():
        print(f"{count:5} {about}")
    return sum(count for about, count in found.items() if about not in (LIBRARY, DISPATCH))


TOLD = (  # kernels with groups of warps
    (hopper.__file__, "hopper_kernel"),
    (few.__file__, "few_kernel"),
    (active_hopper.__file__, "project_hopper_kernel"),
    (active_hopper.__file__, "fold_out_hopper_kernel"),
    (__file__, "idle_kernel"),
)
LIBRARY, DISPATCH = "kernels of the library", "the byte that tells a group of warps what to do"


def _about(places: list[tuple[str, str, str, str]]) -> str:
    if all(kernel.startswith("nvjet") for _, kernel, _, _ in places):
        return LIBRARY
    for file, kernel in TOLD:
        lines = Path(file).read_text().splitlines()
        head = next(i for i, line in enumerate(lines, 1) if line.startswith(f"def {kernel}("))
        call = next(i for i, line in enumerate(lines, 1) if i > head and "gl.warp_specialize(" in line)
        told = {("Read", str(head)), ("Write", str(head)), ("Write", str(call))}
        if all(name == kernel and (access, line) in told for access, name, _, line in places):
            return DISPATCH
    return "; ".join(f"{access} {kernel} {Path(file).name}:{line}" for access, kernel, file, line in places)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--ways", nargs="+", default=WAYS[:-1], choices=WAYS)
    asked.add_argument("--part", default="1/1")
    asked.add_argument("--read", nargs="+", type=Path)
    ask = asked.parse_args()
    if ask.read:
        raise SystemExit(1 if read(ask.read) else 0)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/sanitize.py needs a CUDA device.")
    part, parts = map(int, ask.part.split("/"))
    usual, plan.BY_ENGINE = (plan.BY_HAND, plan.BUSY), 0
    for way in ask.ways:
        if way == "idle":
            idle()
            continue
        plan.BY_HAND, plan.BUSY = (0, 0) if way == "step" else usual
        for number in range(part - 1, len(SHAPES), parts):
            b, n, d, k = SHAPES[number]
            wide = number % 4 == 3 or (way == "step" and number % 2 == 0)
            form, dtype = FORMS[number % len(FORMS)], torch.float32 if wide else torch.bfloat16
            print(f"{way}, {number + 1} of {len(SHAPES)}: {b} x {n} x {d}, {k} heads, {form}, {dtype}", flush=True)
            with dmst.use_kernels("fused"):
                run(way, form, b, n, d, k, dtype)
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    print("all done")


if __name__ == "__main__":
    main()
