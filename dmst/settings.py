"""Settings: frozen dataclasses whose fields state their rules. Sections of a recipe and the config of a model are such.

    @dataclass(frozen=True, kw_only=True)
    class Optim(Settings):
        lr: float = setting(REQUIRED, "peak learning rate", above=0)
        opt: str = setting("adamw", "which optimizer", choices=("adamw", "muon"))
        options: dict[str, Any] = setting({}, "a table of plain values")

A value of the wrong type (True is not a number), out of its range or not finite raises OptionError and names the field; whole
numbers are taken where a float is asked for. Text has at most TEXT bytes and no control characters but tabs and new lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from numbers import Integral
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
    choices: Iterable[str] | None = None,
) -> Any:
    """A field with its rule: `low` and `high` are allowed themselves, `above` and `below` are not; so infinity never is."""
    taken = None if choices is None else tuple(choices)
    rule = {"help": help, "low": low, "high": high, "above": above, "below": below, "choices": taken}
    if isinstance(default, dict):
        return field(default_factory=default.copy, hash=False, metadata=rule)
    return field(default=default, metadata=rule)


@dataclass(frozen=True)
class Settings:
    def __post_init__(self) -> None:
        for rule in self.rules().values():
            self._set(rule.name, check(rule, getattr(self, rule.name)))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def rules(cls) -> dict[str, Field[Any]]:
        """The fields that have a rule, by name."""
        return {each.name: each for each in fields(cls) if "help" in each.metadata}


def check(rule: Field[Any], value: Any, name: str = "") -> Any:
    """`value` as the field keeps it, if it follows the field's rule; `name` is how a message calls it."""
    kind, name = str(rule.type).removesuffix(" | None"), name or rule.name
    if value is None and kind != rule.type:
        return None
    if isinstance(value, Integral) and type(value) is not bool:  # numpy's too
        value = int(value)
        if kind == "float" and abs(value) < 2**53:
            value = float(value)
    if type(value) is not KINDS[kind]:
        raise OptionError(f"{name} is {shown(value)}: it must be {rule_in_words(rule)}.")
    if kind == "str" and not _is_plain(value):
        raise OptionError(f"{name} is {shown(value)}: it must be text of at most {TEXT} bytes, without control characters.")
    if kind == "dict[str, Any]":
        return {key: _check_entry(f"{name}.{key}", entry) for key, entry in value.items()}
    if rule.metadata["choices"] is not None:
        return choose(name, value, rule.metadata["choices"])
    ends = rule.metadata
    if kind in ("int", "float") and not (ends["low"] <= value <= ends["high"] and ends["above"] < value < ends["below"]):
        raise OptionError(f"{name} is {shown(value)}: it must be {rule_in_words(rule)}.")
    return value


def rule_in_words(rule: Field[Any]) -> str:
    """What a field takes: "adamw | muon", "a number from 0 to 1"."""
    if rule.metadata["choices"] is not None:
        return " | ".join(str(choice) or '""' for choice in rule.metadata["choices"])
    ends = {"low": "of at least", "above": "above", "high": "of at most", "below": "below"}
    ends = {key: word for key, word in ends.items() if math.isfinite(rule.metadata[key])}
    numbers = {key: f"{x:,}" if type(x := rule.metadata[key]) is int else f"{x:g}" for key in ends}
    said = " and ".join(f"{word} {numbers[key]}" for key, word in ends.items())
    if ends.keys() == {"low", "high"}:
        said = f"from {numbers['low']} to {numbers['high']}"
    return f"{WORDS[str(rule.type).removesuffix(' | None')]} {said}".strip()


def _check_entry(name: str, value: Any) -> bool | int | float | str:
    """One value of a table."""
    if type(value) is bool or (type(value) is str and _is_plain(value)) or (type(value) in (int, float) and abs(value) < 2**63):
        return value
    raise OptionError(f"{name} is {shown(value)}: it must be a finite number, true, false or short text.")


def _is_plain(text: str) -> bool:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:  # half a character, as bytes of another encoding become on a command line
        return False
    return size <= TEXT and not any((c < " " and c not in "\n\t") or c == "\x7f" for c in text)
