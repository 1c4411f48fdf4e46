"""The machine underneath: threads, device and memory allocator, chosen instead of inherited."""

import ctypes
import sys

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def keep_memory() -> bool:
    """Tell glibc to keep large blocks instead of handing each one back to the kernel.

    Without it a CPU learner spends much of its time in page faults. Returns whether it took effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = ((M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, (1 << 31) - 1), (M_TOP_PAD, 64 << 20))
    return all([mallopt(parameter, value) == 1 for parameter, value in settings])


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        reason = str(e).splitlines()[0]
        raise ValueError(f"runtime.device={name!r} cannot be used here ({reason}); try cpu or auto") from None
    return device
