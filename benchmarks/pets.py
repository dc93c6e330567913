"""The Pets study: do the maps of DMST, ToST and ViT, trained alike at 128 pixels, find the animal, and are they true?

    python benchmarks/pets.py run WEIGHTS --name dmst --data-dir DIR [--limit 1000]   masks, and the answers without any head
    dmst analyze scored WEIGHTS --data pets --data-dir DIR --limit 100 --json > results/pets/dmst-curves.json
    python benchmarks/pets.py table                                                   results/pets.md of all that is there

WEIGHTS: those that `dmst reproduce transfer --cell "DMST, Pets, 128 px, from CIFAR-100" --weights DIR` leaves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from dmst import provenance
from dmst.analysis.foreground import foreground
from dmst.analysis.intervene import switched_off
from dmst.engine.masked import masked
from dmst.engine.prepare import read_weights
from dmst.engine.samples import Sample, sample
from dmst.models import VisionModel

RESULTS = Path(__file__).parents[1] / "results"
NAMES = {"dmst": "DMST", "tost": "ToST", "vit": "ViT"}
MEASURES = {"iou_mean": "IoU, own mean", "iou_area": "IoU, mask's area", "pointing": "pointing"}


@torch.no_grad()
def right(model: VisionModel, images: Sample) -> int:
    return sum(int((model(batch).argmax(1) == labels).sum()) for batch, labels in images)


def run(weights: str, name: str, data_dir: str, limit: int) -> None:
    model = read_weights(weights)
    images = sample(model, "pets", data_dir=data_dir, limit=limit, batch_size=20)
    every = {layer: range(model.config.num_heads) for layer in range(len(model.blocks))}
    answers = {"as it is": right(model, images)}
    with switched_off(model, every):
        answers["all heads off"] = right(model, images)
    print(name, answers, flush=True)
    told = {
        "sample": images.name, "foreground": foreground(model, masked(images)).to_dict(), "right": answers,
        "device": provenance.device_name(torch.device("cpu")), "versions": provenance.versions(), "commit": provenance.commit(),
    }  # fmt: skip
    (RESULTS / "pets" / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")


def table(folder: Path) -> str:
    """The study as markdown."""
    masks = {name: json.loads((folder / f"{name}.json").read_text()) for name in NAMES}
    curves = {name: json.loads((folder / f"{name}-curves.json").read_text()) for name in NAMES}
    lines = [
        "# Pets: do the maps find the animal, and are they true?",
        "",
        "CIFAR-100 weights of the three families, fine-tuned on Oxford-IIIT Pets at 128 pixels by one recipe "
        "([transfer.md](transfer.md)); 1,024 patches of 4 x 4 pixels; one seed. Made by `benchmarks/pets.py`, which says how; "
        "how to read it: [docs/maps.md](../docs/maps.md).",
        "",
        f"## Maps against masks: {masks['dmst']['sample']}",
        "",
        "Of the best head, chosen on the other half of the images; means with 95 % intervals.",
        "",
        f"| | map | {' | '.join(MEASURES.values())} | IoU (mask's area) over the middle of the picture |",
        "|---|---|---|---|---|---|",
    ]
    for name, word in NAMES.items():
        found = masks[name]["foreground"]
        cells = [_interval(found["best"][each]) for each in MEASURES]
        lines.append(f"| {word} | {found['what']} | {' | '.join(cells)} | {_interval(found['ahead']['iou_area'], '+')} |")
    found = masks["dmst"]["foreground"]
    lines.append(
        f"| the middle of the picture | no network | {' | '.join(_interval(found['centre'][x]) for x in MEASURES)} | |"
    )
    lines += [
        "",
        "Median head of each layer, IoU at the mask's area:",
        "",
        "| | " + " | ".join(str(layer["layer"]) for layer in found["layers"]) + " |",
        "|---" * (len(found["layers"]) + 1) + "|",
    ]
    for name, word in NAMES.items():
        cells = [f"{layer['median']['iou_area']:.2f}" for layer in masks[name]["foreground"]["layers"]]
        lines.append(f"| {word} | {' | '.join(cells)} |")
    lines += ["", *(f"- {NAMES[name]}: {masks[name]['foreground']['verdict']}" for name in NAMES), ""]
    lines += [f"## Patches taken away: {curves['dmst']['sample']}", ""]
    lines += ["| | order | test | area | over random | over the middle of the picture |", "|---|---|---|---|---|---|"]
    for name, word in NAMES.items():
        for score in curves[name]["scored"]["scores"]:
            better, ahead = (_interval(score[x], "+") if score[x] else "" for x in ("better", "ahead"))
            lines.append(f"| {word} | {score['order']} | {score['test']} | {score['area']['mean']:.3f} | {better} | {ahead} |")
    lines += ["", *(f"- {NAMES[name]}: {curves[name]['scored']['verdict']}" for name in NAMES), ""]
    lines += [
        "## Without any head",
        "",
        f"Answers that are right, {masks['dmst']['sample']}:",
        "",
        "| | as it is | all heads of all layers off |",
        "|---|---|---|",
    ]
    lines += [f"| {word} | {' | '.join(str(n) for n in masks[name]['right'].values())} |" for name, word in NAMES.items()]
    return "\n".join(lines) + "\n"


def _interval(told: dict[str, Any], sign: str = "") -> str:
    return "{mean:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})".format(sign=sign, **told)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = asked.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("run")
    one.add_argument("weights")
    one.add_argument("--name", choices=NAMES, required=True)
    one.add_argument("--data-dir", required=True)
    one.add_argument("--limit", type=int, default=1000)
    verbs.add_parser("table")
    told = asked.parse_args()
    if told.verb == "run":
        run(told.weights, told.name, told.data_dir, told.limit)
    else:
        (RESULTS / "pets.md").write_text(table(RESULTS / "pets"))


if __name__ == "__main__":
    main()
