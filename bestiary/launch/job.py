"""What a launched job runs: the words behind `--`, checked without importing what they name, and made to resume."""

import re
from dataclasses import dataclass
from itertools import pairwise

from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError
from bestiary.presets import PRESETS

VERBS = ("train", "sweep", "study")
EXAMPLE = "-- train pong runtime:ray --runtime.actors 16"


@dataclass(frozen=True)
class Job:
    """A command of bestiary that goes on where it stood when it is run again."""

    name: str
    words: tuple[str, ...]
    """of the whole command, `bestiary` first"""
    run: str
    notes: tuple[str, ...]
    """what was added, in sentences"""


def job(words: list[str], name: str | None, runs: str) -> Job:
    """The command in full. Without a run directory of its own it gets one under `runs`, named as the job is."""
    if not words:
        raise UserError(f"there is nothing to launch: say what behind two dashes, such as {EXAMPLE}")
    verb, *rest = words
    if verb not in VERBS:
        raise UserError(f"launch runs train, sweep or study, not {verb!r}: write {EXAMPLE}")
    if not rest or rest[0] not in PRESETS:
        said = rest[0] if rest else ""
        raise UserError(f"{verb}: there is no preset {said!r}: {did_you_mean(said, PRESETS)}")
    where = value(rest, "--executor") or ""
    if "runtime:ray" not in rest and where.partition(":")[0] != "ray":
        raise UserError(f"{verb} {rest[0]} would run on one machine only: add runtime:ray behind the preset")
    name = name if name is not None else rest[0]
    notes = []
    run = value(rest, "--run")
    if run is None:
        run = f"{runs.rstrip('/')}/{name}"
        rest += ["--run", run]
        notes.append(f"--run was not given: a job that is started again needs one, so it is {run}.")
    if not run:
        raise UserError("--run needs a directory")
    if where == "ray":  # runs of their own, on the cluster that the job makes
        named = {("--executor", "ray"): "ray:auto"}
        rest = [named.get(pair, pair[1]) for pair in pairwise(["", *rest])]
        rest = ["--executor=ray:auto" if word == "--executor=ray" else word for word in rest]
    elif not where and value(rest, "--runtime.address") is None:
        rest += ["--runtime.address", "auto"]
    return Job(name, ("bestiary", verb, *rest), run, tuple(notes))


def value(words: list[str], flag: str) -> str | None:
    """What was said of a flag last, as `--flag value` or `--flag=value`."""
    said = None
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == flag:
            said = "" if after.startswith("--") else after
        elif word.startswith(f"{flag}="):
            said = word.partition("=")[2]
    return said


def at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise UserError(f"{name.replace('_', '-')}={number} must be at least {least}")


def match(pattern: str, what: str, **texts: str | None) -> None:
    """Texts end up in files that other programs read: each must be of a form that needs no quotes there."""
    for name, text in texts.items():
        if text is not None and not re.fullmatch(pattern, text):
            raise UserError(f"{name.replace('_', '-')}={text!r} cannot be used: {what}")


def fill(template: str, **values: str) -> str:
    """Put values where a template says @NAME@, in one go: what they say is not looked at again."""
    return re.sub("@([A-Z]+)@", lambda found: values[found[1]], template)
