"""Calls to workers without which a run cannot go on: the learners and the replay shards."""

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from bestiary.errors import ProcessLost, UserError
from bestiary.runtime.collective import PeerLost
from bestiary.runtime.ray.faults import START_TIMEOUT, original_error, summary


class EssentialCalls:
    """Waits for results of essential workers. When one is lost, this and every later call raises `ProcessLost`."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.failure_reason = ""  # why the run cannot go on; empty: it can

    def get(self, refs: list[Any], min_timeout: float = 0.0) -> list[Any]:
        timeout = max(self.timeout, min_timeout)
        if self.failure_reason:
            raise ProcessLost(self.failure_reason)
        try:
            return ray.get(refs, timeout=timeout)
        except RayTaskError as e:
            if isinstance(e.cause, PeerLost):  # one learner was lost, and another one noticed it first
                raise self.lost(f"one of the learners was lost ({summary(e.cause)})") from None
            raise original_error(e) from None
        except GetTimeoutError:
            raise self.lost(f"the learner or the replay did not answer within {timeout:g} seconds") from None
        except RayError as e:
            raise self.lost(f"the learner or the replay was lost ({summary(e)})") from e

    def lost(self, reason: str) -> ProcessLost:
        """The error to raise; all later calls raise it too."""
        self.failure_reason = reason
        return ProcessLost(reason)


class LearnerGroup:
    """The learners of a run; rank 0 holds the weights that are published and saved."""

    def __init__(self, handles: list[Any], calls: EssentialCalls) -> None:
        self.handles, self.calls = handles, calls

    def __len__(self) -> int:
        return len(self.handles)

    @property
    def first(self) -> Any:
        return self.handles[0]

    def connect(self) -> None:
        """Let several learners form a group, in which all continue from the state of rank 0."""
        if len(self.handles) > 1:
            address = self.calls.get([self.first.rendezvous.remote()])[0]
            self.calls.get([learner.join_group.remote(address) for learner in self.handles])

    def assign(self, shards: list[Any]) -> None:
        """Give each learner shards of its own to sample from, or all shards where there are too few."""
        count = len(self.handles)
        step = count if len(shards) % count == 0 else 1
        assigned = [{n: s for n, s in enumerate(shards) if n % step == rank % step} for rank in range(count)]
        self.calls.get([learner.use_shards.remote(s) for learner, s in zip(self.handles, assigned, strict=True)])


def start_all(workers: list[Any], calls: EssentialCalls) -> None:
    """Start workers once each has a node: the placement knows a node's cores, not how many of them others use."""
    _, waiting = ray.wait([w.placed.remote() for w in workers], num_returns=len(workers), timeout=START_TIMEOUT)
    if waiting:
        free, have = (found.get("CPU", 0.0) for found in (ray.available_resources(), ray.cluster_resources()))
        raise UserError(
            f"the learner, the replay or the inference server found no room within {START_TIMEOUT:g} seconds: "
            f"{free:g} of the cluster's {have:g} cores are free; end other jobs there, or add nodes"
        )
    calls.get([worker.start.remote() for worker in workers], START_TIMEOUT)
