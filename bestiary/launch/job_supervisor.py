"""Keeps the process of one run on a node. Light, because there is one per run: nothing but the standard library.

Ray kills the children of a process that it ends. A run should save first, so it is a grandchild: this file is also
the program in between, which starts the run and tells its number and its exit code. The run has a line to the keeper,
as it otherwise has to the program that started it: when the keeper is gone, however it went, it saves and leaves.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 120.0  # seconds for the last process of the same run to leave, or for its node to lose its locks
LOOK = 0.05


class Keeper:
    """A Ray actor around one process. `run` and `signal` are called side by side."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.asked = False

    def run(self, words: list[str], path: str, root: str, output: str, env: dict[str, str], cwd: str) -> int:
        """Start it, wait, and return its exit code."""
        ours, everyones = (Path(path) / ".lock").open("wb"), (Path(root) / ".lock").open("wb")
        with ours, everyones:
            until = time.monotonic() + PATIENCE
            while not (lock(everyones, fcntl.LOCK_SH) and lock(ours, fcntl.LOCK_EX)):
                if self.asked:
                    return 128 + signal.SIGTERM
                if time.monotonic() > until:
                    raise TimeoutError(f"another process still works in {path}")
                time.sleep(LOOK)
            held = (ours.fileno(), everyones.fileno())
            said = (Path(path) / output).open("wb")
            # a child gets the signals that this thread blocks, and Ray blocks some
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
            between = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, ",".join(map(str, held)), sys.executable, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=os.environ | env,
                cwd=cwd if os.path.isdir(cwd) else None,
                start_new_session=True,
                pass_fds=held,
            )
            said.close()
        with between:  # leaving it closes the line
            assert between.stdout is not None
            self.pid = int(between.stdout.readline() or 0) or None
            if self.asked:
                self.signal(signal.SIGTERM)
            code = between.stdout.readline()
            self.pid = None
        if not code:
            raise ChildProcessError("the process that started it was killed")
        return int(code)

    def signal(self, number: int) -> None:
        self.asked = True
        if self.pid is not None:
            os.kill(self.pid, number)

    def process(self) -> int | None:
        return self.pid


def lock(file: object, how: int) -> bool:
    """Whether it is ours now; always, on a file system without locks."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)  # type: ignore[arg-type]
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def stand_between(held: list[int], words: list[str]) -> None:
    """Start a run whose output goes to our stderr and whose input is ours; tell its number, then its exit code."""
    run = subprocess.Popen(words, stdout=sys.stderr, stderr=subprocess.STDOUT, pass_fds=held)
    for number in held:
        os.close(number)
    print(run.pid, flush=True)
    print(run.wait(), flush=True)


if __name__ == "__main__":
    stand_between([int(number) for number in sys.argv[1].split(",")], sys.argv[2:])
