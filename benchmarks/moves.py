"""What moves: GMSA, softmax attention, DMSA and TSSA in one skeleton, with the same batches. Tables of docs/what-moves.md.

    python benchmarks/moves.py pack DATA_DIR CACHE cifar100 tinyimagenet   decode once: CACHE/NAME-SPLIT-{images,labels}.npy
    python benchmarks/moves.py run PLAN CACHE --lanes 6 --seconds 560      every run of a plan that results/moves lacks
    python benchmarks/moves.py render                                      results/moves.md and results/moves.svg

The skeleton: width 192, 8 blocks, 8 heads, convolutional stem, learned positions, plain MLPs, mean readout. The hidden width
of the MLPs makes parameters equal within 1 %. AdamW, one warm-up epoch in twenty, half a cosine to 0, crop and flip; weights
are stepped in float32 and computed with in bfloat16. Batches depend on data and seed alone. Searches hold 10 % of the training
images out and never see the test images; finals see them once, after the last step.

A lane is a process. Lanes share the device (start NVIDIA's MPS first) and take runs from the plan until the seconds are over;
MOVES_RESULTS names another folder than results/moves. The step is one CUDA graph. `off` is the accuracy with every operator's
output set to zero. Runs of mode="proximal" are certified on 1,000 test images: the smallest share, over the layers, of images
whose bound is below 0.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from moves_plans import DATA, PLANS, Run
from torch import Tensor, nn
from torch.nn import functional as F

from dmst import provenance
from dmst.analysis.certificates import certify
from dmst.data.catalog import CATALOG, open_set
from dmst.data.sets import split_off
from dmst.models import ModelConfig, VisionModel
from dmst.operators.orthonormal import OrthonormalLinear, closer, retract
from dmst.reproduce import ledger

RESULTS = Path(os.environ.get("MOVES_RESULTS", Path(__file__).resolve().parent.parent / "results" / "moves"))
BATCH, DIM, DEPTH, HEADS, CLIP = 512, 192, 8, 8, 1.0
PARAMETERS = 3_200_000  # with 100 classes at 64 tokens; other data add their own
CERTIFIED = 1000


# --- data ------------------------------------------------------------------------------------------------------------


def pack(data_dir: str, cache: Path, names: list[str]) -> None:
    """Every image of a set in one array. Written under another name first: lanes wait for the file."""
    cache.mkdir(parents=True, exist_ok=True)
    for name in names:
        for split in ("train", "test"):
            found = open_set(name, split, data_dir=data_dir)
            images = found.pixels()
            if images is None:
                parts = np.array_split(np.arange(len(found)), 4 * (os.cpu_count() or 1))
                with ProcessPoolExecutor() as pool:
                    images = np.concatenate(list(pool.map(_decode, [found] * len(parts), parts)))
            for what, array in (("labels", found.labels), ("images", images)):
                np.save(cache / "part.npy", np.ascontiguousarray(array))
                (cache / "part.npy").rename(cache / f"{name}-{split}-{what}.npy")
            print(name, split, images.shape, flush=True)


def _decode(found: Any, indices: np.ndarray) -> np.ndarray:
    return np.stack([found.read(int(i)) for i in indices])


class Images(NamedTuple):
    """One split on the device."""

    pixels: Tensor  # (n, 3, h, w) uint8
    labels: Tensor  # (n,)


def load(run: Run, cache: Path, device: torch.device) -> tuple[Images, Images]:
    """Training and judging images: the test images in a final, else a tenth of the training images."""
    train = _read(cache, run.data, "train")
    if run.final:
        judge = _read(cache, run.data, "test")
    else:
        whole = open_like(train, run.data)
        rest, held = (np.asarray(each.places) for each in split_off(whole, 0.1))
        train, judge = (train[0][rest], train[1][rest]), (train[0][held], train[1][held])
    return tuple(  # type: ignore[return-value]
        Images(torch.from_numpy(x).to(device).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(y).to(device))
        for x, y in (train, judge)
    )


def _read(cache: Path, name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    path = cache / f"{name}-{split}-images.npy"  # written last
    while not path.exists():
        time.sleep(1)
    return np.load(path), np.load(cache / f"{name}-{split}-labels.npy")


def open_like(arrays: tuple[np.ndarray, np.ndarray], name: str) -> Any:
    from dmst.data.sets import ArraySet

    return ArraySet(name, "train", [str(i) for i in range(DATA[name].classes)], arrays[1], arrays[0])


class Epoch:
    """What is drawn for an epoch: order, crops, flips and shares of mixup, in tensors that a CUDA graph reads."""

    def __init__(self, run: Run, images: Images) -> None:
        self.run, self.count, self.steps = run, len(images.labels), len(images.labels) // BATCH
        self.pad = images.pixels.shape[-1] // 8
        device = images.labels.device
        self.order, self.down, self.across, self.mirrored = (
            torch.zeros(self.steps, BATCH, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.share = torch.ones(self.steps, device=device)

    def draw(self, number: int) -> None:
        drawn = np.random.default_rng((self.run.seed, number))
        shape = (self.steps, BATCH)
        self.order.copy_(torch.from_numpy(drawn.permutation(self.count)[: self.steps * BATCH].reshape(shape)))
        for into in (self.down, self.across):
            into.copy_(torch.from_numpy(drawn.integers(0, 2 * self.pad + 1, shape)))
        self.mirrored.copy_(torch.from_numpy(drawn.integers(0, 2 if DATA[self.run.data].flip else 1, shape)))
        if self.run.mixup:
            self.share.copy_(torch.from_numpy(drawn.beta(self.run.mixup, self.run.mixup, self.steps)))


def cut(padded: Tensor, order: Tensor, down: Tensor, across: Tensor, mirrored: Tensor, side: int) -> Tensor:
    """A batch of crops, half of them mirrored, as numbers around 0."""
    place = torch.arange(side, device=padded.device)
    column = torch.where(mirrored.unsqueeze(-1) > 0, side - 1 - place, place) + across.unsqueeze(-1)
    row = place + down.unsqueeze(-1)
    channel = torch.arange(3, device=padded.device)
    pixels = padded[order[:, None, None, None], channel[None, :, None, None], row[:, None, :, None], column[:, None, None, :]]
    return pixels.float()


# --- network and step ------------------------------------------------------------------------------------------------


def network(run: Run) -> VisionModel:
    """The skeleton with this operator; the hidden width of its MLPs is the multiple of 8 that comes nearest in parameters."""
    data = DATA[run.data]
    fixed = {
        "dim": DIM, "depth": DEPTH, "num_heads": HEADS, "operator": run.operator, "operator_options": run.options,
        "patch_size": data.side // run.rows, "img_size": data.side, "num_classes": data.classes, "stem": "conv",
        "position": "learned", "readout": "mean", "drop_path_rate": run.drop_path,
    }  # fmt: skip

    def count(hidden: int, **other: Any) -> int:
        model = VisionModel(ModelConfig(mlp_ratio=hidden / DIM, **fixed | other), device="meta")
        return sum(p.numel() for p in model.parameters())

    small, large = count(8), count(16)
    like = {"patch_size": 4, "img_size": 32, "num_classes": 100}
    target = PARAMETERS + small - count(8, **like)  # what the data themselves ask for is not matched away
    hidden = 8 * round((target - small) / (large - small) + 1)
    return VisionModel(ModelConfig(mlp_ratio=hidden / DIM, **fixed))


def in_sixteen_bits(model: VisionModel) -> VisionModel:
    """Everything but batch norms, whose running means need the digits."""
    model.bfloat16()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
        if isinstance(module, OrthonormalLinear):
            module.kept = True
    return model


class Flat:
    """Parameters of one kind as views of one tensor, exact and in bfloat16: a step is a few kernels, not a few hundred."""

    def __init__(self, exact: list[nn.Parameter], low: list[nn.Parameter]) -> None:
        sizes = [-(-p.numel() // 64) * 64 for p in exact]  # kernels like aligned addresses
        self.exact = torch.zeros(sum(sizes), device=exact[0].device)
        self.low, self.grad = (torch.zeros_like(self.exact, dtype=low[0].dtype) for _ in range(2))
        self.exact.grad = torch.zeros_like(self.exact)
        self.parameters, self.grads, begin = low, list[Tensor](), 0
        for mine, theirs, size in zip(exact, low, sizes, strict=True):
            for flat, p in ((self.exact, mine), (self.low, theirs)):
                p.data = flat[begin : begin + p.numel()].view_as(p).copy_(p.data)
            self.grads.append(self.grad[begin : begin + mine.numel()].view_as(mine))
            begin += size

    def gather(self) -> Tensor:
        """The gradients of the last backward pass, in float32; their norm."""
        torch._foreach_copy_(self.grads, [p.grad for p in self.parameters])
        self.exact.grad.copy_(self.grad)
        return self.exact.grad.norm()


class Trainer:
    """One network, one CUDA graph of its step; `start` gives it a fresh seed."""

    def __init__(self, run: Run, images: Images, judge: Images, device: torch.device) -> None:
        self.run, self.images, self.judge, self.device = run, images, judge, device
        self.model, self.exact = network(run).to(device), network(run).to(device)
        self.parameters = sum(p.numel() for p in self.exact.parameters())
        in_sixteen_bits(self.model)
        self.side = images.pixels.shape[-1]
        statistics = CATALOG[run.data].statistics
        self.mean, self.std = (torch.tensor(x, device=device).view(1, 3, 1, 1) * 255 for x in (statistics.mean, statistics.std))
        self.epoch = Epoch(run, images)
        self.padded = F.pad(images.pixels, (self.epoch.pad,) * 4)
        self.step, self.loss = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros((), device=device)
        self.rates = torch.zeros(run.epochs * self.epoch.steps, device=device)
        self.lr = torch.zeros((), device=device)
        kept, low = self.exact.no_weight_decay(), dict(self.model.named_parameters())
        exact = dict(self.exact.named_parameters())
        decayed = [name for name, p in exact.items() if p.ndim > 1 and name not in kept]
        plain = [name for name in exact if name not in decayed and low[name].dtype == torch.bfloat16]
        rest = [name for name in exact if name not in decayed + plain]  # of batch norms, in float32
        self.flats = [Flat([exact[n] for n in names], [low[n] for n in names]) for names in (decayed, plain, rest)]
        decays = (run.decay, 0.0, 0.0)
        groups = [{"params": [flat.exact], "weight_decay": decay} for flat, decay in zip(self.flats, decays, strict=True)]
        fast = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr if fast else 0.0, fused=fast, capturable=fast)
        by_name = dict(self.exact.named_modules())
        self.bases = [by_name[n].weight for n, m in self.model.named_modules() if isinstance(m, OrthonormalLinear)]
        self.graph: Any = None
        self.cut = cut
        if fast:
            self.cut = torch.compile(cut)
            for block in self.model.blocks:
                block.compile()
            self.model.stem.compile()

    def start(self, run: Run) -> None:
        self.run = self.epoch.run = run
        torch.manual_seed(run.seed)
        fresh = network(run)  # on the CPU: the same start on every device
        self.exact.load_state_dict(fresh.state_dict())
        self.model.load_state_dict(fresh.state_dict())
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        steps, warmup = len(self.rates), self.epoch.steps * run.epochs / 20
        rates = [
            min((i + 1) / warmup, 0.5 * (1 + math.cos(math.pi * max(i - warmup, 0) / (steps - warmup)))) for i in range(steps)
        ]
        self.rates.copy_(torch.tensor(rates) * run.lr)
        self.step.zero_()
        self.model.train()

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Images, labels and the share of each in its mixture with the batch turned round."""
        e, i = self.epoch, self.step % self.epoch.steps
        order, down, across, mirrored = (x.index_select(0, i)[0] for x in (e.order, e.down, e.across, e.mirrored))
        x = (self.cut(self.padded, order, down, across, mirrored, self.side) - self.mean) / self.std
        share = e.share.index_select(0, i)
        if self.run.mixup:
            x = share * x + (1 - share) * x.flip(0)
        return x.bfloat16(), self.images.labels[order], share

    def forward(self) -> Tensor:
        x, labels, share = self.batch()
        logits = self.model(x).float()
        loss = F.cross_entropy(logits, labels)
        if self.run.mixup:
            loss = share[0] * loss + (1 - share[0]) * F.cross_entropy(logits, labels.flip(0))
        return loss

    def one(self) -> None:
        """One step: everything that a CUDA graph records."""
        self.lr.copy_(self.rates.index_select(0, self.step)[0])
        if self.device.type != "cuda":
            for group in self.optimizer.param_groups:
                group["lr"] = float(self.lr)
        self.model.zero_grad()
        loss = self.forward()
        loss.backward()
        norm = torch.stack([flat.gather() for flat in self.flats]).norm()
        for flat in self.flats:
            flat.exact.grad.mul_((CLIP / (norm + 1e-6)).clamp(max=1))
        self.optimizer.step()
        with torch.no_grad():
            if self.bases:
                w = torch.stack(list(self.bases))
                for _ in range(4):
                    w = closer(w, damped=True)
                torch._foreach_copy_(list(self.bases), list(w.unbind()))
            for flat in self.flats:
                flat.low.copy_(flat.exact)
            self.loss += loss.detach()
            self.step += 1

    def record(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.one()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.one()

    def train(self, run: Run) -> dict[str, Any]:
        began = time.monotonic()
        self.start(run)
        self.epoch.draw(0)
        if self.device.type == "cuda" and self.graph is None:
            self.record()
            self.start(run)
        compiled = time.monotonic()
        for number in range(run.epochs):
            self.epoch.draw(number)
            self.loss.zero_()
            for _ in range(self.epoch.steps):
                self.one() if self.graph is None else self.graph.replay()
        train_loss = float(self.loss) / self.epoch.steps  # waits for the device
        trained = time.monotonic()
        self.exact.load_state_dict(
            {k: v for k, v in self.model.state_dict().items() if "running" in k or "num_b" in k}, strict=False
        )
        retract(self.exact)
        found = {"top1": self.judged(), "off": self.judged(off=True), "train_loss": train_loss}
        if run.options.get("mode") == "proximal":
            found["certified"] = self.certified()
        seconds = {"compile": compiled - began, "train": trained - compiled, "all": time.monotonic() - began}
        speed = run.epochs * self.epoch.steps * BATCH / seconds["train"]
        return found | {"seconds": {k: round(v, 1) for k, v in seconds.items()}, "images_per_second": round(speed)}

    @torch.no_grad()
    def judged(self, off: bool = False) -> float:
        model, right = self.exact.eval(), 0
        hooks = [b.operator.register_forward_hook(lambda m, a, out: torch.zeros_like(out)) for b in model.blocks if off]
        for x, y in self.judging(BATCH):
            with torch.autocast(self.device.type, torch.bfloat16):
                right += int((model(x).argmax(-1) == y).sum())
        for hook in hooks:
            hook.remove()
        return right / len(self.judge.labels)

    def judging(self, size: int, most: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.judge.pixels[:most], self.judge.labels[:most]
        for pixels, labels in zip(x.split(size), y.split(size), strict=True):
            yield (pixels.float() - self.mean) / self.std, labels

    def certified(self) -> dict[str, Any]:
        """Over the layers, the smallest share of images with a guarantee, and with a lower rate."""
        found = certify(self.exact.eval(), self.judging(100, CERTIFIED))
        layers = [each for each in found.layers if each is not None]
        guaranteed, descends = (min(getattr(each, name) for each in layers) for name in ("guaranteed", "descends"))
        change = [each.total["frozen"].mean for each in layers]
        return {"images": found.images, "layers": len(layers), "guaranteed": guaranteed, "descends": descends, "change": change}


# --- lanes -----------------------------------------------------------------------------------------------------------


def missing(plan: str) -> list[Run]:
    done = {(line["run"], line["seed"]) for line in ledger.read(RESULTS)}
    return [run for run in PLANS[plan]() if (run.key, run.seed) not in done]


def lane(plan: str, cache: Path, ends: float, device: torch.device) -> None:
    """Runs of the plan that nobody has claimed, those of the network at hand first."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward gives NaN for rows of far scores (docs/lab-notes.md)
    claims, trainer, images, slow = cache / "claims" / plan, None, None, 0.0
    claims.mkdir(parents=True, exist_ok=True)
    left = missing(plan)
    while left:
        left.sort(key=lambda run: (run.stage, trainer is None or run.network != trainer.run.network))  # else the plan's order
        run = left.pop(0)
        if time.time() + run.weight * slow > ends:
            continue
        try:
            (claims / f"{run.key}-{run.seed}").touch(exist_ok=False)
        except FileExistsError:
            continue
        try:
            if images is None or images[0] != (run.data, run.final):
                trainer = None
                images = (run.data, run.final), *load(run, cache, device)
            if trainer is None or run.network != trainer.run.network:
                trainer = None
                torch.cuda.empty_cache()
                torch.compiler.reset()
                trainer = Trainer(run, images[1], images[2], device)
            found = trainer.train(run)
        except Exception as error:  # of one run; the others go on
            print(run.cell, run.data, run.seed, f"FAILED: {type(error).__name__}: {error}"[:2000], flush=True)
            trainer = None
            continue
        slow = max(slow, (found["seconds"]["train"] + 20) / run.weight)
        line = {
            "plan": plan, "run": run.key, "seed": run.seed, **run.told(), "parameters": trainer.parameters, **found,
            "commit": provenance.commit(), "device": provenance.device_name(device), "versions": provenance.versions(),
            "date": datetime.date.today().isoformat(),
        }  # fmt: skip
        ledger.add(RESULTS / f"{plan}.jsonl", line)
        words = f"{100 * found['top1']:6.2f} off {100 * found['off']:6.2f} loss {found['train_loss']:.3f}"
        certified = f" certified {found['certified']['guaranteed']:.3f}" if "certified" in found else ""
        times = f"{found['seconds']['compile']:.0f}+{found['seconds']['train']:.0f} s {found['images_per_second']:,}/s"
        print(
            f"{run.data:12} {run.rows**2:4} {run.cell:34} {run.lr:g} seed {run.seed}  {words}{certified}  {times}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack")
    packing.add_argument("data_dir")
    packing.add_argument("cache", type=Path)
    packing.add_argument("names", nargs="+", choices=DATA)
    for verb in ("run", "lane"):
        running = verbs.add_parser(verb)
        running.add_argument("plan", choices=PLANS)
        running.add_argument("cache", type=Path)
        running.add_argument("--lanes", type=int, default=6)
        running.add_argument("--seconds", type=float, default=1e9, help="start no run that would not end by then")
        running.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    verbs.add_parser("render")
    ask = parser.parse_args()
    if ask.verb == "pack":
        pack(ask.data_dir, ask.cache, ask.names)
    elif ask.verb == "run":
        print(f"{ask.plan}: {len(missing(ask.plan))} runs", flush=True)
        ends = str(time.time() + ask.seconds)
        command = [sys.executable, __file__, "lane", ask.plan, str(ask.cache), "--seconds", ends, "--device", ask.device]
        for process in [subprocess.Popen(command) for _ in range(ask.lanes)]:
            process.wait()
    elif ask.verb == "lane":
        lane(ask.plan, ask.cache, ask.seconds, torch.device(ask.device))
    else:
        from moves_render import render

        render(ledger.read(RESULTS))


if __name__ == "__main__":
    main()
