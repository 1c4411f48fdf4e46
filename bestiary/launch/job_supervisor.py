"""Supervision of one run's process on a node of a Ray cluster. It uses only the standard library: there is one per run.

Ray kills the children of a process that it ends, but a run should save first. The run is therefore a grandchild: this
file is also the program between, which starts the run and prints its process id and its exit code. A pipe connects the
run to the supervisor, as it otherwise connects a run to the program that started it: when the supervisor dies for any
reason, the run saves and exits.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LOCK_TIMEOUT = 120.0  # seconds for the run's last process to exit, or for a dead node to lose its locks
POLL_SECONDS = 0.05


class JobSupervisor:
    """A Ray actor around the process of one run. Its methods are called concurrently."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.stopping = False

    def run(self, args: list[str], path: str, root: str, output: str, env: dict[str, str], cwd: str) -> int:
        """Run `python ARGS` to its end, with the locks of the run and of the directory of all runs; its exit code."""
        run_lock, root_lock = (Path(path) / ".lock").open("wb"), (Path(root) / ".lock").open("wb")
        with run_lock, root_lock:
            deadline = time.monotonic() + LOCK_TIMEOUT
            while not (lock(root_lock, fcntl.LOCK_SH) and lock(run_lock, fcntl.LOCK_EX)):
                if self.stopping:
                    return 128 + signal.SIGTERM
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process still works in {path}")
                time.sleep(POLL_SECONDS)
            locks = (run_lock.fileno(), root_lock.fileno())
            log = (Path(path) / output).open("wb")
            # a child inherits the signals that this thread blocks, and Ray blocks some
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
            starter = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, ",".join(map(str, locks)), sys.executable, *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | env,
                cwd=cwd if os.path.isdir(cwd) else None,
                start_new_session=True,
                pass_fds=locks,
            )
            log.close()
        with starter:  # its end closes the pipe
            assert starter.stdout is not None
            self.pid = int(starter.stdout.readline() or 0) or None
            if self.stopping:
                self.signal(signal.SIGTERM)
            code = starter.stdout.readline()
            self.pid = None
        if not code:
            raise ChildProcessError("the process that started it was killed")
        return int(code)

    def signal(self, number: int) -> None:
        """Send a signal to the run, or to the run that is about to start."""
        self.stopping = True
        if self.pid is not None:
            os.kill(self.pid, number)

    def process(self) -> int | None:
        """The run's process id; None: it does not run."""
        return self.pid


def lock(file: object, mode: int) -> bool:
    """Try to lock a file; True if that succeeded, and always on a file system without locks."""
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)  # type: ignore[arg-type]
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def start_run(locks: list[int], args: list[str]) -> None:
    """Start a run with our stdin and stderr; print its process id, and its exit code when it has ended."""
    run = subprocess.Popen(args, stdout=sys.stderr, stderr=subprocess.STDOUT, pass_fds=locks)
    for number in locks:
        os.close(number)
    print(run.pid, flush=True)
    print(run.wait(), flush=True)


if __name__ == "__main__":
    start_run([int(number) for number in sys.argv[1].split(",")], sys.argv[2:])
