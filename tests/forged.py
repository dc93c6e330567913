"""Files that no run of dmst would write: other contents under right hashes, and pickles that would run code."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

WEIGHTS, CONFIG, MANIFEST = "model.safetensors", "config.json", "manifest.json"
Change = Callable[[dict[str, Any]], Any]


def seal(told: dict[str, Any]) -> bytes:
    """Indented JSON whose last entry is the sha256 of the same without it: a second writing of the format."""
    body = {key: value for key, value in told.items() if key != "self_sha256"}
    digest = hashlib.sha256(json.dumps(body, indent=2).encode()).hexdigest()
    return (json.dumps(body | {"self_sha256": digest}, indent=2) + "\n").encode()


def listed(raw: bytes) -> dict[str, Any]:
    return {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def forge(folder: Path, files: dict[str, bytes] | None = None, change: Change = lambda told: None) -> Path:
    """Other files, or another manifest or config, of a checkpoint or a saved model, under right hashes."""
    last = folder / (MANIFEST if (folder / MANIFEST).exists() else CONFIG)
    told = json.loads(last.read_bytes())
    stated = told["files"] if last.name == MANIFEST else told["dmst"]["files"]
    for name, raw in (files or {}).items():
        (folder / name).write_bytes(raw)
        stated[name] = listed(raw)
    change(told)
    last.write_bytes(seal(told))
    return folder


def put(*keys: str, value: Any) -> Change:
    """A change that sets one entry, however deep."""

    def change(told: dict[str, Any]) -> None:
        for key in keys[:-1]:
            told = told[key]
        told[keys[-1]] = value

    return change


def grown(folder: Path, name: str, size: int) -> Path:
    """A file grows to `size`, of which the disk holds no more than before; the manifest or config says so too."""
    os.truncate(folder / name, size)
    where = ("files",) if (folder / MANIFEST).exists() else ("dmst", "files")
    return forge(folder, change=put(*where, name, "size", value=size))


def header_length(raw: bytes) -> int:
    """Of a safetensors file, with the eight bytes before it."""
    return 8 + struct.unpack("<Q", raw[:8])[0]


def with_header(told: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    body = told if isinstance(told, bytes) else json.dumps(told).encode()
    return struct.pack("<Q", len(body)) + body + data


def harmed(raw: bytes, draw: random.Random, count: int) -> Iterator[bytes]:
    """The same bytes cut off, with more after them, all zero, and with one bit flipped: `count` in the header, and anywhere."""
    yield from (raw[:cut] for cut in (0, 1, 8, len(raw) - 1, *(draw.randrange(len(raw)) for _ in range(10))))
    yield from (raw + b"\0", raw + b"\n", raw + raw, bytes(len(raw)), b"\xef\xbb\xbf" + raw)
    head = len(raw) if raw.startswith(b"{") else header_length(raw)
    for size in [head, len(raw)] * count:
        bit, flipped = draw.randrange(8 * size), bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


class Canary:
    """A pickle of this makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def pickled(how: str, canary: Path, scratch: Path) -> bytes:
    """`how` is "protocol 0" to "protocol 5", "torch.save" or "torch.save of old"."""
    payload = {"head.bias": Canary(canary)}
    if how.startswith("protocol"):
        return pickle.dumps(payload, protocol=int(how[-1]))
    torch.save(payload, scratch, _use_new_zipfile_serialization=how == "torch.save")
    return scratch.read_bytes()
