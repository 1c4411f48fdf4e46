"""Help for a misspelt word."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """ "did you mean lstm?", or what there is to choose from."""
    known = list(known)
    alike = {name: difflib.SequenceMatcher(None, name, word).ratio() for name in known}
    least = max(0.6, max(alike.values(), default=0.0) - 0.15)  # nothing that is much less alike than the nearest
    near = difflib.get_close_matches(word, known, n=2, cutoff=least)
    return f"did you mean {' or '.join(near)}?" if near else otherwise or f"there are: {', '.join(known)}"
