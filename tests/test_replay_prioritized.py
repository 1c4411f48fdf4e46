"""Experience drawn by surprise: whole, as often as its priority says, and never what is no longer or not yet there."""

import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from helpers.files import through_a_file
from helpers.settings import configure
from hypothesis import given
from hypothesis import settings as searching
from hypothesis import strategies as st
from torch import Tensor

from bestiary import tree
from bestiary.algos import Apex
from bestiary.errors import UserError
from bestiary.replay.prioritized import Prioritized, PrioritizedBuilder, PrioritizedReplay
from bestiary.replay.ring_buffer import storage_bytes
from bestiary.types import Batch, Spec, TimeStep, Trajectory

STREAMS, UNROLL = 3, 5
SPEC = Spec("script", (2,), torch.float32, 4)
ATARI = Spec("Any", (1, 84, 84), torch.uint8, 18)


class Script:
    """What all streams would play. Observations tell stream and row; `surprise` is what a row is judged by.

    A row that leads into another episode claims to be most surprising of all.
    """

    def __init__(self, rows: int, density: float = 0.15, streams: int = STREAMS, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.streams = streams
        self.is_first = torch.rand(rows, streams, generator=rng) < density
        self.is_first[0] = True
        self.is_terminal = (torch.rand(rows, streams, generator=rng) < 0.3) & ~self.is_first
        self.surprise = 10 ** (torch.rand(rows, streams, generator=rng) - 0.5)
        self.surprise[:-1][self.is_first[1:]] = 4.0
        self.opens, self.judged = self.is_first.tolist(), self.surprise.tolist()  # for loops

    def at(self, row: Tensor, stream: Tensor) -> tuple[TimeStep, Tensor, dict[str, Tensor]]:
        """[T, B] rows of [B] streams."""
        stream = stream.expand_as(row)
        number = 10_000 * stream + row + 1  # never 0
        step = TimeStep(
            obs=torch.stack([stream, row], -1).float(),
            prev_action=number + 1,
            reward=number.float(),
            is_first=self.is_first[row, stream],
            is_terminal=self.is_terminal[row, stream],
        )
        return step, number + 2, {"surprise": self.surprise[row, stream]}

    def memory(self, row: Tensor, stream: Tensor) -> tuple[Tensor, ...]:
        """Just before rows [B] of streams [B]."""
        return torch.stack([stream, row], 1).float(), (row + stream / 8)[:, None, None]

    def trajectory(self, number: int, unroll: int = UNROLL) -> Trajectory:
        start, stream = number * unroll, torch.arange(self.streams)
        rows = torch.arange(start, start + unroll + 1)[:, None].expand(-1, self.streams)
        return Trajectory(*self.at(rows, stream), self.memory(rows[0], stream), 1000 * number + stream)


def settings(
    streams: int = STREAMS, burn_in: int = 2, length: int = 1, n_step: int = 2, judge: Any = None, **changes: Any
) -> PrioritizedBuilder:
    """An item is judged by the first row that is trained; the ring holds 49 moves of each stream."""
    base: dict[str, Any] = {"batch_size": 8, "stride": 1} | changes
    base = {
        "sequence_length": burn_in + length,
        "capacity": 49 * streams,
        "updates_per_step": 100.0,
        "warmup": streams * (burn_in + length + n_step) + base["batch_size"] * base["stride"],
    } | base
    judge = judge or (lambda t: t.aux["surprise"][burn_in])
    return PrioritizedBuilder(Prioritized(**base), streams, UNROLL, burn_in, n_step, judge)


SHAPES: dict[str, dict[str, Any]] = {
    "moves": {"stride": 1, "burn_in": 3, "length": 1, "n_step": 3},
    "moves and nothing else": {"stride": 1, "burn_in": 0, "length": 1, "n_step": 1},
    "overlapping": {"stride": 4, "burn_in": 2, "length": 6, "n_step": 2},
    "far apart": {"stride": 11, "burn_in": 1, "length": 2, "n_step": 1},
    "with memory": {"stride": 5, "burn_in": 5, "length": 5, "n_step": 2, "stored_state": True},
    "with memory, long": {"stride": 10, "burn_in": 10, "length": 7, "n_step": 3, "stored_state": True},
    "with memory, no burn-in": {"stride": 5, "burn_in": 0, "length": 8, "n_step": 1, "stored_state": True},
    "with memory, burn-in ends elsewhere": {"stride": 5, "burn_in": 3, "length": 4, "n_step": 1, "stored_state": True},
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def known(script: Script, cfg: PrioritizedBuilder, newest: int) -> dict[int, float]:
    """Key -> first weight of every item whose rows are all there, found by looking at each that could be."""
    oldest = max(0, newest - cfg.cfg.capacity // cfg.streams)
    found = {}
    for number in range(newest // cfg.stride + 1):
        first = number * cfg.stride
        if first < oldest or first + cfg.item_steps - 1 > newest:
            continue
        for stream in range(cfg.streams):
            trained = range(first + cfg.burn_in, first + cfg.burn_in + cfg.length)
            nothing = all(script.opens[row + 1][stream] for row in trained)
            surprise = max(script.judged[trained[0]][stream], cfg.cfg.priority_floor)
            found[number * cfg.streams + stream] = 0.0 if nothing else surprise**cfg.cfg.priority_exponent
    return found


def weights_of(replay: PrioritizedReplay) -> dict[int, float]:
    """Key -> weight in the tree; what is not an item's has none."""
    replay.tree.check_valid()
    numbers = replay._held(np.arange(replay.next))
    keys = (numbers[:, None] * replay.streams + np.arange(replay.streams)).flatten()
    slots = replay._slots(*np.divmod(keys, replay.streams))
    assert len(replay) == len(keys) == len(set(slots.tolist()))
    held = replay.tree.weights(slots)
    assert np.count_nonzero(replay.tree.leaves()) == np.count_nonzero(held)
    return dict(zip(keys.tolist(), held.tolist(), strict=True))


def fill(replay: PrioritizedReplay, script: Script, trajectories: int, first: int = 0) -> None:
    for k in range(first, first + trajectories):
        replay.add(script.trajectory(k))


def draw(replay: PrioritizedReplay) -> tuple[Batch, list[int]]:
    batch = replay.sample()
    assert batch is not None and batch.keys is not None
    return batch, batch.keys.tolist()


def drain(replay: PrioritizedReplay) -> int:
    return sum(1 for _ in iter(replay.sample, None))


def as_bits(batch: Batch | None) -> Any:
    return tree.map(lambda x: x.tolist(), tuple(batch)) if batch is not None else None


# -- what an item is --------------------------------------------------------------------------------------------------


@every_shape
def test_an_item_is_rows_that_one_stream_played_with_the_memory_it_had(shape):
    script, cfg = Script(501), settings(**shape)
    replay = cfg.build(0)
    drawn: set[int] = set()
    for k in range(100):  # the ring turns ten times
        replay.add(script.trajectory(k))
        newest = (k + 1) * UNROLL
        batch = replay.sample()
        if batch is None:
            assert newest < cfg.cfg.warmup
            continue
        t = batch.trajectory
        stream, row = t.step.obs[0].long().T
        assert (row % cfg.stride == 0).all()
        assert row.min() >= newest - 49
        assert row.max() <= newest + 1 - cfg.item_steps
        expected = script.at(row + torch.arange(cfg.item_steps)[:, None], stream)
        assert tree.map(torch.equal, (t.step, t.action, t.aux), expected) == tree.map(lambda _: True, expected)
        assert torch.equal(t.version, 1000 * (row // UNROLL) + stream)
        assert batch.keys is not None
        assert torch.equal(batch.keys, row // cfg.stride * STREAMS + stream)
        drawn |= set(batch.keys.tolist())
        known_later = cfg.cfg.stored_state and cfg.burn_in and cfg.burn_in % UNROLL == 0
        for got, wanted in (
            (t.state, script.memory(row, stream) if cfg.cfg.stored_state else ()),
            (batch.actor_state, script.memory(row + cfg.burn_in, stream) if known_later else ()),
        ):
            assert len(got) == len(wanted)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert len(drawn) > 60


@every_shape
@pytest.mark.parametrize("density", [0.1, 0.6, 1.0])
def test_what_can_be_drawn_is_whole_and_has_a_move(shape, density):
    """However surprising it is said to be where one episode ends and another begins."""
    script, cfg = Script(301, density), settings(**shape)
    replay, useless = cfg.build(0), 0
    for k in range(60):
        replay.add(script.trajectory(k))
        replay.rate_limiter.steps = 10**6  # resets are no moves, and there is nothing else where the density is 1
        expected = known(script, cfg, (k + 1) * UNROLL)
        assert weights_of(replay) == pytest.approx(expected, rel=1e-6)
        useless += sum(not weight for weight in expected.values())
        if not any(expected.values()):
            assert replay.sample() is None
            assert not replay.full
            continue
        batch, keys = draw(replay)
        assert all(expected[key] for key in keys)
        opens = batch.trajectory.step.is_first[cfg.burn_in + 1 : cfg.burn_in + 1 + cfg.length]
        assert not opens.all(0).any()
    assert useless or density == 0.1 or cfg.length > 3


@pytest.mark.parametrize("stride", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("spare", [0, 1, 4])
def test_a_ring_that_holds_hardly_more_than_an_item_loses_none_and_keeps_none_too_long(stride, spare):
    """One trajectory may both complete an item and write over its beginning."""
    shape = {"stride": stride, "burn_in": 1, "length": 2, "n_step": 2}
    script, cfg = Script(301), settings(**shape, capacity=STREAMS * (5 + spare))
    replay = cfg.build(0)
    held: set[int] = set()
    for k in range(60):
        replay.add(script.trajectory(k))
        expected = known(script, cfg, (k + 1) * UNROLL)
        assert weights_of(replay) == pytest.approx(expected, rel=1e-6)
        held.add(len(expected) // STREAMS)
        if (batch := replay.sample()) is not None:
            assert set(batch.keys.tolist()) <= {key for key, weight in expected.items() if weight}  # type: ignore
    assert (0 in held) == (stride > spare + 2)  # rows in which an item can begin


def test_nothing_is_looked_at_to_judge_it():
    """First priorities come from what the actor kept: pictures would be copied for nothing."""
    seen = []

    def judge(t: Trajectory) -> Tensor:
        seen.append(t.step.obs.shape)
        return t.aux["surprise"][2]

    replay = settings(judge=judge).build(0)
    fill(replay, Script(101), 3)
    assert all(len(shape) == 2 for shape in seen)
    assert sum(columns for _, columns in seen) == len(replay) == STREAMS * (3 * UNROLL + 1 - 4)  # each once


def test_what_was_drawn_does_not_change_when_more_is_played():
    replay, script = settings(**SHAPES["with memory"], capacity=60).build(0), Script(501)
    fill(replay, script, 8)
    batch, _ = draw(replay)
    before = as_bits(batch)
    fill(replay, script, 20, first=8)
    assert as_bits(batch) == before


# -- how often --------------------------------------------------------------------------------------------------------


def chance(counts: dict[int, int], expected: dict[int, float]) -> float:
    """Of a Pearson statistic at least as large as this one."""
    total = sum(expected.values())
    n = sum(counts.values())
    shares = {key: n * weight / total for key, weight in expected.items() if weight}
    assert not any(count for key, count in counts.items() if key not in shares)
    assert min(shares.values()) > 4
    statistic = sum((counts[key] - share) ** 2 / share for key, share in shares.items())
    half = torch.tensor([len(shares) - 1, statistic], dtype=torch.float64) / 2
    return torch.special.gammaincc(*half).item()


@pytest.mark.parametrize(("alpha", "shape"), [(0.0, "overlapping"), (0.6, "moves"), (1.0, "overlapping")])
def test_items_are_drawn_as_often_as_their_priority_says(alpha, shape):
    """Batches of one, which are independent. Too even would be wrong as well."""
    script, cfg = Script(301), settings(**SHAPES[shape], batch_size=1, priority_exponent=alpha, updates_per_step=1e6)
    replay = cfg.build(3)
    fill(replay, script, 23)
    expected = known(script, cfg, 23 * UNROLL)
    raised = [key for key, weight in expected.items() if weight][::5]
    replay.update_priorities(torch.tensor(raised), torch.full((len(raised),), 6.0))
    expected.update((key, 6.0**alpha) for key in raised)
    counts = dict.fromkeys(expected, 0)
    for _ in range(4000):
        _, (key,) = draw(replay)
        counts[key] += 1
    assert 1e-3 < chance(counts, expected) < 1 - 1e-3
    others = {key: weight**0.5 if alpha else 1.0 + key % 2 for key, weight in expected.items()}
    assert chance(counts, others) < 1e-6  # it would be noticed


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("shape", ["moves", "overlapping"])
def test_weights_undo_how_likely_a_draw_was(alpha, beta, shape):
    script, cfg = Script(301), settings(**SHAPES[shape], priority_exponent=alpha, importance_exponent=beta)
    replay = cfg.build(0)
    fill(replay, script, 23)
    expected = known(script, cfg, 23 * UNROLL)
    total, count = sum(expected.values()), len(expected)
    for _ in range(10):
        batch, keys = draw(replay)
        naive = [(count * expected[key] / total) ** -beta for key in keys]
        assert batch.weight is not None
        assert batch.weight.dtype == torch.float32
        assert batch.weight.tolist() == pytest.approx([w / max(naive) for w in naive], rel=1e-5)
        assert (len(set(naive)) == 1) == (alpha == 0 or beta == 0)


def test_draws_come_from_the_seed():
    bits = []
    for seed in (0, 0, 1):
        replay = settings().build(seed)
        fill(replay, Script(101), 10)
        bits.append([as_bits(replay.sample()) for _ in range(3)])
    assert bits[0] == bits[1]
    assert bits[0] != bits[2]
    assert bits[0][0] != bits[0][1]


# -- priorities that come back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_new_priority_is_the_weight_of_its_item_and_of_no_other(alpha):
    script, cfg = Script(301), settings(priority_exponent=alpha, priority_floor=1e-3)
    replay = cfg.build(0)
    fill(replay, script, 23)
    expected = weights_of(replay)
    for k, priority in enumerate([7.0, 0.0, 1e-9, 1e-3, 0.25, 100.0]):
        _, keys = draw(replay)
        keys = keys[: 1 + k]
        replay.update_priorities(torch.tensor(keys), torch.full((1 + k,), priority))
        expected |= dict.fromkeys(keys, max(priority, 1e-3) ** alpha)
        assert weights_of(replay) == pytest.approx(expected, rel=1e-6)
    assert replay.metrics()["late_priorities"] == 0


def test_of_an_item_drawn_twice_the_last_priority_counts():
    replay = settings(priority_exponent=1.0).build(0)
    fill(replay, Script(301), 23)
    _, (key, *_) = draw(replay)
    replay.update_priorities(torch.tensor([key, key, key]), torch.tensor([3.0, 9.0, 5.0]))
    assert weights_of(replay)[key] == 5.0


def test_a_priority_that_comes_too_late_is_counted_and_changes_nothing():
    """The item that lies in the same place now is another one."""
    script, cfg = Script(501), settings()
    replay = cfg.build(0)
    fill(replay, script, 20)
    old = [key for key, weight in weights_of(replay).items() if weight]
    fill(replay, script, 5, first=20)
    before = weights_of(replay)
    gone, live = [key for key in old if key not in before], [key for key in old if key in before]
    assert len(gone) > 50 and len(live) > 50
    slots, others = (set(replay._slots(*np.divmod(keys, STREAMS)).tolist()) for keys in (gone, list(before)))
    assert len(slots & others) > 50
    replay.update_priorities(torch.tensor(gone), torch.full((len(gone),), 50.0))
    assert weights_of(replay) == before
    assert replay.metrics()["late_priorities"] == len(gone)
    mixed = [gone[0], live[0], gone[-1], live[-1]]
    replay.update_priorities(torch.tensor(mixed), torch.tensor([50.0, 2.0, 50.0, 4.0]))
    after = before | {live[0]: 2.0**cfg.cfg.priority_exponent, live[-1]: 4.0**cfg.cfg.priority_exponent}
    assert weights_of(replay) == pytest.approx(after, rel=1e-12)
    assert replay.metrics()["late_priorities"] == len(gone) + 2


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_priority_that_is_not_a_number_is_refused_and_nothing_changes(wrong, place):
    replay = settings().build(0)
    fill(replay, Script(301), 23)
    before, _ = weights_of(replay), draw(replay)
    keys = torch.tensor([key for key, weight in before.items() if weight][:8])
    priorities = torch.full((8,), 2.0)
    priorities[place] = wrong
    with pytest.raises(ValueError, match=r"slot \d+ cannot have weight (nan|inf)"):
        replay.update_priorities(keys, priorities)
    assert weights_of(replay) == before
    replay.update_priorities(keys, torch.full((8,), 2.0))
    assert weights_of(replay) != before


def test_a_first_priority_that_is_not_a_number_is_refused():
    script = Script(101, density=0.0)
    script.surprise[7, 1] = float("nan")
    with pytest.raises(ValueError, match="cannot have weight nan"):
        fill(settings().build(0), script, 3)


# -- everything at once -----------------------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "sample", "update", "save"]), st.integers(0, 2**16)), max_size=40
)


@searching(deadline=None, max_examples=30)
@given(
    OPERATIONS,
    st.sampled_from(list(SHAPES.values())),
    st.sampled_from([60, 147, 1000]),
    st.sampled_from([0.0, 0.6, 1.0]),
)
def test_the_replay_does_what_a_dictionary_does(operations, shape, capacity, alpha):
    script = Script(40 * 4 * UNROLL + 1)
    cfg = settings(
        **shape,
        capacity=max(capacity, STREAMS * 20),
        priority_exponent=alpha,
        priority_floor=0.05,
        importance_exponent=0.5,
    )
    replay, model, ever, added, late = cfg.build(0), {}, [], 0, 0
    for name, number in operations:
        rng = np.random.default_rng(number)
        if name == "add":
            for _ in range(1 + number % 4):
                replay.add(script.trajectory(added))
                added += 1
                model = {key: model.get(key, weight) for key, weight in known(script, cfg, added * UNROLL).items()}
                ever += [key for key, weight in model.items() if weight]
        elif name == "sample":
            batch = replay.sample()
            assert (batch is None) == (replay.rate_limiter.steps < cfg.cfg.warmup or not any(model.values()))
            if batch is not None:
                keys, weight = batch.keys, batch.weight
                assert keys is not None and weight is not None
                naive = np.array([len(model) * model[key] / sum(model.values()) for key in keys.tolist()]) ** -0.5
                assert weight.tolist() == pytest.approx((naive / naive.max()).tolist(), rel=1e-5)
        elif name == "update" and ever:
            keys, priorities = rng.choice(ever, 10), 10 ** rng.uniform(-3, 3, 10)
            replay.update_priorities(torch.from_numpy(keys), torch.from_numpy(priorities))
            for key, priority in zip(keys.tolist(), priorities.tolist(), strict=True):
                if key in model:
                    model[key] = max(priority, 0.05) ** alpha
                else:
                    late += 1
        elif name == "save":
            saved = through_a_file(replay.state_dict())
            replay = cfg.build(0)
            replay.load_state_dict(saved)
        assert weights_of(replay) == pytest.approx(model, rel=1e-6)
        assert replay.late == late


# -- at its ratio -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["moves", "overlapping"])
@pytest.mark.parametrize("ratio", [0.05, 0.25, 1, 3.7])
def test_updates_keep_their_ratio_to_moves_over_a_long_run(ratio, shape):
    script, cfg = Script(801), settings(**SHAPES[shape], updates_per_step=ratio, batch_size=2)
    replay = cfg.build(0)
    played = given = 0
    for k in range(160 if ratio < 1 else 40):
        replay.add(script.trajectory(k))
        played += int((~script.is_first[k * UNROLL + 1 : (k + 1) * UNROLL + 1]).sum())  # resets are no moves
        given += drain(replay)
        if played >= cfg.cfg.warmup:
            assert 0 <= Fraction(str(ratio)) * played - given < 1 + 1e-9
        else:
            assert given == 0
    told = replay.metrics()
    assert told["updates_per_step"] == given / played == pytest.approx(ratio, abs=1 / played)
    assert told["replay_ratio"] == pytest.approx(given * 2 * cfg.length / played)


def test_nothing_is_drawn_before_the_warm_up_and_all_that_is_due_after_it():
    script, replay = Script(101, density=0.0), settings(warmup=100, updates_per_step=0.5).build(0)
    drawn = []
    for k in range(10):  # 15 moves each
        replay.add(script.trajectory(k))
        drawn.append(drain(replay))
    assert drawn == [0, 0, 0, 0, 0, 0, 52, 8, 7, 8]


def test_producers_wait_when_more_is_due_than_one_trajectory_brings():
    script, replay = Script(101, density=0.0), settings(updates_per_step=0.4, warmup=40).build(0)
    fullness = []
    for k in range(4):  # 15 moves, worth 6 updates, each
        replay.add(script.trajectory(k))
        fullness.append(replay.full)
    assert fullness == [False, False, True, True]  # nothing before the warm-up, then 18 and 24
    for left in range(23, -1, -1):
        assert replay.sample() is not None
        assert replay.full == (left > 6)
    assert replay.sample() is None


def test_nobody_waits_for_less_than_one_update():
    """A trajectory worth less than an update: several must come before anything can be drawn."""
    script, replay = Script(201, density=0.0), settings(updates_per_step=0.03).build(0)
    drawn = 0
    for k in range(30):  # worth 0.45 updates each
        assert not replay.full
        replay.add(script.trajectory(k))
        assert replay.full == (replay.rate_limiter.due >= 1)
        drawn += drain(replay)
    assert drawn == 13


# -- checkpoints ------------------------------------------------------------------------------------------------------


# -- what makes room ------------------------------------------------------------------------------------------------


@every_shape
def test_rows_that_are_worth_least_make_room(shape):
    """Against a loop over blocks, a trajectory of all streams each, with priorities that change on the way."""
    script, cfg = Script(501), settings(**shape, eviction="priority")
    replay, rng = cfg.build(0), np.random.default_rng(0)
    weight: dict[int, float] = {}
    blocks: set[int] = set()

    def rows_of(key: int) -> range:
        return range(key // STREAMS * cfg.stride, key // STREAMS * cfg.stride + cfg.item_steps)

    def worth(block: int) -> float:
        return sum(w for key, w in weight.items() if rows_of(key)[0] // UNROLL == block)

    for k in range(80):
        for block in (0, 1) if k == 0 else (k + 1,):  # a trajectory's last row opens the next block
            if len(blocks) == 10:  # 50 slots
                lost = min((b for b in sorted(blocks) if b < block - -(-cfg.item_steps // UNROLL)), key=worth)
                blocks.remove(lost)
                weight = {key: w for key, w in weight.items() if lost not in {r // UNROLL for r in rows_of(key)}}
            blocks.add(block)
        replay.add(script.trajectory(k))
        everything = known(script, replace(cfg, cfg=replace(cfg.cfg, capacity=10_000)), (k + 1) * UNROLL)
        for key, w in everything.items():
            if k * UNROLL < rows_of(key)[-1] <= (k + 1) * UNROLL and {r // UNROLL for r in rows_of(key)} <= blocks:
                weight[key] = w
        assert weights_of(replay) == pytest.approx(weight)
        if replay.rate_limiter.due < 1 or not any(weight.values()):
            continue
        batch, keys = draw(replay)
        first = torch.tensor([rows_of(key)[0] for key in keys])
        stream = torch.tensor([key % STREAMS for key in keys])
        step, action, _ = script.at(first + torch.arange(cfg.item_steps)[:, None], stream)
        assert torch.equal(batch.trajectory.step.obs, step.obs)
        assert torch.equal(batch.trajectory.action, action)
        if cfg.cfg.stored_state:
            for mine, theirs in zip(batch.trajectory.state, script.memory(first, stream), strict=True):
                assert torch.equal(mine, theirs)
        priority = rng.uniform(0, 9, len(keys)) * rng.integers(0, 2, len(keys))
        replay.update_priorities(torch.tensor(keys), torch.from_numpy(priority))
        weight |= {
            key: max(p, cfg.cfg.priority_floor) ** cfg.cfg.priority_exponent
            for key, p in zip(keys, priority.tolist(), strict=True)
        }


@pytest.mark.parametrize(("eviction", "kept"), [("fifo", False), ("priority", True)])
def test_what_surprises_most_is_kept_longest(eviction, kept):
    script, cfg = Script(501, density=0.0), settings(eviction=eviction)
    script.surprise[15:20] = 100.0
    replay = cfg.build(0)
    fill(replay, script, 60)
    assert (max(weights_of(replay).values()) > 10) == kept


def test_a_ring_of_spared_blocks_goes_on_after_a_restart():
    script, cfg = Script(501), settings(eviction="priority")
    replay, restored = cfg.build(0), cfg.build(0)
    fill(replay, script, 40)
    restored.load_state_dict(through_a_file(replay.state_dict()))
    for k in range(40, 60):
        for one in (replay, restored):
            one.add(script.trajectory(k))
        assert weights_of(replay) == weights_of(restored)
        assert as_bits(replay.sample()) == as_bits(restored.sample())


def test_a_ring_in_which_nothing_could_be_spared_is_refused():
    with pytest.raises(UserError, match=r"is too small for .* raise it to 60, or use fifo"):
        settings(burn_in=9, capacity=12 * STREAMS, eviction="priority")
    fill(settings(burn_in=9, capacity=60, eviction="priority").build(0), Script(501), 90)


def learn(replay: PrioritizedReplay) -> Any:
    """Draw, and give back priorities that tell what was drawn."""
    batch = replay.sample()
    if batch is not None:
        assert batch.keys is not None
        replay.update_priorities(batch.keys, 1 + batch.keys % 7)
    return as_bits(batch)


@pytest.mark.parametrize("shape", ["moves", "overlapping", "with memory"])
@pytest.mark.parametrize("trajectories", [0, 1, 3, 9, 10, 57])
def test_a_saved_replay_goes_on_as_if_nothing_had_happened(shape, trajectories):
    script, cfg = Script(501), settings(**SHAPES[shape], updates_per_step=0.2)
    replay = cfg.build(0)
    for k in range(trajectories):
        replay.add(script.trajectory(k))
        learn(replay)
    if trajectories > 50:
        replay.update_priorities(torch.tensor([0, 1]), torch.tensor([5.0, 6.0]))  # too late
    restored = cfg.build(0)
    restored.load_state_dict(through_a_file(replay.state_dict()))
    drawn = 0
    for k in range(trajectories, trajectories + 30):
        for _ in range(2):
            bits, again = learn(replay), learn(restored)
            assert bits == again
            drawn += bits is not None
        for r in (replay, restored):
            r.add(script.trajectory(k))
        assert replay.full == restored.full
        assert replay.metrics() == restored.metrics()
        assert weights_of(replay) == weights_of(restored)
    assert drawn > 30
    assert replay.metrics()["late_priorities"] == (2 if trajectories > 50 else 0)


@pytest.mark.parametrize("shape", ["moves", "with memory"])
def test_with_another_number_of_streams_the_counters_go_on_and_the_rows_do_not(shape):
    replay = settings(**SHAPES[shape]).build(0)
    fill(replay, Script(101), 18)
    for _ in range(7):
        draw(replay)
    replay.update_priorities(torch.tensor([0]), torch.tensor([1.0]))
    assert replay.late == 1
    cfg = settings(**SHAPES[shape], streams=4)
    wider = cfg.build(0)
    wider.load_state_dict(through_a_file(replay.state_dict()))
    assert (wider.rate_limiter.steps, wider.rate_limiter.batches, wider.late) == (replay.rate_limiter.steps, 7, 1)
    assert wider.sample() is None
    assert not wider.full
    script = Script(501, streams=4, seed=9)
    fill(wider, script, 30)
    assert weights_of(wider) == pytest.approx(known(script, cfg, 30 * UNROLL), rel=1e-6)
    batch, _ = draw(wider)
    stream, row = batch.trajectory.step.obs[0].long().T
    expected = script.at(row + torch.arange(cfg.item_steps)[:, None], stream)
    assert torch.equal(batch.trajectory.aux["surprise"], expected[2]["surprise"])
    assert wider.rate_limiter.batches == 8


# -- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_size": 0}, r"algo\.replay\.batch-size=0 must be at least 1"),
        ({"updates_per_step": 0.0}, r"algo\.replay\.updates-per-step=0\.0 must be positive"),
        ({"updates_per_step": -1.0}, r"algo\.replay\.updates-per-step=-1\.0 must be positive"),
        ({"priority_exponent": -0.1}, r"algo\.replay\.priority-exponent=-0\.1 must lie in \[0, 1\]"),
        ({"priority_exponent": 1.1}, r"algo\.replay\.priority-exponent=1\.1 must lie in \[0, 1\]"),
        ({"importance_exponent": -0.1}, r"algo\.replay\.importance-exponent=-0\.1 must lie in \[0, 1\]"),
        ({"importance_exponent": 1.1}, r"algo\.replay\.importance-exponent=1\.1 must lie in \[0, 1\]"),
        (
            {"capacity": 14},
            r"algo\.replay\.capacity=14 cannot hold one sequence of 5 steps for each of 3 environments: raise it to 15",
        ),
        ({"warmup": 22}, r"algo\.replay\.warmup=22 transitions do not hold a batch of 8 items: raise it to 23"),
        (
            {"batch_size": 100, "warmup": 100},
            r"algo\.replay\.warmup=100 transitions do not hold a batch of 100 items: .* 115",
        ),
    ],
)
def test_numbers_that_cannot_work_are_refused_in_a_sentence(changes, sentence):
    with pytest.raises(UserError, match=sentence) as refused:
        settings(**changes)
    assert "\n" not in str(refused.value)


def test_the_least_that_is_asked_for_is_enough():
    script, cfg = Script(101, density=0.0), settings(capacity=15, warmup=23)
    replay = cfg.build(0)
    fill(replay, script, 2)
    assert weights_of(replay) == pytest.approx(known(script, cfg, 2 * UNROLL), rel=1e-6)
    assert draw(replay)[0].trajectory.action.shape == (5, 8)


def test_an_unroll_longer_than_the_ring_is_refused_with_the_first_trajectory():
    with pytest.raises(
        UserError, match=r"holds 5 transitions for each of 3 env.* fewer than the 6 that --algo\.unroll"
    ):
        settings(capacity=17).build(0).add(Script(101).trajectory(0, unroll=6))


def test_more_than_fits_into_memory_is_refused_with_what_would_fit(monkeypatch):
    monkeypatch.setattr("bestiary.config.machine.free_memory", lambda: 3 * 2**30)
    apex = configure(Apex, capacity=2_000_000)
    with pytest.raises(
        UserError, match=r"^algo\.replay\.capacity=2000000 needs .* GiB of memory, of which 3\.0 are"
    ) as refused:
        apex.replay_builder(360).build(0, ATARI, ())
    told = re.search(r"needs ([\d.]+) GiB.* lower it to (\d+) or less$", str(refused.value))
    assert told is not None
    assert 13e9 < float(told[1]) * 2**30 < 16e9
    assert 200_000 < int(told[2]) < 500_000
    configure(Apex, capacity=int(told[2])).replay_builder(360).build(0, ATARI, ())
    monkeypatch.setattr("bestiary.config.machine.free_memory", lambda: None)  # not known: tried
    apex.replay_builder(360).build(0, ATARI, ())


def test_memory_counts_among_what_must_fit(monkeypatch):
    """Stored memory as large as all else: what fits without it does not with it."""
    cfg = settings(**SHAPES["with memory"], capacity=100_000)
    rows = storage_bytes(100_000, SPEC, 16, (), UNROLL)
    state = (torch.zeros(1, rows * UNROLL // (4 * 100_000)),)
    monkeypatch.setattr("bestiary.config.machine.free_memory", lambda: int(1.5 * rows))
    cfg.build(0, SPEC, ())
    with pytest.raises(UserError, match=r"algo\.replay\.capacity=100000 needs 0\.0 GiB"):
        cfg.build(0, SPEC, state)


def test_the_room_of_two_million_moves_of_a_game():
    needed = storage_bytes(2_000_000, ATARI, 4 * 18, (), 100)
    assert 13e9 < needed < 16e9
    frames = (torch.zeros(1, 3, 84, 84, dtype=torch.uint8),)
    assert storage_bytes(2_000_000, ATARI, 4 * 18, frames, 100) == needed + 20_000 * 3 * 84 * 84


def test_the_ring_takes_as_much_room_as_was_said():
    """What is counted before anything is played against the tensors there are."""
    cfg = settings(**SHAPES["with memory"], capacity=49 * STREAMS)
    replay = cfg.build(0)
    fill(replay, Script(101), 1)
    leaves: list[Tensor] = []
    tree.map(leaves.append, (replay.ring.storage, replay.ring.states))
    taken = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    state = tree.map(lambda x: x[:1], Script(101).trajectory(0).state)
    told = storage_bytes(50 * STREAMS, SPEC, 4, state, UNROLL)
    memory = sum(leaf.numel() * leaf.element_size() for leaf in state)
    assert told <= taken <= told + STREAMS * memory  # one more start than whole trajectories
