"""The parts of the Ray runtime without a cluster: alignment, placement, messages, inference, learner and driver."""

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.settings import configure

import bestiary
from bestiary import tree
from bestiary.config.extras import available
from bestiary.errors import UserError
from bestiary.replay.fifo import select_streams
from bestiary.runtime import Ray
from bestiary.runtime.start import start
from bestiary.types import TimeStep, Trajectory, transitions

pytestmark = pytest.mark.skipif(not available("ray"), reason="needs the extra ray")
GIB = 2**30


def trajectory(value: int, first: bool = False, length: int = 4, streams: int = 2) -> Trajectory:
    """A trajectory whose time steps carry a recognisable value."""
    full = torch.full((length, streams), float(value))
    no = torch.zeros(length, streams, dtype=torch.bool)
    begins = no.clone()
    begins[0] = first
    step = TimeStep(full, full.long(), full.clone(), begins, no)
    return Trajectory(step, full.long(), {}, (torch.full((streams, 3), float(value)),), torch.full((streams,), value))


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r'the extra "ray" \(training on a cluster\) is not installed: pip install "bestiary\[ray\]"'
    ):
        start(replace(bestiary.preset("recall"), runtime=Ray()))


# -- alignment of streams ------------------------------------------------------------------------------------


def new_aligner(actors: int) -> Any:
    from bestiary.runtime.ray.aligner import StreamAligner

    aligner = StreamAligner(actors)
    for actor in range(actors):
        aligner.join(actor)
    return aligner


def test_streams_are_complete_when_every_actor_has_delivered():
    aligner = new_aligner(2)
    aligner.add(1, trajectory(1))
    assert aligner.take() is None
    aligner.add(0, trajectory(0))
    whole = aligner.take()
    assert whole.action[0].tolist() == [0, 0, 1, 1]
    assert whole.state[0][:, 0].tolist() == [0, 0, 1, 1]
    assert aligner.take() is None


def test_the_order_of_an_actors_trajectories_is_kept():
    aligner = new_aligner(2)
    for value in (10, 11):
        aligner.add(0, trajectory(value))
    for value in (20, 21):
        aligner.add(1, trajectory(value))
    assert [aligner.take().action[0].tolist() for _ in range(2)] == [[10, 10, 20, 20], [11, 11, 21, 21]]


def test_a_missing_actor_is_padded_with_invalid_transitions():
    aligner = new_aligner(2)
    aligner.add(0, trajectory(5))
    aligner.leave(1)
    whole = aligner.take()
    valid = transitions(whole.step, 0.9).valid
    assert valid[:, :2].all()
    assert not valid[:, 2:].any()
    assert not whole.step.is_terminal.any()
    assert whole.step.reward[:, 2:].eq(0).all()


def test_a_replacement_does_not_continue_its_predecessors_episodes():
    aligner = new_aligner(2)
    aligner.add(1, trajectory(7))
    aligner.leave(1)
    aligner.join(1)
    aligner.add(0, trajectory(1))
    assert aligner.take() is None
    aligner.add(1, trajectory(8, first=True))
    assert aligner.take().action[0].tolist() == [1, 1, 8, 8]


def test_an_actor_that_is_ahead_must_pause():
    aligner = new_aligner(3)
    aligner.add(2, trajectory(1))
    assert aligner.ahead() == []
    aligner.add(2, trajectory(2))
    assert aligner.ahead() == [2]


# -- messages ------------------------------------------------------------------------------------------------


def test_weights_are_equal_after_encoding_and_decoding():
    from bestiary.runtime.ray.wire import WeightsCodec

    weights = {
        "a": torch.randn(3, 5),
        "flag": torch.tensor(True),
        "count": torch.tensor(7),
        "wide": torch.randn(2, dtype=torch.float64),
        "none": torch.empty(0, 4),
    }
    codec = WeightsCodec(weights)
    decoded = codec.decode(codec.encode(weights))
    assert decoded.keys() == weights.keys()
    for name, value in weights.items():
        assert decoded[name].dtype == value.dtype
        assert torch.equal(decoded[name], value)


def test_unpacked_tensors_can_be_written_to():
    from bestiary.runtime.ray.wire import pack, unpack

    packed = pack(trajectory(3))
    packed.action.setflags(write=False)
    own = unpack(packed)
    own.action[0] = 9
    assert packed.action[0, 0] == 3


# -- placement -----------------------------------------------------------------------------------------------


def node(name: str, cpus: float, gpus: float = 0.0, memory: int = 8 * GIB, store: int = GIB) -> Any:
    from bestiary.runtime.ray.cluster import RayNode

    return RayNode(name, name, cpus, gpus, memory, store)


def placement(nodes: list[Any], needs: tuple[int, int, int] = (10**6, 10**6, 10**6), **runtime: Any) -> Any:
    from bestiary.runtime.ray.placement import MemoryNeeds, plan

    return plan(nodes, Ray(**runtime), MemoryNeeds(*needs))


def test_the_learner_goes_where_the_gpu_is_and_actors_where_cores_are():
    found = placement([node("cpu", 16), node("gpu", 4, gpus=1)], actors=10)
    assert [n.name for n in found.learners] == ["gpu"]
    assert found.learner_gpus == 1
    assert [n.name for n in found.shards] == ["gpu"]
    assert sum(n.name == "cpu" for n in found.actors) >= 8


def test_no_gpu_is_reserved_for_device_cpu():
    assert placement([node("gpu", 4, gpus=1)], device="cpu").learner_gpus == 0


def test_the_inference_server_has_its_own_gpu_or_shares_the_learners():
    one = placement([node("gpu", 8, gpus=1)], inference="shared")
    assert (one.learner_gpus, one.inference_gpus) == (0.5, 0.5)
    two = placement([node("gpu", 8, gpus=2)], inference="shared")
    assert (two.learner_gpus, two.inference_gpus) == (1, 1)
    none = placement([node("gpu", 8, gpus=2)], inference="shared", device="cpu")
    assert (none.learner_gpus, none.inference_gpus) == (0, 0)


def test_shards_placed_anywhere_go_where_memory_is():
    nodes = [node("learner", 8, memory=GIB), node("large", 4, memory=64 * GIB)]
    assert [n.name for n in placement(nodes, (1, 1, 2 * GIB), replay_placement="anywhere").shards] == ["large"]
    with pytest.raises(UserError, match=r"the replay shard needs 0 cores, 0 GPUs and 2\.0 GiB on one node"):
        placement(nodes, (1, 1, 2 * GIB))


def test_too_many_actors_are_refused_with_what_would_fit():
    with pytest.raises(UserError, match=r"lower --runtime\.actors to 3, --runtime\.actor-cpus to 0\.375, or let"):
        placement([node("one", 4)], actors=8)
    found = placement([node("one", 4)], actors=8, min_actors=2)
    assert found.actors.count(None) == 5
    assert any("5 actors will join when there is room" in line for line in found.lines)


def test_too_little_shared_memory_is_refused():
    with pytest.raises(UserError, match=r"GiB of trajectories and weights .* but the cluster has 1\.0"):
        placement([node("one", 64)], (GIB, 1, 1), actors=8)


def test_the_placement_lists_the_processes_of_every_node():
    lines = placement([node("one", 4), node("two", 2)], actors=4, envs=16).lines
    assert lines[0].startswith("one: 1 learner (1 cores, 0 GPUs each), 1 replay shard")
    assert "actors (1 cores, 16 environments each)" in " ".join(lines)
    assert lines[-1].startswith("shared memory: up to ")


# -- replays of a shard --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tmaze", "tmaze-r2d2", "rcp-a", "recall"])
def test_shards_divide_the_capacity_and_serve_every_learner(name):
    whole = bestiary.preset(name).algo.replay_builder(32)
    part = whole.share(2, learners=3)
    if name == "recall":
        assert part == whole
    else:
        assert part.cfg.capacity == whole.cfg.capacity // 2
        assert part.cfg.updates_per_step == 3 * whole.cfg.updates_per_step


def test_an_episode_replay_accepts_some_streams_at_a_time():
    e = bestiary.preset("rcp-a")
    e = replace(e, env=bestiary.preset("cartpole").env)
    spec = e.env.make(1, 0, 0, 1).spec
    agent = e.algo.agent(spec, e.net, e.core)
    whole, parts = (e.algo.replay_builder(4).build(0, spec, agent.initial_state(1)) for _ in range(2))
    torch.manual_seed(0)
    for number in range(6):
        obs = torch.randn(9, 4, *spec.obs_shape)
        first = torch.rand(9, 4) < 0.2
        first[0] = number == 0
        step = TimeStep(obs, torch.zeros(9, 4, dtype=torch.long), torch.randn(9, 4), first, torch.zeros_like(first))
        t = Trajectory(step, torch.zeros(9, 4, dtype=torch.long), {}, (), torch.zeros(4))
        whole.add(t)
        for stream in (2, 0):
            parts.add(select_streams(t, stream, 2), stream)
    assert len(whole.table.number) == len(parts.table.number) > 3
    assert sorted(whole.table.episode_return) == sorted(parts.table.episode_return)


# -- shared inference ----------------------------------------------------------------------------------------


def inference_server(**runtime: Any) -> tuple[Any, Any]:
    from bestiary.runtime.ray.inference import InferenceServer
    from bestiary.runtime.ray.workers import WorkerSpec

    e = bestiary.preset("recall")
    shared = Ray(envs=3, actors=2, inference="shared", **runtime)
    e = replace(e, algo=configure(e.algo, batch_size=4), runtime=shared)
    env_batch = e.env.make(3, 0, 0, 1)
    return InferenceServer(WorkerSpec(e.to_json(), ()), env_batch.spec), env_batch


def test_the_server_returns_an_actors_state_at_trajectory_starts():
    from bestiary.runtime.ray.wire import pack

    server, env_batch = inference_server()
    first = pack(env_batch.reset())
    later = first._replace(is_first=first.is_first & False)

    async def play() -> tuple[Any, Any, Any]:
        zeros = pack(torch.zeros(3))
        await server.act((0, 0), first, zeros, True)
        _, _, state, _ = await server.act((0, 0), later, zeros, True)
        _, _, initial, _ = await server.act((1, 0), later, zeros, True)
        _, _, absent, _ = await server.act((0, 0), later, zeros, False)
        return state, initial, absent

    state, initial, absent = asyncio.run(play())
    assert any(leaf.any() for leaf in state)  # the state after the first step
    assert not any(leaf.any() for leaf in initial)
    assert absent is None


@pytest.mark.parametrize("settings, sizes", [({"min_batch": 6}, [6]), ({"max_batch": 3}, [3, 3])])
def test_batch_sizes_lie_between_minimum_and_maximum(settings, sizes, monkeypatch):
    from bestiary.runtime.ray.wire import pack

    server, env_batch = inference_server(batch_timeout=5.0, **settings)
    step, zeros = pack(env_batch.reset()), pack(torch.zeros(3))
    sizes_seen: list[int] = []
    compute = server._compute
    monkeypatch.setattr(
        server, "_compute", lambda batch: (sizes_seen.append(sum(len(r.explore) for r in batch)), compute(batch))
    )

    async def play() -> None:
        await asyncio.gather(server.act((0, 0), step, zeros, True), server.act((1, 0), step, zeros, True))

    asyncio.run(play())
    assert sizes_seen == sizes


def test_a_batch_waits_no_longer_than_its_timeout():
    from bestiary.runtime.ray.wire import pack

    server, env_batch = inference_server(min_batch=100, batch_timeout=0.05)
    step = pack(env_batch.reset())
    answer = asyncio.run(asyncio.wait_for(server.act((0, 0), step, pack(torch.zeros(3)), True), 5))
    assert len(answer[0]) == 3


def test_a_batched_policy_output_equals_that_of_a_single_actor():
    """The output for one actor does not depend on the other actors of its batch."""
    from bestiary.runtime.ray.wire import pack

    server, env_batch = inference_server(min_batch=6, batch_timeout=5.0)
    step, zeros = pack(env_batch.reset()), pack(torch.zeros(3))

    async def both_actors() -> Any:
        return await asyncio.gather(server.act((0, 0), step, zeros, True), server.act((1, 0), step, zeros, True))

    both = asyncio.run(both_actors())
    tensors = tree.map(torch.from_numpy, step)
    with torch.no_grad():
        _, aux, _ = server.agent.act(tensors, server.agent.initial_state(3), torch.zeros(3), torch.Generator())
    for answer in both:
        torch.testing.assert_close(torch.from_numpy(answer[1]["logits"]), aux["logits"])


def test_trajectories_start_with_the_state_that_earlier_steps_left(monkeypatch):
    from bestiary.algos.exploration import FixedExploration
    from bestiary.runtime.ray import inference

    server, env_batch = inference_server()
    loop = asyncio.new_event_loop()

    class Handle:
        class act:
            remote = staticmethod(lambda *args: loop.run_until_complete(server.act(*args)))

    monkeypatch.setattr(inference.ray, "get", lambda answer: answer)
    agent = server.agent
    actor = inference.RemotePolicyActor(env_batch, agent, FixedExploration(torch.zeros(3)), 5, 0, torch.device("cpu"))
    actor.use_server(Handle, (0, 0))
    trajectories = [actor.unroll()[0] for _ in range(4)]
    for before, after in itertools.pairwise(trajectories):
        state = before.state
        with torch.no_grad():
            for t in range(5):
                step = TimeStep(*(x[t] for x in before.step))
                _, aux, state = agent.act(step, state, torch.zeros(3), torch.Generator())
                torch.testing.assert_close(aux["logits"], before.aux["logits"][t])
        for expected, found in zip(state, after.state, strict=True):
            torch.testing.assert_close(expected, found)
    loop.close()


# -- learner -------------------------------------------------------------------------------------------------


class LocalHandle:
    """Stands in for a Ray handle: the object is in this process and methods return their results."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.target, name))


def learner_and_shard(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Callable[[], None]]:
    """A learner, the shard it samples from, and a function that adds a trajectory to the shard."""
    from bestiary.runtime.ray import workers
    from bestiary.runtime.ray.wire import WeightsCodec

    monkeypatch.setattr(workers, "ray", SimpleNamespace(get=lambda answer, timeout=None: answer))
    e = bestiary.preset("recall")
    e = replace(e, algo=configure(e.algo, batch_size=8), runtime=Ray(envs=8, threads=1))
    worker_spec = workers.WorkerSpec(e.to_json(), ())
    actor = workers.ActorWorker(worker_spec, 0, 0, 0, {})
    state = actor.actor.agent.state_dict()
    weights = WeightsCodec(state).encode(state)
    spec = actor.env_batch.spec
    shard, learner = workers.ReplayShard(worker_spec, spec, 0), workers.LearnerWorker(worker_spec, spec)
    shard.join(0)
    learner.use_shards({0: LocalHandle(shard)})

    def collect() -> None:
        shard.add(0, actor.rollout(0, weights)[1])

    return learner, shard, collect


def test_learning_that_ran_out_of_time_reports_that_more_may_be_due(monkeypatch):
    """Otherwise the driver would not call the learner again if the time passed without an update."""
    learner, _, collect = learner_and_shard(monkeypatch)
    collect()
    result, weights = learner.learn(0.0)
    assert result.more and not result.changed and weights is None
    result, weights = learner.learn(60.0)
    assert not result.more and result.updates == 1 and weights is not None


def test_an_empty_answer_from_before_the_call_does_not_end_learning(monkeypatch):
    """The batch was requested ahead, when the replay was empty."""
    learner, _, collect = learner_and_shard(monkeypatch)
    assert learner.learn(60.0)[0].updates == 0
    assert learner.requested
    collect()
    assert learner.learn(60.0)[0].updates == 1


# -- faults --------------------------------------------------------------------------------------------------


def driver_without_cluster(monkeypatch: pytest.MonkeyPatch, actors: int) -> tuple[Any, list[int]]:
    """A driver whose processes are pretended, and the indices of the actors that have joined its replay shard."""
    from bestiary.runtime.ray import calls, driver, metrics, pools

    joined: list[int] = []
    shard = SimpleNamespace(
        join=SimpleNamespace(remote=joined.append),
        leave=SimpleNamespace(remote=lambda index: object()),
        start=SimpleNamespace(remote=lambda: object()),
    )
    learner = SimpleNamespace(use_shards=SimpleNamespace(remote=lambda shards: object()))
    fake_ray = SimpleNamespace(kill=lambda handle: None, get=lambda refs, timeout=None: refs)
    for module in (calls, driver, pools):
        monkeypatch.setattr(module, "ray", fake_ray)
    made = object.__new__(driver.RayRuntime)
    made.cfg = Ray(actors=actors)
    made.calls = calls.EssentialCalls(made.cfg.timeout)
    made.learners = calls.LearnerGroup([learner], made.calls)
    factory: Any = SimpleNamespace(shard=lambda number: shard)
    made.shards, made.actors = pools.ShardPool(factory, 1), pools.ActorPool(made.cfg, factory)
    made.shards.full, made.shards.ahead = [True], [[0]]
    made.metrics, made.inference_server, made.tasks, made.notes, made.steps = metrics.RunMetrics(), None, {}, [], 0
    for slot in made.actors.slots:
        slot.actor, slot.restarts = object(), 0
    return made, joined


def test_a_new_shard_does_not_wait_for_actors_without_a_node(monkeypatch):
    driver, joined = driver_without_cluster(monkeypatch, actors=3)
    slots = driver.actors.slots
    slots[0].ready = slots[2].ready = True
    driver._replace_shard(0)
    assert joined == [0, 2]
    assert driver.shards.full == [False] and driver.shards.ahead == [[]]


def test_an_error_of_all_placed_actors_ends_the_run_while_others_wait(monkeypatch):
    driver, _ = driver_without_cluster(monkeypatch, actors=3)
    slots = driver.actors.slots
    for slot in slots[:2]:
        slot.placed, slot.failures = True, 1
    driver._replace_actor(slots[0], "failed", ArithmeticError("the pole came off"))
    with pytest.raises(ArithmeticError):
        driver._replace_actor(slots[1], "failed", ArithmeticError("the pole came off"))


def test_calls_dropped_with_their_shard_do_not_cost_the_next_shard(monkeypatch):
    from bestiary.runtime.ray.pools import Task

    driver, _ = driver_without_cluster(monkeypatch, actors=3)
    driver.tasks = {object(): Task("add", n, -1e9) for n in range(3)}
    driver._check_timeouts()
    assert driver.notes == ["replay shard 0 was lost with its contents; an empty one replaces it"]
    assert not driver.tasks


def test_a_restart_continues_from_the_last_checkpoint(monkeypatch, tmp_path):
    from bestiary.errors import EX_TEMPFAIL
    from bestiary.runtime.ray import supervisor

    started, codes = [], iter([EX_TEMPFAIL, EX_TEMPFAIL, 0])

    def start(command: list[str], **_: Any) -> Any:
        started.append(command[3:])
        return SimpleNamespace(wait=lambda: next(codes))

    monkeypatch.setattr(supervisor.subprocess, "Popen", start)
    assert supervisor.supervise(["resume", "RUN", "--checkpoint", "5"], tmp_path, 3, ["resume", "RUN"]) == 0
    assert started == [["resume", "RUN", "--checkpoint", "5"], ["resume", "RUN"], ["resume", "RUN"]]


def test_a_learner_that_waits_for_a_silent_shard_has_time_to_report_it(monkeypatch):
    """The learner waits for a shard as long as the timeout, so the driver must wait longer for the learner."""
    import time

    from bestiary.errors import ProcessLost
    from bestiary.runtime.ray.pools import Task

    driver, _ = driver_without_cluster(monkeypatch, actors=1)
    timeout = driver.cfg.timeout
    driver.tasks = {object(): Task("learn", 0, time.monotonic() - 1.9 * timeout)}
    driver._check_timeouts()
    driver.tasks = {object(): Task("learn", 0, time.monotonic() - 2.1 * timeout)}
    with pytest.raises(ProcessLost, match="the learner did not answer within"):
        driver._check_timeouts()


def test_checking_a_node_does_not_import_pytorch():
    """Every node runs the check in a new process before the driver can place the workers."""
    script = "import sys, bestiary.runtime.ray.cluster; print('ray' in sys.modules, 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False"]
