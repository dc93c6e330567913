"""Layer-wise rates: the numbers of `objective` on what the layers computed, streamed without changing them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dmst import cli, create_model, objective
from dmst.analysis.rates import QUANTITIES, layer_rates, rates_at, rates_of
from dmst.analysis.running import plain
from dmst.engine.recipe import read_recipe
from dmst.engine.samples import sample
from dmst.errors import OptionError, UnknownNameError
from dmst.models import load_model, save_model
from tests.analysed import IMAGES, network


@torch.no_grad()
def test_the_published_convention_written_out() -> None:
    """Unit-length tokens in each head, c = p/eps^2, memberships that sum to 1, silent heads left out: by loops."""
    model = network()
    found = layer_rates(model, IMAGES, eps=0.1).mean["variational"]
    for layer, traced in enumerate(model.trace(IMAGES).layers):
        s, pi, g = (x.double() for x in traced.parts[:3])
        b, k, n, p = s.shape
        total = 0.0
        for i in range(b):
            share = pi[i] / pi[i].sum(0)
            for head in range(k):
                if g[i, head] == 0:
                    continue
                unit = s[i, head] / s[i, head].norm(dim=-1, keepdim=True)
                mass = share[head].sum()
                moment = (share[head][:, None] * unit**2).sum(0) / mass
                total += 0.5 * mass / n * sum(math.log(1 + p / 0.01 * float(m)) for m in moment)
        assert found[layer] == pytest.approx(float(total) / b, rel=1e-5)


@torch.no_grad()
def test_every_quantity_is_the_objective_of_the_parts() -> None:
    model = network()
    block, traced = model.blocks[1], model.trace(IMAGES).layers[1]
    found = rates_of(traced.normed, traced.parts, block.operator, eps=0.5)
    pi = traced.parts.membership
    share = pi / pi.sum(1, keepdim=True)
    assert set(found) == set(QUANTITIES)
    assert torch.allclose(found["coding"], objective.coding_rate(traced.normed, eps=0.5))
    complete = objective.complete_rate(traced.normed, block.operator.subspaces(), share, eps=0.5)
    assert torch.allclose(found["complete"].float(), complete)
    every = objective.variational_rate(traced.parts.projected, share, eps=0.5, width="head_dim", unit_norm=True)
    assert torch.allclose(found["all_heads"].float(), every) and (found["all_heads"] >= found["variational"]).all()
    unit = traced.parts.projected / traced.parts.projected.norm(dim=-1, keepdim=True)
    inside = objective.projected_rate(unit, share, eps=0.5, width="head_dim")
    assert torch.allclose(found["projected"].float(), inside) and (found["gap"] > 0).all()
    assert torch.allclose(found["gap"], found["all_heads"] - found["projected"])
    assert torch.equal(found["active"], (traced.parts.gate != 0).sum(-1).float())
    assert torch.allclose(found["mass"], pi.sum(1).mean(-1))
    assert (found["raw"] > found["variational"]).all() or (found["mass"] < 1).any()


@torch.no_grad()
def test_groups_written_out() -> None:
    """R_mix by loops, shares of a token over heads and groups, silent heads left out; covariances around each group's mean."""
    model = network("gmst_digits", groups=4, gate_activation="sparsemax", gate_scale=3.0)
    block, traced = model.blocks[1], model.trace(IMAGES).layers[1]
    found = rates_of(traced.normed, traced.parts, block.operator, eps=0.5)
    s, pi, g = (x.double() for x in traced.parts[:3])
    b, k, n, p = s.shape
    assert (g == 0).any() and (g != 0).any()
    unit, share = s / s.norm(dim=-1, keepdim=True), pi / k
    want = {name: torch.zeros(b, dtype=torch.float64) for name in ("variational", "raw", "all_heads", "projected")}
    for i in range(b):
        for head in range(k):
            for group in range(4):
                weight = pi[i, head, group] / pi[i, head, group].sum()
                away = unit[i, head] - weight @ unit[i, head]
                whole = away.T @ (weight[:, None] * away)
                cost = 0.5 * share[i, head, group].sum() / n * torch.log1p(p / 0.25 * whole.diagonal()).sum()
                inside = torch.eye(p, dtype=torch.float64) + p / 0.25 * whole
                want["all_heads"][i] += cost
                want["projected"][i] += 0.5 * share[i, head, group].sum() / n * torch.logdet(inside)
                if g[i, head] != 0:
                    want["variational"][i] += cost
                    want["raw"][i] += k * cost
    for name, values in want.items():
        assert torch.allclose(found[name].double(), values, rtol=1e-5), name
    assert torch.allclose(found["gap"], found["all_heads"] - found["projected"]) and (found["gap"] > 0).all()
    assert found["complete"].isnan().all()
    assert torch.allclose(found["mass"], torch.full((b,), float(k))) and torch.equal(found["active"], (g != 0).sum(-1).float())


def test_groups_are_named() -> None:
    found = layer_rates(network("gmst_digits", groups=4), IMAGES)
    assert found.rate == "R_mix" and found.convention.startswith("R_mix, unit-length")
    assert found.missing == "gmst_digits: R+ is not defined for groups with means, so there is no `complete`."
    assert all(math.isnan(x) for x in found.mean["complete"])
    other = layer_rates(network(), IMAGES)
    assert other.rate == "R_var" and not other.missing and other.convention.startswith("R_var, unit-length")


def test_the_command_on_groups(tmp_path: Path) -> None:
    """R_mix heads its column; beside another network, both conventions are told."""
    for name, options in (("gmst", {"groups": 4}), ("dmst", {})):
        save_model(create_model(f"{name}_digits", depth=2, **options), tmp_path / name)
    asked = ["--limit", "9", "--device", "cpu"]
    page, env = tmp_path / "rates.html", {"COLUMNS": "160"}
    one = CliRunner(env=env).invoke(cli.app, ["analyze", "rates", str(tmp_path / "gmst"), *asked, "--page", str(page)])
    assert one.exit_code == 0, one.output
    assert re.search(r"layer\s+R_mix\s+raw", one.output) and "R_var" not in one.output and "no `complete`" in one.output
    assert "R_mix, unit-length" in page.read_text() and "no `complete`" in page.read_text()
    both = CliRunner(env=env).invoke(cli.app, ["analyze", "rates", str(tmp_path / "gmst"), str(tmp_path / "dmst"), *asked])
    assert both.exit_code == 0 and "R_mix, unit-length" in both.output and "R_var, unit-length" in both.output
    told = CliRunner().invoke(cli.app, ["analyze", "rates", str(tmp_path / "gmst"), *asked, "--json"])
    mean = json.loads(told.stdout.splitlines()[0])[str(tmp_path / "gmst")]["input"]["mean"]
    assert mean["complete"] == [None, None] and all(x > 0 for x in mean["variational"] + mean["gap"])


@torch.no_grad()
def test_after_the_operator_and_after_the_block() -> None:
    """Normed by the same layer, in its subspaces, with memberships anew; one pass gives what three do."""
    model = network()
    every = rates_at(model, [IMAGES[:2], IMAGES[2:]])
    for i, (block, traced) in enumerate(zip(model.blocks, model.trace(IMAGES).layers, strict=True)):
        for at, z in (("output", traced.after_operator), ("block", traced.after_feedforward)):
            tokens = block.norm(z)
            expected = rates_of(tokens, block.operator.decompose(tokens), block.operator)
            for name in ("variational", "complete"):
                assert every[at].mean[name][i] == pytest.approx(expected[name].double().mean().item(), rel=1e-6)
    assert layer_rates(model, IMAGES, at="output").mean["raw"] == pytest.approx(every["output"].mean["raw"], rel=1e-6)
    assert "after the operator" in every["output"].convention and "7 images" in every["output"].convention


def test_the_command(tmp_path: Path) -> None:
    save_model(create_model("tost_digits", depth=2), tmp_path / "tost")
    save_model(create_model("vit_digits", depth=2), tmp_path / "vit")
    asked = ["analyze", "rates", str(tmp_path / "tost"), str(tmp_path / "vit"), "--limit", "20", "--device", "cpu"]
    page = tmp_path / "<rates>.html"
    told = CliRunner().invoke(cli.app, [*asked, "--json", "--page", str(page)])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout.splitlines()[0])
    mine = found[str(tmp_path / "tost")]
    assert mine["images"] == "digits test: 20 of 359 images by hash"
    images = torch.cat([some for some, _ in sample(load_model(tmp_path / "tost"), limit=20)])
    here = layer_rates(load_model(tmp_path / "tost"), images, at="block")
    assert mine["block"]["mean"]["complete"] == pytest.approx(here.mean["complete"], rel=1e-5)
    assert found[str(tmp_path / "vit")]["input"]["mean"]["variational"] == [None, None]
    drawn = page.read_text()
    assert drawn.count("<svg") >= 8 and "after the block" in drawn and "http://" not in drawn.replace("http://www.w3.org", "")
    assert "R_var, all heads" in drawn
    shown = CliRunner(env={"COLUMNS": "160"}).invoke(cli.app, asked).output
    assert "c = p/eps²" in shown and "after the operator" not in shown
    rows = [line.split() for line in shown.splitlines() if re.match(r"\s*[01] ", line)]
    means = [found[str(tmp_path / name)]["input"]["mean"] for name in ("tost", "vit")]
    told = [(layer, mean["raw"][layer], mean["mass"][layer]) for mean in means for layer in (0, 1)]
    cells = [(str(layer), *("-" if x is None else f"{x:.1f}" for x in some)) for layer, *some in told]
    assert [(row[0], row[2], row[8]) for row in rows] == cells
    shown = CliRunner().invoke(cli.app, [*asked[:2], *asked[3:]]).output  # one network at every place
    assert "after the operator" in shown


def test_networks_are_compared_on_the_same_images_or_not_at_all(tmp_path: Path) -> None:
    """Two runs, each with its own held-out images: their rates would say nothing about the networks."""
    for share in (0.1, 0.2):
        save_model(create_model("dmst_digits", depth=1), tmp_path / f"{share}/final")
        (tmp_path / f"{share}/recipe.toml").write_text(read_recipe("digits", [f"data.holdout={share}"]).to_toml())
    asked = ["analyze", "rates", str(tmp_path / "0.1"), str(tmp_path / "0.2"), "--device", "cpu"]
    refused = CliRunner().invoke(cli.app, asked)
    assert refused.exit_code and "different images" in str(refused.exception) and "--data" in str(refused.exception)
    assert "digits, 10 % held out" in str(refused.exception)
    assert CliRunner().invoke(cli.app, [*asked, "--data", "digits", "--limit", "5"]).exit_code == 0


@pytest.mark.parametrize("name", ["tost_digits", "vit_digits", "crate_digits"])
def test_other_families(name: str) -> None:
    found = layer_rates(network(name), IMAGES)
    assert all(math.isfinite(x) for x in found.mean["coding"])
    has_membership = name == "tost_digits"
    assert all(math.isfinite(x) is has_membership for x in found.mean["variational"])
    if has_membership:
        assert found.mean["active"] == [3.0] * 3
        assert found.mean["mass"] == pytest.approx([1.0] * 3, rel=1e-6)


def test_one_image_has_no_spread() -> None:
    found = layer_rates(network(), IMAGES[:1])
    assert all(math.isnan(x) for x in found.std["coding"]) and plain(found)["std"]["coding"] == [None] * 3


def test_bad_input() -> None:
    with pytest.raises(UnknownNameError, match="input"):
        layer_rates(network(), IMAGES, at="inputs")
    with pytest.raises(OptionError, match="eps"):
        layer_rates(network(), IMAGES, eps=0.0)
