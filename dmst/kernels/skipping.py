"""Which layers leave their silent heads out on a GPU: decided by measurement, ahead of time, once for each network and device.

    table = choose_silent(model, images)      sets `skip_silent` of every layer it could measure, and tells why
    print(table)

How many heads are silent for which image is known to the device alone, and a host that waited for the answer would lose more
than there is to win. So each block runs on the tokens that these images bring it, with every head and without the silent ones,
and keeps what was faster by 3 %. The block, not the layer in it: with every head a block may take its layer and what stands
around it in one step. A layer that shares its owner with others is measured by itself.

Show it images like those to come: the choice is about time only, the numbers are the same to rounding. Layers with a sparsemax
gate and a sigmoid membership can be measured, where the fused kernels serve. A compiled network computes every head. To undo
it, set `layer.skip_silent = False`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dmst.kernels import choice, compute_dtype, reference
from dmst.kernels.autocast import without_autocast

LEAST = 0.03  # of the time with every head, to be worth it
CALLS, WARM, REPEATS = 8, 3, 20  # calls in a graph, before it is recorded, and timed replays of it

ON_CPU = "On a CPU heads with gate 0 are left out by themselves where that is faster: there is nothing to choose."
NO_LAYER = "No layer of this network has a sparsemax gate and a sigmoid membership."
NOT_FUSED = "The fused kernels do not serve here (`dmst doctor` says why): every head is computed."
NOT_CALLED = "No layer was called: the network computes its layers in another way, every head."


class Row(NamedTuple):
    layer: str
    silent: float  # the share of heads with gate 0, over samples and heads
    dense: float  # milliseconds of its block, or of the layer itself
    skipping: float
    chosen: bool  # whether its silent heads are left out from now on

    def __str__(self) -> str:
        decided = "left out" if self.chosen else "computed"
        return f"{self.layer:<32} {self.silent:>8.1%} {self.dense:>10.4f} {self.skipping:>10.4f}   {decided}"


class Table(list[Row]):
    """A row for each layer that was measured; `note` says why there is none."""

    def __init__(self, rows: list[Row], note: str = "") -> None:
        super().__init__(rows)
        self.note = note

    def __str__(self) -> str:
        if not self:
            return self.note
        head = f"{'layer':<32} {'silent':>8} {'dense, ms':>10} {'without':>10}   silent heads"
        return "\n".join([head, *map(str, self)])


@torch.no_grad()
def choose_silent(model: nn.Module, images: Tensor, *, batch_size: int | None = None) -> Table:
    """Run the network on (the first `batch_size` of) the images, as it is called: autocast and all."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    layers = {name: module for name, module in model.named_modules() if _may_skip(module)}
    if not layers:
        return Table([], NO_LAYER)
    if images.device.type == "cpu" and choice.chosen() != "fused":
        return Table([], ON_CPU)
    measured: dict[str, list[tuple[float, float, float]]] = {}
    refused: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def measure(owner: nn.Module, args: tuple, options: dict[str, Any]) -> None:
            layer = layers[name]
            silent = _share_silent(layer, owner, args, options)
            if silent is None:
                refused.append(name)
            else:
                run = functools.partial(_run, layer, owner, args, options)
                dense, skipping = times(lambda: run(False), lambda: run(True))
                layer.skip_silent = flags[name]
                measured.setdefault(name, []).append((silent, dense, skipping))

        return measure

    before = {module: module.training for module in model.modules()}
    flags = {name: layer.skip_silent for name, layer in layers.items()}
    owners = {name: _owner(model, name, layers) for name in layers}
    hooks = [owner.register_forward_pre_hook(hook(name), with_kwargs=True) for name, owner in owners.items()]
    try:
        model.eval()(images[:batch_size])
    finally:
        for handle in hooks:
            handle.remove()
        for module, training in before.items():
            module.training = training
        for name, flag in flags.items():
            layers[name].skip_silent = flag
    rows = []
    for name, calls in measured.items():  # a layer that is called twice has two lots of tokens
        silent, dense, skipping = (sum(values) for values in zip(*calls, strict=True))
        row = Row(name, silent / len(calls), dense, skipping, skipping <= (1 - LEAST) * dense)
        layers[name].skip_silent = row.chosen
        rows.append(row)
    return Table(rows, NOT_FUSED if refused else NOT_CALLED)


def _may_skip(module: nn.Module) -> bool:
    """One of the family (`operators.family`, which this file is below), with heads that can be silent."""
    form = getattr(module, "form", None)
    return hasattr(module, "skip_silent") and form is not None and form.gate == "sparsemax" and form.membership == "sigmoid"


def _owner(model: nn.Module, name: str, layers: dict[str, Any]) -> nn.Module:
    """The module that holds this layer and no other, below the network itself; else the layer."""
    above = name.rpartition(".")[0]
    alone = above and sum(other.startswith(above + ".") for other in layers) == 1
    owner = model.get_submodule(above) if alone else layers[name]
    return layers[name] if isinstance(owner, nn.ModuleList | nn.ModuleDict) else owner  # which nobody calls


def _run(layer: Any, owner: nn.Module, args: tuple, options: dict[str, Any], skip: bool) -> Any:
    layer.skip_silent = skip
    return owner.forward(*args, **options)  # no hooks


def _share_silent(layer: Any, owner: nn.Module, args: tuple, options: dict[str, Any]) -> float | None:
    """Of the heads, those with gate 0 for the tokens that reach the layer; None where it cannot leave any out."""
    shares: list[float] = []

    def look(_: Any, args: tuple, options: dict[str, Any]) -> None:
        z, weights, form = args[0], layer.weights(), layer.form
        if choice.kernel_for(z, weights, form, compute_dtype(z), skip=True) is choice._skipping_attend:
            with without_autocast(z):
                gate = reference.gate_of(reference.score(z, weights, form, options.get("grid")), form)[1]
            assert gate is not None
            shares.append((gate == 0).float().mean().item())

    if owner is layer:
        look(layer, args, options)
    else:
        handle = layer.register_forward_pre_hook(look, with_kwargs=True)
        try:
            owner.forward(*args, **options)
        finally:
            handle.remove()
    return statistics.mean(shares) if shares else None


def times(*calls: Callable[[], Any]) -> list[float]:
    """Milliseconds of one call of each: medians over CUDA graphs that are replayed in turn."""
    side = torch.cuda.Stream()
    graphs = []
    for call in calls:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is set up at a first call must not be recorded
            for _ in range(WARM):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(CALLS):
                call()
        graphs.append(graph)
    taken: list[list[float]] = [[] for _ in calls]
    for repeat in range(WARM + REPEATS):
        for graph, mine in zip(graphs, taken, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repeat >= WARM:
                mine.append(start.elapsed_time(end) / CALLS)
    return [statistics.median(mine) for mine in taken]
