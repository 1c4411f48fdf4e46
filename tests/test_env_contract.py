"""What every environment promises, whoever wrote it."""

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
AHEAD = 200  # rows that must agree after a restart


class Case(NamedTuple):
    env: Any
    steps: int = 300  # enough for several episodes, and for AHEAD rows after one of them ended
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
        Case(Gym(IMAGE_ENV), name="picture"),
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
# an environment nobody listed is tested with its own defaults
CASES = [case for name, cls in family("env").items() for case in SMALL.get(name, [Case(cls())])]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def rollout(case: Case) -> Iterator[Rollout]:
    with closing(case.make()) as env_batch:
        yield roll_out(env_batch, random_actions(env_batch.spec.num_actions, case.steps, SLOTS))


def assert_goes_on(env_batch: EnvBatch, rollout: Rollout, at: int, rows: int = AHEAD) -> None:
    """The world's next rows and reports are those that followed row `at`."""
    ahead = continue_rollout(env_batch, rollout.action[at : at + rows])
    expected = tree.narrow(rollout.steps, 0, at + 1, len(ahead.action))
    assert different_fields(ahead.steps, expected) == [], f"after row {at}"
    assert ahead.episodes == rollout.episodes[at + 1 : at + 1 + rows], f"after row {at}"


# -- rows -------------------------------------------------------------------------------------------------------


def test_rows_look_as_the_spec_says(case: Case, rollout: Rollout):
    T, rows, spec = case.steps + 1, rollout.steps, rollout.spec
    assert rows.obs.shape == (T, SLOTS, *spec.obs_shape)
    assert rows.obs.dtype == spec.obs_dtype
    assert rows.prev_action.dtype == torch.int64
    assert rows.reward.dtype == torch.float32
    assert rows.is_first.dtype == rows.is_terminal.dtype == torch.bool
    assert all(x.shape == (T, SLOTS) for x in rows[1:])
    assert all(x[0].is_contiguous() for x in rollout.as_returned)


def test_the_story_is_long_enough_to_test_anything(rollout: Rollout):
    assert all(rollout.finished(slot) for slot in range(SLOTS))
    assert rollout.ends()[0] + AHEAD < len(rollout.action)


def test_every_slot_begins_with_a_first_row(rollout: Rollout):
    assert rollout.steps.is_first[0].all()


def test_nothing_led_to_a_first_row(rollout: Rollout):
    first = rollout.steps.is_first
    assert (rollout.steps.prev_action[first] == 0).all()
    assert (rollout.steps.reward[first] == 0).all()


def test_no_episode_ends_where_it_begins(rollout: Rollout):
    assert not (rollout.steps.is_first & rollout.steps.is_terminal).any()
    assert not (rollout.steps.is_first[:-1] & rollout.steps.is_first[1:]).any()


def test_rows_tell_the_action_that_led_to_them(rollout: Rollout):
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


def test_rows_told_earlier_do_not_change(rollout: Rollout):
    assert different_fields(rollout.as_returned, rollout.steps) == []


# -- books ------------------------------------------------------------------------------------------------------


def slow_books(case: Case, rollout: Rollout, slot: int) -> list[tuple[int, Episode]]:
    """Read a slot's rows one by one and write down its episodes."""
    rows, frames = tree.map(lambda x: x[:, slot], rollout.steps), rollout.spec.frames_per_step
    books, score, life, steps, lives = [], 0.0, 0.0, 0, []
    for t in range(1, len(rows.reward)):
        if rows.is_first[t]:
            ended = bool(rows.is_terminal[t - 1])
            if not (case.life_loss and ended):  # the life in progress when the game ended
                lives.append(life)
            books.append((t, Episode(slot, score, steps, steps * frames, tuple(lives), not ended)))
            score, life, steps, lives = 0.0, 0.0, 0, []
            continue
        score += rows.reward[t].item()
        life += rows.reward[t].item()
        steps += 1
        if case.life_loss and rows.is_terminal[t]:
            lives.append(life)
            life = 0.0
    return books


def test_the_books_agree_with_the_rows(case: Case, rollout: Rollout):
    for slot in range(SLOTS):
        told, slow = rollout.finished(slot), slow_books(case, rollout, slot)
        assert len(told) == len(slow) > 0
        for (row, book), (slow_row, expected) in zip(told, slow, strict=True):
            assert row == slow_row
            # what the rows do not tell, or only rounded
            told_only = {"score": 0, "lives": (), "success": None, "components": {}, "life_components": ()}
            assert book._replace(**told_only) == expected._replace(**told_only)
            assert book.score == pytest.approx(expected.score, rel=1e-5)
            assert sum(book.life_returns) == pytest.approx(book.score)
            if case.life_loss or len(book.life_returns) == 1:
                assert book.life_returns == pytest.approx(expected.life_returns, rel=1e-5)


# -- seeds ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opening(rollout: Rollout) -> int:
    """So many moves are enough to see a second episode begin, or to be sure of a difference."""
    return min(rollout.ends()[0] + 20, 300)


def test_the_same_seed_tells_the_same_story(case: Case, rollout: Rollout, opening: int):
    with closing(case.make()) as env_batch:
        env_batch.reset()
        assert_goes_on(env_batch, rollout, 0, opening)


@pytest.mark.parametrize(("seed", "stream"), [(SEED + 1, TRAIN), (SEED, EVAL)], ids=["seed", "stream"])
def test_another_seed_or_stream_tells_another_story(case: Case, rollout: Rollout, opening: int, seed: int, stream: int):
    with closing(case.make(seed=seed, stream=stream)) as env_batch:
        other = roll_out(env_batch, rollout.action[:opening])
    for slot in range(SLOTS):
        assert not other.steps.obs[:, slot].equal(rollout.steps.obs[: opening + 1, slot])


@pytest.fixture(scope="module")
def monotony(case: Case, opening: int) -> Iterator[Rollout]:
    """Always the same action: whatever differs comes from the seeds."""
    with closing(case.make()) as env_batch:
        yield roll_out(env_batch, torch.ones(opening + 40, SLOTS, dtype=torch.int64))


def test_slots_tell_different_stories(monotony: Rollout):
    assert not monotony.steps.obs[:, 0].equal(monotony.steps.obs[:, 1])


def test_a_slot_tells_different_stories_one_after_the_other(monotony: Rollout):
    told, length = monotony.steps.obs, 50
    for slot in range(SLOTS):
        starts = monotony.steps.is_first[:, slot].nonzero().flatten().tolist()
        ends = [*starts[1:], len(told) + 1]  # the last episode is not over, and counts only if long enough
        spans = [(a, min(a + length, b)) for a, b in zip(starts, ends, strict=True)]
        beginnings = [told[a:b, slot].numpy().tobytes() for a, b in spans if b <= len(told)]
        assert len(beginnings) > 1
        assert len(set(beginnings)) > 1


def test_a_slot_does_not_depend_on_the_batch_around_it(case: Case, rollout: Rollout, opening: int):
    with closing(case.make(1)) as env_batch:
        alone = roll_out(env_batch, rollout.action[:opening, :1])
    assert different_fields(alone.steps, tree.map(lambda x: x[: opening + 1, :1], rollout.steps)) == []


def test_a_reset_starts_the_same_story_again(case: Case, rollout: Rollout):
    with closing(case.make()) as env_batch, closing(case.make()) as restored:
        env_batch.reset()
        continue_rollout(env_batch, rollout.action[:9])
        env_batch.reset()
        assert_goes_on(env_batch, rollout, 0, 30)
        restored.load_state_dict(through_a_file(env_batch.state_dict()))
        assert_goes_on(restored, rollout, 30, 30)


# -- checkpoints ------------------------------------------------------------------------------------------------


def moments(rollout: Rollout) -> list[int]:
    """The beginning, on the way, an episode's last row (its reset is pending), the first of the next, a later end."""
    ends = [t for t in rollout.ends() if t + AHEAD < len(rollout.action)]
    return sorted({0, min(7, ends[0] // 2), ends[0], ends[0] + 1, ends[len(ends) // 2]})


def test_a_saved_world_goes_on_as_if_nothing_had_happened(case: Case, rollout: Rollout):
    for at in moments(rollout):
        with closing(case.make()) as env_batch:
            env_batch.load_state_dict(through_a_file(rollout.saved[at]))
            assert same(env_batch.state_dict(), rollout.saved[at]), f"at row {at}"
            assert_goes_on(env_batch, rollout, at)
            assert same(env_batch.state_dict(), rollout.saved[at + AHEAD]), f"after row {at}"


def test_a_world_goes_on_from_what_it_loaded_last(case: Case, rollout: Rollout):
    with closing(case.make()) as env_batch:
        for at in (rollout.ends()[0], 0):
            env_batch.load_state_dict(through_a_file(rollout.saved[at]))
        assert_goes_on(env_batch, rollout, 0, 30)


def same(a: Any, b: Any) -> bool:
    """Equality of nested dicts and lists of numbers and tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a.equal(b) if isinstance(a, torch.Tensor) else a == b
