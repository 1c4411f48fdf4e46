"""The command of a launched job: the arguments after `--`, checked without importing PyTorch, and made resumable."""

import re
from dataclasses import dataclass
from itertools import pairwise

from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError
from bestiary.presets import PRESETS

VERBS = ("train", "sweep", "study")
EXAMPLE = "-- train pong runtime:ray --runtime.actors 16"


@dataclass(frozen=True)
class ClusterJob:
    """A command of this program that resumes its run when it is started again."""

    name: str
    command: tuple[str, ...]
    """program and arguments; the program is `bestiary`"""
    run: str
    """run directory"""
    notes: tuple[str, ...]
    """sentences about arguments that were added"""


def cluster_job(words: list[str], name: str | None, runs: str) -> ClusterJob:
    """The complete command. Without `--run`, its run directory is RUNS/NAME."""
    if not words:
        raise UserError(f"the command is missing: write it after two dashes, such as {EXAMPLE}")
    verb, *rest = words
    if verb not in VERBS:
        raise UserError(f"launch runs train, sweep or study, not {verb!r}: write it as {EXAMPLE}")
    if not rest or rest[0] not in PRESETS:
        preset = rest[0] if rest else ""
        raise UserError(f"{verb}: there is no preset {preset!r}: {did_you_mean(preset, PRESETS)}")
    executor = value(rest, "--executor") or ""
    if "runtime:ray" not in rest and executor.partition(":")[0] != "ray":
        raise UserError(
            f"{verb} {rest[0]} would run on one machine only: add runtime:ray after the preset, or --executor ray for "
            "many runs"
        )
    name = name if name is not None else rest[0]
    notes = []
    run = value(rest, "--run")
    if run is None:
        run = f"{runs.rstrip('/')}/{name}"
        rest += ["--run", run]
        notes.append(f"--run {run} was added: a job that is started again needs a run directory.")
    if not run:
        raise UserError("--run needs a directory after it")
    if executor == "ray":  # without an address: the cluster that the job starts
        named = {("--executor", "ray"): "ray:auto"}
        rest = [named.get(pair, pair[1]) for pair in pairwise(["", *rest])]
        rest = ["--executor=ray:auto" if word == "--executor=ray" else word for word in rest]
    elif not executor and value(rest, "--runtime.address") is None:
        rest += ["--runtime.address", "auto"]
    return ClusterJob(name, ("bestiary", verb, *rest), run, tuple(notes))


def value(words: list[str], flag: str) -> str | None:
    """The last value of a flag, written as `--flag value` or `--flag=value`; None: the flag is absent."""
    found = None
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == flag:
            found = "" if after.startswith("--") else after
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise UserError(f"{name.replace('_', '-')}={number} must be at least {least}")


def match(pattern: str, what: str, **texts: str | None) -> None:
    """Refuse a text that the generated file would have to quote; `what` says how it should look."""
    for name, text in texts.items():
        if text is not None and not re.fullmatch(pattern, text):
            raise UserError(f"{name.replace('_', '-')}={text!r} cannot be used: {what}")


def fill(template: str, **values: str) -> str:
    """Replace every @NAME@ of a template in one pass, so that @NAME@ inside a value stays as it is."""
    return re.sub("@([A-Z]+)@", lambda found: values[found[1]], template)
