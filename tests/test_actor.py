"""The actor: overlapping steps, recurrent states, weight versions and checkpoints; and running whole episodes."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from helpers.files import through_a_file
from helpers.rollouts import different_fields
from torch import Tensor

from bestiary import tree
from bestiary.acting.actor import Actor
from bestiary.acting.episodes import UNROLL, play_episodes
from bestiary.algos.base import Agent
from bestiary.envs import Atari, Catch, Gym, Recall
from bestiary.envs.env_batch import EnvBatch, VectorStep
from bestiary.seeding import TRAIN
from bestiary.types import Episode, Snapshot, Spec, State, TimeStep, Trajectory

SLOTS, T = 3, 7
CPU = torch.device("cpu")
ENVS = {
    "recall": Recall(delay=3),
    "catch": Catch(rows=5),
    "cartpole": Gym("CartPole-v1"),
}


class RecordingAgent(Agent):
    """Records its inputs. Its actions depend on the step, its state, its one weight and, as it explores, on chance.

    Its recurrent state counts the steps since the episode began, and all steps.
    """

    def __init__(self, num_actions: int, chance: float = 0.0) -> None:
        super().__init__()
        self.num_actions, self.chance = num_actions, chance
        self.register_buffer("weight", torch.zeros((), dtype=torch.int64))
        self.inputs: list[tuple[TimeStep, State, Tensor | None]] = []

    def initial_state(self, batch_size: int) -> State:
        return torch.zeros(batch_size, dtype=torch.int64), torch.zeros(batch_size, dtype=torch.int64)

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        self.inputs.append((tree.map(torch.clone, step), tree.map(torch.clone, state), explore))
        age, total = torch.where(step.is_first, 0, state[0]) + 1, state[1] + 1
        seen = step.obs.flatten(1).double().sum(1).long()
        best = (seen + age + 2 * total + self.weight) % self.num_actions
        noise = torch.rand(len(best), generator=rng)
        rate = torch.zeros(len(best)) if explore is None else explore
        action = torch.where(noise < self.chance * rate, (best + 1) % self.num_actions, best)
        return action, {"age": age, "noise": noise, "pair": torch.stack([total, best], 1)}, (age, total)


class RecordingExplorer:
    """Explores more with every step, and more in later slots than in earlier ones; records the steps it receives."""

    def __init__(self) -> None:
        self.steps = 0
        self.received: list[TimeStep] = []

    def __call__(self, step: TimeStep) -> Tensor:
        self.steps += 1
        self.received.append(tree.map(torch.clone, step))
        return torch.linspace(0, 1, len(step.reward)) * self.steps / (self.steps + 1)

    def state_dict(self) -> Snapshot:
        return {"steps": self.steps}

    def load_state_dict(self, state: Snapshot) -> None:
        self.steps = state["steps"]


def make_actor(env: Any, chance: float = 0.0, seed: int = 5) -> Actor:
    env_batch = env.make(SLOTS, 0, TRAIN, 1)
    return Actor(env_batch, RecordingAgent(env_batch.spec.num_actions, chance), RecordingExplorer(), T, seed, CPU)


@pytest.fixture(params=ENVS.values(), ids=ENVS)
def env(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def actor(env: Any) -> Iterator[Actor]:
    actor = make_actor(env, chance=0.5)
    with closing(actor.env_batch):
        yield actor


def assert_same(a: Trajectory, b: Trajectory) -> None:
    assert different_fields(a.step, b.step) == []
    assert a.action.equal(b.action)
    assert a.aux.keys() == b.aux.keys()
    assert all(a.aux[k].equal(b.aux[k]) for k in a.aux)
    assert all(x.equal(y) for x, y in zip(a.state, b.state, strict=True))
    assert a.version.equal(b.version)


# -- trajectories -----------------------------------------------------------------------------------------------


def test_a_trajectory_of_t_transitions_has_one_step_more(actor: Actor):
    trajectory, _ = actor.unroll()
    fields = [*trajectory.step, trajectory.action, *trajectory.aux.values()]
    assert all(x.shape[:2] == (T + 1, SLOTS) for x in fields)
    assert all(x.shape == (SLOTS,) for x in (*trajectory.state, trajectory.version))
    assert trajectory.aux["pair"].shape == (T + 1, SLOTS, 2)
    assert trajectory.step.is_first[0].all()


def test_the_last_step_of_a_trajectory_is_the_first_of_the_next(actor: Actor):
    before, _ = actor.unroll()
    for _ in range(6):
        after, _ = actor.unroll()
        last, first = (tree.map(lambda x, i=i: x[i], (t.step, t.action, t.aux)) for t, i in ((before, -1), (after, 0)))
        assert different_fields(last[0], first[0]) == []
        assert last[1].equal(first[1])
        assert all(last[2][k].equal(first[2][k]) for k in ("age", "noise", "pair"))
        before = after


def test_the_agent_receives_every_step_once_and_in_order(actor: Actor):
    trajectories = [actor.unroll()[0] for _ in range(4)]
    steps = tree.cat([trajectories[0].step, *(tree.narrow(t.step, 0, 1, T) for t in trajectories[1:])])
    assert isinstance(actor.agent, RecordingAgent)
    assert len(actor.agent.inputs) == 4 * T + 1
    assert different_fields(tree.stack([step for step, _, _ in actor.agent.inputs]), steps) == []


def test_the_next_step_holds_the_chosen_action_as_prev_action(actor: Actor):
    for _ in range(4):
        trajectory, _ = actor.unroll()
        valid = ~trajectory.step.is_first[1:]
        assert trajectory.step.prev_action[1:][valid].equal(trajectory.action[:-1][valid])


def test_episodes_come_with_the_trajectory_in_which_the_next_begins(actor: Actor):
    for _ in range(8):
        trajectory, episodes = actor.unroll()
        starts = trajectory.step.is_first[1:].sum(0).tolist()
        assert [sum(e.slot == slot for e in episodes) for slot in range(SLOTS)] == starts


def test_earlier_trajectories_do_not_change(actor: Actor):
    kept = [actor.unroll()[0] for _ in range(3)]
    copies = [tree.map(torch.clone, t) for t in kept]
    for _ in range(3):
        actor.unroll()
    for trajectory, copy in zip(kept, copies, strict=True):
        assert_same(trajectory, copy)


def test_acting_computes_no_gradients(actor: Actor):
    trajectory, _ = actor.unroll()
    assert not any(x.requires_grad for x in (*trajectory.aux.values(), *trajectory.state))


# -- recurrent state --------------------------------------------------------------------------------------------


def test_the_stored_state_is_the_one_before_the_first_step(env: Any):
    actor = make_actor(env)
    with closing(actor.env_batch):
        trajectories = [actor.unroll()[0] for _ in range(5)]
    agent, rng = RecordingAgent(actor.env_batch.spec.num_actions), torch.Generator()
    for k, trajectory in enumerate(trajectories):
        assert trajectory.state[1].tolist() == [k * T] * SLOTS  # without the first step of the trajectory
        state = trajectory.state
        for t in range(T + 1):
            step = tree.map(lambda x, t=t: x[t], trajectory.step)
            action, aux, state = agent.act(step, state, None, rng)
            assert action.equal(trajectory.action[t])
            assert aux["age"].equal(trajectory.aux["age"][t])
    actions = {tuple(t.action.flatten().tolist()) for t in trajectories}
    assert len(actions) > 1  # constant actions would prove nothing


def test_the_state_is_carried_from_step_to_step(actor: Actor):
    for _ in range(3):
        actor.unroll()
    assert isinstance(actor.agent, RecordingAgent)
    totals = torch.stack([state[1] for _, state, _ in actor.agent.inputs])
    assert totals.equal(torch.arange(3 * T + 1)[:, None].expand(-1, SLOTS))


# -- exploration and weights ------------------------------------------------------------------------------------


def test_the_agent_receives_a_step_with_its_exploration_rates(actor: Actor):
    for _ in range(2):
        actor.unroll()
    assert isinstance(actor.agent, RecordingAgent) and isinstance(actor.explorer, RecordingExplorer)
    assert len(actor.explorer.received) == len(actor.agent.inputs) == 2 * T + 1
    for t, (received, (step, _, explore)) in enumerate(zip(actor.explorer.received, actor.agent.inputs, strict=True)):
        assert different_fields(received, step) == []
        assert explore is not None
        assert explore.tolist() == pytest.approx([0, 0.5 * (t + 1) / (t + 2), (t + 1) / (t + 2)])


@pytest.mark.parametrize("unrolls", [0, 2])
def test_the_explorer_is_saved_with_the_actor(unrolls: int):
    actor, other = make_actor(Catch()), make_actor(Catch())
    other.unroll()
    for _ in range(unrolls):
        actor.unroll()
    other.load_state_dict(through_a_file(actor.state_dict()))
    assert isinstance(other.explorer, RecordingExplorer)
    assert other.explorer.steps == (unrolls * T + 1 if unrolls else 0)


def test_trajectories_hold_the_version_of_the_weights(actor: Actor):
    assert actor.unroll()[0].version.tolist() == [0] * SLOTS
    actor.load({"weight": torch.tensor(1)}, 4)
    assert actor.unroll()[0].version.tolist() == [4] * SLOTS
    assert actor.unroll()[0].version.tolist() == [4] * SLOTS
    actor.load({"weight": torch.tensor(2)}, 9)
    assert actor.unroll()[0].version.tolist() == [9] * SLOTS


def test_new_weights_act_from_the_next_step_on():
    old, new = make_actor(Catch()), make_actor(Catch())
    assert_same(old.unroll()[0], new.unroll()[0])
    new.load({"weight": torch.tensor(1)}, 1)
    a, b = old.unroll()[0], new.unroll()[0]
    assert a.action[0].equal(b.action[0])  # chosen at the end of the previous trajectory
    assert a.step.obs[1].equal(b.step.obs[1])
    assert ((a.action[1] + 1) % 3).equal(b.action[1])


def test_the_actor_copies_the_weights_it_is_given():
    actor, weights = make_actor(Catch()), {"weight": torch.tensor(1)}
    actor.load(weights, 1)
    weights["weight"] += 1
    assert actor.agent.state_dict()["weight"] == 1


# -- checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "unrolls"),
    [*((env, n) for env in ENVS.values() for n in (0, 1, 3)), (Atari("Breakout"), 3)],
    ids=[*(f"{name}-{n}" for name in ENVS for n in (0, 1, 3)), "breakout-3"],
)
def test_a_loaded_actor_continues_exactly(env: Any, unrolls: int):
    actor, other = make_actor(env, 0.5), make_actor(env, 0.5, seed=6)
    with closing(actor.env_batch), closing(other.env_batch):
        for actor_ in (actor, other):
            actor_.load({"weight": torch.tensor(1)}, 2)
        for _ in range(unrolls):
            actor.unroll()
        snapshot = actor.state_dict()
        expected = [actor.unroll() for _ in range(5)]
        other.load_state_dict(through_a_file(snapshot))  # written only now: later steps must not have changed it
        for trajectory, episodes in expected:
            again, episodes_again = other.unroll()
            assert_same(again, trajectory)
            assert episodes_again == episodes


def test_random_numbers_depend_on_the_seed():
    actions = []
    for seed in (5, 5, 6):
        actor = make_actor(Catch(), chance=0.5, seed=seed)
        actions.append(torch.cat([actor.unroll()[0].action for _ in range(5)]))
    assert actions[0].equal(actions[1])
    assert not actions[0].equal(actions[2])


# -- whole episodes ------------------------------------------------------------------------------------------------


class FixedLengths(EnvBatch):
    """Episodes of slot i have i+1 steps. The k-th one has a return of scale * (100 * i + k), given at its last step."""

    def __init__(self, num_envs: int, scale: float = 1.0) -> None:
        super().__init__(Spec("FixedLengths", (1,), torch.float32, 2), num_envs)
        self.t, self.episode, self.scale = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64), scale

    def _start(self) -> VectorStep:
        none = np.zeros(self.num_envs, bool)
        return VectorStep(np.zeros((self.num_envs, 1), np.float32), np.zeros(self.num_envs), none, none, ~none)

    def _advance(self, action: np.ndarray) -> VectorStep:
        slot = np.arange(self.num_envs)
        first = self.t == slot + 1
        self.episode += first
        self.t = np.where(first, 0, self.t + 1)
        last = self.t == slot + 1
        reward = np.where(last, self.scale * (100 * slot + self.episode), 0.0)
        return VectorStep(self.t[:, None].astype(np.float32), reward, last, np.zeros_like(last), first)


def run_episodes(
    episodes: int, env_batch: EnvBatch, mode: Any = "greedy", agent: Agent | None = None, **options: Any
) -> list[Episode]:
    return play_episodes(
        agent or RecordingAgent(env_batch.spec.num_actions), env_batch, episodes, mode, torch.Generator(), **options
    )


def test_every_slot_has_its_quota_of_episodes():
    episodes = run_episodes(8, FixedLengths(3))
    assert [e.score for e in episodes] == [0, 1, 2, 100, 101, 102, 200, 201]  # not only the short ones of slot 0
    assert [e.steps for e in episodes] == [1, 1, 1, 2, 2, 2, 3, 3]


def test_episodes_beyond_the_quota_do_not_count():
    assert [e.slot for e in run_episodes(2, FixedLengths(5))] == [0, 1]


@pytest.mark.parametrize(("mode", "explore"), [("greedy", None), ("sampled", [0.0, 0.0])])
def test_greedy_episodes_do_not_explore(mode: str, explore: list[float] | None):
    agent = RecordingAgent(2)
    run_episodes(4, FixedLengths(2), mode, agent)
    received = [None if x is None else x.tolist() for _, _, x in agent.inputs]
    assert received == [explore] * len(received)


def test_the_state_is_carried_through_all_episodes():
    agent = RecordingAgent(2)
    run_episodes(6, FixedLengths(2), agent=agent)
    assert [state[1].tolist() for _, state, _ in agent.inputs] == [[t, t] for t in range(len(agent.inputs))]


def test_rejected_episodes_are_replaced():
    episodes = run_episodes(4, FixedLengths(2), accept=lambda e: e.score % 2 == 1)
    assert [e.score for e in episodes] == [1, 3, 101, 103]


def test_an_error_is_raised_if_too_many_episodes_are_rejected():
    with pytest.raises(ValueError, match=r"only 0 of .* positive score; 3 were requested"):
        run_episodes(3, FixedLengths(1, scale=-1.0), accept=lambda e: e.score > 0)


def test_no_more_episodes_are_run_once_stop_returns_true():
    rounds = iter([False] * 5 + [True])
    # stop is called before every unroll; an episode takes two steps here
    assert len(run_episodes(1000, FixedLengths(1), stop=lambda: next(rounds))) == 5 * UNROLL // 2
