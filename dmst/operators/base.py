"""The contract of an operator: an `nn.Module` on tokens (b, n, d) with these methods, no norm and no residual.

    __init__(dim, num_heads, *, bias, proj_drop, device, dtype, ...)     what networks pass, then its own options by keyword
    forward(z, *, grid=None)          the update (b, n, d)
    decompose(z, *, grid=None)        Parts: what it computed on the way, every head, also the silent ones
    rate(z, *, eps, grid=None)        the objective it was derived from, (b,) in nats; None where there is none
    subspaces()                       the bases U_k (k, d, p) that the tokens are projected on; None where there are none

`grid` = (rows, columns) of the tokens; only 2d positions need it. `Spatial` takes any operator to (b, c, h, w) maps.
`dmst.testing.check_operator` tests whether an operator keeps this contract.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from dmst import tracing
from dmst.errors import OptionError, ShapeError, flag, shown, unknown_name
from dmst.kernels import compute_dtype
from dmst.kernels.casting import autocast_is_on
from dmst.one_node import OneNode

Grid = tuple[int, int] | None


class Parts(NamedTuple):
    """The named intermediates of one operator; those it does not have are None."""

    projected: Tensor | None = None  # (b, k, n, p)  coordinates of each token in each subspace, ungated
    membership: Tensor | None = None  # (b, k, n)    how much token n belongs to subspace k; (b, k, g, n) to its groups
    gate: Tensor | None = None  # (b, k)             which subspaces are on
    attention: Tensor | None = None  # (b, k, n, n)  who looks at whom; (b, k, p, p) between channels in XCA
    means: Tensor | None = None  # (b, k, g, p)      means of the groups of each subspace
    spreads: Tensor | None = None  # (b, k, g, p)    their variances, channel by channel


class Operator(OneNode):
    """Base of every entry of OPERATORS."""

    wants_scalar_scale = False  # whether a LayerScale vector after it would void what it promises
    least_tokens = 0  # with fewer it raises a ShapeError

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("num_heads", num_heads)):
            if type(value) is not int or value < 1:
                raise OptionError(f"{name} is {shown(value)}: it must be a whole number of at least 1.")
        if dim % num_heads:
            fits = [k for k in range(1, dim + 1) if dim % k == 0]
            near = min(fits, key=lambda k: abs(k - num_heads))
            raise OptionError(f"dim {dim} is not divisible by num_heads {num_heads}; the nearest that divides it is {near}.")
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads

    @classmethod
    def keywords(cls) -> dict[str, Any]:
        """What it takes by keyword, with defaults; where it hands on what it does not know, also that of its base."""
        found: dict[str, Any] = {}
        for each in cls.__mro__:
            parameters = inspect.signature(each.__init__).parameters.values()  # type: ignore[misc]
            found |= {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in found}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
        return found

    def forward(self, z: Tensor, *, grid: Grid = None) -> Tensor:
        raise NotImplementedError

    def decompose(self, z: Tensor, *, grid: Grid = None) -> Parts:
        raise NotImplementedError

    def rate(self, z: Tensor, *, eps: float, grid: Grid = None) -> Tensor | None:
        """Descends no rate, unless a subclass says otherwise."""
        return None

    def subspaces(self) -> Tensor | None:
        """The bases U_k (k, d, p) that the tokens are projected on; None where there are none."""
        return None

    def reset_parameters(self) -> None:
        for child in self.children():
            if type(child) is nn.Linear:
                start(child)
            elif isinstance(child, nn.Linear):  # one with a start of its own
                child.reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.dim}, num_heads={self.num_heads}"

    def check(self, z: Tensor) -> None:
        """Refuse what is not (b, n, dim) in the layer's own dtype before anything is computed."""
        name = type(self).__name__
        if z.ndim != 3 or z.shape[-1] != self.dim:
            raise ShapeError(f"{name} takes tokens of shape (batch, tokens, {self.dim}), not {tuple(z.shape)}.")
        weight = self._a_weight()
        if weight is None:  # none that is a float: the maps were quantized
            return
        given, dtype = z.dtype, weight.dtype
        fits = given == dtype or (autocast_is_on(z) and torch.float64 not in (given, dtype))
        if not (fits and given.is_floating_point):
            raise ShapeError(f"{name} holds {dtype} weights and was given {given} tokens: convert one, or use torch.autocast.")

    def _a_weight(self) -> Tensor | None:
        """By name, not from `parameters()`: a replica of nn.DataParallel has none."""
        for child in self.children():
            if isinstance(child, nn.Linear):
                return child.weight
        return next((x for x in self.parameters() if x.is_floating_point()), None)


def start(layer: nn.Linear) -> None:
    """The lineage's start: weight truncated normal .02, bias 0."""
    nn.init.trunc_normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def linear(inputs: int, outputs: int, *, bias: bool = True, device: Any = None, dtype: Any = None) -> nn.Linear:
    """A linear map with that start. No other random number is drawn."""
    place = torch.get_default_device() if device is None else device
    made = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, device=place, dtype=dtype)
    start(made)
    return made


def scaled(weight: Tensor, bias: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """A linear map whose outputs are multiplied by `scale`, one number or one per output."""
    if tracing.is_plain_eager():
        return _Scaled.apply(weight, bias, scale, compute_dtype(weight))
    return weight * scale.unsqueeze(-1), None if bias is None else bias * scale


class _Scaled(torch.autograd.Function):
    """In the dtype that products read, at once: in eager calls every product and every cast is a kernel of its own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, scale: Tensor, dtype: torch.dtype) -> tuple:
        ctx.save_for_backward(weight, bias, scale)
        made = torch.mul(weight, scale.unsqueeze(-1), out=torch.empty_like(weight, dtype=dtype))
        return made, None if bias is None else torch.mul(bias, scale, out=torch.empty_like(bias, dtype=dtype))

    @staticmethod
    def backward(ctx: Any, dweight: Tensor, dbias: Tensor | None) -> tuple:
        (weight, bias, scale), asked, dscale = ctx.saved_tensors, ctx.needs_input_grad, None
        if asked[2]:
            dscale = (dweight * weight).sum_to_size(*scale.shape, 1).squeeze(-1)
            dscale = dscale if bias is None else dscale + (dbias * bias).sum_to_size(scale.shape)
        return dweight * scale.unsqueeze(-1) if asked[0] else None, dbias * scale if asked[1] else None, dscale, None


def lineage_options(owner: type[Operator], bias: bool, options: dict[str, Any]) -> bool:
    """Take the words that the blocks of XCiT and ToST pass; refuse every other leftover. Returns `bias`."""
    bias = options.pop("qkv_bias", bias)
    for word, rest, remedy in (("qk_scale", None, "scale the weights"), ("attn_drop", 0, "use proj_drop")):
        value = options.pop(word, rest)
        if value is not None and value != rest:
            raise OptionError(f"{word} is {shown(value)}: {owner.__name__} does not apply it; {remedy}, and leave {word} out.")
    for name in options:
        raise unknown_name(f"option of {owner.__name__}", name, owner.keywords())
    return flag("bias", bias)


class Spatial(nn.Module):
    """Any operator on feature maps: (b, c, h, w) to the same shape, tokens in row-major order."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ShapeError(f"Spatial takes maps of shape (batch, channels, height, width), not {tuple(x.shape)}.")
        h, w = x.shape[-2:]
        update = self.operator(rearrange(x, "b c h w -> b (h w) c"), grid=(h, w))
        return rearrange(update, "b (h w) c -> b c h w", h=h, w=w)
