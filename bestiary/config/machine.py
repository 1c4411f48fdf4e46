"""The machine: memory allocator, device, CPU threads and free memory."""

import ctypes
import os
import sys
from pathlib import Path

import torch

from bestiary.errors import UserError
from bestiary.types import Spec

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def tune_malloc() -> bool:
    """Let glibc's malloc keep large blocks that are freed, instead of returning each of them to the kernel.

    Otherwise a CPU learner spends much of its time in page faults. Returns whether the settings took effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = ((M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, (1 << 31) - 1), (M_TOP_PAD, 64 << 20))
    accepted = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(accepted)


def choose_device(name: str) -> torch.device:
    """The device of a name such as cpu or cuda:1; `auto`: the accelerator if there is one, else the CPU."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        reason = str(e).splitlines()[0]
        raise UserError(f"runtime.device={name!r} cannot be used here ({reason}); try cpu or auto") from None
    return device


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(requested: int | None, spec: Spec) -> int:
    """Set PyTorch's number of threads: as requested, else all cores for large images and one for small inputs.

    Small matrices lose more to synchronization than they gain: they were four times slower with two threads.
    """
    threads = requested or (cores() if spec.is_image and min(spec.obs_shape[1:]) >= 36 else 1)
    torch.get_num_threads()  # until a thread has called this, it adopts the number that any other thread sets
    torch.set_num_threads(threads)
    return threads


SMALL_BYTES = 2**30  # a size, in memory or in a file, that may be used without asking


def free_memory() -> int | None:
    """Bytes that this process can still allocate, limited by the machine and its container; None: unknown."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return min(free, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no limit, or another kind of container
        return free


def check_memory(needed: int, capacity: int) -> None:
    """Raise a UserError if a replay of `needed` bytes does not fit into memory."""
    free = free_memory()
    if free is not None and needed > free:
        raise UserError(
            f"algo.replay.capacity={capacity} needs {needed / 2**30:.1f} GiB of memory, of which "
            f"{free / 2**30:.1f} are free: lower it to {int(0.9 * capacity * free / needed)} or less"
        )
