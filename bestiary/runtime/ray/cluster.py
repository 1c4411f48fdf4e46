"""Reaching a Ray cluster: one of our own on this machine, or one that is already there."""

import gc
import logging
import os
import signal
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bestiary.errors import UserError

ANSWER = 10.0  # seconds to wait for an address
STORE = 256 * 2**20  # bytes of shared memory, at least
COMPARED = ("python", "bestiary", "torch", "numpy")  # versions that must be the same everywhere


class Node(NamedTuple):
    """A machine of the cluster, or one of several Ray nodes on a machine."""

    id: str
    name: str
    cpus: float
    gpus: float
    memory: int  # bytes
    store: int  # bytes of shared memory


@contextmanager
def own_signals() -> Iterator[None]:
    """Ray takes SIGTERM over when it starts: give it back to whoever had it."""
    ours = threading.current_thread() is threading.main_thread()  # others have no say in signals
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items() if ours else ():
            signal.signal(number, handler)


def connect(address: str | None, store: int = 0) -> list[Node]:
    """Join the cluster at an address; None: start one that only this machine can reach and that ends with us."""
    # Ray listens, and looks for others, on all interfaces unless it believes that clusters are not for this system
    ray_constants.ENABLE_RAY_CLUSTER = address is not None and _answers_beyond_loopback(address)
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    common: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": False,
    }
    with own_signals():
        if address is None:
            if os.environ.get("RAY_AUTH_MODE", "token") != "token":
                raise UserError("RAY_AUTH_MODE must be token, or unset, for a cluster of our own")
            try:
                ray.init(address="local", object_store_memory=max(STORE, store), **common)
            except ValueError as e:
                raise UserError(
                    f"what is under way may take {max(STORE, store) / 2**30:.1f} GiB of shared memory, more than this "
                    f"machine has ({first_line(e)}): lower --runtime.actors or --runtime.envs"
                ) from None
        else:
            common.pop("include_dashboard")  # theirs to decide
            try:
                ray.init(address=address, **common)
            except (ConnectionError, RuntimeError, ValueError, RayError) as e:
                raise UserError(f"runtime.address={address} cannot be joined: {first_line(e)}") from None
    return nodes()


def first_line(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return lines[0] if lines else type(e).__name__


def _answers_beyond_loopback(address: str) -> bool:
    """Whether a cluster can be reached from other machines. One that does not answer at all is refused."""
    if address == "auto":
        file = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
        address = os.environ.get("RAY_ADDRESS") or (file.read_text().strip() if file.exists() else "")
        if not address:
            raise UserError("runtime.address=auto finds no cluster on this machine: start one with `ray start --head`")
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise UserError(f"runtime.address={address!r} should be HOST:PORT, such as 10.0.0.5:6379, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER).close()  # Ray itself would try for a minute
    except OSError as e:
        raise UserError(f"no Ray cluster answers at {address} ({e}): start it with `ray start --head`") from None
    try:
        ray_constants.ENABLE_RAY_CLUSTER = True
        socket.create_connection((ray.util.get_node_ip_address(), int(port)), timeout=1).close()
    except OSError:
        return host not in ("127.0.0.1", "localhost", "::1")
    return True


def disconnect() -> None:
    if ray.is_initialized():
        gc.collect()  # a handle that goes later would be taken for one of the next cluster's
        with own_signals():
            ray.shutdown()


def nodes() -> list[Node]:
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            memory, store = int(has.get("memory", 0)), int(has.get("object_store_memory", 0))
            name = f"{node['NodeName']} ({node['NodeID'][:6]})"
            found.append(Node(node["NodeID"], name, has.get("CPU", 0.0), has.get("GPU", 0.0), memory, store))
    return sorted(found, key=lambda n: (-n.gpus, -n.cpus, n.id))


def on(node: Node, soft: bool = True) -> Any:
    """Preferably on this node; anywhere, should it be gone."""
    return NodeAffinitySchedulingStrategy(node.id, soft=soft)


def later(kind: type) -> type:
    """The same, but built when it is asked for `hello`: what goes wrong there is told as it is, not as a death.

    It answers `placed` as soon as there is a node for it, and `hello` with the versions found there.
    """

    class Later(kind):
        def __init__(self, *words: Any) -> None:
            self.words = words

        def placed(self) -> None:
            return

        def hello(self) -> dict[str, str]:
            from bestiary.config.machine import versions

            super().__init__(*self.words)
            return versions()

    Later.__name__ = Later.__qualname__ = kind.__name__  # by which its process can be found
    return Later


def process(kind: type, cpus: float = 0, gpus: float = 0, **options: Any) -> Any:
    """What a process of this kind is started with: `.remote(...)` gives a handle to it."""
    return ray.remote(num_cpus=cpus, num_gpus=gpus)(kind).options(**options)


def _look(path: str | None) -> tuple[dict[str, str], bool]:
    """Runs on every node: what is installed there, and whether it can read and write a directory."""
    from bestiary.config.machine import versions

    if path is None:
        return versions(), True
    try:
        seen = Path(path).read_text()
        answer = Path(f"{path}.{uuid.uuid4().hex}")
        answer.write_text(seen)
        answer.unlink()
        return versions(), True
    except OSError:
        return versions(), False


def other_version(theirs: dict[str, str], mine: dict[str, str]) -> str:
    """The first of what must be the same everywhere and is not; empty: all is well."""
    different = (name for name in COMPARED if theirs.get(name) != mine.get(name))
    return next((f"{name} {theirs.get(name)}, this machine {mine.get(name)}" for name in different), "")


def check_nodes(found: list[Node], shared: Path | None = None) -> None:
    """Refuse a cluster whose nodes have other versions than we do, or cannot see a directory they would need."""
    from bestiary.config.machine import versions

    mark = None
    if shared is not None:
        shared.mkdir(parents=True, exist_ok=True)
        mark = shared.resolve() / f".probe-{uuid.uuid4().hex}"
        mark.write_text("seen")
    try:
        look = ray.remote(num_cpus=0)(_look)
        asked = [look.options(scheduling_strategy=on(n)).remote(None if mark is None else str(mark)) for n in found]
        mine = versions()
        for node, ref in zip(found, asked, strict=True):
            try:
                theirs, sees = ray.get(ref, timeout=60)
            except RayTaskError as e:
                reason = str(e).strip().splitlines()[-1]
                raise UserError(
                    f"node {node.name} cannot run bestiary ({reason}): install the same package there"
                ) from None
            except GetTimeoutError:
                raise UserError(
                    f"node {node.name} does not answer within a minute: remove it from the cluster"
                ) from None
            if other := other_version(theirs, mine):
                raise UserError(f"node {node.name} has {other}: install the same version everywhere")
            if not sees:
                raise UserError(f"node {node.name} cannot write to {shared}: choose a directory that all nodes share")
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)
