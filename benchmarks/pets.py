"""Maps against the masks of Oxford-IIIT Pets, and the answers without any head; the numbers of results/pets.md.

    python benchmarks/pets.py WEIGHTS --data-dir DIR [--limit 500] --json results/pets/dmst.json
    dmst analyze scored WEIGHTS --data pets --data-dir DIR --limit 100 --json > results/pets/dmst-curves.json

WEIGHTS: those that `dmst reproduce transfer --cell "DMST, Pets, 128 px, from CIFAR-100" --weights DIR` leaves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from heads_off import every_head, right

from dmst import provenance
from dmst.analysis.running import plain
from dmst.analysis.scored import foreground
from dmst.engine.prepare import read_weights
from dmst.engine.samples import sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--json", type=Path, required=True)
    ask = parser.parse_args()
    model = read_weights(ask.weights)
    images = sample(model, "pets", data_dir=ask.data_dir, limit=ask.limit, batch_size=20)
    answers = {"as it is": right(model, images, {}), "all heads off": right(model, images, every_head(model))}
    found = {"sample": images.name, "right": {name: int(hits.sum()) for name, hits in answers.items()}}
    found |= {"foreground": plain(foreground(model, images.masked()))}
    found |= {"versions": provenance.versions(), "commit": provenance.commit()}
    ask.json.write_text(json.dumps(found, indent=1) + "\n")
    print(found["right"])


if __name__ == "__main__":
    main()
