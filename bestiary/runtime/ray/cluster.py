"""Connection to a Ray cluster: a private one on this machine, or one that already runs."""

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
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bestiary.config.compat import allow_ray_clusters
from bestiary.config.versions import versions
from bestiary.errors import UserError

CONNECT_TIMEOUT = 10.0  # seconds to wait for an address to answer
MIN_STORE = 256 * 2**20  # smallest object store (shared memory), in bytes
PROBE_TIMEOUT = 60.0  # seconds for a node to report its versions
SAME_EVERYWHERE = ("python", "bestiary", "torch", "numpy")  # versions that must be equal on all nodes


class RayNode(NamedTuple):
    """A Ray node: usually one machine of the cluster."""

    id: str
    name: str
    cpus: float
    gpus: float
    memory: int  # bytes
    store: int  # size of the object store (shared memory), in bytes


@contextmanager
def preserve_signal_handlers() -> Iterator[None]:
    """Restore the handlers of SIGTERM and SIGINT, which Ray replaces when it starts and stops."""
    in_main_thread = threading.current_thread() is threading.main_thread()  # other threads cannot set handlers
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items() if in_main_thread else ():
            signal.signal(number, handler)


def connect(address: str | None, store: int = 0) -> list[RayNode]:
    """Join the cluster at an address; None: start a cluster on this machine that listens on loopback and ends with us.

    `store` is the size of the object store that a new cluster needs, in bytes.
    """
    allow_ray_clusters(address is not None and _reachable_beyond_loopback(address))
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    common: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": False,
    }
    with preserve_signal_handlers():
        if address is None:
            if os.environ.get("RAY_AUTH_MODE", "token") != "token":
                raise UserError("RAY_AUTH_MODE must be token, or unset, to start a cluster on this machine")
            size = max(MIN_STORE, store)
            try:
                ray.init(address="local", object_store_memory=size, **common)
            except ValueError as e:
                raise UserError(
                    f"trajectories and weights may take {size / 2**30:.1f} GiB of shared memory, more than this "
                    f"machine has ({first_line(e)}): lower --runtime.actors or --runtime.envs"
                ) from None
        else:
            common.pop("include_dashboard")  # decided by whoever started that cluster
            try:
                ray.init(address=address, **common)
            except (ConnectionError, RuntimeError, ValueError, RayError) as e:
                raise UserError(f"runtime.address={address} cannot be joined: {first_line(e)}") from None
    return alive_nodes()


def first_line(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return lines[0] if lines else type(e).__name__


def _reachable_beyond_loopback(address: str) -> bool:
    """Whether other machines can reach the cluster. A cluster that does not answer at all is a UserError."""
    if address == "auto":
        file = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
        address = os.environ.get("RAY_ADDRESS") or (file.read_text().strip() if file.exists() else "")
        if not address:
            raise UserError("runtime.address=auto finds no cluster on this machine: start one with `ray start --head`")
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise UserError(f"runtime.address={address!r} should be HOST:PORT, such as 10.0.0.5:6379, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()  # Ray would try for a minute
    except OSError as e:
        raise UserError(f"no Ray cluster answers at {address} ({e}): start it with `ray start --head`") from None
    try:
        allow_ray_clusters(True)
        socket.create_connection((ray.util.get_node_ip_address(), int(port)), timeout=1).close()
    except OSError:
        return host not in ("127.0.0.1", "localhost", "::1")
    return True


def disconnect() -> None:
    if ray.is_initialized():
        gc.collect()  # a handle that is freed later would be taken for one of the next cluster
        with preserve_signal_handlers():
            ray.shutdown()


def alive_nodes() -> list[RayNode]:
    """The nodes that are alive, those with most GPUs and cores first."""
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            memory, store = int(has.get("memory", 0)), int(has.get("object_store_memory", 0))
            name = f"{node['NodeName']} ({node['NodeID'][:6]})"
            found.append(RayNode(node["NodeID"], name, has.get("CPU", 0.0), has.get("GPU", 0.0), memory, store))
    return sorted(found, key=lambda n: (-n.gpus, -n.cpus, n.id))


def prefer(node: RayNode) -> Any:
    """The scheduling strategy of a process that should run on this node, or on another one if this node is dead."""
    return NodeAffinitySchedulingStrategy(node.id, soft=True)


def deferred(cls: type) -> type:
    """A subclass whose objects are built by `start()` and not by the constructor.

    Ray reports an error in a constructor as the death of the process, but an error in a method as what it is.
    `placed()` returns as soon as a node has room for the process; `start()` returns the versions found there.
    """

    class Deferred(cls):
        def __init__(self, *args: Any) -> None:
            self.init_args = args

        def placed(self) -> None:
            return

        def start(self) -> dict[str, str]:
            super().__init__(*self.init_args)
            return versions()

    Deferred.__name__ = Deferred.__qualname__ = cls.__name__  # the process is named after it
    return Deferred


def remote_class(cls: type, cpus: float = 0, gpus: float = 0, **options: Any) -> Any:
    """A class whose `.remote(...)` starts a process with one object of it and returns a handle."""
    return ray.remote(num_cpus=cpus, num_gpus=gpus)(cls).options(**options)


def version_mismatch(found: dict[str, str], expected: dict[str, str]) -> str:
    """A message about the first version on a node that differs from this machine's; empty: all are equal."""
    different = (name for name in SAME_EVERYWHERE if found.get(name) != expected.get(name))
    return next((f"{name} {found.get(name)}, this machine {expected.get(name)}" for name in different), "")


def _probe(path: str | None) -> tuple[dict[str, str], bool]:
    """Runs on a node: the versions installed there, and whether it can read and write beside a file."""
    if path is None:
        return versions(), True
    try:
        content = Path(path).read_text()
        copy = Path(f"{path}.{uuid.uuid4().hex}")
        copy.write_text(content)
        copy.unlink()
        return versions(), True
    except OSError:
        return versions(), False


def check_nodes(nodes: list[RayNode], shared: Path | None = None) -> None:
    """Raise a UserError if a node has other versions than this machine, or cannot write to the directory `shared`."""
    probe_file = None
    if shared is not None:
        shared.mkdir(parents=True, exist_ok=True)
        probe_file = shared.resolve() / f".probe-{uuid.uuid4().hex}"
        probe_file.write_text("probe")
    try:
        probe = ray.remote(num_cpus=0)(_probe)
        path = None if probe_file is None else str(probe_file)
        refs = [probe.options(scheduling_strategy=prefer(node)).remote(path) for node in nodes]
        for node, ref in zip(nodes, refs, strict=True):
            found, writable = _probe_result(node, ref)
            if mismatch := version_mismatch(found, versions()):
                raise UserError(f"node {node.name} has {mismatch}: install the same version everywhere")
            if not writable:
                raise UserError(f"node {node.name} cannot write to {shared}: choose a directory that all nodes share")
    finally:
        if probe_file is not None:
            probe_file.unlink(missing_ok=True)


def _probe_result(node: RayNode, ref: Any) -> tuple[dict[str, str], bool]:
    try:
        return ray.get(ref, timeout=PROBE_TIMEOUT)
    except RayTaskError as e:
        reason = str(e).strip().splitlines()[-1]
        raise UserError(f"node {node.name} cannot run bestiary ({reason}): install the same package there") from None
    except GetTimeoutError:
        raise UserError(
            f"node {node.name} did not answer within {PROBE_TIMEOUT:g} seconds: remove it from the cluster"
        ) from None
