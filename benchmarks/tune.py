"""Times every tile of every kernel and prints rows for the table of `dmst/kernels/plan.py`. Needs a CUDA device.

    python benchmarks/tune.py [--width 384] [--heads 8] [--shape 256x197] [--dtype bfloat16] [--only front settle] [--jobs 8]

A candidate that does not compile or has no room on this GPU is left out. `--jobs` processes compile first, into Triton's cache;
then one times, by CUDA-graph replay: a median in microseconds. A tile changes no result but the order of sums.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import measure
import torch
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.plan import Cut
from dmst.operators import DMSA, GMSA

GROUPS, KEY = 16, 16  # of GMSA


def candidates(*choices: tuple[int, ...]) -> list[Cut]:
    """Every combination of tokens, channels, columns, warps and stages."""
    return [Cut(*made) for made in itertools.product(*choices)]


CANDIDATES = {
    "front": candidates((16, 32, 64), (32, 64, 128), (0,), (1, 2, 4), (2, 3, 4)),
    "front keys": candidates((64, 128), (32, 64, 128), (128,), (4, 8), (2, 3, 4)),
    "into_tokens": candidates((16, 32, 64), (64, 128), (0,), (2, 4, 8), (1,)),
    "into_tokens keys": candidates((32, 64, 128), (64, 128), (64, 128), (4, 8), (1,)),
    "into_weights": candidates((16, 32, 64), (64, 128), (0,), (2, 4, 8), (1, 2)),
    "into_weights keys": candidates((32, 64), (64, 128), (128,), (4, 8), (1, 2)),
    "settle": candidates((16, 32, 64), (128, 256, 512), (0,), (2, 4, 8), (1, 2, 3)),
    "settle held": candidates((8, 16, 32), (64, 128), (0,), (2, 4, 8), (1,)),
    "adjoint": candidates((8, 16, 32), (128, 256, 512), (0,), (2, 4, 8), (1, 2)),
    "adjoint held": candidates((8, 16, 32), (64, 128), (0,), (2, 4, 8), (1,)),
    "groups": candidates((16, 32, 64), (0,), (0,), (1, 2, 4), (1, 2, 3)),
    "groups back": candidates((16, 32, 64), (0,), (0,), (1, 2, 4), (1, 2)),
    "norm": candidates((1, 2, 4, 8, 16), (512,), (0,), (1, 2, 4, 8), (1,)),
}


def shape_of(text: str) -> tuple[int, int]:
    b, times, n = text.partition("x")
    if not (times and b.isdecimal() and n.isdecimal() and int(b) and int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} must be SAMPLESxTOKENS, for example 256x197")
    return int(b), int(n)


def calls(b: int, n: int, d: int, k: int, dtype: torch.dtype, device: str = "cuda") -> dict[str, Callable[[], Any]]:
    """A call of each kernel, on random numbers. What holds short samples in registers does not hold one of all tokens."""
    from dmst.kernels.fused import adjoint, front, mixture, moments, norm

    chance = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device, generator=chance).to(like)

    f32, text, mixed, q = torch.float32, DMSA(d, k).form.text, GMSA(d, k, groups=GROUPS, key_dim=KEY).form.text, k * KEY
    z, other, narrow, keys = draw(b, n, d), draw(b, n, d), draw(b, n, k, like=f32), draw(b, n, q)
    turn = front.tables("1d", z, None)
    assign, key = draw(k, d, like=f32) / d**0.5, draw(q, d) / d**0.5
    share, gate, sums = draw(b, k, like=f32), draw(b, k, like=f32).square(), draw(b, 1, k, like=f32)
    moment, divisor = draw(b, k, d // k, like=f32).square(), gate + 1
    cell, pi = torch.arange(n, device=device, dtype=torch.int32) * GROUPS // n, narrow.sigmoid()
    centre = draw(b * k, KEY + 1, GROUPS, like=f32).abs() + 1
    far = [x.view(1, -1, x.shape[-1]) for x in (other, z, pi)]
    wide, weight, bias = draw(b, n, d, like=f32), draw(d, like=f32), draw(d, like=f32)
    return {
        "front": lambda: front.front(z, *turn, assign, None, None, None, True, True),
        "front keys": lambda: front.front(z, *turn, assign, None, key, None, False, True),
        "into_tokens": lambda: front.into_tokens(z, narrow, share, assign, None, None, *turn),
        "into_tokens keys": lambda: front.into_tokens(z, None, share, assign, keys, key, *turn),
        "into_weights": lambda: front.into_weights(z, narrow, share, None, *turn),
        "into_weights keys": lambda: front.into_weights(z, None, share, keys, *turn),
        "settle": lambda: moments.settle(*far[1:], sums[:1], None, text),
        "settle held": lambda: moments.settle(z, pi, sums, None, text),
        "adjoint": lambda: adjoint.pull(*far, moment[:1], gate[:1], divisor[:1], None, text, False, True),
        "adjoint held": lambda: adjoint.pull(other, z, pi, moment, gate, divisor, None, text, False, True),
        "groups": lambda: mixture.group_update(z, keys, cell, sums, None, mixed),
        "groups back": lambda: mixture.group_adjoint(z, keys, cell, centre, gate, None, other, mixed, True),
        "norm": lambda: (norm.norm(wide, weight, bias, 1e-6, dtype), *norm.norm_adjoint(wide, weight, other, wide, 1e-6)),
    }


def microseconds(call: Callable[[], Any]) -> float:
    def step(_: int) -> measure.Results:
        made = call()
        return made if isinstance(made, tuple) else (made,)

    return 1e3 * measure.graph(step).median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--shape", default=(256, 197), type=shape_of, metavar="SAMPLESxTOKENS")
    parser.add_argument("--dtype", default="bfloat16", choices=list(measure.DTYPES))
    parser.add_argument("--only", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)  # this process compiles every jobs-th candidate
    ask = parser.parse_args()
    if ask.heads < 1 or ask.width < 1 or ask.width % ask.heads or ask.width % 2:
        parser.error(f"--width {ask.width} must be even, and a multiple of --heads, which is {ask.heads}")
    if not torch.cuda.is_available():
        raise SystemExit("tune.py needs a CUDA device, and this torch sees none.")
    if ask.warm is None and ask.jobs > 1:
        workers = [subprocess.Popen([sys.executable, *sys.argv, "--warm", str(i)]) for i in range(ask.jobs)]
        for worker in workers:
            worker.wait()
    dtype, (b, n) = measure.DTYPES[ask.dtype], ask.shape
    measure.WARM_SECONDS = 0.01  # there are hundreds of candidates, and one follows the other
    made = calls(b, n, ask.width, ask.heads, dtype)
    place, base = (plan.capability(), ask.width, dtype), "WIDE" if dtype == torch.float32 else "USUAL"
    todo = [(name, cut) for name in ask.only for cut in CANDIDATES[name]]
    if ask.warm is not None:
        todo = todo[ask.warm :: ask.jobs]
    times: dict[str, list[tuple[float, Cut]]] = {}
    for name, cut in todo:
        plan.TABLE = {place: {**getattr(plan, base), name: cut}}
        plan.forget()
        try:
            if ask.warm is None:
                time = microseconds(made[name])
                times.setdefault(name, []).append((time, cut))
            else:
                made[name]()
        except Exception as error:  # no room, or the compiler gives up: not a candidate here
            if ask.warm is None:
                print(f"{name} {tuple(cut)}: {str(error).splitlines()[0][:80]}", flush=True)
    if ask.warm is not None:
        return
    for name, found in times.items():
        for time, cut in sorted(found)[:5]:
            print(f"{name:18} {time:8.1f} us  {cut}")
    where = f"{torch.cuda.get_device_name()}, {b}x{n}, {ask.heads} heads"
    print(f"\n    ({place[0]}, {ask.width}, {dtype}): {base} | {{  # {where}")
    for name in times:
        print(f'        "{name}": Cut{tuple(min(times[name])[1])},')
    print("    },")


if __name__ == "__main__":
    main()
