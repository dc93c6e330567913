"""Second moments of the projected tokens, by membership, and the update that they attenuate.

    energy_ki = sum_n pi_nk s_nki^2        mass_k = sum_n pi_nk        T = energy/(mass + delta)
    update_nki = f(pi_nk, c_ki) s_nki      with f and c of `core`, in the dtype of s; the gate on the way, by `gate.opened`

A short sample in 16 bits is read once: a program holds its channels of all tokens in registers (`HELD` tiles of them). A longer
one is read again for the update. Where there are few samples their tokens are split over programs, a launch a sweep; each
leaves one row of partial sums, which are added up between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.form import Form
from dmst.kernels.fused import gate as gates
from dmst.kernels.fused.core import MODES, PROXIMAL, attenuation, factor, weigh
from dmst.kernels.fused.gate import of_heads, opened
from dmst.kernels.fused.launch import launch, op
from dmst.kernels.fused.tiles import by_group, group_block, held_on, places, read, rows, write


@triton.jit
def _divisor(mass, delta: tl.constexpr):
    if delta > 0:
        return mass + delta
    return tl.where(mass > 0, mass, tl.where(mass != mass, mass, 1.0))


@triton.jit
def moments_kernel(
    s_ptr, weight_ptr, score_ptr, theta_ptr, sums_ptr, moment_ptr, divisor_ptr, update_ptr, gate_ptr, pooled_ptr,
    n, span, splits, tiles,
    delta: tl.constexpr, scale: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    HELD: tl.constexpr, UNIFORM: tl.constexpr, SUM: tl.constexpr, UPDATE: tl.constexpr, MODE: tl.constexpr,
    ALL: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`SUM` alone leaves rows of energy and mass (`UNIFORM`: of pi = 1); `UPDATE` alone reads what they sum to."""
    sample, split, start = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * GROUPS
    group, head, column, inside = group_block(GROUPS, WIDTH, PARTS, K, P, start)
    at, known, token = rows(start, TOKENS, GROUPS, WIDTH, PARTS, K, P)
    place, some, nth = places(head, TOKENS, K)
    row, count = sample * n + split * span, tl.minimum(span, n - split * span)
    s_ptr += row * (K * P)
    if UPDATE:
        update_ptr += row * (K * P)
    if not UNIFORM:
        weight_ptr += row * K
    if not (SUM and UPDATE):
        sums_ptr += (sample * splits + split if SUM else sample) * (K * P + K)
    once = (head[:, None] < K) & (group[:, None] % PARTS == 0)  # what a head has once, its first group writes
    held, shares = (), ()
    if SUM:
        energy, mass = tl.zeros((TOKENS, GROUPS, WIDTH), tl.float32), tl.zeros((TOKENS, GROUPS, 1), tl.float32)
        for i in tl.static_range(HELD):
            held += (read(s_ptr + i * TOKENS * K * P, at, known, token, count - i * TOKENS),)
            shares += (read(weight_ptr + i * TOKENS * K, place, some, nth, count - i * TOKENS),)
        for i in tl.static_range(HELD):
            s = by_group(held[i], GROUPS)
            energy += s * s * shares[i]
            mass += shares[i]
        for first in tl.range(0, 0 if HELD else count, TOKENS, num_stages=STAGES):
            s = by_group(read(s_ptr + first * (K * P), at, known, token, count - first), GROUPS)
            left = some & (nth < count - first)
            pi = left.to(tl.float32) if UNIFORM else tl.load(weight_ptr + first * K + place, mask=left, other=0.0)
            energy += s * s * pi
            mass += pi
        total, whole = tl.sum(energy, 0), tl.sum(mass, 0)
        if not UPDATE:
            tl.store(sums_ptr + column, total, mask=inside)
            tl.store(sums_ptr + K * P + head[:, None], whole, mask=once)
    else:
        total = tl.load(sums_ptr + column, mask=inside, other=0.0)
        whole = tl.load(sums_ptr + K * P + head[:, None], mask=head[:, None] < K, other=0.0)
    if UPDATE:
        whole = _divisor(whole, delta)
        moment, gate = total / whole, tl.full((GROUPS, 1), 1.0, tl.float32)
        if GATE:
            pooled, every = opened(score_ptr, sample, n, tiles, scale, K, ALL, GATE, ROWS)
            gate = of_heads(every, head)[:, None]
            if split == 0:
                tl.store(gate_ptr + sample * K + head[:, None], gate, mask=once)
                tl.store(pooled_ptr + sample * K + head[:, None], of_heads(pooled, head)[:, None], mask=once)
        if split == 0:
            tl.store(divisor_ptr + sample * K + head[:, None], whole, mask=once)
            tl.store(moment_ptr + sample * (K * P) + column, moment, mask=inside)
        theta = tl.load(theta_ptr).to(tl.float32) if MODE == PROXIMAL else 1.0
        c = factor(attenuation(moment, gate), gate, theta, MODE)[None]
        for i in tl.static_range(HELD):
            update = weigh(shares[i], c, MODE) * by_group(held_on(held[i], count), GROUPS)
            write(update_ptr + i * TOKENS * K * P, update, at, known, token, count - i * TOKENS)
        for first in tl.range(0, 0 if HELD else count, TOKENS, num_stages=STAGES):
            s = by_group(read(s_ptr + first * (K * P), at, known, token, count - first), GROUPS)
            pi = read(weight_ptr + first * K, place, some, nth, count - first)
            write(update_ptr + first * (K * P), weigh(pi, c, MODE) * s, at, known, token, count - first)


@op()
def settle(
    projected: Tensor, membership: Tensor, scores: Tensor | None, theta: Tensor | None, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of projected (b, n, k p), membership (b, n, k) and, for a gate, sums of scores (b, tiles, k): update (b, n, k p), T
    (b, k, p) and its divisor (b, k), the gate and the pooled scores (b, k), which are empty where there is none."""
    told, update, (b, _, d) = Form.read(form), torch.empty_like(projected), projected.shape
    k, gated = told.num_heads, (b if scores is not None else 0, told.num_heads)
    sizes = (b, k, d // k), (b, k), gated, gated
    moment, divisor, gate, pooled = (torch.empty(size, device=projected.device, dtype=torch.float32) for size in sizes)
    found = _rows(projected, membership, told) if sweep_of(projected, told).splits > 1 else None
    _launch(projected, membership, scores, theta, found, (moment, divisor, update, gate, pooled), told)
    return update, moment, divisor, gate, pooled


def energies(projected: Tensor, weight: Tensor | None, form: Form) -> Tensor:
    """sum_n weight s^2 (b, k, p), by weights (b, n, k)."""
    (b, _, d), k = projected.shape, form.num_heads
    return _rows(projected, weight, form)[:, :d].view(b, k, d // k)


def _rows(projected: Tensor, weight: Tensor | None, form: Form) -> Tensor:
    """Energies and masses, (b, k p + k)."""
    (b, _, d), splits = projected.shape, sweep_of(projected, form).splits
    found = torch.empty(b, splits, d + form.num_heads, device=projected.device, dtype=torch.float32)
    _launch(projected, weight, None, None, found, None, form)
    return found.sum(1)


def sweep_of(projected: Tensor, form: Form) -> plan.Sweep:
    (b, n, d), k = projected.shape, form.num_heads
    return plan.sweep("settle", b, n, k, d // k, projected.dtype)


def _launch(
    projected: Tensor, weight: Tensor | None, scores: Tensor | None, theta: Tensor | None,
    sums: Tensor | None, made: tuple[Tensor, ...] | None, form: Form,
) -> None:  # fmt: skip
    (b, n, d), k, sweep = projected.shape, form.num_heads, sweep_of(projected, form)
    scores, gate = gates.sizes(scores, *form.gate_choice)
    launch(
        moments_kernel, (b, sweep.splits, sweep.blocks),
        projected, weight, scores, theta, sums, *(made or (None,) * 5),
        n, sweep.span, sweep.splits, 0 if scores is None else scores.shape[1],
        delta=form.delta, K=k, P=d // k, **sweep.block, **gate, UNIFORM=weight is None, SUM=sums is None or made is None,
        UPDATE=made is not None, HELD=sweep.held if sums is None else 0, MODE=MODES[form.mode], STAGES=sweep.stages,
        num_warps=sweep.warps,
    )  # fmt: skip
