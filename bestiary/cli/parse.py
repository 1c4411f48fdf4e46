"""From words to experiments: tyro on the dataclasses, with suggestions for what it does not know."""

import contextlib
import io
import re
import sys
import typing
from typing import Annotated, Any, TypeVar

import tyro

from bestiary.config.experiment import Experiment, family
from bestiary.config.extras import require
from bestiary.config.schema import members
from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError
from bestiary.launch.executor import HERE, Place

T = TypeVar("T")
FLAT = tyro.conf.arg(name="")  # fields of a nested dataclass without its name in front
OPTIONS = (tyro.conf.CascadeSubcommandArgs,)
FAMILIES = ("env", "algo", "core", "runtime")


def check_parts(args: list[str]) -> list[str]:
    """`core:lstmm` deserves better than a usage text; naming the only choice there is does no harm."""
    kept = []
    for word in args:
        head, colon, choice = word.partition(":")
        if colon and not word.startswith("-") and head in FAMILIES:
            if choice not in family(head):
                raise UserError(f"there is no {head} {choice!r}: {did_you_mean(choice, family(head))}")
            if len(family(head)) == 1:
                continue
            word = f"{head}:{hyphenated(family(head)[choice])}"
        elif re.fullmatch(rf"--({'|'.join(FAMILIES)})\..*\bno-[a-z-]+", word):
            # tyro knows --env.no-one-life only once another flag, such as --env.one-life, has named the environment
            kept.append(word.replace(".no-", ".", 1))
        kept.append(word)
    return kept


def take_place(args: list[str]) -> tuple[Place, list[str]]:
    """Where runs are made, `--runtime ray[:ADDRESS]`, and the other words: tyro knows only runtimes of experiments."""
    place: Place = HERE
    rest: list[str] = []
    words = iter(args)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != "--runtime":
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        match = re.fullmatch(r"ray(?::(auto|[^\s:/]+:\d+))?", value)
        if match is None:
            raise UserError(f"--runtime {value} should be ray, ray:auto or ray:HOST:PORT, such as ray:10.0.0.5:6379")
        require("ray", "ray")
        from bestiary.launch.ray_executor import Cluster

        place = Cluster(match[1])
    return place, rest


def hyphenated(cls: type) -> str:
    """tyro's name for a choice: TMaze, which is tmaze everywhere else, is t-maze there."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<!^)(?=[A-Z][a-z])", "-", cls.__name__).lower()


def flags(cls: type, prefix: str = "") -> list[str]:
    """Every dotted flag a dataclass offers, over all choices of its unions."""
    found = []
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        dotted = prefix + name.replace("_", "-")
        nested = members(hint)
        here = prefix if FLAT in getattr(hint, "__metadata__", ()) else f"{dotted}."
        found += [flag for part in nested for flag in flags(part, here)] if nested else [f"--{dotted}"]
    return found


def parse(cls: type[T], args: list[str], prog: str, default: Any = None) -> T:
    """Parse arguments into a dataclass. An unknown word is answered with the nearest flag."""
    sys.stdout.flush()
    options: dict[str, Any] = {} if default is None else {"default": default}
    options |= {"prog": prog, "args": args, "config": OPTIONS, "return_unknown_args": True}
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            value, unknown = tyro.cli(cls, **options, console_outputs=False)
    except SystemExit as end:
        if (refusal := behind(end)) is not None:
            raise refusal from None  # a sentence of our own needs no box around it
        value, unknown = tyro.cli(cls, **options)  # help, or a mistake that tyro explains: the same again, aloud
    if unknown:
        word = next((w for w in unknown if w.startswith("-")), unknown[0])
        if (name := word.split("=")[0]) in flags(cls):
            raise UserError(f"there is no flag {name} for what is chosen here: {belongs(name)}")
        hint = did_you_mean(word.split("=")[0], sorted(set(flags(cls))), f"see `{prog} --help`")
        raise UserError(f"there is no flag {word}: {hint}" if word.startswith("-") else f"what is {word!r}? {hint}")
    return value


def behind(end: SystemExit) -> UserError | None:
    """What our own settings had to say, if that is why it came to this. Of a single word, tyro knows the flag too."""
    why = end.__context__  # tyro's own error, around ours
    ours = why and why.__context__
    return ours if isinstance(ours, UserError) and isinstance(getattr(why, "arg", None), str) else None


def belongs(flag: str) -> str:
    """Which choices have a flag."""
    head = flag.removeprefix("--").split(".")[0]
    known = family(head) if head in FAMILIES else {}
    having = [f"{head}:{name}" for name, part in known.items() if flag in flags(part, f"{head}.")]
    return f"it belongs to {' or '.join(having)}" if having else "it belongs to another choice"


Flat = Annotated[Experiment, FLAT]
