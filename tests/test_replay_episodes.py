"""The replay of episodes, compared with a list: what is kept, what is sampled, and the critic's labels."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.files import through_a_file
from hypothesis import given
from hypothesis import settings as searching
from hypothesis import strategies as st
from torch import Tensor

from bestiary import tree
from bestiary.errors import UserError
from bestiary.ops.commands import CommandDistribution, command_distribution, subtract_start_baseline
from bestiary.replay import critic_refresh
from bestiary.replay.base import step_bytes
from bestiary.replay.critic_refresh import CriticLabels, CriticRefresh
from bestiary.replay.episode_storage import EpisodeTable
from bestiary.replay.episodes import EpisodeReplay, Episodes, EpisodesBuilder
from bestiary.types import Batch, Spec, TimeStep, Trajectory, ValueTargets

STREAMS = 3
SPEC = Spec("script", (2,), torch.float32, 4, horizon=50)
IMAGES = Spec("Any", (1, 84, 84), torch.uint8, 18, horizon=1_000)
COMMAND = (torch.zeros(1, 2), torch.ones(1))  # command and inverse temperature
MEMORY = (*COMMAND, torch.zeros(1, 5))


class Script:
    """The experience of all streams. Observations hold stream and time; rewards are eighths, so that sums are exact."""

    def __init__(self, steps: int, density: float = 0.15, streams: int = STREAMS, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.streams, self.length = streams, steps
        self.is_first = torch.rand(steps, streams, generator=rng) < density
        self.is_first[0] = True
        last = torch.cat([self.is_first[1:], torch.zeros(1, streams, dtype=torch.bool)])
        self.is_terminal = last & (torch.rand(steps, streams, generator=rng) < 0.6)  # else the episode is truncated
        self.reward = torch.randint(-16, 17, (steps, streams), generator=rng) / 8
        self.reward[self.is_first] = 0

    @staticmethod
    def of(lengths: list[int], rewards: list[float] | None = None) -> "Script":
        """One stream with episodes of these lengths, each with one reward at its last step."""
        script = Script(sum(lengths) + len(lengths) + 1, 0.0, 1)
        script.reward[:] = 0
        at = 0
        for n, final_reward in zip(lengths, rewards or [0.0] * len(lengths), strict=True):
            script.reward[at + n] = final_reward
            at += n + 1
            script.is_first[at] = True
        return script

    def at(self, index: Tensor, stream: Tensor) -> tuple[TimeStep, Tensor]:
        stream = stream.expand_as(index)
        number = 10_000 * stream + index + 1  # never 0
        step = TimeStep(
            obs=torch.stack([stream, index], -1).float(),
            prev_action=number + 1,
            reward=self.reward[index, stream],
            is_first=self.is_first[index, stream],
            is_terminal=self.is_terminal[index, stream],
        )
        return step, number + 2

    def trajectory(self, start: int, unroll: int) -> Trajectory:
        """Its version is the time of its first step."""
        stream = torch.arange(self.streams)
        steps = torch.arange(start, start + unroll + 1)[:, None].expand(-1, self.streams)
        return Trajectory(*self.at(steps, stream), {}, (), start + 0 * stream)

    def trajectories(self, unrolls: tuple[int, ...] = (5,)) -> Iterator[Trajectory]:
        start, number = 0, 0
        while start + unrolls[number % len(unrolls)] < self.length:
            yield self.trajectory(start, unrolls[number % len(unrolls)])
            start += unrolls[number % len(unrolls)]
            number += 1


class PlainEpisode(NamedTuple):
    """One episode."""

    stream: int
    start: int
    rewards: list[float]
    truncated: bool

    @property
    def length(self) -> int:
        return len(self.rewards)

    def return_to_go(self, step: int, discount: float) -> float:
        return sum(discount**k * reward for k, reward in enumerate(self.rewards[step:]))


class Naive:
    """A list of episodes in order of arrival."""

    def __init__(self, cfg: EpisodesBuilder) -> None:
        self.builder, self.cfg = cfg, cfg.cfg
        self.kept: list[PlainEpisode] = []
        self.arrived = self.steps = 0

    def add(self, script: Script, start: int, unroll: int) -> int:
        """Returns how many episodes have ended in these steps."""
        ended = 0
        for stream in range(script.streams):
            for index in range(start + 1, start + unroll + 1):
                if not script.is_first[index, stream]:
                    self.steps += 1
                    continue
                beginning = index - 1
                while not script.is_first[beginning, stream]:
                    beginning -= 1
                rewards = script.reward[beginning + 1 : index, stream].tolist()
                if rewards:  # a single time step is no episode
                    self.kept.append(
                        PlainEpisode(stream, beginning, rewards, not script.is_terminal[index - 1, stream])
                    )
                    self.arrived += 1
                    ended += 1
        if ended:
            self.evict()
        return ended

    def evict(self) -> None:
        order = list(reversed(range(len(self.kept))))
        if self.cfg.keep == "best":  # sorting keeps the order of equals
            order.sort(key=lambda n: self.rank_score(self.kept[n]), reverse=True)
        stays, transitions = [], 0
        for n in order[: self.cfg.capacity]:
            transitions += self.kept[n].length
            if stays and self.cfg.max_transitions is not None and transitions > self.cfg.max_transitions:
                break
            stays.append(n)
        self.kept = [self.kept[n] for n in sorted(stays)]

    def rank_score(self, episode: PlainEpisode) -> float:
        return sum(episode.rewards) - self.cfg.length_penalty * len(episode.rewards)


def mean_return(held: EpisodeTable, labels: np.ndarray) -> CommandDistribution:
    return command_distribution(np.array([held.episode_return.mean()]))


def settings(**changes: Any) -> EpisodesBuilder:
    cfg = Episodes(
        batch_size=24,
        capacity=20,
        keep="recent",
        best_episodes=5,
        latest_episodes=5,
        best_fraction=0.5,
        sequence_length=1,
        updates_per_step=100.0,
        warmup=1,
    )
    return changed(EpisodesBuilder(cfg, STREAMS, 0.9, 0, mean_return), **changes)


def changed(builder: EpisodesBuilder, **changes: Any) -> EpisodesBuilder:
    """A builder with changes to itself or to the replay's settings."""
    names = {field.name for field in fields(Episodes)}
    cfg = replace(builder.cfg, **{name: value for name, value in changes.items() if name in names})
    return replace(builder, cfg=cfg, **{name: value for name, value in changes.items() if name not in names})


def labels_of(replay: EpisodeReplay) -> CriticLabels:
    assert replay.labels is not None
    return replay.labels


def build(cfg: EpisodesBuilder, seed: int = 0, state: tuple[Tensor, ...] = MEMORY) -> EpisodeReplay:
    return cfg.build(seed, SPEC, state)


def fill(replay: EpisodeReplay, script: Script, unrolls: tuple[int, ...] = (5,)) -> EpisodeReplay:
    for trajectory in script.trajectories(unrolls):
        replay.add(trajectory)
    return replay


def next_batch(replay: EpisodeReplay) -> Batch:
    batch = replay.sample()
    assert batch is not None
    return batch


def places(batch: Batch, script: Script, burn_in: int) -> list[tuple[int, int, int]]:
    """(stream, time at which the episode begins, transition with which the sequence begins) of every column."""
    t = batch.trajectory
    found = []
    for b in range(t.action.shape[1]):
        inside = int(t.aux["valid"][:, b].nonzero()[0])
        stream, index = t.step.obs[burn_in + inside, b].long().tolist()
        beginning = index
        while not script.is_first[beginning, stream]:
            beginning -= 1
        found.append((stream, beginning, index - beginning - inside))
    return found


def check(batch: Batch, script: Script, cfg: EpisodesBuilder, naive: Naive, unrolls: tuple[int, ...] = (5,)) -> None:
    """Compare every time step of a batch and its labels with the experience."""
    t, aux = batch.trajectory, batch.trajectory.aux
    steps, columns = t.action.shape
    window = steps - cfg.burn_in
    starts = np.cumsum([0, *(unrolls * script.length)])  # times at which trajectories begin
    kept = {(e.stream, e.start): e for e in naive.kept}
    for b, (stream, beginning, start) in zip(range(columns), places(batch, script, cfg.burn_in), strict=True):
        episode = kept[stream, beginning]
        offset = torch.arange(steps) + start - cfg.burn_in
        inside = offset.clamp(0, episode.length)
        step, action = script.at(beginning + inside, torch.tensor(stream))
        step = step._replace(is_first=step.is_first | (offset != inside))
        for mine, theirs in zip((*t.step, t.action), (*step, action), strict=True):
            assert torch.equal(mine[:, b], theirs)
        first = beginning + int(inside[0])
        assert t.version[b] == starts[starts <= first].max()
        transitions = range(start, start + window)
        valid = [0 <= k < episode.length for k in transitions]
        assert aux["valid"][:, b].tolist() == valid
        ahead = [episode.return_to_go(k, cfg.discount) for k, real in zip(transitions, valid, strict=True) if real]
        assert aux["return_to_go"][aux["valid"][:, b], b].tolist() == pytest.approx(ahead, rel=1e-6)
        left = [episode.length - k for k, real in zip(transitions, valid, strict=True) if real]
        assert aux["horizon"][aux["valid"][:, b], b].tolist() == left
        assert aux["episode_return"][:, b].tolist() == [sum(episode.rewards)] * window
        assert aux["rank_score"][:, b].tolist() == pytest.approx([naive.rank_score(episode)] * window, rel=1e-6)
    assert set(aux) - {"value_target", "advantage"} == {
        "valid",
        "return_to_go",
        "horizon",
        "episode_return",
        "rank_score",
    }
    assert all(x.shape == (window, columns) for x in aux.values())
    assert t.state == () and t.version.shape == (columns,)


def assert_same(replay: EpisodeReplay, naive: Naive) -> None:
    held, kept = replay.table, naive.kept
    assert held.length.tolist() == [e.length for e in kept]
    assert held.episode_return.tolist() == [sum(e.rewards) for e in kept]
    assert held.discounted_return.tolist() == pytest.approx(
        [e.return_to_go(0, naive.builder.discount) for e in kept], rel=1e-9
    )
    assert held.truncated.tolist() == [e.truncated for e in kept] and held.truncated.dtype == bool
    assert held.rank_score.tolist() == [naive.rank_score(e) for e in kept]
    where = replay.storage.arrays[0].obs[held.start].long().tolist() if len(kept) else []
    assert where == [[e.stream, e.start] for e in kept]
    assert (np.diff(held.number) > 0).all() and replay.arrived == naive.arrived
    assert len(set(held.number)) == len(kept)


# -- eviction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "transitions", "unrolls"),
    [
        (20, None, (5,)),
        (3, None, (1,)),
        (1, None, (2, 9, 1, 4)),
        (1000, 40, (2, 9, 1, 4)),
        (6, 25, (40,)),
        (4, 1, (5,)),
    ],
)
@pytest.mark.parametrize(
    ("keep", "length_penalty"), [("best", 0.0), ("best", 0.25), ("recent", 0.25), ("mixture", 0.0)]
)
def test_the_episodes_held_equal_those_of_a_list(keep, length_penalty, capacity, transitions, unrolls):
    cfg = settings(keep=keep, capacity=capacity, max_transitions=transitions, length_penalty=length_penalty)
    for seed, density in ((0, 0.15), (1, 0.6)):
        script, replay, naive = Script(91, density, seed=seed), build(cfg), Naive(cfg)
        for t in script.trajectories(unrolls):
            replay.add(t)
            naive.add(script, int(t.version[0]), len(t.action) - 1)
            assert_same(replay, naive)
            assert len(naive.kept) <= capacity
        assert naive.arrived > min(capacity, 20)
        metrics = replay.metrics()
        assert metrics["replay_episodes"] == len(naive.kept)
        assert metrics["replay_steps"] == sum(e.length + 1 for e in naive.kept)
        assert metrics["replay_return"] == pytest.approx(np.mean([sum(e.rewards) for e in naive.kept]))
        assert metrics["replay_length"] == pytest.approx(np.mean([e.length for e in naive.kept]))


@searching(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["best", "recent", "mixture"]),
    st.floats(0.05, 0.9),
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(1, 12),
    st.none() | st.integers(1, 60),
    st.sampled_from([(1, 0), (4, 0), (4, 3), (None, 0), (None, 2), (11, 2)]),
)
def test_any_experience_is_kept_and_sampled_as_from_a_list(seed, keep, density, unrolls, capacity, transitions, shape):
    window, burn_in = shape
    cfg = settings(keep=keep, capacity=capacity, max_transitions=transitions, sequence_length=window, burn_in=burn_in)
    script, replay, naive = Script(41, density, streams=2, seed=seed), build(changed(cfg, streams=2)), Naive(cfg)
    for number, t in enumerate(script.trajectories(tuple(unrolls))):
        replay.add(t)
        naive.add(script, int(t.version[0]), len(t.action) - 1)
        assert_same(replay, naive)
        batch = replay.sample()
        assert (batch is None) == (not naive.kept)
        if batch is not None and number % 3 == 0:
            check(batch, script, cfg, naive, tuple(unrolls))


def test_a_single_time_step_is_no_episode():
    script, cfg = Script.of([2, 0, 0, 3]), settings(streams=1, update_unit="episode", warmup=3)
    replay = fill(build(cfg), script, (1,))
    assert replay.table.length.tolist() == [2, 3]
    assert replay.arrived == replay.rate_limiter.steps == 2
    assert replay.sample() is None  # only episodes end the warmup


def test_of_equal_episodes_the_later_is_kept():
    script, cfg = Script.of([1, 2, 3, 4], [1.0, 5.0, 5.0, 0.0]), settings(streams=1, keep="best", capacity=1)
    assert fill(build(cfg), script, (1,)).table.length.tolist() == [3]


def test_one_episode_is_kept_even_if_it_exceeds_max_transitions():
    for keep in ("best", "recent"):
        cfg = settings(streams=1, keep=keep, max_transitions=4)
        replay = fill(build(cfg), Script.of([2, 9], [0.0, 1.0]), (1,))
        assert replay.table.length.tolist() == [9]


def test_the_first_episode_that_does_not_fit_ends_the_selection():
    """Otherwise a short episode would be kept only because it is short."""
    cfg = settings(streams=1, keep="recent", max_transitions=6)
    assert fill(build(cfg), Script.of([1, 5, 3]), (1,)).table.length.tolist() == [3]


def test_an_interrupted_episode_is_dropped():
    """When a stream restarts within an episode, its two parts are not joined."""
    script, replay = Script(40, 0.0), build(settings())
    replay.add(script.trajectory(0, 6))
    again = Script(40, 0.0, seed=1)
    again.is_first[9] = True
    replay.add(again.trajectory(0, 12))
    assert replay.table.length.tolist() == [8] * STREAMS
    assert replay.table.episode_return.tolist() == again.reward[1:9].sum(0).tolist()


def test_an_episode_without_its_first_step_is_dropped():
    script, replay = Script(40, 0.0), build(settings())
    script.is_first[10] = script.is_first[15] = True
    replay.add(script.trajectory(5, 20))
    assert replay.table.length.tolist() == [4] * STREAMS


def test_the_length_penalty_ranks_the_shorter_episode_higher():
    script = Script.of([1, 4], [5.0, 5.5])
    for penalty, kept in ((0.0, 4), (0.1, 4), (0.25, 1)):
        replay = fill(build(settings(streams=1, keep="best", capacity=1, length_penalty=penalty)), script, (1,))
        assert replay.table.length.tolist() == [kept]


@pytest.mark.parametrize("keep", ["best", "recent"])
def test_the_rank_score_may_subtract_the_start_state_baseline(keep):
    """Compared with a list of (start, return) that is fitted again after every episode."""
    cfg = settings(streams=1, start_state_baseline=True, keep=keep, capacity=8, length_penalty=2.0)
    rng = np.random.default_rng(0)
    replay, kept, differs = build(cfg), [], False
    for number in range(40):
        start = rng.integers(0, 9, 2).astype(float)
        final_reward = float(start @ [3.0, -1.0] + rng.integers(0, 9))
        length = 1 + number % 2
        t = Script.of([length], [final_reward]).trajectory(0, length + 1)
        t.step.obs[0, 0] = torch.from_numpy(start)
        replay.add(t)
        kept.append((number, start, final_reward - 2.0 * length))
        score = np.array([e for _, _, e in kept])
        if len(kept) > 2:  # more episodes than coefficients
            score = subtract_start_baseline(score, np.stack([s for _, s, _ in kept]))
        order = sorted(range(len(kept)), key=lambda n: (score[n] if keep == "best" else 0, n), reverse=True)
        stays = sorted(order[:8])
        differs |= set(stays) != set(sorted(range(len(kept)), key=lambda n: kept[n][2], reverse=True)[:8])
        kept, score = [kept[n] for n in stays], score[stays]
        assert replay.table.number.tolist() == [n for n, _, _ in kept]
        np.testing.assert_allclose(replay.table.rank_score, score, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(replay.start_obs, np.stack([s for _, s, _ in kept]))
    assert differs  # from a selection by returns alone


# -- sampling -------------------------------------------------------------------------------------------------------

SHAPES = [(1, 0), (1, 2), (4, 0), (4, 3), (12, 0), (12, 5), (None, 0), (None, 3)]
KEEPS = ["best", "recent", "mixture"]


@pytest.mark.parametrize(("window", "burn_in", "keep"), [(*shape, KEEPS[n % 3]) for n, shape in enumerate(SHAPES)])
def test_sequences_equal_the_experience_through_many_evictions(window, burn_in, keep):
    """The storage of 1024 time steps is overwritten and compacted several times."""
    cfg = settings(keep=keep, sequence_length=window, burn_in=burn_in, capacity=25)
    script, replay, naive = Script(1_501, 0.12), build(cfg), Naive(cfg)
    sizes = set()
    for number, t in enumerate(script.trajectories((20, 7))):
        replay.add(t)
        naive.add(script, int(t.version[0]), len(t.action) - 1)
        if replay.table.number.size:
            batch = next_batch(replay)
            if number % 8 == 0:
                check(batch, script, cfg, naive, (20, 7))
        sizes.add(0 if replay.storage.arrays is None else len(replay.storage.arrays[1]))
    assert replay.arrived > 400 and replay.storage.used < 1_024
    assert max(sizes) == 1_024


def test_the_storage_grows_with_what_is_held():
    cfg = settings(capacity=10_000, sequence_length=4)
    script, naive = Script(1_501, 0.12), Naive(cfg)
    replay = build(cfg)
    for t in script.trajectories((50,)):
        replay.add(t)
        naive.add(script, int(t.version[0]), 50)
    assert_same(replay, naive)
    for _ in range(5):
        check(next_batch(replay), script, cfg, naive, (50,))
    assert 4_000 < replay.storage.used <= len(replay.storage.arrays[1]) < 4 * 4_500
    step_bytes = 8 + 8 + 4 + 1 + 1 + 8 + 8  # observation, previous action, reward, two flags, action, version
    assert replay.bytes == replay.storage.used * step_bytes


def test_a_batch_does_not_change_when_more_is_added():
    script, cfg = Script(1_201), settings(capacity=10, sequence_length=4)
    replay = build(cfg)
    parts = list(script.trajectories((20,)))
    for t in parts[:10]:
        replay.add(t)
    batch = next_batch(replay)
    before = as_bits(batch)
    for t in parts[10:]:
        replay.add(t)
    assert as_bits(batch) == before


def as_bits(batch: Batch | None) -> Any:
    if batch is None:
        return None
    found: list[Any] = []
    tree.map(lambda x: found.append((str(x.dtype), x.tolist())), (batch.trajectory, batch.keys, batch.info))
    return found


def test_batches_hold_batch_size_transitions():
    script = Script(401)
    for window, columns in ((1, 64), (4, 16), (64, 1), (33, 1)):
        replay = fill(build(settings(sequence_length=window, batch_size=64)), script)
        assert next_batch(replay).trajectory.action.shape == (window, columns)
    replay = fill(build(settings(sequence_length=None, batch_size=64)), script)
    transitions = [int(next_batch(replay).trajectory.aux["valid"].sum()) for _ in range(100)]
    assert np.mean(transitions) == pytest.approx(64, rel=0.15)


@pytest.mark.parametrize(("state", "window"), [(COMMAND, 1), (MEMORY, None)])
def test_recurrent_agents_are_given_whole_episodes(state, window):
    replay = build(settings(sequence_length=None), state=state)
    assert replay.sequence_length == window
    frames = (*COMMAND, torch.zeros(1, 3, 1, 9, 9, dtype=torch.uint8))  # a frame stack is no recurrent core
    assert build(settings(sequence_length=None), state=frames).sequence_length == 1
    assert build(settings(sequence_length=7), state=state).sequence_length == 7


def test_samples_depend_on_the_seed_alone():
    bits = []
    for seed in (0, 0, 1):
        replay = fill(build(settings(sequence_length=4), seed), Script(101))
        bits.append([as_bits(next_batch(replay)) for _ in range(3)])
    assert bits[0] == bits[1] != bits[2]
    assert bits[0][0] != bits[0][1]


# -- probabilities----------------------------------------------------------------------------------------------------


def chance(counts: Counter, expected: dict[Any, float]) -> float:
    """p-value of Pearson's chi-squared test."""
    n, total = sum(counts.values()), sum(expected.values())
    assert set(counts) <= {key for key, weight in expected.items() if weight}
    shares = {key: n * weight / total for key, weight in expected.items() if weight}
    assert min(shares.values()) > 4
    statistic = sum((counts[key] - share) ** 2 / share for key, share in shares.items())
    half = torch.tensor([len(shares) - 1, statistic], dtype=torch.float64) / 2
    return torch.special.gammaincc(*half).item()


LENGTHS = [1, 2, 3, 5, 8, 13]
EVERY = {(n, k): 1.0 for n, length in enumerate(LENGTHS) for k in range(length)}


def shown(cfg: EpisodesBuilder, windows: int, rewards: list[float] | None = None) -> tuple[Counter, Counter]:
    """In one batch of `windows` sequences: counts of sampled episodes, and of (episode, transition)."""
    lengths = LENGTHS if rewards is None else [2] * len(rewards)
    script = Script.of(lengths, rewards)
    cfg = changed(
        cfg, streams=1, updates_per_step=1e6, batch_size=round(windows * (cfg.cfg.sequence_length or np.mean(lengths)))
    )
    t = next_batch(fill(build(cfg, seed=5), script, (1,))).trajectory
    valid, index = t.aux["valid"].numpy(), t.step.obs[..., 1].long().numpy()
    number = script.is_first[:, 0].cumsum(0).numpy() - 1
    begins = script.is_first[:, 0].nonzero().flatten().numpy()
    assert valid.any(0).all() and valid.shape[1] == windows
    column = np.arange(windows)
    episodes = Counter(number[index[valid.argmax(0), column]].tolist())
    episode = number[index[valid]]
    return episodes, Counter(zip(episode.tolist(), (index[valid] - begins[episode]).tolist(), strict=True))


def test_episodes_are_sampled_uniformly_or_by_their_length():
    """Frequencies that are too even would be wrong as well."""
    by_episode, _ = shown(settings(), 4_000)
    by_transition, transitions = shown(settings(sample_by="transitions"), 4_000)
    alike, long = dict.fromkeys(range(6), 1.0), {n: float(transitions) for n, transitions in enumerate(LENGTHS)}
    assert 1e-3 < chance(by_episode, alike) < 1 - 1e-3
    assert 1e-3 < chance(by_transition, long) < 1 - 1e-3
    assert chance(by_episode, long) < 1e-6 and chance(by_transition, alike) < 1e-6  # the test has the power to tell
    assert 1e-3 < chance(transitions, EVERY) < 1 - 1e-3


@pytest.mark.parametrize("window", [1, 2, 5, 20])
def test_all_transitions_of_an_episode_are_equally_likely(window):
    """Sequences that begin before an episode or end after it compensate for its borders."""
    episodes, transitions = shown(settings(sequence_length=window), 30_000)
    for n, length in enumerate(LENGTHS):
        counts = np.array([transitions[n, k] for k in range(length)])
        assert abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.mean())
        assert counts.mean() == pytest.approx(episodes[n] * window / (length + window - 1), rel=0.05)


@pytest.mark.parametrize("keep", ["recent", "mixture"])
@pytest.mark.parametrize("window", [1, 4, 20, None])
def test_sampling_by_transitions_is_uniform_over_all_transitions(window, keep):
    _, transitions = shown(
        settings(sequence_length=window, sample_by="transitions", keep=keep, best_episodes=9, latest_episodes=9), 30_000
    )
    counts = np.array([transitions[key] for key in EVERY])
    assert abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.mean())


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_mixture_samples_its_fractions_from_best_and_latest(share):
    rewards = [9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0]  # the best three: 0, 2, 4; the latest two: 6, 7
    cfg = settings(keep="mixture", best_episodes=3, latest_episodes=2, best_fraction=share)
    counts, _ = shown(cfg, 3_000, rewards)
    expected = dict.fromkeys((0, 2, 4), share / 3) | dict.fromkeys((6, 7), (1 - share) / 2)
    assert 1e-3 < chance(counts, expected) < 1 - 1e-3


def test_an_episode_may_be_among_the_best_and_the_latest():
    cfg = settings(keep="mixture", best_episodes=2, latest_episodes=2, best_fraction=0.5)
    counts, _ = shown(cfg, 3_000, [5.0, 1.0, 2.0, 9.0])
    assert 1e-3 < chance(counts, {0: 0.25, 2: 0.25, 3: 0.5}) < 1 - 1e-3
    few, _ = shown(
        changed(cfg, best_episodes=100, latest_episodes=100), 2_000, [5.0, 1.0, 2.0, 9.0]
    )  # fewer episodes than the limits
    assert 1e-3 < chance(few, dict.fromkeys(range(4), 1.0)) < 1 - 1e-3


# -- rate limiter ---------------------------------------------------------------------------------------------------


def drain(replay: EpisodeReplay, most: int = 100_000) -> int:
    count = 0
    while count < most and replay.sample() is not None:
        count += 1
    return count


@pytest.mark.parametrize("per", ["step", "episode"])
@pytest.mark.parametrize("ratio", [0.05, 0.25, 1.0, 2.5])
def test_updates_keep_their_ratio_to_steps_or_episodes(ratio, per):
    script = Script(201)
    cfg = settings(updates_per_step=ratio, update_unit=per, warmup=4, batch_size=1)
    replay, naive, given_out = build(cfg), Naive(cfg), 0
    for t in script.trajectories():
        replay.add(t)
        naive.add(script, int(t.version[0]), 5)
        given_out += drain(replay)
        played = naive.steps if per == "step" else naive.arrived
        assert replay.rate_limiter.steps == played
        if naive.arrived < 4:
            assert given_out == 0
        else:
            assert 0 <= ratio * played - given_out < 1
    assert given_out > 2
    assert replay.metrics()["updates_per_step"] == pytest.approx(ratio, abs=1 / played)


@pytest.mark.parametrize("other", [0.125, 0.5])
def test_another_ratio_applies_from_now_on(other):
    """The ratio changes with the number of learners, each of which takes a batch."""
    cfg = settings(updates_per_step=0.25, warmup=4, batch_size=1)
    replay = fill(build(cfg), Script(201))
    drain(replay)
    resumed = build(changed(cfg, updates_per_step=other))
    resumed.load_state_dict(through_a_file(replay.state_dict()))
    assert abs(resumed.rate_limiter.due) < 2  # less than one was due, at a ratio of at most half of this


def test_warmup_counts_evicted_episodes_too():
    cfg = settings(streams=1, warmup=4, capacity=1, updates_per_step=1.0)
    script, replay, sampled = Script.of([3, 3, 3, 3, 3]), build(cfg), []
    for t in script.trajectories((4,)):  # one episode each
        replay.add(t)
        sampled.append(drain(replay))
    assert sampled == [0, 0, 0, 12, 3]


@pytest.mark.parametrize("per", ["step", "episode"])
@pytest.mark.parametrize("ratio", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("refresh", [None, CriticRefresh(2), CriticRefresh(3, store=False)])
def test_actors_never_pause_without_something_to_sample(refresh, ratio, per):
    """While actors pause there is always a batch, and after it they continue."""
    cfg = settings(updates_per_step=ratio, update_unit=per, warmup=6, critic_refresh=refresh, capacity=5)
    replay, waited = build(cfg), 0
    for t in Script(101).trajectories():
        for _ in range(10_000):
            if not replay.full:
                break
            answer(replay, next_batch(replay))
            waited += 1
        assert not replay.full
        replay.add(t)
    assert waited > 0


# -- the critic's labels ---------------------------------------------------------------------------------------------


def raw_label(number: int, k: Any) -> Any:
    """A label that identifies the transition."""
    return (37 * number + 11 * k) % 23 - 8.0


def answer(replay: EpisodeReplay, batch: Batch) -> list[int] | None:
    """Answer a critic refresh with labels. Returns the numbers of its episodes; None: the batch is a sample."""
    if not batch.is_critic_refresh:
        return None
    assert batch.keys is not None
    numbers = batch.keys.tolist()
    steps, columns = batch.trajectory.action.shape
    labels = torch.zeros(2, steps - 1, columns)
    for b, number in enumerate(numbers):
        raw = raw_label(number, np.arange(steps - 1))
        labels[:, :, b] = torch.from_numpy(np.stack([100 + raw, raw])).float()
    if labels_of(replay).cfg.store:
        replay.set_value_targets(batch.keys, ValueTargets(*labels))
    return numbers


def expected_labels(replay: EpisodeReplay) -> dict[tuple[int, int], float]:
    """(episode, transition) -> label, standardised over all labelled episodes."""
    held = replay.table.select(np.isin(replay.table.number, labels_of(replay).labelled))
    raw = {
        (int(n), t): raw_label(int(n), t)
        for n, transitions in zip(held.number, held.length, strict=True)
        for t in range(transitions)
    }
    mean, std = np.mean(list(raw.values())), np.std(list(raw.values()))
    clip = labels_of(replay).cfg.clip
    return {key: float(np.clip((x - mean) / std, -clip, clip)) for key, x in raw.items()}


def stored_labels(replay: EpisodeReplay) -> dict[tuple[int, int], tuple[float, float]]:
    held = replay.table.select(np.isin(replay.table.number, labels_of(replay).labelled))
    return {
        (int(n), t): tuple(labels_of(replay).values[first + t, :2].tolist())
        for n, first, transitions in zip(held.number, held.start, held.length, strict=True)
        for t in range(transitions)
    }


def numbers_by_start(replay: EpisodeReplay) -> dict[tuple[int, int], int]:
    """(stream, time) at which an episode begins -> its number."""
    where = replay.storage.arrays[0].obs[replay.table.start].long().tolist()
    return {(stream, index): n for (stream, index), n in zip(where, replay.table.number.tolist(), strict=True)}


def assert_labels(replay: EpisodeReplay) -> None:
    """Targets are stored as given, labels standardised, each with its transition."""
    found, labels = stored_labels(replay), expected_labels(replay)
    assert found.keys() == labels.keys()
    for key, (target, label) in found.items():
        assert target == 100 + raw_label(*key)
        assert label == pytest.approx(labels[key], rel=0.02, abs=0.01)  # sample or population deviation


def refresh_all(replay: EpisodeReplay) -> tuple[list[list[int]], Batch]:
    """Answer all parts of a refresh. Returns the numbers of each part and the first sample after them."""
    parts = []
    while True:
        batch = next_batch(replay)
        numbers = answer(replay, batch)
        if numbers is None:
            return parts, batch
        parts.append(numbers)


@pytest.mark.parametrize("max_steps", [1, 60, 200, 100_000])
def test_a_refresh_gives_every_episode_once_in_parts_that_fit(max_steps, monkeypatch):
    monkeypatch.setattr(critic_refresh, "MAX_STEPS", max_steps)
    script, cfg = Script(301), settings(critic_refresh=CriticRefresh(3), capacity=30)
    replay, naive = build(cfg), Naive(cfg)
    for t in script.trajectories():
        replay.add(t)
        naive.add(script, int(t.version[0]), 5)
    numbers: list[int] = []
    parts = 0
    while True:
        batch = next_batch(replay)
        if not batch.is_critic_refresh:
            break
        t = batch.trajectory
        parts += 1
        assert batch.keys is not None
        numbers += batch.keys.tolist()
        assert t.action.numel() <= max(max_steps, len(t.action))  # unless it is a single episode
        for b, key in enumerate(batch.keys.tolist()):
            episode = naive.kept[replay.table.number.tolist().index(key)]
            inside = torch.arange(len(t.action)).clamp(max=episode.length)
            step, action = script.at(episode.start + inside, torch.tensor(episode.stream))
            step.is_first[episode.length + 1 :] = True
            for mine, theirs in zip((*t.step, t.action), (*step, action), strict=True):
                assert torch.equal(mine[:, b], theirs)
        assert len(t.action) == max(naive.kept[replay.table.number.tolist().index(k)].length for k in batch.keys) + 1
        answer(replay, batch)
    assert sorted(numbers) == replay.table.number.tolist()
    assert (parts == 30, parts == 1) == (max_steps == 1, max_steps == 100_000)
    assert_labels(replay)


def test_refreshes_come_once_per_period_and_are_no_updates():
    replay = fill(build(settings(critic_refresh=CriticRefresh(4), updates_per_step=0.05)), Script(301))
    kinds = ""
    while (batch := replay.sample()) is not None:
        kinds += "s" if answer(replay, batch) is not None else "u"
    assert kinds.startswith("suuuusuuuus")
    assert kinds.count("u") == replay.rate_limiter.batches == int(0.05 * replay.rate_limiter.steps)


def test_samples_carry_the_labels_of_their_transitions(monkeypatch):
    monkeypatch.setattr(critic_refresh, "MAX_STEPS", 80)
    script, cfg = (
        Script(1_201),
        settings(critic_refresh=CriticRefresh(5), capacity=15, sequence_length=4, burn_in=2, updates_per_step=0.05),
    )
    replay, seen, refreshes, moved = build(cfg), 0, 0, 0
    for t in script.trajectories((10,)):
        used = replay.storage.used
        replay.add(t)
        moved += replay.storage.used < used
        while (batch := replay.sample()) is not None:
            if answer(replay, batch) is not None:
                refreshes += 1
                if not labels_of(replay).pending:
                    assert_labels(replay)
                    labels = expected_labels(replay)
                continue
            t = batch.trajectory
            numbers = numbers_by_start(replay)
            for b, (stream, beginning, start) in enumerate(places(batch, script, 2)[:3]):
                key = numbers[stream, beginning]
                assert key in labels_of(replay).labelled
                for k in t.aux["valid"][:, b].nonzero().flatten().tolist():
                    assert t.aux["value_target"][k, b] == 100 + raw_label(key, start + k)
                    assert t.aux["advantage"][k, b].item() == pytest.approx(labels[key, start + k], rel=0.02, abs=0.01)
                    seen += 1
    assert seen > 100 and refreshes > 10
    assert moved > 2  # the storage was compacted meanwhile


def test_labels_are_clipped():
    replay = fill(build(settings(critic_refresh=CriticRefresh(3, clip=0.5), capacity=30)), Script(301))
    refresh_all(replay)
    labels = np.array([label for _, label in stored_labels(replay).values()])
    assert abs(labels).max() == 0.5 and (abs(labels) < 0.5).any()
    assert_labels(replay)


def test_only_labelled_episodes_are_sampled():
    script, cfg = Script(601, seed=2), settings(critic_refresh=CriticRefresh(1_000), capacity=25)
    replay, parts = build(cfg), list(script.trajectories((20,)))
    for t in parts[:10]:
        replay.add(t)
    refresh_all(replay)
    old = set(replay.table.number.tolist())
    for t in parts[10:12]:
        replay.add(t)
    fresh = set(replay.table.number.tolist())
    assert fresh - old and old - fresh and old & fresh
    assert set(labels_of(replay).labelled.tolist()) == old & fresh
    numbers = numbers_by_start(replay)
    sampled = {numbers[s, e] for _ in range(40) for s, e, _ in places(next_batch(replay), script, 0)}
    assert sampled == old & fresh


def test_the_command_distribution_is_given_the_labels_held():
    seen_by_builder: list[Any] = []

    def listen(held: EpisodeTable, labels: np.ndarray) -> CommandDistribution:
        seen_by_builder.append((held.number.tolist(), labels.copy()))
        return command_distribution(np.array([labels.max() if len(labels) else 0.0]))

    replay = fill(
        build(settings(critic_refresh=CriticRefresh(50), capacity=25, command_distribution=listen)), Script(301)
    )
    _, batch = refresh_all(replay)
    numbers, labels = seen_by_builder[-1]
    assert numbers == labels_of(replay).labelled.tolist()
    assert labels.tolist() == [label for _, label in stored_labels(replay).values()]
    assert batch.info["pool"].item() == pytest.approx(labels.max())
    next_batch(replay)
    assert len(seen_by_builder) == 1  # cached
    replay.add(Script(301, 0.9).trajectory(0, 20))
    next_batch(replay)
    assert len(seen_by_builder) == 2 and set(seen_by_builder[1][0]) < set(numbers)


def test_the_command_distribution_may_be_given_returns_to_go():
    script, seen_by_builder = Script(301), []

    def listen(held: EpisodeTable, reached: np.ndarray) -> CommandDistribution:
        seen_by_builder.append(np.sort(reached))
        return command_distribution(np.array([0.0]))

    cfg = settings(command_distribution=listen, needs_returns_to_go=True)
    next_batch(fill(build(cfg), script))
    naive = Naive(cfg)
    for start in range(0, script.length - 5, 5):
        naive.add(script, start, 5)
    expected = sorted(e.return_to_go(k, cfg.discount) for e in naive.kept for k in range(e.length))
    np.testing.assert_allclose(seen_by_builder[0], expected, rtol=1e-5, atol=1e-5)
    next_batch(fill(build(changed(cfg, needs_returns_to_go=False)), script))
    assert not len(seen_by_builder[1])  # not needed, so not computed


def test_labels_that_come_too_late_are_dropped(monkeypatch):
    """Episodes are evicted before the critic answers, or before they are given to it."""
    monkeypatch.setattr(critic_refresh, "MAX_STEPS", 100)
    script, cfg = Script(601), settings(critic_refresh=CriticRefresh(1_000), capacity=25)
    replay, parts = build(cfg), list(script.trajectories((20,)))
    for t in parts[:12]:
        replay.add(t)
    first = next_batch(replay)
    waiting = {int(n) for part in labels_of(replay).pending for n in part}
    assert waiting
    for t in parts[12:14]:
        replay.add(t)
    evicted = set(first.keys.tolist()) - set(replay.table.number.tolist())  # type: ignore
    assert evicted
    answer(replay, first)
    assert set(labels_of(replay).labelled.tolist()) == set(first.keys.tolist()) - evicted  # type: ignore
    shown_later, _ = refresh_all(replay)
    assert {n for part in shown_later for n in part} == waiting & set(replay.table.number.tolist())
    assert_labels(replay)


def test_labels_are_standardised_even_if_the_last_part_is_evicted(monkeypatch):
    monkeypatch.setattr(critic_refresh, "MAX_STEPS", 30)
    lengths = [9, 8, 2, 2, 2]  # the oldest are the longest, so they are given out last
    script, cfg = Script.of([*lengths, 2, 2, 2]), settings(streams=1, critic_refresh=CriticRefresh(1_000), capacity=5)
    replay = build(cfg)
    steps = sum(lengths) + len(lengths)
    replay.add(script.trajectory(0, steps))
    answer(replay, next_batch(replay))
    assert labels_of(replay).pending and {int(n) for part in labels_of(replay).pending for n in part} == {0, 1}
    replay.add(script.trajectory(steps, 6))
    assert replay.table.number.tolist() == [2, 3, 4, 5, 6]
    batch = next_batch(replay)
    assert not batch.is_critic_refresh
    assert_labels(replay)


@pytest.mark.parametrize("window", [1, 4, None])
def test_a_refresh_is_due_when_no_labelled_episode_is_left(window):
    """Short episodes are evicted faster than the critic is refreshed."""
    script, cfg = (
        Script(601),
        settings(critic_refresh=CriticRefresh(1_000), capacity=10, sequence_length=window, batch_size=16),
    )
    replay, parts = build(cfg), list(script.trajectories((40,)))
    for t in parts[:4]:
        replay.add(t)
    refresh_all(replay)
    before = set(labels_of(replay).labelled.tolist())
    for t in parts[4:10]:
        replay.add(t)
    assert before and not before & set(replay.table.number.tolist())
    shown_now, _ = refresh_all(replay)
    assert {n for part in shown_now for n in part} == set(replay.table.number.tolist())


def test_parts_of_a_refresh_may_be_answered_late(monkeypatch):
    """A remote learner requests the next part before it has answered the last one."""
    monkeypatch.setattr(critic_refresh, "MAX_STEPS", 60)
    replay = fill(build(settings(critic_refresh=CriticRefresh(1_000), capacity=30)), Script(301))
    given_out = [next_batch(replay)]
    while labels_of(replay).pending:
        given_out.append(next_batch(replay))
        answer(replay, given_out[-2])
    assert len(given_out) > 2
    answer(replay, given_out[-1])
    assert_labels(replay)


def test_the_label_of_a_single_transition_is_zero():
    replay = fill(build(settings(streams=1, critic_refresh=CriticRefresh(10), capacity=1)), Script.of([1]), (1,))
    refresh_all(replay)
    assert list(stored_labels(replay).values()) == [(100 + raw_label(0, 0), 0.0)]


def test_a_joint_critic_is_given_ends_of_a_few_episodes():
    script, cfg = Script.of(LENGTHS), settings(streams=1, critic_refresh=CriticRefresh(1, store=False, episodes=5))
    replay = fill(build(cfg), script, (1,))
    begins = script.is_first[:-1, 0].nonzero().flatten().tolist()
    counts: Counter = Counter()
    for _ in range(200):
        batch = next_batch(replay)
        assert batch.is_critic_refresh and batch.keys is not None
        t = batch.trajectory
        assert t.action.shape[1] == len(batch.keys) == 5
        for b, number in enumerate(batch.keys.tolist()):
            index, end = int(t.step.obs[0, b, 1]), begins[number] + LENGTHS[number]
            counts[number, index - begins[number]] += 1
            assert begins[number] <= index < end
            inside = torch.arange(index, index + len(t.action)).clamp(max=end)
            step, _ = script.at(inside, torch.tensor(0))
            step.is_first[end - index + 1 :] = True
            for mine, theirs in zip(t.step, step, strict=True):
                assert torch.equal(mine[:, b], theirs)
        assert len(t.action) - 1 == max(int((~t.step.is_first[1:, b]).sum()) for b in range(5))
        assert not next_batch(replay).is_critic_refresh  # one update, and the next refresh is due
    assert 1e-3 < chance(counts, EVERY) < 1 - 1e-3
    assert not len(labels_of(replay).values) and not len(labels_of(replay).labelled)


# -- checkpoints -----------------------------------------------------------------------------------------------------


SAVED: dict[str, dict[str, Any]] = {
    "best": {"keep": "best"},
    "recent": {"keep": "recent", "sample_by": "transitions", "sequence_length": None},
    "mixture": {"keep": "mixture", "sequence_length": 4, "burn_in": 2, "max_transitions": 90},
    "per episode": {"update_unit": "episode", "updates_per_step": 3.0},
    "start-state baseline": {"keep": "best", "start_state_baseline": True},
    "critic": {"critic_refresh": CriticRefresh(3), "sequence_length": 4},
    "joint critic": {"critic_refresh": CriticRefresh(3, store=False)},
}


def learn(replay: EpisodeReplay) -> Any:
    """Sample, and answer a critic refresh."""
    batch = replay.sample()
    if batch is not None:
        answer(replay, batch)
    return as_bits(batch)


@pytest.mark.parametrize("changes", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("saved_after", [0, 5, 90])
def test_a_restored_replay_continues_bit_for_bit(changes, saved_after, monkeypatch):
    monkeypatch.setattr(critic_refresh, "MAX_STEPS", 60)
    cfg = settings(**({"updates_per_step": 0.1, "warmup": 3} | changes))
    parts = list(Script(801).trajectories((7,)))
    replay = build(cfg)
    for t in parts[:saved_after]:
        replay.add(t)
        for _ in range(2):
            learn(replay)
    before = through_a_file(replay.state_dict())
    restored = build(cfg)
    restored.load_state_dict(before)
    sampled = 0
    for t in parts[saved_after : saved_after + 20]:
        for _ in range(4):
            bits = learn(replay)
            assert bits == learn(restored)
            sampled += bits is not None
        for one in (replay, restored):
            one.add(t)
        assert replay.full == restored.full and replay.metrics() == restored.metrics()
        for mine, theirs in zip(replay.table._replace(start=replay.table.number), restored.table, strict=True):
            assert mine is replay.table.number or mine.tolist() == theirs.tolist()
    assert sampled > 10
    fresh = build(cfg)  # the loaded state does not share memory with the replay
    fresh.load_state_dict(before)
    assert as_bits_of(fresh.state_dict()) == as_bits_of(before)


def as_bits_of(state: Any) -> Any:
    return tree.map(lambda x: x.tolist() if isinstance(x, Tensor) else x, state)


def test_an_unfinished_refresh_continues_after_a_restore(monkeypatch):
    monkeypatch.setattr(critic_refresh, "MAX_STEPS", 60)
    cfg = settings(critic_refresh=CriticRefresh(3), capacity=30)
    replay, restored = fill(build(cfg), Script(301)), build(cfg)
    answer(replay, next_batch(replay))
    assert labels_of(replay).pending
    restored.load_state_dict(through_a_file(replay.state_dict()))
    for _ in range(20):
        assert learn(replay) == learn(restored)
    assert stored_labels(replay) == stored_labels(restored)


def test_another_number_of_streams_loses_unfinished_episodes_alone():
    cfg, script = settings(updates_per_step=0.1, sequence_length=4), Script(301)
    replay = fill(build(cfg), script)
    drain(replay, 7)
    wider = build(changed(cfg, streams=5))
    wider.load_state_dict(through_a_file(replay.state_dict()))
    assert wider.table.number.tolist() == replay.table.number.tolist()
    assert (wider.rate_limiter.steps, wider.rate_limiter.batches) == (
        replay.rate_limiter.steps,
        replay.rate_limiter.batches,
    )
    assert wider.unfinished == [[]] * 5
    assert as_bits(wider.sample()) == as_bits(replay.sample())
    other = Script(301, streams=5, seed=3)
    naive = Naive(cfg)
    for t in other.trajectories():
        wider.add(t)
        naive.add(other, int(t.version[0]), 5)
    naive.arrived = wider.arrived
    assert_same(wider, naive)
    check(next_batch(wider), other, cfg, naive)


def test_unfinished_episodes_are_saved():
    cfg, script = settings(), Script(60, 0.0)
    script.is_first[33] = True
    replay, restored = build(cfg), build(cfg)
    replay.add(script.trajectory(0, 12))
    replay.add(script.trajectory(12, 12))
    restored.load_state_dict(through_a_file(replay.state_dict()))
    restored.add(script.trajectory(24, 12))
    assert restored.table.length.tolist() == [32] * STREAMS
    naive = Naive(cfg)
    naive.add(script, 0, 36)
    check(next_batch(restored), script, cfg, naive, (12,))


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_size": 0}, r"algo\.replay\.batch-size=0 must be at least 1"),
        (
            {"sequence_length": 0},
            r"algo\.replay\.sequence-length=0 must lie between 1 and algo\.replay\.batch-size=24, or .*",
        ),
        (
            {"sequence_length": 25},
            r"algo\.replay\.sequence-length=25 must lie between 1 and algo\.replay\.batch-size=24, or .*",
        ),
        ({"length_penalty": -0.1}, r"algo\.replay\.length-penalty=-0\.1 must be at least 0"),
        ({"updates_per_step": 0.0}, r"algo\.replay\.updates-per-step=0\.0 must be positive"),
        ({"updates_per_step": -1.0}, r"algo\.replay\.updates-per-step=-1\.0 must be positive"),
        ({"capacity": 0}, r"algo\.replay\.capacity=0 must be at least 1"),
        ({"max_transitions": 0}, r"algo\.replay\.max-transitions=0 must be at least 1"),
        ({"warmup": 0}, r"algo\.replay\.warmup=0 must be at least 1"),
        ({"best_fraction": -0.1}, r"algo\.replay\.best-fraction=-0\.1 must lie in \[0, 1\]"),
        ({"best_fraction": 1.1}, r"algo\.replay\.best-fraction=1\.1 must lie in \[0, 1\]"),
        ({"best_episodes": 0}, r"algo\.replay\.best-episodes=0 must be at least 1"),
        ({"latest_episodes": 0}, r"algo\.replay\.latest-episodes=0 must be at least 1"),
    ],
)
def test_invalid_settings_are_refused_in_a_sentence(changes, sentence):
    with pytest.raises(UserError, match=f"^{sentence}$"):
        settings(**changes)


def test_the_start_state_baseline_refuses_images():
    with pytest.raises(
        UserError, match=r"algo\.replay\.start-state-baseline fits returns to first obs.*: Any has images"
    ):
        settings(start_state_baseline=True).build(0, IMAGES, MEMORY)
    settings(start_state_baseline=True).build(0, SPEC, MEMORY)


def test_a_replay_beyond_free_memory_is_refused(monkeypatch):
    monkeypatch.setattr("bestiary.config.machine.free_memory", lambda: 2**30)
    needed = 200 * 1_000 * step_bytes(IMAGES)
    message = rf"^algo\.replay\.capacity=200 needs {needed / 2**30:.1f} GiB of memory, of which 1\.0 are free"
    with pytest.raises(UserError, match=message):
        settings(capacity=200).build(0, IMAGES, MEMORY)
    with pytest.raises(UserError, match=r"needs 13\.\d GiB"):
        settings(max_transitions=2_000_000, capacity=10_000).build(0, IMAGES, MEMORY)
    settings(capacity=100).build(0, IMAGES, MEMORY)
    settings(capacity=200, max_transitions=50_000).build(0, IMAGES, MEMORY)  # limited in transitions
    settings(capacity=200).build(0, IMAGES._replace(horizon=None), MEMORY)  # unknown size
    monkeypatch.setattr("bestiary.config.machine.free_memory", lambda: None)
    settings(capacity=200).build(0, IMAGES, MEMORY)


def test_a_limit_that_is_never_reached_needs_no_memory(monkeypatch):
    monkeypatch.setattr("bestiary.config.machine.free_memory", lambda: 2**30)
    settings(capacity=10, max_transitions=10_000_000).build(0, IMAGES, MEMORY)
