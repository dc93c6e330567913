"""`dmst export`: a file computes what the network does, at every batch and, where it can, at every size; others are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import dmst
from dmst import cli, create_model, export_model, photos, save_model
from dmst.errors import BadFileError, MissingExtraError, OptionError, ShapeError
from dmst.export import files
from dmst.export.onnx_network import quantize, read_onnx, run_onnx
from tests import networks
from tests.cases import FEW

pytestmark = pytest.mark.compile
SIZES = (1, 32, 48), (3, 32, 48), (2, 48, 32), (1, 64, 80)  # batch, height, width


def invoke(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped network of digits, exported by the command."""
    file = tmp_path_factory.mktemp("export") / "digits.onnx"
    said = invoke("export", "dmst_digits", "--out", str(file))
    assert said.exit_code == 0, said.output
    assert "ONNX opset 20" in said.output and "any height and width in steps of 1" in said.output
    return file


@networks.every
def test_onnx_is_the_network(case: networks.Case, tmp_path: Path) -> None:
    model = networks.build(case, dtype=torch.float32, depth=1, readout_depth=1).eval()
    made = export_model(model, tmp_path / "model.onnx")
    assert made.difference < 1e-5 and made.outputs == ["logits"]
    network, told = read_onnx(made.path), 0
    for b, *sides in SIZES:
        images = torch.randn(b, 3, *sides)
        if made.free_size or tuple(sides) == made.size:
            assert (network(images) - model(images)).abs().max() < 1e-4
            told += 1
        else:
            with pytest.raises(ShapeError, match="takes images"):
                network(images)
    assert told == 4 or (told == 2 and case[1].get("groups"))


def test_a_file_refuses_sizes_that_it_gets_wrong(digits: Path) -> None:
    """Parts of patches, which the graph would cut off, and single patches, which torch's exporter takes for a constant."""
    network = read_onnx(digits)
    assert network(torch.randn(2, 1, 8, 12)).shape == (2, 10)
    network.config.patch_size = 4
    for size in ((8, 10), (4, 12), (12, 4)):
        with pytest.raises(ShapeError, match="two or more patches of 4 pixels"):
            network(torch.randn(1, 1, *size))


def test_a_graph_of_one_shape_says_so(tmp_path: Path) -> None:
    """GMSA's cells follow the shape of the grid: 2 x 2 of a square, 1 x 4 of a wide one."""
    model = networks.build(("gmst_tiny", FEW["gmsa"]), dtype=torch.float32, depth=1).eval()
    made = export_model(model, tmp_path / "model.onnx", size=64)
    assert not made.free_size and made.size == (64, 64)
    images = torch.randn(2, 3, 64, 64)
    assert (read_onnx(made.path)(images) - model(images)).abs().max() < 1e-4


def test_who_listens_to_a_step_is_heard_in_the_file(tmp_path: Path) -> None:
    model = networks.build(("dmst_tiny", {}), dtype=torch.float32, depth=1).eval()
    model.blocks[0].feedforward.mlp.fc2.register_forward_hook(lambda module, args, out: 2 * out)
    model.blocks[0].operator.register_forward_hook(lambda module, args, out: out + 1)
    images = torch.randn(2, 3, 32, 48)
    network = read_onnx(export_model(model, tmp_path / "model.onnx").path)
    assert (network(images) - model(images)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: torch.nn.DataParallel(model), "DataParallel is no network"),
        (lambda model: model.to("meta"), "has no weights"),
        (lambda model: model.head.weight.data.fill_(torch.nan) is None or model, "head.weight holds NaN"),
    ],
)
def test_what_is_no_network_to_export(change: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=told):
        export_model(change(create_model("dmst_digits")), tmp_path / "model.onnx")
    with pytest.raises(OptionError, match="must be a multiple of"):
        export_model(create_model("dmst_digits"), tmp_path / "model.onnx", size=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["dmst_tiny", "gmst_tiny"])
def test_memberships_are_further_outputs(name: str, tmp_path: Path) -> None:
    model = networks.build((name, FEW["gmsa"] if name == "gmst_tiny" else {}), dtype=torch.float32, depth=2).eval()
    made = export_model(model, tmp_path / "model.onnx", maps=True)
    assert made.outputs == ["logits", "membership_0", "membership_1"]
    images = torch.randn(3, 3, *made.size)
    logits, *found = run_onnx(made.path.read_bytes())(images)
    with torch.no_grad():
        trace = model.trace(images)
    assert (logits - trace.logits).abs().max() < 1e-4
    for x, layer in zip(found, trace.layers, strict=True):
        assert x.shape == layer.parts.membership.shape and (x - layer.parts.membership).abs().max() < 1e-5


def test_photos_are_classified_by_the_file(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers, and no layer of torch is called."""
    words = [str(photos.photo(name)) for name in ("cat", "coffee")]
    right = invoke("classify", *words, "--weights", "dmst_digits", "--json")

    def computed(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("torch was asked to compute")

    for name in ("linear", "conv2d", "layer_norm"):
        monkeypatch.setattr(torch.nn.functional, name, computed)
    found = invoke("classify", *words, "--weights", str(digits), "--json")
    assert found.exit_code == 0, found.output
    for mine, theirs in zip(found.output.splitlines(), right.output.splitlines(), strict=True):
        a, b = json.loads(mine)["top"], json.loads(theirs)["top"]
        assert [each["class"] for each in a] == [each["class"] for each in b]
        assert [each["probability"] for each in a] == pytest.approx([each["probability"] for each in b], abs=1e-4)


def test_the_file_is_evaluated_like_the_network(digits: Path) -> None:
    scores = [json.loads(invoke("evaluate", w, "--data", "digits", "--json").output) for w in (str(digits), "dmst_digits")]
    assert scores[0]["right"] == scores[1]["right"] and scores[0]["images"] == 359


@pytest.mark.parametrize("how", ["dynamic", "static"])
def test_eight_bits_and_what_they_cost(how: str, digits: Path, tmp_path: Path) -> None:
    out = tmp_path / "int8.onnx"
    said = invoke("export", "dmst_digits", "--out", str(out), "--int8", how, "--data", "digits")
    assert (
        said.exit_code == 0 and f"int8 ({how}) on digits test: top-1 9" in said.output and "in float32 top-1 9" in said.output
    )
    assert out.stat().st_size < 0.5 * digits.stat().st_size
    assert json.loads(invoke("evaluate", str(out), "--data", "digits", "--json").output)["top1"] > 0.97


def test_an_exported_program_of_torch(tmp_path: Path) -> None:
    model = create_model("dmst_digits", pretrained=True)
    made = export_model(model, tmp_path / "model.pt2", format="torch")
    note = {files.NOTE: ""}
    program = torch.export.load(made.path, extra_files=note)
    images = torch.randn(3, 1, 12, 8)
    torch.testing.assert_close(program.module()(images)[0], model(images), atol=1e-5, rtol=1e-5)
    told = {key: json.loads(value) for key, value in json.loads(note[files.NOTE]).items()}
    assert told["class_names"] == list(model.class_names) and told["mean"] == model.pretrained_cfg["mean"]


def test_compiled_ahead_of_time(tmp_path: Path) -> None:
    """The file is used by a process that knows nothing of dmst."""
    model = create_model("dmst_digits", pretrained=True)
    made = export_model(model, tmp_path / "model.pt2", format="aoti")
    code = (
        "import sys, torch; from torch._inductor import aoti_load_package as load;"
        "print(load(sys.argv[1])(torch.full((2, 1, 8, 8), 0.5))[0].tolist()); assert 'dmst' not in sys.modules"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(made.path)], capture_output=True, text=True, cwd=tmp_path, timeout=100
    )
    assert said.returncode == 0, said.stderr
    torch.testing.assert_close(torch.tensor(json.loads(said.stdout)), model(torch.full((2, 1, 8, 8), 0.5)), atol=1e-4, rtol=0)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_file_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = files.WRITERS["torch"]

    def off(graph: Any, note: Any) -> Any:
        data, run, version = write(graph, note)
        return data, lambda images: tuple(x + 2e-4 for x in run(images)), version

    monkeypatch.setitem(files.WRITERS, "torch", off)
    with pytest.raises(OptionError, match=r"differ by 2\.0e-04 .* Nothing was written"):
        export_model(create_model("dmst_digits", pretrained=True), tmp_path / "model.pt2", format="torch")
    assert not list(tmp_path.iterdir())


class Undecided(dmst.DMSA):
    def forward(self, z: Tensor, **options: Any) -> Tensor:
        return super().forward(z, **options) if z.sum() > 0 else z


def test_an_operator_that_branches_on_values(tmp_path: Path) -> None:
    model = networks.build(("dmst_tiny", {}), dtype=torch.float32, depth=1)
    model.blocks[0].operator.__class__ = Undecided
    with pytest.raises(OptionError, match=r"with operator 'dmsa' cannot be exported .* must not branch on the values"):
        export_model(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["dmst_digits", "--out", "model.pt2"], "model.pt2 must end in .onnx"),
        (["dmst_digits", "--out", "there.onnx"], "there.onnx exists: choose another file"),
        (["dmst_digits", "--out", "model.onnx", "--format", "tflite"], "unknown format 'tflite'"),
        (["dmst_cifar10", "--out", "model.onnx", "--size", "30"], "size is 30: it must be a multiple of 4"),
        (["dmst_digits", "--out", "model.onnx", "--int8", "dynamic"], "--int8 is for --format onnx, and needs --data"),
        (["dmst_digits", "--out", "model.onnx", "--data", "digits"], "--data is for --int8"),
        (["vit_cifar10", "--out", "model.onnx", "--with", "maps"], "operator 'mhsa', which has no memberships"),
        (["there.onnx", "--out", "model.onnx"], "there.onnx is an ONNX file"),
    ],
    ids=lambda x: " ".join(x[2:]) if isinstance(x, list) else "",
)
def test_what_is_wrong_is_said(words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.onnx").write_bytes(b"mine")
    said = invoke("export", *words)
    assert said.exit_code == 1 and told in str(said.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["there.onnx"] and Path("there.onnx").read_bytes() == b"mine"


def test_a_network_without_a_classifier(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no classifier"):
        export_model(create_model("dmst_tiny", depth=1, num_classes=0), tmp_path / "model.onnx")


def test_files_that_are_not_ours(digits: Path, tmp_path: Path) -> None:
    from onnx import load, save

    cut, foreign = tmp_path / "cut.onnx", tmp_path / "foreign.onnx"
    cut.write_bytes(digits.read_bytes()[:1000])
    proto = load(digits)
    del proto.metadata_props[:]
    save(proto, foreign)
    for file, told in (
        (cut, "is not an ONNX file"),
        (foreign, "was not written by `dmst export`"),
        (tmp_path / "no.onnx", "No such"),
    ):
        with pytest.raises(BadFileError, match=told):
            read_onnx(file)
    network = read_onnx(digits)
    with pytest.raises(OptionError, match="no layers to look into"):
        network.trace(torch.zeros(1, 1, 8, 8))
    with pytest.raises(OptionError, match="'full'"):
        quantize(digits, "full")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dmst\[export\]'"):
        export_model(create_model("dmst_digits", pretrained=True), tmp_path / "model.onnx")


def test_a_saved_network_of_ones_own(tmp_path: Path) -> None:
    """Class names, mean and std go with it."""
    model = create_model("dmst_cifar", dim=24, depth=1, num_heads=3, num_classes=2)
    model.class_names, model.pretrained_cfg["mean"] = ("left", "right"), [0.1, 0.2, 0.3]
    save_model(model, tmp_path / "mine")
    said = invoke("export", str(tmp_path / "mine"), "--out", str(tmp_path / "mine.onnx"))
    assert said.exit_code == 0, said.output
    network = read_onnx(tmp_path / "mine.onnx")
    assert network.class_names == ("left", "right") and network.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]
    assert "left" in invoke("classify", str(photos.photo("cat")), "--weights", str(tmp_path / "mine.onnx")).output
