"""Small pieces of a page: elements whose text is escaped, tables, pictures, and numbers as people read them."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from bestiary.reward_hacking.statistics import Estimate

VOID = ("img", "meta")
# nothing is fetched, whatever the texts of a study contain
POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
CSS = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 1120px; margin: 2em auto;
  padding: 0 24px; }
h1 { font-size: 30px; line-height: 1.2; margin-bottom: 0.2em; }
h2 { font-size: 23px; margin-top: 2em; padding-top: 0.6em; border-top: 2px solid #d5d5d5; }
h3 { font-size: 18px; margin-top: 1.6em; }
code { font: 14px ui-monospace, monospace; background: #f1f1f1; padding: 1px 4px; overflow-wrap: anywhere; }
nav a { margin-right: 1.2em; }
a { color: #0059a3; }
figure { margin: 1em 0 1.6em; }
figure > img { width: 100%; height: auto; }
figcaption, .note { color: #444; font-size: 15px; max-width: 95ch; }
.warning { border-left: 4px solid #D55E00; background: #fdf3ec; padding: 0.5em 1em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14.5px; line-height: 1.3; margin: 0.6em 0; }
caption { text-align: left; color: #444; padding-bottom: 0.5em; caption-side: top; font-size: 15px; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid #e2e2e2; text-align: right; vertical-align: top;
  font-variant-numeric: tabular-nums; }
th { border-bottom: 1.5px solid #888; vertical-align: bottom; }
.left { text-align: left; white-space: nowrap; }
.words { text-align: left; min-width: 11em; }
td small { display: block; color: #555; white-space: nowrap; font-size: 12.5px; }
tbody tr:hover { background: #f6f9fc; }
details { margin: 0.6em 0 1.4em; }
summary { cursor: pointer; color: #0059a3; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(520px, 1fr)); gap: 20px; }
.gallery figure { margin: 0; }
.gallery img { width: 100%; height: auto; background: #eee; display: block; }
.gallery figcaption { padding-top: 4px; overflow-wrap: anywhere; }
.gallery img { image-rendering: pixelated; }
@media print { h2 { break-before: auto; } figure, tr { break-inside: avoid; } nav { display: none; } }
"""


class Html(str):
    """Text that is markup already. All other text is escaped on its way into an element."""


def el(name: str, /, *inside: Any, **attributes: Any) -> Html:
    names = {key.rstrip("_").replace("_", "-"): escape(str(value)) for key, value in attributes.items()}
    opening = f"<{name}" + "".join(f' {key}="{value}"' for key, value in names.items()) + ">"
    return Html(opening) if name in VOID else Html(f"{opening}{join(inside)}</{name}>")


def join(parts: Iterable[Any]) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(str(part)) for part in parts))


def page(title: str, *parts: Any) -> str:
    """A whole page that needs no other file."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", title),
        el("style", Html(CSS)),
    )
    return f"<!DOCTYPE html>\n{el('html', head, el('body', el('main', *parts)), lang='en')}\n"


def figure(png: str, alt: str, caption: str) -> Html:
    return el("figure", el("img", src=f"data:image/png;base64,{png}", alt=alt), el("figcaption", caption))


def table(
    head: Sequence[str], body: Sequence[Sequence[Any]], left: int, caption: str = "", words_last: bool = False
) -> Html:
    """Numbers to the right; the first `left` columns to the left, and words in the last one if asked."""

    def look(column: int) -> dict[str, str]:
        last = words_last and column == len(head) - 1
        return {"class_": "words"} if last else {"class_": "left"} if column < left else {}

    top = el("thead", el("tr", *(el("th", name, scope="col", **look(i)) for i, name in enumerate(head))))
    rows = [el("tr", *(el("td", cell, **look(i)) for i, cell in enumerate(row))) for row in body]
    named = [el("caption", caption)] if caption else []
    return el("div", el("table", *named, top, el("tbody", *rows)), class_="wide")


def interval(e: Estimate, of: str = "seed", form: str = "") -> Html:
    """A mean, and its interval below it."""
    mean, low, high = ("" if x is None else format(x, form) if form else number(x) for x in (e.mean, e.low, e.high))
    return join([mean, el("small", f"{low} to {high}" if low else f"one {of}" if e.n == 1 else "no interval")])


def number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 999.5 else f"{x:.3g}"


def short(x: float) -> str:
    """A count as people say it: 250k, 1.2M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= unit:
            return f"{x / unit:.3g}{name}"
    return f"{x:g}"


def words(value: Any) -> str:
    """A setting as text; whole numbers with their thousands apart."""
    if isinstance(value, list | tuple):
        return ", ".join(words(v) for v in value)
    if value is None or isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def count(n: int, thing: str, plural: str = "s") -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}{plural}"
