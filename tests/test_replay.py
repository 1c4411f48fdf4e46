"""The FIFO replay: every trajectory is sampled once, in order of arrival, however it was added."""

import io
from collections.abc import Iterator

import pytest
import torch

from bestiary.replay import Fifo
from bestiary.replay.fifo import FifoBuilder, FifoReplay
from bestiary.types import Batch, TimeStep, Trajectory

STEPS = 4  # three transitions


def trajectory(first: int, width: int) -> Trajectory:
    """Streams first, first + 1, ...: every tensor encodes its stream, and those of time steps their step."""
    stream = torch.arange(first, first + width)
    row = torch.arange(STEPS)[:, None]
    code = 100 * stream + row  # [T+1, B]
    step = TimeStep(
        obs=code[..., None].float().expand(STEPS, width, 2).clone(),
        prev_action=code,
        reward=code.double(),
        is_first=(stream + row) % 3 == 0,
        is_terminal=(stream + row) % 5 == 0,
    )
    aux = {"logits": code[..., None].float(), "mark": code}
    return Trajectory(step, code + 1, aux, (stream[:, None].float(), stream[:, None, None] * 7), stream + 1000)


def assert_streams(batch: Batch | None, streams: list[int]) -> None:
    """The batch holds exactly these streams, each whole, in this order."""
    assert batch is not None
    expected = [trajectory(s, 1) for s in streams]
    t = batch.trajectory
    assert t.action.shape == (STEPS, len(streams))
    for i, e in enumerate(expected):
        for got, want in zip([*t.step, t.action], [*e.step, e.action], strict=True):
            assert torch.equal(got[:, i], want[:, 0])
        assert t.aux.keys() == e.aux.keys()
        assert all(torch.equal(t.aux[k][:, i], e.aux[k][:, 0]) for k in e.aux)
        assert all(torch.equal(got[i], want[0]) for got, want in zip(t.state, e.state, strict=True))
        assert torch.equal(t.version[i], e.version[0])


def drain(replay: FifoReplay) -> Iterator[Batch]:
    while (batch := replay.sample()) is not None:
        yield batch


def test_an_empty_queue_has_no_batch():
    assert FifoBuilder(Fifo(batch_size=1, capacity=4), 1).build().sample() is None


def test_a_batch_waits_until_it_is_full():
    replay = FifoBuilder(Fifo(batch_size=3, capacity=8), 1).build()
    replay.add(trajectory(0, 2))
    assert replay.sample() is None
    replay.add(trajectory(2, 1))
    assert_streams(replay.sample(), [0, 1, 2])
    assert replay.sample() is None


def test_one_wide_trajectory_makes_several_batches():
    replay = FifoBuilder(Fifo(batch_size=2, capacity=8), 1).build()
    replay.add(trajectory(0, 7))
    for streams in ([0, 1], [2, 3], [4, 5]):
        assert_streams(replay.sample(), streams)
    assert replay.sample() is None
    replay.add(trajectory(7, 1))
    assert_streams(replay.sample(), [6, 7])


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("widths", [[1] * 13, [3, 1, 4, 1, 5, 9, 2, 6], [13], [2, 2, 2, 2], [8, 8, 8]], ids=str)
def test_every_stream_is_sampled_once_and_in_order(widths, batch_size):
    replay = FifoBuilder(Fifo(batch_size, capacity=100), 1).build()
    code, added, given = [], 0, []
    for width in widths:
        replay.add(trajectory(added, width))
        added += width
        for batch in drain(replay):
            assert batch.keys is None
            code.append(batch)
            given += batch.trajectory.version.sub(1000).tolist()
    assert given == list(range(added - added % batch_size))
    for i, batch in enumerate(code):
        assert_streams(batch, list(range(i * batch_size, (i + 1) * batch_size)))


def test_sampling_late_gives_the_same_batches_as_sampling_at_once():
    replay = FifoBuilder(Fifo(batch_size=4, capacity=100), 1).build()
    for first, width in ((0, 3), (3, 6), (9, 1), (10, 5)):
        replay.add(trajectory(first, width))
    for i, batch in enumerate(drain(replay)):
        assert_streams(batch, list(range(4 * i, 4 * i + 4)))
    assert i == 2


def test_the_queue_is_full_at_its_capacity():
    replay = FifoBuilder(Fifo(batch_size=2, capacity=5), 1).build()
    fullness = []
    for first in range(0, 6, 2):
        replay.add(trajectory(first, 2))
        fullness.append(replay.full)
    assert fullness == [False, False, True]
    replay.sample()
    assert not replay.full


def partly_sampled() -> FifoReplay:
    """Some streams have been sampled, one trajectory is split, others are complete."""
    replay = FifoBuilder(Fifo(batch_size=4, capacity=100), 1).build()
    for first, width in ((0, 3), (3, 6), (9, 4)):
        replay.add(trajectory(first, width))
    assert_streams(replay.sample(), [0, 1, 2, 3])
    return replay


def test_a_restored_queue_continues_identically():
    saved = partly_sampled()
    restored = FifoBuilder(Fifo(batch_size=4, capacity=100), 1).build()
    restored.add(trajectory(50, 2))  # is replaced by the loaded state
    restored.load_state_dict(saved.state_dict())
    for replay in (saved, restored):
        assert replay.size == 9
        replay.add(trajectory(13, 3))
        assert_streams(replay.sample(), [4, 5, 6, 7])
        assert_streams(replay.sample(), [8, 9, 10, 11])
        assert_streams(replay.sample(), [12, 13, 14, 15])
        assert replay.sample() is None


def test_saving_does_not_change_the_queue():
    replay = partly_sampled()
    state = replay.state_dict()
    assert_streams(replay.sample(), [4, 5, 6, 7])
    restored = FifoBuilder(Fifo(batch_size=4, capacity=100), 1).build()
    restored.load_state_dict(state)
    assert_streams(restored.sample(), [4, 5, 6, 7])


def test_a_queue_can_be_loaded_with_weights_only():
    file = io.BytesIO()
    torch.save(partly_sampled().state_dict(), file)
    file.seek(0)
    restored = FifoBuilder(Fifo(batch_size=4, capacity=100), 1).build()
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert isinstance(restored.waiting[0], Trajectory)
    assert isinstance(restored.waiting[0].step, TimeStep)
    assert_streams(restored.sample(), [4, 5, 6, 7])


def test_an_empty_queue_can_be_saved():
    replay = FifoBuilder(Fifo(batch_size=1, capacity=1), 1).build()
    replay.load_state_dict(replay.state_dict())
    assert replay.sample() is None


def test_a_batch_size_of_zero_is_refused():
    with pytest.raises(ValueError, match="batch-size=0 must be at least 1"):
        Fifo(batch_size=0, capacity=4)


def test_a_batch_that_can_never_be_filled_is_refused():
    with pytest.raises(
        ValueError,
        match=r"batch-size=33 can never be filled.*lower --algo\.replay\.batch-size to 32.*--algo\.replay\.capacity",
    ):
        FifoBuilder(Fifo(batch_size=33), 16)


def test_the_capacity_may_equal_the_batch_size():
    replay = FifoBuilder(Fifo(batch_size=4, capacity=4), 1).build()
    replay.add(trajectory(0, 4))
    assert replay.full
    assert_streams(replay.sample(), [0, 1, 2, 3])


def test_a_queue_has_no_priorities():
    with pytest.raises(AssertionError, match="no priorities"):
        FifoBuilder(Fifo(batch_size=1, capacity=1), 1).build().update_priorities(torch.zeros(1), torch.zeros(1))
