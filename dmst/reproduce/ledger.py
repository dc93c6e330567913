"""The ledger: files of JSON lines, one line a finished run, appended and never changed.

    table, cell, seed       which run it is; a run is found again by `config` and `seed`, so tables share runs
    config                  hash of the recipe, its seed left out
    recipe, changes         the recipe that ships and what was changed in it: enough to run it again
    data                    name, variant, images, fingerprint of pixels and labels of both sets
    commit, device, versions, date, seconds
    parameters, metrics     what came out

A line that a kill cut off is the last one: it is left out when read, and the next run takes its place.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from dmst.engine.checkpoint import posix
from dmst.engine.recipe import Recipe
from dmst.errors import BadFileError

Line = dict[str, Any]


def read(folder: Path) -> list[Line]:
    """Every run of every file, files in the order of their names."""
    return [line for path in sorted(folder.glob("*.jsonl")) for line in parse(path.read_bytes(), str(path))]


def parse(raw: bytes, where: str) -> list[Line]:
    """The runs of one file; `where` is what messages call it."""
    found = []
    lines = raw.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):  # a kill cut it off
                continue
            raise BadFileError(f"{where}, line {number} is damaged: {error}. Bring it back from the repository.") from error
    return found


def add(path: Path, line: Line) -> None:
    """Append a run, and have it on the disk before this returns."""
    fcntl = posix()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several processes may share a device
        file.seek(0)
        text = file.read()
        whole = text.rfind(b"\n") + 1
        kept = bool(text[whole:]) and bool(parse(text[whole:], str(path)))  # a whole run that lacks nothing but its end
        file.truncate(len(text) if kept else whole)  # without what a kill cut off
        file.write(b"\n" * kept + (json.dumps(line, allow_nan=False) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def config_of(recipe: Recipe) -> str:
    """One hash of everything that decides a run but its seed."""
    tables = recipe.tables(promise=False)
    kept = {name: {key: x for key, x in table.items() if (name, key) != ("run", "seed")} for name, table in tables.items()}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
