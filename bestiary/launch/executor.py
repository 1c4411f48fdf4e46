"""Many runs in parallel: an executor starts a process per run, and a pool watches, stops and retries the processes."""

import csv
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Generic, NamedTuple, Protocol, Self, TypeVar

from bestiary.config.aliases import upgrade_metric
from bestiary.config.experiment import Experiment
from bestiary.config.extras import require
from bestiary.config.machine import cores
from bestiary.config.plugins import plugin_args
from bestiary.errors import UserError
from bestiary.training.run import Run

OUTPUT = "output.txt"  # file in the run directory: standard output and error of the run's last process
POLL_SECONDS = 0.1  # time between two checks of the processes


class Job(Protocol):
    """A run to train: its experiment and its run directory."""

    @property
    def name(self) -> str: ...
    @property
    def experiment(self) -> Experiment: ...
    @property
    def path(self) -> Path: ...


J = TypeVar("J", bound=Job)


class JobResult(NamedTuple, Generic[J]):
    """A job whose process has exited and is not retried."""

    job: J
    seconds: float  # since its first start
    problem: str | None  # why it failed; None: it finished, or it was asked to stop


class ExitStatus(NamedTuple):
    """How a process ended."""

    code: int  # the exit code; negative: the number of the signal that killed it
    reason: str | None = None  # why it failed, where neither the code nor the output says so

    @property
    def killed(self) -> bool:
        """True if a signal ended the process, False if it exited by itself."""
        return self.code < 0 or self.code in (128 + signal.SIGTERM, 128 + signal.SIGINT)


class Retries(NamedTuple):
    """How often a job is started again."""

    killed: int  # after a signal killed its process
    failed: int  # after its process failed by itself


class Process(Protocol):
    """The process of a run, on this machine or on another one."""

    def poll(self) -> ExitStatus | None:
        """The exit status; None while the process is running."""
        ...

    def terminate(self) -> None:
        """Ask the run to save a checkpoint and exit."""
        ...

    def kill(self) -> None:
        """End the process at once, without a checkpoint."""
        ...


class Executor(Protocol):
    """Where the processes of runs are started. As a context manager it keeps its connection open."""

    @property
    def max_retries(self) -> Retries: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...

    def max_workers(self, jobs: int | None, experiment: Experiment) -> int:
        """The number of runs in parallel: `jobs`, or if that is None as many as the cores hold with their threads."""
        ...

    def prepare(self, root: Path, lock: IO[bytes]) -> None:
        """Called before the first run below `root` is started. The caller holds the lock of `root`."""
        ...

    def start(self, job: Job, root: Path, lock: IO[bytes]) -> Process: ...

    def release(self, lock: IO[bytes]) -> None:
        """Called after the last process has ended. The caller closes the lock afterwards."""
        ...


class LocalExecutor:
    """Starts runs as processes of this machine."""

    max_retries = Retries(killed=0, failed=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def max_workers(self, jobs: int | None, experiment: Experiment) -> int:
        check_jobs(jobs)
        return jobs or max(1, cores() // threads_of(experiment))

    def prepare(self, root: Path, lock: IO[bytes]) -> None:
        pass

    def start(self, job: Job, root: Path, lock: IO[bytes]) -> Process:
        return _LocalProcess(job, lock)

    def release(self, lock: IO[bytes]) -> None:
        pass


LOCAL = LocalExecutor()


def choose_executor(name: str) -> Executor:
    """The executor that `--executor` names: local, ray, ray:auto or ray:HOST:PORT."""
    if name == "local":
        return LOCAL
    match = re.fullmatch(r"ray(?::(auto|[^\s:/]+:\d+))?", name)
    if match is None:
        raise UserError(f"--executor {name} should be local, ray, ray:auto or ray:HOST:PORT, such as ray:10.0.0.5:6379")
    require("ray", "ray")
    from bestiary.launch.ray_executor import RayExecutor

    return RayExecutor(match[1])


class _LocalProcess:
    def __init__(self, job: Job, lock: IO[bytes]) -> None:
        with (job.path / OUTPUT).open("wb") as output:
            self.process = subprocess.Popen(
                command(job.path),
                stdin=subprocess.PIPE,  # when this pipe closes because we died, the run saves and exits
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": str(threads_of(job.experiment))},
                # Ctrl-C goes to us only: a run that got it from the terminal and from us would exit without saving
                start_new_session=True,
                pass_fds=(lock.fileno(),),  # the directory stays locked until the last process has exited
            )

    def poll(self) -> ExitStatus | None:
        code = self.process.poll()
        if code is None:
            return None
        assert self.process.stdin is not None
        self.process.stdin.close()
        return ExitStatus(code)

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class _RunningJob(NamedTuple, Generic[J]):
    job: J
    process: Process
    started: float


class JobPool(Generic[J]):
    """At most `max_workers` runs in parallel. Leaving the `with` block asks all of them to save, and waits for them."""

    def __init__(
        self, max_workers: int, root: Path, executor: Executor = LOCAL, log: Callable[[str], None] = lambda text: None
    ) -> None:
        self.max_workers, self.root, self.executor, self.log = max_workers, root, executor, log
        self.running: list[_RunningJob[J]] = []
        self.stopping: set[Path] = set()
        self.retried: Counter[tuple[Path, bool]] = Counter()

    def __enter__(self) -> "JobPool[J]":
        self.root.mkdir(parents=True, exist_ok=True)
        self.lock = lock_directory(self.root)
        try:
            self.executor.prepare(self.root, self.lock)
        except BaseException:
            self.lock.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        try:
            for running in self.running:
                self.stop(running.job)
            while any(running.process.poll() is None for running in self.running):
                time.sleep(POLL_SECONDS)
            self.executor.release(self.lock)
        except (
            BaseException
        ):  # a second Ctrl-C: steps since the last checkpoint are lost, but no process is left behind
            for running in self.running:
                running.process.kill()
            raise
        finally:
            self.lock.close()

    @property
    def free(self) -> bool:
        return len(self.running) < self.max_workers

    def start(self, job: J) -> None:
        self.stopping.discard(job.path)
        self._start(job, time.monotonic())

    def _start(self, job: J, started: float) -> None:
        Run.create(job.path, job.experiment)
        self.running.append(_RunningJob(job, self.executor.start(job, self.root, self.lock), started))

    def stop(self, job: J) -> None:
        """Ask a run to save and exit. `poll` returns it once it has exited."""
        for running in self.running:
            if running.job.path == job.path and job.path not in self.stopping:
                self.stopping.add(job.path)
                running.process.terminate()

    def poll(self) -> list[JobResult[J]]:
        """The jobs that have ended since the last call and are not retried; those to be retried are started again."""
        polled = [(running, running.process.poll()) for running in self.running]
        self.running = [running for running, status in polled if status is None]
        results = []
        for (job, _, started), status in polled:
            if status is None:
                continue
            success = job.path in self.stopping or (status.code == 0 and finished(job))
            problem = None if success else status.reason or failure_reason(job.path, status.code)
            if problem is not None and self._may_retry(job, status.killed, problem):
                self._start(job, started)
            else:
                results.append(JobResult(job, time.monotonic() - started, problem))
        return results

    def _may_retry(self, job: J, killed: bool, problem: str) -> bool:
        limit = self.executor.max_retries.killed if killed else self.executor.max_retries.failed
        if self.retried[job.path, killed] >= limit:
            return False
        self.retried[job.path, killed] += 1
        number = self.retried[job.path, killed]
        self.log(f"{job.path.relative_to(self.root)} is restarted, retry {number} of {limit}: {problem}")
        return True


def run_all(
    jobs: Sequence[J],
    max_workers: int,
    on_end: Callable[[JobResult[J]], None],
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[list[J]], None] = lambda running: None,
    progress_seconds: float = 30.0,
    executor: Executor = LOCAL,
    log: Callable[[str], None] = lambda text: None,
) -> None:
    """Train every unfinished job, in order, `max_workers` in parallel.

    `on_end` is called for each job that ended, and `on_progress` with the running jobs every `progress_seconds`.
    """
    waiting = [job for job in jobs if not finished(job)]
    if not waiting:
        return
    last_progress = time.monotonic()
    with JobPool[J](max_workers, jobs[0].path.parent, executor, log) as pool:
        while (waiting or pool.running) and not stop():
            while waiting and pool.free:
                pool.start(waiting.pop(0))
            time.sleep(POLL_SECONDS)
            for result in pool.poll():
                on_end(result)
            if time.monotonic() - last_progress >= progress_seconds:
                last_progress = time.monotonic()
                on_progress([running.job for running in pool.running])


def check_jobs(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise UserError(f"jobs={jobs} must be at least 1")


def threads_of(experiment: Experiment) -> int:
    """Threads of one run: as configured, else one, because more would compete with the runs beside it."""
    return experiment.runtime.threads or 1


def finished(job: Job) -> bool:
    """True if a checkpoint at the frame budget exists and, unless evaluation is off, an evaluation at that budget."""
    budget, saved = job.experiment.frames, Run(job.path).saved()
    if not saved or int(saved[-1].name) < budget:
        return False
    rows = evaluations(job.path)
    return job.experiment.evaluation.episodes == 0 or (bool(rows) and rows[-1]["frames"] >= budget)


def evaluations(path: Path) -> list[dict[str, float]]:
    """The rows of evaluations.csv, with NaN for empty cells, without a last row that is not written completely."""
    file = path / "evaluations.csv"
    text = file.read_text() if file.exists() else ""
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [{upgrade_metric(name): float(value or "nan") for name, value in row.items()} for row in rows]


def frames_trained(path: Path) -> int:
    """Environment frames that a run has trained on, from the last row of its metrics.csv."""
    file = path / "metrics.csv"
    if not file.exists():
        return 0
    with file.open("rb") as tail:
        tail.seek(max(0, file.stat().st_size - 2**16))
        rows = tail.read().split(b"\n")[:-1]
    first = rows[-1].split(b",")[0] if rows else b""
    return int(first) if first.isdigit() else 0


def failure_reason(path: Path, code: int) -> str:
    """Why a process failed: the signal that killed it, or the last line of its output."""
    if code < 0:
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"it was killed by {signal.Signals(-code).name}{hint}"
    lines = (path / OUTPUT).read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else f"it exited with code {code} and printed nothing"


def lock_directory(root: Path) -> IO[bytes]:
    """Lock a directory of runs for as long as the returned file is open, here or in a process started from here."""
    import fcntl

    file = (root / ".lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"{root} is in use by another process; wait for it to end, or stop it first") from None
    except OSError:  # a file system without locks: go on without one
        pass
    return file


def command(path: Path) -> list[str]:
    """The command that resumes a run in its own process, with the plugin files that are loaded here."""
    return [sys.executable, "-m", "bestiary.launch.executor", str(path), *plugin_args()]


def _stop_with_the_parent() -> None:
    """Wait for the end of standard input, which only the end of the parent process causes; then send SIGTERM to us."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_the_parent, daemon=True).start()
    sys.argv = ["bestiary", "resume", *sys.argv[1:], "--plain"]
    runpy.run_module("bestiary", run_name="__main__", alter_sys=True)  # the command line program, in this process
