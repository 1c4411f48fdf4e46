"""Failures of other processes: how many are tolerated, and how messages describe them."""

from typing import Any

from bestiary.errors import UserError

START_TIMEOUT = 120.0  # seconds that a process may take to start
MAX_FAILURES = 2  # consecutive failures of one worker that are tolerated


def original_error(e: Any) -> BaseException:
    """The error that a remote call failed with: a UserError as it is, anything else with the remote traceback."""
    cause = e.cause if hasattr(e, "cause") else e
    if isinstance(cause, UserError):
        return cause
    return RuntimeError(f"a process of the cluster failed:\n{e}")


def summary(e: BaseException) -> str:
    """An error in a few words, for a note."""
    name = type(e).__name__
    if name in ("ActorDiedError", "ActorUnavailableError", "RayActorError"):
        return "its process or node died"
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return lines[-1][:200] if lines else name
