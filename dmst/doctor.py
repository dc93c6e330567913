"""`dmst doctor`: what is installed, which kernel each operator uses here and why, and whether each kernel is right here.

    gather()                 Facts      versions, devices, what does not import
    operator_table(device)   [Row]      operator, kernel in training and in inference, why
    self_test(devices)       [Check]    each kernel in each dtype against the float64 reference: output and every gradient
    examine(facts, checks)   [Finding]  what is wrong, each with its remedy: a function of its arguments alone
    diagnose()               Report     all of it; `show` prints it, `as_json` writes it out

A problem is something that dmst needs and that does not work; a note is something optional. Nothing is saved or fetched.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch import Tensor

import dmst
from dmst.errors import PAIR_REMEDY, asked_by, build_of, misfit
from dmst.kernels import Form, Weights, choice, closed_form, reference, silent
from dmst.kernels.attempt import anew
from dmst.operators import OPERATORS, Operator, create
from dmst.operators.family import TokenStatistics
from dmst.terminal import Terminal, say

# --- what is here ---------------------------------------------------------------------------------------------------

NEEDED = {"numpy": "numpy", "pillow": "PIL.Image", "safetensors": "safetensors"}  # package -> what to import
OPTIONAL = {"torchvision": "torchvision", "timm": "timm"}


class Device(NamedTuple):
    name: str  # as torch takes it
    what: str
    capability: tuple[int, int] = (0, 0)  # of the CPU


class Facts(NamedTuple):
    """A machine, as far as `examine` looks at it."""

    versions: Mapping[str, str | None]  # None: absent
    devices: tuple[Device, ...]  # the CPU first, then what torch can use
    cuda_build: str | None = None  # of torch
    cuda_says: str = ""  # torch's complaint when it was asked for its devices
    gpu: bool = False  # an NVIDIA GPU, seen without torch
    hidden: bool = False  # from torch, on purpose
    triton: str = ""  # what is wrong with it
    triton_asked: str = ""  # the version that torch asks for, if it asks for one
    broken: Mapping[str, str] = {}  # package -> why it does not import
    operators: tuple[str, ...] = ()  # what is wrong with those that other packages bring
    misfit: str = ""  # torch and torchvision, where they are of two builds

    @property
    def best(self) -> Device:
        return max(self.devices, key=lambda device: device.capability)


def gather() -> Facts:
    """Look at this machine."""
    tried = NEEDED | {name: module for name, module in OPTIONAL.items() if importlib.util.find_spec(module)}
    with ThreadPoolExecutor(2) as pool:
        messages = pool.map(import_problem, tried.values())
        devices, complaint = _cuda_devices()
        broken = {name: message for name, message in zip(tried, messages, strict=True) if message}
    versions = {p: next((d.version for d in metadata.distributions(name=p)), None) for p in ("triton", *NEEDED, *OPTIONAL)}
    versions["torchvision"] = build_of("torchvision") or versions["torchvision"]
    return Facts(
        {"dmst": dmst.__version__, "Python": platform.python_version(), "torch": torch.__version__, **versions},
        (Device("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads"), *devices),
        cuda_build=torch.version.cuda,
        cuda_says=complaint,
        gpu=_gpu_seen(),
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"),
        triton=tidy(choice.triton_problem()),
        triton_asked=asked_by("torch", "triton"),
        broken=broken,
        operators=tuple(OPERATORS.look()[1]),
        misfit=misfit() if "torchvision" in broken else "",
    )


def import_problem(module: str) -> str:
    """Why `module` does not import; nothing where it does. In another process: here, half an import would stay behind."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", f"import {module}"]
    try:
        child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "its import takes more than a minute"
    said = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
    return tidy(said[-1]) if child.returncode else ""


def tidy(message: object) -> str:
    """The first line, without the folders of this machine."""
    line = (str(message).strip().splitlines() or [""])[0]
    return re.sub(r"(?<![\w/\\])(?:[A-Za-z]:)?[/\\](?:[^\s/\\:'\"()]+[/\\])+", "", line)


def _gpu_seen() -> bool:
    """Is there an NVIDIA GPU, torch not asked? A container may see its host's driver, so a device node must be there too."""
    if Path("/proc/driver/nvidia/version").exists() and any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    try:
        listed = subprocess.run([shutil.which("nvidia-smi") or "", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU " in listed.stdout


def _cuda_devices() -> tuple[list[Device], str]:
    """What torch can use, and its complaint if it has one."""
    found = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
                card = torch.cuda.get_device_properties(index)
                what = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}"
                torch.ones(1, device=f"cuda:{index}").add(1).item()  # a card may be listed and yet run nothing
                found.append(Device(f"cuda:{index}", what, (card.major, card.minor)))
        except Exception as error:  # a driver has many ways to fail, and each means the same here
            return found, tidy(error)
    return found, tidy(said[0].message) if said else ""


# --- which kernel, and why ------------------------------------------------------------------------------------------

WIDTH, HEADS = 384, 8


class Row(NamedTuple):
    operator: str
    training: str
    inference: str
    why: str
    dtypes: tuple[str, ...]


def operator_table(device: torch.device) -> list[Row]:
    """What computes each operator on this device, asked of `choice`."""
    rows: dict[tuple[str, str, str, str], tuple[str, ...]] = {}
    for name in OPERATORS.look()[0]:
        try:
            operator = create(name, WIDTH, HEADS, device="meta")  # nothing is computed
        except Exception as error:  # somebody else's may be for other shapes
            if name in OPERATORS.built_in:
                raise
            rows[name, "-", "-", f"cannot be built: {tidy(error)}"] = ()
            continue
        for dtype in (torch.bfloat16, torch.float32):
            training, inference = (_kernel_of(operator, device, dtype, grad) for grad in (True, False))
            why = "has no fused kernel"
            if isinstance(operator, TokenStatistics):
                why = tidy(choice.verdict(device, dtype, operator.form, WIDTH, "auto").why)
            key = (name, training, inference, why)
            rows[key] = (*rows.get(key, ()), _name(dtype))
    return [Row(*key, dtypes) for key, dtypes in rows.items()]


def _kernel_of(operator: Operator, device: torch.device, dtype: torch.dtype, grad: bool) -> str:
    if not isinstance(operator, TokenStatistics):
        code = getattr(type(operator).forward, "__code__", None)  # what somebody compiled has none
        return "torch attention" if code and "scaled_dot_product_attention" in code.co_names else "plain torch"
    z = torch.empty(1, 4, WIDTH, device=device)  # float32 tokens and products in `dtype`, as autocast has them
    with choice.use_kernels("auto"), torch.set_grad_enabled(grad):
        kernel = choice.kernel_for(z, operator.weights(), operator.form, dtype)
    names = {closed_form.attend: "closed form", silent.attend: "silent heads skipped", reference.attend: "reference"}
    return names.get(kernel, "fused")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- is it right ----------------------------------------------------------------------------------------------------

# Relative error of the output and of a gradient: those of tests/test_precision.py.
BARS = {torch.float32: (1e-6, 2e-6), torch.bfloat16: (5e-3, 1e-2), torch.float16: (1e-3, 2e-3)}
CANCELLING = ("temperature", "theta", "assign_bias")  # single sums whose terms cancel: only gross errors of theirs count
SMALL, LARGE = (2, 70, 96, 2), (2, 401, 384, 8)  # b, n, d, heads; the second: where leaving six of eight heads out pays
MANY, LONG = (256, 64, 64, 2), (2, 256, 128, 4)  # where the fused layer takes other routes: many samples, and long ones
BIASED = {"membership_bias": True}  # the mean of random scores is near 0: biases make gates differ, and close
MEMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "tssa": ("tssa", {}),
    **{f"dmsa {mode}": ("dmsa", {"mode": mode, **BIASED}) for mode in ("listing", "equation", "proximal")},
    "tpusa": ("tpusa", {}),  # no bias: a shift of its scores changes nothing, so that gradient would be 0
    "tpsusa": ("tpsusa", BIASED),
    "gated_channel": ("gated_channel", BIASED),
}
Kernel = Callable[..., Tensor]


class Check(NamedTuple):
    """One kernel in one dtype: the worst of all members."""

    device: str
    kernel: str
    dtype: str
    output: float
    output_bar: float
    gradient: float | None  # None: the kernel is for inference alone
    gradient_bar: float
    failures: tuple[str, ...]  # "member: what is wrong"


def self_test(devices: Iterable[Device], tick: Callable[[str, float], object] = lambda what, done: None) -> list[Check]:
    """Every kernel on these devices, in the dtypes that are used there; `tick` hears what is next and the share done."""
    jobs = [
        (device, kernel, dtype, attend)
        for device in (torch.device(device.name) for device in devices)
        for kernel, attend in kernels_on(device).items()
        for dtype in (BARS if device.type == "cuda" else (torch.float32,))
    ]
    precision, checks = torch.get_float32_matmul_precision(), []
    torch.set_float32_matmul_precision("highest")  # TF32 is somebody's choice, no error of a kernel
    try:
        for done, (device, kernel, dtype, attend) in enumerate(jobs):
            tick(f"{kernel}, {_name(dtype)}, {device}", done / len(jobs))
            checks.append(check(device, kernel, dtype, attend))
    finally:
        torch.set_float32_matmul_precision(precision)
    return checks


def kernels_on(device: torch.device) -> dict[str, Kernel]:
    """Every kernel that this device can run."""
    found: dict[str, Kernel] = {"reference": reference.attend, "closed form": closed_form.attend}
    if device.type == "cpu":
        found["silent heads skipped"] = silent.attend
    if choice.verdict(device, torch.float32, Form(SMALL[3]), SMALL[2], "fused").fused:
        from dmst.kernels import registered  # imports Triton

        anew()
        found["fused"] = registered.attend
    return found


def check(device: torch.device, kernel: str, dtype: torch.dtype, attend: Kernel) -> Check:
    """One kernel in one dtype, for every member that it serves."""
    inference = kernel == "silent heads skipped"
    bars, worst, failures = BARS[dtype], [0.0, 0.0], []
    tried = [(member, *case, LARGE if inference else SMALL) for member, case in MEMBERS.items()]
    if kernel == "fused" and device.type == "cuda":
        tried += [(f"dmsa listing at {size[:3]}", *MEMBERS["dmsa listing"], size) for size in (MANY, LONG)]
    for member, name, options, (*shape, heads) in tried:
        operator = create(name, shape[-1], heads, device="meta", **options)  # its form, and the shapes of its weights
        assert isinstance(operator, TokenStatistics)
        if inference and operator.form.gate != "sparsemax":
            continue
        try:
            with _aside(device):
                errors = measure(attend, operator, shape, device, dtype, inference)
        except Exception as error:  # whatever it is, this kernel does not work
            failures.append(f"{member}: {type(error).__name__}: {tidy(error)}")
            continue
        for part, off in errors.items():
            which, cancelling = int(part != "output"), part in CANCELLING
            worst[which] = max(worst[which], 0.0 if cancelling else off)
            if off > bars[which] * (100 if cancelling else 1):
                failures.append(f"{member}: {('', 'gradient of ')[which]}{part} off by {off:.1e}")
    gradient = None if inference else worst[1]
    return Check(str(device), kernel, _name(dtype), worst[0], bars[0], gradient, bars[1], tuple(failures))


def _aside(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On a stream of its own, where the fused layer takes the routes that CUDA graphs record."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()


def measure(
    attend: Kernel, operator: TokenStatistics, shape: list[int], device: torch.device, dtype: torch.dtype, inference: bool
) -> dict[str, float]:
    """Relative error of the output and of each gradient, against float64 of the same numbers, which `dtype` can hold."""
    generator, spread = torch.Generator().manual_seed(0), shape[-1] ** -0.5
    sizes = {name: like.shape for name, like in operator.weights()._asdict().items() if like is not None}
    offset: dict[str, Any] = {"temperature": 1.0, "theta": 1.0, "assign_bias": 0.4 * torch.arange(operator.num_heads)}
    drawn = {
        name: spread * (2 * torch.rand(size, generator=generator) - 1) + offset.get(name, 0.0) for name, size in sizes.items()
    }
    drawn |= {name: torch.randn(shape, generator=generator) for name in ("z", "dout")}
    drawn = {name: value.to(dtype) for name, value in drawn.items()}

    def run(attend: Kernel, device: torch.device, stored: torch.dtype, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = {name: value.to(device, stored, copy=True).requires_grad_(not inference) for name, value in drawn.items()}
        dout = leaves.pop("dout").detach()
        with torch.set_grad_enabled(not inference):
            out = attend(leaves["z"], Weights(**{name: leaves[name] for name in sizes}), operator.form, dtype=dtype)
        grads = () if inference else torch.autograd.grad(out, tuple(leaves.values()), dout.to(out.dtype))
        return {"output": out.detach(), **dict(zip(leaves, grads, strict=False))}

    exact = run(reference.attend, torch.device("cpu"), torch.float64, torch.float64)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = run(attend, device, torch.float32, dtype)
    for warning in said:
        if "fused kernel" in str(warning.message):  # it gave way to the plain one, whose numbers would prove nothing
            raise RuntimeError(str(warning.message))
    return {name: _error(found[name].cpu().double(), value, dtype) for name, value in exact.items()}


def _error(found: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Relative error beyond one subnormal of the dtype for each element; infinite where it is not a number."""
    subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    excess = (found - exact).norm() - subnormal * exact.numel() ** 0.5
    return (excess.clamp(min=0) / exact.norm().clamp(min=1e-300)).nan_to_num(math.inf, math.inf).item()


# --- what is wrong --------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    level: str  # problem | note
    what: str
    remedy: str


def _idle(f: Facts) -> bool:
    """There is a GPU, and torch cannot use it."""
    return f.gpu and f.best.name == "cpu"


RULES: tuple[tuple[Callable[[Facts], object], Finding], ...] = (  # when it holds; its text, filled in from the facts
    (lambda f: _idle(f) and not f.hidden and f.cuda_build is None, Finding(
        "problem", "this machine has an NVIDIA GPU, but torch {f.versions[torch]} is a CPU build",
        "install a CUDA build of torch; https://pytorch.org/get-started/locally shows the pip command")),
    (lambda f: _idle(f) and not f.hidden and f.cuda_build, Finding(
        "problem", "this machine has an NVIDIA GPU, but torch for CUDA {f.cuda_build} cannot use it. {f.cuda_says}",
        "install an NVIDIA driver new enough for CUDA {f.cuda_build}; in a container, pass the GPU in (--gpus all)")),
    (lambda f: _idle(f) and f.hidden, Finding(
        "note", "CUDA_VISIBLE_DEVICES hides the GPU of this machine", "unset CUDA_VISIBLE_DEVICES to use it")),
    (lambda f: f.triton and f.best.capability >= choice.OLDEST_DEVICE, Finding(
        "problem", "the fused kernels cannot be used on this GPU: {f.triton}",
        "pip install --upgrade 'dmst[kernels]'; until then the plain kernels are used")),
    (lambda f: (0, 0) < f.best.capability < choice.OLDEST_DEVICE, Finding(
        "note", "{f.best.name} ({f.best.what}) is too old for the fused kernels, which need {oldest}",
        "nothing to do: the plain kernels are used")),
    (lambda f: f.triton_asked and f.versions["triton"] not in (None, f.triton_asked), Finding(
        "note", "torch {f.versions[torch]} needs triton {f.triton_asked}, but triton {f.versions[triton]} is installed",
        "pip install triton=={f.triton_asked}")),
)  # fmt: skip
REMEDIES = {
    "torchvision": f"{PAIR_REMEDY}; dmst itself does not need torchvision, only dmst[timm] does",
    "timm": "pip install --force-reinstall 'dmst[timm]'; dmst itself does not need it",
    "fused": 'call dmst.use_kernels("reference") first, and report this with the output of dmst doctor --json',
    "plain": "torch gives wrong results here: pip install --force-reinstall torch, or report this with dmst doctor --json",
}


def examine(facts: Facts, checks: Iterable[Check]) -> list[Finding]:
    """What is wrong on this machine, problems first."""
    oldest = ".".join(map(str, choice.OLDEST_DEVICE))
    texts = [finding for holds, finding in RULES if holds(facts)]
    found = [Finding(level, *(text.format(f=facts, oldest=oldest).strip() for text in rest)) for level, *rest in texts]
    for name, message in facts.broken.items():
        if not (name == "timm" and "torchvision" in facts.broken):  # which it imports: one cause, one finding
            remedy = REMEDIES.get(name, f"pip install --force-reinstall {name}")
            what = (name == "torchvision" and facts.misfit) or f"{name} cannot be imported: {message}"
            found.append(Finding("problem" if name in NEEDED else "note", what, remedy))
    found += [Finding("note", what, "only needed if you use this operator") for what in facts.operators]
    for test in checks:
        if test.failures:
            what = f"self-test of {test.kernel} in {test.dtype} on {test.device}: {'; '.join(test.failures)}"
            found.append(Finding("problem", what, REMEDIES["fused" if test.kernel == "fused" else "plain"]))
    return sorted(found, key=lambda finding: finding.level != "problem")


# --- the whole ------------------------------------------------------------------------------------------------------


class Report(NamedTuple):
    facts: Facts
    operators: list[Row]
    checks: list[Check]
    findings: list[Finding]

    @property
    def well(self) -> bool:
        return all(finding.level != "problem" for finding in self.findings)


def diagnose() -> Report:
    """Look, test and judge. A bar on the error stream says how far it is, where somebody looks."""
    console = Terminal(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("libraries and devices", total=1.0)
        facts = gather()
        rows = operator_table(torch.device(facts.best.name))
        devices = dict.fromkeys((facts.devices[0], facts.best))  # of several GPUs, the newest
        checks = self_test(devices, lambda what, done: progress.update(task, description=what, completed=done))
    return Report(facts, rows, checks, examine(facts, checks))


def as_json(report: Report) -> str:
    """The report as JSON; an error that is not finite is null."""

    def plain(value: Any) -> Any:
        value = value._asdict() if hasattr(value, "_asdict") else value
        if isinstance(value, Mapping):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [plain(inner) for inner in value]
        return None if value == math.inf else value

    return json.dumps({"well": report.well, **plain(report)}, indent=1)


def show(report: Report) -> None:
    """Print the report."""
    console, facts = Terminal(), report.facts

    def table(title: str, columns: tuple[str, ...], rows: Iterable[Iterable[str]]) -> None:
        grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=bool(columns[0]))
        for column in columns:
            grid.add_column(column, no_wrap=column is not columns[-1])
        for row in rows:
            grid.add_row(*row)
        console.print(Text(title, "bold"), grid, "", sep="\n")

    versions = {name: version or "not installed" for name, version in facts.versions.items()}
    notes = dict.fromkeys(facts.broken, "cannot be imported") | {"triton": f"torch needs {facts.triton_asked or 'none'}"}
    if facts.versions.get("torchvision"):
        notes["torchvision"] = "does not match torch" if facts.misfit else notes.get("torchvision", "matches torch")
    versions |= {name: f"{versions[name]}, {note}" for name, note in notes.items() if name in versions}
    versions["torch"] += f", CUDA {facts.cuda_build}" if facts.cuda_build else ", without CUDA"
    table("Versions", ("", ""), versions.items())
    table("Devices", ("", ""), (device[:2] for device in facts.devices))
    both = max((row.dtypes for row in report.operators), key=len)
    rows = [(" ".join((r.operator, *(r.dtypes if r.dtypes != both else ()))), *r[1:4]) for r in report.operators]
    title = f"Kernels on {facts.best.name}, width {WIDTH}, {HEADS} heads, {' and '.join(both)}"
    table(title, ("operator", "training", "inference", "why"), rows)
    tests = [
        (c.kernel, c.device, c.dtype, f"{c.output:.1e} ({c.output_bar:.0e})",
         "-" if c.gradient is None else f"{c.gradient:.1e} ({c.gradient_bar:.0e})", "failed" if c.failures else "ok")
        for c in report.checks
    ]  # fmt: skip
    table("Self-test: relative error (allowed error)", ("kernel", "device", "dtype", "output", "gradients", "result"), tests)
    for finding in report.findings:
        colour = "red" if finding.level == "problem" else "yellow"
        console.print(Text.assemble((finding.level, f"bold {colour}"), f" {finding.what}"), soft_wrap=True)
        say(f"  remedy: {finding.remedy}")
    problems = sum(finding.level == "problem" for finding in report.findings)
    say("No problems found.", style="bold green") if report.well else say(f"Problems found: {problems}.", style="bold red")
