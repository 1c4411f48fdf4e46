"""From command line arguments to dataclasses with tyro; unknown and old arguments are answered with the right ones."""

import contextlib
import dataclasses
import io
import re
import sys
import typing
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import tyro

from bestiary.cli.help import print_help
from bestiary.config.aliases import renamed_choice, renamed_flag, renamed_value
from bestiary.config.experiment import Experiment, family
from bestiary.config.schema import members
from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError

T = TypeVar("T")
FLAT = tyro.conf.arg(name="")  # marks a nested dataclass whose fields are flags without a prefix
OPTIONS = (tyro.conf.CascadeSubcommandArgs,)
FAMILIES = ("env", "algo", "core", "runtime")

Flat = Annotated[Experiment, FLAT]
ExecutorName = Annotated[str, tyro.conf.arg(metavar="local|ray[:ADDRESS]")]


def check_parts(args: list[str]) -> list[str]:
    """Check words such as `core:lstm`, and write them and negated flags as tyro expects them."""
    checked = []
    for word in args:
        name, colon, choice = word.partition(":")
        if colon and not word.startswith("-") and name in FAMILIES:
            known = family(name)
            if choice not in known:
                hint = renamed_choice(name, choice, known) or did_you_mean(choice, known)
                raise UserError(f"there is no {name} {choice!r}: {hint}")
            if len(known) == 1:  # tyro has no subcommand for a union of one
                continue
            word = f"{name}:{hyphenated(known[choice])}"
        elif re.fullmatch(rf"--({'|'.join(FAMILIES)})\..*\bno-[a-z-]+", word):
            # tyro accepts --env.no-one-life only after another flag, such as --env.one-life, has selected the part
            checked.append(word.replace(".no-", ".", 1))
        checked.append(word)
    return checked


def hyphenated(cls: type) -> str:
    """tyro's name of a choice: TMaze is t-maze for tyro and tmaze everywhere else."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<!^)(?=[A-Z][a-z])", "-", cls.__name__).lower()


def settings(cls: type, prefix: str = "", chosen: Any = None) -> Iterator[tuple[str, type, dataclasses.Field[Any]]]:
    """(flag, dataclass, field) of every setting of a dataclass: of all parts of its unions, or of those in `chosen`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        dotted = prefix + field.name.replace("_", "-")
        nested = members(hints[field.name])
        inner = prefix if FLAT in getattr(hints[field.name], "__metadata__", ()) else f"{dotted}."
        part = None if chosen is None else getattr(chosen, field.name)
        for option in nested if part is None else {type(part)} & set(nested):
            yield from settings(option, inner, part)
        if not nested:
            yield f"--{dotted}", cls, field


def flags(cls: type, prefix: str = "") -> list[str]:
    """Every dotted flag of a dataclass, over all choices of its unions."""
    return [flag for flag, _, _ in settings(cls, prefix)]


def parse(cls: type[T], args: list[str], prog: str, default: Any = None) -> T:
    """Parse arguments into a dataclass. An unknown argument is answered with the flag most like it."""
    sys.stdout.flush()
    refuse_old_flags(cls, args)
    options: dict[str, Any] = {} if default is None else {"default": default}
    options |= {"prog": prog, "args": args, "config": OPTIONS, "return_unknown_args": True}
    if not {"-h", "--help"}.isdisjoint(args):
        print_help(lambda: tyro.cli(cls, **options), advanced_flags(cls, args, options))  # exits
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            value, unknown = tyro.cli(cls, **options, console_outputs=False)
    except SystemExit as end:
        if (error := cause_of(end)) is not None:
            raise error from None  # one sentence, without tyro's box around it
        value, unknown = tyro.cli(cls, **options)  # a mistake that tyro explains: parse again and print
    if unknown:
        word = next((w for w in unknown if w.startswith("-")), unknown[0])
        if (name := word.split("=")[0]) in (known := set(flags(cls))):
            renamed = renamed_flag(name, known - {name})  # another choice may have taken over an old name
            reason = owners(name) if renamed is None else f"{owners(name)}, or {renamed}"
            raise UserError(f"there is no flag {name} for what is chosen here: {reason}")
        hint = did_you_mean(word.split("=")[0], sorted(set(flags(cls))), f"see `{prog} --help`")
        raise UserError(f"there is no flag {word}: {hint}" if word.startswith("-") else f"what is {word!r}? {hint}")
    return value


def advanced_flags(cls: type, args: list[str], options: dict[str, Any]) -> set[str]:
    """The advanced flags of the parts that the arguments choose; of all parts if the arguments cannot be parsed."""
    options = options | {"args": [word for word in args if word not in ("-h", "--help")]}
    chosen = None
    with contextlib.suppress(SystemExit, UserError), contextlib.redirect_stderr(io.StringIO()):
        chosen, _ = tyro.cli(cls, **options, console_outputs=False)
    return {flag for flag, _, field in settings(cls, chosen=chosen) if field.metadata.get("advanced")}


def refuse_old_flags(cls: type, args: list[str]) -> None:
    """Answer a flag of an earlier version with its name of today."""
    known: set[str] = set()
    for word, after in pairwise([*args, ""]):
        flag, _, value = word.partition("=")
        if not flag.startswith("--"):
            continue
        known = known or set(flags(cls))
        if flag == "--runtime" and "--executor" in known:
            value = value or after
            name = value if value.partition(":")[0] == "ray" else "ray[:ADDRESS]"
            raise UserError(
                f"--runtime is no flag: many runs on a Ray cluster are --executor {name}, and runtime:ray spreads one "
                "run over a cluster"
            )
        if (sentence := renamed_flag(flag, known) or renamed_value(flag, value or after, known)) is not None:
            raise UserError(sentence)


def cause_of(end: SystemExit) -> UserError | None:
    """The error of our own settings that made tyro exit, if there is one."""
    error = end.__context__  # tyro's own error, which was raised from ours
    cause = error and error.__context__
    return cause if isinstance(cause, UserError) and isinstance(getattr(error, "arg", None), str) else None


def owners(flag: str) -> str:
    """The choices that have a flag, in words."""
    name = flag.removeprefix("--").split(".")[0]
    known = family(name) if name in FAMILIES else {}
    having = [f"{name}:{choice}" for choice, part in known.items() if flag in flags(part, f"{name}.")]
    return f"it belongs to {' or '.join(having)}" if having else "it belongs to another choice"
