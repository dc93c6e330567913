"""Which networks are compared, each by a name that says what it is: [timm:]NAME[:OPERATOR].

    vit_small                     ViT-S by our code, softmax attention: the skeleton
    vit_small:dmsa                the same skeleton; the operator alone is exchanged
    dmst_small                    DMST-S: conv stem, Fourier positions, class attention
    timm:vit_small_patch16_224    timm's, where timm can be imported
    timm:xcit_small_12_p16_224

NAME is any model of the zoo (`dmst models`), or of timm's registry. Weights are fresh, from one seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from dmst import provenance
from dmst.errors import MissingExtraError, OptionError, need
from dmst.kernels import choice, closed_form, reference, silent
from dmst.models.zoo import create_model, model_config
from dmst.operators import OPERATORS
from dmst.operators.family import TokenStatistics

SKELETON, EXCHANGED, OURS = "vit_small", "vit_small:dmsa", "dmst_small"
TIMM_VIT, TIMM_XCIT = "timm:vit_small_patch16_224", "timm:xcit_small_12_p16_224"
DEFAULT = (SKELETON, EXCHANGED, OURS, TIMM_VIT, TIMM_XCIT)
SEED = 0
KERNELS = {closed_form.attend: "closed form", silent.attend: "silent heads skipped", reference.attend: "reference"}


class Network(NamedTuple):
    name: str
    operator: str | None  # None: the model's own
    theirs: bool  # timm's


def parse(what: str) -> Network:
    """The parts of a name, or an error that says which part is unknown. timm's own names are asked of timm, later."""
    rest = what.removeprefix("timm:")
    if rest != what:
        return Network(rest, None, True)
    name, _, operator = what.partition(":")
    if operator:
        OPERATORS.find(operator)
    model_config(name)
    return Network(name, operator or None, False)


def parse_all(text: str | None) -> list[str]:
    """The names in "vit_small,dmst_small:tssa"; the default ones where nothing is asked."""
    names = [part.strip() for part in text.split(",")] if text else list(DEFAULT)
    for name in names:
        parse(name)
    return list(dict.fromkeys(names))


def left_out(what: str, pixels: int) -> str:
    """Why this network cannot be measured here at this size; nothing where it can."""
    network = parse(what)
    try:
        if network.theirs:
            if not need("timm", "timm").is_model(network.name):
                return "timm has no model of this name"
        else:
            model_config(network.name, operator=network.operator, img_size=pixels)
    except (MissingExtraError, OptionError) as error:
        return str(error)
    return ""


def build(what: str, pixels: int, device: torch.device) -> nn.Module:
    """The network for images of this size, in float32."""
    network = parse(what)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        if network.theirs:
            model = need("timm", "timm").create_model(network.name, pretrained=False, img_size=pixels)
        else:
            model = create_model(network.name, operator=network.operator, img_size=pixels)
    return model.to(device)


def versions(names: Iterable[str]) -> dict[str, Any]:
    """Of what is measured; timm's where it takes part."""
    found: dict[str, Any] = provenance.versions()
    return found | {"timm": need("timm", "timm").__version__} if any(parse(what).theirs for what in names) else found


def channels(what: str) -> int:
    """Of an image."""
    network = parse(what)
    return 3 if network.theirs else model_config(network.name).in_chans


def kernel(model: nn.Module, device: torch.device, dtype: torch.dtype, compiled: bool) -> str:
    """What computes the operators of a network of ours here, inference / training where they differ; as `dmst doctor` asks."""
    operator = model.get_submodule("blocks.0.operator")
    if not isinstance(operator, TokenStatistics):
        return f"torch ({type(operator).__name__})"
    z = torch.empty(1, 4, operator.dim, device=device)  # float32 tokens and products in `dtype`, as autocast has them
    found = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            chosen = choice.kernel_for(z, operator.weights(), operator.form, dtype)
        name = KERNELS.get(chosen, "fused")
        found.append("reference" if compiled and name != "fused" else name)
    return " / ".join(dict.fromkeys(found))
