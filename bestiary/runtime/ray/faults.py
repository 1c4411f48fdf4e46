"""What went wrong in another process: how often that is put up with, and in which words it is told."""

from typing import Any

from bestiary.errors import UserError

START = 120.0  # seconds that a process may take to start
TRIES = 2  # failures in a row that are put up with


def fault(e: Any) -> BaseException:
    """What really went wrong in another process: a user's mistake as such, all else with the traceback from there."""
    cause = e.cause if hasattr(e, "cause") else e
    if isinstance(cause, UserError):
        return cause
    return RuntimeError(f"a process of the cluster failed:\n{e}")


def short(e: BaseException) -> str:
    """The gist of an error, for a note."""
    name = type(e).__name__
    if name in ("ActorDiedError", "ActorUnavailableError", "RayActorError"):
        return "its process or node is gone"
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return lines[-1][:200] if lines else name
