"""Numba compilation with an on-disk cache that is invalidated by a change in any file it depends on.

Numba's cache checks the file that defines a function. But the machine code also contains functions and constants from
other files: after a change of those files alone, the old machine code would still run. Here the cache key covers every
file of the package that compiles functions, and the files that these import.
"""

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit

from bestiary.config.compat import extend_numba_stamp

COMPILES = re.compile(r"^\s*(?:from|import) (?:numba|bestiary\.ops\.jit)\b", re.M)
IMPORTS = re.compile(r"^\s*from bestiary\.([\w.]+) import", re.M)


@cache
def stamp() -> bytes:
    """A digest of all source files that define compiled functions or that these import."""
    package = Path(__file__).parents[1]
    compiling = {path: text for path in package.rglob("*.py") if COMPILES.search(text := path.read_text("utf-8"))}
    imported = {
        package / f"{name.replace('.', '/')}.py" for text in compiling.values() for name in IMPORTS.findall(text)
    }
    digest = hashlib.sha256()
    for path in sorted({*compiling, *filter(Path.is_file, imported)}):
        digest.update(path.read_bytes())
    return digest.digest()


def compiler(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: njit with these options, without the GIL, cached on disk."""

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher: Any = njit(cache=True, nogil=True, **options)(function)
        extend_numba_stamp(dispatcher, stamp())
        return dispatcher

    return compiled
