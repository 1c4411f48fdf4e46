"""Algorithms with changed settings, those of their replay among them."""

from dataclasses import fields, replace
from typing import Any


def configure(algo: Any, **changes: Any) -> Any:
    """An algorithm (class or instance) with changes; a change goes to `algo.replay` where that has such a field."""
    algo = algo() if isinstance(algo, type) else algo
    if not hasattr(algo, "replay"):
        return replace(algo, **changes)
    names = {field.name for field in fields(algo.replay)}
    replay = {name: value for name, value in changes.items() if name in names}
    others = {name: value for name, value in changes.items() if name not in names}
    return replace(algo, replay=replace(algo.replay, **replay), **others)
