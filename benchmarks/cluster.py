"""Fault tolerance of the Ray runtime: seconds until each fault is noticed and until training continues.

    python benchmarks/cluster.py catch      # IMPALA on Catch
    python benchmarks/cluster.py recall     # R2D2 on Recall

The cluster has three hosts on one machine. Each host is a network namespace with its own address and Ray node. This
needs root, the command `ip` and the extra `ray`. It prints a table and writes it to benchmarks/cluster/NAME.csv.
"""

import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DIRECTORY = Path(__file__).parent
sys.path.insert(0, str(DIRECTORY.parent / "tests"))
from helpers.ray_nodes import kill_session, processes  # noqa: E402

SWITCH, NET, PORT = "bst-switch", "10.201.0", 6379
CORES = (2, 1, 2)  # CPU cores of each host, for: the learner and one actor, one actor, two actors
HOSTS = len(CORES)
COMMANDS = {
    "catch": "train catch --algo.replay.batch-size 16 --frames 1G",
    "recall": "train tmaze-r2d2 env:recall --env.delay 6 --frames 1G --algo.replay.warmup 4k --algo.replay.capacity "
    "100k",
}
TIMEOUT = 10  # runtime.timeout, in seconds


def run(*args: str) -> None:
    subprocess.run(args, check=True, capture_output=True)


@contextmanager
def hosts() -> Iterator[None]:
    """Namespaces bst0, bst1 ... with addresses 10.201.0.1, .2 ... behind one switch."""
    names = [SWITCH, *(f"bst{n}" for n in range(HOSTS))]
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", SWITCH, "link", "set", "bridge", "up")
        for n in range(HOSTS):
            host, port = f"bst{n}", f"port{n}"
            run("ip", "link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", port, "netns", SWITCH)
            run("ip", "-n", SWITCH, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", host, "addr", "add", f"{NET}.{n + 1}/24", "dev", "eth0")
            run("ip", "-n", host, "link", "set", "eth0", "up")
            run("ip", "-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start_on(host: int, args: list[str], output: Path, env: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start a process in a host's namespace, in a session of its own."""
    with output.open("ab") as file:
        return subprocess.Popen(
            ["ip", "netns", "exec", f"bst{host}", *args],
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | env,
        )  # fmt: skip


def start_node(host: int, home: Path, env: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start the Ray node of a host; host 0 is the head."""
    address = [f"--port={PORT}", "--head"] if host == 0 else [f"--address={NET}.1:{PORT}"]
    args = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats", *address]
    args += [f"--node-ip-address={NET}.{host + 1}", f"--num-cpus={CORES[host]}", "--object-store-memory=200000000"]
    if host == 0:
        args += ["--include-dashboard=false", f"--temp-dir={home}"]
    return start_on(host, args, home.parent / f"node{host}.txt", env)


def wait_for(condition: Callable[[], object], seconds: float = 180.0) -> float:
    """Wait until a condition holds; returns how many seconds that took."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            raise SystemExit("a condition was not met in time")
        time.sleep(0.05)
    return time.monotonic() - started


class FaultInjection:
    """A training run on the cluster, into which faults are injected one after the other."""

    def __init__(self, home: Path, train_args: list[str]) -> None:
        self.home, self.run = home, home / "run"
        (home / "token").write_text("b" * 64)
        self.env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(home / "token"),
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "3",
        }
        self.nodes = {0: start_node(0, home / "ray", self.env)}
        self.wait_for_node(0)
        for n in range(1, HOSTS):
            self.nodes[n] = start_node(n, home / "ray", self.env)
            self.wait_for_node(n)
        runtime = f"runtime:ray --runtime.address {NET}.1:{PORT} --runtime.actors 4 --runtime.min-actors 1"
        runtime += f" --runtime.envs 16 --runtime.timeout {TIMEOUT} --runtime.shards 2 --checkpoint.frames 20000"
        runtime += " --evaluation.every 20000 --evaluation.episodes 50 --log.no-tensorboard --log.every 1000 --plain"
        args = [sys.executable, "-m", "bestiary", *train_args, *runtime.split(), "--run", str(self.run)]
        self.driver = start_on(0, args, home / "output.txt", self.env)
        self.rows: list[dict[str, str]] = []

    def wait_for_training(self) -> None:
        wait_for(self.actors_running())
        wait_for(lambda: self.frames() > 0)

    def wait_for_node(self, host: int) -> None:
        wait_for(lambda: "Ray runtime started" in (self.home / f"node{host}.txt").read_text())

    def named(self, name: str, host: int | None = None) -> list[int]:
        """Process ids of workers whose title starts with `name`, such as ray::ActorWorker."""
        sessions = {p.pid for n, p in self.nodes.items() if host in (None, n)}
        return [one.pid for one in processes() if one.session in sessions and one.command.startswith(name)]

    def output(self) -> str:
        return (self.home / "output.txt").read_text(errors="replace")

    def events(self) -> str:
        file = self.run / "events.txt"
        return file.read_text() if file.exists() else ""

    def frames(self) -> int:
        file = self.run / "metrics.csv"
        lines = file.read_text().splitlines() if file.exists() else []
        return int(lines[-1].split(",")[0]) if len(lines) > 1 and lines[-1].split(",")[0].isdigit() else 0

    def kill(self, fault: str, name: str, count: int | None, note: str, recovered: Callable[[], object]) -> None:
        """Kill workers, and measure the recovery."""
        for pid in self.named(name)[:count]:
            os.kill(pid, signal.SIGKILL)
        self.measure(fault, note, recovered)

    def measure(self, fault: str, note: str, recovered: Callable[[], object]) -> None:
        """Seconds until a note reports the fault, until the processes are replaced, and until training continues."""

        def notes() -> int:
            return self.events().count(note) + self.output().count(note)

        known = notes()
        noticed = wait_for(lambda: notes() > known)
        replaced = noticed + wait_for(recovered)
        before = self.frames()
        continued = replaced + wait_for(lambda: self.frames() > before)
        self.add_row(fault, f"{noticed:.1f}", f"{replaced:.1f}", f"{continued:.1f}")

    def add_row(self, fault: str, noticed: str, replaced: str, continued: str) -> None:
        self.rows.append({"fault": fault, "noticed": noticed, "replaced": replaced, "continued": continued})
        print(self.rows[-1], flush=True)

    def actors_running(self, count: int = 4) -> Callable[[], object]:
        return lambda: len(self.named("ray::ActorWorker")) - len(self.named("ray::ActorWorker.__init__")) >= count

    def run_all(self) -> None:
        self.kill_workers()
        self.fail_a_host()
        self.kill_learner_and_driver()
        self.terminate()

    def kill_workers(self) -> None:
        lost, full = "; restarting it", self.actors_running()
        self.kill("an actor is killed", "ray::ActorWorker", 1, lost, full)
        self.kill("half of the actors are killed", "ray::ActorWorker", 2, lost, full)
        self.kill("all actors are killed", "ray::ActorWorker", None, lost, full)
        shard, evaluator = "ray::ReplayShard", "ray::EvaluatorWorker"
        replaced = "an empty one replaces it"
        self.kill("a replay shard is killed", shard, 1, replaced, lambda: len(self.named(shard)) == 2)
        wait_for(lambda: self.named(f"{evaluator}.evaluate"))
        self.kill("the evaluator is killed", evaluator, 1, "repeating it", lambda: self.named(evaluator))

    def fail_a_host(self) -> None:
        lost, full = "; restarting it", self.actors_running()
        kill_session(self.nodes[2].pid)
        self.measure("a host with two actors is lost", lost, self.actors_running(2))
        self.nodes[2] = start_node(2, self.home / "ray", self.env)
        self.measure("the host returns", "restarted with new episodes", full)
        self.slow_down_a_host()
        kill_session(self.nodes[2].pid, signal.SIGSTOP)
        self.measure("a host with two actors hangs", lost, self.actors_running(2))
        kill_session(self.nodes[2].pid)
        self.nodes[2] = start_node(2, self.home / "ray", self.env)
        wait_for(full)

    def kill_learner_and_driver(self) -> None:
        restarting, full = "restarting from the last checkpoint", self.actors_running()
        wait_for(lambda: any(self.run.glob("checkpoints/[0-9]*")))
        self.kill("the learner is killed", "ray::LearnerWorker", None, restarting, full)
        drivers = self.driver_processes()
        parents = {one.pid: one.parent for one in processes()}
        os.kill(next(pid for pid in drivers if parents.get(pid) in drivers), signal.SIGKILL)
        self.measure("the driver is killed", restarting, full)

    def terminate(self) -> None:
        started = time.monotonic()
        for pid in self.driver_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self.driver.wait(120)
        wait_for(lambda: not self.named("ray::ActorWorker") and not self.named("ray::LearnerWorker"))
        self.add_row("SIGTERM", "", "", f"saved, all ended after {time.monotonic() - started:.1f}")

    def driver_processes(self) -> list[int]:
        """Ids of the supervisor and the driver."""
        return [one.pid for one in processes() if str(self.run) in one.command]

    def slow_down_a_host(self) -> None:
        """Stop a host for nine tenths of the time."""
        started, before = time.monotonic(), self.frames()
        while time.monotonic() - started < 15:
            kill_session(self.nodes[2].pid, signal.SIGSTOP)
            time.sleep(0.45)
            kill_session(self.nodes[2].pid, signal.SIGCONT)
            time.sleep(0.05)
        slow = (self.frames() - before) / 15
        before = self.frames()
        time.sleep(15)
        normal = (self.frames() - before) / 15
        self.add_row("a host is slow", "", "", f"{slow:,.0f} frames/s, {normal:,.0f} at normal speed")

    def close(self) -> None:
        kill_session(self.driver.pid)
        for process in self.nodes.values():
            kill_session(process.pid)


def main(name: str) -> None:
    with hosts(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        experiment = FaultInjection(Path(home), COMMANDS[name].split())
        try:
            experiment.wait_for_training()
            experiment.run_all()
        except BaseException:
            print(experiment.output()[-3000:], file=sys.stderr)
            raise
        finally:
            experiment.close()
    (DIRECTORY / "cluster").mkdir(exist_ok=True)
    with (DIRECTORY / "cluster" / f"{name}.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, list(experiment.rows[0]), lineterminator="\n")
        lines.writeheader()
        lines.writerows(experiment.rows)
    print("| fault | noticed after s | replaced after s | training continues after s |\n|---|---|---|---|")
    for row in experiment.rows:
        print("| " + " | ".join(row.values()) + " |")


if __name__ == "__main__":
    main(sys.argv[1])
