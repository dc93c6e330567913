"""The training engine on a GPU: recorded steps, bfloat16, compiled input; a run that is cut goes on to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dmst.data import catalog
from dmst.data.augment import Augment
from dmst.data.loader import TrainStream, View
from dmst.engine.train_loop import train
from dmst.engine.train_step import without_cudnn_attention
from tests.runs import Cut, CutAfter, digests, tensors, tiny

pytestmark = pytest.mark.gpu
RANDOM = ["model.options.drop_path_rate=0.2", "model.options.drop_rate=0.1", "optim.model_ema=0.9", "run.save_every=3"]
WAYS = {
    "plain": [],
    "bf16": ["run.amp=bf16"],
    "graph": ["run.graph=true"],
    "graph, bf16": ["run.graph=true", "run.amp=bf16"],
    "graph, orthonormal": ["run.graph=true", "model.options.mode=proximal"],
    "fp16": ["run.amp=fp16"],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_cut_ends_in_the_same_bits(way: str, tmp_path: Path) -> None:
    recipe = tiny(*RANDOM, "run.deterministic=true", *WAYS[way])
    train(recipe, tmp_path / "whole", device="cuda")
    with pytest.raises(Cut):
        train(recipe, tmp_path / "cut", device="cuda", watch=CutAfter(8))
    train(recipe, tmp_path / "cut", device="cuda")
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")


ADAMW = ["optim.opt=adamw", "optim.lr=1e-3"]  # Muon makes large steps of small differences


@pytest.mark.parametrize(("amp", "bar"), [("none", 1e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("mode", ["listing", "proximal"])
def test_recorded_steps_are_the_plain_ones(mode: str, amp: str, bar: float, tmp_path: Path) -> None:
    found = {}
    for way in ("false", "true"):
        recipe = tiny(*ADAMW, "optim.model_ema=0.9", f"model.options.mode={mode}", f"run.amp={amp}", f"run.graph={way}")
        train(recipe, tmp_path / way, device="cuda")
        found[way] = {name: x for name, x in tensors(tmp_path / way, 12).items() if not name.startswith("optim")}
    assert any(name.startswith("ema") for name in found["false"])
    for name, plain in found["false"].items():
        wide = plain.double()
        assert (found["true"][name].double() - wide).norm() <= bar * wide.norm() + 1e-6, name


def test_softmax_attention_with_far_scores_has_finite_gradients() -> None:
    """64 tokens that score one another at -120, as a ViT under Muon comes to: cuDNN's kernel gives NaN there."""
    q, k, v = (torch.randn(4, 8, 64, 24, device="cuda", dtype=torch.bfloat16) * 0.1 for _ in range(3))
    q[..., 0], k[..., 0] = 1, -120 * 24**0.5
    for x in (q, k, v):
        x.requires_grad_()
    with without_cudnn_attention():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    out.backward(torch.randn_like(out))
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_a_gpu_trains_as_a_cpu_does(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        train(tiny(*ADAMW), tmp_path / device, device=device)
    here, there = (tensors(tmp_path / device, 12) for device in ("cpu", "cuda"))
    for name, x in here.items():
        if name.startswith("model."):
            assert (there[name].double() - x.double()).norm() <= 1e-3 * x.double().norm() + 1e-6, name


@pytest.mark.parametrize("compiled", [False, True])
def test_batches_are_those_of_a_cpu(compiled: bool) -> None:
    digits = catalog.open_set("digits", "train")
    view = View(8, 1, (0.5,), (0.5,))
    augment = Augment(crop_padding=1, flip=0.5, mixup=0.3, cutmix=1.0, cutout=2)
    options = {"batch_size": 64, "seed": 3}
    here = TrainStream(digits, view, augment, device="cpu", **options).batches(20, 25)
    there = TrainStream(digits, view, augment, device="cuda", compiled=compiled, **options).batches(20, 25)
    for mine, theirs in zip(here, there, strict=True):
        assert torch.equal(mine.index, theirs.index)
        assert torch.equal(mine.labels, theirs.labels.cpu())
        for x, y in ((mine.images, theirs.images), (mine.targets, theirs.targets)):
            assert torch.allclose(x, y.cpu(), atol=1e-5)
