"""timm, also beside a torchvision of another build than torch.

PyPI's torchvision is compiled for the CUDA build of torch. Beside torch's CPU build its operators (nms and such) cannot be
loaded, and importing it fails at the first one. No network of timm's calls them, so it is enough to declare their names.

    python -m benchmarks.with_timm MODULE [ARGUMENTS]     python -m MODULE, after that
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import sys
from typing import Any

import torch


def import_timm() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when timm is imported; a refused download takes 23 s otherwise
    while True:
        try:
            importlib.import_module("torchvision")
            return importlib.import_module("timm")
        except RuntimeError as error:
            missing = re.fullmatch(r"operator (torchvision::\w+) does not exist", str(error))
            if missing is None:
                raise
            torch.library.define(missing[1], "() -> ()")
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]


if __name__ == "__main__":
    import_timm()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
