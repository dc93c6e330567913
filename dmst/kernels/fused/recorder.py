"""What a pass does, as it does it: the calls of torch that make or change a tensor, and the launches. For `tape`.

    Recorder(inputs)    a torch function mode; `steps` in order, with names in place of tensors; `problem` if one is not known

It holds no tensor, so that memory is given back as without it. Two tensors of one memory know how far they are apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dmst.kernels.fused import launch


class Var(NamedTuple):
    """A tensor of the pass: the storage that it looks at is that of `root`, from `offset` bytes on."""

    name: int
    root: int
    offset: int


class Described(NamedTuple):
    """A descriptor for the copy engine, but for its tensor."""

    base: Var
    kind: type
    state: dict[str, Any]


class Made(NamedTuple):
    """A tuple with names."""

    kind: type
    values: tuple


class Call(NamedTuple):
    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    result: Any  # Var, or a tuple or list of them
    pure: bool  # without effect where nobody reads the result
    room: tuple[int, torch.device] | None = None  # bytes of new memory and where, if it makes nothing else


class Launch(NamedTuple):
    kernel: Any
    cut: launch.Cut
    args: tuple
    found: tuple | None  # what the kernel remembers of this kind of launch


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


# What the kind decides, as far as it is asked of inputs: nothing to do again.
ASKED: set[Any] = {
    *_getters("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "requires_grad", "itemsize"),
    Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.data_ptr, Tensor.get_device, Tensor.is_contiguous,
    Tensor.element_size, Tensor.storage_offset, Tensor.is_floating_point, Tensor.__len__, torch.is_floating_point,
    torch.numel,
}  # fmt: skip
ALLOCATES: set[Any] = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty}
READS = {  # the size of their results depends on values
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave", "bincount", "where",
    "__getitem__",
}  # fmt: skip
CONSTANT = (int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))


class Unknown(Exception):
    """Something that cannot be done again from the inputs alone."""


class Recorder(TorchFunctionMode):
    """What a pass does, as it does it. It holds no tensor: memory is given back as without it."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.steps: list[Call | Launch] = []
        self.problem = ""
        self.count = 0
        self.known: dict[int, tuple[weakref.ref, Var]] = {}
        self.inputs = [None if x is None else self._new(x) for x in tensors]

    def __enter__(self) -> Recorder:
        launch.recording.by = self
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        launch.recording.by = None
        super().__exit__(*args)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.problem and func not in ASKED:
            try:
                self._note(func, args, kwargs, result)
            except Unknown as problem:
                self.problem = str(problem)
        return result

    def launch(self, kernel: Any, cut: launch.Cut, args: tuple) -> Any:
        with torch._C.DisableTorchFunction():  # what Triton asks of torch is no part of the pass
            result = launch.go(kernel, cut, args)
            if not self.problem:
                try:
                    self.steps.append(Launch(kernel, cut, self.written(args), launch.found(kernel, cut, args)))
                except Unknown as problem:
                    self.problem = str(problem)
        return result

    def _note(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        name = getattr(func, "__name__", "")
        given = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        writes = kwargs.get("out") is not None or name == "__setitem__" or (name.startswith("__i") and name.endswith("__"))
        writes = writes or (name.endswith("_") and not name.endswith("__"))
        made = list(leaves(result))
        if any(not isinstance(x, Tensor) for x in made) and not writes:
            if given:
                raise Unknown(f"the host reads {name}")
            return
        if name in READS and (name != "where" or len(args) < 3):
            index = args[1:] if name == "__getitem__" else given
            if any(isinstance(x, Tensor) for x in leaves(index)):
                raise Unknown(f"the values decide the size of {name}")
        if not writes and made and all(self._find(x) is not None for x in made):
            return  # nothing was to do
        template, options = self.written(args), self.written(kwargs)
        places = self._placed(result, given)
        view = any(place.root != place.name for place in leaves(places) if isinstance(place, Var))
        room = (result.untyped_storage().nbytes(), result.device) if func in ALLOCATES and not writes else None
        self.steps.append(Call(func, template, options, places, not writes and (view or room is not None), room))

    def _placed(self, result: Any, given: list[Tensor]) -> Any:
        if isinstance(result, tuple | list):
            return tuple(self._placed(x, given) for x in result)
        if not isinstance(result, Tensor):
            return None
        known = self._find(result)
        if known is not None:
            return known
        memory = result.untyped_storage()
        for x in given:
            place = self._find(x)
            if place is not None and memory.nbytes() and x.untyped_storage().data_ptr() == memory.data_ptr():
                return self._new(result, place, result.data_ptr() - x.data_ptr())
        return self._new(result)

    def _new(self, x: Tensor, of: Var | None = None, offset: int = 0) -> Var:
        name, self.count = self.count, self.count + 1
        var = Var(name, name, 0) if of is None else Var(name, of.root, of.offset + offset)
        self.known[id(x)] = weakref.ref(x), var
        return var

    def _find(self, x: Tensor) -> Var | None:
        found = self.known.get(id(x))
        return found[1] if found is not None and found[0]() is x else None  # else another had its address before

    def written(self, value: Any) -> Any:
        """A value with names in place of tensors."""
        if isinstance(value, Tensor):
            found = self._find(value)
            if found is None:
                raise Unknown("a tensor from elsewhere")
            return found
        if isinstance(value, torch.Size):
            return tuple(value)
        if type(value) in (tuple, list):
            return type(value)(map(self.written, value))
        if type(value) is dict:
            return {name: self.written(x) for name, x in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return Made(type(value), tuple(map(self.written, value)))
        if launch.TensorDescriptor is not None and type(value) is launch.TensorDescriptor:
            state = dict(vars(value))
            return Described(self.written(state.pop("base")), type(value), state)
        if isinstance(value, slice):
            return slice(*map(self.written, (value.start, value.stop, value.step)))
        if isinstance(value, CONSTANT):
            return value
        raise Unknown(f"a {type(value).__name__}")


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size | Var):
        for x in value:
            yield from leaves(x)
    elif value is not None:
        yield value
