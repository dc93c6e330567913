"""Every image of a set is decoded once before a run begins: a bad file is named now, not in the ninth hour.

    scan(image_set, on_bad="fail")      nothing is bad, or one BadImageError lists what is
    scan(image_set, on_bad="skip")      the indices that do not count in the loss: at most 0.1 % of the set (or one image)
    scan_all({"train": ..., "eval": ...})   the same for several sets: one error lists the bad images of all of them

It also hashes the content of every file: names and sizes do not tell when two class folders were exchanged. The result is kept
in `cache`, a JSON file, by the fingerprint of the set and the version of Pillow, for as long as no file has another size, time
or place on the disk, so that a run that resumes does not look again and leaves out the same images. A worker that dies is an
error that names the image it was at.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import PIL

from dmst import atomic
from dmst.data.sets import ImageSet, digest
from dmst.errors import BadImageError, choose

SHARE = 1000  # one image in so many may be bad
LISTED = 200
STRETCH = 64  # images that a worker is asked for at a time
STALLED = 900  # seconds without an answer
Bad = dict[int, str]  # by index, the reason
Answer = tuple[range, Bad, bytes]  # of a stretch; the bytes are a hash of each image


class Scanned(NamedTuple):
    bad: Bad
    content: str = ""  # one hash of all images; none where the fingerprint of the set is that


def scan(image_set: ImageSet, *, cache: Path | None = None, **options: Any) -> frozenset[int]:
    """The indices of the bad images of one set; options as of `scan_all`."""
    return frozenset(scan_all({"": image_set}, caches={"": cache}, **options)[""].bad)


def scan_all(
    sets: Mapping[str, ImageSet],
    *,
    caches: Mapping[str, Path | None],
    workers: int = 0,
    on_bad: str = "fail",
    tick: Callable[[int, int], None] | None = None,
    write: Callable[[Path, str], Any] = atomic.write_text,
) -> dict[str, Scanned]:
    """What is found in every set; `tick` is told how many of how many images have been looked at, `write` keeps a cache."""
    choose("on_bad", on_bad, ("fail", "skip"))
    found: dict[str, Scanned] = {}
    refused: list[BadImageError] = []
    for name, image_set in sets.items():
        scanned, text = look(image_set, caches[name], workers, tick)
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


def look(
    image_set: ImageSet, cache: Path | None, workers: int = 0, tick: Callable[[int, int], None] | None = None
) -> tuple[Scanned, str]:
    """What the cache says of the set if its files are as they were, else what is found now, and the text of a new cache."""
    if image_set.pixels() is not None:  # decoded long ago
        return Scanned({}), ""
    held, key, stamp = _read(cache) if cache else {}, f"{image_set.fingerprint} Pillow {PIL.__version__}", image_set.stamp()
    known = _known(held.get(key), image_set, stamp)
    if known is not None:
        return known, ""
    scanned = _look(image_set, workers, tick or (lambda done, total: None))
    bad = {str(index): reason for index, reason in scanned.bad.items()}
    mine = {"set": str(image_set), "images": len(image_set), "bad": bad, "stamp": stamp, "content": scanned.content}
    return scanned, json.dumps(held | {key: mine}, indent=1) + "\n"


def _look(image_set: ImageSet, workers: int, tick: Callable[[int, int], None]) -> Scanned:
    bad: Bad = {}
    hashes: dict[int, bytes] = {}
    total, done = len(image_set), 0
    stretches = [range(start, min(start + STRETCH, total)) for start in range(0, total, STRETCH)]
    workers = min(workers, len(stretches))
    each = _side_by_side(image_set, stretches, workers) if workers else (_answer(image_set, x) for x in stretches)
    for stretch, found, marks in each:
        bad |= found
        hashes[stretch.start] = marks
        done += len(stretch)
        tick(done, total)
    return Scanned(dict(sorted(bad.items())), digest(*(hashes[start] for start in sorted(hashes))))


def _answer(image_set: ImageSet, stretch: range, at: Any = None) -> Answer:
    """What is bad in a stretch, and a hash of each image; `at` is told which image comes next."""
    bad: Bad = {}
    marks = []
    for index in stretch:
        if at is not None:
            at.value = index
        if reason := _reason(image_set, index):
            bad[index] = reason
        marks.append(b"" if reason else _hash(image_set.source(index)))
    return stretch, bad, b"".join(marks)


def _hash(source: bytes | Path) -> bytes:
    raw = source if isinstance(source, bytes) else source.read_bytes()
    return hashlib.blake2b(raw, digest_size=16).digest()


def _reason(image_set: ImageSet, index: int) -> str:
    """Why this image is bad; nothing, if it is not."""
    try:
        image_set.read(index)
    except BadImageError as error:
        return error.reason or str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- in other processes -----------------------------------------------------------------------------------------------


def _side_by_side(image_set: ImageSet, stretches: list[range], workers: int) -> Iterator[Answer]:
    """In fresh processes, not in forks of this one: a fork of a process with threads may never wake up."""
    context = multiprocessing.get_context("spawn")
    left = iter(stretches)
    staff: dict[Any, tuple[Any, Any]] = {}  # by its pipe, a worker and the number of the image it is at
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            at = context.RawValue("q", -1)
            worker = context.Process(target=_work, args=(image_set, theirs, at), daemon=True)
            worker.start()
            theirs.close()  # so that its end is seen when it dies
            staff[ours] = worker, at
            with suppress(OSError):
                ours.send(next(left))
        while staff:
            ready: list[Any] = wait(list(staff), STALLED)
            if not ready:
                raise _stall(image_set, [at.value for _, at in staff.values()])
            for pipe in ready:
                worker, at = staff[pipe]
                try:
                    answer, stretch = pipe.recv(), next(left, None)
                    pipe.send(stretch)
                except (EOFError, OSError):
                    worker.join()
                    raise _death(image_set, at.value, worker.exitcode) from None
                if stretch is None:
                    worker.join()
                    staff.pop(pipe)
                    pipe.close()
                yield answer
    finally:
        for pipe, (worker, _) in staff.items():
            worker.kill()
            worker.join()
            pipe.close()


def _work(image_set: ImageSet, pipe: Connection, at: Any) -> None:
    """A worker: stretches in, bad images out, until there is nothing more, or nobody."""
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while (stretch := pipe.recv()) is not None:
            pipe.send(_answer(image_set, stretch, at))


def _death(image_set: ImageSet, index: int, status: int | None) -> BadImageError:
    if index < 0:
        return BadImageError(
            str(image_set),
            f"a worker process ended before it began (status {status}): put the code of your script under "
            'if __name__ == "__main__":, or use workers=0',
        )
    how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
    return BadImageError(
        image_set.where(index),
        f"the process that decoded it {how}. Signal 9 usually means that memory ran out: use fewer workers, or check this file",
    )


def _stall(image_set: ImageSet, at: list[int]) -> BadImageError:
    names = ", ".join(image_set.where(max(index, 0)) for index in at)
    return BadImageError(names, f"no image was decoded for {STALLED:,} seconds: check these files and their disk")


# --- what is told and kept --------------------------------------------------------------------------------------------


def _refusal(image_set: ImageSet, bad: Bad, on_bad: str, most: int) -> BadImageError:
    rows = [f"  {image_set.where(index)}: {reason}" for index, reason in list(bad.items())[:LISTED]]
    more = [f"  and {len(bad) - LISTED:,} more"] if len(bad) > LISTED else []
    rule = "" if on_bad == "fail" else f"; {most:,} may be left out"
    skip = ", or leave them out: --on-bad-image skip (data.on_bad_image in a recipe)" if len(bad) <= most else ""
    told = f"{len(bad):,} of {len(image_set):,} images cannot be used{rule}:"
    return BadImageError(str(image_set), "\n".join([told, *rows, *more, f"Replace or remove them{skip}."]))


def _read(cache: Path) -> dict[str, Any]:
    try:
        held = json.loads(cache.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}


def _known(held: Any, image_set: ImageSet, stamp: str) -> Scanned | None:
    """What an earlier scan found; None where there was none, where files have changed, or where the cache is damaged."""
    try:
        bad = {int(index): str(reason) for index, reason in held["bad"].items()}
        sound = held["images"] == len(image_set) and all(0 <= index < len(image_set) for index in bad)
        return Scanned(bad, str(held["content"])) if sound and held["stamp"] == stamp else None
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
