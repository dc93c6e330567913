"""A square linear map whose matrix is orthonormal: `weight` is the plain matrix, `basis()` is what the layer uses.

    retract     weight <- Q^T of weight^T = Q R, diag(R) > 0: Gram-Schmidt on the rows; nothing where it is orthonormal already
    training    each forward retracts, then uses weight with the gradient of Gram-Schmidt, so an optimizer may step freely
    evaluation  weight, or its retraction where somebody changed it since (a step, an average of weights); the same gradient

Saving, loading and `eval()` leave the stored matrix alone, so how often a run, or an average of its weights, is saved or
evaluated does not bend it; a state dict holds the parameter itself, as tools that average state dicts need. `save_model` writes
the retracted matrix. A traced graph cannot look at values: it holds Gram-Schmidt itself and retracts nothing, so call
`retract_()` after the steps of a compiled training, which also makes evaluation quick. All in float32 or wider.

Near the manifold products do what a QR does (`closer`), without a look at values: `settle_` retracts so on a GPU. Who retracts
after every step, as the engine here, says `kept = True`: a traced graph then holds one such pass in place of the QR, and so
does a CUDA graph of training, which always needs it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dmst import tracing
from dmst.kernels.casting import without_autocast


class OrthonormalLinear(nn.Linear):
    """`nn.Linear(dim, dim)` whose matrix is `basis()`."""

    kept = False  # somebody retracts after every step

    def reset_parameters(self) -> None:
        wide = torch.empty_like(self.weight, dtype=torch.promote_types(self.weight.dtype, torch.float32))
        with torch.no_grad():
            self.weight.copy_(nn.init.orthogonal_(wide))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def basis(self) -> Tensor:
        """The orthonormal matrix that the layer uses; a quantized one as it is, since nothing can put it onto the manifold."""
        weight, learned = self.weight, self.training and isinstance(self.weight, nn.Parameter)  # not lent by `functional_call`
        if not tracing.is_tensor(weight):
            return weight
        if learned and (tracing.recorded(weight.device) or (self.kept and tracing.traced())):
            with without_autocast(weight):
                return closer(weight.to(torch.promote_types(weight.dtype, torch.float32))).to(weight.dtype)
        if not self._readable():  # no values to judge, and Gram-Schmidt is right for every weight
            return orthonormal_rows(weight)
        if learned:
            self.retract_()
        elif not is_orthonormal(weight):
            return orthonormal_rows(weight)
        return _OnManifold.apply(weight) if torch.is_grad_enabled() and weight.requires_grad else weight

    def retract_(self) -> None:
        """Put `weight` onto the manifold, in place."""
        if self._readable() and not is_orthonormal(self.weight):
            with torch.no_grad():
                self.weight.copy_(orthonormal_rows(self.weight))

    def forward(self, z: Tensor) -> Tensor:
        return nn.functional.linear(z, self.basis(), self.bias)

    def _readable(self) -> bool:
        hidden = tracing.traced() or tracing.transformed() or tracing.dispatched() or tracing.recorded(self.weight.device)
        return not (self.weight.is_meta or hidden)


class _OnManifold(torch.autograd.Function):
    """An orthonormal W as it is, with the gradient of Gram-Schmidt there: for h, that of the loss by its result,
    h - sym(h W^T) W, where sym copies the lower triangle onto the upper one. Neither QR nor solve."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.clone()

    @staticmethod
    @once_differentiable  # of W off the manifold it says nothing
    def backward(ctx: Any, h: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        with without_autocast(weight):
            wide = torch.promote_types(weight.dtype, torch.float32)
            w, h = weight.to(wide), h.to(wide)
            product = h @ w.mT
            below = product.tril()
            return (h - (below + below.tril(-1).mT) @ w).to(weight.dtype)


SETTLINGS = 12  # from |E| = 3, where a first step of AdamW is far too long, to rounding


def retract(*models: nn.Module) -> None:
    """The orthonormal matrices of models back onto their manifold, which a step or another dtype leaves."""
    layers = [module for model in models for module in model.modules() if isinstance(module, OrthonormalLinear)]
    if layers and layers[0].weight.is_cuda:
        settle_(layers)
    else:
        for layer in layers:
            layer.retract_()


Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def freeze(model: Model) -> Model:
    """A copy for inference, in which every orthonormal map is a plain `nn.Linear` with its basis as weight.

    A traced graph of it is products alone, without the QR, which ONNX cannot say. The logits are the same to the bit, and
    `save_model` writes the same file. It is in evaluation mode and wants no gradients; the model itself stays as it is.
    """
    frozen = copy.deepcopy(model).eval()
    for name, module in list(frozen.named_modules()):
        if type(module) is OrthonormalLinear:
            plain = nn.utils.skip_init(
                nn.Linear, *module.weight.shape, bias=module.bias is not None, device=module.weight.device
            )
            plain.weight, plain.bias = nn.Parameter(module.basis()), module.bias
            frozen.set_submodule(name, plain.eval())
    return frozen.requires_grad_(False)


def closer(w: Tensor, damped: bool = False) -> Tensor:
    """(I - low(E)) W, E = W W^T - I, where low takes what is below the diagonal and half of what is on it. (..., d, d)

    It leaves an error of order E^2. Again and again it ends where Gram-Schmidt does: at the one orthonormal matrix that a lower
    triangle reaches. On the manifold it is W, and its derivative is that of Gram-Schmidt. Far from it, where |E| is above 1,
    `damped` takes the smaller step low(E)/|E|, still by a lower triangle.
    """
    unit = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    error = w @ w.mT - unit
    low = error.tril(-1) + 0.5 * error * unit
    if damped:
        low = low / error.flatten(-2).norm(dim=-1).clamp(min=1)[..., None, None]
    return w - low @ w


@torch.no_grad()
def settle_(layers: Sequence[OrthonormalLinear]) -> None:
    """Retract nearly orthonormal matrices in place, all of one shape at once, by products alone."""
    shapes: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for layer in layers:
        shapes.setdefault((layer.weight.shape, layer.weight.dtype), []).append(layer.weight)
    for (_, dtype), weights in shapes.items():
        w = torch.stack(weights).to(torch.promote_types(dtype, torch.float32))
        with without_autocast(w):
            for _ in range(SETTLINGS):
                w = closer(w, damped=True)
        torch._foreach_copy_(weights, list(w.to(dtype).unbind()))


def orthonormal_rows(weight: Tensor) -> Tensor:
    """Gram-Schmidt on the rows, by the QR of the transpose, diag(R) > 0."""
    with without_autocast(weight):
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        q, r = torch.linalg.qr(wide.mT)
        sign = torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)
        return (q * sign).mT.to(weight.dtype)


def is_orthonormal(weight: Tensor) -> bool:
    """Whether max |W W^T - I| is what rounding alone may leave: 64 float32 steps, or two of a coarser dtype."""
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    with without_autocast(weight):  # which would take the product in bfloat16 and find every matrix off
        error = (wide @ wide.mT - torch.eye(wide.shape[0], dtype=wide.dtype, device=wide.device)).abs().max()
    return bool(error <= max(64 * torch.finfo(wide.dtype).eps, 2 * torch.finfo(weight.dtype).eps))  # never true of a NaN
