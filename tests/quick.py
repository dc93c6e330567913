"""Triton's interpreter without what it does over and over: the same numbers, bit for bit, in a third of the time.

The interpreter is Python around numpy, and most of its time goes into the types of what it holds. What follows from a type
alone is kept here, and what nobody reads is left out: sums of integers are made a second time in 64 bits, for an assertion that
is not there unless `debug` is on. tests/test_quick.py compares with the interpreter as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

READ = ("3.7", "3.8")  # the versions of Triton whose interpreter was read; any other one is left as it is, and takes its time


def quicken(patch: pytest.MonkeyPatch) -> None:
    try:
        import triton
        from triton.runtime import interpreter
    except ImportError:
        return
    known = ".".join(triton.__version__.split(".")[:2]) in READ
    if not known or interpreter._patch_lang.__module__ == __name__:  # it is quick
        return
    _replace_once(interpreter, patch)
    _keep_types(interpreter, patch)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def _replace_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """The language's functions are replaced for the length of a launch, by looking through all of its modules, and anew at
    every call of a device function: look once, and at one of them to see that they are replaced."""
    language, known = interpreter.tl, {}
    original, search = interpreter.InterpretedFunction.__call__, interpreter._patch_lang

    def seen(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is language or value is language.core]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = seen(self.fn)
        if not modules or any(language.core.is_builtin(value.load) for value in modules):
            return original(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def replaced(function: Any) -> Any:
        kind = tuple(map(id, seen(function)))
        if not all(language.core.is_builtin(value.load) for value in (language, language.core)):
            return search(function)
        if kind not in known:
            scope = search(function)
            known[kind] = [(place, name, vars(place)[name]) for place, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for change in known[kind]:
            scope.set_attr(*change)
        return scope

    patch.setattr(interpreter.InterpretedFunction, "__call__", call)
    patch.setattr(interpreter, "_patch_lang", replaced)


def _keep_types(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    core = interpreter.tl.core
    unwrap, np_dtype, block, equal = (
        core._unwrap_if_constexpr, interpreter._get_np_dtype, core.block_type.__init__, core.dtype.__eq__,
    )  # fmt: skip
    broadcast = interpreter.interpreter_semantic.broadcast_impl_value
    dtypes: dict[str, Any] = {}
    shapes: dict[tuple, tuple] = {}
    blocks: dict[tuple, dict[str, Any]] = {}
    scalar = core.constexpr(1), core.tuple([])

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind is int or kind is core.dtype else unwrap(value)

    def in_numpy(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = np_dtype(dtype)
        return dtypes[dtype.name]

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if type(shape) is core.tuple else shape
        kind = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        if kind not in blocks:
            block(self, element_ty, shape)
            if not all(type(size) is int for size in sizes):
                return
            own = core.constexpr(self.numel), core.tuple([core.constexpr(size) for size in self.shape])
            blocks[kind] = {**vars(self), "_own": shapes.setdefault(tuple(sizes), own)}
        vars(self).update(blocks[kind], element_ty=element_ty)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.numel, self.shape = scalar
        elif "_own" in vars(type):
            self.numel, self.shape = type._own
        else:
            self.numel, self.shape = core.constexpr(type.numel), core.tuple([core.constexpr(size) for size in type.shape])

    def fit(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = (vars(x.type).get("_own") for x in (lhs, rhs))
        return (lhs, rhs) if left is not None and left is right else broadcast(lhs, rhs)

    patch.setattr(interpreter.interpreter_semantic, "broadcast_impl_value", fit, raising=False)
    patch.setattr(core, "_unwrap_if_constexpr", unwrapped)
    patch.setattr(interpreter, "_get_np_dtype", in_numpy)
    patch.setattr(core.block_type, "__init__", make_block)
    patch.setattr(core.tensor, "__init__", make_tensor)
    patch.setattr(core.dtype, "__eq__", lambda self, other: self is other or equal(self, other))
