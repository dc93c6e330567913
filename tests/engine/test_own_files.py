"""A run touches nothing that is not its own, has on the disk what it wrote, and tells when it would end in other bits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dmst.engine import journal
from dmst.engine.checkpoint import RunFolder
from dmst.engine.prepare import evaluated_by
from dmst.engine.train_loop import Result, train
from dmst.errors import BadFileError, DmstError, OptionError
from tests.runs import SAVED, Cut, CutAfter, on_pictures, pictures, tiny


def go(recipe: Any, out: Path, **options: Any) -> Result:
    return train(recipe, out, device="cpu", **options)


# --- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lock", "journal.jsonl", "recipe.toml"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_in_a_run_folder_is_not_written_through(name: str, dangling: bool, tmp_path: Path) -> None:
    mine = tmp_path / "thesis.tex"
    if not dangling:
        mine.write_text("years of work")
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(mine)
    if dangling and name == "recipe.toml":  # replaced by a file of the run
        go(tiny("schedule.epochs=1"), run)
        assert not (run / name).is_symlink() and not mine.exists()
        return
    with pytest.raises(DmstError, match=rf"{name}.*link") as said:
        go(tiny("schedule.epochs=1"), run)
    assert str(run) in str(said.value)
    assert not mine.exists() if dangling else mine.read_text() == "years of work"


def test_a_file_of_the_users_called_lock_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("combination: 1234")
    with RunFolder(tmp_path):
        pass
    assert (tmp_path / "lock").read_text() == "combination: 1234"


def test_checkpoints_elsewhere_are_neither_written_nor_swept(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / ".step_00000001.0123456789abcdef").mkdir(parents=True)  # would be swept in a run of ours
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(elsewhere)
    with pytest.raises(OptionError, match="checkpoints: links are not followed"), RunFolder(tmp_path / "run"):
        pass
    assert os.listdir(elsewhere) == [".step_00000001.0123456789abcdef"]


# --- while the folder is held ------------------------------------------------------------------------------------------


def test_the_report_is_written_while_the_folder_is_held(tmp_path: Path) -> None:
    def report(result: Result) -> None:
        with pytest.raises(OptionError, match="in use"):
            RunFolder(result.folder).__enter__()

    go(tiny("schedule.epochs=1"), tmp_path, report=report)


# --- synced ------------------------------------------------------------------------------------------------------------


def test_every_file_is_synced_before_its_rename_and_its_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut leaves an empty file under the right name."""
    events: list[tuple[str, str]] = []
    real_replace, real_rename = Path.replace, Path.rename

    def note(what: str, real: Callable[[Path, Any], Path]) -> Callable[[Path, Any], Path]:
        return lambda path, target: events.append((what, str(path))) or real(path, target)  # type: ignore[func-returns-value]

    monkeypatch.setattr(os, "fsync", lambda handle: events.append(("fsync", os.readlink(f"/proc/self/fd/{handle}"))))
    monkeypatch.setattr(Path, "replace", note("rename", real_replace))
    monkeypatch.setattr(Path, "rename", note("rename", real_rename))
    go(on_pictures(pictures(tmp_path / "data"), "schedule.epochs=1"), run := tmp_path / "run")
    renames = [i for i, (what, _) in enumerate(events) if what == "rename"]
    staged = [events[i][1] for i in renames if "/." in events[i][1]]  # and none that is only removed
    assert {Path(path).name[1:5] for path in staged} >= {"reci", "scan", "step", "fina"}
    for i in renames:
        if events[i][1] in staged:
            assert ("fsync", events[i][1]) in events[:i], events[i]  # the file, or the folder that holds the files
            assert ("fsync", str(Path(events[i][1]).parent)) in events[i:], events[i]
    first = next(i for i in renames if "/checkpoints/.step_" in events[i][1])
    assert ("fsync", str(run / journal.NAME)) in events[:first]  # what happened before a checkpoint is known after it


# --- what changes the bits ---------------------------------------------------------------------------------------------


def test_what_changes_the_bits_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Cut):
        go(tiny(*SAVED), tmp_path, watch=CutAfter(4))
    monkeypatch.setattr(torch, "__version__", "2.13.0+other")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NEON")
    changed = r"torch .* -> 2.13.0.other, threads (\d+) -> 99, instructions .* -> NEON.*OMP_NUM_THREADS=\1"
    with pytest.warns(UserWarning, match=changed):
        go(tiny(*SAVED), tmp_path)


def test_it_is_refused_where_bits_count_unless_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, was = tiny(*SAVED, "run.deterministic=true"), torch.get_num_threads()
    with pytest.raises(Cut):
        go(recipe, tmp_path, watch=CutAfter(4))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    with pytest.raises(OptionError, match=rf"threads {was} -> 99.*run.deterministic"):
        go(recipe, tmp_path)
    with pytest.warns(UserWarning, match="threads"):
        events = go(recipe, tmp_path, allow_config_change=True).journal
    assert [event["changed"] for event in events if event["event"] == "start"][1:] == [[f"threads {was} -> 99"]]


# --- images that change ------------------------------------------------------------------------------------------------


def solid(data: Path) -> Path:
    """Two classes of uncompressed images, all of one size in bytes."""
    for split, count in (("train", 48), ("test", 4)):
        for shade, name in ((40, "dark"), (200, "light")):
            (data / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (shade, i, shade)).save(data / split / name / f"{i:03}.bmp")
    assert len({path.stat().st_size for path in data.rglob("*.bmp")}) == 1
    return data


def exchange(folder: Path) -> None:
    (folder / "dark").rename(folder / "aside")
    (folder / "light").rename(folder / "dark")
    (folder / "aside").rename(folder / "light")


@pytest.mark.parametrize("split", ["train", "test"])
def test_class_folders_that_were_exchanged_are_noticed(split: str, tmp_path: Path) -> None:
    recipe, data = on_pictures(tmp_path / "data", *SAVED), solid(tmp_path / "data")
    for path in data.rglob("*.bmp"):
        os.utime(path, (1e9, 1e9))  # as an archive unpacks them: all of one time
    with pytest.raises(Cut):
        go(recipe, tmp_path / "run", watch=CutAfter(4))
    exchange(data / split)
    with pytest.raises(OptionError, match=r"the images are not those that the run in .* began with"):
        go(recipe, tmp_path / "run")
    exchange(data / split)
    go(recipe, tmp_path / "run")


def test_the_same_images_elsewhere_are_the_same(tmp_path: Path) -> None:
    """Another disk, other times: what counts is what is in the files."""
    recipe, data = on_pictures(tmp_path / "data", *SAVED), solid(tmp_path / "data")
    with pytest.raises(Cut):
        go(recipe, tmp_path / "run", watch=CutAfter(4))
    shutil.copytree(data, tmp_path / "other", copy_function=shutil.copyfile)
    shutil.rmtree(data)
    (tmp_path / "other").rename(data)
    go(recipe, tmp_path / "run")


def test_an_evaluation_notices_them_too(tmp_path: Path) -> None:
    recipe, data = on_pictures(tmp_path / "data", "schedule.epochs=1"), solid(tmp_path / "data")
    go(recipe, tmp_path / "run")
    assert evaluated_by(tmp_path / "run")[0] is not None
    exchange(data / "test")
    with pytest.raises(BadFileError, match="has changed since the run"):
        evaluated_by(tmp_path / "run")
