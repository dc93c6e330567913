"""Programs in processes of their own that have torch from the start: each is forked from one that imported it and no more.

Importing torch is most of what a small program takes. All else is its own: modules, arguments, directory, output, exit status.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import sys
import tempfile
import warnings
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NamedTuple


class Done(NamedTuple):
    returncode: int | None
    stdout: str
    stderr: str


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    return context


def _work(program: list[str], root: str, out: str, strict: bool) -> None:
    os.chdir(root)
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(f"{out}/{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)
    if strict:
        warnings.simplefilter("error")
    option, what, *arguments = program
    sys.argv = ["-c" if option == "-c" else what, *arguments]
    sys.path.insert(0, root)
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif option == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        raise ValueError(option)


def python(*program: str, root: Path, strict: bool = False, timeout: float = 100) -> Done:
    """`python -c CODE ...` or `python -m MODULE ...`, with `strict` as under `-W error`."""
    with tempfile.TemporaryDirectory() as out:
        process = _context().Process(target=_work, args=([*program], str(root), out, strict))
        process.start()
        process.join(timeout)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        told = [path.read_text() if (path := Path(out, name)).exists() else "" for name in ("out", "err")]
    assert not late, f"{program} took more than {timeout} s:\n{told[1]}"
    return Done(process.exitcode, *told)
