"""The table of precision: what each way to compute DMSA with rotary positions is off by, against float64.

    python -m soak.precision [--into docs/FILE.md]      from results/soak/kernels.jsonl: printed, or put between its two marks

    ours    `dmst.kernels.attend` under autocast: the two large products in the dtype, everything between them in float32
    plain   the same formula with every step in the dtype (`formula`): what the rule is for; it has no bar

Weights of nn.Linear's size, tokens of size 1, 100 and 10,000, all rounded to the dtype first. Forward is the output, gradient
that by the tokens: |error| / |exact|, beyond one subnormal of the dtype an element.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import kernels, rotary
from dmst.kernels import Form, Weights, reference
from dmst.operators.dmsa import MODES
from dmst.sparsemax import _sort_threshold
from soak import table as lines
from soak.case import Case
from tests.cases import relative
from tests.parity import BARS, Layer, differentiate, draw, excess

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HEADS = {48: 3, 64: 8, 192: 4}  # of each width
SHAPES = [(b, n, d, k) for b, n, (d, k) in itertools.product((1, 3), (1, 2, 17, 197), HEADS.items())]
SCALES = (1.0, 1e2, 1e4)
WAYS = {
    "float32": (F32, "ours"),
    "bfloat16, plain": (BF16, "plain"),
    "**bfloat16, ours**": (BF16, "ours"),
    "float16, plain": (F16, "plain"),
    "**float16, ours**": (F16, "ours"),
}
ROWS = {
    "ours": "precision table: float32, and bfloat16 and float16 by our rule; error as a share of its bar",
    "plain": "precision table: every step in bfloat16 or float16, for comparison",
}
BEGIN, END = "<!-- begin precision -->", "<!-- end precision -->"


def formula(z: Tensor, weights: Weights, form: Form, *, grid: Any = None) -> Tensor:
    """The layer as one would write it down, every step in the dtype of z."""
    heads, mass_floor = form.num_heads, form.delta
    scores = rated(z, weights, form)
    values = F.linear(z, weights.subspace, weights.subspace_bias).unflatten(-1, (heads, -1))  # (b, n, k, p)
    membership, gate = scores.sigmoid().unsqueeze(-1), gate_of(scores)[:, None, :, None]
    mass = membership.sum(1, keepdim=True) + mass_floor
    mass = mass if mass_floor else torch.where(mass > 0, mass, 1)
    attenuation = 1 / (1 + gate.square() * (membership * values.square()).sum(1, keepdim=True) / mass)
    if form.mode == "proximal":
        w = weights.theta * gate.square() * membership * attenuation
        update = -w / (1 + w) * values
    else:
        update = -(gate**form.power) * membership * attenuation * values
    return F.linear(update.flatten(2), weights.subspace.mT if weights.out is None else weights.out, weights.out_bias)


def rated(z: Tensor, weights: Weights, form: Form) -> Tensor:
    assert weights.assign is not None
    positions = rotary.table(form.rotary, z.shape[-1], z.shape[-2], None, device=z.device, dtype=z.dtype)
    assert positions is not None
    return rotary.rotate(z, positions) @ weights.assign.mT  # (b, n, k)


def gate_of(scores: Tensor) -> Tensor:
    pooled = scores.mean(1)
    pooled = pooled - pooled.amax(-1, keepdim=True).detach()
    return (pooled - _sort_threshold(pooled)).clamp(min=0)


def compute(made: Layer, dtype: torch.dtype, how: str) -> tuple[dict[str, Tensor | None], Tensor]:
    """Output and gradients, and which heads are on."""
    if how == "plain":
        low = made.map(lambda x: x.to(dtype))
        return differentiate(formula, low), gate_of(rated(low.z, low.weights, low.form)) > 0
    with torch.autocast("cpu", dtype=BF16 if dtype == F32 else dtype, enabled=dtype != F32):
        found = differentiate(kernels.attend, made)
    gate = reference.gate_of(reference.score(made.z, made.weights, made.form, None), made.form)[1]
    assert gate is not None
    return found, gate > 0


def measure(mode: str, way: str, scale: float, shape: tuple[int, int, int, int], _: Path) -> dict[str, Any]:
    dtype, how = WAYS[way]
    torch.manual_seed(0)
    made = draw(("dmsa", {"mode": mode, "rotary": "1d"}), shape, dtype, scale=scale, device="cpu")
    wide = made.map(Tensor.double)
    exact, usual = differentiate(functools.partial(reference.attend, dtype=F64), wide), None
    assert relative(formula(*wide[:3]), exact["output"]) < 1e-10, "the plain formula is not that of the layer"  # type: ignore[arg-type]
    found, on = compute(made, dtype, how)
    off = {name: excess(found[name], exact[name], dtype) for name in ("output", "z")}  # type: ignore[arg-type]
    support = int(not torch.equal(on, gate_of(rated(*wide[:3])) > 0))
    facts = {"at": [mode, way, scale], "forward": shown(off["output"]), "gradient": shown(off["z"]), "support": support}
    if how == "plain":
        return facts
    bars = dict(zip(("output", "z"), (1e-4, 5e-4) if dtype == F32 and scale != 1 else BARS[dtype], strict=True))
    if not off["z"] <= bars["z"] and scale != 1:  # what is left of a gradient may be one cancelling sum: 3.7's second rule
        usual = differentiate(functools.partial(reference.attend, dtype=dtype), made)
        bars["z"] = 3 * excess(usual["z"], exact["z"], dtype)  # type: ignore[arg-type]
    for name, bar in bars.items():
        assert off[name] <= bar, f"{name} is off by {off[name]:.2e}, bar {bar:.2e}"
    assert not support, "another head is on"
    return facts | {"error": max(off[name] / bar for name, bar in bars.items())} | ({"over": 1} if usual else {})


def shown(error: float) -> float | None:
    return float(f"{error:.2g}") if math.isfinite(error) else None


def cases() -> Iterator[Case]:
    for mode, way, scale, shape in itertools.product(MODES, WAYS, SCALES, SHAPES):
        name = f"precision: {mode}, {way.strip('*')}, x{scale:g}, {' x '.join(map(str, shape[:3]))}"
        yield Case(ROWS[WAYS[way][1]], name, functools.partial(measure, mode, way, scale, shape))


# --- the table --------------------------------------------------------------------------------------------------------


def worst(told: list[dict[str, Any]]) -> str:
    """The largest error forward / by gradient; one that is no number says so."""
    if not told:
        return "not run"
    out = []
    for kind in ("forward", "gradient"):
        errors = [each[kind] for each in told]
        out.append("NaN" if None in errors else f"{max(errors):.1e}")
    return " / ".join(out)


def table(told: list[dict[str, Any]]) -> str:
    """Markdown, from the lines of results/soak/kernels.jsonl."""
    told = [each for each in told if "at" in each]
    heads = [f"x{scale:g}" for scale in SCALES]
    out = [f"| mode | | {' | '.join(heads)} | support changed |", "|---|---|" + "---|" * (1 + len(SCALES))]
    for mode, way in itertools.product(MODES, WAYS):
        mine = [each for each in told if each["at"][:2] == [mode, way]]
        by_scale = [worst([each for each in mine if each["at"][2] == scale]) for scale in SCALES]
        out.append(f"| {mode} | {way} | {' | '.join(by_scale)} | {sum(e['support'] for e in mine)}/{len(mine)} |")
    return "\n".join(out)


def main() -> None:
    parse = argparse.ArgumentParser(prog="python -m soak.precision", description="The table of precision, as markdown.")
    parse.add_argument("--lines", type=Path, default=Path("results/soak/kernels.jsonl"))
    parse.add_argument("--into", type=Path, help=f"a file with the lines {BEGIN} and {END}")
    ask = parse.parse_args()
    made = table(lines.read(ask.lines))
    if ask.into is None:
        print(made)
        return
    before, rest = ask.into.read_text().split(BEGIN)
    ask.into.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
