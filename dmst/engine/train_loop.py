"""The loop: one function, for training from scratch and for fine-tuning, that goes on where it was killed.

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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import torch
from torch import Tensor

import dmst
from dmst import atomic, provenance
from dmst.data.loader import EvalStream, Shard
from dmst.engine import journal, prepare
from dmst.engine.checkpoint import RunFolder, State
from dmst.engine.console import Clock, Quiet
from dmst.engine.distributed import Group, joined
from dmst.engine.evaluate import Score, evaluate
from dmst.engine.optim import lr_factor, put
from dmst.engine.prepare import RECIPE
from dmst.engine.recipe import Recipe, differences, from_toml
from dmst.engine.summary import summary
from dmst.engine.train_step import StepMetrics, TrainStep
from dmst.errors import ConfigError, DmstError, FullDiskError, NonFiniteError, OptionError, Stopped
from dmst.models import VisionModel, load_model, save_model
from dmst.models.tensors import fit

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
    with joined(device, timeout) as group, _determined(recipe, group), ExitStack() as stack:
        folder = RunFolder(out)
        with group.together("opening the folder"):
            if group.main:
                stack.enter_context(folder)
        loop = _Loop(recipe, folder, group, watch if watch is not None and group.main else Quiet(), probes or {}, listeners)
        loop.stop_rule = stop_rule
        loop.prepare(data_dir, workers, dtype, allow_config_change)
        result = loop.run(keep_going_on_full_disk)
        with group.together("writing the report"):
            if group.main and report is not None:
                folder.check_held(folder.path)
                report(result)
        return result


class _Loop:
    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        group: Group,
        watch: Quiet,
        probes: Mapping[str, Probe],
        listeners: Sequence[journal.Listener],
    ) -> None:
        self.recipe, self.folder, self.group, self.watch, self.probes = recipe, folder, group, watch, probes
        self.journal = journal.Journal(folder.path if group.main else None, listeners, folder.check_held)
        self.step = 0
        self.best: dict[str, Any] = {}
        self.epoch_sums = [0.0, 0.0, 0.0]  # loss, right, images of the epoch so far
        self.last_score: dict[str, Score] = {}
        self._stop, self._process = 0, os.getpid()

    # --- before ------------------------------------------------------------------------------------------------------

    def prepare(self, data_dir: str | Path | None, workers: int, dtype: torch.dtype, allow_change: bool) -> None:
        recipe, group, run = self.recipe, self.group, self.recipe.run
        with group.together("comparing the recipe"):
            self._check_recipe(allow_change)
        with group.together("opening the data"):
            sets = prepare.open_sets(recipe, data_dir=data_dir, workers=workers, cache=self.folder, look=group.main)
        bad = json.loads(group.tell(json.dumps([sorted(sets.bad_train), sorted(sets.bad_eval)])))
        self.sets = replace(sets, bad_train=frozenset(bad[0]), bad_eval=frozenset(bad[1]))
        if not group.all_same(self.sets.fingerprint):
            raise OptionError(f"the processes find different images in {recipe.data.name}: every machine needs the same ones.")
        with group.together("building the network"):
            model = prepare.build_model(recipe, self.sets.train.classes, self.sets.channels).to(group.device, dtype)
        with group.together("preparing to train"):  # in which processes wait for each other: for none that has failed
            self.work = TrainStep(model, recipe, group)
            view = prepare.view_of(model, recipe.data.crop_pct)
            shared: dict[str, Any] = {"device": group.device, "path": recipe.data.path, "workers": workers}
            self.stream = prepare.train_stream(model, recipe, self.sets, group, workers)
            self.steps = recipe.schedule.epochs * self.stream.steps_per_epoch
            self.eval_stream = None
            if (held := self.sets.good_eval) is not None:
                size = run.eval_batch_size or run.batch_size // run.accumulate // group.world
                self.eval_stream = EvalStream(
                    held, view, batch_size=min(size, len(held)), shard=Shard(group.rank, group.world), **shared
                )  # fmt: skip
        self._resume(allow_change)
        if group.main:
            self.folder.write_text(self.folder.path / RECIPE, recipe.to_toml())

    def _check_recipe(self, allow_change: bool) -> None:
        """The recipe of an earlier start in this folder must be this one."""
        path = self.folder.path / RECIPE
        if not self.group.main or not path.exists():
            return
        old = from_toml(atomic.read(path).decode(), str(path))  # no link is followed
        changed = differences(old, self.recipe)
        if changed and not allow_change:
            told = "\n".join(f"  {line}" for line in changed)
            raise ConfigError(
                str(path), "", f"this run was started with another recipe:\n{told}\nChoose another --out, or go on with "
                "--allow-config-change, which is noted in the journal."
            )  # fmt: skip
        self.changed = changed

    changed: Sequence[str] = ()

    def _resume(self, allow_change: bool) -> None:
        """The newest checkpoint, from the main process to all."""
        told = ""
        with self.group.together("reading the checkpoint"):
            if self.group.main:
                held = sum(x.nbytes for tensors in self._tensors().values() for x in tensors.values())
                found = self.folder.newest(most=2 * held)  # another recipe's may be larger, and is told from this one below
                if found is not None:
                    told = json.dumps(vars(replace(found, tensors={})))
                    self._check_same(found, allow_change)
                    for name, tensors in self._tensors().items():
                        if name not in found.tensors:
                            raise OptionError(f"the checkpoint of step {found.step} has no {name}: its recipe was another.")
                        fit(found.tensors[name], tensors, "the checkpoint")
                        put(found.tensors[name], tensors)
        told = self.group.tell(told)
        if told:
            for tensors in self._tensors().values():
                self.group.spread(tensors.values())
            state = State(**json.loads(told))
            self.step, self.best, self.epoch_sums = state.step, state.best, state.epoch_sums
            self._tried = self._saved = self.step
            if self.step > self.steps:
                raise OptionError(
                    f"the run in {self.folder.path} is at step {self.step}, and this recipe ends after {self.steps}: "
                    "schedule.epochs must be more."
                )
            if state.scaler and self.recipe.run.amp == "fp16":
                self.work.scale, self.work.good, self.work.skipped = state.scaler
            done = f"finished: {self.steps:,} steps" if self.step == self.steps else f"going on from step {self.step:,}"
            self.watch.say(f"The run in {self.folder.path} is {done}.")
            if state.processes != self.group.world:
                words = f"{self.group.world} processes instead of {state.processes}"
                self.watch.say(f"It goes on with {words}: the same bits are promised for the same number only.")
        kept = self.journal.take_back(self.step if told else -1, ended=bool(told) and self._has_final())
        known = {(event["event"], event["step"]) for event in kept}
        self.ended = ("end", self.step) in known
        if not told or self.changed:
            self.journal.write("start", self.step, **self._facts(), changed=list(self.changed))
        elif ("checkpoint", self.step) not in known:  # a kill came between the two
            self.journal.write("checkpoint", self.step)

    ended = False  # an earlier start came to the end

    def _has_final(self) -> bool:
        """Whether final/ is there, whole, and of this recipe."""
        if self.group.main and self.step == self.steps and not self.changed:
            with suppress(DmstError):
                return load_model(self.folder.path / FINAL) is not None
        return False

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
        threads = (
            f" OMP_NUM_THREADS={was['threads']} brings the threads back." if was.get("threads") != here.get("threads") else ""
        )
        told = f"not all is as it was when the run in {self.folder.path} was saved: {', '.join(changed)}.{threads}"
        if self.recipe.run.deterministic and not allow_change:
            raise OptionError(
                f"{told} It would end in other bits, and run.deterministic is set: bring back what has changed, or go on with "
                "--allow-config-change, which is noted in the journal."
            )
        self.changed = [*self.changed, *changed]
        warnings.warn(f"{told} The same bits are promised only where all of this is the same.", stacklevel=2)

    def _state(self, tensors: dict[str, dict[str, Tensor]]) -> State:
        return State(
            step=self.step,
            tensors=tensors,
            best=self.best,
            epoch_sums=self.epoch_sums,
            scaler=[self.work.scale, self.work.good, self.work.skipped] if self.recipe.run.amp == "fp16" else [],
            processes=self.group.world,
            data=self.sets.fingerprint,
            content=self.sets.content,
            versions=versions(),
            machine=machine(self.group.device),
        )

    def _facts(self) -> dict[str, Any]:
        sets, model = self.sets, self.work.model
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

    def run(self, keep_going: bool) -> Result:
        self.keep_going = self.journal.keep_going = keep_going
        if type(self.watch) is not Quiet and self.step < self.steps:
            told = summary(
                self.work.model,
                self.sets,
                self.stream,
                self.recipe,
                steps=self.steps,
                done=self.step,
                processes=self.group.world,
            )
            self.watch.say(told)
        for note in self.stream.notes:
            self.watch.say(note)
        with _signals(self._asked_to_stop):
            self.watch.begin(self.step, self.steps)
            try:
                self._train()
            finally:
                self.watch.end()
        return self._finish()

    def _train(self) -> None:
        run, stream = self.recipe.run, self.stream
        peak = self.recipe.optim.lr * self.recipe.lr_scale
        batches = stream.batches(self.step, self.steps)
        every = max(1, stream.steps_per_epoch // 20)
        clock = Clock()
        while self.step < self.steps:
            step = self.step
            factor = lr_factor(step, self.steps, stream.steps_per_epoch, self.recipe.schedule, peak)
            try:
                told = self.work.step(step, batches, float(stream.batch_size), factor, partial(stream.indices, step))
            except DmstError as error:
                self._save_before(error)
                if self._stop and self.group.world == 1:  # a signal to all of a group ends the workers that read images too
                    raise self._stopped() from error
                raise
            self.step += 1
            seconds = clock.lap()
            self._note(told, float(stream.batch_size))
            epoch = self.step / stream.steps_per_epoch
            ends_epoch = self.step % stream.steps_per_epoch == 0
            values = {
                "epoch": round(epoch, 4), "loss": told.loss, "accuracy": told.accuracy, "lr": peak * factor, "norm": told.norm,
                "images_per_s": round(run.batch_size / seconds, 1), "seconds": seconds,
            }  # fmt: skip
            if self.step % every == 0 or ends_epoch:
                self.journal.write("step", self.step, **_finite(values))
            self.watch.step(self.step, self.steps, values)
            due = ends_epoch and (round(epoch) % run.eval_every == 0 or self.step == self.steps)
            if due:
                self._evaluate(round(epoch))
            best = due and self.best.get("step") == self.step
            if best or (due if not run.save_every else self.step % run.save_every == 0 or self.step == self.steps):
                self._save()
            if self.group.any(bool(self._stop or self._verdict)):
                if self._tried != self.step:
                    self._save()
                raise self._stopped()
            if due or self._tried == self.step:
                clock.skip()

    stop_rule: StopRule | None = None
    _verdict = ""  # of the stop rule, the same on all processes
    _tried = -1  # the step that was to be saved last, the same on all processes
    _saved = -1  # the step that was

    def _note(self, told: StepMetrics, count: float) -> None:
        for i, value in enumerate((told.loss * count, told.accuracy * count, count)):
            self.epoch_sums[i] += value

    def _evaluate(self, epoch: int) -> None:
        loss, right, count = self.epoch_sums
        self.epoch_sums = [0.0, 0.0, 0.0]
        values: dict[str, Any] = {"epoch": epoch, "train_loss": loss / max(count, 1), "train_accuracy": right / max(count, 1)}
        if self.eval_stream is not None:
            self.watch.pause("evaluating")
            self.last_score = {}
            for name, model in self._judged().items():
                self.last_score[name] = score = evaluate(model, self.eval_stream, self.group, amp=self.recipe.run.amp)
                values[name] = score.told()
            chosen = self.last_score[self._chosen()]
            if not self.best or chosen.top1 > self.best["top1"]:
                self.best = {"step": self.step, "epoch": epoch, "top1": chosen.top1, "of": self.recipe.data.evaluated}
            values["best"] = self.best
            if self.group.main and self.probes:
                images, _ = self._sample(64)
                for name, probe in self.probes.items():
                    values[name] = probe(self._judged()[self._chosen()].eval(), images)
            of = " (running mean of the weights)" if self._chosen() == "ema" else ""
            self.watch.say(f"epoch {epoch}: loss {values['train_loss']:.4f}, top-1 {chosen.top1:.2%} on {self.sets.eval}{of}")
        self.journal.write("evaluation", self.step, **values)
        if self.stop_rule is not None and self.step < self.steps:
            verdict = ""
            with self.group.together("judging the evaluation"):
                if self.group.main:
                    events = journal.read(self.folder.path / journal.NAME)
                    verdict = self.stop_rule([event for event in events if event["event"] == "evaluation"])
            self._verdict = self.group.tell(verdict)

    def _sample(self, most: int) -> tuple[Tensor, Tensor]:
        """The first images that count, of what is evaluated."""
        assert self.eval_stream is not None
        images: list[Tensor] = []
        labels: list[Tensor] = []
        for batch in self.eval_stream:
            counted = batch.weight > 0
            images.append(batch.images[counted].to(next(self.work.model.parameters()).dtype))
            labels.append(batch.labels[counted])
            if sum(map(len, labels)) >= most:
                break
        return torch.cat(images)[:most], torch.cat(labels)[:most]

    def _judged(self) -> dict[str, VisionModel]:
        return {"model": self.work.model} | ({} if self.work.mean is None else {"ema": self.work.mean.model})

    def _chosen(self) -> str:
        """Which weights final/ holds, and which decide what is best."""
        return self.work.choice

    # --- keeping -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        found = {"model": self.work.model.state_dict(), "optim": self.work.optimizer.state()}
        return found if self.work.mean is None else found | {"ema": self.work.mean.model.state_dict()}

    def _save(self) -> None:
        self.watch.pause("saving")
        tensors = self._tensors()
        if self.group.world > 1 and not self.group.all_same(digest_of(tensors["model"])):
            raise NonFiniteError(f"after step {self.step} the processes have different weights: the run stops, unsaved.")
        with self.group.together("saving"):
            if self.group.main:
                try:
                    self.journal.sync()
                    self.folder.save(self._state(tensors))
                    self._prune()
                except FullDiskError as error:
                    if not self.keep_going:
                        raise
                    self.watch.say(f"{error} Training goes on, as asked.")
                else:
                    self._saved = self.step
                    self.journal.write("checkpoint", self.step)
        self._tried = self.step

    def _prune(self) -> None:
        self.folder.prune(self.recipe.run.keep, [self.best["step"]] if self.best else [])

    def _save_before(self, error: DmstError) -> None:
        """After a step that failed, the state before it: nothing is lost. What fails on one process only is not waited for."""
        if self._tried != self.step and (self.group.world == 1 or isinstance(error, NonFiniteError)):
            try:
                self._save()
            except DmstError as another:
                self.watch.say(str(another))

    def _finish(self) -> Result:
        """final/ holds the chosen weights; a run that had ended stays as it is."""
        if not self.last_score and self.eval_stream is not None:
            for name, model in self._judged().items():
                self.last_score[name] = evaluate(model, self.eval_stream, self.group, amp=self.recipe.run.amp)
        model = self._judged()[self._chosen()]
        score = self.last_score.get(self._chosen())
        with self.group.together("saving the model"):
            if self.group.main and not self.ended:
                self.folder.check_held(self.folder.path / FINAL)
                self._prune()  # a kill may have come between the last checkpoint and this
                save_model(model, self.folder.path / FINAL, overwrite=True)
                values = {name: each.told() for name, each in self.last_score.items()}
                by_class = [] if score is None else [list(pair) for pair in score.by_class]
                self.journal.write("end", self.step, final=self._chosen(), by_class=by_class, best=self.best, **values)
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
        self.watch.say(f"The model is {self.folder.path / FINAL}: dmst.load_model({str(self.folder.path / FINAL)!r})")
        events = list(journal.read(self.folder.path / journal.NAME)) if self.group.main else []
        sample = self._sample(SAMPLE) if self.group.main and self.eval_stream is not None else None
        self.work.leave()
        return Result(self.folder.path, model.eval(), score, sample, events)

    def _stopped(self) -> Stopped:
        self.journal.write("stopped", self.step, signal=self._stop, **({"reason": self._verdict} if self._verdict else {}))
        saved = "which is saved" if self._saved == self.step or not self.group.main else "which could not be saved"
        told = f"Stopped after step {self.step:,} of {self.steps:,}, {saved}. The same command goes on."
        stopped = Stopped(f"{self._verdict} {told}".strip(), self._stop or signal.SIGTERM)
        if self._verdict and not self._stop:
            stopped.exit_code = STOPPED_BY_RULE
        return stopped

    def _asked_to_stop(self, number: int) -> None:
        if os.getpid() != self._process:  # a loader's worker, which has our handlers: the main process says when it ends
            return
        if self._stop:
            if number == signal.SIGTERM and torch.distributed.is_torchelastic_launched():
                return  # once by the cluster, to every process of a job, and once by torchrun, which passes its own on
            os._exit(128 + number)  # asked twice: at once; what is saved is whole
        self._stop = number
        with suppress(RuntimeError):  # in the middle of another line
            self.watch.say("Stopping after this step; again to stop at once.")


@contextmanager
def _signals(stop: Callable[[int], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `stop`; only the main thread may ask for signals."""
    old: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            old[number] = signal.signal(number, lambda found, frame: stop(found))
    except ValueError:
        pass
    try:
        yield
    finally:
        for each, handler in old.items():
            signal.signal(each, handler)


@contextmanager
def _determined(recipe: Recipe, group: Group) -> Iterator[None]:
    """Only algorithms that repeat to the bit, where the recipe asks for it."""
    if not recipe.run.deterministic:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
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


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names and bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: what is not finite is left out."""
    return {key: value for key, value in values.items() if not isinstance(value, float) or np.isfinite(value)}
