"""bestiary doctor: what this machine offers; bestiary doctor core: whether a memory keeps the contract."""

import dataclasses
import os
import platform
import shutil
from typing import Any

from rich.console import Console
from rich.markup import escape

from bestiary.config.extras import EXTRAS, available
from bestiary.config.machine import choose_device, cores, tune_malloc, versions
from bestiary.config.suggestions import did_you_mean
from bestiary.cores.base import Core
from bestiary.errors import UserError

USAGE = """\
usage: bestiary doctor                        what this machine offers, and how to get what is missing
       bestiary doctor core NAME              put a memory through the contract of memory
       bestiary doctor core FILE.py:Class     the same for one of your own
"""


def main(args: list[str]) -> int:
    if args and args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if args and args[0] == "core" and len(args) == 2:
        return _core(args[1])
    if args:
        raise UserError(
            f"doctor does not know {' '.join(args)!r}: it takes nothing, or core NAME, or core FILE.py:Class"
        )
    import torch

    say = Console(highlight=False).print
    say("[bold]versions[/bold]")
    for package, version in versions().items():
        say(f"  {package:12} {version}")
    say("[bold]machine[/bold]")
    say(f"  processor    {platform.machine()}, {cores()} cores usable")
    say(f"  threads      {cores()} for pictures, 1 for small inputs, unless --runtime.threads says otherwise")
    say(f"  device       {choose_device('auto')}" + ("" if torch.accelerator.is_available() else " (no accelerator)"))
    if hasattr(os, "sysconf"):
        say(f"  memory       {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB")
    say(f"  disk here    {shutil.disk_usage('.').free / 2**30:.1f} GiB free")
    if os.path.isdir("/dev/shm"):
        say(f"  /dev/shm     {shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free")
    say(f"  allocator    {'tuned (large blocks are kept)' if tune_malloc() else 'left as it is: not glibc'}")
    say("[bold]extras[/bold]")
    for extra, (_, purpose) in EXTRAS.items():
        here = available(extra)
        state = "[green]yes[/green]" if here else f'no: pip install "bestiary\\[{extra}]"'
        say(f"  {extra:8} {purpose:32} {state}")
    return 0


def _core(which: str) -> int:
    from bestiary.analysis.core_contract import examine

    config = _find(which)
    broken = 0
    say = Console(highlight=False, soft_wrap=True).print
    say(f"[bold]{config}[/bold]", markup=True)
    for finding in examine(config):
        broken += finding.broken is not None
        mark = "[green]kept  [/green]" if finding.broken is None else "[red]broken[/red]"
        say(f"  {mark} {escape(finding.promise)}" + (f"\n         {escape(finding.broken)}" if finding.broken else ""))
    say("the contract is kept" if not broken else f"{broken} of the promises broken")
    return 1 if broken else 0


def _find(which: str) -> Any:
    """A core's configuration, with its own defaults, by name or by FILE.py:Class."""
    from bestiary.config.experiment import family
    from bestiary.config.plugins import load_file

    path, colon, name = which.rpartition(":")
    if colon:
        cls = getattr(load_file(path), name, None)
        if cls is None:
            raise UserError(f"{path} has no class {name}")
    elif which in family("core"):
        cls = family("core")[which]
    else:
        raise UserError(f"there is no core {which!r}: {did_you_mean(which, family('core'))}, or name a FILE.py:Class")
    if not (dataclasses.is_dataclass(cls) and hasattr(cls, "build")):
        raise UserError(
            f"{name or which} must be a frozen dataclass with a method build(input_width) that returns a Core"
        )
    try:
        config = cls()  # type: ignore
        core = config.build(6)  # type: ignore
    except Exception as e:
        raise UserError(f"{name or which} cannot be built with its defaults: {type(e).__name__}: {e}") from e
    if not isinstance(core, Core) or not isinstance(getattr(core, "width", None), int):
        raise UserError(f"{name or which}.build must return a bestiary.cores.base.Core with a width")
    return config
