"""gelu(h + 3x3(h)) of the hidden channels of an MLP, on a grid of patches: plain torch, or on a GPU one kernel.

`dmst::local_gelu` is one node of a traced graph, as the layers are (registered.py); only h is kept for the backward pass, and
the activation costs no pass of its own. On an H200, bf16, 512 x 64 x 768: forward 0.098 ms, plain torch 0.127; with the
backward pass timed in eager calls only, where the host decides.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import tracing
from dmst.errors import DmstError, ShapeError
from dmst.kernels import choice
from dmst.kernels.attempt import attempt, remembered

_broken = remembered()


def local_gelu(hidden: Tensor, weight: Tensor, grid: tuple[int, int]) -> Tensor:
    """hidden (b, n, c), weight (c, 1, 3, 3) of a depthwise convolution, grid (rows, columns): (b, n, c), in hidden's dtype."""
    _, n, c = hidden.shape
    if n != grid[0] * grid[1] or tuple(weight.shape) != (c, 1, 3, 3):
        raise ShapeError(f"{n} tokens of {c} channels, grid {grid} and weight {tuple(weight.shape)} do not fit together.")
    if _served(hidden, weight):
        taps = weight.flatten(1).t().float().contiguous()  # (9, c)
        return torch.ops.dmst.local_gelu(hidden.contiguous(), taps, *grid)
    return _convolved(hidden, weight, grid)


def _convolved(hidden: Tensor, weight: Tensor, grid: tuple[int, int]) -> Tensor:
    image = hidden.unflatten(1, grid).permute(0, 3, 1, 2)
    if tracing.exported():  # channels last in memory, one image is laid out as no batch is: the graph would be for one
        image = image.contiguous()
    near = F.conv2d(image, weight, padding=1, groups=weight.shape[0])
    return F.gelu(hidden + near.permute(0, 2, 3, 1).flatten(1, 2))


def _served(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the kernels take it: as `choice` decides for a layer, but for what only a layer has."""
    if choice.chosen() == "reference" or hidden.dtype not in choice.AUTO or not hidden.numel() or tracing.transformed():
        return False
    forced = choice.chosen() == "fused"
    if choice.machine_problem(hidden.device.type, hidden.device.index or 0, forced):
        return False
    return not tracing.exported() and _library()


@functools.cache
def _library() -> bool:
    """Define the operators once, when a machine that can run them asks."""
    from dmst.kernels.fused import neighbours

    def run(call: Any, plain: Any, z: Tensor, *rest: Any) -> Any:
        kind = z.shape[-1], z.dtype, z.device
        if kind in _broken:
            return plain(z, *rest)

        def says(why: str) -> str:
            return f"The fused kernel does not work here for local MLPs ({why}). Using plain torch instead."

        return attempt(z, call, plain, (z, *rest), _broken, kind, says)

    @torch.library.custom_op("dmst::local_gelu", mutates_args=())
    def forward(hidden: Tensor, taps: Tensor, rows: int, columns: int) -> Tensor:
        return run(neighbours.forward, _plain, hidden, taps, rows, columns)

    @torch.library.custom_op("dmst::local_gelu_backward", mutates_args=())
    def backward(grad: Tensor, hidden: Tensor, taps: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return run(neighbours.backward, _plain_backward, grad.contiguous(), hidden, taps, rows, columns)

    @forward.register_fake
    def _(hidden: Tensor, taps: Tensor, rows: int, columns: int) -> Tensor:
        return torch.empty_like(hidden)

    @backward.register_fake
    def _(grad: Tensor, hidden: Tensor, taps: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return torch.empty_like(hidden), torch.empty_like(taps)

    def keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
        hidden, taps, ctx.rows, ctx.columns = inputs
        ctx.save_for_backward(hidden, taps)

    def differentiate(ctx: Any, grad: Tensor) -> tuple:
        dh, dtaps = torch.ops.dmst.local_gelu_backward(grad, *ctx.saved_tensors, ctx.rows, ctx.columns)
        return dh, dtaps, None, None

    def refuse(ctx: Any, *_: Any) -> tuple:
        raise DmstError(
            "The kernel of local MLPs has no second derivative: take the forward pass that it is asked of inside "
            'dmst.use_kernels("reference"), which has every order.'
        )

    forward.register_autograd(differentiate, setup_context=keep)
    backward.register_autograd(refuse)
    return True


_library._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _plain(hidden: Tensor, taps: Tensor, rows: int, columns: int) -> Tensor:
    return _convolved(hidden, taps.t().unflatten(1, (1, 3, 3)).to(hidden.dtype), (rows, columns))


def _plain_backward(grad: Tensor, hidden: Tensor, taps: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        inputs = hidden.detach().requires_grad_(), taps.detach().requires_grad_()
        dh, dtaps = torch.autograd.grad(_plain(*inputs, rows, columns), inputs, grad)
    return dh, dtaps
