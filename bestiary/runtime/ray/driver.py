"""The Ray runtime: the driver's loop over actors, replay shards and learners in other processes.

The driver handles references and small messages. Trajectories go directly from actors to replay shards, and batches
from shards to learners. Lost actors, shards, inference servers and evaluators are replaced, and notes report it. A
lost learner ends the driver with `ProcessLost`; a new driver then continues from the last checkpoint.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError
from torch import Tensor

from bestiary.config.experiment import Experiment
from bestiary.config.machine import choose_device
from bestiary.config.plugins import plugin_files
from bestiary.config.versions import versions
from bestiary.errors import ProcessLost
from bestiary.runtime import Ray
from bestiary.runtime.ray.calls import EssentialCalls, LearnerGroup, start_all
from bestiary.runtime.ray.cluster import check_nodes, connect, disconnect, version_mismatch
from bestiary.runtime.ray.evaluation import RayEvaluation
from bestiary.runtime.ray.factory import WorkerFactory
from bestiary.runtime.ray.faults import START_TIMEOUT, original_error, summary
from bestiary.runtime.ray.metrics import RunMetrics
from bestiary.runtime.ray.placement import memory_needs, plan
from bestiary.runtime.ray.pools import ActorPool, ActorSlot, Call, ShardPool, Task
from bestiary.runtime.ray.wire import WeightsCodec, pack
from bestiary.runtime.ray.workers import LearnResult, RolloutResult, WorkerSpec
from bestiary.seeding import TRAIN
from bestiary.types import Episode, Progress, Snapshot, Spec

LEARN_SECONDS = 1.0  # longest time of one call to the learners
LOCKSTEP_TIMEOUT = 3600.0  # seconds for all updates that are due at once, for example after a warm-up
POLL_SECONDS = 0.5  # longest wait for results in one turn of the loop


class Events(NamedTuple):
    """What arrived in one turn of the loop."""

    rollouts: list[RolloutResult]
    episodes: list[Episode]
    learned: list[LearnResult]


class RayRuntime:
    """Runs the parts of an experiment in processes of a Ray cluster; a generator of Progress, like every runtime."""

    def __init__(self, experiment: Experiment) -> None:
        assert isinstance(experiment.runtime, Ray)
        self.experiment, self.cfg = experiment, experiment.runtime
        self.spec = env_spec(experiment)
        self.device = torch.device("cpu")  # of videos, which the driver renders
        self.threads = 1
        if self.cfg.device != "auto" and self.cfg.address is None:
            choose_device(self.cfg.device)
        agent = experiment.algo.agent(self.spec, experiment.net, experiment.core)
        self.codec = WeightsCodec(agent.state_dict())
        self.evaluates_remotely = not self.cfg.lockstep
        self.frames = self.steps = self.updates = self.resumes = 0
        self.notes: list[str] = []
        self.tasks: dict[Any, Task] = {}
        self.metrics = RunMetrics()
        self.closed = False
        self.calls = EssentialCalls(self.cfg.timeout)
        self.explorer_state: Snapshot = {}
        self.versions = versions()
        self.learners_busy, self.update_due = 0, False
        needs = memory_needs(experiment, self.spec, self.codec.bytes)
        try:
            nodes = connect(self.cfg.address, 2 * needs.shared(self.cfg.actors))
            check_nodes(nodes)
            self.placement = plan(nodes, self.cfg, needs)
            self._start_workers()
        except BaseException:
            self.close()
            raise

    @property
    def startup_messages(self) -> tuple[str, ...]:
        """The placement, printed before training starts."""
        return self.placement.lines

    # -- workers ---------------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        """Start all workers but the actors, which need to know how often the run was resumed."""
        worker_spec = WorkerSpec(self.experiment.to_json(), tuple(plugin_files()))
        self.factory = WorkerFactory(self.cfg, self.placement, worker_spec, self.spec)
        learners = [self.factory.learner(rank) for rank in range(self.cfg.learners)]
        self.learners = LearnerGroup(learners, self.calls)
        self.shards = ShardPool(self.factory, self.cfg.shards)
        self.actors = ActorPool(self.cfg, self.factory)
        self.evaluator: Any = None
        self.inference_server: Any = None
        workers = [*learners, *self.shards.handles]
        if self.cfg.inference == "shared":
            self.inference_server = self.factory.inference_server()
            workers.append(self.inference_server)
        start_all(workers, self.calls)
        self.learners.assign(self.shards.handles)

    def new_evaluator(self) -> Any:
        """The evaluator; a new one if the last was given up."""
        if self.evaluator is None:
            self.evaluator = self.factory.evaluator()
        return self.evaluator

    def _start_actor(self, slot: ActorSlot) -> None:
        self.actors.start(slot, self.resumes, self.explorer_state, self.inference_server)
        self._add_task(slot.actor.placed.remote(), "placed", slot)

    def _add_task(self, ref: Any, call: Call, slot: ActorSlot, output: Any = None) -> None:
        self.tasks[ref] = Task(call, slot.number, time.monotonic(), slot.restarts, output)

    # -- the loop --------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Progress]:
        self.learners.connect()
        self.version, self.weights_ref = self.updates, self.learners.first.weights.remote()
        self._send_weights_to_server()
        return self._lockstep() if self.cfg.lockstep else self._concurrently()

    def _publish(self, result: LearnResult, weights: Any) -> None:
        """Publish new weights; a node fetches each version once, when the first of its actors needs it."""
        if result.changed:
            self.updates = result.updates
            self.version, self.weights_ref = self.updates, weights
            self._send_weights_to_server()

    def _send_weights_to_server(self) -> None:
        if self.inference_server is not None:
            self.inference_server.load.remote(self.version, self.weights_ref)

    def _lockstep(self) -> Iterator[Progress]:
        """Collect, add and learn in turn, as the local runtime does, with the actors in order."""
        for slot in self.actors.slots:
            self._start_actor(slot)
            self.calls.get([slot.actor.start.remote(), self.shards.join(slot)], START_TIMEOUT)
            slot.ready = True
        self.tasks.clear()
        while self.frames < self.experiment.frames:
            sent = [self._rollout(slot) for slot in self.actors.slots]
            rollouts: list[RolloutResult] = self.calls.get([result for result, _ in sent])
            for slot, (_, trajectory) in zip(self.actors.slots, sent, strict=True):
                self.calls.get([self.shards.add(slot, trajectory)])
            ref, weights = self.learners.first.learn.options(num_returns=2).remote(float("inf"))
            learned: LearnResult = self.calls.get([ref], LOCKSTEP_TIMEOUT)[0]
            self._publish(learned, weights)
            self.shards.update_status(learned.status)
            self._count(sum(r.steps for r in rollouts))
            episodes = [e for n, r in enumerate(rollouts) for e in self._with_global_slots(n, r.episodes)]
            metrics = self.metrics.report([learned], rollouts, self.actors, self.shards)
            yield Progress(self.frames, self.steps, self.updates, episodes, metrics, self._take_notes())

    def _rollout(self, slot: ActorSlot) -> Any:
        """References to the result and to the trajectory of a new rollout."""
        return slot.actor.rollout.options(num_returns=2).remote(self.version, self.weights_ref)

    def _concurrently(self) -> Iterator[Progress]:
        """Collect and learn at the same time, every process at its own pace."""
        for slot in self.actors.slots:
            self._start_actor(slot)
        active = time.monotonic()  # when a rollout or an update last finished
        while self.frames < self.experiment.frames or self._unfinished():
            events = self._wait()
            active = time.monotonic() if events.rollouts or any(r.changed for r in events.learned) else active
            self._check_timeouts()
            for slot in self.actors.due():
                self._start_actor(slot)
            self._request_work()
            if time.monotonic() - active > START_TIMEOUT + self.cfg.timeout:
                raise self.calls.lost(
                    f"no rollout and no update finished within {START_TIMEOUT + self.cfg.timeout:g} seconds"
                )
            if events.rollouts or events.learned or self.notes:
                metrics = self.metrics.report(events.learned, events.rollouts, self.actors, self.shards)
                yield Progress(self.frames, self.steps, self.updates, events.episodes, metrics, self._take_notes())

    def _take_notes(self) -> tuple[str, ...]:
        notes, self.notes = tuple(self.notes), []
        return notes

    def _unfinished(self) -> bool:
        """Whether collected trajectories may still be learned from. Rollouts under way are dropped."""
        self.tasks = {ref: task for ref, task in self.tasks.items() if task.call in ("add", "leave", "learn")}
        return bool(self.tasks) or self.update_due

    def _request_work(self) -> None:
        """Request a rollout from every idle actor that need not pause, and updates if some may be due."""
        for slot in self.actors.slots:
            if slot.idle and not self.shards.must_pause(slot) and self.frames < self.experiment.frames:
                result, trajectory = self._rollout(slot)
                slot.idle = False
                self._add_task(result, "rollout", slot, trajectory)
        if self.update_due and not self.learners_busy:
            self.learners_busy, self.update_due = len(self.learners), False
            for rank, learner in enumerate(self.learners.handles):
                result, weights = learner.learn.options(num_returns=2).remote(LEARN_SECONDS)
                self.tasks[result] = Task("learn", rank, time.monotonic(), output=weights)

    # -- results ---------------------------------------------------------------------------------------

    def _wait(self) -> Events:
        """Wait briefly for results and process all that have arrived."""
        events = Events([], [], [])
        waiting = list(self.tasks)
        if not waiting:
            time.sleep(POLL_SECONDS)
            return events
        ready, _ = ray.wait(waiting, num_returns=1, timeout=POLL_SECONDS, fetch_local=False)
        if ready:
            ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)
        for ref in ready:
            task = self.tasks.pop(ref, None)
            if task is None:  # dropped meanwhile, with the shard it was for
                continue
            if task.call == "learn":
                self._learned(task, self.calls.get([ref])[0], events)
            elif task.call == "leave" or self.actors.is_current(task):
                self._arrived(ref, task, events)
        return events

    def _learned(self, task: Task, result: LearnResult, events: Events) -> None:
        self.learners_busy -= 1
        if task.number == 0:
            self._publish(result, task.output)
            events.learned.append(result)
        self.shards.update_status(result.status)
        for shard in result.lost:
            if self.shards.replaced_at[shard] < task.since:  # else the learner missed the shard's predecessor
                self._replace_shard(shard)
        # after an update, more updates may be due
        self.update_due = self.update_due or result.changed or result.more or bool(result.lost)

    def _arrived(self, ref: Any, task: Task, events: Events) -> None:
        """Process the result of a call to an actor, or to a shard on behalf of an actor."""
        slot = self.actors.slots[task.number]
        try:
            result: Any = ray.get(ref)
        except RayError as e:
            self._failed(task, slot, e)
            return
        if task.call == "placed":
            slot.placed = True
            self._add_task(slot.actor.start.remote(), "start", slot)
        elif task.call == "start":
            self._started(slot, result)
        elif task.call == "rollout":
            slot.failures, slot.idle = 0, True
            slot.adding += 1
            self._add_task(self.shards.add(slot, task.output), "add", slot)
            self._count(result.steps)
            events.rollouts.append(result)
            events.episodes.extend(self._with_global_slots(slot.number, result.episodes))
        else:
            slot.adding -= task.call == "add"
            self.shards.added(slot.shard, result)
            self.update_due = True

    def _started(self, slot: ActorSlot, found: dict[str, str]) -> None:
        if mismatch := version_mismatch(found, self.versions):  # on a node that joined later
            self._replace_actor(slot, f"was placed on a node with {mismatch}")
            return
        self.shards.join(slot)
        slot.ready = slot.idle = True
        if slot.restarts > 0:
            self.notes.append(f"actor {slot.number} restarted with new episodes")

    # -- faults ----------------------------------------------------------------------------------------

    def _failed(self, task: Task, slot: ActorSlot, e: RayError) -> None:
        """Replace the process whose failure a call reports."""
        for_shard = task.call in ("add", "leave")
        if isinstance(e, RayTaskError):  # the process is alive, the method raised
            if task.call == "add" and isinstance(e.cause, ObjectLostError):
                slot.adding -= 1  # the trajectory was lost with the node that held it
            elif self.inference_server is not None and isinstance(e.cause, RayActorError):
                self._replace_inference_server()
            elif for_shard:
                raise original_error(e) from None
            else:
                error = original_error(e)
                self._replace_actor(slot, f"failed: {summary(error)}", error)
        elif not for_shard:
            self._replace_actor(slot, f"was lost ({summary(e)})")
        elif isinstance(e, RayActorError) and self.shards.is_shard(slot.shard, e):
            self._replace_shard(slot.shard)
        elif task.call == "add":
            slot.adding -= 1

    def _replace_actor(self, slot: ActorSlot, reason: str, error: BaseException | None = None) -> None:
        """Give up an actor. Its shard no longer waits for it, and another actor takes its slot."""
        self.actors.remove(slot, error, collected=self.steps > 0)
        self._add_task(self.shards.leave(slot), "leave", slot)
        if self.inference_server is not None:
            self.inference_server.forget.remote(slot.number)
        self.notes.append(f"actor {slot.number} {reason}; restarting it")

    def _replace_inference_server(self) -> None:
        """Start a new server. The recurrent state of all actors is lost, so all of them restart."""
        self.notes.append("the inference server was lost with the recurrent state of all actors; restarting it")
        ray.kill(self.inference_server)
        self.inference_server = self.factory.inference_server()
        self.calls.get([self.inference_server.start.remote()], START_TIMEOUT)
        self._send_weights_to_server()
        for slot in self.actors.slots:
            if slot.actor is not None:
                self._replace_actor(slot, "lost its recurrent state")

    def _replace_shard(self, number: int) -> None:
        self.notes.append(f"replay shard {number} was lost with its contents; an empty one replaces it")
        try:
            self.shards.replace(number)
        except ProcessLost as e:
            raise self.calls.lost(str(e)) from None
        self.learners.assign(self.shards.handles)
        for slot in self.actors.slots:
            if slot.shard == number and slot.ready:  # the others join when they have started
                slot.adding = 0
                self.shards.join(slot)
        self.tasks = {
            ref: task
            for ref, task in self.tasks.items()
            if task.call not in ("add", "leave") or self.actors.slots[task.number].shard != number
        }

    def _check_timeouts(self) -> None:
        """Give up every process that has not answered in time."""
        now = time.monotonic()
        for ref, task in list(self.tasks.items()):
            timeout = self._timeout(task)
            if now - task.since <= timeout or ref not in self.tasks:  # dropped with the shard it was for
                continue
            if task.call == "learn":
                raise self.calls.lost(f"the learner did not answer within {timeout:g} seconds")
            self.tasks.pop(ref)
            slot = self.actors.slots[task.number]
            if task.call == "leave" or self.actors.is_current(task):
                if task.call in ("add", "leave"):
                    self._replace_shard(slot.shard)
                else:
                    self._replace_actor(slot, f"did not answer within {timeout:g} seconds")

    def _timeout(self, task: Task) -> float:
        """Seconds after which the process that should answer is given up."""
        if task.call == "placed":
            return float("inf")  # the cluster may have no room for it yet
        if task.call == "start":
            return max(START_TIMEOUT, self.cfg.timeout)
        if task.call == "learn":  # a learner waits for a silent shard, and reports it, before it is silent itself
            return 2 * self.cfg.timeout + LEARN_SECONDS
        return self.cfg.timeout

    # -- counters and metrics --------------------------------------------------------------------------

    def _count(self, steps: int) -> None:
        self.steps += steps
        self.frames = self.steps * self.spec.frames_per_step

    def _with_global_slots(self, actor: int, episodes: list[Episode]) -> list[Episode]:
        """Episodes with environment slots counted over all actors."""
        return [e._replace(slot=actor * self.cfg.envs + e.slot) for e in episodes]

    @property
    def replay_bytes(self) -> int:
        """Bytes of experience in all shards."""
        return sum(status.bytes for status in self.shards.status.values())

    # -- what a training session needs -----------------------------------------------------------------

    def init_from(self, weights: dict[str, Tensor], learner_state: Snapshot) -> None:
        self.calls.get([self.learners.first.init_from.remote(pack(weights), learner_state)])

    def weights(self) -> dict[str, Tensor]:
        return self.codec.decode(self.calls.get([self.learners.first.weights.remote()])[0])

    def evaluate(self, weights: dict[str, Tensor], stop: Callable[[], bool]) -> list[Episode]:
        evaluation = self.evaluate_async(weights)
        while evaluation.running and not stop():
            time.sleep(0.05)
        evaluation.finish(stop)
        return evaluation.episodes()

    def evaluate_async(self, weights: dict[str, Tensor]) -> RayEvaluation:
        return RayEvaluation(self, weights)

    def state_dict(self, at_rest: bool = True, with_replay: bool = True) -> Snapshot:
        state: Snapshot = {
            "steps": self.steps,
            "resumes": self.resumes,
            "rng": torch.get_rng_state(),
            "learner": self.calls.get([self.learners.first.state.remote()])[0],
            "actor": {"explorer": self._explorer_state()},
        }
        if at_rest and with_replay and len(self.shards) == 1:  # several shards cannot be merged into one replay
            state["replay"] = self.calls.get([self.shards.handles[0].state.remote()])[0]
        return state

    def _explorer_state(self) -> Snapshot:
        """The exploration state, such as visit counts, of one idle actor; it stands for all."""
        idle = [slot.actor for slot in self.actors.slots if slot.actor is not None and slot.idle]
        try:
            return ray.get(idle[0].explorer_state.remote(), timeout=10) if idle else self.explorer_state
        except RayError:
            return self.explorer_state

    def load_state_dict(self, weights: dict[str, Tensor], state: Snapshot) -> None:
        self.calls.get([self.learners.first.load.remote(self.codec.encode(weights), state["learner"])])
        self.updates = state["learner"]["updates"]
        self.steps = state["steps"]
        self.frames = self.steps * self.spec.frames_per_step
        self.resumes = state["resumes"] + 1
        if "replay" in state and len(self.shards) == 1:
            self.calls.get([self.shards.handles[0].load.remote(state["replay"])])
        self.explorer_state = state.get("actor", {}).get("explorer", {})

    def close(self) -> None:
        """Disconnect; Ray ends the processes of a run with its driver."""
        if not self.closed:
            self.closed = True
            # ids of processes repeat in the next cluster this process joins: no handle may outlive the connection
            for name in ("learners", "shards", "actors", "factory", "evaluator", "inference_server", "weights_ref"):
                vars(self).pop(name, None)
            self.tasks = {}
            disconnect()


def env_spec(experiment: Experiment) -> Spec:
    """The environment's specification. A mistake in its settings is reported here, before any process starts."""
    env_batch = experiment.env.make(1, experiment.seed, TRAIN, 1)
    try:
        return env_batch.spec
    finally:
        env_batch.close()
