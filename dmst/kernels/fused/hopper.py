"""The two large products on Hopper, in Gluon, with what the passes next to them would otherwise read or write again.

    product    out = x weight^T + bias
    hidden     out = gelu(x weight^T + bias)         as wide as the weight has rows
    project    s = x weight^T + bias, float32        weighted_nki = pi_nk s_nki, in place of s
               energy_ki = sum_n pi_nk s_nki^2       mass_k = sum_n pi_nk
    fold_out   out_b = x_b weight_b^T + bias         a weight for each sample
    onto z     z_b + keep_b out_b in place of out, in the dtype of z, from the float32 sums

One program a multiprocessor, as long as the launch lasts. It holds 192, 128 or 64 rows of the weight in shared memory, that is
its columns of the output (whole heads), and walks over its share of the tokens. Its warps have three tasks at the same time:

    producer     one warp: the copy engine brings x in pieces of 64 tokens by 64 channels, into a ring of 8 slots
    consumer 0   four warps: a tile of 64 tokens, first its products, then what becomes of them
    consumer 1   the same with another tile, and multiplies while consumer 0 finishes

Onto z: behind a tile's pieces of x the producer brings those of z, 64 tokens by 64 channels, in float32 by 32. A consumer adds
to them where they lie, and from there the copy engine takes the sum: no page, and 10 slots.

A consumer takes a run of `tiles` tiles, the two of them a pair of runs, a program pairs that follow each other. The sums of
`project` stay in registers for a run. Each warp has a quarter of every tile and leaves a row of its own: 4 n / (64 tiles) rows
a sample, all of them written.

Barriers. Slots follow the order of the producer. That a piece has come is told on one of as many barriers of its consumer, in
the order of that consumer's pieces: a common barrier could be two phases behind the one who waits, which its parity does not
show. A piece of the weight has two, for "it is there" and for "both consumers are done with it", so that the next sample's
pieces come while the last ones are still in use. A consumer has given back every slot of a tile when it waits for its next
tile: the other's lies between them, and the ring may hold no more than that.
"""

# mypy: disallow-untyped-defs=False, disable-error-code=assignment
from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from dmst.kernels.arithmetic import aligned
from dmst.kernels.fused.launch import flops, is_fake, op
from dmst.kernels.plan import over

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    GLUON = triton.__version__.startswith(("3.6.", "3.7.", "3.8."))  # an experiment of theirs: only where this was compiled
    SWIZZLED, WIDE = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(128, 32, 2)
except ImportError:
    import triton as gluon  # enough for the definitions below, which nobody calls then
    import triton.language as gl

    GLUON = False
    fence_async_shared = mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = TensorDescriptor = SWIZZLED = None

# gelu(x) = x Phi(x) = x / (1 + 2^(x q(x^2))), q a polynomial, its highest coefficient first. Fitted: in float32 it is off by at
# most 6e-7, and from -3 on by 2e-5 of itself. Its limits are right: q falls for ever.
GELU: gl.constexpr = gl.constexpr(
    (-4.78161562e-9, 3.62801069e-7, -1.10290295e-5, 1.5569583e-4, 1.10615411e-4, -0.104863936, -2.30219511)
)


@gluon.jit
def _produce(
    x, weight, residual, shared, barriers, work,
    D: gl.constexpr, COLUMNS: gl.constexpr, ALL: gl.constexpr, BY_SAMPLE: gl.constexpr,
):  # fmt: skip
    """Every piece of x and z in the order in which it is needed, and of the weight with the first tile that needs it."""
    PIECES: gl.constexpr = D // 64
    SLOTS: gl.constexpr = shared[0].shape[0]
    ring, weights, rests = shared
    full, empty, weight_full, weight_empty = barriers
    first, last, tiles, pairs, block = work
    for tile in range((last - first) * tiles * 2):
        which, own = tile % 2, tile // 2
        pair = first + own // tiles
        row = ((pair * 2 + which) * tiles + own % tiles) * 64
        if BY_SAMPLE:
            sample = pair // pairs
            turn = (sample - first // pairs) & 1
            fresh = (which == 0) & ((own == 0) | (pair % pairs == 0))
        else:
            sample = 0
            turn = 0
            fresh = tile == 0
        for k in gl.static_range(PIECES):
            piece, mine = tile * ALL + k, own * ALL + k
            mbarrier.wait(empty.index(piece % SLOTS), (piece // SLOTS + 1) & 1)
            here = full.index(which * SLOTS + mine % SLOTS)
            mbarrier.expect(here, 64 * 64 * 2)
            tma.async_copy_global_to_shared(x, [row, k * 64], here, ring.index(piece % SLOTS))
            if fresh:
                mbarrier.wait(weight_empty.index(k), turn ^ 1)
                mbarrier.expect(weight_full.index(k), COLUMNS * 64 * 2)
                for c in gl.static_range(COLUMNS // 64):
                    to = rests.index(k) if c == 2 else weights.index(k).slice(c * 64, 64)
                    at = sample * D + block * COLUMNS + c * 64
                    tma.async_copy_global_to_shared(weight, [at, k * 64], weight_full.index(k), to)
        for k in gl.static_range(PIECES, ALL):
            piece, mine = tile * ALL + k, own * ALL + k
            mbarrier.wait(empty.index(piece % SLOTS), (piece // SLOTS + 1) & 1)
            here = full.index(which * SLOTS + mine % SLOTS)
            mbarrier.expect(here, 64 * 64 * 2)
            column = block * COLUMNS + (k - PIECES) * residual.block_shape[1]
            tma.async_copy_global_to_shared(residual, [row, column], here, _seen(ring.index(piece % SLOTS), residual))


@gluon.jit
def _multiply(
    shared, barriers, tile, turn, done,
    D: gl.constexpr, COLUMNS: gl.constexpr, ALL: gl.constexpr, WHICH: gl.constexpr, BY_SAMPLE: gl.constexpr,
):  # fmt: skip
    """The products of one tile, in pieces of 64 columns. A piece of x is given back once the next product is on its way."""
    PIECES: gl.constexpr = D // 64
    SLOTS: gl.constexpr = shared[0].shape[0]
    MOST: gl.constexpr = 64 if COLUMNS == 64 else 128
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MOST, 16])
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ring, weights, rests = shared
    full, empty, weight_full, weight_empty = barriers
    sums = gl.zeros([64, MOST], gl.float32, LAYOUT)
    others = gl.zeros([64, 64], gl.float32, PIECE)
    zero = (
        tile >> 30
    )  # which the compiler does not know: it would keep the addresses of all pieces in registers, and spill them
    for k in gl.static_range(PIECES):
        piece, mine = tile * ALL + k, tile // 2 * ALL + k
        mbarrier.wait(full.index(WHICH * SLOTS + mine % SLOTS), (mine // SLOTS) & 1)
        mbarrier.wait(weight_full.index(k), turn)
        x = ring.index(piece % SLOTS)
        w = weights.index(k + zero) if weights.shape[1] == MOST else weights.index(k + zero).slice(0, MOST)
        sums = warpgroup_mma(x, w.permute((1, 0)), sums, use_acc=k > 0, is_async=True)
        if COLUMNS == 192:
            others = warpgroup_mma(x, rests.index(k + zero).permute((1, 0)), others, use_acc=k > 0, is_async=True)
        if k > 0:
            if COLUMNS == 192:
                sums, others = warpgroup_mma_wait(2, deps=(sums, others))
            else:
                sums = warpgroup_mma_wait(1, deps=(sums,))
            _release(empty, weight_empty, (piece - 1) % SLOTS, k - 1, done, BY_SAMPLE)
    if COLUMNS == 192:
        sums, others = warpgroup_mma_wait(0, deps=(sums, others))
    else:
        sums = warpgroup_mma_wait(0, deps=(sums,))
    _release(empty, weight_empty, (tile * ALL + PIECES - 1) % SLOTS, PIECES - 1, done, BY_SAMPLE)
    return _parts(sums, others, COLUMNS)


@gluon.jit
def _parts(sums, others, COLUMNS: gl.constexpr):
    """The sums of a tile in parts of 64 columns: `others` are the last of 192."""
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    if COLUMNS == 64:
        parts = (sums,)
    else:
        left, right = sums.reshape([64, 2, 64]).permute(0, 2, 1).split()
        parts = (gl.convert_layout(left, PIECE, assert_trivial=True), gl.convert_layout(right, PIECE, assert_trivial=True))
    if COLUMNS == 192:
        parts += (others,)
    return parts


@gluon.jit
def _release(empty, weight_empty, slot, k, done, BY_SAMPLE: gl.constexpr):
    """Gives back a piece of x, and that of the weight if it was the last product of the sample."""
    mbarrier.arrive(empty.index(slot), count=1)
    if BY_SAMPLE:
        mbarrier.arrive(weight_empty.index(k), count=1, pred=done)


@gluon.jit
def _seen(slot, residual):
    """A slot as it holds a piece of z."""
    return slot._reinterpret(residual.dtype, [64, residual.block_shape[1]], residual.layout)


@gluon.jit
def _kept(keep_ptr, row, rows, n):
    """The factors of a tile's 64 tokens, as a consumer's threads hold them."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    token = gl.minimum(row + gl.arange(0, 64, layout=LAYOUT), rows - 1)
    return gl.load(keep_ptr + token // n).to(gl.float32)


@gluon.jit
def _onto(
    s, out, residual, shared, barriers, tile, row, column,
    c: gl.constexpr, PIECES: gl.constexpr, ALL: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """z + s of 64 columns, made where z lies. A slot is given back once the next is on its way out, when it has been read."""
    SLOTS: gl.constexpr = shared[0].shape[0]
    WIDTH: gl.constexpr = residual.block_shape[1]
    FIRST: gl.constexpr = PIECES + c * (64 // WIDTH)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ring, full, empty = shared[0], barriers[0], barriers[1]
    if WIDTH == 64:
        parts = (s,)
    else:
        left, right = s.reshape([64, 2, 32]).permute(0, 2, 1).split()
        parts = (gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True))
    for k in gl.static_range(FIRST, FIRST + 64 // WIDTH):
        piece, mine = tile * ALL + k, tile // 2 * ALL + k
        mbarrier.wait(full.index(WHICH * SLOTS + mine % SLOTS), (mine // SLOTS) & 1)
        z = _seen(ring.index(piece % SLOTS), residual)
        z.store((z.load(LAYOUT).to(gl.float32) + parts[k - FIRST]).to(z.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [row, column + (k - FIRST) * WIDTH], z)
        if k > PIECES:
            tma.store_wait(1)
            mbarrier.arrive(empty.index((piece - 1) % SLOTS), count=1)
        if k == ALL - 1:
            tma.store_wait(0)
            mbarrier.arrive(empty.index(piece % SLOTS), count=1)


@gluon.jit
def _gelu(x):
    square = x * x
    q = square * GELU[0] + GELU[1]
    for k in gl.static_range(2, 7):
        q = q * square + GELU[k]
    return x * _approximate("rcp", 1.0 + _approximate("ex2", x * q))


@gluon.jit
def _approximate(NAME: gl.constexpr, x):
    """1 / x or 2^x by one instruction, off by two units of the last place at most; what is below 2^-126 is 0."""
    CODE: gl.constexpr = NAME + ".approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(CODE, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _shares(membership_ptr, row, head, K: gl.constexpr, HEADS: gl.constexpr):
    """The memberships of a tile's 64 tokens in each of the block's heads, as a consumer's threads hold them."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    token = row + gl.arange(0, 64, layout=LAYOUT)
    shares = ()
    for h in gl.static_range(HEADS):
        shares += (gl.load(membership_ptr + token * K + (head + h)),)
    return shares


@gluon.jit
def _spread(shares, P: gl.constexpr, FIRST: gl.constexpr):
    """The membership of each token in the head of each of the 64 columns from FIRST on, (64, 64)."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    column = gl.expand_dims(FIRST + gl.arange(0, 64, layout=LAYOUT), 0) // 16 * 16
    share = gl.expand_dims(shares[FIRST // P], 1)
    for h in gl.static_range(FIRST // P + 1, (FIRST + 63) // P + 1):
        share = gl.where(column >= h * P, gl.expand_dims(shares[h], 1), share)
    return share


@gluon.jit
def _by_warp(x):
    """(64, 64) or (64,): the two tokens that a thread holds of each column added, (warp, token, column) or (warp, token)."""
    x = x.reshape([4, 2, 8]) if len(x.shape) == 1 else x.reshape([4, 2, 8, 64])
    return gl.sum(x, axis=1)


@gluon.jit
def _leave(energy, mass, energy_ptr, mass_ptr, part, real, block, D: gl.constexpr, COLUMNS: gl.constexpr, P: gl.constexpr):
    """The sums of a run, one row a warp, if there are such tokens: the last pair may be half of one."""
    if real:
        for c in gl.static_range(COLUMNS // 64):
            total = gl.sum(energy[c], axis=1)
            warp = part * 4 + gl.arange(0, 4, layout=gl.SliceLayout(1, total.type.layout))
            column = block * COLUMNS + c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, total.type.layout))
            gl.store(energy_ptr + gl.expand_dims(warp * D, 1) + gl.expand_dims(column, 0), total)
        for h in gl.static_range(COLUMNS // P):
            sums = gl.sum(mass[h], axis=1)
            row = part * 4 + gl.arange(0, 4, layout=sums.type.layout)
            gl.store(mass_ptr + row * (D // P) + (block * (COLUMNS // P) + h), sums)


@gluon.jit
def _consume(
    given, page, rows, shared, barriers, work,
    D: gl.constexpr, COLUMNS: gl.constexpr, P: gl.constexpr, ALL: gl.constexpr, WHICH: gl.constexpr,
    BIAS: gl.constexpr, MOMENTS: gl.constexpr, BY_SAMPLE: gl.constexpr, HIDDEN: gl.constexpr,
):  # fmt: skip
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    HEADS: gl.constexpr = COLUMNS // P
    out, membership_ptr, bias_ptr, energy_ptr, mass_ptr, residual, keep_ptr, n = given
    first, last, tiles, pairs, block = work
    head = block * HEADS
    if BIAS:
        bias = ()
        for c in gl.static_range(COLUMNS // 64):
            column = block * COLUMNS + c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, PIECE))
            bias += (gl.load(bias_ptr + column),)
    for pair in range(first, last):
        part = pair * 2 + WHICH
        turn = 0
        done = False
        if BY_SAMPLE:
            turn = (pair // pairs - first // pairs) & 1
            done = (pair + 1) % pairs == 0
        if MOMENTS:
            energy = (_by_warp(gl.zeros([64, 64], gl.float32, PIECE)),) * (COLUMNS // 64)
            mass = (_by_warp(gl.zeros([64], gl.float32, gl.SliceLayout(1, PIECE))),) * HEADS
        for step in range(tiles):
            tile = ((pair - first) * tiles + step) * 2 + WHICH
            row = (part * tiles + step) * 64
            if MOMENTS:  # on their way during the products
                shares = _shares(membership_ptr, gl.minimum(row, rows - 64), head, D // P, HEADS)
            if keep_ptr is not None:
                keep = _kept(keep_ptr, row, rows, n)
            sums = _multiply(shared, barriers, tile, turn, done, D, COLUMNS, ALL, WHICH, BY_SAMPLE)
            if MOMENTS:
                added = ()
                summed = ()
                for h in gl.static_range(HEADS):
                    summed += (mass[h] + _by_warp(shares[h]),)
                mass = summed
            for c in gl.static_range(COLUMNS // 64):
                s = sums[c]
                if BIAS:
                    s += gl.expand_dims(bias[c].to(gl.float32), 0)
                value = _gelu(s) if HIDDEN else s
                if MOMENTS:
                    value = _spread(shares, P, c * 64) * s
                if keep_ptr is not None:
                    value *= gl.expand_dims(keep, 1)
                if residual is not None:
                    _onto(value, out, residual, shared, barriers, tile, row, block * COLUMNS + c * 64, c, D // 64, ALL, WHICH)
                else:
                    tma.store_wait(0)  # the page has been read
                    page.store(value.to(page.dtype))
                    fence_async_shared()
                    tma.async_copy_shared_to_global(out, [row, block * COLUMNS + c * 64], page)
                if MOMENTS:
                    added += (energy[c] + _by_warp(value * s),)
            if MOMENTS:
                energy = added
        if MOMENTS:
            _leave(energy, mass, energy_ptr, mass_ptr, part, part * tiles * 64 < rows, block, D, COLUMNS, P)
    tma.store_wait(0)


@gluon.jit
def _room(box, SLOTS: gl.constexpr, PIECES: gl.constexpr, COLUMNS: gl.constexpr):
    """A ring for tokens, and pieces of the weight by columns of the output: the first 128, and the last of 192."""
    ring = gl.allocate_shared_memory(box.dtype, [SLOTS, 64, 64], box.layout)
    weights = gl.allocate_shared_memory(box.dtype, [PIECES, 64 if COLUMNS == 64 else 128, 64], box.layout)
    rests = gl.allocate_shared_memory(box.dtype, [PIECES, 64, 64], box.layout) if COLUMNS == 192 else weights
    return ring, weights, rests


@gluon.jit
def _barriers(SLOTS: gl.constexpr, WEIGHTS: gl.constexpr):
    """For tokens, "it is there" by consumer and "it is given back", and for the weight, which both consumers give back."""
    full = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    weight_full = gl.allocate_shared_memory(gl.int64, [WEIGHTS, 1], mbarrier.MBarrierLayout())
    weight_empty = gl.allocate_shared_memory(gl.int64, [WEIGHTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(full.index(SLOTS + i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for k in gl.static_range(WEIGHTS):
        mbarrier.init(weight_full.index(k), count=1)
        mbarrier.init(weight_empty.index(k), count=2)
    fence_async_shared()
    return full, empty, weight_full, weight_empty


@gluon.jit
def hopper_kernel(
    x, weight, out, membership_ptr, bias_ptr, energy_ptr, mass_ptr, rows, tiles, pairs, residual, keep_ptr, n,
    D: gl.constexpr, OUT: gl.constexpr, COLUMNS: gl.constexpr, P: gl.constexpr, BIAS: gl.constexpr, MOMENTS: gl.constexpr,
    BY_SAMPLE: gl.constexpr, HIDDEN: gl.constexpr,
):  # fmt: skip
    """x (rows, D), out and z (rows, OUT), weight (OUT, D) or one below the other; a sample has `pairs` pairs, n tokens."""
    PIECES: gl.constexpr = D // 64
    SLOTS: gl.constexpr = 8 if residual is None else 10  # 8 KB each: what a weight of width 384 leaves free
    ALL: gl.constexpr = PIECES if residual is None else PIECES + COLUMNS // residual.block_shape[1]  # of a tile
    BLOCKS: gl.constexpr = OUT // COLUMNS
    block, group = gl.program_id(0) % BLOCKS, gl.program_id(0) // BLOCKS
    groups = gl.num_programs(0) // BLOCKS
    every = (rows + (tiles * 128 - 1)) // (tiles * 128)
    first, last = every * group // groups, every * (group + 1) // groups

    shared = _room(weight, SLOTS, PIECES, COLUMNS)
    page0 = gl.allocate_shared_memory(x.dtype, [64, 64], x.layout) if residual is None else shared[0]
    page1 = gl.allocate_shared_memory(x.dtype, [64, 64], x.layout) if residual is None else shared[0]
    barriers = _barriers(SLOTS, PIECES)

    work = (first, last, tiles, pairs, block)
    given = (out, membership_ptr, bias_ptr, energy_ptr, mass_ptr, residual, keep_ptr, n)
    gl.warp_specialize(
        [
            (_consume, (given, page0, rows, shared, barriers, work, D, COLUMNS, P, ALL, 0, BIAS, MOMENTS, BY_SAMPLE, HIDDEN)),
            (_consume, (given, page1, rows, shared, barriers, work, D, COLUMNS, P, ALL, 1, BIAS, MOMENTS, BY_SAMPLE, HIDDEN)),
            (_produce, (x, weight, residual, shared, barriers, work, D, COLUMNS, ALL, BY_SAMPLE)),
        ],
        [4, 1],
        [240, 24],
    )


# --- the calls ------------------------------------------------------------------------------------------------------


@cache
def _machine(index: int) -> tuple[bool, int]:
    """Whether this is Hopper, and how many multiprocessors it has."""
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor) == (9, 0), properties.multi_processor_count


def _columns(d: int, p: int, gelu: bool = False) -> int:
    """The block of columns that divides the width and holds whole heads; 0 if there is none. The widest, as tokens are read for
    each block; with GELU, which consumers take of their tiles one after the other, 128 are faster (docs/kernels.md).
    """
    return next((width for width in ((128, 192, 64) if gelu else (192, 128, 64)) if d % width == 0 and width % p == 0), 0)


def serves(device: torch.device, dtype: torch.dtype, d: int, p: int) -> bool:
    """Whether the calls below take tensors of this kind, with d channels in heads of p."""
    if not GLUON or device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if d % 64 or not 64 <= d <= 384 or p % 16 or not _columns(d, p):
        return False
    return _is_hopper(device.index)


def _is_hopper(index: int | None) -> bool:
    return _machine(torch.cuda.current_device() if index is None else index)[0]


_is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]  # asked once while a graph is traced


@op(gluon=True)
def own_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, keep: Tensor | None, gelu: bool
) -> Tensor:
    """x (..., d) by weight (h, d) transposed, and bias (h), or GELU of it: (..., h); h is a multiple of 64. With a weight for
    each sample (b, d, d) n is a multiple of 128. With residual (b, n, d): that + keep (b, 1, 1) times the product.
    """
    out = x.new_empty(*x.shape[:-1], weight.shape[-2]) if residual is None else torch.empty_like(residual)
    if not is_fake(x):
        pairs = x.shape[1] // 128 if weight.dim() == 3 else 1
        _launch(x, weight, bias, out, pairs=pairs, residual=residual, keep=keep, gelu=gelu)
    return out


@op(gluon=True)
def own_project(x: Tensor, weight: Tensor, bias: Tensor | None, membership: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """membership (b, n, k) times s, and rows of energy (b, rows, k, p) and mass (b, rows, k); n is a multiple of 64."""
    (b, n, d), k = x.shape, membership.shape[-1]
    tiles = _tiles(b * n, n, _groups(x.device.index or 0, d, _columns(d, d // k)))
    splits, out = n // (16 * tiles), torch.empty_like(x)
    energy, mass = membership.new_empty(b, splits, k, d // k), membership.new_empty(b, splits, k)
    if not is_fake(x):
        _launch(x, weight, bias, out, membership, energy, mass, d // k, tiles)
    return out, energy, mass


flops("own_product", lambda x, weight, *_, **__: 2 * math.prod(x) * weight[-2])
flops("own_project", lambda x, weight, *_: 2 * math.prod(x) * weight[-2])


def _groups(index: int, out: int, columns: int) -> int:
    """How many programs work on the same columns."""
    return max(1, _machine(index)[1] // (out // columns))


def _tiles(rows: int, n: int, groups: int) -> int:
    """The tiles of a run, all in one sample."""
    return longest({tiles: over(rows, 128 * tiles) for tiles in (8, 4, 2, 1) if n // 64 % tiles == 0}, groups)


def longest(pairs: dict[int, int], groups: int) -> int:
    """The longest run that leaves the busiest program at most 1/16 more to do than another would, of those that are given with
    how many pairs of them there are. Short runs leave many rows of sums: half a million tokens by single tiles took three
    times as long.
    """
    most = {tiles: over(count, groups) * tiles for tiles, count in pairs.items()}
    return next(tiles for tiles in most if 16 * most[tiles] <= 17 * min(most.values()))


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, membership: Tensor | None = None,
    energy: Tensor | None = None, mass: Tensor | None = None, p: int = 16, tiles: int = 1, pairs: int = 1,
    residual: Tensor | None = None, keep: Tensor | None = None, gelu: bool = False,
) -> None:  # fmt: skip
    d, width, x, weight = x.shape[-1], out.shape[-1], aligned(x), aligned(weight)
    rows, columns = x.numel() // d, _columns(width, p, gelu)
    groups = min(_groups(x.get_device(), width, columns), over(rows, 128 * tiles))
    onto = None if residual is None else _pieces(aligned(residual), d)
    factors, n = (None, 1) if keep is None else (keep.contiguous(), x.shape[1])
    bias = None if bias is None else bias.contiguous()
    hopper_kernel[(width // columns * groups,)](
        _pieces(x, d), _pieces(weight, d), _pieces(out, width), membership, bias, energy, mass, rows, tiles, pairs,
        onto, factors, n,
        D=d, OUT=width, COLUMNS=columns, P=p, BIAS=bias is not None, MOMENTS=membership is not None,
        BY_SAMPLE=weight.dim() == 3, HIDDEN=gelu, num_warps=4, maxnreg=168,
    )  # fmt: skip


def _pieces(x: Tensor, d: int) -> Any:
    """x as (rows, d), for the copy engine: 8 KB of 64 rows. Its constructor would check at length what is known here."""
    assert x.data_ptr() % 16 == 0, "base must be 16-byte aligned"
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, [x.numel() // d, d], [d, 1]
    made.block_shape, made.layout = ([64, 32], WIDE) if x.dtype == torch.float32 else ([64, 64], SWIZZLED)
    return made
