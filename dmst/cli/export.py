"""`dmst export`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dmst.cli.train import DATA_DIR
from dmst.terminal import Terminal, say

if TYPE_CHECKING:
    from torch import Tensor

    from dmst.export.onnx_network import OnnxNetwork

SEEN = 128  # images by which static 8-bit ranges are chosen


def export(
    weights: str = typer.Argument(help="A shipped network, a saved model, or a finished run."),
    out: str = typer.Option(help="The file to write: .onnx, or .pt2 for torch and aoti."),
    format: str = typer.Option(
        "onnx", help="onnx: for onnxruntime and others. torch: an exported program. aoti: compiled for this machine."
    ),
    extra: str = typer.Option(None, "--with", metavar="maps", help="Further outputs: the memberships of every layer."),
    size: int = typer.Option(None, min=1, metavar="PIXELS", help="Side of the images, if not the network's own."),
    int8: str = typer.Option(None, metavar="dynamic|static", help="8-bit weights, for ONNX; --data measures the cost."),
    data: str = typer.Option(None, help="Of --int8: a dataset's name, or a folder of class folders."),
    data_dir: str = DATA_DIR,
    overwrite: bool = typer.Option(False, help="Replace a file that is there."),
    unverified: bool = typer.Option(False, help="Accept weights without hashes, such as those of timm."),
) -> None:
    """Write a trained network as one file that other software runs.

    dmst export runs/photos --out photos.onnx

    dmst export dmst_cifar10 --out maps.onnx --with maps

    dmst export dmst_cifar10 --out small.onnx --int8 dynamic --data cifar10

    The file is compared with the network on ten images before it is kept. It takes any number of images, and holds class names
    and how images are prepared. `dmst classify photo.jpg --weights photos.onnx` uses it.
    """
    from dmst import atomic
    from dmst.engine.evaluate import evaluate_weights
    from dmst.engine.prepare import read_weights
    from dmst.errors import OptionError, choose
    from dmst.export.files import export_model, refuse
    from dmst.export.onnx_network import INT8, quantize, read_onnx

    if extra is not None:
        choose("--with", extra, ("maps",))
    if int8 is not None:
        choose("--int8", int8, INT8)
        if format != "onnx" or not data:
            raise OptionError("--int8 is for --format onnx, and needs --data: images by which its accuracy is measured.")
    elif data:
        raise OptionError("--data is for --int8, whose accuracy it measures. `dmst evaluate FILE.onnx --data` measures a file.")
    refuse(Path(out), format, overwrite)
    model = read_weights(weights, unverified=unverified)
    with tempfile.TemporaryDirectory() as folder, Terminal(stderr=True).status("exporting: this takes half a minute"):
        plain = Path(folder) / "float32.onnx" if int8 else Path(out)
        made = export_model(model, plain, format=format, maps=extra == "maps", size=size, overwrite=overwrite)
        if int8:
            network = read_onnx(plain)
            images = _some_images(network, data, data_dir) if int8 == "static" else iter(())
            small = Path(folder) / "int8.onnx"
            small.write_bytes(quantize(plain, int8, images))
            (before, image_set), (after, _) = (evaluate_weights(file, data, data_dir=data_dir) for file in (plain, small))
            atomic.write_bytes(Path(out), small.read_bytes())
    step = model.config.patch_size
    sides = f"any height and width in steps of {step}" if made.free_size else "{} x {} pixels".format(*made.size)
    say(f"{out}: {Path(out).stat().st_size / 1e6:.1f} MB, {made.version}, any number of images, {sides}")
    say(f"outputs: {', '.join(made.outputs)}")
    say(f"largest difference from the network on ten images: {made.difference:.1e}" + (" (before --int8)" if int8 else ""))
    if int8:
        say(f"int8 ({int8}) on {image_set}: {after.words}; in float32 {before.words}")


def _some_images(network: OnnxNetwork, data: str, data_dir: str | None) -> Iterator[Tensor]:
    """Training images, as the network sees them."""
    import numpy as np

    from dmst.data.loader import EvalStream
    from dmst.data.sets import subset
    from dmst.engine import prepare
    from dmst.errors import MissingSplitError

    try:
        images = prepare.images_of(data, "train", data_dir)
    except MissingSplitError:
        images = prepare.images_of(data, "", data_dir)
    few = np.random.default_rng(0).permutation(len(images))[:SEEN]
    for batch in EvalStream(subset(images, few), prepare.view_of(network), batch_size=16):
        yield batch.images
