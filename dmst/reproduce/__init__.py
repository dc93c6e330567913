"""The paper's tables, and ours: what to run, the ledger of what was run, and markdown made from it alone."""
