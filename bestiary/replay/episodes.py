"""Whole episodes, kept for what they earned: the best, the latest, or some of both."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary import tree
from bestiary.config.machine import check_memory
from bestiary.errors import UserError
from bestiary.ops.commands import Aim, Floats, best, less_start, to_go
from bestiary.replay.base import row_bytes
from bestiary.replay.ring_buffer import Drawn, RateLimiter, room
from bestiary.seeding import REPLAY, derive
from bestiary.types import Batch, Snapshot, Spec, State, TimeStep, Trajectory, ValueTargets

Ints = NDArray[np.int64]
SURVEYED = 32_768  # rows of one part of a survey


class Held(NamedTuple):
    """A table of the episodes held, in order of arrival."""

    number: Ints  # never repeats
    first: Ints  # row where it lies
    moves: Ints
    earned: Floats  # undiscounted
    begun: Floats  # discounted, from its first move
    cut: NDArray[np.bool_]  # by a time limit, before it was over
    merit: Floats  # by which it is ranked and weighed: what it earned, or how much more than its start promised

    def __getitem__(self, at: Any) -> "Held":  # type: ignore[override]
        return Held(*(column[at] for column in tuple(self)))  # type: ignore[arg-type]

    @staticmethod
    def none() -> "Held":
        whole, real = np.zeros(0, np.int64), np.zeros(0)
        return Held(whole, whole, whole, real, real, np.zeros(0, bool), real)


class EpisodeReplay(Drawn):
    """Rows of an episode lie one after the other in flat arrays, each once; what they promise is worked out when drawn.

    An episode of n moves has n + 1 rows. What a learner says of rows (`update`) is kept beside them; where that is
    asked for (`survey`), episodes are drawn from only once something has been said of them.
    """

    aligned = False

    def __init__(self, cfg: "Episodes", seed: int, remembers: bool) -> None:
        self.cfg = cfg
        self.seed = derive(seed, REPLAY)
        self.window = 1 if cfg.window is None and not remembers else cfg.window
        self.rate_limiter = RateLimiter(cfg.ratio, 0)
        self.held = Held.none()
        self.begins: Floats = np.zeros((0, 0))  # first observations, where merit depends on them
        self.rows: Any = None  # tree of [room, ...]
        self.used = 0  # rows written, of episodes held or not
        self.arrived = 0  # episodes, ever
        self.open: list[list[Any]] = [[] for _ in range(cfg.streams)]  # rows of episodes under way, in parts
        self.said = torch.zeros(0, 3)  # of each row: the learner's target, its label, and that as it was said
        self.judged: Ints = np.zeros(0, np.int64)  # episodes of which something has been said
        self.surveyed = -1  # updates when the last survey began
        self.waiting: list[Ints] = []  # parts of a survey that are still to be given out
        self._aim: Aim | None = None

    # -- in ------------------------------------------------------------------------------------------

    def add(self, trajectory: Trajectory, stream: int = 0) -> None:
        t = tree.map(lambda x: x.cpu(), trajectory._replace(state=(), aux={}))
        moves = len(t.action) - 1
        version = t.version.expand(moves + 1, -1)
        rows = (t.step, t.action, version)
        is_first = t.step.is_first.numpy()
        finished = 0
        for column in range(is_first.shape[1]):
            at = stream + column
            if is_first[0, column]:  # after an interruption other episodes begin here
                self.open[at] = []
            start = 0
            for end in (*np.flatnonzero(is_first[1:, column]).tolist(), None):
                stop = moves if end is None else end + 1
                part = tree.map(lambda x, a=start, b=stop, s=column: x[a:b, s], rows)
                if stop > start:
                    self.open[at].append(part)
                if end is not None:
                    finished += self._close(at)
                start = stop
        self.rate_limiter.add(finished if self.cfg.per == "episode" else int((~is_first[1:]).sum()))
        if finished:
            self._rank()

    def _close(self, stream: int) -> int:
        """An episode is over: keep it, if it is worth that."""
        parts, self.open[stream] = self.open[stream], []
        rows = tree.cat(parts)
        step, *_ = rows
        moves = len(step.reward) - 1
        if moves < 1 or not step.is_first[0]:
            return 0
        reward = step.reward.numpy()
        at = np.zeros(1, np.int64)
        begun = to_go(reward, at, np.array([moves]), at, 1, self.cfg.discount)[0, 0]
        earned = float(reward[1:].sum(dtype=np.float64))
        cut = not bool(step.is_terminal[-1])
        new = (self.arrived, self._write(rows), moves, earned, begun, cut, earned)
        self.arrived += 1
        self.held = Held(*(np.append(column, x) for column, x in zip(self.held, new, strict=True)))
        if self.cfg.adjust:
            begins = step.obs[0].numpy().astype(np.float64)[None]
            self.begins = begins if not len(self.begins) else np.concatenate([self.begins, begins])
        return 1

    def _write(self, rows: Any) -> int:
        count = len(rows[1])
        if self.rows is None:
            self.rows = tree.map(lambda x: room(1024, x[0]), rows)
        if self.used + count > len(self.rows[1]):
            self._compact(count)
        at = self.used
        tree.map(lambda store, x: store[at : at + count].copy_(x), self.rows, rows)
        self.used += count
        return at

    def _compact(self, count: int) -> None:
        """Rows of episodes that are held move together; where that does not leave as much room again, there is more."""
        alive = concatenated(self.held.first, self.held.moves + 1)
        size = len(self.rows[1])
        while size < 2 * (len(alive) + count):
            size *= 2
        where = torch.from_numpy(alive)

        def move(store: Tensor) -> Tensor:
            fresh = room(size, store[0])
            fresh[: len(alive)] = store[where]
            return fresh

        self.rows = tree.map(move, self.rows)
        if len(self.said):
            self.said = move(self.said)
        self.used = len(alive)
        ends = np.cumsum(self.held.moves + 1)
        self.held = self.held._replace(first=ends - self.held.moves - 1)

    def _rank(self) -> None:
        """Who stays, and what each is worth among those who do."""
        cfg, held = self.cfg, self.held
        merit = held.earned - cfg.cut_penalty * held.cut - cfg.haste * held.moves
        if cfg.adjust and len(held.number) > self.begins.shape[1]:
            merit = less_start(merit, self.begins)
        order = best(merit, len(merit)) if cfg.keep == "best" else np.arange(len(merit))[::-1]
        stays = order[: cfg.capacity]
        if cfg.moves is not None:  # the first that no longer fits, and all after it, go
            fits = np.cumsum(held.moves[stays]) <= cfg.moves
            fits[0] = True
            stays = stays[: len(fits) if fits.all() else int(np.argmin(fits))]
        stays = np.sort(stays)
        self.held = held[stays]._replace(merit=merit[stays])
        if cfg.adjust:
            self.begins = self.begins[stays]
        if cfg.survey is not None:
            self.judged = np.intersect1d(self.judged, self.held.number, assume_unique=True)
        self._aim = None

    # -- out -----------------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        return self.arrived < max(1, self.cfg.warmup)

    def sample(self) -> Batch | None:
        if self.rate_limiter.due < 1 or self.is_empty():
            return None
        survey = self._survey()
        if survey is not None:
            return survey
        rng = self.next_draw()
        assert rng is not None
        return self._windows(rng)

    def _among(self) -> Held:
        if self.cfg.survey is None or not self.cfg.survey.whole:
            return self.held
        return self.held[np.isin(self.held.number, self.judged, assume_unique=True)]

    def _choose(self, held: Held, rng: np.random.Generator, count: int) -> Ints:
        """Which episodes to draw from, as places in the table."""
        cfg = self.cfg
        # of whole episodes all moves are shown: to draw those by their moves would count the long ones twice
        by, extra = ("episodes", 0) if self.window is None else (cfg.draw, self.window - 1)
        if cfg.keep == "mixture":
            ranked = best(held.merit, cfg.best)
            newest = np.arange(max(0, len(held.number) - cfg.latest), len(held.number))
            of_best = rng.random(count) < cfg.best_share
            return np.where(of_best, *(pick(held, among, rng, count, by, extra) for among in (ranked, newest)))
        return pick(held, np.arange(len(held.number)), rng, count, by, extra)

    def _windows(self, rng: np.random.Generator) -> Batch:
        cfg, held = self.cfg, self._among()
        if self.window is None:
            count = max(1, round(cfg.batch_size / held.moves.mean()))
            chosen = held[self._choose(held, rng, count)]
            window, start = int(chosen.moves.max()), np.zeros(count, np.int64)
        else:
            window, count = self.window, max(1, cfg.batch_size // self.window)
            chosen = held[self._choose(held, rng, count)]
            # every move is as likely to be in a window as any other
            start = (rng.random(count) * (chosen.moves + window - 1)).astype(np.int64) - (window - 1)
        t = self._gather(chosen, start - cfg.burn_in, cfg.burn_in + window)
        move = start + np.arange(window)[:, None]
        valid = (move >= 0) & (move < chosen.moves)
        reward = self.rows[0].reward.numpy()
        ahead = to_go(reward, chosen.first, chosen.moves, start, window, cfg.discount)
        aux = {
            "valid": valid,
            "to_go": ahead,
            "horizon": np.where(valid, chosen.moves - move, 1),
            "earned": np.broadcast_to(chosen.earned, valid.shape),
            "merit": np.broadcast_to(chosen.merit, valid.shape),
        }
        told = {k: torch.from_numpy(np.array(x, bool if k == "valid" else np.float32)) for k, x in aux.items()}
        if cfg.survey is not None and cfg.survey.whole:
            row = chosen.first + np.clip(move, 0, chosen.moves)
            target, advantage, _ = self.said[torch.from_numpy(row)].unbind(-1)
            told |= {"target": target, "advantage": advantage}
        return Batch(t._replace(aux=told), about=self.aim()._asdict())

    def _gather(self, chosen: Held, start: Ints, rows: int) -> Trajectory:
        """Rows from `start` of each episode on. Those before its first and after its last are episodes of one row."""
        wanted = start + np.arange(rows)[:, None]
        inside = np.clip(wanted, 0, chosen.moves)
        at = torch.from_numpy(chosen.first + inside)
        step, action, version = tree.map(lambda store: store[at], self.rows)
        outside = torch.from_numpy(wanted != inside)
        step = step._replace(is_first=step.is_first | outside)
        return Trajectory(step, action, {}, (), version[0])

    def aim(self) -> Aim:
        """Where commands come from now."""
        if self._aim is None:
            among = self._among()
            self._aim = self.cfg.aim(among, self._reached(among))
        return self._aim

    def _reached(self, among: Held) -> NDArray[Any]:
        """By all moves there are: what was said of them, or what they still earned; empty where nobody asks."""
        if len(self.said):
            return self.said[:, 1].numpy()[concatenated(among.first, among.moves)]
        if not self.cfg.by_move or not len(among.number):
            return np.zeros(0)
        longest = int(among.moves.max())
        start = np.zeros_like(among.first)
        ahead = to_go(self.rows[0].reward.numpy(), among.first, among.moves, start, longest, self.cfg.discount)
        return ahead[np.arange(longest)[:, None] < among.moves]

    # -- what a learner says of rows -------------------------------------------------------------------

    def _survey(self) -> Batch | None:
        """Episodes for a critic to judge, all or a few, if that is due."""
        survey = self.cfg.survey
        if survey is None:
            return None
        due = self.surveyed < 0 or self.rate_limiter.batches - self.surveyed >= survey.every
        gone = survey.whole and not len(self.judged)  # short episodes may come and go between two surveys
        if not self.waiting and (due or gone):
            self.surveyed = self.rate_limiter.batches
            self.waiting = self._parts() if survey.whole else [np.zeros(0, np.int64)]
        if not self.waiting:
            return None
        numbers, self.waiting = self.waiting[0], self.waiting[1:]
        if survey.whole:
            chosen, start = self.held[np.isin(self.held.number, numbers)], 0
            if not len(chosen.number):
                if not self.waiting and len(self.judged):  # nobody will speak of this part, so it was the last
                    self._standardise()
                return self._survey()
        else:
            rng = np.random.Generator(np.random.Philox(key=[self.seed, (1 << 40) + self.rate_limiter.batches]))
            chosen = self.held[pick(self.held, np.arange(len(self.held.number)), rng, survey.episodes, "moves")]
            start = (rng.random(survey.episodes) * chosen.moves).astype(np.int64)
        t = self._gather(chosen, np.zeros_like(chosen.first) + start, int((chosen.moves - start).max()) + 1)
        return Batch(t, keys=torch.from_numpy(chosen.number), about={"critic_refresh": torch.ones(())})

    def _parts(self) -> list[Ints]:
        """All episodes, by their length so that little is padded, in parts that fit into memory."""
        order = np.argsort(self.held.moves, kind="stable")
        parts, begin = [], 0
        for end in range(len(order)):
            if (self.held.moves[order[end]] + 1) * (end - begin + 1) > SURVEYED and end > begin:
                parts.append(self.held.number[order[begin:end]])
                begin = end
        return [*parts, self.held.number[order[begin:]]]

    def update_priorities(self, keys: Tensor, priorities: Tensor) -> None:
        raise AssertionError("a replay of episodes has no priorities")

    def set_value_targets(self, keys: Tensor, targets: ValueTargets) -> None:
        """Store a critic's targets and advantages with the transitions of whole episodes."""
        if len(self.said) < len(self.rows[1]):
            grown = torch.zeros(len(self.rows[1]), 3)
            grown[: len(self.said)] = self.said
            self.said = grown
        said = torch.stack(targets).cpu()
        place = {int(number): i for i, number in enumerate(self.held.number)}
        at = np.array([place.get(int(key), -1) for key in keys])  # -1: it has made room for others meanwhile
        here = np.flatnonzero(at >= 0)
        moves, first = self.held.moves[at[here]], self.held.first[at[here]]
        column = np.repeat(here, moves)
        row = concatenated(np.zeros_like(moves), moves)
        into = torch.from_numpy(concatenated(first, moves))
        target, label = said[:, torch.from_numpy(row), torch.from_numpy(column)]
        self.said[into] = torch.stack([target, label, label], -1)
        self.judged = np.union1d(self.judged, self.held.number[at[here]])
        if not self.waiting:
            self._standardise()
        self._aim = None

    def _standardise(self) -> None:
        """Labels in standard deviations of all that is held here; of several replays, each by itself.

        From labels as they were said, so that it may be done again: parts that were given out may still be unanswered.
        """
        assert self.cfg.survey is not None
        among = self._among()
        rows = torch.from_numpy(concatenated(among.first, among.moves))
        raw = self.said[rows, 2]
        z = (raw - raw.mean()) / raw.std(correction=0).clamp(min=1e-6)
        self.said[rows, 1] = z.clamp(-self.cfg.survey.clip, self.cfg.survey.clip)

    # -- books and checkpoints -----------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        return 0 if self.rows is None else self.used * tree.size(self.rows) // len(self.rows[1])

    def metrics(self) -> dict[str, float]:
        return self.rate_limiter.metrics() | {
            "replay_episodes": len(self.held.number),
            "replay_rows": int((self.held.moves + 1).sum()),
            "replay_return": float(self.held.earned.mean()) if len(self.held.number) else 0.0,
            "replay_length": float(self.held.moves.mean()) if len(self.held.number) else 0.0,
        }

    def state_dict(self) -> Snapshot:
        state: Snapshot = self.rate_limiter.state_dict() | {
            "streams": self.cfg.streams,
            "open": [[tree.map(torch.clone, _plain(part)) for part in parts] for parts in self.open],
            "held": [torch.from_numpy(column) for column in self.held],
            "begins": torch.from_numpy(self.begins),
            "arrived": self.arrived,
            "used": self.used,
            "said": self.said[: self.used].clone(),
            "judged": torch.from_numpy(self.judged),
            "surveyed": self.surveyed,
            "waiting": [torch.from_numpy(part) for part in self.waiting],
        }
        if self.rows is not None:
            state["rows"] = _plain(tree.map(lambda x: x[: self.used].clone(), self.rows))
        return state

    def load_state_dict(self, state: Snapshot) -> None:
        self.rate_limiter.load_state_dict(state)
        self.held = Held(*(column.clone().numpy() for column in state["held"]))
        self.begins = state["begins"].clone().numpy()
        self.arrived, self.used, self.surveyed = state["arrived"], state["used"], state["surveyed"]
        self.judged = state["judged"].clone().numpy()
        self.waiting = [part.clone().numpy() for part in state["waiting"]]
        if "rows" in state:
            self.rows = tree.map(torch.clone, _rich(state["rows"]))
            self.said = state["said"].clone()  # as many as there are rows, or none
        if state["streams"] == self.cfg.streams:  # else the episodes under way are lost
            self.open = [[tree.map(torch.clone, _rich(part)) for part in parts] for parts in state["open"]]
        else:
            self.rate_limiter.latest = 0
        self._aim = None


def _plain(rows: Any) -> list[Any]:
    """Named tuples are not saved as such."""
    step, *rest = rows
    return [tuple(step), *rest]


def _rich(rows: list[Any]) -> Any:
    step, *rest = rows
    return (TimeStep(*step), *rest)


def concatenated(first: Ints, count: Ints) -> Ints:
    """[first[0], first[0] + 1, ... first[0] + count[0] - 1, first[1], ...]"""
    before = np.cumsum(count) - count
    return np.repeat(first - before, count) + np.arange(int(count.sum()))


def pick(held: Held, among: Ints, rng: np.random.Generator, count: int, by: str, extra: int = 0) -> Ints:
    """Some of `among`: any is as likely as any other, or any of their moves, and so many `extra` each."""
    if by == "episodes":
        return among[rng.integers(len(among), size=count)]
    upto = np.cumsum(held.moves[among] + extra)
    return among[np.searchsorted(upto, rng.random(count) * upto[-1], side="right")]


@dataclass(frozen=True)
class Survey:
    """Episodes that a critic is shown now and then."""

    every: int
    """updates between two"""
    whole: bool = True
    """all there are, and what the critic says of their moves is kept; else the rests of a few, and it is not"""
    episodes: int = 4
    """where it is a few: so many"""
    clip: float = 4.0
    """labels lie within so many standard deviations"""


@dataclass(frozen=True)
class Episodes:
    """Episodes and how they are drawn from."""

    streams: int
    """environments played at once"""
    batch_size: int
    """moves per sample"""
    capacity: int
    """episodes kept"""
    moves: int | None
    """and no more moves than these; None: as many as they have"""
    keep: Literal["best", "recent", "mixture"]
    best: int
    latest: int
    best_share: float
    """of a sample from a mixture that comes from its best episodes; the rest is from its latest"""
    draw: Literal["episodes", "moves"]
    """which are equally likely"""
    window: int | None
    """moves in a row; None: 1, or whole episodes where something is remembered"""
    burn_in: int
    ratio: float
    """updates per move, or per episode"""
    per: Literal["move", "episode"]
    warmup: int
    """episodes before the first update"""
    discount: float
    adjust: bool
    """rank by how much more was earned than the first observation promised"""
    cut_penalty: float
    """points by which an episode that was cut short ranks lower"""
    haste: float
    """points by which it does so for each of its moves"""
    aim: Callable[[Held, NDArray[Any]], Aim]
    """where commands come from, given the episodes held and what their moves reached"""
    by_move: bool = False
    """it asks for that even where no critic says it: what was still to come"""
    survey: Survey | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"algo.batch-size={self.batch_size} must be at least 1")
        if self.window is not None and not 1 <= self.window <= self.batch_size:
            raise UserError(
                f"algo.window={self.window} must lie between 1 and algo.batch-size={self.batch_size}, or be None"
            )
        if self.burn_in < 0:
            raise UserError(f"algo.burn-in={self.burn_in} must be at least 0")
        if self.ratio <= 0:
            raise UserError(f"algo.ratio={self.ratio} must be positive")
        if self.capacity < 1 or (self.moves is not None and self.moves < 1):
            raise UserError(f"algo.capacity={self.capacity} and algo.moves={self.moves} must be at least 1")
        if self.warmup < 1:
            raise UserError(f"algo.warmup={self.warmup} must be at least 1 episode: nothing can be learnt from none")
        if not 0 <= self.best_share <= 1:
            raise UserError(f"algo.best-share={self.best_share} must lie in [0, 1]")
        if min(self.best, self.latest) < 1:
            raise UserError(f"algo.best={self.best} and algo.latest={self.latest} must be at least 1")

    def share(self, parts: int, learners: int = 1) -> Self:
        moves = None if self.moves is None else max(1, self.moves // parts)
        kept = {k: max(1, getattr(self, k) // parts) for k in ("capacity", "best", "latest", "warmup")}
        return replace(self, moves=moves, ratio=self.ratio * learners, **kept)

    def nbytes(self, spec: Spec, unroll: int = 0) -> int:
        limits = (self.moves, None if spec.horizon is None else self.capacity * spec.horizon)
        return min((limit for limit in limits if limit is not None), default=0) * row_bytes(spec)

    def build(self, seed: int, spec: Spec, state: State) -> EpisodeReplay:
        if self.adjust and spec.is_image:
            raise UserError(f"algo.adjust fits returns to first observations: {spec.name} shows pictures, not a vector")
        check_memory(self.nbytes(spec), self.capacity)
        memory = state[2:]  # what comes before is the command, and how boldly it is followed
        return EpisodeReplay(self, seed, remembers=any(leaf.is_floating_point() for leaf in memory))
