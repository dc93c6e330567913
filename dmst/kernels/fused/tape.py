"""A pass over the layer as a tape: what it did the last time, done again without asking anything.

    play(function, key, tensors, *rest)     function(tensors, *rest), where `key` says all that `rest` decides

A pass asks the same questions at each call, and for equal shapes it gets the same answers; they take the host longer than the
work takes the device. So the second call of a kind is recorded (the first may be the only one): every call of torch that makes
or changes a tensor, by a torch function mode, and every launch, by `launch.launch`. Straight Python is written from that, and
each later call of the kind runs it: the same calls of torch, and the compiled kernels with addresses. Results are the same to
the bit, and nothing lives longer than in the pass: a temporary is deleted after its last use, and what only the host reads is
left out. A view that only kernels read is an address and a distance, and so is a small buffer, in one allocation with others.

    one kind     function and key | stream: the default or another | gradients on or off | of each tensor its shape, dtype,
                 device, order in memory and whether its address is divisible by 16

No tape where somebody looks: Triton's hooks and debugging, another torch function mode, a function replaced in a module of
the pass (`watch`), a global variable of a kernel that was set anew. A number set anew in such a module makes all tapes void.
What cannot be recorded (a value that the host reads, a tensor from elsewhere) is noted, and its kind takes the plain way.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dmst.kernels.fused import launch
from dmst.kernels.fused.recorder import Recorder, Unknown
from dmst.kernels.fused.writer import STALE, Replay, Writer

MOST = 256  # kinds that are remembered
CHECKS = 8  # kinds at most that differ in their weights alone, to be asked one by one
PLAIN = frozenset({Tensor, Parameter, type(None)})

with torch.inference_mode(False), torch._C.DisableTorchFunction():
    # in place of None, each in its own place, since a check takes no tensor twice: no layer has such a tensor
    NOTHING = [torch.empty((0,) * 7, device="cpu", dtype=torch.bool) for _ in range(64)]

_tapes: OrderedDict[tuple, Replay | str | None] = OrderedDict()  # by kind; None: seen once; text: why it cannot be recorded
_quick: dict[tuple, list[tuple[Callable[..., bool], Replay]]] = {}  # by what is fast to ask: the rest is for the checks


def play(function: Callable[..., Any], key: tuple, tensors: Sequence[Tensor | None], *rest: Any) -> Any:
    if _replaced or launch.watched() or torch._C._len_torch_function_stack():
        return function(tensors, *rest)
    given = [nothing if x is None else x for x, nothing in zip(tensors, NOTHING)]  # noqa: B905 (there are more of the latter)
    first = given[0]
    device = first.get_device()
    stream = launch.stream(device) if device >= 0 else 0
    call = (function, key, first.shape, torch.is_grad_enabled(), stream != 0)
    addresses = [x.data_ptr() for x in given]
    replay: Replay | str | None = None
    if not reduce(or_, addresses) & 15:
        for check, quick in _quick.get(call, ()):
            if check(*given):
                replay = quick
                break
    if replay is None:
        if not PLAIN.issuperset(map(type, tensors)):
            return function(tensors, *rest)
        replay = _find(call, given, addresses)
        if replay is None:
            return _record(call, given, addresses, function, tensors, rest)
    if isinstance(replay, str):
        return function(tensors, *rest)
    result = replay(given, addresses, stream)
    if result is STALE:
        _forget()
        return function(tensors, *rest)
    return result


def _find(call: tuple, given: list[Tensor], addresses: list[int]) -> Replay | str | None:
    """What is known of this kind: its tape, None if it came once before, or why there is none."""
    kind = _kind(call, given, addresses)
    try:
        replay = _tapes[kind]
        _tapes.move_to_end(kind)
    except KeyError:  # the first time, or another thread has just made room
        _keep(kind, None)
        return "it may be the only call of its kind"
    if callable(replay) and not reduce(or_, addresses) & 15:
        check = _checker(given)
        if check is not None:
            checks = _quick.setdefault(call, [])
            if len(checks) >= CHECKS:
                checks.clear()
            checks.append((check, replay))
    return replay


def _kind(call: tuple, given: list[Tensor], addresses: list[int]) -> tuple:
    return call, *(
        (x.shape, x.dtype, x.get_device(), address & 15, None if x.is_contiguous() else x.stride())
        for x, address in zip(given, addresses, strict=True)
    )


def _checker(given: list[Tensor]) -> Callable[..., bool] | None:
    """Whether tensors are like these, asked by the compiler's own guard: type, dtype, device, shape and strides in one call."""
    try:
        shapes, strides = [list(x.shape) for x in given], [list(x.stride()) for x in given]
        from torch._C._dynamo.guards import TensorGuards

        check = TensorGuards(*given, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check  # type: ignore[arg-type]
        return check if check(*given) else None
    except Exception:  # another torch than those it was written for
        return None


def _keep(kind: tuple, tape: Replay | str | None) -> None:
    _tapes[kind] = tape
    while len(_tapes) > MOST:
        _quick.clear()
        try:
            _tapes.popitem(last=False)
        except KeyError:  # another thread was faster
            break


def _forget() -> None:
    _tapes.clear()
    _quick.clear()


def _record(
    call: tuple, given: list[Tensor], addresses: list[int], function: Callable[..., Any], tensors: Sequence[Tensor | None],
    rest: tuple,
) -> Any:  # fmt: skip
    kind = _kind(call, given, addresses)
    once: set[int] = set()
    apart = []  # the same tensor in two places is two inputs: the next time they may be two
    for x in tensors:
        apart.append(x.detach() if x is not None and id(x) in once else x)
        once.add(id(x))
    recorder = Recorder(apart)
    with recorder:
        result = function(tuple(apart), *rest)
    try:
        if recorder.problem:
            raise Unknown(recorder.problem)
        _keep(kind, Writer(recorder).write(recorder.written(result)))
    except Unknown as problem:
        _keep(kind, str(problem))
    return result


# --- modules whose functions are recorded --------------------------------------------------------------------------------

_usual: dict[str, dict[str, Any]] = {}  # module -> its names when it was watched first
_replaced: set[tuple[str, str]] = set()  # what is something else now: a tape would go around it


class _Module(ModuleType):
    """A module that tells when one of its names is set."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        _changed(self.__name__, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _changed(self.__name__, name, _usual)


def files() -> list[ModuleType]:
    """Those of this folder that are loaded, but for the two that launch."""
    here = __name__.rpartition(".")[0] + "."
    return [x for name, x in sys.modules.items() if name.startswith(here) and x not in (launch, sys.modules[__name__])]


def watch(*modules: ModuleType) -> None:
    for module in modules:
        if type(module) is ModuleType:
            _usual[module.__name__] = dict(vars(module))
            module.__class__ = _Module


def _changed(module: str, name: str, value: Any) -> None:
    _forget()
    usual = _usual[module].get(name, _usual)
    if value is usual or (isinstance(value, int | float | str) and isinstance(usual, int | float | str)):
        _replaced.discard((module, name))
    else:
        _replaced.add((module, name))
