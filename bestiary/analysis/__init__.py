"""Learning curves, plots, memory inspection and the core contract."""
