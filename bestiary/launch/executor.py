"""Runs side by side, each in a process of its own: started, watched, asked to stop, and none left behind."""

import csv
import os
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
from bestiary.config.machine import cores
from bestiary.config.plugins import plugin_args
from bestiary.errors import UserError
from bestiary.training.run import Run

OUTPUT = "output.txt"  # what the process of a run said last time, beside its tables
LOOK = 0.1  # seconds between two looks at the processes


class Job(Protocol):
    """A run to be made."""

    @property
    def name(self) -> str: ...
    @property
    def experiment(self) -> Experiment: ...
    @property
    def path(self) -> Path: ...


J = TypeVar("J", bound=Job)


class Ended(NamedTuple, Generic[J]):
    job: J
    seconds: float
    problem: str | None  # the last thing it said; None: it is finished, or was asked to stop


class Left(NamedTuple):
    """How a process ended."""

    code: int  # negative: killed by that signal
    why: str | None = None  # where its code and its output do not tell

    @property
    def killed(self) -> bool:
        """Ended by others, not by itself."""
        return self.code < 0 or self.code in (128 + signal.SIGTERM, 128 + signal.SIGINT)


class Process(Protocol):
    """What makes a run, wherever that is."""

    def left(self) -> Left | None:
        """How it ended; None: it has not."""
        ...

    def stop(self) -> None:
        """Ask it to save and leave."""
        ...

    def kill(self) -> None:
        """Do not ask."""
        ...


class Place(Protocol):
    """Where runs are made. As a context: until nothing more is to be made there."""

    @property
    def again(self) -> tuple[int, int]:
        """How often a run is tried again that was killed, and one that failed by itself."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...

    def workers(self, asked: int | None, experiment: Experiment) -> int:
        """Runs at a time: as asked, else as many as there are cores for their threads."""
        ...

    def enter(self, root: Path, lock: IO[bytes]) -> None:
        """Before the first run below a directory, of which we have the lock."""
        ...

    def start(self, job: Job, root: Path, lock: IO[bytes]) -> Process: ...

    def leave(self, lock: IO[bytes]) -> None:
        """After the last one."""
        ...


class Here:
    """Processes of this machine."""

    again = (0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def workers(self, asked: int | None, experiment: Experiment) -> int:
        refuse_none(asked)
        return asked or max(1, cores() // threads_of(experiment))

    def enter(self, root: Path, lock: IO[bytes]) -> None:
        pass

    def start(self, job: Job, root: Path, lock: IO[bytes]) -> Process:
        return _Child(job, lock)

    def leave(self, lock: IO[bytes]) -> None:
        pass


HERE = Here()


class _Child:
    def __init__(self, job: Job, lock: IO[bytes]) -> None:
        with (job.path / OUTPUT).open("wb") as output:
            self.process = subprocess.Popen(
                command(job.path),
                stdin=subprocess.PIPE,  # a line to us: once it is cut, the process saves and leaves
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": str(threads_of(job.experiment))},
                # Ctrl-C is for us: a process that heard it from the terminal and from us would not take time to save
                start_new_session=True,
                pass_fds=(lock.fileno(),),  # held for as long as anyone works here
            )

    def left(self) -> Left | None:
        code = self.process.poll()
        if code is None:
            return None
        assert self.process.stdin is not None
        self.process.stdin.close()
        return Left(code)

    def stop(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class _Working(NamedTuple, Generic[J]):
    job: J
    process: Process
    since: float


class Crew(Generic[J]):
    """So many runs at a time. Whoever leaves the `with` block has asked all of them to save, and has waited."""

    def __init__(
        self, workers: int, root: Path, place: Place = HERE, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.workers, self.root, self.place, self.say = workers, root, place, say
        self.working: list[_Working[J]] = []
        self.asked: set[Path] = set()
        self.tried: Counter[tuple[Path, bool]] = Counter()

    def __enter__(self) -> "Crew[J]":
        self.root.mkdir(parents=True, exist_ok=True)
        self.lock = hold(self.root)
        try:
            self.place.enter(self.root, self.lock)
        except BaseException:
            self.lock.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        try:
            for one in self.working:
                self.stop(one.job)
            while any(one.process.left() is None for one in self.working):
                time.sleep(LOOK)
            self.place.leave(self.lock)
        except BaseException:  # insisted upon: what was not saved is lost, but nothing goes on unseen
            for one in self.working:
                one.process.kill()
            raise
        finally:
            self.lock.close()

    @property
    def free(self) -> bool:
        return len(self.working) < self.workers

    def start(self, job: J) -> None:
        self.asked.discard(job.path)
        self._start(job, time.monotonic())

    def _start(self, job: J, since: float) -> None:
        Run.create(job.path, job.experiment)
        self.working.append(_Working(job, self.place.start(job, self.root, self.lock), since))

    def stop(self, job: J) -> None:
        """Ask it to save and leave; it is heard of again among those that have ended."""
        for one in self.working:
            if one.job.path == job.path and job.path not in self.asked:
                self.asked.add(job.path)
                one.process.stop()

    def ended(self) -> list[Ended[J]]:
        """Who has ended since last asked, and is not tried again."""
        looked = [(one, one.process.left()) for one in self.working]
        self.working = [one for one, left in looked if left is None]
        found = []
        for (job, _, since), left in looked:
            if left is None:
                continue
            well = job.path in self.asked or (left.code == 0 and finished(job))
            problem = None if well else left.why or complaint(job.path, left.code)
            if problem is not None and self._again(job, left.killed, problem):
                self._start(job, since)
            else:
                found.append(Ended(job, time.monotonic() - since, problem))
        return found

    def _again(self, job: J, killed: bool, problem: str) -> bool:
        most = self.place.again[0 if killed else 1]
        if self.tried[job.path, killed] >= most:
            return False
        self.tried[job.path, killed] += 1
        number = self.tried[job.path, killed]
        self.say(f"{job.path.relative_to(self.root)} goes on, retry {number} of {most}: {problem}")
        return True


def run_all(
    jobs: Sequence[J],
    workers: int,
    ended: Callable[[Ended[J]], None],
    stop: Callable[[], bool] = lambda: False,
    watch: Callable[[list[J]], None] = lambda working: None,
    every: float = 30.0,
    place: Place = HERE,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Run what is not finished, in order, so many at once; every so many seconds, `watch` those at work."""
    waiting = [job for job in jobs if not finished(job)]
    if not waiting:
        return
    looked = time.monotonic()
    with Crew[J](workers, jobs[0].path.parent, place, say) as crew:
        while (waiting or crew.working) and not stop():
            while waiting and crew.free:
                crew.start(waiting.pop(0))
            time.sleep(LOOK)
            for one in crew.ended():
                ended(one)
            if time.monotonic() - looked >= every:
                looked = time.monotonic()
                watch([one.job for one in crew.working])


def refuse_none(asked: int | None) -> None:
    if asked is not None and asked < 1:
        raise UserError(f"jobs={asked} must be at least 1")


def threads_of(experiment: Experiment) -> int:
    """Side by side, more than one would be in each other's way: only as told."""
    return experiment.runtime.threads or 1


def finished(job: Job) -> bool:
    """Its budget is spent and saved and, unless it is never evaluated, its end has been."""
    budget, saved = job.experiment.frames, Run(job.path).saved()
    if not saved or int(saved[-1].name) < budget:
        return False
    rows = evaluations(job.path)
    return job.experiment.evaluation.episodes == 0 or (bool(rows) and rows[-1]["frames"] >= budget)


def evaluations(path: Path) -> list[dict[str, float]]:
    """Rows of evaluations.csv, NaN where there is nothing. One cut short, or just being written, does not count."""
    file = path / "evaluations.csv"
    text = file.read_text() if file.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    rows = csv.DictReader(whole)
    return [{upgrade_metric(name): float(value or "nan") for name, value in row.items()} for row in rows]


def frames(path: Path) -> int:
    """How far a run has come, by the last row of its metrics."""
    file = path / "metrics.csv"
    if not file.exists():
        return 0
    with file.open("rb") as tail:
        tail.seek(max(0, file.stat().st_size - 2**16))
        rows = tail.read().split(b"\n")[:-1]
    first = rows[-1].split(b",")[0] if rows else b""
    return int(first) if first.isdigit() else 0


def complaint(path: Path, code: int) -> str:
    """Why a process ended."""
    if code < 0:
        reason = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"it was killed by {signal.Signals(-code).name}{reason}"
    lines = (path / OUTPUT).read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else f"it ended with code {code} and without a word"


def hold(root: Path) -> IO[bytes]:
    """Keep others from working on the same runs, for as long as this file is open here or in a process of ours."""
    import fcntl

    file = (root / ".lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"{root} is being worked on by another process; wait for it, or stop it first") from None
    except OSError:  # a file system without locks: as it was before there were any
        pass
    return file


def command(path: Path) -> list[str]:
    """What goes on with a run in a process of its own, with the parts that files registered here."""
    return [sys.executable, "-m", "bestiary.launch.executor", str(path), *plugin_args()]


def _leave_with_the_parent() -> None:
    """Nobody writes to us: this returns only when whoever started us is gone, however it went."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    sys.argv = ["bestiary", "resume", *sys.argv[1:], "--plain"]
    runpy.run_module("bestiary", run_name="__main__", alter_sys=True)  # the program itself, in this process
