"""Write a graph as a file that other software reads. It is kept only if it computes what the network does.

onnx     ONNX, for onnxruntime and what else reads it
torch    an exported program: torch.export.load(file).module()(images)
aoti     compiled for this machine: torch._inductor.aoti_load_package(file)(images)

What a user of the file must know is in it: class names, mean, std, size, how images are cut (`told`).
"""

from __future__ import annotations

import io
import json
import logging
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dmst
from dmst import atomic
from dmst.errors import DmstError, OptionError, choose, in_one_line, need
from dmst.export import graph as graphs
from dmst.export.graph import BAR, Graph, Run
from dmst.models import VisionModel

FORMATS = {"onnx": ".onnx", "torch": ".pt2", "aoti": ".pt2"}
OPSET = 20  # the oldest with an operation for GELU
NOTE = "dmst.json"  # in an exported program


class Exported(NamedTuple):
    path: Path
    difference: float  # the largest one from the network, on ten images
    size: tuple[int, int]
    free_size: bool  # whether it takes any height and width that the patches divide
    outputs: list[str]
    version: str  # of the format, in words


def export_model(
    model: VisionModel, out: str | Path, *, format: str = "onnx", maps: bool = False, size: int | None = None,
    overwrite: bool = False,
) -> Exported:  # fmt: skip
    """Write `model` to the file `out`: images (batch, channels, height, width) to logits, and with `maps` to the memberships of
    every layer. `size`: of the images that it is made with, if not the network's own; a graph that is for one size is for it.
    """
    path = refuse(Path(out), format, overwrite)
    graph = graphs.graph_of(model, maps=maps, size=size)
    try:
        data, run, version = WRITERS[format](graph, told(model, graph))
        found = graphs.difference(graph, run)
        if graph.free_size and not graphs.difference(graph, run, graphs.others(graph)) <= BAR:  # its own, or the exporter's
            graph = graphs.graph_of(model, maps=maps, size=size, free=False)
            data, run, version = WRITERS[format](graph, told(model, graph))
            found = graphs.difference(graph, run)
    except DmstError:
        raise
    except Exception as error:  # a compiler's, or a runtime's: they have many
        raise OptionError(
            f"{model.config.name} could not be written as format {format!r} ({in_one_line(error)}). Another one may serve: "
            f"{', '.join(FORMATS)}." + (" aoti needs a C++ compiler." if format == "aoti" else "")
        ) from error
    if not found <= BAR:
        raise OptionError(
            f"{model.config.name} is not exported: the file's outputs differ by {found:.1e} from the network's on ten images, "
            f"and {BAR:.0e} is accepted. Nothing was written. Another format may serve: {', '.join(FORMATS)}."
        )
    atomic.write_bytes(path, data)
    return Exported(path, found, graph.size, graph.free_size, graph.outputs, version)


def refuse(path: Path, format: str, overwrite: bool = False) -> Path:
    """The file to write, if it may be written and what that needs is installed."""
    suffix = FORMATS[choose("format", format, FORMATS)]
    if path.suffix != suffix:
        raise OptionError(f"{path} must end in {suffix}, as files of format {format!r} do.")
    if path.is_dir() or (path.exists() and not overwrite):
        raise OptionError(f"{path} exists: choose another file, or pass overwrite=True (--overwrite).")
    if format == "onnx":
        for module in ("onnx", "onnxscript", "onnxruntime"):
            need(module, "export")
    return path


def told(model: VisionModel, graph: Graph) -> dict[str, str]:
    """What the file says of the network, each value as JSON."""
    config, view = model.config, model.pretrained_cfg
    values = {
        "dmst": dmst.__version__, "name": config.name, "operator": config.operator, "class_names": list(model.class_names),
        "num_classes": config.num_classes, "input_size": [config.in_chans, *graph.size], "patch_size": config.patch_size,
        "free_size": graph.free_size, **{key: view[key] for key in ("mean", "std", "crop_pct", "interpolation")},
    }  # fmt: skip
    return {key: json.dumps(value) for key, value in values.items()}


def _onnx(graph: Graph, note: dict[str, str]) -> tuple[bytes, Run, str]:
    from dmst.export.onnx_network import run_onnx

    axes = {0: "batch", **({2: "height", 3: "width"} if graph.free_size else {})}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with graphs.plainly():
        made = torch.onnx.export(
            graph.program, dynamo=True, opset_version=OPSET, verbose=False, input_names=["images"],
            output_names=graph.outputs, dynamic_shapes={"images": axes},
        )  # fmt: skip
    assert made is not None
    proto = made.model_proto
    for key, value in note.items():
        proto.metadata_props.add(key=key, value=value)
    data = proto.SerializeToString()
    return data, run_onnx(data), f"ONNX opset {OPSET}"


def _torch(graph: Graph, note: dict[str, str]) -> tuple[bytes, Run, str]:
    file = io.BytesIO()
    torch.export.save(graph.program, file, extra_files={NOTE: json.dumps(note)})
    file.seek(0)
    return file.getvalue(), torch.export.load(file).module(), f"an exported program of torch {torch.__version__}"


def _aoti(graph: Graph, note: dict[str, str]) -> tuple[bytes, Run, str]:
    with tempfile.TemporaryDirectory() as folder:
        where = str(Path(folder) / "model.pt2")
        with graphs.plainly():
            torch._inductor.aoti_compile_and_package(
                graph.program, package_path=where, inductor_configs={"aot_inductor.metadata": note}
            )
        compiled = torch._inductor.aoti_load_package(where)
        data = Path(where).read_bytes()

    def run(images: Tensor) -> tuple[Tensor, ...]:
        made = compiled(images)
        return (made,) if isinstance(made, Tensor) else tuple(made)

    return data, run, f"compiled by torch {torch.__version__} for {platform.machine()}"


WRITERS: dict[str, Callable[[Graph, dict[str, str]], tuple[bytes, Any, str]]] = {"onnx": _onnx, "torch": _torch, "aoti": _aoti}
