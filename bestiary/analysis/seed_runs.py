"""A directory of seeds holds the runs of one experiment: DIR/seed0, DIR/seed1 and so on."""

import re
from pathlib import Path

from bestiary.training.run import EXPERIMENT


def seed_runs(root: Path) -> list[Path]:
    """The runs of a directory of seeds, in order of the seed; empty if `root` is something else."""
    if (root / EXPERIMENT).exists():
        return []
    named = {path: re.fullmatch(r"seed(\d+)", path.name) for path in root.glob("seed*")}
    runs = {int(match[1]): path for path, match in named.items() if match and (path / EXPERIMENT).is_file()}
    return [runs[seed] for seed in sorted(runs)]
