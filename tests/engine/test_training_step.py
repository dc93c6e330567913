"""A step by hand: what training does to every weight, recomputed in float64 from the published definitions, to 1e-12.

`ByHand` shares with the package the network's forward pass and the batches, nothing else. Settings are chosen so that each of
them shows: eps is large, decays are short, the norm of the gradients is above the limit in some steps and below it in others.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dmst.data.augment import Augment
from dmst.data.loader import Batch, Shard, TrainStream, View
from dmst.data.sets import ArraySet
from dmst.engine import prepare
from dmst.engine.console import Quiet
from dmst.engine.distributed import Group
from dmst.engine.recipe import Recipe
from dmst.engine.train_loop import train
from dmst.engine.train_step import StepMetrics, TrainStep
from dmst.errors import NonFiniteError
from dmst.models import VisionModel
from tests.runs import on_pictures, pictures, tensors, tiny

CPU = torch.device("cpu")
CLASSES, BATCH, SEED = 3, 16, 5
VIEW = View(8, 3, (0.5, 0.4, 0.3), (0.25, 0.2, 0.3))

NET = [
    "model.name=dmst_cifar", "model.options.dim=8", "model.options.depth=1", "model.options.num_heads=2",
    "model.options.patch_size=2", "model.options.mlp_ratio=2.0", "model.options.position=learned",
    "model.options.readout=class_attention", "model.options.readout_depth=1", "data.image_size=8",
    f"run.batch_size={BATCH}", f"run.seed={SEED}",
]  # fmt: skip
PLAIN = [*NET, "model.options.stem=patch"]  # no batch norm, which sees a micro-batch

# What is decayed in this network, by hand: matrices and kernels. Biases, norms, scales, the class token and positions are not.
BLOCK = [
    f"blocks.0.{name}.weight" for name in ("operator.subspace", "operator.out", "feedforward.mlp.fc1", "feedforward.mlp.fc2")
] + [f"class_blocks.0.{name}.weight" for name in ("qkv", "out", "mlp.fc1", "mlp.fc2")]
CONVOLUTIONS = [f"stem.layers.{i}.weight" for i in (0, 3, 6)]
DECAYED = {*BLOCK, *CONVOLUTIONS, "stem.projection.weight", "blocks.0.operator.assign.weight", "head.weight"}
DECAYED |= {"blocks.0.operator.qkv.weight", "blocks.0.feedforward.dictionary"}  # of a ViT, and of CRATE

OFF: dict[str, Any] = {  # every piece without effect: plain descent is AdamW's with no memory and a huge eps
    "opt": "adamw", "lr": 0.5, "matrix_lr": 0.02, "weight_decay": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 1.0,
    "clip_grad": 0.0, "smoothing": 0.0, "model_ema": 0.0,
}  # fmt: skip
ON: dict[str, Any] = OFF | {
    "lr": 0.02, "weight_decay": 0.3, "beta1": 0.6, "beta2": 0.8, "eps": 1e-3, "clip_grad": 0.9, "smoothing": 0.2,
    "model_ema": 0.25,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def settings(knobs: dict[str, Any]) -> list[str]:
    return [f"optim.{name}={value}" for name, value in knobs.items()]


def seed_of(step: int, micro: int) -> int:
    """32 bits of a hash of all that a mask may depend on."""
    told = repr(["step", SEED, step, micro, 0]).encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=4).digest(), "little")


# --- the oracle ------------------------------------------------------------------------------------------------------


class ByHand:
    """Weights, moments and running mean of a network, stepped by formulas."""

    def __init__(self, model: nn.Module, knobs: dict[str, Any], matrices: Sequence[str] = BLOCK) -> None:
        self.net, self.knobs, self.taken = copy.deepcopy(model).train(), knobs, 0
        self.weights = dict(self.net.named_parameters())
        self.matrices = matrices if knobs["opt"] == "muon" else []
        kinds = {name: ("mean",) if name in self.matrices else ("exp_avg", "exp_avg_sq") for name in self.weights}
        self.state = {f"{n}.{kind}": torch.zeros_like(p) for n, p in self.weights.items() for kind in kinds[n]}
        self.mean = {name: x.clone() for name, x in self.net.state_dict().items()}

    def step(self, step: int, batches: Sequence[Batch], count: float, lr: float, matrix_lr: float = 0.0) -> StepMetrics:
        """One step on all micro-batches as one: the loss is the mean over all images that count."""
        k, loss, right = self.knobs, torch.zeros((), dtype=torch.float64), 0
        for micro, batch in enumerate(batches):
            torch.manual_seed(seed_of(step, micro))
            logits = self.net(batch.images.double())
            wanted = (1 - k["smoothing"]) * batch.targets.double() + k["smoothing"] / CLASSES
            log_softmax = logits - logits.exp().sum(1, keepdim=True).log()
            loss = loss - (wanted * log_softmax).sum() / count
            right += int((logits.argmax(1) == batch.labels).sum())
        found = torch.autograd.grad(loss, list(self.weights.values()))
        norm = math.sqrt(sum(float((g * g).sum()) for g in found))
        # torch.nn.utils.clip_grads_with_norm_: the limit over the norm + 1e-6, and at most 1
        factor = min(1.0, k["clip_grad"] / (norm + 1e-6)) if k["clip_grad"] else 1.0
        self.taken += 1
        with torch.no_grad():
            for (name, weight), gradient in zip(self.weights.items(), found, strict=True):
                if name in self.matrices:
                    self.muon(name, weight, factor * gradient, matrix_lr)
                else:
                    self.adamw(name, weight, factor * gradient, lr)
        if k["model_ema"]:
            decay = min(k["model_ema"], (1 + step) / (10 + step))
            for name, x in self.net.state_dict().items():
                self.mean[name] = decay * self.mean[name] + (1 - decay) * x if x.is_floating_point() else x.clone()
        return StepMetrics(loss.item(), right / count, norm)

    def adamw(self, name: str, weight: Tensor, g: Tensor, lr: float) -> None:
        """Loshchilov and Hutter, "Decoupled weight decay regularization", algorithm 2, the decay times the rate as in torch."""
        k, t = self.knobs, self.taken
        m = k["beta1"] * self.state[f"{name}.exp_avg"] + (1 - k["beta1"]) * g
        v = k["beta2"] * self.state[f"{name}.exp_avg_sq"] + (1 - k["beta2"]) * g * g
        self.state[f"{name}.exp_avg"], self.state[f"{name}.exp_avg_sq"] = m, v
        decay = k["weight_decay"] if name in DECAYED else 0.0
        root = (v / (1 - k["beta2"] ** t)).sqrt()
        weight.copy_(weight - lr * decay * weight - lr * (m / (1 - k["beta1"] ** t)) / (root + k["eps"]))

    def muon(self, name: str, weight: Tensor, g: Tensor, lr: float) -> None:
        """Jordan and others, "Muon", 2024: Nesterov momentum 0.95, five Newton-Schulz steps, the larger step of tall ones."""
        m = 0.95 * self.state[f"{name}.mean"] + 0.05 * g
        self.state[f"{name}.mean"] = m
        x = (0.05 * g + 0.95 * m).numpy()
        x = x / np.sqrt((x * x).sum())
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
        rows, columns = x.shape
        longer = math.sqrt(max(1.0, rows / columns))
        weight.copy_((1 - lr * self.knobs["weight_decay"]) * weight - lr * longer * torch.from_numpy(x))


def agree(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    off = {name: float((found[name].double() - x.double()).abs().max()) for name, x in wanted.items()}
    assert not {name: value for name, value in off.items() if not value <= 1e-12}


def agree_with(work: TrainStep, hand: ByHand) -> None:
    agree(work.model.state_dict(), hand.net.state_dict())
    kept = {name: x for name, x in work.optimizer.state().items() if not name.endswith(".step")}
    agree(kept, hand.state)
    if work.mean is not None:
        agree(work.mean.model.state_dict(), hand.mean)


# --- what is stepped -------------------------------------------------------------------------------------------------


def stream(augment: Augment = Augment(), micro_steps: int = 1, **options: Any) -> TrainStream:  # noqa: B008 (frozen)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (48, 8, 8, 3), dtype=np.uint8)
    toy = ArraySet("toy", "train", ["a", "b", "c"], np.arange(48) % CLASSES, images)
    shard = Shard(micro_steps=micro_steps)
    return TrainStream(toy, VIEW, augment, batch_size=BATCH, seed=SEED, shard=shard, **options)


def network(recipe: Recipe) -> VisionModel:
    """Of the recipe, every weight drawn at random: at 0 and 1, where biases and norms begin, decay and scale would not show."""
    model = prepare.build_model(recipe, "abc", 3).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


def both(recipe: Recipe, knobs: dict[str, Any]) -> tuple[TrainStep, ByHand]:
    model = network(recipe)
    hand = ByHand(model, knobs)
    return TrainStep(model, recipe, Group(CPU)), hand


def beside(work: TrainStep, hand: ByHand, batches: TrainStream, steps: int) -> list[StepMetrics]:
    """Some steps of both, at a rate that changes from step to step, each compared."""
    told, given = [], batches.batches(0, steps)
    for step in range(steps):
        part, factor = [next(given) for _ in range(work.recipe.run.accumulate)], 1 / (1 + step)
        found = work.step(step, iter(part), factor)
        rates = hand.knobs["lr"] * factor, hand.knobs["matrix_lr"] * factor
        assert found == pytest.approx(hand.step(step, part, BATCH, *rates), abs=1e-12)
        agree_with(work, hand)
        told.append(found)
    return told


PIECES: dict[str, dict[str, Any]] = {
    "none": {},
    "clipping": {"clip_grad": 0.9},
    "smoothing": {"smoothing": 0.2},
    "betas": {"beta1": 0.6, "beta2": 0.8, "eps": 1e-3, "lr": 0.02},
    "decay": {"weight_decay": 0.3},
    "ema": {"model_ema": 0.25},
    "muon": {"opt": "muon", "weight_decay": 0.3},
    "all": ON,
}


@pytest.mark.parametrize("piece", PIECES)
def test_each_piece(piece: str) -> None:
    knobs = OFF | PIECES[piece]
    work, hand = both(tiny(*NET, *settings(knobs)), knobs)
    norms = [told.norm for told in beside(work, hand, stream(), 4)]
    if piece == "clipping":
        assert min(norms) < 0.9 < max(norms)


def test_what_muon_leaves_to_adamw() -> None:
    """Thin matrices, here of the MLPs; the scores, a row a head, however many heads there are."""
    knobs = ON | {"opt": "muon"}
    recipe = tiny(*NET, *settings(knobs), "model.options.num_heads=8", "model.options.mlp_ratio=0.5")
    model = network(recipe)
    assert model.get_parameter("blocks.0.operator.assign.weight").shape == (8, 8)
    hand = ByHand(model, knobs, [name for name in BLOCK if "mlp" not in name])
    beside(TrainStep(model, recipe, Group(CPU)), hand, stream(), 2)


@pytest.mark.parametrize("family", ["tost", "vit", "crate"])
def test_other_families(family: str) -> None:
    """A temperature is no matrix, whatever its shape: it is not decayed."""
    work, hand = both(tiny(*NET, *settings(ON), f"model.name={family}_cifar"), ON)
    assert ("blocks.0.operator.temperature" in hand.weights) == (family == "tost")
    beside(work, hand, stream(), 2)


def test_micro_steps_add_up_to_the_whole_batch() -> None:
    """By hand the sixteen images go through the network at once."""
    work, hand = both(tiny(*PLAIN, *settings(ON), "run.accumulate=4"), ON)
    parts = stream(micro_steps=4).batches(0, 3)
    for step, whole in enumerate(stream().batches(0, 3)):
        found = work.step(step, parts, 1.0)
        assert found == pytest.approx(hand.step(step, [whole], BATCH, ON["lr"]), abs=1e-12)
        agree_with(work, hand)


# --- what is left out at random --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", ["proj_drop_rate", "attn_drop"])
def test_masks_are_functions_of_the_step_alone(drop: str) -> None:
    """At rate 0 the weights stay, so that the loss tells the masks apart."""
    name = "model.name=vit_cifar" if drop == "attn_drop" else "model.name=dmst_cifar"
    recipe = tiny(*PLAIN, name, f"model.options.{drop}=0.3", *settings(OFF))
    batch = next(stream().batches(0, 1))

    def losses(work: TrainStep, *steps: int) -> list[float]:
        return [work.step(step, iter([batch]), 0.0).loss for step in steps]

    first = losses(TrainStep(network(recipe), recipe, Group(CPU)), 0, 1, 2, 1, 0)
    assert len(set(first)) == 3 and first[3:] == first[1::-1]
    resumed = TrainStep(network(recipe), recipe, Group(CPU))
    torch.manual_seed(17)  # what others drew does not matter
    assert losses(resumed, 1) == first[1:2]
    assert not set(losses(TrainStep(network(recipe), recipe, Group(CPU, rank=1)), 0, 1)) & set(first)


# --- numbers that are not finite, and those of fp16 ------------------------------------------------------------------


class Spoilt:
    """Makes one gradient infinite while it is on."""

    def __init__(self, model: VisionModel) -> None:
        self.on = False
        model.head.weight.register_hook(lambda gradient: gradient * math.inf if self.on else gradient)


def kept_of(work: TrainStep) -> list[Tensor]:
    mean = {} if work.mean is None else work.mean.model.state_dict()
    return [x.clone() for part in (work.model.state_dict(), work.optimizer.state(), mean) for x in part.values()]


def test_a_step_that_is_not_finite_leaves_no_trace() -> None:
    """Nor do running statistics: the next step is as if it had never been."""
    work, hand = both(tiny(*NET, *settings(ON)), ON)
    beside(work, hand, stream(), 1)
    before = kept_of(work)
    batch = next(stream().batches(1, 2))
    spoilt = Spoilt(work.model)
    for images, on in ((batch.images.clone().index_fill_(0, torch.tensor([3]), math.nan), False), (batch.images, True)):
        spoilt.on = on
        with pytest.raises(NonFiniteError, match=r"step 1: .*Nothing was applied"):
            work.step(1, iter([batch._replace(images=images)]), 1.0)
        assert all(map(torch.equal, before, kept_of(work)))
    spoilt.on = False
    found = work.step(1, iter([batch]), 1.0)
    assert found == pytest.approx(hand.step(1, [batch], BATCH, ON["lr"]), abs=1e-12)
    agree_with(work, hand)


@pytest.mark.parametrize("opt", ["adamw", "muon"])
def test_the_scale_of_fp16_cancels(opt: str) -> None:
    """Autocast leaves float64 alone, so that only the scale is left of fp16; a step that overflows leaves no trace."""
    knobs = ON | {"opt": opt}
    work, hand = both(tiny(*NET, *settings(knobs), "run.amp=fp16", "run.accumulate=2"), knobs)
    assert work.scale == 2.0**16
    beside(work, hand, stream(micro_steps=2), 2)
    before, spoilt = kept_of(work), Spoilt(work.model)
    spoilt.on = True
    batches = list(stream(micro_steps=2).batches(2, 3))
    work.step(2, iter(batches), 1.0)
    assert work.scale == 2.0**15 and all(map(torch.equal, before, kept_of(work)))
    spoilt.on = False
    found = work.step(2, iter(batches), 1.0)
    assert found == pytest.approx(hand.step(2, batches, BATCH, knobs["lr"], knobs["matrix_lr"]), abs=1e-12)
    agree_with(work, hand)
    spoilt.on = True
    for _ in range(20):
        work.step(3, iter(batches), 1.0)
    with pytest.raises(NonFiniteError, match=r"step 3: the gradient of head\.weight"):  # 20 in a row are enough
        work.step(3, iter(batches), 1.0)


# --- matrices that stay orthonormal ----------------------------------------------------------------------------------


def gram_schmidt(weight: Tensor) -> Tensor:
    rows: list[np.ndarray] = []
    for row in weight.numpy():
        for done in rows:
            row = row - (row @ done) * done
        rows.append(row / math.sqrt(row @ row))
    return torch.from_numpy(np.stack(rows))


def test_orthonormal_matrices_go_back_to_their_manifold() -> None:
    """After the step, and in the running mean after that."""
    recipe = tiny(*PLAIN, *settings(ON), "model.options.mode=proximal")
    model = prepare.build_model(recipe, "abc", 3).double()
    name = "blocks.0.operator.subspace.weight"
    with torch.no_grad():
        model.get_parameter(name).copy_(gram_schmidt(model.get_parameter(name).detach()))
    hand, work = ByHand(model, ON), TrainStep(model, recipe, Group(CPU))
    for step, batch in enumerate(stream().batches(0, 3)):
        work.step(step, iter([batch]), 1.0)
        before = hand.mean[name]
        hand.step(step, [batch], BATCH, ON["lr"])
        with torch.no_grad():
            weight = hand.net.get_parameter(name)
            assert (weight @ weight.mT - torch.eye(8)).norm() > 1e-3
            weight.copy_(gram_schmidt(weight.detach()))
        decay = min(0.25, (1 + step) / (10 + step))
        hand.mean[name] = gram_schmidt(decay * before + (1 - decay) * weight.detach())
        agree_with(work, hand)


# --- a whole run -----------------------------------------------------------------------------------------------------

# Three steps an epoch, one epoch of rise from 0.004, two epochs. The peak is 0.02 for 8 images, so 0.04 for 16. Then half a
# cosine to 0.008: 1, 3/4 and 1/4 of the way above it.
RATES = [0.004, 0.004 + 0.036 / 3, 0.004 + 2 * 0.036 / 3, 0.04, 0.008 + 0.032 * 3 / 4, 0.008 + 0.032 / 4]
SCHEDULE = [
    "schedule.epochs=2", "schedule.warmup_epochs=1.0", "schedule.warmup_lr=0.004", "schedule.min_lr=0.008",
    "schedule.base_batch=8",
]  # fmt: skip


class Heard(Quiet):
    def __init__(self) -> None:
        self.values: list[dict[str, Any]] = []

    def step(self, done: int, steps: int, values: dict[str, Any]) -> None:
        self.values.append(values)


@pytest.mark.parametrize("opt", ["adamw", "muon"])
def test_six_steps_of_a_run(opt: str, tmp_path: Path) -> None:
    """Everything at once, through `train`: every checkpoint, the learning rates and what is told of each step."""
    knobs = ON | {"opt": opt, "matrix_lr": 0.01, "clip_grad": 0.6}
    recipe = on_pictures(
        pictures(tmp_path / "data", each=16), *NET, *SCHEDULE, *settings(knobs), "data.eval=", "run.save_every=1", "run.keep=9",
        "run.accumulate=2", "model.options.drop_path_rate=0.2", "model.options.proj_drop_rate=0.1",
        "model.options.drop_rate=0.1", "augment.mixup=0.8", "augment.cutmix=1.0",
    )  # fmt: skip
    images = prepare.open_sets(recipe).train
    model = prepare.build_model(recipe, images.classes, 3).double()
    hand, heard = ByHand(model, knobs), Heard()
    result = train(recipe, tmp_path / "run", device="cpu", watch=heard, dtype=torch.float64)
    given = TrainStream(images, prepare.view_of(model), recipe.augment, batch_size=BATCH, seed=SEED, shard=Shard(micro_steps=2))
    batches = given.batches(0, 6)
    for step, lr in enumerate(RATES):
        told = hand.step(step, [next(batches), next(batches)], BATCH, lr, lr / 2)
        wanted = {"lr": lr, "loss": told.loss, "accuracy": told.accuracy, "norm": told.norm}
        assert {name: heard.values[step][name] for name in wanted} == pytest.approx(wanted, abs=1e-12)
        held = tensors(tmp_path / "run", step + 1)
        for part, tensor in (("model", hand.net.state_dict()), ("optim", hand.state), ("ema", hand.mean)):
            found = {name.removeprefix(f"{part}."): x for name, x in held.items() if name.startswith(f"{part}.")}
            agree({name: x for name, x in found.items() if not name.endswith(".step")}, tensor)
    assert len(heard.values) == 6
    agree(result.model.state_dict(), hand.mean)
    norms = [values["norm"] for values in heard.values]
    assert min(norms) < knobs["clip_grad"] < max(norms)
