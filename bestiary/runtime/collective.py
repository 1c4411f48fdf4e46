"""Synchronous data-parallel learning: several learner processes, each with a part of the batch, make one joint update.

A loss is a sum over the local transitions, divided by a count or a sum of weights over all processes. Gradients and
metrics therefore add up. A learner reaches the other learners through its attribute `collective` and needs no branch:
with a single process nothing is sent and nothing changes.
"""

import io
import socket
import weakref
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed
from torch import Tensor, nn

from bestiary import tree
from bestiary.config.compat import gloo_group, nccl_group
from bestiary.errors import UserError
from bestiary.ops.collective import Collective, Moments

if TYPE_CHECKING:
    from bestiary.algos.base import Learner

LOOPBACK = "127.0.0.1"
dist: Any = torch.distributed  # its type stubs lack groups and stores
Tree = TypeVar("Tree")


class PeerLost(RuntimeError):
    """Another learner died or was too slow. Learners may be one update apart: restart all from the last checkpoint."""


class Distributed(Collective):
    """One of several learner processes. All of them must make the same calls in the same order."""

    def __init__(self, group: Any, device: torch.device, timeout_seconds: float) -> None:
        self.device, self.timeout_seconds = device, timeout_seconds
        self.rank, self.size = group.rank(), group.size()
        self._groups = [group]
        # a group that outlives the interpreter aborts the process if another learner is gone by then
        self._leave = weakref.finalize(self, self._groups.clear)

    def broadcast_state(self, learner: "Learner") -> None:
        """Copy weights, optimizer and counters of rank 0 to all learners, and connect this learner to the group."""
        if not hasattr(learner, "collective"):
            raise UserError(
                f"{type(learner).__name__} cannot be distributed: it has no attribute `collective` for its sums"
            )
        saved = io.BytesIO()
        if self.rank == 0:
            torch.save({"weights": learner.agent.state_dict(), "learner": learner.state_dict()}, saved)
        message = self._broadcast(saved.getvalue())
        if self.rank != 0:
            state = torch.load(io.BytesIO(message), weights_only=True, map_location="cpu")
            learner.agent.load_state_dict(state["weights"])
            learner.load_state_dict(state["learner"])
        learner.collective = self  # type: ignore[attr-defined]

    def all_reduce_sum(self, parts: Tree) -> Tree:
        return self._reduce(parts, dist.ReduceOp.SUM)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self._reduce(x, dist.ReduceOp.MAX)

    def batch_fraction(self, count: float) -> float:
        total = self.all_reduce_sum(torch.tensor(count, dtype=torch.float64)).item()
        return count / total if total else 0.0

    def moments(self, x: Tensor) -> Moments:
        count = torch.tensor(float(len(x)), dtype=torch.float64)
        total, added = self.all_reduce_sum((count, x.sum()))
        number, mean = int(total.item()), added / total.to(added)
        squares = self.all_reduce_sum((x - mean).square().sum())
        return Moments(number, mean, (squares / max(1, number - 1)).sqrt())

    def all_reduce_gradients(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Sum gradients in place. A parameter without a gradient in any process keeps none: optimizers skip it."""
        parameters = list(parameters)
        has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=loss.dtype)
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        loss, has_gradient, sums = self.all_reduce_sum((loss.detach(), has_gradient, own))
        for p, anywhere, gradient in zip(parameters, has_gradient.tolist(), sums, strict=True):
            if anywhere:  # in the memory layout of the parameter, which fused optimizers rely on
                p.grad = (torch.empty_like(p) if p.grad is None else p.grad).copy_(gradient)
        return loss

    def leave(self) -> None:
        """Disconnect; the other learners see this process as lost."""
        self._leave()

    # -- messages ------------------------------------------------------------------------------------

    def _reduce(self, parts: Tree, operation: Any) -> Tree:
        leaves: list[Tensor] = []
        tree.map(leaves.append, parts)
        flat = torch.cat([leaf.detach().flatten().to(self.device) for leaf in leaves])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(operation)
        self._wait(self._group.allreduce([flat], options))
        pieces = iter(flat.split([leaf.numel() for leaf in leaves]))
        return tree.map(lambda leaf: next(pieces).view(leaf.shape).to(leaf), parts)

    def _broadcast(self, message: bytes) -> bytes:
        """The message of rank 0; the argument of the other ranks is empty."""
        size = torch.tensor([len(message)], device=self.device)
        self._wait(self._group.broadcast([size], dist.BroadcastOptions()))
        data = torch.zeros(int(size.item()), dtype=torch.uint8, device=self.device)
        if message:
            data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        self._wait(self._group.broadcast([data], dist.BroadcastOptions()))
        return data.cpu().numpy().tobytes()

    @property
    def _group(self) -> Any:
        if not self._groups:
            raise PeerLost(f"learner {self.rank} of {self.size} has left its group: join a new one")
        return self._groups[0]

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
            return
        except RuntimeError as e:
            reason = str(e).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
        del work  # nothing may hold a reference to the group, not even the traceback
        self.leave()
        raise PeerLost(
            f"learner {self.rank} of {self.size}: another learner died, or did not answer for "
            f"{self.timeout_seconds:g} s ({reason})"
        )


# -- forming a group -------------------------------------------------------------------------------------


def rendezvous(host: str = LOOPBACK) -> str:
    """An address where learners can form a group: a free port on the machine of rank 0."""
    with socket.create_server((host, 0)) as server:
        return f"tcp://{host}:{server.getsockname()[1]}"


def join(
    rank: int, size: int, address: str, device: torch.device | str = "cpu", timeout_seconds: float = 120.0
) -> Distributed:
    """Form a group with `size` - 1 other processes at `tcp://host:port`, or at a new `file:///path`.

    The backend is Gloo on CPUs and NCCL on GPUs. With Gloo, only rank 0 listens at `host`, and each process listens at
    the address from which it reaches `host`. `timeout_seconds` bounds every wait: for all processes to arrive, and for
    every exchange. It must be longer than the longest time between two updates.
    """
    device = torch.device(device)
    if not 0 <= rank < size:
        raise UserError(f"rank {rank} must lie between 0 and {size - 1} in a group of {size} learners")
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store, own_address = _store(rank, size, address, timeout)
        if device.type == "cuda":  # groups of our own: the default group of torch.distributed stays free for others
            group = nccl_group(store, rank, size, timeout)
        else:
            group = gloo_group(store, rank, size, own_address, timeout)
    except (RuntimeError, OSError) as e:
        raise UserError(
            f"learner {rank} of {size} found no group at {address} within {timeout_seconds:g} s "
            f"({str(e).splitlines()[0]}): start all learners, with the same address, which must be new or free"
        ) from e
    return Distributed(group, device, timeout_seconds)


def _store(rank: int, size: int, address: str, timeout: timedelta) -> tuple[Any, str]:
    """The store where processes exchange their addresses, and this process's own address."""
    url = urlsplit(address)
    if url.scheme == "file" and url.path:
        Path(url.path).parent.mkdir(parents=True, exist_ok=True)
        store = dist.FileStore(url.path, size)
        store.set_timeout(timeout)
        return store, LOOPBACK
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        raise UserError(f"learners cannot form a group at {address}: use tcp://host:port or file:///path")
    host, port = url.hostname, url.port
    if rank:
        store = dist.TCPStore(host, port, size, False, timeout)
    else:  # without a socket of ours the store would listen on all interfaces
        listening = socket.create_server((host, port))
        store = dist.TCPStore(
            host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    return store, _address_towards(host)


def _address_towards(host: str) -> str:
    """The address of this machine from which it reaches a host; nothing is sent."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as s:
        s.connect(address)
        return s.getsockname()[0]
