"""`dmst doctor`: what is installed, which kernel each operator uses here and why, and whether each kernel is right here.

    gather()                 Facts      versions, devices, what does not import
    operator_table(device)   [Row]      operator, kernel in training and in inference, why
    self_test(devices)       [Check]    what runs here, in training and in inference, against float64
    examine(facts, checks)   [Finding]  what is wrong, each with its remedy: a function of its arguments alone

A problem is something that dmst needs and that does not work; a note is something optional. Nothing is saved or fetched.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import platform
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

import dmst
from dmst.errors import PAIR_REMEDY
from dmst.kernels import choice, closed_form, reference, silent
from dmst.kernels.attempt import anew
from dmst.operators import OPERATORS, create
from dmst.operators.family import TokenStatistics
from dmst.terminal import Terminal, say

# --- what is here ---------------------------------------------------------------------------------------------------

PACKAGES = ("triton", "numpy", "pillow", "safetensors", "torchvision", "timm")
OPTIONAL = ("torchvision", "timm")  # the others are imported by dmst itself: without them there is no `dmst doctor`


@dataclass(frozen=True)
class Device:
    name: str  # as torch takes it
    what: str
    capability: tuple[int, int] = (0, 0)  # of the CPU


@dataclass(frozen=True)
class Facts:
    """A machine, as far as `examine` looks at it."""

    versions: Mapping[str, str | None]  # None: absent
    devices: tuple[Device, ...]  # the CPU first, then what torch can use
    cuda_build: str | None = None  # of torch
    gpu: bool = False  # an NVIDIA GPU, seen without torch
    triton: str = ""  # what is wrong with it
    broken: Mapping[str, str] = field(default_factory=dict)  # package -> why it does not import
    operators: tuple[str, ...] = ()  # what is wrong with those that other packages bring

    @property
    def best(self) -> Device:
        return max(self.devices, key=lambda device: device.capability)


def gather() -> Facts:
    """Look at this machine."""
    versions = {name: next((d.version for d in metadata.distributions(name=name)), None) for name in PACKAGES}
    return Facts(
        {"dmst": dmst.__version__, "Python": platform.python_version(), "torch": torch.__version__, **versions},
        (Device("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads"), *_cuda_devices()),
        cuda_build=torch.version.cuda,
        gpu=_gpu_seen(),
        triton=tidy(choice.triton_problem()),
        broken={name: problem for name in OPTIONAL if versions[name] and (problem := import_problem(name))},
        operators=tuple(OPERATORS.look()[1]),
    )


def import_problem(module: str) -> str:
    """Why `module` does not import; nothing where it does."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a torchvision of another torch raises RuntimeError
        return f"{type(error).__name__}: {tidy(error)}"
    return ""


def tidy(message: object) -> str:
    """The first line, without the folders of this machine."""
    line = (str(message).strip().splitlines() or [""])[0]
    return re.sub(r"(?<![\w/\\])(?:[A-Za-z]:)?[/\\](?:[^\s/\\:'\"()]+[/\\])+", "", line)


def _gpu_seen() -> bool:
    """Is there an NVIDIA GPU, torch not asked?"""
    command = shutil.which("nvidia-smi")
    return command is not None and "GPU " in subprocess.run([command, "-L"], capture_output=True, text=True).stdout


def _cuda_devices() -> list[Device]:
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(index)
        what = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}"
        found.append(Device(f"cuda:{index}", what, (card.major, card.minor)))
    return found


# --- which kernel, and why ------------------------------------------------------------------------------------------

WIDTH, HEADS = 384, 8
NAMES = {closed_form.attend: "closed form", silent.attend: "silent heads skipped", reference.attend: "reference"}


@dataclass(frozen=True)
class Row:
    operator: str
    training: str
    inference: str
    why: str


def operator_table(device: torch.device) -> list[Row]:
    """What computes each operator on this device, in the dtype that is usual there, asked of `choice`."""
    dtype, rows = usual(device), []
    for name in OPERATORS.look()[0]:
        try:
            operator = create(name, WIDTH, HEADS, device="meta")  # nothing is computed
        except Exception as error:  # somebody else's may be for other shapes
            if name in OPERATORS.built_in:
                raise
            rows.append(Row(name, "-", "-", f"cannot be built: {tidy(error)}"))
            continue
        if isinstance(operator, TokenStatistics):
            z = torch.empty(1, 4, WIDTH, device=device)
            why = choice.verdict(device, dtype, operator.form, WIDTH, "auto").why
            rows.append(Row(name, kernel_of(operator, z, dtype, True), kernel_of(operator, z, dtype, False), tidy(why)))
        else:
            rows.append(Row(name, "plain torch", "plain torch", "has no fused kernel"))
    return rows


def kernel_of(operator: TokenStatistics, z: Tensor, dtype: torch.dtype, grad: bool) -> str:
    """Float32 tokens, and products in `dtype`, as autocast has them."""
    with choice.use_kernels("auto"), torch.set_grad_enabled(grad):
        return NAMES.get(choice.kernel_for(z, operator.weights(), operator.form, dtype), "fused")


def usual(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


# --- is it right ----------------------------------------------------------------------------------------------------

BARS = {torch.float32: (1e-6, 2e-6), torch.bfloat16: (5e-3, 1e-2), torch.float16: (1e-3, 2e-3)}  # output, gradients
SHAPE = 2, 401, 384  # where leaving six of eight heads out pays


@dataclass(frozen=True)
class Check:
    """A kernel in one dtype, in training (output and gradients) or in inference."""

    device: str
    operator: str
    kernel: str
    dtype: str
    problem: str = ""


def self_test(devices: Iterable[Device]) -> list[Check]:
    """DMSA, which uses every kernel, as these devices run it: in training, in inference, in the dtypes that are used there."""
    checks = []
    for device in (torch.device(device.name) for device in devices):
        for dtype in BARS if device.type == "cuda" else (torch.float32,):
            layer = _layer(dtype).to(device)
            for grad in (True, False):
                kernel = kernel_of(layer, torch.empty(SHAPE, device=device), dtype, grad)
                checks.append(Check(str(device), "dmsa", kernel, _name(dtype), problem_of(layer, device, dtype, grad)))
    return checks


def _layer(dtype: torch.dtype) -> TokenStatistics:
    """Weights that `dtype` can hold; gates that differ, and some close."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer: Any = create("dmsa", SHAPE[-1], HEADS, membership_bias=True)
        layer.assign.bias.copy_(0.4 * torch.arange(HEADS))
    return layer.to(dtype).float()


def problem_of(layer: TokenStatistics, device: torch.device, dtype: torch.dtype, grad: bool) -> str:
    """What is wrong with a layer as it is called, beside `reference` in float64 on the CPU with the same numbers."""
    chance = torch.Generator().manual_seed(0)
    z, pull = (torch.randn(SHAPE, generator=chance).to(dtype).float() for _ in range(2))
    twin = copy.deepcopy(layer).cpu().double()

    def run(call: Callable[[Tensor], Tensor], z: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The output; in training also the gradients of tokens and weights."""
        with torch.set_grad_enabled(grad):
            out = call(z.requires_grad_(grad))
        gradients = torch.autograd.grad(out, (z, *parameters), pull.to(out)) if grad else ()
        return [each.detach().cpu().double() for each in (out, *gradients)]

    exact = run(lambda z: reference.attend(z, twin.weights(), twin.form, dtype=z.dtype), z.double(), twin.parameters())
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 is somebody's choice, no error of a kernel
    anew()
    try:
        with warnings.catch_warnings(), choice.use_kernels("auto"), torch.autocast(device.type, dtype, dtype.itemsize == 2):
            warnings.filterwarnings("error", "The fused kernel")  # it gave way to plain torch, whose numbers prove nothing
            found = run(layer, z.to(device), layer.parameters())
    except Exception as error:  # whatever it is, this kernel does not work
        return f"{type(error).__name__}: {tidy(error)}"
    finally:
        torch.set_float32_matmul_precision(precision)
    output, *gradients = [((x - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True)]
    most_output, most_gradient = BARS[dtype]
    fine = output <= most_output and all(each <= most_gradient for each in gradients)  # NaN is not
    return "" if fine else f"output off by {output:.1e}" + (f", gradients by {max(gradients):.1e}" if grad else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- what is wrong --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    level: str  # problem | note
    what: str
    remedy: str


BROKEN = {
    "torchvision": f"{PAIR_REMEDY}; dmst itself does not need torchvision, only dmst[timm] does",
    "timm": "pip install --force-reinstall 'dmst[timm]'; dmst itself does not need it",
}


def examine(facts: Facts, checks: Iterable[Check]) -> list[Finding]:
    """What is wrong on this machine, problems first."""
    problems, notes, best = [], [], facts.best
    if facts.gpu and best.name == "cpu":
        what = f"this machine has an NVIDIA GPU, but torch {facts.versions['torch']}"
        if facts.cuda_build:
            what += f" for CUDA {facts.cuda_build} cannot use it"
            remedy = "unset CUDA_VISIBLE_DEVICES if it hides the GPU; install an NVIDIA driver new enough for this CUDA; "
            remedy += "in a container, pass the GPU in (--gpus all)"
        else:
            what += " is a CPU build"
            remedy = "install a CUDA build of torch; https://pytorch.org/get-started/locally shows the pip command"
        problems.append((what, remedy))
    if (0, 0) < best.capability < choice.OLDEST_DEVICE:
        oldest = ".".join(map(str, choice.OLDEST_DEVICE))
        what = f"{best.name} ({best.what}) is too old for the fused kernels, which need {oldest}"
        notes.append((what, "nothing to do: the plain kernels are used"))
    elif facts.triton and best.name != "cpu":
        remedy = "pip install --upgrade 'dmst[kernels]'; until then the plain kernels are used"
        problems.append((f"the fused kernels cannot be used on this GPU: {facts.triton}", remedy))
    for name, message in facts.broken.items():
        if not (name == "timm" and "torchvision" in facts.broken):  # which it imports: one cause, one finding
            notes.append((f"{name} cannot be imported: {message}", BROKEN[name]))
    notes += [(what, "only needed if you use this operator") for what in facts.operators]
    for test in checks:
        if test.problem:
            what = f"self-test of {test.operator} ({test.kernel}) in {test.dtype} on {test.device}: {test.problem}"
            remedy = 'call dmst.use_kernels("reference") first' if test.kernel == "fused" else "reinstall torch"
            problems.append((what, f"{remedy}, and report this with the output of dmst doctor --json"))
    return [Finding("problem", *each) for each in problems] + [Finding("note", *each) for each in notes]


# --- the whole ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    well: bool
    facts: Facts
    operators: list[Row]
    checks: list[Check]
    findings: list[Finding]


def diagnose() -> Report:
    """Look, test and judge."""
    facts = gather()
    checks = self_test(dict.fromkeys((facts.devices[0], facts.best)))  # of several GPUs, the newest
    findings = examine(facts, checks)
    well = all(finding.level != "problem" for finding in findings)
    return Report(well, facts, operator_table(torch.device(facts.best.name)), checks, findings)


def as_json(report: Report) -> str:
    return json.dumps(dataclasses.asdict(report), indent=1)


def show(report: Report) -> None:
    """Print the report."""
    console, facts = Terminal(), report.facts

    def table(title: str, columns: tuple[str, ...], rows: Iterable[Iterable[str]]) -> None:
        grid = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=bool(columns[0]))
        for row in rows:
            grid.add_row(*row)
        console.print(Text(title, "bold"), grid, "", sep="\n")

    versions = {name: version or "not installed" for name, version in facts.versions.items()}
    versions |= {name: f"{versions.get(name)}, cannot be imported" for name in facts.broken}
    versions["torch"] += f", CUDA {facts.cuda_build}" if facts.cuda_build else ", without CUDA"
    table("Versions", ("", ""), versions.items())
    table("Devices", ("", ""), ((device.name, device.what) for device in facts.devices))
    title = f"Kernels on {facts.best.name}, width {WIDTH}, {HEADS} heads, {_name(usual(torch.device(facts.best.name)))}"
    rows = [dataclasses.astuple(row) for row in report.operators]
    table(title, ("operator", "training", "inference", "why"), rows)
    tests = [(c.operator, c.kernel, c.device, c.dtype, "failed" if c.problem else "ok") for c in report.checks]
    table("Self-test against float64", ("operator", "kernel", "device", "dtype", "result"), tests)
    for finding in report.findings:
        say(f"{finding.level} {finding.what}", style="red" if finding.level == "problem" else "yellow")
        say(f"  remedy: {finding.remedy}")
    problems = sum(finding.level == "problem" for finding in report.findings)
    say(f"Problems found: {problems}." if problems else "No problems found.")
