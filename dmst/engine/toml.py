"""TOML, read with care and written flat.

    parse(bytes, source)       at most 64 KiB, 1 KiB a line and 1,000 dots outside quotes, before; at most 8 deep, after
    parse_value(text)          one value, as it stands behind the = of a line
    write(tables)              {"model": {"name": "dmst_tiny"}} as [model] and name = "dmst_tiny"; parse gives it back exactly

Whatever is wrong with a file is a ConfigError that says where. The limits are for time, which the standard parser takes as the
square of the parts of a dotted key: 7 s for one of 40 KB, 1.6 s for 64 lines of 1 KiB. Nothing is interpolated, included or
taken from the environment.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmst.errors import ConfigError, OptionError, shown

FILE, LINE, DOTS, DEPTH = 64 * 1024, 1024, 1000, 8
QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*"|\'[^\']*\'')
ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"})
PLACE = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)")


def read(path: Path) -> bytes:
    """The bytes of a file; no more of them than `parse` would take, whatever the file is."""
    try:
        if path.is_file():  # a pipe would wait for ever
            with path.open("rb") as file:
                return file.read(FILE + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), "", f"it could not be read ({error}).") from error
    raise ConfigError(str(path), "", "there is no such file.")


def parse(data: bytes, source: str) -> dict[str, Any]:
    """The tables of a file; `source` is how messages call it."""
    if len(data) > FILE:
        raise ConfigError(source, "", f"it has more than {FILE:,} bytes, which no recipe needs.")
    if data.startswith(b"\xef\xbb\xbf"):
        raise ConfigError(source, "line 1", "it starts with a byte order mark: save it as UTF-8 without one.")
    for count, line in enumerate(data.split(b"\n"), 1):
        if len(line) > LINE:
            raise ConfigError(source, f"line {count}", f"the line has {len(line):,} bytes, and {LINE:,} are allowed.")
    if data.count(b".") > DOTS and sum(QUOTED.sub(b"", line).count(b".") for line in data.split(b"\n")) > DOTS:
        raise ConfigError(source, "", f"it has more than {DOTS:,} dots, which the keys of no recipe need.")
    try:
        tables = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        count = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(source, f"line {count}", "it is not UTF-8 text.") from error
    except RecursionError as error:
        raise ConfigError(source, "", f"it is nested deeper than {DEPTH} levels.") from error
    except ValueError as error:  # TOMLDecodeError is one; so is what int() says to 5,000 digits
        where = PLACE.search(str(error))
        place = f"line {where[1]}" if where and where[1] else "its end" if where else ""
        raise ConfigError(source, place, f"it is not TOML: {PLACE.sub('', str(error))}.") from error
    _check_depth(tables, source)
    return tables


def parse_value(text: str) -> Any:
    """The value of `key = text`."""
    try:
        tables = parse(f"value = {text}".encode(errors="surrogatepass"), "")
        if list(tables) == ["value"]:
            return tables["value"]
    except ConfigError:
        pass
    raise OptionError(f'{shown(text)} is no value of TOML; such are 1, 0.5, 2e-4, true and "text".')


def write(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of numbers, flags and texts, in the order given; "a.b" is a table inside another."""
    return "\n".join(
        "".join([f"[{name}]\n", *(f"{_key(key)} = {write_value(value)}\n" for key, value in table.items())])
        for name, table in tables.items()
    )


def write_value(value: Any) -> str:
    if type(value) is bool:
        return str(value).lower()
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return repr(value)
    if type(value) is str:
        return f'"{value.translate(ESCAPES)}"'
    raise OptionError(f"{shown(value)} cannot be written to a recipe: it must be a finite number, true, false or text.")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else write_value(key)


def _check_depth(tables: dict[str, Any], source: str) -> None:
    level: list[tuple[str, Any]] = list(tables.items())
    for _ in range(DEPTH):
        level = [(name, x) for name, value in level if isinstance(value, dict | list) for x in _inside(value)]
    if level:
        raise ConfigError(source, level[0][0], f"{level[0][0]} is nested deeper than {DEPTH} levels.")


def _inside(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
