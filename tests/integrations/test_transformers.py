"""Our networks in transformers, which has a wrapper for timm's: the code of docs/ecosystem.md, and equal answers.

Skipped, with the reason, where transformers or timm is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import dmst
from dmst import photos
from dmst.engine.classify import classify
from dmst.models import VisionModel, load_model, save_model
from tests.models.test_hub import Home
from tests.timm_here import timm

assert timm
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
ROOT = Path(dmst.__file__).parents[1]
SECTION = (ROOT / "docs/ecosystem.md").read_text().partition("## Networks in transformers")[2]
USE, BACK = (block.partition("```")[0] for block in SECTION.split("```py\n")[1:])


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


def pipeline(folder: Path) -> Any:
    return transformers.pipeline("image-classification", model=str(folder))


def answers_alike(model: VisionModel, pipe: Any, names: Any = photos.PHOTOS) -> None:
    """`dmst classify` and the pipeline, on photographs: the same pixels to the bit, the same classes and shares."""
    for name in names:
        (ours,) = classify(model, [photos.photo(name)])
        with Image.open(photos.photo(name)) as photo:
            assert torch.equal(pipe.image_processor(photo)["pixel_values"], ours.image), name
        theirs = pipe(str(photos.photo(name)), top_k=len(ours.top))
        for (label, share), row in zip(ours.top, theirs, strict=True):
            assert row["label"] == label and row["score"] == pytest.approx(share, abs=1e-6), name


def test_a_pipeline_answers_as_classify_does(tmp_path: Path) -> None:
    model = dmst.create_model("dmst_cifar100", pretrained=True)
    pipe = pipeline(save_model(model, tmp_path / "saved"))
    assert type(pipe.model.timm_model) is VisionModel and pipe.model.config.id2label == dict(enumerate(model.class_names))
    answers_alike(model, pipe)


def test_a_tuned_network_of_another_size_with_its_own_mean(tmp_path: Path) -> None:
    """Everything that a user can have changed: classes, names, operator and options, image size, crop, mean."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"depth": 2, "dim": 48, "num_heads": 2, "num_classes": 3, "operator": "dmsa", "mode": "equation"}
    model = dmst.create_model("tost_tiny", **options, global_pool="avg").eval()
    torch.nn.init.normal_(model.head.weight)  # a fresh one says nearly the same of every class
    model.class_names = ("one", "two", "three")
    model.pretrained_cfg.update(mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7])
    assert model.pretrained_cfg["crop_pct"] == 0.875
    answers_alike(model, pipeline(save_model(model, tmp_path / "saved")))


def test_the_code_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline; then other classes, trained there and saved as ours."""
    monkeypatch.chdir(tmp_path)
    seen: dict[str, Any] = {}
    exec(USE, seen)
    assert seen["answers"][0]["label"] == "cat" and seen["answers"][0]["score"] > 0.9
    exec(BACK, seen)
    again, images = load_model(tmp_path / "tuned"), torch.randn(2, 3, 32, 32)
    assert again.class_names == ("day", "night")
    with torch.no_grad():
        assert torch.equal(again(images), seen["wrapped"].eval()(images).logits)
    first = seen["model"].state_dict()["blocks.0.norm.weight"]
    assert not torch.equal(again.blocks[0].norm.weight, first)  # it did learn


def test_what_each_layer_gives(tmp_path: Path) -> None:
    model = dmst.create_model("vit_cifar10", pretrained=True)
    wrapped = transformers.AutoModel.from_pretrained(save_model(model, tmp_path / "saved"))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        found = wrapped(images, output_hidden_states=True)
        tokens, maps = model.forward_intermediates(images)
        assert torch.equal(found.last_hidden_state, tokens)
        assert torch.equal(found.pooler_output, model.forward_head(tokens, pre_logits=True))
    assert len(found.hidden_states) == len(maps) == 9 and all(map(torch.equal, found.hidden_states, maps))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.hub.shutdown()
    made.hub.server_close()


@pytest.mark.process
def test_by_its_address_on_the_hub(home: Home) -> None:
    home.python(
        """
from benchmarks.with_timm import import_timm
import_timm()
import dmst.integrations.timm
from dmst.photos import photo
from transformers import pipeline
model = dmst.create_model("dmst_cifar10", pretrained=True)
commit = dmst.push_to_hub(model, "me/cifar").partition("@")[2]
torch.nn.init.zeros_(model.head.weight)
dmst.push_to_hub(model, "me/cifar")
first = pipeline("image-classification", model="me/cifar", revision=commit)(str(photo("cat")))[0]
newest = pipeline("image-classification", model="me/cifar")(str(photo("cat")))[0]
assert (first["label"], round(first["score"], 3)) == ("cat", 0.942), first
assert newest["score"] < 0.2, newest
""",
        HF_HUB_OFFLINE="0",
    )
