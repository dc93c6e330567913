"""What a head does, by taking it away: the gate is a multiplier, so an intervention is exact and the model computes the rest.

    with forced_gates(model, {11: {3: 0.5}}):     head 3 of layer 11 (both from 0; layer -1 is the last) has gate 0.5 inside
    with switched_off(model, {11: [3]}):          it adds nothing: gate 0, or its channels 0 where there is no gate
    contributions(operator, z)                    (b, k, n, d): what each head adds, the closed form
    check_layer(model, images, layer)             measured change of a layer's output against that closed form
    head_effects(model, images)                   what the logits lose with each head, one at a time

    output = bias + sum_k update_k(g_k) W_out,k, so head k off takes exactly update_k W_out,k away (theory: g = 0 skips a head)

The forced gate replaces the computed one between two steps of the reference kernel, whatever `use_kernels` says; memberships
and moments stay as they are, since neither depends on the gate. `trace` and `decompose` show the forced gate too. A graph that
was exported before does not know of it; torch.compile does, and compiles again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from dmst import kernels
from dmst.analysis.probes import only_looking
from dmst.errors import OptionError, ShapeError, number, shown
from dmst.kernels import Weights, reference
from dmst.models import VisionModel
from dmst.operators import MHSA, MSSA, XCA, Operator
from dmst.operators.base import Grid, Parts
from dmst.operators.family import TokenStatistics

Value = float | Tensor  # one gate for all images, or one an image: (b,)
Gates = Mapping[int, Mapping[int, Value]]


@contextmanager
def forced_gates(model: VisionModel, gates: Gates) -> Iterator[None]:
    """{layer: {head: gate}}, inside the block only. One inside another: both hold, the inner one wins where they differ."""
    with ExitStack() as undo:
        for layer, heads in gates.items():
            operator = operator_of(model, layer)
            values = {_head(operator, head): _value(value) for head, value in heads.items()}
            if isinstance(operator, TokenStatistics):
                undo.enter_context(_gates_of(operator, values))
            else:
                undo.enter_context(_silent_channels(operator, values))
        yield


@contextmanager
def switched_off(model: VisionModel, heads: Mapping[int, Iterable[int]]) -> Iterator[None]:
    """{layer: heads}: these add nothing to the output of their layers, inside the block only."""
    with forced_gates(model, {layer: dict.fromkeys(off, 0.0) for layer, off in heads.items()}):
        yield


def operator_of(model: VisionModel, layer: int) -> Operator:
    depth = len(model.blocks)
    if type(layer) is not int or not -depth <= layer < depth:
        raise OptionError(f"layer is {shown(layer)}: the model has layers 0 to {depth - 1}.")
    operator = model.blocks[layer].operator
    assert isinstance(operator, Operator)
    return operator


def _head(operator: Operator, head: int) -> int:
    if type(head) is not int or not 0 <= head < operator.num_heads:
        raise OptionError(f"head is {shown(head)}: the layer has heads 0 to {operator.num_heads - 1}.")
    return head


def _value(value: Value) -> Value:
    if isinstance(value, Tensor):
        if value.ndim > 1:
            raise OptionError(f"a gate has shape {tuple(value.shape)}: it is one number, or one an image, (b,).")
        return value
    return number("gate", value, -torch.inf, torch.inf)


@contextmanager
def _gates_of(operator: TokenStatistics, values: Mapping[int, Value]) -> Iterator[None]:
    """The operator's own steps with these gates put in between; the attributes of the instance go again afterwards."""
    if operator.form.gate is None and any(isinstance(value, Tensor) or value != 0 for value in values.values()):
        raise OptionError(f"{type(operator).__name__} has no gate here: its heads can be switched off (0), not weighed.")
    before = {name: operator.__dict__.get(name) for name in ("forward", "decompose")}
    forced = dict(getattr(before["forward"], "forced", {})) | dict(values)

    def steps(z: Tensor, grid: Grid) -> tuple[reference.Steps, Weights, torch.dtype]:
        operator.check(z)
        found = operator.steps(z, grid)
        return found._replace(gate=_with(found, forced)), operator.weights(), kernels.compute_dtype(z)

    def forward(z: Tensor, *, grid: Grid = None) -> Tensor:
        found, weights, dtype = steps(z, grid)
        with kernels.without_autocast(z):
            out = reference.project_out(reference.update_of(found, weights.theta, operator.form), weights, dtype)
        return operator.proj_drop(out)

    def decompose(z: Tensor, *, grid: Grid = None) -> Parts:
        found, _, _ = steps(z, grid)
        return Parts(projected=found.projected, membership=found.membership, gate=found.gate)

    forward.forced = forced  # type: ignore[attr-defined]
    operator.__dict__ |= {"forward": forward, "decompose": decompose}  # not the class: other layers stay as they are
    try:
        yield
    finally:
        for name, method in before.items():
            del operator.__dict__[name]
            if method is not None:
                operator.__dict__[name] = method


def _with(steps: reference.Steps, forced: Mapping[int, Value]) -> Tensor:
    """The gate (b, k) with some of its heads replaced; ones where the layer has none."""
    gate = torch.ones_like(steps.divisor) if steps.gate is None else steps.gate
    columns = list(gate.unbind(-1))
    for head, value in forced.items():
        told = torch.as_tensor(value, dtype=gate.dtype, device=gate.device)
        if told.ndim and len(told) != len(gate):
            raise ShapeError(f"the gate of head {head} is given for {len(told)} images, and there are {len(gate)}.")
        columns[head] = told.expand(len(gate))
    return torch.stack(columns, -1)


@contextmanager
def _silent_channels(operator: Operator, values: Mapping[int, Value]) -> Iterator[None]:
    """Softmax attention: what a head hands to the output projection is 0; tied to the subspaces, what it takes from them."""
    name = type(operator).__name__
    if not isinstance(operator, MHSA | MSSA | XCA):
        raise OptionError(f"{name}: where its heads enter the output is not known here, so none can be switched off.")
    if any(isinstance(value, Tensor) or value != 0 for value in values.values()):
        raise OptionError(f"{name} has no gate: its heads can be switched off (0), not weighed.")

    def without(channels: Tensor) -> Tensor:
        heads = rearrange(channels, "b n (k p) -> b n k p", k=operator.num_heads)
        on = torch.ones(operator.num_heads, 1, dtype=torch.bool, device=channels.device)
        on[list(values)] = False
        return rearrange(torch.where(on, heads, 0), "b n k p -> b n (k p)")

    if operator.out is not None:
        handle = operator.out.register_forward_pre_hook(lambda _, args: (without(args[0]),))
    else:  # relaxed MSSA: s_k = 0 mixes to 0
        assert isinstance(operator, MSSA)
        handle = operator.subspace.register_forward_hook(lambda _, args, out: without(out))
    try:
        yield
    finally:
        handle.remove()


def contributions(operator: Operator, z: Tensor, *, grid: Grid = None, gate: Tensor | None = None) -> Tensor:
    """(b, k, n, d): update_k W_out,k, what each head adds to the output for tokens z (b, n, d); with another `gate` (b, k), at
    that one. Their sum is the output without its bias (and, of the relaxed MSSA, without -kappa z)."""
    projected, membership, found, attention = operator.decompose(z, grid=grid)
    assert projected is not None
    out, tied = getattr(operator, "out", None), operator.subspaces()
    if out is None:
        assert tied is not None
        weight = tied.mT
    else:
        weight = rearrange(out.weight, "d (k p) -> k p d", k=operator.num_heads)
    if isinstance(operator, TokenStatistics):
        assert membership is not None
        theta = operator.weights().theta
        update = reference.token_statistics(projected, membership, found if gate is None else gate, theta, form=operator.form)
    elif gate is not None or attention is None or not isinstance(operator, MHSA | MSSA | XCA):
        raise OptionError(f"{type(operator).__name__} has no gate, or is not known here.")
    else:
        mixed = projected @ attention.mT if isinstance(operator, XCA) else attention @ projected
        update = mixed * (operator.relaxed or 1.0) if isinstance(operator, MSSA) else mixed
    return update.to(weight.dtype) @ weight


@dataclass(frozen=True)
class LayerCheck:
    """Of every head of one layer: the largest change of the layer's output when it is off, and how far the closed form is."""

    layer: int
    images: int
    change: tuple[float, ...]  # largest |output - output without the head|
    apart: tuple[float, ...]  # largest |that difference - update_k W_out,k|, divided by the largest |output|

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_layer(model: VisionModel, images: Tensor, layer: int = -1) -> LayerCheck:
    """Is the measured change of the output of one layer what the sum over heads says?"""
    operator = operator_of(model, layer)
    layer %= len(model.blocks)
    with only_looking(model):
        z, grid = model.embed(images)
        for block in model.blocks[:layer]:
            z = block(z, grid)
        z = model.blocks[layer].norm(z)  # type: ignore[operator]
        output = operator(z, grid=grid)
        told = contributions(operator, z, grid=grid)
        change, apart = [], []
        for head in range(operator.num_heads):
            with switched_off(model, {layer: [head]}):
                measured = output - operator(z, grid=grid)
            change.append(measured.abs().max().item())
            apart.append(((measured - told[:, head]).abs().max() / output.abs().max().clamp(min=1e-30)).item())
    return LayerCheck(layer, len(images), tuple(change), tuple(apart))


def logit_changes(model: VisionModel, images: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(layer, head, logits without the head minus logits (b, classes)) for every head, one at a time.

    The layers before it are not asked again: nothing changes there.
    """
    with only_looking(model):
        z, grid = model.embed(images)
        before = [z]
        for block in model.blocks:
            before.append(block(before[-1], grid))
        logits = model.forward_head(model.finish(before[-1]))
        for layer in range(len(model.blocks)):
            for head in range(operator_of(model, layer).num_heads):
                with switched_off(model, {layer: [head]}):
                    z = before[layer]
                    for block in model.blocks[layer:]:
                        z = block(z, grid)
                    yield layer, head, model.forward_head(model.finish(z)) - logits


@dataclass(frozen=True)
class HeadEffects:
    """By layer and head, means over images."""

    model: str
    images: int
    size: list[list[float]]  # length of the change of all logits
    chosen: list[list[float]]  # change of the logit of the class that the network chose
    flipped: list[list[float]]  # share of images that are given another class
    gate: list[list[float]] | None  # mean gate; None without gates

    @property
    def verdict(self) -> str:
        flat = [(size, layer, head) for layer, row in enumerate(self.size) for head, size in enumerate(row)]
        size, layer, head = max(flat)
        idle = sum(each == 0 for each, _, _ in flat)
        return (
            f"Over {self.images:,} images head {head} of layer {layer} matters most: without it the logits move by {size:.2f} "
            f"and {self.flipped[layer][head]:.1%} of the answers change; {idle} of {len(flat)} heads change nothing at all."
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


def head_effects(
    model: VisionModel,
    images: Tensor | Iterable[Any],
    *,
    batch_size: int = 64,
    tick: Callable[[int], None] = lambda images: None,
) -> HeadEffects:
    """What the logits lose with each head: one tensor of images, or batches of any number, also a loader's pairs."""
    shape = [operator_of(model, layer).num_heads for layer in range(len(model.blocks))]
    total = torch.zeros(3, len(shape), max(shape), dtype=torch.float64)
    gates = torch.zeros(len(shape), max(shape), dtype=torch.float64)
    gated, count = True, 0
    for batch in images.split(batch_size) if isinstance(images, Tensor) else images:
        some = batch[0] if isinstance(batch, tuple | list) else batch
        with only_looking(model):
            z, grid = model.embed(some)
            for layer, block in enumerate(model.blocks):
                gate = block.operator.decompose(block.norm(z), grid=grid).gate  # type: ignore[union-attr, operator]
                gated = gated and gate is not None
                if gate is not None:
                    gates[layer, : gate.shape[1]] += gate.sum(0).double().cpu()
                z = block(z, grid)
            logits = model.forward_head(model.finish(z))
        chosen = logits.argmax(-1, keepdim=True)
        for layer, head, change in logit_changes(model, some):
            found = (change.norm(dim=-1), change.gather(1, chosen)[:, 0], (logits + change).argmax(-1) != chosen[:, 0])
            total[:, layer, head] += torch.stack([each.double().sum().cpu() for each in found])
        count += len(some)
        tick(len(some))
    if not count:
        raise OptionError("head_effects was given no images.")
    size, chosen_change, flipped = (_rows(each / count, shape) for each in total)
    return HeadEffects(model.config.name, count, size, chosen_change, flipped, _rows(gates / count, shape) if gated else None)


def _rows(values: Tensor, shape: list[int]) -> list[list[float]]:
    return [row[:k] for row, k in zip(values.tolist(), shape, strict=True)]
