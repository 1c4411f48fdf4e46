"""Many runs on a Ray cluster: each run is a process on a node with free cores, in a directory that all nodes share."""

import fcntl
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

STALE_SECONDS = 60.0  # a network file system shows another node's writes at most this much later
NODE_LOST = "its node or its supervisor process on that node is gone"


class RayExecutor:
    """Starts runs on the cluster at an address; None: at RAY_ADDRESS, else on a new cluster of this machine alone."""

    max_retries = executor.Retries(killed=3, failed=1)

    def __init__(self, address: str | None = None) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS") or None
        self.connected = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        if self.connected:
            self.connected = False
            disconnect()

    def max_workers(self, jobs: int | None, experiment: "Experiment") -> int:
        executor.check_jobs(jobs)
        if isinstance(experiment.runtime, Ray):
            raise UserError(
                "--executor ray starts every run as one process: leave out runtime:ray, which spreads one run over "
                "many processes"
            )
        if not self.connected:
            connect(self.address)
            self.connected = True
        threads = executor.threads_of(experiment)
        workers = sum(int(node.cpus // threads) for node in alive_nodes())
        if not workers:
            largest = max((node.cpus for node in alive_nodes()), default=0)
            raise UserError(
                f"runtime.threads={threads} is more than any node of the cluster has: the largest has {largest:g} cores"
            )
        return jobs or workers

    def prepare(self, root: Path, lock: IO[bytes]) -> None:
        check_nodes(alive_nodes(), root)
        # the runs hold the same shared lock on their nodes; nobody else gets an exclusive one meanwhile
        job_supervisor.lock(lock, fcntl.LOCK_SH)

    def start(self, job: executor.Job, root: Path, lock: IO[bytes]) -> executor.Process:
        return SupervisedProcess(job, root)

    def release(self, lock: IO[bytes]) -> None:
        """Wait for runs whose supervisors died: they may still be saving."""
        deadline = time.monotonic() + job_supervisor.LOCK_TIMEOUT
        while not job_supervisor.lock(lock, fcntl.LOCK_EX) and time.monotonic() < deadline:
            time.sleep(executor.POLL_SECONDS)


class SupervisedProcess:
    """The process of a run on some node, through the `JobSupervisor` actor that started it there."""

    def __init__(self, job: executor.Job, root: Path) -> None:
        self.job = job
        threads = executor.threads_of(job.experiment)
        path = job.path.resolve()
        args = executor.command(path)[1:]  # without the interpreter, which may have another path on that node
        actor_class: Any = ray.remote(job_supervisor.JobSupervisor)
        self.supervisor = actor_class.options(num_cpus=threads, max_concurrency=2, max_restarts=0).remote()
        self.started = self.supervisor.process.remote()
        self.code = self.supervisor.run.remote(
            args, str(path), str(root.resolve()), executor.OUTPUT, {"OMP_NUM_THREADS": str(threads)}, os.getcwd()
        )
        self.status: executor.ExitStatus | None = None
        self.end_time = 0.0

    def poll(self) -> executor.ExitStatus | None:
        if self.status is None:
            if not ray.wait([self.code], timeout=0)[0]:
                return None
            self._end(self._result())
        assert self.status is not None
        visible = executor.finished(self.job) or time.monotonic() >= self.end_time + STALE_SECONDS
        return None if self.status.code == 0 and not visible else self.status

    def _result(self) -> executor.ExitStatus:
        try:
            return executor.ExitStatus(ray.get(self.code))
        except RayTaskError as e:
            return executor.ExitStatus(-signal.SIGKILL, f"its supervisor failed: {e.cause}")
        except RayError:
            return executor.ExitStatus(-signal.SIGKILL, NODE_LOST)

    def _end(self, status: executor.ExitStatus) -> None:
        self.status, self.end_time = status, time.monotonic()
        ray.kill(self.supervisor)  # if it is only out of reach, this makes its run save and exit

    def terminate(self) -> None:
        if self.status is not None:
            return
        if ray.wait([self.started], timeout=0)[0]:
            self.supervisor.signal.remote(signal.SIGTERM)
        else:  # the supervisor still waits for a free core
            self._end(executor.ExitStatus(128 + signal.SIGTERM))

    def kill(self) -> None:
        if self.status is None:
            ray.wait([self.supervisor.signal.remote(signal.SIGKILL)], timeout=1)
            self._end(executor.ExitStatus(-signal.SIGKILL))
