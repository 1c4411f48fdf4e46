"""Checkpoints that survive: written aside, synced, renamed; checked by hash and loaded without running code."""

import hashlib
import json
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from bestiary.errors import UserError
from bestiary.types import Snapshot

FORMAT = 1
WEIGHTS, TRAINER, META = "weights.safetensors", "trainer.pt", "meta.json"


class BadCheckpoint(UserError):
    pass


class NotSaved(UserError):
    pass


@dataclass(frozen=True)
class Checkpoint:
    weights: dict[str, torch.Tensor]
    trainer: Snapshot
    meta: dict[str, Any]


def save(path: Path, weights: dict[str, torch.Tensor], trainer: Snapshot, meta: dict[str, Any]) -> None:
    """Write a checkpoint directory as a whole or not at all; what stood at `path` is replaced last."""
    aside = path.with_name(f".{path.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        contiguous = {k: v.detach().cpu().contiguous() for k, v in weights.items()}
        safetensors.torch.save_file(contiguous, aside / WEIGHTS)
        torch.save(trainer, aside / TRAINER)
        files = {name: _digest(aside / name) for name in (WEIGHTS, TRAINER)}
        (aside / META).write_text(json.dumps({"format": FORMAT, "files": files, **meta}, indent=2))
        for name in (WEIGHTS, TRAINER, META):
            _sync(aside / name)
        _replace(aside, path)
    except (OSError, SafetensorError, RuntimeError) as e:  # torch reports a full disk as RuntimeError
        shutil.rmtree(aside, ignore_errors=True)
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
    """Read a checkpoint, or say in one sentence why not. Nothing in the files can run code."""
    try:
        meta = json.loads((path / META).read_text())
        if meta.get("format") != FORMAT:
            raise BadCheckpoint(f"{path} is not a checkpoint of this version (format {meta.get('format')})")
        for name in (WEIGHTS, TRAINER):
            if _digest(path / name) != meta["files"][name]:
                raise BadCheckpoint(f"{path / name} is damaged or truncated: its contents do not match its hash")
        weights = safetensors.torch.load_file(path / WEIGHTS)
        trainer = torch.load(path / TRAINER, weights_only=True, map_location="cpu")
    except FileNotFoundError as e:
        raise BadCheckpoint(f"{path} is not a complete checkpoint: {Path(str(e.filename)).name} is missing") from None
    except pickle.UnpicklingError:
        raise BadCheckpoint(f"{path / TRAINER} holds something other than tensors and numbers; not loaded") from None
    except (json.JSONDecodeError, KeyError, AttributeError, UnicodeDecodeError, SafetensorError, EOFError) as e:
        raise BadCheckpoint(f"{path} cannot be read as a checkpoint: {e}") from None
    except RuntimeError as e:
        raise BadCheckpoint(f"{path} cannot be read as a checkpoint: {str(e).splitlines()[0]}") from None
    return Checkpoint(weights, trainer, meta)
