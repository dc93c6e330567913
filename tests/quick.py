"""Triton's interpreter without what it does over and over: the same numbers in half the time.

The interpreter replaces the language's functions for the length of a launch, by looking through all of its modules, and anew
at every call of a device function: here it looks once. And sums of integers are made a second time in 64 bits, for an
assertion that is not there unless `debug` is on: here they are not.
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
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def _replace_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """One of the functions tells whether they are replaced."""
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
