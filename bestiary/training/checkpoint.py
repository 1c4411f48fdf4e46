"""Checkpoints: written atomically, verified by hash, and loaded without running code."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from bestiary.config.aliases import upgrade_snapshot, upgrade_weight
from bestiary.errors import UserError
from bestiary.types import Snapshot

FORMAT = 1
WEIGHTS, TRAINER, REPLAY, META = "weights.safetensors", "trainer.pt", "replay.pt", "meta.json"


class BadCheckpoint(UserError):
    """A checkpoint does not exist or cannot be read."""


class NotSaved(UserError):
    """A checkpoint could not be written."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: the agent's weights, the state of the training session, and information about both."""

    weights: dict[str, torch.Tensor]
    trainer: Snapshot
    meta: dict[str, Any]


def save(
    path: Path,
    weights: dict[str, torch.Tensor],
    trainer: Snapshot,
    meta: dict[str, Any],
    replay: Snapshot | None = None,
) -> None:
    """Write a checkpoint directory atomically: a failure leaves the one that was at `path`."""
    partial = path.with_name(f".{path.name}.writing")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        contiguous = {k: v.detach().cpu().contiguous() for k, v in weights.items()}
        safetensors.torch.save_file(contiguous, partial / WEIGHTS)
        torch.save(trainer, partial / TRAINER)
        if replay is not None:
            torch.save(replay, partial / REPLAY)
        files = {file.name: _digest(file) for file in partial.iterdir()}
        (partial / META).write_text(json.dumps({"format": FORMAT, "files": files, **meta}, indent=2))
        for file in partial.iterdir():
            _sync(file)
        _replace(partial, path)
    except (OSError, SafetensorError, RuntimeError) as e:  # torch reports a full disk as RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        reason = str(e).splitlines()[0]
        raise NotSaved(f"could not write checkpoint {path} ({reason}); earlier checkpoints are intact") from e


def _replace(new: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(path: Path) -> Checkpoint:
    """Read a checkpoint, also one of an earlier version. A file that cannot be read raises `BadCheckpoint`.

    Nothing in the files can run code.
    """
    with _readable(path):
        meta = _checked(path, WEIGHTS, TRAINER)
        weights = safetensors.torch.load_file(path / WEIGHTS)
        trainer = torch.load(path / TRAINER, weights_only=True, map_location="cpu")
        return Checkpoint({upgrade_weight(k): v for k, v in weights.items()}, upgrade_snapshot(trainer), meta)


def load_replay(path: Path) -> Snapshot | None:
    """The replay buffer of a checkpoint, memory-mapped from its file; None if it was not saved."""
    with _readable(path):
        if not (path / REPLAY).exists():
            return None
        _checked(path, REPLAY)
        replay = torch.load(path / REPLAY, weights_only=True, map_location="cpu", mmap=True)
        return upgrade_snapshot(replay, "replay")


def _checked(path: Path, *names: str) -> dict[str, Any]:
    """Verify the hashes of files and return the contents of meta.json."""
    meta = json.loads((path / META).read_text())
    if meta.get("format") != FORMAT:
        raise BadCheckpoint(f"{path} is not a checkpoint of this version (format {meta.get('format')})")
    for name in names:
        if _digest(path / name) != meta["files"][name]:
            raise BadCheckpoint(f"{path / name} is damaged or truncated: its contents do not match its hash")
    return meta


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as e:
        raise BadCheckpoint(f"{path} is not a complete checkpoint: {Path(str(e.filename)).name} is missing") from None
    except pickle.UnpicklingError:
        raise BadCheckpoint(f"{path} holds something other than tensors and numbers; not loaded") from None
    except (json.JSONDecodeError, KeyError, AttributeError, UnicodeDecodeError, SafetensorError, EOFError) as e:
        raise BadCheckpoint(f"{path} cannot be read as a checkpoint: {e}") from None
    except RuntimeError as e:
        raise BadCheckpoint(f"{path} cannot be read as a checkpoint: {str(e).splitlines()[0]}") from None
