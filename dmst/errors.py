"""What can go wrong, as types: each message names the thing, the rule and the remedy.

DmstError
├── OptionError          a value that an option cannot take            (also a ValueError)
│   ├── UnknownNameError a name that is not in a table                 (also a ValueError)
│   └── ConfigError      a recipe that breaks a rule: file, key, why   (also a ValueError)
├── OperatorContractError  an operator that breaks the contract of dmst.operators (also an AssertionError)
├── ShapeError           a tensor whose shape or dtype does not fit    (also a ValueError)
├── BadFileError         a file that is damaged, foreign or unsafe     (also a ValueError)
│   └── MissingSplitError  a dataset without the split that is asked for
├── BadImageError        a picture that cannot be used                 (also a ValueError)
├── SaveError            a file that could not be written              (also an OSError)
│   └── FullDiskError    there is no room for it                       (also an OSError)
├── NonFiniteError       a loss, gradient or logit that is NaN or infinite
├── DeviceMemoryError    a step that does not fit on the device
├── Stopped              a signal ended a run, whose state is saved
├── FetchError           a file that could not be downloaded           (also an OSError)
└── MissingExtraError    an optional library is absent or broken       (also an ImportError)
"""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Iterable
from pathlib import PurePath
from types import ModuleType
from typing import Any

TEXT = 480  # bytes of the longest text that is a setting


class DmstError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 1  # of the command, where nobody catches it


class OptionError(DmstError, ValueError):
    """An option has a value outside its rule."""


class UnknownNameError(OptionError):
    """A name is not in the table it was looked up in."""


class ConfigError(OptionError):
    """A recipe is not what it must be: which file, which line or key of it, and why."""

    def __init__(self, file: str, where: str, reason: str) -> None:
        super().__init__(file, where, reason)
        self.file, self.where, self.reason = file, where, reason

    def __str__(self) -> str:
        where = "" if self.where in self.file + self.reason else f", {self.where}"
        return f"{self.file}{where}: {self.reason}" if self.file else self.reason


class OperatorContractError(DmstError, AssertionError):
    """An operator does not do what dmst/operators/base.py says of every one: what it does, and what the contract says."""


class ShapeError(DmstError, ValueError):
    """A tensor does not have the shape or dtype that the function states."""


class BadFileError(DmstError, ValueError):
    """A file is not what it should be; nothing was loaded from it."""


class MissingSplitError(BadFileError):
    """A dataset is there, and this split of it is not."""


class BadImageError(DmstError, ValueError):
    """A picture cannot be used: which one, and why. Both survive the way out of a worker process."""

    def __init__(self, name: str, reason: str = "") -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


class NonFiniteError(DmstError):
    """A number that training or evaluation came to is NaN or infinite; no weight was changed by it."""


def bad_answer(network: str, what: str) -> NonFiniteError:
    """The error for logits of `what` that are not finite."""
    return NonFiniteError(
        f"{network} answers {what} with NaN or infinity: its weights are of no use. Name other weights, or train it again with "
        "a smaller optim.lr."
    )


class DeviceMemoryError(DmstError):
    """The memory of the device does not suffice for a step; no weight was changed."""


class Stopped(DmstError):
    """A signal asked a run to end; it finished its step and saved."""

    def __init__(self, message: str, signal: int = 15) -> None:  # 15: as pickle makes it, which knows the message alone
        super().__init__(message)
        self.exit_code = 128 + signal  # as shells say it


class SaveError(DmstError, OSError):
    """Something could not be written; what was there before is untouched."""


class FullDiskError(SaveError):
    """The disk, or the user's share of it, has no room for what is to be written."""

    exit_code = 75  # try again later


class FetchError(DmstError, OSError):
    """A file could not be downloaded; what has come of it is kept."""


class MissingExtraError(DmstError, ImportError):
    """An optional library is not installed, or does not import."""


def unknown_name(what: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error for `name`, with the nearest known name and the whole list."""
    names = {n.lower(): n for n in sorted(known)}
    asked = (name[:TEXT] if isinstance(name, str) else shown(name)).lower()
    near = difflib.get_close_matches(asked, names, n=1, cutoff=0.3)
    hint = f" Did you mean {names[near[0]]!r}?" if near else ""
    return UnknownNameError(f"unknown {what} {shown(name, TEXT)}.{hint} Known: {', '.join(names.values()) or 'none'}.")


def choose(what: str, name: Any, known: Iterable[Any]) -> Any:
    """`name` if it is one of `known` (None included where listed), else the error above."""
    known = tuple(known)
    if any(name is k or (type(name) is type(k) and name == k) for k in known):
        return name
    raise unknown_name(what, name, (str(k) for k in known))


def number(what: str, value: Any, low: float, high: float) -> float:
    """`value` as a float, if it is a plain number from `low` to `high`."""
    if type(value) not in (int, float) or not low <= value <= high or not abs(value) <= sys.float_info.max:
        raise OptionError(f"{what} is {shown(value)}: it must be a finite number from {low:g} to {high:g}.")
    return float(value)


def flag(what: str, value: Any) -> bool:
    """`value`, if it is True or False."""
    if type(value) is not bool:
        raise OptionError(f"{what} is {shown(value)}: it must be True or False.")
    return value


def shown(value: object, most: int = 80) -> str:
    """`value` for a message: never a screenful."""
    try:
        text = repr(value[:TEXT] if isinstance(value, str) else value)
    except ValueError:  # of a whole number with more digits than Python writes
        text = f"a value that is too long to write, of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 20]}..."


def in_one_line(error: BaseException) -> str:
    """What went wrong in somebody else's code, and where: "ZeroDivisionError: division by zero (my_op.py, line 3)"."""
    line = (str(error).strip().splitlines() or ["no message"])[0]
    if isinstance(error, DmstError):
        return line.rstrip(".")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    known = isinstance(error, SyntaxError) or not frames  # a SyntaxError says it itself
    where = "" if known else f" ({PurePath(frames[-1].filename).name}, line {frames[-1].lineno})"
    return f"{type(error).__name__}: {line}{where}"


def need(module: str, extra: str) -> ModuleType:
    """Import an optional library, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a torchvision built for another torch raises RuntimeError
        remedy = f"Install it with: pip install 'dmst[{extra}]'"
        if "torchvision::" in str(error):
            remedy = "Install torch and torchvision from the same index, CPU or CUDA: https://pytorch.org/get-started/locally/"
        told = f"{module} could not be imported ({type(error).__name__}: {error}). {remedy}"
        raise MissingExtraError(told) from error
