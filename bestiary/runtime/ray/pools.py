"""Actors and replay shards of a run: their state as the driver knows it, and their replacement when they are lost."""

import time
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from bestiary.config.compat import ray_actor_id
from bestiary.errors import ProcessLost, UserError
from bestiary.runtime import Ray
from bestiary.runtime.ray.factory import WorkerFactory
from bestiary.runtime.ray.faults import MAX_FAILURES, START_TIMEOUT, original_error
from bestiary.runtime.ray.workers import AddResult, ShardStatus
from bestiary.types import Snapshot

MAX_PAUSE = 30.0  # longest pause before an actor that keeps failing is restarted, in seconds
RETRY = 0.5  # seconds before a shard that could not start is started again

Call = Literal["placed", "start", "rollout", "add", "leave", "learn"]


class Task(NamedTuple):
    """A remote call whose result the driver waits for."""

    call: Call
    number: int  # of the actor's slot, or the learner's rank
    since: float
    restarts: int = 0  # of the slot when the call was made
    output: Any = None  # reference to the call's large result: a trajectory, or weights


class ActorSlot:
    """The place of one actor; when its actor is lost, another one takes the slot over."""

    def __init__(self, number: int, shard: int, index: int) -> None:
        self.number, self.shard, self.index = number, shard, index  # `index`: among the actors of its shard
        self.actor: Any = None
        self.restarts = -1  # actors this slot had before the present one
        self.placed = False  # whether some actor of the slot ever had a node
        self.ready = False  # whether its actor has started
        self.idle = False  # whether its actor is ready and collects nothing
        self.adding = 0  # trajectories on their way into the replay
        self.failures = 0  # consecutive
        self.retry_at = 0.0  # when the next actor may be started


class ShardPool:
    """The replay shards, and whether actors should pause for them."""

    def __init__(self, factory: WorkerFactory, count: int) -> None:
        self.factory = factory
        self.handles: list[Any] = [factory.shard(number) for number in range(count)]
        self.full = [False] * count  # whether learning lags behind collection
        self.ahead: list[list[int]] = [[] for _ in range(count)]  # actors that are ahead of slower ones, by index
        self.replaced_at = [0.0] * count
        self.status: dict[int, ShardStatus] = {}

    def __len__(self) -> int:
        return len(self.handles)

    def join(self, slot: ActorSlot) -> Any:
        return self.handles[slot.shard].join.remote(slot.index)

    def leave(self, slot: ActorSlot) -> Any:
        return self.handles[slot.shard].leave.remote(slot.index)

    def add(self, slot: ActorSlot, trajectory: Any) -> Any:
        return self.handles[slot.shard].add.remote(slot.index, trajectory)

    def added(self, number: int, result: AddResult) -> None:
        self.full[number], self.ahead[number] = result.full, result.ahead

    def must_pause(self, slot: ActorSlot) -> bool:
        return self.full[slot.shard] or slot.index in self.ahead[slot.shard] or slot.adding > 1

    def update_status(self, status: dict[int, ShardStatus]) -> None:
        self.status |= status
        for number, one in status.items():
            self.full[number] = one.full

    def is_shard(self, number: int, e: RayActorError) -> bool:
        """Whether an error reports the death of this shard's process."""
        return e.actor_id == ray_actor_id(self.handles[number])

    def replace(self, number: int) -> None:
        """Start an empty shard in the place of one that is lost."""
        ray.kill(self.handles[number])
        self._start_again(number)
        self.replaced_at[number] = time.monotonic()
        self.full[number], self.ahead[number] = False, []

    def _start_again(self, number: int) -> None:
        """The node that died with the last shard may not be known to be dead yet; then the next one dies there too."""
        for _ in range(MAX_FAILURES):
            self.handles[number] = self.factory.shard(number)
            try:
                ray.get(self.handles[number].start.remote(), timeout=START_TIMEOUT)
                return
            except RayActorError:
                time.sleep(RETRY)
            except RayTaskError as e:
                raise original_error(e) from None
            except RayError:
                break
        raise ProcessLost(f"replay shard {number} was lost and could not be replaced")


class ActorPool:
    """The actors. A lost actor's slot gets a new actor, which starts new episodes."""

    def __init__(self, cfg: Ray, factory: WorkerFactory) -> None:
        self.factory = factory
        self.slots = [ActorSlot(n, n % cfg.shards, n // cfg.shards) for n in range(cfg.actors)]
        self.lost = 0  # actors, since the driver started

    @property
    def ready(self) -> int:
        return sum(slot.ready for slot in self.slots)

    def start(self, slot: ActorSlot, resumes: int, explorer: Snapshot, inference_server: Any) -> None:
        """Start a new actor in a slot. It may have to wait for a node."""
        slot.restarts += 1
        slot.actor = self.factory.actor(slot.number, slot.restarts, resumes, explorer, inference_server)
        slot.ready, slot.idle, slot.retry_at, slot.adding = False, False, 0.0, 0

    def due(self) -> list[ActorSlot]:
        """Slots without an actor whose pause is over."""
        return [slot for slot in self.slots if slot.actor is None and time.monotonic() >= slot.retry_at]

    def is_current(self, task: Task) -> bool:
        """Whether the actor that a task belongs to is still in its slot."""
        slot = self.slots[task.number]
        return slot.actor is not None and slot.restarts == task.restarts

    def remove(self, slot: ActorSlot, error: BaseException | None, collected: bool) -> None:
        """Give up a slot's actor. Raises `error` if it is not the fault of a single process.

        A UserError before any actor `collected` a step is a mistake in the experiment; afterwards it is the fault of a
        node. Any other error ends the run once every actor that has a node failed with it repeatedly.
        """
        if isinstance(error, UserError) and not collected:
            raise error
        slot.failures += 1
        if error is not None and all(s.failures >= MAX_FAILURES for s in self.slots if s.placed):
            raise error
        ray.kill(slot.actor)
        self.lost += 1
        slot.ready, slot.idle, slot.actor = False, False, None
        pause = min(MAX_PAUSE, 2.0 ** (slot.failures - 2)) if slot.failures > 1 else 0.0
        slot.retry_at = time.monotonic() + pause
