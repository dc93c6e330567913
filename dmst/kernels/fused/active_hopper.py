"""The two products of `active.py` on Hopper, in Gluon: programs, consumers, ring and barriers as in `hopper.py`.

    project    (pi s or s) of a sample's active heads, and rows of their energy and mass
    fold_out   out_b = (pi s) W_b^T + bias, over as many columns of s as there are

A program takes units of tokens that follow each other, each in one sample: a pair of runs of `tiles` tiles of 64 tokens, a run
for each consumer. Boxes of the copy engine lie in one sample, so that any number of tokens will do: beyond the last they are
zeros, and nothing is written there. How many heads are on each group of warps reads for itself.

    project    a sample's tokens pass once for every block of at most `COLUMNS` columns, whose rows of the weight wait in shared
               memory, brought by a warp of its own. Rows come in boxes that lie in one head; a box of no head is asked for
               beyond the last row and is zeros. The last block is multiplied as 64, 128 or 192 columns, and so wide is s
    fold_out   a program has `COLUMNS` columns of the output. Pieces of W_b, 64 columns of s, go through a ring: if there is
               room, those of the next sample come while this one's are in use
"""

# mypy: disallow-untyped-defs=False, disable-error-code="assignment, misc, var-annotated"
from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dmst.kernels.fused import hopper
from dmst.kernels.fused.few import _rows, _samples
from dmst.kernels.fused.hopper import (
    _barriers,
    _by_warp,
    _multiply,
    _parts,
    _room,
    _spread,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dmst.kernels.fused.launch import Cut, launch, launched, planned
from dmst.kernels.plan import over


@gluon.jit
def _part(active_ptr, unit, last, units, K: gl.constexpr):
    """The sample of a unit, the first unit that is not in it or not ours, its list of heads, and their number."""
    sample = unit // units
    list_ptr = active_ptr + sample.to(gl.int64) * (K + 1)
    return sample, gl.minimum(last, (sample + 1) * units), list_ptr + 1, gl.load(list_ptr)


@gluon.jit
def _heads(list_ptr, count, first, K: gl.constexpr, HEADS: gl.constexpr):
    """The heads of a block; K, whose rows would lie behind the last ones of the weight, where there is none."""
    heads = ()
    for h in gl.static_range(HEADS):
        heads += (
            gl.where(first + h < count, gl.load(list_ptr + first + h), K),
        )  # waits for the number no longer than for them
    return heads


@gluon.jit
def _wide(count, block, P: gl.constexpr, COLUMNS: gl.constexpr):
    """Pieces of 64 columns that a block has."""
    return (gl.minimum(count * P - block * COLUMNS, COLUMNS) + 63) // 64


@gluon.jit
def _boxed(slot, box):
    """64 tokens by 64 channels as one sample's."""
    return slot._reinterpret(box.dtype, [1, 64, 64], box.layout)


# --- the first product ----------------------------------------------------------------------------------------------


@gluon.jit
def _bring_columns(weight, rows, here, heads, k: gl.constexpr, FIRST: gl.constexpr, P: gl.constexpr):
    """64 channels of the rows of 64 columns of s, from FIRST on in their block."""
    BOX: gl.constexpr = weight.block_shape[0]
    for j in gl.static_range(64 // BOX):
        to = rows.slice((FIRST + j * BOX) % 128, BOX)
        at = heads[(FIRST + j * BOX) // P] * P + (FIRST + j * BOX) % P
        tma.async_copy_global_to_shared(weight, [at, k * 64], here, to)


@gluon.jit
def _bring_tokens(
    z, active_ptr, shared, barriers, work, D: gl.constexpr, K: gl.constexpr, P: gl.constexpr, COLUMNS: gl.constexpr
):  # fmt: skip
    """Every piece of z in the order in which it is needed."""
    PIECES: gl.constexpr = D // 64
    SLOTS: gl.constexpr = shared[0].shape[0]
    ring, full, empty = shared[0], barriers[0], barriers[1]
    unit, last, units, tiles = work
    done = 0
    while unit < last:
        sample, stop, _, count = _part(active_ptr, unit, last, units, K)
        every = (stop - unit) * tiles * 2
        for turn in range((count * P + (COLUMNS - 1)) // COLUMNS * every):
            tile = turn % every
            which, own = tile % 2, tile // 2
            token = (((unit - sample * units + own // tiles) * 2 + which) * tiles + own % tiles) * 64
            for k in gl.static_range(PIECES):
                piece, mine = (done + turn) * PIECES + k, (done + turn) // 2 * PIECES + k
                mbarrier.wait(empty.index(piece % SLOTS), (piece // SLOTS + 1) & 1)
                here = full.index(which * SLOTS + mine % SLOTS)
                mbarrier.expect(here, 64 * 64 * 2)
                tma.async_copy_global_to_shared(z, [sample, token, k * 64], here, _boxed(ring.index(piece % SLOTS), z))
        done += (count * P + (COLUMNS - 1)) // COLUMNS * every
        unit = stop


@gluon.jit
def _bring_weights(
    weight, active_ptr, shared, barriers, work, D: gl.constexpr, K: gl.constexpr, P: gl.constexpr, COLUMNS: gl.constexpr
):  # fmt: skip
    """Each block's rows of the weight, a piece as soon as both consumers are done with the last one there."""
    _, weights, rests = shared
    _, _, full, empty = barriers
    unit, last, units, _ = work
    turn = 0
    while unit < last:
        _, stop, list_ptr, count = _part(active_ptr, unit, last, units, K)
        for block in range((count * P + (COLUMNS - 1)) // COLUMNS):
            heads = _heads(list_ptr, count, block * (COLUMNS // P), K, COLUMNS // P)
            wide = _wide(count, block, P, COLUMNS)
            for k in gl.static_range(D // 64):
                mbarrier.wait(empty.index(k), turn ^ 1)
                for c in gl.static_range(COLUMNS // 64):
                    mbarrier.expect(full.index(k), (c + 1) * 64 * 64 * 2, pred=wide == c + 1)
                for c in gl.static_range(COLUMNS // 64):
                    if c < wide:
                        _bring_columns(
                            weight, rests.index(k) if c == 2 else weights.index(k), full.index(k), heads, k, c * 64, P
                        )
            turn ^= 1
        unit = stop


@gluon.jit
def _shares(membership_ptr, sample, token, n, heads, K: gl.constexpr, HEADS: gl.constexpr):
    """The memberships of 64 tokens in each of the heads; 0 beyond the last token, or of no head."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    token += gl.arange(0, 64, layout=LAYOUT)
    at = membership_ptr + (sample.to(gl.int64) * n + token) * K
    shares = ()
    for h in gl.static_range(HEADS):
        shares += (gl.load(at + heads[h], mask=(token < n) & (heads[h] < K), other=0.0),)
    return shares


@gluon.jit
def _bias(bias_ptr, heads, D: gl.constexpr, P: gl.constexpr, FIRST: gl.constexpr):
    """That of 64 columns of a block."""
    column = FIRST + gl.arange(0, 64, layout=gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])))
    origin = heads[FIRST // P] * P + column - FIRST // P * P
    for h in gl.static_range(FIRST // P + 1, (FIRST + 63) // P + 1):
        origin = gl.where(column // 16 * 16 >= h * P, heads[h] * P + column - h * P, origin)
    return gl.load(bias_ptr + origin, mask=origin < D, other=0.0)


@gluon.jit
def _leave(energy, mass, page, energy_ptr, mass_ptr, WIDE: gl.constexpr, P: gl.constexpr):
    """The sums of a run; four warps meet where the page has been read."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [1, 4], [1, 0])
    rows = page._reinterpret(gl.float32, [8, 4, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    tma.store_wait(0)
    for c in gl.static_range(WIDE // 64):
        rows.index(c).store(gl.sum(energy[c], axis=1))
    for c in gl.static_range(WIDE // 64):
        column = c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
        gl.store(energy_ptr + column, gl.sum(rows.index(c).load(LAYOUT), axis=0))
    for h in gl.static_range(WIDE // P):
        gl.store(mass_ptr + h, gl.sum(gl.sum(mass[h], axis=1), axis=0))


@gluon.jit
def _pass(
    given, page, biases, shared, barriers, work, sample, stop, heads, block, done, turn,
    D: gl.constexpr, P: gl.constexpr, COLUMNS: gl.constexpr, WIDE: gl.constexpr, WHICH: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """A consumer's tiles of one sample by `WIDE` columns of a block of `COLUMNS`."""
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    HEADS: gl.constexpr = (WIDE - 1) // P + 1
    K: gl.constexpr = D // P
    s_out, membership_ptr, bias_ptr, energy_ptr, mass_ptr, n = given
    unit, _, units, tiles = work
    if bias_ptr is not None:  # registers are scarce
        for c in gl.static_range(WIDE // 64):
            biases.index(c).store(_bias(bias_ptr, heads, D, P, c * 64))
    for pair in range(unit, stop):
        energy = (_by_warp(gl.zeros([64, 64], gl.float32, PIECE)),) * (WIDE // 64)
        mass = (_by_warp(gl.zeros([64], gl.float32, gl.SliceLayout(1, PIECE))),) * HEADS
        for step in range(tiles):
            tile = ((pair - unit) * tiles + step) * 2 + WHICH
            token = (((pair - sample * units) * 2 + WHICH) * tiles + step) * 64
            shares = _shares(membership_ptr, sample, token, n, heads, K, HEADS)  # on their way during the products
            given_back = (pair + 1 == stop) & (step + 1 == tiles)
            sums = _multiply(shared, barriers, done + tile, turn, given_back, D, WIDE, D // 64, WHICH, True)
            added = ()
            summed = ()
            for h in gl.static_range(HEADS):
                summed += (mass[h] + _by_warp(shares[h]),)
            mass = summed
            for c in gl.static_range(WIDE // 64):
                s = sums[c]
                if bias_ptr is not None:
                    s += gl.expand_dims(biases.index(c).load(gl.SliceLayout(0, PIECE)).to(gl.float32), 0)
                weighed = _spread(shares, P, c * 64) * s
                tma.store_wait(0)  # the page has been read
                page.store((weighed if WEIGHTED else s).to(page.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(s_out, [sample, token, block * COLUMNS + c * 64], _boxed(page, s_out))
                added += (energy[c] + _by_warp(weighed * s),)
            energy = added
        row = (pair * 2 + WHICH).to(gl.int64)
        _leave(energy, mass, page, energy_ptr + row * D + block * COLUMNS, mass_ptr + row * K + block * (COLUMNS // P), WIDE, P)


@gluon.jit
def _project(
    given, page, biases, active_ptr, shared, barriers, work,
    D: gl.constexpr, K: gl.constexpr, P: gl.constexpr, COLUMNS: gl.constexpr, WHICH: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    unit, last, units, tiles = work
    done, turn = 0, 0
    while unit < last:
        sample, stop, list_ptr, count = _part(active_ptr, unit, last, units, K)
        here = (unit, last, units, tiles)
        for block in range((count * P + (COLUMNS - 1)) // COLUMNS):
            heads = _heads(list_ptr, count, block * (COLUMNS // P), K, COLUMNS // P)
            wide = _wide(count, block, P, COLUMNS)
            for c in gl.static_range(1, COLUMNS // 64 + 1):
                if wide == c:
                    _pass(
                        given, page, biases, shared, barriers, here, sample, stop, heads, block, done, turn,
                        D, P, COLUMNS, c * 64, WHICH, WEIGHTED,
                    )  # fmt: skip
            done += (stop - unit) * tiles * 2
            turn ^= 1
        unit = stop
    tma.store_wait(0)


@launched
@gluon.jit
def project_hopper_kernel(
    z, weight, s, membership_ptr, bias_ptr, active_ptr, energy_ptr, mass_ptr, n, every, units, tiles,
    D: gl.constexpr, K: gl.constexpr, P: gl.constexpr, COLUMNS: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """z and s (b, n, D), weight (D, D) by columns of s; `every` unit, `units` a sample."""
    PIECES: gl.constexpr = D // 64
    SLOTS: gl.constexpr = 8
    program, programs = gl.program_id(0), gl.num_programs(0)
    work = (every * program // programs, every * (program + 1) // programs, units, tiles)

    shared = _room(weight, SLOTS, PIECES, COLUMNS)
    page0 = gl.allocate_shared_memory(z.dtype, [64, 64], weight.layout)
    page1 = gl.allocate_shared_memory(z.dtype, [64, 64], weight.layout)
    biases0 = gl.allocate_shared_memory(z.dtype, [COLUMNS // 64, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    biases1 = gl.allocate_shared_memory(z.dtype, [COLUMNS // 64, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = _barriers(SLOTS, PIECES)

    given = (s, membership_ptr, bias_ptr, energy_ptr, mass_ptr, n)
    gl.warp_specialize(
        [
            (_project, (given, page0, biases0, active_ptr, shared, barriers, work, D, K, P, COLUMNS, 0, WEIGHTED)),
            (_project, (given, page1, biases1, active_ptr, shared, barriers, work, D, K, P, COLUMNS, 1, WEIGHTED)),
            (_bring_tokens, (z, active_ptr, shared, barriers, work, D, K, P, COLUMNS)),
            (_bring_weights, (weight, active_ptr, shared, barriers, work, D, K, P, COLUMNS)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


# --- the second product ---------------------------------------------------------------------------------------------


@gluon.jit
def _bring_rows(
    s, weight, active_ptr, shared, barriers, work, D: gl.constexpr, K: gl.constexpr, P: gl.constexpr, COLUMNS: gl.constexpr
):  # fmt: skip
    """Every piece of s in the order in which it is needed, and of a sample's weight with its first tile."""
    SLOTS: gl.constexpr = shared[0].shape[0]
    WEIGHTS: gl.constexpr = shared[1].shape[0]
    ring, weights, rests = shared
    full, empty, weight_full, weight_empty = barriers
    unit, last, units, column = work
    done, turn = 0, 0  # pieces of s that each consumer had before, and of the weights
    while unit < last:
        sample, stop, _, count = _part(active_ptr, unit, last, units, K)
        pieces = (count * P + 63) // 64
        for tile in range((stop - unit) * 2):
            which, own = tile % 2, tile // 2
            token = ((unit - sample * units) * 2 + tile) * 64
            for k in range(pieces):
                piece, mine = done * 2 + tile * pieces + k, done + own * pieces + k
                mbarrier.wait(empty.index(piece % SLOTS), (piece // SLOTS + 1) & 1)
                here = full.index(which * SLOTS + mine % SLOTS)
                mbarrier.expect(here, 64 * 64 * 2)
                tma.async_copy_global_to_shared(s, [sample, token, k * 64], here, _boxed(ring.index(piece % SLOTS), s))
                if tile == 0:
                    slot = (turn + k) % WEIGHTS
                    there = weight_full.index(slot)
                    mbarrier.wait(weight_empty.index(slot), ((turn + k) // WEIGHTS + 1) & 1)
                    mbarrier.expect(there, COLUMNS * 64 * 2)
                    for c in gl.static_range(COLUMNS // 64):
                        to = rests.index(slot) if c == 2 else weights.index(slot).slice(c * 64, 64)
                        tma.async_copy_global_to_shared(weight, [sample * D + column + c * 64, k * 64], there, to)
        done += (stop - unit) * pieces
        turn += pieces
        unit = stop


@gluon.jit
def _accumulate(
    shared, barriers, piece, mine, turn, pieces, given_back, COLUMNS: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """The products of one tile over as many pieces as its sample has, in parts of 64 columns."""
    SLOTS: gl.constexpr = shared[0].shape[0]
    WEIGHTS: gl.constexpr = shared[1].shape[0]
    MOST: gl.constexpr = 64 if COLUMNS == 64 else 128
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MOST, 16])
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ring, weights, rests = shared
    full, empty, weight_full, weight_empty = barriers
    sums = gl.zeros([64, MOST], gl.float32, LAYOUT)
    others = gl.zeros([64, 64], gl.float32, PIECE)
    for k in range(pieces):
        slot = (turn + k) % WEIGHTS
        mbarrier.wait(full.index(WHICH * SLOTS + (mine + k) % SLOTS), ((mine + k) // SLOTS) & 1)
        mbarrier.wait(weight_full.index(slot), ((turn + k) // WEIGHTS) & 1)
        x = ring.index((piece + k) % SLOTS)
        sums = warpgroup_mma(x, weights.index(slot).permute((1, 0)), sums, is_async=True)
        if COLUMNS == 192:
            others = warpgroup_mma(x, rests.index(slot).permute((1, 0)), others, is_async=True)
            sums, others = warpgroup_mma_wait(2, deps=(sums, others))
        else:
            sums = warpgroup_mma_wait(1, deps=(sums,))
        mbarrier.arrive(empty.index((piece + k + SLOTS - 1) % SLOTS), count=1, pred=k > 0)
        mbarrier.arrive(weight_empty.index((turn + k + WEIGHTS - 1) % WEIGHTS), count=1, pred=given_back & (k > 0))
    if COLUMNS == 192:
        sums, others = warpgroup_mma_wait(0, deps=(sums, others))
    else:
        sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(empty.index((piece + pieces + SLOTS - 1) % SLOTS), count=1, pred=pieces > 0)
    mbarrier.arrive(weight_empty.index((turn + pieces + WEIGHTS - 1) % WEIGHTS), count=1, pred=given_back & (pieces > 0))
    return _parts(sums, others, COLUMNS)


@gluon.jit
def _fold_out(
    out, bias_ptr, page, active_ptr, shared, barriers, work,
    K: gl.constexpr, P: gl.constexpr, COLUMNS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    unit, last, units, column = work
    if bias_ptr is not None:
        bias = ()
        for c in gl.static_range(COLUMNS // 64):
            bias += (gl.load(bias_ptr + column + c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, PIECE))),)
    done, turn = 0, 0
    while unit < last:
        sample, stop, _, count = _part(active_ptr, unit, last, units, K)
        pieces = (count * P + 63) // 64
        for pair in range(unit, stop):
            own = pair - unit
            piece = done * 2 + (own * 2 + WHICH) * pieces
            parts = _accumulate(
                shared, barriers, piece, done + own * pieces, turn, pieces, pair + 1 == stop, COLUMNS, WHICH
            )  # fmt: skip
            token = ((pair - sample * units) * 2 + WHICH) * 64
            for c in gl.static_range(COLUMNS // 64):
                value = parts[c]
                if bias_ptr is not None:
                    value += gl.expand_dims(bias[c].to(gl.float32), 0)
                tma.store_wait(0)  # the page has been read
                page.store(value.to(page.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(out, [sample, token, column + c * 64], _boxed(page, out))
        done += (stop - unit) * pieces
        turn += pieces
        unit = stop
    tma.store_wait(0)


@launched
@gluon.jit
def fold_out_hopper_kernel(
    s, weight, out, bias_ptr, active_ptr, every, units,
    D: gl.constexpr, K: gl.constexpr, P: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """s and out (b, n, D), weight (D, D) of each sample, one below the other; `every` pair of tiles, `units` a sample."""
    WEIGHTS: gl.constexpr = D // 64
    SLOTS: gl.constexpr = 8
    BLOCKS: gl.constexpr = D // COLUMNS
    block, group = gl.program_id(0) % BLOCKS, gl.program_id(0) // BLOCKS
    groups = gl.num_programs(0) // BLOCKS
    work = (every * group // groups, every * (group + 1) // groups, units, block * COLUMNS)

    shared = _room(weight, SLOTS, WEIGHTS, COLUMNS)
    page0 = gl.allocate_shared_memory(s.dtype, [64, 64], weight.layout)
    page1 = gl.allocate_shared_memory(s.dtype, [64, 64], weight.layout)
    barriers = _barriers(SLOTS, WEIGHTS)

    gl.warp_specialize(
        [
            (_fold_out, (out, bias_ptr, page0, active_ptr, shared, barriers, work, K, P, COLUMNS, 0)),
            (_fold_out, (out, bias_ptr, page1, active_ptr, shared, barriers, work, K, P, COLUMNS, 1)),
            (_bring_rows, (s, weight, active_ptr, shared, barriers, work, D, K, P, COLUMNS)),
        ],
        [4, 1],
        [240, 24],
    )


# --- the calls ------------------------------------------------------------------------------------------------------

serves = hopper.serves


def project(
    z: Tensor, weight: Tensor, bias: Tensor | None, membership: Tensor, active: Tensor, weighted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `skip.project`; the weight (d, d) is contiguous. In s the active columns end with zeros, up to a multiple of 64."""
    (b, n, d), k = z.shape, membership.shape[-1]
    cut, tiles, units = _plan_project(z.get_device(), b, n, d, k, weighted)
    s = torch.empty_like(z)
    energy = torch.empty(b, units * 2, k, d // k, device=z.device, dtype=torch.float32)
    mass = torch.empty(b, units * 2, k, device=z.device, dtype=torch.float32)
    boxes = (_samples(z, 64), _rows(weight, d // k), _samples(s, 64))
    launch(project_hopper_kernel, cut, *boxes, membership, bias, active, energy, mass, n, b * units, units, tiles)
    return s, energy, mass


@lru_cache(1024)
def _plan_project(index: int, b: int, n: int, d: int, k: int, weighted: bool) -> tuple[Cut, int, int]:
    programs = hopper._machine(index)[1]
    tiles = hopper.longest({tiles: b * over(n, 128 * tiles) for tiles in (8, 4, 2, 1)}, programs)
    units = over(n, 128 * tiles)
    cut = planned(
        (min(programs, b * units),),
        D=d, K=k, P=d // k, COLUMNS=hopper._columns(d, d // k), WEIGHTED=weighted, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return cut, tiles, units


def fold_out(s: Tensor, weights: Tensor, bias: Tensor | None, active: Tensor) -> Tensor:
    """s of `project` through the weight of each sample (b, d, d), of which the columns that count are as many as in s."""
    b, n, d = s.shape
    k, units = active.shape[1] - 1, over(n, 128)
    out = torch.empty_like(s)
    boxes = (_samples(s, 64), hopper._pieces(weights, d), _samples(out, 64))
    launch(fold_out_hopper_kernel, _plan_out(s.get_device(), b * units, d, k), *boxes, bias, active, b * units, units)
    return out


@lru_cache(1024)
def _plan_out(index: int, every: int, d: int, k: int) -> Cut:
    columns = hopper._columns(d, 16)
    blocks = d // columns
    groups = min(hopper._machine(index)[1] // blocks, every)
    return planned((blocks * groups,), D=d, K=k, P=d // k, COLUMNS=columns, num_warps=4, maxnreg=168)
