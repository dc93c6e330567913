"""Who is looking: the few questions whose answer decides whether a shortcut may be taken.

    transformed()   torch.func transforms or forward-mode differentiation: tensors hide their batch and their tangents
    traced()        torch.compile, torch.export, torch.jit.trace: what is done once is done for every later input
    exported()      of these, the ones whose graph somebody else will read: plain operators only
    dispatched()    a dispatch mode (fake tensors, make_fx, a FLOP counter): tensors may have no values to read
    recorded(x)     a CUDA graph is recorded where x is: nothing has a value yet
    symbolic()      torch.fx: tensors may be proxies
    proxied(x)      x is one: it stands for a tensor, and has no size, dtype or device to ask for (one_node.py)
    hooked(x)       a module whose call somebody would miss: hooks, a forward of its own as an object, compiled by itself
    is_plain(x)     a linear map of which the weight is all: no adapter, no quantized or sharded weight, no hook
    everywhere()    a hook on every module there is
    surely(x)       x, a condition on sizes; while a graph is traced, whether it holds for all that the graph will serve
    is_plain_eager()        none of the first four, asked at once: plain eager execution, where each question costs the host

Plain eager execution answers no every time. Each asks PyTorch's private state, so they are asked in this one file.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def traced() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def exported() -> bool:
    return _exporting() or torch.jit.is_tracing()


def _exporting() -> bool:
    """Asked of torch itself: the compiler of older ones takes `is_exporting()` in what it compiles for true."""
    return torch.compiler.is_exporting()


def transformed() -> bool:
    return _within_transforms() or dual()


def dual() -> bool:
    """Forward-mode differentiation alone."""
    return _within_levels()


def _within_transforms() -> bool:
    return torch._C._are_functorch_transforms_active()


def _within_levels() -> bool:
    return forward_ad._current_level >= 0


# Asked when a function is traced: the compiler takes the answer as a constant, and guards the transforms by itself.
for _question in (_within_transforms, _within_levels, _exporting):
    _question._dynamo_marked_constant = True  # type: ignore[attr-defined]


def dispatched() -> bool:
    return not torch.compiler.is_compiling() and is_in_torch_dispatch_mode()


def is_plain_eager() -> bool:
    return not (
        torch.compiler.is_compiling() or _exporting() or torch._C._is_tracing() or is_in_torch_dispatch_mode() or transformed()
    )


def recorded(x: torch.Tensor) -> bool:
    return x.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def symbolic() -> bool:
    return _symbolic_trace._is_fx_tracing_flag


def proxied(x: object) -> bool:
    return isinstance(x, torch.fx.Proxy)


def hooked(module: torch.nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module) or module._compiled_call_impl is not None


def everywhere() -> bool:
    return _has_any_global_hook()


def is_plain(linear: torch.nn.Module, kind: type[torch.nn.Linear] = torch.nn.Linear) -> bool:
    """Whether a product with its weight is all that a call of it is."""
    return type(linear) is kind and not (hooked(linear) or everywhere()) and is_tensor(linear.weight)


def is_tensor(x: object) -> bool:
    """Whether x is a tensor of torch's own, or what stands for one while a graph is traced: no quantized or sharded one."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) or type(x).__name__ in ("FakeTensor", "FunctionalTensor")


def surely(condition: bool) -> bool:
    """No guard: a graph for every length stays one. torch.jit.trace serves all sizes; ONNX made of it only what was shown."""
    if not torch.compiler.is_compiling():
        return condition if not torch.jit.is_tracing() or torch.onnx.is_in_onnx_export() else False
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # sympy, which a compiler has imported

    return statically_known_true(condition)
