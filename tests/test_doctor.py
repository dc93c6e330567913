"""`dmst doctor`: problems and remedies on machines made of facts, a self-test that sees wrong kernels, and this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from dmst import cli, doctor, errors
from dmst.doctor import Check, Device, Facts
from dmst.kernels import choice, closed_form, reference, silent
from dmst.operators import OPERATORS
from tests.test_precision import BARS

CPU = Device("cpu", "x86_64, 2 threads [fed]")  # brackets are not markup
H200 = Device("cuda:0", "NVIDIA H200, 140 GiB, compute capability 9.0", (9, 0))
T4 = Device("cuda:0", "Tesla T4, 15 GiB, compute capability 7.5", (7, 5))
VERSIONS = {"torch": "2.13.0+cpu", "timm": None}
HERE = torch.device("cpu")


def facts(*devices: Device, **rest: object) -> Facts:
    return Facts(VERSIONS, (CPU, *devices), **rest)  # type: ignore[arg-type]


def passed(**rest: object) -> Check:
    return Check("cpu", "reference", "float32", 1e-7, 1e-6, 1e-7, 2e-6, ())._replace(**rest)  # type: ignore[arg-type]


def test_a_sound_machine_has_no_findings() -> None:
    assert doctor.examine(facts(), [passed()]) == []
    assert doctor.examine(facts(H200, gpu=True, cuda_build="13.0"), [passed()]) == []


MACHINES = [
    (facts(gpu=True), "problem", "2.13.0+cpu is a CPU build", "pytorch.org"),
    (facts(gpu=True, cuda_build="13.0", cuda_says="driver too old"), "problem", "cannot use it. driver too old", "CUDA 13.0"),
    (facts(gpu=True, cuda_build="13.0", hidden=True), "note", "CUDA_VISIBLE_DEVICES", "unset"),
    (facts(gpu=True, hidden=True), "note", "CUDA_VISIBLE_DEVICES", "unset"),
    (facts(H200, gpu=True, triton="Triton is not installed"), "problem", "Triton is not installed", "'dmst[kernels]'"),
    (facts(T4, gpu=True), "note", "Tesla T4", "plain kernels"),
    (facts(T4, gpu=True, triton="Triton is not installed"), "note", "too old for the fused kernels, which need 8.0", "nothing"),
    (
        facts(broken={"torchvision": "RuntimeError: nms"}),
        "note",
        "torchvision cannot be imported: RuntimeError: nms",
        "dmst[timm]",
    ),
    (facts(broken={"torchvision": "nms", "timm": "nms"}), "note", "torchvision cannot be imported", "index"),
    (
        facts(broken={"torchvision": "nms"}, misfit="0.28.0+cu130 does not fit"),
        "note",
        "0.28.0+cu130 does not fit",
        "same index",
    ),
    (
        facts(triton_asked="3.7.1")._replace(versions={"torch": "2.13.0+cu130", "triton": "3.8.0"}),
        "note",
        "torch 2.13.0+cu130 needs triton 3.7.1, but triton 3.8.0 is installed",
        "pip install triton==3.7.1",
    ),
    (facts(broken={"timm": "ImportError: x"}), "note", "timm cannot be imported: ImportError: x", "'dmst[timm]'"),
    (facts(broken={"pillow": "ImportError: x"}), "problem", "pillow cannot be imported", "--force-reinstall pillow"),
]


@pytest.mark.parametrize(("machine", "level", "what", "remedy"), MACHINES)
def test_each_problem_has_its_remedy(machine: Facts, level: str, what: str, remedy: str) -> None:
    (finding,) = doctor.examine(machine, [])
    assert finding.level == level
    assert what in finding.what
    assert remedy in finding.remedy
    assert "\n" not in "".join(finding)
    assert "{" not in "".join(finding)


@pytest.mark.parametrize(
    "triton",
    [
        "Triton is not installed",
        "Triton 3.9.0 is newer than 3.8, the newest that was tested",
        "Triton cannot be used (RuntimeError: x)",
    ],
)
def test_triton_matters_only_beside_a_gpu(triton: str) -> None:
    assert doctor.examine(facts(triton=triton), []) == []
    assert doctor.examine(facts(gpu=True, triton=triton), [])[0].what.endswith("is a CPU build")  # the first thing to mend
    assert "Triton" in doctor.examine(facts(H200, triton=triton), [])[0].what


def test_failed_self_tests_are_problems_and_come_first() -> None:
    tests = [passed(), passed(kernel="fused", failures=("dmsa listing: x", "tssa: y")), passed(failures=("tssa: z",))]
    fused, plain, note = doctor.examine(facts(broken={"timm": "x"}), tests)
    assert fused.what == "self-test of fused in float32 on cpu: dmsa listing: x; tssa: y"
    assert 'dmst.use_kernels("reference")' in fused.remedy
    assert "torch" in plain.remedy
    assert "use_kernels" not in plain.remedy  # it would not go around a wrong torch
    assert (fused.level, plain.level, note.level) == ("problem", "problem", "note")


# --- looking --------------------------------------------------------------------------------------------------------


def test_a_broken_library_is_found_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in {
        "half_of_it": "import sys\nraise RuntimeError('operator half::nms does not exist')",
        "elsewhere": "raise ImportError('/somewhere/lib/libfoo.so: undefined symbol; see (/somewhere/foo/__init__.py)')",
        "dies": "import os\nos._exit(3)",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.import_problem("half_of_it") == "RuntimeError: operator half::nms does not exist"
    assert doctor.import_problem("elsewhere") == "ImportError: libfoo.so: undefined symbol; see (__init__.py)"
    assert doctor.import_problem("dies") == "exit status 3"
    assert doctor.import_problem("json") == ""
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(tmp_path)  # what lies where somebody happens to stand is not installed
    assert doctor.import_problem("dies") == "ModuleNotFoundError: No module named 'dies'"
    assert doctor.import_problem("no_such_module") == "ModuleNotFoundError: No module named 'no_such_module'"
    assert not {"half_of_it", "elsewhere", "dies"} & set(sys.modules)


def test_an_import_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 60)

    monkeypatch.setattr(subprocess, "run", never)
    assert "more than a minute" in doctor.import_problem("json")
    assert doctor._gpu_seen() is False


def test_tidy_keeps_what_is_no_folder() -> None:
    assert (
        doctor.tidy("see https://pytorch.org/get-started/locally or a/b\nmore")
        == "see https://pytorch.org/get-started/locally or a/b"
    )
    assert doctor.tidy(r"C:\Users\me\torch\lib.dll is missing") == "lib.dll is missing"
    assert doctor.tidy("") == ""


@pytest.mark.parametrize(
    ("script", "seen"), [("echo 'GPU 0: NVIDIA H200'", True), ("echo 'no driver'; exit 9", False), ("echo nothing", False)]
)
def test_a_gpu_is_seen_without_torch(script: str, seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: False)  # no driver of the host
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._gpu_seen() is seen


def test_what_torch_says_about_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def old_driver() -> bool:
        warnings.warn("CUDA initialization: the driver is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", old_driver)
    assert doctor._cuda_devices() == ([], "CUDA initialization: the driver is too old")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def no_card(index: int) -> None:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "get_device_properties", no_card)
    assert doctor._cuda_devices() == ([], "No CUDA GPUs are available")


# --- which kernel ---------------------------------------------------------------------------------------------------


def test_every_operator_has_its_kernel_and_its_reason() -> None:
    rows = {row.operator: row for row in doctor.operator_table(HERE)}
    assert list(rows) == list(OPERATORS)
    assert all(row.dtypes == ("bfloat16", "float32") for row in rows.values())
    kernels = {name: (row.training, row.inference) for name, row in rows.items()}
    assert kernels["dmsa"] == kernels["tpsusa"] == ("closed form", "silent heads skipped")
    assert kernels["tssa"] == kernels["tpusa"] == kernels["gated_channel"] == ("closed form", "reference")
    assert kernels["mhsa"] == kernels["mssa"] == ("torch attention", "torch attention")
    assert kernels["xca"] == ("plain torch", "plain torch")
    assert rows["dmsa"].why == "fused kernels need a CUDA device, and this is cpu"


def test_the_table_asks_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which bfloat16 is fused and float32 is not: two rows for each member."""
    answers = {torch.bfloat16: choice.Verdict(True, "quick"), torch.float32: choice.Verdict(False, "slow")}
    monkeypatch.setattr(choice, "verdict", lambda device, dtype, *_: answers[dtype])
    rows = {(row.operator, *row.dtypes): row for row in doctor.operator_table(HERE)}
    assert rows["dmsa", "bfloat16"][1:4] == ("fused", "fused", "quick")
    assert rows["dmsa", "float32"][1:4] == ("closed form", "silent heads skipped", "slow")
    assert ("mhsa", "bfloat16", "float32") in rows


# --- is it right ----------------------------------------------------------------------------------------------------


def test_the_kernels_of_this_machine_are_right() -> None:
    heard: list[tuple[str, float]] = []
    precision = torch.get_float32_matmul_precision()
    tests = doctor.self_test([CPU], lambda what, done: heard.append((what, done)))
    fused = ["fused"] if choice.interpreted() and not choice.triton_problem() else []
    assert [test.kernel for test in tests] == ["reference", "closed form", "silent heads skipped", *fused]
    assert [what for what, _ in heard] == [f"{test.kernel}, float32, cpu" for test in tests]
    for test in tests:
        assert test.failures == ()
        assert 0 < test.output < test.output_bar == 1e-6
        assert test.gradient is None or 0 < test.gradient < test.gradient_bar == 2e-6
    assert torch.get_float32_matmul_precision() == precision
    assert doctor.BARS == BARS


def test_without_the_interpreter_a_cpu_has_no_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "interpreted", lambda: False)
    assert list(doctor.kernels_on(HERE)) == ["reference", "closed form", "silent heads skipped"]


def wrong(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel whose output is 1e-4 too large in float32; its float64, the truth, is left alone."""
    return lambda *args, dtype, **rest: attend(*args, dtype=dtype, **rest) * (1 + 1e-4 * (dtype == torch.float32))


def failed() -> dict[str, tuple[str, ...]]:
    """What fails of the plain kernels (the interpreter is slow)."""
    plain = {name: attend for name, attend in doctor.kernels_on(HERE).items() if name != "fused"}
    tests = [doctor.check(HERE, name, torch.float32, attend) for name, attend in plain.items()]
    return {test.kernel: test.failures for test in tests if test.failures}


@pytest.mark.parametrize(
    ("module", "kernel", "members"),
    [(reference, "reference", 7), (closed_form, "closed form", 7), (silent, "silent heads skipped", 4)],
)
def test_a_wrong_kernel_is_caught(module: object, kernel: str, members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "attend", wrong(module.attend))  # type: ignore[attr-defined]
    found = failed()
    assert set(found) == {kernel}
    assert sum(": output off by 1.0e-04" in failure for failure in found[kernel]) == members


def test_wrong_gradients_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = closed_form.pull_back

    def lean(*args: object, **rest: object) -> tuple:
        dz, grads = right(*args, **rest)  # type: ignore[arg-type]
        *others, temperature, theta = grads
        return dz * (1 + 1e-4), (*others, temperature, None if theta is None else -theta)

    monkeypatch.setattr(closed_form, "pull_back", lean)
    found = failed()
    assert set(found) == {"closed form"}
    assert [failure for failure in found["closed form"] if "theta" not in failure] == [
        f"{member}: gradient of z off by 1.0e-04" for member in doctor.MEMBERS
    ]
    assert (
        "dmsa proximal: gradient of theta off by 2.0e+00" in found["closed form"]
    )  # cancelling sums have a wide bar, not none


def test_the_silent_heads_are_left_out_in_the_test_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = silent.project_active
    monkeypatch.setattr(silent, "project_active", lambda *args: right(*args) * (1 + 1e-4))
    assert set(failed()) == {"silent heads skipped"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_caught(value: float) -> None:
    test = doctor.check(HERE, "closed form", torch.float32, lambda *args, **rest: closed_form.attend(*args, **rest) + value)
    assert test.output == float("inf")
    assert sum("output off by inf" in failure for failure in test.failures) == len(doctor.MEMBERS)
    report = doctor.Report(facts(), [], [test], [])
    assert json.loads(doctor.as_json(report), parse_constant=pytest.fail)["checks"][0]["output"] is None


def test_a_kernel_that_raises_is_caught() -> None:
    def breaks(*_: object, **__: object) -> Tensor:
        raise ValueError("no such tile in /somewhere/cache/kernel.py\nand more")

    test = doctor.check(HERE, "closed form", torch.float32, breaks)
    assert test.failures == tuple(f"{member}: ValueError: no such tile in kernel.py" for member in doctor.MEMBERS)


def test_a_fused_kernel_that_gives_way_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain kernel takes over, and its right numbers do not count."""
    if choice.triton_problem():
        pytest.skip("needs Triton")
    from dmst.kernels import attempt, registered

    def breaks(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(registered.layer, "forward", breaks)
    monkeypatch.setattr(registered, "_broken", attempt.remembered())
    monkeypatch.setattr(choice, "interpreted", lambda: True)
    for _ in range(2):  # what gave way once is silent afterwards: it must be said again
        test = doctor.check(HERE, "fused", torch.float32, doctor.kernels_on(HERE)["fused"])
        assert len(test.failures) == len(doctor.MEMBERS)
        assert all("The fused kernel does not work here" in failure for failure in test.failures)
        assert all("out of resource" in failure for failure in test.failures)


# --- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(cli.app, ["doctor", *arguments])
    return result.exit_code, result.stdout


def test_all_is_well_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MEMBERS", {"tpsusa": doctor.MEMBERS["tpsusa"]})  # all of them: test_the_kernels_of_...
    code, text = run()
    assert code == 0, text
    assert text.rstrip().endswith("No problems found.")
    assert errors.misfit() in text  # the pair that is here, if it does not fit
    for name in (
        "dmst",
        "Python",
        "torch",
        "triton",
        "safetensors",
        *OPERATORS,
        "closed form",
        "Self-test",
    ):
        assert name in text
    assert not [folder for folder in (sys.prefix, str(Path.home()), str(Path(cli.__file__).parent)) if folder in text]


# what is installed, what is wrong with it, what the table of versions says
SHOWN = [
    ({"torchvision": "0.28.0+cpu", "triton": "3.8.0"}, {}, ["0.28.0+cpu, matches torch", "3.8.0, torch needs none"]),
    (
        {"torchvision": "0.28.0", "triton": None},
        {"broken": {"torchvision": "x"}},
        ["0.28.0, cannot be imported", "not installed"],
    ),
    ({"torchvision": "0.28.0+cu130"}, {"broken": {"torchvision": "x"}, "misfit": "x"}, ["0.28.0+cu130, does not match torch"]),
    (
        {"torchvision": None, "triton": "3.7.1"},
        {"triton_asked": "3.7.1"},
        ["torchvision  not installed ", "3.7.1, torch needs 3.7.1"],
    ),
]


@pytest.mark.parametrize(("versions", "rest", "shown"), SHOWN)
def test_the_versions_say_what_fits(
    versions: dict, rest: dict, shown: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    machine = facts(**rest)._replace(versions={"torch": "2.13.0+cpu", **versions})
    doctor.show(doctor.Report(machine, doctor.operator_table(HERE), [], []))
    text = capsys.readouterr().out
    assert all(each in text for each in shown), text


def test_the_exit_status_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: facts(gpu=True, broken={"timm": "ImportError: [x]"}))
    monkeypatch.setattr(doctor, "self_test", lambda devices, tick: [passed()])
    code, text = run()
    assert code == 1
    assert "problem this machine has an NVIDIA GPU" in text
    assert "ImportError: [x]" in text
    assert CPU.what in text
    assert "pip install --force-reinstall 'dmst[timm]'" in text
    assert text.rstrip().endswith("Problems found: 1.")
    code, text = run("--json")
    assert code == 1
    told = json.loads(text)
    assert told["well"] is False
    assert [finding["level"] for finding in told["findings"]] == ["problem", "note"]
    assert told["facts"]["devices"] == [{"name": "cpu", "what": CPU.what, "capability": [0, 0]}]
    assert told["facts"]["versions"]["timm"] is None
    assert [row["operator"] for row in told["operators"]] == list(OPERATORS)
    assert told["checks"][0]["kernel"] == "reference"


def test_a_failed_self_test_is_in_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gather", facts)
    monkeypatch.setattr(choice, "interpreted", lambda: False)
    code, text = run("--json")
    assert (code, json.loads(text)["well"]) == (0, True)
    monkeypatch.setattr(closed_form, "attend", wrong(closed_form.attend))
    code, text = run()
    assert code == 1
    assert "self-test of closed form in float32 on cpu: tssa: output off by 1.0e-04" in text
