"""Time and memory of one layer, beside the others. Device: CUDA if there is one, else the CPU.

    python benchmarks/operators.py [--shapes 256x197 64x1024] [--only dmsa floor] [--modes graph eager compiled] [--json FILE]

    floor             the two projections alone, out(subspace(z)): the least that a layer of this kind can cost
    sdpa_p48, _p64    softmax attention by PyTorch's kernel, heads of 48 and of 64 channels
    xca, mssa         XCiT's and CRATE's, ours
    tssa_published    TSSA as in ToST's code                     tssa    ours
    listing           DMSA as the paper prints it                dmsa    ours
    gmsa, gmsa_proximal    GMSA with a free output; tied, on orthonormal subspaces

Our family runs by its fused kernels (`fused`; on a CPU `auto`) and by the plain steps (`reference`). Every time is a median in
milliseconds: forward_ms without gradients, train_ms forward and backward. kept_mb is what the backward pass waits for, peak_mb
the most that a training step allocates. Milliseconds of a CPU count only as ratios to the floor of the same run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import measure
import torch
from published import AttentionDMSA, AttentionTSSA
from torch import Tensor, nn

from dmst.kernels import use_kernels
from dmst.operators import DMSA, GMSA, MHSA, MSSA, TSSA, XCA
from dmst.operators.gmsa import KEY_STD

SHAPES = {"cuda": ["256x197", "64x1024", "16x4096", "4x16384", "1x65536"], "cpu": ["8x197", "1x1024"]}
MODES = {"cuda": ["graph", "eager", "compiled"], "cpu": ["eager"]}
CAST: dict[torch.dtype, Callable[[nn.Module], nn.Module]] = {  # not .to(dtype): it would make complex tables real
    torch.bfloat16: nn.Module.bfloat16,
    torch.float16: nn.Module.half,
    torch.float32: nn.Module.float,
}
OUR_NAMES = {"qkv": "subspace", "PI_linear": "assign", "to_out.0": "out", "temp": "temperature"}  # published name -> ours


class Layer(NamedTuple):
    build: Callable[[int, int, int], nn.Module]  # (dim, heads, tokens)
    family: bool = False  # it has fused kernels
    width: int | None = None  # of a head, where it is fixed and the number of heads follows
    ours: Callable[..., nn.Module] | None = None  # of a published layer: our operator that computes the same
    linear: bool = True  # in tokens; float64 can then check the very shape that is timed


def gmsa(dim: int, heads: int, n: int, **options: Any) -> nn.Module:
    """With four tokens a group at least: alone in its group a token is the mean, and mu - s loses all digits."""
    return GMSA(dim, heads, bias=False, groups=min(max(n // 4, 1), GMSA.keywords()["groups"]), **options)


LAYERS: dict[str, Layer] = {
    "floor": Layer(lambda d, k, n: nn.Sequential(nn.Linear(d, d, bias=False), nn.Linear(d, d))),
    "dmsa": Layer(lambda d, k, n: DMSA(d, k, bias=False), family=True),
    "sdpa_p64": Layer(lambda d, k, n: MHSA(d, k, bias=False), width=64, linear=False),
    "sdpa_p48": Layer(lambda d, k, n: MHSA(d, k, bias=False), width=48, linear=False),
    "tssa": Layer(lambda d, k, n: TSSA(d, k, bias=False), family=True),
    "xca": Layer(lambda d, k, n: XCA(d, k, bias=False)),
    "mssa": Layer(lambda d, k, n: MSSA(d, k, bias=False), linear=False),
    "tssa_published": Layer(lambda d, k, n: AttentionTSSA(d, k), ours=TSSA),
    "listing": Layer(lambda d, k, n: AttentionDMSA(d, k, tokens=max(n, 4096)), ours=DMSA),
    "gmsa": Layer(gmsa),
    "gmsa_proximal": Layer(lambda d, k, n: gmsa(d, k, n, mode="proximal")),
}


def make(what: str, dim: int, heads: int, n: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    layer = measure.fill(LAYERS[what].build(dim, heads, n))
    if isinstance(layer, GMSA):  # keys of the size they start with: by smaller ones groups hardly differ, which loses digits
        with torch.no_grad():
            layer.key.weight.mul_(KEY_STD * (3 * dim) ** 0.5)
    return CAST[dtype](layer).to(device)


def our_name(name: str) -> str:
    """What we call a parameter of a published layer."""
    stem = next(stem for stem in OUR_NAMES if name == stem or name.startswith(stem + "."))
    return OUR_NAMES[stem] + name[len(stem) :]


def exact(what: str, layer: nn.Module, heads: int, z: Tensor, grad: Tensor) -> measure.Results:
    """Output and gradients in float64, with the same rounded weights and tokens, by the plain steps."""
    twin, ours = copy.deepcopy(layer).double(), LAYERS[what].ours
    names = [name for name, _ in layer.named_parameters()]
    if ours is not None:
        twin = ours(z.shape[-1], heads, bias=False, dtype=torch.float64)
        twin.load_state_dict({our_name(name): layer.get_parameter(name) for name in names}, strict=False)
        twin, names = twin.to(z.device), [our_name(name) for name in names]
    parameters = [twin.get_parameter(name) for name in names]
    with use_kernels("reference"):
        return measure.train(twin, parameters, z.detach().double().requires_grad_(), grad.double())


def passed(row: measure.Row, layer: nn.Module, timed: list[measure.Results], inputs: tuple[Tensor, Tensor]) -> bool:
    """What the timed calls computed against float64. Attention has no room for that: it is judged against its plain call (twice
    the bars, both are rounded), and its plain call against float64 on a few tokens."""
    what, heads, parameters = row["what"], row["heads"], list(layer.parameters())
    names = ["out", "z", *(name for name, _ in layer.named_parameters())]
    loose = 4.0 if LAYERS[what].ours else 1.0  # published layers compute in the low dtype throughout
    output, gradients = (loose * bar for bar in measure.BARS[inputs[0].dtype])
    if LAYERS[what].linear:
        return measure.passed(row, names, timed, exact(what, layer, heads, *inputs), (output, gradients))
    few = (inputs[0][:2, :197].detach().requires_grad_(), inputs[1][:2, :197])
    right = exact(what, layer, heads, *few)
    measure.passed(row, names, [measure.train(layer, parameters, *few)], right, (output, gradients))
    right = measure.train(layer, parameters, *inputs)
    return measure.passed(row, names, timed, right, (2 * output, 2 * gradients), "against_plain")


def fill_row(row: measure.Row, device: torch.device, dtype: torch.dtype) -> None:
    what, mode, dim, heads = (row[key] for key in ("what", "mode", "dim", "heads"))
    inputs = measure.tokens(row["B"], row["N"], dim, device, dtype)
    layer = make(what, dim, heads, row["N"], device, dtype)
    call: Any = measure.compiled(layer) if mode == "compiled" else layer
    parameters = list(layer.parameters())

    def step(turn: int) -> measure.Results:
        return measure.train(call, parameters, *inputs[turn])

    timer = measure.timer(device, "graph" if mode == "graph" else "queued")

    def infer(turn: int) -> measure.Results:
        return measure.forward(call, inputs[turn][0])

    infer(0)  # compiles, as the next line does, before anything is timed
    step(0)
    with measure.alone():
        forward, both = timer(infer), timer(step)
    if passed(row, layer, [forward.last, both.last], inputs[0]):
        row |= {"forward_ms": forward.median, "train_ms": both.median}
        if mode == "eager":
            row["kept_mb"] = measure.kept_mb(call, [*parameters, *layer.buffers()], inputs[0][0])
            row["peak_mb"] = measure.peak_mb(step)


def main() -> None:
    device = measure.device_here()
    parser = measure.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES[device.type], metavar="BATCHxTOKENS")
    parser.add_argument("--only", nargs="+", default=list(LAYERS), choices=list(LAYERS), metavar="LAYER")
    parser.add_argument("--modes", nargs="+", default=MODES[device.type], choices=["graph", "eager", "compiled"])
    parser.add_argument("--dtype", default="bfloat16" if device.type == "cuda" else "float32", choices=list(measure.DTYPES))
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=8)
    ask = parser.parse_args()
    rows = measure.Rows("operators", ask, ("mode", "B", "N", "what", "backend", "dim", "dtype"))
    kernels = {True: ("fused" if device.type == "cuda" else "auto", "reference"), False: ("torch",)}
    tasks = [
        (m, s, what, way) for m in ask.modes for s in ask.shapes for what in ask.only for way in kernels[LAYERS[what].family]
    ]
    for mode, shape, what, backend in tasks:
        width = LAYERS[what].width
        if rows.late() or (width and ask.dim % width):
            continue
        b, n = map(int, shape.split("x"))
        row = {"what": what, "backend": backend, "mode": mode, "B": b, "N": n, "dim": ask.dim, "dtype": ask.dtype}
        row["heads"] = ask.dim // width if width else ask.heads
        with measure.attempting(row), use_kernels("auto" if backend == "torch" else backend):
            fill_row(row, device, measure.DTYPES[ask.dtype])
        rows.add(row)
    measure.show(rows.rows, ("B", "N", "mode"), ("what", "backend"), ("forward_ms", "train_ms", "kept_mb", "peak_mb"), "floor")
    rows.finish()


if __name__ == "__main__":
    main()
