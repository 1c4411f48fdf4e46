"""Equations of return-conditioned policies, compared with recorded numbers and plain loops."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as searching
from hypothesis import strategies as st
from torch import Tensor

from bestiary.algos import Rcp, Udrl
from bestiary.algos.return_conditioned.agent import ReturnConditionedAgent
from bestiary.algos.return_conditioned.learner import ReturnConditionedLearner
from bestiary.cores import Ff
from bestiary.nets import Mlp, Net
from bestiary.ops.commands import (
    command_distribution,
    exponential_weight,
    next_command,
    returns_to_go,
    subtract_start_baseline,
    top_episodes,
    zscore,
)
from bestiary.ops.returns import lambda_returns
from bestiary.replay.episode_storage import EpisodeTable
from bestiary.replay.episodes import EpisodeReplay, Episodes
from bestiary.types import Spec, TimeStep, Trajectory

GOLDEN = np.load(Path(__file__).parent / "data" / "udrl.npz")
LENGTHS, OFFSETS, RETURNS = GOLDEN["lengths"], GOLDEN["offsets"], GOLDEN["returns"]
MOST = float(GOLDEN["max_return"])
GAMMA = float(GOLDEN["label/discount"])
KS = GOLDEN["command_k"].tolist()
EXACT = {"rtol": 1e-10, "atol": 1e-10}
SINGLE = {"rtol": 1e-6, "atol": 1e-5}  # for numbers stored as float32
SPEC = Spec("vector", (2,), torch.float32, 4, horizon=20)
NET = Net(encoder=Mlp(num_layers=0), prev_action=False, prev_reward=False)


def golden(name: str) -> Tensor:
    return torch.from_numpy(GOLDEN[name])


def close(mine: Any, name: str, **tolerance: float) -> None:
    """Compare with a recorded number, by default to 1e-10."""
    np.testing.assert_allclose(np.asarray(mine), GOLDEN[name], **(tolerance or EXACT))


def stored(rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rewards as stored with time steps, with none at an episode's first step, and where episodes start."""
    parts = [np.concatenate([[0.0], rewards[a:b]]) for a, b in pairwise(OFFSETS)]
    return np.concatenate(parts).astype(np.float32), OFFSETS[:-1] + np.arange(len(LENGTHS))


def held(which: slice = slice(None)) -> EpisodeTable:
    """The table of a replay that holds all recorded episodes."""
    discounted = GOLDEN["rcp_r/initial_returns"]
    return table(LENGTHS, episode_return=RETURNS, discounted_return=discounted, rank_score=RETURNS).select(which)


def table(length: np.ndarray, **columns: np.ndarray) -> EpisodeTable:
    """Episodes of these lengths; other columns are zero."""
    blank = EpisodeTable(*(np.zeros(len(length), column.dtype) for column in EpisodeTable.empty()))
    return blank._replace(number=np.arange(len(length)), length=length, **columns)


# -- returns-to-go ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "discount", "name"),
    [
        ("rewards", 1.0, "label/return_to_go"),
        ("rewards", GAMMA, "label/discounted_return_to_go"),
        ("label/sparse_rewards", 1.0, "label/sparse_return_to_go"),
    ],
)
def test_returns_to_go_equal_the_recorded_ones(rewards, discount, name):
    reward, first = stored(GOLDEN[rewards])
    window = int(LENGTHS.max())
    out = returns_to_go(reward, first, LENGTHS, np.zeros_like(first), window, discount)
    assert out.dtype == np.float64
    close(np.concatenate([out[:n, e] for e, n in enumerate(LENGTHS)]), name)
    for e, n in enumerate(LENGTHS):
        assert not out[n:, e].any()


@searching(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_returns_to_go_equal_a_loop_for_any_window(seed, window, discount):
    """Windows begin before an episode or in it, and end in it or after it."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, 9, 6)
    start = np.cumsum(length + 1) - length - 1
    reward = rng.normal(size=int((length + 1).sum())).astype(np.float32)
    first = rng.integers(-window - 1, length + 2)
    out = returns_to_go(reward, start, length, first, window, discount)
    assert out.shape == (window, 6)
    for b in range(6):
        for k in range(window):
            t, expected = first[b] + k, 0.0
            if 0 <= t < length[b]:
                expected = sum(discount ** (n - t) * float(reward[start[b] + n + 1]) for n in range(t, length[b]))
            assert out[k, b] == pytest.approx(expected, rel=1e-10, abs=1e-10)


# -- top episodes -----------------------------------------------------------------------------------------------------


def test_top_episodes_are_sorted_and_of_equals_the_later_is_first():
    assert top_episodes(RETURNS, 100).tolist() == GOLDEN["sorted_episode_order"].tolist()
    assert len(set(RETURNS.tolist())) < len(RETURNS)  # there are equal returns
    assert top_episodes(np.array([1.0, 2.0, 2.0, 2.0, 0.0]), 3).tolist() == [3, 2, 1]


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("k", KS)
def test_top_episodes_and_their_statistics_equal_the_recorded_ones(k, distinct):
    name = f"command/{'distinct' if distinct else 'episodes'}_k{k}"
    chosen = top_episodes(RETURNS, k, distinct)
    assert chosen.tolist() == GOLDEN[f"{name}/selected"].tolist()
    close(RETURNS[chosen].mean(), f"{name}/mean")
    close(RETURNS[chosen].std(), f"{name}/std")
    close(LENGTHS[chosen].mean(), f"{name}/mean_length")


@searching(max_examples=40, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=15), st.integers(1, 17), st.booleans())
def test_top_episodes_equal_those_of_a_sorted_list(values, k, distinct):
    ranked = sorted(range(len(values)), key=lambda i: (values[i], i), reverse=True)
    if distinct:
        ranked = [i for n, i in enumerate(ranked) if values[i] not in [values[j] for j in ranked[:n]]]
    assert top_episodes(np.array(values, np.float64), k, distinct).tolist() == ranked[:k]


# -- command distributions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("k", KS)
def test_the_uniform_source_spans_mean_to_mean_plus_deviation(k, distinct):
    name = f"command/{'distinct' if distinct else 'episodes'}_k{k}"
    cfg = Udrl(command_source="uniform", command_episodes=k, distinct_returns=distinct)
    found = cfg.command_distribution(held(), np.zeros(0))
    assert found.pool.shape == (1, 2)
    close(found.pool[0, 0], f"{name}/desired_low", **SINGLE)
    close(found.pool[0, 1], f"{name}/horizon", rtol=0)
    close(found.pool[0, 0] + found.spread[0], f"{name}/desired_high", **SINGLE)
    assert found.spread[1] == 0 and not found.noise.any()
    uniform, wanted = golden(f"{name}/uniform"), GOLDEN[f"{name}/desired_return"]
    sampled = (found.pool[0, 0] + uniform * found.spread[0]).clamp(max=MOST)
    np.testing.assert_allclose(sampled, wanted, **SINGLE)


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("k", KS)
def test_an_agent_samples_the_recorded_commands(k, distinct, monkeypatch):
    """Its random numbers are replaced by the recorded ones."""
    name = f"command/{'distinct' if distinct else 'episodes'}_k{k}"
    cfg = Udrl(command_source="uniform", command_episodes=k, distinct_returns=distinct, max_return=MOST)
    agent = cfg.agent(SPEC, NET, Ff())
    agent.set_command_distribution(cfg.command_distribution(held(), np.zeros(0)))
    uniform = golden(f"{name}/uniform").float()
    noise = torch.stack([torch.zeros_like(uniform), uniform], 1)
    monkeypatch.setattr(torch, "rand", lambda *size, **_: noise.reshape(size))
    sampled = agent.sample_commands(torch.ones(len(uniform)), len(uniform), torch.Generator())
    close(sampled[:, 0], f"{name}/desired_return", **SINGLE)
    assert (sampled[:, 1] == int(GOLDEN[f"{name}/horizon"])).all()


@pytest.mark.parametrize(("lengths", "rounded"), [((8, 9), 8.0), ((9, 10), 10.0), ((7, 7, 8), 7.0), ((2, 3), 2.0)])
def test_halves_of_a_horizon_are_rounded_to_even(lengths, rounded):
    assert (
        Udrl(command_source="uniform").command_distribution(table(np.array(lengths)), np.zeros(0)).pool[0, 1] == rounded
    )


@pytest.mark.parametrize("distinct", [True, False])
def test_the_episode_source_has_pairs_of_real_episodes_and_a_spread(distinct):
    found = Udrl(
        command_source="episode", command_episodes=5, distinct_returns=distinct, return_increment=0.5
    ).command_distribution(held(), np.zeros(0))
    chosen = GOLDEN[f"command/{'distinct' if distinct else 'episodes'}_k5/selected"]
    np.testing.assert_allclose(found.pool, np.stack([RETURNS[chosen], LENGTHS[chosen]], 1), rtol=1e-6)
    np.testing.assert_allclose(found.spread, [0.5 * RETURNS[chosen].std(), 0], rtol=1e-6)
    without = Udrl(
        command_source="episode", command_episodes=5, horizon=False, command_shift=(0.0,), command_scale=(1.0,)
    ).command_distribution(held(), np.zeros(0))
    assert without.pool.shape == (5, 1) and without.spread.shape == (1,)


def test_a_discounted_return_to_go_starts_at_the_discounted_return():
    top = top_episodes(RETURNS, 3)
    found = Udrl(command_source="episode", command_episodes=3, discount=GAMMA).command_distribution(held(), np.zeros(0))
    np.testing.assert_allclose(found.pool[:, 0], GOLDEN["rcp_r/initial_returns"][top], rtol=1e-6)
    plain = Udrl(command_source="episode", command_episodes=3, discount=GAMMA, command="return").command_distribution(
        held(), np.zeros(0)
    )
    np.testing.assert_allclose(plain.pool[:, 0], RETURNS[top], rtol=1e-6)


@pytest.mark.parametrize("few", [True, False])
def test_the_maximum_source_has_the_largest_recent_return_and_noise(few, monkeypatch):
    monkeypatch.setattr("bestiary.algos.return_conditioned.config.LATEST_EPISODES", int(GOLDEN["rcp_r/latest_batch"]))
    cfg = Rcp(command="return-to-go", command_source="maximum", discount=GAMMA)
    found = cfg.command_distribution(held(slice(-6, None)) if few else held(), np.zeros(0))
    assert found.pool.shape == (1, 1)
    close(found.pool[0, 0], "rcp_r/command_mean", **SINGLE)
    close(found.noise[0], "rcp_r/command_std", **SINGLE)
    assert not found.spread.any()


def test_the_maximum_source_has_the_mean_recent_length(monkeypatch):
    monkeypatch.setattr("bestiary.algos.return_conditioned.config.LATEST_EPISODES", 6)
    found = Udrl(command_source="maximum").command_distribution(held(), np.zeros(0))
    np.testing.assert_allclose(found.pool, [[RETURNS[-6:].max(), LENGTHS[-6:].mean()]], rtol=1e-6)
    np.testing.assert_allclose(found.noise, [RETURNS[-6:].std(), 0], rtol=1e-6)


def test_the_percentile_source_is_of_returns_or_labels():
    advantage = GOLDEN["rcp_a/advantage"]
    found = Rcp(command_percentile=75.0).command_distribution(held(), advantage)
    assert found.pool.item() == pytest.approx(
        np.sort(advantage)[103:105].mean(), rel=1e-6
    )  # between 103 and 104 of 0..138
    without_labels = Rcp(command_percentile=75.0).command_distribution(held(slice(0, 0)), np.zeros(0))
    assert without_labels.pool.tolist() == [[0.0]]
    by_return = Rcp(command="return", command_percentile=100.0)
    assert by_return.command_distribution(held(), advantage).pool.item() == RETURNS.max()
    by_transition = Rcp(command="return-to-go", command_percentile=100.0)
    assert by_transition.command_distribution(held(), advantage).pool.item() == pytest.approx(advantage.max(), rel=1e-6)


def test_a_distribution_has_one_spread_and_one_noise_per_number():
    one = command_distribution(np.array([5.0, 3.0]), spread=2.0)
    assert one.pool.tolist() == [[5.0, 3.0]] and one.spread.tolist() == [2.0, 2.0] and one.noise.tolist() == [0.0, 0.0]
    many = command_distribution(np.arange(6.0).reshape(3, 2), noise=np.array([1.0, 0.0]))
    assert many.pool.shape == (3, 2) and many.noise.tolist() == [1.0, 0.0]
    assert all(x.dtype == torch.float32 for x in many)


# -- command updates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(3))
def test_command_updates_equal_the_recorded_ones(case):
    name = f"update/case{case}"
    wanted = torch.stack([golden(f"{name}/desired_return"), golden(f"{name}/desired_horizon").double()], 1)
    command = wanted[:1]
    for reward, after in zip(golden(f"{name}/rewards"), wanted[1:], strict=True):
        command = next_command(command, reward[None], 1.0, MOST)
        torch.testing.assert_close(command[0], after, **EXACT)


def test_a_discounted_command_stays_the_return_to_go():
    """A command that starts as an episode's discounted return equals the return-to-go after every step."""
    reward, first = stored(GOLDEN["rewards"])
    ahead = returns_to_go(reward, first, LENGTHS, np.zeros_like(first), 4, GAMMA)[:, LENGTHS >= 5]  # [4, B]
    moved = torch.from_numpy(np.stack([reward[first + t + 1] for t in range(3)]).astype(np.float64)[:, LENGTHS >= 5])
    command = torch.from_numpy(ahead[0])[:, None]
    for t in range(3):
        command = next_command(command, moved[t], GAMMA, np.inf)
        np.testing.assert_allclose(command[:, 0], ahead[t + 1], rtol=1e-10)


def test_each_command_of_a_batch_is_updated_by_its_own_reward():
    command = torch.tensor([[10.0, 5.0], [3.0, 1.0], [319.0, 2.0]])
    out = next_command(command, torch.tensor([1.0, 5.0, -9.0]), 1.0, 320.0)
    assert out.tolist() == [[9.0, 4.0], [-2.0, 1.0], [320.0, 1.0]]
    assert command.tolist() == [[10.0, 5.0], [3.0, 1.0], [319.0, 2.0]]  # not changed in place


# -- weights ---------------------------------------------------------------------------------------------------------


def test_z_scores_and_weights_equal_the_recorded_ones():
    z = zscore(golden("weights/x"))
    close(z, "weights/zscore")
    for beta, cap in ((1, 20), (0.5, 20), (0.25, 20), (2, 5)):
        close(exponential_weight(z, beta, cap), f"weights/beta{beta:g}_clip{cap}")
    capped = exponential_weight(z, 0.25, 20) == 20
    assert capped.sum().item() == int(GOLDEN["weights/capped_count_beta0.25_clip20"]) > 0


def test_z_scores_are_of_valid_entries():
    x = golden("weights/x")
    valid = torch.arange(len(x)) % 3 != 0
    torch.testing.assert_close(zscore(x, valid)[valid], zscore(x[valid]), **EXACT)
    assert (zscore(x, valid)[valid] - zscore(x)[valid]).abs().min() > 1e-6
    table = x.view(8, 5)
    torch.testing.assert_close(zscore(table), zscore(x).view(8, 5), **EXACT)


@pytest.mark.parametrize("x", [torch.full((5,), 3.0), torch.tensor([7.0]), torch.zeros(0)])
def test_z_scores_of_equal_numbers_are_zero(x):
    assert torch.equal(zscore(x), torch.zeros_like(x))
    valid = torch.zeros(5, dtype=torch.bool)
    assert torch.equal(zscore(torch.arange(5.0), valid), torch.zeros(5))


def test_an_infinite_weight_is_the_cap():
    assert exponential_weight(torch.tensor([1e6, -1e6]), 0.01, 20.0).tolist() == [20.0, 0.0]


# -- labels and weights of the learner --------------------------------------------------------------------------------


def learner_of(cls: type, **settings: Any) -> ReturnConditionedLearner:
    cfg = cls(**({"head": (8,), "critic_head": (8,)} | settings))
    return cfg.learner(cfg.agent(SPEC, NET, Ff()), 1000)


def labelled(at: np.ndarray) -> Trajectory:
    """Recorded transitions as a batch of sequences of length one."""
    count = len(at)
    blank = TimeStep(
        torch.zeros(1, count, 2),
        torch.zeros(1, count, dtype=torch.int64),
        torch.zeros(1, count),
        *torch.zeros(2, 1, count).bool(),
    )
    aux = {
        "valid": torch.ones(1, count, dtype=torch.bool),
        "return_to_go": golden("label/return_to_go")[at][None],
        "horizon": golden("label/horizon")[at][None].double(),
        "episode_return": golden("label/episode_return")[at][None],
        "rank_score": golden("label/episode_return")[at][None],
        "advantage": golden("rcp_a/advantage")[at][None],
    }
    return Trajectory(blank, torch.zeros(1, count, dtype=torch.int64), aux, (), torch.zeros(count))


def test_labels_are_returns_and_horizons():
    t = labelled(np.arange(139))
    label = learner_of(Udrl).label(t)
    close(label[0, :, 0], "label/return_to_go")
    close(label[0, :, 1], "label/horizon")
    short = learner_of(Udrl, command="return", horizon=False, command_shift=(0.0,), command_scale=(1.0,)).label(t)
    assert short.shape == (1, 139, 1)
    close(short[0, :, 0], "label/episode_return")


@pytest.mark.parametrize("beta", [1.0, 0.5, 2.0])
def test_weights_of_episode_returns_equal_the_recorded_ones(beta):
    at = GOLDEN["rcp_r/step_index"]
    t = labelled(at)
    close(t.aux["episode_return"][0], "rcp_r/episode_return")
    for command in ("return-to-go", "return"):
        learner = learner_of(Rcp, command=command, command_source="maximum", beta=beta)
        weight = learner.weight(t, learner.label(t), t.aux["valid"])
        close(weight[0], f"rcp_r/beta{beta:g}/weight")
    close(zscore(t.aux["episode_return"])[0], "rcp_r/zscore")


def test_advantages_and_their_weights_equal_the_recorded_ones(monkeypatch):
    """Return-to-go minus value is both the label and the argument of the weight."""
    at = GOLDEN["rcp_a/step_index"]
    t = labelled(at)
    t.aux["return_to_go"] = golden("label/discounted_return_to_go")[at][None]
    learner = learner_of(Rcp, critic="joint", command_source="maximum", value_scale=1.0)
    monkeypatch.setattr(learner, "values", lambda step: golden("rcp_a/values")[at][None])
    label = learner.label(t)
    np.testing.assert_allclose(label[0, :, 0], GOLDEN["rcp_a/advantage"][at], **EXACT)
    close(zscore(label[..., 0])[0], "rcp_a/zscore")
    close(learner.weight(t, label, t.aux["valid"])[0], "rcp_a/weight_beta1")
    own = learner_of(Rcp)
    close(own.weight(t, own.label(t), t.aux["valid"])[0], "rcp_a/weight_beta1")


def test_padding_has_no_weight_and_does_not_change_other_weights():
    at = np.concatenate([GOLDEN["rcp_r/step_index"], [0, 1, 2]])
    t = labelled(at)
    t.aux["valid"][0, -3:] = False
    t.aux["episode_return"][0, -3:] = 1e9
    learner = learner_of(Rcp, command="return")
    weight = learner.weight(t, learner.label(t), t.aux["valid"])[0]
    close(weight[:-3], "rcp_r/beta1/weight")
    assert not weight[-3:].any()
    even = learner_of(Udrl)
    assert even.weight(t, even.label(t), t.aux["valid"])[0].tolist() == [1.0] * 24 + [0.0] * 3


def whole(terminal: Tensor) -> tuple[TimeStep, Tensor]:
    """All recorded episodes as columns, [17, 14], padded with first steps, and values of the time steps.

    terminal: [14], whether the last time step is terminal; its value is 1000.
    """
    rows, lengths = torch.arange(int(LENGTHS.max()) + 1)[:, None], torch.from_numpy(LENGTHS)
    reward, value = torch.zeros(2, len(rows), len(LENGTHS), dtype=torch.float64)
    for e, (a, b) in enumerate(pairwise(OFFSETS)):
        reward[1 : b - a + 1, e] = golden("rewards")[a:b]
        value[: b - a, e] = golden("rcp_a/values")[a:b]
        value[b - a :, e] = 1000.0
    is_first = (rows == 0) | (rows > lengths)
    is_terminal = (rows >= lengths) & terminal
    obs = torch.zeros(*reward.shape, 2)
    return TimeStep(obs, torch.zeros_like(reward, dtype=torch.int64), reward, is_first, is_terminal), value


def flat(x: Tensor) -> Tensor:
    return torch.cat([x[:n, e] for e, n in enumerate(LENGTHS)])


@pytest.mark.parametrize("critic", ["separate", "joint"])
def test_targets_of_the_critic_equal_the_recorded_ones(critic):
    learner = learner_of(Rcp, critic=critic, command_source="maximum", value_scale=1.0, discount=GAMMA)
    step, value = whole(terminal=torch.ones(14, dtype=torch.bool))
    t = Trajectory(step, step.prev_action, {}, (), torch.zeros(14))
    target, valid = learner.value_targets(t, value)
    close(flat(target), "rcp_a/td_lambda_target")
    assert valid.sum(0).tolist() == LENGTHS.tolist() and flat(valid).all()
    scaled = learner_of(Rcp, critic=critic, command_source="maximum", value_scale=50.0, discount=GAMMA)
    close(50 * flat(scaled.value_targets(t, value / 50)[0]), "rcp_a/td_lambda_target")


def test_only_a_separate_critic_bootstraps_truncated_episodes():
    terminal = torch.arange(14) % 2 == 0
    step, value = whole(terminal)
    t = Trajectory(step, step.prev_action, {}, (), torch.zeros(14))
    settings: dict[str, Any] = {"command_source": "maximum", "value_scale": 1.0, "discount": GAMMA}
    target = learner_of(Rcp, critic="separate", **settings).value_targets(t, value)[0]
    joint = learner_of(Rcp, critic="joint", **settings).value_targets(t, value)[0]
    close(flat(joint), "rcp_a/td_lambda_target")
    lam = float(GOLDEN["rcp_a/lambda"])
    for e, n in enumerate(LENGTHS):
        beyond = 0.0 if terminal[e] else GAMMA * 1000.0
        expected = golden("rcp_a/td_lambda_target")[OFFSETS[e] : OFFSETS[e + 1]].clone()
        for t_ in range(n):
            expected[t_] += (GAMMA * lam) ** (n - 1 - t_) * beyond
        torch.testing.assert_close(target[:n, e], expected, **EXACT)


@searching(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_lambda_returns_follow_the_recursion(seed, length, trace_decay):
    rng = torch.Generator().manual_seed(seed)
    shape = (length, 3)
    reward, value = torch.randn(2, *shape, generator=rng, dtype=torch.float64)
    valid, alive = torch.rand(2, *shape, generator=rng) < 0.8
    discount = 0.9 * (valid & alive).double()
    out = lambda_returns(reward, discount, valid, value, trace_decay)
    for b in range(3):
        after = 0.0
        for t in reversed(range(length)):
            goes_on = t + 1 < length and bool(valid[t + 1, b])
            ahead = (1 - trace_decay) * value[t, b] + trace_decay * after if goes_on else value[t, b]
            after = reward[t, b] + discount[t, b] * ahead
            if valid[t, b]:
                assert out[t, b].item() == pytest.approx(float(after), rel=1e-10, abs=1e-10)


# -- labels of the replay ---------------------------------------------------------------------------------------------


def filled_replay(rewards: np.ndarray, discount: float) -> EpisodeReplay:
    """A replay with the recorded episodes in one stream. Observations hold the episode's and the time step's number."""
    reward, _ = stored(rewards)
    episode = np.repeat(np.arange(14), LENGTHS + 1)
    row = np.concatenate([np.arange(n + 1) for n in LENGTHS])
    count = len(reward) + 1  # and the first step of another episode
    step = TimeStep(
        obs=torch.zeros(count, 1, 2),
        prev_action=torch.zeros(count, 1, dtype=torch.int64),
        reward=torch.zeros(count, 1),
        is_first=torch.ones(count, 1, dtype=torch.bool),
        is_terminal=torch.zeros(count, 1, dtype=torch.bool),
    )
    step.obs[:-1, 0] = torch.from_numpy(np.stack([episode, row], 1)).float()
    step.reward[:-1, 0] = torch.from_numpy(reward)
    step.is_first[:-1, 0] = torch.from_numpy(row == 0)
    settings = Episodes(
        warmup=1, updates_per_step=100.0, batch_size=400, sample_by="transitions", keep="best", capacity=14
    )
    cfg = Udrl(discount=discount, replay=settings)
    replay = cfg.replay_builder(1).build(0, SPEC, ReturnConditionedAgent(cfg, SPEC, NET, Ff()).initial_state(1))
    replay.add(Trajectory(step, step.prev_action, {}, (), torch.zeros(1)))
    return replay


@pytest.mark.parametrize(
    ("rewards", "discount", "name"),
    [
        ("rewards", 1.0, "label/return_to_go"),
        ("rewards", GAMMA, "label/discounted_return_to_go"),
        ("label/sparse_rewards", 1.0, "label/sparse_return_to_go"),
    ],
)
def test_a_replay_labels_every_transition_as_recorded(rewards, discount, name):
    replay = filled_replay(GOLDEN[rewards], discount)
    close(replay.table.episode_return, "returns")
    assert replay.table.length.tolist() == LENGTHS.tolist()
    if discount == GAMMA:
        close(replay.table.discounted_return, "rcp_r/initial_returns")
    seen = set()
    for _ in range(5):
        batch = replay.sample()
        assert batch is not None
        t = batch.trajectory
        episode, row = t.step.obs[0].long().numpy().T
        at = OFFSETS[episode] + row
        assert t.aux["valid"].all()
        np.testing.assert_allclose(t.aux["return_to_go"][0], GOLDEN[name][at], **SINGLE)
        np.testing.assert_array_equal(t.aux["horizon"][0], GOLDEN["label/horizon"][at])
        np.testing.assert_allclose(t.aux["episode_return"][0], GOLDEN["label/episode_return"][at], **SINGLE)
        np.testing.assert_allclose(t.aux["rank_score"][0], GOLDEN["label/episode_return"][at], **SINGLE)
        seen |= set(at.tolist())
    assert seen == set(range(139))


def test_a_batch_carries_the_command_distribution():
    batch = filled_replay(GOLDEN["rewards"], 1.0).sample()
    assert batch is not None
    assert set(batch.info) == {"pool", "spread", "noise"}
    order = GOLDEN["sorted_episode_order"]
    np.testing.assert_allclose(batch.info["pool"], np.stack([RETURNS[order], LENGTHS[order]], 1), rtol=1e-6)


# -- start-state baseline ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("episodes", [3, 40])
def test_the_start_state_baseline_is_a_ridge_regression(episodes, ridge):
    rng = np.random.default_rng(0)
    start = rng.normal(3.0, [1.0, 5.0, 0.01, 2.0], (episodes, 4))
    returns = 7.0 + start @ [1.0, -2.0, 30.0, 0.0] + rng.normal(size=episodes)
    x = (start - start.mean(0)) / start.std(0)
    rows = np.concatenate([x, np.sqrt(ridge) * np.eye(4)])
    slope = np.linalg.lstsq(rows, np.concatenate([returns - returns.mean(), np.zeros(4)]), rcond=None)[0]
    np.testing.assert_allclose(
        subtract_start_baseline(returns, start, ridge), returns - x @ slope, rtol=1e-9, atol=1e-9
    )


def test_the_baseline_explains_all_of_a_linear_return_and_nothing_else():
    rng = np.random.default_rng(0)
    start = rng.normal(size=(500, 3))
    lucky = 2.0 + start @ [4.0, 0.0, -1.0]
    assert subtract_start_baseline(lucky, start).std() < 0.01 * lucky.std()
    assert subtract_start_baseline(lucky, start).mean() == pytest.approx(lucky.mean())
    same = np.ones((500, 3)) * [0.1, 0.0, -7.0]  # all episodes have the same start
    np.testing.assert_allclose(subtract_start_baseline(lucky, same), lucky, atol=1e-6)
