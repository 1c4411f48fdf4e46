"""The actor: overlapping rows, the memory before them, the weights behind them; and playing whole games."""

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


class Diarist(Agent):
    """Writes down all it sees. Plays by the row, by its memory, by its one weight and, as far as told, by chance.

    Its memory: rows since the episode began, and rows in all.
    """

    def __init__(self, num_actions: int, chance: float = 0.0) -> None:
        super().__init__()
        self.num_actions, self.chance = num_actions, chance
        self.register_buffer("weight", torch.zeros((), dtype=torch.int64))
        self.diary: list[tuple[TimeStep, State, Tensor | None]] = []

    def initial_state(self, batch_size: int) -> State:
        return torch.zeros(batch_size, dtype=torch.int64), torch.zeros(batch_size, dtype=torch.int64)

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        self.diary.append((tree.map(torch.clone, step), tree.map(torch.clone, state), explore))
        age, total = torch.where(step.is_first, 0, state[0]) + 1, state[1] + 1
        seen = step.obs.flatten(1).double().sum(1).long()
        best = (seen + age + 2 * total + self.weight) % self.num_actions
        luck = torch.rand(len(best), generator=rng)
        rung = torch.zeros(len(best)) if explore is None else explore
        action = torch.where(luck < self.chance * rung, (best + 1) % self.num_actions, best)
        return action, {"age": age, "luck": luck, "pair": torch.stack([total, best], 1)}, (age, total)


class Counting:
    """Explores more with every row, and in later slots more than in earlier ones; writes down what it was shown."""

    def __init__(self) -> None:
        self.rows = 0
        self.shown: list[TimeStep] = []

    def __call__(self, step: TimeStep) -> Tensor:
        self.rows += 1
        self.shown.append(tree.map(torch.clone, step))
        return torch.linspace(0, 1, len(step.reward)) * self.rows / (self.rows + 1)

    def state_dict(self) -> Snapshot:
        return {"rows": self.rows}

    def load_state_dict(self, state: Snapshot) -> None:
        self.rows = state["rows"]


def make_actor(env: Any, chance: float = 0.0, seed: int = 5) -> Actor:
    env_batch = env.make(SLOTS, 0, TRAIN, 1)
    return Actor(env_batch, Diarist(env_batch.spec.num_actions, chance), Counting(), T, seed, CPU)


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


def test_a_trajectory_of_t_moves_has_one_row_more(actor: Actor):
    trajectory, _ = actor.unroll()
    rows = [*trajectory.step, trajectory.action, *trajectory.aux.values()]
    assert all(x.shape[:2] == (T + 1, SLOTS) for x in rows)
    assert all(x.shape == (SLOTS,) for x in (*trajectory.state, trajectory.version))
    assert trajectory.aux["pair"].shape == (T + 1, SLOTS, 2)
    assert trajectory.step.is_first[0].all()


def test_the_last_row_of_a_trajectory_opens_the_next(actor: Actor):
    before, _ = actor.unroll()
    for _ in range(6):
        after, _ = actor.unroll()
        last, first = (tree.map(lambda x, i=i: x[i], (t.step, t.action, t.aux)) for t, i in ((before, -1), (after, 0)))
        assert different_fields(last[0], first[0]) == []
        assert last[1].equal(first[1])
        assert all(last[2][k].equal(first[2][k]) for k in ("age", "luck", "pair"))
        before = after


def test_the_agent_sees_every_row_once_and_in_order(actor: Actor):
    trajectories = [actor.unroll()[0] for _ in range(4)]
    rows = tree.cat([trajectories[0].step, *(tree.narrow(t.step, 0, 1, T) for t in trajectories[1:])])
    assert isinstance(actor.agent, Diarist)
    assert len(actor.agent.diary) == 4 * T + 1
    assert different_fields(tree.stack([step for step, _, _ in actor.agent.diary]), rows) == []


def test_rows_tell_the_chosen_action_back(actor: Actor):
    for _ in range(4):
        trajectory, _ = actor.unroll()
        going = ~trajectory.step.is_first[1:]
        assert trajectory.step.prev_action[1:][going].equal(trajectory.action[:-1][going])


def test_episodes_come_with_the_trajectory_that_saw_the_next_one_begin(actor: Actor):
    for _ in range(8):
        trajectory, episodes = actor.unroll()
        begun = trajectory.step.is_first[1:].sum(0).tolist()
        assert [sum(e.slot == slot for e in episodes) for slot in range(SLOTS)] == begun


def test_trajectories_written_earlier_do_not_change(actor: Actor):
    kept = [actor.unroll()[0] for _ in range(3)]
    copies = [tree.map(torch.clone, t) for t in kept]
    for _ in range(3):
        actor.unroll()
    for trajectory, copy in zip(kept, copies, strict=True):
        assert_same(trajectory, copy)


def test_worlds_run_without_gradients(actor: Actor):
    trajectory, _ = actor.unroll()
    assert not any(x.requires_grad for x in (*trajectory.aux.values(), *trajectory.state))


# -- memory -----------------------------------------------------------------------------------------------------


def test_the_stored_state_is_the_memory_just_before_the_first_row(env: Any):
    actor = make_actor(env)
    with closing(actor.env_batch):
        trajectories = [actor.unroll()[0] for _ in range(5)]
    agent, rng = Diarist(actor.env_batch.spec.num_actions), torch.Generator()
    for k, trajectory in enumerate(trajectories):
        assert trajectory.state[1].tolist() == [k * T] * SLOTS  # the row about to be seen is not yet in it
        state = trajectory.state
        for t in range(T + 1):
            step = tree.map(lambda x, t=t: x[t], trajectory.step)
            action, aux, state = agent.act(step, state, None, rng)
            assert action.equal(trajectory.action[t])
            assert aux["age"].equal(trajectory.aux["age"][t])
    plays = {tuple(t.action.flatten().tolist()) for t in trajectories}
    assert len(plays) > 1  # a player who always does the same proves nothing


def test_memory_is_carried_from_row_to_row(actor: Actor):
    for _ in range(3):
        actor.unroll()
    assert isinstance(actor.agent, Diarist)
    totals = torch.stack([state[1] for _, state, _ in actor.agent.diary])
    assert totals.equal(torch.arange(3 * T + 1)[:, None].expand(-1, SLOTS))


# -- exploration and weights ------------------------------------------------------------------------------------


def test_what_the_explorer_says_of_a_row_reaches_the_agent_with_that_row(actor: Actor):
    for _ in range(2):
        actor.unroll()
    assert isinstance(actor.agent, Diarist) and isinstance(actor.explorer, Counting)
    assert len(actor.explorer.shown) == len(actor.agent.diary) == 2 * T + 1
    for row, (shown, (step, _, explore)) in enumerate(zip(actor.explorer.shown, actor.agent.diary, strict=True)):
        assert different_fields(shown, step) == []
        assert explore is not None
        assert explore.tolist() == pytest.approx([0, 0.5 * (row + 1) / (row + 2), (row + 1) / (row + 2)])


@pytest.mark.parametrize("unrolls", [0, 2])
def test_the_explorer_is_saved_with_the_actor(unrolls: int):
    actor, other = make_actor(Catch()), make_actor(Catch())
    other.unroll()
    for _ in range(unrolls):
        actor.unroll()
    other.load_state_dict(through_a_file(actor.state_dict()))
    assert isinstance(other.explorer, Counting)
    assert other.explorer.rows == (unrolls * T + 1 if unrolls else 0)


def test_trajectories_tell_which_weights_acted(actor: Actor):
    assert actor.unroll()[0].version.tolist() == [0] * SLOTS
    actor.load({"weight": torch.tensor(1)}, 4)
    assert actor.unroll()[0].version.tolist() == [4] * SLOTS
    assert actor.unroll()[0].version.tolist() == [4] * SLOTS
    actor.load({"weight": torch.tensor(2)}, 9)
    assert actor.unroll()[0].version.tolist() == [9] * SLOTS


def test_new_weights_act_from_the_next_row_on():
    old, new = make_actor(Catch()), make_actor(Catch())
    assert_same(old.unroll()[0], new.unroll()[0])
    new.load({"weight": torch.tensor(1)}, 1)
    a, b = old.unroll()[0], new.unroll()[0]
    assert a.action[0].equal(b.action[0])  # was chosen at the end of the trajectory before
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
def test_a_saved_actor_goes_on_as_if_nothing_had_happened(env: Any, unrolls: int):
    actor, other = make_actor(env, 0.5), make_actor(env, 0.5, seed=6)
    with closing(actor.env_batch), closing(other.env_batch):
        for actor_ in (actor, other):
            actor_.load({"weight": torch.tensor(1)}, 2)
        for _ in range(unrolls):
            actor.unroll()
        snapshot = actor.state_dict()
        expected = [actor.unroll() for _ in range(5)]
        other.load_state_dict(through_a_file(snapshot))  # written only now: playing on must not have changed it
        for trajectory, episodes in expected:
            again, episodes_again = other.unroll()
            assert_same(again, trajectory)
            assert episodes_again == episodes


def test_chance_comes_from_the_seed():
    actions = []
    for seed in (5, 5, 6):
        actor = make_actor(Catch(), chance=0.5, seed=seed)
        actions.append(torch.cat([actor.unroll()[0].action for _ in range(5)]))
    assert actions[0].equal(actions[1])
    assert not actions[0].equal(actions[2])


# -- whole games ------------------------------------------------------------------------------------------------


class Clockwork(EnvBatch):
    """Slot i plays games of i+1 steps. The k-th game of slot i scores 100*i + k with its last step, or less."""

    def __init__(self, num_envs: int, worth: float = 1.0) -> None:
        super().__init__(Spec("Clockwork", (1,), torch.float32, 2), num_envs)
        self.t, self.game, self.worth = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64), worth

    def _start(self) -> VectorStep:
        none = np.zeros(self.num_envs, bool)
        return VectorStep(np.zeros((self.num_envs, 1), np.float32), np.zeros(self.num_envs), none, none, ~none)

    def _advance(self, action: np.ndarray) -> VectorStep:
        slot = np.arange(self.num_envs)
        first = self.t == slot + 1
        self.game += first
        self.t = np.where(first, 0, self.t + 1)
        last = self.t == slot + 1
        reward = np.where(last, self.worth * (100 * slot + self.game), 0.0)
        return VectorStep(self.t[:, None].astype(np.float32), reward, last, np.zeros_like(last), first)


def games(
    episodes: int, env_batch: EnvBatch, mode: Any = "greedy", agent: Agent | None = None, **rules: Any
) -> list[Episode]:
    return play_episodes(
        agent or Diarist(env_batch.spec.num_actions), env_batch, episodes, mode, torch.Generator(), **rules
    )


def test_every_slot_plays_its_share_of_whole_games():
    played = games(8, Clockwork(3))
    assert [e.score for e in played] == [0, 1, 2, 100, 101, 102, 200, 201]  # not just the quick ones of slot 0
    assert [e.steps for e in played] == [1, 1, 1, 2, 2, 2, 3, 3]


def test_slots_without_a_share_do_not_count():
    assert [e.slot for e in games(2, Clockwork(5))] == [0, 1]


@pytest.mark.parametrize(("mode", "explore"), [("greedy", None), ("sampled", [0.0, 0.0])])
def test_greedy_play_is_told_not_to_explore(mode: str, explore: list[float] | None):
    agent = Diarist(2)
    games(4, Clockwork(2), mode, agent)
    told = [None if x is None else x.tolist() for _, _, x in agent.diary]
    assert told == [explore] * len(told)


def test_play_carries_the_memory_on():
    agent = Diarist(2)
    games(6, Clockwork(2), agent=agent)
    assert [state[1].tolist() for _, state, _ in agent.diary] == [[t, t] for t in range(len(agent.diary))]


def test_games_that_do_not_count_are_played_again():
    played = games(4, Clockwork(2), accept=lambda e: e.score % 2 == 1)
    assert [e.score for e in played] == [1, 3, 101, 103]


def test_play_gives_up_when_no_game_counts():
    with pytest.raises(ValueError, match=r"only 0 of .* positive score; 3 were asked for"):
        games(3, Clockwork(1, worth=-1.0), accept=lambda e: e.score > 0)


def test_play_stops_when_told():
    rounds = iter([False] * 5 + [True])
    # asked before every round of rows; a game takes two rows here
    assert len(games(1000, Clockwork(1), stop=lambda: next(rounds))) == 5 * UNROLL // 2
