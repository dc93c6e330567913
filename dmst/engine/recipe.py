"""Recipes, read: the ones that ship, by name, and anyone's, from TOML; checked once and refused with the key and the reason.

    read_recipe("digits", ["optim.lr=2e-4", "model.options.operator=tssa"])
    from_toml(recipe.to_toml(), "again") == recipe

What the keys are and which rules they follow: sections.py. dmst/recipes holds those that ship.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field
from importlib import resources
from pathlib import Path
from typing import Any

from dmst.engine import toml
from dmst.engine.sections import SECTIONS, Data, Model, Optim, Promise, Recipe, Run, Schedule, reported
from dmst.errors import ConfigError, unknown_name
from dmst.settings import REQUIRED, Settings, rule_in_words

__all__ = ["Data", "Model", "Optim", "Promise", "Recipe", "Run", "Schedule"]
__all__ += ["differences", "from_toml", "help_text", "list_recipes", "read_recipe"]

Tables = dict[str, dict[str, Any]]


def read_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe that ships, by name, or the one in a .toml file; each of `overrides`, "optim.lr=2e-4", sets one key."""
    name, shipped = str(name_or_path), _shipped()
    if name in shipped:
        return _build(shipped[name], f"recipe {name}", overrides)
    if name.endswith(".toml"):
        return _build(toml.read(Path(name)), name, overrides)
    raise ConfigError("", name, f"{unknown_name('recipe', name, shipped)} Or give the path of a .toml file.")


def from_toml(text: str, source: str) -> Recipe:
    """The recipe that `text` states; `source` is how messages call it."""
    return _build(text.encode(errors="surrogatepass"), source)


def list_recipes() -> dict[str, Recipe]:
    """Every recipe that ships, by name."""
    return {name: _build(data, f"recipe {name}") for name, data in sorted(_shipped().items())}


def differences(old: Recipe, new: Recipe) -> list[str]:
    """A line for every key of a run that differs, "optim.lr: 0.001 -> 0.002"; the promise does not count."""
    lines = []
    befores, afters = old.tables(promise=False), new.tables(promise=False)
    for name, before in befores.items():
        for key in before | afters[name]:
            was, now = (toml.write_value(table[key]) if key in table else "not set" for table in (before, afters[name]))
            lines += [f"{name}.{key}: {was} -> {now}"] if was != now else []
    return lines


def help_text() -> str:
    """Every key of a recipe: its default, what it takes, what it does."""
    rows = [
        [f"{name}.{key}", _default(rule), rule_in_words(rule), rule.metadata["help"]]
        for name, section in SECTIONS.items()
        for key, rule in section.rules().items()
    ]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _default(rule: Field[Any]) -> str:
    if _required(rule):
        return "required"
    return "empty" if rule.default is REQUIRED else toml.write_value(rule.default)


def _required(rule: Field[Any]) -> bool:
    return rule.default is REQUIRED and rule.default_factory is REQUIRED


def _shipped() -> dict[str, bytes]:
    folder = resources.files("dmst") / "recipes"
    return {file.name.removesuffix(".toml"): file.read_bytes() for file in folder.iterdir() if file.name.endswith(".toml")}


def _build(data: bytes, source: str, overrides: Sequence[str] = ()) -> Recipe:
    tables: Tables = {name: {} for name in SECTIONS}
    for name, table in toml.parse(data, source).items():
        section = _section(name, source)
        if not isinstance(table, dict):
            raise ConfigError(source, name, f"{name} must be a section: a line [{name}], and its keys below.")
        for key, value in table.items():
            tables[name][key] = _value(section, name, key, value, source)
    before = dict(tables["schedule"])
    for override in overrides:
        _override(tables, override)
    if not any(override.strip().startswith("schedule.warmup_epochs") for override in overrides):
        _shorten_warmup(before, tables["schedule"])
    made: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        for key, rule in section.rules().items():
            if key not in tables[name] and _required(rule):
                raise ConfigError(source, f"{name}.{key}", f"{name}.{key} is missing: {rule.metadata['help']}.")
        with reported(source, name):
            made[name] = section(**tables[name])
    with reported(source, "recipe"):
        return Recipe(**made)


def _shorten_warmup(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Of a run that was made shorter, the warm-up keeps its share where it would fill more than half of the run."""
    warmup, epochs = now.get("warmup_epochs", 0), now.get("epochs", 0)
    if epochs < before.get("epochs", 0) and warmup > epochs / 2:
        now["warmup_epochs"] = round(warmup / before["epochs"] * epochs, 4)


def _override(tables: Tables, override: str) -> None:
    """Set one key: "optim.lr=2e-4", "model.options.mode=equation". Bare words are text where text is asked for."""
    source = f"--set {override[:80]}"
    dotted, equals, text = (part.strip() for part in override.partition("="))
    name, _, key = dotted.partition(".")
    if not (equals and name and key) or len(override) > toml.LINE:
        raise ConfigError(source, "", "it must be section.key=value, as optim.lr=2e-4.")
    section = _section(name, source)
    key, _, option = key.partition(".")
    kind = str(_rule(section, name, key, source).type)
    if option and not kind.startswith("dict"):
        raise ConfigError(source, dotted, f"{name}.{key} is no table and has no {option!r}.")
    bare = text.isidentifier() and text not in ("true", "false") if option else kind == "str" and text[:1] not in ("'", '"')
    with reported(source, dotted):
        value = text if bare else toml.parse_value(text)
    if option:
        value = tables[name].get(key, {}) | {option: value}
    tables[name][key] = _value(section, name, key, value, source)


def _section(name: str, source: str) -> type[Settings]:
    with reported(source, name):
        if name not in SECTIONS:
            raise unknown_name("section", name, SECTIONS)
    return SECTIONS[name]


def _rule(section: type[Settings], name: str, key: str, source: str) -> Field[Any]:
    with reported(source, f"{name}.{key}"):
        if key not in section.rules():
            raise unknown_name(f"key of [{name}]", key, section.rules())
    return section.rules()[key]


def _value(section: type[Settings], name: str, key: str, value: Any, source: str) -> Any:
    _rule(section, name, key, source)
    with reported(source, f"{name}.{key}"):
        return section.checked(key, value, f"{name}.{key}")
