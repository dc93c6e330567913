"""Networks on the hub: pushed, loaded at a commit, offline, damaged, absent; against a server on this machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dmst
from dmst import create_model, load_model, photos
from dmst.errors import MissingExtraError, OptionError
from dmst.models import VisionModel, hub
from tests.hub_server import Hub

ROOT = Path(dmst.__file__).parents[1]
BEGIN = """
import sys, torch, dmst
model, images = dmst.create_model("dmst_digits", pretrained=True), torch.linspace(-1, 1, 128).view(2, 1, 8, 8)
"""


class Home:
    """A user's machine: its cache, and the hub that it asks."""

    def __init__(self, folder: Path) -> None:
        self.hub, self.folder, self.address = Hub(), folder, ""

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        given = {"HF_ENDPOINT": self.hub.address, "HF_HOME": str(self.folder / "cache"), "HF_TOKEN": "hf_mine"}
        known = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        known |= {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", **given, **env}
        command = [sys.executable, *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=self.folder, env=known, timeout=100)

    def python(self, code: str, **env: str) -> str:
        done = self.run("-c", BEGIN + code, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("home"))
    made.address = made.python('print(dmst.push_to_hub(model, "me/digits"))')
    yield made
    made.hub.shutdown()
    made.hub.server_close()


@pytest.mark.process
def test_what_is_pushed_is_loaded(home: Home) -> None:
    files = home.hub.files("me/digits", "main")[1]
    assert {"model.safetensors", "config.json", "README.md"} <= files.keys()
    card = files["README.md"].decode()
    assert "library_name: dmst" in card and 'dmst.load_model("hf://me/digits")' in card and "(0, 1, 2" in card
    home.python(
        'for other in (dmst.load_model("hf://me/digits"), dmst.VisionModel.from_pretrained("me/digits")):\n'
        "    assert torch.equal(other(images), model(images)) and other.class_names == model.class_names"
    )


@pytest.mark.process
def test_an_address_names_a_commit(home: Home) -> None:
    """What is pushed later changes nothing of it; a branch is an address too."""
    code = """
first = dmst.push_to_hub(model, "me/moving")
torch.nn.init.zeros_(model.head.weight)
second = model.push_to_hub("me/moving", commit_message="zeros", branch="next")
third = model.save_pretrained("saved", push_to_hub=True, repo_id="me/moving", branch="next")
assert first.startswith("hf://me/moving@") and len({first, second, third}) == 3
places = first, second, third, "hf://me/moving", "hf://me/moving@next"
zero = [dmst.load_model(where).head.weight.abs().sum() == 0 for where in places]
assert zero == [False, True, True, False, True], zero
dmst.push_to_hub(model, "me/moving@next", card="# Mine")
dmst.push_to_hub(model, "me/moving@next")  # the card of its owner stays
again = dmst.VisionModel.from_pretrained("me/moving", revision="next")
assert torch.equal(again(images), dmst.VisionModel.from_pretrained("saved")(images))
"""
    home.python(code)
    assert home.hub.files("me/moving", "next")[1]["README.md"] == b"# Mine"
    assert b"dmst.load_model" in home.hub.files("me/moving", "main")[1]["README.md"]


@pytest.mark.process
def test_a_photo_is_classified_by_weights_on_the_hub(home: Home) -> None:
    photo = str(photos.photo("cat"))
    right, found = (home.run("-m", "dmst", "classify", photo, "--weights", w) for w in ("dmst_digits", home.address))
    assert found.returncode == 0 and found.stdout == right.stdout, found.stderr


@pytest.mark.process
def test_offline(home: Home) -> None:
    """What is in the cache loads. What is not is one line, and so is a hub that does not answer."""
    home.python('dmst.load_model("hf://me/digits")')
    for env in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        home.python('assert torch.equal(dmst.load_model("hf://me/digits")(images), model(images))', **env)
        said = home.run("-m", "dmst", "classify", str(photos.photo("cat")), "--weights", "hf://me/other", **env)
        assert said.returncode == 1 and len(said.stderr.splitlines()) == 1, said.stderr
        assert "hf://me/other is not in the cache, and the hub cannot be reached" in said.stderr
    said = home.run("-c", BEGIN + 'dmst.push_to_hub(model, "me/x")', HF_ENDPOINT="http://127.0.0.1:9")
    assert "dmst.errors.FetchError: hf://me/x: the hub cannot be reached" in said.stderr


@pytest.mark.process
def test_what_is_not_there_and_what_is_damaged(home: Home) -> None:
    files = dict(home.hub.files("me/digits", "main")[1])
    weights = bytearray(files["model.safetensors"])
    weights[-5] ^= 1
    home.hub.commit("me/damaged", files | {"model.safetensors": bytes(weights)})
    home.hub.commit("me/empty", {"README.md": b"nothing"})
    for address, told in (
        ("hf://me/none", "is not on the hub, or is private"),
        ("hf://me/digits@nope", "no such revision"),
        ("hf://me/damaged", "sha256"),
        ("hf://me/empty", "hf://me/empty has no config.json"),
    ):
        said = home.run("-m", "dmst", "classify", str(photos.photo("cat")), "--weights", address)
        assert said.returncode == 1 and told in said.stderr.splitlines()[-1], (address, said.stderr)


@pytest.mark.process
def test_timm_both_ways(home: Home) -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    home.python(
        """
from benchmarks.with_timm import import_timm
timm = import_timm()
import dmst.integrations.timm
theirs = timm.create_model("hf-hub:me/digits", pretrained=True).eval()
assert torch.equal(theirs(images), model(images))
timm.models.push_to_hf_hub(timm.create_model("dmst_digits", pretrained=True), "me/timm", safe_serialization=True)
assert torch.equal(dmst.VisionModel.from_pretrained("me/timm", unverified=True)(images), model(images))
""",
        HF_HUB_OFFLINE="0",  # which import_timm would set
    )


@pytest.mark.process
def test_the_code_of_the_page(home: Home) -> None:
    """That of docs/ecosystem.md, where the hub has a revision v1.0."""
    (code, *_) = (
        (ROOT / "docs/ecosystem.md").read_text().partition("on the Hugging Face Hub\n")[2].split("```py\n")[1].split("```")
    )
    before = 'dmst.save_model(model, "runs/photos")\ndmst.push_to_hub(model, "me/photos", branch="v1.0")\n'
    home.python(f'{before}{code}assert model.class_names == tuple("0123456789") and address.startswith("hf://me/photos@")')


@pytest.mark.process
def test_torch_hub_from_a_clone(home: Home) -> None:
    home.python(
        f'found = torch.hub.load({str(ROOT)!r}, "dmst_digits", source="local")\n'
        "assert torch.equal(found(images), model(images))\n"
        f'assert torch.hub.load({str(ROOT)!r}, "create_model", "dmst_cifar", source="local", depth=1).config.depth == 1'
    )


@pytest.mark.parametrize("address", ["digits", "me/digits@", "me/../digits", "a/b/c", "", "me/x y"])
def test_wrong_addresses(address: str) -> None:
    with pytest.raises(OptionError, match="is no address on the hub: write hf://owner/name"):
        load_model(f"hf://{address}")


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    model = create_model("dmst_digits", pretrained=True)
    assert model.save_pretrained(tmp_path / "m") is None
    assert model.save_pretrained(tmp_path / "m") is None  # over what was saved there
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(VisionModel.from_pretrained(tmp_path / "m")(images), model(images))
    with pytest.raises(OptionError, match="is a folder: revision are for networks on the hub"):
        VisionModel.from_pretrained(tmp_path / "m", revision="main")
    with pytest.raises(OptionError, match="give repo_id"):
        model.save_pretrained(tmp_path / "n", push_to_hub=True)
    assert not (tmp_path / "n").exists()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dmst\[hub\]'"):
        hub.download("hf://me/digits")
