"""Prioritized replay: items are consecutive steps, sampled in proportion to priority, and never incomplete."""

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
    """The time steps of all streams. Observations encode stream and step; `td_error` gives initial priorities.

    A step before another episode's first has the largest TD error: it must be ignored.
    """

    def __init__(self, steps: int, density: float = 0.15, streams: int = STREAMS, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.streams = streams
        self.is_first = torch.rand(steps, streams, generator=rng) < density
        self.is_first[0] = True
        self.is_terminal = (torch.rand(steps, streams, generator=rng) < 0.3) & ~self.is_first
        self.td_error = 10 ** (torch.rand(steps, streams, generator=rng) - 0.5)
        self.td_error[:-1][self.is_first[1:]] = 4.0
        self.starts, self.td_errors = self.is_first.tolist(), self.td_error.tolist()  # lists, for loops

    def at(self, index: Tensor, stream: Tensor) -> tuple[TimeStep, Tensor, dict[str, Tensor]]:
        """Steps [T, B] of streams [B]."""
        stream = stream.expand_as(index)
        number = 10_000 * stream + index + 1  # never 0
        step = TimeStep(
            obs=torch.stack([stream, index], -1).float(),
            prev_action=number + 1,
            reward=number.float(),
            is_first=self.is_first[index, stream],
            is_terminal=self.is_terminal[index, stream],
        )
        return step, number + 2, {"td_error": self.td_error[index, stream]}

    def memory(self, index: Tensor, stream: Tensor) -> tuple[Tensor, ...]:
        """Recurrent state just before steps [B] of streams [B]."""
        return torch.stack([stream, index], 1).float(), (index + stream / 8)[:, None, None]

    def trajectory(self, number: int, unroll: int = UNROLL) -> Trajectory:
        start, stream = number * unroll, torch.arange(self.streams)
        steps = torch.arange(start, start + unroll + 1)[:, None].expand(-1, self.streams)
        return Trajectory(*self.at(steps, stream), self.memory(steps[0], stream), 1000 * number + stream)


def settings(
    streams: int = STREAMS,
    burn_in: int = 2,
    length: int = 1,
    n_step: int = 2,
    initial_priorities: Any = None,
    **changes: Any,
) -> PrioritizedBuilder:
    """An item's priority is the TD error of its first trained step; the ring buffer holds 49 transitions per stream."""
    base: dict[str, Any] = {"batch_size": 8, "stride": 1} | changes
    base = {
        "sequence_length": burn_in + length,
        "capacity": 49 * streams,
        "updates_per_step": 100.0,
        "warmup": streams * (burn_in + length + n_step) + base["batch_size"] * base["stride"],
    } | base
    initial_priorities = initial_priorities or (lambda t: t.aux["td_error"][burn_in])
    return PrioritizedBuilder(Prioritized(**base), streams, UNROLL, burn_in, n_step, initial_priorities)


SHAPES: dict[str, dict[str, Any]] = {
    "transitions": {"stride": 1, "burn_in": 3, "length": 1, "n_step": 3},
    "transitions alone": {"stride": 1, "burn_in": 0, "length": 1, "n_step": 1},
    "overlapping": {"stride": 4, "burn_in": 2, "length": 6, "n_step": 2},
    "far apart": {"stride": 11, "burn_in": 1, "length": 2, "n_step": 1},
    "stored state": {"stride": 5, "burn_in": 5, "length": 5, "n_step": 2, "stored_state": True},
    "stored state, long": {"stride": 10, "burn_in": 10, "length": 7, "n_step": 3, "stored_state": True},
    "stored state, no burn-in": {"stride": 5, "burn_in": 0, "length": 8, "n_step": 1, "stored_state": True},
    "stored state, burn-in ends elsewhere": {"stride": 5, "burn_in": 3, "length": 4, "n_step": 1, "stored_state": True},
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def known(script: Script, cfg: PrioritizedBuilder, newest: int) -> dict[int, float]:
    """Key -> initial weight of every complete item, found by trying all."""
    oldest = max(0, newest - cfg.cfg.capacity // cfg.streams)
    found = {}
    for number in range(newest // cfg.stride + 1):
        first = number * cfg.stride
        if first < oldest or first + cfg.item_steps - 1 > newest:
            continue
        for stream in range(cfg.streams):
            trained = range(first + cfg.burn_in, first + cfg.burn_in + cfg.length)
            nothing = all(script.starts[index + 1][stream] for index in trained)
            td_error = max(script.td_errors[trained[0]][stream], cfg.cfg.priority_floor)
            found[number * cfg.streams + stream] = 0.0 if nothing else td_error**cfg.cfg.priority_exponent
    return found


def weights_of(replay: PrioritizedReplay) -> dict[int, float]:
    """Key -> weight in the sum tree; all other weights must be 0."""
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


# -- items -----------------------------------------------------------------------------------------------------------


@every_shape
def test_an_item_is_consecutive_steps_of_one_stream_with_its_state(shape):
    script, cfg = Script(501), settings(**shape)
    replay = cfg.build(0)
    sampled: set[int] = set()
    for k in range(100):  # the ring buffer wraps around ten times
        replay.add(script.trajectory(k))
        newest = (k + 1) * UNROLL
        batch = replay.sample()
        if batch is None:
            assert newest < cfg.cfg.warmup
            continue
        t = batch.trajectory
        stream, index = t.step.obs[0].long().T
        assert (index % cfg.stride == 0).all()
        assert index.min() >= newest - 49
        assert index.max() <= newest + 1 - cfg.item_steps
        expected = script.at(index + torch.arange(cfg.item_steps)[:, None], stream)
        assert tree.map(torch.equal, (t.step, t.action, t.aux), expected) == tree.map(lambda _: True, expected)
        assert torch.equal(t.version, 1000 * (index // UNROLL) + stream)
        assert batch.keys is not None
        assert torch.equal(batch.keys, index // cfg.stride * STREAMS + stream)
        sampled |= set(batch.keys.tolist())
        known_later = cfg.cfg.stored_state and cfg.burn_in and cfg.burn_in % UNROLL == 0
        for got, wanted in (
            (t.state, script.memory(index, stream) if cfg.cfg.stored_state else ()),
            (batch.actor_state, script.memory(index + cfg.burn_in, stream) if known_later else ()),
        ):
            assert len(got) == len(wanted)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert len(sampled) > 60


@every_shape
@pytest.mark.parametrize("density", [0.1, 0.6, 1.0])
def test_items_are_complete_and_have_a_valid_transition(shape, density):
    """However large the TD error is between two episodes."""
    script, cfg = Script(301, density), settings(**shape)
    replay, useless = cfg.build(0), 0
    for k in range(60):
        replay.add(script.trajectory(k))
        replay.rate_limiter.steps = 10**6  # resets are no transitions, and there is nothing else where the density is 1
        expected = known(script, cfg, (k + 1) * UNROLL)
        assert weights_of(replay) == pytest.approx(expected, rel=1e-6)
        useless += sum(not weight for weight in expected.values())
        if not any(expected.values()):
            assert replay.sample() is None
            assert not replay.full
            continue
        batch, keys = draw(replay)
        assert all(expected[key] for key in keys)
        starts = batch.trajectory.step.is_first[cfg.burn_in + 1 : cfg.burn_in + 1 + cfg.length]
        assert not starts.all(0).any()
    assert useless or density == 0.1 or cfg.length > 3


@pytest.mark.parametrize("stride", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("spare", [0, 1, 4])
def test_a_ring_buffer_of_little_more_than_one_item_works(stride, spare):
    """One trajectory may both complete an item and overwrite its first step."""
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
    assert (0 in held) == (stride > spare + 2)  # steps at which an item can begin


def test_initial_priorities_need_no_observations():
    """They are computed from what the actor recorded, so images need not be copied."""
    seen = []

    def initial_priorities(t: Trajectory) -> Tensor:
        seen.append(t.step.obs.shape)
        return t.aux["td_error"][2]

    replay = settings(initial_priorities=initial_priorities).build(0)
    fill(replay, Script(101), 3)
    assert all(len(shape) == 2 for shape in seen)
    assert sum(columns for _, columns in seen) == len(replay) == STREAMS * (3 * UNROLL + 1 - 4)  # each once


def test_a_sampled_batch_does_not_change_when_more_is_added():
    replay, script = settings(**SHAPES["stored state"], capacity=60).build(0), Script(501)
    fill(replay, script, 8)
    batch, _ = draw(replay)
    before = as_bits(batch)
    fill(replay, script, 20, first=8)
    assert as_bits(batch) == before


# -- frequencies ------------------------------------------------------------------------------------------------------


def chance(counts: dict[int, int], expected: dict[int, float]) -> float:
    """p-value of Pearson's chi-squared statistic."""
    total = sum(expected.values())
    n = sum(counts.values())
    shares = {key: n * weight / total for key, weight in expected.items() if weight}
    assert not any(count for key, count in counts.items() if key not in shares)
    assert min(shares.values()) > 4
    statistic = sum((counts[key] - share) ** 2 / share for key, share in shares.items())
    half = torch.tensor([len(shares) - 1, statistic], dtype=torch.float64) / 2
    return torch.special.gammaincc(*half).item()


@pytest.mark.parametrize(("alpha", "shape"), [(0.0, "overlapping"), (0.6, "transitions"), (1.0, "overlapping")])
def test_items_are_sampled_in_proportion_to_their_priority(alpha, shape):
    """Batches of one, which are independent. Counts that are too even would be wrong as well."""
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
    assert chance(counts, others) < 1e-6  # the test can fail


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("shape", ["transitions", "overlapping"])
def test_importance_sampling_weights(alpha, beta, shape):
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


def test_samples_depend_on_the_seed_alone():
    bits = []
    for seed in (0, 0, 1):
        replay = settings().build(seed)
        fill(replay, Script(101), 10)
        bits.append([as_bits(replay.sample()) for _ in range(3)])
    assert bits[0] == bits[1]
    assert bits[0] != bits[2]
    assert bits[0][0] != bits[0][1]


# -- new priorities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_new_priority_changes_the_weight_of_its_item_alone(alpha):
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


def test_the_last_priority_of_an_item_sampled_twice_counts():
    replay = settings(priority_exponent=1.0).build(0)
    fill(replay, Script(301), 23)
    _, (key, *_) = draw(replay)
    replay.update_priorities(torch.tensor([key, key, key]), torch.tensor([3.0, 9.0, 5.0]))
    assert weights_of(replay)[key] == 5.0


def test_a_late_priority_is_counted_and_changes_nothing():
    """Another item has its slot by then."""
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
def test_a_nan_priority_is_refused_and_nothing_changes(wrong, place):
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


def test_a_nan_initial_priority_is_refused():
    script = Script(101, density=0.0)
    script.td_error[7, 1] = float("nan")
    with pytest.raises(ValueError, match="cannot have weight nan"):
        fill(settings().build(0), script, 3)


# -- all operations ---------------------------------------------------------------------------------------------------

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
def test_the_replay_equals_a_dictionary(operations, shape, capacity, alpha):
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


# -- updates per step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["transitions", "overlapping"])
@pytest.mark.parametrize("ratio", [0.05, 0.25, 1, 3.7])
def test_updates_per_step_are_kept_over_a_long_run(ratio, shape):
    script, cfg = Script(801), settings(**SHAPES[shape], updates_per_step=ratio, batch_size=2)
    replay = cfg.build(0)
    collected = given = 0
    for k in range(160 if ratio < 1 else 40):
        replay.add(script.trajectory(k))
        collected += int((~script.is_first[k * UNROLL + 1 : (k + 1) * UNROLL + 1]).sum())  # resets are no transitions
        given += drain(replay)
        if collected >= cfg.cfg.warmup:
            assert 0 <= Fraction(str(ratio)) * collected - given < 1 + 1e-9
        else:
            assert given == 0
    metrics = replay.metrics()
    assert metrics["updates_per_step"] == given / collected == pytest.approx(ratio, abs=1 / collected)
    assert metrics["replay_ratio"] == pytest.approx(given * 2 * cfg.length / collected)


def test_nothing_is_sampled_before_the_warmup_and_all_due_after_it():
    script, replay = Script(101, density=0.0), settings(warmup=100, updates_per_step=0.5).build(0)
    sampled = []
    for k in range(10):  # 15 transitions each
        replay.add(script.trajectory(k))
        sampled.append(drain(replay))
    assert sampled == [0, 0, 0, 0, 0, 0, 52, 8, 7, 8]


def test_the_replay_is_full_when_more_is_due_than_one_trajectory_brings():
    script, replay = Script(101, density=0.0), settings(updates_per_step=0.4, warmup=40).build(0)
    fullness = []
    for k in range(4):  # 15 transitions and 6 updates each
        replay.add(script.trajectory(k))
        fullness.append(replay.full)
    assert fullness == [False, False, True, True]  # nothing before the warm-up, then 18 and 24
    for left in range(23, -1, -1):
        assert replay.sample() is not None
        assert replay.full == (left > 6)
    assert replay.sample() is None


def test_the_replay_is_not_full_while_less_than_one_update_is_due():
    """Several trajectories are needed for one update."""
    script, replay = Script(201, density=0.0), settings(updates_per_step=0.03).build(0)
    sampled = 0
    for k in range(30):  # 0.45 updates each
        assert not replay.full
        replay.add(script.trajectory(k))
        assert replay.full == (replay.rate_limiter.due >= 1)
        sampled += drain(replay)
    assert sampled == 13


# -- checkpoints ------------------------------------------------------------------------------------------------------


# -- eviction -------------------------------------------------------------------------------------------------------


@every_shape
def test_the_trajectory_of_the_lowest_priority_is_evicted(shape):
    """Against a loop over blocks (a trajectory of all streams each), with priorities that change."""
    script, cfg = Script(501), settings(**shape, eviction="priority")
    replay, rng = cfg.build(0), np.random.default_rng(0)
    weight: dict[int, float] = {}
    blocks: set[int] = set()

    def steps_of(key: int) -> range:
        return range(key // STREAMS * cfg.stride, key // STREAMS * cfg.stride + cfg.item_steps)

    def total_priority(block: int) -> float:
        return sum(w for key, w in weight.items() if steps_of(key)[0] // UNROLL == block)

    for k in range(80):
        for block in (0, 1) if k == 0 else (k + 1,):  # a trajectory's last step begins the next block
            if len(blocks) == 10:  # 50 slots
                lost = min((b for b in sorted(blocks) if b < block - -(-cfg.item_steps // UNROLL)), key=total_priority)
                blocks.remove(lost)
                weight = {key: w for key, w in weight.items() if lost not in {r // UNROLL for r in steps_of(key)}}
            blocks.add(block)
        replay.add(script.trajectory(k))
        everything = known(script, replace(cfg, cfg=replace(cfg.cfg, capacity=10_000)), (k + 1) * UNROLL)
        for key, w in everything.items():
            if k * UNROLL < steps_of(key)[-1] <= (k + 1) * UNROLL and {r // UNROLL for r in steps_of(key)} <= blocks:
                weight[key] = w
        assert weights_of(replay) == pytest.approx(weight)
        if replay.rate_limiter.due < 1 or not any(weight.values()):
            continue
        batch, keys = draw(replay)
        first = torch.tensor([steps_of(key)[0] for key in keys])
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
def test_items_of_high_priority_are_kept_longest(eviction, kept):
    script, cfg = Script(501, density=0.0), settings(eviction=eviction)
    script.td_error[15:20] = 100.0
    replay = cfg.build(0)
    fill(replay, script, 60)
    assert (max(weights_of(replay).values()) > 10) == kept


def test_priority_eviction_continues_identically_after_a_restart():
    script, cfg = Script(501), settings(eviction="priority")
    replay, restored = cfg.build(0), cfg.build(0)
    fill(replay, script, 40)
    restored.load_state_dict(through_a_file(replay.state_dict()))
    for k in range(40, 60):
        for one in (replay, restored):
            one.add(script.trajectory(k))
        assert weights_of(replay) == weights_of(restored)
        assert as_bits(replay.sample()) == as_bits(restored.sample())


def test_priority_eviction_with_too_few_blocks_is_refused():
    with pytest.raises(UserError, match=r"is too small for .* raise it to 60, or use fifo"):
        settings(burn_in=9, capacity=12 * STREAMS, eviction="priority")
    fill(settings(burn_in=9, capacity=60, eviction="priority").build(0), Script(501), 90)


def learn(replay: PrioritizedReplay) -> Any:
    """Sample, and update with priorities that depend on the keys."""
    batch = replay.sample()
    if batch is not None:
        assert batch.keys is not None
        replay.update_priorities(batch.keys, 1 + batch.keys % 7)
    return as_bits(batch)


@pytest.mark.parametrize("shape", ["transitions", "overlapping", "stored state"])
@pytest.mark.parametrize("trajectories", [0, 1, 3, 9, 10, 57])
def test_a_restored_replay_continues_identically(shape, trajectories):
    script, cfg = Script(501), settings(**SHAPES[shape], updates_per_step=0.2)
    replay = cfg.build(0)
    for k in range(trajectories):
        replay.add(script.trajectory(k))
        learn(replay)
    if trajectories > 50:
        replay.update_priorities(torch.tensor([0, 1]), torch.tensor([5.0, 6.0]))  # overwritten
    restored = cfg.build(0)
    restored.load_state_dict(through_a_file(replay.state_dict()))
    sampled = 0
    for k in range(trajectories, trajectories + 30):
        for _ in range(2):
            bits, again = learn(replay), learn(restored)
            assert bits == again
            sampled += bits is not None
        for r in (replay, restored):
            r.add(script.trajectory(k))
        assert replay.full == restored.full
        assert replay.metrics() == restored.metrics()
        assert weights_of(replay) == weights_of(restored)
    assert sampled > 30
    assert replay.metrics()["late_priorities"] == (2 if trajectories > 50 else 0)


@pytest.mark.parametrize("shape", ["transitions", "stored state"])
def test_with_other_streams_only_the_counters_are_restored(shape):
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
    stream, index = batch.trajectory.step.obs[0].long().T
    expected = script.at(index + torch.arange(cfg.item_steps)[:, None], stream)
    assert torch.equal(batch.trajectory.aux["td_error"], expected[2]["td_error"])
    assert wider.rate_limiter.batches == 8


# -- invalid settings -------------------------------------------------------------------------------------------------


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
def test_invalid_settings_are_refused_in_one_sentence(changes, sentence):
    with pytest.raises(UserError, match=sentence) as refused:
        settings(**changes)
    assert "\n" not in str(refused.value)


def test_the_smallest_allowed_capacity_and_warmup_work():
    script, cfg = Script(101, density=0.0), settings(capacity=15, warmup=23)
    replay = cfg.build(0)
    fill(replay, script, 2)
    assert weights_of(replay) == pytest.approx(known(script, cfg, 2 * UNROLL), rel=1e-6)
    assert draw(replay)[0].trajectory.action.shape == (5, 8)


def test_an_unroll_longer_than_the_ring_buffer_is_refused():
    with pytest.raises(
        UserError, match=r"holds 5 transitions for each of 3 env.* fewer than the 6 that --algo\.unroll"
    ):
        settings(capacity=17).build(0).add(Script(101).trajectory(0, unroll=6))


def test_a_replay_larger_than_memory_is_refused_with_what_would_fit(monkeypatch):
    monkeypatch.setattr("bestiary.config.machine.free_memory", lambda: 3 * 2**30)
    apex = configure(Apex, capacity=2_000_000)
    with pytest.raises(
        UserError, match=r"^algo\.replay\.capacity=2000000 needs .* GiB of memory, of which 3\.0 are"
    ) as refused:
        apex.replay_builder(360).build(0, ATARI, ())
    found = re.search(r"needs ([\d.]+) GiB.* lower it to (\d+) or less$", str(refused.value))
    assert found is not None
    assert 13e9 < float(found[1]) * 2**30 < 16e9
    assert 200_000 < int(found[2]) < 500_000
    configure(Apex, capacity=int(found[2])).replay_builder(360).build(0, ATARI, ())
    monkeypatch.setattr("bestiary.config.machine.free_memory", lambda: None)  # unknown: it is tried
    apex.replay_builder(360).build(0, ATARI, ())


def test_stored_state_counts_among_what_must_fit(monkeypatch):
    """Stored state as large as all else: a replay that fits without it does not fit with it."""
    cfg = settings(**SHAPES["stored state"], capacity=100_000)
    steps = storage_bytes(100_000, SPEC, 16, (), UNROLL)
    state = (torch.zeros(1, steps * UNROLL // (4 * 100_000)),)
    monkeypatch.setattr("bestiary.config.machine.free_memory", lambda: int(1.5 * steps))
    cfg.build(0, SPEC, ())
    with pytest.raises(UserError, match=r"algo\.replay\.capacity=100000 needs 0\.0 GiB"):
        cfg.build(0, SPEC, state)


def test_the_bytes_of_two_million_atari_transitions():
    needed = storage_bytes(2_000_000, ATARI, 4 * 18, (), 100)
    assert 13e9 < needed < 16e9
    frames = (torch.zeros(1, 3, 84, 84, dtype=torch.uint8),)
    assert storage_bytes(2_000_000, ATARI, 4 * 18, frames, 100) == needed + 20_000 * 3 * 84 * 84


def test_the_ring_buffer_takes_as_many_bytes_as_predicted():
    """The prediction against the tensors."""
    cfg = settings(**SHAPES["stored state"], capacity=49 * STREAMS)
    replay = cfg.build(0)
    fill(replay, Script(101), 1)
    leaves: list[Tensor] = []
    tree.map(leaves.append, (replay.ring.storage, replay.ring.states))
    taken = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    state = tree.map(lambda x: x[:1], Script(101).trajectory(0).state)
    predicted = storage_bytes(50 * STREAMS, SPEC, 4, state, UNROLL)
    memory = sum(leaf.numel() * leaf.element_size() for leaf in state)
    assert predicted <= taken <= predicted + STREAMS * memory  # one more state than whole trajectories
