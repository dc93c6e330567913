"""What PyTorch is doing with the current call, and with a module. Its private state is asked in this one file.

is_plain_eager()  none of the next four: a shortcut may be taken
traced()          torch.compile, torch.export, torch.jit.trace: what is done once is done for every later input
exported()        of these, the ones whose graph somebody else will read: plain operators only
compiled()        of these, torch.compile: what is made of the graph is its own affair
transformed()     torch.func transforms or forward-mode differentiation: tensors hide their batch and their tangents
dispatched()      a dispatch mode (fake tensors, make_fx, a FLOP counter): tensors may have no values to read
recorded(device)  a CUDA graph is recorded there: nothing has a value yet
surely(x)         x, a condition on sizes; while a graph is traced, whether it holds for all that the graph will serve
is_plain(module)  its own weights are all that a call of it is: no adapter, no hook, no quantized or sharded weight
"""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

TENSORS = (nn.Parameter, torch.Tensor)


def is_plain_eager() -> bool:
    """In one piece: a layer asks ten times, and calls cost the host time."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or is_in_torch_dispatch_mode():
        return False
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def traced() -> bool:
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def exported() -> bool:
    return _exporting() or torch.jit.is_tracing()


def compiled() -> bool:
    return torch.compiler.is_compiling() and not exported()


def _exporting() -> bool:
    """Asked of torch itself: the compiler of older ones takes `is_exporting()` in what it compiles for true."""
    return torch.compiler.is_exporting()


def transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def dual() -> bool:
    """Forward-mode differentiation alone."""
    return forward_ad._current_level >= 0


# Asked when a function is traced: the compiler takes the answer as a constant, and guards the transforms by itself.
for _question in (transformed, dual, _exporting):
    _question._dynamo_marked_constant = True  # type: ignore[attr-defined]


def dispatched() -> bool:
    return not torch.compiler.is_compiling() and is_in_torch_dispatch_mode()


def recorded(device: torch.device) -> bool:
    cuda = device.type == "cuda" and not torch.compiler.is_compiling()
    return cuda and torch.cuda.is_current_stream_capturing()


def surely(condition: bool) -> bool:
    """No guard: a graph for every length stays one. torch.jit.trace serves all sizes; ONNX made of it only what was shown."""
    if not torch.compiler.is_compiling():
        return condition if not torch.jit.is_tracing() or torch.onnx.is_in_onnx_export() else False
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # sympy, which a compiler has imported

    return statically_known_true(condition)


def is_plain(*modules: nn.Module) -> bool:
    return not _has_any_global_hook() and all(map(_is_plain, modules))


def _is_plain(module: nn.Module) -> bool:
    if not type(module).__module__.startswith(("torch.nn.modules.", "dmst.")):  # adapters, parametrized, somebody's subclass
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return False
    return all(x is None or is_tensor(x) for x in module._parameters.values())


def is_tensor(x: object) -> bool:
    """Whether x is a tensor of torch's own, or what stands for one while a graph is traced: no quantized or sharded one."""
    return type(x) in TENSORS or type(x).__name__ in ("FakeTensor", "FunctionalTensor")
