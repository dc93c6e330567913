"""Inference of whole networks on a CPU, interleaved: every network takes its turn, again and again, and its best time counts.

    python benchmarks/cpu.py [--only dmst_tiny timm:vit_tiny_patch16_224] [--sizes 224 512] [--batches 1 16] [--threads 2]
                             [--modes eager compiled onnx] [--turns 20] [--json FILE]

A network is NAME of the zoo or timm:NAME where timm is installed; fresh weights, float32. Modes are plain calls, torch.compile,
and onnxruntime (ours by `dmst.export_model`, timm's by `torch.onnx.export` at the same opset; its threads do not spin while
another network has its turn). What a mode answers is compared with plain calls, and a row that differs by more than 1e-3 has no
time. An absolute time is of one machine; ratios of one run are what to quote.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from with_timm import import_timm

from dmst import export_model, provenance
from dmst.export.files import OPSET
from dmst.models import VisionModel, create_model, freeze

NETWORKS = [
    "dmst_tiny", "gmst_tiny", "tost_tiny", "timm:vit_tiny_patch16_224", "timm:xcit_tiny_12_p16_224",
    "dmst_small", "gmst_small", "tost_small", "timm:vit_small_patch16_224",
]  # fmt: skip
MODES = ("eager", "compiled", "onnx")
BAR = 1e-3
Run = Callable[[Tensor], Tensor]


def build(what: str, pixels: int) -> nn.Module:
    torch.manual_seed(0)
    if what.startswith("timm:"):
        return import_timm().create_model(what.removeprefix("timm:"), img_size=pixels).eval()
    return freeze(create_model(what, img_size=pixels))


def onnx(model: nn.Module, images: Tensor, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        if isinstance(model, VisionModel):
            export_model(model, file, size=images.shape[-1])
        else:
            made = torch.onnx.export(model, (images,), dynamo=True, opset_version=OPSET, verbose=False, input_names=["images"])
            assert made is not None
            made.save(file)
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"images": x.numpy()})[0])


def ready(what: str, mode: str, images: Tensor, threads: int) -> tuple[Run | None, str]:
    """The call, warm; or why there is none."""
    try:
        model = build(what, images.shape[-1])
        right = model(images)
        run: Run = model
        if mode == "compiled":
            torch._dynamo.reset()
            run = torch.compile(model)
        elif mode == "onnx":
            run = onnx(model, images, threads)
        gap = ((run(images) - right).norm() / right.norm()).item()
    except Exception as error:  # a library is missing, or cannot do it
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return (run, "") if gap <= BAR else (None, f"off by {gap:.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=NETWORKS, metavar="NETWORK")
    parser.add_argument("--sizes", nargs="+", type=int, default=[224])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    ask = parser.parse_args()
    torch.set_num_threads(ask.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for size in ask.sizes:
            for batch in ask.batches:
                for mode in ask.modes:
                    rows += timed(ask, mode, torch.randn(batch, 3, size, size))
    if ask.json:
        told = {"commit": provenance.commit(), "versions": provenance.versions(), "threads": ask.threads, "turns": ask.turns}
        lines = ",\n".join(map(json.dumps, rows))
        ask.json.write_text(json.dumps(told, indent=1)[:-2] + f',\n "rows": [\n{lines}\n]}}\n')


def timed(ask: argparse.Namespace, mode: str, images: Tensor) -> list[dict[str, Any]]:
    calls = {what: ready(what, mode, images, ask.threads) for what in ask.only}
    best = {what: float("inf") for what in ask.only}
    for _ in range(ask.turns):
        for what, (run, _) in calls.items():
            if run is not None:
                begun = time.perf_counter()
                run(images)
                best[what] = min(best[what], 1e3 * (time.perf_counter() - begun))
    rows = []
    for what, (run, why) in calls.items():
        row = {"network": what, "mode": mode, "batch": len(images), "size": images.shape[-1]}
        row |= {"ms": round(best[what], 3)} if run is not None else {"why": why}
        rows.append(row)
        print(f"{images.shape[-1]:5} px  batch {len(images):3}  {mode:9} {what:28} {row.get('ms', row.get('why'))}", flush=True)
    return rows


if __name__ == "__main__":
    main()
