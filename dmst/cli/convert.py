"""`dmst convert`."""

from __future__ import annotations

from pathlib import Path

import typer

from dmst.terminal import say

MEAN = typer.Option([], help="Mean of the pixels, 0 to 1: one number, or one per channel. ImageNet's if not given.")
STD = typer.Option([], help="Their standard deviation, likewise.")


def convert(
    weights: str = typer.Argument(help="A .safetensors file of ToST, CRATE or a timm ViT."),
    out: str = typer.Option(metavar="DIR", help="The folder of the saved model."),
    heads: int = typer.Option(None, min=1, help="Heads, where neither the weights nor a published size tells them."),
    partial: bool = typer.Option(False, help="Leave out tensors that have no place in the network."),
    mean: list[float] = MEAN,
    std: list[float] = STD,
) -> None:
    """Turn published weights into a saved model of this package.

    dmst convert vit_small.safetensors --out vit_small --mean 0.5 --std 0.5

    A .pth file is a pickle, which can run code when it is read. If you trust it, turn it into safetensors first:

    python -c "import torch, safetensors.torch as s; x = torch.load('a.pth'); s.save_file(x.get('model', x), 'a.safetensors')"
    """
    from dmst import atomic
    from dmst.errors import BadFileError, OptionError
    from dmst.models import save_model
    from dmst.models.convert import CALLED
    from dmst.models.convert import convert as converted
    from dmst.models.files import from_bytes
    from dmst.models.preprocessing import set_mean_std

    path = Path(weights)
    if path.suffix != ".safetensors":
        raise BadFileError(f"{path} is not a .safetensors file. `dmst convert --help` shows how to make one of a .pth file.")
    made = converted(from_bytes(path, atomic.read(path)), num_heads=heads, partial=partial)
    if mean or std:
        told = made.model.pretrained_cfg
        set_mean_std(told, mean, std)
        channels = len(told["mean"])
        if any(list(told[key]) != (given * channels)[:channels] for key, given in (("mean", mean), ("std", std))):
            raise OptionError(f"--mean and --std need 1 or {len(told['mean'])} numbers each, the latter above 0.")
    save_model(made.model, out)
    config = made.model.config
    say(f"{out}: {CALLED[made.layout]}, {config.depth} blocks of width {config.dim}, {config.num_heads} heads, patch "
        f"{config.patch_size}, {config.num_classes} classes")  # fmt: skip
    say("Weights do not tell everything. Taken: heads as said, GELU, the class token as readout, a square grid of patches.")
    if made.left_over:
        say(f"left out: {', '.join(made.left_over)}", style="yellow")
