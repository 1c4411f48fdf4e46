"""Several learners that step as one: each has a part of the batch, all take the step of the whole.

A loss is written as a sum over the moves that are here, divided by what all processes have together. Gradients then
simply add up, and so do metrics. A learner has one attribute for it, `together`, and no branch: alone, nothing is sent
and nothing is changed.
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
from bestiary.errors import UserError
from bestiary.ops.collective import Collective, Moments
from bestiary.types import Batch

if TYPE_CHECKING:
    from bestiary.algos.base import Learner

LOOPBACK = "127.0.0.1"
dist: Any = torch.distributed  # groups and stores: its stubs leave them out
Tree = TypeVar("Tree")


class PeerLost(RuntimeError):
    """Another process is gone, or too slow. They may be a step apart: all begin anew, from what was saved last."""


class Distributed(Collective):
    """One of several processes that step as one. All must make the same calls in the same order."""

    def __init__(self, group: Any, device: torch.device, timeout_seconds: float) -> None:
        self.device, self.timeout_seconds = device, timeout_seconds
        self.rank, self.size = group.rank(), group.size()
        self._groups = [group]
        # a group that outlives the interpreter aborts the process when another one is gone
        self._leave = weakref.finalize(self, self._groups.clear)

    def broadcast_state(self, learner: "Learner") -> None:
        """All go on from where the first one is, and step together from now on."""
        if not hasattr(learner, "collective"):
            raise UserError(
                f"{type(learner).__name__} learns alone: it has no `collective` through which losses are shared"
            )
        saved = io.BytesIO()
        if self.rank == 0:
            torch.save({"weights": learner.agent.state_dict(), "learner": learner.state_dict()}, saved)
        said = self._from_first(saved.getvalue())
        if self.rank != 0:
            state = torch.load(io.BytesIO(said), weights_only=True, map_location="cpu")
            learner.agent.load_state_dict(state["weights"])
            learner.load_state_dict(state["learner"])
        learner.collective = self  # type: ignore[attr-defined]

    def all_reduce_sum(self, parts: Tree) -> Tree:
        return self._reduce(parts, dist.ReduceOp.SUM)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self._reduce(x, dist.ReduceOp.MAX)

    def batch_fraction(self, count: float) -> float:
        of = self.all_reduce_sum(torch.tensor(count, dtype=torch.float64)).item()
        return count / of if of else 0.0

    def moments(self, x: Tensor) -> Moments:
        here = torch.tensor(float(len(x)), dtype=torch.float64)
        there, added = self.all_reduce_sum((here, x.sum()))
        number, mean = int(there.item()), added / there.to(added)
        squares = self.all_reduce_sum((x - mean).square().sum())
        return Moments(number, mean, (squares / max(1, number - 1)).sqrt())

    def all_reduce_gradients(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
        """A parameter that no process has a gradient for keeps none: optimisers pass it by."""
        parameters = list(parameters)
        touched = torch.tensor([p.grad is not None for p in parameters], dtype=loss.dtype)
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        loss, touched, added = self.all_reduce_sum((loss.detach(), touched, mine))
        for p, anyone, gradient in zip(parameters, touched.tolist(), added, strict=True):
            if anyone:  # in the memory layout of the parameter, which fused optimisers rely on
                p.grad = (torch.empty_like(p) if p.grad is None else p.grad).copy_(gradient)
        return loss

    def leave(self) -> None:
        """Hang up; for the others this process is gone."""
        self._leave()

    # -- what is sent --------------------------------------------------------------------------------

    def _reduce(self, parts: Tree, how: Any) -> Tree:
        leaves: list[Tensor] = []
        tree.map(leaves.append, parts)
        flat = torch.cat([leaf.detach().flatten().to(self.device) for leaf in leaves])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(how)
        self._wait(self._group.allreduce([flat], options))
        pieces = iter(flat.split([leaf.numel() for leaf in leaves]))
        return tree.map(lambda leaf: next(pieces).view(leaf.shape).to(leaf), parts)

    def _from_first(self, said: bytes) -> bytes:
        size = torch.tensor([len(said)], device=self.device)
        self._wait(self._group.broadcast([size], dist.BroadcastOptions()))
        data = torch.zeros(int(size.item()), dtype=torch.uint8, device=self.device)
        if said:
            data.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        self._wait(self._group.broadcast([data], dist.BroadcastOptions()))
        return data.cpu().numpy().tobytes()

    @property
    def _group(self) -> Any:
        if not self._groups:
            raise PeerLost(f"learner {self.rank} of {self.size} has left the others: join them anew")
        return self._groups[0]

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
            return
        except RuntimeError as e:
            reason = str(e).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
        del work  # nothing may hold on to the group, not even the traceback
        self.leave()
        raise PeerLost(
            f"learner {self.rank} of {self.size}: another one is gone, or was silent for {self.timeout_seconds:g} s "
            f"({reason})"
        )


# -- meeting ---------------------------------------------------------------------------------------------


def meeting(host: str = LOOPBACK) -> str:
    """Where learners can meet: a port that is free now, on the machine of the first of them."""
    with socket.create_server((host, 0)) as server:
        return f"tcp://{host}:{server.getsockname()[1]}"


def join(
    rank: int, size: int, at: str, device: torch.device | str = "cpu", timeout_seconds: float = 120.0
) -> Distributed:
    """Meet `size` - 1 other processes at `tcp://host:port`, or at a `file:///path` that is not there yet.

    By gloo on processors, by nccl on GPUs. With gloo nothing listens but the first process at `host`, and each at the
    address from which it reaches that. `timeout_seconds` bounds every wait, for all to come and for each step:
    it must be longer than the longest time between two updates.
    """
    device = torch.device(device)
    if not 0 <= rank < size:
        raise UserError(f"learner {rank} is not one of {size}: ranks begin at 0")
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store, mine = _store(rank, size, at, timeout)
        group = _group(store, rank, size, device, mine, timeout)
    except (RuntimeError, OSError) as e:
        raise UserError(
            f"learner {rank} of {size} met nobody at {at} within {timeout_seconds:g} s ({str(e).splitlines()[0]}): "
            "all must be started, with the same address, which must be new or free"
        ) from e
    return Distributed(group, device, timeout_seconds)


def _store(rank: int, size: int, at: str, timeout: timedelta) -> tuple[Any, str]:
    """Where addresses are exchanged, and this process's own."""
    where = urlsplit(at)
    if where.scheme == "file" and where.path:
        Path(where.path).parent.mkdir(parents=True, exist_ok=True)
        store = dist.FileStore(where.path, size)
        store.set_timeout(timeout)
        return store, LOOPBACK
    if where.scheme != "tcp" or where.hostname is None or where.port is None:
        raise UserError(f"learners cannot meet at {at}: give tcp://host:port or file:///path")
    host, port = where.hostname, where.port
    if rank:
        store = dist.TCPStore(host, port, size, False, timeout)
    else:  # left to itself the store would listen to the whole world
        listening = socket.create_server((host, port))
        store = dist.TCPStore(
            host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    return store, _address_towards(host)


def _address_towards(host: str) -> str:
    """By which of its addresses this machine would speak to that one; nothing is sent."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as s:
        s.connect(address)
        return s.getsockname()[0]


def _group(store: Any, rank: int, size: int, device: torch.device, mine: str, timeout: timedelta) -> Any:
    """A group of our own: the default one of torch.distributed stays free for others."""
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=mine)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


# -- parts of a batch --------------------------------------------------------------------------------------


def divide(batch: Batch, parts: int) -> list[Batch]:
    """A batch by its streams, as evenly as they go; what a replay says of all it holds goes to everyone."""
    t = batch.trajectory
    streams = t.action.shape[1]
    if streams < parts:
        raise UserError(f"a batch of {streams} cannot be divided among {parts} learners: raise algo.batch-size")
    bounds = [streams * i // parts for i in range(parts + 1)]

    def columns(dim: int, part: Tree, i: int) -> Tree:
        return tree.narrow(part, dim, bounds[i], bounds[i + 1] - bounds[i])

    return [
        Batch(
            t._replace(
                step=columns(1, t.step, i),
                action=columns(1, t.action, i),
                aux=columns(1, t.aux, i),
                state=columns(0, t.state, i),
                version=columns(0, t.version, i),
            ),
            columns(0, batch.keys, i),
            columns(0, batch.weight, i),
            columns(0, batch.reached, i),
            batch.about,
        )
        for i in range(parts)
    ]
