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

from dmst import cli, create_model, objective
from dmst.analysis import certificates
from dmst.analysis.certificates import QUANTITIES, ascending, certificate_of, certify, descent, rate_by_head
from dmst.engine.train_loop import train
from dmst.errors import OptionError, Stopped, UnknownNameError
from dmst.models import load_model, save_model
from dmst.sparsemax import sparsemax
from tests.analysed import IMAGES, analyze, network
from tests.runs import on_pictures, pictures

F64 = torch.float64
ROOT = Path(__file__).resolve().parents[2]


# --- the bound -------------------------------------------------------------------------------------------------------


def test_the_bound_holds_for_any_step() -> None:
    """Random steps, large and small, gates and none, any c: the change is at most the bound, in each head and in all."""
    descents = 0
    for trial in range(40):
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
    assert descents > 16


def test_the_bound_holds_for_groups_with_means() -> None:
    """The same of R_mix: any step, gates of both signs, far from 0, groups that are empty."""
    descents = 0
    for trial in range(40):
        torch.manual_seed(trial)
        s, e = torch.randn(2, 3, 7, 5, dtype=F64) + 3, torch.randn(2, 3, 7, 5, dtype=F64) * 10 ** (trial % 4 - 2)
        pi = (3 * torch.randn(2, 3, 4, 7, dtype=F64)).softmax(2)
        if trial % 2:
            pi[:, 1, 2] = 0
        gate = None if trial % 3 == 0 else 2 * torch.randn(2, 3, dtype=F64)
        c = 10.0 ** (trial % 5 - 1)
        found = certificate_of(s, e, pi, gate, c=c)
        for t in (0.3, 1.0, 4.0):
            then = certificate_of(s, t * e, pi, gate, c=c)
            assert torch.allclose(then["bound"], t * found["lin"] + t**2 * found["quad"] / 2)
            assert (then["frozen"] <= then["bound"] + 1e-12).all()
        lin, quad = found["lin"].sum(-1), found["quad"].sum(-1)
        falls = lin < -1e-6
        descents += int(falls.sum())
        longest = torch.where(falls, -2 * lin / quad, 0).view(2, 1, 1, 1)
        for share in (1e-3, 0.5, 0.999):
            assert (certificate_of(s, share * longest * e, pi, gate, c=c)["frozen"].sum(-1)[falls] < 0).all()
    assert descents > 16


def test_groups_by_hand() -> None:
    """lin and quad group by group, S = g (s - mu) and W = pi f'(g^2 V); and one group around 0 is the old certificate."""
    s, e = torch.randn(2, 3, 7, 5, dtype=F64) + 1, torch.randn(2, 3, 7, 5, dtype=F64)
    pi, gate, c = torch.rand(2, 3, 4, 7, dtype=F64), torch.randn(2, 3, dtype=F64), 2.5
    found = certificate_of(s, e, pi, gate, c=c)
    lin, quad = torch.zeros(2, 3, dtype=F64), torch.zeros(2, 3, dtype=F64)
    for g in range(4):
        weight, g2 = pi[:, :, g, :, None], gate[..., None, None] ** 2
        mean = (weight * s).sum(2, keepdim=True) / weight.sum(2, keepdim=True)
        spread = (weight * (s - mean) ** 2).sum(2, keepdim=True) / weight.sum(2, keepdim=True)
        w = weight * g2 * c / (1 + c * g2 * spread)
        lin, quad = lin + (w * (s - mean) * e).sum((2, 3)) / 7, quad + (w * e**2).sum((2, 3)) / 7
    assert torch.allclose(found["lin"], lin) and torch.allclose(found["quad"], quad)
    rate = objective.mixture_rate(s, pi, gate, eps=math.sqrt(15 / c))
    assert torch.allclose(found["rate"].sum(-1), rate) and (rate > 0).all()
    at = torch.zeros((), dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(objective.mixture_rate(s + at * e, pi, gate, eps=math.sqrt(15 / c)).sum(), at)
    assert found["lin"].sum().item() == pytest.approx(slope.item(), rel=1e-10)
    opposite = torch.cat((s, -s), 2)  # its mean is 0
    one, both = torch.ones(2, 3, 14, dtype=F64), torch.cat((e, e), 2)
    for name, value in certificate_of(opposite, both, one, gate).items():
        if name != "frozen":  # the new mean is not 0
            assert torch.allclose(value, certificate_of(opposite, both, one.unsqueeze(2), gate)[name], atol=1e-12), name


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


# --- a network -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [None, 0.5])
def test_every_number_is_that_of_the_trace(eps: float | None) -> None:
    """Written out image by image, head by head, of what `model.trace` has; the step is what the block added."""
    model = network()
    found = certify(model, IMAGES, eps=eps)
    c = 1.0 if eps is None else 24 / eps**2
    assert (found.c, found.images, found.model) == (c, 7, "dmst_digits") and len(found.layers) == 3
    with torch.no_grad():
        trace = model.trace(IMAGES)
    for block, layer, told in zip(model.blocks, trace.layers, found.layers, strict=True):
        values = written_out(block, layer, trace.grid, c)
        for name in QUANTITIES:
            rows = [(told.total[name], values[name][:, -1])]
            rows += [(head[name], values[name][:, i]) for i, head in enumerate(told.heads)]
            for numbers, each in rows:
                assert numbers.mean == pytest.approx(each.mean().item(), rel=1e-5, abs=1e-7), name
                assert numbers.std == pytest.approx(each.std().item(), rel=1e-4, abs=1e-6), name
                assert numbers.below == pytest.approx((each < 0).double().mean().item()), name
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
def test_proximal_with_a_scalar_scale_descends_and_a_negative_one_climbs() -> None:
    """Whatever the weights, every layer, image and head."""
    for seed in range(3):
        model = network(seed=seed, mode="proximal")
        for block, scale in zip(model.blocks, (0.3, 1.0, 1.9), strict=True):
            assert block.residual.scale.shape == (1,)
            block.residual.scale.fill_(scale)
        for layer in certify(model, IMAGES).layers:
            assert layer.descends == layer.guaranteed == 1.0 and not layer.raising
            assert layer.total["longest"].mean > 1 and all(head["frozen"].mean <= 0 for head in layer.heads)
        model.blocks[1].residual.scale.fill_(-0.5)
        layer = certify(model, IMAGES).layers[1]
        assert layer.descends == layer.guaranteed == 0.0 and layer.total["bound"].mean > 0 and layer.raising


MIXED = {"groups": 4, "key_dim": 5, "gate_activation": "gelu", "gate_scale": 3.0}


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"gate_activation": "none"}, {"rounds": 2, "key_rotary": "2d"}], ids=str)
def test_proximal_groups_descend(options: dict) -> None:
    """GMSA: every layer, image and head, fresh or not; a negative scale climbs. The rate is the operator's own."""
    fresh = create_model("gmst_digits", mode="proximal", **MIXED | options).eval()
    for model in (fresh, network("gmst_digits", mode="proximal", **MIXED | options)):
        for i, block in enumerate(model.blocks if model is not fresh else ()):
            block.residual.scale.fill_((0.3, 1.0, 1.9)[i])
        found = certify(model, IMAGES)
        assert found.rate == "R_mix" and "R_mix at the tokens" in found.convention and not found.missing
        for layer in found.layers:
            assert layer.descends == layer.guaranteed == 1.0 and not layer.raising
            assert layer.total["bound"].mean < 0 and layer.total["longest"].mean > 1
        told = descent(model, IMAGES)
        assert told["guaranteed"] == told["descends"] == [1.0] * len(model.blocks)
    traced = model.trace(IMAGES)
    for block, layer, told in zip(model.blocks, traced.layers, found.layers, strict=True):
        rate = block.operator.rate(layer.normed, eps=math.sqrt(24), grid=traced.grid)
        assert torch.allclose(rate_by_head(*layer.parts[:3], c=1.0).sum(-1).float(), rate, rtol=1e-5)
        assert told.total["rate"].mean == pytest.approx(rate.mean().item(), rel=1e-5)
    model.blocks[1].residual.scale.fill_(-0.5)
    layer = certify(model, IMAGES).layers[1]
    assert layer.descends == layer.guaranteed == 0.0 and layer.total["bound"].mean > 0 and layer.raising


@torch.no_grad()
def test_numbers_of_groups_are_those_of_the_trace() -> None:
    """Frozen, anew, normed and reread of a network with a free output, by the objective itself; also on orthonormal bases."""
    model = network("gmst_digits", mode="listing", **MIXED)
    for basis in ("raw", "orthonormal"):
        found, traced = certify(model, IMAGES, eps=0.5, basis=basis), model.trace(IMAGES)
        for block, layer, told in zip(model.blocks, traced.layers, found.layers, strict=True):
            bases, operator = block.operator.subspaces().double(), block.operator
            bases = bases if basis == "raw" else torch.linalg.qr(bases).Q

            def rate(z: Tensor, parts: Any, bases: Tensor = bases) -> Tensor:
                s = torch.einsum("bnd,kdp->bknp", z.double(), bases)
                return objective.mixture_rate(s, parts.membership, parts.gate, eps=0.5)

            moved = layer.normed + (layer.after_operator - layer.z)
            after, before = block.norm(layer.after_operator), rate(layer.normed, layer.parts)
            anew, reread = (operator.decompose(z, grid=traced.grid) for z in (moved, after))
            expected = {
                "rate": before, "frozen": rate(moved, layer.parts) - before, "anew": rate(moved, anew) - before,
                "normed": rate(after, layer.parts) - before, "reread": rate(after, reread) - before,
            }  # fmt: skip
            for name, values in expected.items():
                assert told.total[name].mean == pytest.approx(values.mean().item(), rel=1e-4, abs=1e-5), name
            heads = [head["frozen"].mean for head in told.heads]
            assert sum(heads) == pytest.approx(told.total["frozen"].mean, abs=1e-9) and len(heads) == 3


def test_orthonormal_bases() -> None:
    """Each head's U by QR: the rate of the tokens on them; where they are orthonormal already (no bias), nothing changes."""
    model = network()
    found = certify(model, IMAGES, basis="orthonormal").layers[2]
    with torch.no_grad():
        layer = model.trace(IMAGES).layers[2]
        bases = torch.linalg.qr(model.blocks[2].operator.subspaces().double()).Q
    s = torch.einsum("bnd,kdp->bknp", layer.normed.double(), bases)
    rate = rate_by_head(s, layer.parts.membership, layer.parts.gate, c=1.0).sum(-1)
    assert found.total["rate"].mean == pytest.approx(rate.mean().item(), rel=1e-6)
    plain = network(mode="proximal", qkv_bias=False)
    raw, turned = (certify(plain, IMAGES, basis=basis).layers[0].total["frozen"].mean for basis in ("raw", "orthonormal"))
    assert raw == pytest.approx(turned, rel=1e-4)


def test_other_operators() -> None:
    for name in ("vit_digits", "crate_digits"):
        found = certify(network(name), IMAGES)
        assert found.layers == [None] * 3 and found.missing == f"{name}: no rate to certify, its operator has no memberships."
    tost = certify(network("tost_digits"), IMAGES)
    assert all(math.isfinite(layer.total["reread"].mean) for layer in tost.layers) and not tost.missing
    assert all(layer.guaranteed <= layer.descends for layer in tost.layers)


def test_bad_input() -> None:
    for eps in (0.0, -1.0, math.nan):
        with pytest.raises(OptionError, match="eps"):
            certify(network(), IMAGES, eps=eps)
    with pytest.raises(UnknownNameError, match="orthonormal"):
        certify(network(), IMAGES, basis="ortho")


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command() -> None:
    text = analyze("certify", "dmst_digits", "--limit", "20")
    assert "dmst_digits on digits test: 20 of 359 images by hash" in text and "c = d/eps² = 1 (eps = 5.65685), raw U" in text
    table = [line.split() for line in text.splitlines() if re.match(r"\s+\d ", line)]
    told = json.loads(analyze("certify", "dmst_digits", "--limit", "20", "--json", "--batch-size", "7"))
    assert (told["weights"], told["images"], told["data"]) == ("dmst_digits", 20, "digits test: 20 of 359 images by hash")
    assert len(table) == len(told["layers"]) == 4
    for row, layer in zip(table, told["layers"], strict=True):
        mean = {name: numbers["mean"] for name, numbers in layer["total"].items()}
        falls, proven = (f"{layer['total'][name]['below']:.0%}" for name in ("frozen", "bound"))
        assert row[:4] == [str(layer["layer"]), f"{mean['rate']:.2f}", f"{mean['frozen']:+.2f}", falls]
        assert row[4:7] == [f"{mean['bound']:+.2f}", proven, f"{mean['longest']:.2f}"]
        assert row[7:] == [f"{mean[x]:+.2f}" for x in ("anew", "normed", "reread")]
        raising = [str(i) for i, head in enumerate(layer["heads"]) if head["frozen"]["mean"] > 0]
        assert f"layer {layer['layer']}: {'all' if len(raising) == 4 else ', '.join(raising)}" in text
    other = analyze("certify", "dmst_digits", "--limit", "5", "--eps", "0.5", "--orthonormal")
    assert "c = d/eps² = 128 (eps = 0.5), U orthonormal" in other


def test_the_command_on_groups(tmp_path: Path) -> None:
    """All four verbs that print numbers, on a saved network."""
    where = str(tmp_path / "gmst")
    save_model(create_model("gmst_digits", depth=2, mode="proximal", **MIXED), tmp_path / "gmst")
    text = analyze("certify", where, "--limit", "12")
    assert "R_mix at the tokens that each operator read" in text and text.count("100%") == 4
    told = json.loads(analyze("certify", where, "--limit", "12", "--json"))
    assert told["rate"] == "R_mix" and all(layer["total"]["bound"]["below"] == 1 for layer in told["layers"])
    assert "the theorem does not apply" in analyze("theorem", where, "--limit", "3")
    assert json.loads(analyze("theorem", where, "--limit", "3", "--json"))["layers"] == [None, None]


@pytest.mark.parametrize("verb", ["certify", "theorem"])
def test_the_page_quotes_the_command(verb: str) -> None:
    """Word for word, and every number within what another machine's rounding may change."""
    page = (ROOT / "docs/certificates.md").read_text()
    quoted = page.partition(f"$ dmst analyze {verb} dmst_digits\n")[2].partition("```")[0].split()
    printed = analyze(verb, "dmst_digits").split()
    number = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]\d+)?")
    assert len(quoted) > 50 and [number.sub("#", word) for word in quoted] == [number.sub("#", word) for word in printed]
    for one, other in zip(quoted, printed, strict=True):
        for left, right in zip(number.finditer(one), number.finditer(other), strict=True):
            apart = abs(float(left.group()) - float(right.group()))
            assert apart <= max(0.03 * abs(float(left.group())), 0.02 if "%" not in one else 1), (one, other)


# --- during training -------------------------------------------------------------------------------------------------


def test_the_probe() -> None:
    model = network(mode="equation")
    with torch.no_grad():
        for block in model.blocks:
            block.residual.scale.fill_(4.0)  # longer steps than the bound can vouch for on every image
    told, found = descent(model, IMAGES), certify(model, IMAGES)
    assert told["descends"] != told["guaranteed"]
    assert told["images"] == 7 and told["c"] == 1
    assert told["change"] == pytest.approx([layer.total["frozen"].mean for layer in found.layers], rel=1e-4)
    assert told["descends"] == [layer.descends for layer in found.layers]
    assert told["guaranteed"] == [layer.guaranteed for layer in found.layers]
    assert descent(network("vit_digits"), IMAGES)["descends"] == [None] * 3


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
    data, run, recipe = pictures(tmp_path / "shapes", each=8), tmp_path / "run", tmp_path / "recipe.toml"
    recipe.write_text(on_pictures(data, "schedule.epochs=4", "run.batch_size=12").to_toml())

    def typed(*words: str) -> int:
        monkeypatch.setattr(
            sys, "argv", ["dmst", "train", str(recipe), "--out", str(run), "--device", "cpu", "--no-report", *words]
        )
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
    assert "layer 0 (+0.5 and +0.5 nats) raises its own rate. Stopped after step 4 of 8" in capsys.readouterr().err
    last = journal()[-1]
    assert last["event"] == "stopped" and last["reason"].startswith("At 2 evaluations") and not (run / "final").exists()
    monkeypatch.setattr(certificates, "descent", real)
    assert typed("--certify") == 0, capsys.readouterr().err
    evaluations = [event for event in journal() if event["event"] == "evaluation"]
    assert [event["step"] for event in evaluations] == [2, 4, 6, 8] and load_model(run / "final")
    assert all(0 <= event["certificate"]["descends"][0] <= 1 for event in evaluations)
    assert typed("--certify", "--set", 'data.eval=""') == 1 and "has none" in capsys.readouterr().err


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
