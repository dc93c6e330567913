"""VisionModel: images (b, c, h, w) -> stem -> + position -> blocks -> readout -> classifier -> logits (b, classes).

    model(images)                     one tensor, in training and evaluation
    model.trace(images)               the logits and what every layer computed on the way
    model.forward_intermediates(...)  feature maps, as timm's models give them

Any height and width that the patch divides. Methods keep the names and meanings of timm's models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dmst import tracing
from dmst.errors import OptionError, choose
from dmst.models.block import Block, LayerTrace
from dmst.models.class_attention import ClassAttentionBlock
from dmst.models.config import ModelConfig
from dmst.models.hub import HubMethods
from dmst.models.positions import POSITIONS
from dmst.models.preprocessing import patch_grid, pretrained_cfg
from dmst.models.stems import STEMS
from dmst.operators.base import linear, start

Grid = tuple[int, int]
torch.fx.wrap("patch_grid")  # torch.fx must not look inside: it branches on shapes


@torch.fx.wrap
def _promoted(x: Tensor, other: Tensor) -> Tensor:
    """x in the dtype that it would share with another."""
    return x.to(torch.promote_types(x.dtype, other.dtype))


class Trace(NamedTuple):
    """What a model did to some images."""

    logits: Tensor  # (b, classes)
    grid: Grid  # rows and columns of patches
    prefix: int  # tokens before the patches in every layer
    layers: list[LayerTrace]


class VisionModel(HubMethods, nn.Module):
    def __init__(self, config: ModelConfig, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.config = config
        self.stem = STEMS[config.stem](config, **factory)
        self.position = POSITIONS[config.position](config, **factory)
        self.cls_token = None if config.readout == "mean" else nn.Parameter(torch.empty(1, 1, config.dim, **factory))
        self.blocks = nn.ModuleList(Block(config, **factory) for _ in range(config.depth))
        count = config.readout_depth if config.readout == "class_attention" else 0
        self.class_blocks = nn.ModuleList(ClassAttentionBlock(config, **factory) for _ in range(count))
        self.norm: nn.Module = nn.LayerNorm(config.dim, eps=config.norm_eps, **factory)
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head: nn.Module = self._classifier(config.num_classes, **factory)
        self.grad_checkpointing = False
        self.class_names: tuple[str, ...] = ()  # of the classifier's outputs, where they are known
        self.pretrained_cfg = self.default_cfg = pretrained_cfg(config)  # two names of timm for one thing
        self.reset_parameters()

    # --- from images to logits ---------------------------------------------------------------------------------------

    def forward(self, images: Tensor) -> Tensor:
        alone = isinstance(images, Tensor) and self._pools_class_token()  # a graph of torch.fx is asked for any of its nodes
        return self.forward_head(self.finish(self._through(images), alone))

    def forward_features(self, images: Tensor) -> Tensor:
        """Every token at the end, normed: (b, 1 + n, d), or (b, n, d) with readout "mean"."""
        return self.finish(self._through(images))

    def _through(self, images: Tensor) -> Tensor:
        """The tokens after the blocks."""
        z, grid = self.embed(images)
        for block in self.blocks:
            z = self._run(block, z, grid)
        return z

    def embed(self, images: Tensor) -> tuple[Tensor, Grid]:
        """The tokens that the first block reads, and the grid of their patches."""
        name, in_chans, size = self.config.name, self.config.in_chans, self.config.patch_size
        grid = patch_grid(images, self._weight().dtype, name=name, in_chans=in_chans, patch_size=size)
        z = self.stem(images)
        if self.config.prefix:
            z = torch.cat((self._token(z), z), 1)
        z = self.position(z, grid)
        return _promoted(z, self._weight()), grid  # a stream of the weights' dtype, also under autocast

    def finish(self, z: Tensor, alone: bool = False) -> Tensor:
        """From the last block to the classifier's tokens: class attention where there is some, and the norm. `alone`: of the
        class token only, (b, 1, d), so that the last class block leaves the patches as they are."""
        if self.config.readout == "class_attention":
            cls = self._token(z)
            cls, z = _promoted(cls, z), _promoted(z, cls)
            for i, block in enumerate(self.class_blocks, 1):
                cls, z = self._run(block, cls, z, alone and i == len(self.class_blocks))
            z = cls if alone else torch.cat((cls, z), 1)
        return self.norm(z)

    def _pools_class_token(self) -> bool:
        """Whether nobody asks for the patches after the last class block: no pool of theirs, no hook."""
        asked = self.config.readout == "class_attention" and self.config.global_pool == "token"
        return asked and tracing.is_plain(self.norm, *self.class_blocks[-1:])

    def forward_head(self, z: Tensor, pre_logits: bool = False) -> Tensor:
        z = self.head_drop(self._pool(z))
        return z if pre_logits else self.head(z)

    def trace(self, images: Tensor) -> Trace:
        """The logits, and for every layer its tokens and Parts: what the model computes, in any state and on any kernel."""
        z, grid = self.embed(images)
        layers: list[LayerTrace] = []
        for block in self.blocks:
            layers.append(block.trace(z, grid))  # type: ignore[operator]
            z = layers[-1].after_feedforward
        logits = self.forward_head(self.finish(z, self._pools_class_token()))
        return Trace(logits, grid, self.config.prefix, layers)

    # --- feature maps ------------------------------------------------------------------------------------------------

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        row = {"num_chs": self.config.dim, "reduction": self.config.patch_size}
        return [{"module": f"blocks.{i}", **row} for i in range(len(self.blocks))]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The tokens after the blocks `indices` (an int: the last so many; None: all), as maps (NCHW) or sequences (NLC).

        Returns (final, maps) with final as `forward_features` gives it, or the maps alone.
        """
        output_fmt = choose("output_fmt", getattr(output_fmt, "value", output_fmt), ("NCHW", "NLC"))  # timm's is an Enum
        taken = self._indices(indices)
        z, grid = self.embed(x)
        prefix, maps = self.config.prefix, []
        for i, block in enumerate(self.blocks[: taken[-1] + 1] if stop_early else self.blocks):
            z = self._run(block, z, grid)
            if i in taken:
                seen = self.norm(z) if norm else z
                tokens = seen[:, prefix:]
                if output_fmt == "NCHW":
                    tokens = rearrange(tokens, "b (h w) d -> b d h w", h=grid[0]).contiguous()
                maps.append((tokens, seen[:, :prefix]) if return_prefix_tokens else tokens)
        return maps if intermediates_only else (self.finish(z), maps)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] | None = None, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the last of `indices`; with `prune_head` the head too."""
        taken = self._indices(indices)
        self.blocks = self.blocks[: taken[-1] + 1]
        self.config = replace(self.config, depth=len(self.blocks))
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
            self.class_blocks = nn.ModuleList()
            self.config = replace(self.config, readout_depth=0)
        return taken

    # --- the classifier ----------------------------------------------------------------------------------------------

    @property
    def num_classes(self) -> int:
        return self.config.num_classes

    @property
    def num_features(self) -> int:
        return self.config.dim

    embed_dim = head_hidden_size = num_features

    @property
    def global_pool(self) -> str | None:
        return self.config.global_pool

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches inside the blocks, so in the intermediates. `forward_features` has one more where class
        attention brings the class token in after them.
        """
        return self.config.prefix

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh classifier for another number of classes; 0 leaves the features."""
        pool = self.config.global_pool if global_pool is None else global_pool
        config = replace(self.config, num_classes=num_classes, global_pool=pool)
        weight = next(self.blocks.parameters())
        self.head = self._classifier(num_classes, device=weight.device, dtype=weight.dtype)
        self.config, self.class_names = config, ()

    # --- training ----------------------------------------------------------------------------------------------------

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep one tensor per block, and compute activations again in the backward pass."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters, besides biases and norms, that should not be decayed: tokens, positions, scales, temperatures."""
        ends = ("cls_token", "position.table", ".scale", ".temperature", ".theta")
        return {name for name, _ in self.named_parameters() if name.endswith(ends)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that group parameters by depth, for layer-wise learning rates."""
        # the rest, with coarse also class_blocks and norm, comes last; (99999,) is timm's word for "with the group before"
        ends = {} if coarse else {"class_blocks": [(r"^class_blocks\.(\d+)", None), (r"^norm", (99999,))]}
        return {"stem": r"^cls_token|^position|^stem", "blocks": r"^blocks\.(\d+)", **ends}

    def reset_parameters(self) -> None:
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=self.config.token_std)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Start anew in place: after `to_empty`, or for another seed. Children first, so that a parent has the last word."""
        for module in reversed(list(self.modules())):
            reset = getattr(module, "reset_parameters", None)
            if type(module) is nn.Linear:
                start(module)
            elif callable(reset):
                reset()

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _classifier(self, num_classes: int, **factory: Any) -> nn.Module:
        return linear(self.config.dim, num_classes, **factory) if num_classes else nn.Identity()

    def _run(self, block: nn.Module, *args: Any) -> Any:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False)
        return block(*args)

    def _weight(self) -> Tensor:
        """One of the weights, by name: a replica of DataParallel has no parameters()."""
        return self.stem.get_submodule(self.stem.first).weight  # type: ignore[return-value]

    def _token(self, z: Tensor) -> Tensor:
        assert self.cls_token is not None
        return self.cls_token.expand(z.shape[0], -1, -1)

    def _pool(self, z: Tensor) -> Tensor:
        if self.config.global_pool == "token":
            return z[:, 0]
        return z[:, int(self.cls_token is not None) :].mean(1) if self.config.global_pool == "avg" else z

    def _indices(self, indices: int | Sequence[int] | None) -> list[int]:
        depth = len(self.blocks)
        if indices is None:
            return list(range(depth))
        if isinstance(indices, int):
            taken = list(range(depth - indices, depth))
        else:
            taken = sorted({i + depth if i < 0 else i for i in map(index, indices)})
        if not taken or taken[0] < 0 or taken[-1] >= depth:
            raise OptionError(f"indices are {indices!r}: the model has blocks 0 to {depth - 1}.")
        return taken
