"""Runs side by side on a Ray cluster: each is a process on whatever node has room for it, in a directory all share."""

import os
import signal
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import ray
from ray.exceptions import RayError, RayTaskError

from bestiary.errors import UserError
from bestiary.launch import executor, job_supervisor
from bestiary.runtime import Ray
from bestiary.runtime.ray.cluster import alive_nodes, check_nodes, connect, disconnect

if TYPE_CHECKING:
    from bestiary.config.experiment import Experiment

STALE = 60.0  # seconds after which a network file system shows here what was written elsewhere
GONE = "its node is gone, or the process there that kept it"


class Cluster:
    """The cluster at an address; None: that of RAY_ADDRESS, else one of our own on this machine."""

    again = (3, 1)

    def __init__(self, address: str | None = None) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS") or None
        self.connected = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        if self.connected:
            self.connected = False
            disconnect()

    def workers(self, asked: int | None, experiment: "Experiment") -> int:
        executor.refuse_none(asked)
        if isinstance(experiment.runtime, Ray):
            raise UserError(
                "--runtime ray makes every run a process of its own: leave out runtime:ray, which spreads one run"
            )
        if not self.connected:
            connect(self.address)
            self.connected = True
        threads = executor.threads_of(experiment)
        room = sum(int(node.cpus // threads) for node in alive_nodes())
        if not room:
            most = max((node.cpus for node in alive_nodes()), default=0)
            raise UserError(f"runtime.threads={threads} fit on no node of the cluster: the largest has {most:g} cores")
        return asked or room

    def enter(self, root: Path, lock: IO[bytes]) -> None:
        import fcntl

        check_nodes(alive_nodes(), root)
        job_supervisor.lock(
            lock, fcntl.LOCK_SH
        )  # shared with our runs, wherever they are; nobody else gets it for himself

    def start(self, job: executor.Job, root: Path, lock: IO[bytes]) -> executor.Process:
        return Kept(job, root)

    def leave(self, lock: IO[bytes]) -> None:
        """Runs whose keepers died may still be saving."""
        import fcntl

        until = time.monotonic() + job_supervisor.LOCK_TIMEOUT
        while not job_supervisor.lock(lock, fcntl.LOCK_EX) and time.monotonic() < until:
            time.sleep(executor.LOOK)


class Kept:
    """A run's process on some node, through the actor that keeps it there."""

    def __init__(self, job: executor.Job, root: Path) -> None:
        self.job = job
        threads = executor.threads_of(job.experiment)
        path = job.path.resolve()
        # the interpreter may be elsewhere on another node
        words = executor.command(path)[1:]
        make: Any = ray.remote(job_supervisor.JobSupervisor)
        self.keeper = make.options(num_cpus=threads, max_concurrency=2, max_restarts=0).remote()
        self.up = self.keeper.process.remote()
        self.code = self.keeper.run.remote(
            words, str(path), str(root.resolve()), executor.OUTPUT, {"OMP_NUM_THREADS": str(threads)}, os.getcwd()
        )
        self.how: executor.Left | None = None
        self.since = 0.0  # when it ended

    def left(self) -> executor.Left | None:
        if self.how is None:
            if not ray.wait([self.code], timeout=0)[0]:
                return None
            self._end(self._result())
        assert self.how is not None
        if self.how.code == 0 and not executor.finished(self.job) and time.monotonic() < self.since + STALE:
            return None
        return self.how

    def _result(self) -> executor.Left:

        try:
            return executor.Left(ray.get(self.code))
        except RayTaskError as e:
            return executor.Left(-signal.SIGKILL, f"its node could not keep it: {e.cause}")
        except RayError:
            return executor.Left(-signal.SIGKILL, GONE)

    def _end(self, how: executor.Left) -> None:
        self.how, self.since = how, time.monotonic()
        ray.kill(self.keeper)  # also one we no longer hear of: its process saves and leaves

    def stop(self) -> None:
        if self.how is not None:
            return
        if ray.wait([self.up], timeout=0)[0]:
            self.keeper.signal.remote(signal.SIGTERM)
        else:  # it still waits for a core
            self._end(executor.Left(128 + signal.SIGTERM))

    def kill(self) -> None:
        if self.how is None:
            ray.wait([self.keeper.signal.remote(signal.SIGKILL)], timeout=1)
            self._end(executor.Left(-signal.SIGKILL))
