"""The fused kernels on 20 shapes, for NVIDIA's sanitizer to watch. It prints a line a shape.

    compute-sanitizer --tool memcheck  python benchmarks/sanitize.py [--ways eager stream step silent]
    compute-sanitizer --tool racecheck python benchmarks/sanitize.py

    eager     the layer, forward and backward, on the default stream, where fewer launches serve
    stream    the same on a stream of its own, where CUDA graphs are recorded: the kernels for a busy device
    step      a block's residual step with all that can be around it, by our own products where they serve
    silent    the layer without its silent heads, forward alone

Small: under the sanitizer a kernel takes a hundred times as long. Every route of docs/kernels.md is taken by some shape.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import dmst
from dmst.kernels import plan, step

# samples, tokens, width, heads; odd ones, one token, short and long samples, narrow and wide heads
SHAPES = [
    (1, 1, 48, 1), (2, 7, 48, 4), (3, 37, 96, 2), (5, 64, 96, 12), (4, 197, 384, 8), (2, 197, 192, 3), (1, 256, 64, 1),
    (64, 17, 128, 8), (70, 33, 96, 2), (1, 768, 384, 8), (2, 768, 384, 8), (5, 896, 384, 8), (3, 1024, 192, 4),
    (1, 1000, 256, 2), (2, 1023, 384, 6), (130, 5, 384, 8), (1, 2048, 128, 1), (2, 513, 768, 12), (1, 777, 1024, 8),
    (9, 100, 72, 9),
]  # fmt: skip
FORMS = ("dmsa:listing", "dmsa:proximal", "tssa")
WAYS = ("eager", "stream", "step", "silent")


def layer_of(form: str, d: int, k: int, dtype: torch.dtype) -> torch.nn.Module:
    name, _, mode = form.partition(":")
    options = {"mode": mode} if mode else {}
    return dmst.operators.create(name, d, k, device="cuda", dtype=dtype, **options)


def backward(out: Tensor, z: Tensor) -> None:
    out.backward(torch.randn_like(out))
    assert z.grad is not None and torch.isfinite(z.grad).all()


def run(way: str, form: str, b: int, n: int, d: int, k: int, dtype: torch.dtype) -> None:
    layer = layer_of("dmsa:listing" if way == "silent" else form, d, k, dtype)
    z = torch.randn(b, n, d, device="cuda", dtype=dtype, requires_grad=True)
    if way == "silent":
        layer.skip_silent = True
        with torch.no_grad():
            assert torch.isfinite(layer(z)).all()
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


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    ask = asked.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/sanitize.py needs a CUDA device.")
    usual = plan.BY_HAND, plan.BUSY
    for way in ask.ways:
        plan.BY_HAND, plan.BUSY = (0, 0) if way == "step" else usual
        for number, (b, n, d, k) in enumerate(SHAPES):
            wide = number % 4 == 3 or (way == "step" and number % 2 == 0)
            form, dtype = FORMS[number % len(FORMS)], torch.float32 if wide else torch.bfloat16
            with dmst.use_kernels("fused"):
                run(way, form, b, n, d, k, dtype)
            torch.cuda.synchronize()
            print(f"{way}, {number + 1} of {len(SHAPES)}: {b} x {n} x {d}, {k} heads, {form}, {dtype}", flush=True)


if __name__ == "__main__":
    main()
