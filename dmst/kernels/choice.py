"""Which kernel computes a layer, decided here and nowhere else.

    use_kernels("auto")        the Triton kernels where they can run, else plain torch (the default)
    use_kernels("reference")   plain torch, to any derivative
    use_kernels("fused")       the Triton kernels, or an error that says why not

As a function it holds until the next call; in a `with` it holds inside. One choice for the whole process, all its threads.

    traced for export, torch.jit, forward-mode derivatives   reference     plain torch: others read the graph
    fused kernels serve (`verdict`)                          fused         also inside torch.compile, which looks into them
    otherwise                                                reference     checkpointed where save="nothing", in eager calls

The reference of GMSA is `mixture`. Autograd differentiates both.
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
from dmst.kernels import mixture, plan, reference
from dmst.kernels.form import Form, Weights
from dmst.kernels.mixture import MixtureForm, MixtureWeights

CHOICES = ("auto", "reference", "fused")
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 8)  # tested, both; a newer one may break the kernels, as 3.9 does
UNTESTED = "the newest that was tested"
FUSED_GATES = ("sparsemax", "gelu", None)
OLDEST_DEVICE = (8, 0)  # bfloat16 and TF32 in the tensor cores
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
AnyForm = Form | MixtureForm
AnyWeights = Weights | MixtureWeights
Kernel = Callable[..., Tensor]


def reference_of(form: AnyForm) -> Kernel:
    """The `attend` that takes this form step by step."""
    return mixture.attend if isinstance(form, MixtureForm) else reference.attend


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
        f"{problem}: plain torch is used, which is slower. Remedy: pip install --upgrade 'dmst[kernels]'", stacklevel=4
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


def verdict(device: torch.device, dtype: torch.dtype, form: AnyForm, dim: int, choice: str | None = None) -> Verdict:
    """Would a layer of this form and width, on this device, with tokens and products in these dtypes, be fused?"""
    choice = choice or _chosen
    if choice == "reference":
        return Verdict(False, 'use_kernels("reference")')
    if dtype not in DTYPES:
        return Verdict(False, f"fused kernels compute in at most float32, and this is {str(dtype).removeprefix('torch.')}")
    problem = unfit(form, dim) or machine_problem(device.type, device.index or 0, choice == "fused")
    if problem:
        return Verdict(False, problem)
    return Verdict(True, "the default on this GPU" if choice == "auto" else 'use_kernels("fused")')


def unfit(form: AnyForm, dim: int) -> str:
    """Why no kernel computes this form at this width; nothing where one does."""
    p = dim // form.num_heads
    if form.gate not in FUSED_GATES or form.max_active_heads:
        return "fused kernels have the gates sparsemax and gelu, without a cap on heads"
    if form.num_heads > plan.MOST_HEADS or p > plan.WIDEST:
        return f"fused kernels take up to {plan.MOST_HEADS} heads of up to {plan.WIDEST} channels"
    if isinstance(form, MixtureForm):
        means = max(16, plan.power_of_two(p)) * max(16, plan.power_of_two(form.groups))
        limits = [("groups times channels", means, plan.MOST_MEANS), ("key_dim", form.key_dim, plan.MOST_KEYS)]
        wrong = [
            f"up to {most} {name}, not {size}" for name, size, most in (*limits, ("rounds", form.rounds, 1)) if size > most
        ]
        wrong += ["keys that are not normalised"] if form.normalize_keys else []
        return f"the fused GMSA takes {', '.join(wrong)}" if wrong else ""
    if form.membership not in ("sigmoid", "energy") or form.token_sparse_rescale or form.uniform_moment or form.sign > 0:
        return "fused kernels compute DMSA, TSSA and GMSA, and this is a relative of theirs"
    return "fused kernels read the same scores for membership and gate" if form.split else ""


def _fused(*args: Any, **kwargs: Any) -> Tensor:
    from dmst.kernels.fused.layer import attend  # Triton is imported only where it is used

    return attend(*args, **kwargs)


def _checkpointed(
    z: Tensor, weights: AnyWeights, form: AnyForm, *, grid: tuple[int, int] | None = None, dtype: torch.dtype
) -> Tensor:
    """The reference, of which autograd keeps z and the weights alone."""

    def run(z: Tensor, *tensors: Tensor) -> Tensor:
        return reference_of(form)(z, type(weights)(*tensors), form, grid=grid, dtype=dtype)

    return checkpoint(run, z, *weights, use_reentrant=False, preserve_rng_state=False)


def kernel_for(z: Tensor, weights: AnyWeights, form: AnyForm, dtype: torch.dtype) -> Kernel:
    """The `attend` that computes this layer, now."""
    alone = tracing.is_plain_eager()  # one question in place of many, where a call waits for the host
    plain = reference_of(form)
    if not alone and (tracing.exported() or tracing.dual()):
        return plain
    if alone or not tracing.transformed():
        wide = z.dtype if z.dtype == torch.float64 else dtype
        answer = verdict(z.device, wide, form, z.shape[-1])
        if answer.fused:
            return _fused
        if _chosen == "fused":
            raise OptionError(f'use_kernels("fused"): {answer.why}. Use use_kernels("auto") to fall back by itself.')
    return _checkpointed if form.save == "nothing" and not (tracing.traced() or tracing.transformed()) else plain
