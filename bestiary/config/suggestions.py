"""Suggestions for misspelt names."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """ "did you mean lstm?", else `otherwise`, else the list of known names."""
    known = list(known)
    similarity = {name: difflib.SequenceMatcher(None, name, word).ratio() for name in known}
    cutoff = max(0.6, max(similarity.values(), default=0.0) - 0.15)  # only names almost as similar as the most similar
    near = difflib.get_close_matches(word, known, n=2, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise or f"there are: {', '.join(known)}"
