"""`dmst doctor`: problems and remedies on machines made of facts, a self-test that sees wrong kernels, and this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from dmst import cli, doctor
from dmst.kernels import choice, reference
from dmst.operators import OPERATORS

CPU = {"name": "cpu", "what": "x86_64, 2 threads [fed]", "capability": (0, 0)}  # brackets are not markup
H200 = {"name": "cuda:0", "what": "NVIDIA H200, 140 GiB, compute capability 9.0", "capability": (9, 0)}
T4 = {"name": "cuda:0", "what": "Tesla T4, 15 GiB, compute capability 7.5", "capability": (7, 5)}
HERE = torch.device("cpu")
NO_TRITON = "Triton is not installed"
BROKEN = ["operator 'mine' is broken"]


def machine(*devices: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {
        "versions": {"torch": "2.13.0+cpu", "timm": None}, "devices": [CPU, *devices], "cuda_build": None, "gpu_present": False,
        "triton_problem": "", "operator_problems": [], "self_test": [],
    } | rest  # fmt: skip


MACHINES = [
    (machine(gpu_present=True), "problem", "2.13.0+cpu is a CPU build", "pytorch.org"),
    (machine(gpu_present=True, cuda_build="13.0"), "problem", "CUDA 13.0 cannot use it", "NVIDIA driver"),
    (machine(H200, gpu_present=True, triton_problem=NO_TRITON), "problem", NO_TRITON, "'dmst[kernels]'"),
    (machine(operator_problems=BROKEN), "note", "'mine' is broken", "only needed"),
]


@pytest.mark.parametrize(("machine", "level", "what", "remedy"), MACHINES)
def test_each_problem_has_its_remedy(machine: dict[str, Any], level: str, what: str, remedy: str) -> None:
    (finding,) = doctor.findings(machine)
    assert finding["level"] == level
    assert what in finding["what"]
    assert remedy in finding["remedy"]


def test_a_sound_machine_has_no_findings_and_failed_tests_come_first() -> None:
    passed = {"operator": "dmsa", "kernel": "reference", "device": "cpu", "dtype": "float32", "problem": ""}
    for devices, problem in (((), ""), ((), NO_TRITON), ((H200,), ""), ((T4,), NO_TRITON)):
        assert doctor.findings(machine(*devices, triton_problem=problem, self_test=[passed])) == []
    wrong = [passed | {"kernel": "fused", "problem": "x"}, passed | {"problem": "y"}]
    fused, plain, note = doctor.findings(machine(operator_problems=BROKEN, self_test=wrong))
    assert fused["what"] == "self-test of dmsa (fused) in float32 on cpu: x"
    assert 'dmst.use_kernels("reference")' in fused["remedy"]
    assert "use_kernels" not in plain["remedy"]  # it would not go around a wrong torch
    assert (fused["level"], plain["level"], note["level"]) == ("problem", "problem", "note")


def test_a_gpu_is_seen_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for script, seen in (("echo 'GPU 0: NVIDIA H200'", True), ("echo 'no driver'; exit 9", False)):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        assert doctor.gpu_present() is seen


def test_every_operator_has_its_kernel_and_its_reason() -> None:
    rows = {row["operator"]: row for row in doctor.operator_table(HERE)}
    assert list(rows) == list(OPERATORS)
    for name in ("dmsa", "tssa", "gmsa"):
        assert rows[name]["kernel"] == "reference"
    assert rows["mhsa"]["kernel"] == "plain torch"
    assert rows["dmsa"]["why"] == rows["gmsa"]["why"] == "fused kernels need a CUDA device, and this is cpu"


def failed() -> list[tuple[str, str]]:
    return [(test["kernel"], test["problem"]) for test in doctor.self_test(HERE) if test["problem"]]


def test_a_wrong_kernel_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    precision = torch.get_float32_matmul_precision()
    assert failed() == []
    assert torch.get_float32_matmul_precision() == precision
    right = reference.project_out

    def wrong(by: float) -> Callable[..., Tensor]:
        return lambda update, *rest: right(update, *rest) * (by if update.dtype == torch.float32 else 1)

    def breaks(update: Tensor, *rest: Any) -> Tensor:
        if update.dtype == torch.float32:
            raise ValueError("no such tile\nand more")
        return right(update, *rest)

    for project, told in (
        (wrong(1.0001), "output off by 1.0e-04"),
        (wrong(float("nan")), "output off by nan"),
        (breaks, "ValueError: no such tile (test_doctor.py"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(reference, "project_out", project)
            ((kernel, problem),) = failed()
            assert kernel == "reference" and problem.startswith(told)


def test_a_fused_kernel_that_gives_way_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain kernel takes over, and its right numbers do not count."""
    if choice.triton_problem():
        pytest.skip("needs Triton")
    from dmst.kernels import attempt
    from dmst.kernels.fused import layer

    def breaks(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(layer, "_forward", breaks)
    attempt.anew()
    monkeypatch.setattr(choice, "verdict", lambda *_: choice.Verdict(True, "here"))
    for _ in range(2):  # what gave way once is silent afterwards: it must be said again
        problem = doctor.problem_of(doctor.sample_layer(torch.float32), HERE, torch.float32, True)
        assert "The fused kernel of the layer does not work here" in problem and "out of resource" in problem
    attempt.anew()


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(cli.app, ["doctor", *arguments])
    return result.exit_code, result.stdout


def test_the_exit_status_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "machine", machine)
    code, text = run()
    assert code == 0 and text.rstrip().endswith("No problems found.")
    assert all(name in text for name in ("torch", *OPERATORS, "reference", "Self-test", CPU["what"]))
    monkeypatch.setattr(doctor, "machine", lambda: machine(gpu_present=True, operator_problems=BROKEN))
    code, text = run()
    assert code == 1
    assert "problem this machine has an NVIDIA GPU" in text
    assert "note operator 'mine' is broken" in text
    assert text.rstrip().endswith("Problems found: 1.")
    code, text = run("--json")
    told = json.loads(text)
    assert code == 1 and told["well"] is False
    assert [finding["level"] for finding in told["findings"]] == ["problem", "note"]
    assert told["devices"][0]["what"] == CPU["what"]
    assert [row["operator"] for row in told["operators"]] == list(OPERATORS)


@pytest.mark.process
def test_this_machine_is_looked_at() -> None:
    found = doctor.machine()
    assert found["devices"][0]["name"] == "cpu"
    assert found["versions"]["torch"] == torch.__version__
