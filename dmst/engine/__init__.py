"""Training: recipes, the loop, and runs that a kill cannot spoil."""
