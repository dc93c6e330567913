"""Looking inside: what a model computed, as numbers and pictures.

rates.py (how many nats each layer's tokens cost)      membership.py (which token belongs where, as images)
report.py, templates/, charts.py (pages)                network_report.py (the page of a network, or a run)
probes.py (what each layer does, asked during training) run_journal.py (a run, from its journal)
certificates.py (does each step lower its rate?)        theorem.py (the paper's inequality, on real weights)
scored.py (are the maps true?)                          intervene.py (heads and groups switched off, gates forced)
groups.py (the groups of a head: mass, nearest patches, pull)
features.py (the features of patches as colours)
"""

from dmst.analysis.certificates import Certificate, certify
from dmst.analysis.membership import colour, gate_by_class, maps, overlay, picture, sheet
from dmst.analysis.rates import LayerRates, layer_rates

__all__ = [
    "Certificate", "LayerRates", "certify", "colour", "gate_by_class", "layer_rates", "maps", "overlay", "picture",
    "sheet",
]  # fmt: skip
