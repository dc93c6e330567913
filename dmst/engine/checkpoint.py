"""One checkpoint: a folder whose every byte is accounted for, or refused. No pickle, neither written nor read.

    model.safetensors    and ema, optim: one file for each entry of `Snapshot.tensors`
    state.json           `Snapshot.state`
    config.toml          `Snapshot.recipe`
    manifest.json        written last: schema, step, context, size and sha256 of each file above; `self_sha256` covers the rest

Reading follows the manifest: a file that it does not list is never opened, one that it lists is read once, and those bytes are
hashed and then parsed. Whether the tensors fit a model is asked with `tensors.fit`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dmst import atomic
from dmst.errors import BadFileError, OptionError, SaveError
from dmst.models.tensors import LONGEST_HEADER, not_finite, pieces, read

SCHEMA = 1
MANIFEST, STATE, RECIPE, TENSORS = "manifest.json", "state.json", "config.toml", ".safetensors"
STEM = re.compile(r"[a-z][a-z0-9_]*")
LARGEST_MANIFEST, LARGEST_SMALL = 2**20, 2**24  # bytes: of the manifest, and of state and recipe
REFUSED = "it was not written by this program, and nothing was read."


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to go on from after `step` optimizer steps."""

    step: int
    tensors: dict[str, dict[str, Tensor]]  # "model", "ema" or "optim" -> name -> tensor
    state: dict[str, Any] = field(default_factory=dict)  # plain JSON
    recipe: str = ""  # TOML
    context: dict[str, Any] = field(default_factory=dict)  # plain JSON: config hash, dataset fingerprint, versions


# --- writing ---------------------------------------------------------------------------------------------------------


def contents(snapshot: Snapshot) -> tuple[int, dict[str, atomic.Pieces]]:
    """How many bytes a checkpoint of `snapshot` takes, about, and its files in pieces, for `atomic.write_folder`.

    What could not be loaded is refused here, before a byte is written. The manifest is made when its turn comes: last, when
    the pieces of the others have gone by.
    """
    parts, told = _parts(snapshot), dict[str, Any]()
    files: dict[str, atomic.Pieces] = {name: _hashed(name, data, told) for name, (_, data) in parts.items()}
    files[MANIFEST] = (_sealed(snapshot, told) for _ in range(1))
    return sum(size for size, _ in parts.values()) + len(_plain("context", snapshot.context)) + 2**12, files


def holds(folder: Path, snapshot: Snapshot) -> bool:
    """Whether `folder` is a checkpoint of exactly `snapshot`, and whole."""
    size = sum(x.nbytes for tensors in snapshot.tensors.values() for x in tensors.values())
    try:
        stored = verify(folder, snapshot.step, size)
    except BadFileError:
        return False
    told: dict[str, Any] = {}
    for name, (_, data) in _parts(snapshot).items():
        for _ in _hashed(name, data, told):
            pass
    return atomic.sealed(stored) == _sealed(snapshot, told)


def _parts(snapshot: Snapshot) -> dict[str, tuple[int, Iterable[bytes | memoryview]]]:
    """Size and pieces of every file but the manifest."""
    if type(snapshot.step) is not int or snapshot.step < 0:
        raise OptionError(f"step is {snapshot.step!r}: it must be a whole number of at least 0.")
    small = {STATE: _plain("state", snapshot.state), RECIPE: snapshot.recipe.encode()}
    parts: dict[str, tuple[int, Iterable[bytes | memoryview]]] = {name: (len(raw), [raw]) for name, raw in small.items()}
    for stem, tensors in snapshot.tensors.items():
        if not STEM.fullmatch(stem):
            raise OptionError(f"tensors has an entry {stem!r}: it names a file, so it must be small letters, digits and _.")
        parts[stem + TENSORS] = pieces(stem, tensors)
        if bad := not_finite(tensors):
            raise SaveError(f"step {snapshot.step} is not saved: {bad} of {stem} holds NaN or infinity.")
    return parts


def _plain(what: str, value: dict[str, Any]) -> bytes:
    """`value` as JSON, if JSON brings it back unchanged."""
    for key, entry in value.items():
        try:
            same = json.loads(json.dumps({key: entry}, allow_nan=False)) == {key: entry}
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise OptionError(f"{what}[{key!r}] cannot be kept: only text, finite numbers, lists, and dicts by text can.")
    return json.dumps(value, indent=2, allow_nan=False).encode()


def _hashed(name: str, data: Iterable[bytes | memoryview], told: dict[str, Any]) -> Iterator[bytes | memoryview]:
    """The same pieces; `told` learns size and sha256 when the last has gone by."""
    size, digest = 0, hashlib.sha256()
    for piece in data:
        size += len(piece)
        digest.update(piece)
        yield piece
    told[name] = {"size": size, "sha256": digest.hexdigest()}


def _sealed(snapshot: Snapshot, told: dict[str, Any]) -> bytes:
    return atomic.sealed({"schema": SCHEMA, "step": snapshot.step, "context": snapshot.context, "files": told})


# --- reading ---------------------------------------------------------------------------------------------------------


def load(folder: Path, step: int | None = None, most: int | None = None) -> Snapshot:
    """The checkpoint in `folder`, verified to the last byte; else BadFileError, which says what is wrong with it.

    One that states more than `most` bytes of tensors, and a header for each, is refused before it is read.
    """
    told = manifest(folder, step, most)
    tensors: dict[str, dict[str, Tensor]] = {}
    small: dict[str, bytes] = {}
    for name, raw in _files(folder, told):
        if not name.endswith(TENSORS):
            small[name] = raw
            continue
        found = read(folder / name, raw)
        if bad := not_finite(found):
            raise BadFileError(f"{folder / name}: {bad} holds NaN or infinity.")
        tensors[name.removesuffix(TENSORS)] = found
    state = atomic.json_object(folder / STATE, small[STATE], "the state of a run")
    try:
        _plain("state", state)
        recipe = small[RECIPE].decode()
    except ValueError as error:
        raise BadFileError(f"{folder}: {STATE} or {RECIPE} holds what no run writes ({error}).") from error
    return Snapshot(told["step"], tensors, state, recipe, told["context"])


def verify(folder: Path, step: int | None = None, most: int | None = None) -> dict[str, Any]:
    """Read every byte and hold it against the manifest, which is returned; else BadFileError."""
    told = manifest(folder, step, most)
    for _ in _files(folder, told):
        pass
    return told


def manifest(folder: Path, step: int | None = None, most: int | None = None) -> dict[str, Any]:
    """What manifest.json says, without its hash: sealed, of a known schema, and listing nothing but the files above.

    Where a step is asked for, the folder must be of that step, and no link to somewhere else.
    """
    path = folder / MANIFEST
    if step is not None and folder.is_symlink():
        raise BadFileError(f"{folder} is a link: links are not followed.")
    raw = _read(path)
    told = atomic.json_object(path, raw, "the manifest of a checkpoint")
    atomic.check_seal(path, told, raw)
    del told["self_sha256"]
    schema, files = told.get("schema"), told.get("files")
    if type(schema) is int and schema > SCHEMA:
        raise BadFileError(
            f"{path} is of a newer dmst: its schema is {schema}, and this one reads up to {SCHEMA}. Update dmst."
        )
    if type(schema) is not int or schema < 1 or type(told.get("step")) is not int or type(told.get("context")) is not dict:
        raise BadFileError(f"{path} is not the manifest of a checkpoint: it misses schema, step or context.")
    if step not in (None, told["step"]):
        raise BadFileError(f"{folder} was renamed: it holds step {told['step']}.")
    if type(files) is not dict or not {STATE, RECIPE} <= files.keys():
        raise BadFileError(f"{path} is not the manifest of a checkpoint: it does not list {STATE} and {RECIPE}.")
    for name, stated in files.items():
        known = name in (STATE, RECIPE) or (name.endswith(TENSORS) and STEM.fullmatch(name.removesuffix(TENSORS)))
        if not known:
            raise BadFileError(f"{path} lists {name!r}, which no checkpoint has: {REFUSED}")
        if type(stated) is not dict or type(stated.get("size")) is not int or type(stated.get("sha256")) is not str:
            raise BadFileError(f"{path} states no size and sha256 of {name}: {REFUSED}")
        if name in (STATE, RECIPE) and stated["size"] > LARGEST_SMALL:
            raise BadFileError(f"{path} states {stated['size']:,} bytes of {name}, more than {LARGEST_SMALL:,}: {REFUSED}")
    sizes = [stated["size"] for name, stated in files.items() if name.endswith(TENSORS)]
    if most is not None and sum(sizes) > most + LONGEST_HEADER * len(sizes):
        raise BadFileError(
            f"{path} states {sum(sizes):,} bytes of tensors, and those of this run are at most {most:,}: nothing was read."
        )
    return told


def _files(folder: Path, told: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Each listed file, once its bytes are known to be right; one at a time in memory."""
    for name, stated in told["files"].items():
        raw = _read(folder / name, stated["size"])
        if hashlib.sha256(raw).hexdigest() != stated["sha256"]:
            raise BadFileError(f"{folder / name} is damaged: its sha256 is not the one in {MANIFEST}.")
        yield name, raw


def _read(path: Path, size: int | None = None) -> bytes:
    """The bytes of a plain file of this size (nothing states that of a manifest), and no pickle."""
    try:
        return atomic.read(path, size, most=LARGEST_MANIFEST if size is None else None)
    except OSError as error:
        raise BadFileError(f"{path} cannot be read ({error.strerror or error}).") from error
