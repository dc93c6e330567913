"""timm with our models in it. A test that imports this is skipped, with the reason, where timm or its torchvision fails."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.with_timm import import_timm

try:
    timm = import_timm()
except (ImportError, RuntimeError) as error:
    pytest.skip(f"needs timm: {error}", allow_module_level=True)
integration = importlib.import_module("dmst.integrations.timm")
for _part in ("data", "optim", "utils"):  # import timm leaves them out
    importlib.import_module(f"timm.{_part}")
torchvision = importlib.import_module("torchvision")
importlib.import_module("torchvision.models.feature_extraction")
