"""The [augment] section of a recipe: what happens to an image between the set and the model. In this order:

    resized_crop | resize      crop_padding, flip      rotate, zoom, shift      aa | color_jitter
    normalise                  reprob                  cutout                   mixup, cutmix

All of it happens on the device, on whole batches; large images are first cut to size by worker processes, resized_crop or
resize. Of images that are on the device already, crop_padding and flip, exact moves of pixels, come before the resizing. Names
and meanings are timm's where it has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from dmst.data import rand_augment
from dmst.settings import Settings, setting


@dataclass(frozen=True)
class Augment(Settings):
    resized_crop: float = setting(
        0.0, "least share of the area in a random resized crop, ratio 3/4 to 4/3; 0: none", low=0, high=1
    )
    crop_padding: int = setting(0, "pad by reflection by so many pixels, then crop at random: small images", low=0)
    flip: float = setting(0.0, "probability of a mirrored image", low=0, high=1)
    rotate: float = setting(0.0, "turn by up to so many degrees either way; what comes into view is black", low=0, high=180)
    zoom: float = setting(0.0, "enlarge or shrink by up to a factor of 1 + zoom; what comes into view is black", low=0, high=9)
    shift: float = setting(0.0, "move by up to so many pixels along each axis; what comes into view is black", low=0)
    interpolation: str = setting("bicubic", "how pixels are interpolated", choices=("bicubic", "bilinear"))
    aa: str = setting(
        "", "RandAugment in timm's words, rand-m9-mstd0.5-inc1: magnitude m, layers n, probability p, spread mstd"
    )
    color_jitter: float = setting(
        0.0, "change brightness, contrast and colour by up to this share; not used beside aa", low=0, high=1
    )
    reprob: float = setting(0.0, "probability of random erasing, by noise, 2 to 33 % of the area", low=0, high=1)
    cutout: int = setting(0, "side in pixels of a square set to the mean colour; its centre is anywhere in the image", low=0)
    mixup: float = setting(0.0, "alpha of mixup; 0: none", low=0, high=100)
    cutmix: float = setting(0.0, "alpha of cutmix; 0: none", low=0, high=100)
    mixup_prob: float = setting(1.0, "probability that a pair, or a batch, is mixed", low=0, high=1)
    mixup_switch_prob: float = setting(0.5, "probability of cutmix where mixup is set as well", low=0, high=1)
    mixup_mode: str = setting(
        "pair",
        "pair: neighbours, each pair its own share; batch: one share, the batch reversed, as timm",
        choices=("pair", "batch"),
    )
    repeats: int = setting(
        1, "repeated augmentation: each image so many times; an epoch is then floor(n / 256) * 256 samples", low=1, high=100
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rand_augment.read_policy(self.aa)

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    @property
    def moves(self) -> bool:
        """Whether pixels are interpolated, beyond what another size of the image asks for."""
        return max(self.resized_crop, self.rotate, self.zoom, self.shift) > 0
