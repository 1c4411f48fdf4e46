"""From words to experiments: tyro on the dataclasses, with suggestions for what it does not know."""

import difflib
import importlib.metadata
import sys
from typing import Annotated, Any, TypeVar

import tyro

from bestiary.experiment import Experiment, family

T = TypeVar("T")
FLAT = tyro.conf.arg(name="")  # fields of a nested dataclass without its name in front
OPTIONS = (tyro.conf.CascadeSubcommandArgs,)
FAMILIES = ("env", "algo", "core", "runtime")


def load_plugins() -> None:
    """Packages may register parts of their own through the entry-point group `bestiary`."""
    for entry in importlib.metadata.entry_points(group="bestiary"):
        entry.load()()


def check_parts(args: list[str]) -> None:
    """`core:lstmm` deserves better than a usage text."""
    for word in args:
        head, colon, choice = word.partition(":")
        if not colon or word.startswith("-") or head not in FAMILIES:
            continue
        if choice not in family(head):
            near = difflib.get_close_matches(choice, family(head), n=2, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(family(head))}"
            raise ValueError(f"there is no {head} {choice!r}: {hint}")


def parse(cls: type[T], args: list[str], prog: str, default: Any = None) -> T:
    """Parse arguments into a dataclass; a mistake ends the program with tyro's explanation and code 2."""
    sys.stdout.flush()
    if default is None:
        return tyro.cli(cls, prog=prog, args=args, config=OPTIONS)
    return tyro.cli(cls, prog=prog, args=args, default=default, config=OPTIONS)


Flat = Annotated[Experiment, FLAT]
