"""bestiary doctor: versions, hardware, extras; bestiary doctor core: test a memory core against the core contract."""

import dataclasses
import os
import platform
import shutil
from typing import Any

from rich.console import Console
from rich.markup import escape

from bestiary.config.extras import EXTRAS, available
from bestiary.config.machine import choose_device, cores, tune_malloc
from bestiary.config.suggestions import did_you_mean
from bestiary.config.versions import versions
from bestiary.cores.base import Core
from bestiary.errors import UserError

USAGE = """\
usage: bestiary doctor                        versions, hardware, and extras with the command that installs them
       bestiary doctor core NAME              test a memory core against the core contract
       bestiary doctor core FILE.py:Class     test a core of your own
"""


def main(args: list[str]) -> int:
    if args and args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if args and args[0] == "core" and len(args) == 2:
        return _core(args[1])
    if args:
        raise UserError(
            f"doctor does not know {' '.join(args)!r}: it takes no argument, core NAME or core FILE.py:Class"
        )
    import torch

    show = Console(highlight=False).print
    show("[bold]versions[/bold]")
    for package, version in versions().items():
        show(f"  {package:12} {version}")
    show("[bold]hardware[/bold]")
    show(f"  processor    {platform.machine()}, {cores()} usable cores")
    show(f"  threads      {cores()} for images, 1 for small inputs, unless --runtime.threads is given")
    show(f"  device       {choose_device('auto')}" + ("" if torch.accelerator.is_available() else " (no accelerator)"))
    if hasattr(os, "sysconf"):
        show(f"  memory       {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB")
    show(f"  disk here    {shutil.disk_usage('.').free / 2**30:.1f} GiB free")
    if os.path.isdir("/dev/shm"):
        show(f"  /dev/shm     {shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free")
    show(f"  allocator    {'tuned: large blocks are reused' if tune_malloc() else 'not tuned: this is not glibc'}")
    show("[bold]extras[/bold]")
    for extra, (_, purpose) in EXTRAS.items():
        state = "[green]yes[/green]" if available(extra) else f'no: pip install "bestiary\\[{extra}]"'
        show(f"  {extra:8} {purpose:32} {state}")
    return 0


def _core(which: str) -> int:
    from bestiary.analysis.core_contract import check_contract

    config = _find(which)
    failed = 0
    show = Console(highlight=False, soft_wrap=True).print
    show(f"[bold]{config}[/bold]", markup=True)
    for finding in check_contract(config):
        failed += finding.violation is not None
        mark = "[green]pass[/green]" if finding.violation is None else "[red]FAIL[/red]"
        detail = f"\n       {escape(finding.violation)}" if finding.violation else ""
        show(f"  {mark} {escape(finding.requirement)}{detail}")
    show("the core keeps the contract" if not failed else f"the core breaks {failed} promises of the contract")
    return 1 if failed else 0


def _find(which: str) -> Any:
    """The default settings of a core, by its name or by FILE.py:Class."""
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
