"""timm with our models in it. A test that imports this is skipped, with the reason, where timm or its torchvision fails."""

from __future__ import annotations

import importlib
import os

import pytest

from dmst.errors import MissingExtraError

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when timm is imported; a refused download takes 23 s otherwise
try:
    integration = importlib.import_module("dmst.integrations.timm")
except MissingExtraError as error:
    pytest.skip(f"needs timm: {error}", allow_module_level=True)
timm = importlib.import_module("timm")
for _part in ("data", "optim", "utils"):  # import timm leaves them out
    importlib.import_module(f"timm.{_part}")
torchvision = importlib.import_module("torchvision")
importlib.import_module("torchvision.models.feature_extraction")
