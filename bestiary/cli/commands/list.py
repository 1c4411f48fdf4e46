"""bestiary list [WHAT]: presets, and the parts of an experiment with their settings."""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError
from bestiary.presets import PRESETS

WIDTH = 256
KINDS = {"algos": "algo", "cores": "core", "envs": "env", "runtimes": "runtime"}


def main(args: list[str]) -> int:
    wanted = args or ["presets", *KINDS]
    if wanted[0] in ("-h", "--help"):
        print(f"usage: bestiary list [presets|{'|'.join(KINDS)}|games]")
        return 0
    for what in wanted:
        if what not in ("presets", "games", *KINDS):
            raise UserError(f"cannot list {what!r}: {did_you_mean(what, ['presets', *KINDS, 'games'])}")
    for what in wanted:
        _show(what)
    return 0


def _sizes(cls: Any) -> tuple[str, str]:
    """Numbers of parameters and of state values of a core with its default settings."""
    core = cls().build(WIDTH)
    parameters = sum(p.numel() for p in core.parameters())
    return f"{parameters:,}", f"{sum(leaf.numel() for leaf in core.initial_state(1)):,}"


def _show(what: str) -> None:
    table = Table(title=what, title_justify="left", box=None, padding=(0, 2))
    if what == "games":
        from bestiary.config.extras import require
        from bestiary.envs.atari import camel_case

        require("ale_py", "atari")
        from ale_py import roms

        print("\n".join(camel_case(rom) for rom in sorted(roms.get_all_rom_ids())))
        return
    if what == "presets":
        table.add_column("name")
        table.add_column("description")
        for name, (_, text) in PRESETS.items():
            table.add_row(name, text)
    else:
        from bestiary.config.experiment import family
        from bestiary.config.plugins import load_plugins

        load_plugins()
        sized = what == "cores"
        names = family(KINDS[what])
        table.add_column("name", min_width=max(len(f"{KINDS[what]}:{name}") for name in names))
        for column in ("description", *(("parameters", "state") if sized else ()), "settings"):
            table.add_column(column)
        for name, cls in names.items():
            sentence = (cls.__doc__ or "").strip().splitlines()[0]
            fields = ", ".join(f.name.replace("_", "-") for f in dataclasses.fields(cls))
            table.add_row(f"{KINDS[what]}:{name}", sentence, *(_sizes(cls) if sized else ()), fields or "-")
        if sized:
            table.caption = f"with default settings and an input of width {WIDTH}; state: values per environment stream"
            table.caption_justify = "left"
    Console().print(table)
    print()
