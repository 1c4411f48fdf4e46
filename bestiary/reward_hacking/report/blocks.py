"""Tables and figures of the report as data for its template, and numbers as readable text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from bestiary.reward_hacking.statistics import Estimate


class Cell(NamedTuple):
    """A table cell with small lines below its text."""

    text: str
    small: list[str]
    strong: bool = False


class TableBlock(NamedTuple):
    """The first `left` columns are left-aligned; the last column holds sentences if `words_last`."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    left: int
    caption: str = ""
    words_last: bool = False
    summary: str = ""  # if given, the table is collapsed below this line


class FigureBlock(NamedTuple):
    png: str  # base64
    alt: str
    caption: str


Block = TableBlock | FigureBlock
ByMode = dict[str, list[Block]]  # mode of the policy -> what is shown


def interval(e: Estimate, of: str = "seed", form: str = "") -> Cell:
    """A mean with its interval below it."""
    mean, low, high = ("" if x is None else format(x, form) if form else number(x) for x in (e.mean, e.low, e.high))
    return Cell(mean, [f"{low} to {high}" if low else f"one {of}" if e.n == 1 else "no interval"])


def number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 999.5 else f"{x:.3g}"


def short(x: float) -> str:
    """A count with a metric prefix: 250k, 1.2M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= unit:
            return f"{x / unit:.3g}{name}"
    return f"{x:g}"


def setting_text(value: Any) -> str:
    """A setting as text; integers with thousands separators."""
    if isinstance(value, list | tuple):
        return ", ".join(setting_text(v) for v in value)
    if value is None or isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def count(n: int, thing: str, plural: str = "s") -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}{plural}"
