"""Saved models: exact when whole, refused when not, and nothing of the user's is ever lost or run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from dmst.errors import BadFileError, DmstError, FullDiskError, OptionError
from dmst.models import VisionModel, create_model, load_model, save_model
from dmst.operators import DMSA, OPERATORS
from dmst.operators.orthonormal import is_orthonormal
from tests.forged import CONFIG, WEIGHTS, Change, forge, grown, harmed, header_length, pickled, put, seal, with_header

BOTH = [CONFIG, WEIGHTS]
SMALL: dict[str, Any] = {"dim": 16, "depth": 1, "num_heads": 2, "img_size": 16, "num_classes": 3}
FAMILIES = ("dmst_tiny", "tost_tiny", "vit_tiny", "crate_tiny", "dmst_cifar", "gmst_cifar")


def tiny(name: str = "dmst_tiny", **options: Any) -> VisionModel:
    """A small model in which no tensor is what a fresh one has."""
    few = {"groups": 4} if name.startswith("gmst") else {}  # there are 4 x 4 patches
    model = create_model(name, **SMALL | few | options)
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


# --- whole files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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


def test_saving_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = tiny(depth=2).train()
    model.blocks[1].norm.weight = model.blocks[0].norm.weight  # written twice
    model.reset_classifier(7)
    model.set_grad_checkpointing()
    model.compile(backend="eager")  # in place: the names of the weights stay
    before = {key: x.clone() for key, x in model.state_dict().items()}
    loaded = load_model(save_model(model, tmp_path / "saved"))
    assert model.training and not loaded.training and loaded.num_classes == 7
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items()) and same(loaded, model)


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
    departs = {**SMALL, "img_size": [16, 16]}  # from the named model
    del departs["num_classes"]  # it is said once: transformers passes all of model_args, and the classes, to timm
    assert told["model_args"] == departs
    assert told["pretrained_cfg"]["input_size"] == [3, 16, 16] and told["pretrained_cfg"]["num_classes"] == 3
    stored = safetensors.torch.load(weights)
    assert stored.keys() == model.state_dict().keys()


def test_only_a_model_is_saved(tmp_path: Path) -> None:
    for wrapped in (nn.DataParallel(tiny()), torch.compile(tiny(), backend="eager"), tiny().state_dict()):
        with pytest.raises(OptionError, match=r"takes a VisionModel of this package, not .*: unwrap it first"):
            save_model(wrapped, tmp_path / "saved")  # type: ignore[arg-type]
    assert names(tmp_path) == []


SPOILT: dict[str, Callable[[VisionModel], Any]] = {
    "holds NaN": lambda model: model.head.weight.data.fill_(torch.nan),
    "mixes torch.float32, torch.float64": lambda model: model.head.double(),
    "missing 2": lambda model: model.prune_intermediate_layers(1, prune_norm=True, prune_head=False),
    "unknown 1": lambda model: setattr(model, "extra", nn.Parameter(torch.ones(2))),
}


@pytest.mark.parametrize("why", SPOILT)
def test_what_could_not_be_loaded_is_not_written(why: str, folder: Path) -> None:
    """Not even over an old one: hours later it would be too late to learn of it."""
    model, old = tiny(), load_model(folder)
    SPOILT[why](model)
    with pytest.raises(OptionError, match=why):
        save_model(model, folder, overwrite=True)
    assert names(folder.parent) == ["saved"] and same(load_model(folder), old)


# --- what is already there -------------------------------------------------------------------------------------------


def test_an_existing_folder_is_refused_and_overwritten_on_request(folder: Path) -> None:
    old, new = load_model(folder), tiny()
    with pytest.raises(OptionError, match=r"saved exists: choose another folder, or pass overwrite=True"):
        save_model(new, folder)
    assert same(load_model(folder), old)
    assert save_model(new, folder, overwrite=True) == folder
    assert same(load_model(folder), new) and not same(old, new)
    assert names(folder) == BOTH and names(folder.parent) == ["saved"]


@pytest.mark.parametrize("what", ["file", "link to nowhere", "foreign folder", "saved model and more", "folder in it"])
def test_what_is_not_a_saved_model_is_never_deleted(what: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if what == "file":
        place.write_text("mine")
    elif what == "link to nowhere":
        place.symlink_to(place.parent / "gone")
    else:
        save_model(tiny(), place) if what == "saved model and more" else place.mkdir()
        (place / WEIGHTS).mkdir() if what == "folder in it" else (place / "notes.txt").write_text("mine")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    for overwrite in (False, True):
        with pytest.raises(OptionError, match=r"place (exists|contains files that are not of a saved model): choose another"):
            save_model(tiny(), place, overwrite=overwrite)
        assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_a_link_to_a_folder_is_replaced_not_followed(folder: Path) -> None:
    old, new, link = load_model(folder), tiny(), folder.parent / "link"
    link.symlink_to(folder)
    save_model(new, link, overwrite=True)
    assert same(load_model(link), new) and same(load_model(folder), old) and not link.is_symlink()


# --- a disk that fails -----------------------------------------------------------------------------------------------

FAILURES = [
    pytest.param(os, "fsync", 1, id="flushing the weights"),
    pytest.param(os, "fsync", 3, id="flushing the folder"),
    pytest.param(Path, "open", 2, id="writing the config"),
    pytest.param(Path, "mkdir", 2, id="room for the new"),
    pytest.param(Path, "rename", 1, id="moving the old away"),
    pytest.param(Path, "rename", 2, id="moving the new in"),
]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(("owner", "name", "turn"), FAILURES)
def test_the_old_model_stays_until_the_new_one_is_complete(
    owner: Any, name: str, turn: int, error: BaseException, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there was none. The message of a full disk names what is needed and free."""
    old, new, real, calls = load_model(folder), tiny(), getattr(owner, name), []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == turn:
            raise error
        return real(*args, **options)

    for place in (folder, folder.parent / "new"):
        if place != folder and name == "rename" and turn == 2:
            continue  # there is one only
        calls.clear()
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, failing)
            with pytest.raises((FullDiskError, KeyboardInterrupt)) as said:
                save_model(new, place, overwrite=True)
        if isinstance(said.value, FullDiskError):
            assert "No space left on device): it needs " in str(said.value) and " are free there" in str(said.value)
        assert names(folder.parent) == ["saved"] and names(folder) == BOTH
        assert same(load_model(folder), old)
    save_model(new, folder, overwrite=True)  # and with room again it works
    assert same(load_model(folder), new)


# --- damage ----------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_and_every_truncation_is_refused(folder: Path, untouched: None) -> None:
    draw, other = random.Random(0), save_model(tiny(), folder.parent / "other")
    for name in BOTH:
        whole = (folder / name).read_bytes()
        for raw in [*harmed(whole, draw, 60), *([(other / name).read_bytes()] if name == WEIGHTS else [])]:
            (folder / name).write_bytes(raw)
            with pytest.raises(BadFileError):
                load_model(folder)
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("what", ["missing", "folder", "link to itself", "pipe", "link to a device", "html"])
def test_something_else_in_place_of_a_file(what: str, name: str, folder: Path, untouched: None) -> None:
    path = folder / name
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":  # would be waited for
        os.mkfifo(path)
    elif what.startswith("link"):
        path.symlink_to(path if what == "link to itself" else "/dev/zero")  # which never ends
    elif what == "html":
        path.write_bytes(b"<!doctype html>" * 50)
    with pytest.raises(BadFileError, match=name):
        load_model(folder)


# --- what somebody else wrote ----------------------------------------------------------------------------------------


def foreign(folder: Path, told: dict[str, Any] | None = None) -> Path:
    """As timm writes it: the same two files without hashes."""
    told = {"architecture": "dmst_tiny_patch16_224", "num_classes": 3, "model_args": SMALL} if told is None else told
    (folder / CONFIG).write_text(json.dumps(told))
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load((folder / WEIGHTS).read_bytes())


def test_a_forged_folder_loads_if_it_is_right(folder: Path) -> None:
    """So that the refusals below are for the reason they state. Another writer's order, spaces and metadata are fine."""
    weights = tensors(folder)
    weights["head.bias"] += 1
    forge(folder, {WEIGHTS: safetensors.torch.save(weights)})
    raw = (folder / WEIGHTS).read_bytes()
    told = {"__metadata__": {"format": "pt"}} | dict(reversed(json.loads(raw[8 : header_length(raw)]).items()))
    forge(folder, {WEIGHTS: with_header(json.dumps(told, indent=1).encode(), raw[header_length(raw) :])})
    assert torch.equal(load_model(folder).head.bias, weights["head.bias"])


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


def test_a_model_from_before_whose_model_args_state_the_classes_too(tmp_path: Path) -> None:
    model = tiny()
    folder = forge(save_model(model, tmp_path / "old"), change=put("model_args", "num_classes", value=3))
    assert load_model(folder).config == model.config and same(load_model(folder), model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda w: {f"module.{k}": x for k, x in w.items()},
            r"for dmst_tiny_patch16_224 does not fit: missing \d+ .*; unknown \d+ ",
            id="keys",
        ),
        pytest.param(with_value("extra", torch.ones(1)), r"unknown 1 \(extra", id="one more"),
        pytest.param(with_value("head.bias", torch.ones(4)), r"head\.bias is .* \(4,\), and .* \(3,\) is needed", id="shape"),
        pytest.param(with_value("head.bias", torch.tensor([1, torch.nan, 2])), "head.bias holds NaN", id="NaN"),
        pytest.param(with_value("head.bias", torch.ones(3).half()), "mixes torch.float16, torch.float32", id="one half"),
        pytest.param(as_dtype(torch.int8), "is torch.int8 .* and torch.float32", id="int8"),
    ],
)
def test_weights_that_do_not_fit_are_named(change: Callable, message: str, folder: Path) -> None:
    forge(folder, {WEIGHTS: safetensors.torch.save(change(tensors(folder)))})
    with pytest.raises(BadFileError, match=message):
        load_model(folder)


@pytest.mark.parametrize("verified", [True, False])
def test_a_giant_is_refused_unread(verified: bool, folder: Path, untouched: None) -> None:
    grown(folder, WEIGHTS, 10**12)
    if not verified:
        foreign(folder)
    with pytest.raises(BadFileError, match=r"1,000,000,000,000 bytes instead of at most 8,[\d,]+\."):
        load_model(folder, unverified=not verified)


@pytest.mark.parametrize("how", ["protocol 0", "protocol 5", "torch.save"])
@pytest.mark.parametrize("name", BOTH)
def test_no_pickle_is_ever_run(how: str, name: str, folder: Path, tmp_path: Path, untouched: None) -> None:
    canary = tmp_path / "canary"
    raw = pickled(how, canary, tmp_path / "scratch")
    assert b"mkdir" in raw
    (folder / name).write_bytes(raw)
    textual = how == "protocol 0"  # it begins like text: no JSON, no safetensors
    told = "is damaged" if textual else "is a pickle or zip file, which can run code when it is read: refused. Load it where"
    with pytest.raises(BadFileError, match=f"{name} {told}"):
        load_model(folder)
    with pytest.raises(BadFileError, match=name):
        load_model(folder if name == CONFIG else foreign(folder), unverified=True)
    if name == WEIGHTS:
        with pytest.raises(BadFileError):
            load_model(forge(save_model(tiny(), tmp_path / "other"), {WEIGHTS: raw}))
    assert not canary.exists()


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


@pytest.mark.parametrize("where", ["gone", "file", "loop", "a\0b"])
def test_a_folder_that_is_none(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(BadFileError, match=r"cannot be read: .* a saved model is a folder with model.safetensors and config"):
        load_model(tmp_path / where)


HUGE = {"dim": 2**16, "num_classes": 10**6, "mlp_ratio": 1e6, "depth": 100}  # more bytes than 64 bits can count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("self", value=float("inf")), "do not match its self_sha256"),
        (put("dmst", "config", "swish", value=1), r"was written by dmst 0\.1\.0 and says \['swish'\], unknown to "),
        (put("dmst", "config", value=5), "was not written by save_model"),
        (put("dmst", "config", value=HUGE), r"for custom does not fit: missing"),
        (put("dmst", "files", WEIGHTS, "size", value="x"), "was not written by save_model"),
        (put("dmst", "config", "dim", value="16"), "dim is '16'"),
        (put("dmst", "config", "operator", value="dmsb"), "saved with operator 'dmsb', which is not in dmst.OPERATORS"),
        (put("dmst", "config", "operator_options", value={"self": 1}), "is not a valid config|operator_options"),
        (put("dmst", "config", "depth", value=900_000), "depth is 900000: it must be a whole number from 1 to 256"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_from_elsewhere(change: Change, message: str, folder: Path) -> None:
    """Right hashes around what this version cannot use: a newer version's file, or a hand-made one."""
    with pytest.raises(DmstError, match=message):
        load_model(forge(folder, change=change))


# --- files without hashes --------------------------------------------------------------------------------------------


def test_without_hashes_only_on_request(folder: Path) -> None:
    wanted = load_model(folder)
    foreign(folder)
    with pytest.raises(BadFileError, match=r"has no sha256, so damage could not be detected: pass unverified=True"):
        load_model(folder)
    loaded = load_model(folder, unverified=True)
    assert same(loaded, wanted) and loaded.config == wanted.config and not loaded.training


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"architecture": 5}, "is no config of a model"),
        ({"architecture": "resnet50"}, "unknown model 'resnet50'"),
        ({"architecture": "dmst_tiny", "model_args": {"name": "x"}}, "is no config of a model"),
        ({"architecture": "dmst_tiny", "model_args": {"swish": 1}}, "'swish'"),
    ],
    ids=str,
)
def test_a_config_without_hashes_is_still_read_with_care(told: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(DmstError, match=message):
        load_model(foreign(folder, told), unverified=True)


def test_a_save_that_was_killed_between_two_renames_is_found_again(tmp_path: Path) -> None:
    """What SIGKILL leaves at that instant, made by hand: it loads with a warning, and the next save tidies up."""
    first, second = tiny(), tiny()
    save_model(first, tmp_path / "m [1]")
    (tmp_path / "m [1]").rename(tmp_path / ".m [1].old.abc")
    with pytest.warns(UserWarning, match="was interrupted: loading the model that was there before"):
        assert same(load_model(tmp_path / "m [1]"), first)
    save_model(second, tmp_path / "m [1]")
    assert names(tmp_path) == ["m [1]"]
    assert same(load_model(tmp_path / "m [1]"), second)


@pytest.mark.parametrize("value", [(1, 2), torch.float32], ids=str)
def test_options_that_json_would_change_are_refused(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(DMSA):
        def __init__(self, dim: int, num_heads: int = 8, *, odd: Any = None, **options: Any) -> None:
            super().__init__(dim, num_heads, **options)

    monkeypatch.setitem(OPERATORS, "odd", Odd)
    model = tiny(operator="odd", odd=value)
    with pytest.raises(OptionError, match="a saved model can store only text, numbers"):
        save_model(model, tmp_path / "m")
    assert names(tmp_path) == []
