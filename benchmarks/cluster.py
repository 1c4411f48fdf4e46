"""A cluster of three hosts on one machine and what can go wrong with it: what happens, and how long it takes.

    python benchmarks/cluster.py catch      # IMPALA on Catch
    python benchmarks/cluster.py recall     # R2D2 on Recall

Every host is a network namespace with an address of its own and a Ray node in it; needs root, `ip` and the extra `ray`.
Prints a table and writes it to benchmarks/cluster/NAME.csv.
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

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
from helpers.ray_nodes import kill_session, processes  # noqa: E402

SWITCH, NET, PORT = "bst-switch", "10.201.0", 6379
CORES = (2, 1, 2)  # of each host: the learner and one actor, one actor, two actors
HOSTS = len(CORES)
COMMANDS = {
    "catch": "train catch --algo.replay.batch-size 16 --frames 1G",
    "recall": "train tmaze-r2d2 env:recall --env.delay 6 --frames 1G --algo.replay.warmup 4k --algo.replay.capacity "
    "100k",
}
TIMEOUT = 10  # seconds


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


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
            here, there = f"bst{n}", f"port{n}"
            run("ip", "link", "add", "eth0", "netns", here, "type", "veth", "peer", "name", there, "netns", SWITCH)
            run("ip", "-n", SWITCH, "link", "set", there, "master", "bridge", "up")
            run("ip", "-n", here, "addr", "add", f"{NET}.{n + 1}/24", "dev", "eth0")
            run("ip", "-n", here, "link", "set", "eth0", "up")
            run("ip", "-n", here, "link", "set", "lo", "up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def on(host: int, words: list[str], output: Path, env: dict[str, str]) -> "subprocess.Popen[bytes]":
    with output.open("ab") as file:
        return subprocess.Popen(
            ["ip", "netns", "exec", f"bst{host}", *words],
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | env,
        )  # fmt: skip


def node(host: int, home: Path, env: dict[str, str]) -> "subprocess.Popen[bytes]":
    where = [f"--port={PORT}", "--head"] if host == 0 else [f"--address={NET}.1:{PORT}"]
    words = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats", *where]
    words += [f"--node-ip-address={NET}.{host + 1}", f"--num-cpus={CORES[host]}", "--object-store-memory=200000000"]
    if host == 0:
        words += ["--include-dashboard=false", f"--temp-dir={home}"]
    return on(host, words, home.parent / f"node{host}.txt", env)


def until(what: Callable[[], object], seconds: float = 180.0) -> float:
    """Seconds until it is so."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > seconds:
            raise SystemExit("it did not happen in time")
        time.sleep(0.05)
    return time.monotonic() - began


class Drill:
    def __init__(self, home: Path, words: list[str]) -> None:
        self.home, self.run = home, home / "run"
        (home / "token").write_text("b" * 64)
        self.env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(home / "token"),
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "3",
        }
        self.nodes = {0: node(0, home / "ray", self.env)}
        self.joined(0)
        for n in range(1, HOSTS):
            self.nodes[n] = node(n, home / "ray", self.env)
            self.joined(n)
        runtime = f"runtime:ray --runtime.address {NET}.1:{PORT} --runtime.actors 4 --runtime.min-actors 1"
        runtime += f" --runtime.envs 16 --runtime.timeout {TIMEOUT} --runtime.shards 2 --checkpoint.frames 20000"
        runtime += " --evaluation.every 20000 --evaluation.episodes 50 --log.no-tensorboard --log.every 1000 --plain"
        self.words = [sys.executable, "-m", "bestiary", *words, *runtime.split(), "--run", str(self.run)]
        self.driver = on(0, self.words, home / "output.txt", self.env)
        self.rows: list[dict[str, str]] = []

    def begin(self) -> None:
        until(self.players())
        until(lambda: self.frames() > 0)

    def joined(self, host: int) -> None:
        until(lambda: "Ray runtime started" in (self.home / f"node{host}.txt").read_text())

    def named(self, name: str, host: int | None = None) -> list[int]:
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

    def strike(self, fault: str, name: str, count: int | None, told: str, back: Callable[[], object]) -> None:
        """Kill, and take the time until it is told and until things are as before."""
        for pid in self.named(name)[:count]:
            os.kill(pid, signal.SIGKILL)
        self.watch(fault, told, back)

    def watch(self, fault: str, told: str, back: Callable[[], object]) -> None:
        known = self.events().count(told) + self.output().count(told) if told else 0
        noticed = until(lambda: not told or self.events().count(told) + self.output().count(told) > known)
        again = noticed + until(back)
        before = self.frames()
        went_on = again + until(lambda: self.frames() > before)
        row = {"fault": fault, "noticed": f"{noticed:.1f}", "replaced": f"{again:.1f}", "going on": f"{went_on:.1f}"}
        self.rows.append(row)
        print(row, flush=True)

    def players(self, count: int = 4) -> Callable[[], object]:
        return lambda: len(self.named("ray::ActorWorker")) - len(self.named("ray::ActorWorker.__init__")) >= count

    def all(self) -> None:
        lost, full = "; restarting it", self.players()
        self.strike("an actor is killed", "ray::ActorWorker", 1, lost, full)
        self.strike("half of the actors are killed", "ray::ActorWorker", 2, lost, full)
        self.strike("all actors are killed", "ray::ActorWorker", None, lost, full)
        shard, evaluator = "ray::ReplayShard", "ray::EvaluatorWorker"
        replaced = "an empty one replaces it"
        self.strike("a replay shard is killed", shard, 1, replaced, lambda: len(self.named(shard)) == 2)
        until(lambda: self.named(f"{evaluator}.evaluate"))
        self.strike("the evaluator is killed", evaluator, 1, "repeating it", lambda: self.named(evaluator))
        kill_session(self.nodes[2].pid)
        self.watch("a host with two actors is gone", lost, self.players(2))
        self.nodes[2] = node(2, self.home / "ray", self.env)
        self.watch("it comes back", "restarted with new episodes", full)
        self.slow()
        kill_session(self.nodes[2].pid, signal.SIGSTOP)
        self.watch("a host with two actors hangs", lost, self.players(2))
        kill_session(self.nodes[2].pid)
        self.nodes[2] = node(2, self.home / "ray", self.env)
        until(full)
        saved = "restarting from the last checkpoint"
        until(lambda: any(self.run.glob("checkpoints/[0-9]*")))
        self.strike("the learner is killed", "ray::LearnerWorker", None, saved, full)
        drivers = [one.pid for one in processes() if str(self.run) in one.command]
        parents = {one.pid: one.parent for one in processes()}
        os.kill(next(pid for pid in drivers if parents.get(pid) in drivers), signal.SIGKILL)
        self.watch("the driver is killed", saved, full)
        began = time.monotonic()
        for pid in drivers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self.driver.wait(120)
        until(lambda: not self.named("ray::ActorWorker") and not self.named("ray::LearnerWorker"))
        took = f"{time.monotonic() - began:.1f}"
        self.rows.append(
            {"fault": "SIGTERM", "noticed": "", "replaced": "", "going on": f"saved, all gone after {took}"}
        )
        print(self.rows[-1], flush=True)

    def slow(self) -> None:
        """A host that stands still nine tenths of the time."""
        began, before = time.monotonic(), self.frames()
        while time.monotonic() - began < 15:
            kill_session(self.nodes[2].pid, signal.SIGSTOP)
            time.sleep(0.45)
            kill_session(self.nodes[2].pid, signal.SIGCONT)
            time.sleep(0.05)
        slow = (self.frames() - before) / 15
        before = self.frames()
        time.sleep(15)
        usual = (self.frames() - before) / 15
        text = f"{slow:,.0f} frames/s, {usual:,.0f} when it is well"
        self.rows.append({"fault": "a host is slow", "noticed": "", "replaced": "", "going on": text})
        print(self.rows[-1], flush=True)

    def close(self) -> None:
        kill_session(self.driver.pid)
        for process in self.nodes.values():
            kill_session(process.pid)


def main(name: str) -> None:
    with hosts(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        drill = Drill(Path(home), COMMANDS[name].split())
        try:
            drill.begin()
            drill.all()
        except BaseException:
            print(drill.output()[-3000:], file=sys.stderr)
            raise
        finally:
            drill.close()
    (HERE / "cluster").mkdir(exist_ok=True)
    with (HERE / "cluster" / f"{name}.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, list(drill.rows[0]), lineterminator="\n")
        lines.writeheader()
        lines.writerows(drill.rows)
    print("| fault | noticed after s | replaced after s | training goes on |\n|---|---|---|---|")
    for row in drill.rows:
        print("| " + " | ".join(row.values()) + " |")


if __name__ == "__main__":
    main(sys.argv[1])
