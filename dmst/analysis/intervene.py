"""What a head does, by taking it away: the gate is a multiplier, so an intervention is exact and the model computes the rest.

    with forced_gates(model, {11: {3: 0.5}}):     head 3 of layer 11 (both from 0; layer -1 is the last) has gate 0.5 inside
    with switched_off(model, {11: [3]}):          it adds nothing: gate 0, or its channels 0 where there is no gate
    with groups_off(model, {11: {3: [0, 5]}}):    groups 0 and 5 of head 3 pull no token: their attenuation is 0 (GMSA)

    output = bias + sum_k update_k(g_k) W_out,k, so head k off takes exactly update_k W_out,k away (theory: g = 0 skips a head)
    update_k of a token is g sum_g pi a (mu - s), so a group off takes its own term away; of `proximal`, its part of A and M

The forced gate replaces the computed one in `steps`, in plain torch, whatever `use_kernels` says; memberships and moments stay
as they are, since neither depends on the gate. `trace` and `decompose` show the forced gate too. A graph that was exported
before does not know of it; torch.compile does, and compiles again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from dmst.errors import OptionError, number, shown
from dmst.kernels.mixture import MixtureSteps
from dmst.models import VisionModel
from dmst.operators import GMSA, MHSA, MSSA, XCA, Operator
from dmst.operators.base import Grid
from dmst.operators.family import TokenStatistics

Gates = Mapping[int, Mapping[int, float]]
Groups = Mapping[int, Mapping[int, Iterable[int]]]


@contextmanager
def forced_gates(model: VisionModel, gates: Gates) -> Iterator[None]:
    """{layer: {head: gate}}, inside the block only. One inside another: both hold, the inner one wins where they differ."""
    with ExitStack() as undo:
        for layer, heads in gates.items():
            operator = operator_of(model, layer)
            values = {_head(operator, head): number("gate", value, -torch.inf, torch.inf) for head, value in heads.items()}
            if isinstance(operator, TokenStatistics | GMSA):
                undo.enter_context(_gates_of(operator, values))
            else:
                undo.enter_context(_silent_channels(operator, values))
        yield


@contextmanager
def switched_off(model: VisionModel, heads: Mapping[int, Iterable[int]]) -> Iterator[None]:
    """{layer: heads}: these add nothing to the output of their layers, inside the block only."""
    with forced_gates(model, {layer: dict.fromkeys(off, 0.0) for layer, off in heads.items()}):
        yield


@contextmanager
def groups_off(model: VisionModel, groups: Groups) -> Iterator[None]:
    """{layer: {head: groups}}: these pull no token, inside the block only. Memberships and means stay as they are."""
    with ExitStack() as undo:
        for layer, heads in groups.items():
            operator = operator_of(model, layer)
            if not isinstance(operator, GMSA):
                raise OptionError(f"{type(operator).__name__} in layer {layer} has no groups to switch off: only GMSA has.")
            if not isinstance(heads, Mapping):
                raise OptionError(f"groups of layer {layer} are {shown(heads)}: give {{head: groups}}, such as {{1: [3]}}.")
            off = torch.zeros(operator.num_heads, operator.form.groups, dtype=torch.bool)
            for head, some in heads.items():
                off[_head(operator, head), [_group(operator, group) for group in some]] = True
            undo.enter_context(_silent_groups(operator, off))
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


def _group(operator: GMSA, group: int) -> int:
    if type(group) is not int or not 0 <= group < operator.form.groups:
        raise OptionError(f"group is {shown(group)}: the heads have groups 0 to {operator.form.groups - 1}.")
    return group


@contextmanager
def _changed_steps(operator: TokenStatistics | GMSA, change: Callable[[Any], Any]) -> Iterator[None]:
    """The operator's own steps, changed, in plain torch; the attributes of the instance go again afterwards."""
    inner, before = operator.steps, {name: operator.__dict__.get(name) for name in ("steps", "is_plain")}

    def steps(z: Tensor, grid: Grid = None) -> Any:
        return change(inner(z, grid))

    operator.__dict__ |= {"steps": steps, "is_plain": lambda: False}  # not the class: other layers stay as they are
    try:
        yield
    finally:
        for name, method in before.items():
            del operator.__dict__[name]
            if method is not None:
                operator.__dict__[name] = method


@contextmanager
def _gates_of(operator: TokenStatistics | GMSA, values: Mapping[int, float]) -> Iterator[None]:
    """With these gates put in."""
    if operator.form.gate is None and any(values.values()):
        raise OptionError(f"{type(operator).__name__} has no gate here: its heads can be switched off (0), not weighed.")

    def forced(found: Any) -> Any:
        ones = found.mass[..., 0] if isinstance(operator, GMSA) else found.divisor
        gate = torch.ones_like(ones) if found.gate is None else found.gate.clone()
        for head, value in values.items():
            gate[..., head] = value
        return found._replace(gate=gate)

    with _changed_steps(operator, forced):
        yield


@contextmanager
def _silent_groups(operator: GMSA, off: Tensor) -> Iterator[None]:
    """With the groups in `off` (k, g) silent, besides those that already are."""

    def silenced(found: MixtureSteps) -> MixtureSteps:
        silent = off.to(found.mass.device)
        return found._replace(silent=silent if found.silent is None else silent | found.silent)

    with _changed_steps(operator, silenced):
        yield


@contextmanager
def _silent_channels(operator: Operator, values: Mapping[int, float]) -> Iterator[None]:
    """Softmax attention: what a head hands to the output projection is 0; tied to the subspaces, what it takes from them."""
    name = type(operator).__name__
    if not isinstance(operator, MHSA | MSSA | XCA):
        raise OptionError(f"{name}: where its heads enter the output is not known here, so none can be switched off.")
    if any(values.values()):
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
