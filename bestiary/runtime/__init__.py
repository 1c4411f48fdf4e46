"""Runtimes: how actors, replay and learner of an experiment are executed. Importing this imports the settings only."""

from bestiary.runtime.config import Local, Overlap, Ray, RuntimeBase, RuntimeConfig

__all__ = ["Local", "Overlap", "Ray", "RuntimeBase", "RuntimeConfig"]
