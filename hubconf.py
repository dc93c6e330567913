"""torch.hub: the networks that ship, and any other by its name.

model = torch.hub.load("PATH/TO/CLONE", "dmst_cifar10", source="local")            with its weights
model = torch.hub.load("PATH/TO/CLONE", "create_model", "dmst_small", source="local")
"""

from dmst import create_model
from dmst.models.shipped import SHIPPED

dependencies = ["torch", "numpy", "PIL", "safetensors", "einops"]


def _shipped(name):
    def entry(pretrained=True, **options):
        return create_model(name, pretrained=pretrained, **options)

    entry.__name__, entry.__doc__ = name, f"{name}, by default with the weights that are in the package."
    return entry


globals().update({name: _shipped(name) for name in SHIPPED})
__all__ = ["create_model", *SHIPPED]
