"""Every image of a set is decoded once before a run begins: a bad file is named now, not in the ninth hour.

    scan(image_set, on_bad="fail")      nothing is bad, or one BadImageError lists what is
    scan(image_set, on_bad="skip")      the indices that do not count in the loss: at most 0.1 % of the set (or one image)
    scan_all({"train": ..., "eval": ...})   the same for several sets: one error lists the bad images of all of them

The result is kept in `cache`, a JSON file, by the fingerprint of the set and the version of Pillow, so that a run that resumes
does not look again and leaves out the same images. A worker that dies is an error that names the image it was at.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import PIL

from dmst import whole
from dmst.data.sets import ImageSet
from dmst.errors import BadImageError, choose

SHARE = 1000  # one image in so many may be bad
LISTED = 200
STRETCH = 64  # images that a worker is asked for at a time
STALLED = 900  # seconds without an answer
Bad = dict[int, str]  # by index, the reason


def scan(image_set: ImageSet, *, cache: Path | None = None, **options: Any) -> frozenset[int]:
    """The indices of the bad images of one set; options as of `scan_all`."""
    return scan_all({"": image_set}, caches={"": cache}, **options)[""]


def scan_all(
    sets: Mapping[str, ImageSet],
    *,
    caches: Mapping[str, Path | None],
    workers: int = 0,
    on_bad: str = "fail",
    tick: Callable[[int, int], None] | None = None,
) -> dict[str, frozenset[int]]:
    """The bad images of every set; `tick` is told how many of how many have been looked at."""
    choose("on_bad", on_bad, ("fail", "skip"))
    found: dict[str, frozenset[int]] = {}
    refused: list[BadImageError] = []
    for name, image_set in sets.items():
        cache = caches[name]
        bad = _known(cache, image_set)
        if bad is None or (bad and on_bad == "fail"):  # a file may have been mended without a change of its size
            bad = _look(image_set, workers, tick or (lambda done, total: None))
        most = min(max(1, len(image_set) // SHARE), len(image_set) - 1)
        if len(bad) > (most if on_bad == "skip" else 0):
            refused.append(_refusal(image_set, bad, on_bad, most))
            continue
        found[name] = frozenset(bad)
        if cache is not None:
            _keep(cache, image_set, bad)
    if refused:
        first, *others = refused
        raise BadImageError(first.name, "\n".join([first.reason, *map(str, others)]))
    return found


def known_bad(cache: Path, image_set: ImageSet) -> frozenset[int]:
    """What an earlier scan found bad in this set; nothing where there was none."""
    return frozenset(_known(cache, image_set) or ())


def _look(image_set: ImageSet, workers: int, tick: Callable[[int, int], None]) -> Bad:
    if image_set.pixels() is not None:  # decoded long ago
        return {}
    bad: Bad = {}
    total, done = len(image_set), 0
    stretches = [range(start, min(start + STRETCH, total)) for start in range(0, total, STRETCH)]
    workers = min(workers, len(stretches))
    for count, found in _side_by_side(image_set, stretches, workers) if workers else _one_by_one(image_set, stretches):
        bad |= found
        done += count
        tick(done, total)
    return dict(sorted(bad.items()))


def _one_by_one(image_set: ImageSet, stretches: list[range]) -> Iterator[tuple[int, Bad]]:
    for stretch in stretches:
        yield len(stretch), {i: reason for i in stretch if (reason := _reason(image_set, i))}


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


def _side_by_side(image_set: ImageSet, stretches: list[range], workers: int) -> Iterator[tuple[int, Bad]]:
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
            bad: Bad = {}
            for index in stretch:
                at.value = index
                if reason := _reason(image_set, index):
                    bad[index] = reason
            pipe.send((len(stretch), bad))


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


def _key(image_set: ImageSet) -> str:
    return f"{image_set.fingerprint} Pillow {PIL.__version__}"


def _read(cache: Path) -> dict[str, Any]:
    try:
        held = json.loads(cache.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}


def _known(cache: Path | None, image_set: ImageSet) -> Bad | None:
    """What an earlier scan found; None where there was none, or where its file is damaged."""
    held = _read(cache).get(_key(image_set)) if cache is not None else None
    try:
        bad = {int(index): str(reason) for index, reason in held["bad"].items()}  # type: ignore[index]
        sound = held["images"] == len(image_set) and all(0 <= index < len(image_set) for index in bad)  # type: ignore[index]
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    return bad if sound else None


def _keep(cache: Path, image_set: ImageSet, bad: Bad) -> None:
    held = _read(cache)
    mine = {"set": str(image_set), "images": len(image_set), "bad": {str(index): reason for index, reason in bad.items()}}
    if held.get(_key(image_set)) != mine:
        whole.write_text(cache, json.dumps(held | {_key(image_set): mine}, indent=1) + "\n")
