"""The training loop: one function, for training from scratch and for fine-tuning, that goes on where it was killed.

    <run>/recipe.toml          the resolved recipe; another one is refused, with what differs
    <run>/journal.jsonl        what happened (journal.py)
    <run>/checkpoints/         whole or absent (checkpoint.py); the newest `keep`, and the best
    <run>/final/               model.safetensors and config.json, for dmst.load_model
    <run>/scan-*.json          which images were looked at

Everything random is a function of (seed, step, sample), so a checkpoint holds no generator's state, and a run that was killed
at any instant ends in the same bits as one that was not.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import torch
from torch import Tensor

import dmst
from dmst import atomic, provenance
from dmst.data.loader import Batch, EvalStream, Shard, TrainStream
from dmst.engine import journal, prepare
from dmst.engine.checkpoint import RunFolder, State
from dmst.engine.console import Clock, Quiet
from dmst.engine.distributed import Group, joined
from dmst.engine.evaluate import Score, evaluate
from dmst.engine.optim import lr_factor
from dmst.engine.prepare import RECIPE
from dmst.engine.recipe import Recipe, differences, from_toml
from dmst.engine.summary import summary
from dmst.engine.train_step import StepMetrics, TrainStep
from dmst.errors import ConfigError, DmstError, FullDiskError, NonFiniteError, OptionError, Stopped
from dmst.models import VisionModel, save_model
from dmst.models.files import CONFIG, fit, to_bytes

FINAL = "final"
LEFT = re.compile(r"\.(final|recipe\.toml|journal\.jsonl|scan-\w+\.json|report\.html)\..+")  # by kills while these were written
SAMPLE = 256  # images for the report
LISTED = 20  # images that are named
Probe = Callable[[VisionModel, Tensor], Any]
StopRule = Callable[[Sequence[Mapping[str, Any]]], str]  # of the evaluations so far, as the journal has them
STOPPED_BY_RULE = 3  # the exit status


class Result(NamedTuple):
    folder: Path
    model: VisionModel  # what final/ holds
    score: Score | None  # of it, where something is evaluated
    sample: tuple[Tensor, Tensor] | None  # the first images of what is evaluated, as the model takes them, and their labels
    journal: list[dict[str, Any]]


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    data_dir: str | Path | None = None,
    device: str | None = None,
    workers: int = 0,
    watch: Quiet | None = None,
    probes: Mapping[str, Probe] | None = None,
    stop_rule: StopRule | None = None,
    listeners: Sequence[journal.Listener] = (),
    report: Callable[[Result], Any] | None = None,
    allow_config_change: bool = False,
    keep_going_on_full_disk: bool = False,
    timeout: float = 60.0,
    dtype: torch.dtype = torch.float32,
) -> Result:
    """Train `recipe` in the folder `out`, or go on there. `probes` are asked at each evaluation: name -> f(model, images).

    Then `stop_rule` hears all evaluations, probes included; if it says why the run should end, the run is saved and ends there.
    `report` is called at the end, on the main process, while the folder is still held: it may write there.
    """
    with joined(device, timeout) as group, _deterministic(recipe.run.deterministic), ExitStack() as stack:
        folder = RunFolder(out)
        with group.together("opening the folder"):
            if group.main:
                stack.enter_context(folder)
        log = journal.Journal(folder if group.main else None, listeners, keep_going_on_full_disk)
        run = _Run(recipe, folder, group, log, watch if watch is not None and group.main else Quiet(), probes or {}, stop_rule)
        with group.together("comparing the recipe"):
            run.check_recipe(allow_config_change)
        run.build(data_dir, workers, dtype)
        run.resume(allow_config_change)
        if group.main:
            folder.write_text(folder.path / RECIPE, recipe.to_toml())
        with StopSignals(run.watch.say) as run.signals:
            run.train()
        result = run.finish()
        with group.together("writing the report"):
            if group.main and report is not None:
                folder.check_held(folder.path)
                report(result)
        return result


class StopSignals:
    """SIGTERM and SIGINT ask for a stop after this step; asked twice, the process ends at once: what is saved is whole."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received, self._process, self._say = 0, os.getpid(), say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        with suppress(ValueError):  # only the main thread may ask for signals
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, lambda found, frame: self._ask(found))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int) -> None:
        if os.getpid() != self._process:  # a loader's worker, which has our handlers: the main process says when it ends
            return
        if self.received:
            if number == signal.SIGTERM and torch.distributed.is_torchelastic_launched():
                return  # once by the cluster, to every process of a job, and once by torchrun, which passes its own on
            os._exit(128 + number)
        self.received = number
        with suppress(RuntimeError):  # in the middle of another line
            self._say("Stopping after this step; again to stop at once.")


@dataclass
class _Run:
    recipe: Recipe
    folder: RunFolder
    group: Group
    log: journal.Journal
    watch: Quiet
    probes: Mapping[str, Probe]
    stop_rule: StopRule | None
    step: int = 0  # steps that are done
    best: dict[str, Any] = field(default_factory=dict)
    epoch_sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # loss, right, images since the last evaluation
    scores: dict[str, Score] = field(default_factory=dict)  # of the last evaluation: "model", "ema"
    changed: list[str] = field(default_factory=list)  # since the start before, in words
    ended: bool = False  # an earlier start came to the end
    reason: str = ""  # why the stop rule ends the run, the same on all processes
    tried: int = -1  # the step of the last attempt to save, also a failed one; the same on all processes

    signals: StopSignals = field(init=False)

    # --- before ------------------------------------------------------------------------------------------------------

    def check_recipe(self, allow_change: bool) -> None:
        """The recipe of an earlier start in this folder must be this one."""
        path = self.folder.path / RECIPE
        if not self.group.main or not path.exists():
            return
        old = from_toml(atomic.read(path).decode(), str(path))  # no link is followed
        self.changed = differences(old, self.recipe)
        if self.changed and not allow_change:
            told = "\n".join(f"  {line}" for line in self.changed)
            raise ConfigError(
                str(path), "", f"this run was started with another recipe:\n{told}\nChoose another --out, or go on with "
                "--allow-config-change, which is noted in the journal."
            )  # fmt: skip

    def build(self, data_dir: str | Path | None, workers: int, dtype: torch.dtype) -> None:
        """Data, network and streams."""
        recipe, group, run = self.recipe, self.group, self.recipe.run
        with group.together("opening the data"):
            sets = prepare.open_sets(recipe, data_dir=data_dir, workers=workers, cache=self.folder, look=group.main)
        bad = json.loads(group.broadcast_text(json.dumps([sorted(sets.bad_train), sorted(sets.bad_eval)])))
        self.sets = replace(sets, bad_train=frozenset(bad[0]), bad_eval=frozenset(bad[1]))
        if not group.all_same(self.sets.fingerprint):
            raise OptionError(f"the processes find different images in {recipe.data.name}: every machine needs the same ones.")
        with group.together("building the network"):
            model = prepare.build_model(recipe, self.sets.train.classes, self.sets.channels).to(group.device, dtype)
        with group.together("preparing to train"):  # if one process fails here, the others must not wait for it
            self.train_step = TrainStep(model, recipe, group)
            view = prepare.view_of(model, recipe.data.crop_pct)
            places: dict[str, Any] = {"device": group.device, "path": recipe.data.path, "workers": workers}
            self.stream = TrainStream(
                self.sets.good_train, view, recipe.augment, batch_size=run.batch_size, seed=run.seed,
                shard=Shard(group.rank, group.world, run.accumulate),
                compiled=run.compile or (run.graph and group.device.type == "cuda"), **places,
            )  # fmt: skip
            self.steps = recipe.schedule.epochs * self.stream.steps_per_epoch
            self.eval_stream = None
            if (held := self.sets.good_eval) is not None:
                size = run.eval_batch_size or run.batch_size // run.accumulate // group.world
                self.eval_stream = EvalStream(held, view, batch_size=size, shard=Shard(group.rank, group.world), **places)

    def resume(self, allow_change: bool) -> None:
        """The newest checkpoint, from the main process to all; the journal up to there."""
        told = ""
        with self.group.together("reading the checkpoint"):
            if self.group.main:
                found = self.folder.newest()
                if found is not None:
                    told = json.dumps(vars(replace(found, tensors={})))
                    self._check_same(found, allow_change)
                    for name, tensors in self._tensors().items():
                        if name not in found.tensors:
                            raise OptionError(f"the checkpoint of step {found.step} has no {name}: its recipe was another.")
                        fit(found.tensors[name], tensors, "the checkpoint")
                        for key, tensor in tensors.items():
                            tensor.data.copy_(found.tensors[name][key])
        told = self.group.broadcast_text(told)
        if told:
            for tensors in self._tensors().values():
                self.group.broadcast(tensors.values())
            self._take(State(**json.loads(told)))
        ended = self.step == self.steps and not self.changed and (self.folder.path / FINAL / CONFIG).is_file()
        kept = self.log.take_back(self.step if told else -1, ended=ended)
        known = {(event["event"], event["step"]) for event in kept}
        self.ended = ("end", self.step) in known
        if not told or self.changed:
            self.log.write("start", self.step, **self._facts(), changed=self.changed)
        elif ("checkpoint", self.step) not in known:  # a kill came between the two
            self.log.write("checkpoint", self.step)

    def _take(self, state: State) -> None:
        self.step, self.best, self.epoch_sums = state.step, state.best, state.epoch_sums
        self.tried = self.step
        if self.step > self.steps:
            raise OptionError(
                f"the run in {self.folder.path} is at step {self.step}, and this recipe ends after {self.steps}: "
                "schedule.epochs must be more."
            )
        if state.scaler and self.recipe.run.amp == "fp16":
            scale, good, skipped = state.scaler
            self.train_step.scale, self.train_step.good, self.train_step.skipped = scale, int(good), int(skipped)
        done = f"finished: {self.steps:,} steps" if self.step == self.steps else f"going on from step {self.step:,}"
        self.watch.say(f"The run in {self.folder.path} is {done}.")
        if state.processes != self.group.world:
            words = f"{self.group.world} processes instead of {state.processes}"
            self.watch.say(f"It goes on with {words}: the same bits are promised for the same number only.")

    def _check_same(self, state: State, allow_change: bool) -> None:
        """The images must be the same. What else decides the bits is told where it differs, and refused where bits count."""
        now = self._state({})
        if state.data != now.data or (state.content and now.content and state.content != now.content):
            raise OptionError(
                f"the images are not those that the run in {self.folder.path} began with: {self.recipe.data.name} has changed. "
                "Bring them back, or choose another --out."
            )
        was, here = ({**each.versions, **each.machine} for each in (state, now))
        changed = [f"{name} {was[name]} -> {here.get(name)}" for name in was if was[name] != here.get(name)]
        if not changed or state.step >= self.steps:
            return
        told = f"not all is as it was when the run in {self.folder.path} was saved: {', '.join(changed)}."
        if was.get("threads") != here.get("threads"):
            told += f" OMP_NUM_THREADS={was['threads']} brings the threads back."
        if self.recipe.run.deterministic and not allow_change:
            raise OptionError(
                f"{told} It would end in other bits, and run.deterministic is set: bring back what has changed, or go on with "
                "--allow-config-change, which is noted in the journal."
            )
        self.changed = [*self.changed, *changed]
        warnings.warn(f"{told} The same bits are promised only where all of this is the same.", stacklevel=2)

    def _state(self, tensors: dict[str, dict[str, Tensor]]) -> State:
        step = self.train_step
        return State(
            step=self.step,
            tensors=tensors,
            best=self.best,
            epoch_sums=self.epoch_sums,
            scaler=[step.scale, step.good, step.skipped] if self.recipe.run.amp == "fp16" else [],
            processes=self.group.world,
            data=self.sets.fingerprint,
            content=self.sets.content,
            versions=versions(),
            machine=machine(self.group.device),
        )

    def _facts(self) -> dict[str, Any]:
        sets, model = self.sets, self.train_step.model
        return {
            "model": model.config.name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "config": model.config.to_dict(),
            "data": sets.train.name,
            "variant": sets.train.variant,
            "classes": list(sets.train.classes),
            "train_images": len(sets.train) - len(sets.bad_train),
            "eval_images": 0 if sets.eval is None else len(sets.eval) - len(sets.bad_eval),
            "evaluated": self.recipe.data.evaluated,
            "eval_fingerprint": "" if sets.eval is None else sets.eval.fingerprint,
            "eval_content": sets.eval_content,
            "bad_images": sets.bad_images,
            "path": self.stream.path,
            "notes": list(self.stream.notes),
            "steps": self.steps,
            "steps_per_epoch": self.stream.steps_per_epoch,
            "recipe": self.recipe.digest,
            "device": provenance.device_name(self.group.device),
            "processes": self.group.world,
            "versions": versions(),
            "machine": machine(self.group.device),
        }

    # --- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """All steps that are left, with evaluations and checkpoints where they are due."""
        run, per_epoch = self.recipe.run, self.stream.steps_per_epoch
        if type(self.watch) is not Quiet and self.step < self.steps:
            sizes = {"steps": self.steps, "done": self.step, "processes": self.group.world}
            self.watch.say(summary(self.train_step.model, self.sets, self.stream, self.recipe, **sizes))
        for note in self.stream.notes:
            self.watch.say(note)
        batches, clock = self.stream.batches(self.step, self.steps), Clock()
        try:
            while self.step < self.steps:
                metrics, lr = self._take_step(batches)
                self._tell(metrics, lr, clock.lap())
                due = self.step == self.steps or self.step % (per_epoch * run.eval_every) == 0
                if due:
                    self._evaluate(self.step // per_epoch)
                is_best = due and self.best.get("step") == self.step
                save_due = self.step == self.steps or (self.step % run.save_every == 0 if run.save_every else due)
                if is_best or save_due:
                    self._save()
                if self.group.any(bool(self.signals.received or self.reason)):
                    if self.tried != self.step:
                        self._save()
                    raise self._stopped()
                if due or self.tried == self.step:
                    clock.skip()
        finally:
            self.watch.end()

    def _take_step(self, batches: Iterator[Batch]) -> tuple[StepMetrics, float]:
        """The next step, and its learning rate."""
        step, stream, peak = self.step, self.stream, self.recipe.optim.lr * self.recipe.lr_scale
        factor = lr_factor(step, self.steps, stream.steps_per_epoch, self.recipe.schedule, peak)
        try:
            metrics = self.train_step.step(step, batches, factor)
        except DmstError as error:
            # The state before the step is saved: nothing is lost. What fails on one process only is not waited for.
            if self.tried != step and (self.group.world == 1 or isinstance(error, NonFiniteError)):
                with suppress(DmstError):
                    self._save()
            raise
        self.step += 1
        count = stream.batch_size
        self.epoch_sums = np.add(self.epoch_sums, (metrics.loss * count, metrics.accuracy * count, count)).tolist()
        return metrics, peak * factor

    def _tell(self, metrics: StepMetrics, lr: float, seconds: float) -> None:
        """The step that was taken: some to the journal, all to who watches."""
        per_epoch = self.stream.steps_per_epoch
        values = {
            "epoch": round(self.step / per_epoch, 4),
            "loss": metrics.loss,
            "accuracy": metrics.accuracy,
            "lr": lr,
            "norm": metrics.norm,
            "images_per_s": round(self.recipe.run.batch_size / seconds, 1),
            "seconds": seconds,
        }
        if self.step % max(1, per_epoch // 20) == 0 or self.step % per_epoch == 0:
            self.log.write("step", self.step, **values)
        self.watch.step(self.step, self.steps, values)

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _models(self) -> dict[str, VisionModel]:
        """What is evaluated: the weights of the last step, and their running mean."""
        mean = self.train_step.mean
        return {"model": self.train_step.model} | ({} if mean is None else {"ema": mean.model})

    def _score(self) -> None:
        assert self.eval_stream is not None
        amp = self.recipe.run.amp
        self.scores = {name: evaluate(each, self.eval_stream, self.group, amp=amp) for name, each in self._models().items()}

    def _evaluate(self, epoch: int) -> None:
        loss, right, count = self.epoch_sums
        self.epoch_sums = [0.0, 0.0, 0.0]
        values: dict[str, Any] = {"epoch": epoch, "train_loss": loss / max(count, 1), "train_accuracy": right / max(count, 1)}
        if self.eval_stream is not None:
            self._score()
            values |= {name: score.to_dict() for name, score in self.scores.items()}
            choice = self.train_step.choice
            top1 = self.scores[choice].top1
            if not self.best or top1 > self.best["top1"]:
                self.best = {"step": self.step, "epoch": epoch, "top1": top1, "of": self.recipe.data.evaluated}
            values["best"] = self.best
            with self.group.together("measuring the layers"):
                if self.group.main and self.probes:
                    images, _ = self._sample(64)
                    values |= {name: probe(self._models()[choice].eval(), images) for name, probe in self.probes.items()}
            of = " (running mean of the weights)" if choice == "ema" else ""
            self.watch.say(f"epoch {epoch}: loss {values['train_loss']:.4f}, top-1 {top1:.2%} on {self.sets.eval}{of}")
        self.log.write("evaluation", self.step, **values)
        if self.stop_rule is not None and self.step < self.steps:
            with self.group.together("asking the stop rule"):
                if self.group.main:
                    events = journal.read(self.folder.path / journal.NAME)
                    self.reason = self.stop_rule([event for event in events if event["event"] == "evaluation"])
            self.reason = self.group.broadcast_text(self.reason)

    def _sample(self, most: int) -> tuple[Tensor, Tensor]:
        """The first images of what is evaluated."""
        assert self.eval_stream is not None
        images: list[Tensor] = []
        labels: list[Tensor] = []
        for batch in self.eval_stream:
            images.append(batch.images.to(next(self.train_step.model.parameters()).dtype))
            labels.append(batch.labels)
            if sum(map(len, labels)) >= most:
                break
        return torch.cat(images)[:most], torch.cat(labels)[:most]

    # --- keeping -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        weights = {name: model.state_dict() for name, model in self._models().items()}
        return weights | {"optim": self.train_step.optimizer.state()}

    def _save(self) -> None:
        tensors = self._tensors()
        if self.group.world > 1 and not self.group.all_same(hashlib.sha256(to_bytes(tensors["model"])).hexdigest()):
            raise NonFiniteError(f"after step {self.step} the processes have different weights: the run stops, unsaved.")
        with self.group.together("saving"):
            if self.group.main:
                try:
                    self.log.sync()
                    self.folder.save(self._state(tensors))
                    self._prune()
                except FullDiskError as error:
                    if not self.log.keep_going:
                        raise
                    self.watch.say(f"{error} Training goes on, as asked.")
                else:
                    self.log.write("checkpoint", self.step)
        self.tried = self.step

    def _prune(self) -> None:
        """The best stays, and the step just saved: damaged checkpoints may be newer."""
        self.folder.prune(self.recipe.run.keep, [self.step, *([self.best["step"]] if self.best else [])])

    def _stopped(self) -> Stopped:
        received = self.signals.received
        self.log.write("stopped", self.step, signal=received, **({"reason": self.reason} if self.reason else {}))
        saved = "which is saved" if not self.group.main or self.step in self.folder.steps() else "which could not be saved"
        told = f"Stopped after step {self.step:,} of {self.steps:,}, {saved}. The same command goes on."
        stopped = Stopped(f"{self.reason} {told}".strip(), received or signal.SIGTERM)
        if self.reason and not received:
            stopped.exit_code = STOPPED_BY_RULE
        return stopped

    def finish(self) -> Result:
        """final/ holds the chosen weights; a run that had ended stays as it is."""
        if not self.scores and self.eval_stream is not None:
            self._score()
        choice = self.train_step.choice
        model, score = self._models()[choice], self.scores.get(choice)
        final = self.folder.path / FINAL
        with self.group.together("saving the model"):
            if self.group.main and not self.ended:
                self._prune()  # a kill may have come between the last checkpoint and this
                save_model(model, final, overwrite=True)
                values = {name: each.to_dict() for name, each in self.scores.items()}
                by_class = [] if score is None else [list(pair) for pair in score.by_class]
                self.log.write("end", self.step, final=choice, by_class=by_class, best=self.best, **values)
            if self.group.main:
                for path in self.folder.path.iterdir():
                    if LEFT.fullmatch(path.name):
                        atomic.remove(path)
        if score is not None:
            self.watch.say(f"{self.sets.eval}: {score.words} of {score.images:,} images")
        if bad := self.sets.bad_images:
            more = f" and {len(bad) - LISTED:,} more (all are in {journal.NAME})" if len(bad) > LISTED else ""
            count = "1 image" if len(bad) == 1 else f"{len(bad):,} images"
            self.watch.say(f"{count} could not be read and did not count: {', '.join(bad[:LISTED])}{more}")
        self.watch.say(f"The model is {final}: dmst.load_model({str(final)!r})")
        events = list(journal.read(self.folder.path / journal.NAME)) if self.group.main else []
        sample = self._sample(SAMPLE) if self.group.main and self.eval_stream is not None else None
        self.train_step.leave()
        return Result(self.folder.path, model.eval(), score, sample, events)


@contextmanager
def _deterministic(asked: bool) -> Iterator[None]:
    """Only algorithms that repeat to the bit, where the recipe asks for it."""
    was = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if asked:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0])
        torch.backends.cudnn.benchmark = was[1]


def versions() -> dict[str, str]:
    return {
        "dmst": dmst.__version__, "torch": str(torch.__version__), "numpy": np.__version__, "Pillow": PIL.__version__,
        "Python": platform.python_version(),
    }  # fmt: skip


def machine(device: torch.device) -> dict[str, Any]:
    """What else changes the bits: on a CPU the order of sums follows from the threads, and rounding from the instructions."""
    if device.type != "cpu":
        return {"device": provenance.device_name(device)}
    return {"device": "CPU", "threads": torch.get_num_threads(), "instructions": torch.backends.cpu.get_cpu_capability()}
