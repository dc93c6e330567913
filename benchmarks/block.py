"""The two lines of a DMST-S block on a CUDA device, beside the least that they can cost. CUDA-graph replay, medians.

    python benchmarks/block.py [--shapes 256x197 64x1024] [--streams float32 bfloat16] [--json results/h200/block.json]

    attend, floor    z + out(subspace(norm z)) by torch.compile: LayerNorm, the two projections, the addition
    attend, parts    z + scale * operator(norm z): norm, fused operator, scale and addition one by one
    attend, step     the same as one operator (docs/kernels.md, the residual step)
    mlp, plain       W2 gelu(W1 z) in inference, torch's product and GELU       mlp, kernel    the first product by our kernel

"compiled" after a name: by torch.compile. `float32` is a stream of float32 tokens under bfloat16 autocast, as networks train.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import measure
import torch
from torch import Tensor, nn

from dmst.kernels import plan, use_kernels
from dmst.models.block import Block
from dmst.models.feedforward import Mlp
from dmst.models.zoo import model_config

SHAPES = ("256x197", "64x1024", "16x4096", "4x16384", "1x65536")
TAKEN = plan.step
BARS = {"attend": measure.BARS[torch.bfloat16], "mlp": (6e-3, 0.0)}
WAYS = {  # one operator?, compiled?
    "floor": (False, True),
    "parts": (False, False),
    "parts compiled": (False, True),
    "step": (True, False),
    "step compiled": (True, True),
}


class Floor(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.subspace, self.out = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def attend(self, z: Tensor) -> Tensor:
        return z + self.out(self.subspace(self.norm(z)))


def attend_row(row: measure.Row, stream: torch.dtype) -> None:
    one_operator, compiled = WAYS[row["way"]]
    plan.step = TAKEN if one_operator else lambda *_: False
    config = model_config("dmst_small", layer_scale=0.1, drop_path_rate=0.0)
    made: Any = measure.fill(Floor(config.dim) if row["way"] == "floor" else Block(config)).to("cuda", stream)
    named = {name: p for name, p in made.named_parameters() if not name.startswith("feedforward")}
    call = under_autocast(measure.compiled(made.attend) if compiled else made.attend, stream)
    inputs = measure.tokens(row["B"], row["N"], config.dim, torch.device("cuda"), stream)

    def step(turn: int) -> measure.Results:
        return measure.train(call, list(named.values()), *inputs[turn])

    forward, both = measure.graph(lambda turn: measure.forward(call, inputs[turn][0])), measure.graph(step)
    twin, (z, grad) = copy.deepcopy(made).double(), inputs[0]
    with use_kernels("reference"):
        parameters = [twin.get_parameter(name) for name in named]
        right = measure.train(twin.attend, parameters, z.detach().double().requires_grad_(), grad.double())
    if measure.passed(row, ["out", "z", *named], [forward.last, both.last], right, BARS["attend"]):
        row |= {"forward_ms": forward.median, "train_ms": both.median, "peak_mb": measure.peak_mb(step)}


def mlp_row(row: measure.Row, dtype: torch.dtype) -> None:
    config = model_config("dmst_small")
    mlp = measure.fill(Mlp(config)).to("cuda", dtype).eval().requires_grad_(False)
    inputs = measure.tokens(row["B"], row["N"], config.dim, torch.device("cuda"), dtype)
    call = measure.compiled(mlp)
    with use_kernels("auto" if row["way"] == "kernel" else "reference"):
        forward = measure.graph(lambda turn: measure.forward(call, inputs[turn][0]))
    right = measure.forward(copy.deepcopy(mlp).double(), inputs[0][0].double())
    if measure.passed(row, ["out"], [forward.last], right, BARS["mlp"]):
        row["forward_ms"] = forward.median


def under_autocast(call: Callable[[Tensor], Tensor], stream: torch.dtype) -> Callable[[Tensor], Tensor]:
    def run(z: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=stream == torch.float32):
            return call(z)

    return run


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="BATCHxTOKENS")
    parser.add_argument("--streams", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    ask = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/block.py needs a CUDA device.")
    rows = measure.Rows("block", ask, ("what", "way", "B", "N", "stream"))
    tasks = [("attend", way, stream) for stream in ask.streams for way in WAYS]
    tasks += [("mlp", way, "bfloat16") for way in ("plain", "kernel")]
    for shape in ask.shapes:
        b, n = map(int, shape.split("x"))
        for what, way, stream in tasks:
            row = {"what": what, "way": way, "B": b, "N": n, "stream": stream}
            with measure.attempting(row), use_kernels("auto"):
                (attend_row if what == "attend" else mlp_row)(row, measure.DTYPES[stream])
            rows.add(row)
    rows.finish()


if __name__ == "__main__":
    main()
