"""An ONNX file that `dmst export` wrote, as a network: onnxruntime computes, on the CPU.

It has what classifying and measuring ask of a network: config, class names, and how images are prepared.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from dmst import atomic
from dmst.errors import BadFileError, OptionError, ShapeError, choose, in_one_line, need

LARGEST = 2**31  # bytes: what the format allows one file
INT8 = ("dynamic", "static")
PRODUCTS = ["MatMul", "Gemm", "Conv"]  # what is worth 8 bits; onnxruntime has no dynamic convolution of signed weights
KEYS = (  # of a file's note, each with a value in JSON
    "name", "class_names", "num_classes", "input_size", "patch_size", "free_size", "mean", "std", "crop_pct", "interpolation",
)  # fmt: skip


def run_onnx(data: bytes) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """What is in a file, as a function of images: all outputs."""
    session = _session(data)

    def run(images: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(x) for x in session.run(None, {"images": images.numpy()}))

    return run


def _session(data: bytes) -> Any:
    runtime = need("onnxruntime", "export")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors
    return runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


class OnnxNetwork(nn.Module):
    def __init__(self, path: Path, data: bytes) -> None:
        super().__init__()
        try:
            self.session = _session(data)
        except ImportError:
            raise
        except Exception as error:  # onnxruntime has errors of its own, all of which mean the same
            raise BadFileError(f"{path} is not an ONNX file that onnxruntime reads ({in_one_line(error)}).") from error
        note = self.session.get_modelmeta().custom_metadata_map
        try:
            told = {key: json.loads(note[key]) for key in KEYS}
            channels, height, width = (int(x) for x in told["input_size"])
            names, view = told["class_names"], {key: told[key] for key in ("mean", "std", "crop_pct", "interpolation")}
            self.config = SimpleNamespace(
                name=str(told["name"]), in_chans=channels, img_size=(height, width), num_classes=int(told["num_classes"]),
                patch_size=int(told["patch_size"]),
            )  # fmt: skip
            numbers = [*view["mean"], *view["std"], view["crop_pct"]]
            fits = (
                all(type(x) in (int, float) and math.isfinite(x) for x in numbers) and min(*view["std"], view["crop_pct"]) > 0
            )
            fits &= len(view["mean"]) == len(view["std"]) == channels and len(names) in (0, self.config.num_classes)
            if not fits or not all(isinstance(name, str) for name in names):
                raise ValueError("mean, std or class names do not fit")
        except (KeyError, TypeError, ValueError) as error:
            raise BadFileError(
                f"{path} was not written by `dmst export`: it does not say how images are prepared ({in_one_line(error)})."
            ) from error
        self.free_size = bool(told["free_size"])
        self.class_names, self.pretrained_cfg = tuple(names), view
        self.dtype = nn.Parameter(torch.empty(0), requires_grad=False)  # of no numbers: it says that images are float32

    @property
    def num_classes(self) -> int:
        return self.config.num_classes

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        channels, size, patch = self.config.in_chans, self.config.img_size, self.config.patch_size
        sides = tuple(images.shape[2:])
        if images.ndim != 4 or images.shape[1] != channels or not (self.free_size or sides == size):
            told = "height, width" if self.free_size else "{}, {}".format(*size)
            raise ShapeError(f"{self.config.name} takes images (batch, {channels}, {told}), not {tuple(images.shape)}.")
        if sides != size and any(side % patch or side < 2 * patch for side in sides):  # torch's exporter takes 1 for a constant
            raise ShapeError(
                f"images are {tuple(images.shape)}: the file takes sides of two or more patches of {patch} pixels."
            )
        made = self.session.run(["logits"], {"images": images.detach().cpu().float().numpy()})[0]
        return torch.from_numpy(np.asarray(made)).to(images.device)

    def trace(self, images: Tensor) -> NoReturn:
        raise OptionError("an ONNX file has no layers to look into: name the saved model that it was exported from.")


def read_onnx(path: str | Path) -> OnnxNetwork:
    path = Path(path)
    return OnnxNetwork(path, atomic.read(path, most=LARGEST)).eval()


def quantize(path: str | Path, how: str, images: Iterable[Tensor] = ()) -> bytes:
    """The file in 8 bits: weights alone, activations as they come (dynamic), or both, by some images (static)."""
    choose("int8", how, INT8)
    tool, shape = need("onnxruntime.quantization", "export"), need("onnxruntime.quantization.shape_inference", "export")
    feed = iter(images)

    class Reader(tool.CalibrationDataReader):  # type: ignore[name-defined]
        def get_next(self) -> dict[str, Any] | None:
            batch = next(feed, None)
            return None if batch is None else {"images": batch.numpy()}

    with tempfile.TemporaryDirectory() as folder:
        ready, made = (str(Path(folder) / name) for name in ("ready.onnx", "made.onnx"))
        shape.quant_pre_process(_forget_shapes(path, ready), ready, skip_symbolic_shape=True)
        _forget_shapes(ready, ready)
        if how == "dynamic":
            tool.quantize_dynamic(ready, made, weight_type=tool.QuantType.QInt8, op_types_to_quantize=PRODUCTS[:2])
        else:
            tool.quantize_static(ready, made, Reader(), per_channel=True, op_types_to_quantize=PRODUCTS)
        return Path(made).read_bytes()


def _forget_shapes(path: str | Path, out: str) -> str:
    """The quantizer transposes weights, and leaves the shapes that are noted beside them."""
    onnx = need("onnx", "export")
    proto = onnx.load(str(path))
    del proto.graph.value_info[:]
    onnx.save(proto, out)
    return out
