"""`dmst bench`: one layer, or one network, beside the others, in time and memory, on the machine at hand.

    published.py     the listing and TSSA as their papers print them
    layers.py        what is compared: a table
    parity.py        against float64, before a time is told
    timing.py        forward, forward+backward, kept and peak memory
    operators.py     the run: what is asked, in which order, one row after the other
    record.py        rows and facts, in a JSON file that is whole at every moment
    tables.py        rows for the terminal and for the README
    acceptance.py    rows against the targets
    figure.py        rows as the paper's figure

    networks.py      which whole networks are compared, by name
    model_plan.py    at which sizes, in which batches, modes and order
    model_parity.py  logits and gradients against the plain steps, before a time is told
    model_row.py     one row: inference, training, peak memory
    models.py        the run (`dmst bench models`)
    model_tables.py  its rows for the terminal and for the README
    model_figure.py  its rows as a figure

    training.py      `dmst bench training`: images a second of the training engine, and what their input costs

`operators.json` is {"facts": {...}, "rows": [...]}; a row is one layer in one mode at one shape (record.py names its keys).
`models.json` has the same form; a row is one network in one mode at one size (model_row.py names its keys).
"""
