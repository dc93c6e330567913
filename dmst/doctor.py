"""`dmst doctor`: what is installed, which kernel each operator uses here and why, and whether each kernel is right here.

    diagnose()    {"well", what `machine` gives, "operators", "self_test", "findings"}: a dict, which --json prints
    show(report)  the same for a person

A problem is something that dmst needs and that does not work; a note is something optional. Nothing is saved or fetched.
"""

from __future__ import annotations

import copy
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

import dmst
from dmst.errors import in_one_line
from dmst.kernels import choice, mixture, reference
from dmst.kernels.attempt import anew
from dmst.operators import OPERATORS, create
from dmst.operators.family import TokenStatistics
from dmst.operators.gmsa import GMSA
from dmst.terminal import Terminal, say

PACKAGES = ("triton", "numpy", "pillow", "safetensors", "torchvision", "timm")
WIDTH, HEADS = 384, 8
SHAPE = 2, 401, WIDTH  # of the self-test
BARS = {torch.float32: (1e-6, 2e-6), torch.bfloat16: (5e-3, 1e-2), torch.float16: (1e-3, 2e-3)}  # output, gradients
KERNELS = {reference.attend: "reference", mixture.attend: "reference"}


def diagnose() -> dict[str, Any]:
    """Look, test and judge."""
    report = machine()
    names = dict.fromkeys(("cpu", best(report)["name"]))  # of several GPUs, the newest
    report["operators"] = operator_table(torch.device(best(report)["name"]))
    report["self_test"] = [row for name in names for row in self_test(torch.device(name))]
    report["findings"] = findings(report)
    return {"well": all(each["level"] != "problem" for each in report["findings"]), **report}


# --- what is here ---------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Versions, devices, and what is wrong with the optional parts ("": nothing)."""
    versions = {name: next((d.version for d in metadata.distributions(name=name)), None) for name in PACKAGES}
    return {
        "versions": {"dmst": dmst.__version__, "Python": platform.python_version(), "torch": torch.__version__, **versions},
        "devices": devices(),
        "cuda_build": torch.version.cuda,
        "gpu_present": gpu_present(),
        "triton_problem": choice.triton_problem(),
        "operator_problems": OPERATORS.look()[1],
    }


def devices() -> list[dict[str, Any]]:
    """The CPU first, then what torch can use."""
    found = [{"name": "cpu", "what": f"{platform.machine()}, {torch.get_num_threads()} threads", "capability": (0, 0)}]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(index)
        what = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}"
        found.append({"name": f"cuda:{index}", "what": what, "capability": (card.major, card.minor)})
    return found


def best(report: dict[str, Any]) -> dict[str, Any]:
    return max(report["devices"], key=lambda device: device["capability"])


def gpu_present() -> bool:
    """Is there an NVIDIA GPU, torch not asked?"""
    command = shutil.which("nvidia-smi")
    return command is not None and "GPU " in subprocess.run([command, "-L"], capture_output=True, text=True).stdout


# --- which kernel, and why ------------------------------------------------------------------------------------------


def operator_table(device: torch.device) -> list[dict[str, str]]:
    """What computes each operator on this device, in the dtype that is usual there, asked of `choice`."""
    dtype, rows = usual_dtype(device), []
    for name in OPERATORS.look()[0]:
        kernel, why = "plain torch", "has no fused kernel"
        try:
            operator = create(name, WIDTH, HEADS, device="meta")  # nothing is computed
        except Exception as error:  # an operator of another package may be for other shapes
            kernel, why = "-", f"cannot be built: {in_one_line(error)}"
        else:
            if isinstance(operator, TokenStatistics | GMSA):
                kernel = kernel_of(operator, device, dtype)
                why = choice.verdict(device, dtype, operator.form, WIDTH, "auto").why
        rows.append({"operator": name, "kernel": kernel, "why": why})
    return rows


def kernel_of(operator: TokenStatistics | GMSA, device: torch.device, dtype: torch.dtype) -> str:
    """Float32 tokens, and products in `dtype`, as autocast has them."""
    with choice.use_kernels("auto"):
        z = torch.empty(SHAPE, device=device)
        return KERNELS.get(choice.kernel_for(z, operator.weights(), operator.form, dtype), "fused")


def usual_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


# --- is it right ----------------------------------------------------------------------------------------------------


def self_test(device: torch.device) -> list[dict[str, str]]:
    """DMSA as this device runs it, in training and in inference, in the dtypes that are used there."""
    rows = []
    for dtype in BARS if device.type == "cuda" else (torch.float32,):
        layer = sample_layer(dtype).to(device)
        kernel, name = kernel_of(layer, device, dtype), str(dtype).removeprefix("torch.")
        problem = problem_of(layer, device, dtype, True) or problem_of(layer, device, dtype, False)
        rows.append({"operator": "dmsa", "kernel": kernel, "device": str(device), "dtype": name, "problem": problem})
    return rows


def sample_layer(dtype: torch.dtype) -> TokenStatistics:
    """Weights that `dtype` can hold; gates that differ, and some close."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer: Any = create("dmsa", WIDTH, HEADS, membership_bias=True)
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
        return in_one_line(error)
    finally:
        torch.set_float32_matmul_precision(precision)
    output, *gradients = [((x - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True)]
    most_output, most_gradient = BARS[dtype]
    fine = output <= most_output and all(each <= most_gradient for each in gradients)  # NaN is not
    return "" if fine else f"output off by {output:.1e}" + (f", gradients by {max(gradients):.1e}" if grad else "")


# --- what is wrong --------------------------------------------------------------------------------------------------


def findings(report: dict[str, Any]) -> list[dict[str, str]]:
    """What is wrong, each with its remedy, problems first."""
    problems, notes, device = [], [], best(report)
    if report["gpu_present"] and device["name"] == "cpu":
        build = f"for CUDA {report['cuda_build']} cannot use it" if report["cuda_build"] else "is a CPU build"
        what = f"this machine has an NVIDIA GPU, but torch {report['versions']['torch']} {build}"
        remedy = "install a CUDA build of torch (https://pytorch.org/get-started/locally) and a new enough NVIDIA driver"
        problems.append((what, f"{remedy}; unset CUDA_VISIBLE_DEVICES; in a container, pass the GPU in (--gpus all)"))
    if report["triton_problem"] and device["capability"] >= choice.OLDEST_DEVICE:  # an older GPU does not need it
        remedy = "pip install --upgrade 'dmst[kernels]'; until then the plain kernels are used"
        problems.append((f"the fused kernels cannot be used on this GPU: {report['triton_problem']}", remedy))
    for test in report["self_test"]:
        if test["problem"]:
            what = "self-test of {operator} ({kernel}) in {dtype} on {device}: {problem}".format(**test)
            remedy = 'call dmst.use_kernels("reference") first' if test["kernel"] == "fused" else "reinstall torch"
            problems.append((what, f"{remedy}, and report this with the output of dmst doctor --json"))
    notes += [(what, "only needed if you use this operator") for what in report["operator_problems"]]
    levels = {"problem": problems, "note": notes}
    return [{"level": level, "what": what, "remedy": remedy} for level, found in levels.items() for what, remedy in found]


# --- for a person ---------------------------------------------------------------------------------------------------


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    console, device = Terminal(), best(report)["name"]

    def table(title: str, columns: tuple[str, ...], rows: Iterable[Iterable[str]]) -> None:
        grid = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=any(columns))
        for row in rows:
            grid.add_row(*row)
        console.print(Text(title, "bold"), grid, "", sep="\n")

    versions = {name: version or "not installed" for name, version in report["versions"].items()}
    versions["torch"] += f", CUDA {report['cuda_build']}" if report["cuda_build"] else ", without CUDA"
    table("Versions", ("", ""), versions.items())
    table("Devices", ("", ""), ((each["name"], each["what"]) for each in report["devices"]))
    title = f"Kernels on {device}, width {WIDTH}, {HEADS} heads, {usual_dtype(torch.device(device))}"
    table(title, ("operator", "kernel", "why"), (row.values() for row in report["operators"]))
    tests = [{**row, "problem": "failed" if row["problem"] else "ok"} for row in report["self_test"]]
    table("Self-test against float64", ("operator", "kernel", "device", "dtype", "result"), (row.values() for row in tests))
    for each in report["findings"]:
        say(f"{each['level']} {each['what']}", style="red" if each["level"] == "problem" else "yellow")
        say(f"  remedy: {each['remedy']}")
    problems = sum(each["level"] == "problem" for each in report["findings"])
    say(f"Problems found: {problems}." if problems else "No problems found.")
