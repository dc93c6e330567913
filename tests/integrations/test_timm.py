"""The models of the zoo in timm: names beside its own, its wrappers and optimizers, its files and ours.

Then oracles: timm's ViT and parts of its XCiT. What timm asks of a model by itself is in test_timm_contract.py.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import dmst
from dmst import photos
from dmst.errors import OptionError
from dmst.models import shipped
from dmst.models.class_attention import ClassAttentionBlock
from dmst.models.config import ModelConfig
from dmst.models.positions import FourierPosition
from dmst.models.vision import VisionModel
from dmst.models.zoo import MODELS, model_config, timm_name
from tests import forked
from tests.forged import forge, put
from tests.integrations.test_timm_contract import SMALL, every_model, images, one_of_each, small
from tests.timm_here import timm, torchvision

ROOT = Path(dmst.__file__).parent.parent


def create(name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    return timm.create_model(timm_name(name), **small(name, **options))


def same(a: nn.Module, b: nn.Module) -> None:
    """Equal to the bit: names, order, values."""
    left, right = a.state_dict(), b.state_dict()
    assert list(left) == list(right)
    for name, x in left.items():
        assert torch.equal(x, right[name]), name


# --- the registry ----------------------------------------------------------------------------------------------------


def test_every_model_is_registered_under_a_name_of_its_own() -> None:
    ours = {timm_name(name) for name in MODELS}
    assert len(ours) == len(MODELS)
    assert ours == set(timm.list_models(module="timm"))
    assert all(timm.is_model(name) for name in ours)
    assert set(timm.list_models("dmst_*")) == {name for name in ours if name.startswith("dmst_")}
    assert timm.list_models("dmst_vit_tiny*") == ["dmst_vit_tiny_patch8_224", "dmst_vit_tiny_patch16_224"]
    assert timm.list_models("crate_cifar", include_tags=True) == ["crate_cifar.untrained"]
    assert set(timm.list_models(module="timm", pretrained=True)) == {f"{timm_name(name)}.shipped" for name in shipped.SHIPPED}


@every_model
def test_a_name_alone_gives_the_model_of_the_zoo(name: str) -> None:
    """At full size, on the device that holds no numbers; and how its images are prepared."""
    model, config = timm.create_model(timm_name(name), device="meta"), model_config(name)
    assert type(model) is VisionModel and model.config == config
    data = timm.data.resolve_model_data_config(model)
    assert data["input_size"] == (config.in_chans, *config.img_size)  # type: ignore[misc]
    assert len(data["mean"]) == len(data["std"]) == config.in_chans and data["interpolation"] == "bicubic"


@pytest.mark.parametrize("name", ["dmst_cifar10", "dmst_digits"])
def test_weights_that_ship(name: str) -> None:
    """As `dmst.create_model(name, pretrained=True)` has them; with other classes, a new classifier and the same backbone."""
    stored = shipped.answers(name)
    model = timm.create_model(timm_name(name), pretrained=True).eval()
    assert model.pretrained_cfg["tag"] == "shipped"
    with torch.no_grad():
        assert (model(stored["images"]) - stored["logits"]).abs().max() < shipped.NEAR
        other = timm.create_model(timm_name(name), pretrained=True, num_classes=3).eval()
        assert other(stored["images"]).shape == (8, 3)
        maps = timm.create_model(timm_name(name), pretrained=True, features_only=True, out_indices=(1,)).eval()
        seen = model.forward_intermediates(stored["images"], [1], intermediates_only=True)[0]
        torch.testing.assert_close(maps(stored["images"])[0], seen)
    assert torch.equal(other.blocks[0].norm.weight, model.blocks[0].norm.weight)
    assert timm.models.is_model_pretrained(timm_name(name))
    assert timm.list_pretrained(f"{timm_name(name)}.*") == [f"{timm_name(name)}.shipped"]
    if name == "dmst_digits":
        with pytest.raises(OptionError, match=r"in_chans is 3, and the weights are for 1.*pretrained=False"):
            timm.create_model(name, pretrained=True, in_chans=3)


def test_the_models_of_timm_are_still_its_own() -> None:
    assert type(timm.create_model("vit_tiny_patch16_224", depth=1)) is timm.models.VisionTransformer
    for name in timm.list_models("vit_*"):
        assert timm.models.model_entrypoint(name).__module__.startswith("timm.")


# --- what timm makes of every model ----------------------------------------------------------------------------------


@one_of_each
def test_features_only(name: str) -> None:
    x = images(create(name))
    for out_indices, chosen in ((None, [0, 1, 2]), ((0, 2), [0, 2]), ((-2,), [1]), (1, [2])):
        features = create(name, features_only=True, out_indices=out_indices).eval()
        maps = create(name).eval().forward_intermediates(x, chosen, intermediates_only=True)
        found = features(x)
        assert len(found) == len(chosen) and all(map(torch.equal, found, maps))
        assert features.feature_info.channels() == [SMALL["dim"]] * len(chosen)
        assert features.feature_info.reduction() == [model_config(name).patch_size] * len(chosen)
        assert "classifier" not in features.pretrained_cfg


@one_of_each
def test_features_from_a_symbolic_graph(name: str) -> None:
    """torch.fx, as timm and torchvision use it: the logits, the tokens after a block, and any part by its name."""
    model = create(name, drop_path_rate=0.1).eval()
    x, last = images(model), timm.models.get_graph_node_names(model)[1][-1]
    wanted, blocks = model(x), model.forward_intermediates(x, output_fmt="NLC", return_prefix_tokens=True)[1]
    assert torch.equal(timm.models.create_feature_extractor(model, [last])(x)[last], wanted)
    for found, (patches, prefix) in zip(timm.models.FeatureGraphNet(model, (0, 2))(x), (blocks[0], blocks[2]), strict=True):
        assert torch.equal(found, torch.cat((prefix, patches), 1))

    names = ["stem", "blocks.1.operator", "blocks.2.feedforward", "norm", "head"]
    heard: dict[str, torch.Tensor] = {}
    found = torchvision.models.feature_extraction.create_feature_extractor(model, names)(x)
    for part in names:
        model.get_submodule(part).register_forward_hook(lambda _, args, out, part=part: heard.setdefault(part, out))
    model(x)
    assert found.keys() == heard.keys() and all(torch.equal(found[part], heard[part]) for part in names)


@one_of_each
def test_groups_for_the_optimizer(name: str) -> None:
    """Layer-wise learning rates and weight decay; test_timm_contract.py has the groups themselves."""
    model = create(name)
    names, still = [key for key, _ in model.named_parameters()], model.no_weight_decay()
    assert {key for key in names if key in ("cls_token", "position.table")} <= still <= set(names)
    rows = timm.optim.param_groups_layer_decay(model, 0.05, no_weight_decay_list=still, layer_decay=0.5)
    met = {id(x): row for row in rows for x in row["params"]}
    assert len(met) == sum(len(row["params"]) for row in rows) == len(names)
    for key, x in model.named_parameters():
        assert met[id(x)]["weight_decay"] == (0.0 if x.ndim <= 1 or key in still else 0.05), key
    parts = (model.stem, *model.blocks, *model.class_blocks, model.head)
    scales = [met[id(next(part.parameters()))]["lr_scale"] for part in parts]
    assert scales == [0.5**i for i in reversed(range(len(scales)))]


@one_of_each
def test_files_of_either_side_load_on_either_side(name: str, tmp_path: Path) -> None:
    """Also another operator, with its options, and another pool than the family's."""
    options = small(name, num_classes=5, operator="dmsa", mode="equation", global_pool="avg")
    model = timm.create_model(timm_name(name), **options).eval()
    for x in model.state_dict().values():
        if x.is_floating_point():
            x += 0.1 * torch.rand_like(x)  # so that nothing is what a fresh model has
    timm.models.save_for_hf(model, tmp_path / "timm", model_args=options, safe_serialization=True)
    dmst.save_model(model, tmp_path / "dmst")
    loaded = [dmst.load_model(tmp_path / "timm", unverified=True), dmst.load_model(tmp_path / "dmst")]
    forge(dmst.save_model(model, tmp_path / "before"), change=put("model_args", "num_classes", value=5))  # as it was written
    loaded += [timm.create_model(f"local-dir:{tmp_path / side}", pretrained=True).eval() for side in ("timm", "dmst", "before")]
    x = images(model)
    wanted = model(x)
    for other in loaded:
        same(model, other)
        assert other.config == model.config and torch.equal(other(x), wanted)


# --- timm's other uses of a model, once a family ---------------------------------------------------------------------


@one_of_each
def test_weights_adapt_to_classes_channels_and_sizes(name: str, tmp_path: Path) -> None:
    model = create(name).eval()
    folder = f"local-dir:{dmst.save_model(model, tmp_path / 'saved')}"
    five = timm.create_model(folder, pretrained=True, num_classes=5).eval()
    x = images(model)
    assert torch.equal(five.forward_features(x), model.forward_features(x)) and five(x).shape == (2, 5)
    maps = timm.create_model(folder, pretrained=True, features_only=True, out_indices=(1,)).eval()(x)
    assert torch.equal(maps[0], model.forward_intermediates(x, [1], intermediates_only=True)[0])

    patch = model.config.patch_size
    for grid in ((4, 4), (2, 3)):  # more places; as many, but elsewhere
        resized = timm.create_model(folder, pretrained=True, img_size=(grid[0] * patch, grid[1] * patch)).eval()
        assert resized.config.grid == grid
        y = images(resized)
        torch.testing.assert_close(resized(y), model(y), atol=1e-5, rtol=1e-4)

    if model.config.stem == "norm_patch":  # no convolution: its norm has a weight a pixel
        with pytest.raises(RuntimeError, match=r"size mismatch for stem\.norm_in"):
            timm.create_model(folder, pretrained=True, in_chans=1)
    else:
        gray = timm.create_model(folder, pretrained=True, in_chans=1).eval()
        torch.testing.assert_close(gray(x[:, :1]), model(x[:, :1].expand(-1, 3, -1, -1)), atol=1e-5, rtol=1e-4)


def test_positions_of_a_size_that_the_file_does_not_state(tmp_path: Path) -> None:
    """timm's file keeps the input size of the name, whatever the model was made with: then a square is assumed."""
    options = SMALL | {"img_size": 48}
    model = timm.create_model("crate_tiny_patch16_224", **options).eval()
    timm.models.save_for_hf(model, tmp_path, model_args=options, safe_serialization=True)
    assert json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]["input_size"] == [3, 224, 224]
    resized = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=(64, 32)).eval()
    x = images(resized)
    torch.testing.assert_close(resized(x), model(x), atol=1e-5, rtol=1e-4)


@one_of_each
def test_weights_of_other_channels_are_loaded_as_they_are(name: str, tmp_path: Path) -> None:
    """timm takes the first layer of any file for one of three channels, and starts it anew where it cannot be."""
    model = create(name, in_chans=4)
    folder = dmst.save_model(model, tmp_path / "saved")
    same(model, timm.create_model(f"local-dir:{folder}", pretrained=True))


def test_what_the_training_script_passes(tmp_path: Path) -> None:
    """Its defaults, of which timm drops what is None; then --pretrained-path and --initial-checkpoint."""
    name, common = "dmst_digits", {"in_chans": 1, "drop_rate": 0.0, "scriptable": False, "cache_dir": tmp_path}
    unset = dict.fromkeys(("num_classes", "drop_path_rate", "drop_block_rate", "global_pool", "bn_momentum", "bn_eps"))
    model = timm.create_model(name, pretrained=False, checkpoint_path="", **common, **unset)
    assert model.config == model_config(name)
    file = dmst.save_model(model, tmp_path / "saved") / "model.safetensors"
    same(model, timm.create_model(name, checkpoint_path=str(file), **common, **unset))
    overlay = {"file": str(file), "num_classes": -1}
    tuned = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **common, **unset)
    assert torch.equal(tuned.blocks[0].norm.weight, model.blocks[0].norm.weight)
    same(model.blocks, tuned.blocks)
    same(model.stem, tuned.stem)


# --- scripts of timm -------------------------------------------------------------------------------------------------

# what timm's validate.py does, with a module beside it and a class of its own that is pickled
SCRIPT = """
import argparse, copy, pickle, sys
import beside, timm, timm.data, torch

class Seen:
    pass

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    args = parser.parse_args()
    model = timm.create_model(args.model, pretrained=True).eval()
    data = timm.data.resolve_data_config(vars(args), model=model)
    assert type(pickle.loads(pickle.dumps(Seen()))) is Seen
    import dmst.integrations.timm  # once more: no name is registered twice
    with torch.no_grad():
        print(beside.WORD, sys.argv, data["input_size"], tuple(model(torch.zeros(2, *data["input_size"])).shape))
    sys.exit(7)
"""


def run_script(*arguments: str, strict: bool = True) -> forked.Done:
    """With torchvision of any build (benchmarks/with_timm.py)."""
    return forked.python("-m", "benchmarks.with_timm", "dmst.integrations.timm", *arguments, root=ROOT, strict=strict)


@pytest.mark.process
def test_a_script_of_timm_finds_the_models(tmp_path: Path) -> None:
    script = tmp_path / "validate.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    done = run_script(str(script), "--model", "dmst_digits")
    assert done.returncode == 7, done.stderr  # the script's own
    assert done.stdout == f"found {[str(script), '--model', 'dmst_digits']} (1, 8, 8) (2, 10)\n"


@pytest.mark.process
def test_the_training_script_trains_a_network(tmp_path: Path) -> None:
    """timm's own train.py, on photos of two classes; its validate.py finds in the checkpoint what was trained."""
    scripts = Path(os.environ.get("TIMM_SCRIPTS", "none"))
    if not (scripts / "train.py").is_file():
        pytest.skip("TIMM_SCRIPTS names no folder with timm's train.py and validate.py: the wheel has none, a clone does")
    for part in ("train", "validation"):
        for name in ("cat", "coffee"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            with Image.open(photos.photo(name)) as whole:
                for i in range(8):
                    whole.crop((20 * i, 10 * i, 20 * i + 160, 10 * i + 160)).save(tmp_path / f"photos/{part}/{name}/{i}.jpg")
    asked = ["--data-dir", f"{tmp_path}/photos", "--model", "dmst_cifar10", "--num-classes", "2", "--device", "cpu"]
    asked += ["--batch-size", "8", "--workers", "0"]
    how = ["--pretrained", "--opt", "adamw", "--lr", "2e-3", "--epochs", "6", "--warmup-epochs", "0", "--output", str(tmp_path)]
    done = run_script(f"{scripts}/train.py", *asked, *how, "--experiment", "run", strict=False)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "run/summary.csv").open() as file:
        epochs = list(csv.DictReader(file))
    assert len(epochs) == 6 and float(epochs[-1]["eval_loss"]) < 0.3 < 0.5 < float(epochs[0]["train_loss"])
    where = ["--split", "validation", "--checkpoint", f"{tmp_path}/run/last.pth.tar", "--results-file", f"{tmp_path}/found.csv"]
    done = run_script(f"{scripts}/validate.py", *asked, *where, strict=False)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "found.csv").open() as file:
        (found,) = csv.DictReader(file)
    assert float(found["top1"]) == float(epochs[-1]["eval_top1"]) == 100


def test_no_script_is_one_line() -> None:
    for arguments in ([], ["no_such.py", "-h"]):
        done = run_script(*arguments)
        said = "Name a script of timm, such as its validate.py: python -m dmst.integrations.timm SCRIPT [ARGUMENTS]\n"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


# --- oracles ---------------------------------------------------------------------------------------------------------

RENAMED = [
    (r"^patch_embed\.proj\.", "stem.projection."),
    (r"^pos_embed$", "position.table"),
    (r"^(blocks\.\d+)\.norm1\.", r"\1.norm."),
    (r"^(blocks\.\d+)\.attn\.qkv\.", r"\1.operator.qkv."),
    (r"^(blocks\.\d+)\.attn\.proj\.", r"\1.operator.out."),
    (r"^(blocks\.\d+)\.norm2\.", r"\1.feedforward.norm."),
    (r"^(blocks\.\d+)\.mlp\.", r"\1.feedforward.mlp."),
]


def our_name(key: str) -> str:
    for pattern, ours in RENAMED:
        key = re.sub(pattern, ours, key)
    return key


def stir(model: nn.Module) -> None:
    """No parameter stays at 0 or 1, where a misplaced one would not be seen."""
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x), alpha=0.05)


@pytest.mark.parametrize("size", [(224, 224), (160, 96)], ids=str)
def test_vit_is_the_vit_of_timm(size: tuple[int, int]) -> None:
    """The other size resizes the positions, on both sides."""
    theirs = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True).eval()
    stir(theirs)
    ours = timm.create_model("dmst_vit_tiny_patch16_224").eval()
    weights = {our_name(key): x.squeeze(0) if key == "pos_embed" else x for key, x in theirs.state_dict().items()}
    ours.load_state_dict(weights, strict=True)
    x = torch.randn(1, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.forward_features(x), theirs.forward_features(x), rtol=1e-5, atol=1e-5)


def test_the_class_attention_block_is_that_of_xcit() -> None:
    xcit = importlib.import_module("timm.models.xcit")
    theirs = xcit.ClassAttentionBlock(
        48, 4, qkv_bias=True, eta=1.0, tokens_norm=True, norm_layer=lambda d, **kw: nn.LayerNorm(d, 1e-6, **kw)
    )
    theirs.double().eval()
    stir(theirs)
    ours = ClassAttentionBlock(ModelConfig(dim=48, num_heads=4), dtype=torch.float64).eval()
    weights = theirs.state_dict()
    for kind in ("weight", "bias"):
        weights[f"qkv.{kind}"] = torch.cat([weights.pop(f"attn.{part}.{kind}") for part in "qkv"])
        weights[f"out.{kind}"] = weights.pop(f"attn.proj.{kind}")
    weights["attention_residual.scale"], weights["residual.scale"] = weights.pop("gamma1"), weights.pop("gamma2")
    ours.load_state_dict(weights, strict=True)
    x = torch.randn(2, 7, 48, dtype=torch.float64)
    torch.testing.assert_close(torch.cat(ours(x[:, :1], x[:, 1:]), 1), theirs(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("grid", [(14, 14), (3, 8)], ids=str)
def test_fourier_positions_are_those_of_xcit(grid: tuple[int, int]) -> None:
    xcit = importlib.import_module("timm.models.xcit")
    theirs, ours = xcit.PositionalEncodingFourier(dim=48), FourierPosition(ModelConfig(dim=48))
    ours.projection.load_state_dict(theirs.token_projection.state_dict())
    found = ours(torch.zeros(1, grid[0] * grid[1], 48), grid)
    torch.testing.assert_close(found, theirs(1, *grid).flatten(2).mT, rtol=1e-5, atol=1e-6)
