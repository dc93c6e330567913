"""dmst: white-box vision transformers: layers derived from the coding rate, networks made of them, and proofs as tests.

model = dmst.create_model("dmst_small", num_classes=10)         # images (b, 3, h, w) to logits (b, 10)
trace = model.trace(images)                                     # what every layer computed on the way
update = dmst.DMSA(dim=384, num_heads=8)(tokens)                # the layer alone: (b, n, 384) to the same shape
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> the module it lives in; imported when first asked for, so that `import dmst` is quick and quiet
_HOMES = {
    "DMSA": "dmst.operators",
    "GMSA": "dmst.operators",
    "TSSA": "dmst.operators",
    "OPERATORS": "dmst.operators",
    "Parts": "dmst.operators",
    "Spatial": "dmst.operators",
    "ModelConfig": "dmst.models",
    "VisionModel": "dmst.models",
    "create_model": "dmst.models",
    "export_model": "dmst.export.files",
    "freeze": "dmst.models",
    "list_models": "dmst.models",
    "load_model": "dmst.models",
    "push_to_hub": "dmst.models.hub",
    "save_model": "dmst.models",
    "use_kernels": "dmst.kernels",
}
_MODULES = ("analysis", "errors", "kernels", "models", "objective", "operators", "rotary", "sparsemax", "testing")

if TYPE_CHECKING:
    from dmst import analysis, errors, kernels, models, objective, operators, rotary, sparsemax, testing
    from dmst.export.files import export_model
    from dmst.kernels import use_kernels
    from dmst.models import ModelConfig, VisionModel, create_model, freeze, list_models, load_model, save_model
    from dmst.models.hub import push_to_hub
    from dmst.operators import DMSA, GMSA, OPERATORS, TSSA, Parts, Spatial

__all__ = [
    "DMSA", "GMSA", "OPERATORS", "TSSA", "ModelConfig", "Parts", "Spatial", "VisionModel", "__version__",
    "analysis", "create_model", "errors", "export_model", "freeze", "kernels", "list_models", "load_model", "models",
    "objective", "operators", "push_to_hub", "rotary", "save_model", "sparsemax", "testing", "use_kernels",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dmst.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dmst' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
