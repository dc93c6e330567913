"""Certificates: a bound that is never broken and is sharp, the numbers of the trace, and what a person is told of them."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from dmst import cli, create_model, objective
from dmst.analysis import certificates
from dmst.analysis.certificates import QUANTITIES, Certificate, ascending, certificate_of, certify, descent, rate_by_head
from dmst.cli.analyze.certify import COLUMNS
from dmst.engine.train_loop import train
from dmst.errors import OptionError, Stopped, UnknownNameError
from dmst.kernels import Form, reference
from dmst.models import VisionModel, load_model
from dmst.sparsemax import sparsemax
from tests.runs import on_pictures, pictures

F64 = torch.float64
ROOT = Path(__file__).resolve().parent.parent
SMALL = {"dim": 24, "depth": 3, "num_heads": 3, "img_size": 8}
IMAGES = torch.randn(7, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def model(name: str = "dmst_digits", seed: int = 0, **options: Any) -> VisionModel:
    torch.manual_seed(seed)
    network = create_model(name, **{**SMALL, **options}).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


def command(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(cli.app, ["analyze", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


# --- the bound -------------------------------------------------------------------------------------------------------


def test_the_bound_holds_for_any_step() -> None:
    """200 random steps, large and small, gates and none, any c: the change is at most the bound, in each head and in all."""
    descents = 0
    for trial in range(100):
        torch.manual_seed(trial)
        s, e = torch.randn(2, 3, 7, 5, dtype=F64), torch.randn(2, 3, 7, 5, dtype=F64) * 10 ** (trial % 4 - 2)
        pi = torch.rand(2, 3, 7, dtype=F64)
        gate = None if trial % 3 == 0 else sparsemax(torch.randn(2, 3, dtype=F64))
        c = 10.0 ** (trial % 5 - 1)
        found = certificate_of(s, e, pi, gate, c=c)
        assert (found["frozen"] <= found["bound"] + 1e-12).all()
        for t in (0.3, 4.0):
            then = certificate_of(s, t * e, pi, gate, c=c)
            assert torch.allclose(then["bound"], t * found["lin"] + t**2 * found["quad"] / 2)
            assert (then["frozen"] <= then["bound"] + 1e-12).all()
        lin, quad = found["lin"].sum(-1), found["quad"].sum(-1)
        falls = lin < -1e-6
        descents += int(falls.sum())
        longest = torch.where(falls, -2 * lin / quad, 0).view(2, 1, 1, 1)
        for share in (1e-3, 0.5, 0.999):
            assert (certificate_of(s, share * longest * e, pi, gate, c=c)["frozen"].sum(-1)[falls] < 0).all()
    assert descents > 40


def test_it_is_the_objective_and_its_gradient() -> None:
    """lin is the derivative of R_var along the step, the heads' rates add up to R_var, and c = k p / eps^2."""
    s, e = torch.randn(2, 3, 7, 5, dtype=F64), torch.randn(2, 3, 7, 5, dtype=F64)
    pi, gate = torch.rand(2, 3, 7, dtype=F64), torch.rand(2, 3, dtype=F64)
    found = certificate_of(s, e, pi, gate, c=15 / 0.25)
    at = torch.zeros((), dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(objective.variational_rate(s + at * e, pi, gate, eps=0.5).sum(), at)
    assert found["lin"].sum().item() == pytest.approx(slope.item(), rel=1e-10)
    before, after = (objective.variational_rate(x, pi, gate, eps=0.5) for x in (s, s + e))
    assert torch.allclose(found["rate"].sum(-1), before) and torch.allclose(found["frozen"].sum(-1), after - before)
    empty = certificate_of(s, e, torch.zeros_like(pi), gate)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in empty.values())


def test_the_interval_is_sharp() -> None:
    """Tokens so small that f is a line, along the steepest direction: 1.99/lmax descends and is certified, 2.01 climbs."""
    s = torch.zeros(1, 2, 3, 2, dtype=F64)
    s[0, 0, :, 0] = 1e-4
    pi, gate = torch.full((1, 2, 3), 0.8, dtype=F64), torch.tensor([[0.9, 0.1]], dtype=F64)
    steepest = 0.8 * 0.9**2  # lmax(A_n) = max g^2 pi f', f' = 1 to eight digits
    for theta, sign in ((1.99, -1), (2.01, 1)):
        curved = torch.tensor([0.8 * 0.9**2, 0.8 * 0.1**2], dtype=F64).view(1, 2, 1, 1)
        found = certificate_of(s, -theta / steepest * curved * s, pi, gate)
        assert math.copysign(1, found["frozen"].sum()) == math.copysign(1, found["bound"].sum()) == sign
        assert -2 * found["lin"].sum() / found["quad"].sum() == pytest.approx(2 / theta, rel=1e-6)


@pytest.mark.parametrize(
    ("membership", "gate", "alpha", "theta", "mode", "change"),
    [
        ((0.5, 0.5), (0.9, 0.1), -0.05, None, "listing", 0.083),
        ((0.5, 0.5), (0.9, 0.1), -0.05, None, "equation", -0.035),
        ((1.0, 0.01), (1.0, 1.0), -0.2, 100.0, "proximal", 1.61),
        ((1.0, 0.01), (1.0, 1.0), -0.2, None, "equation", -0.54),
    ],
)
def test_vector_scales_are_caught(membership: tuple, gate: tuple, alpha: float, theta: Any, mode: str, change: float) -> None:
    """The counter-examples of the theory: one token, LayerScale (1, 0). `equation` alone keeps its certificate."""
    u = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=F64) / math.sqrt(2)
    subspaces = u.unsqueeze(-1)  # (k, d, p)
    z = (0.01 * (alpha * u[0] + u[1])).view(1, 1, 2)
    pi, g = torch.tensor(membership, dtype=F64).view(1, 2, 1), torch.tensor(gate, dtype=F64).view(1, 2)
    projected = torch.einsum("bnd,kdp->bknp", z, subspaces)
    step = None if theta is None else torch.tensor(theta, dtype=F64)
    update = reference.token_statistics(projected, pi, g, step, form=Form(num_heads=2, mode=mode, delta=0.0))
    scaled = torch.tensor([1.0, 0.0], dtype=F64) * torch.einsum("bknp,kdp->bnd", update, subspaces)
    found = certificate_of(projected, torch.einsum("bnd,kdp->bknp", scaled, subspaces), pi, g)
    assert (found["frozen"].sum() / found["rate"].sum()).item() == pytest.approx(change, rel=0.02)
    assert (found["bound"].sum() < 0) == (change < 0) and found["frozen"].sum() <= found["bound"].sum() + 1e-15


# --- a network -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [None, 0.5])
def test_every_number_is_that_of_the_trace(eps: float | None) -> None:
    """Written out image by image, head by head, of what `model.trace` has; the step is what the block added."""
    network = model()
    found = certify(network, IMAGES, eps=eps)
    c = 1.0 if eps is None else 24 / eps**2
    assert (found.c, found.images, found.model) == (c, 7, "dmst_digits") and len(found.layers) == 3
    with torch.no_grad():
        trace = network.trace(IMAGES)
    for block, layer, told in zip(network.blocks, trace.layers, found.layers, strict=True):
        values = written_out(block, layer, trace.grid, c)
        for name in QUANTITIES:
            rows = [(told.total[name], values[name][:, -1])]
            rows += [(head[name], values[name][:, i]) for i, head in enumerate(told.heads)]
            for numbers, each in rows:
                assert numbers.mean == pytest.approx(each.mean().item(), rel=1e-5, abs=1e-7), name
                assert numbers.std == pytest.approx(each.std().item(), rel=1e-4, abs=1e-6), name
                assert numbers.below == pytest.approx((each < 0).double().mean().item()), name
        assert told.shortest == pytest.approx(values["longest"][:, -1].min().item(), rel=1e-6)
        assert told.descends == (values["frozen"][:, -1] < 0).double().mean().item()
        assert told.guaranteed == (values["bound"][:, -1] < 0).double().mean().item() <= told.descends
        assert told.raising == [i for i in range(3) if values["frozen"][:, i].mean() > 0]


@torch.no_grad()
def written_out(block: Any, layer: Any, grid: Any, c: float) -> dict[str, Tensor]:
    """Every quantity (b, k + 1) by loops."""

    def coordinates(tokens: Tensor) -> Tensor:
        flat = tokens.double() @ block.operator.subspace.weight.double().T + block.operator.subspace.bias.double()
        return flat.unflatten(-1, (3, 8)).transpose(1, 2)

    def rate(s: Tensor, pi: Tensor, g: Tensor, i: int, k: int) -> float:
        mass, n = pi[i, k].double().sum(), s.shape[2]
        moment = (pi[i, k].double()[:, None] * s[i, k] ** 2).sum(0) / mass
        return 0.5 * (mass / n * torch.log1p(c * g[i, k].double() ** 2 * moment).sum()).item()

    step = layer.after_operator.double() - layer.z.double()
    x, after = layer.normed.double(), block.norm(layer.after_operator)
    moved = (x + step).float()
    here, there, read = layer.parts, block.operator.decompose(moved, grid=grid), block.operator.decompose(after, grid=grid)
    s, e = coordinates(x), coordinates(x + step) - coordinates(x)
    b, k, n, _ = s.shape
    found = {name: torch.zeros(b, k + 1, dtype=F64) for name in QUANTITIES}
    for i in range(b):
        for h in range(k):
            pi, g2 = here.membership[i, h].double(), here.gate[i, h].double() ** 2
            moment = (pi[:, None] * s[i, h] ** 2).sum(0) / pi.sum()
            w = pi[:, None] * g2 * c / (1 + c * g2 * moment)
            lin, quad = (w * s[i, h] * e[i, h]).sum() / n, (w * e[i, h] ** 2).sum() / n
            before = rate(s, here.membership, here.gate, i, h)
            changes = {
                "rate": before, "lin": lin, "quad": quad, "bound": lin + quad / 2,
                "frozen": rate(s + e, here.membership, here.gate, i, h) - before,
                "anew": rate(coordinates(moved), there.membership, there.gate, i, h) - before,
                "normed": rate(coordinates(after), here.membership, here.gate, i, h) - before,
                "reread": rate(coordinates(after), read.membership, read.gate, i, h) - before,
            }  # fmt: skip
            for name, value in changes.items():
                found[name][i, h] = value
                found[name][i, k] += value
    lin, quad = found["lin"], found["quad"]
    found["longest"] = torch.where(lin < 0, -2 * lin / quad.clamp(min=1e-30), 0)
    return found


@torch.no_grad()
def test_the_step_is_the_one_that_is_applied() -> None:
    """A scale of 0 changes nothing; half of it halves lin and quarters quad."""
    network = model(depth=1)
    whole = certify(network, IMAGES).layers[0].total
    network.blocks[0].residual.scale.mul_(0.5)
    half = certify(network, IMAGES).layers[0].total
    assert half["lin"].mean == pytest.approx(whole["lin"].mean / 2, rel=1e-4)
    assert half["quad"].mean == pytest.approx(whole["quad"].mean / 4, rel=1e-4)
    network.blocks[0].residual.scale.zero_()
    still = certify(network, IMAGES)
    assert still.layers[0].total["frozen"].mean == still.layers[0].descends == still.layers[0].shortest == 0
    assert "Layer 0 does not change the rate" in still.sentences()[0]


def test_proximal_with_a_scalar_scale_descends_and_a_negative_one_climbs() -> None:
    """Whatever the weights, every layer, image and head; and the sentences say which it is."""
    for seed in range(3):
        network = model(seed=seed, mode="proximal")
        with torch.no_grad():
            for block, scale in zip(network.blocks, (0.3, 1.0, 1.9), strict=True):
                assert block.residual.scale.shape == (1,)
                block.residual.scale.fill_(scale)
        found = certify(network, IMAGES)
        for layer in found.layers:
            assert layer.descends == layer.guaranteed == 1.0 and layer.shortest > 1 and not layer.raising
            assert all(head["frozen"].mean <= 0 for head in layer.heads)
        told = found.sentences()
        assert all("lowers the rate" in line and "100% of the images (guaranteed on 100%). No head" in line for line in told)
        with torch.no_grad():
            network.blocks[1].residual.scale.fill_(-0.5)
        layer = certify(network, IMAGES).layers[1]
        assert layer.descends == layer.guaranteed == layer.shortest == 0.0 and layer.total["bound"].mean > 0
        assert "Layer 1 raises the rate by" in layer.sentence() and "falls on 0% of the images" in layer.sentence()
        assert "Every head raises it" in layer.sentence() or f"{layer.raising[-1]} raise" in layer.sentence()


def test_it_streams() -> None:
    """Batches of any size give the same numbers, with empty ones among them; the model is left as it was."""
    network = model().train()
    network.stem.eval()
    whole = certify(network, IMAGES)
    parts = certify(network, iter([(IMAGES[:3], "labels"), IMAGES[:0], IMAGES[3:4], IMAGES[4:]]))
    assert whole.images == parts.images == 7 and network.training and not network.stem.training
    for one, other in zip(whole.layers, parts.layers, strict=True):
        assert one.shortest == pytest.approx(other.shortest, rel=1e-4)
        for left, right in zip([one.total, *one.heads], [other.total, *other.heads], strict=True):
            for name in QUANTITIES:
                assert left[name].mean == pytest.approx(right[name].mean, rel=1e-4, abs=1e-6)
                assert left[name].std == pytest.approx(right[name].std, rel=1e-4, abs=1e-6)
                assert left[name].below == right[name].below
    with pytest.raises(OptionError, match="no images"):
        certify(network, [IMAGES[:0]])


def test_orthonormal_bases() -> None:
    """Each head's U by QR: the rate of the tokens on them; where they are orthonormal already (no bias), nothing changes."""
    network = model()
    found = certify(network, IMAGES, basis="orthonormal").layers[2]
    with torch.no_grad():
        layer = network.trace(IMAGES).layers[2]
        bases = torch.linalg.qr(network.blocks[2].operator.subspaces().double()).Q
    s = torch.einsum("bnd,kdp->bknp", layer.normed.double(), bases)
    rate = rate_by_head(s, layer.parts.membership, layer.parts.gate, c=1.0).sum(-1)
    assert found.total["rate"].mean == pytest.approx(rate.mean().item(), rel=1e-6)
    plain = model(mode="proximal", qkv_bias=False)
    raw, turned = (certify(plain, IMAGES, basis=basis).layers[0].total["frozen"].mean for basis in ("raw", "orthonormal"))
    assert raw == pytest.approx(turned, rel=1e-4)


@pytest.mark.parametrize("name", ["vit_digits", "crate_digits"])
def test_no_memberships_no_certificate(name: str) -> None:
    found = certify(model(name), IMAGES)
    assert found.layers == [None] * 3
    assert found.sentences() == [f"{name}: no rate to certify, its operator has no memberships."]
    assert Certificate.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_tost_has_one() -> None:
    found = certify(model("tost_digits"), IMAGES)
    assert all(math.isfinite(layer.total["reread"].mean) for layer in found.layers)
    assert all(layer.guaranteed <= layer.descends for layer in found.layers)


def test_json_there_and_back() -> None:
    found = certify(model(), IMAGES, eps=0.7)
    assert Certificate.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    broken = model()
    with torch.no_grad():
        broken.blocks[1].operator.out.weight.fill_(math.nan)
    told = certify(broken, IMAGES).to_dict()
    assert told["layers"][1]["total"]["frozen"]["mean"] is None and json.dumps(told, allow_nan=False)


def test_bad_input() -> None:
    for eps in (0.0, -1.0, math.nan):
        with pytest.raises(OptionError, match="eps"):
            certify(model(), IMAGES, eps=eps)
    with pytest.raises(UnknownNameError, match="orthonormal"):
        certify(model(), IMAGES, basis="ortho")


# --- the command -----------------------------------------------------------------------------------------------------


def test_every_column_has_a_line_in_the_legend() -> None:
    text = command("certify", "dmst_digits", "--limit", "5")
    head, *_ = (line.split() for line in text.splitlines() if line.split()[:1] == ["layer"])
    explained = [line for line in text.splitlines() if "  " in line.strip() and line.startswith(tuple(COLUMNS))]
    assert " ".join(head) == " ".join(["layer", *COLUMNS]) and [line.partition("  ")[0] for line in explained] == list(COLUMNS)
    assert all(len(line) <= 80 for line in explained)


def test_the_command() -> None:
    text = command("certify", "dmst_digits", "--limit", "20")
    assert "dmst_digits on digits test: 20 of 359 images by hash" in text and "c = d/eps² = 1 (eps = 5.65685), raw U" in text
    table = [line.split() for line in text.splitlines() if re.match(r"\s+\d ", line)]
    told = json.loads(command("certify", "dmst_digits", "--limit", "20", "--json", "--batch-size", "7"))
    assert (told["weights"], told["images"], told["data"]) == ("dmst_digits", 20, "digits test: 20 of 359 images by hash")
    found = Certificate.from_dict({key: value for key, value in told.items() if key not in ("weights", "data")})
    assert len(table) == len(found.layers) == 4 and all(line in text for line in found.sentences())
    for row, layer in zip(table, found.layers, strict=True):
        total = layer.total
        assert row[:4] == [
            str(layer.layer),
            f"{total['rate'].mean:.2f}",
            f"{total['frozen'].mean:+.2f}",
            f"{layer.descends:.0%}",
        ]
        assert row[4:7] == [f"{total['bound'].mean:+.2f}", f"{layer.guaranteed:.0%}", f"{total['longest'].mean:.2f}"]
        assert row[7:] == [f"{total[x].mean:+.2f}" for x in ("anew", "normed", "reread")]
    other = command("certify", "dmst_digits", "--limit", "5", "--eps", "0.5", "--orthonormal")
    assert "c = d/eps² = 128 (eps = 0.5), U orthonormal" in other


@pytest.mark.parametrize("verb", ["certify", "theorem"])
def test_the_page_quotes_the_command(verb: str) -> None:
    """Word for word, and every number within what another machine's rounding may change."""
    page = (ROOT / "docs/certificates.md").read_text()
    quoted = page.partition(f"$ dmst analyze {verb} dmst_digits\n")[2].partition("```")[0].split()
    printed = command(verb, "dmst_digits").split()
    number = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]\d+)?")
    assert len(quoted) > 50 and [number.sub("#", word) for word in quoted] == [number.sub("#", word) for word in printed]
    for one, other in zip(quoted, printed, strict=True):
        for left, right in zip(number.finditer(one), number.finditer(other), strict=True):
            apart = abs(float(left.group()) - float(right.group()))
            assert apart <= max(0.03 * abs(float(left.group())), 0.02 if "%" not in one else 1), (one, other)


# --- during training -------------------------------------------------------------------------------------------------


def test_the_probe() -> None:
    network = model(mode="equation")
    with torch.no_grad():
        for block in network.blocks:
            block.residual.scale.fill_(4.0)  # longer steps than the bound can vouch for on every image
    told, found = descent(network, IMAGES), certify(network, IMAGES)
    assert told["descends"] != told["guaranteed"]
    assert told["images"] == 7 and told["c"] == 1
    assert told["change"] == pytest.approx([layer.total["frozen"].mean for layer in found.layers], rel=1e-4)
    assert told["descends"] == [layer.descends for layer in found.layers]
    assert told["guaranteed"] == [layer.guaranteed for layer in found.layers]
    assert descent(model("vit_digits"), IMAGES)["descends"] == [None] * 3


def test_when_a_run_should_end() -> None:
    def events(*changes: list[float | None]) -> list[dict[str, Any]]:
        return [{"event": "evaluation", "certificate": {"change": each}} for each in changes]

    assert ascending([]) == ascending(events([1.0, 1.0])) == ascending([{"event": "evaluation"}] * 3) == ""
    assert ascending(events([1.0, -1.0], [-1.0, 1.0])) == ascending(events([None, 0.0], [None, 2.0])) == ""
    assert ascending(events([1.0, 1.0], [1.0, 1.0], [-1.0, -1.0])) == ""
    once = ascending(events([9.0, 9.0], [-1.0, 0.25], [1.0, 0.5]))
    assert once == "At 2 evaluations in a row, layer 1 (+0.25 and +0.5 nats) raises its own rate."
    assert "layer 0 (+1 and +2 nats), layer 1 (+1 and +3 nats) raise their own rates" in ascending(
        events([1.0, 1.0], [2.0, 3.0])
    )


def test_training_logs_it_and_can_be_ended_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ended after the second evaluation, saved; without the option the same folder goes on to the end."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    data, run = pictures(tmp_path / "shapes", each=8), tmp_path / "run"
    settings = [
        "model.name=dmst_cifar",
        "model.options.patch_size=2",
        "data.image_size=8",
        "model.options.dim=16",
        "data.limit=0",
    ]
    settings += [
        f"data.name={json.dumps(str(data))}",
        "model.options.depth=1",
        "model.options.num_heads=2",
        "run.batch_size=12",
    ]
    settings += ["schedule.epochs=4", "schedule.warmup_epochs=0.5", "run.eval_batch_size=12", "run.save_every=100"]

    def typed(*words: str) -> int:
        line = ["dmst", "train", "digits", "--out", str(run), "--device", "cpu", "--no-report", *words]
        monkeypatch.setattr(sys, "argv", line + [word for each in settings for word in ("--set", each)])
        try:
            cli.main()
        except SystemExit as leave:
            return int(leave.code or 0)
        return 0

    def journal() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]

    real = certificates.descent
    monkeypatch.setattr(certificates, "descent", lambda network, images: real(network, images) | {"change": [0.5]})
    assert typed("--stop-ascending") == 3
    told = capsys.readouterr()
    assert "layer 0 (+0.5 and +0.5 nats) raises its own rate. Stopped after step 4 of 8, which is saved." in told.err
    last = journal()[-1]
    assert last["event"] == "stopped" and last["reason"].startswith("At 2 evaluations") and not (run / "final").exists()
    assert (run / "checkpoints/step_00000004").is_dir()
    monkeypatch.setattr(certificates, "descent", real)
    assert typed("--certify") == 0, capsys.readouterr().err
    evaluations = [event for event in journal() if event["event"] == "evaluation"]
    assert [event["step"] for event in evaluations] == [2, 4, 6, 8] and load_model(run / "final")
    assert all(0 <= event["certificate"]["descends"][0] <= 1 for event in evaluations)
    settings.append('data.eval=""')
    assert typed("--certify") == 1 and "has none" in capsys.readouterr().err


def test_a_judge_is_not_asked_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    recipe = on_pictures(pictures(tmp_path / "shapes", each=8), "schedule.epochs=2")
    heard: list[int] = []

    def judge(evaluations: Any) -> str:
        heard.append(len(evaluations))
        return ""

    assert train(recipe, tmp_path / "run", device="cpu", stop_rule=judge).score is not None and heard == [1]
    with pytest.raises(Stopped, match=r"Enough. Stopped after step 1 of 2, which is saved") as stop:
        train(recipe, tmp_path / "other", device="cpu", stop_rule=lambda evaluations: "Enough.")
    assert stop.value.exit_code == 3
