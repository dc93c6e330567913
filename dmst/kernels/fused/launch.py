"""Launching a kernel again without asking Triton again which one it is.

    @launched
    @triton.jit
    def kernel(...)                         kernel[grid](tensors and numbers, CONSTANT=..., num_warps=...) as before
    cut = planned(grid, CONSTANT=..., num_warps=...)
    launch(kernel, cut, tensors and numbers)    the same with what belongs to a shape made once, where the shape is planned

Triton looks for the compiled kernel at each launch, which takes the host several times as long as a short kernel takes the
device. Here the first call of a kind goes Triton's way and what it found is remembered; the next of that kind launches it. Of
one kind are calls of one kernel that agree in all that Triton compiles for:

    device       the current one, where every tensor must be
    constants    names and values of all keywords, the launch options among them: one object for equal ones
    tensor       dtype, and whether its address is divisible by 16
    descriptor   dtype, box and layout: the rest is not compiled for
    integer      1 itself, or divisible by 16 or not; one that needs more than 32 bits is a kind of its own
    other        float, bool and None by that alone: Triton does not look at their values

Everything else takes Triton's way each time: other arguments, launch hooks, debugging and instrumentation, a global variable of
the kernel that was set anew. And so does every launch under the interpreter or a Triton whose launcher was not read (`READ`).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

try:
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:  # a Triton without Gluon
    GluonJITFunction = TensorDescriptor = None

READ = ("3.6", "3.7", "3.8")  # they take addresses in place of tensors, and want every argument, constants too, in its place
MOST = 1024  # kinds of one kernel that are remembered


class Constants(dict[str, Any]):
    """Names and values, hashed as the object they are: `_one` makes one object of equal ones."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@lru_cache(MOST)
def _one(names: tuple[str, ...], values: tuple) -> Constants:
    return Constants(zip(names, values, strict=True))


class Cut(NamedTuple):
    """How a kernel is launched for a shape."""

    grid: tuple[int, ...]
    constants: Constants


def planned(grid: tuple[int, ...], **constants: Any) -> Cut:
    return Cut(grid, _one(tuple(constants), tuple(constants.values())))


class _Recording(threading.local):
    """Who writes down the launches of this thread (`tape`)."""

    by: Any = None


recording = _Recording()


def launch(kernel: Any, cut: Cut, *args: Any) -> Any:
    return go(kernel, cut, args) if recording.by is None else recording.by.launch(kernel, cut, args)


def go(kernel: Any, cut: Cut, args: tuple) -> Any:
    if isinstance(kernel, _Short):
        return kernel._launch(*cut, args)
    return kernel[cut.grid](*args, **cut.constants)


def found(kernel: Any, cut: Cut, args: tuple) -> tuple | None:
    """What the kernel remembers of launches of this kind; None where each of them goes Triton's way."""
    if not isinstance(kernel, _Short) or type(cut.grid) is not tuple or kernel._is_watched():
        return None
    kind = kernel._kind(driver.active.get_current_device(), cut.constants, args)
    return None if kind is None else kernel.remembered.get(kind[0])


def stream(device: int) -> int:
    return driver.active.get_current_stream(device)


class Given(NamedTuple):
    """In place of an argument of a launcher: which one."""

    place: int


def straight(run: Any, count: int) -> tuple[Callable[..., Any], tuple] | None:
    """What a launcher calls in the end, and with what: `Given` where it passes on one of its own 9 + count arguments.

    A launcher asks each time whether its kernel wants scratch memory. Where it does not, what it does is found by watching a
    copy of it at work, twice; None where that is not simply passing its arguments on.
    """
    if type(run).__name__ != "CudaLauncher" or run.global_scratch_size or run.profile_scratch_size:
        return None
    seen: list[tuple] = []
    twin = copy.copy(run)
    twin.launch = lambda *args: seen.append(args)
    ours = [None if 6 <= place < 9 else Given(place) for place in range(9 + count)]  # what hooks read is nothing
    try:
        for _ in range(2):
            twin(*ours)
        first, second = seen
    except Exception:
        return None
    every = [x for arg in first for x in (arg if type(arg) is tuple else (arg,))]
    again = [x for arg in second for x in (arg if type(arg) is tuple else (arg,))]
    same = len(every) == len(again) and all(x is y for x, y in zip(every, again, strict=True))
    once = sorted(x.place for x in every if type(x) is Given) == [x.place for x in ours if x is not None]
    return (run.launch, first) if same and once else None


def launched(kernel: Any) -> Any:
    """The kernel, launched the short way where that is known to be right."""
    known = ".".join(triton.__version__.split(".")[:2]) in READ
    short = SHORT.get(type(kernel)) if known else None
    if short is not None:
        kernel.__class__, kernel.remembered = short, {}
    return kernel


def watched() -> bool:
    """Somebody wants to see each launch, or other kernels than the usual."""
    runtime = knobs.runtime
    return bool(
        getattr(runtime.launch_enter_hook, "calls", True)  # anything but an empty chain
        or getattr(runtime.launch_exit_hook, "calls", True)
        or runtime.debug
        or knobs.compilation.instrumentation_mode
        or runtime.add_stages_inspection_hook is not None
    )


class _Short:
    """Triton's own kernel, which remembers by kind: launcher, function, metadata, constants in order, global variables."""

    remembered: dict[tuple, tuple]
    run: Any
    debug: Any
    pre_run_hooks: Any
    params: Any
    used_global_vals: Any

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **constants: self._launch(grid, planned((), **constants).constants, args)

    def _launch(self, grid: Any, constants: Constants, args: tuple) -> Any:
        if type(grid) is not tuple or self._is_watched():
            return self.run(*args, grid=grid, warmup=False, **constants)
        active = driver.active
        device = active.get_current_device()
        kind = self._kind(device, constants, args)
        if kind is None:
            return self.run(*args, grid=grid, warmup=False, **constants)
        key, values = kind
        found = self.remembered.get(key)
        if found is None:
            return self._remember(key, self.run(*args, grid=grid, warmup=False, **constants), args, constants)
        kernel, run, function, metadata, rest, read, _ = found
        for names, name, value in read:
            if names.get(name) is not value:
                return self.run(*args, grid=grid, warmup=False, **constants)
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, active.get_current_stream(device), function, metadata, None, None, None, *values, *rest)
        return kernel

    def _kind(self, device: int, constants: Constants, args: tuple) -> tuple[tuple, list] | None:
        """And the arguments with addresses in place of tensors; None where Triton must look itself."""
        kind: list[Any] = [device, constants]
        values = list(args)
        for place, arg in enumerate(args):
            given = type(arg)
            if given is Tensor or given is Parameter:
                values[place] = address = arg.data_ptr()
                kind.append((arg.dtype,) if address & 15 else arg.dtype)
                if arg.get_device() != device:
                    return None
            elif given is int:
                kind.append(arg if arg == 1 or not -(2**31) <= arg < 2**31 else 0 if arg & 15 else 16)
            elif arg is None or given is float or given is bool:
                kind.append(given)
            elif given is TensorDescriptor and arg.base.get_device() == device:
                kind.append((arg.base.dtype, *arg.block_shape, arg.padding, id(arg.layout)))
            else:
                return None
        return tuple(kind), values

    def _is_watched(self) -> bool:
        return bool(self.debug or self.pre_run_hooks or watched())

    def _remember(self, key: tuple, kernel: Any, args: tuple, constants: Constants) -> Any:
        """Only where the arguments by position are those that are no constants, and the keywords or defaults all the others."""
        positions = len(args)
        after = self.params[positions:]
        in_order = [parameter.is_constexpr for parameter in self.params] == [False] * positions + [True] * len(after)
        if in_order and type(kernel) is CompiledKernel:
            if len(self.remembered) >= MOST:
                self.remembered.clear()
            rest = tuple(constants.get(parameter.name, parameter.default) for parameter in after)
            read = [(names, name, names.get(name)) for (name, _), (_, names) in self.used_global_vals.items()]
            layouts = [arg.layout for arg in args if type(arg) is TensorDescriptor]  # the key has their addresses
            self.remembered[key] = (kernel, kernel.run, kernel.function, kernel.packed_metadata, rest, read, layouts)
        return kernel


class Launched(_Short, JITFunction):
    """A kernel in Triton."""


SHORT: dict[type, type] = {JITFunction: Launched}
if GluonJITFunction is not None:

    class LaunchedGluon(_Short, GluonJITFunction):
        """A kernel in Gluon."""

    SHORT[GluonJITFunction] = LaunchedGluon
