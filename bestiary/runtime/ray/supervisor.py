"""Supervision of the driver: a small parent process restarts a lost driver from the run's last checkpoint."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

from bestiary.errors import EX_TEMPFAIL

SUPERVISED = "BESTIARY_SUPERVISED"  # file descriptor that closes when the supervisor dies


def is_supervised() -> bool:
    """Whether a supervisor started this process; then this process ends when the supervisor dies."""
    pipe = os.environ.pop(SUPERVISED, None)
    if pipe is None:
        return False
    threading.Thread(target=_end_with_supervisor, args=(int(pipe),), daemon=True).start()
    return True


def _end_with_supervisor(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written: the call returns when the other end closes
    os.kill(os.getpid(), signal.SIGTERM)


def in_foreground() -> bool:
    """Whether a terminal sends its signals to this process and its children."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def supervise(args: list[str], path: Path, restarts: int, restart_args: list[str] | None = None) -> int:
    """Run `bestiary ARGS` in a child process and restart it, at most `restarts` times, when it is lost.

    The command (or `restart_args`, if given, from the second start on) must continue the run at `path`. Returns the
    exit code of the last child.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None and not (number == signal.SIGINT and in_foreground()):  # the terminal sends Ctrl-C to both
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while True:
            child_end, own_end = os.pipe()
            environment = os.environ | {SUPERVISED: str(child_end)}
            child = subprocess.Popen([sys.executable, "-m", "bestiary", *args], env=environment, pass_fds=(child_end,))
            os.close(child_end)
            code = child.wait()
            os.close(own_end)
            if received or (code >= 0 and code != EX_TEMPFAIL):
                return code if code >= 0 else 128 - code
            reason = "lost the learner" if code == EX_TEMPFAIL else f"was ended by {signal.Signals(-code).name}"
            if restarts == 0:
                print(f"bestiary: {path} {reason}; continue with: bestiary resume {path}", file=sys.stderr, flush=True)
                return EX_TEMPFAIL
            restarts -= 1
            args = restart_args or args
            left = f"{restarts} more restart{'s' * (restarts != 1)}"
            print(
                f"warning: {path} {reason}; restarting from the last checkpoint ({left})", file=sys.stderr, flush=True
            )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
