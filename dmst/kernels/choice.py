"""Which kernel computes a layer, decided here and nowhere else.

    use_kernels("auto")        the Triton kernels where the table below says so and they can run, else plain torch (the default)
    use_kernels("reference")   plain torch, to any derivative
    use_kernels("fused")       the Triton kernels, or an error that says why not

As a function it holds until the next call; in a `with` it holds inside. One choice for the whole process, all its threads.

    traced for export, torch.jit, forward-mode derivatives   reference     plain torch: others read the graph
    fused allowed (the table below)                          fused         also inside torch.compile, which looks into them
    otherwise traced by torch.compile                        reference     the compiler fuses it and chooses what to keep
    otherwise gate_rotary differs from rotary                reference     for experiments; checkpointed where it saves nothing
    otherwise a gradient is wanted                           closed_form   one autograd function, keeps 2 n d, or n d
    otherwise CPU, sparsemax gate, eager                     silent        heads with gate 0 left out where that is faster
    otherwise                                                reference

GMSA has its own three: `fused/mixture_layer` where its `serves` says so, else `mixture` and `mixture_closed_form`, chosen as
reference and closed_form are.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dmst import tracing
from dmst.errors import OptionError, choose
from dmst.kernels import closed_form, mixture, mixture_closed_form, plan, reference, silent
from dmst.kernels.form import Form, Weights

CHOICES = ("auto", "reference", "fused")
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 8)  # tested, both; a newer one may break the kernels, as 3.9 does
UNTESTED = "the newest that was tested"
OLDEST_DEVICE = (8, 0)  # bfloat16 and TF32 in the tensor cores

# What "auto" does on a CUDA device, by dtype. Timed on one H200 by CUDA-graph replay, in bfloat16 alone
# (results/h200/operators.json): the other two follow it unmeasured, and `dmst doctor` says so.
AUTO = {torch.bfloat16: True, torch.float16: True, torch.float32: True}
TIMED = {torch.bfloat16}

_chosen = "auto"


class use_kernels:
    """Choose the kernels: `use_kernels("fused")` from here on, `with use_kernels("fused"):` inside only."""

    def __init__(self, choice: str) -> None:
        self.choice = choose("kernels", choice, CHOICES)
        self.before, self.fresh = [_set(choice)], True

    def __enter__(self) -> None:
        if not self.fresh:  # the same object, entered again
            self.before.append(_set(self.choice))
        self.fresh = False

    def __exit__(self, *_: object) -> None:
        _set(self.before.pop())


def _set(choice: str) -> str:
    """Set the choice; the one before."""
    global _chosen
    before, _chosen = _chosen, choice
    return before


def chosen() -> str:
    return _chosen


class Verdict(NamedTuple):
    """Whether the fused kernels serve, and in a few words why."""

    fused: bool
    why: str


@functools.cache
def triton_problem() -> str:
    """What is wrong with Triton here; nothing where it is present and of a version that was tested."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'dmst[kernels]')"
    try:
        version = importlib.import_module("triton").__version__
        release = tuple(int(part) for part in version.split(".")[:2])
        if release < OLDEST_TRITON:
            return f"Triton {version} is older than {'.'.join(map(str, OLDEST_TRITON))}"
        if release > NEWEST_TRITON:
            return f"Triton {version} is newer than {'.'.join(map(str, NEWEST_TRITON))}, {UNTESTED}"
        importlib.import_module("dmst.kernels.fused.layer")
    except Exception as error:  # a broken build fails in many ways; each means the same here
        return f"Triton cannot be used ({type(error).__name__}: {error})"
    return ""


@functools.cache
def _warn_once(problem: str) -> None:
    warnings.warn(
        f"{problem}: plain torch is used, which is slower. For a Triton that was tested: pip install --upgrade 'dmst[kernels]'",
        stacklevel=4,
    )


@functools.cache
def interpreted() -> bool:
    """Triton's interpreter runs the kernels on the CPU, slowly: for tests. Triton reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def machine_problem(device: str, index: int, fused: bool) -> str:
    """Why this machine cannot run the fused kernels on this kind of device; nothing where it can."""
    if device != "cuda" and not (device == "cpu" and fused and interpreted()):
        return f"fused kernels need a CUDA device, and this is {device}"
    problem = triton_problem()
    if problem.endswith(UNTESTED) and not fused:
        _warn_once(problem)
    if problem or device != "cuda":
        return problem
    return _card_problem(index, torch.cuda.is_available, torch.cuda.get_device_capability)


@functools.cache
def _card_problem(index: int, is_available: Callable[[], bool], capability: Callable[[int], tuple[int, int]]) -> str:
    """Asked of torch once: its answers take as long as a kernel."""
    if torch.version.hip:
        return "the fused kernels are measured on NVIDIA devices only"
    if not is_available():
        return "this torch sees no CUDA device"
    if capability(index) < OLDEST_DEVICE:
        return f"fused kernels need compute capability {OLDEST_DEVICE[0]}.{OLDEST_DEVICE[1]} or newer"
    return ""


# A traced graph is for one machine: this is asked when it is traced and is no part of it. The attribute is all that
# torch.compiler.assume_constant_result sets; the function itself would import the whole compiler with this file.
machine_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


def verdict(device: torch.device, dtype: torch.dtype, form: Form, dim: int, choice: str | None = None) -> Verdict:
    """Would a layer of this form and width, on this device, with tokens and products in these dtypes, be fused?"""
    choice = choice or _chosen
    if choice == "reference":
        return Verdict(False, 'use_kernels("reference")')
    if dtype not in AUTO:
        return Verdict(False, f"fused kernels compute in at most float32, and this is {str(dtype).removeprefix('torch.')}")
    if form.num_heads > plan.MOST_HEADS or dim // form.num_heads > plan.WIDEST:
        return Verdict(False, f"fused kernels take up to {plan.MOST_HEADS} heads of up to {plan.WIDEST} channels")
    if (form.membership == "sigmoid" and form.token_sparse_rescale) or (form.membership == "energy" and form.uniform_moment):
        return Verdict(False, "fused kernels do not compute this form")  # no operator has it
    if form.split:
        return Verdict(False, "fused kernels read the same scores for membership and gate")
    problem = machine_problem(device.type, device.index or 0, choice == "fused")
    if problem:
        return Verdict(False, problem)
    if choice == "auto" and not AUTO[dtype]:
        return Verdict(False, f"measured slower in {str(dtype).removeprefix('torch.')}")
    if choice == "auto":
        return Verdict(True, "measured fastest in CUDA graphs" if dtype in TIMED else "as bfloat16; not timed in this dtype")
    return Verdict(True, 'use_kernels("fused")')


def _fused_attend(*args: Any, **kwargs: Any) -> Tensor:
    from dmst.kernels.fused.layer import attend  # Triton is imported only where it is used

    return attend(*args, **kwargs)


def _checkpointed(
    z: Tensor, weights: Weights, form: Form, *, grid: tuple[int, int] | None = None, dtype: torch.dtype
) -> Tensor:
    """The reference, of which autograd keeps z and the weights alone."""

    def run(z: Tensor, *tensors: Tensor) -> Tensor:
        return reference.attend(z, Weights(*tensors), form, grid=grid, dtype=dtype)

    return checkpoint(run, z, *weights, use_reentrant=False, preserve_rng_state=False)


def serves(z: Tensor, form: Form, dtype: torch.dtype) -> bool:
    """Whether the fused kernels compute this layer, now."""
    if tracing.exported() or tracing.transformed():
        return False
    return verdict(z.device, z.dtype if z.dtype == torch.float64 else dtype, form, z.shape[-1]).fused


def kernel_for(z: Tensor, weights: Weights, form: Form, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The `attend` that computes this layer, now."""
    alone = tracing.is_plain_eager()  # one question in place of many, where a call waits for the host
    if not alone and (tracing.exported() or tracing.dual()):
        return reference.attend
    if alone or not tracing.transformed():
        wide = z.dtype if z.dtype == torch.float64 else dtype
        answer = verdict(z.device, wide, form, z.shape[-1])
        if answer.fused:
            return _fused_attend
        if _chosen == "fused":
            raise OptionError(f'use_kernels("fused"): {answer.why}. Use use_kernels("auto") to fall back by itself.')
    if tracing.traced():
        return reference.attend
    if form.split:
        return _checkpointed if form.save == "nothing" and not tracing.transformed() else reference.attend
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (z, *weights)):
        return closed_form.attend
    readable = not (tracing.transformed() or tracing.dispatched())  # by the host: which heads are on
    if z.device.type == "cpu" and form.gate == "sparsemax" and readable:
        return silent.attend
    return reference.attend


def mixture_kernel_for(
    z: Tensor, weights: mixture.MixtureWeights, form: mixture.MixtureForm, dtype: torch.dtype
) -> Callable[..., Tensor]:
    """The `attend` that computes GMSA, now."""
    if tracing.exported() or tracing.dual():
        return mixture.attend
    if not tracing.transformed():
        problem = mixture_problem(z, form, dtype)
        if not problem:
            return _fused_mixture
        if _chosen == "fused":
            raise OptionError(f'use_kernels("fused"): {problem}. Use use_kernels("auto") to fall back by itself.')
    if tracing.traced():
        return mixture.attend
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (z, *weights))
    return mixture_closed_form.attend if wanted else mixture.attend


def mixture_problem(z: Tensor, form: mixture.MixtureForm, dtype: torch.dtype) -> str:
    """Why the fused kernel of GMSA does not serve; nothing where it does."""
    if _chosen == "reference":
        return 'use_kernels("reference")'
    if z.dtype == torch.float64 or dtype not in AUTO:
        return "fused kernels compute in at most float32"
    problem = machine_problem(z.device.type, z.device.index or 0, _chosen == "fused")
    if problem:
        return problem
    from dmst.kernels.fused.mixture_layer import serves

    return serves(z.shape[-1], form)


def _fused_mixture(*args: Any, **kwargs: Any) -> Tensor:
    from dmst.kernels.fused.mixture_layer import attend

    return attend(*args, **kwargs)
