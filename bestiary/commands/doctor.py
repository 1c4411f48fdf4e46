"""bestiary doctor: what this machine offers, and how to get what is missing."""

import os
import platform
import shutil

from rich.console import Console

from bestiary.errors import UserError
from bestiary.extras import EXTRAS, available
from bestiary.machine import choose_device, cores, keep_memory
from bestiary.run import versions


def main(args: list[str]) -> int:
    if args:
        raise UserError(f"doctor takes no arguments, not {' '.join(args)}")
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
    say(f"  allocator    {'tuned (large blocks are kept)' if keep_memory() else 'left as it is: not glibc'}")
    say("[bold]extras[/bold]")
    for extra, (_, purpose) in EXTRAS.items():
        here = available(extra)
        state = "[green]yes[/green]" if here else f'no: pip install "bestiary\\[{extra}]"'
        say(f"  {extra:8} {purpose:32} {state}")
    return 0
