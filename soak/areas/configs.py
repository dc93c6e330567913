"""Recipes and model configs: a ConfigError that names the file and the key or line, or a recipe that comes back as it was.

Each in at most 5 s of the processor. What tests/engine/test_recipe.py holds by hand; recipes with one to five keys set to
values right and wrong; the recipes that ship, damaged as text; values of --set; and the configs of models, from keywords and
from JSON, whose refusals name the option. Every one is seeded by its number.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from dmst import atomic
from dmst.engine.recipe import SECTIONS, Recipe, differences, from_toml, read_recipe
from dmst.errors import BadFileError, ConfigError, DmstError
from dmst.models.config import ModelConfig
from dmst.models.files import CONFIG, WEIGHTS, load_model
from dmst.models.vision import VisionModel
from dmst.models.zoo import MODELS, model_config
from dmst.operators import OPERATORS
from soak.case import Case
from tests.engine import test_recipe
from tests.engine.test_recipe import BAD_OVERRIDES, BASE, HOSTILE, KEYS, RULE_BREAKERS, SHIPPED

TITLE = "Hostile configs"
SECONDS = 5
FIELDS = [field.name for field in fields(ModelConfig)]
CHANGED, DAMAGED, SET, NETWORKS = 8000, 8000, 4000, 2000
WHOLE_FILE = ("more than 16,384 bytes", "it is not TOML")  # refusals of no place in it


# --- what is promised ------------------------------------------------------------------------------------------------


def same_again(recipe: Recipe) -> None:
    text = recipe.to_toml()
    again = from_toml(text, "again")
    assert again == recipe and again.digest == recipe.digest and again.to_toml() == text, "it does not come back"
    assert differences(recipe, again) == []


def names_the_place(error: ConfigError, source: str, text: str) -> None:
    """The file, and a line that it has or a key that it holds; or one that must be there and is not."""
    assert error.file == source and error.reason and len(str(error)) < 3000, f"{error.file!r}: {str(error)[:200]}"
    line = re.search(r"\(at line (\d+)", error.reason)
    parts = error.where.split(".")
    known = error.where in KEYS or ".".join(parts[:2]) in KEYS or error.where in SECTIONS
    there = bool(error.where) and (known or all(_written(part, text) for part in parts))
    there = 1 <= int(line[1]) <= text.count("\n") + 1 if line else there
    assert there or any(reason in error.reason for reason in WHOLE_FILE), (
        f"no such place: {error.where!r}, {error.reason[:200]}"
    )


def _written(name: str, text: str) -> bool:
    """As it stands, or where the text has escapes, perhaps in another spelling."""
    return name in text or "\\" in text


def judged(read: Callable[[], Recipe], place: Callable[[ConfigError], None]) -> None:
    begun = time.process_time()
    try:
        recipe, error = read(), None
    except ConfigError as refusal:
        recipe, error = None, refusal
    except BadFileError:  # too large, or a pickle: nothing of it was parsed
        recipe, error = None, None
    took = time.process_time() - begun
    assert took < SECONDS, f"it took {took:.2f} s"
    if recipe is not None:
        same_again(recipe)
    if error is not None:
        place(error)


def file_of(make: Callable[[random.Random], bytes], seed: int, folder: Path) -> None:
    data, path = make(random.Random(seed)), folder / "my.toml"
    path.write_bytes(data)
    judged(lambda: read_recipe(path), lambda error: names_the_place(error, str(path), data.decode(errors="replace")))


# --- recipes with some keys changed ----------------------------------------------------------------------------------

WORDS = ["", "a", "auto", "none", "../..", "/dev/zero", "${HOME}", "\u202e", "é" * 100, "x" * 481, "true", "nan", "\U0001f600"]
ODD = [
    "nan", "-nan", "inf", "-inf", "1e999", "-1e999", "1e-400", "-0.0", "0", "-1", "1", "2", "0.5", "1.0", "1e300", "true",
    "false",
]  # fmt: skip
ODD += ["9" * 400, "-" + "9" * 30, "0x" + "f" * 200, "0o17", "0b1", "1_000", "1__0", "01", "+1", "2**3", "9223372036854775807"]
ODD += [
    "2026-01-02", "07:32:00", "1979-05-27T07:32:00Z", "[]", "{}", "[1, 2]", "[[1], [2]]", "{a = 1}", "[" * 20 + "]" * 20,
    '""',
]  # fmt: skip
ODD += [
    "'a'", '"""a\nb"""', "'''\n'''", '"\\u0000"', '"\\ud800"', '"\\x41"', "None", "", "=", "#", "'", "[",
    "{a = {b = {c = {}}}}",
]  # fmt: skip
ODD += ["4294967296", "4294967295", "1000000001", "1000000000", "8193", "0.999999999999999999", "1.0000000000000002", "5e-324"]


def text_of(word: str) -> str:
    return json.dumps(word, ensure_ascii=False)


def fitting(chance: random.Random, name: str) -> str:
    """A value that the rule of a key may take."""
    section, _, key = name.partition(".")
    rule = SECTIONS[section].rules()[key]
    told = rule.metadata
    if name == "model.name":
        return text_of(chance.choice(sorted(MODELS)))
    if name == "augment.aa":
        return text_of(chance.choice(["", "rand-m9-mstd0.5-inc1", "rand-n3-p0.25", "rand-m10", "augmix-m3"]))
    if told["choices"] is not None:
        return text_of(chance.choice(told["choices"]))
    if rule.type == "bool":
        return chance.choice(["true", "false"])
    if rule.type == "str":
        return text_of(chance.choice(WORDS))
    if rule.type not in ("int", "float"):
        return "{" + ", ".join(f"{key} = {value}" for key, value in options(chance).items()) + "}"
    low, high = max(told["low"], told["above"], -1e9), min(told["high"], told["below"], 1e9)
    if rule.type == "int":
        return str(chance.choice([int(low), int(high), chance.randint(int(low), int(min(high, low + 4096)))]))
    return repr(chance.choice([low, high, chance.uniform(low, min(high, low + 2)), 10 ** chance.uniform(-12, 0)]))


def options(chance: random.Random) -> dict[str, str]:
    names = [*FIELDS, "mode", "rotary", "gate_scale", "max_active_heads", "x", "'a b'", "a.b", '"\\n"']
    picked = chance.sample(names, chance.randint(0, 3))
    return {
        name: chance.choice([*ODD, '"2d"', '"equation"', "4", "0.1", text_of(chance.choice(sorted(OPERATORS)))])
        for name in picked
    }


def misspelt(chance: random.Random, name: str) -> str:
    at = chance.randrange(len(name))
    return chance.choice(
        [name[:at] + name[at + 1 :], name[:at] + chance.choice("aé_ .\t-Z0") + name[at:], name.upper(), name[::-1]]
    )


def changed(chance: random.Random) -> bytes:
    """A recipe that ships, or the least one, as lines; one to five of them set, removed, doubled, misspelt or moved."""
    text = BASE if chance.random() < 0.2 else SHIPPED[chance.choice(sorted(SHIPPED))].to_toml()
    lines = text.splitlines()
    for _ in range(chance.randint(1, 5)):
        key = chance.choice(KEYS)
        section, _, name = key.partition(".")
        value = fitting(chance, key) if chance.random() < 0.6 else chance.choice(ODD)
        at = [i for i, line in enumerate(lines) if line.startswith(f"{name} =")]
        here = [i + 1 for i, line in enumerate(lines) if line == f"[{section}]"]
        match chance.randrange(12):
            case 0:
                lines[chance.randrange(len(lines))] = ""
            case 1:
                lines.insert(chance.randrange(len(lines)), f"{misspelt(chance, name)} = {value}")
            case 2:
                lines.insert(
                    chance.randrange(len(lines)), chance.choice([f"[{section}]", f"[[{section}]]", f"[{key}]", f"[{name}]"])
                )
            case 3:
                lines.insert(chance.choice(here or [0]), f"{name} = {value}")  # perhaps a second time
            case _:  # set where it is, else in its section, else anywhere
                found = [i for i in at if here and i >= here[0]]
                if found:
                    lines[found[0]] = f"{name} = {value}"
                else:
                    lines.insert(chance.choice(here or range(len(lines))), f"{name} = {value}")
    return "\n".join(lines).encode(errors="surrogatepass")


# --- recipes damaged as text -----------------------------------------------------------------------------------------

RAW = {file.name: file.read_bytes() for file in (resources.files("dmst") / "recipes").iterdir() if file.name.endswith(".toml")}
INSERTS = [
    "\0", "\x01", "\x1b[31m", "\x7f", "\r", "\r\n", "\u2028", "\u202e", "\ufeff", "\U0010ffff", "é", '"', "'", '"""', "[",
    "]",
]  # fmt: skip
INSERTS += [
    "{", "}", "=", "#", ".", ",", "\\", "\\u", "\t", "\n\n", "[" * 900, "{a=" * 300, "a." * 499 + "a = 1\n", "x" * 1025,
    "[a]\n",
]  # fmt: skip
INSERTS += ["a.b.c.d.e.f.g.h.i = 1\n", "9" * 1000, "[model]\n", "[[model.options]]\n", "[model.options.options]\n", "\n= 1\n"]


def damaged(chance: random.Random) -> bytes:
    data = bytearray(RAW[chance.choice(sorted(RAW))])
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at = chance.randrange(len(data) + 1)
        lines = bytes(data).split(b"\n")
        match chance.randrange(10):
            case 0:
                data[at : at + 1] = bytes([data[at] ^ 1 << chance.randrange(8)]) if at < len(data) else b"\xff"
            case 1:
                data[at : at + 1] = chance.randbytes(chance.randint(1, 4))
            case 2:
                del data[at:]
            case 3:
                del data[at : at + chance.randint(1, 40)]
            case 4 | 5:
                data[at:at] = chance.choice(INSERTS).encode(errors="surrogatepass")
            case 6:
                chance.shuffle(lines)
                data = bytearray(b"\n".join(lines))
            case 7:
                lines[chance.randrange(len(lines))] *= chance.choice((2, 3, 40))
                data = bytearray(b"\n".join(lines))
            case 8:
                lines[chance.randrange(len(lines)) : 0] = [chance.choice(lines)] * chance.choice((1, 2, 3000))
                data = bytearray(b"\n".join(lines))
            case 9:
                lines.insert(chance.randrange(len(lines)), b"k" + b".a" * chance.choice((3, 8, 9, 490, 5000)) + b" = 1")
                data = bytearray(b"\n".join(lines))
        data = data or bytearray(b"\n")
    return bytes(data)


# --- values of --set -------------------------------------------------------------------------------------------------


def override(chance: random.Random) -> str:
    key = chance.choice(KEYS)
    value = (
        fitting(chance, key)
        if chance.random() < 0.5
        else chance.choice([*ODD, *WORDS, "\udcff", "1\n[run]\nseed = 3", "1 # 2"])
    )
    if chance.random() < 0.2:
        option, value = chance.choice([*options(chance).items(), ("mode", "equation")])
        key = f"model.options.{option}"
    if chance.random() < 0.15:
        key = misspelt(chance, key)
    return chance.choice([f"{key}={value}"] * 8 + [f" {key} = {value} ", key, f"={value}", f"{key}=={value}"])


def overrides(seed: int, folder: Path) -> None:
    chance = random.Random(seed)
    name, given = chance.choice(sorted(SHIPPED)), [override(chance) for _ in range(chance.choice((1, 1, 2, 4)))]
    sources = [f"--set {each[:80]}" for each in given] + [f"recipe {name}"]

    def place(error: ConfigError) -> None:
        assert error.file in sources, f"{error.file!r} is none of {sources}"
        shape = "it must be section.key=value" in error.reason and error.file != sources[-1]
        if not shape:
            names_the_place(error, error.file, "\n".join(given))

    judged(lambda: read_recipe(name, given), place)


# --- configs of models -----------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 4, 8, 16, 32, 100, 192, 1000, 10**6, 10**6 + 1, 2**63, 10**400, 10**5000,
]  # fmt: skip
VALUES += [
    0.0, -0.0, 0.1, 0.5, 1.0, 1e-9, 1e300, float("nan"), float("inf"), -float("inf"), "", "a", "2d", "1d", "equation",
    "token", "mean",
]  # fmt: skip
VALUES += [
    "avg", "conv", "patch", "learned", "ista", "mlp", "class_attention", "\udcff", [], [1], [32, 32], [224, 224, 224], {},
    {"a": 1},
]  # fmt: skip
VALUES += [{"mode": "equation"}, {"dim": 3}, {"rotary": "2d"}, [[[]]], *OPERATORS]
OPTION_NAMES = sorted(
    {name for operator in OPERATORS.values() for name in operator.keywords()} | {"unknown", "num_head", "qk_scale", "attn_drop"}
)
SANE: dict[str, list[Any]] = {
    "dim": [32, 64, 192], "depth": [1, 2, 12], "num_heads": [1, 2, 4], "patch_size": [1, 4, 8, 16], "num_classes": [0, 7],
    "img_size": [32, [64, 32], 224], "drop_path_rate": [0, 0.1, 1], "mlp_ratio": [1, 0.5, 4.0], "in_chans": [1, 3],
    "stem": ["conv", "patch", "norm_patch"], "readout": ["token", "mean", "class_attention"], "readout_depth": [0, 1, 2],
    "global_pool": ["avg", "", None], "operator": list(OPERATORS), "feedforward": ["mlp", "ista"],
    "position": ["fourier", "learned"], "layer_scale": [None, 1e-5],
}  # fmt: skip


def keywords(chance: random.Random) -> dict[str, Any]:
    """Some options, of which most can be taken."""
    given = {name: chance.choice(SANE[name]) for name in chance.sample(sorted(SANE), chance.randint(0, 4))}
    wild = chance.sample([*FIELDS, *OPTION_NAMES], chance.choice((0, 1, 1, 2, 4)))
    return given | {name: chance.choice(VALUES) for name in wild}


def names_an_option(error: DmstError, given: dict[str, Any]) -> None:
    """One of those that were given; a list of all that are known does not count."""
    told, _, _ = str(error).partition(" Known: ")
    inner = given.get("operator_options")
    names = [*given, *(inner if isinstance(inner, dict) else [])]
    assert len(told) < 3000, f"{len(told)} characters: {told[:200]}"
    assert any(re.search(rf"\b{re.escape(name)}\b", told) for name in names), f"none of {names} is named: {told[:300]}"


def comes_back(config: ModelConfig) -> None:
    if all(type(value) in (int, float, str, bool) for value in config.operator_options.values()):
        again = ModelConfig(**json.loads(json.dumps(config.to_dict())))
        assert again == config and repr(again) == repr(config), "it does not come back from JSON"
    assert config.change() == config and hash(config.change()) == hash(config), "it does not come back"


def network(seed: int, folder: Path) -> None:
    """From keywords, as create_model takes them, before anything is built."""
    chance = random.Random(seed)
    given = keywords(chance)
    given.pop("name", None)  # which is the first argument
    name = chance.choice([*sorted(MODELS), "dmst_tiny", "vit_small"])
    begun = time.process_time()
    try:
        config, error = model_config(name, **given), None
    except DmstError as refusal:
        config, error = None, refusal
    took = time.process_time() - begun
    assert took < SECONDS, f"it took {took:.2f} s"
    if error is not None:
        names_an_option(error, given)
    if config is not None:
        comes_back(config)


def saved(seed: int, folder: Path) -> None:
    """From config.json, of ours or timm's, beside one tensor that fits no network."""
    given = {name: value for name, value in keywords(random.Random(seed)).items() if value != 10**5000}  # JSON has no such
    weights = safetensors.torch.save({"x": torch.zeros(1)})
    (folder / WEIGHTS).write_bytes(weights)
    if seed % 2:
        told = json.dumps({"architecture": "dmst_tiny", "model_args": given}).encode()
    else:
        given = {name: value for name, value in given.items() if type(value) is not float or math.isfinite(value)}
        files = {WEIGHTS: {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}}
        told = atomic.sealed({"dmst": {"version": "1", "config": given, "files": files}})
    (folder / CONFIG).write_bytes(told)
    begun = time.process_time()
    try:
        load_model(folder, unverified=True)
        error = None
    except DmstError as refusal:
        error = refusal
    took = time.process_time() - begun
    assert error is not None, "a network was loaded from one tensor"
    assert took < SECONDS, f"it took {took:.2f} s"
    if not isinstance(error, BadFileError) or str(folder) not in str(error):
        names_an_option(error, given)


# --- all -------------------------------------------------------------------------------------------------------------


def by_hand() -> Iterator[tuple[str, Callable[[], None]]]:
    for name in HOSTILE:
        yield name, partial(test_recipe.test_hostile, name)
    for given in BAD_OVERRIDES:
        yield f"--set {ascii(given)[:60]}", partial(test_recipe.test_bad_overrides, given)
    for given, where in RULE_BREAKERS:
        yield f"rule {where} {given}", partial(test_recipe.test_rules_between_keys, given, where)


def cases(place: Path) -> Iterator[Case]:
    VisionModel(model_config("dmst_tiny"), device="meta")  # the first of a process makes torch import half of itself
    for name, check in by_hand():
        yield Case("hostile recipes and --set values, by hand", f"hand {name}", lambda folder, check=check: check(), 20)  # type: ignore[misc]
    rows: list[tuple[str, str, int, Callable[[int, Path], None]]] = [
        ("recipes with one to five keys changed", "changed", CHANGED, partial(file_of, changed)),
        ("shipped recipes damaged as text", "damaged", DAMAGED, partial(file_of, damaged)),
        ("recipes changed by --set", "set", SET, overrides),
        ("configs of models, from keywords", "keywords", NETWORKS // 2, network),
        ("configs of models, from files", "file", NETWORKS // 2, saved),
    ]
    for row, name, count, check in rows:
        for seed in range(count):
            yield Case(row, f"{name} {seed}", partial(check, seed), 20)
