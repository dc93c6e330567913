"""Every image of a set is decoded once before a run begins: a bad file is named now, not in the ninth hour.

    scan_all({"train": ..., "eval": ...}, on_bad="fail")    nothing is bad, or one BadImageError lists what is, of all sets
    on_bad="skip"                                           what is left out: at most 0.1 % of each set (or one image)

It also hashes the content of every file: names and sizes do not tell when two class folders were exchanged. The result is kept
in a JSON file, for as long as the set, its files on the disk and the version of Pillow stay: a run that resumes does not look
again, and leaves out the same images.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import PIL
from torch.utils.data import Dataset

from dmst import atomic
from dmst.data.sets import ImageSet, digest
from dmst.data.workers import through_workers
from dmst.errors import BadImageError, choose

SHARE = 1000  # one image in so many may be bad
LISTED = 200
STRETCH = 64  # images that a worker is asked for at a time
Bad = dict[int, str]  # by index, the reason


class Scanned(NamedTuple):
    bad: Bad
    content: str = ""  # one hash of all images; none where the fingerprint of the set is that


def scan_all(
    sets: Mapping[str, ImageSet],
    *,
    caches: Mapping[str, Path | None],
    workers: int = 0,
    on_bad: str = "fail",
    write: Callable[[Path, str], Any] = atomic.write_text,
) -> dict[str, Scanned]:
    """What is found in every set; `write` keeps a cache."""
    choose("on_bad", on_bad, ("fail", "skip"))
    found: dict[str, Scanned] = {}
    refused: list[BadImageError] = []
    for name, image_set in sets.items():
        scanned, text = look(image_set, caches[name], workers)
        most = min(max(1, len(image_set) // SHARE), len(image_set) - 1)
        if len(scanned.bad) > (most if on_bad == "skip" else 0):
            refused.append(_refusal(image_set, scanned.bad, on_bad, most))
            continue
        found[name] = scanned
        if (cache := caches[name]) is not None and text:
            write(cache, text)
    if refused:
        first, *others = refused
        raise BadImageError(first.name, "\n".join([first.reason, *map(str, others)]))
    return found


def look(image_set: ImageSet, cache: Path | None, workers: int = 0) -> tuple[Scanned, str]:
    """What the cache says of the set if its files are as they were, else what is found now, and the text of a new cache."""
    if image_set.pixels() is not None:  # decoded long ago
        return Scanned({}), ""
    key = digest(image_set.fingerprint, PIL.__version__, image_set.stamp())
    known = _known(cache, key) if cache else None
    if known is not None:
        return known, ""
    every = range(len(image_set))
    stretches = [every[start : start + STRETCH] for start in every[::STRETCH]]
    scanned, marks = Scanned({}), []
    for stretch, found in zip(stretches, through_workers(_Looks(image_set), stretches, workers, list), strict=True):
        scanned.bad.update((index, reason) for index, (_, reason) in zip(stretch, found, strict=True) if reason)
        marks.append(b"".join(mark for mark, _ in found))
    scanned = scanned._replace(content=digest(*marks))
    held = {"key": key, "set": str(image_set), **scanned._asdict()}
    return scanned, json.dumps(held, indent=1) + "\n"


class _Looks(Dataset):
    """By index: a hash of the image, or why it is bad."""

    def __init__(self, image_set: ImageSet) -> None:
        self.image_set = image_set

    def __getitem__(self, index: int) -> tuple[bytes, str]:
        try:
            self.image_set.read(index)
            source = self.image_set.source(index)
            raw = source if isinstance(source, bytes) else source.read_bytes()
        except Exception as error:
            return b"", getattr(error, "reason", "") or f"{type(error).__name__}: {error}"
        return hashlib.blake2b(raw, digest_size=16).digest(), ""


def _refusal(image_set: ImageSet, bad: Bad, on_bad: str, most: int) -> BadImageError:
    rows = [f"  {image_set.where(index)}: {reason}" for index, reason in list(bad.items())[:LISTED]]
    more = [f"  and {len(bad) - LISTED:,} more"] if len(bad) > LISTED else []
    rule = "" if on_bad == "fail" else f"; {most:,} may be left out"
    skip = ", or leave them out: --on-bad-image skip (data.on_bad_image in a recipe)" if len(bad) <= most else ""
    told = f"{len(bad):,} of {len(image_set):,} images cannot be used{rule}:"
    return BadImageError(str(image_set), "\n".join([told, *rows, *more, f"Replace or remove them{skip}."]))


def _known(cache: Path, key: str) -> Scanned | None:
    """What an earlier scan of the same files found; None where there was none, or where the cache is damaged."""
    try:
        held = json.loads(cache.read_text("utf-8"))
        bad = {int(index): str(reason) for index, reason in held["bad"].items()}
        return Scanned(bad, str(held["content"])) if held["key"] == key else None
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None
