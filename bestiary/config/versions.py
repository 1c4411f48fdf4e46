"""Versions of installed packages. This module must not import PyTorch: every node of a cluster runs it first."""

import platform
from importlib import metadata


def versions() -> dict[str, str]:
    """Versions of everything that can change a result."""
    found: dict[str, str] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("bestiary", "torch", "numpy", "gymnasium", "ale-py", "box2d", "envpool", "tyro", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
