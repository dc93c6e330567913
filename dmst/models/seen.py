"""Whether somebody could tell that a module was not called: by hooks, a forward of its own, a compiled call, another weight."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from dmst.models.linear import Linear


def is_hooked(module: nn.Module) -> bool:
    """Or has a forward of its own, as an object, or was compiled by itself."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module) or module._compiled_call_impl is not None


def anybody() -> bool:
    """A hook on every module there is."""
    return _has_any_global_hook()


def is_plain(linear: nn.Module) -> bool:
    """Whether a product with its weight is all that a call of it is: no adapter, no quantized or sharded weight, no hook."""
    if type(linear) is not Linear or is_hooked(linear):
        return False
    return type(linear.weight) in (Tensor, nn.Parameter) and not anybody()
