"""Saved models: exact when whole, refused when not, and nothing of the user's is ever lost or run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import socket
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from dmst import atomic
from dmst.errors import BadFileError, DmstError, OptionError, SaveError
from dmst.models import ModelConfig, VisionModel, create_model, load_model, save_model
from dmst.operators import DMSA, OPERATORS
from dmst.operators.orthonormal import is_orthonormal

WEIGHTS, CONFIG = "model.safetensors", "config.json"
BOTH = [CONFIG, WEIGHTS]
SMALL: dict[str, Any] = {"dim": 16, "depth": 1, "num_heads": 2, "img_size": 16, "num_classes": 3}
FAMILIES = ("dmst_tiny", "tost_tiny", "vit_tiny", "crate_tiny", "dmst_cifar")


def tiny(name: str = "dmst_tiny", **options: Any) -> VisionModel:
    """A small model in which no tensor is what a fresh one has."""
    model = create_model(name, **SMALL | options)
    with torch.no_grad():
        for x in model.state_dict().values():
            x.add_(torch.rand_like(x) if x.is_floating_point() else 3)
    return model.eval()


def images(model: VisionModel) -> Tensor:
    return torch.randn(2, 3, 16, 16, dtype=next(model.parameters()).dtype)


def same(a: nn.Module, b: nn.Module) -> bool:
    """Equal to the bit: names, order, dtypes, values."""
    left, right = a.state_dict(), b.state_dict()
    return list(left) == list(right) and all(x.dtype == right[k].dtype and torch.equal(x, right[k]) for k, x in left.items())


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tiny(), tmp_path / "saved")


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes weights, before the file is known to be whole, fails the test."""

    def take(*_: object, **__: object) -> None:
        pytest.fail("a model took the weights of a bad file")

    monkeypatch.setattr(VisionModel, "load_state_dict", take)


@contextmanager
def cheaply(room: int = 2**25) -> Iterator[None]:
    """In less than 1 s, with less memory than `room`."""
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
        took, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took < 1 and peak < room, f"{took:.1f} s, {peak:,} bytes"


# --- whole files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_exact(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny(name, dtype=dtype)
    folder = save_model(model, tmp_path / "saved")
    assert folder == tmp_path / "saved"
    loaded = load_model(folder)
    assert type(loaded) is VisionModel and loaded.config == model.config
    assert same(loaded, model) and {x.dtype for x in loaded.parameters()} == {dtype}
    assert not any(module.training for module in loaded.modules())
    x = images(model)
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_exact_with_orthonormal_subspaces(dtype: torch.dtype, tmp_path: Path) -> None:
    """After a step that leaves the manifold: saving comes back to it, loading changes nothing more."""
    model = create_model("dmst_tiny", mode="proximal", dtype=dtype, **SMALL).train()
    x = images(model)
    with torch.no_grad():
        model.blocks[0].operator.subspace.weight.add_(torch.randn(16, 16), alpha=0.1)
    assert not is_orthonormal(model.blocks[0].operator.subspace.weight)
    loaded = load_model(save_model(model, tmp_path / "saved"))
    assert is_orthonormal(loaded.blocks[0].operator.subspace.weight)
    assert torch.equal(loaded(x), model.eval()(x))
    model.train()(x)  # retracts, to the very bits that were saved
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    assert same(load_model(save_model(loaded, tmp_path / "again")), loaded)


def test_options_and_shapes_come_back(tmp_path: Path) -> None:
    for i, options in enumerate(
        (
            {"operator": "tpsusa", "mode": "equation", "gate_activation": "gelu", "rotary": "2d"},
            {"operator": "mssa", "relaxed": 0.3, "layer_scale": None, "qkv_bias": False},
            {"position": "learned", "img_size": (32, 16), "global_pool": "avg", "readout_depth": 1},
            {"num_classes": 0, "in_chans": 3, "drop_path_rate": 0.25, "mlp_ratio": 1.5},
        )
    ):
        model = tiny(**options)
        loaded = load_model(save_model(model, tmp_path / str(i)))
        assert loaded.config == model.config and same(loaded, model)


def test_a_loaded_model_can_be_trained(folder: Path) -> None:
    model = load_model(folder).train()
    assert all(x.requires_grad and x.is_leaf for x in model.parameters())
    before = {key: x.clone() for key, x in model.state_dict().items()}
    (model(torch.randn(2, 3, 32, 48)) * torch.randn(2, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for key in ("stem.layers.0.weight", "stem.layers.1.running_mean", "blocks.0.operator.subspace.weight", "head.weight"):
        assert not torch.equal(model.state_dict()[key], before[key]), key
    assert all(torch.equal(x, before[key]) for key, x in load_model(folder).state_dict().items())


def test_saving_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = tiny().train()
    model.set_grad_checkpointing()
    model.compile(backend="eager")  # in place: the names of the weights stay
    before = {key: x.clone() for key, x in model.state_dict().items()}
    loaded = load_model(save_model(model, tmp_path / "saved"))
    assert model.training and not loaded.training
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items()) and same(loaded, model)


def test_another_classifier_is_kept(tmp_path: Path) -> None:
    model = tiny()
    model.reset_classifier(7)
    loaded = load_model(save_model(model, tmp_path / "seven"), num_classes=7)
    assert loaded.num_classes == 7 and same(loaded, model)
    model.reset_classifier(0, "avg")
    loaded = load_model(save_model(model, tmp_path / "none"))
    assert (loaded.num_classes, loaded.global_pool) == (0, "avg")
    x = images(model)
    assert torch.equal(loaded(x), model(x)) and loaded(x).shape == (2, 16)


def test_another_number_of_classes_is_named(folder: Path) -> None:
    with pytest.raises(
        OptionError, match=r"num_classes is 10, and the weights .*saved have 3: .*model\.reset_classifier\(10\)"
    ):
        load_model(folder, num_classes=10)
    assert load_model(folder, num_classes=3).num_classes == 3


def test_the_device_is_chosen_when_loading(folder: Path) -> None:
    assert {x.device.type for x in load_model(folder, device="cpu").state_dict().values()} == {"cpu"}
    assert {x.device.type for x in load_model(folder, device="meta").state_dict().values()} == {"meta"}


def test_layout(tmp_path: Path) -> None:
    """Two files; the hashes are what their names say, by a second reading of the format."""
    model = create_model("vit_tiny", **SMALL)
    folder = save_model(model, tmp_path / "new" / "er" / "saved")
    assert names(folder) == BOTH and names(folder.parent) == ["saved"]
    assert folder.stat().st_mode & 0o777 == 0o755
    raw, weights = (folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes()
    told = json.loads(raw)
    assert list(told)[-1] == "self_sha256" and raw == seal({k: v for k, v in told.items() if k != "self_sha256"})
    assert told["dmst"]["files"] == {WEIGHTS: {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}}
    assert told["dmst"]["config"] == json.loads(json.dumps(model.config.to_dict()))
    assert (told["architecture"], told["num_classes"], told["num_features"]) == ("dmst_vit_tiny_patch16_224", 3, 16)
    assert told["model_args"] == {**SMALL, "img_size": [16, 16]}  # what departs from the named model, and nothing else
    assert told["pretrained_cfg"]["input_size"] == [3, 16, 16] and told["pretrained_cfg"]["num_classes"] == 3
    stored = safetensors.torch.load(weights)
    assert stored.keys() == model.state_dict().keys()


def test_the_same_model_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    other = save_model(load_model(folder), tmp_path / "other")
    assert [(folder / name).read_bytes() for name in BOTH] == [(other / name).read_bytes() for name in BOTH]


def test_paths_as_text_and_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny()
    assert save_model(model, "here") == Path("here")
    assert same(load_model("here"), model) and names(tmp_path) == ["here"]


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled, lambda m: m.blocks, lambda m: m.state_dict()])
def test_only_a_model_is_saved(wrap: Callable, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"takes a VisionModel of this package, not .*: unwrap it first"):
        save_model(wrap(tiny()), tmp_path / "saved")
    assert names(tmp_path) == []


def spoil(model: VisionModel, how: str) -> None:
    with torch.no_grad():
        if how == "NaN":
            model.head.weight[0, 0] = torch.nan
        elif how == "infinity":
            model.stem.layers[1].running_var[0] = torch.inf
        elif how == "mixes torch.float32, torch.float64":
            model.head.double()
        elif how == "missing 2":
            model.prune_intermediate_layers(1, prune_norm=True, prune_head=False)
        else:
            model.extra = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("how", ["NaN", "infinity", "mixes torch.float32, torch.float64", "missing 2", "unknown 1"])
def test_what_could_not_be_loaded_is_not_written(how: str, folder: Path) -> None:
    """Not even over an old one: hours later it would be too late to learn of it."""
    model = tiny()
    spoil(model, how)
    with pytest.raises(OptionError, match=how):
        save_model(model, folder, overwrite=True)
    with pytest.raises(OptionError, match=how):
        save_model(model, folder.parent / "new")
    assert names(folder.parent) == ["saved"] and load_model(folder).num_classes == 3


# --- what is already there -------------------------------------------------------------------------------------------


def test_an_existing_folder_is_refused_and_overwritten_on_request(folder: Path) -> None:
    old, new = load_model(folder), tiny()
    with pytest.raises(OptionError, match=r"saved exists: choose another folder, or pass overwrite=True"):
        save_model(new, folder)
    assert same(load_model(folder), old)
    assert save_model(new, folder, overwrite=True) == folder
    assert same(load_model(folder), new) and not same(old, new)
    assert names(folder) == BOTH and names(folder.parent) == ["saved"]


def occupy(place: Path, what: str) -> None:
    if what == "file":
        place.write_text("mine")
    elif what == "link to nowhere":
        place.symlink_to(place.parent / "gone")
    elif what == "link to itself":
        place.symlink_to(place)
    else:
        place.mkdir()
        if what != "empty folder":
            (place / ("notes.txt" if what == "foreign folder" else CONFIG)).write_text("mine")
        if what == "saved model and more":
            (place / WEIGHTS).write_bytes(b"")
            (place / "notes.txt").write_text("mine")
        if what == "folders of those names":
            (place / CONFIG).unlink()
            (place / WEIGHTS).mkdir()
            (place / WEIGHTS / "notes.txt").write_text("mine")


@pytest.mark.parametrize(
    "what", ["file", "link to nowhere", "link to itself", "foreign folder", "saved model and more", "folders of those names"]
)
def test_what_is_not_a_saved_model_is_never_deleted(what: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    occupy(place, what)
    before = {p: (p.is_symlink() and os.readlink(p)) or (p.is_file() and p.read_bytes()) for p in tmp_path.rglob("*")}
    for overwrite in (False, True):
        with pytest.raises(
            OptionError, match=r"place (exists|contains files that are not of a saved model): choose another folder"
        ):
            save_model(tiny(), place, overwrite=overwrite)
        after = {p: (p.is_symlink() and os.readlink(p)) or (p.is_file() and p.read_bytes()) for p in tmp_path.rglob("*")}
        assert after == before


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    occupy(tmp_path / "place", "empty folder")
    with pytest.raises(OptionError, match="exists"):
        save_model(tiny(), tmp_path / "place")
    assert load_model(save_model(tiny(), tmp_path / "place", overwrite=True))
    assert names(tmp_path) == ["place"]


def test_a_link_to_a_folder_is_replaced_not_followed(folder: Path) -> None:
    old, new, link = load_model(folder), tiny(), folder.parent / "link"
    link.symlink_to(folder)
    save_model(new, link, overwrite=True)
    assert same(load_model(link), new) and same(load_model(folder), old) and not link.is_symlink()


# --- a disk that fails -----------------------------------------------------------------------------------------------

FULL = OSError(errno.ENOSPC, "No space left on device")


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, turn: int, half: bool = False) -> None:
    """The `turn`-th call of owner.name from now on raises, after half of the bytes where `half`."""
    real, calls = getattr(owner, name), []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == turn:
            if half:
                args[0].write_bytes(args[1][: len(args[1]) // 2])
            raise FULL
        return real(*args, **options)

    monkeypatch.setattr(owner, name, failing)


FAILURES = [
    pytest.param(atomic, "_write", 1, True, id="half of the weights"),
    pytest.param(atomic, "_write", 2, True, id="half of the config"),
    pytest.param(os, "fsync", 1, False, id="flushing the weights"),
    pytest.param(os, "fsync", 2, False, id="flushing the config"),
    pytest.param(os, "fsync", 3, False, id="flushing the folder"),
    pytest.param(Path, "mkdir", 2, False, id="room for the new"),
    pytest.param(Path, "mkdir", 3, False, id="room for the old"),
    pytest.param(Path, "rename", 1, False, id="moving the old away"),
    pytest.param(Path, "rename", 2, False, id="moving the new in"),
]


@pytest.mark.parametrize(("owner", "name", "turn", "half"), FAILURES)
def test_the_old_model_stays_until_the_new_one_is_complete(
    owner: Any, name: str, turn: int, half: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = load_model(folder), tiny()
    with monkeypatch.context() as broken:
        fail_at(broken, owner, name, turn, half)
        with pytest.raises(OSError, match="No space left"):
            save_model(new, folder, overwrite=True)
    assert names(folder.parent) == ["saved"] and names(folder) == BOTH
    assert same(load_model(folder), old)
    save_model(new, folder, overwrite=True)  # and with room again it works
    assert same(load_model(folder), new)


@pytest.mark.parametrize(
    ("owner", "name", "turn", "half"), [*FAILURES[:6], pytest.param(Path, "rename", 1, False, id="moving in")]
)
def test_a_failed_first_save_leaves_nothing(
    owner: Any, name: str, turn: int, half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        fail_at(broken, owner, name, turn, half)
        with pytest.raises(OSError, match="No space left"):
            save_model(tiny(), tmp_path / "saved")
    assert names(tmp_path) == []


def test_an_interrupt_is_no_exception(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle is a BaseException."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = load_model(folder)
    with monkeypatch.context() as broken:
        broken.setattr(atomic, "_write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_model(tiny(), folder, overwrite=True)
    assert names(folder.parent) == ["saved"] and same(load_model(folder), old)


# --- damage ----------------------------------------------------------------------------------------------------------


def header_length(weights: bytes) -> int:
    return 8 + struct.unpack("<Q", weights[:8])[0]


def test_every_flipped_bit_is_refused(folder: Path, untouched: None) -> None:
    """200 over both files by their sizes, 100 in the header of the weights, and one in every byte of the config."""
    draw = random.Random(0)
    whole = {name: (folder / name).read_bytes() for name in BOTH}
    flips = [(CONFIG, 8 * i + draw.randrange(8)) for i in range(len(whole[CONFIG]))]
    flips += [(WEIGHTS, draw.randrange(8 * header_length(whole[WEIGHTS]))) for _ in range(100)]
    flips += [
        (name, draw.randrange(8 * len(whole[name])))
        for name in draw.choices(BOTH, weights=[len(whole[name]) for name in BOTH], k=200)
    ]
    assert len(set(flips)) > 1000 and {name for name, _ in flips} == set(BOTH)
    for name in BOTH:
        for bit in [bit for file, bit in flips if file == name]:
            damaged = bytearray(whole[name])
            damaged[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(damaged)
            with pytest.raises(BadFileError):
                load_model(folder)
        (folder / name).write_bytes(whole[name])


def test_every_truncation_is_refused(folder: Path, untouched: None) -> None:
    draw = random.Random(1)
    for name in BOTH:
        whole = (folder / name).read_bytes()
        cuts = [0, 1, 7, 8, 9, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(100))]
        for data in [*(whole[:cut] for cut in cuts), whole + b"\0", whole + b"\n", whole + whole, b"\xef\xbb\xbf" + whole]:
            (folder / name).write_bytes(data)
            with pytest.raises(BadFileError):
                load_model(folder)
        (folder / name).write_bytes(whole)


def test_the_whole_file_still_loads(folder: Path) -> None:
    """The two tests above would pass on a loader that refuses everything."""
    for name in BOTH:
        (folder / name).write_bytes((folder / name).read_bytes())
    assert load_model(folder).num_classes == 3


def test_files_of_two_models_do_not_mix(folder: Path) -> None:
    other = save_model(tiny(), folder.parent / "other")
    shutil.copy(other / WEIGHTS, folder / WEIGHTS)
    with pytest.raises(BadFileError, match=r"sha256 is not the one in config\.json\. Copy it again"):
        load_model(folder)


# --- what somebody else wrote ----------------------------------------------------------------------------------------


def seal(told: dict[str, Any]) -> bytes:
    """The bytes of config.json: indented JSON whose last entry is the sha256 of the same without it."""
    digest = hashlib.sha256(json.dumps(told, indent=2).encode()).hexdigest()
    return (json.dumps(told | {"self_sha256": digest}, indent=2) + "\n").encode()


def forge(folder: Path, weights: bytes | None = None, change: Callable[[dict], Any] = lambda told: None) -> Path:
    """Other weights or another config under right hashes: what damage never makes, but a person could."""
    told = json.loads((folder / CONFIG).read_bytes())
    del told["self_sha256"]
    if weights is not None:
        (folder / WEIGHTS).write_bytes(weights)
        told["dmst"]["files"][WEIGHTS] = {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    change(told)
    (folder / CONFIG).write_bytes(seal(told))
    return folder


def foreign(folder: Path, told: dict[str, Any] | None = None) -> Path:
    """As timm writes it: the same two files without hashes."""
    told = {"architecture": "dmst_tiny_patch16_224", "num_classes": 3, "model_args": SMALL} if told is None else told
    (folder / CONFIG).write_text(json.dumps(told))
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load((folder / WEIGHTS).read_bytes())


def test_a_forged_folder_loads_if_it_is_right(folder: Path) -> None:
    """So that the refusals below are for the reason they state."""
    weights = tensors(folder)
    weights["head.bias"] += 1
    assert torch.equal(load_model(forge(folder, safetensors.torch.save(weights))).head.bias, weights["head.bias"])


def other_keys(w: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{key}": x for key, x in w.items()}


def with_value(key: str, value: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda w: w | {key: value}


def as_dtype(dtype: torch.dtype) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda w: {key: x.to(dtype) if x.is_floating_point() else x for key, x in w.items()}


def test_a_crate_from_before_its_eps_was_stated_keeps_the_one_it_was_trained_with(tmp_path: Path) -> None:
    model = create_model("crate_tiny", **SMALL, norm_eps=1e-6)
    folder = forge(save_model(model, tmp_path / "old"), change=lambda told: told["dmst"]["config"].pop("norm_eps"))
    again = load_model(folder)
    assert again.config.norm_eps == again.blocks[0].norm.eps == again.norm.eps == 1e-6
    assert again.config == model.config and create_model("crate_tiny", **SMALL).norm.eps == 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            other_keys, r"does not hold the weights of dmst_tiny_patch16_224: missing \d+ .*; unknown \d+ ", id="keys"
        ),
        pytest.param(lambda w: {}, r"missing \d+ ", id="empty"),
        pytest.param(lambda w: {k: x for k, x in w.items() if k != "norm.bias"}, r"missing 1 \(norm\.bias", id="one missing"),
        pytest.param(with_value("extra", torch.ones(1)), r"unknown 1 \(extra", id="one more"),
        pytest.param(with_value("head.bias", torch.ones(4)), r"head\.bias has shape \(4,\), and .* needs \(3,\)", id="shape"),
        pytest.param(with_value("head.bias", torch.ones(1, 3)), r"shape \(1, 3\), and .* needs \(3,\)", id="one axis more"),
        pytest.param(with_value("head.bias", torch.tensor([1, torch.nan, 2])), "head.bias holds NaN", id="NaN"),
        pytest.param(with_value("head.bias", torch.tensor([1, torch.inf, 2])), "head.bias holds NaN or infinity", id="inf"),
        pytest.param(with_value("head.bias", torch.ones(3).half()), "mixes torch.float16, torch.float32", id="one half"),
        pytest.param(with_value("head.bias", torch.ones(3).int()), "is torch.int32, and .* needs torch.float32", id="int"),
        pytest.param(with_value("stem.layers.1.num_batches_tracked", torch.tensor(1.0)), "needs torch.int64", id="float count"),
        pytest.param(with_value("stem.layers.1.num_batches_tracked", torch.tensor(True)), "needs torch.int64", id="bool count"),
        pytest.param(as_dtype(torch.int8), "is torch.int8, and .* needs torch.float32", id="int8"),
        pytest.param(as_dtype(torch.bool), "is torch.bool", id="bool"),
        pytest.param(as_dtype(torch.complex64), "is of dtype 'C64', and I64, F64", id="complex"),
        pytest.param(as_dtype(torch.float8_e4m3fn), "is of dtype 'F8_E4M3'", id="float8 e4m3"),
        pytest.param(as_dtype(torch.float8_e5m2), "is of dtype 'F8_E5M2'", id="float8 e5m2"),
    ],
)
@pytest.mark.parametrize("verified", [True, False])
def test_weights_that_do_not_fit_are_named(change: Callable, message: str, verified: bool, folder: Path) -> None:
    forge(folder, safetensors.torch.save(change(tensors(folder))))
    if not verified:
        foreign(folder)
    with pytest.raises(BadFileError, match=message):
        load_model(folder, unverified=not verified)


def test_another_float_for_all_weights_is_the_models_dtype(folder: Path) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        model = load_model(forge(folder, safetensors.torch.save(as_dtype(dtype)(tensors(folder)))))
        assert {x.dtype for x in model.parameters()} == {dtype}


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_header_of_any_stated_length(length: int, folder: Path) -> None:
    weights = struct.pack("<Q", length) + (folder / WEIGHTS).read_bytes()[8:]
    with pytest.raises(BadFileError, match="is not a safetensors file"):
        load_model(forge(folder, weights))


def test_any_header_under_right_hashes_loads_or_is_refused(folder: Path) -> None:
    """What gets past the hashes still meets typed errors only. Mutations of the header keep its length."""
    draw, whole, refused = random.Random(2), (folder / WEIGHTS).read_bytes(), 0
    end = header_length(whole)
    for i in range(300):
        damaged = bytearray(whole)
        if i % 2:
            bit = draw.randrange(8 * end)
            damaged[bit // 8] ^= 1 << bit % 8
        else:
            damaged[draw.randrange(8, end)] = draw.choice(b'0123456789{}[]",:-eEF I\x00\xff')
        try:
            load_model(forge(folder, bytes(damaged)))
        except DmstError:
            refused += 1
    assert refused > 200


def state_size(folder: Path, size: int) -> Path:
    """The weights grow to `size`, of which the disk holds no more than before; the config says so too."""
    os.truncate(folder / WEIGHTS, size)
    return forge(folder, change=put("dmst", "files", WEIGHTS, "size", value=size))


@pytest.mark.parametrize("size", [3 * 10**9, 10**12], ids=["3 GB", "1 TB"])
@pytest.mark.parametrize("verified", [True, False])
def test_a_giant_is_refused_unread(size: int, verified: bool, folder: Path, untouched: None) -> None:
    state_size(folder, size)
    if not verified:
        foreign(folder)
    with cheaply(), pytest.raises(BadFileError, match=f"{size:,} bytes instead of at most [\\d,]+, which .* can have"):
        load_model(folder, unverified=not verified)


def test_a_giant_of_the_right_size_is_refused_by_its_header(folder: Path, untouched: None) -> None:
    """A config can ask for a file of 3 GB; this one has the header of another network."""
    forge(folder, change=put("dmst", "config", "mlp_ratio", value=1e6))
    state_size(folder, 3 * 10**9)
    with cheaply(), pytest.raises(BadFileError, match=r"is not a safetensors file \(its tensors have [\d,]+ bytes"):
        load_model(folder)


def with_header(head: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(head)) + head + data


def test_a_giant_that_is_right_still_needs_memory(folder: Path, untouched: None) -> None:
    """Names, shapes and sizes are those of the config: 6 GB of zeros."""
    forge(folder, change=put("dmst", "config", "mlp_ratio", value=1e6))
    config = ModelConfig(**json.loads((folder / CONFIG).read_bytes())["dmst"]["config"])
    told, end = {}, 0
    for name, x in VisionModel(config, device="meta").state_dict().items():
        kind = "F32" if x.is_floating_point() else "I64"
        told[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    raw = with_header(json.dumps(told).encode())
    (folder / WEIGHTS).write_bytes(raw)
    state_size(folder, len(raw) + end)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, limits[1]))
    try:
        with pytest.raises(BadFileError, match=r"has 6,[\d,]+ bytes, and there is no memory for so many"):
            load_model(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("verified", [True, False])
def test_countless_empty_tensors_are_refused_unread(verified: bool, folder: Path, untouched: None) -> None:
    """In a network that is large enough for such a header, but has a few tensors only."""
    told = ",".join(f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(200_000))
    forge(folder, with_header(f"{{{told}}}".encode()), put("dmst", "config", "mlp_ratio", value=1e6))
    if not verified:
        foreign(folder, {"architecture": "dmst_tiny", "num_classes": 3, "model_args": SMALL | {"mlp_ratio": 1e6}})
    with cheaply(), pytest.raises(BadFileError, match=r"is not a safetensors file \(its header is said to have"):
        load_model(folder, unverified=not verified)


@pytest.mark.parametrize("level", ["tensor", "its dtype"])
@pytest.mark.parametrize("verified", [True, False])
def test_a_name_that_comes_twice_is_refused(level: str, verified: bool, folder: Path, untouched: None) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    head, data = raw[8 : header_length(raw)].rstrip(), raw[header_length(raw) :]
    first = json.dumps(json.loads(head)["head.bias"])
    twice = {
        "tensor": b'{"head.bias":' + first.encode() + b"," + head[1:],
        "its dtype": head.replace(b'"head.bias":{', b'"head.bias":{"dtype":"F32",'),
    }
    forge(folder, with_header(twice[level], data))
    if not verified:
        foreign(folder)
    with pytest.raises(BadFileError, match=f"{'head.bias' if level == 'tensor' else 'dtype'}' comes twice"):
        load_model(folder, unverified=not verified)


def test_the_header_of_another_writer_is_read(folder: Path) -> None:
    """Another order, other spaces, and metadata, as safetensors itself allows."""
    wanted, raw = load_model(folder), (folder / WEIGHTS).read_bytes()
    told = json.loads(raw[8 : header_length(raw)])
    told = {"__metadata__": {"format": "pt"}} | dict(reversed(told.items()))
    forge(folder, with_header(json.dumps(told, indent=1).encode(), raw[header_length(raw) :]))
    assert same(load_model(folder), wanted) and same(load_model(foreign(folder), unverified=True), wanted)


class Canary:
    """A pickle of this makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def pickled(how: str, canary: Path, scratch: Path) -> bytes:
    payload = {"head.bias": Canary(canary)}
    if how.startswith("protocol"):
        return pickle.dumps(payload, protocol=int(how[-1]))
    torch.save(payload, scratch, _use_new_zipfile_serialization=how == "torch.save")
    return scratch.read_bytes()


@pytest.mark.parametrize("how", [*(f"protocol {i}" for i in range(6)), "torch.save", "torch.save of old"])
@pytest.mark.parametrize("name", BOTH)
def test_no_pickle_is_ever_run(how: str, name: str, folder: Path, tmp_path: Path, untouched: None) -> None:
    canary = tmp_path / "canary"
    raw = pickled(how, canary, tmp_path / "scratch")
    assert b"mkdir" in raw
    (folder / name).write_bytes(raw)
    textual = how in ("protocol 0", "protocol 1")  # these begin like text: no JSON, no safetensors
    told = "is damaged" if textual else "is a pickle or zip file, which can run code when it is read: refused. Load it where"
    with pytest.raises(BadFileError, match=f"{name} {told}"):
        load_model(folder)
    with pytest.raises(BadFileError, match=name):
        load_model(folder if name == CONFIG else foreign(folder), unverified=True)
    assert not canary.exists()


def test_a_pickle_under_right_hashes_is_refused_too(folder: Path, tmp_path: Path, untouched: None) -> None:
    for how in ("protocol 0", "protocol 2", "protocol 5", "torch.save"):
        with pytest.raises(BadFileError):
            load_model(forge(folder, pickled(how, tmp_path / "canary", tmp_path / "scratch")))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("what", ["empty", "missing", "folder", "link to itself", "link to nowhere", "zeros", "random", "html"])
@pytest.mark.parametrize("unverified", [False, True])
def test_something_else_in_place_of_a_file(what: str, name: str, unverified: bool, folder: Path, untouched: None) -> None:
    if unverified:
        foreign(folder)
    path = folder / name
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what.startswith("link"):
        path.symlink_to(path if what == "link to itself" else folder / "gone")
    elif what != "missing":
        data = {"empty": b"", "zeros": bytes(999), "random": random.Random(3).randbytes(999), "html": b"<!doctype html>" * 50}
        path.write_bytes(data[what])
    with pytest.raises(BadFileError, match=name):
        load_model(folder, unverified=unverified)


ENDLESS = [(what, name) for what in ("pipe", "link to a pipe", "socket", "link to a device") for name in BOTH]


@pytest.mark.parametrize(
    ("what", "name", "unverified"),
    [(*each, unverified) for each in (*ENDLESS, ("1 TiB", CONFIG), ("1 TiB", WEIGHTS)) for unverified in (False, True)],
)
def test_what_would_be_waited_for_or_never_ends(
    what: str, name: str, unverified: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, untouched: None
) -> None:
    path = folder / name
    if unverified:
        foreign(folder)
    path.unlink()
    monkeypatch.chdir(folder)  # the name of a socket must be short
    if what == "1 TiB":
        path.touch()
        os.truncate(path, 2**40)
    elif what == "link to a device":
        path.symlink_to("/dev/zero")
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
    else:
        os.mkfifo(folder / "pipe")
        (folder / "pipe").rename(path) if what == "pipe" else path.symlink_to("pipe")
    message = f"{name} is damaged: 1,099,511,627,776 bytes instead of" if what == "1 TiB" else f"{name} is not a plain file"
    with pytest.raises(BadFileError, match=message):
        load_model(folder, unverified=unverified)


@pytest.mark.parametrize("name", BOTH)
def test_a_link_to_a_plain_file_is_followed(name: str, folder: Path, tmp_path: Path) -> None:
    """The caches that models come from are made of links; the hashes stand for what they lead to."""
    wanted = load_model(folder)
    (folder / name).rename(tmp_path / "blob")
    (folder / name).symlink_to("../blob")
    assert same(load_model(folder), wanted)
    (tmp_path / "blob").write_bytes((tmp_path / "blob").read_bytes()[:-1])
    with pytest.raises(BadFileError, match=f"{name} is damaged"):
        load_model(folder)


def test_what_json_reads_and_cannot_write_is_refused() -> None:
    """Where reading goes deeper than writing: it does since Python 3.12."""
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(BadFileError, match="do not match its self_sha256"):
        atomic.check_seal(Path("config.json"), {"dmst": deep}, b"")


@pytest.mark.parametrize("where", ["gone", "file", "loop", "config.json"])
def test_a_folder_that_is_none(where: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = folder / where if where == CONFIG else tmp_path / where
    with pytest.raises(
        BadFileError, match=r"cannot be read .*: a saved model is a folder with model.safetensors and config.json"
    ):
        load_model(path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param(b"[" * 100_000 + b"]" * 100_000, "not JSON", id="deep list"),
        pytest.param(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "not JSON", id="deep object"),
        pytest.param(b'{"dmst": NaN}', "do not match its self_sha256", id="NaN"),
        pytest.param(b'{"dmst": 1e999}', "do not match its self_sha256", id="1e999"),
        pytest.param(b'{"self_sha256": "0"}', "do not match its self_sha256", id="only a hash"),
        pytest.param(b'{"dmst": {}}', "do not match its self_sha256", id="no hash"),
        pytest.param(b'{"dmst": ' + b"9" * 5000 + b"}", "not JSON", id="5000 digits"),
        pytest.param(b"[]", "must hold an object", id="list"),
        pytest.param(b"null", "must hold an object", id="null"),
        pytest.param(b'"dmst"', "must hold an object", id="text"),
        pytest.param(b"\xff\xfe{}", "not JSON|must hold|has no sha256", id="half a UTF-16"),
        pytest.param(b'{"\xff": 1}', "not JSON", id="bad UTF-8"),
        pytest.param(b"{}", "has no sha256", id="nothing"),
    ],
)
def test_a_config_that_is_none(raw: bytes, message: str, folder: Path, untouched: None) -> None:
    (folder / CONFIG).write_bytes(raw)
    with pytest.raises(BadFileError, match=message):
        load_model(folder)
    with pytest.raises(BadFileError):
        load_model(folder, unverified=True)


def put(*keys: str, value: Any) -> Callable[[dict], None]:
    def change(told: dict) -> None:
        for key in keys[:-1]:
            told = told[key]
        told[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("dmst", "config", "swish", value=1), r"was written by dmst 0\.1\.0 and says \['swish'\], unknown to 0\.1\.0"),
        (put("dmst", "config", value=None), "config.json"),
        (put("dmst", "config", value=[]), "config.json"),
        (put("dmst", "config", value="abc"), "config.json"),
        (put("dmst", "config", value=5), "config.json"),
        (put("dmst", "config", value={}), r"does not hold the weights of custom"),
        (put("dmst", "files", value={}), "has no entry 'model.safetensors'"),
        (put("dmst", "files", value=[]), "was not written by save_model"),
        (put("dmst", "files", WEIGHTS, value={"size": 1}), "has no entry 'sha256'"),
        (put("dmst", value=5), "was not written by save_model"),
        (put("dmst", value=None), "was not written by save_model"),
        (put("dmst", "config", "dim", value="16"), "dim is '16'"),
        (put("dmst", "config", "num_classes", value=True), "num_classes is True"),
        (put("dmst", "config", "name", value=None), "name is None"),
        (put("dmst", "config", "operator", value="dmsb"), "saved with operator 'dmsb', which is not in dmst.OPERATORS"),
        (put("dmst", "config", "operator_options", value={"mode": "x"}), "unknown mode 'x'"),
        (put("dmst", "config", "operator_options", value={"modes": "x"}), "'modes'. Did you mean 'mode'"),
        (put("dmst", "config", "operator_options", value=[1]), "operator_options is"),
        (put("dmst", "config", "depth", value=2), "missing .*blocks.1."),
        (put("dmst", "config", "num_heads", value=3), "not divisible"),
        (put("dmst", "config", "img_size", value=[40000, 40000]), "img_size is .*: it must be a whole number from 1 to 4,096"),
        (put("dmst", "config", "operator_options", value={"gate_scale": 1e308}), "gate_scale is 1e.308: it must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_from_elsewhere(change: Callable, message: str, folder: Path) -> None:
    """Right hashes around what this version cannot use: a newer version's file, or a hand-made one."""
    with pytest.raises(DmstError, match=message):
        load_model(forge(folder, change=change))


def test_a_newer_version_is_named(folder: Path) -> None:
    def newer(told: dict) -> None:
        told["dmst"]["version"] = "9.9.0"
        told["dmst"]["config"]["swish"] = 1

    with pytest.raises(BadFileError, match=r"was written by dmst 9\.9\.0 and says \['swish'\]"):
        load_model(forge(folder, change=newer))


def test_what_a_newer_version_says_beside_the_config_does_no_harm(folder: Path) -> None:
    wanted = load_model(folder)
    assert same(load_model(forge(folder, change=put("note", value="hello"))), wanted)
    assert same(load_model(forge(folder, change=put("dmst", "trained_on", value="cifar10"))), wanted)


# --- files without hashes --------------------------------------------------------------------------------------------


def test_without_hashes_only_on_request(folder: Path) -> None:
    wanted = load_model(folder)
    foreign(folder)
    with pytest.raises(BadFileError, match=r"has no sha256, so damage could not be detected: pass unverified=True"):
        load_model(folder)
    loaded = load_model(folder, unverified=True)
    assert same(loaded, wanted) and loaded.config == wanted.config and not loaded.training


def test_hashes_that_are_there_count_also_when_unverified(folder: Path, untouched: None) -> None:
    weights = bytearray((folder / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (folder / WEIGHTS).write_bytes(weights)
    with pytest.raises(BadFileError, match="sha256 is not the one"):
        load_model(folder, unverified=True)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({}, "names no architecture"),
        ({"architecture": 5}, "names no architecture"),
        ({"architecture": "resnet50"}, "unknown model 'resnet50'"),
        ({"architecture": "dmst_tiny"}, "does not hold the weights of dmst_tiny_patch16_224: missing"),
        ({"architecture": "dmst_tiny", "model_args": [1, 2]}, "model_args"),
        ({"architecture": "dmst_tiny", "model_args": "abc"}, "model_args"),
        ({"architecture": "dmst_tiny", "model_args": 5}, "model_args"),
        ({"architecture": "dmst_tiny", "model_args": {"name": "x"}}, "name"),
        ({"architecture": "dmst_tiny", "model_args": {"swish": 1}}, "'swish'"),
        ({"architecture": "dmst_tiny", "model_args": {"dim": "16"}}, "dim is '16'"),
        ({"architecture": "dmst_tiny", "model_args": {"operator_options": 5}}, "operator_options is 5"),
        ({"architecture": "dmst_tiny", "model_args": {"drop_rate": float("nan")}}, "drop_rate is nan"),
        ({"architecture": "dmst_tiny", "num_classes": "3"}, "num_classes is '3'"),
        ({"architecture": "dmst_tiny", "global_pool": "max"}, "global_pool"),
    ],
    ids=str,
)
def test_a_config_without_hashes_is_still_read_with_care(told: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(DmstError, match=message):
        load_model(foreign(folder, told), unverified=True)


def test_a_full_disk_names_what_is_needed_and_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise FULL

    monkeypatch.setattr(atomic, "_write", full)
    with pytest.raises(SaveError, match=r"No space left on device\): it needs [\d,]+ bytes, and [\d,]+ are free") as said:
        save_model(tiny(), tmp_path / "deep" / "model")
    assert isinstance(said.value, OSError) and "untouched" in str(said.value)


def test_a_save_that_was_killed_between_two_renames_is_found_again(tmp_path: Path) -> None:
    """What SIGKILL leaves at that instant, made by hand: it loads with a warning, and the next save tidies up."""
    first, second = tiny(), tiny()
    save_model(first, tmp_path / "m [1]")
    aside = tmp_path / ".m [1].old.abc"
    aside.mkdir()
    (tmp_path / "m [1]").rename(aside / "m [1]")
    with pytest.warns(UserWarning, match="was interrupted: loading the model that was there before"):
        assert same(load_model(tmp_path / "m [1]"), first)
    save_model(second, tmp_path / "m [1]")
    assert names(tmp_path) == ["m [1]"]
    assert same(load_model(tmp_path / "m [1]"), second)


def test_a_failure_after_the_swap_is_no_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the swap the new model is there: saying that the old one is untouched would be a lie."""
    sync, calls = os.fsync, []

    def flaky(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 4:  # after two files and the folder of the new model: the folder around it
            raise OSError(errno.EIO, "no")
        sync(handle)

    monkeypatch.setattr(os, "fsync", flaky)
    other = tiny()
    save_model(other, folder, overwrite=True)
    assert len(calls) == 4 and same(load_model(folder), other) and names(folder.parent) == [folder.name]


def test_shared_weights_are_written_apart(tmp_path: Path) -> None:
    model = tiny(depth=2)
    model.blocks[1].norm.weight = model.blocks[0].norm.weight
    assert same(load_model(save_model(model, tmp_path / "m")), model)


def test_an_orthonormal_matrix_is_written_as_it_is_used(tmp_path: Path) -> None:
    model = tiny(mode="proximal").eval()
    weight = model.blocks[0].operator.subspace.weight
    with torch.no_grad():
        weight.add_(0.1 * torch.randn_like(weight))
    before = weight.clone()
    again = load_model(save_model(model, tmp_path / "m"))
    assert is_orthonormal(again.blocks[0].operator.subspace.weight)
    x = images(model)
    assert torch.equal(again(x), model(x))
    assert torch.equal(weight, before)  # the model itself is left alone


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), torch.float32, {"a": {3}}], ids=str)
def test_options_that_json_would_change_are_refused(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(DMSA):
        def __init__(self, dim: int, num_heads: int = 8, *, odd: Any = None, **options: Any) -> None:
            super().__init__(dim, num_heads, **options)

    monkeypatch.setitem(OPERATORS, "odd", Odd)
    model = tiny(operator="odd", odd=value)
    with pytest.raises(OptionError, match="a saved model can store only text, numbers"):
        save_model(model, tmp_path / "m")
    assert names(tmp_path) == []


HUGE = {"dim": 2**16, "num_classes": 10**6, "mlp_ratio": 1e6, "depth": 100}  # more bytes than 64 bits can count


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("dmst", "files", "model.safetensors", "size"), None, "has no config or no size"),
        (("dmst", "files", "model.safetensors", "size"), "1", "has no config or no size"),
        (("dmst", "config", "operator_options"), {"self": 1}, "is not a valid config|operator_options"),
        (("dmst", "config", "depth"), 900_000, "depth is 900000: it must be a whole number from 1 to 256"),
        (("dmst", "config", "readout_depth"), 900_000, "readout_depth is 900000"),
        (("dmst", "config"), HUGE, "does not hold the weights of custom: missing"),
    ],
)
def test_hostile_configs_with_right_hashes(path: tuple, value: Any, message: str, folder: Path) -> None:
    told = json.loads((folder / "config.json").read_text())
    told.pop("self_sha256")
    inside = told
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    (folder / "config.json").write_bytes(atomic.sealed(told))
    with pytest.raises(DmstError, match=message):
        load_model(folder)


def test_odd_names_and_empty_models(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match="cannot be read"):
        load_model("a\0b")
    with pytest.raises(OptionError, match="meta device"):
        save_model(tiny().to("meta"), tmp_path / "m")
