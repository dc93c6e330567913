"""The demo, small: it trains by the engine, goes on where it was cut short, and its page shows what was measured."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
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
from dmst.demo import run_demo, summary
from dmst.engine import journal
from dmst.engine.recipe import read_recipe
from dmst.engine.samples import sample
from dmst.engine.train_loop import train
from dmst.errors import DmstError, MissingExtraError, Stopped
from tests.pages import check_page

RECIPE = read_recipe("digits", ["schedule.epochs=1", "schedule.warmup_epochs=0.1"])


def test_the_split_is_fixed_and_whole() -> None:
    learnt, unseen = (catalog.open_set("digits", split) for split in ("train", "test"))
    assert [np.asarray(each.pixels()).shape for each in (learnt, unseen)] == [(1438, 8, 8, 1), (359, 8, 8, 1)]
    assert (np.bincount(learnt.labels) + np.bincount(unseen.labels)).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip


def test_the_usual_demo_is_the_usual_recipe() -> None:
    for function in (cli.demo, run_demo):
        defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
        assert getattr(defaults["epochs"], "default", defaults["epochs"]) == read_recipe("digits").schedule.epochs


def test_the_table_averages_runs() -> None:
    runs = (("dmst_digits", 0.98), ("dmst_digits", 0.99), ("dmst_digits", 1.0), ("tost_digits", 0.5), ("vit_digits", 0.5))
    every = [{"model": name, "parameters": 7, "accuracies": [0.1, a], "seconds": 2.0, "images": 100} for name, a in runs]
    rows = summary(every)
    assert rows[0] == ("dmst_digits", "dmsa", "99.0 % ± 1.0", "3", "7", "50")
    assert rows[2] == ("vit_digits", "mhsa", "50.0 %", "1", "7", "50")


@pytest.mark.process
def test_a_run_that_fails_ends_the_demo(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DmstError, match=r"the demo stopped: .*file"):
        run_demo(tmp_path / "file")


def test_a_missing_library_and_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dmst.demo.train_one", interrupted)
    with pytest.raises(Stopped, match="the same command again") as stop:
        run_demo(tmp_path / "out")
    assert stop.value.exit_code == 130
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dmst\[demo\]'"):
        run_demo(tmp_path)


@pytest.mark.process
def test_a_demo_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    """Its run of DMST was stopped after 7 of 22 steps by a signal. Then the command, its words and its page."""
    out = tmp_path / "out"
    mine = out / "dmst_digits-seed0"

    def stop(values: Mapping[str, Any], step: int) -> None:
        if step == 7 and "loss" in values:  # the step itself; that it was saved is told as well
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        train(RECIPE, mine, device="cpu", listeners=[stop])
    result = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(
        cli.app, ["demo", "--out", str(out), "--seeds", "1", "--epochs", "1", "--workers", "1"]
    )
    assert result.exit_code == 0, result.output
    assert str(out / "report.html") in "".join(result.output.split()) and "51,554" in result.output
    events = list(journal.read(mine / journal.NAME))
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 23))

    record = json.loads((out / "results.json").read_text())
    assert [run["model"] for run in record["runs"]] == ["vit_digits", "dmst_digits", "tost_digits"]
    assert record["recipe"]["schedule"]["epochs"] == 1 and record["recipe"]["model"]["name"] == "dmst_digits"
    for run in record["runs"]:
        assert len(run["losses"]) == len(run["accuracies"]) == 1 and run["images"] == 22 * 64
        assert 0.5 < run["losses"][0] < math.log(10) + 0.3 and run["accuracies"][0] > 0.15 and run["seconds"] > 0
        assert run["parameters"] == {"dmst": 51_554, "tost": 51_058, "vit": 59_490}[run["model"].removesuffix("_digits")]
    kept = re.search(r"dmst\.load_model\('(.*)'\)", result.output.replace("\n", ""))
    assert kept is not None and Path(kept[1]) == mine / "final"
    model = dmst.load_model(kept[1])
    ((images, labels),) = sample(model, "digits", batch_size=1000)
    read = (model(images).argmax(-1) == labels).sum().item() / 359
    assert read == record["runs"][1]["accuracies"][-1]

    check_page(out / "report.html")
    text = " ".join((out / "report.html").read_text().split())
    assert f"{read:.2%}" in text and "Comparison" in text and all(f"<td>{name}_digits</td>" in text for name in ("tost", "vit"))
    assert "nan" not in re.sub(r"data:image/png;base64,[^\"]*", "", text).lower()
