"""An area of the long run in which everything happens: cases that are fine, fail, die, hang, print."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from soak.case import Case

TITLE = "planted"


def cases(place: Path) -> Iterator[Case]:
    def fails(_: Path) -> None:
        raise AssertionError("a promise is broken")

    def dies(_: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(_: Path) -> None:
        threading.Event().wait()

    def fine(folder: Path) -> dict[str, Any]:
        assert list(folder.iterdir()) == []
        (folder / "left").write_text("x")
        print('{"case": "not one"}')
        return {"error": 2e-7}

    for i in range(6):
        yield Case("fine", f"fine {i}", fine)
    if "DMST_PLANTED" in os.environ:
        yield Case("bad", "fails", fails)
        yield Case("bad", "dies", dies)
        yield Case("bad", "hangs", hangs, 1.0)
    for i in range(6, 10):
        yield Case("fine", f"fine {i}", fine)
