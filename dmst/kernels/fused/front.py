"""What a layer reads off its rotated tokens, and the way back: no rotated token is ever written.

    t_n = rot_n z_n
    scores l_nk = <t_n, assign_k> + bias      membership sigmoid(l), or l itself; with their sums by tile, for the gate
    keys   q_n  = A t_n + bias                GMSA's, in the dtype of A
    dz_n     = product_n + rot_n^T (sum_k dl_nk assign_k + A^T dq_n)        dl_nk = dscores_nk + dpooled_k
    dassign  = sum_n dl_n t_n^T,   dA = sum_n dq_n t_n^T                    one row of partial sums a program

Scores of 16-bit tokens are products of bfloat16 numbers: t, dl and assign are written as sums of two each, which is 16 digits
(the tokens have 8 or 11). Those of float32 tokens are products of float32. Keys are products in their own dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst import rotary
from dmst.kernels import plan
from dmst.kernels.choice import interpreted
from dmst.kernels.fused.launch import flops, launch, op
from dmst.kernels.fused.turn import angles, places, rotate
from dmst.kernels.plan import over, power_of_two


@triton.jit
def _tokens(z_ptr, row, here, channel, D: tl.constexpr, CHANNELS: tl.constexpr):
    """z_n in some channels, (tokens, channels), float32."""
    real = here if D % CHANNELS == 0 else here & (channel < D)
    return tl.load(z_ptr + row * D + channel, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _lead(x):
    """x without the digits that bfloat16 has no room for: by a mask, which is faster than rounding."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _by_slot(x, slot, HEADS: tl.constexpr):
    """The leading term of x in the first HEADS slots, and what it leaves in the others."""
    lead = _lead(x)
    return tl.where(slot < HEADS, lead, x - lead).to(tl.bfloat16)


@triton.jit
def _dot(x, y, total, EXACT: tl.constexpr):
    if EXACT:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), total, input_precision="ieee")
    return tl.dot(x, y, total)


@triton.jit
def _dscores(
    dscores_ptr, dpooled_ptr, sample, start, row, here, head, K: tl.constexpr, SCORES: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """dl (tokens, slots)."""
    some = here & (head < K)
    dl = tl.zeros(some.shape, tl.float32)
    if SCORES:
        dl += tl.load(dscores_ptr + start * K + row * K + head, mask=some, other=0.0)
    if GATED:
        dl += tl.load(dpooled_ptr + sample * K + head, mask=some, other=0.0)
    return dl


@triton.jit
def front_kernel(
    z_ptr, far_cos, far_sin, near_cos, near_sin, assign_ptr, bias_ptr, key_ptr, key_bias_ptr, out_ptr, sum_ptr, keys_ptr,
    n, step, tiles,
    D: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, TERMS: tl.constexpr, SLOTS: tl.constexpr, Q: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, ROTARY: tl.constexpr, LEVEL: tl.constexpr,
    SCORES: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr, SUMS: tl.constexpr, KEYS: tl.constexpr,
    KEY_BIAS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of tokens and, of the keys, some columns; the first of these programs has the scores."""
    sample, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    token, far, near = places(tile, n, step, TOKENS, LEVEL)
    here = token < n
    start, row = sample * n + tile * TOKENS, tl.arange(0, TOKENS)[:, None]  # 64 bits, and 32
    z_ptr += start * D
    slot, column = tl.arange(0, SLOTS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    products = tl.zeros((TOKENS, SLOTS), tl.float32)
    keys = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for first in tl.range(0, D, CHANNELS, num_stages=STAGES):
        channel = first + tl.arange(0, CHANNELS)
        turned = _tokens(z_ptr, row, here, channel[None, :], D, CHANNELS)
        if ROTARY:
            cos, sin = angles(far_cos, far_sin, near_cos, near_sin, far, near, first, D, CHANNELS)
            turned = rotate(turned, cos, sin, TOKENS, CHANNELS, False)
        if SCORES:
            real = (channel[:, None] < D) & (slot[None, :] % HEADS < K)
            weight = tl.load(assign_ptr + slot[None, :] % HEADS * D + channel[:, None], mask=real, other=0.0).to(tl.float32)
            if TERMS == 1:
                products = _dot(turned, weight, products, EXACT)
            else:
                weight = _by_slot(weight, slot[None, :], HEADS)
                lead = _lead(turned)
                products = _dot(lead.to(tl.bfloat16), weight, products, EXACT)
                products = _dot((turned - lead).to(tl.bfloat16), weight, products, EXACT)
        if KEYS:
            real = (channel[:, None] < D) & (column[None, :] < Q)
            weight = tl.load(key_ptr + column[None, :] * D + channel[:, None], mask=real, other=0.0)
            keys = _dot(turned.to(weight.dtype), weight, keys, EXACT)
    if SCORES and tl.program_id(1) == 0:
        scores = tl.sum(tl.reshape(products, (TOKENS, TERMS, HEADS)), 1)
        head = tl.arange(0, HEADS)
        real = head[None, :] < K
        if BIAS:
            scores += tl.load(bias_ptr + head[None, :], mask=real, other=0.0).to(tl.float32)
        if SUMS:
            added = tl.sum(tl.where(here, scores, 0.0), 0)
            tl.store(sum_ptr + (sample * tiles + tile) * K + head, added, mask=head < K)
        value = tl.sigmoid(scores) if SIGMOID else scores
        if not KEYS:
            tl.store(out_ptr + start * K + row * K + head[None, :], value, mask=here & real)
    if KEYS:
        real = column[None, :] < Q
        if KEY_BIAS:
            keys += tl.load(key_bias_ptr + column[None, :], mask=real, other=0.0).to(tl.float32)
        tl.store(keys_ptr + start * Q + row * Q + column[None, :], keys.to(keys_ptr.dtype.element_ty), mask=here & real)


@triton.jit
def _share(b, tiles, samples, some, chunks):
    """The samples and tiles of this program (`plan.share`)."""
    sample, tile = (tl.program_id(0) % chunks).to(tl.int64) * samples, tl.program_id(0) // chunks * some
    return sample, tl.minimum(sample + samples, b), tile, tl.minimum(tile + some, tiles)


@triton.jit
def _add_keys(
    total, dq_ptr, key_ptr, left, row, here, channel,
    D: tl.constexpr, Q: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """total + dq A for the columns from `left` on."""
    column = left + tl.arange(0, COLUMNS)
    dq = tl.load(dq_ptr + row * Q + column[None, :], mask=here & (column[None, :] < Q), other=0.0)
    weight = tl.load(key_ptr + column[:, None] * D + channel, mask=(column[:, None] < Q) & (channel < D), other=0.0)
    return _dot(dq, weight, total, EXACT)


@triton.jit
def into_tokens_kernel(
    dscores_ptr, dpooled_ptr, assign_ptr, dkeys_ptr, key_ptr, product_ptr, far_cos, far_sin, near_cos, near_sin, dz_ptr,
    n, step, b, tiles, samples, some, chunks,
    D: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, TERMS: tl.constexpr, SLOTS: tl.constexpr, Q: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, ROTARY: tl.constexpr, LEVEL: tl.constexpr,
    SCORES: tl.constexpr, GATED: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some channels of its tokens. The weights stay where they are, and the angles of a tile for all samples."""
    first = tl.program_id(1) * CHANNELS
    channel, slot = first + tl.arange(0, CHANNELS)[None, :], tl.arange(0, TERMS * SLOTS)
    known = (slot[:, None] % HEADS < K) & (channel < D)
    if SCORES or GATED:
        assign_ptr += slot[:, None] % HEADS * D + channel
        if TERMS == 2:  # slots: leading dl leading assign, rest leading, leading rest, rest rest
            assign = _by_slot(tl.load(assign_ptr, mask=known, other=0.0).to(tl.float32), slot[:, None], SLOTS)
    sample_0, sample_1, tile_0, tile_1 = _share(b, tiles, samples, some, chunks)
    for tile in range(tile_0, tile_1):
        token, far, near = places(tile, n, step, TOKENS, LEVEL)
        here = token < n
        row = tl.arange(0, TOKENS)[:, None]
        full = here if D % CHANNELS == 0 else here & (channel < D)
        if ROTARY:
            cos, sin = angles(far_cos, far_sin, near_cos, near_sin, far, near, first, D, CHANNELS)
        for sample in tl.range(sample_0, sample_1, num_stages=STAGES):
            start = sample * n + tile * TOKENS
            product = tl.load(product_ptr + start * D + row * D + channel, mask=full, other=0.0, eviction_policy="evict_first")
            dturned = tl.zeros((TOKENS, CHANNELS), tl.float32)
            if SCORES or GATED:
                dl = _dscores(dscores_ptr, dpooled_ptr, sample, start, row, here, slot[None, :] % HEADS, K, SCORES, GATED)
                if TERMS == 2:
                    dturned = _dot(_by_slot(dl, slot[None, :] % SLOTS, HEADS), assign, dturned, EXACT)
                else:  # exact products would keep the weights in registers
                    dturned = _dot(dl, tl.load(assign_ptr, mask=known, other=0.0).to(tl.float32), dturned, EXACT)
            if KEYS:
                dq_ptr = dkeys_ptr + start * Q
                if Q <= COLUMNS:
                    dturned = _add_keys(dturned, dq_ptr, key_ptr, 0, row, here, channel, D, Q, COLUMNS, EXACT)
                else:
                    for left in tl.range(0, Q, COLUMNS, num_stages=2):
                        dturned = _add_keys(dturned, dq_ptr, key_ptr, left, row, here, channel, D, Q, COLUMNS, EXACT)
            if ROTARY:
                dturned = rotate(dturned, cos, sin, TOKENS, CHANNELS, True)
            dz = product.to(tl.float32) + dturned
            tl.store(dz_ptr + start * D + row * D + channel, dz.to(dz_ptr.dtype.element_ty), mask=full)


@triton.jit
def into_weights_kernel(
    z_ptr, far_cos, far_sin, near_cos, near_sin, dscores_ptr, dpooled_ptr, dkeys_ptr, dassign_ptr, dkey_ptr,
    n, step, b, tiles, samples, some, chunks,
    D: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, TERMS: tl.constexpr, SLOTS: tl.constexpr, Q: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, ROTARY: tl.constexpr, LEVEL: tl.constexpr,
    SCORES: tl.constexpr, GATED: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some channels of its tokens and, of the keys, some columns; the first of these programs has `assign`."""
    slot, column = tl.arange(0, SLOTS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * CHANNELS
    channel = first + tl.arange(0, CHANNELS)
    dassign = tl.zeros((SLOTS, CHANNELS), tl.float32)
    dkey = tl.zeros((CHANNELS, COLUMNS), tl.float32)
    sample_0, sample_1, tile_0, tile_1 = _share(b, tiles, samples, some, chunks)
    for tile in range(tile_0, tile_1):
        token, far, near = places(tile, n, step, TOKENS, LEVEL)
        here = token < n
        row = tl.arange(0, TOKENS)[:, None]
        if ROTARY:
            cos, sin = angles(far_cos, far_sin, near_cos, near_sin, far, near, first, D, CHANNELS)
        for sample in tl.range(sample_0, sample_1, num_stages=STAGES):
            start = sample * n + tile * TOKENS
            turned = _tokens(z_ptr + start * D, row, here, channel[None, :], D, CHANNELS)
            if ROTARY:
                turned = rotate(turned, cos, sin, TOKENS, CHANNELS, False)
            if SCORES or GATED:
                dl = _dscores(dscores_ptr, dpooled_ptr, sample, start, row, here, slot[None, :] % HEADS, K, SCORES, GATED)
                if TERMS == 1:
                    dassign = _dot(tl.trans(dl), turned, dassign, EXACT)
                else:
                    dl, lead = tl.trans(_by_slot(dl, slot[None, :], HEADS)), _lead(turned)
                    dassign = _dot(dl, lead.to(tl.bfloat16), dassign, EXACT)
                    dassign = _dot(dl, (turned - lead).to(tl.bfloat16), dassign, EXACT)
            if KEYS:
                dq = tl.load(dkeys_ptr + start * Q + row * Q + column[None, :], mask=here & (column[None, :] < Q), other=0.0)
                dkey = _dot(tl.trans(turned.to(dq.dtype)), dq, dkey, EXACT)
    part = tl.program_id(0).to(tl.int64)
    if (SCORES or GATED) and tl.program_id(2) == 0:
        head = tl.arange(0, HEADS)
        total = tl.sum(tl.reshape(dassign, (TERMS, HEADS, CHANNELS)), 0)
        real = (head[:, None] < K) & (channel[None, :] < D)
        tl.store(dassign_ptr + (part * K + head[:, None]) * D + channel[None, :], total, mask=real)
    if KEYS:
        real = (column[None, :] < Q) & (channel[:, None] < D)
        tl.store(dkey_ptr + (part * Q + column[None, :]) * D + channel[:, None], dkey, mask=real)


def tables(mode: str, z: Tensor, grid: Any) -> tuple[list[Tensor], int]:
    """Of the rotation of z (b, n, d), and their step; none where nothing turns."""
    f32, place = torch.float32, z.device
    factors = rotary.factors(mode, z.shape[-1], z.shape[1], grid, step=plan.STEP, device=place, dtype=f32)
    return ([], 1) if factors is None else ([x.contiguous() for x in (*factors.far, *factors.near)], factors.step)


def _sizes(like: Tensor, assign: int, key: int, tile: plan.Cut, turn: list[Tensor], step: int) -> dict[str, Any]:
    """Constants of the three kernels; `assign` and `key` count rows. A slot is a term of a head. The interpreter multiplies
    bfloat16 wrongly, so that it is given the same numbers as float32."""
    turned, wide = len(turn) > 0, like.dtype == torch.float32
    terms, heads = 1 if wide else 2, max(16 if wide else 8, power_of_two(assign))
    return {
        "D": like.shape[-1], "K": assign, "HEADS": heads, "TERMS": terms, "SLOTS": terms * heads, "Q": key,
        "COLUMNS": tile.columns, "TOKENS": tile.tokens, "CHANNELS": tile.channels, "KEYS": key > 0, "ROTARY": turned,
        "LEVEL": turned and step % tile.tokens == 0, "EXACT": wide or interpreted(), "num_warps": tile.warps,
    }  # fmt: skip


@op()
def front(
    z: Tensor, turn: list[Tensor], step: int, assign: Tensor | None, bias: Tensor | None, key: Tensor | None,
    key_bias: Tensor | None, sigmoid: bool, pooled: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of z (b, n, d): pi or l (b, n, k), where there are no keys; with `pooled` sums of l by tile, (b, tiles, k); and keys
    (b, n, q). What there is not is empty."""
    (b, n, d), k, q = z.shape, 0 if assign is None else assign.shape[0], 0 if key is None else key.shape[0]
    tile = plan.cut("front keys" if q else "front", d, z.dtype, q)
    tiles, sizes = over(n, tile.tokens), _sizes(z, k, q, tile, turn, step)
    out = torch.empty(b if k and not q else 0, n, k, device=z.device, dtype=torch.float32)
    sums = torch.empty(b, tiles if k and pooled else 0, k, device=z.device, dtype=torch.float32)
    keys = torch.empty(b if q else 0, n, q, device=z.device, dtype=z.dtype if key is None else key.dtype)
    launch(
        front_kernel, (b * tiles, max(1, over(q, sizes["COLUMNS"]))),
        z, *(turn or (z,) * 4), assign, bias, key, key_bias, out, sums, keys, n, step, tiles,
        SCORES=k > 0, BIAS=bias is not None, SIGMOID=sigmoid, SUMS=pooled, KEY_BIAS=key_bias is not None,
        STAGES=tile.stages, **sizes,
    )  # fmt: skip
    return out, sums, keys


@op()
def into_tokens(
    product: Tensor, dscores: Tensor | None, dpooled: Tensor | None, assign: Tensor | None, dkeys: Tensor | None,
    key: Tensor | None, turn: list[Tensor], step: int,
) -> Tensor:  # fmt: skip
    """dz (b, n, d) from dS U^T, dscores (b, n, k), dpooled (b, k), each token's share of the gate, and dkeys (b, n, q)."""
    (b, n, d), k, q = product.shape, 0 if assign is None else assign.shape[0], 0 if key is None else key.shape[0]
    kernel = "into_tokens keys" if q else "into_tokens"
    tile = plan.cut(kernel, d, product.dtype, q)
    dz, sizes = torch.empty_like(product), _sizes(product, k, q, tile, turn, step)
    share = plan.share(kernel, b, n, d, tile)
    launch(
        into_tokens_kernel, (share.programs, over(d, tile.channels)),
        dscores, dpooled, assign, dkeys, key, product, *(turn or (product,) * 4), dz, n, step, *share[1:],
        SCORES=dscores is not None, GATED=dpooled is not None, STAGES=tile.stages, **sizes,
    )  # fmt: skip
    return dz


@op()
def into_weights(
    z: Tensor, dscores: Tensor | None, dpooled: Tensor | None, dkeys: Tensor | None, turn: list[Tensor], step: int
) -> tuple[Tensor, Tensor]:
    """Partial sums of the gradients of `assign` (rows, k, d) and of the keys' weight (rows, q, d)."""
    (b, n, d), q = z.shape, 0 if dkeys is None else dkeys.shape[-1]
    given = dpooled if dscores is None else dscores
    k, kernel = 0 if given is None else given.shape[-1], "into_weights keys" if q else "into_weights"
    tile = plan.cut(kernel, d, z.dtype, q)
    sizes, share = _sizes(z, k, q, tile, turn, step), plan.share(kernel, b, n, d, tile)
    dassign = torch.empty(share.programs, k, d, device=z.device, dtype=torch.float32)
    dkey = torch.empty(share.programs, q, d, device=z.device, dtype=torch.float32)
    launch(
        into_weights_kernel, (share.programs, over(d, tile.channels), max(1, over(q, sizes["COLUMNS"]))),
        z, *(turn or (z,) * 4), dscores, dpooled, dkeys, dassign, dkey, n, step, *share[1:],
        SCORES=dscores is not None, GATED=dpooled is not None, STAGES=tile.stages, **sizes,
    )  # fmt: skip
    return dassign, dkey


flops("front", lambda z, turn, step, assign, bias, key, *_: 2 * math.prod(z) * sum(x[0] for x in (assign, key) if x))
flops("into_tokens", lambda z, dl, dp, assign, dq, key, *_: 2 * math.prod(z) * sum(x[0] for x in (assign, key) if x))
flops("into_weights", lambda z, dl, dp, dq, *_: 2 * math.prod(z) * ((dl or dp or [0])[-1] + (dq or [0])[-1]))
