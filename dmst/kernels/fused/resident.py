"""The passes between two products with each token read once: it waits in shared memory between the two sweeps. In Gluon.

    settle    energy_ki = sum_n pi_nk s_nki^2    mass_k = sum_n pi_nk    T = energy/(mass + delta)    update = f s    `moments`
    pull      A_ki = sum_n pi G s    then dT, dg, dtheta    then dS, written over G, dscores, and the update again   `adjoint`

A program takes some columns of one sample and all its n tokens. Threads copy 16 bytes at a time, 8 channels of one token, with
`cp.async`, and each reads back what it copied itself. Samples are taken in reverse: the last ones of the product before are
still in the cache, and so are the first ones for the product after.

    settle    64 (or 32) columns, wherever the heads begin: 8 channels always lie in one head (p % 8 == 0), so that each piece
              sums the memberships of its own head. Whole lines of memory, no padding
    pull      dscores_nk is a sum over a head's channels: whole heads, each padded to a power of two in registers and in shared
              memory, never in global memory

Tokens are covered by tiles of a few rows, not by the next power of two. The number of tiles is known when a kernel is compiled,
rounded up to one of `CLASSES`; n itself is not.
"""

# mypy: disallow-untyped-defs=False, disable-error-code="assignment, misc, var-annotated"
from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.form import Form
from dmst.kernels.fused.core import LISTING, MODES, PROXIMAL, attenuation, factor, weigh
from dmst.kernels.fused.launch import is_fake, op
from dmst.kernels.plan import over, power_of_two

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy

    GLUON = triton.__version__.startswith(("3.6.", "3.7.", "3.8."))  # an experiment of theirs: only where this was compiled
    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
except ImportError:
    import triton as gluon  # enough for the definitions below, which nobody calls then
    import triton.language as gl

    GLUON = False

F32 = torch.float32
CLASSES = (1, 2, 3, 4, 6, 8, 10, 13, 16)  # numbers of tiles; a thread keeps one membership of each in a register
# A product is fused with a sum only where it is written so. The compiler does as it likes, and otherwise in a kernel that also
# sums a bias or writes the update: what else is wanted would decide last bits of dS.
AS_WRITTEN = {"enable_fp_fusion": False}


@gluon.jit
def _shares(membership_ptr, place, some, MASKED: gl.constexpr):
    if MASKED:
        return gl.load(membership_ptr + place, mask=some, other=0.0)
    return gl.load(membership_ptr + place)


@gluon.jit
def _copy(page, source, real, MASKED: gl.constexpr):
    """Into shared memory, zeros where a token is not real."""
    if MASKED:
        async_copy.async_copy_global_to_shared(page, source, mask=real)
    else:
        async_copy.async_copy_global_to_shared(page, source)


@gluon.jit
def _write(place, value, real, MASKED: gl.constexpr):
    if MASKED:
        gl.store(place, value, mask=real)
    else:
        gl.store(place, value)


@gluon.jit
def between(total, a, gate, theta, sign, MODE: gl.constexpr):
    """Between the two sweeps, of each head: dT (heads, channels), dg and, in the proximal form, dtheta (heads) from A."""
    if MODE == PROXIMAL:
        dmoment = theta * gate * gate * gate * gate * a * a * total
        dgate = -2.0 * theta * gl.sum(gate * a * a * total, axis=1)
        dtheta = -gl.sum(gate * gate * a * total, axis=1)
    elif MODE == LISTING:
        dmoment = -sign * gate * gate * gate * a * a * total
        dgate = sign * gl.sum(total * a * (2.0 * a - 1.0), axis=1)
        dtheta = dgate
    else:
        dmoment = -sign * gate * gate * gate * gate * a * a * total
        dgate = 2.0 * sign * gl.sum(gate * total * a * a, axis=1)
        dtheta = dgate
    return dmoment, dgate, dtheta


@gluon.jit
def pulled(grad, s, share, c, m, mean, MODE: gl.constexpr, UNIFORM: gl.constexpr, SIGMOID: gl.constexpr):
    """dS and dscores of some tokens, from G, s, pi (tokens, heads) and what is the same for all of them."""
    pi = gl.expand_dims(share, 2)
    bent = m * s
    if MODE == PROXIMAL:
        w = pi * c
        damp = 1.0 / (1.0 + w)
        flow = -grad * damp
        ds = flow * w + (2.0 * bent if UNIFORM else 2.0 * pi * bent)
        lean = c * flow * damp
    else:
        lean = c * grad
        ds = pi * lean + 2.0 * bent if UNIFORM else pi * ((lean + bent) + bent)
    dpi = gl.sum(lean * s, axis=2) if UNIFORM else gl.sum((lean + bent) * s, axis=2) - mean
    if SIGMOID:
        dpi = dpi * share * (1.0 - share)
    return ds, dpi


@gluon.jit(do_not_specialize=["n"])
def settle_kernel(
    s_ptr, membership_ptr, gate_ptr, theta_ptr, update_ptr, moment_ptr, divisor_ptr, n, delta, sign,
    K: gl.constexpr, P: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr, FULL: gl.constexpr, WARPS: gl.constexpr,
    MODE: gl.constexpr, GATED: gl.constexpr, UNIFORM: gl.constexpr, DELTA: gl.constexpr,
):  # fmt: skip
    """Tiles (ROWS, PIECES, 8); the first FULL of them have no row beyond n."""
    BLOCKS: gl.constexpr = K * P // COLUMNS
    PIECES: gl.constexpr = COLUMNS // 8
    ROWS: gl.constexpr = WARPS * (32 // PIECES)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [32 // PIECES, PIECES, 1], [WARPS, 1, 1], [2, 1, 0])
    SHARE: gl.constexpr = gl.SliceLayout(2, LAYOUT)  # (ROWS, PIECES)
    CHANNEL: gl.constexpr = gl.SliceLayout(0, LAYOUT)  # (PIECES, 8)
    PAGE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [2, 1, 0])
    program = gl.num_programs(0) - 1 - gl.program_id(0)
    sample = (program // BLOCKS).to(gl.int64)
    piece = (program % BLOCKS) * PIECES + gl.arange(0, PIECES, layout=gl.SliceLayout(0, SHARE))
    head = piece // (P // 8)
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, SHARE)), 1)
    place = sample * n * K + (row * K + gl.expand_dims(head, 0))
    channel = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, CHANNEL)), 0)
    column = _spread(piece, CHANNEL) * 8 + channel
    token = gl.expand_dims(row, 2)
    at = sample * n * (K * P) + (token * (K * P) + gl.expand_dims(column, 0))

    shares = ()
    pages = ()  # one allocation a tile: in a common one the compiler puts barriers between the copies
    for t in gl.static_range(TILES):
        pages += (gl.allocate_shared_memory(s_ptr.dtype.element_ty, [1, ROWS, PIECES, 8], PAGE),)
        _copy(pages[t].index(0), s_ptr + at + t * ROWS * (K * P), token + t * ROWS < n, t >= FULL)
    async_copy.commit_group()
    barrier()  # no copy may wait for what is loaded below, as the compiler would have it
    for t in gl.static_range(TILES):
        shares += (_shares(membership_ptr, place + t * ROWS * K, row + t * ROWS < n, t >= FULL),)
    gate = _spread(gl.load(gate_ptr + sample * K + head), CHANNEL) if GATED else 1.0
    theta = gl.load(theta_ptr).to(gl.float32) if MODE == PROXIMAL else 1.0

    # the divisor while the tokens are on their way
    if UNIFORM:
        divisor = gl.full([PIECES], 1.0, gl.float32, gl.SliceLayout(0, SHARE)) * gl.maximum(n, 1)
    else:
        mass = shares[0]
        for t in gl.static_range(1, TILES):
            mass += shares[t]
        divisor = gl.sum(mass, axis=0)
        if DELTA:
            divisor += delta
        else:
            divisor = gl.where(divisor > 0, divisor, gl.where(divisor != divisor, divisor, 1.0))
    gl.store(divisor_ptr + sample * K + head, divisor, mask=piece % (P // 8) == 0)

    async_copy.wait_group(0)
    energy = gl.zeros([ROWS, PIECES, 8], gl.float32, LAYOUT)
    for t in gl.static_range(TILES):
        s = pages[t].index(0).load(LAYOUT).to(gl.float32)
        energy += s * s if UNIFORM else (gl.expand_dims(shares[t], 2) * s) * s
    moment = gl.sum(energy, axis=0) / _spread(divisor, CHANNEL)
    gl.store(moment_ptr + sample * (K * P) + column, moment)
    c = gl.expand_dims(factor(attenuation(moment, gate), gate, theta, sign, MODE), 0)

    again = n >> 31  # 0, as the compiler cannot know: or it would keep what the first sweep read in registers
    for t in gl.static_range(TILES):
        s = pages[t].index(again).load(LAYOUT).to(gl.float32)
        update = (weigh(gl.expand_dims(shares[t], 2), c, MODE) * s).to(update_ptr.dtype.element_ty)
        _write(update_ptr + at + t * ROWS * (K * P), update, token + t * ROWS < n, t >= FULL)


@gluon.jit
def _spread(x, CHANNEL: gl.constexpr):
    """(PIECES) as a column beside the channels."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, CHANNEL), assert_trivial=True), 1)


@gluon.jit(do_not_specialize=["n"])
def pull_kernel(
    grad_ptr, s_ptr, membership_ptr, moment_ptr, gate_ptr, divisor_ptr, theta_ptr,
    dmembership_ptr, dgate_ptr, dtheta_ptr, dbias_ptr, update_ptr, n, sign,
    K: gl.constexpr, P: gl.constexpr, HEADS: gl.constexpr, WIDTH: gl.constexpr, TILES: gl.constexpr, FULL: gl.constexpr,
    WARPS: gl.constexpr, MODE: gl.constexpr, GATED: gl.constexpr, UNIFORM: gl.constexpr, SIGMOID: gl.constexpr,
    BIAS: gl.constexpr, UPDATE: gl.constexpr,
):  # fmt: skip
    """Tiles (ROWS, HEADS, WIDTH), p padded to WIDTH; the first FULL of them have no row beyond n."""
    BLOCKS: gl.constexpr = (K + HEADS - 1) // HEADS
    PIECES: gl.constexpr = WIDTH // 8
    ROWS: gl.constexpr = WARPS * (32 // (HEADS * PIECES))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [32 // (HEADS * PIECES), HEADS, PIECES], [WARPS, 1, 1], [2, 1, 0])
    SHARE: gl.constexpr = gl.SliceLayout(2, LAYOUT)  # (ROWS, HEADS)
    CHANNEL: gl.constexpr = gl.SliceLayout(0, LAYOUT)  # (HEADS, WIDTH)
    PAGE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [2, 1, 0])
    EXACT: gl.constexpr = P == WIDTH and K % HEADS == 0
    program = gl.num_programs(0) - 1 - gl.program_id(0)
    sample = (program // BLOCKS).to(gl.int64)
    head = (program % BLOCKS) * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, CHANNEL))
    channel = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, CHANNEL)), 0)
    some = head < K
    inside = (channel < P) & gl.expand_dims(some, 1)
    column = gl.expand_dims(head, 1) * P + channel
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, SHARE)), 1)
    across = gl.expand_dims(gl.convert_layout(head, gl.SliceLayout(0, SHARE), assert_trivial=True), 0)
    place = sample * n * K + (row * K + across)
    token = gl.expand_dims(row, 2)
    at = sample * n * (K * P) + (token * (K * P) + gl.expand_dims(column, 0))

    shares = ()
    pages = ()  # one allocation a tile: in a common one the compiler puts barriers between the copies
    for t in gl.static_range(TILES):
        grads = gl.allocate_shared_memory(grad_ptr.dtype.element_ty, [1, ROWS, HEADS, WIDTH], PAGE)
        tokens = gl.allocate_shared_memory(s_ptr.dtype.element_ty, [1, ROWS, HEADS, WIDTH], PAGE)
        real = (token + t * ROWS < n) & gl.expand_dims(inside, 0)
        _copy(grads.index(0), grad_ptr + at + t * ROWS * (K * P), real, t >= FULL or not EXACT)
        _copy(tokens.index(0), s_ptr + at + t * ROWS * (K * P), real, t >= FULL or not EXACT)
        pages += ((grads, tokens),)
    async_copy.commit_group()
    barrier()  # no copy may wait for what is loaded below, as the compiler would have it
    for t in gl.static_range(TILES):
        here = (row + t * ROWS < n) & (across < K)
        shares += (_shares(membership_ptr, place + t * ROWS * K, here, t >= FULL or K % HEADS != 0),)
    moment = gl.load(moment_ptr + sample * (K * P) + column, mask=inside, other=0.0)
    divisor = gl.expand_dims(gl.load(divisor_ptr + sample * K + head, mask=some, other=1.0), 1)
    gate = gl.expand_dims(gl.load(gate_ptr + sample * K + head, mask=some, other=0.0), 1) if GATED else 1.0
    theta = gl.load(theta_ptr).to(gl.float32) if MODE == PROXIMAL else 1.0
    a = attenuation(moment, gate)
    c = factor(a, gate, theta, sign, MODE)
    by_token = gl.expand_dims(c, 0)

    barrier()  # nor may these loads wait for the copies
    async_copy.wait_group(0)
    sums = gl.zeros([ROWS, HEADS, WIDTH], gl.float32, LAYOUT)
    for t in gl.static_range(TILES):
        grad = pages[t][0].index(0).load(LAYOUT).to(gl.float32)
        s = pages[t][1].index(0).load(LAYOUT).to(gl.float32)
        pi = gl.expand_dims(shares[t], 2)
        if MODE == PROXIMAL:
            damp = 1.0 + pi * by_token
            sums += pi * (grad * s / (damp * damp))
        else:
            sums = gl.fma(pi * grad, s, sums)
    total = gl.sum(sums, axis=0)

    dmoment, dgate, dtheta = between(total, a, gate, theta, sign, MODE)
    if MODE == PROXIMAL:
        gl.store(dtheta_ptr + sample * K + head, dtheta, mask=some)
    if GATED:
        gl.store(dgate_ptr + sample * K + head, dgate, mask=some)
    m = dmoment / divisor
    mean = gl.sum(m * moment, axis=1)
    mean = gl.expand_dims(gl.convert_layout(mean, gl.SliceLayout(0, SHARE), assert_trivial=True), 0)
    m = gl.expand_dims(m, 0)

    again = n >> 31  # 0, as the compiler cannot know: or it would keep what the first sweep read in registers
    if MODE == PROXIMAL:
        by_token += again.to(gl.float32)  # the same with what it made of c and each pi
    bias = gl.zeros([ROWS, HEADS, WIDTH], gl.float32, LAYOUT)
    for t in gl.static_range(TILES):
        grad = pages[t][0].index(again).load(LAYOUT).to(gl.float32)
        s = pages[t][1].index(again).load(LAYOUT).to(gl.float32)
        ds, dpi = pulled(grad, s, shares[t], by_token, m, mean, MODE, UNIFORM, SIGMOID)
        ds = ds.to(grad_ptr.dtype.element_ty)
        here, real = (row + t * ROWS < n) & (across < K), (token + t * ROWS < n) & gl.expand_dims(inside, 0)
        _write(grad_ptr + at + t * ROWS * (K * P), ds, real, t >= FULL or not EXACT)
        if UPDATE:
            update = (weigh(gl.expand_dims(shares[t], 2), by_token, MODE) * s).to(update_ptr.dtype.element_ty)
            _write(update_ptr + at + t * ROWS * (K * P), update, real, t >= FULL or not EXACT)
        gl.store(dmembership_ptr + place + t * ROWS * K, dpi, mask=here)
        if BIAS:  # beyond n both tokens are zero, and so is dS
            bias += ds.to(gl.float32)
    if BIAS:
        gl.store(dbias_ptr + sample * (K * P) + column, gl.sum(bias, axis=0), mask=inside)


# --- the calls ------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """How a sample is cut: programs of some columns, padding included, and all its tokens in tiles of `rows`."""

    columns: int
    warps: int
    tiles: int  # one of CLASSES
    full: int  # of these, tiles that no n of the class leaves in part

    @property
    def rows(self) -> int:
        return self.warps * 256 // self.columns


def fits(n: int, d: int, p: int, dtype: torch.dtype, device: torch.device) -> Shape | None:
    """How `settle` cuts samples of n tokens with d channels in heads of p; None where it does not serve them."""
    return _fits(n, d, p, _index(device)) if _serves(n, p, dtype, device) else None


def fits_pull(n: int, d: int, p: int, dtype: torch.dtype, device: torch.device) -> Shape | None:
    """The same for `pull`, which has two tensors to hold."""
    return _fits_pull(n, d, p, _index(device)) if _serves(n, p, dtype, device) else None


@op(gluon=True)
def resident_settle(
    projected: Tensor, membership: Tensor, gate: Tensor | None, theta: Tensor | None, form: str
) -> tuple[Tensor, Tensor, Tensor]:
    """As `moments.settle`."""
    told, (b, n, d), k = Form.read(form), projected.shape, membership.shape[-1]
    update = torch.empty_like(projected)
    moment, divisor = membership.new_empty(b, k, d // k), membership.new_empty(b, k)
    if not is_fake(projected):
        shape = fits(n, d, d // k, projected.dtype, projected.device)
        assert shape is not None
        settle_kernel[(b * (d // shape.columns),)](
            projected, membership, gate, theta, update, moment, divisor, n, float(told.delta), float(told.sign),
            K=k, P=d // k, COLUMNS=shape.columns, TILES=shape.tiles, FULL=shape.full, WARPS=shape.warps,
            MODE=MODES[told.mode], GATED=gate is not None, UNIFORM=told.uniform_moment, DELTA=bool(told.delta),
            num_warps=shape.warps,
        )  # fmt: skip
    return update, moment, divisor


@op(gluon=True, mutates=("grad",))
def resident_pull(
    grad: Tensor, projected: Tensor, membership: Tensor, moment: Tensor, gate: Tensor | None, divisor: Tensor,
    theta: Tensor | None, form: str, wants_bias: bool, wants_update: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `adjoint.pull`, with the update once more, since s is at hand."""
    told, (b, n, d), k = Form.read(form), projected.shape, membership.shape[-1]
    p, width = d // k, power_of_two(d // k)
    made = empties(membership, gate, theta, (b, 1, k, p), wants_bias)
    update = torch.empty_like(projected) if wants_update else grad.new_empty(0)
    if not is_fake(grad):
        shape = fits_pull(n, d, p, grad.dtype, grad.device)
        assert shape is not None and grad.dtype == projected.dtype
        heads = shape.columns // width
        pull_kernel[(b * over(k, heads),)](
            grad, projected, membership, moment, gate, divisor, theta, *made, update, n, float(told.sign),
            K=k, P=p, HEADS=heads, WIDTH=width, TILES=shape.tiles, FULL=shape.full, WARPS=shape.warps,
            MODE=MODES[told.mode], GATED=gate is not None, UNIFORM=told.uniform_moment,
            SIGMOID=told.membership == "sigmoid", BIAS=wants_bias, UPDATE=wants_update, num_warps=shape.warps, **AS_WRITTEN,
        )  # fmt: skip
    return *made, update


def empties(
    membership: Tensor, gate: Tensor | None, theta: Tensor | None, bias: tuple[int, ...], wants_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for the gradients of scores, gate, theta and bias; empty where there is none, or it is not wanted."""
    k = membership.shape[-1]
    dgate, dtheta = (membership.new_empty(membership.shape[0] if x is not None else 0, k) for x in (gate, theta))
    return torch.empty_like(membership), dgate, dtheta, membership.new_empty(bias if wants_bias else (0, *bias[1:]))


def _serves(n: int, p: int, dtype: torch.dtype, device: torch.device) -> bool:
    """What neither the sample's length nor the device's memory decides. A graph for every length has no length."""
    return plan.RESIDENT and isinstance(n, int) and serves(p, dtype, device)


def serves(p: int, dtype: torch.dtype, device: torch.device) -> bool:
    known = GLUON and torch.version.hip is None
    return known and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and p % 8 == 0


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _fits(n: int, d: int, p: int, index: int) -> Shape | None:
    for columns, programs in ((64, 3), (32, 2)):  # narrow ones rather than two wide ones
        if d % columns == 0 and (shape := _cut(n, columns, 1, programs, index)):
            return shape
    return None


@cache
def _fits_pull(n: int, d: int, p: int, index: int) -> Shape | None:
    width = power_of_two(p)
    for columns in (64, 32) if width <= 64 else (width,):
        if width <= columns <= 256 and (shape := _cut(n, columns, 2, 2, index)):
            return shape
    return None


def _cut(n: int, columns: int, tensors: int, programs: int, index: int) -> Shape | None:
    """With as few warps as reach n tokens, if so many programs have room on a multiprocessor."""
    for warps in (4, 8, 16):
        rows = warps * 256 // columns
        tiles = next((tiles for tiles in CLASSES if n <= tiles * rows), None)
        if tiles is not None and n > 0:
            needed = tensors * tiles * rows * columns * 2 + warps * columns * 4  # the latter to add up over the warps
            full = max((fewer for fewer in CLASSES if fewer < tiles), default=0)
            return Shape(columns, warps, tiles, full) if programs * (needed + 1024) <= _room(index) else None
    return None


@cache
def _room(index: int) -> int:
    """Bytes of shared memory of a multiprocessor, 1024 of which go with each program; 0 where there is no `cp.async`."""
    properties = torch.cuda.get_device_properties(index)
    return properties.shared_memory_per_multiprocessor if properties.major >= 8 else 0
