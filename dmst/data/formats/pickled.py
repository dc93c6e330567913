"""A pickled dict of text, numbers, lists and uint8 arrays, read without running it.

    read(raw, name) -> {"labels": [6, 9, ...], "data": uint8 (n, 3072), ...}

A pickle is a program for a stack machine, and unpickling runs it: it may import and call anything. Here `pickletools` takes the
program apart and a machine of our own walks through it, which knows the few steps that such a dict needs. The names that numpy
writes for its arrays stand for nothing but themselves; nothing is imported, nothing is called. Any other name is refused.

    _reconstruct (ndarray, (0,), b"b"), then its state (1, shape, dtype, fortran, bytes)      protocols 2 to 4
    _frombuffer (bytes, dtype, shape, order)                                                  protocol 5
    dtype ("u1", ...)      _codecs.encode (text, "latin1"): bytes as protocol 2 writes them on Python 3
"""

from __future__ import annotations

import pickletools
from typing import Any, NamedTuple

import numpy as np

from dmst.errors import BadFileError

KNOWN = {
    "numpy.core.multiarray._reconstruct": "array",
    "numpy._core.multiarray._reconstruct": "array",
    "numpy.core.numeric._frombuffer": "buffer",
    "numpy._core.numeric._frombuffer": "buffer",
    "numpy.ndarray": "ndarray",
    "numpy.dtype": "dtype",
    "_codecs.encode": "encode",
}
CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE"}
VALUES |= {"BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Name(NamedTuple):
    """What the pickle would have imported; here a word."""

    kind: str


class _Dtype(NamedTuple):
    """A dtype; only uint8 comes this far."""

    code: str


class _Array:
    """What the pickle would have built; here its shape, its order and its bytes."""

    def __init__(self, shape: Any = (), order: Any = "C", raw: bytes = b"") -> None:
        self.shape, self.order, self.raw = shape, order, raw

    def build(self) -> np.ndarray:
        if not all(type(side) is int and side >= 0 for side in self.shape) or self.order not in ("C", "F"):
            raise ValueError(f"an array of shape {self.shape!r} and order {self.order!r}")
        return np.frombuffer(self.raw, np.uint8).reshape(self.shape, order=self.order)


def read(raw: bytes, name: str) -> dict[str, Any]:
    """The dict in `raw`; `name` is how an error calls the file."""
    try:
        found = _run(raw, name)
        if type(found) is not dict:
            raise ValueError(f"it holds a {type(found).__name__} instead of a dict")
        return {_text(key): value.build() if type(value) is _Array else value for key, value in found.items()}
    except BadFileError:
        raise
    except Exception as error:  # a damaged program fails wherever it likes: an empty stack, a missing note, an odd length
        raise BadFileError(
            f"{name} is not a batch of the python version: {error or type(error).__name__}. Copy it again."
        ) from error


def _run(raw: bytes, name: str) -> Any:
    argument: Any
    stack: list[Any] = []
    marks: list[list[Any]] = []  # what was on the stack before a MARK
    notes: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(raw):
        word = opcode.name
        if word in VALUES:
            stack.append(argument)
        elif word in ("BINPUT", "LONG_BINPUT"):
            notes[argument] = stack[-1]
        elif word == "MEMOIZE":
            notes[len(notes)] = stack[-1]
        elif word in ("BINGET", "LONG_BINGET"):
            stack.append(notes[argument])
        elif word in CONSTANTS:
            stack.append(CONSTANTS[word])
        elif word == "EMPTY_LIST":
            stack.append([])
        elif word == "EMPTY_DICT":
            stack.append({})
        elif word == "MARK":
            marks.append(stack)
            stack = []
        elif word in ("APPENDS", "SETITEMS", "TUPLE"):
            items, stack = stack, marks.pop()
            if word == "TUPLE":
                stack.append(tuple(items))
            elif word == "APPENDS":
                _of(list, stack[-1]).extend(items)
            else:
                _of(dict, stack[-1]).update(zip(items[::2], items[1::2], strict=True))
        elif word == "APPEND":
            item = stack.pop()
            _of(list, stack[-1]).append(item)
        elif word == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _of(dict, stack[-1])[key] = value
        elif word in TUPLES:
            stack.append(tuple([stack.pop() for _ in range(TUPLES[word])][::-1]))
        elif word == "GLOBAL":
            stack.append(_known(argument.replace(" ", "."), name))
        elif word == "STACK_GLOBAL":
            last, module = stack.pop(), stack.pop()
            stack.append(_known(f"{module}.{last}", name))
        elif word == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            stack.append(_made(_of(_Name, called).kind, _of(tuple, arguments)))
        elif word == "BUILD":
            state = _of(tuple, stack.pop())
            if type(stack[-1]) is not _Dtype:  # the state of a dtype says how its bytes lie, and uint8 has one
                _fill(_of(_Array, stack[-1]), state)
        elif word == "STOP":
            return stack.pop()
        elif word not in ("PROTO", "FRAME"):
            raise ValueError(f"it uses {word}, which no batch needs")
    raise ValueError("it has no end")


def _known(called: str, name: str) -> _Name:
    if called not in KNOWN:
        raise BadFileError(
            f"{name} asks for {called!r} when it is unpickled, which could run anything: refused, nothing was run. "
            "A CIFAR batch needs numpy's arrays alone. Get the official files again."
        )
    return _Name(KNOWN[called])


def _made(kind: str, arguments: tuple[Any, ...]) -> Any:
    """What a call would have given."""
    if kind == "array" and _of(_Name, arguments[0]).kind == "ndarray":
        return _Array()
    if kind == "buffer":
        raw, dtype, shape, order = arguments
        _of(_Dtype, dtype)
        return _Array(_of(tuple, shape), _of(str, order), bytes(raw))
    if kind == "dtype":
        if arguments[0] not in ("u1", "|u1", "uint8"):
            raise ValueError(f"an array of {arguments[0]!r}; pixels are u1")
        return _Dtype("u1")
    if kind == "encode" and arguments[1:] in (("latin1",), ("latin-1",)):
        return _of(str, arguments[0]).encode("latin-1")
    raise ValueError(f"it calls {kind} in an unknown way")


def _fill(array: _Array, state: tuple[Any, ...]) -> None:
    _, shape, dtype, fortran, raw = state
    _of(_Dtype, dtype)
    array.shape, array.order = _of(tuple, shape), "F" if fortran is True else "C"
    array.raw = raw.encode("latin-1") if isinstance(raw, str) else bytes(raw)  # text is how pickletools gives Python 2's bytes


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__.strip('_').lower()} where a {kind.__name__.strip('_').lower()} belongs")
    return value


def _text(key: Any) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else _of(str, key)
