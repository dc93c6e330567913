"""Checkpoints: exact when whole, refused when not, and never the last good one lost. Kills are in test_checkpoint_kills.py."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pathlib
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from dmst import atomic
from dmst.engine import checkpoint
from dmst.engine.checkpoint import Snapshot
from dmst.engine.folder import RunFolder
from dmst.errors import BadFileError, FullDiskError, OptionError, SaveError
from dmst.models import tensors
from tests.test_model_files import cheaply

FILES = ["config.toml", "ema.safetensors", "manifest.json", "model.safetensors", "optim.safetensors", "state.json"]
WEIGHTS, MANIFEST = "model.safetensors", "manifest.json"
STATE = {"epoch": 2, "tick": 2**60 + 1, "best": 0.1 + 0.2, "tiny": 5e-324, "name": "é\n", "groups": [{"lr": 1e-3}, None, True]}
CONTEXT = {"config": "c0ffee", "dataset": "cifar10", "versions": {"torch": "2"}}
RECIPE = '[run]\r\nname = "né"\n'


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is not waited for: what fsync is for, no test can see."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def snapshot(step: int, value: float = 0.0) -> Snapshot:
    parts = {
        stem: {"head.weight": torch.randn(3, n) + value, "head.bias": torch.randn(n), "count": torch.tensor(step)}
        for n, stem in ((5, "model"), (6, "ema"), (7, "optim"))
    }
    return Snapshot(step, parts, STATE, RECIPE, CONTEXT)


def same(a: Snapshot | None, b: Snapshot | None) -> bool:
    """Equal to the bit, in names, dtypes, shapes and values."""
    if a is None or b is None or (a.step, a.state, a.recipe, a.context) != (b.step, b.state, b.recipe, b.context):
        return False
    return a.tensors.keys() == b.tensors.keys() and all(
        xs.keys() == b.tensors[stem].keys()
        and all(
            (x.dtype, x.shape) == (b.tensors[stem][name].dtype, b.tensors[stem][name].shape)
            and torch.equal(x, b.tensors[stem][name])
            for name, x in xs.items()
        )
        for stem, xs in a.tensors.items()
    )


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run with checkpoints of steps 3 and 6."""
    with RunFolder(tmp_path / "run") as folder:
        folder.save(snapshot(3))
        folder.save(snapshot(6))
        yield folder


def newest(run: RunFolder) -> Path:
    return run.checkpoints / "step_00000006"


# --- whole ones ------------------------------------------------------------------------------------------------------

KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KINDS += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def of_all_kinds() -> dict[str, Tensor]:
    """Every dtype in several shapes, laid out in every way that a tensor can be."""
    found = {}
    for i, kind in enumerate(KINDS):
        x = (torch.randn(4, 3 + i) * 50).to(kind)
        found |= {f"{i}.full": x, f"{i}.0d": x[1, 2], f"{i}.empty": x[:0], f"{i}.turned": x.T, f"{i}.part": x[1:, ::2]}
        found |= {f"{i}.shared": x.view(-1), f"{i}.wide": x[:1].expand(5, -1), f"{i}.4d": x.reshape(2, 1, 2, -1)}
    return found


def test_exact(tmp_path: Path) -> None:
    written = replace(snapshot(12), tensors={"model": of_all_kinds(), "optim": {}})
    before = {name: x.clone() for name, x in written.tensors["model"].items()}
    with RunFolder(tmp_path / "deep" / "run") as run:
        assert run.newest() is None and run.steps() == []
        assert run.save(written) == tmp_path / "deep" / "run" / "checkpoints" / "step_00000012"
        assert run.steps() == [12]
        loaded = run.newest()
        assert loaded is not None and same(loaded, written) and same(run.load(12), written)
    assert repr(loaded.state) == repr(STATE)  # floats to the last digit, True not 1
    assert all(torch.equal(x, before[name]) for name, x in written.tensors["model"].items())
    loaded.tensors["model"]["1.full"].add_(1)  # their own memory, and writable
    assert torch.equal(loaded.tensors["model"]["1.shared"], before["1.shared"])


def test_what_a_model_and_an_optimizer_hold(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 5)).square().sum().backward()
    optimizer.step()
    moments = {f"{name}.{key}": x for name, weight in model.named_parameters() for key, x in optimizer.state[weight].items()}
    written = Snapshot(1, {"model": dict(model.named_parameters()) | dict(model.named_buffers()), "optim": moments})
    with RunFolder(tmp_path) as run:
        run.save(written)
        loaded = run.load(1)
    assert same(loaded, written) and not any(x.requires_grad for x in loaded.tensors["model"].values())


def test_layout(run: RunFolder) -> None:
    """The files, and their hashes by a second reading of the format."""
    folder = newest(run)
    assert names(run.path) == ["checkpoints", "lock"] and names(run.checkpoints) == ["step_00000003", "step_00000006"]
    assert names(folder) == FILES and folder.stat().st_mode & 0o777 == 0o755
    raw = (folder / MANIFEST).read_bytes()
    told = json.loads(raw)
    assert list(told)[-1] == "self_sha256" and raw == seal(told)
    assert (told["schema"], told["step"], told["context"]) == (1, 6, CONTEXT)
    assert told["files"] == {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name in FILES
        if name != MANIFEST and (data := (folder / name).read_bytes())
    }
    assert (folder / "config.toml").read_bytes() == RECIPE.encode()
    assert json.loads((folder / "state.json").read_bytes()) == STATE


def test_the_bytes_are_those_of_safetensors() -> None:
    for found in (of_all_kinds(), {}, {"é": torch.ones(3)}):
        size, data = tensors.pieces("model", found)
        raw = b"".join(data)
        assert raw == safetensors.torch.save({name: x.clone().contiguous() for name, x in found.items()}) and size == len(raw)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("stem", ["model", "ema", "optim"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_what_is_not_finite_is_never_written(value: float, stem: str, kind: torch.dtype, run: RunFolder) -> None:
    bad = snapshot(9)
    bad.tensors[stem]["head.bias"] = torch.tensor([1.0, value, 2.0]).to(kind)
    with pytest.raises(SaveError, match=f"step 9 is not saved: head.bias of {stem} holds NaN or infinity") as said:
        run.save(bad)
    assert not isinstance(said.value, FullDiskError) and run.steps() == [3, 6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": True}, "step is True"),
        ({"state": {"a": torch.inf}}, r"state\['a'\] cannot be kept"),
        ({"state": {"a": [{"b": float("nan")}]}}, r"state\['a'\]"),
        ({"state": {"a": (1, 2)}}, r"state\['a'\]"),
        ({"state": {"a": {1: 2}}}, r"state\['a'\]"),
        ({"state": {1: 2}}, r"state\[1\]"),
        ({"state": {"a": torch.ones(1)}}, r"state\['a'\]"),
        ({"context": {"a": {3}}}, r"context\['a'\]"),
        ({"tensors": {"../model": {}}}, "'../model': it names a file"),
        ({"tensors": {"Model": {}}}, "'Model'"),
        ({"tensors": {"": {}}}, "''"),
        ({"tensors": {"model": {"a": torch.ones(1, device="meta")}}}, "a is on the meta device"),
        ({"tensors": {"model": {"a": torch.ones(1, dtype=torch.complex64)}}}, "a is torch.strided of torch.complex64"),
        ({"tensors": {"model": {"a": torch.eye(2).to_sparse()}}}, "a is torch.sparse_coo"),
        ({"tensors": {"model": {"a": torch.ones(1).reshape([1] * 65)}}}, "a is torch.strided of torch.float32 with 65 axes"),
        ({"tensors": {"model": {"__metadata__": torch.ones(1)}}}, "__metadata__"),
        ({"tensors": {"model": {"\ud800": torch.ones(1)}}}, "no text"),
    ],
    ids=str,
)
def test_what_could_not_be_loaded_is_not_written(change: dict[str, Any], message: str, run: RunFolder) -> None:
    with pytest.raises(OptionError, match=message):
        run.save(replace(snapshot(9), **change))
    assert run.steps() == [3, 6] and names(run.checkpoints) == ["step_00000003", "step_00000006"]


# --- the same step again ---------------------------------------------------------------------------------------------


def test_the_same_again_is_not_written_again(run: RunFolder) -> None:
    written = run.load(6)
    before = {name: (newest(run) / name).stat().st_ino for name in FILES}
    assert run.save(written) == newest(run)
    assert {name: (newest(run) / name).stat().st_ino for name in FILES} == before


@pytest.mark.parametrize(
    "what", ["other weights", "other context", "damaged", "empty folder", "file", "link", "link to nowhere"]
)
def test_another_one_takes_its_place(what: str, run: RunFolder, tmp_path: Path) -> None:
    old, folder = run.load(6), newest(run)
    new = replace(old, context=CONTEXT | {"dataset": "digits"}) if what == "other context" else snapshot(6, value=1.0)
    if what == "damaged":
        new = old
        (folder / WEIGHTS).write_bytes(b"")
    elif not what.startswith("other"):
        folder.rename(tmp_path / "elsewhere")
        if what == "empty folder":
            folder.mkdir()
        elif what == "file":
            folder.write_text("x")
        else:
            folder.symlink_to(tmp_path / ("elsewhere" if what == "link" else "gone"))
    run.save(new)
    assert same(run.newest(), new) and same(new, old) == (what == "damaged") and not folder.is_symlink()
    assert names(run.checkpoints) == ["step_00000003", "step_00000006"]
    if what == "link":
        assert same(checkpoint.load(tmp_path / "elsewhere"), old)


# --- pruning ---------------------------------------------------------------------------------------------------------


def saved(run: RunFolder, *steps: int) -> None:
    for step in steps:
        run.save(snapshot(step))


def test_the_newest_are_kept_and_what_is_protected(run: RunFolder) -> None:
    saved(run, 9, 12, 15)
    assert run.prune(keep=3, protect=[6]) == [3] and run.steps() == [6, 9, 12, 15]
    assert run.prune(keep=1, protect=[6, 7]) == [9] and run.steps() == [6, 12, 15]  # never less than 2
    assert run.prune(keep=2) == [6] and run.prune() == [] and run.prune(keep=0) == []
    assert names(run.checkpoints) == ["step_00000012", "step_00000015"]
    newest_ = run.newest()
    assert newest_ is not None and newest_.step == 15


def damage(run: RunFolder, *steps: int) -> None:
    for step in steps:
        path = run.checkpoints / f"step_{step:08d}" / WEIGHTS
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)


def test_damaged_ones_do_not_count(run: RunFolder) -> None:
    saved(run, 9, 12, 15)
    damage(run, 12, 15)
    assert run.prune(keep=2) == [3] and run.steps() == [6, 9, 12, 15]
    damage(run, 9)
    assert run.prune(keep=2) == []  # 6 alone is good
    damage(run, 6)
    assert run.prune(keep=2) == [] and run.steps() == [6, 9, 12, 15]


def test_a_whole_one_is_hashed_once(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    read, seen = checkpoint.verify, []
    monkeypatch.setattr(checkpoint, "verify", lambda folder, step, *rest: (seen.append(step), read(folder, step, *rest))[1])
    run.prune()
    run.prune()
    run.save(snapshot(6, value=2.0))
    saved(run, 9)
    run.prune()
    assert seen == [6, 3, 6, 9, 6]  # the third by the save, which looks whether it is the same


def test_nothing_is_removed_before_the_newer_ones_are_safe(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(run, 9)

    def broken(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(SaveError, match=r"checkpoints could not be removed \(Input/output error\)"):
        run.prune()
    assert run.steps() == [3, 6, 9]


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
    others = ["step_7", "step_00000x07", "step_000000007", "notes.txt", "dead.txt", ".tmp-x", "old.step"]
    for name in others:
        (run.checkpoints / name).write_text("mine")
    run.__exit__()
    with run:
        assert run.steps() == [3, 6, 99_999_999, 100_000_000]
        assert set(others) < set(names(run.checkpoints))
        found = run.newest()
    assert found is not None and found.step == 100_000_000


def test_a_missing_step_is_named(run: RunFolder) -> None:
    with pytest.raises(BadFileError, match=r"step_00000005/manifest\.json cannot be read \(No such file"):
        run.load(5)


# --- damage ----------------------------------------------------------------------------------------------------------


def refused(run: RunFolder, good: Snapshot, match: str = "") -> None:
    """The newest is refused by itself, and passed over for the one before."""
    with pytest.raises(BadFileError, match=match):
        run.load(6)
    with pytest.warns(UserWarning, match="step_00000006 is skipped: .* 3 steps are lost"):
        assert same(run.newest(), good)


def test_every_flipped_bit_is_refused(run: RunFolder) -> None:
    good, draw, folder = run.load(3), random.Random(0), newest(run)
    flips = 0
    for name, count in zip(FILES, (20, 40, 40, 40, 40, 20), strict=True):
        data = (folder / name).read_bytes()
        for _ in range(count):
            bit, damaged = draw.randrange(8 * len(data)), bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(damaged)
            refused(run, good, name)
            flips += 1
        (folder / name).write_bytes(data)
    assert flips == 200 and run.load(6).step == 6


def test_every_truncation_is_refused(run: RunFolder) -> None:
    good, draw, folder = run.load(3), random.Random(1), newest(run)
    cuts = 0
    for name in FILES:
        data = (folder / name).read_bytes()
        for cut in [0, 1, len(data) - 1, *(draw.randrange(len(data)) for _ in range(7))]:
            (folder / name).write_bytes(data[:cut])
            refused(run, good, name)
            cuts += 1
        for more in (data + b"\0", data + b"\n", data + data, bytes(len(data)), b"\xef\xbb\xbf" + data):
            (folder / name).write_bytes(more)
            refused(run, good, name)
        (folder / name).write_bytes(data)
    assert cuts == 60 and run.load(6).step == 6


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", ["missing", "folder", "link", "link to itself", "link to nowhere", "pipe", "of another step"])
def test_something_else_in_place_of_a_file(what: str, name: str, run: RunFolder, tmp_path: Path) -> None:
    good, path = run.load(3), newest(run) / name
    real = shutil.copy(path, tmp_path / "real")
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "of another step":
        other = run.checkpoints / "step_00000003" / name
        shutil.copy(other, path)
        if name in ("config.toml", "state.json"):
            path.write_bytes(other.read_bytes() + b" ")
    elif what != "missing":
        path.symlink_to({"link": Path(real), "link to itself": path, "link to nowhere": tmp_path / "gone"}[what])
    refused(run, good, f"{name}|was renamed: it holds step 3")


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


def seal(told: dict[str, Any]) -> bytes:
    """The bytes of a manifest: indented JSON whose last entry is the sha256 of the same without it."""
    body = {key: value for key, value in told.items() if key != "self_sha256"}
    digest = hashlib.sha256(json.dumps(body, indent=2).encode()).hexdigest()
    return (json.dumps(body | {"self_sha256": digest}, indent=2) + "\n").encode()


def forge(folder: Path, files: dict[str, bytes] | None = None, change: Callable[[dict], Any] = lambda told: None) -> None:
    """Other files or another manifest under right hashes: what damage never makes, but a person could."""
    told = json.loads((folder / MANIFEST).read_bytes())
    for name, data in (files or {}).items():
        (folder / name).write_bytes(data)
        told["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(told)
    (folder / MANIFEST).write_bytes(seal(told))


def header(told: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    body = told if isinstance(told, bytes) else json.dumps(told).encode()
    return struct.pack("<Q", len(body)) + body + data


def entry(kind: str, shape: list[int], *offsets: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": list(offsets)}


def test_a_forged_checkpoint_loads_if_it_is_right(run: RunFolder) -> None:
    """So that the refusals below are for the reason they state."""
    found = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.int64)}
    forge(newest(run), {WEIGHTS: safetensors.torch.save(found), "more.safetensors": header(b"{}      ")})
    loaded = run.load(6).tensors
    assert all(torch.equal(x, loaded["model"][name]) for name, x in found.items()) and loaded["more"] == {}


AXES = b'{"a":{"dtype":"F32","shape":[' + b",".join([b"1"] * 65) + b'],"data_offsets":[0,4]}}'
TWICE = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}   '


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param(b"", "not a safetensors file", id="nothing"),
        pytest.param(bytes(512), "not a safetensors file", id="zeros"),
        pytest.param(struct.pack("<Q", 2**63) + b"{}", "not a safetensors file", id="header of 2^63"),
        pytest.param(struct.pack("<Q", 101_000_000) + b"{}", "not a safetensors file", id="header of 101 MB"),
        pytest.param(header({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, b"123456"), "not a safe", id="overlap"),
        pytest.param(header({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 4, 6)}, b"123456"), "not a safe", id="hole"),
        pytest.param(header({"a": entry("U8", [4], 0, 4)}, b"12345"), "not a safe", id="more data"),
        pytest.param(header(TWICE, b"1234"), "does not have the header that belongs", id="one name twice"),
        pytest.param(header({"a": entry("U8", [4], 0, 4)}, b"1234"), "does not have the header", id="another writer's spaces"),
        pytest.param(header({"a": entry("F32", [0, 2**63], 0, 0)}), "not a safe", id="2^63 columns"),
        pytest.param(header({"a": entry("F32", [0, 2**62, 2**62], 0, 0)}), "not a safe", id="2^124 columns"),
        pytest.param(header({"a": entry("F32", [2**32, 2**32], 0, 4)}, b"1234"), "not a safe", id="2^64 elements"),
        pytest.param(header(AXES + b" " * (-len(AXES) % 8), b"1234"), "does not have the header", id="65 axes"),
        pytest.param(header({"a": entry("F4", [4], 0, 2)}, b"12"), "not a safe", id="dtype unknown to torch"),
        pytest.param(header({"a": entry("C64", [1], 0, 8)}, b"12345678"), "does not have the header", id="complex"),
        pytest.param(header({"a": entry("F8_E4M3", [2], 0, 2)}, b"12"), "does not have the header", id="8 bits"),
        pytest.param(safetensors.torch.save({"a": torch.tensor([1, torch.nan])}), "a holds NaN or infinity", id="NaN"),
        pytest.param(safetensors.torch.save({"a": torch.tensor([-torch.inf])}), "a holds NaN or infinity", id="infinity"),
        pytest.param(safetensors.torch.save({"a": torch.ones(2)}, {"by": "me"}), "does not have the header", id="metadata"),
    ],
)
def test_tensors_from_elsewhere_under_right_hashes(raw: bytes, message: str, run: RunFolder) -> None:
    good = run.load(3)
    forge(newest(run), {WEIGHTS: raw})
    refused(run, good, message)


def test_wrong_shapes_and_dtypes_are_for_the_caller_to_see(run: RunFolder) -> None:
    """Damage is caught by the hashes; a checkpoint of another network is whole."""
    wanted = run.load(6).tensors["model"]
    forge(newest(run), {WEIGHTS: safetensors.torch.save(wanted | {"head.bias": torch.ones(4)})})
    found = run.load(6).tensors["model"]
    with pytest.raises(BadFileError, match=r"head\.bias is torch\.float32 of shape \(4,\), and torch\.float32 of shape \(5,\)"):
        tensors.fit(found, wanted)


def state_size(place: Path, size: int, name: str = WEIGHTS) -> None:
    """A file grows to `size`, of which the disk holds no more than before; the manifest says so too."""
    os.truncate(place / name, size)
    forge(place, change=put("files", name, "size", value=size))


@pytest.mark.parametrize(("size", "most"), [(3 * 10**9, 2**20), (10**12, 2**30)], ids=["3 GB", "1 TB"])
def test_a_giant_is_refused_unread_and_the_one_before_taken(size: int, most: int, run: RunFolder) -> None:
    good = run.load(3)
    state_size(newest(run), size)
    with cheaply():
        with pytest.warns(UserWarning, match=r"states [\d,]{13,} bytes of tensors, and those of this run are at most"):
            assert same(run.newest(most), good)
        assert run.prune() == []  # which hashes what it counts
        run.save(snapshot(6))  # which looks whether it is there already
    assert run.load(6).step == 6


def test_countless_empty_tensors_are_refused_unread(run: RunFolder) -> None:
    good = run.load(3)
    told = b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(200_000))
    forge(newest(run), {WEIGHTS: header(b"{%b}" % told)})
    with cheaply(2**26):  # the file itself is 11 MB
        refused(run, good, "its header is said to have .* bytes")


@pytest.mark.parametrize("name", ["state.json", "config.toml"])
def test_a_giant_beside_the_tensors(name: str, run: RunFolder) -> None:
    good = run.load(3)
    state_size(newest(run), 10**10, name)
    with cheaply():
        refused(run, good, f"states 10,000,000,000 bytes of {name}, more than 16,777,216")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {k: v for k, v in x.items() if k != "b"}, r"my weights does not fit: b is missing \(1 in all\)"),
        (lambda x: {}, r"a is missing \(2 in all\)"),
        (lambda x: x | {"z": x["a"], "y": x["a"]}, r"z is unknown here \(2 in all\)"),
        (
            lambda x: x | {"a": x["a"].T},
            r"a is torch\.float32 of shape \(3, 2\), and torch\.float32 of shape \(2, 3\) is needed",
        ),
        (lambda x: x | {"a": x["a"].half()}, r"a is torch\.float16 of shape \(2, 3\), and torch\.float32 of shape \(2, 3\)"),
        (lambda x: x | {"b": x["b"].reshape(1)}, r"b is torch\.int64 of shape \(1,\), and torch\.int64 of shape \(\)"),
    ],
    ids=["missing", "empty", "unknown", "turned", "dtype", "0d"],
)
def test_fit_names_the_first_that_differs(change: Callable, message: str) -> None:
    wanted = {"a": torch.randn(2, 3), "b": torch.tensor(5)}
    tensors.fit({name: x.clone() for name, x in reversed(wanted.items())}, wanted)
    with pytest.raises(BadFileError, match=message):
        tensors.fit(change(wanted), wanted, "my weights")


def put(*keys: str, value: Any) -> Callable[[dict], None]:
    def change(told: dict) -> None:
        for key in keys[:-1]:
            told = told[key]
        told[keys[-1]] = value

    return change


LISTED = {"size": 1, "sha256": "0"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            put("schema", value=2),
            r"manifest\.json is of a newer dmst: its schema is 2, and this one reads up to 1\. Update dmst",
        ),
        (put("schema", value=0), "misses schema, step or context"),
        (put("schema", value="1"), "misses schema"),
        (put("schema", value=True), "misses schema"),
        (put("step", value=None), "misses schema, step"),
        (put("step", value=6.0), "misses schema, step"),
        (put("step", value=7), "was renamed: it holds step 7"),
        (put("context", value=[]), "misses schema, step or context"),
        (put("files", value=[]), "does not list state.json and config.toml"),
        (put("files", value={}), "does not list state.json and config.toml"),
        (put("files", "../model.safetensors", value=LISTED), r"lists '\.\./model\.safetensors', which no checkpoint has"),
        (put("files", "/etc/passwd", value=LISTED), "lists '/etc/passwd'"),
        (put("files", "a/b.safetensors", value=LISTED), "lists 'a/b.safetensors'"),
        (put("files", "..safetensors", value=LISTED), "lists '..safetensors'"),
        (put("files", "a\0.safetensors", value=LISTED), "which no checkpoint has"),
        (put("files", "manifest.json", value=LISTED), "lists 'manifest.json'"),
        (put("files", "model.pt", value=LISTED), "lists 'model.pt'"),
        (put("files", WEIGHTS, value=5), "states no size and sha256 of model.safetensors"),
        (put("files", WEIGHTS, "size", value=True), "states no size and sha256"),
        (put("files", WEIGHTS, "size", value=10**30), "is damaged: .* bytes instead of 1,000"),
        (put("files", WEIGHTS, "sha256", value=None), "states no size and sha256"),
        (put("files", WEIGHTS, "sha256", value=""), "its sha256 is not the one"),
        (put("context", value=float("inf")), "do not match its self_sha256"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_manifest_from_elsewhere_under_its_right_hash(change: Callable, message: str, run: RunFolder) -> None:
    good = run.load(3)
    forge(newest(run), change=change)
    refused(run, good, message)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param(b"", "not JSON", id="empty"),
        pytest.param(b"{}", "do not match its self_sha256", id="nothing in it"),
        pytest.param(b"[]", "must hold an object", id="list"),
        pytest.param(b"[" * 100_000, "not JSON", id="deep"),
        pytest.param(b'{"schema": 1, "step": 6, "files": {}}', "do not match its self_sha256", id="foreign"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", "not JSON", id="5000 digits"),
        pytest.param(b" " * (2**20 + 1), "1,048,577 bytes instead of at most 1,048,576", id="1 MiB"),
    ],
)
def test_a_manifest_that_is_none(raw: bytes, message: str, run: RunFolder) -> None:
    good = run.load(3)
    (newest(run) / MANIFEST).write_bytes(raw)
    refused(run, good, message)


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("state.json", b"", "not JSON"),
        ("state.json", b"[1]", "is not the state of a run"),
        ("state.json", b'{"a": NaN}', "holds what no run writes"),
        ("state.json", b'{"a": 1e999}', "holds what no run writes"),
        ("config.toml", b"\xff", "holds what no run writes"),
    ],
)
def test_small_files_under_right_hashes(name: str, raw: bytes, message: str, run: RunFolder) -> None:
    good = run.load(3)
    forge(newest(run), {name: raw})
    refused(run, good, message)


class Canary:
    """A pickle of this makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def payloads(tmp_path: Path) -> dict[str, bytes]:
    bomb = {"head.bias": Canary(tmp_path / "canary")}
    found = {f"protocol {i}": pickle.dumps(bomb, protocol=i) for i in (2, 4, 5)}
    torch.save(bomb, tmp_path / "scratch")
    with zipfile.ZipFile(tmp_path / "zip", "w") as file:
        file.writestr("x", "y")
    return found | {"torch.save": (tmp_path / "scratch").read_bytes(), "zip": (tmp_path / "zip").read_bytes()}


PICKLE = "is a pickle or zip file, which can run code when it is read: refused. Load it where"


@pytest.mark.parametrize("how", ["protocol 2", "protocol 4", "protocol 5", "torch.save", "zip"])
def test_no_pickle_is_ever_run(how: str, run: RunFolder, tmp_path: Path) -> None:
    """In place of a file, damaged or under right hashes; beside them, listed or not; and as the folder of a run."""
    good, raw, folder = run.load(3), payloads(tmp_path)[how], newest(run)
    backup = shutil.copytree(folder, tmp_path / "backup")
    for name in FILES:
        (folder / name).write_bytes(raw)
        refused(run, good, f"{name} {PICKLE}")
        shutil.copytree(backup, folder, dirs_exist_ok=True)
    for ending in ("pt", "pth", "bin", "ckpt"):
        forge(folder, {f"model.{ending}": raw})
        refused(run, good, f"lists 'model.{ending}', which no checkpoint has")
        shutil.copytree(backup, folder, dirs_exist_ok=True)
        assert run.load(6).step == 6  # beside it, not listed
        (tmp_path / f"run.{ending}").write_bytes(raw)
        with pytest.raises(BadFileError, match=f"run.{ending} {PICKLE}"):
            RunFolder(tmp_path / f"run.{ending}").__enter__()
    forge(folder, {WEIGHTS: raw})
    refused(run, good, PICKLE)
    shutil.rmtree(folder)
    folder.write_bytes(raw)
    refused(run, good, "Not a directory")
    assert not (tmp_path / "canary").exists()


# --- a disk that fails -----------------------------------------------------------------------------------------------


class Failing:
    """A file whose every write takes half of the bytes and fails."""

    def __init__(self, file: Any, error: OSError) -> None:
        self.file, self.error = file, error

    def write(self, data: Any) -> None:
        self.file.write(data[: len(data) // 2])
        raise self.error

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def fail(monkeypatch: pytest.MonkeyPatch, when: str, name: str, error: OSError) -> None:
    """Opening, writing or syncing the file `name`, or making, syncing or renaming the folder, raises `error`."""
    real_open, real_mkdir, real_rename = pathlib.Path.open, pathlib.Path.mkdir, pathlib.Path.rename

    def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if when == "open" and "x" in mode and path.name == name:
            raise error
        file = real_open(path, mode, *args, **options)
        return Failing(file, error) if when == "write" and "x" in mode and path.name == name else file

    def fsync(handle: int) -> None:
        if when == "fsync" and Path(os.readlink(f"/proc/self/fd/{handle}")).name.startswith(name):
            raise error

    def mkdir(path: Path, *args: Any, **options: Any) -> None:
        if when == "mkdir" and path.name.startswith(name):
            raise error
        real_mkdir(path, *args, **options)

    def rename(path: Path, target: Path) -> Path:
        if when == "rename" and path.name.startswith(name):
            raise error
        return real_rename(path, target)

    monkeypatch.setattr(pathlib.Path, "open", opened)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(pathlib.Path, "mkdir", mkdir)
    monkeypatch.setattr(pathlib.Path, "rename", rename)


FAILURES = [(when, name) for when in ("write", "fsync", "open") for name in FILES]
FAILURES += [(when, ".tmp-") for when in ("mkdir", "fsync", "rename")]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize(("when", "name"), FAILURES)
def test_a_failed_save_changes_nothing(
    when: str, name: str, code: int, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new step, and one in the place of another."""
    old = run.load(6)
    for step in (9, 6):
        new = snapshot(step, value=1.0)
        with monkeypatch.context() as broken:
            fail(broken, when, name, OSError(code, os.strerror(code)))
            with pytest.raises(SaveError) as said:
                run.save(new)
        assert isinstance(said.value, FullDiskError) == (code == errno.ENOSPC)
        told = f"{run.checkpoints}/step_0000000{step} could not be written ({os.strerror(code)}): it needs "
        assert str(said.value).startswith(told) and str(said.value).endswith("What was there before is untouched.")
        needed, free = (int(x.split()[0].replace(",", "")) for x in str(said.value).split("): it needs ")[1].split(", and "))
        assert 1000 < needed < 10_000 and free > needed
        assert same(run.newest(), old) and names(run.checkpoints) == ["step_00000003", "step_00000006"]
    run.save(new)  # and with room again it works
    assert same(run.newest(), new)


def test_a_disk_that_is_nearly_full_is_seen_beforehand(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = run.load(6), snapshot(9)
    size = checkpoint.contents(new)[0]
    assert 0 <= size - sum(path.stat().st_size for path in newest(run).iterdir()) < 2**12
    needed = size + size // 5
    free = [needed - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, free[0]))
    with monkeypatch.context() as watched:
        watched.setattr(atomic, "_write", lambda *_: pytest.fail("something was written"))
        with pytest.raises(FullDiskError, match=f"it needs {needed:,} bytes, and {needed - 1:,} are free there"):
            run.save(new)
    assert same(run.newest(), old)
    free[0] = needed
    run.save(new)
    assert same(run.newest(), new)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_vanished_is_not_made_anew(replaced: bool, run: RunFolder, tmp_path: Path) -> None:
    """A disk that went away, or a folder that another run made in its place: nothing is written there."""
    old = run.load(6)
    run.path.rename(tmp_path / "away")
    if replaced:
        with RunFolder(run.path):
            pass
    with pytest.raises(
        SaveError, match=r"step_00000009 could not be .* moved away or replaced\): it needs [\d,]+ bytes, and [\d,]"
    ):
        run.save(snapshot(9))
    with pytest.raises(SaveError, match="moved away or replaced"):
        run.prune()
    assert names(tmp_path) == ["away", *(["run"] if replaced else [])]
    assert not replaced or RunFolder(run.path).steps() == []
    assert same(RunFolder(tmp_path / "away").newest(), old)


def test_checkpoints_alone_that_vanished(run: RunFolder, tmp_path: Path) -> None:
    run.checkpoints.rename(tmp_path / "away")
    moved = (
        r"could not be written \(the folder of its checkpoints was moved away or replaced\): it needs [\d,]+ bytes, and [\d,]"
    )
    with pytest.raises(SaveError, match=moved):
        run.save(snapshot(9))
    assert not run.checkpoints.exists()


def test_an_interrupt_leaves_nothing(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "_write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.save(snapshot(9))
    assert names(run.checkpoints) == ["step_00000003", "step_00000006"]


# --- the folder ------------------------------------------------------------------------------------------------------


def test_one_run_at_a_time(run: RunFolder) -> None:
    with pytest.raises(
        OptionError, match=f"run is in use: another run, process {os.getpid()}, is in it. Choose another folder"
    ):
        RunFolder(run.path).__enter__()
    with pytest.raises(OptionError, match="is open already"):
        run.__enter__()
    saved(run, 9)  # neither took the lock away
    run.__exit__()
    with RunFolder(run.path) as other:
        assert other.steps() == [3, 6, 9]
        with pytest.raises(OptionError, match="in use"):
            run.__enter__()


def test_reading_is_free_and_writing_is_not(run: RunFolder) -> None:
    reader = RunFolder(run.path)
    assert same(reader.newest(), run.load(6)) and reader.steps() == [3, 6]
    for change in (lambda: reader.save(snapshot(9)), reader.prune):
        with pytest.raises(OptionError, match=r"is not held: use it inside `with RunFolder"):
            change()
    assert RunFolder(run.path / "gone").newest() is None and not (run.path / "gone").exists()


@pytest.mark.parametrize("link", [False, True])
def test_checkpoints_that_were_replaced_are_not_gone_on_with(link: bool, run: RunFolder, tmp_path: Path) -> None:
    """A kill would find none there, and begin at step 0 in silence."""
    old, other = run.load(6), tmp_path / "other"
    run.checkpoints.rename(tmp_path / "away")
    other.mkdir()
    run.checkpoints.symlink_to(other) if link else run.checkpoints.mkdir()
    for work in (lambda: run.save(snapshot(9)), run.prune):
        with pytest.raises(SaveError, match="moved away or replaced"):
            work()
    assert names(run.checkpoints) == names(other) == []
    run.checkpoints.unlink() if link else run.checkpoints.rmdir()
    (tmp_path / "away").rename(run.checkpoints)
    assert same(run.newest(), old)
    saved(run, 9)


def test_a_full_disk_is_told_from_a_place_that_cannot_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the number of the process finds room: try again later, not elsewhere."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        with pytest.raises(FullDiskError, match=r"run could not be written \(No space left on device\): it needs .* are free"):
            RunFolder(tmp_path / "run").__enter__()
    with RunFolder(tmp_path / "run") as run:
        saved(run, 3)


@pytest.mark.parametrize("what", ["file", "link to itself", "under a file"])
def test_a_place_that_cannot_be_a_folder(what: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link to itself").symlink_to(tmp_path / "link to itself")
    path = tmp_path / "file" / "run" if what == "under a file" else tmp_path / what
    with pytest.raises(OptionError, match=r"cannot be the folder of a run \(.+\): choose another one"):
        RunFolder(path).__enter__()


def test_what_was_cut_off_is_swept_and_what_stepped_aside_comes_back(run: RunFolder) -> None:
    old, inside = run.load(6), run.checkpoints
    shutil.copytree(newest(run), inside / ".tmp-1-9")
    shutil.copytree(newest(run), inside / "dead.step_00000001")
    shutil.copytree(newest(run), inside / "old.step_00000003")  # the new one came: this is no longer needed
    (inside / "dead.step_00000002").symlink_to(inside / "step_00000003")
    newest(run).rename(inside / "old.step_00000006")  # the new one never came
    assert RunFolder(run.path).steps() == [3] and len(names(inside)) == 6  # who only looks, changes nothing
    run.__exit__()
    with run:
        assert names(inside) == ["step_00000003", "step_00000006"] and same(run.newest(), old) and run.load(3).step == 3


def test_the_lock_is_let_go_when_opening_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(RunFolder, "_sweep", lambda self: os.listdir(tmp_path / "gone"))
        with pytest.raises(OptionError, match="cannot be the folder of a run"):
            RunFolder(tmp_path).__enter__()
    with RunFolder(tmp_path) as run:
        saved(run, 3)
