"""Whoever drives a cluster run may be lost too: a small process beside it starts it again, from the last checkpoint."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

from bestiary.errors import LOST

WATCHED = "BESTIARY_WATCHED"  # file descriptor that closes when the process that watches over us is gone


def watched() -> bool:
    """Whether somebody watches over this process; then it leaves with them."""
    line = os.environ.pop(WATCHED, None)
    if line is None:
        return False
    threading.Thread(target=_leave_with, args=(int(line),), daemon=True).start()
    return True


def _leave_with(line: int) -> None:
    os.read(line, 1)  # nobody writes: this returns when the other end is gone
    os.kill(os.getpid(), signal.SIGTERM)


def in_terminal() -> bool:
    """Whether we, and so all that we start, are what a terminal sends its signals to."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def supervise(args: list[str], path: Path, restarts: int, again: list[str] | None = None) -> int:
    """Run `bestiary ARGS` in a process of its own; should it be lost, again, so often at most. Returns its last code.

    The command, or what is to be run the other times, must be one that continues what it finds at `path`.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None and not (number == signal.SIGINT and in_terminal()):  # whose Ctrl-C reaches it by itself
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while True:
            theirs, ours = os.pipe()
            environment = os.environ | {WATCHED: str(theirs)}
            child = subprocess.Popen([sys.executable, "-m", "bestiary", *args], env=environment, pass_fds=(theirs,))
            os.close(theirs)
            code = child.wait()
            os.close(ours)
            if received or (code >= 0 and code != LOST):
                return code if code >= 0 else 128 - code
            why = "lost the learner" if code == LOST else f"was ended by {signal.Signals(-code).name}"
            if restarts == 0:
                print(f"bestiary: {path} {why}; continue with: bestiary resume {path}", file=sys.stderr, flush=True)
                return LOST
            restarts -= 1
            args = again or args
            left = f"{restarts} more restart{'s' * (restarts != 1)}"
            print(f"warning: {path} {why}; it goes on from its last checkpoint ({left})", file=sys.stderr, flush=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
