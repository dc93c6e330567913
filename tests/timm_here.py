"""timm with our models in it, also where torchvision is built for another torch than the one installed. Tests only.

Such a torchvision does not load its extension and then misses two operators while it is imported. None of timm's models calls
them, so they are declared by name and the import is tried again. Where torchvision imports, nothing of this happens: its own
extension declares them, and a second declaration would be an error.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

import pytest
import torch

MISSING = "operator torchvision::nms does not exist"
_declared: list[torch.library.Library] = []  # a Library that is collected takes its operators along


def import_torchvision() -> ModuleType:
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if MISSING not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]  # the half that was imported
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    return importlib.import_module("torchvision")


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when timm is imported; a refused download takes 23 s otherwise
try:
    import_torchvision()
    timm = importlib.import_module("timm")
except ImportError as missing:
    pytest.skip(f"needs the extra timm: {missing}", allow_module_level=True)
for _part in ("data", "optim", "utils"):  # import timm leaves them out
    importlib.import_module(f"timm.{_part}")
integration = importlib.import_module("dmst.integrations.timm")
