"""The long run: every promise of docs/reliability.md tried many times over, one line a case, on a CPU. `make soak`."""
