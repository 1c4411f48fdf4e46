"""Uniform replay: samples are consecutive steps or whole episodes, equally likely, at the set updates per step."""

import io
import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from bestiary import tree
from bestiary.errors import UserError
from bestiary.replay import Uniform
from bestiary.replay.uniform import UniformBuilder, UniformReplay
from bestiary.types import Batch, Spec, TimeStep, Trajectory, transitions

STREAMS, UNROLL = 3, 5
GAMMA = 0.75


SPEC = Spec("script", (3,), torch.float32, 4)


class Script:
    """The time steps of all streams. Every tensor encodes its stream, its step and its script."""

    def __init__(self, steps: int, density: float = 0.15, streams: int = STREAMS, number: int = 0) -> None:
        rng = torch.Generator().manual_seed(number)
        self.number, self.streams = number, streams
        self.is_first = torch.rand(steps, streams, generator=rng) < density
        self.is_first[0] = True
        self.is_terminal = (torch.rand(steps, streams, generator=rng) < 0.3) & ~self.is_first
        self.all = self.steps(0, steps)

    def at(self, index: torch.Tensor, stream: torch.Tensor) -> tuple[TimeStep, torch.Tensor, dict]:
        """Steps [T, B] of streams [B]."""
        return tree.map(lambda x: x[index, stream], self.all)

    def steps(self, first: int, count: int, stream: slice = slice(None)) -> tuple[TimeStep, torch.Tensor, dict]:
        index = torch.arange(first, first + count)[:, None]
        column = torch.arange(self.streams)[stream][None]
        code = 10_000 * column + index + 1  # never 0
        step = TimeStep(
            obs=torch.stack([torch.full_like(code, self.number), column.expand_as(code), index.expand_as(code)], -1),
            prev_action=code + 1,
            reward=code.float(),
            is_first=self.is_first[first : first + count, stream],
            is_terminal=self.is_terminal[first : first + count, stream],
        )
        return step, code + 2, {"logits": code[..., None].double(), "mark": code.to(torch.int32)}

    def trajectory(self, number: int, unroll: int = UNROLL) -> Trajectory:
        start = number * unroll
        stream = torch.arange(self.streams)
        state = (torch.stack([stream, torch.full_like(stream, start)], 1).float(), start + stream[:, None, None] / 8)
        return Trajectory(*self.steps(start, unroll + 1), state, 1000 * number + stream)

    def episodes(self, newest: int, oldest: int = 0) -> set[tuple[int, int, int]]:
        """(stream, first step, steps) of finished episodes that began at `oldest` or later and have a transition."""
        found = set()
        for b in range(self.streams):
            starts = self.is_first[: newest + 1, b].nonzero().flatten().tolist()
            found |= {(b, n, after - n) for n, after in itertools.pairwise(starts) if n >= oldest and after - n > 1}
        return found


def settings(streams: int = STREAMS, **changes: Any) -> UniformBuilder:
    base = {"batch_size": 16, "capacity": 300, "updates_per_step": 50.0, "warmup": 0}
    return UniformBuilder(Uniform(**(base | changes)), streams, UNROLL)


def fill(replay: UniformReplay, script: Script, trajectories: int, first: int = 0, unroll: int = UNROLL) -> None:
    for k in range(first, first + trajectories):
        replay.add(script.trajectory(k, unroll))


def draw(replay: UniformReplay) -> Trajectory:
    batch = replay.sample()
    assert batch is not None
    assert batch.keys is None
    return batch.trajectory


def drain(replay: UniformReplay) -> int:
    return sum(1 for _ in iter(replay.sample, None))


def column(t: Trajectory, b: int) -> tuple[int, int]:
    """Stream and first step of one sample."""
    _, stream, index = t.step.obs[0, b].tolist()
    return stream, index


def different(a: Any, b: Any) -> list[str]:
    """Names of the fields of (step, action, aux) that differ bit for bit."""
    flat = [{**dict(zip(TimeStep._fields, step, strict=True)), "action": act, **aux} for step, act, aux in (a, b)]
    assert flat[0].keys() == flat[1].keys()
    return [k for k in flat[0] if flat[0][k].dtype != flat[1][k].dtype or not torch.equal(flat[0][k], flat[1][k])]


def part(t: Trajectory, steps: slice, b: int) -> Any:
    return tree.map(lambda x: x[steps, b : b + 1], (t.step, t.action, t.aux))


def as_bits(batch: Batch | None) -> Any:
    assert batch is not None
    return tree.map(lambda x: x.tolist(), tuple(batch.trajectory))


# -- sequences ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 5, 17])
@pytest.mark.parametrize("stored_state", [False, True])
def test_a_sequence_is_consecutive_steps_of_one_stream(length, stored_state):
    script = Script(501)
    replay = settings(sequence_length=length, capacity=147, batch_size=8, stored_state=stored_state).build(0)
    slots = 50  # 147 / 3 transitions, and the step that the last one leads to
    for k in range(100):  # the ring buffer wraps around ten times
        replay.add(script.trajectory(k))
        newest = (k + 1) * UNROLL
        if newest < length:
            assert replay.sample() is None
            continue
        t = draw(replay)
        _, stream, index = t.step.obs[0].T
        assert index.min() >= max(0, newest - slots + 1)
        assert index.max() <= newest - length
        expected = script.at(index + torch.arange(length + 1)[:, None], stream)
        assert different((t.step, t.action, t.aux), expected) == []
        assert torch.equal(t.version, 1000 * (index // UNROLL) + stream)


def test_stored_state_is_that_of_the_trajectory_that_begins_there():
    script, replay = Script(501), settings(sequence_length=7, capacity=147, stored_state=True).build(0)
    seen = set()
    for k in range(60):
        replay.add(script.trajectory(k))
        if k < 1:
            continue
        t = draw(replay)
        for b in range(16):
            stream, index = column(t, b)
            assert index % UNROLL == 0
            seen.add((k + 1) - index // UNROLL)
            for got, all_streams in zip(t.state, script.trajectory(index // UNROLL).state, strict=True):
                assert torch.equal(got[b], all_streams[stream])
    assert seen == set(
        range(2, 10)
    )  # trajectories back: 49 transitions hold the starts of nine, two of which are needed


def test_without_stored_state_a_sample_has_none():
    for length in (4, None):
        replay = settings(sequence_length=length).build(0)
        fill(replay, Script(101), 20)
        assert draw(replay).state == ()


def chi_square(counts: dict[Any, int]) -> tuple[float, float]:
    """Pearson's statistic, and its mean plus five standard deviations."""
    n, k = sum(counts.values()), len(counts)
    return sum((c - n / k) ** 2 / (n / k) for c in counts.values()), (k - 1) + 5 * (2 * (k - 1)) ** 0.5


@pytest.mark.parametrize("stored_state", [False, True])
def test_every_sequence_is_equally_likely(stored_state):
    script, replay = (
        Script(501),
        settings(sequence_length=6, capacity=150, stored_state=stored_state, batch_size=25).build(3),
    )
    fill(replay, script, 31)
    newest, slots = 31 * UNROLL, 51
    starts = [n for n in range(newest - slots + 1, newest - 5) if not stored_state or n % UNROLL == 0]
    counts = {(s, n): 0 for s in range(STREAMS) for n in starts}
    for _ in range(200):
        for _, stream, index in draw(replay).step.obs[0].tolist():
            counts[stream, index] += 1
    statistic, limit = chi_square(counts)
    assert statistic < limit


# -- whole episodes -----------------------------------------------------------------------------------------------


def test_a_sample_is_one_episode_from_its_first_step_to_its_last():
    script, replay = Script(1001), settings(capacity=147).build(0)
    slots, sampled = 50, set()
    for k in range(100):
        replay.add(script.trajectory(k))
        newest = (k + 1) * UNROLL
        known = script.episodes(newest, oldest=newest - slots + 1)
        assert {tuple(e) for e in replay.episodes.tolist()} == known  # those that were overwritten are gone
        if not known:
            assert replay.sample() is None
            continue
        t = draw(replay)
        lengths = {(stream, first): length for stream, first, length in known}
        for b in range(16):
            stream, first = column(t, b)
            length = lengths[stream, first]
            sampled.add((stream, first))
            expected = script.steps(first, length, slice(stream, stream + 1))
            assert expected[0].is_first.flatten().tolist() == [True] + [False] * (length - 1)
            assert script.is_first[first + length, stream]
            assert different(part(t, slice(length), b), expected) == []
            assert t.version[b] == 1000 * (first // UNROLL) + stream
        assert len(t.action) == max(lengths[column(t, b)] for b in range(16))  # padded no further than needed
    assert len(sampled) > 50


def test_padding_adds_no_transitions():
    script, replay = Script(1001), settings().build(0)
    padded = 0
    for k in range(40):
        replay.add(script.trajectory(k))
        if not len(replay.episodes):
            continue
        lengths = {(stream, first): length for stream, first, length in replay.episodes.tolist()}
        t = draw(replay)
        m = transitions(t.step, GAMMA)
        for b in range(16):
            stream, first = column(t, b)
            length = lengths[stream, first]
            alone = transitions(script.steps(first, length, slice(stream, stream + 1))[0], GAMMA)
            for joint, single in zip(m, alone, strict=True):
                assert torch.equal(joint[: length - 1, b], single[:, 0])
            assert m.valid[: length - 1, b].all()
            beyond = slice(length - 1, None)
            assert not m.valid[beyond, b].any()
            assert not m.discount[beyond, b].any()
            padded += len(t.action) - length
    assert padded > 500


def test_every_episode_is_equally_likely_however_long_it_is():
    script, replay = Script(501), settings(batch_size=40).build(3)
    fill(replay, script, 31)
    known = script.episodes(31 * UNROLL, oldest=31 * UNROLL - 100)
    assert len({length for _, _, length in known}) > 5
    counts = {(stream, first): 0 for stream, first, _ in known}
    for _ in range(200):
        for _, stream, index in draw(replay).step.obs[0].tolist():
            counts[stream, index] += 1
    statistic, limit = chi_square(counts)
    assert statistic < limit


def test_an_episode_longer_than_the_ring_buffer_is_never_sampled():
    script, replay = Script(501, density=0.0), settings(capacity=60).build(0)
    script.is_first[[100, 104, 140, 141]] = True  # lengths: far too long, four steps, too long, no transition
    for k in range(40):
        replay.add(script.trajectory(k))
        while (batch := replay.sample()) is not None:
            assert {column(batch.trajectory, b)[1] for b in range(16)} == {100}
            replay.rate_limiter.batches = int(replay.cfg.updates_per_step * replay.rate_limiter.steps)
        known = script.episodes((k + 1) * UNROLL, oldest=(k + 1) * UNROLL - 20)
        assert {tuple(e) for e in replay.episodes.tolist()} == known


@pytest.mark.parametrize("length", [None, 6])
def test_an_interrupted_episode_is_not_joined_to_the_next(length):
    """A resumed run starts new episodes at step 0 of its first trajectory, although the old ones had not ended."""
    replay = settings(sequence_length=length, batch_size=32).build(0)
    sampled = set()
    for number in range(6):
        script = Script(101, density=0.1, number=number)
        for k in range(4):
            replay.add(script.trajectory(k))
            t = draw(replay) if not replay.is_empty() else None
            for b in range(0 if t is None else 32):
                assert t is not None
                kept = ~t.step.is_first[:, b].roll(-1) if length is None else torch.ones(7, dtype=torch.bool)
                code = t.step.obs[:, b]
                crossing = code[1:, 0] != code[:-1, 0]
                assert t.step.is_first[1:, b][crossing].all()  # no transition leads from one script to another
                inside = ~crossing & (code[1:, 2] != code[:-1, 2])
                assert (code[1:, 2] - code[:-1, 2])[inside & kept[:-1]].eq(1).all()
                if length is None:
                    last = int((~t.step.is_first[:, b]).nonzero().max())
                    source, stream, index = code[last].tolist()
                    assert code[: last + 1, 0].eq(source).all()
                    assert Script(101, density=0.1, number=source).is_first[
                        index + 1, stream
                    ]  # the episode really ended there
                    sampled.add(source)
    assert length is not None or len(sampled) > 3


# -- ring buffer ---------------------------------------------------------------------------------------------------


def test_the_step_that_two_trajectories_share_is_stored_once():
    replay = settings(sequence_length=3, capacity=3000).build(0)
    for k in range(10):
        fill(replay, Script(101), 1, first=k)
        assert replay.metrics()["replay_steps"] == STREAMS * (UNROLL * (k + 1) + 1)
    steps = replay.ring.storage[0].obs[: 10 * UNROLL + 1, :, 2]
    assert torch.equal(steps, torch.arange(10 * UNROLL + 1)[:, None].expand(-1, STREAMS))


def test_the_ring_buffer_holds_its_capacity_and_never_grows():
    replay = settings(sequence_length=3, capacity=100).build(0)
    script = Script(501)
    fill(replay, script, 1)
    place = replay.ring.storage[0].obs.data_ptr()
    fill(replay, script, 99, first=1)
    assert replay.ring.storage[0].obs.data_ptr() == place
    assert len(replay.ring.storage[0].obs) == 34  # 100 // 3 transitions each
    assert replay.metrics()["replay_steps"] == 34 * STREAMS


def test_a_sampled_batch_does_not_change_when_more_is_added():
    for length in (None, 8):
        replay = settings(sequence_length=length, capacity=60, batch_size=4).build(0)
        script = Script(501)
        fill(replay, script, 8)
        batch = replay.sample()
        before = as_bits(batch)
        fill(replay, script, 20, first=8)
        assert as_bits(batch) == before


# -- frequencies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [None, 4])
@pytest.mark.parametrize("ratio", [0.05, 0.25, 1, 3.7])
def test_updates_per_step_are_kept_over_a_long_run(ratio, length):
    script = Script(1001)
    replay = settings(updates_per_step=ratio, sequence_length=length, batch_size=1).build(0)
    collected = given = 0
    trajectories = 200 if ratio < 1 else 80
    for k in range(trajectories):
        replay.add(script.trajectory(k))
        collected += int((~script.is_first[k * UNROLL + 1 : (k + 1) * UNROLL + 1]).sum())  # resets are no transitions
        given += drain(replay)
        if not replay.is_empty():
            assert 0 <= Fraction(str(ratio)) * collected - given < 1 + 1e-9
        assert replay.rate_limiter.steps == collected
    assert collected < trajectories * UNROLL * STREAMS
    assert replay.metrics()["updates_per_step"] == pytest.approx(ratio, abs=1 / collected)


def test_nothing_is_sampled_before_the_warmup_and_all_due_after_it():
    script, replay = Script(501, density=0.0), settings(warmup=100, updates_per_step=0.5, sequence_length=2).build(0)
    sampled = []
    for k in range(10):  # 15 transitions each
        replay.add(script.trajectory(k))
        sampled.append(drain(replay))
    assert sampled == [0, 0, 0, 0, 0, 0, 52, 8, 7, 8]


def test_the_replay_is_full_when_more_is_due_than_one_trajectory_allows():
    script, replay = Script(501, density=0.0), settings(updates_per_step=0.4, sequence_length=2, warmup=20).build(0)
    fullness = []
    for k in range(3):  # 15 transitions and 6 updates each
        replay.add(script.trajectory(k))
        fullness.append(replay.full)
    assert fullness == [False, True, True]  # nothing before the warm-up, then 12 and 18
    for left in range(17, 5, -1):
        assert replay.sample() is not None
        assert replay.full == (left > 6)


def test_the_replay_is_not_full_while_less_than_one_update_is_due():
    """Several trajectories are needed for one update."""
    script, replay = Script(501, density=0.0), settings(updates_per_step=0.03, sequence_length=2, warmup=0).build(0)
    sampled = 0
    for k in range(30):  # 0.45 updates each
        assert not replay.full
        replay.add(script.trajectory(k))
        sampled += drain(replay)
    assert sampled == 13


@pytest.mark.parametrize("length", [None, 40])
def test_the_replay_is_not_full_while_there_is_nothing_to_sample(length):
    """No episode has ended, or there are fewer steps than a sequence has: more experience is needed."""
    script, replay = Script(501, density=0.0), settings(sequence_length=length, batch_size=1).build(0)
    script.is_first[38] = True
    for k in range(7):
        replay.add(script.trajectory(k))
        assert replay.rate_limiter.due > 100
        assert replay.sample() is None
        assert not replay.full
    replay.add(script.trajectory(7))
    assert replay.full
    assert replay.sample() is not None


def test_samples_depend_on_the_seed_alone():
    bits = []
    for seed in (0, 0, 1):
        replay = settings(sequence_length=4).build(seed)
        fill(replay, Script(101), 10)
        bits.append([as_bits(replay.sample()) for _ in range(3)])
    assert bits[0] == bits[1]
    assert bits[0] != bits[2]
    assert bits[0][0] != bits[0][1]


# -- checkpoints --------------------------------------------------------------------------------------------------


def through_a_file(snapshot: Any) -> tuple[Any, int]:
    file = io.BytesIO()
    torch.save(snapshot, file)
    size = file.tell()
    file.seek(0)
    return torch.load(file, weights_only=True), size


KINDS = {
    "episodes": settings(capacity=147),
    "sequences": settings(capacity=147, sequence_length=6),
    "stored state": settings(capacity=147, sequence_length=6, stored_state=True),
}


@pytest.mark.parametrize("cfg", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("trajectories", [0, 3, 9, 10, 57])
def test_a_restored_replay_continues_identically(cfg, trajectories):
    script, replay = Script(501), cfg.build(0)
    for k in range(trajectories):
        replay.add(script.trajectory(k))
        replay.sample()
    saved, _ = through_a_file(replay.state_dict())
    restored = cfg.build(0)
    restored.load_state_dict(saved)
    for k in range(trajectories, trajectories + 30):
        for _ in range(2):
            given = [r.sample() for r in (replay, restored)]
            assert (given[0] is None) == (given[1] is None)
            if given[0] is not None:
                assert as_bits(given[0]) == as_bits(given[1])
        for r in (replay, restored):
            r.add(script.trajectory(k))
        assert replay.full == restored.full
        assert replay.metrics() == restored.metrics()


def test_a_partly_filled_replay_is_saved_without_its_empty_storage():
    sizes = []
    for capacity in (300, 300_000):
        replay = settings(capacity=capacity, sequence_length=4).build(0)
        fill(replay, Script(101), 4)
        sizes.append(through_a_file(replay.state_dict())[1])
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.parametrize("cfg", KINDS.values(), ids=KINDS)
def test_with_other_streams_only_the_counters_are_restored(cfg):
    replay = cfg.build(0)
    fill(replay, Script(101), 12)
    given = [replay.sample() for _ in range(7)]
    assert all(given)
    wider = replace(cfg, streams=4).build(0)
    wider.load_state_dict(through_a_file(replay.state_dict())[0])
    assert (wider.rate_limiter.steps, wider.rate_limiter.batches) == (replay.rate_limiter.steps, 7)
    assert wider.sample() is None
    assert not wider.full
    script = Script(501, streams=4, number=9)
    fill(wider, script, 30)
    t = draw(wider)
    assert t.step.obs[..., 0].eq(9).all()
    assert wider.rate_limiter.batches == 8


# -- invalid settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_size": 0}, r"algo\.replay\.batch-size=0 must be at least 1"),
        (
            {"sequence_length": 0},
            r"algo\.replay\.sequence-length=0 must be at least 1 transition, or None for whole episodes",
        ),
        ({"updates_per_step": 0.0}, r"algo\.replay\.updates-per-step=0\.0 must be positive"),
        ({"updates_per_step": -1.0}, r"algo\.replay\.updates-per-step=-1\.0 must be positive"),
        ({"warmup": -1}, r"algo\.replay\.warmup=-1 must be at least 0"),
        ({"stored_state": True}, r"algo\.replay\.stored-state needs algo\.replay\.sequence-length"),
        ({"capacity": 15}, r"algo\.replay\.capacity=15 is too small for one batch: it needs 16 transitions"),
        (
            {"capacity": 159, "sequence_length": 10},
            r"algo\.replay\.capacity=159 is too small for one batch: it needs 160 transitions",
        ),
    ],
)
def test_invalid_settings_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        settings(**changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"capacity": 14},
            r"capacity=14 holds 4 transitions for each of 3 environments, fewer than the 5 .*--algo\.unroll",
        ),
        (
            {"capacity": 20, "sequence_length": 7},
            r"holds 6 transitions .* fewer than the 7 that --algo\.replay\.sequence-length needs",
        ),
        (
            {"capacity": 29, "sequence_length": 7, "stored_state": True},
            r"holds 9 transitions .* fewer than the 10 .*--algo\.replay\.sequence-length",
        ),
    ],
)
def test_a_ring_buffer_too_short_for_a_sample_is_refused(changes, sentence):
    script = Script(101)
    with pytest.raises(UserError, match=sentence):
        settings(batch_size=1, **changes).build(0).add(script.trajectory(0))
    enough = settings(batch_size=1, **changes | {"capacity": changes["capacity"] + 1}).build(0)
    fill(enough, script, 20)
    assert changes.get("length") is None or enough.sample() is not None


def test_a_uniform_replay_has_no_priorities():
    with pytest.raises(AssertionError, match="no priorities"):
        settings().build(0).update_priorities(torch.zeros(1), torch.zeros(1))


def test_trajectories_must_have_one_length():
    replay, script = settings().build(0), Script(101)
    replay.add(script.trajectory(0))
    with pytest.raises(AssertionError, match="one length"):
        replay.add(script.trajectory(0, unroll=6))


def test_episodes_longer_than_the_ring_buffer_are_refused():
    """Otherwise training would run without a single update."""
    small = settings(capacity=10 * STREAMS)
    with pytest.raises(
        UserError, match=r"holds 10 transitions for each of 3 env.* can have 11: raise it to 33, or set --alg"
    ):
        small.build(0, SPEC._replace(horizon=11))
    small.build(0, SPEC._replace(horizon=10))
    settings(capacity=10 * STREAMS, batch_size=2, sequence_length=2).build(0, SPEC._replace(horizon=11))
