"""Ray nodes as separate processes that a test can add, kill or stop, and the processes that run on them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PYTHON = Path(sys.executable)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Nodes:
    """A head node and worker nodes, each `ray start --block` in its own session. Killing the session kills the node."""

    def __init__(self, home: Path, cpus: int) -> None:
        self.home = home
        self.env = os.environ | {
            "RAY_AUTH_MODE": "disabled",  # Ray reads the token once, when it is imported
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "1000",
            "RAY_health_check_failure_threshold": "3",
        }
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.temporary = tempfile.mkdtemp(prefix="ray")  # paths of Unix sockets must be short
        self.add(cpus, "--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.temporary}")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError((home / "node0.txt").read_text())

    def add(self, cpus: int, *how: str) -> "subprocess.Popen[bytes]":
        how = how or (f"--address={self.address}",)
        words = [str(PYTHON.parent / "ray"), "start", "--block", "--disable-usage-stats", f"--num-cpus={cpus}"]
        words += ["--object-store-memory=100000000", *how]
        output = (self.home / f"node{len(self.processes)}.txt").open("wb")
        self.processes.append(
            subprocess.Popen(words, env=self.env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        )
        return self.processes[-1]

    def started(self, node: "subprocess.Popen[bytes]") -> bool:
        """True when a node has joined the cluster."""
        return "Ray runtime started" in (self.home / f"node{self.processes.index(node)}.txt").read_text()

    def named(self, name: str) -> list[int]:
        """Process ids on these nodes whose command starts with `name`, such as ray::ActorWorker."""
        sessions = {process.pid for process in self.processes}
        return [one.pid for one in processes() if one.command.startswith(name) and one.session in sessions]

    def close(self) -> None:
        for process in reversed(self.processes):
            kill_session(process.pid)
            process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)


def kill_session(leader: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to every process of the session that `leader` started."""
    for one in processes():
        if one.session == leader:
            with suppress(ProcessLookupError):
                os.kill(one.pid, number)


class Process(NamedTuple):
    pid: int
    parent: int
    session: int
    command: str


def processes() -> list[Process]:
    """All processes of this machine except zombies."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                stat = (directory / "stat").read_text()
                command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            state, parent, _, session = stat.rpartition(")")[2].split()[:4]
            if state != "Z":
                found.append(Process(int(directory.name), int(parent), int(session), command.strip()))
    return found


def descendants(pid: int) -> set[int]:
    """Ids of all direct and indirect child processes."""
    known = processes()
    found, new = set[int](), {pid}
    while new:
        new = {one.pid for one in known if one.parent in new}
        found |= new
    return found
