"""The ledger and its tables: what was run is found again, gaps are shown, the same ledger gives the same bytes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from dmst import cli
from dmst.engine import prepare
from dmst.engine.checkpoint import take_lock
from dmst.engine.console import Quiet
from dmst.engine.train_loop import train
from dmst.errors import BadFileError, DmstError, Stopped
from dmst.models import VisionModel, load_model
from dmst.reproduce import ledger, render, run
from dmst.reproduce.tables import TABLES, Cell, Table
from tests.runs import SMALL, TWELVE

DMSA = ("model.options.operator=dmsa",)
CELLS = (
    Cell("DMSA", DMSA, 50.0, seeds=3),
    Cell("TSSA", ("model.options.operator=tssa",), seeds=3, published=60.0),
    Cell("MHSA", ("model.options.operator=mhsa",), seeds=3),
)
TINY = Table(
    "Three layers on digits",
    "digits",
    CELLS,
    "TSSA",
    changes=(*SMALL, *TWELVE, "optim.opt=adamw"),
    pairs=(("DMSA", "TSSA"), ("DMSA", "MHSA")),
    layers=("zero_gates", "never"),
    marks=("DMSA", "TSSA"),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "tiny", TINY)


def line(cell: str, seed: int, top1: float, **more: Any) -> dict[str, Any]:
    recipe = TINY.recipe_of(next(each for each in TINY.cells if each.name == cell), seed)
    told: dict[str, Any] = {"table": "x", "device": "x", "date": "x", "cell": cell, "seed": seed}
    told["config"] = ledger.config_of(recipe)
    told |= {"seconds": 6.0, "parameters": 1234, "commit": "abcdefghij", "versions": {"torch": "2"}}
    told |= {"data": {"name": "digits", "variant": ""}, "metrics": {"top1": top1, "train_loss": 1.5}}
    return told | more


def test_every_cell_is_a_network_and_no_two_of_a_table_are_the_same() -> None:
    networks = {}
    for name, table in TABLES.items():
        configs = [ledger.config_of(table.recipe_of(cell, 3)) for cell in table.cells]
        assert len(set(configs)) == len(configs) and configs[0] == table.config_of(table.cells[0]), name  # whatever the seed
        assert {cell.against or table.against for cell in table.cells} <= {"", *(cell.name for cell in table.cells)}
        found = [table.recipe_of(cell, 0).model_config(num_classes=10) for cell in table.cells]
        networks |= {repr(config): config for config in found}
    for config in networks.values():
        VisionModel(config, device="meta")
    shared = {ledger.config_of(TABLES[name].recipe_of(cell, 0)) for name in ("gain", "gates") for cell in TABLES[name].cells}
    dmsa = ledger.config_of(TABLES["sparsity-cifar10"].recipe_of(TABLES["sparsity-cifar10"].cells[2], 0))
    assert dmsa in shared and len(shared) == len(TABLES["gain"].cells) + len(TABLES["gates"].cells) - 1


@pytest.mark.slow
def test_scaled_gates_start_where_sparsemax_does() -> None:
    """A quarter, whatever the images: the table says so."""
    images = F.interpolate(torch.randn(16, 3, 4, 4), size=32, mode="bicubic")
    table = TABLES["gates"]
    for name, printed in (("sigmoid", 0.5), ("relu", 0.078), ("gelu", 0.081), ("sparsemax", 0.25)):
        for cell in table.cells:
            scale = {"as printed": 1.0, "gate x 32": 32.0}.get(cell.name.removeprefix(f"{name}, "), 0.25 / printed)
            if cell.name.startswith(name) and scale != 32:
                models = [prepare.build_model(table.recipe_of(cell, seed), "0123456789", 3).eval() for seed in range(3)]
                with torch.no_grad():
                    gates = [layer.parts.gate.abs().mean() for model in models for layer in model.trace(images).layers]
                assert sum(gates).item() / len(gates) == pytest.approx(printed * scale, rel=0.15), cell.name


def test_a_ledger_is_appended_to_and_a_cut_line_costs_itself_alone(tmp_path: Path) -> None:
    file = tmp_path / "ledger/tiny.jsonl"
    ledger.add(file, line("DMSA", 0, 0.5))
    file.write_text(file.read_text() + '{"table": "ti')
    assert [each["seed"] for each in ledger.read(tmp_path / "ledger")] == [0]
    ledger.add(file, line("DMSA", 1, 0.6))
    assert [each["seed"] for each in ledger.read(tmp_path / "ledger")] == [0, 1]
    file.write_text(file.read_text().removesuffix("\n"))  # a whole run, its end of line lost
    ledger.add(file, line("DMSA", 2, 0.6))
    assert [each["seed"] for each in ledger.read(tmp_path / "ledger")] == [0, 1, 2]
    file.write_text(file.read_text().replace('"seed": 1', '"seed": '))
    with pytest.raises(BadFileError, match=r"tiny\.jsonl, line 2 is damaged"):
        ledger.read(tmp_path / "ledger")


def test_a_table_shows_means_intervals_and_gaps(tiny: None) -> None:
    lines = [line("TSSA", seed, top1) for seed, top1 in enumerate((0.80, 0.82, 0.81))]
    lines += [line("DMSA", seed, top1) for seed, top1 in enumerate((0.83, 0.84, 0.85))]
    lines += [line("DMSA", 0, 0.99), line("DMSA", 9, 0.99)]  # a second run of a seed, and a seed of no table
    shown = render.markdown("tiny", lines)
    assert "| DMSA | 50.00 | - | 84.00 ± 1.00 | 3 | +3.00 (+0.52 to +5.48, n = 3) | 1.5000 | 1,234 |" in shown
    assert "| TSSA | - | 60.00 | 81.00 ± 1.00 | 3 |  | 1.5000 | 1,234 |" in shown
    assert "| MHSA | - | - | not run | 0 of 3 | | | |" in shown
    assert "- digits; x, torch 2, commit abcdefg, x." in shown and "6 runs, 0.6 minutes of wall time" in shown
    assert "| DMSA | TSSA | +3.00 (+0.52 to +5.48, n = 3) |\n| DMSA | MHSA | not run |" in shown
    assert render.markdown("tiny", lines) == shown
    assert render.markdown("tiny", [*lines, line("MHSA", 0, 0.7)]) != shown


def test_a_table_shows_what_the_layers_did(tiny: None) -> None:
    def layered(seed: int, gates: list[float], never: list[list[int]]) -> dict[str, Any]:
        layers = {"images": 256, "zero_gates": gates, "never": never}
        return line("DMSA", seed, 0.5, metrics={"top1": 0.5, "train_loss": 1.0, "layers": layers})

    shown = render.markdown(
        "tiny", [layered(0, [0.25, 0.5], [[3], []]), layered(1, [0.75, 0.5], [[], []]), line("TSSA", 0, 0.5)]
    )
    assert "## Gates that are exactly 0, %, by layer\n\n| | 0 | 1 |\n|---|---|---|\n| DMSA | 50.0 | 50.0 |\n\n## Heads" in shown
    unknown = render.markdown("tiny", [layered(0, [None, 0.5], [[3], []])])  # type: ignore[list-item]
    assert "| DMSA | - | 50.0 |" in unknown
    assert "| DMSA | 0.5 | 0.0 |" in shown and "the first 256 of the images" in shown


def test_the_picture_shows_every_run(tiny: None) -> None:
    lines = [line("TSSA", 0, 0.80), line("TSSA", 1, 0.84), line("DMSA", 0, 0.9)]
    drawn = render.svg("tiny", lines)
    assert drawn.count("<circle") == 3 and drawn.count('class="mean"') == 2 and drawn.index(">DMSA<") < drawn.rindex(">TSSA<")
    assert "MHSA" not in drawn and render.svg("tiny", lines[:2]) != drawn
    assert "<circle" not in render.svg("tiny", [])


def start(folder: Path, **more: Any) -> list[str]:
    """Run the table "tiny"; what is said."""
    said: list[str] = []
    run.run_table("tiny", folder, say=said.append, **{"device": "cpu", "commit": "abc", "quiet": True} | more)
    return said


def test_only_what_is_missing_is_run_and_is_what_train_gives(tiny: None, tmp_path: Path) -> None:
    ledger.add(tmp_path / "other.jsonl", line("TSSA", 1, 0.5))
    first, *said = start(tmp_path, weights=tmp_path / "weights", cells=["DMSA", "TSSA"])
    assert first == "tiny: 5 runs, 1 at a time" and [each.partition(": ")[2].partition(":")[0] for each in said] == [
        "DMSA, seed 0", "DMSA, seed 1", "DMSA, seed 2", "TSSA, seed 0", "TSSA, seed 2",
    ]  # fmt: skip
    assert [(cell.name, seed) for cell, seed in run.missing(TINY, ledger.read(tmp_path))] == [("MHSA", i) for i in range(3)]
    assert start(tmp_path, cells=["DMSA", "TSSA"]) == [] and not list((tmp_path / ".runs").iterdir())
    found = {(each["cell"], each["seed"]): each for each in ledger.read(tmp_path)}
    mine = found["DMSA", 2]
    assert mine["changes"][-1] == "run.seed=2" and mine["data"]["images"] == [96, 359] and mine["recipe"] == "digits"
    alone = train(TINY.recipe_of(CELLS[0], 2), tmp_path / "alone", device="cpu")
    assert mine["metrics"]["right"] == alone.score.right and mine["metrics"]["loss"] == pytest.approx(alone.score.loss)
    last = [event for event in alone.journal if event["event"] == "evaluation"][-1]
    assert mine["metrics"]["train_loss"] == last["train_loss"]  # of the last epoch
    layers = mine["metrics"]["layers"]
    assert layers["images"] == 256 and len(layers["zero_gates"]) == 1 and layers["zero_memberships"] == [0.0]
    assert "zero_gates" not in found["TSSA", 0]["metrics"]["layers"]
    saved = load_model(tmp_path / "weights" / f"{mine['config']}-2")
    assert torch.equal(saved.head.weight, alone.model.head.weight)


def test_several_processes_share_a_table(tiny: None, tmp_path: Path) -> None:
    """Somebody is at seed 1 of TSSA; seed 2 is done while it waits for its turn."""
    folder = tmp_path / ".runs" / f"{TINY.config_of(CELLS[1])}-1"
    folder.mkdir(parents=True)
    handle = take_lock(folder / "lock")
    _, *said = start(tmp_path, cells=["TSSA"])
    assert said[1] == "tiny: TSSA, seed 1: another process is at it" and not any("at it" in each for each in said[::2])
    os.close(handle)
    job = run.Job("tiny", TINY, CELLS[1], 2, tmp_path, device="cpu", quiet=True)
    assert run.run(job) == (True, "done by another process")
    assert [each["seed"] for each in ledger.read(tmp_path)] == [0, 2]


def test_a_killed_run_goes_on(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after its first epoch: not in the ledger; the same command trains the second epoch alone."""
    folder = tmp_path / ".runs" / f"{TINY.config_of(CELLS[0])}-0"
    steps: list[int] = []

    class Ctrl(Quiet):
        def step(self, done: int, steps_: int, values: dict[str, Any]) -> None:
            steps.append(done)
            if len(steps) == 6:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run, "watcher", lambda quiet: Ctrl())
    with pytest.raises(Stopped, match="which is saved"):
        start(tmp_path, cells=["DMSA"])
    assert not ledger.read(tmp_path) and (folder / "checkpoints").is_dir()
    start(tmp_path, cells=["DMSA"])
    assert steps[:12] == list(range(1, 13)) and [each["seed"] for each in ledger.read(tmp_path)] == [0, 1, 2]


@pytest.mark.process
def test_runs_at_once_are_those_that_they_are_alone(tiny: None, tmp_path: Path) -> None:
    """Two processes; the second table of the same runs is trained in this one."""
    start(tmp_path / "both", cells=["DMSA"], at_once=2)
    start(tmp_path / "alone", cells=["DMSA"])
    both, alone = ({each["seed"]: each["metrics"] for each in ledger.read(tmp_path / name)} for name in ("both", "alone"))
    assert both == alone and set(both) == {0, 1, 2}


def test_a_cell_may_start_from_the_weights_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same seed; without them it says what to run first, and its line names the cell, no folder."""
    first = Table("First", "digits", [Cell("long", DMSA, seeds=1)], changes=TINY.changes)
    still = ("optim.lr=1e-12", "optim.weight_decay=0.0")  # so that it ends where it began
    later = Table("Later", "digits", [Cell("from it", (*DMSA, *still), seeds=1, start="long")], changes=TINY.changes)
    monkeypatch.setitem(TABLES, "best", first)
    monkeypatch.setitem(TABLES, "tiny", later)
    with pytest.raises(DmstError, match="it starts from long of the table best: run that first, with the same --weights"):
        start(tmp_path, weights=tmp_path / "weights")
    run.run_table("best", tmp_path, say=print, device="cpu", quiet=True, weights=tmp_path / "weights")
    start(tmp_path, weights=tmp_path / "weights")
    begun_from, told = ledger.read(tmp_path)
    saved, ended = (load_model(tmp_path / "weights" / f"{each['config']}-0") for each in (begun_from, told))
    assert torch.allclose(saved.blocks[0].operator.subspace.weight, ended.blocks[0].operator.subspace.weight, atol=1e-7)
    assert told["changes"][-2] == f'model.init_from="the weights of long, {begun_from["config"]}"'


def test_a_run_that_fails_costs_the_others_nothing(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def some_fail(recipe: Any, *rest: Any, **more: Any) -> Any:
        operator = recipe.model.options["operator"]
        if operator != "tssa":
            raise DmstError("no") if operator == "dmsa" else RuntimeError("the compiler broke")
        return train(recipe, *rest, **more)

    monkeypatch.setattr(run, "train", some_fail)
    command = ["reproduce", "tiny", "--device", "cpu", "--ledger", str(tmp_path), "--out", str(tmp_path / "out")]
    told = CliRunner().invoke(cli.app, [*command, "--at-once", "1"])
    assert "6 of 9 runs of tiny failed: DMSA, seed 0: no | " in str(told.exception)
    assert "MHSA, seed 2: RuntimeError: the compiler broke" in str(told.exception)
    assert "| TSSA | - | 60.00 |" in (tmp_path / "out/tiny.md").read_text()
    assert {each["cell"] for each in ledger.read(tmp_path)} == {"TSSA"}


def test_the_command(tiny: None, tmp_path: Path) -> None:
    ledger.add(tmp_path / "ledger/tiny.jsonl", line("DMSA", 0, 0.5))
    places = ["--ledger", str(tmp_path / "ledger"), "--out", str(tmp_path / "out")]
    asked = CliRunner().invoke(cli.app, ["reproduce", "--list", *places])
    assert "1 of 9" in asked.output and "gates" in asked.output
    done = CliRunner().invoke(cli.app, ["reproduce", "--all", "--render", *places])
    assert done.exit_code == 0 and "not run" in (tmp_path / "out/gates.md").read_text()
    assert (tmp_path / "out/tiny.md").read_text() == render.markdown("tiny", ledger.read(tmp_path / "ledger"))
    for words, message in ((["gate"], "gates"), ([], "no table was named")):
        failed = CliRunner().invoke(cli.app, ["reproduce", *words, *places])
        assert failed.exit_code != 0 and message in str(failed.exception)


def test_the_committed_tables_are_those_of_the_committed_ledger() -> None:
    results = Path(__file__).parents[2] / "results"
    lines = ledger.read(results / "ledger")
    for name, table in TABLES.items():
        assert (results / f"{name}.md").read_text() == render.markdown(name, lines), name
        if table.marks:
            assert (results / f"{name}.svg").read_text() == render.svg(name, lines), name
    known = {ledger.config_of(table.recipe_of(cell, 0)) for table in TABLES.values() for cell in table.cells}
    assert {line["config"] for line in lines} <= known  # a changed recipe must not orphan what was run
