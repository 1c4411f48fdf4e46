"""A replay of whole episodes, ranked by return: it keeps and samples the best, the latest, or a mixture of both."""
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary import tree
from bestiary.config.machine import check_memory
from bestiary.config.schema import Count, advanced
from bestiary.errors import UserError
from bestiary.ops.commands import CommandDistribution, Floats, returns_to_go, subtract_start_baseline, top_episodes
from bestiary.replay.base import step_bytes
from bestiary.replay.critic_refresh import CriticLabels, CriticRefresh
from bestiary.replay.episode_storage import (
    EpisodeStorage,
    EpisodeTable,
    Ints,
    concatenated_ranges,
    from_plain,
    sample_episodes,
    to_plain,
)
from bestiary.replay.rate_limiter import RateLimiter, SampledReplay
from bestiary.seeding import REPLAY, derive
from bestiary.types import Batch, Snapshot, Spec, State, Trajectory, ValueTargets, within_episode


@dataclass(frozen=True)
class Episodes:
    """A replay of whole episodes: which ones are kept and how they are sampled."""

    batch_size: int = 256
    """batch size in transitions (Srivastava et al. 2019: 768)"""
    capacity: Count = 1_000
    """replay capacity in episodes (Srivastava et al. 2019: 300 to 700)"""
    updates_per_step: float = 1 / 64
    """gradient updates per environment step, or per episode (see update-unit)"""
    warmup: int = 50
    """episodes collected with a uniformly random policy before the first update (Srivastava et al. 2019: 10 to 50)"""
    keep: Literal["best", "recent", "mixture"] = "mixture"
    """episodes that are kept and sampled: the best ever (UDRL), the most recent (RCP), or the most recent with a part
    of each batch from their best"""
    sample_by: Literal["episodes", "transitions"] = "episodes"
    """sampled uniformly: episodes, or transitions, so that an episode counts in proportion to its length"""
    best_episodes: int = 200
    """episodes that count as best in a mixture"""
    latest_episodes: int = 200
    """episodes that count as latest in a mixture"""
    best_fraction: float = 0.7
    """fraction of a batch that a mixture samples from its best episodes; the rest is from its latest"""
    start_state_baseline: bool = advanced(False)
    """rank and weigh episodes by return minus a linear fit on the first observation; for vector observations"""
    length_penalty: float = advanced(0.0)
    """points by which an episode's rank score is lower for each of its steps, so that quicker episodes are preferred"""
    sequence_length: int | None = advanced(None)
    """consecutive transitions per sample; None: 1, or whole episodes for agents with a recurrent core"""
    max_transitions: Count | None = advanced(None)
    """replay capacity in transitions, besides that in episodes; None: no limit"""
    update_unit: Literal["step", "episode"] = advanced("step")
    """what updates-per-step counts: environment steps or episodes"""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"algo.replay.batch-size={self.batch_size} must be at least 1")
        if self.sequence_length is not None and not 1 <= self.sequence_length <= self.batch_size:
            raise UserError(
                f"algo.replay.sequence-length={self.sequence_length} must lie between 1 and "
                f"algo.replay.batch-size={self.batch_size}, or be None"
            )
        if self.updates_per_step <= 0:
            raise UserError(f"algo.replay.updates-per-step={self.updates_per_step} must be positive")
        if not self.length_penalty >= 0:
            raise UserError(f"algo.replay.length-penalty={self.length_penalty} must be at least 0")
        if not 0 <= self.best_fraction <= 1:
            raise UserError(f"algo.replay.best-fraction={self.best_fraction} must lie in [0, 1]")
        for name in ("capacity", "max_transitions", "warmup", "best_episodes", "latest_episodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"algo.replay.{name.replace('_', '-')}={value} must be at least 1")


class EpisodeReplay(SampledReplay):
    """Episodes are stored once, as they were collected; returns-to-go and horizons are computed when they are sampled.

    With a critic, its value targets and advantages are stored with the transitions, and only episodes that have them
    are sampled.
    """

    aligned = False

    def __init__(self, builder: "EpisodesBuilder", seed: int, recurrent: bool) -> None:
        self.builder, self.cfg = builder, builder.cfg
        cfg = self.cfg
        self.seed = derive(seed, REPLAY)
        self.sequence_length = 1 if cfg.sequence_length is None and not recurrent else cfg.sequence_length
        self.rate_limiter = RateLimiter(cfg.updates_per_step, 0)
        self.table = EpisodeTable.empty()
        self.storage = EpisodeStorage()
        self.labels = None if builder.critic_refresh is None else CriticLabels(builder.critic_refresh)
        self.start_obs: Floats = np.zeros((0, 0))  # first observations, where the rank score depends on them
        self.arrived = 0  # episodes, ever
        self.unfinished: list[list[Any]] = [[] for _ in range(builder.streams)]  # parts of each stream's episode
        self._distribution: CommandDistribution | None = None

    # -- add ---------------------------------------------------------------------------------------------------------

    def add(self, trajectory: Trajectory, stream: int = 0) -> None:
        t = tree.map(lambda x: x.cpu(), trajectory._replace(state=(), aux={}))
        steps = len(t.action) - 1
        version = t.version.expand(steps + 1, -1)
        arrays = (t.step, t.action, version)
        is_first = t.step.is_first.numpy()
        finished = 0
        for column in range(is_first.shape[1]):
            at = stream + column
            if is_first[0, column]:  # after an interruption other episodes begin here
                self.unfinished[at] = []
            start = 0
            for end in (*np.flatnonzero(is_first[1:, column]).tolist(), None):
                stop = steps if end is None else end + 1
                part = tree.map(lambda x, a=start, b=stop, s=column: x[a:b, s], arrays)
                if stop > start:
                    self.unfinished[at].append(part)
                if end is not None:
                    finished += self._finish_episode(at)
                start = stop
        transitions = int(within_episode(t.step.is_first).sum())
        self.rate_limiter.add(finished if self.cfg.update_unit == "episode" else transitions)
        if finished:
            self._rank_and_evict()

    def _finish_episode(self, stream: int) -> int:
        """Store the episode that has ended in a stream. Returns 0 for one without transitions or without its start."""
        parts, self.unfinished[stream] = self.unfinished[stream], []
        episode = tree.cat(parts)
        step, *_ = episode
        length = len(step.reward) - 1
        if length < 1 or not step.is_first[0]:
            return 0
        reward = step.reward.numpy()
        zero = np.zeros(1, np.int64)
        discounted = returns_to_go(reward, zero, np.array([length]), zero, 1, self.builder.discount)[0, 0]
        episode_return = float(reward[1:].sum(dtype=np.float64))
        truncated = not bool(step.is_terminal[-1])
        start = self.storage.write(episode, self._compact)
        self.table = self.table.append(
            self.arrived, start, length, episode_return, discounted, truncated, episode_return
        )
        self.arrived += 1
        if self.cfg.start_state_baseline:
            obs = step.obs[0].numpy().astype(np.float64)[None]
            self.start_obs = obs if not len(self.start_obs) else np.concatenate([self.start_obs, obs])
        return 1

    def _compact(self, count: int) -> None:
        """Move the time steps of held episodes together, and enlarge the storage until at least half of it is free."""
        kept = concatenated_ranges(self.table.start, self.table.length + 1)
        size = self.storage.size_for(len(kept) + count)
        self.storage.compact(kept, size)
        if self.labels is not None:
            self.labels.compact(kept, size)
        ends = np.cumsum(self.table.length + 1)
        self.table = self.table._replace(start=ends - self.table.length - 1)

    def _rank_and_evict(self) -> None:
        """Compute the rank scores of all episodes, and drop those that do not fit."""
        cfg, table = self.cfg, self.table
        score = table.episode_return - cfg.length_penalty * table.length
        if cfg.start_state_baseline and len(table.number) > self.start_obs.shape[1]:
            score = subtract_start_baseline(score, self.start_obs)
        order = top_episodes(score, len(score)) if cfg.keep == "best" else np.arange(len(score))[::-1]
        kept = order[: cfg.capacity]
        if cfg.max_transitions is not None:  # the first that does not fit goes, and all after it
            fits = np.cumsum(table.length[kept]) <= cfg.max_transitions
            fits[0] = True
            kept = kept[: len(fits) if fits.all() else int(np.argmin(fits))]
        kept = np.sort(kept)
        self.table = table.select(kept)._replace(rank_score=score[kept])
        if cfg.start_state_baseline:
            self.start_obs = self.start_obs[kept]
        if self.labels is not None:
            self.labels.keep(self.table)
        self._distribution = None

    # -- sample ------------------------------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        return self.arrived < max(1, self.cfg.warmup)

    def sample(self) -> Batch | None:
        if self.rate_limiter.due < 1 or self.is_empty():
            return None
        refresh = self._sample_for_critic()
        if refresh is not None:
            return refresh
        rng = self.next_rng()
        assert rng is not None
        return self._sample_sequences(rng)

    def _sample_for_critic(self) -> Batch | None:
        """Episodes for which the critic is to compute targets, if a refresh is due or under way."""
        labels, updates = self.labels, self.rate_limiter.batches
        if labels is None:
            return None
        due = labels.is_due(updates)
        if due:
            labels.begin(updates, self.table)
        if labels.cfg.store:
            episodes = labels.next_part(self.table)
            if episodes is None and labels.is_due(updates):  # all labelled episodes have gone meanwhile
                return self._sample_for_critic()
            first = None if episodes is None else np.zeros_like(episodes.start)
        else:
            episodes, first = self._sample_ends(labels.cfg.episodes) if due else (None, None)
        if episodes is None or first is None:
            return None
        t = self.storage.gather(episodes, first, int((episodes.length - first).max()) + 1)
        return Batch(t, keys=torch.from_numpy(episodes.number), info={"critic_refresh": torch.ones(())})

    def _sample_ends(self, count: int) -> tuple[EpisodeTable, Ints]:
        """A few episodes, each from a random transition on, so that all transitions are equally likely starts."""
        rng = np.random.Generator(np.random.Philox(key=[self.seed, (1 << 40) + self.rate_limiter.batches]))
        everything = np.arange(len(self.table.number))
        episodes = self.table.select(sample_episodes(self.table, everything, rng, count, "transitions"))
        return episodes, (rng.random(count) * episodes.length).astype(np.int64)

    def _sampleable(self) -> EpisodeTable:
        return self.table if self.labels is None else self.labels.labelled_episodes(self.table)

    def _choose(self, table: EpisodeTable, rng: np.random.Generator, count: int) -> Ints:
        """Indices of sampled episodes."""
        cfg = self.cfg
        # of whole episodes all transitions are shown: sampled by transitions, long ones would count twice
        whole = self.sequence_length is None
        by, extra = ("episodes", 0) if whole else (cfg.sample_by, (self.sequence_length or 1) - 1)
        if cfg.keep == "mixture":
            best = top_episodes(table.rank_score, cfg.best_episodes)
            latest = np.arange(max(0, len(table.number) - cfg.latest_episodes), len(table.number))
            from_best = rng.random(count) < cfg.best_fraction
            samples = (sample_episodes(table, among, rng, count, by, extra) for among in (best, latest))
            return np.where(from_best, *samples)
        return sample_episodes(table, np.arange(len(table.number)), rng, count, by, extra)

    def _sample_sequences(self, rng: np.random.Generator) -> Batch:
        cfg, burn_in, discount, table = self.cfg, self.builder.burn_in, self.builder.discount, self._sampleable()
        if self.sequence_length is None:
            count = max(1, round(cfg.batch_size / table.length.mean()))
            episodes = table.select(self._choose(table, rng, count))
            window, first = int(episodes.length.max()), np.zeros(count, np.int64)
        else:
            window, count = self.sequence_length, max(1, cfg.batch_size // self.sequence_length)
            episodes = table.select(self._choose(table, rng, count))
            # sequences may begin before the episode, so that every transition is equally likely to be in one
            first = (rng.random(count) * (episodes.length + window - 1)).astype(np.int64) - (window - 1)
        t = self.storage.gather(episodes, first - burn_in, burn_in + window)
        number = first + np.arange(window)[:, None]  # of each transition in its episode
        valid = (number >= 0) & (number < episodes.length)
        to_go = returns_to_go(self.storage.reward, episodes.start, episodes.length, first, window, discount)
        numbers = {
            "return_to_go": to_go,
            "horizon": np.where(valid, episodes.length - number, 1),
            "episode_return": np.broadcast_to(episodes.episode_return, valid.shape),
            "rank_score": np.broadcast_to(episodes.rank_score, valid.shape),
        }
        aux = {"valid": torch.from_numpy(valid)}
        aux |= {name: torch.from_numpy(np.array(x, np.float32)) for name, x in numbers.items()}
        if self.labels is not None and self.labels.cfg.store:
            target, advantage = self.labels.at(episodes.start + np.clip(number, 0, episodes.length))
            aux |= {"value_target": target, "advantage": advantage}
        return Batch(t._replace(aux=aux), info=self.command_distribution()._asdict())

    def command_distribution(self) -> CommandDistribution:
        """The distribution of commands that the algorithm derives from the episodes held."""
        if self._distribution is None:
            table = self._sampleable()
            self._distribution = self.builder.command_distribution(table, self._labels_of_transitions(table))
        return self._distribution

    def _labels_of_transitions(self, table: EpisodeTable) -> NDArray[Any]:
        """Of all transitions: the critic's advantages, or returns-to-go; empty where neither is used."""
        if self.labels is not None and len(self.labels.values):
            return self.labels.advantages(table)
        if not self.builder.needs_returns_to_go or not len(table.number):
            return np.zeros(0)
        longest, first = int(table.length.max()), np.zeros_like(table.start)
        to_go = returns_to_go(self.storage.reward, table.start, table.length, first, longest, self.builder.discount)
        return to_go[np.arange(longest)[:, None] < table.length]

    # -- the learner's answers ---------------------------------------------------------------------------------------

    def update_priorities(self, keys: Tensor, priorities: Tensor) -> None:
        raise AssertionError("a replay of episodes has no priorities")

    def set_value_targets(self, keys: Tensor, targets: ValueTargets) -> None:
        assert self.labels is not None
        self.labels.store(keys, targets, self.table, self.storage.size)
        self._distribution = None

    # -- metrics and checkpoints -------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        return self.storage.bytes

    def metrics(self) -> dict[str, float]:
        table = self.table
        return self.rate_limiter.metrics() | {
            "replay_episodes": len(table.number),
            "replay_steps": int((table.length + 1).sum()),
            "replay_return": float(table.episode_return.mean()) if len(table.number) else 0.0,
            "replay_length": float(table.length.mean()) if len(table.number) else 0.0,
        }

    def state_dict(self) -> Snapshot:  # keys as in checkpoints of 0.1
        used = self.storage.used
        state: Snapshot = self.rate_limiter.state_dict() | {
            "streams": self.builder.streams,
            "open": [[tree.map(torch.clone, to_plain(part)) for part in parts] for parts in self.unfinished],
            "held": [torch.from_numpy(column) for column in self.table],
            "begins": torch.from_numpy(self.start_obs),
            "arrived": self.arrived,
            "used": used,
        }
        if self.storage.arrays is not None:
            state["rows"] = to_plain(tree.map(lambda x: x[:used].clone(), self.storage.arrays))
        return state | ({} if self.labels is None else self.labels.state_dict(used))

    def load_state_dict(self, state: Snapshot) -> None:
        self.rate_limiter.load_state_dict(state)
        self.table = EpisodeTable(*(column.clone().numpy() for column in state["held"]))
        self.start_obs = state["begins"].clone().numpy()
        self.arrived, self.storage.used = state["arrived"], state["used"]
        if "rows" in state:
            self.storage.arrays = tree.map(torch.clone, from_plain(state["rows"]))
        if self.labels is not None:
            self.labels.load_state_dict(state)
        if state["streams"] == self.builder.streams:  # else the unfinished episodes are lost
            self.unfinished = [[tree.map(torch.clone, from_plain(part)) for part in parts] for parts in state["open"]]
        else:
            self.rate_limiter.last_added = 0
        self._distribution = None


@dataclass(frozen=True)
class EpisodesBuilder:
    """The replay's settings and what the algorithm decides."""

    cfg: Episodes
    streams: int
    discount: float
    burn_in: int  # time steps before a sequence that only refresh recurrent state or fill a frame stack
    command_distribution: Callable[[EpisodeTable, NDArray[Any]], CommandDistribution]  # of episodes and their labels
    needs_returns_to_go: bool = False  # the distribution depends on the returns-to-go of all transitions
    critic_refresh: CriticRefresh | None = None
    leaves_before_core: int = 2  # of an agent's state: the command and the inverse temperature

    def share(self, parts: int, learners: int = 1) -> Self:
        names = ("capacity", "best_episodes", "latest_episodes", "warmup", "max_transitions")
        limits = {name: getattr(self.cfg, name) for name in names}
        divided = {name: None if limit is None else max(1, limit // parts) for name, limit in limits.items()}
        return replace(self, cfg=replace(self.cfg, updates_per_step=self.cfg.updates_per_step * learners, **divided))

    def nbytes(self, spec: Spec, unroll: int = 0) -> int:
        limits = (self.cfg.max_transitions, None if spec.horizon is None else self.cfg.capacity * spec.horizon)
        return min((limit for limit in limits if limit is not None), default=0) * step_bytes(spec)

    def build(self, seed: int, spec: Spec, state: State) -> EpisodeReplay:
        if self.cfg.start_state_baseline and spec.is_image:
            raise UserError(
                "algo.replay.start-state-baseline fits returns to first observations, which must be vectors: "
                f"{spec.name} has images"
            )
        check_memory(self.nbytes(spec), self.cfg.capacity)
        core_state = state[self.leaves_before_core :]
        return EpisodeReplay(self, seed, recurrent=any(leaf.is_floating_point() for leaf in core_state))
