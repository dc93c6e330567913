"""The whole layer from the kernels of this folder and the library's matrix products: forward, and backward in closed form.

    forward     scores, membership | projected = z U | moments, gate | output = update W
    backward    G = dout W_out^T | adjoint: dS, dscores | dW_out | dU | dassign | dz = dS U^T + the scores' part

It keeps what `closed_form` keeps, in memory order (b, n, k, p). The backward pass needs room for two more tensors of z's size
at a time: G, in whose place dS is written, and first the update, then the last product, which becomes dz in its place.
With save="nothing" it keeps z alone, and the backward pass begins with the forward pass, all but its last product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmst import rotary
from dmst.kernels import plan
from dmst.kernels.arithmetic import aligned, cast
from dmst.kernels.form import MEMBERSHIP, Form, Weights
from dmst.kernels.fused import calls, hopper, resident
from dmst.kernels.fused.calls import F32, Kept
from dmst.kernels.fused.casts import cast_all


def forward(
    z: Tensor,
    weights: Weights,
    form: Form,
    factors: rotary.Factors | None,
    dtype: torch.dtype,
    scored: tuple[Tensor | None, Tensor | None] | None = None,
    onto: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Kept]:
    """The layer on z (b, n, d), with at least one token. `scored`: what `calls.score` makes of z, where that is known. `onto`:
    what the output is added to, in whose dtype, and the factor of each sample (b, 1, 1)."""
    kept, output, adds = take_steps(z, weights, form, factors, dtype, scored)
    if onto is None:
        return output(), kept
    return output(*onto) if adds and plan.ONTO else add(onto[0], output(), onto[1]), kept


def add(z: Tensor, update: Tensor, keep: Tensor | None) -> Tensor:
    """z + keep * update, in z's dtype."""
    return torch.add(z, update) if keep is None else cast(torch.addcmul(z, keep, update), z.dtype)  # keep may be wider


def take_steps(
    z: Tensor,
    weights: Weights,
    form: Form,
    factors: rotary.Factors | None,
    dtype: torch.dtype,
    scored: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Kept, Callable[..., Tensor], bool]:
    """What there is to keep, the output product, not yet made, and whether it is our own, which adds."""
    z, weights = aligned(z), calls.flat(weights)
    b, n, d = z.shape
    k, p = form.num_heads, d // form.num_heads
    scores, sums = scored or (None, None)
    if weights.assign is not None and scored is None:
        scores, sums = calls.score(z, weights, form, factors)
    tokens = cast(z, dtype)
    matrices, biases = (weights.subspace, _weight_out(weights)), (weights.subspace_bias, weights.out_bias)
    weight_in, weight_out, bias_in, bias_out = cast_all(dtype, *matrices, *biases)

    if _keeps_weighted(z, form, dtype):
        assert scores is not None
        gate, pooled = calls.open_gate(sums, n, form)
        weighted, energy, mass = hopper.project(tokens, weight_in, bias_in, scores)
        folded = torch.empty(b, d, d, device=z.device, dtype=dtype)
        moment, divisor = calls.finish(energy, mass, gate, weight_out, folded, n, form)
        kept = Kept(weighted, scores, pooled, gate, moment, divisor, None)
        return kept, functools.partial(hopper.fold_out, weighted, folded, bias_out), True

    projected, adds = calls.linear(tokens, weight_in, bias_in), calls.by_hand(tokens)
    sweep = plan.whole(b, n, k, p) or plan.sweep(b, n, k, p)
    membership, channel = calls.membership(scores, projected, weights, form, sweep)
    if sweep.splits == 1 and calls.unhurried(z) and resident.fits(n, d, p, dtype, z.device):
        gate, pooled = calls.open_gate(sums, n, form)
        options: dict[str, Any] = {"mode": form.mode, "sign": form.sign, "delta": form.delta, "uniform": form.uniform_moment}
        update, moment, divisor = resident.settle(projected, membership, gate, weights.theta, **options)
        kept = Kept(projected, membership, pooled, gate, moment, divisor, channel)
        return kept, functools.partial(calls.linear, update, weight_out, bias_out), adds

    fits = not (dtype == torch.float16 and form.token_sparse_rescale)  # pi s alone, with pi up to n, overflows float16
    route = plan.route(b, sweep.splits, form.mode, fits=fits)
    energy, mass = calls.partial_sums((b, sweep.splits), k, p, z.device)
    made = torch.empty_like(projected) if route != "apart" else None
    gate = pooled = apart = None
    if route == "along" and form.gate is not None:  # opened on the way
        gate, pooled = (torch.empty(b, k, device=z.device, dtype=F32) for _ in range(2))
    calls.moments(projected, membership, None, sums, energy, mass, gate, pooled, weights.theta, made, form, sweep, route)
    if route == "along":
        moment, divisor = energy.squeeze(1), mass.squeeze(1)
    else:
        gate, pooled = calls.open_gate(sums, n, form)
        apart = torch.empty(b, d, d, device=z.device, dtype=dtype) if route == "fold" else None
        moment, divisor = calls.finish(energy, mass, gate, weight_out, apart, n, form)
    kept = Kept(projected, membership, pooled, gate, moment, divisor, channel)
    if made is None:
        late = functools.partial(calls.update, kept, weights, form, sweep, weighted=False)
        return kept, lambda *onto: calls.linear(late(), weight_out, bias_out, *onto), adds
    if apart is None:
        return kept, functools.partial(calls.linear, made, weight_out, bias_out), adds
    return kept, functools.partial(_fold_out, made, apart, bias_out), False


def _fold_out(weighted: Tensor, folded: Tensor, bias: Tensor | None) -> Tensor:
    """pi s W_b + bias, a product a sample."""
    out = torch.empty_like(weighted)
    for x, w, y in zip(weighted, folded, out, strict=True):
        torch.mm(x, w.mT, out=y) if bias is None else torch.addmm(bias, x, w.mT, out=y)
    return out


def backward(
    dout: Tensor,
    z: Tensor,
    weights: Weights,
    form: Form,
    factors: rotary.Factors | None,
    dtype: torch.dtype,
    kept: Kept,
    wanted: Weights,
    wants_z: bool,
    scored: tuple[Tensor | None, Tensor | None] | None = None,
    apart: dict[str, Tensor] | None = None,
) -> tuple[Any, dict[str, Tensor]]:
    """dz, and the gradient of each weight that is wanted.

    `apart`: who calls adds up the rest. In place of dz the Flow that it is the sum of, and into `apart` what `add_up` takes.
    """
    if form.save == "nothing":
        kept = take_steps(z, weights, form, factors, dtype, scored)[0]  # the update is gone with the product that would read it
    z, dout, weights = aligned(z), aligned(cast(dout, dtype)), calls.flat(weights)
    b, n, d = z.shape
    k, p = form.num_heads, d // form.num_heads
    tokens_in, tokens_out = cast(z, dtype).flatten(0, 1), dout.flatten(0, 1)
    sweep = plan.sweep(b, n, k, p)
    grads: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {} if apart is None else apart
    weight_in, weight_out = cast_all(dtype, weights.subspace, _weight_out(weights))

    weighted = _keeps_weighted(z, form, dtype)
    tied = wanted.subspace and weights.out is None
    wants_out, pulls = bool(wanted.out or tied), calls.pulls(kept, form, weighted)
    dweight_out = total = None
    if weighted and b <= plan.UNFOLDED:  # whatever is wanted: it decides no bit of the others
        products = calls.products(dout, kept.projected)
        total = calls.gather(products, weight_out, form)
        if wants_out:
            dtype_out = F32 if weights.out is None or apart is not None else weights.out.dtype
            dweight_out = calls.unfold(products, kept, form, dtype_out)
        del products
    elif wants_out and not pulls:
        dweight_out = tokens_out.mT @ calls.update(kept, weights, form, sweep, weighted=weighted).flatten(0, 1)
    if wanted.out_bias:
        parts["out_bias"] = calls.column_sums(tokens_out)

    flow = tokens_out @ weight_out  # G, then dS in its place
    given = (flow, kept, weights, form, sweep, bool(wanted.subspace_bias), weighted, total, wants_out)
    dscores, dgate, dtheta, dbias, update = calls.adjoint(*given)
    if update is not None:
        dweight_out = tokens_out.mT @ update.flatten(0, 1)
        del update
    if wanted.out:
        grads["out"] = dweight_out  # type: ignore[assignment]
    if form.membership == "energy":
        dscores = MEMBERSHIP["softmax"].pullback(dscores.mT, None, kept.membership.mT, form).mT.contiguous()
        dtemperature, dbias = calls.energy_adjoint(flow, dscores, kept, weights, form, sweep, bool(wanted.subspace_bias))
        if wanted.temperature:
            grads["temperature"] = dtemperature
    elif form.membership != "sigmoid":
        scale = n if form.token_sparse_rescale else 1
        value = kept.membership.mT / scale
        dscores = MEMBERSHIP[form.membership].pullback(dscores.mT * scale, None, value, form).mT.contiguous()
    if wanted.theta and dtheta is not None:
        grads["theta"] = dtheta.sum()
    if wanted.subspace_bias and dbias is not None:
        parts["subspace_bias"] = dbias.view(-1, d)
    if wanted.subspace:
        grads["subspace"] = flow.mT @ tokens_in
        if tied:
            assert dweight_out is not None
            grads["subspace"] += dweight_out.mT

    if weights.assign is None:
        product = (flow @ weight_in).view_as(z) if wants_z else None
        dz = cast(product, z.dtype) if apart is None or product is None else calls.Flow(product)
    else:
        rest = (kept, weights, form, factors, wanted, wants_z, grads, parts, apart is not None)
        dz = calls.score_adjoint(z, flow, weight_in, dscores, dgate, *rest)
    return dz, grads if apart is not None else grads | calls.add_up(parts, weights)


def _weight_out(weights: Weights) -> Tensor:
    return weights.subspace.mT if weights.out is None else weights.out


def _keeps_weighted(z: Tensor, form: Form, dtype: torch.dtype) -> bool:
    """Whether the first product leaves pi s with its moments, in place of s, and each sample has an output weight."""
    _, n, d = z.shape
    learned = form.membership == "sigmoid" and form.mode != "proximal" and not form.uniform_moment
    return learned and plan.weighted(n, d, dtype) and hopper.serves(z.device, dtype, d, d // form.num_heads)
