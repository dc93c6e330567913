"""Looking inside: what a model computed, as numbers and pictures.

rates.py (how many nats each layer's tokens cost)      membership.py (which token belongs where, as images)
charts.py (lines and tables of cells, as SVG and HTML) report.py (one self-contained page of them)
probes.py (what each layer does, asked during training) run_report.py (the page of a training run, from its journal)
certificates.py (does each step lower its rate?)        theorem.py (the paper's inequality, on real weights)
scored.py, foreground.py (are the maps true?)           intervene.py (heads switched off, gates forced)
answers.py (what a network says, how sure)              weights_report.py (the page of a network)
"""

from dmst.analysis.certificates import Certificate, certify
from dmst.analysis.membership import colour, gate_by_class, maps, overlay, picture, sheet
from dmst.analysis.rates import LayerRates, layer_rates
from dmst.analysis.report import Section, write_report

__all__ = [
    "Certificate", "LayerRates", "Section", "certify", "colour", "gate_by_class", "layer_rates", "maps", "overlay", "picture",
    "sheet", "write_report",
]  # fmt: skip
