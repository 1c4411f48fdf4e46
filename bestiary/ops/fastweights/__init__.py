"""Four ways to program a small network's weights while it runs, each in a plain form and in fast ones."""
