"""Compiled functions whose machine code is kept, and thrown away when any code it was made from changes.

Numba keeps machine code with a stamp of the file a function is in. But a function also contains what it calls, and
that may be in another file: after an update of that one alone the old code would run on. Here the stamp covers every
file of the package that is compiled.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit

from bestiary.config.compat import extend_numba_stamp


@cache
def stamp() -> bytes:
    """Of every source that speaks of compiling, and of the random numbers they share."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        text = path.read_bytes()
        if b"numba" in text or b"compil" in text or path.name == "seeding.py":
            digest.update(text)
    return digest.digest()


def compiler(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: njit with these options, without the interpreter lock, kept on disk."""

    def compiled(function: Callable[..., Any]) -> Any:
        made: Any = njit(cache=True, nogil=True, **options)(function)
        extend_numba_stamp(made, stamp())
        return made

    return compiled
