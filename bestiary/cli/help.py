"""The help of a command: tyro's text in one column, the parts of a preset first, shared settings after them."""

import codecs
import contextlib
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

T = TypeVar("T")
ORDER = (
    "positional arguments",
    "algo",
    "core",
    "env",
    "net",
    "",
    "evaluation",
    "runtime",
    "checkpoint",
    "log",
    "video",
)
WIDTH = 100  # columns: two of tyro's columns do not fit into it
TOP = re.compile(r"╭─ (\S.*?) ─+╮")
BOTTOM = re.compile(r"╰─+╯")
RULE = re.compile(r"│ ─+ │")


class Box(NamedTuple):
    title: str
    lines: list[str]  # with the frame

    @property
    def rank(self) -> tuple[int, int]:
        """The place of a box: by its first word in ORDER, nested parts after the part itself; choices come last."""
        name = self.title.removesuffix("options").strip()
        head = name.split(".")[0]
        return (ORDER.index(head) if head in ORDER else len(ORDER), name.count("."))

    def split(self, advanced: Collection[str]) -> "list[Box]":
        """This box without its advanced flags, and a box of these."""
        rules = [at for at, line in enumerate(self.lines) if RULE.fullmatch(line)]
        first = rules[0] + 1 if rules else 1
        kept, moved = self.lines[:first], [titled(self.lines[0], f"advanced {self.title}")]
        target = kept
        for line in self.lines[first:-1]:
            if match := re.match(r"│ (--[\w.-]+)", line):
                target = moved if match[1] in advanced else kept
            target.append(line)
        boxes = [Box(self.title, [*kept, self.lines[-1]])]
        if len(moved) > 1:
            boxes.append(Box(f"advanced {self.title}", [*moved, self.lines[-1]]))
        return boxes


def titled(top: str, title: str) -> str:
    """The top of a box with another title and the same width."""
    return f"╭─ {title} ".ljust(len(top) - 1, "─") + "╮"


def print_help(run: Callable[[], T], advanced: Collection[str]) -> T:
    """Run what prints tyro's help and exits, and print that help arranged."""
    width = os.environ.get("COLUMNS")
    # without UTF-8, tyro draws no boxes, and its order stays
    encoding = codecs.lookup(sys.stdout.encoding or "utf-8").name
    printed = io.TextIOWrapper(io.BytesIO(), encoding, errors="replace", write_through=True)
    os.environ["COLUMNS"] = str(min(WIDTH, shutil.get_terminal_size().columns))
    try:
        with contextlib.redirect_stdout(printed):
            return run()
    finally:
        os.environ.pop("COLUMNS")
        if width is not None:
            os.environ["COLUMNS"] = width
        printed.seek(0)
        print(arrange(printed.read(), advanced), end="", flush=True)


def arrange(text: str, advanced: Collection[str]) -> str:
    """tyro's help with its boxes in our order."""
    before: list[str] = []
    boxes: list[Box] = []
    inside = False
    for line in text.splitlines():
        if not inside and (match := TOP.fullmatch(line)):
            title = "parts to choose" if match[1] == "subcommands" else match[1]
            boxes.append(Box(title, [titled(line, title)]))
            inside = True
        elif inside:
            boxes[-1].lines.append(line)
            inside = not BOTTOM.fullmatch(line)
        else:
            before.append(line)
    parts = [part for box in boxes for part in box.split(advanced)]
    parts.sort(key=lambda box: box.rank)  # stable: boxes of equal rank stay in tyro's order
    return "\n".join([*before, *(line for box in parts for line in box.lines)]) + "\n"
