"""Does the cases of an area, told to its parent line by line: {"total"}, for each {"begin"} and what it came to, {"end"}.

python -m soak.worker AREA K JOBS     every JOBS-th case from the K-th on, but for names that come on standard input
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from soak.case import module_of


def tell(told: dict[str, Any]) -> None:
    os.write(OUT, (json.dumps(told) + "\n").encode())


def main(area: str, k: int, jobs: int, most: int) -> None:
    done = set(json.load(sys.stdin))
    module = module_of(area)
    place = Path(tempfile.mkdtemp(prefix=f"soak-{area}-"))
    try:
        every = list(module.cases(place))
        if most:
            every = [case for row in dict.fromkeys(x.row for x in every) for case in [x for x in every if x.row == row][:most]]
        assert len({case.name for case in every}) == len(every), f"two cases of {area} have one name"
        tell({"total": len(every)})
        for case in every[k::jobs]:
            if case.name in done:
                continue
            tell({"begin": case.name, "row": case.row, "limit": case.limit})
            folder = place / "case"
            folder.mkdir()
            began, told = time.monotonic(), {"row": case.row, "case": case.name, "ok": True}
            try:
                told |= case.check(folder) or {}
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                traceback.print_exc()
                told |= {"ok": False, "why": f"{type(error).__name__}: {error}"[:400]}
            told["s"] = round(time.monotonic() - began, 3)
            shutil.rmtree(folder, ignore_errors=True)
            tell(told)
        tell({"end": True})  # a process that a case left behind may keep the pipe open
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    OUT = os.dup(1)  # what a case prints must not mix with what is told
    os.dup2(2, 1)
    torch.set_num_threads(1)
    main(sys.argv[1], *map(int, sys.argv[2:5]))
