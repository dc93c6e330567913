"""Images in. `digits.py`: the small set that the demo learns."""
