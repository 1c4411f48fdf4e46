"""The loop over processes: weights, trajectories and priorities travel as before, only further.

The driver sees references and small messages; what was observed goes from players to shards and from there to the
learner. Whoever is lost is replaced and told of. Without the learner nothing can go on: then the run continues from its
last checkpoint, in a new driver.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError
from torch import Tensor

from bestiary.config.experiment import Experiment
from bestiary.config.machine import choose_device, versions
from bestiary.config.plugins import used
from bestiary.errors import Lost, UserError
from bestiary.replay.base import row_bytes
from bestiary.runtime import Ray
from bestiary.runtime.collective import PeerLost
from bestiary.runtime.ray.cluster import check_nodes, connect, disconnect, later, on, other_version, process
from bestiary.runtime.ray.evaluation import RayEvaluation
from bestiary.runtime.ray.faults import START, TRIES, fault, short
from bestiary.runtime.ray.placement import Needs, plan
from bestiary.runtime.ray.wire import Flat, pack
from bestiary.runtime.ray.workers import Added, Held, Judge, Order, Played, Player, Shard, Taught, Teacher
from bestiary.seeding import TRAIN
from bestiary.types import Episode, Progress, Snapshot, Spec

LESSON = 1.0  # seconds of learning between two looks at the rest
LONG = 3600.0  # seconds for all that is due at once, after a warm-up in lock-step
LOOK = 0.5  # seconds to wait for news at most
PAUSE = 30.0  # seconds at most before a player that keeps failing is tried again


class Task(NamedTuple):
    """Something asked of a process."""

    what: str  # placed, hello, play, add, leave or learn
    who: int
    since: float
    life: int = 0  # of the player that was asked
    brings: Any = None  # reference to what it makes besides its answer: a trajectory, or weights


class Place:
    """Where a player plays; players come and go."""

    def __init__(self, number: int, shard: int, lane: int) -> None:
        self.number, self.shard, self.lane = number, shard, lane
        self.player: Any = None
        self.life = -1  # how many played here before
        self.placed = False  # there was a node for some player of it, once
        self.ready = False  # has said hello
        self.idle = False  # ready, and nothing was asked of it
        self.adding = 0  # trajectories on their way into the replay
        self.failures = 0  # in a row
        self.again = 0.0  # when to try again


class ClusterRuntime:
    """A generator of Progress, like every runtime."""

    exact = False  # episodes under way are lost with the players: a resumed run starts new ones

    def __init__(self, experiment: Experiment) -> None:
        assert isinstance(experiment.runtime, Ray)
        self.experiment, self.cfg = experiment, experiment.runtime
        self.spec = look(experiment)
        self.device = torch.device("cpu")  # of evaluations here
        self.threads = 1
        if self.cfg.device != "auto" and self.cfg.address is None:
            choose_device(self.cfg.device)
        agent = experiment.algo.agent(self.spec, experiment.net, experiment.core)
        self.flat = Flat(agent.state_dict())
        self.evaluates_remotely = not self.cfg.lockstep
        self.frames = self.steps = self.updates = self.resumes = 0
        self.replay_bytes = 0
        self.notes: list[str] = []
        self.tasks: dict[Any, Task] = {}
        self.closed = False
        self.gone = ""  # why nothing can go on
        self.explored: Snapshot = {}
        self.lost = 0  # players, ever
        self.versions = versions()
        self.order = Order(experiment.to_json(), tuple(used()))
        unroll = experiment.algo.unroll
        config = experiment.algo.replay_builder(self.cfg.streams).share(*self.cfg.shards_and_learners)
        row = row_bytes(self.spec) + 4 * self.spec.num_actions
        needs = Needs(row * (unroll + 1) * self.cfg.envs, self.flat.bytes, config.nbytes(self.spec, unroll))
        try:
            found = connect(self.cfg.address, 2 * needs.store(self.cfg.actors))
            check_nodes(found)
            self.plan = plan(found, self.cfg, needs)
            self._build()
        except BaseException:
            self.close()
            raise

    @property
    def startup_messages(self) -> tuple[str, ...]:
        """What a person should know before it starts."""
        return self.plan.lines

    # -- processes -------------------------------------------------------------------------------------

    def _build(self) -> None:
        """All but the players, who need to know how often the run was resumed."""
        cores, gpus = self.cfg.learner_cpus, self.plan.gpus
        self.teachers: list[Any] = [
            process(later(Teacher), cores, gpus, scheduling_strategy=on(node)).remote(self.order, self.spec, rank)
            for rank, node in enumerate(self.plan.learners)
        ]
        self.teacher: Any = self.teachers[0]  # speaks for all
        self.shards = [self._new_shard(number) for number in range(self.cfg.shards)]
        self.judge: Any = None
        self.chooser: Any = None
        parts = [*self.teachers, *self.shards]
        if self.cfg.inference == "shared":
            self._new_chooser()
            parts.append(self.chooser)
        self._wait_for_room(parts)
        self._ask([part.hello.remote() for part in parts], START)
        self._share_out()
        shards = self.cfg.shards
        self.places = [Place(n, n % shards, n // shards) for n in range(self.cfg.actors)]
        self.full = [False] * shards
        self.renewed = [0.0] * shards  # when a shard was last replaced
        self.held: dict[int, Held] = {}  # what the shards last said of themselves
        self.untold: list[Played] = []
        self.ahead: list[list[int]] = [[] for _ in range(shards)]
        self.learning, self.due = 0, False  # learners at work; whether there may be something to learn

    def _wait_for_room(self, parts: list[Any]) -> None:
        """The plan knows what nodes have, not what others use of it."""
        _, waiting = ray.wait([part.placed.remote() for part in parts], num_returns=len(parts), timeout=START)
        if waiting:
            free, have = (found.get("CPU", 0.0) for found in (ray.available_resources(), ray.cluster_resources()))
            raise UserError(
                f"the learner, the replay or shared inference found no room within {START:g} seconds: "
                f"of the cluster's {have:g} cores {free:g} are free; end what else runs there, or add nodes"
            )

    def _share_out(self) -> None:
        """Which shards each learner draws from: its own, or all where there are too few."""
        many = len(self.teachers)
        step = many if len(self.shards) % many == 0 else 1
        known = dict(enumerate(self.shards))
        mine = [{n: s for n, s in known.items() if n % step == rank % step} for rank in range(many)]
        self._ask([teacher.use.remote(shards) for teacher, shards in zip(self.teachers, mine, strict=True)])

    def _new_shard(self, number: int) -> Any:
        return process(later(Shard), scheduling_strategy=on(self.plan.shards[number])).remote(
            self.order, self.spec, number
        )

    def _new_chooser(self) -> None:
        from bestiary.runtime.ray.inference import Chooser

        assert self.plan.chooser is not None
        where, many = on(self.plan.chooser), 2 * self.cfg.actors + 4
        cores, gpus = self.cfg.actor_cpus, self.plan.chooser_gpus
        chooser = process(later(Chooser), cores, gpus, scheduling_strategy=where, max_concurrency=many)
        self.chooser = chooser.remote(self.order, self.spec)

    def _new_judge(self) -> Any:
        if self.judge is None:
            # the second one at a time asks whether it still plays
            judge = process(Judge, scheduling_strategy=on(self.plan.judge), max_concurrency=2)
            self.judge = judge.remote(self.order, self.spec)
        return self.judge

    def _start(self, place: Place) -> None:
        """A new player for a place; it says hello when it is ready, which may be once there is a node for it."""
        place.life += 1
        planned = self.plan.actors[place.number]
        where = on(planned) if planned is not None and place.life == 0 else "SPREAD"
        player = process(later(Player), self.cfg.actor_cpus, scheduling_strategy=where)
        place.player = player.remote(self.order, place.number, place.life, self.resumes, self.explored, self.chooser)
        place.ready, place.idle, place.again, place.adding = False, False, 0.0, 0
        self._note_task(place.player.placed.remote(), "placed", place)

    def _note_task(self, ref: Any, what: str, place: Place, brings: Any = None) -> None:
        self.tasks[ref] = Task(what, place.number, time.monotonic(), place.life, brings)

    def _ask(self, refs: list[Any], at_least: float = 0.0) -> list[Any]:
        """Answers of processes without which nothing goes on; some need a number of seconds at least."""
        patience = max(self.cfg.timeout, at_least)
        if self.gone:
            raise Lost(self.gone)
        try:
            return ray.get(refs, timeout=patience)
        except RayTaskError as e:
            if isinstance(e.cause, PeerLost):  # of several learners one is gone, and another was the first to see it
                self.gone = f"one of the learners was lost ({short(e.cause)})"
                raise Lost(self.gone) from None
            raise fault(e) from None
        except GetTimeoutError:
            self.gone = f"the learner or the replay did not answer within {patience:g} seconds"
            raise Lost(self.gone) from None
        except RayError as e:
            self.gone = f"the learner or the replay was lost ({short(e)})"
            raise Lost(self.gone) from e

    # -- the loop --------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Progress]:
        if len(self.teachers) > 1:
            at = self._ask([self.teacher.invite.remote()])[0]
            self._ask([teacher.meet.remote(at) for teacher in self.teachers])
        self.version, self.weights_ref = self.updates, self.teacher.weights.remote()
        self._tell_chooser()
        return self._in_step() if self.cfg.lockstep else self._at_once()

    def _publish(self, taught: Taught, weights: Any) -> None:
        """A new version: each node fetches it once, when the first of its players asks for it."""
        if taught.changed:
            self.updates = taught.updates
            self.version, self.weights_ref = self.updates, weights
            self._tell_chooser()

    def _tell_chooser(self) -> None:
        if self.chooser is not None:
            self.chooser.load.remote(self.version, self.weights_ref)

    def _in_step(self) -> Iterator[Progress]:
        """As the local runtime does it, with the players in order."""
        for place in self.places:
            self._start(place)
            self._ask([place.player.hello.remote(), self.shards[place.shard].join.remote(place.lane)], START)
            place.ready = True
        self.tasks.clear()
        while self.frames < self.experiment.frames:
            sent = [
                place.player.play.options(num_returns=2).remote(self.version, self.weights_ref) for place in self.places
            ]
            played: list[Played] = self._ask([told for told, _ in sent])
            for place, (_, trajectory) in zip(self.places, sent, strict=True):
                self._ask([self.shards[place.shard].add.remote(place.lane, trajectory)])
            ref, weights = self.teacher.learn.options(num_returns=2).remote(float("inf"))
            taught: Taught = self._ask([ref], LONG)[0]
            self._publish(taught, weights)
            self.held |= taught.held
            self._count(sum(p.moves for p in played))
            episodes = [e for n, p in enumerate(played) for e in self._moved(n, p.episodes)]
            told = self._told([taught], played)
            yield Progress(self.frames, self.steps, self.updates, episodes, told, self._noted())

    def _at_once(self) -> Iterator[Progress]:
        """Everybody at their own pace."""
        for place in self.places:
            self._start(place)
        heard = time.monotonic()  # when something was last played or learnt
        while self.frames < self.experiment.frames or self._unlearnt():
            news = self._hear()
            heard = time.monotonic() if news.played or any(t.changed for t in news.taught) else heard
            self._give_up_on_the_silent()
            self._begin_anew()
            self._keep_busy()
            if time.monotonic() - heard > START + self.cfg.timeout:
                self.gone = f"nothing was played or learnt for {START + self.cfg.timeout:g} seconds"
                raise Lost(self.gone)
            if news.played or news.taught or self.notes:
                told = self._told(news.taught, news.played)
                yield Progress(self.frames, self.steps, self.updates, news.episodes, told, self._noted())

    def _noted(self) -> tuple[str, ...]:
        notes, self.notes = tuple(self.notes), []
        return notes

    def _unlearnt(self) -> bool:
        """Whether something that was played may still be learnt from. What is still being played no longer counts."""
        self.tasks = {ref: task for ref, task in self.tasks.items() if task.what not in ("placed", "hello", "play")}
        return bool(self.tasks) or self.due

    def _hear(self) -> "News":
        """Wait for what was asked, a little, and deal with all that is there."""
        news = News([], [], [])
        waiting = list(self.tasks)
        if not waiting:
            time.sleep(LOOK)
            return news
        ready, _ = ray.wait(waiting, num_returns=1, timeout=LOOK, fetch_local=False)
        if ready:
            ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)
        for ref in ready:
            task = self.tasks.pop(ref, None)
            if task is None:  # given up meanwhile, with the shard it was for
                continue
            if task.what == "learn":
                self._heard_teacher(task, self._ask([ref])[0], news)
            elif task.what == "leave" or self._still_there(task):
                self._heard_place(ref, task, news)
        return news

    def _still_there(self, task: Task) -> bool:
        """Whether the player that was asked still plays."""
        place = self.places[task.who]
        return place.player is not None and place.life == task.life

    def _heard_teacher(self, task: Task, taught: Taught, news: "News") -> None:
        self.learning -= 1
        if task.who == 0:
            self._publish(taught, task.brings)
            news.taught.append(taught)
        self.held |= taught.held
        for shard, held in taught.held.items():
            self.full[shard] = held.full
        for shard in taught.lost:
            if self.renewed[shard] < task.since:  # else it is the one before that was missed
                self._lose_shard(shard)
        # as long as something was learnt, there may be more to learn from
        self.due = self.due or taught.changed or taught.more or bool(taught.lost)

    def _heard_place(self, ref: Any, task: Task, news: "News") -> None:
        place = self.places[task.who]
        try:
            answer: Any = ray.get(ref)
        except RayTaskError as e:
            if task.what == "add" and isinstance(e.cause, ObjectLostError):
                place.adding -= 1  # the trajectory is gone, with the node that had it
            elif self.chooser is not None and isinstance(e.cause, RayActorError):
                self._lose_chooser()
            elif task.what in ("add", "leave"):
                raise fault(e) from None
            else:
                self._lose(place, f"failed: {short(fault(e))}", fault(e))
            return
        except RayError as e:
            if task.what not in ("add", "leave"):
                self._lose(place, f"was lost ({short(e)})")
            elif isinstance(e, RayActorError) and e.actor_id == self.shards[place.shard]._actor_id.hex():
                self._lose_shard(place.shard)
            elif task.what == "add":
                place.adding -= 1
            return
        if task.what == "placed":
            place.placed = True
            self._note_task(place.player.hello.remote(), "hello", place)
        elif task.what == "hello":
            if other := other_version(answer, self.versions):  # of a node that joined later
                self._lose(place, f"found itself on a node with {other}")
                return
            self.shards[place.shard].join.remote(place.lane)
            place.ready = place.idle = True
            if place.life > 0:
                self.notes.append(f"actor {place.number} is back, with new episodes")
        elif task.what == "play":
            self._heard_play(place, answer, task.brings, news)
        else:
            place.adding -= task.what == "add"
            added: Added = answer
            self.full[place.shard], self.ahead[place.shard] = added.full, added.ahead
            self.due = True

    def _heard_play(self, place: Place, played: Played, trajectory: Any, news: "News") -> None:
        place.failures, place.idle = 0, True
        place.adding += 1
        self._note_task(self.shards[place.shard].add.remote(place.lane, trajectory), "add", place)
        self._count(played.moves)
        news.played.append(played)
        news.episodes.extend(self._moved(place.number, played.episodes))

    def _keep_busy(self) -> None:
        """Ask everybody who is ready for more, unless others must catch up first."""
        for place in self.places:
            behind = self.full[place.shard] or place.lane in self.ahead[place.shard] or place.adding > 1
            if place.idle and not behind and self.frames < self.experiment.frames:
                told, trajectory = place.player.play.options(num_returns=2).remote(self.version, self.weights_ref)
                place.idle = False
                self._note_task(told, "play", place, trajectory)
        if self.due and not self.learning:
            self.learning, self.due = len(self.teachers), False
            for rank, teacher in enumerate(self.teachers):
                told, weights = teacher.learn.options(num_returns=2).remote(LESSON)
                self.tasks[told] = Task("learn", rank, time.monotonic(), brings=weights)

    # -- faults ----------------------------------------------------------------------------------------

    def _lose(self, place: Place, why: str, error: BaseException | None = None) -> None:
        """A player is gone: nobody waits for it, and another takes its place."""
        if isinstance(error, UserError) and not self.steps:
            raise error  # where others play, it is the fault of a node and not of the experiment
        place.failures += 1
        if error is not None and all(p.failures >= TRIES for p in self.places if p.placed):
            raise error
        ray.kill(place.player)
        self._note_task(self.shards[place.shard].leave.remote(place.lane), "leave", place)
        if self.chooser is not None:
            self.chooser.forget.remote(place.number)
        self.lost += 1
        place.ready, place.idle, place.player = False, False, None
        pause = min(PAUSE, 2.0 ** (place.failures - 2)) if place.failures > 1 else 0.0
        place.again = time.monotonic() + pause
        self.notes.append(f"actor {place.number} {why}; another takes its place, with new episodes")

    def _lose_chooser(self) -> None:
        """All memory was with it: everybody begins anew."""
        self.notes.append("the process that chooses actions was lost with all memory; another takes its place")
        ray.kill(self.chooser)
        self._new_chooser()
        self._ask([self.chooser.hello.remote()], START)
        self._tell_chooser()
        for place in self.places:
            if place.player is not None:
                self._lose(place, "lost its memory")

    def _begin_anew(self) -> None:
        for place in self.places:
            if place.player is None and time.monotonic() >= place.again:
                self._start(place)

    def _lose_shard(self, number: int) -> None:
        ray.kill(self.shards[number])
        self.notes.append(f"replay shard {number} was lost with what was played into it; it fills anew")
        self._renew_shard(number)
        self._share_out()
        self.renewed[number] = time.monotonic()
        self.full[number], self.ahead[number] = False, []
        for place in self.places:
            if place.shard == number and place.ready:  # whoever is not joins later: nobody waits for them
                place.adding = 0
                self.shards[number].join.remote(place.lane)
        gone = [r for r, t in self.tasks.items() if t.what in ("add", "leave") and self.places[t.who].shard == number]
        for ref in gone:
            del self.tasks[ref]

    def _renew_shard(self, number: int) -> None:
        """The node that took the last one along may not be known to be gone: then its successor is lost there too."""
        for _ in range(TRIES):
            self.shards[number] = self._new_shard(number)
            try:
                ray.get(self.shards[number].hello.remote(), timeout=START)
                return
            except RayActorError:
                time.sleep(LOOK)
            except RayTaskError as e:
                raise fault(e) from None
            except RayError:
                break
        self.gone = f"replay shard {number} was lost and could not be replaced"
        raise Lost(self.gone)

    def _give_up_on_the_silent(self) -> None:
        now = time.monotonic()
        for ref, task in list(self.tasks.items()):
            patience = self._patience(task)
            if now - task.since <= patience or ref not in self.tasks:  # or given up with the shard it was for
                continue
            if task.what == "learn":
                self.gone = f"the learner did not answer within {patience:g} seconds"
                raise Lost(self.gone)
            self.tasks.pop(ref)
            place = self.places[task.who]
            if task.what == "leave" or self._still_there(task):
                if task.what in ("add", "leave"):
                    self._lose_shard(place.shard)
                else:
                    self._lose(place, f"did not answer within {patience:g} seconds")

    def _patience(self, task: Task) -> float:
        """Seconds after which whoever was asked is given up."""
        if task.what == "placed":
            return float("inf")  # there may be no node for it yet
        if task.what == "hello":
            return max(START, self.cfg.timeout)
        if task.what == "learn":  # who waits for a shard that is silent says so itself
            return 2 * self.cfg.timeout + LESSON
        return self.cfg.timeout

    # -- books -----------------------------------------------------------------------------------------

    def _count(self, moves: int) -> None:
        self.steps += moves
        self.frames = self.steps * self.spec.frames_per_step

    def _moved(self, number: int, episodes: list[Episode]) -> list[Episode]:
        """Slots counted over all players."""
        return [e._replace(slot=number * self.cfg.envs + e.slot) for e in episodes]

    def _told(self, taught: list[Taught], played: list[Played]) -> dict[str, float]:
        """Of all that was played and learnt since the last time something was told."""
        self.untold += played
        learnt = mean([t.metrics for t in taught if t.metrics])
        if not learnt:
            return {}
        played, self.untold = self.untold, []
        self.replay_bytes = sum(held.bytes for held in self.held.values())
        here = {
            "actors": float(sum(place.ready for place in self.places)),
            "actors_lost": float(self.lost),
            "learner_idle": sum(t.idle for t in taught) / len(taught),
        }
        if played:
            here["unroll_seconds"] = sum(p.seconds for p in played) / len(played)
        kept = mean([held.metrics for held in self.held.values()])
        return learnt | kept | mean([p.tally for p in played]) | here

    # -- what whoever trains asks for ------------------------------------------------------------------

    def init_from(self, weights: dict[str, Tensor], learnt: Snapshot) -> None:
        self._ask([self.teacher.init_from.remote(pack(weights), learnt)])

    def weights(self) -> dict[str, Tensor]:
        return self.flat.unpack(self._ask([self.teacher.weights.remote()])[0])

    def evaluate(self, weights: dict[str, Tensor], stop: Callable[[], bool]) -> list[Episode]:
        beside = self.evaluate_async(weights)
        while beside.running and not stop():
            time.sleep(0.05)
        beside.finish(stop)
        return beside.episodes()

    def evaluate_async(self, weights: dict[str, Tensor]) -> RayEvaluation:
        return RayEvaluation(self, weights)

    def state_dict(self, at_rest: bool = True, with_replay: bool = True) -> Snapshot:
        learner, _ = self._ask([self.teacher.state.remote()])[0]
        state: Snapshot = {
            "steps": self.steps,
            "resumes": self.resumes,
            "rng": torch.get_rng_state(),
            "learner": learner,
            "actor": {"explorer": self._explorer()},
        }
        if at_rest and with_replay and len(self.shards) == 1:  # parts of several could not be put together again
            state["replay"] = self._ask([self.shards[0].state.remote()])[0]
        return state

    def _explorer(self) -> Snapshot:
        """What has been seen counts in new episodes too; one of the players speaks for all."""
        known = [place.player for place in self.places if place.player is not None and place.idle]
        try:
            return ray.get(known[0].explored.remote(), timeout=10) if known else self.explored
        except RayError:
            return self.explored

    def load_state_dict(self, weights: dict[str, Tensor], state: Snapshot) -> None:
        self._ask([self.teacher.load.remote(self.flat.pack(weights), state["learner"])])
        self.updates = state["learner"]["updates"]
        self.steps = state["steps"]
        self.frames = self.steps * self.spec.frames_per_step
        self.resumes = state["resumes"] + 1
        if "replay" in state and len(self.shards) == 1:
            self._ask([self.shards[0].load.remote(state["replay"])])
        self.explored = state.get("actor", {}).get("explorer", {})

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            # numbers of processes repeat in the next cluster joined from here: no handle may outlive this one
            self.teachers, self.shards, self.places, self.tasks = [], [], [], {}
            self.teacher = self.judge = self.chooser = self.weights_ref = None
            disconnect()  # what belongs to this run ends with its driver


class News(NamedTuple):
    played: list[Played]
    episodes: list[Episode]
    taught: list[Taught]


def look(experiment: Experiment) -> Spec:
    """What an agent must know of the environment; what is wrong with it is told before any process is started."""
    env_batch = experiment.env.make(1, experiment.seed, TRAIN, 1)
    try:
        return env_batch.spec
    finally:
        env_batch.close()


def mean(found: list[dict[str, float]]) -> dict[str, float]:
    """Of every number, over those who told it."""
    sums: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for values in found:
        counts.update(values.keys())
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value
    return {name: value / counts[name] for name, value in sums.items()}
