"""Files that tests write, read and compare."""

import csv
import io
from pathlib import Path
from typing import Any

import torch


def through_a_file(snapshot: Any) -> Any:
    """Save a snapshot with `torch.save` and load it again, as a checkpoint does."""
    file = io.BytesIO()
    torch.save(snapshot, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def modification_times(root: Path) -> dict[Path, int]:
    """Modification time in nanoseconds of every file below `root`."""
    return {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
