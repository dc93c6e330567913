"""A short sample of few heads without its silent ones, on Hopper, in Gluon: what `short.py` does, where 128 columns are enough.

    s = z U_on + bias          all tokens by 128 columns, the sums in registers
    update = f(pi, c) s        with c from sums over them; rounded, it is the left side of the next product where it is
    out = update W_on + bias   64 channels at a time

Columns are those of `active.py`. A program takes every so many-th sample and passes over those with more heads, which are left
to `short_kernel`: one program a multiprocessor, as long as the launch lasts. Eight of its warps do all of the above. One other
has the copy engine bring what they read, in pieces of 64 channels, as far ahead as there is room, into the next sample:

    ring, columns   a piece of z and of U_on, `STAGES` of them. Of z a box is one sample by TOKENS by 64: it ends with zeros
                    beyond n, and of the output nothing beyond n is written
    blocks          64 channels of W_on, as two halves of 64 columns of s, `BLOCKS` of them
    page            64 channels of the output, on their way to memory

Rows of the weights come in boxes that lie in one head, the largest power of two in p. A box of no head is asked for beyond the
last row and is zeros: no column needs a mask, and nothing that lay there before, which may be NaN, is multiplied by 0.

Pieces are counted over all samples of a program, and so are blocks: number i lies in slot i % STAGES, and its barriers, "it is
there" and "all eight warps are done with it", have parity i // STAGES.
"""

# mypy: disallow-untyped-defs=False, disable-error-code="assignment, misc, var-annotated"
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.form import Form
from dmst.kernels.fused import hopper
from dmst.kernels.fused.core import MODES, PROXIMAL, attenuation, factor, weigh
from dmst.kernels.fused.hopper import (
    SWIZZLED,
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dmst.kernels.fused.launch import Cut, launch, launched, planned

if hopper.GLUON:
    SAMPLE = gl.NVMMASharedLayout(128, 16, 3)
    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

FEW: gl.constexpr = gl.constexpr(plan.FEW)


@gluon.jit
def _following(active_ptr, sample, b, K: gl.constexpr, P: gl.constexpr):
    """From `sample` on the first one of this program that has few heads; b or more if there is none."""
    looking = sample < b
    while looking:
        many = gl.load(active_ptr + sample.to(gl.int64) * (K + 1)) * P > FEW
        sample = gl.where(many, sample + gl.num_programs(0), sample)
        looking = many & (sample < b)
    return sample


@gluon.jit
def _heads(active_ptr, sample, K: gl.constexpr, P: gl.constexpr):
    """Which heads the 128 columns belong to; K, whose rows would lie behind the last ones of the weights, where to none."""
    active_ptr += sample.to(gl.int64) * (K + 1)
    count = gl.load(active_ptr)
    heads = ()
    for h in gl.static_range((FEW - 1) // P + 1):
        if (h + 1) * P <= FEW and h < K:  # as many as there can be
            heads += (gl.where(h < count, gl.load(active_ptr + 1 + h), K),)
        else:
            heads += (K,)
    return heads


@gluon.jit
def _bring(z, weight, shared, barriers, sample, heads, piece, k: gl.constexpr, P: gl.constexpr):
    """Piece k of a sample's tokens, and of the active rows of the first weight."""
    TOKENS: gl.constexpr = z.block_shape[1]
    BOX: gl.constexpr = weight.block_shape[0]
    STAGES: gl.constexpr = shared[0].shape[0]
    ring, columns, _ = shared
    full, empty, _, _ = barriers
    stage = piece % STAGES
    here = full.index(stage)
    mbarrier.wait(empty.index(stage), (piece // STAGES + 1) & 1)
    mbarrier.expect(here, (TOKENS + FEW) * 64 * 2)
    seen = ring.index(stage)._reinterpret(z.dtype, [1, TOKENS, 64], z.layout)
    tma.async_copy_global_to_shared(z, [sample, 0, k * 64], here, seen)
    for j in gl.static_range(FEW // BOX):
        to = columns.index(stage).slice(j * BOX, BOX)
        tma.async_copy_global_to_shared(weight, [heads[j * BOX // P] * P + j * BOX % P, k * 64], here, to)


@gluon.jit
def _bring_block(weight, shared, barriers, heads, block, i: gl.constexpr, P: gl.constexpr):
    """Block i of the active rows of the second weight, in two halves."""
    BOX: gl.constexpr = weight.block_shape[0]
    BLOCKS: gl.constexpr = shared[2].shape[0] // 2
    _, _, blocks = shared
    _, _, full, empty = barriers
    slot = block % BLOCKS
    here = full.index(slot)
    mbarrier.wait(empty.index(slot), (block // BLOCKS + 1) & 1)
    mbarrier.expect(here, FEW * 64 * 2)
    for j in gl.static_range(FEW // BOX):
        to = blocks.index(slot * 2 + j * BOX // 64).slice(j * BOX % 64, BOX)
        tma.async_copy_global_to_shared(weight, [heads[j * BOX // P] * P + j * BOX % P, i * 64], here, to)


@gluon.jit
def _produce(z, weight_in, weight_out, active_ptr, b, shared, barriers, D: gl.constexpr, K: gl.constexpr, P: gl.constexpr):
    """Pieces and blocks, each as soon as there is room: the next sample's first ones while this one's are in use."""
    PIECES: gl.constexpr = D // 64
    STAGES: gl.constexpr = shared[0].shape[0]
    BLOCKS: gl.constexpr = shared[2].shape[0] // 2
    sample = _following(active_ptr, gl.program_id(0), b, K, P)
    if sample < b:
        heads = _heads(active_ptr, sample, K, P)
        for k in gl.static_range(STAGES):
            _bring(z, weight_in, shared, barriers, sample, heads, k, k, P)
        for i in gl.static_range(BLOCKS):
            _bring_block(weight_out, shared, barriers, heads, i, i, P)
    done = 0  # pieces, and blocks, of the samples before
    while sample < b:
        following = _following(active_ptr, sample + gl.num_programs(0), b, K, P)
        more = following < b
        heads = _heads(active_ptr, sample, K, P)
        ahead = _heads(active_ptr, gl.minimum(following, b - 1), K, P)
        for k in gl.static_range(STAGES, PIECES):
            _bring(z, weight_in, shared, barriers, sample, heads, done + k, k, P)
        if more:
            for k in gl.static_range(STAGES):
                _bring(z, weight_in, shared, barriers, following, ahead, done + PIECES + k, k, P)
        for i in gl.static_range(BLOCKS, PIECES):
            _bring_block(weight_out, shared, barriers, heads, done + i, i, P)
        if more:
            for i in gl.static_range(BLOCKS):
                _bring_block(weight_out, shared, barriers, ahead, done + PIECES + i, i, P)
        done += PIECES
        sample = following


@gluon.jit
def _spread(values, column, P: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """The value of each column's head, for so many columns from FIRST on; heads begin at multiples of 16."""
    spread = values[FIRST // P]
    for h in gl.static_range(FIRST // P + 1, (FIRST + WIDTH - 1) // P + 1):
        spread = gl.where(column // 16 * 16 >= h * P, values[h], spread)
    return spread


@gluon.jit
def _project(
    bias_ptr, heads, shared, barriers, done,
    D: gl.constexpr, P: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """s of one sample, as two halves of 64 columns. A piece is given back once the next product is on its way."""
    PIECES: gl.constexpr = D // 64
    STAGES: gl.constexpr = shared[0].shape[0]
    WHOLE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 128, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    ring, columns, _ = shared
    full, empty, _, _ = barriers
    sums = gl.zeros([TOKENS, FEW], gl.float32, WHOLE)
    if BIAS:
        begins = ()
        for h in gl.static_range((FEW - 1) // P + 1):
            begins += ((heads[h] - h) * P,)
        column = gl.arange(0, FEW, layout=gl.SliceLayout(0, WHOLE))
        origin = _spread(begins, column, P, 0, FEW) + column
        sums += gl.expand_dims(gl.load(bias_ptr + origin, mask=origin < D, other=0.0).to(gl.float32), 0)
    for k in gl.static_range(PIECES):
        stage = (done + k) % STAGES
        mbarrier.wait(full.index(stage), ((done + k) // STAGES) & 1)
        u = columns.index(stage).permute((1, 0))
        sums = warpgroup_mma(ring.index(stage), u, sums, use_acc=BIAS or k > 0, is_async=True)
        if k > 0:
            sums = warpgroup_mma_wait(1, deps=(sums,))
            barrier()  # both warpgroups are done with it
            mbarrier.arrive(empty.index((done + k - 1) % STAGES), count=1)
    sums = warpgroup_mma_wait(0, deps=(sums,))
    barrier()
    mbarrier.arrive(empty.index((done + PIECES - 1) % STAGES), count=1)
    left, right = sums.reshape([TOKENS, 2, 64]).permute(0, 2, 1).split()
    return gl.convert_layout(left, HALF, assert_trivial=True), gl.convert_layout(right, HALF, assert_trivial=True)


@gluon.jit
def _begin(parts, bias_ptr, shared, barriers, block, i, LAYOUT: gl.constexpr, BIAS: gl.constexpr):
    """The products of block i of the output, on their way: of both halves of the columns."""
    BLOCKS: gl.constexpr = shared[2].shape[0] // 2
    _, _, blocks = shared
    _, _, full, _ = barriers
    slot = block % BLOCKS
    sums = gl.zeros([parts[0].shape[0], 64], gl.float32, LAYOUT)
    if BIAS:
        bias = gl.load(bias_ptr + i * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT)))
        sums += gl.expand_dims(bias.to(gl.float32), 0)
    mbarrier.wait(full.index(slot), (block // BLOCKS) & 1)
    sums = warpgroup_mma(parts[0], blocks.index(slot * 2), sums, use_acc=BIAS, is_async=True)
    return warpgroup_mma(parts[1], blocks.index(slot * 2 + 1), sums, is_async=True)


@gluon.jit
def _leave(made, out, page, barriers, sample, i, block, BLOCKS: gl.constexpr):
    """Block i of the output to memory; its products are done, and their part of the weight is given back."""
    tma.store_wait(0)
    barrier()  # the page has been read, and both warpgroups are done with the block
    mbarrier.arrive(barriers[3].index(block % BLOCKS), count=1)
    page.store(made)
    fence_async_shared()
    barrier()
    seen = page._reinterpret(page.dtype, [1, page.shape[0], 64], out.layout)
    tma.async_copy_shared_to_global(out, [sample, 0, i * 64], seen)


@gluon.jit
def _consume(
    out, given, numbers, page, factors, shared, barriers,
    D: gl.constexpr, K: gl.constexpr, P: gl.constexpr, WARPS: gl.constexpr, BIAS_IN: gl.constexpr, BIAS_OUT: gl.constexpr,
    DELTA: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    PIECES: gl.constexpr = D // 64
    TOKENS: gl.constexpr = page.shape[0]
    BLOCKS: gl.constexpr = shared[2].shape[0] // 2
    HEADS: gl.constexpr = (FEW - 1) // P + 1  # that 128 columns belong to, the last one perhaps in part
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    MOST: gl.constexpr = FEW // P if FEW // P < K else K  # of these, heads that there can be
    TOKEN: gl.constexpr = gl.SliceLayout(1, HALF)
    COLUMN: gl.constexpr = gl.SliceLayout(0, HALF)
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, HALF, 2)
    bias_in_ptr, bias_out_ptr, membership_ptr, gate_ptr, active_ptr, theta_ptr = given
    b, n, delta, sign = numbers
    theta = gl.load(theta_ptr).to(gl.float32) if MODE == PROXIMAL else 1.0
    token = gl.arange(0, TOKENS, layout=TOKEN)
    sample = _following(active_ptr, gl.program_id(0), b, K, P)
    done = 0
    while sample < b:
        heads = _heads(active_ptr, sample, K, P)
        at = sample.to(gl.int64)
        shares = ()
        gates = ()
        for h in gl.static_range(HEADS):  # on their way during the products
            if h < MOST:
                on = heads[h] < K
                shares += (gl.load(membership_ptr + (at * n + token) * K + heads[h], mask=(token < n) & on, other=0.0),)
                gates += (gl.load(gate_ptr + at * K + heads[h], mask=on, other=0.0),)
            else:
                shares += (gl.zeros([TOKENS], gl.float32, TOKEN),)
                gates += (0.0,)
        halves = _project(bias_in_ptr, heads, shared, barriers, done, D, P, TOKENS, WARPS, BIAS_IN)

        divisors = ()
        across = ()
        for h in gl.static_range(HEADS):
            if h < MOST:
                mass = gl.sum(shares[h], axis=0)
                if DELTA:
                    divisors += (mass + delta,)
                else:
                    divisors += (gl.where(mass > 0, mass, gl.where(mass != mass, mass, 1.0)),)
            else:
                divisors += (1.0,)
            across += (gl.expand_dims(shares[h], 1),)
        column = gl.expand_dims(gl.arange(0, 64, layout=COLUMN), 0)
        for c in gl.static_range(2):  # of a column without head s, membership and gate are 0, and so will be its update
            pi = _spread(across, c * 64 + column, P, c * 64, 64)
            energy = gl.convert_layout(gl.sum(pi * halves[c] * halves[c], axis=0), FLAT)
            place = c * 64 + gl.arange(0, 64, layout=FLAT)
            gate = _spread(gates, place, P, c * 64, 64)
            a = attenuation(energy / _spread(divisors, place, P, c * 64, 64), gate)
            factors.index(c).store(factor(a, gate, theta, sign, MODE))
        barrier()
        parts = ()
        for c in gl.static_range(2):
            pi = _spread(across, c * 64 + column, P, c * 64, 64)
            f = weigh(pi, gl.expand_dims(factors.index(c).load(COLUMN), 0), MODE)
            parts += (gl.convert_layout((f * halves[c]).to(page.dtype), LEFT, assert_trivial=True),)

        sums = _begin(parts, bias_out_ptr, shared, barriers, done, 0, HALF, BIAS_OUT)
        for i in range(PIECES - 1):  # half as many registers wait for the page while the next products run
            made = warpgroup_mma_wait(0, deps=(sums, parts[0], parts[1]))[0].to(page.dtype)  # the left side is in use, too
            sums = _begin(parts, bias_out_ptr, shared, barriers, done + i + 1, i + 1, HALF, BIAS_OUT)
            _leave(made, out, page, barriers, sample, i, done + i, BLOCKS)
        made = warpgroup_mma_wait(0, deps=(sums, parts[0], parts[1]))[0].to(page.dtype)
        _leave(made, out, page, barriers, sample, PIECES - 1, done + PIECES - 1, BLOCKS)
        done += PIECES
        sample = _following(active_ptr, sample + gl.num_programs(0), b, K, P)
    tma.store_wait(0)


@launched
@gluon.jit
def few_kernel(
    z, weight_in, weight_out, out, bias_in_ptr, bias_out_ptr, membership_ptr, gate_ptr, active_ptr, theta_ptr,
    b, n, delta, sign,
    D: gl.constexpr, K: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr,
    BIAS_IN: gl.constexpr, BIAS_OUT: gl.constexpr, DELTA: gl.constexpr, MODE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """z and out (b, n, D), weight_in (D, D) by columns of s, weight_out (D, D) by columns of the update: out = update W."""
    TOKENS: gl.constexpr = z.block_shape[1]
    ring = gl.allocate_shared_memory(z.dtype, [STAGES, TOKENS, 64], weight_in.layout)
    columns = gl.allocate_shared_memory(z.dtype, [STAGES, FEW, 64], weight_in.layout)
    blocks = gl.allocate_shared_memory(z.dtype, [2 * BLOCKS, 64, 64], weight_in.layout)
    page = gl.allocate_shared_memory(z.dtype, [TOKENS, 64], weight_in.layout)
    factors = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    block_full = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    block_empty = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(BLOCKS):
        mbarrier.init(block_full.index(i), count=1)
        mbarrier.init(block_empty.index(i), count=1)
    fence_async_shared()
    barrier()

    shared = (ring, columns, blocks)
    barriers = (full, empty, block_full, block_empty)
    given = (bias_in_ptr, bias_out_ptr, membership_ptr, gate_ptr, active_ptr, theta_ptr)
    numbers = (b, n, delta, sign)
    gl.warp_specialize(
        [
            (
                _consume,
                (out, given, numbers, page, factors, shared, barriers, D, K, P, WARPS, BIAS_IN, BIAS_OUT, DELTA, MODE),
            ),
            (_produce, (z, weight_in, weight_out, active_ptr, b, shared, barriers, D, K, P)),
        ],
        [1],
        [24],
    )


# --- the call -------------------------------------------------------------------------------------------------------


def serves(device: torch.device, dtype: torch.dtype, n: int, d: int, p: int) -> bool:
    """Whether `attend` takes samples of n tokens of this kind, with d channels in heads of p."""
    if not hopper.GLUON or torch.version.hip is not None or device.type != "cuda":
        return False
    if dtype not in (torch.bfloat16, torch.float16) or not 64 < n <= 256:
        return False
    if d % 64 or not 64 <= d <= 1024 or p % 16 or not 16 <= p <= plan.FEW:
        return False
    return hopper._machine(torch.cuda.current_device() if device.index is None else device.index)[0]


def attend(
    z: Tensor, membership: Tensor, gate: Tensor, active: Tensor, theta: Tensor | None, weight_in: Tensor, weight_out: Tensor,
    bias_in: Tensor | None, bias_out: Tensor | None, out: Tensor, form: Form,
) -> None:  # fmt: skip
    """The layer from its gate on, into those samples of out (b, n, d) that have at most `plan.FEW` columns of active heads.

    Weights are contiguous, both with a row for each column of s: s = z weight_in^T, and out = update weight_out.
    """
    assert FEW.value == plan.FEW, "the kernel was defined for another number of columns"
    b, n, d = z.shape
    tokens, p = max(128, plan.power_of_two(n)), d // form.num_heads
    cut = _plan(z.get_device(), form, b, d, tokens, bias_in is not None, bias_out is not None)
    launch(
        few_kernel, cut,
        _samples(z, tokens), _rows(weight_in, p), _rows(weight_out, p), _samples(out, tokens), bias_in, bias_out,
        membership, gate, active, theta, b, n, float(form.delta), float(form.sign),
    )  # fmt: skip


@lru_cache(1024)
def _plan(index: int, form: Form, b: int, d: int, tokens: int, bias_in: bool, bias_out: bool) -> Cut:
    k, pieces = form.num_heads, d // 64
    return planned(
        (min(b, hopper._machine(index)[1]),),
        D=d, K=k, P=d // k, STAGES=min(pieces, 3 if tokens == 256 else 4), BLOCKS=min(pieces, 2),
        BIAS_IN=bias_in, BIAS_OUT=bias_out, DELTA=bool(form.delta), MODE=MODES[form.mode], WARPS=8,
        num_warps=8, maxnreg=168,
    )  # fmt: skip


def _samples(x: Tensor, tokens: int) -> Any:
    """x (b, n, d) for the copy engine: a sample by so many tokens by 64 channels."""
    _, n, d = x.shape
    return _described(x, [*x.shape], [n * d, d, 1], [1, tokens, 64], SAMPLE)


def _rows(weight: Tensor, p: int) -> Any:
    """A weight (d, d): rows of one head by 64 columns."""
    d = weight.shape[1]
    return _described(weight, [*weight.shape], [d, 1], [min(p & -p, 64), 64], SWIZZLED)


def _described(x: Tensor, shape: list[int], strides: list[int], box: list[int], layout: Any) -> Any:
    """Without the constructor, which would check at length what is known here."""
    assert x.is_contiguous() and x.data_ptr() % 16 == 0, "the copy engine takes aligned rows"
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape, made.layout = x, shape, strides, box, layout
    return made
