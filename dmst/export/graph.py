"""From a network to a graph of plain operators, and whether the graph computes what the network does.

The batch is free always. Height and width are free, in two or more whole patches, where the graph is right for other sizes too:
GMSA cuts its cells by the shape of the grid, so that a graph may be for one shape. This is tried: ten images at the network's
size, and some at other sizes and shapes, against the network itself.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from dmst import photos, tracing
from dmst.data.images import decode
from dmst.errors import OptionError, in_one_line, shown
from dmst.kernels import use_kernels
from dmst.models import VisionModel, freeze
from dmst.models.feedforward import MlpStep
from dmst.models.files import not_finite
from dmst.operators.base import scaled
from dmst.operators.unrolled import Unrolled

BAR = 1e-4  # the largest difference of an output that is accepted
Run = Callable[[Tensor], "tuple[Tensor, ...]"]


class Outputs(nn.Module):
    """The logits; with `maps` also the memberships of every layer, (b, heads, tokens) or (b, heads, groups, tokens)."""

    def __init__(self, model: VisionModel, maps: bool) -> None:
        super().__init__()
        self.model, self.maps = model, maps

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if not self.maps:
            return (self.model(images),)
        trace = self.model.trace(images)
        return trace.logits, *(layer.parts.membership for layer in trace.layers)  # type: ignore[arg-type]


class Graph(NamedTuple):
    program: ExportedProgram
    network: Outputs  # what it was made from
    outputs: list[str]
    size: tuple[int, int]  # height and width of the examples
    free_size: bool  # any height and width that the patches divide


def graph_of(model: VisionModel, *, maps: bool = False, size: int | None = None, free: bool = True) -> Graph:
    """`free`: with any height and width, where that is right."""
    if not isinstance(model, VisionModel):
        raise OptionError(f"{type(model).__name__} is no network of this package: unwrap it (its `module`) and export that.")
    if any(x.is_meta for x in model.parameters()):
        raise OptionError("the network has no weights (device 'meta'): load some before it is exported.")
    if bad := not_finite(model.state_dict()):
        raise OptionError(f"{bad} holds NaN or infinity: the network is not exported.")
    if not model.config.num_classes:
        raise OptionError("the network has no classifier (num_classes is 0): model.reset_classifier(...), then train it.")
    config = model.config
    height, width = config.img_size if size is None else (size, size)  # type: ignore[misc]
    if type(height) is not int or min(height, width) < 1 or height % config.patch_size or width % config.patch_size:
        raise OptionError(f"size is {shown(size)}: it must be a multiple of {config.patch_size}, the side of a patch.")
    network = Outputs(freeze(model).cpu().float(), maps).eval()
    lean = Outputs(_without_scales(copy.deepcopy(network.model)), maps).eval()
    images = examples(model, (height, width))
    with plainly():
        found = network(images[:2])
        if missing := [i for i, x in enumerate(found) if x is None]:
            raise OptionError(
                f"maps cannot be exported: layer {missing[0] - 1} has operator {config.operator!r}, which has no memberships. "
                "Export without them."
            )
        names = ["logits", *(f"membership_{i}" for i in range(len(found) - 1))]
        for loose in (True, False) if free else (False,):
            sides = {2: config.patch_size * Dim("rows"), 3: config.patch_size * Dim("columns")} if loose else {}
            try:
                program = torch.export.export(lean, (images[:2],), dynamic_shapes={"images": {0: Dim("batch"), **sides}})
                graph = Graph(program, network, names, (height, width), loose)
                if not loose or difference(graph, program.module(), others(graph)) <= BAR:
                    return graph
            except Exception as error:  # of torch's tracer, or of an operator: it has many
                if not loose:
                    raise OptionError(
                        f"{config.name} with operator {config.operator!r} cannot be exported ({in_one_line(error)}). Every "
                        "operator of this package can; one of your own must not branch on the values of its tokens."
                    ) from error
    raise AssertionError("a graph of one size is returned or is an error")


def _without_scales(model: VisionModel) -> VisionModel:
    """The network itself, with z + scale * (W x + b) as z + W' x + b' where W ends the step: one operation less."""
    steps: list[tuple[Any, Any, Any]] = []
    for block in model.blocks:
        if isinstance(block.operator, Unrolled):
            steps.append((block.residual, block.operator, block.operator.out))
        if isinstance(block.feedforward, MlpStep):
            steps.append((block.feedforward.residual, block.feedforward.mlp, block.feedforward.mlp.fc2))
    for residual, step, last in steps:  # who listens to a step shall hear its update
        if residual.scale is not None and type(last) is nn.Linear and tracing.is_plain(step, last):
            weight, bias = scaled(last.weight, last.bias, residual.scale)
            last.weight = nn.Parameter(weight, False)
            if bias is not None:
                last.bias = nn.Parameter(bias, False)
            residual.scale = None
    return model


def examples(model: VisionModel, size: tuple[int, int]) -> Tensor:
    """Ten images, as the network reads them: the photos of this package and their mirror images."""
    seen, channels, told = [], model.config.in_chans, model.pretrained_cfg
    for path in map(photos.photo, photos.PHOTOS):
        pixels = torch.from_numpy(np.ascontiguousarray(decode(path, path.name, grey=channels == 1))).permute(2, 0, 1)[None]
        seen.append(F.interpolate(pixels.float() / 255, size, mode="bilinear", antialias=True))
    images = torch.cat(seen)[:, torch.arange(channels) % seen[0].shape[1]]
    images = (images - torch.tensor(told["mean"])[:, None, None]) / torch.tensor(told["std"])[:, None, None]
    return torch.cat((images, images.flip(-1)))[:10]


def others(graph: Graph) -> list[tuple[int, int]]:
    """Other sizes and shapes than the graph's own."""
    (height, width), patch = graph.size, graph.network.model.config.patch_size
    return [(height, width + patch), (2 * height, width), (height, 2 * width), (height, 4 * width), (4 * height, width)]


@torch.no_grad()
def difference(graph: Graph, run: Run, sizes: list[tuple[int, int]] | None = None) -> float:
    """The largest one of any output, on ten images; or on two at each of some sizes. Infinite where one is not finite."""
    model, worst = graph.network.model, 0.0
    for size in sizes or [graph.size]:
        images = examples(model, size)[: 2 if sizes else 10]
        with use_kernels("reference"):
            right = graph.network(images)
        for x, y in zip(run(images), right, strict=True):
            gap = (x - y).abs().max().item() if x.shape == y.shape else float("inf")
            worst = max(worst, gap if np.isfinite(gap) else float("inf"))
    return worst


@contextmanager
def plainly() -> Iterator[None]:
    """Plain torch, which other software can read; and none of the exporter's warnings about its own future."""
    with torch.no_grad(), use_kernels("reference"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
