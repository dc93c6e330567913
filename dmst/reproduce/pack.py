"""Carry a ledger and the weights of its runs off a machine, in parts that are small enough to be sent.

    <pack>/index.json         sealed: name, size and sha256 of every file in their order, the same of every part
    <pack>/part-001 ...       the files end to end, cut every 15 MiB, each part after MAGIC

All is checked before anything is written. Unpacking adds the runs and the weights that are not here yet; what is here stays.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

from dmst.atomic import check_seal, json_object, read, sealed, write_folder
from dmst.errors import BadFileError, OptionError
from dmst.models.files import CONFIG, WEIGHTS
from dmst.reproduce import ledger

MAGIC = b"part of a dmst pack\n"
MOST = 15 * 2**20  # of a part, its magic included
INDEX, MOST_INDEX = "index.json", 2**24
NAME = re.compile(rf"ledger/[a-z0-9_-]+\.jsonl|weights/[0-9a-f]{{16}}-\d+/({re.escape(CONFIG)}|{re.escape(WEIGHTS)})")


class Unpacked(NamedTuple):
    runs: int
    weights: int


def pack(folder: Path, weights: Path | None, out: Path) -> Path:
    """The ledger in `folder`, and the saved models in `weights`, as parts in `out`, a new folder."""
    if out.exists():
        raise OptionError(f"{out} exists: choose another folder for the pack.")
    ledger.read(folder)  # a damaged one is not carried on
    paths = {f"ledger/{path.name}": path for path in sorted(folder.glob("*.jsonl"))}
    if weights is not None:
        if not any(weights.glob("*/*")):
            raise OptionError(f"{weights} holds no weights of runs: leave --weights out, or name the folder that does.")
        paths |= {f"weights/{path.parent.name}/{path.name}": path for path in sorted(weights.glob("*/*"))}
    if not paths:
        raise OptionError(f"{folder} holds no ledger: nothing to pack.")
    for name, path in paths.items():
        if not NAME.fullmatch(name):
            raise OptionError(f"{path} is neither a ledger nor weights of a run: it cannot be packed.")
    files = {name: read(path) for name, path in paths.items()}
    whole = b"".join(files.values())
    room = MOST - len(MAGIC)
    parts = {f"part-{i + 1:03}": MAGIC + whole[i * room : (i + 1) * room] for i in range(max(1, -(-len(whole) // room)))}
    told = {"files": [_told(*each) for each in files.items()], "parts": [_told(*each) for each in parts.items()]}
    return write_folder(out, parts | {INDEX: sealed(told)})


def unpack(source: Path, folder: Path, weights: Path | None) -> Unpacked:
    """What `source` carries and `folder` and `weights` lack; of two runs of one config and seed the first counts."""
    files = _read(source)
    new: dict[str, list[ledger.Line]] = {}
    mine = {(line["config"], line["seed"]): line for line in (ledger.read(folder) if folder.is_dir() else [])}
    foreign: set[str] = set()  # weights of runs that are here already, as other runs
    models: dict[str, dict[str, bytes]] = {}
    for name, raw in files.items():
        kind, _, rest = name.partition("/")
        if kind == "ledger":
            for line in ledger.parse(raw, f"{source}: {name}"):
                which = line["config"], line["seed"]
                if which not in mine:
                    new.setdefault(rest, []).append(line)
                    mine[which] = line
                elif mine[which] != line:
                    foreign.add(f"{which[0]}-{which[1]}")
        else:
            run, _, file = rest.partition("/")
            models.setdefault(run, {})[file] = raw
    if models and weights is None:
        raise OptionError(f"{source} carries the weights of {len(models)} runs: say where they go with --weights DIR.")
    for file, lines in new.items():
        for line in lines:
            ledger.add(folder / file, line)
    placed = 0
    for run, its_files in models.items():
        assert weights is not None
        if run not in foreign and not (weights / run).exists():
            write_folder(weights / run, its_files)
            placed += 1
    return Unpacked(sum(map(len, new.values())), placed)


def _told(name: str, raw: bytes) -> dict[str, Any]:
    return {"name": name, "size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def _read(source: Path) -> dict[str, bytes]:
    """The files of a pack, every part and every file checked."""
    index = source / INDEX
    try:
        raw = read(index, most=MOST_INDEX)
        told = json_object(index, raw, "the index of a pack")
        check_seal(index, told, raw)
        parts = [read(source / part["name"], part["size"]) for part in told["parts"] if _checked(part, r"part-\d{3,}", index)]
    except OSError as error:
        raise BadFileError(
            f"{error.filename} cannot be read ({error.strerror}): bring every part of the pack, and its {INDEX}."
        ) from error
    for part, data in zip(told["parts"], parts, strict=True):
        if _told(part["name"], data) != part or not data.startswith(MAGIC):
            raise BadFileError(f"{source / part['name']} is damaged: it has not the sha256 of the index. Bring it again.")
    whole = b"".join(part[len(MAGIC) :] for part in parts)
    entries = [entry for entry in told["files"] if _checked(entry, NAME.pattern, index)]
    ends = list(itertools.accumulate(entry["size"] for entry in entries))
    if not ends or ends[-1] != len(whole):
        raise BadFileError(f"{index} does not fit its parts.")
    files = {entry["name"]: whole[end - entry["size"] : end] for entry, end in zip(entries, ends, strict=True)}
    for entry in entries:
        if _told(entry["name"], files[entry["name"]]) != entry:
            raise BadFileError(f"{source}: {entry['name']} is damaged.")
    return files


def _checked(entry: Any, pattern: str, index: Path) -> bool:
    good = isinstance(entry, dict) and set(entry) == {"name", "size", "sha256"}
    good = good and re.fullmatch(pattern, str(entry["name"])) is not None and type(entry["size"]) is int and entry["size"] >= 0
    if not good:
        raise BadFileError(f"{index} names what no pack holds: {str(entry)[:120]}.")
    return True
