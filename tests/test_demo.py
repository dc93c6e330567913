"""The demo, small: it trains by the engine, goes on where it was cut short, and its page shows what was measured."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import dmst
from dmst import cli
from dmst.data import catalog
from dmst.demo import Job, make_ready, outcome, run_demo, summary, train_all
from dmst.engine import journal
from dmst.engine.recipe import differences, read_recipe
from dmst.engine.samples import sample
from dmst.engine.train_loop import train
from dmst.errors import DmstError, MissingExtraError, OptionError, SaveError, Stopped
from dmst.terminal import Terminal
from tests.pages import check_page

MINE = Job("dmst_digits", 0)
RECIPE = MINE.recipe(1)
quiet = Terminal(quiet=True)


def test_the_split_is_fixed_and_whole() -> None:
    learnt, unseen = (catalog.open_set("digits", split) for split in ("train", "test"))
    assert [np.asarray(each.pixels()).shape for each in (learnt, unseen)] == [(1438, 8, 8, 1), (359, 8, 8, 1)]
    assert (np.bincount(learnt.labels) + np.bincount(unseen.labels)).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip


def test_a_job_is_the_recipe_for_its_network_and_seed() -> None:
    usual = read_recipe("digits")
    assert Job("dmst_digits", 0).recipe(usual.schedule.epochs) == usual  # so `dmst train digits` is a run of the demo
    assert differences(usual, Job("vit_digits", 3).recipe(5)) == [
        'model.name: "dmst_digits" -> "vit_digits"',
        "schedule.epochs: 16 -> 5",
        "schedule.warmup_epochs: 1.6 -> 0.5",
        "run.seed: 0 -> 3",
    ]
    for function in (cli.demo, run_demo):
        defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
        assert getattr(defaults["epochs"], "default", defaults["epochs"]) == usual.schedule.epochs


def test_the_table_averages_runs() -> None:
    runs = (("dmst_digits", 0.98), ("dmst_digits", 0.99), ("dmst_digits", 1.0), ("tost_digits", 0.5), ("vit_digits", 0.5))
    every = [{"model": name, "parameters": 7, "accuracies": [0.1, a], "seconds": 2.0, "images": 100} for name, a in runs]
    rows = summary(every)
    assert rows[0] == ("dmst_digits", "dmsa", "99.0 % ± 1.0", "3", "7", "50")
    assert rows[2] == ("vit_digits", "mhsa", "50.0 %", "1", "7", "50")


def test_an_earlier_demo_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "[v1]"
    for turn in range(3):
        make_ready(out, quiet)
        assert out.is_dir() and not any(out.iterdir())
        for name in ("results.json", "report.html"):
            (out / name).write_text(str(turn))
    kept = {x.name: (x / "report.html").read_text() for x in tmp_path.iterdir()}
    assert kept == {"[v1]": "2", "[v1]-1": "0", "[v1]-2": "1"}
    (out / "results.json").unlink()  # as in the folder of a training run
    with pytest.raises(OptionError, match="something else"):
        make_ready(out, quiet)


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="cannot be written"):
        run_demo(tmp_path / "file")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dmst\[demo\]'"):
        run_demo(tmp_path)


def test_ctrl_c_says_that_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dmst.demo.train_all", interrupted)
    with pytest.raises(Stopped, match="the same command again") as stop:
        run_demo(tmp_path / "out")
    assert stop.value.exit_code == 130


# --- the whole ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A demo that was cut short, its run of DMST stopped after 7 of 22 steps by a signal; then gone on."""
    out = tmp_path_factory.mktemp("demo") / "out"

    def stop(values: Mapping[str, Any], step: int) -> None:
        if step == 7 and "loss" in values:  # the step itself; that it was saved is told as well
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        train(RECIPE, out / MINE.folder, device="cpu", listeners=[stop])
    result = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(
        cli.app, ["demo", "--out", str(out), "--seeds", "1", "--epochs", "1", "--workers", "1"]
    )
    assert result.exit_code == 0, result.output
    return out, result.output


@pytest.mark.process
def test_the_command_says_where_the_report_is(finished: tuple[Path, str]) -> None:
    out, text = finished
    joined = "".join(text.split())
    assert str(out / "report.html") in joined and f"Continuingthedemoin{out}." in joined and "Next:" in text
    assert "dmst_digits" in text and "tost_digits" in text and "vit_digits" in text and "51,554" in text
    kept = re.search(r"dmst\.load_model\('(.*)'\)", text.replace("\n", ""))
    assert kept is not None and Path(kept[1]) == out / MINE.folder / "final"
    model = dmst.load_model(kept[1])
    ((images, labels),) = sample(model, "digits", batch_size=1000)
    read = (model(images).argmax(-1) == labels).sum().item() / 359
    record = json.loads((out / "results.json").read_text())
    assert read == next(r for r in record["runs"] if r["model"] == "dmst_digits")["accuracies"][-1]


@pytest.mark.process
def test_a_demo_that_was_cut_short_goes_on(finished: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = finished
    events = list(journal.read(out / MINE.folder / journal.NAME))
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 23))
    kinds = [event["event"] for event in events if event["event"] != "step"]
    assert kinds == ["start", "checkpoint", "stopped", "evaluation", "checkpoint", "end"]
    for run in json.loads((out / "results.json").read_text())["runs"]:
        assert len(run["losses"]) == len(run["accuracies"]) == 1 and run["images"] == 22 * 64
        assert 0.5 < run["losses"][0] < math.log(10) + 0.3 and run["accuracies"][0] > 0.15 and run["seconds"] > 0
        assert run["parameters"] == {"dmst": 51_554, "tost": 51_058, "vit": 59_490}[run["model"].removesuffix("_digits")]
    copy = Path(shutil.copytree(out, tmp_path / "out"))  # killed before its page was written: no run is repeated
    heard: list[Mapping[str, Any]] = []
    train(RECIPE, copy / MINE.folder, device="cpu", listeners=[lambda values, step: heard.append(values)])
    assert not any("loss" in values for values in heard)
    assert outcome(MINE, copy / MINE.folder) == outcome(MINE, out / MINE.folder)


@pytest.mark.process
def test_the_page_is_whole_and_quotes_the_results(finished: tuple[Path, str]) -> None:
    out, _ = finished
    reader = check_page(out / "report.html")
    text = " ".join((out / "report.html").read_text().split())
    record = json.loads((out / "results.json").read_text())
    assert [run["model"] for run in record["runs"]] == ["vit_digits", "dmst_digits", "tost_digits"]
    assert record["recipe"] == RECIPE.tables(promise=False)
    read = next(run for run in record["runs"] if run["model"] == "dmst_digits")["accuracies"][-1]
    wrong = round((1 - read) * 359)
    assert f"{read:.1%}" in text and f"{wrong} of 359" in text
    assert len(re.findall(r"predicted \d, \d", text)) == 10 * 5 + min(wrong, 24)
    assert "dmst demo --epochs 1 --seeds 1" in text and len(reader.ids) == 6 + 5
    assert "nan" not in re.sub(r"data:image/png;base64,[^\"]*", "", text).lower()


@pytest.mark.process
def test_a_run_that_fails_stops_the_demo(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DmstError, match=r"(?s)the demo stopped: .*file/dmst_digits-seed0 cannot be the\s+folder"):
        train_all([MINE], 1, tmp_path / "file", 1, quiet)
