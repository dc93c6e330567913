"""Networks: one Block, one VisionModel, four families as tables.

config.py (what decides a network)   zoo.py (the named ones)   files.py (saved ones)
vision.py = stems.py -> positions.py -> block.py x depth -> class_attention.py -> classifier
block.py  = operator + residual.py, then feedforward.py
"""

from dmst.models.block import Block, LayerTrace
from dmst.models.config import ModelConfig
from dmst.models.files import load_model, save_model
from dmst.models.vision import Trace, VisionModel
from dmst.models.zoo import create_model, list_models, model_config
from dmst.operators.orthonormal import freeze

__all__ = [
    "Block",
    "LayerTrace",
    "ModelConfig",
    "Trace",
    "VisionModel",
    "create_model",
    "freeze",
    "list_models",
    "load_model",
    "model_config",
    "save_model",
]
