"""The scripts of benchmarks/: they start, a tiny run has rows, and no time is told of a wrong layer."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmst.kernels import plan
from dmst.kernels.attempt import attempt
from dmst.kernels.choice import interpreted
from dmst.operators import create
from dmst.reproduce import ledger

ROOT = Path(__file__).resolve().parent.parent
HELPERS = ("measure", "moves_plans", "moves_render", "published", "with_timm")
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in HELPERS)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script as `python benchmarks/NAME.py` would."""
    import importlib

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def run(module: Any, monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as stop:
        module(name).main()
    return int(stop.value.code or 0)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_explains_itself(
    name: str, module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "explorer":
        pytest.importorskip("playwright")
    assert run(module, monkeypatch, name, "--help") == 0
    assert f"python benchmarks/{name}.py" in capsys.readouterr().out


@pytest.mark.slow
def test_operators_on_a_cpu(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module("measure"), "PATIENCE", 0.02)
    asked = ["--dim", "192", "--heads", "4", "--shapes", "2x7", "--json", str(tmp_path / "rows.json")]
    assert run(module, monkeypatch, "operators", *asked) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["what"] for row in rows} == set(module("operators").LAYERS)
    assert all(row["failure"] is None and row["forward_ms"] > 0 < row["train_ms"] for row in rows)
    kept = {row["what"]: row["kept_mb"] * 2**20 / (4 * 2 * 7 * 192) for row in rows if row["backend"] != "reference"}
    assert kept["floor"] == pytest.approx(2, rel=1e-3)
    assert kept["listing"] > 6


@pytest.mark.slow
def test_a_wrong_layer_gets_no_time(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Right to two digits is not right."""
    operators = module("operators")

    class Wrong(operators.DMSA):  # type: ignore[name-defined]
        def forward(self, z: torch.Tensor, **call: Any) -> torch.Tensor:
            return super().forward(z, **call) * (1.0 if z.dtype == torch.float64 else 1.001)

    monkeypatch.setitem(operators.LAYERS, "dmsa", operators.Layer(lambda d, k, n: Wrong(d, k, bias=False)))
    asked = ["--dim", "24", "--heads", "3", "--shapes", "2x7", "--only", "dmsa", "floor", "--json", str(tmp_path / "rows.json")]
    assert run(module, monkeypatch, "operators", *asked) == 1
    rows = {row["what"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert "forward_ms" not in rows["dmsa"]
    assert rows["dmsa"]["failure"].startswith("parity failed: out is off by 1.0e-03")
    assert rows["floor"]["train_ms"] > 0


@pytest.mark.slow
def test_models_and_training_on_a_cpu(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module("measure"), "PATIENCE", 0.02)
    asked = ["--sizes", "32", "--batch", "2", "--only", "dmst_tiny", "vit_tiny:tssa", "--json", str(tmp_path / "models.json")]
    assert run(module, monkeypatch, "models", *asked) == 0
    rows = json.loads((tmp_path / "models.json").read_text())["rows"]
    assert all(row["inference"] > 0 < row["training"] and row["gradient_error"] < 1e-4 for row in rows)
    assert run(module, monkeypatch, "training", "digits", "--seconds", "0.1", "--json", str(tmp_path / "training.json")) == 0
    assert json.loads((tmp_path / "training.json").read_text())["rows"][0]["images_per_s"] > 0


@pytest.mark.slow
def test_where_the_time_of_a_network_goes(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["where", "dmst_digits", "--pixels", "8", "--batch", "2", "--rows", "1000"]
    monkeypatch.setattr(sys, "argv", asked)
    module("where").main()
    inference, training = capsys.readouterr().out.split("training")
    assert "aten::addmm" in inference and "Backward" not in inference and "NativeLayerNormBackward0" in training
    shares = [float(line.split()[1].rstrip("%")) for line in inference.splitlines() if "aten::" in line]
    assert 90 < sum(shares) < 101


def test_a_kernel_that_fell_back_has_no_time(module: Any) -> None:
    def broken() -> None:
        raise RuntimeError("no such instruction")

    row: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as outside the tests, where a warning is no error by itself
        with module("measure").attempting(row):
            attempt(broken, lambda: None, (), torch.zeros(1), ("the layer",))
    assert "no such instruction" in row["failure"]


def test_who_times_is_alone(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measure, path = module("measure"), tmp_path / "device"
    monkeypatch.setattr(measure, "_shared", [])
    measure.share_device(path)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)  # another one that compiles
        fcntl.flock(other, fcntl.LOCK_UN)
        with measure.alone(), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):  # another one that would time, while this one compiles
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for file in measure._shared:
        file.close()


def test_processes_fill_one_file(module: Any, tmp_path: Path) -> None:
    measure = module("measure")
    asked = ["--json", str(tmp_path / "rows.json"), "--add"]
    first, second = (measure.Rows("script", measure.arguments("").parse_args(asked), ("what",)) for _ in range(2))
    for rows, what in ((first, "a"), (second, "b"), (first, "a")):
        rows.add({"what": what})
    assert [row["what"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "asked", "told"),
    [
        ("tune", ["--shape", "256"], "'256' must be SAMPLESxTOKENS, for example 256x197"),
        ("tune", ["--width", "100", "--heads", "3"], "--width 100 must be even, and a multiple of --heads"),
        ("check", ["README.md"], "README.md is no file of a benchmark"),
        ("check", ["results/h200/operators.json", "--before", "results/h200/models.json"], "give a file of models.py too"),
    ],
)
def test_a_wrong_argument_is_named(
    name: str, asked: list[str], told: str, module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert run(module, monkeypatch, name, *asked) == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_targets_are_read_from_the_table() -> None:
    files = ("results/h200/operators.json", "results/h200/models.json", "--before", "results/h200/models.json")
    told = subprocess.run([sys.executable, "benchmarks/check.py", *files], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert told.returncode in (0, 1), told.stderr
    lines = told.stdout.splitlines()
    same = [line for line in lines if "the same before" in line]
    assert len(lines) - len(same) == len((ROOT / "benchmarks/targets.csv").read_text().splitlines()) - 1
    assert same and all("1.000  must >= 0.95: yes" in line for line in same)  # a file compared with itself
    assert "nan" not in told.stdout


@pytest.mark.interpreter
@pytest.mark.skipif(not interpreted(), reason="the kernels run here in Triton's interpreter alone; tune.py times them on a GPU")
def test_tune_calls_every_kernel_of_the_table(module: Any) -> None:
    calls = module("tune").calls(2, 35, 32, 4, torch.float32, "cpu")
    assert calls.keys() == plan.USUAL.keys() == module("tune").CANDIDATES.keys()
    for name, call in calls.items():
        made = call()
        assert all(x.isfinite().all() for x in (made if isinstance(made, tuple) else (made,))), name


# --- what moves ------------------------------------------------------------------------------------------------------


def test_the_tables_of_what_moves_are_those_of_its_runs(module: Any) -> None:
    lines = ledger.read(ROOT / "results/moves")
    assert module("moves_render").markdown(lines) == (ROOT / "results/moves.md").read_text()
    assert module("moves_render").svg(lines) == (ROOT / "results/moves.svg").read_text()
    known = {run.key for plan in module("moves_plans").PLANS.values() for run in plan()}
    assert {line["run"] for line in lines} <= known  # a plan that changes must not orphan its runs


def test_what_moves_compares_the_defaults_at_equal_size(module: Any) -> None:
    """The finals are of GMSA as it is built without options, and no network has 1 % more parameters than another."""
    plans, moves = module("moves_plans"), module("moves")
    for cell, (name, options) in plans.BASE.items():
        only = {"mode": "proximal"} if "proximal" in cell else {}
        if name == "gmsa":
            assert create(name, 192, 8, **options).form == create(name, 192, 8, **only).form
        else:
            assert not options
    for data, rows in (("cifar100", 8), ("tinyimagenet", 16)):
        runs = [plans.Run(cell, name, data, options, rows) for cell, (name, options) in plans.BASE.items()]
        counts = [sum(p.numel() for p in moves.network(run).parameters()) for run in runs]
        assert max(counts) < 1.01 * min(counts)


@pytest.mark.slow
def test_a_run_of_what_moves_repeats(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two steps of a proximal network, certified; the same seed gives the same loss, another one another."""
    moves, plans = module("moves"), module("moves_plans")
    for name, value in {"BATCH": 8, "DEPTH": 1, "PARAMETERS": 700_000, "CERTIFIED": 4}.items():
        monkeypatch.setattr(moves, name, value)
    drawn = np.random.default_rng(0)
    for split, count in (("train", 16), ("test", 6)):
        np.save(tmp_path / f"cifar100-{split}-labels.npy", np.arange(count))
        np.save(tmp_path / f"cifar100-{split}-images.npy", drawn.integers(0, 256, (count, 32, 32, 3), np.uint8))
    name, options = plans.BASE["GMSA, proximal"]
    run = plans.Run("GMSA, proximal", name, "cifar100", options, epochs=1, mixup=0.4, final=True)
    device = torch.device("cpu")
    trainer = moves.Trainer(run, *moves.load(run, tmp_path, device), device)
    first, again, other = (trainer.train(replace(run, seed=seed)) for seed in (0, 0, 1))
    assert first["train_loss"] == again["train_loss"] != other["train_loss"]
    assert first["certified"]["guaranteed"] == 1.0
    assert 0 <= first["off"] <= 1
