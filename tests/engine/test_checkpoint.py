"""Checkpoints: exact when whole, refused when not, and never the last good one lost. Kills are in test_checkpoint_kills.py."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from dmst.engine.checkpoint import RunFolder, State
from dmst.errors import BadFileError, FullDiskError, OptionError, SaveError
from tests.forged import MANIFEST, WEIGHTS, Change, forge, harmed, listed, pickled, put, seal, with_header

FILES = ["ema.safetensors", "manifest.json", "model.safetensors", "optim.safetensors", "state.json"]
TOLD: dict[str, Any] = {
    "best": {"step": 3, "top1": 0.1 + 0.2, "tiny": 5e-324, "of": "é\n"}, "epoch_sums": [1.5, 2**60 + 1, 0.0], "processes": 2,
    "data": "digits", "versions": {"torch": "2"}, "machine": {"threads": 1},
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is not waited for: what fsync is for, no test can see."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def state(step: int, value: float = 0.0) -> State:
    parts = {
        stem: {"head.weight": torch.randn(3, n) + value, "head.bias": torch.randn(n), "count": torch.tensor(step)}
        for n, stem in ((5, "model"), (6, "ema"), (7, "optim"))
    }
    return State(step, parts, **TOLD)


def same(a: State | None, b: State | None) -> bool:
    """Equal to the bit, in names, dtypes, shapes and values."""
    if a is None or b is None or replace(a, tensors={}) != replace(b, tensors={}):
        return False
    left, right = ({(stem, name): x for stem, xs in each.tensors.items() for name, x in xs.items()} for each in (a, b))
    return left.keys() == right.keys() and all(
        (x.dtype, x.shape) == (right[key].dtype, right[key].shape) and torch.equal(x, right[key]) for key, x in left.items()
    )


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run with checkpoints of steps 3 and 6."""
    with RunFolder(tmp_path / "run") as folder:
        saved(folder, 3, 6)
        yield folder


def saved(run: RunFolder, *steps: int) -> None:
    for step in steps:
        run.save(state(step))


def newest(run: RunFolder) -> Path:
    return run.checkpoints / "step_00000006"


def damage(run: RunFolder, *steps: int) -> None:
    for step in steps:
        path = run.checkpoints / f"step_{step:08d}" / WEIGHTS
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)


# --- whole ones ------------------------------------------------------------------------------------------------------


def of_all_kinds() -> dict[str, Tensor]:
    """Every dtype in several shapes, laid out in every way that a tensor can be."""
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
    found = {"a": torch.nn.Parameter(torch.ones(2))}
    for i, kind in enumerate(kinds):
        x = (torch.randn(4, 3 + i) * 50).to(kind)
        found |= {f"{i}.full": x, f"{i}.0d": x[1, 2], f"{i}.empty": x[:0], f"{i}.turned": x.T, f"{i}.part": x[1:, ::2]}
        found |= {f"{i}.shared": x.view(-1), f"{i}.wide": x[:1].expand(5, -1), f"{i}.4d": x.reshape(2, 1, 2, -1)}
    return found


def test_exact(tmp_path: Path) -> None:
    written = State(12, {"model": of_all_kinds(), "optim": {}}, **TOLD)
    before = {name: x.clone() for name, x in written.tensors["model"].items()}
    with RunFolder(tmp_path / "deep" / "run") as run:
        assert run.newest() is None and run.steps() == []
        assert run.save(written) == tmp_path / "deep" / "run" / "checkpoints" / "step_00000012"
        assert run.steps() == [12]
        loaded = run.newest()
    assert loaded is not None and same(loaded, written)
    assert repr(replace(loaded, tensors={})) == repr(replace(written, tensors={}))  # floats to the last digit
    assert all(torch.equal(x, before[name]) for name, x in written.tensors["model"].items())
    loaded.tensors["model"]["1.full"].add_(1)  # their own memory, and writable
    assert torch.equal(loaded.tensors["model"]["1.shared"], before["1.shared"])


def test_layout(run: RunFolder) -> None:
    """The files, and their hashes by a second reading of the format."""
    folder = newest(run)
    assert names(run.path) == ["checkpoints", "lock"] and names(run.checkpoints) == ["step_00000003", "step_00000006"]
    assert names(folder) == FILES and folder.stat().st_mode & 0o777 == 0o755
    raw = (folder / MANIFEST).read_bytes()
    told = json.loads(raw)
    assert told["schema"] == 2 and list(told)[-1] == "self_sha256" and raw == seal(told)
    assert told["files"] == {name: listed((folder / name).read_bytes()) for name in FILES if name != MANIFEST}
    assert json.loads((folder / "state.json").read_bytes()) == {"step": 6, "scaler": [], "content": "", **TOLD}


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_what_is_not_finite_is_never_written(value: float, run: RunFolder) -> None:
    bad = state(9)
    bad.tensors["ema"]["head.bias"] = torch.tensor([1.0, value, 2.0]).bfloat16()
    with pytest.raises(SaveError, match=r"step 9 is not saved: head.bias of ema holds NaN or infinity"):
        run.save(bad)
    assert names(run.checkpoints) == ["step_00000003", "step_00000006"]


@pytest.mark.parametrize("what", ["other weights", "link"])
def test_another_one_takes_its_place(what: str, run: RunFolder, tmp_path: Path) -> None:
    new, folder = state(6, value=1.0), newest(run)
    if what == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    run.save(new)
    assert same(run.newest(), new) and not folder.is_symlink()
    assert names(run.checkpoints) == ["step_00000003", "step_00000006"]
    assert what != "link" or names(tmp_path / "elsewhere") == FILES


# --- pruning ---------------------------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_what_is_protected(run: RunFolder) -> None:
    saved(run, 9, 12, 15)
    assert run.prune(keep=3, protect=[6]) == [3] and run.steps() == [6, 9, 12, 15]
    assert run.prune(keep=1, protect=[6, 7]) == [9] and run.steps() == [6, 12, 15]  # never less than 2
    assert run.prune(keep=2) == [6] and run.prune() == [] and run.prune(keep=0) == []
    assert names(run.checkpoints) == ["step_00000012", "step_00000015"]


# --- which one is newest ---------------------------------------------------------------------------------------------


def test_a_damaged_one_is_skipped_with_its_name_its_reason_and_its_price(run: RunFolder) -> None:
    good = run.load(6)
    saved(run, 9, 13)
    damage(run, 13)
    (run.checkpoints / "step_00000009" / MANIFEST).unlink()
    with pytest.warns(UserWarning, match="is skipped") as said:
        assert same(run.newest(), good)
    told = [str(x.message) for x in said]
    assert len(told) == 2 and all(x.filename == __file__ for x in said)
    assert told[0].startswith("step_00000013 is skipped: ") and "sha256 is not the one" in told[0]
    assert told[0].endswith("The run goes on from step 6: 7 steps are lost.")
    assert told[1].startswith("step_00000009 is skipped: ") and told[1].endswith("3 steps are lost.")


def test_none_that_can_be_used_stops_the_run(run: RunFolder) -> None:
    damage(run, 3, 6)
    with pytest.raises(BadFileError, match=r"no checkpoint in .* can be used. To start again from step 0, move them") as said:
        run.newest()
    assert all(f"step_0000000{step}: " in str(said.value) for step in (3, 6))


def test_a_renamed_one_is_not_taken_for_another_step(run: RunFolder) -> None:
    shutil.copytree(newest(run), run.checkpoints / "step_00000900")
    with pytest.warns(UserWarning, match=r"step_00000900 was renamed: it holds step 6\. .* 894 steps are lost"):
        assert same(run.newest(), run.load(6))


def test_steps_are_sorted_as_numbers_and_other_names_left_alone(run: RunFolder) -> None:
    saved(run, 100_000_000, 99_999_999)
    others = ["step_7", "step_00000x07", "notes.txt", ".step_1.old", ".step_1.x"]
    for name in others:
        (run.checkpoints / name).write_text("mine")
    run.__exit__()
    with run:
        assert run.steps() == [3, 6, 99_999_999, 100_000_000]
        assert set(others) < set(names(run.checkpoints))
        found = run.newest()
    assert found is not None and found.step == 100_000_000


# --- damage ----------------------------------------------------------------------------------------------------------


def refused(run: RunFolder, good: State, match: str = "") -> None:
    """The newest is refused by itself, and passed over for the one before."""
    with pytest.raises(BadFileError, match=match):
        run.load(6)
    with pytest.warns(UserWarning, match="step_00000006 is skipped: .* 3 steps are lost"):
        assert same(run.newest(), good)


def test_every_flipped_bit_and_every_truncation_is_refused(run: RunFolder) -> None:
    good, draw, folder = run.load(3), random.Random(0), newest(run)
    for name in FILES:
        whole = (folder / name).read_bytes()
        for raw in harmed(whole, draw, 20):
            (folder / name).write_bytes(raw)
            refused(run, good, name)
        (folder / name).write_bytes(whole)
    assert run.load(6).step == 6


@pytest.mark.parametrize("name", [WEIGHTS, MANIFEST])
@pytest.mark.parametrize("what", ["missing", "folder", "link", "link to itself", "pipe", "of another step"])
def test_something_else_in_place_of_a_file(what: str, name: str, run: RunFolder, tmp_path: Path) -> None:
    good, path = run.load(3), newest(run) / name
    real = shutil.copy(path, tmp_path / "real")
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "of another step":
        shutil.copy(run.checkpoints / "step_00000003" / name, path)
    elif what != "missing":
        path.symlink_to(real if what == "link" else path)
    refused(run, good, f"{name}|sha256 is not the one")


def test_a_link_in_place_of_a_checkpoint(run: RunFolder, tmp_path: Path) -> None:
    good = run.load(3)
    newest(run).rename(tmp_path / "elsewhere")
    newest(run).symlink_to(tmp_path / "elsewhere")
    refused(run, good, "is a link: links are not followed")


def test_what_the_manifest_does_not_list_is_never_opened(run: RunFolder) -> None:
    os.mkfifo(newest(run) / "more.safetensors")  # to open it would wait for ever
    (newest(run) / "optim.pt").write_bytes(b"\x80\x05")
    assert run.load(6).tensors.keys() == {"model", "ema", "optim"}


# --- what somebody else wrote ----------------------------------------------------------------------------------------


def test_a_forged_checkpoint_loads_if_it_is_right(run: RunFolder) -> None:
    """So that the refusals below are for the reason they state."""
    found = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.int64)}
    forge(newest(run), {WEIGHTS: safetensors.torch.save(found), "more.safetensors": with_header(b"{}      ")})
    loaded = run.load(6).tensors
    assert all(torch.equal(x, loaded["model"][name]) for name, x in found.items()) and loaded["more"] == {}


TWO = {name: {"dtype": "U8", "shape": [4], "data_offsets": place} for name, place in (("a", [0, 4]), ("b", [2, 6]))}
OTHER = {"size": 1, "sha256": "0"}
NONE = "is not the checkpoint of a run"
FORGED: list[tuple[dict[str, bytes] | Change, str]] = [
    ({WEIGHTS: struct.pack("<Q", 2**63) + b"{}"}, "is not a safetensors file"),
    ({WEIGHTS: with_header(TWO, b"123456")}, "is not a safetensors file"),
    ({WEIGHTS: with_header(b" " * (2**23 + 8))}, "its header is said to have 8,388,616 bytes"),
    ({WEIGHTS: safetensors.torch.save({"a": torch.tensor([1, torch.nan])})}, "a holds NaN or infinity"),
    ({"state.json": b"[" * 100_000}, "not JSON"),
    ({"state.json": b"[1]"}, "must hold an object"),
    ({"state.json": b'{"step": 6, "more": 1}'}, "is not the checkpoint of a run .*'more'"),
    ({"state.json": b'{"step": 6, "best": 5}'}, "is not the checkpoint of a run .best is 5"),
    ({"state.json": b'{"step": 7}'}, "was renamed: it holds step 7"),
    (put("schema", value=3), r"is of another dmst: its schema is 3, and this one reads 2\. Update dmst"),
    (put("schema", value="1"), "is of another dmst"),
    (put("schema", value=1), NONE),
    (put("files", value=[]), NONE),
    (put("files", value={}), NONE),
    (put("files", "../model.safetensors", value=OTHER), NONE),
    (put("files", "model.pt", value=OTHER), NONE),
    (put("files", WEIGHTS, value=5), NONE),
    (put("files", WEIGHTS, "size", value=10**30), "is damaged: .* bytes instead of 1,000"),
    (put("files", WEIGHTS, "sha256", value="0"), "its sha256 is not the one"),
    (put("more", value=float("inf")), "do not match its self_sha256"),
]


@pytest.mark.parametrize(("what", "message"), FORGED, ids=[f"{i} {message[:30]}" for i, (_, message) in enumerate(FORGED)])
def test_files_from_elsewhere_under_right_hashes(what: dict[str, bytes] | Change, message: str, run: RunFolder) -> None:
    good = run.load(3)
    forge(newest(run), what) if isinstance(what, dict) else forge(newest(run), change=what)
    refused(run, good, message)


@pytest.mark.parametrize("how", ["protocol 2", "protocol 5", "torch.save"])
def test_no_pickle_is_ever_run(how: str, run: RunFolder, tmp_path: Path) -> None:
    """In place of a file, damaged or under right hashes."""
    good, raw, folder = run.load(3), pickled(how, tmp_path / "canary", tmp_path / "scratch"), newest(run)
    backup = shutil.copytree(folder, tmp_path / "backup")
    told = "is a pickle or zip file, which can run code when it is read: refused. Load it where"
    for name in (WEIGHTS, "state.json", MANIFEST):
        if name != MANIFEST:
            forge(folder, {name: raw})
        (folder / name).write_bytes(raw)
        refused(run, good, f"{name} {told}")
        shutil.copytree(backup, folder, dirs_exist_ok=True)
    assert not (tmp_path / "canary").exists()


# --- a disk that fails -----------------------------------------------------------------------------------------------


def test_a_disk_that_is_nearly_full_is_seen_beforehand(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    old, size = run.load(6), sum(path.stat().st_size for path in newest(run).iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, size))
    monkeypatch.setattr(pathlib.Path, "open", lambda *_: pytest.fail("something was written"))
    with pytest.raises(FullDiskError, match=f"it needs [\\d,]+ bytes, and {size:,} are free there"):
        run.save(state(9))
    monkeypatch.undo()
    assert same(run.newest(), old)


# --- the folder ------------------------------------------------------------------------------------------------------


def test_one_run_at_a_time(run: RunFolder) -> None:
    with pytest.raises(OptionError, match="run is in use by another run: choose another folder"):
        RunFolder(run.path).__enter__()
    saved(run, 9)  # neither took the lock away
    run.__exit__()
    with RunFolder(run.path) as other:
        assert other.steps() == [3, 6, 9]
        with pytest.raises(OptionError, match="in use"):
            run.__enter__()


def test_reading_is_free_and_writing_is_not(run: RunFolder) -> None:
    reader = RunFolder(run.path)
    assert same(reader.newest(), run.load(6)) and reader.steps() == [3, 6]
    for change in (lambda: reader.save(state(9)), reader.prune):
        with pytest.raises(OptionError, match=r"is not held: use it inside `with RunFolder"):
            change()
    assert RunFolder(run.path / "gone").newest() is None and not (run.path / "gone").exists()


def test_a_place_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OptionError, match=r"cannot be the folder of a run \(.+\): choose another one"):
            RunFolder(path).__enter__()


def test_what_was_cut_off_is_swept_and_what_stepped_aside_comes_back(run: RunFolder) -> None:
    old, inside, ending = run.load(6), run.checkpoints, "0123456789abcdef"
    shutil.copytree(newest(run), inside / f".step_00000009.{ending}")
    shutil.copytree(newest(run), inside / f".step_00000003.old.{ending}")  # the new one came: this is no longer needed
    newest(run).rename(inside / f".step_00000006.old.{ending}")  # the new one never came
    assert RunFolder(run.path).steps() == [3] and len(names(inside)) == 4  # who only looks, changes nothing
    run.__exit__()
    with run:
        assert names(inside) == ["step_00000003", "step_00000006"] and same(run.newest(), old) and run.load(3).step == 3
