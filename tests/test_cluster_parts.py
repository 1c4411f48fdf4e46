"""What a cluster is made of, without one: lanes, plans, and what travels."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bestiary
from bestiary import tree
from bestiary.config.extras import available
from bestiary.errors import UserError
from bestiary.replay.fifo import columns
from bestiary.runtime import Ray
from bestiary.runtime.start import start
from bestiary.types import TimeStep, Trajectory, transitions

pytestmark = pytest.mark.skipif(not available("ray"), reason="needs the extra ray")
GIB = 2**30


def trajectory(value: int, first: bool = False, rows: int = 4, streams: int = 2) -> Trajectory:
    """Rows that can be told apart by their value."""
    full = torch.full((rows, streams), float(value))
    no = torch.zeros(rows, streams, dtype=torch.bool)
    begins = no.clone()
    begins[0] = first
    step = TimeStep(full, full.long(), full.clone(), begins, no)
    return Trajectory(step, full.long(), {}, (torch.full((streams, 3), float(value)),), torch.full((streams,), value))


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'training on a cluster need the extra "ray": pip install "bestiary\[ray\]"'):
        start(replace(bestiary.preset("recall"), runtime=Ray()))


# -- lanes ---------------------------------------------------------------------------------------------------


def lanes(count: int) -> Any:
    from bestiary.runtime.ray.aligner import Lanes

    made = Lanes(count)
    for lane in range(count):
        made.join(lane)
    return made


def test_a_trajectory_of_all_is_there_when_everybody_has_played():
    made = lanes(2)
    made.add(1, trajectory(1))
    assert made.take() is None
    made.add(0, trajectory(0))
    whole = made.take()
    assert whole.action[0].tolist() == [0, 0, 1, 1]
    assert whole.state[0][:, 0].tolist() == [0, 0, 1, 1]
    assert made.take() is None


def test_order_within_a_lane_is_kept():
    made = lanes(2)
    for value in (10, 11):
        made.add(0, trajectory(value))
    for value in (20, 21):
        made.add(1, trajectory(value))
    assert [made.take().action[0].tolist() for _ in range(2)] == [[10, 10, 20, 20], [11, 11, 21, 21]]


def test_nobody_waits_for_who_is_gone_and_nothing_is_learnt_in_their_place():
    made = lanes(2)
    made.add(0, trajectory(5))
    made.leave(1)
    whole = made.take()
    valid = transitions(whole.step, 0.9).valid
    assert valid[:, :2].all()
    assert not valid[:, 2:].any()
    assert not whole.step.is_terminal.any()
    assert whole.step.reward[:, 2:].eq(0).all()


def test_who_takes_a_lane_over_does_not_continue_what_was_left_there():
    made = lanes(2)
    made.add(1, trajectory(7))
    made.leave(1)
    made.join(1)
    made.add(0, trajectory(1))
    assert made.take() is None
    made.add(1, trajectory(8, first=True))
    assert made.take().action[0].tolist() == [1, 1, 8, 8]


def test_who_is_ahead_is_told_to_wait():
    made = lanes(3)
    made.add(2, trajectory(1))
    assert made.ahead() == []
    made.add(2, trajectory(2))
    assert made.ahead() == [2]


# -- what travels --------------------------------------------------------------------------------------------


def test_weights_travel_as_bytes_and_come_back_as_they_were():
    from bestiary.runtime.ray.wire import Flat

    weights = {
        "a": torch.randn(3, 5),
        "flag": torch.tensor(True),
        "count": torch.tensor(7),
        "wide": torch.randn(2, dtype=torch.float64),
        "none": torch.empty(0, 4),
    }
    flat = Flat(weights)
    back = flat.unpack(flat.pack(weights))
    assert back.keys() == weights.keys()
    for name, value in weights.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value)


def test_what_was_read_from_shared_memory_can_be_written_to():
    from bestiary.runtime.ray.wire import pack, unpack

    packed = pack(trajectory(3))
    packed.action.setflags(write=False)
    mine = unpack(packed)
    mine.action[0] = 9
    assert packed.action[0, 0] == 3


# -- plans ---------------------------------------------------------------------------------------------------


def node(name: str, cpus: float, gpus: float = 0.0, memory: int = 8 * GIB, store: int = GIB) -> Any:
    from bestiary.runtime.ray.cluster import Node

    return Node(name, name, cpus, gpus, memory, store)


def planned(nodes: list[Any], needs: tuple[int, int, int] = (10**6, 10**6, 10**6), **runtime: Any) -> Any:
    from bestiary.runtime.ray.placement import Needs, plan

    return plan(nodes, Ray(**runtime), Needs(*needs))


def test_the_learner_goes_where_the_gpu_is_and_actors_where_cores_are():
    found = planned([node("cpu", 16), node("gpu", 4, gpus=1)], actors=10)
    assert [n.name for n in found.learners] == ["gpu"]
    assert found.gpus == 1
    assert [n.name for n in found.shards] == ["gpu"]
    assert sum(n.name == "cpu" for n in found.actors) >= 8


def test_no_gpu_is_asked_for_where_none_is_wanted():
    assert planned([node("gpu", 4, gpus=1)], device="cpu").gpus == 0


def test_shared_inference_has_a_gpu_of_its_own_or_a_part_of_the_learners():
    one = planned([node("gpu", 8, gpus=1)], inference="shared")
    assert (one.gpus, one.chooser_gpus) == (0.5, 0.5)
    two = planned([node("gpu", 8, gpus=2)], inference="shared")
    assert (two.gpus, two.chooser_gpus) == (1, 1)
    none = planned([node("gpu", 8, gpus=2)], inference="shared", device="cpu")
    assert (none.gpus, none.chooser_gpus) == (0, 0)


def test_shards_go_where_memory_is_if_told_so():
    nodes = [node("learner", 8, memory=GIB), node("large", 4, memory=64 * GIB)]
    assert [n.name for n in planned(nodes, (1, 1, 2 * GIB), replay_at="anywhere").shards] == ["large"]
    with pytest.raises(UserError, match=r"the replay shard needs 0 cores, 0 GPUs and 2\.0 GiB on one node"):
        planned(nodes, (1, 1, 2 * GIB))


def test_what_does_not_fit_is_refused_with_what_would():
    with pytest.raises(UserError, match=r"lower --runtime\.actors to 3, --runtime\.actor-cpus to 0\.375, or let them"):
        planned([node("one", 4)], actors=8)
    found = planned([node("one", 4)], actors=8, min_actors=2)
    assert found.actors.count(None) == 5
    assert any("5 actors will join when there is room" in line for line in found.lines)


def test_more_than_shared_memory_holds_is_refused():
    with pytest.raises(UserError, match=r"GiB of trajectories and weights may be under way, but the cluster has 1\.0"):
        planned([node("one", 64)], (GIB, 1, 1), actors=8)


def test_the_plan_says_who_runs_where():
    lines = planned([node("one", 4), node("two", 2)], actors=4, envs=16).lines
    assert lines[0].startswith("one: 1 learner (1 cores, 0 GPUs each), 1 replay shard")
    assert "actors (1 cores, 16 environments each)" in " ".join(lines)
    assert lines[-1].startswith("shared memory: up to ")


# -- replays, shared out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tmaze", "tmaze-r2d2", "rcp-a", "recall"])
def test_replays_share_what_is_kept_and_every_learner_has_its_batch(name):
    whole = bestiary.preset(name).algo.replay_builder(32)
    part = whole.share(2, learners=3)
    if name == "recall":
        assert part == whole
    else:
        assert part.capacity == whole.capacity // 2
        assert part.ratio == 3 * whole.ratio


def test_a_replay_of_episodes_takes_some_streams_at_a_time():
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
            parts.add(columns(t, stream, 2), stream)
    assert len(whole.held.number) == len(parts.held.number) > 3
    assert sorted(whole.held.earned) == sorted(parts.held.earned)


# -- shared inference ----------------------------------------------------------------------------------------


def chooser(**runtime: Any) -> tuple[Any, Any]:
    from bestiary.runtime.ray.inference import Chooser
    from bestiary.runtime.ray.workers import Order

    e = bestiary.preset("recall")
    shared = Ray(envs=3, actors=2, inference="shared", **runtime)
    e = replace(e, algo=replace(e.algo, batch_size=4), runtime=shared)
    env_batch = e.env.make(3, 0, 0, 1)
    made = Chooser(Order(e.to_json(), ()), env_batch.spec)
    return made, env_batch


def test_memory_is_kept_per_player_and_given_out_where_a_trajectory_begins():
    from bestiary.runtime.ray.wire import pack

    made, env_batch = chooser()
    row = pack(env_batch.reset())
    later = row._replace(is_first=row.is_first & False)

    async def play() -> tuple[Any, Any, Any]:
        zeros = pack(torch.zeros(3))
        await made.act((0, 0), row, zeros, True)
        _, _, opening, _ = await made.act((0, 0), later, zeros, True)
        _, _, fresh, _ = await made.act((1, 0), later, zeros, True)
        _, _, nothing, _ = await made.act((0, 0), later, zeros, False)
        return opening, fresh, nothing

    opening, fresh, nothing = asyncio.run(play())
    assert any(leaf.any() for leaf in opening)  # what the first row left
    assert not any(leaf.any() for leaf in fresh)
    assert nothing is None


@pytest.mark.parametrize("settings, sizes", [({"min_batch": 6}, [6]), ({"max_batch": 3}, [3, 3])])
def test_batches_wait_for_enough_and_are_never_too_large(settings, sizes, monkeypatch):
    from bestiary.runtime.ray.wire import pack

    made, env_batch = chooser(batch_timeout=5.0, **settings)
    row, zeros = pack(env_batch.reset()), pack(torch.zeros(3))
    seen: list[int] = []
    choose = made._choose
    monkeypatch.setattr(made, "_choose", lambda batch: (seen.append(sum(len(r.explore) for r in batch)), choose(batch)))

    async def play() -> None:
        await asyncio.gather(made.act((0, 0), row, zeros, True), made.act((1, 0), row, zeros, True))

    asyncio.run(play())
    assert seen == sizes


def test_a_batch_waits_no_longer_than_it_may():
    from bestiary.runtime.ray.wire import pack

    made, env_batch = chooser(min_batch=100, batch_timeout=0.05)
    row = pack(env_batch.reset())
    answer = asyncio.run(asyncio.wait_for(made.act((0, 0), row, pack(torch.zeros(3)), True), 5))
    assert len(answer[0]) == 3


def test_a_shared_choice_is_that_of_each_player_alone():
    """Values of a network do not depend on who else is in the batch."""
    from bestiary.runtime.ray.wire import pack

    made, env_batch = chooser(min_batch=6, batch_timeout=5.0)
    row, zeros = pack(env_batch.reset()), pack(torch.zeros(3))

    async def collective() -> Any:
        return await asyncio.gather(made.act((0, 0), row, zeros, True), made.act((1, 0), row, zeros, True))

    both = asyncio.run(collective())
    step = tree.map(torch.from_numpy, row)
    with torch.no_grad():
        _, aux, _ = made.agent.act(step, made.agent.initial_state(3), torch.zeros(3), torch.Generator())
    for answer in both:
        torch.testing.assert_close(torch.from_numpy(answer[1]["logits"]), aux["logits"])


def test_trajectories_begin_with_the_memory_that_the_rows_before_have_left(monkeypatch):
    from bestiary.algos.exploration import Fixed
    from bestiary.runtime.ray import inference

    made, env_batch = chooser()
    loop = asyncio.new_event_loop()

    class Handle:
        class act:
            remote = staticmethod(lambda *words: loop.run_until_complete(made.act(*words)))

    monkeypatch.setattr(inference.ray, "get", lambda answer: answer)
    agent = made.agent
    asking = inference.Asking(env_batch, agent, Fixed(torch.zeros(3)), 5, 0, torch.device("cpu")).ask(Handle, (0, 0))
    played = [asking.unroll()[0] for _ in range(4)]
    for before, after in itertools.pairwise(played):
        state = before.state
        with torch.no_grad():
            for row in range(5):
                step = TimeStep(*(x[row] for x in before.step))
                _, aux, state = agent.act(step, state, torch.zeros(3), torch.Generator())
                torch.testing.assert_close(aux["logits"], before.aux["logits"][row])
        for mine, theirs in zip(state, after.state, strict=True):
            torch.testing.assert_close(mine, theirs)
    loop.close()


# -- lessons -------------------------------------------------------------------------------------------------


class Here:
    """What Ray would make of an object in another process, in this one: methods answer when they are asked."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.thing, name))


def school(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Callable[[], None]]:
    """A learner, the shard it draws from, and something that plays into that."""
    from bestiary.runtime.ray import workers
    from bestiary.runtime.ray.wire import Flat

    monkeypatch.setattr(workers, "ray", SimpleNamespace(get=lambda answer, timeout=None: answer))
    e = bestiary.preset("recall")
    e = replace(e, algo=replace(e.algo, batch_size=8), runtime=Ray(envs=8, threads=1))
    order = workers.Order(e.to_json(), ())
    player = workers.Player(order, 0, 0, 0, {})
    weights = Flat(player.actor.agent.state_dict()).pack(player.actor.agent.state_dict())
    shard, teacher = workers.Shard(order, player.env_batch.spec, 0), workers.Teacher(order, player.env_batch.spec)
    shard.join(0)
    teacher.use({0: Here(shard)})

    def play() -> None:
        shard.add(0, player.play(0, weights)[1])

    return teacher, shard, play


def test_a_lesson_that_ran_out_of_time_says_that_there_may_be_more(monkeypatch):
    """Else, where all the time went by without an update, nobody would ask again."""
    teacher, _, play = school(monkeypatch)
    play()
    taught, weights = teacher.learn(0.0)
    assert taught.more and not taught.changed and weights is None
    taught, weights = teacher.learn(60.0)
    assert not taught.more and taught.updates == 1 and weights is not None


def test_an_answer_from_before_a_lesson_does_not_end_it(monkeypatch):
    """The one asked for ahead, when there was nothing."""
    teacher, _, play = school(monkeypatch)
    assert teacher.learn(60.0)[0].updates == 0
    assert teacher.asked
    play()
    assert teacher.learn(60.0)[0].updates == 1


# -- faults --------------------------------------------------------------------------------------------------


def without_a_cluster(monkeypatch: pytest.MonkeyPatch, actors: int) -> tuple[Any, list[int]]:
    """The driver of a run, all of whose processes are pretended; and the lanes that have joined the shard."""
    from bestiary.runtime.ray import driver as ray_driver

    joined: list[int] = []
    shard = SimpleNamespace(
        join=SimpleNamespace(remote=joined.append), leave=SimpleNamespace(remote=lambda lane: object())
    )
    monkeypatch.setattr(ray_driver.ray, "kill", lambda who: None)
    driver = object.__new__(ray_driver.ClusterRuntime)
    driver.cfg = Ray(actors=actors)
    driver.places = [ray_driver.Place(n, 0, n) for n in range(actors)]
    driver.shards, driver.chooser, driver.tasks, driver.notes = [shard], None, {}, []
    driver.full, driver.ahead, driver.renewed = [True], [[0]], [0.0]
    driver.steps = driver.lost = 0
    monkeypatch.setattr(driver, "_renew_shard", lambda number: None)
    monkeypatch.setattr(driver, "_share_out", lambda: None)
    for place in driver.places:
        place.player, place.life = object(), 0
    return driver, joined


def test_a_new_shard_does_not_wait_for_players_without_a_node(monkeypatch):
    driver, joined = without_a_cluster(monkeypatch, actors=3)
    driver.places[0].ready = driver.places[2].ready = True
    driver._lose_shard(0)
    assert joined == [0, 2]


def test_a_fault_of_all_who_play_ends_the_run_though_others_wait_for_a_node(monkeypatch):
    driver, _ = without_a_cluster(monkeypatch, actors=3)
    for place in driver.places[:2]:
        place.placed, place.failures = True, 1
    driver._lose(driver.places[0], "failed", ArithmeticError("the pole came off"))
    with pytest.raises(ArithmeticError):
        driver._lose(driver.places[1], "failed", ArithmeticError("the pole came off"))


def test_tasks_given_up_with_their_shard_do_not_cost_the_next_one(monkeypatch):
    from bestiary.runtime.ray.driver import Task

    driver, _ = without_a_cluster(monkeypatch, actors=3)
    driver.tasks = {object(): Task("add", n, -1e9) for n in range(3)}
    driver._give_up_on_the_silent()
    assert len(driver.notes) == 1 and not driver.tasks


def test_a_restart_goes_on_from_the_last_checkpoint_whichever_was_named_first(monkeypatch, tmp_path):
    from bestiary.errors import LOST
    from bestiary.runtime.ray import supervisor

    started, codes = [], iter([LOST, LOST, 0])

    def start(command: list[str], **_: Any) -> Any:
        started.append(command[3:])
        return SimpleNamespace(wait=lambda: next(codes))

    monkeypatch.setattr(supervisor.subprocess, "Popen", start)
    assert supervisor.supervise(["resume", "RUN", "--checkpoint", "5"], tmp_path, 3, ["resume", "RUN"]) == 0
    assert started == [["resume", "RUN", "--checkpoint", "5"], ["resume", "RUN"], ["resume", "RUN"]]


def test_a_learner_that_waits_for_a_silent_shard_has_time_to_say_so(monkeypatch):
    """It gives the shard as long as anybody is given: whoever waits for the learner must wait longer than that."""
    import time

    from bestiary.errors import Lost
    from bestiary.runtime.ray.driver import Task

    driver, _ = without_a_cluster(monkeypatch, actors=1)
    patience = driver.cfg.timeout
    driver.tasks = {object(): Task("learn", 0, time.monotonic() - 1.9 * patience)}
    driver._give_up_on_the_silent()
    driver.tasks = {object(): Task("learn", 0, time.monotonic() - 2.1 * patience)}
    with pytest.raises(Lost, match="the learner did not answer within"):
        driver._give_up_on_the_silent()
