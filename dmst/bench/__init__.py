"""`dmst bench`: one layer beside the others, in time and memory, on the machine at hand.

    published.py     the listing and TSSA as their papers print them
    layers.py        what is compared: a table
    parity.py        against float64, before a time is told
    timing.py        forward, forward+backward, kept and peak memory
    operators.py     the run: what is asked, in which order, one row after the other
    record.py        rows and facts, in a JSON file that is whole at every moment
    tables.py        rows for the terminal and for the README
    acceptance.py    rows against the targets
    figure.py        rows as the paper's figure

`operators.json` is {"facts": {...}, "rows": [...]}; a row is one layer in one mode at one shape (record.py names its keys).
"""
