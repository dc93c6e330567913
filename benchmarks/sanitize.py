"""The fused kernels on 20 shapes, for NVIDIA's sanitizer to watch. It prints a line per shape.

    compute-sanitizer --tool memcheck  python benchmarks/sanitize.py [--ways eager stream] [--part 1/4]
    compute-sanitizer --tool racecheck python benchmarks/sanitize.py

    eager     a norm and the layer, forward and backward, on the default stream
    stream    the same on a stream of its own, where CUDA graphs are recorded

`--part 1/4` takes every fourth shape from the first on, for several processes. Races in kernels of the library (nvjet) are not
about our memory (docs/kernels.md).
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import dmst
from dmst.models.norm import normed

# samples, tokens, width, heads; odd ones, one token, short and long samples, narrow and wide heads
SHAPES = [
    (1, 1, 48, 1), (2, 7, 48, 4), (3, 37, 96, 2), (5, 64, 96, 12), (4, 197, 384, 8), (2, 197, 192, 3), (1, 256, 64, 1),
    (64, 17, 128, 8), (70, 33, 96, 2), (1, 768, 384, 8), (2, 256, 128, 2), (5, 384, 192, 4), (140, 257, 64, 4),
    (1, 300, 256, 2), (2, 255, 384, 6), (130, 5, 384, 8), (1, 512, 128, 1), (2, 65, 768, 12), (1, 131, 1024, 8),
    (9, 100, 72, 9),
]  # fmt: skip
FORMS = ("dmsa:listing", "gmsa:listing", "dmsa:proximal", "tssa", "gmsa:proximal")
WAYS = ("eager", "stream")


def layer_of(form: str, d: int, k: int, dtype: torch.dtype, **options: int | None) -> torch.nn.Module:
    name, _, mode = form.partition(":")
    options |= {"mode": mode} if mode else {}
    return dmst.operators.create(name, d, k, device="cuda", dtype=dtype, **options)


def backward(out: Tensor, z: Tensor) -> None:
    out.backward(torch.randn_like(out))
    assert z.grad is not None and torch.isfinite(z.grad).all()


def run(way: str, form: str, b: int, n: int, d: int, k: int, dtype: torch.dtype) -> None:
    layer = layer_of(form, d, k, dtype, **({"groups": min(n, 16)} if form.startswith("gmsa") else {}))
    norm, z = torch.nn.LayerNorm(d, device="cuda"), torch.randn(b, n, d, device="cuda", requires_grad=True)
    side = torch.cuda.Stream() if way == "stream" else torch.cuda.current_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            tokens, _ = normed(norm, z)
        backward(layer(tokens), z)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--part", default="1/1")
    ask = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/sanitize.py needs a CUDA device.")
    part, parts = map(int, ask.part.split("/"))
    for way in ask.ways:
        for number in range(part - 1, len(SHAPES), parts):
            b, n, d, k = SHAPES[number]
            form, dtype = FORMS[number % len(FORMS)], torch.float32 if number % 4 == 3 else torch.bfloat16
            print(f"{way}, {number + 1} of {len(SHAPES)}: {b} x {n} x {d}, {k} heads, {form}, {dtype}", flush=True)
            with dmst.use_kernels("fused"):
                run(way, form, b, n, d, k, dtype)
            torch.cuda.synchronize()
    print("all done")


if __name__ == "__main__":
    main()
