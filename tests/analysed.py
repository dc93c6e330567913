"""What the tests of analyses share: a small network with weights at which everything matters, images, the command."""

from __future__ import annotations

from typing import Any

import torch
from typer.testing import CliRunner

from dmst import cli, create_model
from dmst.models import VisionModel

IMAGES = torch.randn(7, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def network(name: str = "dmst_digits", seed: int = 0, **options: Any) -> VisionModel:
    """Three layers of three heads of eight channels, none of its weights where they begin."""
    torch.manual_seed(seed)
    model = create_model(name, **{"dim": 24, "depth": 3, "num_heads": 3, "img_size": 8, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def analyze(*arguments: str) -> str:
    """What `dmst analyze` prints."""
    result = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(cli.app, ["analyze", *arguments])
    assert result.exit_code == 0, result.output
    return result.output
