"""The contract of environments, tested for every environment of the union."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest
import torch
from helpers.files import through_a_file
from helpers.rollouts import IMAGE_ENV, Rollout, continue_rollout, different_fields, random_actions, roll_out

from bestiary import tree
from bestiary.config.experiment import family
from bestiary.config.schema import kebab
from bestiary.envs import Atari, Catch, Gym, KeyToDoor, LunarLander, Recall, Riverraid, TMaze, VisualMatch
from bestiary.envs.env_batch import EnvBatch
from bestiary.seeding import EVAL, TRAIN
from bestiary.types import Episode

SLOTS, SEED = 2, 3
AHEAD = 200  # steps that must agree after a restart


class Case(NamedTuple):
    env: Any
    steps: int = 300  # enough for several episodes, and for AHEAD steps after one of them ended
    name: str = ""

    def __str__(self) -> str:
        return "-".join(x for x in (kebab(type(self.env)), self.name) if x)

    def make(self, num_envs: int = SLOTS, seed: int = SEED, stream: int = TRAIN) -> EnvBatch:
        return self.env.make(num_envs, seed, stream, 1)

    @property
    def life_loss(self) -> bool:
        return getattr(self.env, "life_loss", False)


SMALL = {
    "recall": [Case(Recall(delay=3, cues=3))],
    "catch": [Case(Catch(rows=5, columns=4))],
    "tmaze": [
        Case(TMaze(length=2), name="passive"),
        Case(TMaze(length=2, active=True, oracle=True), name="active"),
    ],
    "visual-match": [
        Case(VisualMatch(length=8)),
        Case(VisualMatch(length=8, colours="per_run", oracle=True), name="per-run"),
    ],
    "key-to-door": [Case(KeyToDoor(length=30)), Case(KeyToDoor(length=8, oracle=True), name="oracle")],
    "gym": [
        Case(Gym("CartPole-v1"), name="cartpole"),
        Case(Gym("CartPole-v1", processes=True), name="processes"),
        Case(Gym("MountainCar-v0"), steps=450, name="mountaincar"),
        Case(Gym(IMAGE_ENV), name="image"),
    ],
    "lunar-lander": [
        Case(LunarLander(), name="dense"),
        Case(LunarLander(sparse=True, limit=60), name="sparse"),
        Case(LunarLander(processes=True), name="processes"),
    ],
    "atari": [
        Case(Atari("Pong", time_limit_frames=480), steps=330, name="pong"),
        Case(Atari("Breakout"), steps=480, name="breakout"),
        Case(Atari("Breakout", life_loss=False, sticky=0.25), steps=480, name="breakout-games"),
        Case(Atari("Breakout", one_life=True), steps=330, name="breakout-one-life"),
    ],
    "riverraid": [
        Case(Riverraid("pacifist:20", launch=True, sticky=0.25, time_limit_frames=480), steps=330),
        Case(Riverraid(stall=20, sticky=0.25, life_loss=False, time_limit_frames=480), steps=330, name="cut-short"),
    ],
}
# an environment that is not listed here is tested with its own defaults
CASES = [case for name, cls in family("env").items() for case in SMALL.get(name, [Case(cls())])]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def rollout(case: Case) -> Iterator[Rollout]:
    with closing(case.make()) as env_batch:
        yield roll_out(env_batch, random_actions(env_batch.spec.num_actions, case.steps, SLOTS))


def assert_continues(env_batch: EnvBatch, rollout: Rollout, at: int, steps: int = AHEAD) -> None:
    """The next time steps and episodes are those that followed step `at`."""
    ahead = continue_rollout(env_batch, rollout.action[at : at + steps])
    expected = tree.narrow(rollout.steps, 0, at + 1, len(ahead.action))
    assert different_fields(ahead.steps, expected) == [], f"after step {at}"
    assert ahead.episodes == rollout.episodes[at + 1 : at + 1 + steps], f"after step {at}"


# -- time steps ----------------------------------------------------------------------------------------------------


def test_time_steps_have_the_shapes_and_dtypes_of_the_spec(case: Case, rollout: Rollout):
    T, steps, spec = case.steps + 1, rollout.steps, rollout.spec
    assert steps.obs.shape == (T, SLOTS, *spec.obs_shape)
    assert steps.obs.dtype == spec.obs_dtype
    assert steps.prev_action.dtype == torch.int64
    assert steps.reward.dtype == torch.float32
    assert steps.is_first.dtype == steps.is_terminal.dtype == torch.bool
    assert all(x.shape == (T, SLOTS) for x in steps[1:])
    assert all(x[0].is_contiguous() for x in rollout.as_returned)


def test_the_rollout_is_long_enough_to_test_anything(rollout: Rollout):
    assert all(rollout.finished(slot) for slot in range(SLOTS))
    assert rollout.ends()[0] + AHEAD < len(rollout.action)


def test_every_slot_begins_with_a_first_step(rollout: Rollout):
    assert rollout.steps.is_first[0].all()


def test_a_first_step_has_no_previous_action_and_no_reward(rollout: Rollout):
    first = rollout.steps.is_first
    assert (rollout.steps.prev_action[first] == 0).all()
    assert (rollout.steps.reward[first] == 0).all()


def test_no_episode_ends_where_it_begins(rollout: Rollout):
    assert not (rollout.steps.is_first & rollout.steps.is_terminal).any()
    assert not (rollout.steps.is_first[:-1] & rollout.steps.is_first[1:]).any()


def test_time_steps_hold_the_action_that_led_to_them(rollout: Rollout):
    going = ~rollout.steps.is_first[1:]
    assert rollout.steps.prev_action[1:][going].equal(rollout.action[going])


def test_a_new_episode_follows_every_end_and_nothing_else(case: Case, rollout: Rollout):
    begins = rollout.steps.is_first[1:]
    reported = torch.zeros_like(begins)
    cut = torch.zeros_like(begins)
    for t, ended in enumerate(rollout.episodes[1:]):
        for episode in ended:
            reported[t, episode.slot] = True
            cut[t, episode.slot] = episode.truncated
    assert reported.equal(begins)
    terminal = rollout.steps.is_terminal[:-1]
    if case.life_loss:
        assert (terminal | cut)[begins].all()
    else:
        assert (terminal | cut).equal(begins)


def test_earlier_time_steps_do_not_change(rollout: Rollout):
    assert different_fields(rollout.as_returned, rollout.steps) == []


# -- episode statistics -------------------------------------------------------------------------------------------


def slow_statistics(case: Case, rollout: Rollout, slot: int) -> list[tuple[int, Episode]]:
    """The episodes of a slot, computed from its time steps one after the other."""
    step, frames = tree.map(lambda x: x[:, slot], rollout.steps), rollout.spec.frames_per_step
    episodes, score, life, steps, lives = [], 0.0, 0.0, 0, []
    for t in range(1, len(step.reward)):
        if step.is_first[t]:
            ended = bool(step.is_terminal[t - 1])
            if not (case.life_loss and ended):  # the life in progress at the end of the episode
                lives.append(life)
            episodes.append((t, Episode(slot, score, steps, steps * frames, tuple(lives), not ended)))
            score, life, steps, lives = 0.0, 0.0, 0, []
            continue
        score += step.reward[t].item()
        life += step.reward[t].item()
        steps += 1
        if case.life_loss and step.is_terminal[t]:
            lives.append(life)
            life = 0.0
    return episodes


def test_episode_statistics_agree_with_the_time_steps(case: Case, rollout: Rollout):
    for slot in range(SLOTS):
        recorded, slow = rollout.finished(slot), slow_statistics(case, rollout, slot)
        assert len(recorded) == len(slow) > 0
        for (step, episode), (slow_step, expected) in zip(recorded, slow, strict=True):
            assert step == slow_step
            # fields that the time steps do not hold, or only rounded
            not_compared = {"score": 0, "life_returns": (), "success": None, "components": {}, "life_components": ()}
            assert episode._replace(**not_compared) == expected._replace(**not_compared)
            assert episode.score == pytest.approx(expected.score, rel=1e-5)
            assert sum(episode.life_returns) == pytest.approx(episode.score)
            if case.life_loss or len(episode.life_returns) == 1:
                assert episode.life_returns == pytest.approx(expected.life_returns, rel=1e-5)


# -- seeds ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opening(rollout: Rollout) -> int:
    """Number of steps in which a second episode begins, or in which rollouts surely differ."""
    return min(rollout.ends()[0] + 20, 300)


def test_the_same_seed_gives_the_same_rollout(case: Case, rollout: Rollout, opening: int):
    with closing(case.make()) as env_batch:
        env_batch.reset()
        assert_continues(env_batch, rollout, 0, opening)


@pytest.mark.parametrize(("seed", "stream"), [(SEED + 1, TRAIN), (SEED, EVAL)], ids=["seed", "stream"])
def test_another_seed_or_stream_gives_another_rollout(
    case: Case, rollout: Rollout, opening: int, seed: int, stream: int
):
    with closing(case.make(seed=seed, stream=stream)) as env_batch:
        other = roll_out(env_batch, rollout.action[:opening])
    for slot in range(SLOTS):
        assert not other.steps.obs[:, slot].equal(rollout.steps.obs[: opening + 1, slot])


@pytest.fixture(scope="module")
def monotony(case: Case, opening: int) -> Iterator[Rollout]:
    """Always the same action: all differences come from the seeds."""
    with closing(case.make()) as env_batch:
        yield roll_out(env_batch, torch.ones(opening + 40, SLOTS, dtype=torch.int64))


def test_slots_have_different_episodes(monotony: Rollout):
    assert not monotony.steps.obs[:, 0].equal(monotony.steps.obs[:, 1])


def test_successive_episodes_of_a_slot_differ(monotony: Rollout):
    obs, length = monotony.steps.obs, 50
    for slot in range(SLOTS):
        starts = monotony.steps.is_first[:, slot].nonzero().flatten().tolist()
        ends = [*starts[1:], len(obs) + 1]  # the last episode is not over, and counts only if long enough
        spans = [(a, min(a + length, b)) for a, b in zip(starts, ends, strict=True)]
        beginnings = [obs[a:b, slot].numpy().tobytes() for a, b in spans if b <= len(obs)]
        assert len(beginnings) > 1
        assert len(set(beginnings)) > 1


def test_a_slot_does_not_depend_on_the_batch_around_it(case: Case, rollout: Rollout, opening: int):
    with closing(case.make(1)) as env_batch:
        alone = roll_out(env_batch, rollout.action[:opening, :1])
    assert different_fields(alone.steps, tree.map(lambda x: x[: opening + 1, :1], rollout.steps)) == []


def test_a_reset_repeats_the_same_rollout(case: Case, rollout: Rollout):
    with closing(case.make()) as env_batch, closing(case.make()) as restored:
        env_batch.reset()
        continue_rollout(env_batch, rollout.action[:9])
        env_batch.reset()
        assert_continues(env_batch, rollout, 0, 30)
        restored.load_state_dict(through_a_file(env_batch.state_dict()))
        assert_continues(restored, rollout, 30, 30)


# -- checkpoints ------------------------------------------------------------------------------------------------


def moments(rollout: Rollout) -> list[int]:
    """Step 0, some step, the last of an episode (its reset is pending), the first of the next, a later end."""
    ends = [t for t in rollout.ends() if t + AHEAD < len(rollout.action)]
    return sorted({0, min(7, ends[0] // 2), ends[0], ends[0] + 1, ends[len(ends) // 2]})


def test_a_restored_env_batch_continues_exactly(case: Case, rollout: Rollout):
    for at in moments(rollout):
        with closing(case.make()) as env_batch:
            env_batch.load_state_dict(through_a_file(rollout.saved[at]))
            assert same(env_batch.state_dict(), rollout.saved[at]), f"at step {at}"
            assert_continues(env_batch, rollout, at)
            assert same(env_batch.state_dict(), rollout.saved[at + AHEAD]), f"after step {at}"


def test_an_env_batch_continues_from_the_state_it_loaded_last(case: Case, rollout: Rollout):
    with closing(case.make()) as env_batch:
        for at in (rollout.ends()[0], 0):
            env_batch.load_state_dict(through_a_file(rollout.saved[at]))
        assert_continues(env_batch, rollout, 0, 30)


def same(a: Any, b: Any) -> bool:
    """Equality of nested dicts and lists of numbers and tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a.equal(b) if isinstance(a, torch.Tensor) else a == b
