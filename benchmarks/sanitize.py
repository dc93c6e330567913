"""The fused layer on 20 shapes, forward and backward, for NVIDIA's sanitizer to watch. It prints a line a shape.

    compute-sanitizer --tool memcheck  python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/sanitize.py

Small: under the sanitizer a kernel takes a hundred times as long. Every route of docs/kernels.md is taken by some shape.
"""

from __future__ import annotations

import torch

import dmst

# samples, tokens, width, heads; odd ones, one token, short and long samples, narrow and wide heads
SHAPES = [
    (1, 1, 48, 1), (2, 7, 48, 4), (3, 37, 96, 2), (5, 64, 96, 12), (4, 197, 384, 8), (2, 197, 192, 3), (1, 256, 64, 1),
    (64, 17, 128, 8), (70, 33, 96, 2), (1, 768, 384, 8), (2, 768, 384, 8), (5, 896, 384, 8), (3, 1024, 192, 4),
    (1, 1000, 256, 2), (2, 1023, 384, 6), (130, 5, 384, 8), (1, 2048, 128, 1), (2, 513, 768, 12), (1, 777, 1024, 8),
    (9, 100, 72, 9),
]  # fmt: skip
FORMS = ("dmsa:listing", "dmsa:proximal", "tssa")


def layer_of(form: str, d: int, k: int, dtype: torch.dtype) -> torch.nn.Module:
    name, _, mode = form.partition(":")
    options = {"mode": mode} if mode else {}
    return dmst.operators.create(name, d, k, device="cuda", dtype=dtype, **options)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/sanitize.py needs a CUDA device.")
    for number, (b, n, d, k) in enumerate(SHAPES):
        form, dtype = FORMS[number % len(FORMS)], torch.float32 if number % 4 == 3 else torch.bfloat16
        layer = layer_of(form, d, k, dtype)
        z = torch.randn(b, n, d, device="cuda", dtype=dtype, requires_grad=True)
        with dmst.use_kernels("fused"):
            out = layer(z)
            out.backward(torch.randn_like(out))
        torch.cuda.synchronize()
        assert z.grad is not None and torch.isfinite(z.grad).all()
        print(f"{number + 1} of {len(SHAPES)}: {b} x {n} x {d}, {k} heads, {form}, {dtype}", flush=True)


if __name__ == "__main__":
    main()
