"""One training run: the session, its checkpoints, logs, evaluations and videos."""
