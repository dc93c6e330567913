"""Settings: frozen dataclasses whose fields state their rules, checked in one place.

    @dataclass(frozen=True, kw_only=True)
    class Optim(Settings):
        lr: float = setting(REQUIRED, "peak learning rate", above=0)
        opt: str = setting("adamw", "which optimizer", choices=("adamw", "muon"))
        options: dict[str, Any] = setting({}, "a table of plain values")

A value of the wrong type (True is not a number), out of its range or not finite raises OptionError and names the field; whole
numbers are taken where a float is asked for. Text has at most TEXT bytes, so that it fits on a line of a recipe, and no control
characters but tabs and new lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from dmst.errors import TEXT, OptionError, choose, shown

KINDS: dict[str, type[Any]] = {"int": int, "float": float, "bool": bool, "str": str, "dict[str, Any]": dict}
WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "dict[str, Any]": "a table"}
REQUIRED: Any = MISSING


def setting(
    default: Any,
    help: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    choices: Sequence[Any] | None = None,
) -> Any:
    """A field with its rule: `low` and `high` are allowed themselves, `above` and `below` are not; so infinity never is."""
    rule = {"help": help, "low": low, "high": high, "above": above, "below": below, "choices": choices}
    if isinstance(default, dict):
        return field(default_factory=default.copy, hash=False, metadata=rule)
    return field(default=default, metadata=rule)


@dataclass(frozen=True)
class Settings:
    def __post_init__(self) -> None:
        for each in fields(self):
            if "help" in each.metadata:
                object.__setattr__(self, each.name, self.checked(each.name, getattr(self, each.name)))

    @classmethod
    def rules(cls) -> dict[str, Field[Any]]:
        """The fields by name."""
        return {each.name: each for each in fields(cls) if "help" in each.metadata}

    @classmethod
    def checked(cls, name: str, value: Any, what: str = "") -> Any:
        """`value` as the field keeps it, if it follows the field's rule; `what` is how a message calls it."""
        each = cls.rules()[name]
        return _checked(what or name, value, str(each.type), each.metadata)


def rule_in_words(each: Field[Any]) -> str:
    """What a field takes: "adamw | muon", "a number from 0 to 1"."""
    rule = each.metadata
    if rule["choices"] is not None:
        return " | ".join(str(choice) or '""' for choice in rule["choices"])
    return WORDS[str(each.type)] + _range(rule)


def _checked(name: str, value: Any, kind: str, rule: Mapping[str, Any]) -> Any:
    if kind == "float" and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not KINDS[kind]:
        raise OptionError(f"{name} is {shown(value)}: it must be {WORDS[kind]}.")
    if kind == "str" and not _plain(value):
        raise OptionError(f"{name} is {shown(value)}: it must be text of at most {TEXT} bytes, without control characters.")
    if kind == "dict[str, Any]":
        return {key: _entry(f"{name}.{key}", entry) for key, entry in value.items()}
    if rule["choices"] is not None:
        return choose(name, value, rule["choices"])
    if kind in ("int", "float") and not (rule["low"] <= value <= rule["high"] and rule["above"] < value < rule["below"]):
        raise OptionError(f"{name} is {shown(value)}: it must be {WORDS[kind]}{_range(rule) or ' and finite'}.")
    return value


def _entry(name: str, value: Any) -> bool | int | float | str:
    """One value of a table."""
    if type(value) is bool or (type(value) is str and _plain(value)) or (type(value) in (int, float) and abs(value) < 2**63):
        return value
    raise OptionError(f"{name} is {shown(value)}: it must be a finite number, true, false or short text.")


def _plain(text: str) -> bool:
    try:
        size = len(text.encode())  # half a character, as bytes of another encoding become on a command line, has no UTF-8
    except UnicodeEncodeError:
        return False
    return size <= TEXT and not any((c < " " and c not in "\n\t") or c == "\x7f" for c in text)


def _range(rule: Mapping[str, Any]) -> str:
    words = {"low": "of at least", "above": "above", "high": "of at most", "below": "below"}
    said = [f"{word} {_number(rule[key])}" for key, word in words.items() if abs(rule[key]) < math.inf]
    if min(rule["low"], -rule["high"]) > -math.inf:
        said = [f"from {_number(rule['low'])} to {_number(rule['high'])}"]
    return " " + " and ".join(said) if said else ""


def _number(x: float) -> str:
    return f"{x:,}" if type(x) is int else f"{x:g}"
