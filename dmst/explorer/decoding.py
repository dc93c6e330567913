"""Pictures that nobody vouches for, decoded in a child process: it imports Pillow and not torch, and may fail or be killed.

    parent                                 child: python -m dmst.explorer.decoding
    grey (1 byte), length (4), bytes   ->  dmst.data.images.decode, under limits of memory, files and time
    0, height, width, channels, pixels <-  a picture
    1, length, words                   <-  why there is none
    nothing more                       <-  it was killed: the next picture gets a new child

One child is kept warm, and one picture is decoded at a time. Nothing is written anywhere.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import numpy as np

import dmst
from dmst.data import images
from dmst.errors import BadImageError

SECONDS = 5.0  # a picture
MEMORY = 1536 * 2**20  # bytes of address space of the child, of which Python and its libraries take a third
NAME = "the picture"
ASKED, TOLD = struct.Struct("<?I"), struct.Struct("<?III")


class Decoder:
    """The parent's end. Any thread may ask."""

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self.seconds, self.memory = seconds, memory
        self._lock = threading.Lock()
        self._child = self._start()

    def decode(self, raw: bytes, *, grey: bool = False) -> np.ndarray:
        """(h, w, 3) or (h, w, 1) uint8, as `dmst.data.images.decode` has it; raises BadImageError."""
        with self._lock:
            if self._child.poll() is not None:
                self._end()
                self._child = self._start()
            late = threading.Timer(self.seconds, self._kill)
            late.start()
            try:
                return _ask(self._child, raw, grey)
            except (OSError, EOFError):  # it is gone
                self._end()
                raise BadImageError(
                    NAME, f"it takes more than {self.seconds:g} s or too much memory: make it smaller"
                ) from None
            finally:
                late.cancel()
                late.join()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def _end(self) -> None:
        self._kill()
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):  # of what was not sent yet
                if pipe is not None:
                    pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        here = os.pathsep.join([str(Path(dmst.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": here, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "dmst.explorer.decoding", str(self.memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent
        )


def _ask(child: subprocess.Popen[bytes], raw: bytes, grey: bool) -> np.ndarray:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(ASKED.pack(grey, len(raw)))
    child.stdin.write(raw)
    child.stdin.flush()
    refused, *shape = TOLD.unpack(_read(child.stdout, TOLD.size))
    if refused:
        raise BadImageError(NAME, _read(child.stdout, shape[0]).decode())
    return np.frombuffer(_read(child.stdout, shape[0] * shape[1] * shape[2]), np.uint8).reshape(shape)


def _read(pipe: IO[bytes], count: int) -> bytes:
    found = pipe.read(count)
    if len(found) < count:
        raise EOFError
    return found


def answer(asked: IO[bytes], told: IO[bytes]) -> None:
    """The child: one picture after another, until the parent is gone."""
    while len(head := asked.read(ASKED.size)) == ASKED.size:
        grey, length = ASKED.unpack(head)
        try:
            pixels = images.decode(asked.read(length), NAME, grey=grey)
        except BadImageError as error:
            words = error.reason.encode()
            told.write(TOLD.pack(True, len(words), 0, 0) + words)
        else:
            told.write(TOLD.pack(False, *pixels.shape))
            told.write(np.ascontiguousarray(pixels).data)
        told.flush()


def _limit(memory: int) -> None:
    with contextlib.suppress(ImportError):  # of Windows
        import resource

        limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
        for what, most in limits.items():
            resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    _limit(int(sys.argv[1]))
    answer(sys.stdin.buffer, sys.stdout.buffer)
